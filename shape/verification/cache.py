"""The KV cache: one allocation for all layers, sequences of unequal length, commits that move only accepted states.

Attention sees slots ``[0, max(lengths) + N)``, in layers with a sliding window those from the first on that any
sequence's new tokens reach; the mask decides per sequence. ``lengths`` alone says how much is committed: what lies
beyond is overwritten by the next step, so rejecting a draft costs nothing. Nothing is forgotten either: slots that a
window has left are kept, since a session may go back to them.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from shape.target.support import LayerShape
from shape.verification.tree import of_lists


class Group(NamedTuple):
    """What states must have in common to share a tensor."""

    heads: int
    size: int
    dtype: torch.dtype
    device: torch.device


def grouped(shapes: list[LayerShape], dtype: torch.dtype, device: torch.device) -> list[tuple[Group, Group]]:
    """The groups of every layer's keys and values, for a target with states of this dtype on this device."""
    common = [(shape.dtype or dtype, shape.device or device) for shape in shapes]
    return [(Group(*shape.keys, *own), Group(*shape.values, *own)) for shape, own in zip(shapes, common, strict=True)]


class Slots:
    """How many slots of each sequence are committed, and so where the next tokens go. Shared by a cache and its layers.

    Layers refer to this and not to the cache: a reference cycle would keep its memory until Python's collector runs.

    Attributes:
        capacity: slots per sequence.
        lengths: (B,) int64, committed slots per sequence; ``host_lengths`` are the same numbers on the host.
        longest: the largest of these. shortest: the smallest. uniform: whether all are equal.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity, self.device = capacity, device

    def set(self, lengths: list[int]) -> None:
        self.host_lengths = lengths
        self.shortest, self.longest = min(lengths), max(lengths)
        self.uniform = self.shortest == self.longest
        self.lengths = of_lists(lengths, self.device)
        self._next: dict[tuple[int, torch.device], Tensor] = {}

    def see(self, slots: int, new: int) -> None:
        """Let the next forward, of ``new`` tokens per sequence, see so many slots, whatever ``lengths`` says."""
        self.shortest, self.longest, self.uniform = 0, slots - new, False
        self._next = {}

    def first(self, window: int | None) -> int:
        """The first slot that new tokens reach within a window of so many tokens, in any sequence; 0 without one."""
        return 0 if window is None else max(0, self.shortest - window + 1)

    def next(self, new: int, device: torch.device) -> Tensor:
        """(B * new,) int64, where the next tokens go if the sequences' slots lie one behind the other."""
        if (new, device) not in self._next:
            if self.uniform and len(self.host_lengths) == 1:  # in one operation
                slots = torch.arange(self.longest, self.longest + new, device=self.device)
            else:
                starts = self.lengths + torch.arange(len(self.lengths), device=self.device) * self.capacity
                slots = (starts[:, None] + torch.arange(new, device=self.device)).flatten()
            self._next[new, device] = slots.to(device)
        return self._next[new, device]


