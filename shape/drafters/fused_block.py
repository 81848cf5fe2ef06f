"""Blocks of DFlash, DFlash2 and DSpark on a CPU: all places in one call (see ``shape.drafters.fused``)."""

from functools import cache
from math import gcd
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

from shape.drafters.fused import FusedPredictor
from shape.networks.block import BlockPredictor
from shape.target import kernels
from shape.target.kernels import F32, I32, I64, TILE, begin, own_units, row_bytes
from shape.verification.cache import KVCache
from shape.verification.program import Forward, Layer, all_rows


class _Memory(Forward):
    _of: FusedPredictor

    def _build(self, layers: tuple[int, ...]) -> None:
        of, network, size = self._of, self._of.predictor, self._y.shape[1]
        self._features = self._new(self._tokens, network.config.feature_size)
        (feature,) = self._linear(network._modules, ["fc"], self._features, [size])
        self._norm(network._modules, "hidden_norm", self._y, feature[:, :size])
        for number, layer in enumerate(of.layers):
            k, v = self._linear(layer.attention, ("k_proj", "v_proj"), self._y, [of.kv_heads * of.size] * 2)
            self._keep(layer, number, k, v)

    def write(self, features: Tensor, embeddings: Tensor) -> None:
        self._features.copy_(features.reshape(self._features.shape))


class _Convolved(Forward):
    """Through layers with convolutions (``shape.networks.convolution``)."""

    def _through(self, layer: Layer, number: int, seen: Tensor) -> None:
        of, y = self._of, self._y
        self._buffers.again()
        attention, mlp = layer.parts["attention_conv"], layer.parts["mlp_conv"]
        seen, kernel = self._before(attention, seen)
        found = self._found(layer, number, seen)
        self._norm(*of.norms[2 * number + 1], y, added=self._convolve(found, attention.base_kernel[1], kernel))
        seen, kernel = self._before(mlp, y)
        found = self._mlp(layer.parts["mlp"], seen)
        self._norm(*of.norms[2 * number + 2], y, added=self._convolve(found, mlp.base_kernel[1], kernel))

    def _before(self, convolution: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """What a part reads of x, and what is added to the kernel for what it makes."""
        count = convolution.kernel_projection.out_features
        (added,) = self._linear(convolution._modules, ["kernel_projection"], x, [count])
        here, behind = added[:, :count].chunk(2, dim=1)
        return self._convolve(x, convolution.base_kernel[0], here), behind

    def _convolve(self, x: Tensor, base: Tensor, added: Tensor) -> Tensor:
        """``shape.networks.convolution.convolved``; behind a wait for x, whose rows each read others."""
        (taps, width), groups = base.shape, added.shape[1] // len(base)
        y, tokens = self._temporary(self._tokens, width), self._tokens
        kernel = _convolution(self._dtype, width, taps, width // groups)
        given = (x, row_bytes(x), added, row_bytes(added), base, y, row_bytes(y), self._shape[1], tokens)
        self._program.add(kernel, *given)
        return y


class FusedBlock(FusedPredictor):
    """A block predictor, by kernels."""

    kind, memory = BlockPredictor, _Memory

    def begin(self, features: Tensor, embedding: Tensor, cache: KVCache) -> Tensor:
        """States (B, S, H) of all steps behind tokens with embeddings (B, 1, H); what is known is remembered."""
        network, rows = self.predictor, len(embedding)
        size, made = network.config.block_size, _Convolved if network.config.conv_kernel_size else Forward
        cache.reserve(size)
        x = network.masked(embedding[:, 0], size).to(network.dtype)
        turns, mask = self.turns(cache.host_lengths, size), self.seen(cache, size)
        with self.program(made, rows, size, mask is not None, (-1,)) as forward:
            states, _ = forward(all_rows(x), turns, cache, cache.longest + size, [mask])
        return states[:, size - network.config.num_steps :]


@cache
def _convolution(dtype: torch.dtype, width: int, taps: int, group: int) -> int:
    """y = what a convolution over the places of blocks makes of x (rows, width), rounded where torch rounds.

    Arguments: x, x_bytes, added (rows, taps groups), added_bytes, base (taps, width), y, y_bytes, nodes (places of a
    block), rows.
    """
    names = ("x", "x_bytes", "added", "added_bytes", "base", "y", "y_bytes", "nodes", "rows")
    lanes, size, module = gcd(group, TILE), dtype.itemsize, ir.Module()
    code, given = begin(module, "convolution", names)
    row, code, done = own_units(code, given["rows"], "rows")
    place = code.urem(row, given["nodes"])
    x, added, y = (code.plus(given[name], code.times(row, given[f"{name}_bytes"])) for name in ("x", "added", "y"))
    # Where a block has no place so far back its own is read, and counts nothing.
    there = [code.icmp_unsigned(">=", place, I64(tap)) for tap in range(taps)]
    shares = [code.spread(code.select(one, F32(1.0), F32(0.0)), lanes) for one in there]
    x_of = [code.sub(x, code.select(one, code.times(given["x_bytes"], tap), I64(0))) for tap, one in enumerate(there)]
    at, inner, behind = code.counted(I64(width // lanes), "vectors")
    offset, number = inner.times(at, lanes * size), inner.udiv(at, I64(group // lanes))
    total: Any = None
    for tap in range(taps):
        own = inner.take(dtype, inner.plus(given["base"], offset, tap * width * size), lanes)
        more = inner.take(dtype, inner.plus(added, inner.times(number, size), tap * (width // group) * size), 1)
        coefficient = inner.fadd(own, inner.spread(inner.extract_element(more, I32(0)), lanes))
        value = inner.fmul(inner.take(dtype, inner.plus(x_of[tap], offset), lanes), shares[tap])
        value = inner.stored(dtype, inner.fmul(inner.stored(dtype, coefficient), value))
        total = value if total is None else inner.stored(dtype, inner.fadd(total, value))
    inner.put(dtype, total, inner.plus(y, offset))
    inner.again(at, behind).again(row, done).ret_void()
    return kernels.compiled(module)["convolution"]
