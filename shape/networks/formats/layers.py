"""What the formats of networks with decoder layers share: the layers' configuration, and the draft vocabulary."""

import warnings
from typing import Any

import torch
from transformers import AutoConfig

from shape.errors import CheckpointError
from shape.networks.base import Predictor
from shape.networks.config import LAYER_TYPES, ShapeConfig
from shape.networks.decoder import SCALINGS
from shape.networks.formats.files import Weights
from shape.networks.formats.targets import TargetFacts
from shape.target.loading import dtype_name

# What of a configuration says how decoder layers compute; the rest is a language model's, or how it was trained.
_KEPT = (
    "attention_bias", "head_dim", "hidden_act", "hidden_size", "initializer_range", "intermediate_size", "layer_types",
    "max_position_embeddings", "mlp_bias", "model_type", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "rms_norm_eps", "rope_parameters", "sliding_window", "use_sliding_window",
)  # fmt: skip
_CHANGING = ("dynamic", "longrope")  # with the length of the text; here the scaling for short ones is used throughout
_MASK = "mask_embedding"  # ours alone: the target's embedding of a token
# Weights that only training reads: copies of the target's, and constants.
_TRAINING_ONLY = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")


# Options that change what is computed and are not known here, with the value that changes nothing.
_NEUTRAL = {
    "input_embedding_scale": 1, "output_multiplier": 1, "attention_value_scale": 1, "logit_scale": 1,
    "is_neox_style": True, "rope_is_neox_style": True,
}  # fmt: skip


def refuse_scales(config: dict[str, Any]) -> None:
    """Raises CheckpointError for numbers that are multiplied, or rotary positions in another order."""
    if given := [f"{name} {config[name]}" for name, value in _NEUTRAL.items() if config.get(name) not in (None, value)]:
        raise CheckpointError(f"its configuration has {', '.join(given)}, which is not computed here")


def layers_of(config: dict[str, Any]) -> dict[str, Any]:
    """`transformer_layer_config` of a configuration that may leave defaults out, or be of an earlier release.

    Raises:
        CheckpointError: layers that are not built here.
    """
    kind = config.get("model_type", "llama")
    if kind not in LAYER_TYPES:
        raise CheckpointError(f"its layers are of model_type {kind!r}; {' and '.join(LAYER_TYPES)} are known")
    given = {name: value for name, value in config.items() if name in _KEPT and name != "model_type"}
    filled = AutoConfig.for_model(kind, **{**given, "rope_parameters": _rope_of(config)}).to_dict()
    return {name: filled[name] for name in _KEPT if name in filled}


def _rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary parameters, whatever release of transformers wrote them.

    Raises:
        CheckpointError: positions that are not computed here.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    # Where kinds of layers have their own, speculators takes that of windows for all.
    rope = dict(given.get("sliding_attention") or given.get("full_attention") or given)
    kind = rope.pop("type", None)
    kind = rope.pop("rope_type", kind) or "default"
    if kind == "mrope":  # of text alone it is the plain one
        kind = "default"
    if kind in _CHANGING:
        longest = rope.get("original_max_position_embeddings") or config.get("max_position_embeddings")
        warnings.warn(
            f"its rotary positions are of type {kind!r}: behind {longest} tokens it drafts otherwise than it was "
            "trained to",
            stacklevel=2,
        )
    elif kind not in SCALINGS:
        raise CheckpointError(f"its rotary positions are of type {kind!r}, which is not computed here")
    partial = rope.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise CheckpointError(
            f"its configuration has partial_rotary_factor {partial}, and here all of a head is given a position"
        )
    if config.get("rope_theta") is not None:
        rope.setdefault("rope_theta", config["rope_theta"])
    return {**rope, "rope_type": kind}


def warn_of_last_layer(layers: list[int], target: TargetFacts) -> None:
    """Where the target is known, and its last layer is among those that a drafter reads."""
    if max(layers) == target.num_layers:
        warnings.warn(
            f"the checkpoint reads the target's last layer, {max(layers)}: here behind the final norm, as transformers "
            "has it, and before it in vLLM and SGLang",
            stacklevel=2,
        )


def require_layers(config: ShapeConfig, target: TargetFacts, first: int) -> None:
    """Raises CheckpointError for layers of the target that engines do not know as they are here.

    Args:
        first: the least that they know.
    """
    layers, last = config.feature_layers, target.num_layers
    if min(layers) < first or (last is not None and max(layers) >= last):
        below = "" if last is None else f", below the last ({last}), which they read before the final norm"
        raise CheckpointError(
            f"it reads layers {layers} of the target, and engines know those from {first} on{below}; train with "
            "--predictor.feature_layers of these"
        )


