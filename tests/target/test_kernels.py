"""Machine code is made once on a machine, and anew where what was kept is damaged or cannot be kept; programs of
products are made once for all weights of a layout.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
from helpers import ROOT
from llvmlite import ir

from shape.target import floats, kernels
from shape.target.kernels import Pool, Program, begin

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


@cache
def neighbours() -> int:
    """Adds one, in the second row, to what the next thread has left in the first."""
    module = ir.Module()
    code, given = begin(module, "neighbours", ("first", "second"))
    _, thread, threads = code.function.args
    following = code.urem(code.plus(thread, 1), threads)
    found = code.read(kernels.I64, code.plus(given["first"], code.times(following, 8)))
    code.write(code.plus(found, 1), code.plus(given["second"], code.times(thread, 8)))
    code.ret_void()
    return kernels.compiled(module)["neighbours"]


@pytest.mark.skipif(kernels.openmp() is None, reason="torch does not compute with GNU's OpenMP")
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_threads_wait_for_each_other(threads):
    """More of them than cores too."""
    before, program, rows = torch.get_num_threads(), Program(), torch.zeros(2, threads, dtype=torch.int64)
    for turn in range(1000):
        program.add(neighbours(), rows[turn % 2], rows[1 - turn % 2])
        program.wait()
    torch.set_num_threads(threads)
    try:
        for turn in range(1, 4):
            program.run(kernels.PARALLEL)
            assert rows[0].tolist() == [1000 * turn] * threads
    finally:
        torch.set_num_threads(before)


def test_what_a_pool_lends_nobody_else_has():
    pool, made = Pool(2), []

    def make() -> list[int]:
        made.append([len(made)])
        return made[-1]

    with pool.lend("a", make) as one, pool.lend("a", make) as other:
        assert one is not other
    with pool.lend("a", make) as again:
        assert any(again is known for known in made[:2]) and len(made) == 2
    for key in ("b", "c"):  # more keys than it keeps
        with pool.lend(key, make):
            pass
    with pool.lend("a", make):
        assert len(made) == 5


def test_what_was_lent_to_a_call_that_failed_is_not_used_again():
    pool = Pool(2)
    with pytest.raises(RuntimeError), pool.lend("a", lambda: [1]):
        raise RuntimeError
    with pool.lend("a", lambda: [2]) as one:
        assert one == [2]


@pytest.mark.skipif(not floats.supports(torch.float32), reason="this CPU lacks AVX2, or torch GNU's OpenMP")
@pytest.mark.parametrize("tokens", [1, 3, kernels._FEW + 1])
def test_one_program_serves_many_weights_and_threads(tokens):
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(48, 33, generator=generator) for _ in range(4)]
    x = torch.randn(tokens, 33, generator=generator)
    packed = [floats.Packed.of(weight) for weight in weights]
    expected = [x @ weight.T for weight in weights]

    def multiply(number: int) -> None:
        for turn in range(200):
            at = (number + turn) % len(weights)
            torch.testing.assert_close(floats.product(x, packed[at]), expected[at], rtol=1e-5, atol=1e-5)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(multiply, number) for number in range(4)]:
            done.result()


# By a process of its own: what is made for the CPU at hand is kept.
ELSEWHERE = """
from shape.target import kernels

kernels.has, kernels.openmp = lambda feature: False, lambda: None
from shape import ShapeDecoder

decoder = ShapeDecoder.from_pretrained("quickstart-shape", dtype="float32", device_map="cpu")
ids = decoder.target.encode([{"role": "user", "content": "Book a table for two."}])
options = {"max_new_tokens": 32, "do_sample": False}
found = decoder.generate(ids, **options, return_dict_in_generate=True)
assert decoder.support.fused and decoder.drafter.single and found.stats.acceptance_length > 1.5, found.stats
plain = decoder.target.model.generate(ids, **options)
assert found.sequences.tolist() == plain.tolist()
"""


def test_the_shipped_pair_without_instructions_and_threads():
    """As on a CPU of ARM, and where torch has the threads of another library: macOS and Windows."""
    command = [sys.executable, "-c", ELSEWHERE]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
