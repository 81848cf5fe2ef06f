"""What kernels for the CPU at hand are written with: LLVM's own language, through llvmlite, and torch's own threads.

``shape.target.floats`` and ``shape.target.integers`` hold products, ``shape.target.elements`` what lies between them. A
kernel is a function of an array of addresses and numbers, and of which thread of how many calls it. A ``Program`` is
several, one after the other: threads are woken once for all of them.
"""

import ctypes
import hashlib
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from threading import get_ident
from typing import Any, Protocol, TypeVar

import llvmlite
import llvmlite.binding as llvm
import psutil
import torch
from llvmlite import ir
from torch import Tensor

from shape.errors import ShapeError
from shape.files import cache_folder, written_whole

TILE = 16  # outputs of a tile: one vector of 32-bit numbers, or what a CPU makes several of
PARALLEL = 1 << 18  # multiplications that are worth waking threads for
_FEW = 16  # tokens, for which products are kept ready: more have larger buffers, and time enough
_KEPT = 256  # such products
_LINE = 64  # bytes of a cache line
_SPINS = 2048  # looks at the others' arrival, behind which the core is offered to others before each
Made = TypeVar("Made")

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
INTS, FLOATS, HALVES = (ir.VectorType(kind, TILE) for kind in (I32, F32, I16))


@cache
def openmp() -> Any:
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


class Buffers:
    """Memory that kernels write, made once and used again from layer to layer, each of which asks for the same."""

    def __init__(self) -> None:
        self._made: list[Tensor] = []
        self._next = 0

    def again(self) -> None:
        """From the first one on: what was asked for is not needed any more."""
        self._next = 0

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        known = self._made[self._next] if self._next < len(self._made) else None
        self._next += 1
        if known is not None and known.shape == shape and known.dtype == dtype:
            return known
        made = torch.empty(shape, dtype=dtype)
        if known is None:
            self._made.append(made)
        return made


