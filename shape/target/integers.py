"""Products with weights of 8 and 4 bits for a few tokens: kernels in LLVM's own language, made for the CPU at hand.

A forward over one token costs what its weights' bytes cost; one over a tree costs no more for as long as the cores
multiply as fast as the memory delivers. In bfloat16 two cores do not, unless they multiply whole matrices (AMX); in
integers of 8 bits, of which AVX-512 VNNI multiplies 64 at once, they nearly do, and by whole matrices they do.
Activations have a scale per token and 128 inputs: one for a whole forward, or for a whole token, loses much more where
few activations are large, and one for every 32 makes a forward over 13 tokens of the shipped target take an eighth
longer.

Sums of integers are exact, and the sums of groups are added in one order: a token's result is the same, bit for bit,
whatever goes through beside it, and on whatever CPU. With AVX2 alone a product takes several instructions, and a token
in 8 bits three quarters of what it takes in float32; without, it takes ordinary ones, slowly.

Layout: outputs in tiles of 16, and of a tile, four inputs after four, 16 x 4 bytes; in 4 bits each byte holds four
inputs' weights in its low half and the next four's in its high half. Weights are stored unsigned, by an offset.
"""

from dataclasses import dataclass
from functools import cache, reduce
from math import gcd
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

from shape.target import kernels, matrices
from shape.target.kernels import F32, FLOATS, I8, I16, I32, I64, INTS, TILE, Code, Program, begin, every, own_units

GROUP = 32  # inputs that share a weight's scale in 4 bits
SPAN = 128  # inputs that share an activation's scale, where that divides a row
# Tokens whose sums fit into the registers, by digits of activations; more than AVX2 has, where it was as good.
_MOST_ROWS = {1: 13, 2: 8}
_LEAST_LINES = {8: 6, 4: 9}  # digits of tokens, by bits of weights, that are multiplied as a matrix where the CPU can
# Tokens for which a core asks for memory early enough by itself; with AMX, in 4 bits, it does not.
_FEW = 3
_DIGITS = {torch.bfloat16: 1, torch.float32: 2}  # an activation's, of 8 bits each
_LARGEST = {1: 127.0, 2: 127.0 * 256}
_PAIRS, _BYTES = ir.VectorType(I16, 2 * TILE), ir.VectorType(I8, 4 * TILE)
_QUANTISER = ("x", "digits", "offsets", "steps", "units", "grain", "spans")
_MULTIPLIER = ("weights", "scales", "digits", "offsets", "steps", "out", "chunks", "spans", "tiles")


@dataclass(frozen=True)
class Kind:
    """What a kernel is made for.

    Attributes:
        bits: of a weight, 8 (a float32 scale per output) or 4 (a bfloat16 scale per output and group).
        dtype: of activations and results, bfloat16 or float32.
        rows: tokens that it takes at a time.
        digits: of an activation, of 8 bits each.
        span: groups that share an activation's scale.
    """

    bits: int
    dtype: torch.dtype
    rows: int
    digits: int
    span: int

    @property
    def sums(self) -> int:
        """Of a span: products are added as integers where they share both scales."""
        return 1 if self.bits == 8 else self.span

    @property
    def lines(self) -> int:
        """Digits of all tokens."""
        return self.digits * self.rows

    @property
    def by_matrices(self) -> bool:
        return self.lines >= _LEAST_LINES[self.bits] and matrices.multiplies("int8")


