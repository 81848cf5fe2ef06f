"""One target forward over token trees behind a ragged cache, on unmodified transformers models."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from shape.target.model import Target
from shape.target.openvino import OpenVinoTarget
from shape.target.support import Masks, Support
from shape.verification.attention import grouped_queries
from shape.verification.cache import KVCache
from shape.verification.openvino import OpenVinoCache
from shape.verification.recurrent import RecurrentCache
from shape.verification.tree import TokenTree, chain, positions_and_mask

_FEW = 128  # tokens of a prompt; for more, what torch's calls cost does not count
_FILLED = 16  # of which prompts are filled up to multiples
Inputs = tuple[Tensor, Masks]  # positions of nodes, and their masks


def new_cache(target: Target, support: Support, batch: int, capacity: int) -> KVCache:
    """An empty cache of the kind that the target needs.

    Args:
        batch: sequences. capacity: slots for each; more are made as they are needed.
    """
    if isinstance(target, OpenVinoTarget) and target.converted is not None:
        return OpenVinoCache(target, support, batch)
    if support.recurrent:
        return RecurrentCache(target)
    return KVCache(support.layers, batch, capacity, target.dtype, target.device)


def prefill(
    target: Target,
    cache: KVCache,
    input_ids: Tensor,
    lengths: list[int],
    portion: int = 1024,
    layers: Sequence[int] = (-1,),
    support: Support | None = None,
) -> Tensor:
    """States of the given tokens, (B, T, len(layers) * H). Afterwards ``lengths`` tokens per sequence are committed.

    Args:
        cache: empty, or with the same number of committed tokens in every sequence, which the given ones follow.
        input_ids: (B, T) int64, padded on the right: under the model's causal mask no token sees the padding,
            and later writes overwrite it.
        portion: tokens per sequence and forward, which bounds the memory of activations. The first is larger where
            it has to reach the rotary table that a long prompt has throughout (see ``shape.target.rotary``).
        layers: as in ``Target.hidden``.
        support: the target's, with which a short prompt goes through the layers that few tokens go through.
    """
    hidden = []
    first, width = portion, input_ids.shape[1]
    if target.switch is not None and cache.longest + width > target.switch.positions:
        first = max(portion, target.switch.positions + 1 - cache.longest)
    for begin, end in pairwise([0, *range(first, width, portion), width]):
        tokens = input_ids[:, begin:end]
        start, batch = cache.longest, tokens.shape[0]
        cache.reserve(tokens.shape[1])
        few = support is not None and support.fused is not None and tokens.numel() <= _FEW and target.switch is None
        if isinstance(cache, RecurrentCache):
            hidden.append(cache.through(tokens, layers))
        elif support is not None and few and support.fused.serves(tokens, {}, cache):  # under masks
            hidden.append(_few(target, support, cache, tokens, layers))
        else:
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device).expand_as(tokens)
            hidden.append(target.hidden(tokens, position_ids=positions, cache=cache, layers=layers))
        cache.set_lengths([start + tokens.shape[1]] * batch)
    cache.set_lengths(lengths)
    return torch.cat(hidden, dim=1)


def _few(target: Target, support: Support, cache: KVCache, tokens: Tensor, layers: Sequence[int]) -> Tensor:
    """A prompt as a chain, filled up so that few numbers of tokens come, for each of which a program is made."""
    size = tokens.shape[1]
    padded = F.pad(tokens, (0, -size % _FILLED))
    cache.reserve(padded.shape[1])
    tree = chain(padded[:, 0], padded[:, 1:])
    return tree_forward(target, support, cache, tree, layers)[:, :size]


def recompute(target: Target, cache: KVCache, texts: list[list[int]], layers: Sequence[int]) -> Tensor:
    """Prefill anew all but the last token of texts of one length, which goes through with them: its position says
    which rotary table they have. Their states, (B, T - 1, len(layers) * H).
    """
    committed = len(texts[0]) - 1
    cache.set_lengths([0] * len(texts))
    ids = torch.tensor(texts, device=target.device)
    return prefill(target, cache, ids, [committed] * len(texts), layers=layers)[:, :committed]


def tree_forward(
    target: Target, support: Support, cache: KVCache, tree: TokenTree, layers: Sequence[int] = (-1,)
) -> Tensor:
    """States of all nodes, (B, N, len(layers) * H). Their keys and values are written behind the committed tokens."""
    return _states(target, support, cache, tree, tree_inputs(target, support, cache, tree), layers, False)[0]


def tree_logits(
    target: Target,
    support: Support,
    cache: KVCache,
    tree: TokenTree,
    layers: Sequence[int] = (-1,),
    inputs: Inputs | None = None,
) -> tuple[Tensor, Tensor]:
    """``tree_forward``, and the logits (B, N, V) of the last of these layers, which is the target's last; with the
    ``tree_inputs`` that are at hand, or with new ones.
    """
    inputs = inputs or tree_inputs(target, support, cache, tree)
    states, read = _states(target, support, cache, tree, inputs, layers, True)
    last = states if len(layers) == 1 else states[..., -target.hidden_size :]
    return states, target.logits(last, None if read is None else lambda _: read)


def _states(
    target: Target,
    support: Support,
    cache: KVCache,
    tree: TokenTree,
    inputs: Inputs,
    layers: Sequence[int],
    logits: bool,
) -> tuple[Tensor, Tensor | None]:
    """``tree_forward``, and what the output embedding reads off the last layer's states, (B, N, V), where that is asked
    for and kernels make it in the same call.
    """
    tokens, (positions, masks) = tree.tokens, inputs
    if isinstance(cache, RecurrentCache):
        return cache.through(tokens, layers), None
    if support.fused is not None and support.fused.serves(tokens, masks, cache):
        return support.fused(tokens, positions, masks, cache, layers, logits)
    with attending(target, support):
        return target.hidden(tokens, attention_mask=masks, position_ids=positions, cache=cache, layers=layers), None


def attending(target: Target, support: Support) -> AbstractContextManager[None]:
    """Within it the target attends to trees with the masks of ``tree_inputs`` in the fastest way that is exact."""
    inside = torch.compiler.is_compiling()  # a compiled step, which cannot change configurations and is within it all
    return grouped_queries(target.config) if support.grouped_queries and not inside else nullcontext()


def tree_inputs(target: Target, support: Support, cache: KVCache, tree: TokenTree) -> Inputs:
    """Positions of a tree's nodes, (B, N) int64, and its attention masks in the form that the model takes."""
    masks: Masks = None
    single = tree.size == 1 and cache.uniform and support.sliding_window is None
    if single or support.mode == "chain":  # the model's own causal mask; without another its fastest kernels apply
        positions = cache.lengths[:, None] if tree.size == 1 else cache.lengths[:, None] + tree.depth
    else:
        positions, masks = _within(support.sliding_window, cache, tree)
        if support.mask_by_layer_type:
            masks = {"full_attention": _within(None, cache, tree)[1], "sliding_attention": masks}
    limit = support.positions or target.max_positions
    if limit is not None and cache.longest + tree.size > limit:
        # Nodes past the last position cannot be emitted any more, but must not index out of a position table.
        positions = positions.clamp(max=limit - 1)
    return positions, masks


def _within(window: int | None, cache: KVCache, tree: TokenTree) -> tuple[Tensor, Tensor]:
    """``positions_and_mask`` of a tree, for the slots that layers with this window see."""
    first = cache.first(window)
    if first == 0:
        return positions_and_mask(tree, cache.lengths, cache.longest + tree.size, cache.dtype, window)
    # Only distances count, so that the slots before the first one may be taken off all lengths.
    seen = cache.lengths - first, cache.longest + tree.size - first
    positions, mask = positions_and_mask(tree, *seen, cache.dtype, window)
    return positions + first, mask
