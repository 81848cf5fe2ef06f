"""Products with weights in float32 and bfloat16 on a CPU: kernels made for the CPU at hand.

A forward over one token costs what its weights' bytes cost, and one over the dozen tokens of a tree should cost no
more. oneDNN has kernels for many tokens, and in bfloat16 none for most laptops, which have AVX2 and nothing beyond.
These take up to 16 tokens at a time, whose sums stay in registers: weights are read once for them, as they lie in
memory. In bfloat16 they are multiplied by whole matrices (AMX) or in pairs (AVX-512 BF16) where the CPU can, else
widened in registers; sums are in float32.

Each output is a sum over the inputs in one order, so that a token's result is the same, bit for bit, whatever goes
through beside it.

Layout: outputs in tiles of 16, and of a tile, one input after the other, or one pair of them, 16 weights each.
"""

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from llvmlite import ir
from torch import Tensor

from shape.target import elements, kernels, matrices
from shape.target.kernels import F32, FLOATS, I32, I64, INTS, TILE, Code, Program, begin, own_share, own_units
from shape.target.memory import in_large_pages

_TILES = 4  # weights are filled up to so many, as kernels of few tokens take several at a time
_MOST, _MOST_AVX2 = 14, 6  # tokens whose sums fit into the registers
_MANY = 8  # of many, at a time: their activations stay in the first cache
_ARGUMENTS = ("weights", "bias", "x", "out", "inputs", "tiles", "tokens", "chunks")


