"""Forwards over a few tokens of Llama-like targets on a GPU, by a tenth of the kernels (``shape.target.gpu_kernels``).

What ``shape.verification.fused`` is for a CPU: the same families, looked at in the same way. In 16 bits alone, in
which matrix units compute: in float32 a target's forward stays its own. ``shape.verification.probe`` compares both when
a target is loaded.
"""

from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from shape.target.families import is_hooked, is_plain_mlp
from shape.target.inference import on_device
from shape.target.support import Masks
from shape.verification.fused import FusedLayers

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_SMALL = 2048  # states' width below which it is launches that take time, whatever the number of tokens
_ALIGNED = 16  # bytes that weights begin at multiples of, so that they are read by so many at a time


class FusedGpuLayers(FusedLayers):
    """The body of a Llama-like target on a GPU, from token ids to states."""

    most = 64  # for more, products by libraries are faster, as by then it is arithmetic that takes time
    dtypes = (torch.bfloat16, torch.float16)
    device = "cuda"

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if self.weights[0]["weight"].numel() < _SMALL:
            self.most = 256

    @classmethod
    def of(cls, body: Any, config: PretrainedConfig, head: Any = None) -> Self | None:
        return super().of(body, config, head) if find_spec("triton") else None

    @cached_property
    def _kernels(self) -> ModuleType:
        from shape.target import gpu_kernels  # where Triton is

        return gpu_kernels

    def _unchanged(self) -> bool:
        return super()._unchanged() and all(map(self._is_plain, self.layers))

    def _is_plain(self, layer: Any) -> bool:
        """Whether kernels compute what the layer's modules do."""
        mlp, size = layer.parts["mlp"], self.size
        if size < _ALIGNED or size & (size - 1) or not is_plain_mlp(mlp):  # a tile of Triton's is a power of two
            return False
        projections = [layer.attention[name] for name in (*_PROJECTIONS, "o_proj")]
        linears = [*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        biased = [one.bias is not None for one in linears if isinstance(one, nn.Linear)]
        return (
            all(_is_plain_linear(one, self.weights[0]["weight"]) for one in linears)
            and len({*biased[:3]}) == 1  # of queries, keys and values all have one, or none has
            and not any(biased[3:])
        )

    def _renew(self) -> None:
        """Nothing is made of weights."""

    def __call__(
        self, input_ids: Tensor, positions: Tensor, mask: Masks, cache: Any, layers: Sequence[int], logits: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        with on_device(input_ids.device):  # where Triton launches
            parts, (batch, nodes) = self._body._modules, input_ids.shape
            embedded: Tensor = parts["embed_tokens"](input_ids)
            turned = [part.expand(batch, nodes, -1).flatten(0, 1) for part in parts["rotary_emb"](embedded, positions)]
            x = embedded.flatten(0, 1)
            slots, end = cache.slots.next(nodes, x.device), cache.slots.longest + nodes
            wanted = [layer % (len(self.layers) + 1) for layer in layers]
            states = {0: x}
            sums = self._kernels.squares_of(x)
            lengths = {0: cache.slots.lengths}  # behind the first slot that a layer sees
            for number, (layer, held) in enumerate(zip(self.layers, cache.layers, strict=True)):
                own = mask[layer.kind] if isinstance(mask, dict) else mask
                first = 0 if own is None else end - own.shape[-1]
                if first not in lengths:
                    lengths[first] = lengths[0] - first
                x, sums = self._through(layer, x, sums, turned, slots, held, own, lengths[first], end)
                if number + 1 in wanted:
                    states[number + 1] = x
            states[len(self.layers)] = last = parts["norm"](x)
            found = torch.cat([states[layer] for layer in wanted], dim=-1) if len(wanted) > 1 else states[wanted[0]]
            read = None
            if logits and _is_plain_linear(self.head, last) and self.head.bias is None:
                read = self._kernels.linear(last, [self.head.weight])[0].view(batch, nodes, -1)
            return found.view(batch, nodes, -1), read

    def _through(
        self,
        layer: Any,
        x: Tensor,
        sums: Any,
        turned: list[Tensor],
        slots: Tensor,
        held: Any,
        mask: Tensor | None,
        lengths: Tensor,
        end: int,
    ) -> tuple[Tensor, Any]:
        """States behind a layer, (T, H), and the sums of their squares."""
        kernels, attention, mlp = self._kernels, layer.attention, layer.parts["mlp"]
        first, second = layer.parts["input_layernorm"], layer.parts["post_attention_layernorm"]
        projections = [attention[name] for name in _PROJECTIONS]
        biases = None if projections[0].bias is None else [one.bias for one in projections]
        weights = [one.weight for one in projections]
        states, _ = kernels.linear(x, weights, biases, (first.weight, first.variance_epsilon, sums))
        norms = None
        if "q_norm" in attention:
            query, key = attention["q_norm"], attention["k_norm"]
            norms = query.weight, key.weight, query.variance_epsilon
        kernels.turn(states, turned, slots, held.keys, held.values, self.heads, norms)
        seen = kernels.attend(states, held.keys, held.values, mask, lengths, end, self.heads, self.scale)
        x, sums = kernels.linear(seen, [attention["o_proj"].weight], residual=x)
        norm = second.weight, second.variance_epsilon, sums
        active, _ = kernels.linear(x, [mlp.gate_proj.weight, mlp.up_proj.weight], norm=norm, gated=True)
        return kernels.linear(active, [mlp.down_proj.weight], residual=x)


def _is_plain_linear(module: Any, like: Tensor) -> bool:
    """Whether it is what torch has, with a weight of the same dtype and on the same device, as kernels read it."""
    if type(module) is not nn.Linear or "forward" in vars(module) or is_hooked(module):
        return False
    weight = module.weight
    return (
        (weight.dtype, weight.device) == (like.dtype, like.device)
        and weight.is_contiguous()
        and weight.data_ptr() % _ALIGNED == 0
        and weight.shape[1] * weight.itemsize % _ALIGNED == 0
    )