@dataclass(frozen=True)
class Digits:
    """Activations of T tokens, rounded, in chunks of some rows.

    What a group needs lies together: rows that are a power of two apart would drive each other out of the cache.

    Attributes:
        numbers: (chunks, groups, digits, rows, 32) int8.
        offsets: (chunks, sums, digits, rows) int32, one for all groups whose products are added as integers.
        steps: (chunks, spans, rows) float32. The last chunk's rows may be more than there are; those are not read.
    """

    numbers: Tensor
    offsets: Tensor
    steps: Tensor


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight in the kernels' layout.

    Attributes:
        weights: (tiles of outputs, inputs / 4 for 8 bits or inputs / 8 for 4, 16, 4) uint8.
        scales: the bytes of (tiles, 16) float32 for 8 bits, of (tiles, inputs / 32, 16) bfloat16 for 4.
        bits: 8 or 4.
        outputs: of the weight as it was.
        digits: of activations, of 8 bits each; None: one in bfloat16, which has no more itself, and two in float32.
    """

    weights: Tensor
    scales: Tensor
    bits: int
    outputs: int
    digits: int | None = None

    @property
    def inputs(self) -> int:
        """Filled up to a multiple of 32."""
        return self.weights[0].numel() * 8 // self.bits // TILE

    @property
    def layout(self) -> tuple[Any, ...]:
        return self.bits, self.digits, self.weights.shape

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.weights, self.scales

    def prepare(self, program: Program, x: Tensor, grain: int) -> Digits:
        """Activations (T, inputs) as ``multiply`` takes them, made by a step of the program.

        Args:
            grain: of a row, that the same thread makes: a divisor of `inputs`, and a multiple of ``grain_of`` them.
        """
        tokens, groups = len(x), self.inputs // GROUP
        digits = self.digits or _DIGITS[x.dtype]
        most = matrices.ROWS // digits if matrices.multiplies("int8") else _MOST_ROWS[digits]
        chunks = -(-tokens // most)
        kind = self._kind(x.dtype, -(-tokens // chunks))
        spans = groups // kind.span
        made = Digits(
            program.buffers.empty(chunks, groups, kind.digits, kind.rows, GROUP, dtype=torch.int8),
            program.buffers.empty(chunks, spans * kind.sums, kind.digits, kind.rows, dtype=torch.int32),
            program.buffers.empty(chunks, spans, kind.rows, dtype=torch.float32),
        )
        given = (x, made.numbers, made.offsets, made.steps, x.numel() // grain, grain // GROUP // kind.span, spans)
        program.add(_kernels(kind)["quantise"], *given)
        return made

    def multiply(self, program: Program, x: Digits, dtype: torch.dtype) -> Tensor:
        """Go on with x times the transposed weights: (T or more, 16 * tiles) in a dtype, written when it runs."""
        chunks, spans, rows = x.steps.shape
        tiles = len(self.weights)
        out = program.buffers.empty(chunks * rows, tiles * TILE, dtype=dtype)
        given = (self.weights, self.scales, x.numbers, x.offsets, x.steps, out, chunks, spans, tiles)
        program.add(_kernels(self._kind(dtype, rows))["multiply"], *given)
        return out

    def _kind(self, dtype: torch.dtype, rows: int) -> Kind:
        return Kind(self.bits, dtype, rows, self.digits or _DIGITS[dtype], grain_of(self.inputs) // GROUP)


def grain_of(inputs: int) -> int:
    """How many of a row's inputs share an activation's scale, at most; fewer than 32 where no kernel takes the row."""
    return gcd(inputs, SPAN)


def supports(dtype: torch.dtype) -> bool:
    """Whether there are kernels for activations of this dtype."""
    return dtype in _DIGITS


def product(x: Tensor, weights: Tensor, scales: Tensor, bits: int, outputs: int) -> Tensor:
    """x times the transposed weights.

    Args:
        x: (..., K) bfloat16 or float32 on the CPU, K a multiple of 32.
        weights, scales, bits, outputs: as in ``Packed``.

    Returns:
        (..., outputs) in x's dtype.
    """
    rows = x.contiguous().view(-1, x.shape[-1])
    tokens = rows.shape[0]
    if not tokens:
        return x.new_empty(*x.shape[:-1], outputs)
    out = kernels.multiplied(Packed(weights, scales, bits, outputs), rows, grain_of(x.shape[-1]))
    return out[:tokens, :outputs].reshape(*x.shape[:-1], outputs)


@cache
def _kernels(kind: Kind) -> dict[str, int]:
    """Addresses of kernels of ``_QUANTISER`` and ``_MULTIPLIER``."""
    module = ir.Module()
    _quantiser(module, kind)
    _multiplier(module, kind)
    return kernels.compiled(module)


def _quantiser(module: ir.Module, kind: Kind) -> None:
    """Activations to digits of 8 bits, span by span, with what the weights' offset adds to sums taken off ahead.

    NaN and infinity become a step of NaN or infinity, and so do the results.
    """
    code, given = begin(module, "quantise", _QUANTISER)
    spans = given["spans"]
    own, inner, done = own_units(code, given["units"], "spans", given["grain"])
    token, span = inner.udiv(own, spans), inner.urem(own, spans)
    chunk, row = inner.udiv(token, I64(kind.rows)), inner.urem(token, I64(kind.rows))
    where = inner.plus(given["x"], inner.times(own, kind.span * GROUP * kind.dtype.itemsize))
    halves = GROUP // TILE
    x = [inner.take(kind.dtype, inner.plus(where, kind.dtype.itemsize * TILE * at)) for at in range(halves * kind.span)]
    sizes = [inner.and_(inner.bitcast(one, INTS), every(0x7FFFFFFF)) for one in x]  # ordered as floats are, NaN above
    size = reduce(lambda one, other: inner.intrinsic("llvm.umax.v16i32", INTS, one, other), sizes)
    largest = inner.bitcast(inner.intrinsic("llvm.vector.reduce.umax.v16i32", I32, size), F32)
    most = ir.Constant(F32, _LARGEST[kind.digits])
    small = inner.fcmp_ordered("<", largest, ir.Constant(F32, 2.0**-100))  # of which the inverse may not exist
    inverse = inner.spread(inner.select(small, ir.Constant(F32, 0.0), inner.fdiv(most, largest)))
    place = inner.plus(inner.times(chunk, spans), span)
    inner.write(
        inner.fdiv(largest, most), inner.plus(given["steps"], inner.times(place, 4 * kind.rows), inner.times(row, 4))
    )
    numbers = [inner.fptosi(inner.intrinsic("llvm.rint.v16f32", FLOATS, inner.fmul(one, inverse)), INTS) for one in x]
    digits = [numbers]
    if kind.digits == 2:
        high = [inner.ashr(inner.add(one, every(128)), every(8)) for one in numbers]
        digits = [high, [inner.sub(one, inner.shl(h, every(8))) for one, h in zip(numbers, high, strict=True)]]
    each = len(x) // kind.sums
    for number, digit in enumerate(digits):
        for at, values in enumerate(digit):
            group = inner.plus(inner.times(place, kind.span), at // halves)
            line = inner.plus(inner.times(inner.plus(inner.times(group, kind.digits), number), kind.rows), row)
            where = inner.plus(given["digits"], inner.times(line, GROUP), at % halves * TILE)
            inner.write(inner.trunc(values, ir.VectorType(I8, TILE)), where)
        for at in range(kind.sums):
            total = reduce(inner.add, digit[at * each : (at + 1) * each])
            total = inner.intrinsic("llvm.vector.reduce.add.v16i32", I32, total)
            number_of_sum = inner.plus(inner.times(place, kind.sums), at)
            line = inner.plus(inner.times(inner.plus(inner.times(number_of_sum, kind.digits), number), kind.rows), row)
            offset = I32(-(1 << (kind.bits - 1)))
            inner.write(inner.mul(total, offset), inner.plus(given["offsets"], inner.times(line, 4)))
    inner.again(own, done).ret_void()


def _multiplier(module: ir.Module, kind: Kind) -> None:
    """This thread's share of the tiles, each times all chunks of tokens."""
    code, given = begin(module, "multiply", _MULTIPLIER)
    tiles, spans = given["tiles"], given["spans"]
    start, end, code = kernels.own_share(code, tiles)
    ahead = _Matrices(code, kind, given) if kind.by_matrices else None
    tile, code, done = code.counted(end, "tiles", start)
    chunk, code, after = code.counted(given["chunks"], "chunks")
    first = code.times(chunk, kind.rows)  # its first token
    weights = code.plus(given["weights"], code.times(tile, spans, kind.span * _bytes(kind)))
    of_tile = 64 if kind.bits == 8 else code.times(spans, 2 * TILE * kind.span)
    scales = code.plus(given["scales"], code.times(tile, of_tile))
    place = code.times(chunk, spans)  # of the first span among those of all chunks
    if ahead is not None:
        ahead.multiply(code, weights, place, I64(0))
    span, inner, behind = code.counted(spans, "spans")
    totals = [inner.phi(FLOATS) for _ in range(kind.rows)]
    for total in totals:
        total.add_incoming(every(0.0, FLOATS), code.block)
    if ahead is not None:
        following, last = inner.plus(span, 1), inner.sub(spans, I64(1))
        following = inner.select(inner.icmp_unsigned("<", following, last), following, last)
        of_following = inner.plus(weights, inner.times(following, kind.span * _bytes(kind)))
        ahead.multiply(inner, of_following, inner.plus(place, following), inner.plus(span, 1))
    place = inner.plus(place, span)
    own = inner.plus(weights, inner.times(span, kind.span * _bytes(kind)))
    found: list[Any] = []
    for at in range(kind.sums):
        sums = _sums(inner, kind, given, own, place, at) if ahead is None else ahead.sums(inner, place, span, at)
        sums = [inner.sitofp(one, FLOATS) for one in sums]
        if kind.bits == 4:
            scale = inner.plus(scales, inner.times(span, 2 * TILE * kind.span), 2 * TILE * at)
            factor = inner.widened(inner.read(kernels.HALVES, scale))
            before = found or [None] * kind.rows
            sums = [
                inner.fmul(one, factor) if total is None else inner.fma(one, factor, total)
                for one, total in zip(sums, before, strict=True)
            ]
        found = sums
    steps = inner.plus(given["steps"], inner.times(place, 4 * kind.rows))
    for row, total in enumerate(totals):
        found[row] = inner.fma(found[row], inner.spread(inner.read(F32, inner.plus(steps, 4 * row))), total)
        total.add_incoming(found[row], inner.block)
    code = inner.again(span, behind)
    for row, value in enumerate(found):
        value = value if kind.bits == 4 else code.fmul(value, code.read(FLOATS, scales))
        at = code.times(code.plus(code.times(code.plus(first, row), tiles), tile), TILE * kind.dtype.itemsize)
        code.put(kind.dtype, value, code.plus(given["out"], at))
    code = code.again(chunk, after)
    code = code.again(tile, done)
    if ahead is not None:
        matrices.end(code)
    code.ret_void()


