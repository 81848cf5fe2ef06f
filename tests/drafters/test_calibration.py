"""What is learned of the sources of a hybrid."""

import pytest

from shape.drafters.calibration import Calibration, Times, Worth


def test_calibration_begins_with_the_claim_and_forgets():
    odds = Calibration(memory=16)
    assert odds(0.37, True) == pytest.approx(0.37)
    for _ in range(100):
        odds.add(0.35, True, True)
    assert odds(0.35, True) > 0.8 and odds(0.35, False) == pytest.approx(0.35)
    assert odds(0.75, True) == pytest.approx(0.75)
    for _ in range(16):
        odds.add(0.35, True, False)
    assert odds(0.35, True) < 0.6


def test_a_costly_source_is_asked_where_it_brings_more_than_it_costs():
    worth, verify = Worth(), 1.0
    assert worth.pays(expected=5.0, spent=0.0, verify=verify)  # not known yet
    worth.seconds += [0.5, 9.0, 0.5]  # with a hiccup
    worth.add(0.6, 2.0)
    worth.add(2.5, 0.2)
    assert worth.pays(0.9, 0.0, verify)  # 3.9 tokens in 1.5 seconds, 1.9 in one
    assert not worth.pays(2.1, 0.0, verify)  # 3.3 in 1.5, 3.1 in one
    assert worth.pays(2.1, 2.0, verify)  # 3.3 in 3.5, 3.1 in 3: too close to know
    assert worth.pays(5.0, 0.0, verify)  # not known where so many are expected


def test_a_source_that_did_not_pay_is_asked_again_ever_more_rarely():
    worth = Worth()
    worth.seconds.append(1.0)
    worth.add(0.0, 0.1)
    asked = [at for at in range(200) if worth.pays(0.0, 0.0, 1.0)]
    assert asked == [16, 49, 114]  # after 16, 32 and 64 drafts without
    for _ in range(50):
        worth.add(0.0, 3.0)
    assert worth.pays(0.0, 0.0, 1.0)


def test_times_are_a_line_through_medians():
    times = Times()
    assert times.line is None and times.usual is None
    times.add(10, 1.2)
    start, slope = times.line
    assert start + 10 * slope == pytest.approx(1.2) and slope > 0
    for _ in range(9):
        for nodes in (1, 5, 20):
            times.add(nodes, 1.0 + 0.05 * nodes)
    times.add(5, 60.0)
    for _ in range(8):
        times.add(10, 1.5)
    assert times.line == pytest.approx((1.0, 0.05), rel=1e-3) and times.usual == 1.5
