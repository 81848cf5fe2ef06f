"""One target forward over token trees behind a ragged cache, on unmodified transformers models.

``probe`` finds out at load what an architecture can do, because the failures are silent: a model that ignores
explicit positions or a 4D mask returns numbers all the same.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from shape.errors import UnsupportedTarget
from shape.target import Target
from shape.verification.cache import KVArena, LayerShape
from shape.verification.tree import TokenTree, attention_mask, chain

# Allowed relative error (root mean square) between a cached tree forward and plain forwards of its paths. Some
# models take their softmax in float32 whatever their dtype; a wrong mask or position is off by far more.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Support:
    """How a target can be verified.

    Attributes:
        mode: "tree" when ragged batches of trees are exact; "chain" when only an unbranched proposal of one row
            is, which is then decoded row by row.
        reason: why not "tree"; empty otherwise.
        layers: shapes of the cache.
        sliding_window: window of the sliding layers, or None.
        mask_by_layer_type: the model takes a dict of masks, one per layer type.
    """

    mode: Literal["tree", "chain"]
    reason: str
    layers: list[LayerShape]
    sliding_window: int | None
    mask_by_layer_type: bool


def new_arena(target: Target, support: Support, batch: int, capacity: int) -> KVArena:
    return KVArena(support.layers, batch, capacity, target.dtype, target.device)


def prefill(target: Target, arena: KVArena, input_ids: Tensor, lengths: list[int], portion: int = 1024) -> Tensor:
    """States of the given tokens, (B, T, H); afterwards the arena holds ``lengths`` settled tokens per row.

    Args:
        arena: empty, or with the same number of settled tokens in every row, which the given ones follow.
        input_ids: (B, T) int64, padded on the right: under the model's causal mask no token sees the padding,
            and later writes overwrite it.
        portion: tokens of a row per forward, which bounds the memory that activations take.
    """
    hidden = []
    for tokens in input_ids.split(portion, dim=1):
        start, rows = arena.longest, tokens.shape[0]
        arena.reserve(tokens.shape[1])
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device).expand_as(tokens)
        hidden.append(target.hidden(tokens, position_ids=positions, cache=arena))
        arena.set_lengths([start + tokens.shape[1]] * rows)
    arena.set_lengths(lengths)
    return torch.cat(hidden, dim=1)


def tree_forward(target: Target, support: Support, arena: KVArena, tree: TokenTree) -> Tensor:
    """States of all nodes, (B, N, H), written behind the settled tokens and not settled yet."""
    positions = arena.lengths[:, None] + tree.depth
    if target.max_positions is not None:
        # Nodes past the last position cannot be emitted any more, but must not index out of a position table.
        positions = positions.clamp(max=target.max_positions - 1)
    return target.hidden(
        tree.tokens, attention_mask=_masks(target, support, arena, tree), position_ids=positions, cache=arena
    )


def _masks(target: Target, support: Support, arena: KVArena, tree: TokenTree) -> Tensor | dict[str, Tensor] | None:
    single = tree.size == 1 and arena.uniform and support.sliding_window is None
    if single or support.mode == "chain":
        return None  # the model's own causal mask; without an explicit one its fastest kernels apply

    def mask(window: int | None) -> Tensor:
        return attention_mask(
            tree.ancestors, arena.lengths, arena.longest + tree.size, target.dtype, window, tree.depth
        )

    if support.mask_by_layer_type:
        return {"full_attention": mask(None), "sliding_attention": mask(support.sliding_window)}
    return mask(support.sliding_window)


@torch.no_grad()
def probe(target: Target) -> Support:
    """Find out by experiment whether the target is exact on trees, on chains only, or not at all.

    Raises:
        UnsupportedTarget: with the reason, when not even a chain is exact.
    """
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(target.vocab_size, (2, 11), generator=generator).to(target.device)
    drafts = torch.randint(target.vocab_size, (2, 6), generator=generator).to(target.device)
    try:
        layers, noise = _plain_cache(target, prompt)
        _check_logits(target, prompt)
        window, by_type = _sliding_window(target)
    except UnsupportedTarget:
        raise
    except Exception as error:  # any architecture may fail in its own way; the user needs one sentence
        raise UnsupportedTarget(
            f"target {target.name} cannot run a cached forward ({type(error).__name__}: {error})"
        ) from error
    allowed = max(_TOLERANCE.get(target.dtype, 1e-2), 3 * noise)

    support = Support("tree", "", layers, window, by_type)
    reason = _tree_failure(target, support, prompt, drafts, allowed)
    if reason is None:
        return support
    support = Support("chain", reason, layers, window, by_type)
    chain_reason = _chain_failure(target, support, prompt[:1], drafts[:1], allowed)
    if chain_reason is None:
        return support
    raise UnsupportedTarget(
        f"target {target.name} cannot verify drafts exactly: as a tree, {reason}; as a chain, {chain_reason}"
    )


def _sliding_window(target: Target) -> tuple[int | None, bool]:
    """(window, whether masks are given per layer type)."""
    config = target.config
    kinds = set(getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False or (kinds and "sliding_attention" not in kinds):
        window = None
    return window, window is not None and len(kinds) > 1


def _plain_cache(target: Target, prompt: Tensor) -> tuple[list[LayerShape], float]:
    """Shapes of the model's own cache, and how far its cached decoding is from a full forward."""
    cache = DynamicCache(config=target.model.config)
    first = target.hidden(prompt[:, :-3], cache=cache)
    second = target.hidden(prompt[:, -3:], cache=cache)
    shapes = []
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            raise UnsupportedTarget(
                f"target {target.name} keeps a recurrent or shared state ({type(layer).__name__}) that cannot be "
                "rolled back after a rejected draft"
            )
        shapes.append(
            LayerShape((layer.keys.shape[1], layer.keys.shape[3]), (layer.values.shape[1], layer.values.shape[3]))
        )
    return shapes, _distance(torch.cat([first, second], dim=1), target.hidden(prompt))


