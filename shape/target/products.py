"""Products of weights with few vectors on a CPU, in compiled loops.

With one vector, as in a step without drafts, a product reads every weight once and hardly computes. What a matrix
kernel does before it begins then takes longer than the reading: for the layers of small models several times as long.

bfloat16, which numpy does not know, is seen as the integers of its bits, the upper half of a float32's.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shape.loops import compiled

_HALF = np.uint32(0x7FFF)  # less than half of the last bit that bfloat16 keeps, so that ties go to even numbers


def numbers(x: Tensor) -> np.ndarray:
    """A tensor's own memory: float32 as it is, bfloat16 as uint16."""
    x = x.detach() if x.requires_grad else x
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def _multiply(weight: np.ndarray, bias: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    """y = x W^T + b in float32: weight (N, K), of ``numbers``; bias (N,), or (0,) for none; x (R, K); y (R, N)."""
    for n in range(weight.shape[0]):
        for row in range(x.shape[0]):
            total = np.float32(0)
            if weight.itemsize == 2:
                for k in range(x.shape[1]):
                    total += np.uint32(np.uint32(weight[n, k]) << np.uint32(16)).view(np.float32) * x[row, k]
            else:
                for k in range(x.shape[1]):
                    total += np.float32(weight[n, k]) * x[row, k]
            y[row, n] = total + bias[n] if len(bias) else total


multiply = compiled(_multiply, "reassoc")  # sums in lanes are in another order


@compiled
def read(x: np.ndarray, row: int, k: int) -> Any:
    """One of the ``numbers``, as float32."""
    if x.itemsize == 2:
        return np.uint32(np.uint32(x[row, k]) << np.uint32(16)).view(np.float32)
    return np.float32(x[row, k])


@compiled
def stored(like: np.ndarray, value: Any) -> Any:
    """A float32 as one of the ``numbers`` that an array holds, rounded to the nearest."""
    if like.itemsize == 2:
        bits = np.float32(value).view(np.uint32)
        bits += _HALF + ((bits >> np.uint32(16)) & np.uint32(1))
        return np.uint16(bits >> np.uint32(16))
    return value


@compiled
def widen(x: np.ndarray, y: np.ndarray) -> None:
    """``numbers`` as float32, (R, K) both."""
    for row in range(x.shape[0]):
        for k in range(x.shape[1]):
            y[row, k] = read(x, row, k)


@compiled
def narrow(x: np.ndarray, y: np.ndarray) -> None:
    """float32 as ``numbers``, rounded to the nearest, (R, K) both."""
    for row in range(x.shape[0]):
        for k in range(x.shape[1]):
            y[row, k] = stored(y, x[row, k])
