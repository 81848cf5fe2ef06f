"""The interface of drafters: each proposes a token tree per sequence, given the committed text."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from shape.errors import ConfigError
from shape.networks.base import Predictor
from shape.target.model import Target
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree, of_lists
from shape.verification.tree_shape import TreeShape

MEASURED_LENGTH = 256  # known positions that ``Drafter.run_forwards`` attends to


@dataclass
class Committed:
    """The committed tokens of a batch: x_0..x_t per sequence; the root x_t has not been through the target yet.

    Attributes:
        texts: token ids per sequence, on the host, where streaming and stopping need them anyway.
        lengths: (B,) int64 on the device, ``len(texts[b])``.
        root: (B,) int64, the last token of each sequence.
    """

    texts: list[list[int]]
    lengths: Tensor
    root: Tensor

    def advance(self, new: list[list[int]], counts: Tensor) -> None:
        """Append ``counts[b]`` tokens to each text."""
        for text, tokens in zip(self.texts, new, strict=True):
            text.extend(tokens)
        self.lengths = self.lengths + counts
        self.root = of_lists([text[-1] for text in self.texts], self.root.device)

    def select(self, rows: list[int]) -> "Committed":
        index = of_lists(rows, self.root.device)
        return Committed([self.texts[row] for row in rows], self.lengths[index], self.root[index])

    def to(self, device: torch.device) -> "Committed":
        if self.root.device == device:
            return self
        return replace(self, lengths=self.lengths.to(device), root=self.root.to(device))


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning of two texts."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))


class Drafter(ABC):
    """Proposes token trees.

    The loop calls ``start`` after the prefill, then ``draft`` and ``update`` in turn, and ``select`` when sequences
    have finished. While drafting pauses, steps are told of together, in one update. Whatever is proposed, verification
    keeps the output that of the target.

    The decoder makes a shallow copy for each call, since several can be open at a time: ``start`` sets anew whatever a
    call changes, and a drafter made of drafters copies these too. Tensors given here were made under
    ``torch.inference_mode``: clone what is to be trained on.
    """

    name: str = ""
    layers: tuple[int, ...] = (-1,)  # of the target whose states it reads (``Target.features``); -1, h, comes last
    passes: int = 0  # forwards of a network in the last draft, one after the other
    predictor: Predictor | None = None  # the trained network that it drafts with
    tree: TreeShape | None = None  # how its trees grow, where they have such a shape
    depth: int = 0  # of its longest path, where that is all there is to set
    # With ``Sampler.one_drawn`` it draws one child of a node alone, and leaves it out only by what was known before.
    draws_one_child: bool = False
    kept: Sequence[Any] = ()  # something for each sequence, made in ``start``; ``select`` and ``join`` go along
    one_at_a_time: bool = False  # whether it drafts for one sequence alone; known once it is bound
    verified_whole: bool = False  # its nodes are there to be verified, however unlikely they are to be accepted

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
        if self.tree is not None:
            self.tree = replace(self.tree, depth=num_draft_tokens)
        elif self.depth:
            self.depth = num_draft_tokens
        else:
            raise ConfigError(f"drafter {self.name} has no draft length; leave num_draft_tokens out")

    def forget_misses(self) -> None:
        """Log no misses (``RecipeDrafter``): for drafters that are not in use yet."""

    @property
    def text_sizes(self) -> tuple[int, int] | None:
        """Of drafters that look at nothing but ``Committed.texts``: how many nodes a draft has at most, and how many of
        them on a path. None of others.
        """
        return None

    def why_not_fixed(self, target: Target) -> str | None:
        """Why it cannot draft in steps of fixed shapes (``shape.generation.fixed``); None where it can."""
        return None if self.text_sizes is not None else f"drafter {self.name} waits for the host"

    @property
    def networks(self) -> Sequence[nn.Module]:
        """What it computes with beside the target."""
        return ()

    def bind(self, target: Target) -> None:
        """Prepare for a target. Raise here when the two do not fit."""

    def start(self, committed: Committed, hidden: Tensor) -> None:
        """A new batch.

        Args:
            committed: prompts and the first token of each sequence.
            hidden: (B, T, F) states of the prompts, those of ``layers`` side by side, padded on the right;
                ``lengths[b] - 1`` of sequence b, or its last T where that is less: engines do not compute a cached
                prefix again.
        """

    @abstractmethod
    def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        """Propose a tree per sequence, of which node 0 is the root. Sampling drafters rank by ``sampler.draft_scores``,
        and where ``sampler.draws`` they keep every child that they draw and say in ``TokenTree.log_q`` from what.
        """

    def reproducible(self) -> "Drafter":
        """A copy for a single call whose drafts depend on that call's text alone. To be overridden where a drafter
        learns from earlier calls or looks at the clock.
        """
        return copy(self)

    def run_forwards(self, rows: int, passes: int) -> None:
        """Run the network's forwards of a draft and nothing else, for measuring; does nothing without a network."""

    def update(self, tokens: list[list[int]], hidden: Tensor, counts: Tensor) -> None:
        """What verification made known.

        Args:
            tokens: of each sequence the root that was verified and what was committed behind it.
            hidden: (B, D, F), states of all but the last of these.
            counts: (B,) int64, how many of the states are not padding.
        """

    def inspect(self, tree: TokenTree, logits: Tensor) -> None:
        """The target's logits at every node of the verified tree, accepted or not. Called before ``update``, after
        steps with a draft.

        Args:
            tree: as it was verified, which may be less than what was drafted.
            logits: (B, N, V), the target's.
        """

    def select(self, rows: Tensor) -> None:
        """Keep only these sequences, (B',) int64. To be overridden, as ``join``, where more than `kept` is kept."""
        if self.kept:
            self.kept = [self.kept[row] for row in rows.tolist()]

    def join(self, other: Self) -> None:
        """Take in the sequences of another copy of this drafter, behind its own: in engines requests come and go."""
        self.kept = [*self.kept, *other.kept]


class Wrapped(Drafter):
    """Passes the calls of decoding, `bind` to `select`, on to another drafter; base of classes that observe one."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.name, self.layers, self.predictor = inner, inner.name, inner.layers, inner.predictor
        self.verified_whole, self.draws_one_child = inner.verified_whole, inner.draws_one_child

    @property
    def networks(self) -> Sequence[nn.Module]:
        return self.inner.networks

    @property
    def drops_drawn_nodes(self) -> bool:
        return self.inner.drops_drawn_nodes

    def reproducible(self) -> "Drafter":
        other = copy(self)
        other.inner = self.inner.reproducible()
        return other

    def forget_misses(self) -> None:
        self.inner.forget_misses()

    def bind(self, target: Target) -> None:
        self.inner.bind(target)
        self.one_at_a_time = self.inner.one_at_a_time

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
