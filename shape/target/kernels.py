"""What kernels for the CPU at hand are written with: LLVM's own language, through llvmlite, and torch's own threads.

``shape.target.integers`` and ``shape.target.bfloat16`` hold the kernels. A kernel is a function of one array of
addresses and numbers, so that a call costs little.
"""

import ctypes
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import psutil
import torch
from llvmlite import ir

TILE = 16  # outputs of a tile: one vector of 32-bit numbers, or what a CPU makes several of
PARALLEL = 1 << 18  # multiplications that are worth waking threads for

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


def in_parallel(function: int, arguments: Any, work: int) -> None:
    library, threads = openmp(), torch.get_num_threads() if work >= PARALLEL else 1
    if library is None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(ctypes.addressof(arguments))
    else:
        library.GOMP_parallel(function, ctypes.addressof(arguments), threads, 0)


@cache
def has(feature: str) -> bool:
    """Whether this CPU has a feature, by LLVM's name for it."""
    return bool(llvm.get_host_cpu_features().get(feature))


def compiled(module: ir.Module) -> Any:
    """What keeps a module's machine code, made for this CPU in a tenth of a second or two, and knows its addresses."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if (library := openmp()) is not None:
        for name in ("omp_get_thread_num", "omp_get_num_threads"):
            llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten() + (",-prefer-256-bit" if has("avx512f") else ""),
        opt=2,
    )
    parsed = llvm.parse_assembly(str(module))
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(parsed, passes)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    return engine


class Code(ir.IRBuilder):
    """LLVM's builder, with the few things that the kernels are made of. Addresses are integers."""

    def at(self, address: Any, *offsets: Any) -> Any:
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

    def spread(self, value: Any) -> Any:
        """A number, as a vector of it."""
        kind = ir.VectorType(value.type, TILE)
        one = self.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
        return self.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(INTS, [0] * TILE))

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

    def widened(self, halves: Any) -> Any:
        """bfloat16 as float32."""
        return self.bitcast(self.shl(self.zext(halves, INTS), every(16)), FLOATS)

    def narrowed(self, floats: Any) -> Any:
        """float32 as bfloat16, to the nearest, ties to even."""
        bits = self.bitcast(floats, INTS)
        odd = self.and_(self.lshr(bits, every(16)), every(1))
        return self.trunc(self.lshr(self.add(self.add(bits, every(0x7FFF)), odd), every(16)), HALVES)

    def counted(self, count: Any, name: str) -> tuple[Any, "Code", Any]:
        """A loop: its number, the code inside of it, and the block behind it, which ``again`` leads to."""
        before, inside = self.block, self.append_basic_block(name)
        behind = self.append_basic_block(f"{name}_done")
        self.branch(inside)
        code = Code(inside)
        number = code.phi(I64)
        number.add_incoming(I64(0), before)
        number.limit = count
        return number, code, behind

    def again(self, number: Any, behind: Any) -> "Code":
        """The end of a loop's inside; returns the code behind it."""
        following = self.add(number, I64(1))
        number.add_incoming(following, self.block)
        self.cbranch(self.icmp_unsigned("<", following, number.limit), number.parent, behind)
        return Code(behind)


def every(value: float, kind: Any = INTS) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def begin(
    module: ir.Module, name: str, arguments: tuple[str, ...], more: tuple[Any, ...] = ()
) -> tuple[Any, Code, dict[str, Any]]:
    """A function of an array of 64-bit arguments, and more: itself, the code inside, the arguments by name."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64.as_pointer(), *more]), name)
    code = Code(function.append_basic_block())
    given = {name: code.load(code.gep(function.args[0], [I64(number)])) for number, name in enumerate(arguments)}
    return function, code, given


def share(code: Code, units: Any) -> tuple[Any, Any, Code]:
    """This thread's share of so many units: its first, their number, and the code that goes on if there are any."""
    thread, threads = I64(0), I64(1)
    if openmp() is not None:
        thread = code.zext(code.intrinsic("omp_get_thread_num", I32), I64)
        threads = code.zext(code.intrinsic("omp_get_num_threads", I32), I64)
    first = code.udiv(code.mul(units, thread), threads)
    count = code.sub(code.udiv(code.mul(units, code.at(thread, 1)), threads), first)
    nothing, work = code.append_basic_block("nothing"), code.append_basic_block("work")
    code.cbranch(code.icmp_unsigned("==", count, I64(0)), nothing, work)
    Code(nothing).ret_void()
    return first, count, Code(work)
