"""Families of targets whose code was read, and whether a model's modules are as transformers has them there."""

from typing import Any

from transformers.activations import SiLUActivation

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")


def is_plain_mlp(mlp: Any) -> bool:
    """Whether it is down(silu(gate(x)) up(x)) of its layers, and nothing else."""
    names = (_module(family, "MLP") for family in _FAMILIES)
    own = (type(mlp).__module__, type(mlp).__name__) in names and "forward" not in vars(mlp)
    return own and not is_hooked(mlp) and type(mlp.act_fn) is SiLUActivation


def is_hooked(module: Any) -> bool:
    return any(has_foreign_hooks(own) for own in (module._forward_hooks, module._forward_pre_hooks) if own)


def has_foreign_hooks(hooks: dict[int, Any]) -> bool:
    """Whether there is any but transformers' own, which do nothing unless the model itself is asked for states."""
    return bool(foreign(hooks))


def foreign(hooks: dict[int, Any]) -> list[int]:
    """Numbers of the hooks that are not transformers' own."""
    own = "transformers.utils.output_capturing"
    return [number for number, hook in hooks.items() if getattr(hook, "__module__", "") != own]


def _module(family: str, part: str) -> tuple[str, str]:
    """Where transformers has a family's class, and its name."""
    return f"transformers.models.{family.lower()}.modeling_{family.lower()}", family + part


def is_known(body: Any) -> bool:
    """Whether a target's body is one of a family, by its own class and those of its blocks."""
    return any(_is_of(family, body) for family in _FAMILIES)


def _is_of(family: str, body: Any) -> bool:
    def known(module: Any, part: str) -> bool:
        return (type(module).__module__, type(module).__name__) == _module(family, part)

    def block_is(block: Any) -> bool:
        norms = (block.input_layernorm, block.post_attention_layernorm)
        own = known(block, "DecoderLayer") and known(block.self_attn, "Attention")
        return own and all(known(norm, "RMSNorm") for norm in norms)

    return (
        known(body, "Model")
        and known(body.norm, "RMSNorm")
        and len(body.layers) > 0
        and all(map(block_is, body.layers))
    )
