"""Decoder layers of transformers' own classes, with attention to known positions and to a node's own path.

What transformers has stays as it is: projections, norms, feed-forward part, rotary frequencies, and the names of the
weights, which are those of published drafters. Only the attention itself is ours: nodes of a tree, or of many roots in
training, see what is remembered of known positions and what their own path or block has left.
"""

import math
from functools import cache
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from shape.networks.base import Predictor
from shape.networks.layers import Memory, attend, attend_in_order, rotate

# By model type: transformers' package, and how its classes begin, the rotary embedding's last.
_NAMES = {
    "llama": ("llama", "Llama", "Llama"),
    "qwen3": ("qwen3", "Qwen3", "Qwen3"),
    "qwen3_next": ("qwen3_next", "Qwen3Next", "Qwen3Next"),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5", "Qwen3_5Text"),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5Moe", "Qwen3_5MoeText"),
}


@cache
def layer_class(model_type: str, part: Literal["DecoderLayer", "RMSNorm", "RotaryEmbedding"]) -> Any:
    """A part's class, of a model type (`shape.networks.config.MTP_LAYER_TYPES`)."""
    package, name, rotary = _NAMES[model_type]
    module = import_module(f"transformers.models.{package}.modeling_{package}")
    return getattr(module, (rotary if part == "RotaryEmbedding" else name) + part)


SCALINGS = ("default", "linear", "llama3", "yarn")


