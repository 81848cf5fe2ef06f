"""Weights of 8 or 4 bits on a CPU: a half or a quarter of bfloat16's bytes, so that much less time for a token.

Linear layers and the output embedding keep integers and scales alone; the input embedding stays. In "int8" a weight has
8 bits, and each output a scale. In "int4" a weight has 4 bits, and each output a scale for every 32 inputs, but for the
output embedding, which keeps 8 bits. Activations are rounded too, each token's by itself with a scale for every 128: in
bfloat16, which has 8 bits itself, to 8 bits; in float32 to 16 bits, so that what is lost is lost by the weights.

It is another model than the unquantised one, and plain and drafted decoding run the same: what a layer gives for a
token does not depend on what else is in a forward (``shape.target.integers``).
"""

import warnings
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shape.errors import ConfigError
from shape.target import kernels
from shape.target.integers import GROUP, TILE, Packed, product, supports
from shape.target.loading import dtype_name
from shape.target.memory import in_large_pages
from shape.target.prepack import is_plain, matrix_of

Quantization = Literal["int8", "int4"]
_ROWS = 4096  # of a weight that are quantised at a time, so that copies in float32 stay small
_TINY = 2.0**-100


class QuantizedLinear(nn.Module):
    """Takes the place of a linear layer: packed weights, no parameter, no gradient but for its input.

    Args:
        layer: nn.Linear, or transformers' Conv1D, which has its weight transposed, in any float dtype.
        bits: 8 or 4.
    """

    packed: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, layer: Any, bits: int) -> None:
        super().__init__()
        weight, bias = matrix_of(layer)
        self.out_features: int = weight.shape[0]
        self.in_features: int = weight.shape[1]
        self.bits = bits
        self._padding = -self.in_features % GROUP
        parts = [pack(some, bits) for some in weight.split(_ROWS)]  # each a multiple of a tile, but for the last
        packed, scales = (in_large_pages(torch.cat(some)) for some in zip(*parts, strict=True))
        self.register_buffer("packed", packed)
        # As bytes, which stay what they are where a model is cast.
        self.register_buffer("scales", scales.view(torch.uint8))
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) bfloat16 or float32 on the CPU -> (..., out)."""
        if torch.is_grad_enabled() and x.requires_grad:
            return F.linear(x, self.rows(dtype=x.dtype), self.bias)
        if not (x.is_cpu and supports(x.dtype)):
            raise ConfigError(
                f"a layer quantised for the CPU is given {x.dtype} on {x.device}; leave the target on the CPU in "
                "float32 or bfloat16, or load it with quantization_config instead of quantize"
            )
        x = F.pad(x, (0, self._padding)) if self._padding else x
        multiply = _traced if torch.compiler.is_compiling() else product
        own: Any = self._buffers  # without a module's search for names, which every call would pay for
        found = multiply(x, own["packed"], own["scales"], self.bits, self.out_features)
        return found if own["bias"] is None else found + own["bias"]

    @property
    def blocks(self) -> Packed | None:
        """The weights as the kernels take them, where activations need not be filled up."""
        return None if self._padding else Packed(self.packed, self.scales, self.bits, self.out_features)

    def rows(self, outputs: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights that the integers stand for, (K, in), of some outputs, (K,) int64, or of all."""
        outputs = torch.arange(self.out_features) if outputs is None else outputs.cpu()
        parts = [dequantize(self.packed, self.scales, some, self.bits).to(dtype) for some in outputs.split(_ROWS)]
        return torch.cat(parts)[:, : self.in_features]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"