class KVCacheLayer(CacheLayerMixin):
    """One layer's view of the cache, in the form that transformers' attention layers expect.

    Attributes:
        in_place: whether others may write where ``slots`` says, and attend to what lies there: not where ``update``
            transforms it.
        is_sliding, sliding_window: under the names of transformers' own layers, which its masks ask for.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, slots: Slots, keys: Tensor, values: Tensor, sliding_window: int | None = None) -> None:
        super().__init__()
        self.slots, self.keys, self.values = slots, keys, values
        self.is_sliding, self.sliding_window = sliding_window is not None, sliding_window
        self.is_initialized = True
        whole = all(held.transpose(1, 2).is_contiguous() for held in (keys, values))
        self.in_place = whole and type(self).update is KVCacheLayer.update

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the cache is allocated as a whole."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write (B, heads, N, D) states behind each sequence's committed ones and return the slots in use, all of
        them or those that the layer's window reaches.
        """
        slots, new = self.slots, key_states.shape[2]
        first, end = slots.first(self.sliding_window), slots.longest + new
        for held, states in ((self.keys, key_states), (self.values, value_states)):
            states = states.to(held.dtype)  # which autocast may have made others
            if slots.uniform:
                held[:, :, slots.longest : end] = states
            else:  # each token as a whole
                held.transpose(1, 2).flatten(0, 1).index_copy_(
                    0, slots.next(new, held.device), states.transpose(1, 2).flatten(0, 1)
                )
        return self.keys[:, :, first:end], self.values[:, :, first:end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many slots ``update`` gives, and which is the first."""
        first = self.slots.first(self.sliding_window)
        return self.slots.longest + query_length - first, first

    def get_seq_length(self) -> int:
        return self.slots.longest

    def get_max_length(self) -> int:
        return self.slots.capacity


class KVCache(Cache):
    """Keys and values of a batch of sequences of unequal length.

    Args:
        shapes: one LayerShape per layer.
        batch, capacity: sequences, and slots per sequence (committed tokens plus the largest tree).
        dtype: of layers that have none of their own; ``cache.dtype`` is that of the first layer's keys.
        device: of lengths and paths, and of layers that have none of their own.

    Attributes:
        checked_by: the layers that were found to be as they were (``FusedLayers``), and stay so for the call that this
            is for.
    """

    layers: list[KVCacheLayer]  # type: ignore[assignment]  # of no other kind
    checked_by: Any = None
    _windows: frozenset[int | None] = frozenset()

    def __init__(
        self, shapes: list[LayerShape], batch: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes, self.device = shapes, device
        self._windows = frozenset(shape.sliding_window for shape in shapes)
        self.slots = Slots(capacity, device)
        self._groups = grouped(shapes, dtype, device)
        self.dtype = self._groups[0][0].dtype
        # States of one kind share a tensor, so that a commit is one copy for all of them; the heads of a token lie
        # together, so that a token is written and moved as a whole.
        counts = Counter(group for layer in self._groups for group in layer)
        self._storage = {
            group: torch.zeros(count, batch, capacity, group.heads, group.size, dtype=group.dtype, device=group.device)
            for group, count in counts.items()
        }
        self.set_lengths([0] * batch)
        super().__init__(layers=list(self._views()))

    @property
    def capacity(self) -> int:
        return self.slots.capacity

    @property
    def lengths(self) -> Tensor:
        return self.slots.lengths

    @property
    def host_lengths(self) -> list[int]:
        return self.slots.host_lengths

    @property
    def longest(self) -> int:
        return self.slots.longest

    @property
    def uniform(self) -> bool:
        return self.slots.uniform

    @property
    def again(self) -> int:
        """Committed tokens that have to go through the target once more, before others (``RecurrentCache``)."""
        return 0

    def first(self, window: int | None) -> int:
        """The first slot that the next forward's attention sees in layers with this window."""
        return self.slots.first(window) if window in self._windows else 0

    def _views(self) -> Iterator[KVCacheLayer]:
        unused = {group: iter(storage) for group, storage in self._storage.items()}
        for (keys, values), shape in zip(self._groups, self.shapes, strict=True):
            held = next(unused[keys]).transpose(1, 2), next(unused[values]).transpose(1, 2)
            yield KVCacheLayer(self.slots, *held, shape.sliding_window)

    def reserve(self, new: int) -> None:
        """Make room for ``new`` slots behind the longest sequence."""
        if self.longest + new <= self.capacity:
            return
        self._allocate(max(self.longest + new - self.capacity, self.capacity // 2))
        self.layers = list(self._views())

    def _allocate(self, extra: int) -> None:
        """So many slots more per sequence."""
        self._storage = {
            key: torch.nn.functional.pad(storage, (0, 0, 0, 0, 0, extra)) for key, storage in self._storage.items()
        }
        self.slots.capacity += extra

    def set_lengths(self, lengths: list[int]) -> None:
        """Say how many slots of each sequence are committed."""
        self.slots.set(lengths)

    def can_hold(self, length: int) -> bool:
        """Whether so many tokens may be said to be committed, of those that went through the target."""
        return True

    def _move(self, old: Tensor, new: Tensor) -> None:
        """Copy slots (M,) int64 of all sequences, one behind the other, to others."""
        for storage in self._storage.values():
            tokens, device = storage.flatten(1, 2), storage.device
            tokens.index_copy_(1, new.to(device), tokens.index_select(1, old.to(device)))

    def commit(self, paths: list[list[int]]) -> None:
        """Keep the states of accepted nodes: slot ``length + path[i]`` moves to ``length + i``.

        Nothing moves when every accepted path is already contiguous, as in every chain.

        Args:
            paths: per sequence the accepted nodes, root first, increasing.
        """
        moves = [
            (row * self.capacity + length + node, row * self.capacity + length + at)
            for row, (length, path) in enumerate(zip(self.host_lengths, paths, strict=True))
            for at, node in enumerate(path)
            if node != at
        ]
        if moves:
            old, new = (of_lists(slots, self.device) for slots in zip(*moves, strict=True))
            self._move(old, new)
        self.set_lengths([length + len(path) for length, path in zip(self.host_lengths, paths, strict=True)])

    def select(self, rows: Tensor) -> None:
        """Keep only these sequences, (B',) int64. If they are not more than before, what is committed of those that
        change their place is all that moves.
        """
        kept, before = rows.tolist(), self.host_lengths
        moves = [(at, row) for at, row in enumerate(kept) if at != row]
        if len(kept) > len(before):
            self._storage = {key: storage[:, rows.to(storage.device)] for key, storage in self._storage.items()}
        elif moves:
            new, old = (of_lists(places, self.device) for places in zip(*moves, strict=True))
            for storage in self._storage.values():
                used, device = storage[:, :, : max(before[row] for _, row in moves)], storage.device
                used.index_copy_(1, new.to(device), used.index_select(1, old.to(device)))
        self._storage = {key: storage[:, : len(kept)] for key, storage in self._storage.items()}
        self.layers = list(self._views())
        self.set_lengths([before[row] for row in kept])

    def join(self, other: "KVCache") -> None:
        """Take in the sequences of another cache of such layers, behind its own. The other one may grow."""
        capacity = max(self.capacity, other.capacity)
        for each in (self, other):
            each._allocate(capacity - each.capacity)
        self._storage = {key: torch.cat([held, other._storage[key]], dim=1) for key, held in self._storage.items()}
        self.layers = list(self._views())
        self.set_lengths([*self.host_lengths, *other.host_lengths])
