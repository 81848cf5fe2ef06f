"""Loops of the host, compiled by numba: what a step decides on a CPU costs one call instead of dozens.

Behind a target's forward caches are cold, and a call of torch or numpy takes several microseconds whatever it computes.
Compiled are only the loops that every step runs: noise, choices, growing and describing trees. Tensors of other devices
never come here, and neither does ``torch.compile``, which cannot look into them: each has a twin by tensors.
"""

import math

import numpy as np
import torch

from shape.loops import Function, compiled


def runs_on_host(x: torch.Tensor) -> bool:
    """Whether loops may be asked about this tensor: it is the host's, and nothing is being traced."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def compiled_sum(function: Function) -> Function:
    """Compiled; its sums may be added in lanes, which is another order."""
    return compiled(function, "reassoc")


_ONE, _HALF = np.float32(1), np.float32(0.5)
_LN2, _LOG2_E = np.float32(math.log(2)), np.float32(math.log2(math.e))
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # the high part times an exponent is exact
# Coefficients of polynomials, the highest first.
_LOG = tuple(
    map(np.float32, (
        7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
        2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
    ))
)  # fmt: skip
_EXP = tuple(
    map(np.float32, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5))
)
_SQRT_HALF = np.int32(0x3F3504F3)  # its bits
_SMALL = np.float32(0.29)
_LEAST = np.float32(-87.0)  # exp of less is no normal number


@compiled
def log(x: np.float32) -> np.float32:
    """Of a positive normal float32, to its last bit or two (Cephes, logf). That of libm is not taken in lanes."""
    bits = np.float32(x).view(np.int32)
    exponent = np.int32(np.int32(bits - _SQRT_HALF) >> np.int32(23))
    mantissa = np.int32(bits - np.int32(exponent << np.int32(23))).view(np.float32)
    return _log_near_one(mantissa - _ONE) + np.float32(exponent) * _LN2


@compiled
def log_complement(x: np.float32) -> np.float32:
    """log(1 - x) of a float32 from 0 to below 1, exact for small x too."""
    return _log_near_one(-x) if x < _SMALL else log(_ONE - x)


@compiled
def _log_near_one(f: np.float32) -> np.float32:
    """log(1 + f) for 1 + f between the root of a half and of two."""
    p = _LOG[0]  # written out: behind a loop of its own the loops around this one are not taken in lanes
    p = p * f + _LOG[1]
    p = p * f + _LOG[2]
    p = p * f + _LOG[3]
    p = p * f + _LOG[4]
    p = p * f + _LOG[5]
    p = p * f + _LOG[6]
    p = p * f + _LOG[7]
    p = p * f + _LOG[8]
    square = f * f
    return p * f * square - _HALF * square + f


@compiled
def exp(x: np.float32) -> np.float32:
    """Of a float32 of at most 0, to its last bit or two (Cephes, expf); 1e-38 below -87."""
    x = max(np.float32(x), _LEAST)
    whole = np.int32(x * _LOG2_E - _HALF)
    n = np.float32(whole)
    f = x - n * _LN2_HIGH - n * _LN2_LOW
    p = _EXP[0]
    p = p * f + _EXP[1]
    p = p * f + _EXP[2]
    p = p * f + _EXP[3]
    p = p * f + _EXP[4]
    p = p * f + _EXP[5]
    return (p * f * f + f + _ONE) * np.int32(np.int32(whole + np.int32(127)) << np.int32(23)).view(np.float32)


@compiled_sum
def sum_of_exp(scores: np.ndarray, largest: np.float32) -> np.float32:
    """Of (K,) float32, over exp of the largest."""
    total = np.float32(0)
    for k in range(scores.shape[0]):
        total += exp(scores[k] - largest)
    return total


_BLOCK = 256
_SIGN, _ALL_BUT_SIGN = np.int32(-(2**31)), np.int32(2**31 - 1)
_INFINITE = np.int32(0x7F800000)  # its bits


@compiled
def ordered(x: np.float32) -> np.int32:
    """An integer that is larger where x is, its size with its sign: unlike floats, integers are compared in lanes.

    NaN is beyond all whatever its sign, which on x86 is set in those that arithmetic makes.
    """
    bits = np.float32(x).view(np.int32)
    sign, size = np.int32(bits >> np.int32(31)), np.int32(bits & _ALL_BUT_SIGN)
    return _ALL_BUT_SIGN if size > _INFINITE else np.int32(np.int32(size ^ sign) - sign)


@compiled
def unordered(number: np.int32) -> np.float32:
    """What ``ordered`` makes such an integer of."""
    sign = np.int32(number >> np.int32(31))
    return np.int32(np.int32(np.int32(number ^ sign) - sign) | np.int32(sign & _SIGN)).view(np.float32)


@compiled
def largest(numbers: np.ndarray) -> np.float32:
    """Of (K,) float32; NaN where there is one."""
    found = ordered(numbers[0])
    for k in range(numbers.shape[0]):
        found = max(found, ordered(numbers[k]))
    return unordered(found)


@compiled
def first_largest(numbers: np.ndarray) -> int:
    """Where the largest of (K,) float32 is, the first of equal ones; where the first NaN is, if there is one."""
    begin, found = 0, ordered(numbers[0])
    for start in range(0, numbers.shape[0], _BLOCK):
        here = ordered(largest(numbers[start : start + _BLOCK]))
        if here > found:
            found, begin = here, start
    while ordered(numbers[begin]) != found:
        begin += 1
    return begin
