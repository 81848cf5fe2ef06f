"""Attention of token trees with grouped queries, without a copy of keys and values for every query head.

Where a mask is given, and on a CPU without one too, sdpa repeats keys and values to the number of query heads, at every
layer and step: for Llama-3.1-8B four times the cache is written and read again. Queries that share a key head can
instead lie side by side in the dimension of tokens, each group under the same mask, and the repeats are gone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from shape.verification.tree import ALIGNED

_NAME = "shape_grouped_sdpa"
_STOCK = "sdpa"
_ENTRY = "_attn_implementation_internal"
# Given any of these, the stock function is asked: it knows what to make of them.
_UNKNOWN = ("position_bias", "cache", "softcap", "output_attentions")


def grouped_sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention as transformers' ``sdpa_attention_forward``, with the same result.

    Args:
        query: (B, H, N, D). key, value: (B, H', K, D), where H' divides H.
        attention_mask: (B, 1, N, K), or None where N is 1 and everything is looked at; with others the stock function
            is asked.

    Returns:
        (B, N, H, D).
    """
    batch, heads, nodes, _ = query.shape
    groups = heads // key.shape[1]
    asked = any(isinstance(options.get(name), Tensor) or options.get(name) for name in _UNKNOWN)
    served = nodes == 1 if attention_mask is None else attention_mask.shape[1] == 1
    if not served or groups == 1 or asked:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    found = F.scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], groups * nodes, -1),
        key,
        value,
        attn_mask=None if attention_mask is None else _for_groups(attention_mask, groups),
        dropout_p=options.get("dropout", 0.0),
        scale=options.get("scaling"),
    )
    return found.reshape(batch, heads, nodes, -1).transpose(1, 2).contiguous(), None


def repeated(mask: Tensor, groups: int) -> Tensor:
    """(B, 1, N, K) -> (B, 1, groups * N, K), with rows as far apart as they were (see ``tree.positions_and_mask``)."""
    keys = mask.shape[-1]
    padding = mask.stride(2) - keys
    if not 0 < padding < ALIGNED:
        return mask.repeat(1, 1, groups, 1)
    return F.pad(mask, (0, padding)).repeat(1, 1, groups, 1)[..., :keys]


class _Step(local):
    """What the layers of a forward have in common: its masks, each repeated once. Each thread has its own."""

    # By identity, which they keep while they are here.
    masks: dict[tuple[int, int], tuple[Tensor, Tensor]] | None = None


_step = _Step()


def _for_groups(mask: Tensor, groups: int) -> Tensor:
    # A compiler sees by itself what is computed twice.
    if torch.compiler.is_compiling() or (masks := _step.masks) is None:
        return repeated(mask, groups)
    key = id(mask), groups
    if key not in masks:
        masks[key] = mask, repeated(mask, groups)
    return masks[key][1]


AttentionInterface.register(_NAME, grouped_sdpa)
# Trees bring their masks, and a single token needs none; but others may ask the model meanwhile, in their own threads.
AttentionMaskInterface.register(_NAME, sdpa_mask)


@contextmanager
def grouped_queries(config: PretrainedConfig) -> Iterator[None]:
    """Within it a model that computes attention by stock sdpa uses ``grouped_sdpa``.

    The choice is an entry of the model's configuration, which belongs to the user: it is put back at once, always to
    the stock name, so that two threads cannot leave the other one behind.
    """
    if config._attn_implementation != _STOCK:
        yield
        return
    _choose(config, _NAME)
    _step.masks = {}
    try:
        yield
    finally:
        _choose(config, _STOCK)
        _step.masks = None


def _choose(config: PretrainedConfig, name: str) -> None:
    if _ENTRY in vars(config):  # what the property sets, without its visits, which every step would pay for
        vars(config)[_ENTRY] = name
    else:
        config._attn_implementation = name
