"""Instructions for whole matrices (Intel's AMX), of which the kernels of ``shape.target.floats`` and ``integers`` are
made where the CPU has them: one multiplies up to 16 tokens by 16 outputs' weights for 32 inputs in bfloat16, or 64 in
8 bits.

They work on eight registers of up to 16 rows of 64 bytes. A kernel says how many rows and bytes it uses of each,
and lets go of them at its end, as code that comes after it may have another use for them.
"""

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from llvmlite import ir

from shape.target import kernels
from shape.target.kernels import I8, I16, I64, Code

ROWS, ROW = 16, 64  # of a register: rows, and bytes of one
_VOID = ir.VoidType()
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18  # a system call's number, its ARCH_REQ_XCOMP_PERM, and what for


def multiplies(numbers: str) -> bool:
    """Whether this CPU multiplies matrices of such numbers, bf16 or int8, and the system lets us."""
    return kernels.has("amx-tile") and kernels.has(f"amx-{numbers}") and _allowed()


@cache
def _allowed() -> bool:
    """Linux gives the registers to processes that have asked for them; once for all threads."""
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0


def begin(code: Code, shapes: Sequence[tuple[Any, int]]) -> None:
    """Use the first registers, each with so many rows of so many bytes: an ``ir.Value`` of 64 bits or a number, and a
    number.
    """
    place = memory(code, 1)
    code.write(ir.Constant(ir.VectorType(I8, ROW), [1] + [0] * (ROW - 1)), place)
    for register, (rows, row) in enumerate(shapes):
        rows = code.trunc(rows, I8) if isinstance(rows, ir.Value) else I8(rows)
        code.write(I16(row), code.plus(place, 16 + 2 * register))
        code.write(rows, code.plus(place, 48 + register))
    code.intrinsic("llvm.x86.ldtilecfg", _VOID, code.inttoptr(place, I8.as_pointer()))


def end(code: Code) -> None:
    code.intrinsic("llvm.x86.tilerelease", _VOID)


def memory(code: Code, rows: int) -> Any:
    """The address of so many rows of this kernel's own."""
    with code.goto_entry_block():
        made = code.alloca(ir.ArrayType(I8, ROW * rows))
        made.align = ROW
        return code.ptrtoint(made, I64)


def zero(code: Code, register: int) -> None:
    code.intrinsic("llvm.x86.tilezero", _VOID, I8(register))


def load(code: Code, register: int, address: Any, stride: Any = ROW) -> None:
    """Rows that lie so many bytes apart."""
    _move(code, "llvm.x86.tileloadd64", register, address, stride)


def store(code: Code, register: int, address: Any) -> None:
    _move(code, "llvm.x86.tilestored64", register, address, ROW)


def _move(code: Code, name: str, register: int, address: Any, stride: Any) -> None:
    stride = stride if isinstance(stride, ir.Value) else I64(stride)
    code.intrinsic(name, _VOID, I8(register), code.inttoptr(address, I8.as_pointer()), stride)


def multiply(code: Code, numbers: str, sums: int, x: int, weights: int) -> None:
    """Add to sums (tokens, 16) the products of x and weights, of which a row holds 16 outputs for as many inputs as
    four bytes hold.

    Args:
        numbers: bf16, pairs of which give sums in float32; or int8, x with signs and weights without, fours of which
            give sums in int32.
        sums, x, weights: registers.
    """
    name = {"bf16": "tdpbf16ps", "int8": "tdpbsud"}[numbers]
    code.intrinsic(f"llvm.x86.{name}", _VOID, *map(I8, (sums, x, weights)))
