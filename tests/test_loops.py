"""Compiling the host's loops."""

from numba import njit

from shape import loops


def test_without_a_place_to_keep_it_a_loop_is_compiled_all_the_same(monkeypatch):
    def njit(cache: bool = False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(**options)

    real = loops.njit
    monkeypatch.setattr(loops, "njit", njit)
    assert loops.compiled(lambda x: x + 1)(2) == 3


def test_compiling_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(loops.COMPILING, "told", False)

    def loop(x):
        return x

    loop.__module__ = "shape.example"
    with caplog.at_level("INFO", "shape"):
        for given in (1, 1.0):
            njit(loop)(given)
    assert [record.message for record in caplog.records] == [
        "compiling loops for this machine, which takes a while the first time"
    ]


def test_code_of_no_module_is_compiled_beside(monkeypatch):
    """Of others, in the same process; as `exec` makes it."""
    monkeypatch.setattr(loops.COMPILING, "told", False)
    made: dict = {}
    exec("def plus(x): return x + 1", made)
    made["plus"].__module__ = None
    assert njit(made["plus"])(2) == 3 and not loops.COMPILING.told