def written_layers(config: ShapeConfig, target: TargetFacts) -> dict[str, Any]:
    """The layers' configuration as engines read it, which take the draft model's positions for its longest text."""
    layers = dict(config.transformer_layer_config or {})
    positions = max(layers.get("max_position_embeddings") or 0, target.max_position_embeddings or 0)
    if positions:
        layers["max_position_embeddings"] = positions
    return {**layers, "vocab_size": config.vocab_size, "tie_word_embeddings": False}


def written_dtype(predictor: Predictor) -> str:
    """What engines compute in. Of float32 weights SGLang makes float16, which a target in bfloat16 does not go with."""
    dtype = predictor.dtype if predictor.dtype.itemsize == 2 else torch.bfloat16
    return dtype_name(dtype)


def take_vocabulary(weights: Weights, vocab_size: int) -> Weights:
    """The weights, without a `model.` before their names, with `draft_vocabulary` in place of `d2t` (differences to the
    tokens' own numbers) and `t2d`.

    Raises:
        CheckpointError: the two contradict each other, or name tokens that the target has not.
    """
    weights = {
        name.removeprefix("model."): weight for name, weight in weights.items() if not name.endswith(_TRAINING_ONLY)
    }
    deltas, drafted = weights.pop("d2t", None), weights.pop("t2d", None)
    if deltas is None:
        return weights
    tokens = torch.arange(len(deltas)) + deltas.long()
    absolute = drafted is not None and not drafted.nonzero()[:, 0].equal(tokens.sort().values)
    if absolute or int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size or len(tokens.unique()) < len(tokens):
        raise CheckpointError(
            "its d2t, added to the draft tokens' numbers, does not give the tokens that t2d marks; d2t has to hold "
            "differences, and not the tokens themselves"
        )
    return weights if len(tokens) == vocab_size and not deltas.any() else {**weights, "draft_vocabulary": tokens}


def with_mask(weights: Weights, size: int) -> Weights:
    """The weights with a place for the target's embedding of the mask token, (size,), unless they have embeddings."""
    if "embed_tokens.weight" in weights:
        return weights
    dtype = next(weight.dtype for weight in weights.values() if weight.is_floating_point())
    return {**weights, _MASK: torch.full((size,), torch.nan, dtype=dtype)}


def own_weights(predictor: Predictor) -> Weights:
    """The way back: a network's weights as other packages have them."""
    weights, vocab_size = dict(predictor.state_dict()), predictor.config.vocab_size or 0
    weights.pop(_MASK, None)
    tokens = weights.pop("draft_vocabulary", None)
    if tokens is None:
        return weights
    marked = torch.zeros(vocab_size, dtype=torch.bool)
    marked[tokens.cpu()] = True
    return {**weights, "d2t": tokens.cpu() - torch.arange(len(tokens)), "t2d": marked}


def shared_options(config: dict[str, Any], layers: dict[str, Any], vocab_size: int, weights: Weights) -> dict[str, Any]:
    """What of `ShapeConfig` follows from the layers and from which weights are there."""
    return {
        "target_hidden_size": config.get("target_hidden_size"),
        "hidden_size": layers["hidden_size"],
        "vocab_size": vocab_size,
        "draft_vocab_size": len(weights["draft_vocabulary"]) if "draft_vocabulary" in weights else None,
        "transformer_layer_config": layers,
        "num_layers": layers["num_hidden_layers"],
        "own_heads": "lm_head.weight" in weights,
        "own_embeddings": "embed_tokens.weight" in weights,
    }


def written_width(config: ShapeConfig) -> dict[str, Any]:
    """What all layouts say of a drafter that is narrower or wider than its target."""
    return {} if config.target_hidden_size is None else {"target_hidden_size": config.target_hidden_size}


def require_no_token_heads(config: ShapeConfig) -> None:
    """Raises CheckpointError for a Markov bias or a confidence estimate, which engines know of DSpark alone."""
    if config.markov_rank or config.confidence:
        raise CheckpointError(
            "it has a Markov bias or a confidence estimate, which engines know of DSpark alone; train with "
            "--predictor.markov_rank 0 --predictor.confidence false"
        )


def require_head(predictor: Predictor) -> None:
    """Raises CheckpointError where a draft vocabulary has no output embedding of its own, which engines need."""
    if predictor.draft_vocabulary is not None and predictor.lm_head is None:
        raise CheckpointError(
            "it drafts from a part of the vocabulary with the target's own output embedding, of which engines need "
            "those rows: give --target, from which they are copied"
        )
