"""transformers' warpers in compiled loops, for a CPU: temperature, top-k, top-p and min-p.

For top-p torch sorts the whole vocabulary at every token; of 150,000 tokens that takes as long as a small target's
forward. What is to be kept is found without: few tokens are likely enough to be looked at more closely. The same tokens
are kept, but where they have the share of top-p to float32's rounding, or equal others: torch's sort is not stable.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from shape.verification.compiled import compiled, exp, largest, ordered, sum_of_exp, unordered

_KINDS: tuple[tuple[type[LogitsProcessor], str], ...] = (
    (TemperatureLogitsWarper, "temperature"),
    (TopKLogitsWarper, "top_k"),
    (TopPLogitsWarper, "top_p"),
    (MinPLogitsWarper, "min_p"),
)
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = range(4)
_BLOCK = 64  # scores that are passed by together, where none of them is large enough
_NEVER = np.float32(-np.inf)
_NEAR = 1e-3  # nats, far more than rounding makes


class Warps(NamedTuple):
    """Warpers in order, (W,) each: int64 kinds and float64 values. Of none, scores are as they come."""

    kinds: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, warpers: Sequence[Any]) -> "Warps | None":
        """None where one of them is another kind, or keeps or puts in what these do not."""
        found = []
        for warper in warpers:
            kind = next((at for at, (own, _) in enumerate(_KINDS) if type(warper) is own), None)
            own = {"filter_value": -np.inf, "min_tokens_to_keep": 1}
            if kind is None or any(getattr(warper, name, value) != value for name, value in own.items()):
                return None
            found.append((kind, float(getattr(warper, _KINDS[kind][1]))))
        return cls(np.array([kind for kind, _ in found], np.int64), np.array([value for _, value in found]))

    @classmethod
    def at_end_of(cls, chain: LogitsProcessorList) -> "tuple[LogitsProcessorList, Warps]":
        """A chain of processors without the warpers that end it, and these."""
        first = len(chain)
        while first > 0 and cls.of(chain[first - 1 : first]) is not None:
            first -= 1
        warps = cls.of(chain[first:])
        assert warps is not None
        return LogitsProcessorList(chain[:first]), warps


@compiled
def warp(scores: np.ndarray, warps: Warps) -> None:
    """All warpers on scores (V,) float32, in place; what they cut off is -inf."""
    for at in range(len(warps.kinds)):
        kind, value = warps.kinds[at], warps.values[at]
        if kind == _TEMPERATURE:
            divisor = np.float32(value)
            if divisor != 1:
                for k in range(scores.shape[0]):
                    scores[k] /= divisor
        elif kind == _TOP_K:
            _keep_top_k(scores, int(value))
        elif kind == _TOP_P:
            _keep_top_p(scores, value)
        else:
            _cut_below(scores, np.float32(largest(scores) + np.log(value)))


@compiled
def _keep_top_k(scores: np.ndarray, count: int) -> None:
    """The largest ones, and what equals the last of them."""
    if count >= scores.shape[0]:
        return
    blocks = _largest_of_blocks(scores)
    least = _NEVER if count > len(blocks) else _nth_largest(blocks, count)
    some, _ = _not_below(scores, blocks, least)
    _cut_below(scores, _nth_largest(some, count))


@compiled
def _keep_top_p(scores: np.ndarray, share: float) -> None:
    """The likeliest ones, until they have this share of all; of equal ones the last first, as a stable sort
    would have it.
    """
    if share >= 1:
        return
    blocks = _largest_of_blocks(scores)
    most = largest(blocks)
    if not np.isfinite(most):
        return
    total = np.float64(sum_of_exp(scores, most))
    # All that are less likely than this have less than the rest together.
    least = most + np.log((1 - share) * total / len(scores)) - _NEAR
    some, where = _not_below(scores, blocks, np.float32(least))
    masses = np.empty(len(some), np.float32)
    for k in range(len(some)):
        masses[k] = exp(some[k] - most)
    low, high = np.int64(ordered(np.float32(least))), np.int64(ordered(most))
    while low < high:  # the smallest of which those above have less than the share
        middle = (low + high) >> 1
        if _mass_above(some, masses, np.int32(middle)) < share * total:
            high = middle
        else:
            low = middle + 1
    last = unordered(np.int32(low))
    mass = _mass_above(some, masses, np.int32(low))
    _cut_below(scores, last)
    for k in range(len(some) - 1, -1, -1):
        if some[k] == last:
            if mass >= share * total and mass > 0:
                scores[where[k]] = _NEVER
            mass += masses[k]


@compiled
def _mass_above(scores: np.ndarray, masses: np.ndarray, bound: np.int32) -> float:
    total = 0.0
    for k in range(len(scores)):
        if ordered(scores[k]) > bound:
            total += masses[k]
    return total


@compiled
def _cut_below(scores: np.ndarray, bound: np.float32) -> None:
    for k in range(scores.shape[0]):
        scores[k] = _NEVER if scores[k] < bound else scores[k]


@compiled
def _largest_of_blocks(scores: np.ndarray) -> np.ndarray:
    found = np.empty(-(-len(scores) // _BLOCK), np.float32)
    for block in range(len(found)):
        found[block] = largest(scores[block * _BLOCK : (block + 1) * _BLOCK])
    return found


@compiled
def _not_below(scores: np.ndarray, blocks: np.ndarray, least: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Scores that are at least so large, and where they are, in order."""
    count = 0
    for block in range(len(blocks)):
        count += int(not blocks[block] < least)
    found, where = np.empty(count * _BLOCK, np.float32), np.empty(count * _BLOCK, np.int64)
    count = 0
    for block in range(len(blocks)):
        if not blocks[block] < least:
            for k in range(block * _BLOCK, min(len(scores), (block + 1) * _BLOCK)):
                if not scores[k] < least:
                    found[count], where[count] = scores[k], k
                    count += 1
    return found[:count], where[:count]


@compiled
def _nth_largest(numbers: np.ndarray, n: int) -> np.float32:
    """From 1 on, of float32."""
    low, high = np.int64(-(2**31)), np.int64(2**31 - 1)
    while low < high:  # the largest that so many are not below
        middle, count = (low + high + 1) >> 1, 0
        bound = np.int32(middle)
        for k in range(len(numbers)):
            count += int(ordered(numbers[k]) >= bound)
        if count >= n:
            low = middle
        else:
            high = middle - 1
    return unordered(np.int32(low))
