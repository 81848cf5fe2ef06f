"""What an architecture can do, found out by experiment when it is loaded, because the failures are silent: a model that
ignores explicit positions or a 4D mask returns numbers all the same.
"""

import math
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin

from shape.errors import UnsupportedTarget
from shape.target.inference import evaluating, host_by_default, relative_error
from shape.target.model import Target
from shape.target.openvino import OpenVinoTarget
from shape.target.support import LayerShape, Support
from shape.verification.forward import new_cache, prefill, tree_forward
from shape.verification.fused import FusedLayers
from shape.verification.fused_gpu import FusedGpuLayers
from shape.verification.tree import TokenTree, chain, root_only
from shape.verification.windows import PretendedCache, holding, pretended_length, too_wide

# Allowed relative error (root mean square) between a cached tree forward and forwards of its paths as texts. Some
# models take their softmax in float32 whatever their dtype; a wrong mask or position is off by far more.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
_TILED = {24: 16, 48: 32}  # tokens, of the GPU kernels' tiles for more than a tree's: what smaller tiles are for
# Three times what the target's own forwards differ by is allowed too, up to here: beyond it nothing is rounding.
_MOST_NOISE = 5e-2
# How far a token's result in one module may depend on tokens that it cannot see. Kernels for equal shapes do not let it
# depend at all; outliers that are taken out of 8-bit products (LLM.int8(), arXiv 2208.07339) move it by about 1e-2, one
# 8-bit scale for all tokens by more than 0.1.
_SLIGHT_MIXING, _MOST_MIXING = 1e-3, 1e-1


def support_of(target: Target) -> Support:
    """What the target supports, probed once and kept with it.

    Raises:
        UnsupportedTarget: see ``probe``.
    """
    if target.support is None:
        with evaluating([target.model]), host_by_default():
            target.support = probe(target)
    return target.support


@torch.no_grad()
def probe(target: Target) -> Support:
    """Find out by experiment whether the target is exact on trees, on chains only, or not at all.

    Raises:
        UnsupportedTarget: with the reason, when not even a chain is exact.
    """
    return _probe_converted(target) if isinstance(target, OpenVinoTarget) else _probe(target)


def _probe_converted(target: OpenVinoTarget) -> Support:
    """Of another backend: what torch finds, and whether the converted target computes the same, and trees as texts."""
    prompt, drafts = _examples(target)
    allowed, reason = _TOLERANCE[target.computed_in], None
    if target.converted is None:
        support = replace(_probe(target), grouped_queries=False, fused=None)
        if support.mode != "tree" or target.switch is not None:
            why = support.reason or "its rotary table changes with the length of the text"
            raise UnsupportedTarget(f"target {target.name} cannot be converted to OpenVINO ({why}); use backend torch")
        expected = target.hidden(prompt)
        target.convert(support)
        if target.quantized is None and not relative_error(target.hidden(prompt), expected) <= allowed:
            reason = "its states are not those of torch"
    assert target.converted is not None
    reason = reason or _near_failure(target, target.converted, prompt, drafts, allowed)
    if reason is not None:
        target.discard()
        raise UnsupportedTarget(f"target {target.name} cannot be verified in OpenVINO: {reason}; use backend torch")
    return target.converted


