"""Products with weights in bfloat16 on a CPU that does not multiply in it: kernels made for the CPU at hand.

Most laptops have AVX2 and nothing beyond. There oneDNN has no kernels for bfloat16, and what torch does instead costs
several times as much for the dozen tokens of a tree as for one. These kernels read the weights as they are, half of
float32's bytes, widen them in registers and add in float32: a forward over one token costs what its weights' bytes
cost, and one over a few what their multiplications do.

Each output is a sum over the inputs in their order, so that a token's result is the same, bit for bit, whatever goes
through beside it.

Layout: outputs in tiles of 16, and of a tile, one input after the other, 16 weights each.
"""

import ctypes
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from llvmlite import ir
from torch import Tensor

from shape.target import kernels
from shape.target.kernels import F32, FLOATS, HALVES, I64, TILE, begin, in_parallel, share

_TILES = 4  # weights are filled up to so many, as kernels of few tokens take several at a time
_MOST_TOKENS = 6  # whose sums fit into the 16 registers of AVX2
_AT_A_TIME = {1: 4, 2: 2}  # tiles, by tokens: enough sums that the next product need not wait for the last
_ARGUMENTS = ("weights", "bias", "x", "out", "inputs", "tiles", "tokens", "chunks")


def serves() -> bool:
    """Whether this CPU has what the kernels are made of."""
    return kernels.has("avx2") and kernels.has("fma")


def pack(weight: Tensor) -> Tensor:
    """A weight (out, in) bfloat16 in the kernels' layout, (tiles, in, 16), filled up with zeros."""
    weight = F.pad(weight, (0, 0, 0, -weight.shape[0] % (TILE * _TILES)))
    return weight.view(-1, TILE, weight.shape[1]).transpose(1, 2).contiguous()


def pack_bias(bias: Tensor | None, weights: Tensor) -> Tensor:
    """A bias (out,), or none, for packed weights: (16 * tiles,) float32."""
    size = weights.shape[0] * TILE
    return torch.zeros(size) if bias is None else F.pad(bias.float(), (0, size - len(bias)))


def product(x: Tensor, weights: Tensor, bias: Tensor, outputs: int) -> Tensor:
    """x times the transposed weights, plus bias.

    Args:
        x: (..., in) bfloat16 on the CPU.
        weights: of `pack`. bias: of `pack_bias`.

    Returns:
        (..., outputs) bfloat16.
    """
    tiles, inputs, _ = weights.shape
    wide = x.to(torch.float32, memory_format=torch.contiguous_format)
    tokens = wide.numel() // inputs
    out = x.new_empty(tokens, tiles * TILE)
    if tokens:
        chunks = -(-tokens // _MOST_TOKENS)
        rows = -(-tokens // chunks)
        given = (one.data_ptr() for one in (weights, bias, wide, out))
        arguments = (ctypes.c_int64 * len(_ARGUMENTS))(*given, inputs, tiles, tokens, -(-tokens // rows))
        in_parallel(_kernel(rows)[0], arguments, tokens * weights.numel())
    return out[:, :outputs].view(*x.shape[:-1], outputs)


@cache
def _kernel(rows: int) -> tuple[int, Any]:
    """The address of a function that takes an array of ``_ARGUMENTS``, and what keeps it alive.

    Args:
        rows: tokens that it takes at a time. Of the last ones the last token again, where there are fewer.
    """
    module, at_a_time = ir.Module(), _AT_A_TIME.get(rows, 1)
    _, code, given = begin(module, "multiply", _ARGUMENTS)
    inputs, tiles = given["inputs"], given["tiles"]
    start, count, code = share(code, code.udiv(tiles, I64(at_a_time)))
    number, code, done = code.counted(count, "tiles")
    first = code.times(code.at(number, start), at_a_time)
    chunk, code, after = code.counted(given["chunks"], "chunks")
    last = code.sub(given["tokens"], I64(1))
    tokens = [code.at(code.times(chunk, rows), row) for row in range(rows)]
    tokens = [code.select(code.icmp_unsigned("<", token, last), token, last) for token in tokens]
    x = [code.at(given["x"], code.times(token, inputs, 4)) for token in tokens]
    places = [code.at(first, tile) for tile in range(at_a_time)]
    weights = [code.at(given["weights"], code.times(place, inputs, 2 * TILE)) for place in places]
    biases = [code.read(FLOATS, code.at(given["bias"], code.times(place, 4 * TILE))) for place in places]
    at, inner, behind = code.counted(inputs, "inputs")
    sums = [[inner.phi(FLOATS) for _ in range(at_a_time)] for _ in range(rows)]
    found: list[list[Any]] = []
    wide = [inner.widened(inner.read(HALVES, inner.at(where, inner.times(at, 2 * TILE)))) for where in weights]
    for row, some in enumerate(sums):
        value = inner.spread(inner.read(F32, inner.at(x[row], inner.times(at, 4))))
        found.append(
            [inner.intrinsic("llvm.fma.v16f32", FLOATS, value, *pair) for pair in zip(wide, some, strict=True)]
        )
        for total, bias, new in zip(some, biases, found[row], strict=True):
            total.add_incoming(bias, code.block)
            total.add_incoming(new, inner.block)
    code = inner.again(at, behind)
    for token, some in zip(tokens, found, strict=True):
        for place, value in zip(places, some, strict=True):
            where = code.times(code.at(code.times(token, tiles), place), 2 * TILE)
            code.write(code.narrowed(value), code.at(given["out"], where))
    code = code.again(chunk, after)
    code.again(number, done).ret_void()
    engine = kernels.compiled(module)
    return engine.get_function_address("multiply"), engine
