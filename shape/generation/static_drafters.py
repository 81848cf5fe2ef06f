"""Drafters in static tensors, for steps of fixed shapes: nothing waits for the host, trees have one size."""

from copy import copy
from dataclasses import dataclass, replace
from itertools import chain as chain_of
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from shape.drafters import Drafter, OracleDrafter, TrainedDrafter
from shape.drafters.base import Committed
from shape.target.support import LayerShape
from shape.verification.cache import KVCache, grouped
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree, ancestors, chain, root_only

_TABLE = 256  # positions of an oracle's table come in multiples of this


def slot_bytes(shapes: list[LayerShape], dtype: torch.dtype) -> int:
    """Memory that one slot of one sequence takes in a ``KVCache``."""
    groups = chain_of(*grouped(shapes, dtype, torch.device("cpu")))
    return sum(group.heads * group.size * group.dtype.itemsize for group in groups)


class StaticCache(KVCache):
    """A cache of which attention always sees the same number of slots; its ``lengths`` change in place, and the host
    does not read them.

    Attributes:
        width: slots of each sequence that are seen, all of them at first.
    """

    def __init__(
        self, shapes: list[LayerShape], batch: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(shapes, batch, capacity, dtype, device)
        self.width = capacity

    @property
    def nbytes(self) -> int:
        return self.lengths.nbytes + sum(storage.nbytes for storage in self._storage.values())

    def expect(self, nodes: int) -> None:
        """The next forward is over this many nodes per sequence."""
        self.slots.see(self.width, nodes)

    def move(self, path: Tensor) -> None:
        """Move the states of nodes ``path``, (B, D) int64, increasing, to the first slots behind the committed ones."""
        starts = torch.arange(len(path), device=path.device)[:, None] * self.capacity + self.lengths[:, None]
        self._move((starts + path).flatten(), (starts + torch.arange(path.shape[1], device=path.device)).flatten())

    def fill(self, other: KVCache, rows: Tensor) -> None:
        """Take ``rows``, (R,) int64, of another cache; sequences behind them are empty."""
        count, slots = len(rows), min(self.capacity, other.capacity)
        for group, storage in self._storage.items():
            for own, others in zip(storage, other._storage[group], strict=True):  # a layer's copy at a time
                own[:count, :slots] = others[:, :slots].index_select(0, rows)
        self.lengths.zero_()
        self.lengths[:count] = other.lengths[rows]


OwnCache = StaticCache | None  # a drafter's own keys and values, where it has some


@dataclass(frozen=True)
class StaticTree(TokenTree):
    """A tree that knows its ancestors and depths from the start: torch.compile does not look into cached properties."""

    ancestors: Tensor = None  # type: ignore[assignment]
    depth: Tensor = None  # type: ignore[assignment]

    @classmethod
    def of(cls, tree: TokenTree) -> "StaticTree":
        above = ancestors(tree.parent)
        return cls(tree.tokens, tree.parent, ancestors=above, depth=above.sum(-1) - 1)


class StaticDrafter:
    """What drafts from a state, (B, ...), that changes from step to step beside text and cache; this class itself is
    autoregressive decoding.

    Attributes:
        depth: drafted tokens on the longest path. nodes: of a tree, its root included. passes: see ``Drafter``.
        contiguous: whether every tree is a chain, whose commits move nothing.
        layers: of the target whose states it reads, see ``Drafter``.
        memory: keys and values of its own for committed positions, behind ``start``.
    """

    depth: int = 0
    nodes: int = 1
    passes: int = 0
    contiguous: bool = True
    layers: tuple[int, ...] = (-1,)
    memory: KVCache | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal keys draft alike from equal states."""
        return (type(self).__name__,)

    def alone(self) -> Self:
        """A copy that shares nothing that steps change, and holds nothing of a call."""
        made = copy(self)
        made.memory = None
        return made

    def start(self, committed: Committed, hidden: Tensor) -> Tensor:
        """The state behind a prefill (see ``Drafter.start``)."""
        return hidden.new_zeros(len(hidden), 0)

    def draft(self, state: Tensor, memory: OwnCache, lengths: Tensor, root: Tensor, sampler: Sampler) -> TokenTree:
        """Trees of one size behind the roots (B,), texts being ``lengths`` (B,) long with them."""
        return root_only(root)

    def update(self, state: Tensor, memory: OwnCache, tokens: Tensor, hidden: Tensor, counts: Tensor) -> Tensor:
        """The state behind a step, see ``Drafter.update``; keys and values are written behind the memory's lengths."""
        return state


class StaticPredictor(StaticDrafter):
    """Trees of a trained predictor; the state is its window, (B, W, F)."""

    def __init__(self, drafter: TrainedDrafter) -> None:
        self._drafter = copy(drafter)
        self._drafter.tree = tree = replace(drafter.tree, threshold=0.0)
        self._drafter.on_host = False
        self.layers = drafter.layers
        self.passes = self.depth = tree.depth
        branching, expanded = tree.branching or tree.width, 1
        for _ in range(self.depth):
            self.nodes += expanded * branching
            expanded = min(tree.width, expanded * branching)
        self.contiguous = self.nodes == self.depth + 1
        if tree.nodes is not None:
            self.nodes = min(self.nodes, tree.nodes + 1)
            self.depth = min(self.depth, tree.nodes)

    @property
    def key(self) -> tuple[Any, ...]:
        return ("shape", id(self._drafter.predictor), self._drafter.tree)

    def alone(self) -> Self:
        made = super().alone()
        made._drafter = copy(self._drafter)
        made._drafter.cache = None
        return made

    def start(self, committed: Committed, hidden: Tensor) -> Tensor:
        self._drafter.start(committed, hidden)
        self.memory = self._drafter.cache
        return self._drafter.window

    def draft(self, state: Tensor, memory: OwnCache, lengths: Tensor, root: Tensor, sampler: Sampler) -> TokenTree:
        self._drafter.window, self._drafter.cache = state, memory
        if memory is not None:
            memory.expect(0)
        return self._drafter.draft(Committed([], lengths, root), sampler)

    def update(self, state: Tensor, memory: OwnCache, tokens: Tensor, hidden: Tensor, counts: Tensor) -> Tensor:
        self._drafter.window, self._drafter.cache = state, memory
        if memory is not None:
            memory.expect(hidden.shape[1])
        self._drafter.append_states(tokens, hidden, counts)
        return self._drafter.window


class StaticText(StaticDrafter):
    """Trees that are made on the host, of the committed text alone; the state is the next ones, (B, 2, N) int64: tokens
    and parents. What is committed has to be known first, so that there is one step under way.

    Args:
        most: drafted nodes of a tree. deepest: of them on a path.
    """

    contiguous = False

    def __init__(self, most: int, deepest: int) -> None:
        self.nodes, self.depth = most + 1, deepest

    @property
    def key(self) -> tuple[Any, ...]:
        return ("text", self.nodes, self.depth)

    def start(self, committed: Committed, hidden: Tensor) -> Tensor:
        return torch.zeros(len(hidden), 2, self.nodes, dtype=torch.long, device=hidden.device)

    def draft(self, state: Tensor, memory: OwnCache, lengths: Tensor, root: Tensor, sampler: Sampler) -> TokenTree:
        tokens, parent = state[:, :, 1:].unbind(1)
        no_parent = torch.full_like(root, -1)
        return TokenTree(torch.cat([root[:, None], tokens], dim=1), torch.cat([no_parent[:, None], parent], dim=1))


def text_state(tree: TokenTree, nodes: int) -> Tensor:
    """The state of ``StaticText`` for a tree, filled up with nodes that nothing can accept."""
    padding = 0, nodes - tree.size
    return torch.stack([F.pad(tree.tokens, padding), F.pad(tree.parent, padding, value=-1)], dim=1)


class StaticOracle(StaticDrafter):
    """Chains that an oracle foretells; the state is its drafts by position, (B, P) int64, -1 behind the last."""

    def __init__(self, drafter: OracleDrafter) -> None:
        self._drafter, self.depth, self.nodes = copy(drafter), drafter.depth, drafter.depth + 1

    @property
    def key(self) -> tuple[Any, ...]:
        return ("oracle", self.depth)

    def start(self, committed: Committed, hidden: Tensor) -> Tensor:
        self._drafter.start(committed, hidden)
        drafts = self._drafter.drafts
        width = -(-(max(map(len, drafts)) + 1) // _TABLE) * _TABLE  # the last is always -1
        return torch.tensor([[*row, *[-1] * (width - len(row))] for row in drafts], device=hidden.device)

    def draft(self, state: Tensor, memory: OwnCache, lengths: Tensor, root: Tensor, sampler: Sampler) -> TokenTree:
        positions = lengths[:, None] + torch.arange(self.depth, device=root.device)
        drafts = state.gather(1, positions.clamp(max=state.shape[1] - 1))
        tree = chain(root, drafts.clamp(min=0))
        known = torch.cat([root[:, None] >= 0, drafts >= 0], dim=1)
        return TokenTree(tree.tokens, tree.parent.masked_fill(~known, -1))


def static_drafter(drafter: Drafter | None) -> StaticDrafter:
    """The static form of a drafter that ``Drafter.why_not_fixed`` has nothing against."""
    if isinstance(drafter, TrainedDrafter):
        return StaticPredictor(drafter)
    if drafter is not None and (sizes := drafter.text_sizes) is not None:
        return StaticText(*sizes)
    return StaticOracle(drafter) if isinstance(drafter, OracleDrafter) else StaticDrafter()