def _examples(target: Target) -> tuple[Tensor, Tensor]:
    """Two prompts, (2, 11), and as many drafts, (2, 6)."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(target.vocab_size, (2, 11), generator=generator).to(target.device)
    return prompt, torch.randint(target.vocab_size, (2, 6), generator=generator).to(target.device)


def _probe(target: Target) -> Support:
    prompt, drafts = _examples(target)
    try:
        layers, cached_noise = _cache_shapes(target, prompt)
        _check_logits(target, prompt)
        noise = max(cached_noise, _sensitivity(target, prompt, _tolerance(target) / 10))
        mixing, where = _mixing(target, prompt)
        window, by_type = _sliding_window(target)
        target.switch  # noqa: B018  # found out here, where what goes wrong has a name
    except UnsupportedTarget:
        raise
    except Exception as error:  # any architecture may fail in its own way; the user needs one sentence
        raise UnsupportedTarget(
            f"target {target.name} cannot run a cached forward ({type(error).__name__}: {error})"
        ) from error
    _judge_rounding(target, noise, mixing, where)
    allowed = max(_tolerance(target), min(3 * noise, _MOST_NOISE))

    if not layers:
        why = "recurrent layers cannot forget a rejected draft"
        return _chain(target, Support("chain", why, layers, window, by_type), prompt, drafts, allowed)
    grouped = _has_grouped_queries(target, layers)
    layered = FusedLayers if target.device.type == "cpu" else FusedGpuLayers
    fused = layered.of(target.model.base_model, target.config, target.head)
    reasons: list[str] = []
    for ways in dict.fromkeys(((grouped, fused), (grouped, None), (False, None))):  # the fastest that is exact
        support = Support("tree", "", layers, window, by_type, *ways)
        reason = _tree_failure(target, support, prompt, drafts, allowed)
        if reason is None:
            if fused is not None and support.fused is None:
                warnings.warn(f"target {target.name} is decoded without kernels of ours: {reasons[0]}", stacklevel=3)
            return support
        reasons.append(reason)
    return _chain(target, Support("chain", reason or "", layers, window, by_type), prompt, drafts, allowed)


def _chain(target: Target, support: Support, prompt: Tensor, drafts: Tensor, allowed: float) -> Support:
    """The support, where chains are exact; raises UnsupportedTarget where they are not."""
    reason = _chain_failure(target, support, prompt[:1], drafts[:1], allowed)
    if reason is None:
        return support
    raise UnsupportedTarget(
        f"target {target.name} cannot verify drafts exactly: as a tree, {support.reason}; as a chain, {reason}"
    )


def _sliding_window(target: Target) -> tuple[int | None, bool]:
    """(window, whether masks are given per layer type)."""
    config = target.config
    kinds = set(getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False or (kinds and "sliding_attention" not in kinds):
        window = None
    return window, window is not None and len(kinds) > 1


def _windows_of(target: Target, layers: list[Any]) -> list[int | None]:
    """Of every layer of transformers' cache the window that it drops older tokens by, where a mask can be cut alike."""
    window, by_type = _sliding_window(target)
    found = [window if getattr(layer, "sliding_window", None) == window else None for layer in layers]
    return found if by_type or None not in found else [None] * len(found)  # layers that are not alike need two masks


def _has_grouped_queries(target: Target, layers: list[LayerShape]) -> bool:
    """Whether several query heads share a key head, in a model that lets its attention function be chosen."""
    heads = getattr(target.config, "num_attention_heads", 0)
    return target.model._supports_attention_backend and any(layer.keys[0] < heads for layer in layers)


def _cache_shapes(target: Target, prompt: Tensor) -> tuple[list[LayerShape], float]:
    """Shapes of the model's own cache, none where it is `RecurrentCache` that serves, and how far its cached decoding
    is from a full forward.
    """
    cache, positions = DynamicCache(config=target.model.config), torch.arange(prompt.shape[1], device=prompt.device)
    parts = [slice(-3), slice(-3, None)]
    states = [target.hidden(prompt[:, part], position_ids=positions[None, part], cache=cache) for part in parts]
    noise = relative_error(torch.cat(states, dim=1), target.hidden(prompt))
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
        return [], 0.0  # of some the cached forward begins anew, which is no noise
    shapes, held = [], holding(cache)
    for layer, window in zip(held, _windows_of(target, held), strict=True):
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            raise UnsupportedTarget(
                f"target {target.name} keeps a recurrent or shared state ({type(layer).__name__}) that cannot be "
                "rolled back after a rejected draft"
            )
        keys, values = layer.keys, layer.values
        shapes.append(
            LayerShape(
                (keys.shape[1], keys.shape[3]),
                (values.shape[1], values.shape[3]),
                None if keys.dtype == target.dtype else keys.dtype,
                None if keys.device == target.device else keys.device,
                window,
            )
        )
    return shapes, noise


