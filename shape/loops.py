"""How loops of the host are compiled: by numba, at their first call on a machine, and kept for later processes."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numba.core.event import Event, Listener, register

_LOG = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])


class _Told(Listener):
    """Says once in a process that a loop is compiled, as that takes up to a minute on a machine's first run."""

    told = False

    def on_start(self, event: Event) -> None:
        module = event.data["dispatcher"].py_func.__module__ or ""  # code made from a text is of none
        if not self.told and module.startswith("shape."):
            self.told = True
            _LOG.info("compiling loops for this machine, which takes a while the first time")

    def on_end(self, event: Event) -> None:
        """Nothing to say."""


COMPILING = _Told()
register("numba:compile", COMPILING)


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


@compiled
def add_product(x: np.ndarray, matrix: np.ndarray, y: np.ndarray) -> None:
    """y += x M, (R, I) and (I, O) -> (R, O) float32, for few rows: four of the matrix's at a time, each read once."""
    rows, inputs = x.shape
    outputs = y.shape[1]
    for i in range(0, inputs - 3, 4):
        for row in range(rows):
            first, second, third, fourth = x[row, i], x[row, i + 1], x[row, i + 2], x[row, i + 3]
            for k in range(outputs):
                y[row, k] += (
                    first * matrix[i, k]
                    + second * matrix[i + 1, k]
                    + third * matrix[i + 2, k]
                    + fourth * matrix[i + 3, k]
                )
    for i in range(inputs - inputs % 4, inputs):
        for row in range(rows):
            for k in range(outputs):
                y[row, k] += x[row, i] * matrix[i, k]


@compiled
def take_rows(source: np.ndarray, rows: np.ndarray, into: np.ndarray) -> None:
    """into[i] = source[rows[i]], (S, W), (R,) and (R, W), but for the rows below 0, which are left as they are."""
    for i, row in enumerate(rows):
        if row >= 0:
            into[i] = source[row]