def pack(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """A weight (out, in) in the layout of ``shape.target.integers``, filled up with zeros: integers, and scales."""
    outputs, inputs = weight.shape
    weight = F.pad(weight.float(), (0, -inputs % GROUP, 0, -outputs % TILE))
    tiles, width = weight.shape[0] // TILE, weight.shape[1]
    if bits == 8:
        scales = weight.abs().amax(1) / 127
        numbers = (weight / scales.clamp(min=_TINY)[:, None]).round() + 128
        tiled = numbers.to(torch.uint8).view(tiles, TILE, width // 4, 4)
        return tiled.transpose(1, 2).contiguous(), scales.view(tiles, TILE)
    groups = weight.view(-1, width // GROUP, GROUP)
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))  # becomes -8, as 8 is beyond what 4 bits hold
    steps = (extreme / -8).bfloat16()
    inverse = torch.where(steps == 0, 0.0, steps.float().reciprocal())
    numbers = ((groups * inverse).round().clamp(-8, 7) + 8).to(torch.uint8)
    low, high = numbers.view(tiles, TILE, width // 8, 2, 4).transpose(1, 2).unbind(3)
    return (low | high << 4).contiguous(), steps.view(tiles, TILE, -1).transpose(1, 2).contiguous()


def dequantize(packed: Tensor, scales: Tensor, outputs: Tensor, bits: int) -> Tensor:
    """Rows (K, in) float32 of what ``pack`` gave, its scales as bytes."""
    tile, inside = outputs // TILE, outputs % TILE
    some = packed[tile, :, inside]
    if bits == 8:
        return (some.flatten(1).float() - 128) * scales.view(torch.float32)[tile, inside, None]
    numbers = torch.stack([some & 15, some >> 4], dim=2).view(len(outputs), -1, GROUP).float() - 8
    return (numbers * scales.view(torch.bfloat16)[tile, :, inside, None].float()).flatten(1)


def quantize_model(model: Any, how: Quantization) -> None:
    """Replace a model's plain linear layers on the CPU, one after the other, each weight let go of before the next.

    Whatever else is left as it is: embeddings, norms, and experts that are not linear layers.

    Raises:
        ConfigError: no layer but the output embedding is a plain one, as in families with linear layers of their own.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    made: dict[int, QuantizedLinear] = {}  # layers that stand at several places stay one
    layers = [one for one in model.named_modules(remove_duplicate=False) if is_plain(one[1])]
    if all(layer is head for _, layer in layers):
        raise ConfigError(
            f"quantize {how} is for plain linear layers, and a {type(model).__name__} has none but its output "
            "embedding; leave it out, or give quantization_config"
        )
    for name, layer in layers:
        if id(layer) not in made:
            bits = 4 if how == "int4" and layer is not head else 8
            made[id(layer)] = QuantizedLinear(layer, bits).train(layer.training)
        model.set_submodule(name, made[id(layer)])
        layer.weight = None


def quantized(model: nn.Module) -> str | None:
    """In what a model's linear layers were put here: "int8", "int4", or None."""
    bits = {module.bits for module in model.modules() if isinstance(module, QuantizedLinear)}
    return f"int{min(bits)}" if bits else None


def check_name(how: str) -> None:
    """Raises ConfigError: neither int8 nor int4."""
    if how not in get_args(Quantization):
        raise ConfigError(f"quantize {how} is unknown; use {' or '.join(get_args(Quantization))}")


def check(how: str, place: Any, dtype: torch.dtype, config: Any, options: dict[str, Any]) -> None:
    """Whether a target can be quantised, before it is read; warns where its products take one thread.

    Args:
        place: a device, or a device for each part, as in transformers' ``device_map``.
        dtype: of states.

    Raises:
        ConfigError: with the reason.
    """
    check_name(how)
    if "quantization_config" in options or getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"quantize {how} and a quantization_config are given; leave one of them out")
    if str(place or "cpu") != "cpu":
        raise ConfigError(
            f"quantize {how} is for the CPU, and the target is put on {place}; give device cpu, or "
            "quantization_config with a method of transformers for that device"
        )
    if not supports(dtype):
        name = dtype_name(dtype)
        raise ConfigError(f"quantize {how} computes in bfloat16 or float32, not in {name}; give dtype bfloat16")
    if kernels.openmp() is None:
        warnings.warn(
            f"quantize {how} computes in one thread here, as its kernels know the threads of GNU's OpenMP alone, which "
            "PyTorch has on Linux; without it PyTorch's own products take all cores",
            stacklevel=2,
        )


@torch.library.custom_op("shape::quantized_product", mutates_args=())
def _traced(x: Tensor, packed: Tensor, scales: Tensor, bits: int, outputs: int) -> Tensor:
    """``product`` as ``torch.compile`` sees it, which cannot look into kernels that are not torch's."""
    return product(x, packed, scales, bits, outputs)


@_traced.register_fake
def _(x: Tensor, packed: Tensor, scales: Tensor, bits: int, outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)
