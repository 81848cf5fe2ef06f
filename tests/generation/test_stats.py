"""Counts of decoding: which tokens and which steps enter which mean."""

import json

import pytest

from shape.generation.stats import DecodeStats


def test_steps_without_a_draft_count_for_one_mean_only():
    stats = DecodeStats(sequence_emitted=[0, 0], sequence_forwards=[0, 0])
    stats.count(sequence=0, proposed=4, accepted=2, emitted=3)
    stats.count(sequence=0, proposed=0, accepted=0, emitted=1)
    stats.count(sequence=1, proposed=4, accepted=4, emitted=4)  # stopped before its bonus token
    assert stats.acceptance_length == pytest.approx(8 / 3)
    assert stats.tokens_per_draft_step == pytest.approx(1 + 6 / 2)
    assert stats.draft_acceptance_rate == pytest.approx(6 / 8)
    assert stats.histogram == {1: 1, 3: 1, 4: 1}
    assert (stats.sequence_emitted, stats.sequence_forwards) == ([4, 4], [2, 1])


def test_nothing_decoded_is_plain():
    stats = DecodeStats()
    assert stats.acceptance_length == stats.tokens_per_draft_step == 1.0
    assert stats.draft_acceptance_rate == 0.0


def test_a_report_is_plain_json():
    stats = DecodeStats(sequence_emitted=[0], sequence_forwards=[0])
    stats.count(0, 3, 1, 2)
    report = json.loads(json.dumps(stats.to_dict()))
    assert report["acceptance_length"] == 2.0 and report["histogram"] == {"2": 1} and report["lossless"]
