"""What ``shape.verification.probe`` finds out about a target: how drafts can be verified, and what its KV cache holds.

The types are here and the probe is there, because it runs the tree forward, which is built on the target. Besides, what
transformers calls a cache, which depends on its version.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationMixin

Masks = Tensor | dict[str, Tensor] | None
"""Of attention, as a model takes them: one for all layers, one for each type of them, or the model's own."""


@dataclass(frozen=True)
class LayerShape:
    """How one layer's states are cached.

    Attributes:
        keys, values: (heads, head size).
        dtype, device: None stands for those of the target's states, so that a target that is moved takes its cache
            along; layers that accelerate spreads over devices have their own.
        sliding_window: tokens that the layer looks back over, its own included, where its cache hands to attention
            those that new tokens reach alone; None where it hands over all.
    """

    keys: tuple[int, int]
    values: tuple[int, int]
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    sliding_window: int | None = None


@dataclass(frozen=True)
class Support:
    """How a target can be verified; one that cannot is refused with UnsupportedTarget.

    Attributes:
        mode: "tree" when ragged batches of trees are exact; "chain" when only an unbranched draft for one sequence is,
            and batches are decoded one sequence at a time.
        reason: why not "tree"; empty otherwise.
        layers: shapes of the cache; none where layers are recurrent.
        sliding_window: window of the sliding layers, or None.
        mask_by_layer_type: the model takes a dict of masks, one per layer type.
        grouped_queries: trees are attended to without repeated keys and values (``shape.verification.attention``).
        fused: the ``FusedLayers`` (``shape.verification.fused``) that few tokens go through where it serves, or None.
        positions: that forwards may reach, where a call is sure to need no more and has the first rotary table
            throughout; None leaves it to the target.
    """

    mode: Literal["tree", "chain"]
    reason: str
    layers: list[LayerShape]
    sliding_window: int | None
    mask_by_layer_type: bool
    grouped_queries: bool = False
    fused: Any = None
    positions: int | None = None

    @property
    def recurrent(self) -> bool:
        """Whether layers have states that cannot forget (``shape.verification.recurrent``), which have no shapes."""
        return not self.layers


CACHE_NAMES = ("past_key_values", "cache")
"""What functions of transformers call a KV cache, before 5.24 and since."""


@cache
def cache_name(function: Callable[..., Any]) -> str:
    """What a model's function calls its KV cache: the old name where it takes that, else this transformers' own."""
    takers = function, GenerationMixin.prepare_inputs_for_generation
    named = (name for taker in takers for name in CACHE_NAMES if name in inspect.signature(taker).parameters)
    return next(named)