def _bytes(kind: Kind) -> int:
    """Of a tile's weights in a group."""
    return GROUP * TILE * kind.bits // 8


def _sums(code: Code, kind: Kind, given: dict[str, Any], weights: Any, place: Any, at: int) -> list[Any]:
    """Of a tile and the groups that make one of a span's sums, for each token of a chunk (16) int32: the sums of
    products, in units of their steps.

    Args:
        weights: the address of the span's. place: of the span among those of all chunks. at: which sum.
    """
    lines, groups = kind.lines, kind.span // kind.sums
    numbers = code.plus(given["digits"], code.times(place, kind.span * lines * GROUP))
    sums = _offsets(code, kind, given, place, at)
    avx2 = kernels.has("avx2") and not (kernels.has("avx512vnni") or kernels.has("avxvnni"))
    if avx2 and kind.bits == 8:
        sums = [every(0)] * lines
    for group in range(at * groups, (at + 1) * groups):
        fours = _fours(code, kind, weights, group)
        own = code.plus(numbers, group * lines * GROUP)
        digits = [
            [code.spread(code.read(I32, code.plus(own, GROUP * line + 4 * four))) for line in range(lines)]
            for four in range(len(fours))
        ]
        if avx2:
            sums = _avx2_sums(code, kind, fours, digits, sums)
        else:
            for four, some in zip(fours, digits, strict=True):
                sums = [_dot(code, *each) for each in zip(sums, [four] * lines, some, strict=True)]
    return _of_digits(code, kind, sums)


