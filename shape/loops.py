"""How loops of the host are compiled: by numba, at their first call on a machine, and kept for later processes."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function, *relaxed: str) -> Function:
    """The function, compiled at its first call for the types that it is given, and kept for later processes.

    Floats keep their own precision. A function that is kept is compiled again when its own file changes, not when
    another does that it calls into: who changes that removes the ``.nbi`` and ``.nbc`` files in ``__pycache__``.

    Args:
        relaxed: what else is allowed with floats than fused products and sums (LLVM's fast-math flags).
    """
    options: dict[str, Any] = {"error_model": "numpy", "nogil": True, "fastmath": {"contract", *relaxed}}
    try:
        return cast(Function, njit(cache=True, **options)(function))
    except RuntimeError:  # nowhere to keep it: neither beside the source nor in the user's cache
        return cast(Function, njit(**options)(function))
