"""Products with weights of 8 and 4 bits for a few tokens: kernels in LLVM's own language, made for the CPU at hand.

A forward over one token costs what its weights' bytes cost; one over a tree costs no more for as long as the cores
multiply as fast as the memory delivers. In bfloat16 two cores do not; in integers of 8 bits, of which AVX-512 VNNI
multiplies 64 at once, they nearly do. Activations have a scale per token and group of 32, as in llama.cpp: one for a
whole forward, or for a whole token, loses much more where few activations are large.

Sums of integers are exact, and the sums of groups are added in one order: a token's result is the same, bit for bit,
whatever goes through beside it. The kernels run on the threads that torch itself computes with. On a CPU without VNNI
the same sums are taken by ordinary instructions, slowly.

Layout: outputs in tiles of 16, and of a tile, four inputs after four, 16 x 4 bytes; in 4 bits each byte holds four
inputs' weights in its low half and the next four's in its high half. Weights are stored unsigned, by an offset.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import psutil
import torch
from llvmlite import ir
from torch import Tensor

TILE = 16  # outputs of a tile, one vector of 32-bit sums
GROUP = 32  # inputs that share a scale
_MOST_ROWS = {1: 13, 2: 8}  # tokens whose sums fit into the registers, by digits of activations
_AHEAD = 2048  # bytes from memory asked for early, where several tokens keep the core from asking by itself
_PARALLEL = 1 << 18  # multiplications that are worth waking threads for
_DIGITS = {torch.bfloat16: 1, torch.float32: 2}  # an activation's, of 8 bits each
_LARGEST = {1: 127.0, 2: 127.0 * 256}

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_INTS, _FLOATS, _HALVES = (ir.VectorType(kind, TILE) for kind in (_I32, _F32, _I16))
_ARGUMENTS = ("weights", "scales", "x", "digits", "offsets", "steps", "out", "chunks", "groups", "tiles")


@dataclass(frozen=True)
class Kind:
    """What a kernel is made for.

    Attributes:
        bits: of a weight, 8 (a float32 scale per output) or 4 (a bfloat16 scale per output and group).
        dtype: of activations and results: bfloat16, whose own 8 bits become 8; or float32, which become 16.
        rows: tokens that it takes at a time.
    """

    bits: int
    dtype: torch.dtype
    rows: int

    @property
    def digits(self) -> int:
        return _DIGITS[self.dtype]


@dataclass(frozen=True)
class Kernel:
    """Addresses of functions that take an array of ``_ARGUMENTS``, and what keeps them alive."""

    quantise: Any
    multiply: int
    engine: Any


def serves(dtype: torch.dtype) -> bool:
    """Whether there are kernels for activations of this dtype."""
    return dtype in _DIGITS


def product(x: Tensor, weights: Tensor, scales: Tensor, bits: int, outputs: int) -> Tensor:
    """x times the transposed weights.

    Args:
        x: (..., K) bfloat16 or float32 on the CPU, K a multiple of 32.
        weights: packed, (tiles of outputs, K / 4 for 8 bits or K / 8 for 4, 16, 4) uint8.
        scales: the bytes of (tiles, 16) float32 for 8 bits, of (tiles, K / 32, 16) bfloat16 for 4.

    Returns:
        (..., outputs) in x's dtype.
    """
    x = x.contiguous()
    inputs, tiles = x.shape[-1], weights.shape[0]
    tokens, groups = x.numel() // inputs, inputs // GROUP
    digits = _DIGITS[x.dtype]
    chunks = -(-tokens // _MOST_ROWS[digits])
    if not tokens:
        return x.new_empty(*x.shape[:-1], outputs)
    rows = -(-tokens // chunks)  # of each; the last one's may be more than there are, of which nothing is read
    kernel = _kernel(Kind(bits, x.dtype, rows))
    out = x.new_empty(chunks * rows, tiles * TILE)
    # What a group needs lies together: rows that are a power of two apart would drive each other out of the cache.
    numbers = torch.empty(chunks, groups, digits, rows, GROUP, dtype=torch.int8)
    offsets = torch.empty(chunks, groups, digits, rows, dtype=torch.int32)
    steps = torch.empty(chunks, groups, rows, dtype=torch.float32)
    given = (weights, scales, x, numbers, offsets, steps, out)
    arguments = (ctypes.c_int64 * len(_ARGUMENTS))(*(one.data_ptr() for one in given), chunks, groups, tiles)
    kernel.quantise(arguments, tokens)
    _in_parallel(kernel.multiply, arguments, tokens * weights.numel())
    return out[:tokens, :outputs].reshape(*x.shape[:-1], outputs)


@cache
def _openmp() -> Any:
    """The library whose threads torch computes with, where it is GNU's; None elsewhere."""
    if not hasattr(psutil.Process, "memory_maps") or "USE_OPENMP=ON" not in torch.__config__.show():
        return None
    torch.zeros(1)
    found = [one.path for one in psutil.Process().memory_maps() if "libgomp" in one.path]
    first = [path for path in found if "torch" in path] + found
    if not first:
        return None
    library = ctypes.CDLL(first[0])
    library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    library.GOMP_parallel.restype = None
    return library