def _sensitivity(target: Target, prompt: Tensor, change: float) -> float:
    """How far states move when the embeddings move by a share of their size, as kernels for other lengths may move
    them: about as much, unless activations are rounded to few bits on the way.
    """

    def move(module: nn.Module, given: Any, found: Tensor) -> Tensor:
        signs = torch.randint(2, found.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
        return found + change * signs.to(found) * found

    still = target.hidden(prompt)
    hook = target.model.get_input_embeddings().register_forward_hook(move)
    try:
        return relative_error(target.hidden(prompt), still)
    finally:
        hook.remove()


def _mixing(target: Target, prompt: Tensor) -> tuple[float, str]:
    """How far the results of a module for some tokens depend on tokens that these cannot see, and in which module most.

    Looks at every module that maps states to states and is given nothing else, while the prompts (2, T) go through:
    with the last token of the first one and all of the second scaled up, the first one's other tokens must stay.
    """
    worst, where = 0.0, ""
    busy = False

    def look(name: str, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], found: Any) -> None:
        nonlocal worst, where, busy
        if busy or named or len(given) != 1 or not (_are_states(given[0], prompt) and _are_states(found, prompt)):
            return
        changed = given[0].clone()
        changed[0, -1] *= 64
        changed[1] *= 64
        busy = True
        again = module.forward(changed)
        busy = False
        if torch.equal(again[0, :-1], found[0, :-1]):
            return
        distance = relative_error(again[0, :-1], found[0, :-1])
        if not (distance <= worst or math.isnan(worst)):
            worst, where = distance, f"{name} ({type(module).__name__})"

    hooks = [
        module.register_forward_hook(partial(look, name), with_kwargs=True)
        for name, module in target.model.named_modules()
    ]
    try:
        target.logits(target.hidden(prompt))
    finally:
        for hook in hooks:
            hook.remove()
    return worst, where


def _are_states(given: Any, prompt: Tensor) -> bool:
    """Whether these are floats (B, T, any) for prompts (B, T)."""
    return (
        isinstance(given, Tensor) and given.is_floating_point() and given.dim() == 3 and given.shape[:2] == prompt.shape
    )


def _judge_rounding(target: Target, noise: float, mixing: float, where: str) -> None:
    """Refuse what depends on other tokens outright, and say where near-ties are wider than the dtype explains."""
    if not mixing <= _MOST_MIXING:
        raise UnsupportedTarget(
            f"target {target.name} cannot verify drafts exactly: {where} gives a token another result when tokens that "
            f"it cannot see change (by {mixing:.2g}), as activations with one 8-bit scale for all tokens do; quantise "
            "weights only, or activations token by token"
        )
    kind = torch.finfo(target.dtype)
    if mixing > max(_SLIGHT_MIXING, kind.eps):
        what = (
            f"lets the tokens of a forward change each other by {mixing:.1g} in {where}, as outliers do in LLM.int8()"
        )
    elif noise > _tolerance(target) and kind.bits > 16:  # of smaller dtypes nobody expects better
        what = f"rounds coarsely: small changes grow to {noise:.1g} in its states, as they do in 8-bit activations"
    else:
        return
    warnings.warn(
        f"target {target.name} {what}; near-ties can fall otherwise than in autoregressive decoding, where they can "
        "fall otherwise from batch to batch too",
        stacklevel=3,
    )


def _tolerance(target: Target) -> float:
    return _TOLERANCE.get(target.dtype, 1e-2)


def _check_logits(target: Target, prompt: Tensor) -> None:
    expected = target.model(input_ids=prompt, use_cache=False).logits
    distance = relative_error(target.logits(target.hidden(prompt)), expected)
    if not distance <= _tolerance(target):
        raise UnsupportedTarget(
            f"target {target.name} computes its logits in a way that is not known here (off by {distance:.2g}); "
            "add its scaling to Target.logits"
        )


def _tree_failure(target: Target, support: Support, prompt: Tensor, drafts: Tensor, allowed: float) -> str | None:
    if (reason := _near_failure(target, support, prompt, drafts, allowed)) is not None:
        return reason
    if isinstance(support.fused, FusedGpuLayers):  # whose tiles follow from the number of tokens
        for count, fewer in _TILED.items():
            if (reason := _many_failure(target, support, prompt[:1], count, allowed)) is not None:
                # The shared memory of an RTX 3090 or 4090 holds no larger tiles, an A100's some.
                support.fused.most = fewer
                warnings.warn(
                    f"kernels of ours are used for forwards of target {target.name} over no more than {fewer} tokens: "
                    f"with more {reason}",
                    stacklevel=4,
                )
                break
    return _far_failure(target, support, TokenTree(drafts[:1], _parents(drafts[:1])), allowed)


def _parents(drafts: Tensor) -> Tensor:
    """Of a tree that branches, for drafts of six tokens."""
    return torch.tensor([-1, 0, 0, 1, 1, 3], device=drafts.device).expand_as(drafts)


def _off(allowed: float, *distances: float, where: str = "") -> str | None:
    """What to say of states that are too far off, as NaN is; None where all are near enough."""
    wrong = [one for one in distances if not one <= allowed]
    return f"states are off by {max(wrong, key=lambda one: (math.isnan(one), one)):.2g}{where}" if wrong else None


