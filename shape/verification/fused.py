"""Forwards over a few tokens of Llama-like targets on a CPU, in some twenty calls a layer instead of sixty.

A small target's forward over one token or a tree is bound by the number of operations and not by what they compute:
norms, rotary embedding and cache take five to ten of torch's each, of some microseconds. Here they are compiled loops.
The matrix products and the activation stay those of the target's own modules, prepacked, quantised or adapted, and
attention stays torch's. Roundings are where transformers has them: in bfloat16 most states are the same bit for bit, as
sums alone are added in another order.

Which targets are served is a list of families whose code was read. ``shape.verification.probe`` compares a served
target's states with those of its own forward when it is loaded, and turns this off where they differ.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from shape.loops import compiled
from shape.target.products import numbers, read, rounded, stored
from shape.verification.attention import repeated

MOST = 512  # tokens of all sequences together times torch's threads, of which these loops have one
_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
_DTYPES = (torch.bfloat16, torch.float32)


class _Layer(NamedTuple):
    """Modules by name: what takes a module's place is found there."""

    parts: dict[str, Any]
    attention: dict[str, Any]
    kind: str


class FusedLayers:
    """The body of a Llama-like target, from token ids to states."""

    def __init__(self, body: Any, config: PretrainedConfig) -> None:
        self._body, self._config = body, config
        attention = body.layers[0].self_attn
        self._scale, self._size = attention.scaling, attention.head_dim
        self._heads, self._groups = config.num_attention_heads, attention.num_key_value_groups
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(body.layers)
        self._layers = [
            _Layer(block._modules, block.self_attn._modules, kind)
            for block, kind in zip(body.layers, kinds, strict=True)
        ]
        self._kinds = set(kinds)
        # What is not called, and must be as it was: whose place is taken, who has hooks or a forward of its own.
        seen = [(body._modules, name) for name in ("layers", "norm")]
        seen += [(body.layers._modules, name) for name in body.layers._modules]
        for layer in self._layers:
            seen += [(layer.parts, name) for name in layer.parts if name != "mlp"]
            seen += [(layer.attention, name) for name in ("q_norm", "k_norm") if name in layer.attention]
        self._places = [(parts, name, parts[name]) for parts, name in seen]
        modules = [body, *(module for _, _, module in self._places)]
        self._hooks = [own for one in modules for own in (one._forward_hooks, one._forward_pre_hooks)]
        self._attributes = [vars(module) for module in modules]

    @classmethod
    def of(cls, body: Any, config: PretrainedConfig) -> Self | None:
        """None for targets of other families."""
        if not any(_is_of(family, body) for family in _FAMILIES) or len(body.layers) != config.num_hidden_layers:
            return None
        made = cls(body, config)
        return made if made._unchanged() else None

    def serves(self, input_ids: Tensor, mask: Tensor | dict[str, Tensor] | None, cache: Any) -> bool:
        """Whether these tokens can go through: few, behind a cache of ours, and seen as one token or under a mask."""
        dtype = self._body._modules["norm"].weight.dtype
        return (
            input_ids.numel() * torch.get_num_threads() <= MOST
            and dtype in _DTYPES
            and input_ids.device.type == "cpu"
            and cache is not None
            and all(getattr(held, "in_place", False) and held.keys.dtype == dtype for held in cache.layers)
            and (mask is not None or input_ids.shape[1] == 1)
            and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))
            and "sdpa" in self._config._attn_implementation
            and self._unchanged()
        )

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor | dict[str, Tensor] | None,
        cache: Any,
        layers: Sequence[int],
    ) -> Tensor:
        """As ``shape.verification.forward.node_states``.

        Args:
            mask: (B, 1, N, K) in the target's dtype, one for all layers or one for each kind.
            cache: a ``shape.verification.cache.KVCache``.
        """
        parts = self._body._modules
        x: Tensor = parts["embed_tokens"](input_ids)
        y, norms = torch.empty_like(x), [*(layer.parts["input_layernorm"] for layer in self._layers), parts["norm"]]
        found = {0: x.clone()} if 0 in layers else {}
        cos, sin = (_rows(one.expand(*x.shape[:2], -1)) for one in parts["rotary_emb"](x, position_ids))
        slots, end = cache.slots.next(x.shape[1], x.device).numpy(), cache.slots.longest + x.shape[1]
        masks = {kind: self._for_groups(mask[kind] if isinstance(mask, dict) else mask) for kind in self._kinds}
        states, normed = _rows(x), _rows(y)
        _norm(states, _weight(norms[0]), norms[0].variance_epsilon, normed)
        for number, layer in enumerate(self._layers):
            seen = self._attend(layer.attention, y, (cos, sin), cache.layers[number], slots, end, masks[layer.kind])
            _add(states, layer.attention["o_proj"](seen), layer.parts["post_attention_layernorm"], normed)
            _add(states, layer.parts["mlp"](y), norms[number + 1], normed)
            if number + 1 in layers:
                found[number + 1] = x.clone()
        found[len(self._layers)] = found[-1] = y  # transformers has the last block's behind the norm
        return y if tuple(layers) == (-1,) else torch.cat([found[layer] for layer in layers], dim=-1)

    def _attend(
        self,
        attention: dict[str, Any],
        y: Tensor,
        turn: tuple[np.ndarray, np.ndarray],
        held: Any,
        slots: np.ndarray,
        end: int,
        mask: Tensor | None,
    ) -> Tensor:
        """(B, N, H) -> (B, N, heads D); queries that share a key lie side by side (``shape.verification.attention``).

        Args:
            turn: cosines and sines of the tokens' positions, (B N, D). slots: where their keys and values go, (B N,).
            held: the layer's keys and values, of which attention sees the first `end`.
        """
        batch, nodes, _ = y.shape
        q, k, v = (attention[name](y).contiguous() for name in ("q_proj", "k_proj", "v_proj"))
        for name, states in (("q_norm", q), ("k_norm", k)):
            if (norm := attention.get(name)) is not None:
                heads = _rows(states, self._size)
                _norm(heads, _weight(norm), norm.variance_epsilon, heads)
        query = y.new_empty(batch, self._heads, nodes, self._size)
        keys, values = held.keys, held.values
        key_rows, value_rows = (_rows(one.transpose(1, 2), self._size) for one in (keys, values))
        _rotate(_rows(q), _rows(k), _rows(v), turn, _rows(query), key_rows, value_rows, slots, nodes)
        found = F.scaled_dot_product_attention(
            query.view(batch, keys.shape[1], self._groups * nodes, self._size),
            keys[:, :, :end],
            values[:, :, :end],
            attn_mask=mask,
            scale=self._scale,
        )
        return found.view(query.shape).transpose(1, 2).reshape(batch, nodes, self._heads * self._size)

    def _for_groups(self, mask: Tensor | None) -> Tensor | None:
        return mask if mask is None or self._groups == 1 else repeated(mask, self._groups)

    def _unchanged(self) -> bool:
        return (
            all(parts.get(name) is module for parts, name, module in self._places)
            and not any(self._hooks)
            and not any("forward" in own for own in self._attributes)
        )