class Program:
    """Kernels and their arguments, in the order in which all threads go through them.

    Attributes:
        buffers: where products find memory for what they write.
    """

    def __init__(self, buffers: Buffers | None = None) -> None:
        self.buffers = buffers or Buffers()
        self._steps: list[int] = []
        self._kept: list[Any] = []
        self._array: Any = None
        self._counts = (ctypes.c_int64 * (2 * _LINE // 8))()
        self._arrived = -ctypes.addressof(self._counts) % _LINE // 8  # which of them begins a cache line

    def __len__(self) -> int:
        return len(self._steps) // 3

    def add(self, kernel: int, *arguments: int | Tensor) -> None:
        """Go on with the kernel at an address: numbers of 64 bits, and tensors, of which it is given the address."""
        given = [one.data_ptr() if isinstance(one, Tensor) else one for one in arguments]
        array = (ctypes.c_int64 * len(given))(*given)
        self._steps += kernel, ctypes.addressof(array), 0
        self._kept.append((array, list(arguments)))

    def vacate(self, tensor: Tensor) -> list[tuple[Any, int]]:
        """Leave a tensor's address open. Returns the arrays and indices that held it, for another's before each run."""
        places = []
        for array, arguments in self._kept:
            for at, one in enumerate(arguments):
                if one is tensor:
                    arguments[at] = None
                    places.append((array, at))
        return places

    def wait(self) -> None:
        """A barrier: until all threads have finished the last kernel. Not needed where the next kernel divides its work
        the same way and each thread reads only what it wrote itself.
        """
        self._steps[-1] = 1

    def run(self, work: int) -> None:
        """By torch's threads, where so many multiplications are worth waking them for."""
        threads = torch.get_num_threads() if work >= PARALLEL else 1
        if self._array is None or len(self._array) != len(self._steps) + 2:
            arrived = ctypes.addressof(self._counts) + 8 * self._arrived
            self._array = (ctypes.c_int64 * (len(self._steps) + 2))(len(self), arrived, *self._steps)
        self._counts[self._arrived] = 0
        library = openmp()
        if library is None:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_runner())(ctypes.addressof(self._array))
        else:
            library.GOMP_parallel(_runner(), ctypes.addressof(self._array), threads, 0)


def put(places: list[tuple[Any, int]], address: int) -> None:
    """Give programs an address, for their next run, where they have let go of a tensor."""
    for array, at in places:
        array[at] = address


class Pool:
    """What is made once for each of some keys, and used from then on, by one thread at a time.

    Args:
        most: keys, beyond which all is forgotten.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[Any, list[Any]] = {}

    @contextmanager
    def lend(self, key: Any, make: Callable[[], Made]) -> Iterator[Made]:
        """Lend one to this thread alone, as several may decode at a time."""
        try:
            one = self._held[key].pop()
        except (KeyError, IndexError):
            one = make()
        yield one
        if len(self._held) >= self._most and key not in self._held:
            self._held.clear()
        self._held.setdefault(key, []).append(one)


class Blocks(Protocol):
    """A weight in a layout of kernels, which make programs of products with it.

    Attributes:
        layout: equal for weights that the same program serves, if their ``tensors`` are exchanged.
    """

    @property
    def weights(self) -> Tensor: ...
    @property
    def layout(self) -> tuple[Any, ...]: ...
    @property
    def tensors(self) -> Sequence[Tensor]: ...
    def prepare(self, program: Program, x: Tensor, grain: int) -> Any: ...
    def multiply(self, program: Program, x: Any, dtype: torch.dtype) -> Tensor: ...


_PRODUCTS = Pool(_KEPT)


def multiplied(blocks: Blocks, x: Tensor, grain: int) -> Tensor:
    """x times the transposed weights, by a program of nothing else.

    Args:
        x: (T, inputs), contiguous, T > 0. grain: as of ``Blocks.prepare``.

    Returns:
        (T or more, outputs or more) in x's dtype.
    """
    make, tokens = partial(_Product, blocks, x, grain), x.shape[0]
    if tokens > _FEW:
        return make()(blocks, x)
    with _PRODUCTS.lend((blocks.layout, x.dtype, tokens), make) as product:
        return product(blocks, x)


class _Product:
    """The program of a product, for any weight of a layout and any x of a shape."""

    def __init__(self, blocks: Blocks, x: Tensor, grain: int) -> None:
        self._program = Program()
        prepared = blocks.prepare(self._program, x, grain)
        if len(self._program):
            self._program.wait()
        out = blocks.multiply(self._program, prepared, x.dtype)
        self._program.buffers = Buffers()  # which would hold the memory of `out`
        self._shape = out.shape
        self._places = [self._program.vacate(one) for one in (out, x, *blocks.tensors)]

    def __call__(self, blocks: Blocks, x: Tensor) -> Tensor:
        out = torch.empty(self._shape, dtype=x.dtype)
        for places, one in zip(self._places, (out, x, *blocks.tensors), strict=True):
            put(places, one.data_ptr())
        self._program.run(x.shape[0] * blocks.weights.numel())
        return out


@cache
def _runner() -> int:
    """The address of what each thread runs, given a program's array: the number of its steps, the address of a 0, at
    which threads that have come to a wait are counted, and the steps.

    Threads wait by looking, as most waits are shorter than a microsecond; OpenMP's own barrier calls the system.
    """
    module = ir.Module()
    code = Code(ir.Function(module, ir.FunctionType(ir.VoidType(), [I64]), "run").append_basic_block())
    given, thread, threads = code.function.args[0], I64(0), I64(1)
    if openmp() is not None:
        thread = code.zext(code.intrinsic("omp_get_thread_num", I32), I64)
        threads = code.zext(code.intrinsic("omp_get_num_threads", I32), I64)
    arrived = code.inttoptr(code.read(I64, code.plus(given, 8)), I64.as_pointer())
    start = code.block
    number, code, done = code.counted(code.read(I64, given), "steps")
    before = code.phi(I64)  # arrivals, of all threads, at the waits so far
    before.add_incoming(I64(0), start)
    step = code.plus(given, 16, code.times(number, 24))
    kernel, arguments, wait = (code.read(I64, code.plus(step, at)) for at in (0, 8, 16))
    kind = ir.FunctionType(ir.VoidType(), [I64.as_pointer(), I64, I64]).as_pointer()
    code.call(code.inttoptr(kernel, kind), [code.inttoptr(arguments, I64.as_pointer()), thread, threads])
    expected = code.add(before, code.mul(wait, threads))
    if openmp() is not None:
        waiting, on = code.append_basic_block("waiting"), code.append_basic_block("on")
        code.cbranch(code.icmp_unsigned("==", wait, I64(0)), on, waiting)
        code = Code(waiting)
        code.atomic_rmw("add", arrived, I64(1), "acq_rel")
        _spin_until(code, arrived, expected, on)
        code = Code(on)
    before.add_incoming(expected, code.block)
    code.again(number, done).ret_void()
    return compiled(module)["run"]


def _spin_until(code: "Code", arrived: Any, expected: Any, on: Any) -> None:
    """Go on once so many have arrived."""
    look, relax, offer = (code.append_basic_block(name) for name in ("look", "relax", "offer"))
    start = code.block
    code.branch(look)
    code = Code(look)
    looks = code.phi(I64)
    looks.add_incoming(I64(0), start)
    code.cbranch(code.icmp_unsigned(">=", code.load_atomic(arrived, "acquire", 8), expected), on, relax)
    code = Code(relax)
    if has("sse2"):
        code.intrinsic("llvm.x86.sse2.pause", ir.VoidType())
    more = code.add(looks, I64(1))
    looks.add_incoming(more, relax)
    code.cbranch(code.icmp_unsigned("<", more, I64(_SPINS)), look, offer)
    code = Code(offer)
    code.intrinsic("sched_yield", I32)
    looks.add_incoming(more, offer)
    code.branch(look)


@cache
def has(feature: str) -> bool:
    """Whether this CPU has a feature, by LLVM's name for it."""
    return bool(llvm.get_host_cpu_features().get(feature))


_ENGINES: list[Any] = []  # what keeps machine code alive


def compiled(module: ir.Module) -> dict[str, int]:
    """Addresses of a module's functions by name, made for the CPU at hand.

    Machine code takes one to three tenths of a second to make, and is kept in ``cache_folder`` for later processes.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if (library := openmp()) is not None:
        for name in ("omp_get_thread_num", "omp_get_num_threads"):
            llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
        llvm.add_symbol("sched_yield", ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value)
    target = llvm.Target.from_default_triple()
    features = llvm.get_host_cpu_features().flatten() + (",-prefer-256-bit" if has("avx512f") else "")
    machine = target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=2, jit=True)
    source = str(module)
    made_of = (source, target.triple, llvm.get_host_cpu_name(), features, llvmlite.__version__)
    name = hashlib.sha256(repr(made_of).encode()).hexdigest()
    if (code := _kept(name)) is None:
        parsed = llvm.parse_assembly(source)
        parsed.verify()
        passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
        passes.getModulePassManager().run(parsed, passes)
        code = machine.emit_object(parsed)
        _keep(name, code)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _ENGINES.append(engine)
    return {one.name: engine.get_function_address(one.name) for one in module.functions if not one.is_declaration}


def _kept(name: str) -> bytes | None:
    """Machine code as it was written; None where there is none, or it is damaged."""
    try:
        content = (cache_folder() / "kernels" / name).read_bytes()
    except (OSError, RuntimeError):  # the latter: there is no home
        return None
    digest, code = content[:32], content[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def _keep(name: str, code: bytes) -> None:
    """Behind its digest, where there is a place for it."""
    with (
        suppress(OSError, RuntimeError, ShapeError),
        written_whole(cache_folder() / "kernels" / name, f".{os.getpid()}.{get_ident()}") as file,
    ):
        file.write_bytes(hashlib.sha256(code).digest() + code)


class Code(ir.IRBuilder):
    """LLVM's builder, with the few things that the kernels are made of. Addresses are integers."""

    def plus(self, address: Any, *offsets: Any) -> Any:
        for offset in offsets:
            address = self.add(address, offset if isinstance(offset, ir.Value) else I64(offset))
        return address

    def times(self, *factors: Any) -> Any:
        product: Any = I64(1)
        for factor in factors:
            product = self.mul(product, factor if isinstance(factor, ir.Value) else I64(factor))
        return product

    def read(self, kind: Any, address: Any) -> Any:
        found = self.load(self.inttoptr(address, kind.as_pointer()))
        found.align = 1
        return found

    def write(self, value: Any, address: Any) -> None:
        self.store(value, self.inttoptr(address, value.type.as_pointer())).align = 1

    def prefetch(self, address: Any) -> None:
        """Prefetches memory, where several tokens keep the core from asking early enough by itself. With AVX-512 far
        ahead and into the second cache, which is up to twice as fast as into the first; with AVX2 alone it is slower.
        """
        ahead, cache = (16384, 2) if has("avx512f") else (2048, 3)
        place = self.inttoptr(self.plus(address, ahead), I8.as_pointer())
        self.intrinsic("llvm.prefetch.p0", ir.VoidType(), place, I32(0), I32(cache), I32(1))

    def spread(self, value: Any, count: int = TILE) -> Any:
        """A number, as a vector of it."""
        kind = ir.VectorType(value.type, count)
        one = self.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
        return self.shuffle_vector(one, ir.Constant(kind, ir.Undefined), every(0, ir.VectorType(I32, count)))

    def half(self, vector: Any, upper: bool) -> Any:
        count = vector.type.count // 2
        places = range(count, 2 * count) if upper else range(count)
        undefined = ir.Constant(vector.type, ir.Undefined)
        return self.shuffle_vector(vector, undefined, ir.Constant(ir.VectorType(I32, count), list(places)))

    def intrinsic(self, name: str, result: Any, *values: Any) -> Any:
        function = self.module.globals.get(name) or ir.Function(
            self.module, ir.FunctionType(result, [value.type for value in values]), name
        )
        return self.call(function, values)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """x y + z, rounded once."""
        return self.intrinsic(f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)

    def total(self, floats: Any) -> Any:
        """The sum of a vector's numbers, halves upon halves: always in this order, which LLVM's own need not be in."""
        while floats.type.count > 1:
            floats = self.fadd(self.half(floats, False), self.half(floats, True))
        return self.extract_element(floats, I32(0))

    def widened(self, halves: Any) -> Any:
        """bfloat16 as float32."""
        kind = ir.VectorType(I32, halves.type.count)
        return self.bitcast(self.shl(self.zext(halves, kind), every(16, kind)), ir.VectorType(F32, kind.count))

    def narrowed(self, floats: Any) -> Any:
        """float32 as bfloat16, to the nearest, ties to even."""
        kind = ir.VectorType(I32, floats.type.count)
        bits = self.bitcast(floats, kind)
        odd = self.and_(self.lshr(bits, every(16, kind)), every(1, kind))
        bits = self.lshr(self.add(self.add(bits, every(0x7FFF, kind)), odd), every(16, kind))
        return self.trunc(bits, ir.VectorType(I16, kind.count))

    def take(self, dtype: torch.dtype, address: Any, count: int = TILE) -> Any:
        """So many numbers of float32 or bfloat16, as float32."""
        wide = dtype == torch.float32
        read = self.read(ir.VectorType(F32 if wide else I16, count), address)
        return read if wide else self.widened(read)

    def put(self, dtype: torch.dtype, floats: Any, address: Any) -> None:
        self.write(floats if dtype == torch.float32 else self.narrowed(floats), address)

    def stored(self, dtype: torch.dtype, floats: Any) -> Any:
        """Rounded as they would be stored."""
        return floats if dtype == torch.float32 else self.widened(self.narrowed(floats))

    def exp(self, x: Any) -> Any:
        """e to the power of float32, to one or two units in the last place: Cephes' polynomial; above 88 that of 88."""
        count = x.type.count
        kind, name = ir.VectorType(I32, count), f"v{count}f32"
        least = every(-87.3, x.type)
        small = self.fcmp_ordered("<", x, least)
        most = every(88.0, x.type)
        x = self.select(small, least, self.select(self.fcmp_ordered(">", x, most), most, x))  # which NaN passes
        power = self.intrinsic(f"llvm.rint.{name}", x.type, self.fmul(x, every(1.44269504088896341, x.type)))
        x = self.fma(power, every(-0.693359375, x.type), x)
        x = self.fma(power, every(2.12194440e-4, x.type), x)
        y = every(1.9875691500e-4, x.type)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            y = self.fma(y, x, every(factor, x.type))
        y = self.fadd(self.fma(y, self.fmul(x, x), x), every(1.0, x.type))
        bits = self.add(self.bitcast(y, kind), self.shl(self.fptosi(power, kind), every(23, kind)))
        return self.select(small, every(0.0, x.type), self.bitcast(bits, x.type))

    def counted(self, end: Any, name: str, first: Any = None) -> tuple[Any, "Code", Any]:
        """A loop from `first`, or 0, to below `end`: its number, its code, and the block that ``again`` leads to."""
        before, inside = self.block, self.append_basic_block(name)
        behind = self.append_basic_block(f"{name}_done")
        self.branch(inside)
        code = Code(inside)
        number = code.phi(I64)
        number.add_incoming(first or I64(0), before)
        number.limit = end
        return number, code, behind

    def again(self, number: Any, behind: Any) -> "Code":
        """The end of a loop's inside; returns the code behind it."""
        following = self.add(number, I64(1))
        number.add_incoming(following, self.block)
        self.cbranch(self.icmp_unsigned("<", following, number.limit), number.parent, behind)
        return Code(behind)


def every(value: float, kind: Any = INTS) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def begin(module: ir.Module, name: str, arguments: tuple[str, ...]) -> tuple[Code, dict[str, Any]]:
    """A kernel: the code inside, and its arguments by name, all of 64 bits."""
    kind = ir.FunctionType(ir.VoidType(), [I64.as_pointer(), I64, I64])
    function = ir.Function(module, kind, name)
    code = Code(function.append_basic_block())
    return code, {name: code.load(code.gep(function.args[0], [I64(at)])) for at, name in enumerate(arguments)}


def own_units(code: Code, units: Any, name: str = "units", parts: Any = 1) -> tuple[Any, Code, Any]:
    """A loop over this thread's share of so many units, or over all parts of these: see ``Code.counted``."""
    first, end, code = own_share(code, units)
    return code.counted(code.times(end, parts), name, code.times(first, parts))


def own_share(code: Code, units: Any) -> tuple[Any, Any, Code]:
    """First and end of this thread's share of so many units, and the code that follows where there is one."""
    _, thread, threads = code.function.args
    first = code.udiv(code.mul(units, thread), threads)
    end = code.udiv(code.mul(units, code.plus(thread, 1)), threads)
    with code.if_then(code.icmp_unsigned("==", first, end)):
        code.ret_void()
    return first, end, code


def bits(value: float) -> int:
    """Of a float32, as arguments are numbers of 64 bits."""
    return int.from_bytes(struct.pack("<f", value), "little")


def row_bytes(x: Tensor) -> int:
    """From one row to the next."""
    return x.stride(0) * x.itemsize
