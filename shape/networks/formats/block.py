"""Checkpoints of DFlash, DFlash2 and DSpark: those of z-lab, SpecForge and DeepSeek, and of speculators.

All name the weights alike. In the originals' `target_layer_ids` layer i is the output of the target's decoder layer i,
which transformers' `hidden_states` and speculators' `aux_hidden_state_layer_ids` number i + 1.
"""

import warnings
from typing import Any

from shape.errors import CheckpointError
from shape.networks.base import Predictor
from shape.networks.config import ShapeConfig
from shape.networks.formats.files import Checkpoint, Weights, architectures
from shape.networks.formats.layers import (
    layers_of,
    own_weights,
    refuse_scales,
    require_head,
    require_layers,
    shared_options,
    take_vocabulary,
    warn_of_last_layer,
    with_mask,
    written_dtype,
    written_layers,
    written_width,
)
from shape.networks.formats.targets import TargetFacts

_SLIDING = "sliding_attention"
# As they are written.
_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "Qwen3DSparkModel"}
_DSPARK = {"Qwen3DSparkModel", "DSparkDraftModel"}
# DFlash2's selector by our names and by its own.
_SELECTOR = {
    "markov_head.markov_w1.weight": "candidate_selector.predecessor_codebook",
    "markov_head.markov_w2.weight": "candidate_selector.successor_codebook",
    "markov_head.hidden_projection.weight": "candidate_selector.hidden_projection.weight",
}
_CONVOLUTIONS = ("conv_kernel_size", "conv_group_size")


def recognise(config: dict[str, Any]) -> bool:
    return bool(architectures(config) & {*_ARCHITECTURES.values(), *_DSPARK}) or "dflash_config" in config


def read(checkpoint: Checkpoint, target: TargetFacts) -> tuple[ShapeConfig, Weights]:
    """Ours of the originals'; SpecForge keeps in `dflash_config` what DeepSeek has beside it."""
    config = {**checkpoint.config, **(checkpoint.config.get("dflash_config") or {})}
    if not (chosen := config.get("target_layer_ids")):
        raise CheckpointError("its configuration has no target_layer_ids, the layers that it reads")
    dspark = bool(architectures(config) & _DSPARK) or bool(config.get("markov_rank"))
    config.setdefault("sample_from_anchor", dspark)
    config |= _windows(config)
    chosen = [layer + 1 for layer in chosen]
    warn_of_last_layer(chosen, target)
    return _read(Checkpoint(config, checkpoint.weights), config, chosen)


def _windows(config: dict[str, Any]) -> dict[str, Any]:
    """The layers' windows as speculators has them, of the originals' options.

    Raises:
        CheckpointError: full attention that is causal within a block.
    """
    kinds, count = config.get("layer_types") or [], config.get("num_hidden_layers", 0)
    causal = config.get("is_causal", config.get("causal"))
    if config.get("use_swa") and _SLIDING not in kinds:  # in every layer, which a block then sees as a whole
        causal, kinds = bool(causal), [_SLIDING] * count
    if causal and any(kind != _SLIDING for kind in kinds or [""]):
        raise CheckpointError("its places see only those before them in every layer; with full attention they see all")
    if _SLIDING not in kinds:
        return {}
    window = config.get("swa_window_size") or config.get("sliding_window")
    found = {"layer_types": kinds, "sliding_window": window, "use_sliding_window": True}
    return {**found, "sliding_window_non_causal": causal is not None and not causal}


def read_speculators(checkpoint: Checkpoint, steps: int, target: TargetFacts) -> tuple[ShapeConfig, Weights]:
    """Ours of speculators'; how many steps follows from the size of a block."""
    config = checkpoint.config
    if not (chosen := config.get("aux_hidden_state_layer_ids")):
        raise CheckpointError("its configuration has no aux_hidden_state_layer_ids, the layers that it reads")
    kind = config["speculators_model_type"]
    config = {"sample_from_anchor": kind == "dspark", "sliding_window_non_causal": kind == "dflash2", **config}
    warn_of_last_layer(chosen, target)
    return _read(Checkpoint(config, checkpoint.weights), config["transformer_layer_config"], chosen)


def _read(checkpoint: Checkpoint, language_model: dict[str, Any], chosen: list[int]) -> tuple[ShapeConfig, Weights]:
    config, layers = checkpoint.config, layers_of(language_model)
    for name in ("block_size", "mask_token_id"):
        if config.get(name) is None:
            raise CheckpointError(f"its configuration has no {name}")
    refuse_scales(config)
    vocab_size, anchored = language_model["vocab_size"], config["sample_from_anchor"]
    ours = {theirs: name for name, theirs in _SELECTOR.items()}
    weights = take_vocabulary(checkpoint.weights, vocab_size)
    weights = with_mask({ours.get(name, name): weight for name, weight in weights.items()}, layers["hidden_size"])
    selects = bool(config.get("selector_rank"))
    made = ShapeConfig(
        kind="block",
        feature_layers=chosen,
        num_steps=config["block_size"] if anchored else config["block_size"] - 1,
        mask_token_id=config["mask_token_id"],
        sample_from_anchor=anchored,
        sliding_window_non_causal=bool(config.get("sliding_window_non_causal", False)),
        markov_rank=config.get("selector_rank") or config.get("markov_rank") or 0,
        markov_head_type="selector" if selects else config.get("markov_head_type") or "vanilla",
        **{name: config[name] for name in ("selector_top_k", *_CONVOLUTIONS) if config.get(name) is not None},
        confidence="confidence_head.proj.weight" in weights,
        confidence_head_with_markov=bool(config.get("confidence_head_with_markov", False)),
        **shared_options(config, layers, vocab_size, weights),
    )
    return made, weights


