"""Weights in the layout of a CPU's matrix kernels, made once instead of at every forward.

Where a weight lies in rows, as in every checkpoint, a product with few tokens spends most of its time on bringing the
weight into blocks (bfloat16), or goes to kernels made for many tokens (float32): a forward over the dozen nodes of a
tree then takes up to three times as long as one over a single token. With weights in blocks it takes little longer, and
that is what speculation lives on. It costs a second copy of the weights in memory. ``python -m eval.forwards``
measures both on a machine.

Blocks are those of our own kernels (``shape.target.floats``), which for the tokens of a tree were as fast as oneDNN's
or faster wherever both were measured (two cores with AVX-512, and with AMX); else oneDNN's.
"""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from transformers.pytorch_utils import Conv1D

from shape.files import human_bytes
from shape.target import floats
from shape.target.inference import state_of
from shape.target.loading import dtype_name

_EXPECTED_TOKENS = 16  # for which the layout is chosen; measured to be as good for one and for hundreds
_SHARE = 0.5  # of the free memory that copies may take where nobody asked for them
_SEEN = 16  # numbers of a weight that are looked at

if torch.backends.mkldnn.is_available():
    _BLOCKS, _PRODUCT = torch.ops.mkldnn._reorder_linear_weight.default, torch.ops.mkldnn._linear_pointwise.default


class PrepackedForward:
    """Takes the place of a linear layer's ``forward``; module, weight and name stay the owner's.

    Where the copy does not serve (gradients, autocast, other devices and dtypes, compilation) the layer does what it
    always does. The copy is made at the first call, and again where the weight has changed since; writing into
    ``weight.data`` in place is the one change that PyTorch does not count (see ``count_unseen``).

    Args:
        layer: nn.Linear, or transformers' Conv1D, which has its weight transposed.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._made_of: tuple[int, ...] | None = None
        self._kept: tuple[Tensor | None, ...] = ()  # as they were, so that no others can come to lie where they lay
        self._blocks: Tensor | None = None
        self._packed: floats.Packed | None = None
        self._seen: tuple[Tensor, Tensor] | None = None  # some of the weight's numbers, and as they were

    def __call__(self, x: Tensor) -> Tensor:
        parameters = self._layer._parameters  # without a module's search for names, which every call would pay for
        weight = parameters.get("weight")  # which a parametrisation takes away
        elsewhere = torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu")
        if elsewhere or not x.is_cpu or weight is None or x.dtype != weight.dtype:
            return self._stock(x)
        if (packed := self.packed()) is not None:
            return floats.product(x, packed)
        if self._blocks is None:
            return self._stock(x)
        return _PRODUCT(x, self._blocks, parameters["bias"], "none", (), "")

    def packed(self) -> floats.Packed | None:
        """The weight in blocks of our own kernels, as it is now, where those serve."""
        weight, bias = self._layer._parameters.get("weight"), self._layer._parameters["bias"]
        if weight is None:
            return None
        made_of = state_of(weight) + (() if bias is None else state_of(bias))
        if self._made_of != made_of:
            self._make(weight, bias)
            self._made_of = made_of  # not before: another thread would take what is not packed yet
        return self._packed

    def holds(self) -> bool:
        """Whether the copy is of the weight as it is, or the change is counted, as far as a glance can tell."""
        seen, weight = self._seen, self._layer._parameters.get("weight")  # which another thread may renew
        if seen is None or weight is None or self._made_of is None or self._made_of[:2] != state_of(weight):
            return True  # a change that is counted is noticed anyway, and is of this weight alone
        return torch.equal(*seen)

    def count_change(self) -> None:
        """Say that the weight was written to."""
        self._seen = None
        if (weight := self._layer._parameters.get("weight")) is not None:
            increment_version(weight)

    def _stock(self, x: Tensor) -> Tensor:
        return type(self._layer).forward(self._layer, x)

    def _make(self, weight: Tensor, bias: Tensor | None) -> None:
        self._kept, self._blocks, self._packed, self._seen = (weight.detach(), bias), None, None, None
        if not weight.is_cpu or not multiplies(weight.dtype):  # it may have changed
            return
        rows = weight.detach()
        some = rows.diagonal()[:: max(1, min(rows.shape) // _SEEN)]
        self._seen = some, some.clone()
        rows = rows.T.contiguous() if isinstance(self._layer, Conv1D) else rows
        with torch.inference_mode(False):  # else it could not be used without
            if floats.supports(weight.dtype):
                self._packed = floats.Packed.of(rows, None if bias is None else bias.detach())
            else:
                self._blocks = _BLOCKS(rows, _EXPECTED_TOKENS)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PrepackedForward":
        copied = PrepackedForward(deepcopy(self._layer, memo))
        # These serve where the weight is shared.
        copied._made_of, copied._kept = self._made_of, self._kept
        copied._blocks, copied._packed, copied._seen = self._blocks, self._packed, self._seen
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return PrepackedForward, (self._layer,)


def prepack(model: nn.Module, wanted: bool | None = None) -> bool:
    """Let a model's linear layers use prepacked copies of their weights on the CPU, under ``torch.no_grad``.

    Args:
        wanted: None stands for yes where half of the free memory is enough for the copies; False changes nothing.

    Returns:
        Whether the model has a layer that does.
    """
    layers = [] if wanted is False else list(_layers(model))
    size = sum(layer.weight.nbytes for layer in layers)
    if wanted or size <= _SHARE * psutil.virtual_memory().available:
        for layer in layers:
            layer.forward = PrepackedForward(layer)
    return is_prepacked(model)


def unpack(model: nn.Module) -> None:
    """Undo ``prepack``, and let go of the copies."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), PrepackedForward):
            del module.forward