def _in_parallel(function: int, arguments: Any, work: int) -> None:
    library, threads = _openmp(), torch.get_num_threads() if work >= _PARALLEL else 1
    if library is None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(ctypes.addressof(arguments))
    else:
        library.GOMP_parallel(function, ctypes.addressof(arguments), threads, 0)


def _has(feature: str) -> bool:
    """Whether this CPU has a feature, by LLVM's name for it."""
    return bool(llvm.get_host_cpu_features().get(feature))


@cache
def _kernel(kind: Kind) -> Kernel:
    """Compiled at the first call, in a tenth of a second."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = ir.Module()
    _quantiser(module, kind)
    _multiplier(module, kind, _has("avx512vnni"), parallel=_openmp() is not None)
    if (library := _openmp()) is not None:
        for name in ("omp_get_thread_num", "omp_get_num_threads"):
            llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten() + (",-prefer-256-bit" if _has("avx512f") else ""),
        opt=2,
    )
    parsed = llvm.parse_assembly(str(module))
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(parsed, passes)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    quantise = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(engine.get_function_address("quantise"))
    return Kernel(quantise, engine.get_function_address("multiply"), engine)


class _Code(ir.IRBuilder):
    """LLVM's builder, with the few things that the kernels are made of. Addresses are integers."""

    def at(self, address: Any, *offsets: Any) -> Any:
        for offset in offsets:
            address = self.add(address, offset if isinstance(offset, ir.Value) else _I64(offset))
        return address

    def times(self, *factors: Any) -> Any:
        product: Any = _I64(1)
        for factor in factors:
            product = self.mul(product, factor if isinstance(factor, ir.Value) else _I64(factor))
        return product

    def read(self, kind: Any, address: Any) -> Any:
        found = self.load(self.inttoptr(address, kind.as_pointer()))
        found.align = 1
        return found

    def write(self, value: Any, address: Any) -> None:
        self.store(value, self.inttoptr(address, value.type.as_pointer())).align = 1

    def spread(self, value: Any) -> Any:
        """A number, as a vector of it."""
        kind = ir.VectorType(value.type, TILE)
        one = self.insert_element(ir.Constant(kind, ir.Undefined), value, _I32(0))
        return self.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(_INTS, [0] * TILE))

    def intrinsic(self, name: str, result: Any, *values: Any) -> Any:
        function = self.module.globals.get(name) or ir.Function(
            self.module, ir.FunctionType(result, [value.type for value in values]), name
        )
        return self.call(function, values)

    def widened(self, halves: Any) -> Any:
        """bfloat16 as float32."""
        return self.bitcast(self.shl(self.zext(halves, _INTS), _all(16)), _FLOATS)

    def narrowed(self, floats: Any) -> Any:
        """float32 as bfloat16, to the nearest, ties to even."""
        bits = self.bitcast(floats, _INTS)
        odd = self.and_(self.lshr(bits, _all(16)), _all(1))
        return self.trunc(self.lshr(self.add(self.add(bits, _all(0x7FFF)), odd), _all(16)), _HALVES)

    def dot(self, sums: Any, unsigned: Any, signed: Any, vnni: bool) -> Any:
        """Sums (16) int32, plus products of four bytes each."""
        if vnni:
            return self.intrinsic("llvm.x86.avx512.vpdpbusd.512", _INTS, sums, unsigned, signed)
        for byte in range(4):
            weight = self.and_(self.lshr(unsigned, _all(8 * byte)), _all(255))
            number = self.ashr(self.shl(signed, _all(24 - 8 * byte)), _all(24))
            sums = self.add(sums, self.mul(weight, number))
        return sums

    def counted(self, count: Any, name: str) -> tuple[Any, "_Code", Any]:
        """A loop: its number, the code inside of it, and the block behind it, which ``again`` leads to."""
        before, inside = self.block, self.append_basic_block(name)
        behind = self.append_basic_block(f"{name}_done")
        self.branch(inside)
        code = _Code(inside)
        number = code.phi(_I64)
        number.add_incoming(_I64(0), before)
        number.limit = count
        return number, code, behind

    def again(self, number: Any, behind: Any) -> "_Code":
        """The end of a loop's inside; returns the code behind it."""
        following = self.add(number, _I64(1))
        number.add_incoming(following, self.block)
        self.cbranch(self.icmp_unsigned("<", following, number.limit), number.parent, behind)
        return _Code(behind)


