"""How large a target is: counted from its configuration alone, or from the loaded model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from shape.errors import UnsupportedTarget
from shape.target.loading import auto_class, first_line

# Of a weight, where the name of a method says it (with its scale), or that of its weights (optimum-quanto).
_BITS = {"mxfp4": 4.25, "fp8": 8.0, "fbgemm_fp8": 8.0, "int2": 2.0, "int4": 4.0, "int8": 8.0, "float8": 8.0}


@dataclass(frozen=True)
class Size:
    """Of a target.

    Attributes:
        parameters: all of them.
        active: parameters that one token's forward multiplies with, without the output embedding.
        hidden_size: width of a state.
        attention: operations per token and token before it.
        cache: bytes of a token's keys and values in bfloat16, as if no layer had a sliding window; 0 is unknown.
        vocab_size: tokens of the vocabulary.
        positions: longest text; None has no limit.
        config: of the text model, where the size was counted from one.
        bits: of a weight outside of embeddings, where the checkpoint is quantised and says so.
    """

    parameters: float
    active: float
    hidden_size: int
    attention: float = 0.0
    vocab_size: int = 0
    positions: int | None = None
    config: PretrainedConfig | None = None
    cache: float = 0.0
    bits: float | None = None

    @property
    def read(self) -> float:
        """Weights that a step of one token reads, the output embedding among them."""
        return self.active + self.hidden_size * self.vocab_size


def size_of(target: PretrainedConfig | PreTrainedModel, trust_remote_code: bool = False) -> Size:
    """Of a model, or from a configuration alone: the model is then made without memory for its weights.

    Raises:
        UnsupportedTarget: it is no decoder-only language model.
    """
    if isinstance(target, PreTrainedModel):
        model = target
    else:
        try:
            with torch.device("meta"):
                model = auto_class(target).from_config(target, trust_remote_code=trust_remote_code)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):  # of its attention, say
                raise UnsupportedTarget(f"the target cannot be made as asked for ({first_line(error)})") from error
            raise UnsupportedTarget(  # transformers lists all that it knows
                f"the target's configuration, of model_type {target.model_type}, is not that of a decoder-only "
                "language model; give one of a causal LM"
            ) from error
    text = model.config.get_text_config()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    outside = {id(weight): weight.numel() for each in (embedding, head) for weight in each.parameters()}
    parameters = sum(weight.numel() for weight in model.parameters())
    experts = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
    # A token is sent to a few of a mixture's experts.
    count = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 1
    used = experts * (getattr(text, "num_experts_per_tok", None) or count) / count
    heads = getattr(text, "num_attention_heads", None) or 0  # none where all layers are recurrent
    head_size = getattr(text, "head_dim", None) or text.hidden_size // max(heads, 1)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    attending = sum("attention" in kind and kind != "linear_attention" for kind in kinds)
    return Size(
        parameters=parameters,
        active=parameters - sum(outside.values()) - experts + used,
        hidden_size=text.hidden_size,
        attention=4.0 * heads * head_size * attending,
        vocab_size=text.vocab_size,
        positions=longest_text(text),
        config=text,
        cache=4.0 * (getattr(text, "num_key_value_heads", None) or heads) * head_size * attending,
        bits=bits_of(getattr(model.config, "quantization_config", None)),
    )


def bits_of(method: Any) -> float | None:
    """Of a weight, by a configuration's `quantization_config`; None where there is none, or it does not say."""
    said: Mapping[str, Any] = method if isinstance(method, Mapping) else method.to_dict() if method else {}
    for bits in (4, 8):
        if said.get(f"load_in_{bits}bit"):
            return float(bits)
    return float(said["bits"]) if said.get("bits") else _BITS.get(str(said.get("weights") or said.get("quant_method")))


def longest_text(config: PretrainedConfig) -> int | None:
    """Positions of a text model; None has no limit. YaRN's are its factor times the original ones: model cards have it
    added to a configuration whose own number stays.
    """
    most: int | None = getattr(config, "max_position_embeddings", getattr(config, "max_seq_len", None))
    rope = getattr(config, "rope_parameters", None) or {}
    if most is None or rope.get("rope_type") != "yarn":
        return most
    return max(most, int((rope.get("factor") or 1) * (rope.get("original_max_position_embeddings") or most)))
