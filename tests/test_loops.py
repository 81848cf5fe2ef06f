"""Compiling the host's loops."""

from shape import loops


def test_without_a_place_to_keep_it_a_loop_is_compiled_all_the_same(monkeypatch):
    def njit(cache: bool = False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(**options)

    real = loops.njit
    monkeypatch.setattr(loops, "njit", njit)
    assert loops.compiled(lambda x: x + 1)(2) == 3
