"""The cost model: the closed form against simulation, measured costs, and what is learned while decoding."""

import gc
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from shape.drafters.cost import (
    Costs,
    DraftValue,
    VerificationTimes,
    best_depth,
    break_even,
    expected_length,
    throughput,
)


@pytest.mark.parametrize("rate,depth", [(0.9, 8), (0.5, 3), (0.0, 4), (1.0, 5)])
def test_the_closed_form_agrees_with_simulation(rate, depth):
    """20,000 steps; the mean within 4.9 standard errors: a false-alarm rate of 1e-6, fixed seed."""
    coin, lengths = random.Random(0), []
    for _ in range(20_000):
        accepted = 0
        while accepted < depth and coin.random() < rate:
            accepted += 1
        lengths.append(accepted + 1)
    mean = sum(lengths) / len(lengths)
    deviation = (sum((length - mean) ** 2 for length in lengths) / len(lengths)) ** 0.5
    assert abs(mean - expected_length(rate, depth)) <= 4.9 * deviation / len(lengths) ** 0.5 + 1e-12
    seconds = depth * 0.1 + 1.0
    assert throughput(rate, depth, 0.1, 1.0) == pytest.approx(expected_length(rate, depth) / seconds)


def test_the_best_depth_and_the_break_even():
    assert best_depth(0.0, 0.1, 1.0) == 0
    assert best_depth(0.95, 0.0, 1.0) == 32
    depth = best_depth(0.8, 0.2, 1.2)
    assert 0 < depth < 32
    around = [throughput(0.8, other, 0.2, 1.2) for other in (depth - 1, depth, depth + 1)]
    assert max(around) == around[1]
    rate = break_even(3, 0.2, 1.2, 1.0)
    assert throughput(rate, 3, 0.2, 1.2) >= 1.0 > throughput(rate - 0.002, 3, 0.2, 1.2)
    assert break_even(2, 2.0, 1.2, 1.0) is None


def test_costs_between_sizes():
    costs = Costs(1, 128, {1: 1.0, 3: 2.0, 5: 2.0}, {1: (0.0, 0.1), 2: (0.1, 0.25)})
    assert (
        costs.step_seconds(2, 0, 1) == 1.5
        and costs.step_seconds(4, 2, 2) == pytest.approx(2.6)
        and costs.step_seconds(10, 0, 1) == 4.0
    )
    assert costs.step_seconds(1, 1, 9) == pytest.approx(1.35)  # wider than what was measured
    assert Costs(1, 1, {1: 1.0}, {}).step_seconds(1, 5, 1) == 1.0  # a drafter without a network


def test_a_costly_source_is_asked_where_it_brings_more_than_it_costs():
    value, verify = DraftValue(), 1.0
    assert value.pays(expected=5.0, spent=0.0, verify=verify)  # not known yet
    for seconds in (0.5, 9.0, 0.5):  # with a hiccup
        value.seconds.append(seconds)
    value.add(0.6, 2.0)
    value.add(2.5, 0.2)
    assert value.pays(0.9, 0.0, verify)  # 3.9 tokens in 1.5 seconds, 1.9 in one
    assert not value.pays(2.1, 0.0, verify)  # 3.3 in 1.5, 3.1 in one
    assert value.pays(2.1, 2.0, verify)  # 3.3 in 3.5, 3.1 in 3: too close to know
    assert value.pays(5.0, 0.0, verify)  # not known where so many are expected


def test_a_source_that_did_not_pay_is_asked_again_ever_more_rarely():
    value = DraftValue()
    value.seconds.append(1.0)
    value.add(0.0, 0.1)
    asked = [at for at in range(200) if value.pays(0.0, 0.0, 1.0)]
    assert asked == [16, 49, 114]  # after 16, 32 and 64 drafts without
    for _ in range(50):
        value.add(0.0, 3.0)
    assert value.pays(0.0, 0.0, 1.0)


def test_times_are_a_line_through_medians():
    times = VerificationTimes()
    assert times.line is None
    times.add(10, 60.0)  # the first of a size is not counted
    for _ in range(2):
        times.add(10, 1.2)
        assert times.line is None
    times.add(10, 1.2)
    start, slope = times.line
    assert start + 10 * slope == pytest.approx(1.2) and slope > 0
    for _ in range(9):
        for nodes in (1, 5, 20):
            times.add(nodes, 1.0 + 0.05 * nodes)
    times.add(5, 60.0)
    for _ in range(8):
        times.add(10, 1.5)
    assert times.line == pytest.approx((1.0, 0.05), rel=1e-3)


def test_calls_side_by_side_may_verify_trees_of_new_sizes():
    times, interval, threshold = VerificationTimes(), sys.getswitchinterval(), gc.get_threshold()

    def yield_to_others(*_: object) -> None:  # as profilers and test tools do: threads switch where objects are made
        time.sleep(0)

    sys.setswitchinterval(1e-6)
    gc.set_threshold(10)
    gc.callbacks.append(yield_to_others)
    try:
        with ThreadPoolExecutor(1) as thread:
            new = thread.submit(lambda: [times.add(nodes, 1.0) for nodes in range(3, 3000)])
            while not new.done():
                for nodes in range(3):
                    times.add(nodes, 1.0)
            new.result()
    finally:
        gc.callbacks.remove(yield_to_others)
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)
