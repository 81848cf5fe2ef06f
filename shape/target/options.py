"""The options by which every command reads a target. Nothing heavy is imported, so that help is quick.

They have no methods: jsonargparse would take public ones for commands.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(kw_only=True)
class TargetOptions:
    """How a target is read, in the words of transformers' `from_pretrained`.

    Attributes:
        revision: branch, tag or commit of the target's hub repository.
        token: for hub repositories that are not public; default: the one that you are logged in with, or HF_TOKEN.
        trust_remote_code: run code that comes with the target.
        attn_implementation: the target's attention, for example sdpa, eager or flash_attention_2.
        quantization_config: how the target's weights are quantised when it is loaded, for example
            '{quant_method: bitsandbytes, load_in_4bit: true}'.
        quantize: int8 or int4, on a CPU: the weights of the target in so many bits, for a few tokens' kernels; another
            model than the unquantised one, the same for plain and drafted decoding.
        target_options: whatever else transformers takes, for example '{variant: fp16, subfolder: model}'.
    """

    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    quantization_config: dict[str, Any] | None = None
    quantize: Literal["int8", "int4"] | None = None
    target_options: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class PlacedOptions(TargetOptions):
    """How a target is read, and where it is put.

    Attributes:
        device: where the target is put, for example cpu or cuda:1; default: on a GPU where there is one.
        device_map: the same in transformers' words, to spread it: auto, or in YAML a device for each part.
    """

    device: str | None = None
    device_map: str | dict[str, str | int] | None = None


@dataclass(kw_only=True)
class PairOptions(PlacedOptions):
    """How a target and its predictor are read, and where the target is put.

    Attributes:
        predictor_revision: branch, tag or commit of the predictor's hub repository.
    """

    predictor_revision: str | None = None


@dataclass(kw_only=True)
class AnsweringOptions(PairOptions):
    """The same, of commands that let the target answer.

    Attributes:
        backend: what computes the target: torch, or openvino on its device CPU, GPU or NPU.
        dtype: of the target, for example float32 or bfloat16; default: its checkpoint's.
        chat_template_kwargs: given to the target's chat template, for example {"enable_thinking": false}.
    """

    backend: Literal["torch", "openvino"] = "torch"
    dtype: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