def layers_like(target: PreTrainedConfig, size: int | None = None) -> dict[str, Any]:
    """`ShapeConfig.transformer_layer_config` with a target's geometry: heads, their size and grouping, width of the
    feed-forward part, epsilon, and rotary parameters as far as they do not change with the text. The model type is the
    kind's: published drafters, and the engines that load them, have its layers whatever the target is.

    Args:
        size: width of the layers; another one than the target's has as many heads, of the same size, as fit in it.
    """
    ropes = getattr(target, "rope_parameters", None) or {}
    rope = ropes.get("full_attention") or ropes  # of targets with several kinds of layers
    rope = {name: value for name, value in rope.items() if name not in ("partial_rotary_factor", "mrope_section")}
    if rope.get("rope_type", "default") not in SCALINGS:
        rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
    found: dict[str, Any] = {"hidden_act": "silu", "rope_parameters": rope if "rope_theta" in rope else None}
    names = (
        "hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "rms_norm_eps", "max_position_embeddings",
    )  # fmt: skip
    found |= {name: getattr(target, name, None) for name in names}
    if isinstance(widths := found["intermediate_size"], list | tuple):  # Gemma 3n's has one for each layer
        found["intermediate_size"] = max(widths)
    if size is not None and size != target.hidden_size:
        each = found["head_dim"] or target.hidden_size // target.num_attention_heads
        heads = max(size // each, 1)
        groups = math.gcd(heads, found["num_key_value_heads"] or heads)
        found |= {"hidden_size": size, "head_dim": each, "num_attention_heads": heads, "num_key_value_heads": groups}
        if inner := found["intermediate_size"]:  # GPT-2's configuration has none
            found["intermediate_size"] = round(inner * size / target.hidden_size)
    return {name: value for name, value in found.items() if value is not None}


class Rotary:
    """The rotary embedding of a model type, with its scaling. It is no module: neither loading nor casting a model may
    change it.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        with torch.device("cpu"):  # models are made on the device "meta" when they are loaded
            module = layer_class(config.model_type, "RotaryEmbedding")(config)
        self.scaling: float = module.attention_scaling
        self._frequencies: dict[torch.device, Tensor] = {torch.device("cpu"): module.inv_freq}

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Cosines and sines, (...) -> (..., 2, D / 2)."""
        device = positions.device
        if device not in self._frequencies:
            self._frequencies[device] = self._frequencies[torch.device("cpu")].to(device)
        angles = positions.unsqueeze(-1).float() * self._frequencies[device]
        return (torch.stack([angles.cos(), angles.sin()], dim=-2) * self.scaling).to(dtype)


def norm_of(config: PreTrainedConfig, size: int) -> nn.Module:
    """The model type's RMS norm, of any width."""
    return layer_class(config.model_type, "RMSNorm")(size, eps=config.rms_norm_eps)


class DraftAttention(nn.Module):
    """The parts of a model type's attention, and our own attention on them: grouped heads, biases, norms of queries and
    keys, and a gate on what is found (made beside the queries), are the type's.

    Args:
        stock: transformers' attention, whose parts become this one's.
        config: of the layer.
        in_size: width of what queries, keys and values are made from.
    """

    def __init__(self, stock: Any, config: PreTrainedConfig, in_size: int) -> None:
        super().__init__()
        self.head_dim: int = stock.head_dim
        self.scaling = self.head_dim**-0.5
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        bias = config.attention_bias
        queries: int = stock.q_proj.out_features
        self.gated = queries == 2 * self.heads * self.head_dim
        self.q_proj = nn.Linear(in_size, queries, bias=bias)
        self.k_proj = nn.Linear(in_size, self.key_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(in_size, self.key_heads * self.head_dim, bias=bias)
        self.o_proj: nn.Module = stock.o_proj
        self.q_norm: nn.Module | None = getattr(stock, "q_norm", None)
        self.k_norm: nn.Module | None = getattr(stock, "k_norm", None)

    def remember(self, states: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, in_size), rotary (B, T or 1, 2, D / 2) -> keys and values (B, G, T, D)."""
        keys = self._split(self.k_proj(states))
        keys = keys if self.k_norm is None else self.k_norm(keys)
        return rotate(keys.transpose(1, 2), rotary), self._split(self.v_proj(states)).transpose(1, 2)

    def forward(
        self,
        states: Tensor,
        rotary: Tensor,
        memory: Memory,
        visible: Tensor | None,
        own: Memory | None = None,
        among: Tensor | None = None,
    ) -> Tensor:
        """(B, M, in_size) -> (B, M, H); the other arguments as of `shape.networks.layers.attend`."""
        query, gate = self._query(states, rotary)
        return self._out(attend(query, memory, visible, own, among), gate)

    def in_order(
        self, states: Tensor, rotary: Tensor, new: Memory, past: Memory | None, lengths: Tensor, window: int | None
    ) -> Tensor:
        """(B, N, in_size) -> (B, N, H); the other arguments as of `shape.networks.layers.attend_in_order`."""
        query, gate = self._query(states, rotary)
        return self._out(attend_in_order(query, new, past, lengths, window), gate)

    def _query(self, states: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries (B, heads, N, D), and the gate (B, N, heads, D) where there is one."""
        query, gate = self.q_proj(states), None
        if self.gated:
            query, gate = query.unflatten(-1, (self.heads, -1)).chunk(2, dim=-1)
        else:
            query = self._split(query)
        query = query if self.q_norm is None else self.q_norm(query)
        return rotate(query.transpose(1, 2), rotary), gate

    def _out(self, found: Tensor, gate: Tensor | None) -> Tensor:
        found = found.transpose(1, 2)
        return self.o_proj((found if gate is None else found * gate.sigmoid()).flatten(-2))

    def _split(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.head_dim))


class DraftLayer(nn.Module):
    """The parts of a model type's decoder layer, its attention ours.

    Args:
        config: of the layer. in_size: width of what attention reads; None is the layer's own.
    """

    def __init__(self, config: PreTrainedConfig, in_size: int | None = None) -> None:
        super().__init__()
        stock = layer_class(config.model_type, "DecoderLayer")(config, 0)
        self.self_attn = DraftAttention(stock.self_attn, config, in_size or config.hidden_size)
        self.mlp: nn.Module = stock.mlp
        self.input_layernorm: nn.Module = stock.input_layernorm
        self.post_attention_layernorm: nn.Module = stock.post_attention_layernorm

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(..., in_size) -> what attention reads, of that width, and the residual, (..., H)."""
        return self.input_layernorm(x), x

    def behind(self, residual: Tensor, found: Tensor) -> Tensor:
        """The layer's output, (..., H), of its residual and of what attention found."""
        x = residual + found
        return x + self.mlp(self.post_attention_layernorm(x))

    def over_blocks(
        self, x: Tensor, rotary: Tensor, memory: Memory, visible: Tensor | None, among: Tensor | None = None
    ) -> Tensor:
        """The layer's output for blocks, (B, P, S, in_size) -> (B, P, S, H); other arguments as of `attended`."""
        seen, residual = self.inputs(x)
        return self.behind(residual, self.attended(seen, rotary, memory, visible, among))

    def attended(
        self, seen: Tensor, rotary: Tensor, memory: Memory, visible: Tensor | None, among: Tensor | None
    ) -> Tensor:
        """Attention to known positions and, in a block of S places, to the places that `among`, (S, S) bool, lets each
        see: all without.

        (B, P, S, in_size), rotary (B, P, S, 2, D / 2), known keys and values (B, G, T, D), (B, P, T) -> (B, P, S, H).
        """
        steps, seen, rotary = seen.shape[2], seen.flatten(1, 2), rotary.flatten(1, 2)
        keys, values = self.self_attn.remember(seen, rotary)
        own = keys.unflatten(2, (-1, steps)), values.unflatten(2, (-1, steps))
        return self.self_attn(seen, rotary, memory, visible, own, among).unflatten(1, (-1, steps))


class DecoderPredictor(Predictor):
    """Base of the networks that are built of decoder layers.

    Attributes:
        layers: ``DraftLayer``s.
    """

    layers: nn.ModuleList
    _rotary: Rotary

    @property
    def memory_shapes(self) -> list[tuple[int, int]]:
        return [(layer.self_attn.key_heads, layer.self_attn.head_dim) for layer in self._layers()]

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        return self._rotary(positions, dtype)

    def _layers(self) -> list[DraftLayer]:
        return list(self.layers)  # type: ignore[arg-type]
