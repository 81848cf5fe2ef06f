"""Families of targets whose code was read, and whether a model's modules are as transformers has them there."""

from typing import Any

from transformers.activations import SiLUActivation

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")


def is_plain_mlp(mlp: Any) -> bool:
    """Whether it is down(silu(gate(x)) up(x)) of its layers, and nothing else."""
    own = any(_is(mlp, family, "MLP") for family in _FAMILIES) and "forward" not in vars(mlp)
    return own and not is_hooked(mlp) and type(mlp.act_fn) is SiLUActivation


def is_hooked(module: Any) -> bool:
    return any(foreign(own) for own in (module._forward_hooks, module._forward_pre_hooks) if own)


def foreign(hooks: dict[int, Any]) -> list[int]:
    """Numbers of the hooks but for transformers' own, which do nothing unless the model itself is asked for states."""
    own = "transformers.utils.output_capturing"
    return [number for number, hook in hooks.items() if getattr(hook, "__module__", "") != own]


def _is(module: Any, family: str, part: str) -> bool:
    """Whether a module is of a family's class, where transformers has that."""
    where = f"transformers.models.{family.lower()}.modeling_{family.lower()}"
    return (type(module).__module__, type(module).__name__) == (where, family + part)


def is_known(body: Any) -> bool:
    """Whether a target's body is one of a family, by its own class and those of its blocks."""
    family = next((name for name in _FAMILIES if _is(body, name, "Model")), None)
    if family is None or not len(body.layers):
        return False
    return _is(body.norm, family, "RMSNorm") and all(
        _is(block, family, "DecoderLayer")
        and _is(block.self_attn, family, "Attention")
        and _is(block.input_layernorm, family, "RMSNorm")
        and _is(block.post_attention_layernorm, family, "RMSNorm")
        for block in body.layers
    )
