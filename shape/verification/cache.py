"""The KV arena: one allocation for all layers, ragged rows, and commits that move only accepted rows.

Attention sees slots ``[0, max(lengths) + N)``; the mask decides per row. ``lengths`` is the only truth about how
much is settled: what lies beyond is overwritten by the next step, so rejecting a draft costs nothing.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True)
class LayerShape:
    """How one layer's states are stored.

    Attributes:
        keys, values: (heads, head size).
        dtype, device: None stands for those of the target's states, so that a target that is moved takes its cache
            along; layers that accelerate spreads over devices have their own.
    """

    keys: tuple[int, int]
    values: tuple[int, int]
    dtype: torch.dtype | None = None
    device: torch.device | None = None


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


class ArenaLayer(CacheLayerMixin):
    """One layer's window on the arena, in the form that transformers' attention layers expect."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, arena: "KVArena", keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.arena, self.keys, self.values = arena, keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the arena is allocated as a whole."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write (B, heads, N, D) states behind each row's settled ones and return all slots in use."""
        arena, new = self.arena, key_states.shape[2]
        end = arena.longest + new
        if arena.uniform:
            self.keys[:, :, arena.longest : end] = key_states
            self.values[:, :, arena.longest : end] = value_states
        else:
            lengths = arena.lengths_on(self.keys.device)
            slots = (lengths[:, None] + torch.arange(new, device=lengths.device))[:, None, :, None]
            self.keys.scatter_(2, slots.expand_as(key_states), key_states)
            self.values.scatter_(2, slots.expand_as(value_states), value_states)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.arena.longest + query_length, 0

    def get_seq_length(self) -> int:
        return self.arena.longest

    def get_max_length(self) -> int:
        return self.arena.capacity


class KVArena(Cache):
    """Keys and values of a batch with rows of unequal length.

    Args:
        shapes: one LayerShape per layer.
        batch, capacity: rows, and slots per row (settled tokens plus the largest tree).
        dtype: of layers that have none of their own; ``arena.dtype`` is that of the first layer's keys.
        device: of lengths and paths, and of layers that have none of their own.
    """

    def __init__(
        self, shapes: list[LayerShape], batch: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.capacity = capacity
        self.device = device
        self._groups = grouped(shapes, dtype, device)
        self.dtype = self._groups[0][0].dtype
        # States of one kind share a tensor, so that a commit is one gather and one scatter for all of them.
        counts = Counter(group for layer in self._groups for group in layer)
        self._storage = {
            group: torch.zeros(count, batch, group.heads, capacity, group.size, dtype=group.dtype, device=group.device)
            for group, count in counts.items()
        }
        self.set_lengths([0] * batch)
        super().__init__(layers=list(self._views()))

    def _views(self) -> Iterator[CacheLayerMixin]:
        """One window per layer, in the model's order."""
        unused = {group: iter(storage) for group, storage in self._storage.items()}
        return (ArenaLayer(self, next(unused[keys]), next(unused[values])) for keys, values in self._groups)

    def reserve(self, new: int) -> None:
        """Make room for ``new`` slots behind the longest row."""
        if self.longest + new <= self.capacity:
            return
        extra = max(self.longest + new - self.capacity, self.capacity // 2)
        self._storage = {
            key: torch.nn.functional.pad(storage, (0, 0, 0, extra)) for key, storage in self._storage.items()
        }
        self.capacity += extra
        self.layers = list(self._views())

    def set_lengths(self, lengths: list[int]) -> None:
        """Say how many slots of each row are settled (host numbers, which the loop has anyway)."""
        self.host_lengths = lengths
        self.longest = max(lengths)
        self.uniform = min(lengths) == self.longest
        self.lengths = torch.tensor(lengths, dtype=torch.long, device=self.device)
        self._lengths = {storage.device: self.lengths.to(storage.device) for storage in self._storage.values()}

    def lengths_on(self, device: torch.device) -> Tensor:
        """(B,) int64, the settled slots of each row, on the device of some layer."""
        return self._lengths[device]

    def commit(self, path: Tensor, counts: list[int]) -> None:
        """Settle the states of accepted nodes: slot ``length + path[i]`` moves to ``length + i``.

        Nothing moves when every accepted path is already contiguous, as in every chain.

        Args:
            path: (B, D) int64, accepted nodes, root first, increasing.
            counts: number of accepted nodes per row.
        """
        depth = max(counts)
        nodes = path[:, :depth]
        target = torch.arange(depth, device=path.device).expand_as(nodes)
        # Beyond its count a row copies a slot onto itself.
        valid = target < torch.tensor(counts, device=path.device)[:, None]
        nodes = torch.where(valid, nodes, target)
        if depth > 1 and not torch.equal(nodes, target):
            source, destination = self.lengths[:, None] + nodes[:, 1:], self.lengths[:, None] + target[:, 1:]
            for storage in self._storage.values():
                shape = (storage.shape[0], -1, storage.shape[2], -1, storage.shape[4])
                old = source.to(storage.device)[None, :, None, :, None].expand(shape)
                new = destination.to(storage.device)[None, :, None, :, None].expand(shape)
                storage.scatter_(3, new, storage.gather(3, old))
        self.set_lengths([length + count for length, count in zip(self.host_lengths, counts, strict=True)])

    def select(self, rows: Tensor) -> None:
        """Keep only these rows."""
        self._storage = {key: storage[:, rows.to(storage.device)] for key, storage in self._storage.items()}
        self.layers = list(self._views())
        self.set_lengths([self.host_lengths[row] for row in rows.tolist()])