def _near_failure(target: Target, support: Support, prompt: Tensor, drafts: Tensor, allowed: float) -> str | None:
    """Two sequences of unequal length with a branching tree, and a single token, against forwards of their texts."""
    lengths = [prompt.shape[1], prompt.shape[1] - 3]
    tree = TokenTree(drafts, _parents(drafts))
    try:
        cache = new_cache(target, support, 2, max(lengths) + tree.size)
        prefill(target, cache, prompt, lengths)
        states = tree_forward(target, support, cache, tree)
        cache.select(torch.zeros(1, dtype=torch.int64, device=prompt.device))
        single = tree_forward(target, support, cache, root_only(drafts[:1, 0]))
    except Exception as error:
        return f"it raises {type(error).__name__}"
    expected = torch.zeros_like(states)
    for row, length in enumerate(lengths):
        for node in range(tree.size):
            path = tree.ancestors[row, node].nonzero()[:, 0]
            text = torch.cat([prompt[row, :length], tree.tokens[row, path]])
            expected[row, node] = target.hidden(text[None])[0, -1]
    return _off(allowed, relative_error(states, expected), relative_error(single[0, 0], expected[0, 0]))


def _many_failure(target: Target, support: Support, prompt: Tensor, count: int, allowed: float) -> str | None:
    """A chain of so many tokens, of which a GPU may have no room for the tiles, against the forward of its text."""
    length = prompt.shape[1]
    if target.max_positions is not None and length + count > target.max_positions:
        return None
    tokens = prompt[:, torch.arange(count, device=prompt.device) % length]
    try:
        cache = new_cache(target, support, 1, length + count)
        prefill(target, cache, prompt, [length])
        states = tree_forward(target, support, cache, chain(tokens[:, 0], tokens[:, 1:]))
    except Exception as error:
        return f"it raises {type(error).__name__} over {count} tokens"
    expected = target.hidden(torch.cat([prompt, tokens], dim=1))[:, length:]
    return _off(allowed, relative_error(states, expected), where=f" over {count} tokens")


def _far_failure(target: Target, support: Support, tree: TokenTree, allowed: float) -> str | None:
    """One tree behind a long text, against its paths under the model's own masks and its own cache."""
    if support.mode == "tree" and (window := too_wide(target)) is not None:
        return f"its window of {window} tokens is wider than can be looked beyond"
    if (length := pretended_length(target, tree.size)) is None:
        return None
    try:
        states = tree_forward(target, support, PretendedCache(target, support.layers, length, tree.size), tree)
    except Exception as error:
        return f"it raises {type(error).__name__} behind {length} tokens"
    cache = PretendedCache(target, support.layers, length, tree.size, cropped=True)
    expected = torch.zeros_like(states)
    for node in range(tree.size):
        path = tree.ancestors[0, node].nonzero()[:, 0]
        positions = length + torch.arange(len(path), device=path.device)
        found = target.hidden(tree.tokens[:, path], position_ids=positions[None], cache=cache)
        expected[0, node] = found[0, -1]
    return _off(allowed, relative_error(states, expected), where=f" behind {length} tokens")


def _chain_failure(target: Target, support: Support, prompt: Tensor, drafts: Tensor, allowed: float) -> str | None:
    """A chain, of which three tokens are accepted, and another one behind them, against forwards of their texts."""
    others, accepted = drafts.flip(1), 3
    try:
        cache = new_cache(target, support, 1, prompt.shape[1] + accepted + 2 * drafts.shape[1])
        prefill(target, cache, prompt, [prompt.shape[1]])
        tree = chain(drafts[:, 0], drafts[:, 1:])
        states = tree_forward(target, support, cache, tree)
        cache.commit([[*range(accepted)]])
        behind = tree_forward(target, support, cache, chain(others[:, 0], others[:, 1:]))
    except Exception as error:
        return f"it raises {type(error).__name__}"
    expected = target.hidden(torch.cat([prompt, drafts], dim=1))[:, prompt.shape[1] :]
    text = torch.cat([prompt, drafts[:, :accepted], others], dim=1)
    last = relative_error(behind, target.hidden(text)[:, -others.shape[1] :])
    reason = _off(allowed, relative_error(states, expected), last)
    return reason if reason or support.recurrent else _far_failure(target, support, tree, allowed)
