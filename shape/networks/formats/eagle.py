"""EAGLE-3's checkpoints, and P-EAGLE's: those of SafeAILab and SpecForge (`midlayer`), and of speculators and DeepSpec
(`layers.0`).

The layers that are read have two numberings. At the top of a configuration, where speculators writes and vLLM looks
first, layer i is transformers' `hidden_states[i]`, as here. In `eagle_config`, where SpecForge writes and SGLang looks,
a list that begins with 1 counts outputs of decoder layers: its layer i is `hidden_states[i + 1]`. Files whose list
begins with another number use the first numbering (sgl-project/sglang, pull request 25454), and so do all of gpt-oss,
by SGLang's reading (32334). DeepSpec's `target_layer_ids` count outputs.
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
    require_no_token_heads,
    shared_options,
    take_vocabulary,
    warn_of_last_layer,
    with_mask,
    written_dtype,
    written_layers,
    written_width,
)
from shape.networks.formats.targets import TargetFacts, TargetUnknown

_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_OUTPUTS = "target_layer_ids"  # DeepSpec's name, of outputs of decoder layers
_STEPS = 7  # that the originals unroll in training, where a checkpoint says nothing
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_ORIGINAL, _OURS = "midlayer.", "layers.0."
_PARALLEL = "mask_hidden"  # P-EAGLE has it
_MASK_IDS = ("mask_token_id", "pard_token", "ptd_token_id")  # what the mask token is called


def recognise(config: dict[str, Any]) -> bool:
    """SafeAILab's configurations are those of a Llama with a draft vocabulary."""
    named = any("eagle3" in name.lower() for name in architectures(config))
    return named or (config.get("model_type") == "llama" and "draft_vocab_size" in config)


def read(checkpoint: Checkpoint, target: TargetFacts) -> tuple[ShapeConfig, Weights]:
    """Ours of SafeAILab's, SpecForge's or DeepSpec's."""
    return _read(checkpoint, checkpoint.config, checkpoint.config.get("ttt_length") or _STEPS, target)


def read_speculators(checkpoint: Checkpoint, steps: int, target: TargetFacts) -> tuple[ShapeConfig, Weights]:
    return _read(checkpoint, checkpoint.config["transformer_layer_config"], steps, target)