class _Bfloat(ir.Type):
    """A number of bfloat16 as few instructions take it, a type that llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


_PAIRS = ir.VectorType(_Bfloat(), 2 * TILE)


def supports(dtype: torch.dtype) -> bool:
    """Whether this CPU has what the kernels are made of, and torch threads that they can run in."""
    known = dtype in (torch.float32, torch.bfloat16)
    return known and kernels.has("avx2") and kernels.has("fma") and kernels.openmp() is not None


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight in the kernels' layout.

    Attributes:
        weights: (tiles, inputs, 16), or in pairs (tiles, inputs / 2, 16, 2), filled up with zeros.
        bias: (16 * tiles,) float32.
        outputs, inputs: of the weight as it was.
        at_once: inputs that an instruction multiplies by: 32 or 2, of activations in bfloat16, or 1, in float32.
    """

    weights: Tensor
    bias: Tensor
    outputs: int
    inputs: int
    at_once: int

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None, wide: bool = False) -> "Packed":
        """Of (out, in) and (out,), float32 or bfloat16.

        Args:
            wide: whether activations are to be taken in float32, whatever the CPU can.
        """
        outputs, inputs = weight.shape
        at_once = 1 if wide or weight.dtype == torch.float32 else _multiplied_at_once()
        weight = F.pad(weight, (0, -inputs % at_once, 0, -outputs % (TILE * _TILES)))
        pair = () if at_once == 1 else (2,)
        tiles = weight.view(len(weight) // TILE, TILE, -1, *pair).transpose(1, 2).contiguous()
        biases = torch.zeros(outputs, dtype=torch.float32) if bias is None else bias.float()
        biases = F.pad(biases, (0, len(weight) - outputs))
        return cls(in_large_pages(tiles), biases, outputs, inputs, at_once)

    @property
    def padding(self) -> int:
        """Zeros that activations are padded with."""
        return self.weights[0].numel() // TILE - self.inputs

    @property
    def layout(self) -> tuple[Any, ...]:
        return self.weights.dtype, self.weights.shape, self.at_once

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.weights, self.bias

    def prepare(self, program: Program, x: Tensor, grain: int) -> Tensor:
        """Activations (T, inputs) as ``multiply`` takes them, made by a step of the program where they are others.

        Args:
            grain: of a row, that the same thread makes: a divisor of `inputs`.
        """
        if x.dtype == torch.float32 or self.at_once > 1:
            return x
        wide = program.buffers.empty(*x.shape, dtype=torch.float32)
        lanes, rows = gcd(grain, TILE), (wide, grain * wide.itemsize, x, grain * x.itemsize)
        program.add(elements.copy(wide.dtype, x.dtype, lanes), *rows, grain // lanes, x.numel() // grain)
        return wide

    def multiply(self, program: Program, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Go on with x times the transposed weights plus bias: (T, 16 * tiles) in a dtype, written when it runs."""
        tiles, tokens = len(self.weights), len(x)
        out = program.buffers.empty(tokens, tiles * TILE, dtype=dtype)
        most = _MOST_AVX2
        if self.at_once == 32:
            most = matrices.ROWS
        elif kernels.has("avx512f"):
            most = _MOST if tokens <= _MOST else _MANY
        rows = -(-tokens // -(-tokens // most))
        chunks = -(-tokens // rows)
        given = (self.weights, self.bias, x, out, self.weights.shape[1], tiles, tokens, chunks)
        if self.at_once == 32:
            program.add(_matrix_multiplier(dtype), *given, rows)
        else:
            program.add(_multiplier(self.weights.dtype, self.at_once == 2, rows, dtype), *given)
        return out


def product(x: Tensor, packed: Packed) -> Tensor:
    """x times the transposed weights, plus bias.

    Args:
        x: (..., inputs) on the CPU, in the weights' dtype.

    Returns:
        (..., outputs), alike.
    """
    rows = x.reshape(-1, packed.inputs).contiguous()
    if not len(rows):
        return x.new_empty(*x.shape[:-1], packed.outputs)
    rows = F.pad(rows, (0, packed.padding)) if packed.padding else rows
    out = kernels.multiplied(packed, rows, rows.shape[1])
    return out[:, : packed.outputs].view(*x.shape[:-1], packed.outputs)


def _multiplied_at_once() -> int:
    """Inputs in bfloat16 that this CPU has an instruction for."""
    if matrices.multiplies("bf16"):
        return 32
    return 2 if kernels.has("avx512bf16") else 1


@cache
def _multiplier(dtype: torch.dtype, pairs: bool, rows: int, result: torch.dtype) -> int:
    """The address of a kernel of ``_ARGUMENTS``.

    Args:
        dtype: of the weights. result: of what comes out.
        pairs: whether inputs are multiplied two at a time.
        rows: tokens that it takes at a time. Of the last ones the last token again, where there are fewer.
    """
    module, at_a_time = ir.Module(), _at_a_time(rows)
    size = 4 if pairs else dtype.itemsize  # of a weight or a pair, as it is read; activations have four bytes
    code, given = begin(module, "multiply", _ARGUMENTS)
    inputs, tiles = given["inputs"], given["tiles"]
    number, code, done = own_units(code, code.udiv(tiles, I64(at_a_time)), "tiles")
    first = code.times(number, at_a_time)
    chunk, code, after = code.counted(given["chunks"], "chunks")
    last = code.sub(given["tokens"], I64(1))
    tokens = [code.plus(code.times(chunk, rows), row) for row in range(rows)]
    tokens = [code.select(code.icmp_unsigned("<", token, last), token, last) for token in tokens]
    x = [code.plus(given["x"], code.times(token, inputs, 4)) for token in tokens]
    places = [code.plus(first, tile) for tile in range(at_a_time)]
    weights = [code.plus(given["weights"], code.times(place, inputs, size * TILE)) for place in places]
    biases = [code.read(FLOATS, code.plus(given["bias"], code.times(place, 4 * TILE))) for place in places]
    at, inner, behind = code.counted(inputs, "inputs")
    sums = [[inner.phi(FLOATS) for _ in range(at_a_time)] for _ in range(rows)]
    where = [inner.plus(address, inner.times(at, size * TILE)) for address in weights]
    some = [inner.bitcast(inner.read(INTS, one), _PAIRS) if pairs else inner.take(dtype, one) for one in where]
    for address in where if rows > _MOST // 2 else ():
        inner.prefetch(address)
    found: list[list[Any]] = []
    for row, totals in enumerate(sums):
        number_or_pair = inner.spread(inner.read(I32 if pairs else F32, inner.plus(x[row], inner.times(at, 4))))
        value = inner.bitcast(number_or_pair, _PAIRS) if pairs else number_or_pair
        found.append([_added(inner, total, weight, value) for total, weight in zip(totals, some, strict=True)])
        for total, bias, new in zip(totals, biases, found[row], strict=True):
            total.add_incoming(bias, code.block)
            total.add_incoming(new, inner.block)
    code = inner.again(at, behind)
    size = TILE * result.itemsize
    for token, values in zip(tokens, found, strict=True):
        for place, value in zip(places, values, strict=True):
            at = code.times(code.plus(code.times(token, tiles), place), size)
            code.put(result, value, code.plus(given["out"], at))
    code = code.again(chunk, after)
    code.again(number, done).ret_void()
    return kernels.compiled(module)["multiply"]


@cache
def _matrix_multiplier(result: torch.dtype) -> int:
    """The address of a kernel of ``_ARGUMENTS`` and the tokens that it takes at a time, at most 16. The last ones begin
    as many before the end.

    Its registers: sums of four tiles, then activations, then weights, of one tile while the other's are multiplied.
    """
    module, x_at, weights_at = ir.Module(), _TILES, (_TILES + 1, _TILES + 2)
    code, given = begin(module, "multiply", (*_ARGUMENTS, "rows"))
    inputs, tiles, rows = given["inputs"], given["tiles"], given["rows"]
    start, end, code = own_share(code, code.udiv(tiles, I64(_TILES)))
    matrices.begin(code, [(rows, matrices.ROW)] * (_TILES + 1) + [(matrices.ROWS, matrices.ROW)] * len(weights_at))
    sums = [matrices.memory(code, matrices.ROWS) for _ in range(_TILES)]
    number, code, done = code.counted(end, "tiles", start)
    places = [code.plus(code.times(number, _TILES), tile) for tile in range(_TILES)]
    chunk, code, after = code.counted(given["chunks"], "chunks")
    first, last = code.times(chunk, rows), code.sub(given["tokens"], rows)
    first = code.select(code.icmp_unsigned("<", first, last), first, last)
    row_size = code.times(inputs, 4)
    x = code.plus(given["x"], code.times(first, row_size))
    for tile, place in enumerate(places):
        matrices.load(code, tile, code.plus(given["bias"], code.times(place, 4 * TILE)), stride=0)
    at, inner, behind = code.counted(code.udiv(inputs, I64(matrices.ROWS)), "inputs")
    matrices.load(inner, x_at, inner.plus(x, inner.times(at, matrices.ROW)), row_size)
    for tile, place in enumerate(places):
        of_tile = inner.plus(given["weights"], inner.times(place, inputs, 4 * TILE))
        matrices.load(inner, weights_at[tile % 2], inner.plus(of_tile, inner.times(at, matrices.ROWS * matrices.ROW)))
        matrices.multiply(inner, "bf16", tile, x_at, weights_at[tile % 2])
    code = inner.again(at, behind)
    for tile, where in enumerate(sums):
        matrices.store(code, tile, where)
    row, inner, behind = code.counted(rows, "rows")
    out = inner.plus(given["out"], inner.times(inner.plus(first, row), tiles, TILE * result.itemsize))
    for place, where in zip(places, sums, strict=True):
        found = inner.read(FLOATS, inner.plus(where, inner.times(row, matrices.ROW)))
        inner.put(result, found, inner.plus(out, inner.times(place, TILE * result.itemsize)))
    code = inner.again(row, behind)
    code = code.again(chunk, after)
    code = code.again(number, done)
    matrices.end(code)
    code.ret_void()
    return kernels.compiled(module)["multiply"]


def _at_a_time(rows: int) -> int:
    """Tiles: enough sums that the next product need not wait for the last, and no more than there are registers for."""
    if kernels.has("avx512f"):
        return 2 if rows == 1 or rows > 6 else 4
    return {1: 4, 2: 2}.get(rows, 1)


def _added(code: Code, total: Any, weight: Any, value: Any) -> Any:
    """A sum and one product more, or a pair of them."""
    if weight.type == FLOATS:
        return code.fma(value, weight, total)
    return code.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, weight, value)
