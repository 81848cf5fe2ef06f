"""How far a drafter's probabilities are trusted."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shape.drafters import calibration
from shape.drafters.calibration import Calibration, PathChances
from shape.verification.tree import TokenTree


def test_calibration_begins_with_the_claim_and_forgets(monkeypatch):
    monkeypatch.setattr(calibration, "_MEMORY", 16)
    odds = Calibration()
    assert odds(0.37, True) == pytest.approx(0.37)
    for _ in range(100):
        odds.add(0.35, True, True)
    assert odds(0.35, True) > 0.8 and odds(0.35, False) == pytest.approx(0.35)
    assert odds(0.75, True) == pytest.approx(0.75)
    for _ in range(16):
        odds.add(0.35, True, False)
    assert odds(0.35, True) < 0.6


def tree(parents: list[int], claims: list[float]) -> TokenTree:
    """One whose nodes have these probabilities behind their parents."""
    joint = [0.0]
    for above, claim in zip(parents, claims, strict=True):
        joint.append(joint[above] + float(np.log(max(claim, 1e-30))))
    found = torch.tensor([[-1, *parents]])
    return TokenTree(torch.arange(len(joint))[None], found, joint=torch.tensor([joint]))


def test_chances_of_paths_are_products_of_what_such_nodes_came_to():
    """Likeliest children apart, and only of nodes behind accepted ones."""
    chances, one = PathChances(), tree([0, 1, 0, 3], [0.15, 0.95, 0.12, 0.95])
    for at in range(1000):
        chances.add(one, [[1, 2] if at % 5 < 2 else [3, 4] if at % 5 == 2 else []])
    found = np.exp(chances(one)[0])
    assert found == pytest.approx([1.0, 0.4, 0.4, 0.2, 0.2], abs=0.04)  # 0.15 and 0.12 share a bin, but for their ranks
    rejected = PathChances()
    for _ in range(100):
        rejected.add(one, [[]])
    assert np.exp(rejected(one)[0, 2]) / np.exp(rejected(one)[0, 1]) > 0.9  # nobody knows what was behind


def test_until_something_is_known_second_choices_are_taken_as_they_say():
    found = np.exp(PathChances()(tree([0, 0], [0.1, 0.1]))[0])
    assert found == pytest.approx([1.0, 0.4, 0.1], abs=1e-6)


def test_impossible_nodes_have_no_chance_and_do_no_harm():
    one = tree([0, 1, 2], [0.5, 0.5, 0.5])
    one = TokenTree(one.tokens, one.parent, joint=torch.tensor([[0.0, -torch.inf, -torch.inf, -1.0]]))
    chances = PathChances()
    chances.add(one, [[1, 2, 3]])
    assert np.isfinite(chances(one)).all() and (chances(one)[0, 1:] < 0).all()


@given(st.data())
def test_chances_fall_along_paths(data):
    size = data.draw(st.integers(1, 8))
    chances = PathChances()
    for _ in range(3):
        parents = [data.draw(st.integers(-1, at)) for at in range(size)]
        one = tree([max(above, 0) for above in parents], [data.draw(st.floats(0.0, 1.0)) for _ in parents])
        one = TokenTree(one.tokens, torch.tensor([[-1, *parents]]), joint=one.joint)
        found = chances(one)[0]
        assert found[0] == 0
        for node, above in enumerate(parents, 1):
            assert found[node] == -np.inf if above < 0 else found[node] <= found[above]
        accepted, at = [], 0
        while (below := [node for node, above in enumerate(parents, 1) if above == at]) and data.draw(st.booleans()):
            at = data.draw(st.sampled_from(below))
            accepted.append(at)
        chances.add(one, [accepted])
