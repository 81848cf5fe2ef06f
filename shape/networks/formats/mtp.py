"""A target's own MTP layer, as Qwen3-Next's and Qwen3.5's files have it beside the model's other weights (`mtp.`).

transformers leaves these weights out when it loads the model; vLLM and SGLang draft with them.
"""

import re

import torch
from transformers import AutoConfig

from shape.errors import CheckpointError
from shape.networks.config import MTP_LAYER_TYPES, ShapeConfig
from shape.networks.formats.files import Checkpoint, Weights
from shape.networks.formats.layers import shared_options
from shape.networks.formats.targets import TargetFacts

PREFIX = "mtp."
_STEPS = 3  # that vLLM's recipes for these models draft, where one was trained
# What of a language model's configuration its layer does not read.
_NOT_THE_LAYERS = (
    "architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "quantization_config",
    "transformers_version",
)  # fmt: skip
_SCALES, _BLOCK = "_scale_inv", (128, 128)
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def read(checkpoint: Checkpoint, target: TargetFacts) -> tuple[ShapeConfig, Weights]:
    """Ours of a target's folder.

    Raises:
        CheckpointError: no such layer, several, or one of another family.
    """
    if not checkpoint.weights:
        raise CheckpointError(f"it has no weights {PREFIX}*, of an MTP layer; leave drafter out, or train one")
    text = checkpoint.config.get("text_config") or checkpoint.config
    kind = text.get("model_type")
    weights = {name.removeprefix(PREFIX): weight for name, weight in checkpoint.weights.items()}
    block = (checkpoint.config.get("quantization_config") or {}).get("weight_block_size") or _BLOCK
    if kind not in MTP_LAYER_TYPES:
        raise CheckpointError(f"its layers are of model_type {kind!r}; {', '.join(MTP_LAYER_TYPES)} are known")
    if any(name.startswith("layers.1.") for name in weights):
        raise CheckpointError("it has several MTP layers; those with one are known")
    given = {name: value for name, value in text.items() if name not in ("model_type", "layer_types")}
    chosen = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    layers = AutoConfig.for_model(kind, **{**given, **chosen}).to_dict()
    layers = {name: value for name, value in layers.items() if name not in _NOT_THE_LAYERS}
    weights = _with_experts_together(_in_full(weights, *block))
    made = ShapeConfig(
        kind="mtp",
        num_steps=_STEPS,
        **shared_options({}, layers, layers["vocab_size"], weights),
        draft={"depth": _STEPS},
    )
    return made, weights


def _in_full(weights: Weights, rows: int, columns: int) -> Weights:
    """The weights with those in float8 that have a scale for each block in bfloat16, as DeepSeek-V3's and Qwen's do."""
    full = {name: weight for name, weight in weights.items() if not name.endswith(_SCALES)}
    scaled = {name: weights[name + _SCALES] for name in full if name + _SCALES in weights}
    for name, scales in scaled.items():
        each = scales.float().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
        height, width = full[name].shape[-2:]
        full[name] = (full[name].float() * each[..., :height, :width]).bfloat16()
    return full


def _with_experts_together(weights: Weights) -> Weights:
    """The weights with all experts of a layer in one tensor, (E, 2 M, H) and (E, H, M), as transformers 5 has them."""
    together, parts = {}, {}
    for name, weight in weights.items():
        if found := _EXPERT.fullmatch(name):
            parts[found[1], int(found[2]), found[3]] = weight
        else:
            together[name] = weight
    for layer in {layer for layer, *_ in parts}:
        experts = range(sum(each == layer for each, *_ in parts) // 3)
        joined = [torch.cat([parts[layer, number, "gate"], parts[layer, number, "up"]]) for number in experts]
        together[f"{layer}.gate_up_proj"] = torch.stack(joined)
        together[f"{layer}.down_proj"] = torch.stack([parts[layer, number, "down"] for number in experts])
    return together