def _read(
    checkpoint: Checkpoint, language_model: dict[str, Any], steps: int, target: TargetFacts
) -> tuple[ShapeConfig, Weights]:
    config, layers = checkpoint.config, layers_of(language_model)
    nested = config.get("eagle_config") or {}
    if not nested.get("use_aux_hidden_state", True):
        raise CheckpointError("it reads the last layer alone, as EAGLE-1; give an EAGLE-3 checkpoint")
    chosen = config.get(_LAYER_IDS)
    if not chosen and (outputs := nested.get(_LAYER_IDS)):
        chosen = [layer + 1 for layer in outputs] if outputs[0] == 1 and not _counts_states(target) else outputs
    if not chosen and (outputs := config.get(_OUTPUTS)):
        chosen = [layer + 1 for layer in outputs]
    if not chosen:
        count = target.layers()
        chosen = [2, count // 2, count - 3]
    warn_of_last_layer(chosen, target)
    refuse_scales(config)
    vocab_size = language_model.get("vocab_size") or target.vocab_size
    if vocab_size is None:
        raise TargetUnknown("its configuration has no vocab_size; give --target")
    weights = {name.replace(_ORIGINAL, _OURS, 1): weight for name, weight in checkpoint.weights.items()}
    weights = take_vocabulary(weights, vocab_size)
    parallel = _PARALLEL in weights
    options: dict[str, Any] = {name: bool(config.get(name, nested.get(name, False))) for name in _NORMS}
    if parallel:
        weights[_PARALLEL] = weights[_PARALLEL].reshape(1, 1, -1)
        weights = with_mask(weights, layers["hidden_size"])
        options |= {"norm_output": False, "mask_token_id": _mask_token(config)}  # nothing reads that output
    made = ShapeConfig(
        kind="peagle" if parallel else "eagle",
        feature_layers=chosen,
        num_steps=steps,
        **shared_options(config, layers, vocab_size, weights),
        **options,
    )
    return made, weights


def _counts_states(target: TargetFacts) -> bool:
    """Whether SGLang numbers hidden states of this target, whatever a list begins with."""
    return "GptOssForCausalLM" in target.architectures


def _mask_token(config: dict[str, Any]) -> int:
    given = next((config[name] for name in _MASK_IDS if config.get(name) is not None), None)
    if given is None:
        raise CheckpointError(
            f"its configuration has no {_MASK_IDS[0]}, the token that masks read; add it to config.json (SpecForge "
            "leaves it out: the tokenizer's mask token, or else the first id that the tokenizer does not use)"
        )
    return int(given)


def write(predictor: Predictor, target: TargetFacts) -> Checkpoint:
    """As SafeAILab and SpecForge have it, which SGLang and vLLM load beside a target.

    Raises:
        CheckpointError: layers that this layout has no name for.
    """
    config, layers = predictor.config, written_layers(predictor.config, target)
    if layers["model_type"] != "llama":
        raise CheckpointError(f"this layout has Llama's layers, and not {layers['model_type']}'s: use --to speculators")
    if config.num_layers > 1:
        raise CheckpointError(f"this layout has one layer, and it has {config.num_layers}: use --to speculators")
    if any(config.windows):
        raise CheckpointError("this layout has no layers of sliding_attention, and it has: use --to speculators")
    rope = layers.pop("rope_parameters", None) or {"rope_theta": 10000.0}
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    scaled = scaling.get("rope_type", "default") != "default"
    read, shifted = config.feature_layers, not _counts_states(target)
    if read[0] == 1 and shifted:
        warnings.warn(
            "SGLang reads other layers where the first one is 1, as its numbering has no way to say so; vLLM reads "
            "them as they are. For SGLang train with --predictor.feature_layers from 2 on",
            stacklevel=2,
        )
    written = {
        **layers,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling if scaled else None,
        "architectures": ["LlamaForCausalLMEagle3"],
        "torch_dtype": written_dtype(predictor),
        "eagle_config": {
            "use_aux_hidden_state": True,
            _LAYER_IDS: [layer - 1 for layer in read] if read[0] == 2 and shifted else read,
        },
        **_written(predictor, target),
    }
    if predictor.lm_head is None:  # by which SGLang knows that the target's is meant
        written["draft_vocab_size"] = None
    weights = own_weights(predictor)
    return Checkpoint(written, {name.replace(_OURS, _ORIGINAL, 1): weight for name, weight in weights.items()})


def write_speculators(predictor: Predictor, target: TargetFacts) -> Checkpoint:
    """What is the algorithm's own in a configuration of speculators."""
    config = predictor.config
    parallel = config.kind == "peagle"
    written = {
        "architectures": ["PEagleDraftModel" if parallel else "Eagle3DraftModel"],
        "speculators_model_type": "peagle" if parallel else "eagle3",
        "transformer_layer_config": written_layers(config, target),
        **_written(predictor, target),
    }
    return Checkpoint(written, own_weights(predictor))


def _written(predictor: Predictor, target: TargetFacts) -> dict[str, Any]:
    """What both layouts say of a network.

    Raises:
        CheckpointError: what engines would not compute as it is.
    """
    config = predictor.config
    require_head(predictor)
    require_no_token_heads(config)
    require_layers(config, target, first=0)
    shared = {_LAYER_IDS: config.feature_layers, "draft_vocab_size": config.draft_size, **written_width(config)}
    shared |= {name: getattr(config, name) for name in _NORMS}
    if config.kind != "peagle":
        return shared
    if config.fc_norm:
        raise CheckpointError("it has fc_norm, which engines know of EAGLE-3 alone and not of P-EAGLE")
    return {**shared, "mask_token_id": config.mask_token_id, "embed_requires_grad": config.own_embeddings}