def _all(value: float, kind: Any = _INTS) -> Any:
    return ir.Constant(kind, [value] * TILE)


def _begin(module: ir.Module, name: str, more: tuple[Any, ...] = ()) -> tuple[Any, _Code, dict[str, Any]]:
    """A function of ``_ARGUMENTS`` and more."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64.as_pointer(), *more]), name)
    code = _Code(function.append_basic_block())
    given = {
        name: code.load(code.gep(function.args[0], [_I64(number)])) for number, name in enumerate(_ARGUMENTS)
    }  # fmt: skip
    return function, code, given


def _quantiser(module: ir.Module, kind: Kind) -> None:
    """Activations to digits of 8 bits, group by group, with what the weights' offset adds to sums taken off ahead.

    NaN and infinity become a step of NaN or infinity, and so do the results.
    """
    function, code, given = _begin(module, "quantise", (_I64,))
    groups = given["groups"]
    token, code, done = code.counted(function.args[1], "tokens")
    chunk, row = code.udiv(token, _I64(kind.rows)), code.urem(token, _I64(kind.rows))
    group, inner, after = code.counted(groups, "groups")
    where = inner.at(inner.times(inner.at(inner.times(token, groups), group), GROUP * kind.dtype.itemsize), given["x"])
    halves = GROUP // TILE
    if kind.dtype == torch.bfloat16:
        x = [inner.widened(inner.read(_HALVES, inner.at(where, 2 * TILE * half))) for half in range(halves)]
    else:
        x = [inner.read(_FLOATS, inner.at(where, 4 * TILE * half)) for half in range(halves)]
    sizes = [inner.and_(inner.bitcast(one, _INTS), _all(0x7FFFFFFF)) for one in x]  # ordered as floats are, NaN above
    size = inner.intrinsic("llvm.umax.v16i32", _INTS, *sizes)
    largest = inner.bitcast(inner.intrinsic("llvm.vector.reduce.umax.v16i32", _I32, size), _F32)
    most = ir.Constant(_F32, _LARGEST[kind.digits])
    small = inner.fcmp_ordered("<", largest, ir.Constant(_F32, 2.0**-100))  # of which the inverse may not exist
    inverse = inner.spread(inner.select(small, ir.Constant(_F32, 0.0), inner.fdiv(most, largest)))
    place = inner.at(inner.times(chunk, groups), group)
    step = inner.at(inner.times(place, kind.rows), row)
    inner.write(inner.fdiv(largest, most), inner.at(given["steps"], inner.times(step, 4)))
    numbers = [inner.fptosi(inner.intrinsic("llvm.rint.v16f32", _FLOATS, inner.fmul(one, inverse)), _INTS) for one in x]
    digits = [numbers]
    if kind.digits == 2:
        high = [inner.ashr(inner.add(one, _all(128)), _all(8)) for one in numbers]
        digits = [high, [inner.sub(one, inner.shl(h, _all(8))) for one, h in zip(numbers, high, strict=True)]]
    offset = 1 << (kind.bits - 1)
    for number, digit in enumerate(digits):
        line = inner.at(inner.times(inner.at(inner.times(place, kind.digits), number), kind.rows), row)
        for half, values in enumerate(digit):
            at = inner.at(given["digits"], inner.times(line, GROUP), half * TILE)
            inner.write(inner.trunc(values, ir.VectorType(_I8, TILE)), at)
        total = inner.intrinsic("llvm.vector.reduce.add.v16i32", _I32, inner.add(*digit))
        inner.write(inner.mul(total, _I32(-offset)), inner.at(given["offsets"], inner.times(line, 4)))
    code = inner.again(group, after)
    code.again(token, done).ret_void()


def _multiplier(module: ir.Module, kind: Kind, vnni: bool, parallel: bool) -> None:
    """This thread's share of the tiles, each times all chunks of tokens."""
    _, code, given = _begin(module, "multiply")
    tiles, groups = given["tiles"], given["groups"]
    if parallel:
        thread = code.zext(code.intrinsic("omp_get_thread_num", _I32), _I64)
        threads = code.zext(code.intrinsic("omp_get_num_threads", _I32), _I64)
    else:
        thread, threads = _I64(0), _I64(1)
    begin = code.udiv(code.mul(tiles, thread), threads)
    count = code.sub(code.udiv(code.mul(tiles, code.at(thread, 1)), threads), begin)
    nothing, work = code.append_basic_block("nothing"), code.append_basic_block("work")
    code.cbranch(code.icmp_unsigned("==", count, _I64(0)), nothing, work)
    _Code(nothing).ret_void()
    number, code, done = _Code(work).counted(count, "tiles")
    tile = code.at(number, begin)
    chunk, code, after = code.counted(given["chunks"], "chunks")
    first = code.times(chunk, kind.rows)  # its first token
    weights = code.at(given["weights"], code.times(tile, groups, _bytes(kind)))
    scales = code.at(given["scales"], code.times(tile, groups, 2 * TILE) if kind.bits == 4 else code.times(tile, 64))
    group, inner, behind = code.counted(groups, "groups")
    totals = [inner.phi(_FLOATS) for _ in range(kind.rows)]
    for total in totals:
        total.add_incoming(_all(0.0, _FLOATS), code.block)
    place = inner.at(inner.times(chunk, groups), group)
    sums = _group_sums(inner, kind, given, inner.at(weights, inner.times(group, _bytes(kind))), place, vnni)
    steps = inner.at(given["steps"], inner.times(place, 4 * kind.rows))
    scale = (
        inner.widened(inner.read(_HALVES, inner.at(scales, inner.times(group, 2 * TILE)))) if kind.bits == 4 else None
    )
    found = []
    for row, total in enumerate(totals):
        step = inner.spread(inner.read(_F32, inner.at(steps, 4 * row)))
        step = step if scale is None else inner.fmul(step, scale)
        found.append(inner.intrinsic("llvm.fma.v16f32", _FLOATS, inner.sitofp(sums[row], _FLOATS), step, total))
        total.add_incoming(found[-1], inner.block)
    code = inner.again(group, behind)
    for row, value in enumerate(found):
        value = value if kind.bits == 4 else code.fmul(value, code.read(_FLOATS, scales))
        value = code.narrowed(value) if kind.dtype == torch.bfloat16 else value
        at = code.times(code.at(code.times(code.at(first, row), tiles), tile), TILE * kind.dtype.itemsize)
        code.write(value, code.at(given["out"], at))
    code = code.again(chunk, after)
    code.again(number, done).ret_void()


