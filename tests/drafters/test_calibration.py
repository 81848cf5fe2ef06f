"""How far a drafter's probabilities are trusted."""

import pytest

from shape.drafters.calibration import Calibration


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