def _offsets(code: Code, kind: Kind, given: dict[str, Any], place: Any, at: int) -> list[Any]:
    """What sums begin with, for each line."""
    offsets = code.plus(given["offsets"], code.times(place, kind.sums * kind.lines * 4), at * kind.lines * 4)
    return [code.spread(code.read(I32, code.plus(offsets, 4 * line))) for line in range(kind.lines)]


def _fours(code: Code, kind: Kind, weights: Any, group: int) -> list[Any]:
    """Of a tile and a group, four inputs' weights after the other's."""
    fours = []
    for piece in range(group * _bytes(kind), (group + 1) * _bytes(kind), 64):
        some = code.read(INTS, code.plus(weights, piece))
        if kind.rows > _FEW or (kind.bits == 4 and matrices.multiplies("int8")):
            code.prefetch(code.plus(weights, piece))
        low = every(0x0F0F0F0F)
        fours += [some] if kind.bits == 8 else [code.and_(some, low), code.and_(code.lshr(some, every(4)), low)]
    return fours


def _of_digits(code: Code, kind: Kind, sums: list[Any]) -> list[Any]:
    """Sums of numbers, from those of their digits."""
    if kind.digits == 1:
        return sums
    return [
        code.add(code.shl(high, every(8)), low) for high, low in zip(sums[: kind.rows], sums[kind.rows :], strict=True)
    ]


