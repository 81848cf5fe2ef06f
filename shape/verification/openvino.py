"""The KV cache of a target that OpenVINO computes: state of its own, which only grows.

New keys and values are appended behind all others, in place. What is committed is a table of slots: a commit changes
the table, masks hide the slots that are not in it, and no key or value moves until most slots are such.
"""

from dataclasses import replace
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from shape.target.openvino import CompiledLayers, OpenVinoTarget, shared
from shape.target.support import Support
from shape.verification.cache import KVCache

_UNUSED = 256  # slots at least before the state is made smaller


class OpenVinoCache(KVCache):
    """Slots of a batch of sequences, all of which the state has as many of.

    Attributes:
        written: slots of the state, per sequence.
    """

    def __init__(self, target: OpenVinoTarget, support: Support, batch: int) -> None:
        # Its attention sees all slots, whatever a layer's window is.
        whole = [replace(shape, sliding_window=None) for shape in support.layers]
        super().__init__(whole, batch, 0, target.dtype, target.device)
        self.written = 0
        self._rows = np.arange(batch, dtype=np.int32)  # of the state, where each sequence goes on
        self._table = np.zeros((batch, 0), np.int64)  # slots of the committed tokens, then of the last forward's
        self._request: Any = None

    def append(self, compiled: CompiledLayers, ids: Tensor, positions: Tensor, masks: dict[str, Tensor]) -> Tensor:
        """States of new tokens, (B, N, F). They take the next slots.

        Args:
            masks: (B, 1, N, K) each, as if the committed tokens lay one behind the other and the new ones behind them.
        """
        if self._request is None:
            self._request = compiled.request()
            finalize(self, compiled.idle.append, self._request)
        new = ids.shape[1]
        self._reach(self.longest + new)
        for row, length in enumerate(self.host_lengths):
            self._table[row, length : length + new] = range(self.written, self.written + new)
        placed = {name: self._placed(mask, new) for name, mask in masks.items()}
        states = compiled.run(self._request, ids, positions, placed, self._rows)
        self.written += new
        self._rows = np.arange(len(ids), dtype=np.int32)
        return states

    def reserve(self, new: int) -> None:
        """Make the state smaller where most of it is unused."""
        if self.written - self.longest > max(_UNUSED, self.longest):
            self._compact()

    def commit(self, paths: list[list[int]]) -> None:
        for row, (length, path) in enumerate(zip(self.host_lengths, paths, strict=True)):
            self._table[row, length : length + len(path)] = self._table[row, [length + node for node in path]]
        self.set_lengths([length + len(path) for length, path in zip(self.host_lengths, paths, strict=True)])

    def select(self, rows: Tensor) -> None:
        kept = rows.numpy()
        self._rows, self._table = self._rows[kept], self._table[kept]
        self.set_lengths([self.host_lengths[row] for row in kept.tolist()])

    def join(self, other: KVCache) -> None:
        raise NotImplementedError("the states of two requests cannot be joined")

    def _reach(self, slots: int) -> None:
        if (lacking := slots - self._table.shape[1]) > 0:
            self._table = np.pad(self._table, ((0, 0), (0, lacking + self._table.shape[1])))

    def _placed(self, mask: Tensor, new: int) -> Tensor:
        """The mask of slots as they are: (B, 1, N, written + N)."""
        if self.uniform and self.written == self.longest:
            return mask
        found = mask.new_full((*mask.shape[:3], self.written + new), torch.finfo(mask.dtype).min)
        source, into = mask.numpy(), found.numpy()
        for row, length in enumerate(self.host_lengths):
            into[row, :, :, self._table[row, : length + new]] = source[row, :, :, : length + new].transpose(2, 0, 1)
        return found

    def _compact(self) -> None:
        """Keep the committed slots alone."""
        for state in self._request.query_state():
            held = np.array(state.state.data)[self._rows]
            slots = self._table[:, : self.longest, None]
            kept = np.take_along_axis(held, slots[:, None], axis=2)
            state.state = shared(np.ascontiguousarray(kept))
        self.written, self._rows = self.longest, np.arange(len(self._rows), dtype=np.int32)
        self._table[:, : self.longest] = range(self.longest)
