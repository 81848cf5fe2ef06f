"""What every drafter is: something that proposes a token tree for each row, given the committed text."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from shape.errors import ConfigError
from shape.networks.base import Predictor
from shape.target.model import Target
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree, of_lists
from shape.verification.tree_shape import TreeShape as TreeShape


@dataclass
class Committed:
    """The committed text of a batch: x_0..x_t per row; the root x_t has not been through the target yet.

    Attributes:
        texts: token ids per row, on the host, where streaming and stopping need them anyway.
        lengths: (B,) int64 on the device, ``len(texts[b])``.
        root: (B,) int64, the last token of each row.
    """

    texts: list[list[int]]
    lengths: Tensor
    root: Tensor

    def advance(self, new: list[list[int]], counts: Tensor) -> None:
        """Settle ``counts[b]`` more tokens of each row."""
        for text, tokens in zip(self.texts, new, strict=True):
            text.extend(tokens)
        self.lengths = self.lengths + counts
        self.root = of_lists([text[-1] for text in self.texts], self.root.device)

    def select(self, rows: list[int]) -> "Committed":
        index = torch.tensor(rows, device=self.root.device)
        return Committed([self.texts[row] for row in rows], self.lengths[index], self.root[index])

    def to(self, device: torch.device) -> "Committed":
        if self.root.device == device:
            return self
        return replace(self, lengths=self.lengths.to(device), root=self.root.to(device))


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))


class Drafter(ABC):
    """Proposes token trees.

    One instance serves one call at a time, and the decoder makes a shallow copy for each, since streams can be open
    side by side: ``start`` binds anew whatever a call changes, and a drafter made of drafters copies these too.

    The loop calls ``start`` after the prefill, then ``draft`` and ``update`` once per step, and ``select`` when
    rows have finished. Whatever is proposed, verification keeps the output that of the target. What these are given was
    made under ``torch.inference_mode`` (see ``inference``): clone what is to be trained on.
    """

    name: str = ""
    layers: tuple[int, ...] = (-1,)  # of the target, whose states it reads: see ``Target.features``; h, -1, comes last
    passes: int = 0  # forwards of a network in the last draft, one after the other
    predictor: Predictor | None = None  # the trained network that it drafts with, where that is one
    tree: TreeShape | None = None  # how its trees grow, where they have such a shape

    def __str__(self) -> str:
        """For reports, and to tell settings apart."""
        return self.name

    def describe(self, beside: torch.device | None = None) -> str:
        """For records: changes with its settings and weights, and with its device where that is not the given one."""
        return str(self)

    @property
    def needs_updates(self) -> bool:
        """Whether ``update`` does anything, so that its arguments have to be gathered."""
        return type(self).update is not Drafter.update

    @property
    def drops_drawn_nodes(self) -> bool:
        """Whether it may leave out children that it drew, which biases rejection sampling."""
        return False

    def with_tree(self, tree: TreeShape) -> "Drafter | None":
        """A copy that grows trees of this shape; None for drafters whose trees have no such shape."""
        return None

    def limit_draft(self, num_draft_tokens: int) -> None:
        """Draft at most so many tokens one after the other; for drafters that are not in use yet.

        Raises:
            ConfigError: its drafts have no length to set.
        """
        raise ConfigError(f"drafter {self.name} has no draft length; leave num_draft_tokens out")

    def why_not_fixed(self, target: Target) -> str | None:
        """Why it cannot draft in steps of fixed shapes (``shape.generation.fixed``); None where it can."""
        return f"drafter {self.name} waits for the host"

    def weights_read(self, target: Target, hidden_size: int, vocab_size: int) -> float | None:
        """Weights read for one draft, projected to a target of other sizes; None where that is not known.

        Args:
            target: the target that it drafts for.
            hidden_size, vocab_size: those of the target that is projected to.
        """
        return None if self.networks else 0.0

    @property
    def networks(self) -> Sequence[nn.Module]:
        """What it computes with beside the target."""
        return ()

    def bind(self, target: Target) -> None:
        """Learn the target, before anything is computed. Raise here when the two do not fit."""

    def start(self, committed: Committed, hidden: Tensor) -> None:
        """A new batch.

        Args:
            committed: prompts and the first token of each row.
            hidden: (B, T, F) states of the prompts, those of ``layers`` side by side, padded on the right; row b has
                ``lengths[b] - 1`` of them.
        """

    @abstractmethod
    def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        """Propose a tree per row. Node 0 is the root; sampling drafters rank by ``sampler.draft_scores``, and where
        ``sampler.draws`` they keep every child that they draw and say in ``TokenTree.log_q`` from what.
        """

    def reproducible(self) -> "Drafter":
        """One for a single call whose drafts depend on nothing but that call's text: neither on earlier calls nor on
        the clock. To be overridden where a drafter looks at either.
        """
        return copy(self)

    def run_forwards(self, rows: int, passes: int) -> None:
        """Run the network's forwards of a draft and nothing else, for measuring; does nothing without a network."""

    def update(self, tokens: list[list[int]], hidden: Tensor, counts: Tensor) -> None:
        """What verification made known.

        Args:
            tokens: of each row the root that was verified and what was committed behind it.
            hidden: (B, D, F), states of all but the last of these.
            counts: (B,) int64, how many of row b's states count; the others are padding.
        """

    def inspect(self, tree: TokenTree, logits: Tensor) -> None:
        """What the target says behind every node of the tree that was verified, accepted or not: for those that ask it
        more than what to accept. Comes before ``update``, after steps with a draft.

        Args:
            tree: as it was verified, which may be less than what was drafted.
            logits: (B, N, V), the target's.
        """

    def select(self, rows: Tensor) -> None:
        """Keep only these rows, (B',) int64."""


class Wrapped(Drafter):
    """Another drafter, as it is: for those that look at what it does."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.name, self.layers, self.predictor = inner, inner.name, inner.layers, inner.predictor

    @property
    def networks(self) -> Sequence[nn.Module]:
        return self.inner.networks

    def reproducible(self) -> "Drafter":
        other = copy(self)
        other.inner = self.inner.reproducible()
        return other

    def bind(self, target: Target) -> None:
        self.inner.bind(target)

    def start(self, committed: Committed, hidden: Tensor) -> None:
        self.inner.start(committed, hidden)

    def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        return self.inner.draft(committed, sampler)

    def update(self, tokens: list[list[int]], hidden: Tensor, counts: Tensor) -> None:
        self.inner.update(tokens, hidden, counts)

    def inspect(self, tree: TokenTree, logits: Tensor) -> None:
        self.inner.inspect(tree, logits)

    def select(self, rows: Tensor) -> None:
        self.inner.select(rows)


def __getattr__(name: str) -> Any:
    if name == "Settled":
        warn("shape.drafters.base.Settled is now called Committed", FutureWarning, stacklevel=2)
        return Committed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
