"""Compiled loops against numpy, to their last bits."""

import numpy as np
import pytest
import torch

from shape.verification.compiled import first_largest, largest, log, log_complement, ordered, sum_of_exp, unordered

RELATIVE = 4e-7  # of three roundings


def spread(low: float, high: float, count: int = 20_000) -> np.ndarray:
    return np.exp(np.random.default_rng(0).uniform(low, high, count)).astype(np.float32)


def over(function, given: np.ndarray) -> np.ndarray:
    return np.array([function(one) for one in given])


def test_log():
    given = np.concatenate([spread(-44, 80), spread(-1e-3, 1e-3), [np.float32(1)]])
    assert over(log, given) == pytest.approx(np.log(given.astype(float)), rel=RELATIVE, abs=1e-9)


def test_log_of_a_complement_keeps_its_precision_for_small_numbers():
    given = np.concatenate([spread(-44, -1e-4), [np.float32(1 - 2**-24), np.float32(0.29)]])
    assert over(log_complement, given) == pytest.approx(np.log1p(-given.astype(float)), rel=RELATIVE)


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 2048])
def test_sum_of_exp(size):
    scores = (20 * np.random.default_rng(size).normal(size=size)).astype(np.float32)
    exact = np.exp(scores.astype(float) - scores.max()).sum()
    assert sum_of_exp(scores, scores.max()) == pytest.approx(exact, rel=1e-6)
    scores[0] = -np.inf
    assert size == 1 or np.isfinite(sum_of_exp(scores, scores.max()))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_largest_is_the_first_of_equal_ones(dtype):
    generator = np.random.default_rng(0)
    for size in [1, 2, 63, 64, 65, 200, 1000]:
        for _ in range(50):
            numbers = generator.integers(0, 30, size).astype(dtype)
            assert first_largest(numbers) == numbers.argmax()
    assert first_largest(np.full(100, -np.inf, dtype)) == 0
    assert first_largest(np.array([-1.0, -0.0, 0.0, -2.0], dtype)) == 1
    assert first_largest(np.array([-3.0, -1.5, -np.inf, -1.0, np.inf, 7.0], dtype)) == 4
    assert first_largest(np.full(100, np.nan, dtype)) == 0  # not a place behind the last


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF])
def test_no_number_is_beyond_all(bits):
    """Whatever its sign: as torch and numpy have it, so that such logits decode as in transformers."""
    nan = np.array([bits], np.uint32).view(np.float32)[0]
    for size in (3, 300, 1000):
        for places in ([size - 1], [1, size // 2, size - 1]):
            numbers = np.random.default_rng(size).normal(size=size).astype(np.float32)
            numbers[0], numbers[places] = np.inf, nan
            assert np.isnan(largest(numbers)) and first_largest(numbers) == numbers.argmax() == places[0]
            assert first_largest(numbers) == torch.from_numpy(numbers).argmax()


def test_integers_keep_the_order_of_floats_and_give_them_back():
    given = np.concatenate([-spread(-80, 80, 500), spread(-80, 80, 500), [0, -np.inf, np.inf, 1e-45, -1e-45]])
    given = np.sort(given.astype(np.float32))
    numbers = over(ordered, given)
    assert (np.diff(numbers) > 0).all() == (np.diff(given) > 0).all() and (np.diff(numbers) >= 0).all()
    assert (over(unordered, numbers) == given).all() and ordered(np.float32(-0.0)) == ordered(np.float32(0.0)) == 0