def _check_logits(target: Target, prompt: Tensor) -> None:
    expected = target.model(input_ids=prompt, use_cache=False).logits
    distance = _distance(target.logits(target.hidden(prompt)), expected)
    if not distance <= _TOLERANCE.get(target.dtype, 1e-2):
        raise UnsupportedTarget(
            f"target {target.name} computes its logits in a way that is not known here (off by {distance:.2g}); "
            "add its scaling to Target.logits"
        )


def _tree_failure(target: Target, support: Support, prompt: Tensor, drafts: Tensor, allowed: float) -> str | None:
    """Two rows of unequal length with a branching tree against plain forwards of every node's path."""
    lengths = [prompt.shape[1], prompt.shape[1] - 3]
    parent = torch.tensor([-1, 0, 0, 1, 1, 3], device=prompt.device).expand_as(drafts)
    tree = TokenTree(drafts, parent)
    try:
        arena = new_arena(target, support, 2, max(lengths) + tree.size)
        prefill(target, arena, prompt, lengths)
        states = tree_forward(target, support, arena, tree)
    except Exception as error:
        return f"it raises {type(error).__name__}"
    expected = torch.zeros_like(states)
    for row, length in enumerate(lengths):
        for node in range(tree.size):
            path = tree.ancestors[row, node].nonzero()[:, 0]
            text = torch.cat([prompt[row, :length], tree.tokens[row, path]])
            expected[row, node] = target.hidden(text[None])[0, -1]
    distance = _distance(states, expected)
    return None if distance <= allowed else f"states are off by {distance:.2g}"


def _chain_failure(target: Target, support: Support, prompt: Tensor, drafts: Tensor, allowed: float) -> str | None:
    tree = chain(drafts[:, 0], drafts[:, 1:])
    try:
        arena = new_arena(target, support, 1, prompt.shape[1] + tree.size)
        prefill(target, arena, prompt, [prompt.shape[1]])
        states = tree_forward(target, support, arena, tree)
    except Exception as error:
        return f"it raises {type(error).__name__}"
    expected = target.hidden(torch.cat([prompt, tree.tokens], dim=1))[:, prompt.shape[1] :]
    distance = _distance(states, expected)
    return None if distance <= allowed else f"states are off by {distance:.2g}"


def _distance(found: Tensor, expected: Tensor) -> float:
    """Root mean square error relative to the expected values; NaN compares as failure."""
    error = (found.double() - expected.double()).pow(2).mean()
    return float((error / expected.double().pow(2).mean()).sqrt())
