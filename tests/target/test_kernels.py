"""Machine code is made once on a machine, and anew where what was kept is damaged or cannot be kept."""

import pytest
import torch
from llvmlite import ir

from shape.target import kernels
from shape.target.kernels import Program, begin

ANSWER = 42


def kernel() -> dict[str, int]:
    """Writes a number where it is told to."""
    module = ir.Module()
    code, given = begin(module, "answer", ("place",))
    code.write(kernels.I64(ANSWER), given["place"])
    code.ret_void()
    return kernels.compiled(module)


def answer(made: dict[str, int]) -> int:
    place, program = torch.zeros(1, dtype=torch.int64), Program()
    program.add(made["answer"], place)
    program.run(0)
    return int(place)


@pytest.fixture
def made(monkeypatch, tmp_path):
    """What was compiled and is to be kept, in an empty folder."""
    kernels._runner()  # which all programs share
    found: list[bytes] = []
    keep = kernels._keep
    monkeypatch.setenv("SHAPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "_keep", lambda name, code: (found.append(code), keep(name, code)))
    return found


def test_machine_code_is_kept(made, tmp_path):
    assert answer(kernel()) == ANSWER and len(made) == 1
    assert answer(kernel()) == ANSWER and len(made) == 1
    assert len(list((tmp_path / "cache/kernels").iterdir())) == 1


@pytest.mark.parametrize("damage", [lambda code: code[:-8], lambda code: bytes(code[:-1]) + b"!", lambda code: b""])
def test_damaged_code_is_made_anew(made, tmp_path, damage):
    kernel()
    (file,) = (tmp_path / "cache/kernels").iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert answer(kernel()) == ANSWER and len(made) == 2
    assert answer(kernel()) == ANSWER and len(made) == 2


def test_nowhere_to_keep_it_is_no_error(made, tmp_path):
    (tmp_path / "cache").write_text("no folder")
    assert answer(kernel()) == ANSWER == answer(kernel()) and len(made) == 2