class _Matrices:
    """Sums of products by instructions for matrices, made a span ahead of their use: they come by way of memory, and
    what was written a moment ago is loaded late.
    """

    _X, _WEIGHTS = (4, 5), (6, 7)  # registers, of one group while the other's are in use; the first are for sums

    def __init__(self, code: Code, kind: Kind, given: dict[str, Any]) -> None:
        self._kind, self._given = kind, given
        sums, x, weights = (kind.lines, 4 * TILE), (kind.lines, GROUP), (GROUP // 4, 4 * TILE)
        matrices.begin(code, [sums] * min(self._X) + [x] * len(self._X) + [weights] * len(self._WEIGHTS))
        self._sums = [matrices.memory(code, 2 * kind.lines) for _ in range(kind.sums)]
        self._bytes = [matrices.memory(code, 2 * GROUP // 4) for _ in range(kind.span if kind.bits == 4 else 0)]

    def multiply(self, code: Code, weights: Any, place: Any, number: Any) -> None:
        """Make a span's sums.

        Args:
            weights: the address of the span's. place: of the span among those of all chunks. number: the span's, as
                ``sums`` will be given it.
        """
        kind = self._kind
        digits = code.plus(self._given["digits"], code.times(place, kind.span * kind.lines * GROUP))
        groups = [code.plus(weights, group * _bytes(kind)) for group in range(kind.span)]
        for group, memory in enumerate(self._bytes):
            fours = _fours(code, kind, weights, group)
            groups[group] = _every_other(code, memory, GROUP // 4, number)
            for row, four in enumerate(fours):
                code.write(four, code.plus(groups[group], matrices.ROW * row))
        for register in range(kind.sums):
            matrices.zero(code, register)
        for group, where in enumerate(groups):
            register = group * kind.sums // kind.span
            x, own = self._X[group % 2], self._WEIGHTS[group % 2]
            matrices.load(code, x, code.plus(digits, group * kind.lines * GROUP), GROUP)
            matrices.load(code, own, where)
            for row in range(GROUP // 4 if kind.bits == 8 else 0):
                code.prefetch(code.plus(where, matrices.ROW * row))
            matrices.multiply(code, "int8", register, x, own)
        for register, memory in enumerate(self._sums):
            matrices.store(code, register, _every_other(code, memory, kind.lines, number))

    def sums(self, code: Code, place: Any, number: Any, at: int) -> list[Any]:
        """What ``_sums`` returns."""
        kind = self._kind
        memory = _every_other(code, self._sums[at], kind.lines, number)
        found = [code.read(INTS, code.plus(memory, matrices.ROW * line)) for line in range(kind.lines)]
        offsets = _offsets(code, kind, self._given, place, at)
        return _of_digits(code, kind, [code.add(*each) for each in zip(found, offsets, strict=True)])


def _every_other(code: Code, memory: Any, rows: int, number: Any) -> Any:
    """The address of one half of twice so many rows, in turn."""
    return code.plus(memory, code.times(code.and_(number, I64(1)), matrices.ROW * rows))


def _dot(code: Code, sums: Any, unsigned: Any, signed: Any) -> Any:
    """Sums (16) int32, plus products of four bytes each, exactly."""
    if kernels.has("avx512vnni"):
        return code.intrinsic("llvm.x86.avx512.vpdpbusd.512", INTS, sums, unsigned, signed)
    if kernels.has("avxvnni"):
        return _by_halves(code, "llvm.x86.avx512.vpdpbusd.256", sums, unsigned, signed)
    for byte in range(4):
        weight = code.and_(code.lshr(unsigned, every(8 * byte)), every(255))
        number = code.ashr(code.shl(signed, every(24 - 8 * byte)), every(24))
        sums = code.add(sums, code.mul(weight, number))
    return sums


def _avx2_sums(code: Code, kind: Kind, fours: list[Any], digits: list[list[Any]], sums: list[Any]) -> list[Any]:
    """What ``_dot`` adds up, for a whole group; weights of 8 bits are taken without their offset."""
    if kind.bits == 4:  # pairs of products fit into 16 bits, and so do eight of them: 8 * 2 * 15 * 128
        pairs = [every(0, _PAIRS)] * len(sums)
        for four, some in zip(fours, digits, strict=True):
            given = [(code.bitcast(four, _BYTES), code.bitcast(one, _BYTES)) for one in some]
            found = [_by_halves(code, "llvm.x86.avx2.pmadd.ub.sw", *each) for each in given]
            pairs = [code.add(*each) for each in zip(pairs, found, strict=True)]
        found = [_by_halves(code, "llvm.x86.avx2.pmadd.wd", each, every(1, _PAIRS)) for each in pairs]
        return [code.add(*each) for each in zip(sums, found, strict=True)]
    # Pairs of products fit into 16 bits where weights have signs: 2 * 127 * 128. As the instruction takes one factor
    # without, that is the activation's size, and the weight gets both signs.
    positive = ir.Constant(ir.IntType(1), 0)
    for four, some in zip(fours, digits, strict=True):
        weight = code.bitcast(code.xor(four, every(-0x7F7F7F80)), _BYTES)
        for line, one in enumerate(some):
            number = code.bitcast(one, _BYTES)
            size = code.intrinsic("llvm.abs.v64i8", _BYTES, number, positive)
            signed = _by_halves(code, "llvm.x86.avx2.psign.b", weight, number)
            pairs = _by_halves(code, "llvm.x86.avx2.pmadd.ub.sw", size, signed)
            sums[line] = code.add(sums[line], _by_halves(code, "llvm.x86.avx2.pmadd.wd", pairs, every(1, _PAIRS)))
    return sums


def _by_halves(code: Code, name: str, *values: Any) -> Any:
    """An instruction of 256 bits, for 512."""
    number = {"b": I8, "sw": I16}.get(name.rpartition(".")[2], I32)
    kind = ir.VectorType(number, 256 // number.width)
    halves = [code.intrinsic(name, kind, *(code.half(value, upper) for value in values)) for upper in (False, True)]
    return code.shuffle_vector(*halves, ir.Constant(ir.VectorType(I32, 2 * kind.count), list(range(2 * kind.count))))
