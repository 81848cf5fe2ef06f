"""Weights in the layout of a CPU's matrix kernels, made once instead of at every forward.

oneDNN multiplies by matrices in blocks. Where a weight lies in rows, as in every checkpoint, a product with few tokens
spends most of its time on bringing the weight into blocks (bfloat16), or goes to kernels made for many tokens
(float32): a forward over the dozen nodes of a tree then takes up to three times as long as one over a single token.
With weights in blocks it takes little longer, and that is what speculation lives on. It costs a second copy of the
weights in memory. ``python eval/prepack.py`` measures both on a machine.
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

_EXPECTED_TOKENS = 16  # for which the layout is chosen; measured to be as good for one and for hundreds
_SHARE = 0.5  # of the free memory that copies may take where nobody asked for them


class PrepackedForward:
    """Takes the place of a linear layer's ``forward``; module, weight and name stay the owner's.

    Where the copy does not serve (gradients, autocast, other devices and dtypes, compilation) the layer does what it
    always does. The copy is made at the first call, and again where the weight has changed since.

    Args:
        layer: nn.Linear, or transformers' Conv1D, which has its weight transposed.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._made_of: tuple[Tensor, int] | None = None  # the weight as it was, which keeps its place in memory taken
        self._blocks: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        weight = self._layer.weight
        elsewhere = torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu")
        if elsewhere or not x.is_cpu or x.dtype != weight.dtype:
            return self._stock(x)
        blocks = self._blocks if self._is_made_of(weight) else self._make(weight)
        if blocks is None:
            return self._stock(x)
        return torch.ops.mkldnn._linear_pointwise.default(x, blocks, self._layer.bias, "none", [], "")

    def _stock(self, x: Tensor) -> Tensor:
        return type(self._layer).forward(self._layer, x)

    def _is_made_of(self, weight: Tensor) -> bool:
        if self._made_of is None:
            return False
        seen, version = self._made_of
        return seen.data_ptr() == weight.data_ptr() and version == weight._version

    def _make(self, weight: Tensor) -> Tensor | None:
        """None where the weight has changed to a dtype that is not multiplied in."""
        found = weight.detach()
        self._made_of, self._blocks = (found, weight._version), None
        if multiplies(weight.dtype):
            rows = found.T.contiguous() if isinstance(self._layer, Conv1D) else found
            self._blocks = torch.ops.mkldnn._reorder_linear_weight.default(rows, _EXPECTED_TOKENS)
        return self._blocks

    def __deepcopy__(self, memo: dict[int, Any]) -> "PrepackedForward":
        copied = PrepackedForward(deepcopy(self._layer, memo))
        copied._made_of, copied._blocks = self._made_of, self._blocks  # serve where the weight is shared
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return PrepackedForward, (self._layer,)


def prepack(model: nn.Module, wanted: bool | None = None) -> bool:
    """Let a model's linear layers use prepacked copies of their weights on the CPU, under ``torch.no_grad``.

    Args:
        wanted: None stands for yes where half of the free memory is enough for the copies; False changes nothing.

    Returns:
        Whether there is a layer that does now.
    """
    layers = [] if wanted is False else list(_layers(model))
    if wanted is None and sum(layer.weight.nbytes for layer in layers) > _SHARE * psutil.virtual_memory().available:
        return False
    for layer in layers:
        layer.forward = PrepackedForward(layer)
    return bool(layers)


def _layers(model: nn.Module) -> Iterator[Any]:
    """Plain linear layers on the CPU in a dtype that is multiplied in; nobody else's ``forward`` is replaced."""
    for module in model.modules():
        if type(module) not in (nn.Linear, Conv1D) or "forward" in vars(module):
            continue
        weight: Any = module.weight
        plain = type(weight) is nn.Parameter and type(weight.data) is Tensor and not weight.is_inference()
        if plain and weight.device.type == "cpu" and multiplies(weight.dtype):
            yield module


def multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN is there and multiplies matrices of this dtype on this machine."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype == torch.float32


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A layer of given weights, (out, in) and (out,), that are not copied and take no gradient."""
    outputs, inputs = weight.shape
    made = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made