def _bytes(kind: Kind) -> int:
    """Of a tile's weights in a group."""
    return GROUP * TILE * kind.bits // 8


def _group_sums(code: _Code, kind: Kind, given: dict[str, Any], weights: Any, place: Any, vnni: bool) -> list[Any]:
    """Of a tile and a group, for each token of a chunk (16) int32: the sums of products, in units of their steps.

    Args:
        weights: their address.
        place: of the group among those of all chunks.
    """
    lines = kind.digits * kind.rows
    numbers = code.at(given["digits"], code.times(place, lines * GROUP))
    offsets = code.at(given["offsets"], code.times(place, lines * 4))
    sums = [code.spread(code.read(_I32, code.at(offsets, 4 * line))) for line in range(lines)]
    fours = []
    for piece in range(0, _bytes(kind), 64):
        some = code.read(_INTS, code.at(weights, piece))
        if kind.rows > 3:
            ahead = code.inttoptr(code.at(weights, piece + _AHEAD), _I8.as_pointer())
            code.intrinsic("llvm.prefetch.p0", ir.VoidType(), ahead, _I32(0), _I32(3), _I32(1))
        low = _all(0x0F0F0F0F)
        fours += [some] if kind.bits == 8 else [code.and_(some, low), code.and_(code.lshr(some, _all(4)), low)]
    for number, four in enumerate(fours):
        for line in range(lines):
            some = code.spread(code.read(_I32, code.at(numbers, GROUP * line + 4 * number)))
            sums[line] = code.dot(sums[line], four, some, vnni)
    if kind.digits == 1:
        return sums
    return [
        code.add(code.shl(high, _all(8)), low) for high, low in zip(sums[: kind.rows], sums[kind.rows :], strict=True)
    ]
