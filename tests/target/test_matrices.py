"""Instructions for whole matrices: who may use them, and what they leave behind."""

import pytest
import torch
from helpers import numbers
from llvmlite import ir

from shape.target import floats, integers, kernels, matrices
from shape.target.kernels import I8, Program
from shape.target.quantize import pack

amx = pytest.mark.skipif(not matrices.multiplies("bf16"), reason="this CPU has no AMX, or the system keeps it")


@pytest.fixture
def registers():
    """A function of no arguments: how this thread's registers are laid out, 64 bytes."""
    module = ir.Module()
    code, given = kernels.begin(module, "look", ("place",))
    code.intrinsic("llvm.x86.sttilecfg", ir.VoidType(), code.inttoptr(given["place"], I8.as_pointer()))
    code.ret_void()
    program, place = Program(), torch.ones(64, dtype=torch.uint8)
    program.add(kernels.compiled(module)["look"], place)

    def look() -> list[int]:
        program.run(0)
        return place.tolist()

    return look


def test_without_the_systems_leave_they_are_not_used(monkeypatch):
    monkeypatch.setattr(matrices, "_allowed", lambda: False)
    monkeypatch.setattr(kernels, "has", lambda feature: True)
    assert not matrices.multiplies("bf16") and not matrices.multiplies("int8")
    monkeypatch.setattr(matrices, "_allowed", lambda: True)
    assert matrices.multiplies("bf16")
    monkeypatch.setattr(kernels, "has", lambda feature: feature != "amx-int8")
    assert matrices.multiplies("bf16") and not matrices.multiplies("int8")


@amx
def test_kernels_let_go_of_the_registers(registers):
    x = numbers(torch.bfloat16, 13, 256)
    weights, scales = pack(numbers(torch.float32, 32, 256), 8)
    floats.product(x, floats.Packed.of(numbers(torch.bfloat16, 64, 256)))
    assert registers() == [0] * 64
    integers.product(x, weights, scales.view(torch.uint8), 8, 32)
    assert registers() == [0] * 64


@amx
def test_others_who_use_them_in_between_notice_nothing():
    """torch multiplies by oneDNN's kernels, which lay the registers out their own way."""
    x, weight = numbers(torch.bfloat16, 16, 256), numbers(torch.bfloat16, 128, 256, seed=1)
    packed, ours, theirs = floats.Packed.of(weight), [], []
    for _ in range(3):
        ours.append(floats.product(x, packed))
        theirs.append(x @ weight.T)
    assert all(torch.equal(one, ours[0]) for one in ours) and all(torch.equal(one, theirs[0]) for one in theirs)
    torch.testing.assert_close(ours[0], theirs[0], rtol=2**-7, atol=2**-4)
