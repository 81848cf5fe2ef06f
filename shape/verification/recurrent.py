"""The cache of a target with recurrent layers: linear attention, state spaces, short convolutions.

Such a layer holds one state, what all tokens so far have made of it, which cannot forget a rejected draft. So states
are kept as they were before a forward. Where some of its tokens are rejected, these states come back, and the accepted
tokens go through again at the beginning of the next forward, where they cost little. Drafts are chains, one sequence at
a time, and the cache is transformers' own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from shape.target.model import Target
from shape.verification.cache import KVCache, Slots

# On a CPU linear attention fills a forward up to multiples of 64 tokens, unless its model is told otherwise. These are.
_CHUNKED, _CHUNK = {"qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"}, 16


class RecurrentCache(KVCache):
    """Of one sequence.

    Attributes:
        lengths: (1,) int64, committed tokens, of which the last ones may have to go through again.
    """

    layers: list[Any]
    _seen: int  # tokens that the states are of
    _behind: Tensor  # (1, T) int64, what follows them: tokens of the last forward, or those to go through again
    _before: list[dict[str, Any]] | None  # what layers held before the last forward, until it is kept or undone

    def __init__(self, target: Target) -> None:
        self._target, self.device, self.dtype = target, target.device, target.dtype
        self._chunked = target.device.type == "cpu" and target.config.model_type in _CHUNKED
        self.slots = Slots(0, target.device)
        Cache.__init__(self, layers=[])
        self._forget()

    @property
    def again(self) -> int:
        return self.longest - self._seen

    def through(self, tokens: Tensor, layers: Sequence[int]) -> Tensor:
        """States (1, N, len(layers) * H) of tokens (1, N) behind the committed ones, as of ``Target.hidden``."""
        self._go_back()
        again, self._before = self.again, [_copied(layer) for layer in self.layers]
        self._behind = torch.cat([self._behind, tokens], dim=1)
        size = self._behind.shape[1]
        positions = torch.arange(self._seen, self._seen + size, device=self.device)[None]
        more: dict[str, Any] = {"chunk_size": _CHUNK} if self._chunked and 1 < size <= 2 * _CHUNK else {}
        found = self._target.hidden(self._behind, position_ids=positions, cache=self, layers=layers, **more)
        return found[:, again:]

    def can_hold(self, length: int) -> bool:
        return self._seen <= length <= self._seen + self._behind.shape[1]

    def set_lengths(self, lengths: list[int]) -> None:
        """Say how many tokens are committed.

        Raises:
            ValueError: they are fewer than those that the states are of, and not none, or more than went through.
        """
        (length,) = lengths
        if length == 0:
            return self._forget()
        if not self.can_hold(length):
            raise ValueError(f"states of {self._seen} tokens cannot be made states of {length}")
        self.slots.set(lengths)
        if self._before is not None and self.again == self._behind.shape[1]:  # nothing was rejected
            self._seen, self._behind, self._before = length, self._behind[:, :0], None
        self._go_back()

    def reserve(self, new: int) -> None:
        """Nothing to do: transformers' cache grows by itself."""

    def select(self, rows: Tensor) -> None:
        if rows.tolist() != [0]:
            raise NotImplementedError("targets with recurrent layers decode one sequence at a time")

    def join(self, other: KVCache) -> None:
        raise NotImplementedError("targets with recurrent layers decode one sequence at a time")

    def _forget(self) -> None:
        self.layers = DynamicCache(config=self._target.model.config).layers
        self.slots.set([0])
        self._seen, self._before = 0, None
        self._behind = torch.empty(1, 0, dtype=torch.long, device=self.device)

    def _go_back(self) -> None:
        """Undo a forward, and keep of its tokens those that are committed."""
        if self._before is not None:
            for layer, before in zip(self.layers, self._before, strict=True):
                vars(layer).update(before)
            self._before = None
        self._behind = self._behind[:, : self.again]


def _copied(layer: Any) -> dict[str, Any]:
    """What a layer holds. States are copied, as they are written in place; keys and values are not, as they grow."""

    def copied(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: copied(one) for key, one in value.items()}
        return value.clone() if isinstance(value, Tensor) else value

    return {name: one if name in ("keys", "values") else copied(one) for name, one in vars(layer).items()}
