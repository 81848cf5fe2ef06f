"""What a short text cannot show: windows, chunks and whatever else hides old tokens from new ones.

A tree's mask has to hide what the model's own mask hides. Whether it does shows behind a long text only; but masks ask
how many tokens are committed, not how these came about. So a few tokens go through the target behind thousands that are
pretended: one layer's keys and values serve all layers, and the first of them and those where a window may begin are so
loud that it shows at once who looks at them.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicCache

from shape.target.model import Target
from shape.target.support import LayerShape
from shape.verification.cache import Group, KVCache, KVCacheLayer

# Whatever its name, a window of so many tokens is seen; larger ones by the numbers under such names.
_SEEN, _NAMES = 4096, re.compile("window|chunk|block|local|span|stride|segment|sparse|topk")
_MOST = 1 << 16  # tokens pretended at most
# Quantisers' blocks, and vLLM's attention to long texts, which transformers has not (Qwen2.5-1M): no layer reads them.
_UNREAD = {"quantization_config", "dual_chunk_attention_config"}
_LOUD, _LOUDEST = 4, 8192
_NOTHING: Any = getattr(cache_utils, "DummyLayer", ())  # which older transformers leave out


class PretendedLayer(KVCacheLayer):
    """Behind pretended tokens; new ones are not kept."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        first, held = self.slots.first(self.sliding_window), ((self.keys, key_states), (self.values, value_states))
        keys, values = (torch.cat([old[:, :, first:], new], dim=2) for old, new in held)
        return keys, values


class PretendedCache(KVCache):
    """As if a text of ``length`` tokens were committed, before ``new`` ones.

    Args:
        cropped: forget what transformers' own cache drops, which then is not loud any more. Attention sees all slots
            then: what hides the others is the model's own mask.
    """

    def __init__(self, target: Target, shapes: list[LayerShape], length: int, new: int, cropped: bool = False) -> None:
        super().__init__(shapes, 1, 0, target.dtype, target.device)
        self.set_lengths([length])
        # Attention to all tokens in sight, or to those in a window, makes these a mean.
        volume = torch.ones(length, 1)
        volume[:_LOUD] = min(length, _LOUDEST)
        for window in (number for number in windows(target) if number > new):
            volume[max(0, length - window - new) : length - window + new] = min(window, _LOUDEST)
        contents: dict[tuple[Group, Group, int], tuple[Tensor, Tensor]] = {}
        self.layers = []
        stock = holding(DynamicCache(config=target.model.config))
        for own, (keys, group), shape in zip(stock, self._groups, shapes, strict=True):
            dropped = max(0, length + 1 - own.sliding_window) if cropped and own.is_sliding else 0
            if (keys, group, dropped) not in contents:
                # All keys are 0, so that no token is looked at more than others.
                zeros = torch.zeros(1, keys.heads, length, keys.size, dtype=keys.dtype, device=keys.device)
                values = torch.randn(1, group.heads, length, group.size, generator=torch.Generator().manual_seed(0))
                values *= volume
                values[:, :, :dropped] = 0
                contents[keys, group, dropped] = zeros, values.to(group.device, group.dtype)
            held, reach = contents[keys, group, dropped], None if cropped else shape.sliding_window
            self.layers.append(PretendedLayer(self.slots, *held, reach))


def holding(cache: DynamicCache) -> list[Any]:
    """The layers of transformers' cache without the last ones that hold nothing, whose keys are those of others."""
    layers: list[Any] = list(cache.layers)
    while layers and isinstance(layers[-1], _NOTHING):
        layers.pop()
    return layers


def pretended_length(target: Target, new: int) -> int | None:
    """How many tokens to pretend before ``new`` ones, so that every window of the target ends among them; None where
    its positions leave no room, and no window that could hide anything.
    """
    room = target.max_positions or _MOST
    length = min(max([_SEEN, *windows(target)]) + new, room, _MOST) - new
    if target.switch is not None and length <= target.switch.positions < length + new:
        length = target.switch.positions - new  # no forward has two rotary tables
    return length if length > _LOUD else None


def windows(target: Target) -> list[int]:
    """Numbers of tokens in a configuration that may say how far its layers look, where that is less than a text."""
    return [number for number in _named(target.config.to_dict()) if number < (target.max_positions or _MOST)]


def too_wide(target: Target) -> int | None:
    """A window wider than ``_MOST`` tokens, beyond which the probe cannot look; None where there is none."""
    return next((number for number in windows(target) if number > _MOST), None)


def _named(config: Any, name: str = "") -> Iterator[int]:
    if isinstance(config, dict):
        for key, value in config.items():
            if key not in _UNREAD:
                yield from _named(value, str(key))
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _named(value, name)
    elif isinstance(config, int) and not isinstance(config, bool) and _NAMES.search(name):
        yield config