def write(predictor: Predictor, target: TargetFacts) -> Checkpoint:
    """As DeepSeek and z-lab have it, which vLLM and SGLang load beside a target."""
    config, common = predictor.config, _written(predictor, target)
    if _algorithm(config) == "dspark" and config.markov_head_type != "vanilla":
        raise CheckpointError(
            f"its markov_head_type is {config.markov_head_type}, and engines load vanilla ones: use --to speculators, "
            "whose package trains it"
        )
    if differs := _not_sglangs(predictor):
        warnings.warn(f"SGLang passes over {' and '.join(differs)}; vLLM reads them", stacklevel=2)
    chosen = [layer - 1 for layer in config.feature_layers]
    written = {**written_layers(config, target), **common, "target_layer_ids": chosen}
    # Which SGLang takes for the draft's own number, and z-lab's and SpecForge's packages do not do without.
    written["num_target_layers"] = target.num_layers or max(chosen) + 1
    written |= {"torch_dtype": written_dtype(predictor), "architectures": [_ARCHITECTURES[_algorithm(config)]]}
    if _algorithm(config) != "dspark":
        names = ("block_size", "mask_token_id", "target_layer_ids", "sample_from_anchor", *_of_selector(config))
        written["dflash_config"] = {name: written[name] for name in names}
    if config.sliding_window_non_causal:
        written["is_causal"] = False
    return Checkpoint(written, _written_weights(predictor))


def _not_sglangs(predictor: Predictor) -> list[str]:
    """What SGLang ignores (its `models/dspark.py` and `models/dflash.py`), so that it drafts other tokens."""
    config = predictor.config
    found = {
        "an output embedding of the drafter's own": config.own_heads,
        "a draft vocabulary": predictor.draft_vocabulary is not None,
        "another width than the target's": config.target_hidden_size is not None,
        "blocks whose first place drafts nothing": _algorithm(config) == "dspark" and not config.sample_from_anchor,
    }
    return [what for what, there in found.items() if there]


def write_speculators(predictor: Predictor, target: TargetFacts) -> Checkpoint:
    """What is the algorithm's own in a configuration of speculators."""
    config, algorithm = predictor.config, _algorithm(predictor.config)
    if algorithm == "dspark" and config.markov_head_type != "vanilla":
        warnings.warn(f"vLLM 0.32 loads no {config.markov_head_type} markov_head_type, but vanilla ones", stacklevel=2)
    written = {
        **_written(predictor, target),
        "architectures": [_ARCHITECTURES[algorithm]],
        "speculators_model_type": algorithm,
        "transformer_layer_config": written_layers(config, target),
        "aux_hidden_state_layer_ids": config.feature_layers,
        "sliding_window_non_causal": config.sliding_window_non_causal,
    }
    return Checkpoint(written, _written_weights(predictor))


def _algorithm(config: ShapeConfig) -> str:
    if config.markov_head_type == "selector" or config.conv_kernel_size:
        return "dflash2"
    return "dspark" if config.markov_rank else "dflash"


def _of_selector(config: ShapeConfig) -> dict[str, Any]:
    """DFlash2's own options."""
    if _algorithm(config) != "dflash2":
        return {}
    own = {"selector_rank": config.markov_rank, "selector_top_k": config.selector_top_k}
    return {**own, **{name: getattr(config, name) for name in _CONVOLUTIONS}}


def _written_weights(predictor: Predictor) -> Weights:
    names = {} if predictor.selector is None else _SELECTOR
    return {names.get(name, name): weight for name, weight in own_weights(predictor).items()}


def _written(predictor: Predictor, target: TargetFacts) -> dict[str, Any]:
    """What all layouts say of a network.

    Raises:
        CheckpointError: what engines would not compute as it is.
    """
    config = predictor.config
    require_head(predictor)
    require_layers(config, target, first=1)
    if _algorithm(config) != "dspark" and (config.sample_from_anchor or config.confidence):
        raise CheckpointError("engines know sample_from_anchor and a confidence with DSpark's markov_rank alone")
    if _algorithm(config) == "dflash2" and not (
        config.conv_kernel_size and predictor.selector and predictor.draft_vocabulary is None
    ):
        raise CheckpointError(
            "engines know convolutions and a selector together, and without a draft vocabulary (DFlash2); train with "
            "--predictor.conv_kernel_size 2 --predictor.markov_head_type selector --predictor.draft_vocab_size null"
        )
    written = {
        **written_width(config),
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        **_of_selector(config),
    }
    if _algorithm(config) != "dspark":
        return written
    return written | {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_head_with_markov,
    }