def _is_of(family: str, body: Any) -> bool:
    def known(module: Any, part: str) -> bool:
        place = f"transformers.models.{family.lower()}.modeling_{family.lower()}"
        return (type(module).__module__, type(module).__name__) == (place, family + part)

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


def _rows(x: Tensor, width: int | None = None) -> np.ndarray:
    """A tensor's ``numbers``, (R, width) or (R, its last dimension): its own memory where it is contiguous."""
    return numbers(x.contiguous()).reshape(-1, width or x.shape[-1])


def _weight(norm: Any) -> np.ndarray:
    return numbers(norm.weight)[None]


def _add(x: np.ndarray, added: Tensor, norm: Any, y: np.ndarray) -> None:
    _add_and_norm(x, _rows(added), _weight(norm), norm.variance_epsilon, y)


def _norm_loop(x: np.ndarray, weight: np.ndarray, epsilon: float, y: np.ndarray) -> None:
    """y = RMS norm of every row of x, (R, K) both, which may be the same; weight (1, K)."""
    for row in range(x.shape[0]):
        square = np.float32(0)
        for k in range(x.shape[1]):
            square += read(x, row, k) * read(x, row, k)
        scale = np.float32(1) / np.sqrt(square / np.float32(x.shape[1]) + np.float32(epsilon))
        for k in range(x.shape[1]):
            y[row, k] = stored(y, rounded(y, read(x, row, k) * scale) * read(weight, 0, k))


_norm = compiled(_norm_loop, "reassoc")  # sums in lanes are in another order


@compiled
def _add_and_norm(x: np.ndarray, added: np.ndarray, weight: np.ndarray, epsilon: float, y: np.ndarray) -> None:
    """x += added, in place, and y = norm of x."""
    for row in range(x.shape[0]):
        for k in range(x.shape[1]):
            x[row, k] = stored(x, read(x, row, k) + read(added, row, k))
    _norm(x, weight, epsilon, y)


@compiled
def _turn(x: np.ndarray, row: int, first: int, cos: np.ndarray, sin: np.ndarray, y: np.ndarray, place: int) -> None:
    """Row `place` of y, (., D) = head of x's row that begins at `first`, turned by cos and sin, (R, D)."""
    half = cos.shape[1] // 2
    for i in range(half):
        here, there = read(x, row, first + i), read(x, row, first + half + i)
        y[place, i] = stored(y, rounded(y, here * read(cos, row, i)) - rounded(y, there * read(sin, row, i)))
        y[place, half + i] = stored(
            y, rounded(y, there * read(cos, row, half + i)) + rounded(y, here * read(sin, row, half + i))
        )


@compiled
def _rotate(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    turn: tuple[np.ndarray, np.ndarray],
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    slots: np.ndarray,
    nodes: int,
) -> None:
    """Rotary embedding of projected tokens; keys and values go to the cache.

    Args:
        q: (R, H D). k, v: (R, H' D). turn: cosines and sines, (R, D) both.
        query: (B H N, D), written. keys, values: the cache's rows, (B S H', D), written.
        slots: (R,) int64 of each token. nodes: N tokens per sequence.
    """
    cos, sin = turn
    size = cos.shape[1]
    heads, shared = q.shape[1] // size, k.shape[1] // size
    for row in range(len(q)):
        first = row // nodes * heads * nodes + row % nodes
        for head in range(heads):
            _turn(q, row, head * size, cos, sin, query, first + head * nodes)
        for head in range(shared):
            place = slots[row] * shared + head
            _turn(k, row, head * size, cos, sin, keys, place)
            for i in range(size):
                values[place, i] = v[row, head * size + i]