def count_unseen(modules: Iterable[nn.Module]) -> None:
    """Count what was written to prepacked weights where PyTorch does not count it, so that all that was made of them
    is made anew: adapters that are merged or taken out again are added to ``weight.data``. Some numbers of every weight
    are looked at, since the layer in which an adapter was is gone where it was merged for good.
    """
    found = (vars(module).get("forward") for module in modules)
    forwards = [one for one in found if isinstance(one, PrepackedForward)]
    if not all(map(PrepackedForward.holds, forwards)):
        for one in forwards:  # where one was written to, others may have been that do not show it
            one.count_change()


def is_prepacked(model: nn.Module) -> bool:
    """Whether a layer of the model uses a prepacked copy of its weight."""
    return any(isinstance(vars(module).get("forward"), PrepackedForward) for module in model.modules())


def _layers(model: nn.Module) -> Iterator[Any]:
    """Plain linear layers on the CPU in a dtype that is multiplied in; nobody else's ``forward`` is replaced."""
    for module in model.modules():
        if not is_plain(module) or "forward" in vars(module):
            continue
        weight: Any = module.weight
        if weight.device.type == "cpu" and multiplies(weight.dtype) and not weight.is_inference():
            yield module


def matrix_of(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Weight (out, in) and bias (out,) of a linear layer, without gradient; Conv1D has its weight transposed."""
    weight: Tensor = layer.weight.detach()
    return weight.T if isinstance(layer, Conv1D) else weight, None if layer.bias is None else layer.bias.detach()


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a linear layer with an ordinary matrix of floats; quantisers have kinds of their own."""
    weight = getattr(module, "weight", None)
    return type(module) in (nn.Linear, Conv1D) and type(weight) is nn.Parameter and weight.is_floating_point()


def multiplies(dtype: torch.dtype) -> bool:
    """Whether there are kernels on this machine that multiply by matrices of this dtype in a layout of their own."""
    return onednn_multiplies(dtype) or floats.supports(dtype)


def why_slow(model: nn.Module, dtype: torch.dtype) -> str | None:
    """What makes forwards over a few tokens slow on a CPU, and what to do about it; None if nothing does."""
    plain = [module for module in model.modules() if is_plain(module)]
    if is_prepacked(model) or len(plain) < 2:  # the output layer alone: the others are a quantiser's
        return None
    if not multiplies(dtype):
        known = " or ".join(dtype_name(each) for each in (torch.bfloat16, torch.float32) if multiplies(each))
        return f"is in {dtype_name(dtype)}, for which this CPU has no fast kernels; give --dtype {known}"
    size = human_bytes(sum(matrix_of(module)[0].nbytes for module in plain))
    return (
        f"has no copy of its weights in the layout of fast kernels, as {size} are more than half of the free memory: "
        "forwards over several tokens, and so drafts, may take several times as long. Free memory, or give --quantize "
        "int8"
    )


def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN is there and multiplies by matrices of this dtype on this machine."""
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
