"""The bound against the linear programme that it solves."""

import itertools
from math import prod

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.analysis.optimal_acceptance import _least_rho, k_sequential, one_drawn, optimal_acceptance

seeds = st.integers(0, 2**31)


def problem(seed: int, batch: tuple[int, ...] = (3,), d: int = 7, sharpness: float = 1.0) -> torch.Tensor:
    """p and q, (2, *batch, d) float64."""
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(2, *batch, d, generator=generator, dtype=torch.float64)).softmax(-1)


def drawings(q: list[float], drafts: int, replacement: bool) -> dict[tuple[int, ...], float]:
    """Every tuple of drafts and its probability."""
    found = {}
    for drawn in itertools.product(range(len(q)), repeat=drafts):
        if replacement:
            found[drawn] = prod(q[i] for i in drawn)
        elif len(set(drawn)) == drafts:
            rests = [1 - sum(q[i] for i in drawn[:k]) for k in range(drafts)]
            found[drawn] = prod(q[i] / rest for i, rest in zip(drawn, rests, strict=True))
    return found


class TestOptimalAcceptance:
    @given(seeds, st.integers(3, 5), st.integers(1, 3), st.booleans(), st.floats(0, 5))
    @settings(max_examples=60)
    def test_against_the_linear_programme(
        self, seed: int, d: int, drafts: int, replacement: bool, sharpness: float
    ) -> None:
        """The whole transport problem between tuples of drafts and tokens, by POT."""
        p, q = problem(seed, batch=(), d=d, sharpness=sharpness)
        drawn = drawings(q.tolist(), drafts, replacement)
        mass = np.array(list(drawn.values()))
        cost = np.array([[float(token not in one) for token in range(d)] for one in drawn])
        refused = ot.emd2(mass / mass.sum(), p.numpy(), cost)
        assert optimal_acceptance(p, q, drafts, replacement).item() == pytest.approx(1 - refused, abs=1e-6)

    @given(seeds, st.booleans(), st.floats(0, 8))
    def test_one_draft_is_total_variation_and_more_are_no_worse(
        self, seed: int, replacement: bool, size: float
    ) -> None:
        p, q = problem(seed, d=9, sharpness=size)
        values = [optimal_acceptance(p, q, drafts, replacement) for drafts in (1, 2, 4)]
        torch.testing.assert_close(values[0], torch.minimum(p, q).sum(-1))
        assert (values[1] >= values[0] - 1e-9).all() and (values[2] >= values[1] - 1e-9).all()
        assert (values[2] <= 1).all()

    def test_tokens_that_are_never_drafted(self) -> None:
        p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.5, 0.5, 0.0])
        assert optimal_acceptance(p, q, 1).item() == pytest.approx(0.75)
        assert optimal_acceptance(p, q, 2, replacement=False).item() == pytest.approx(0.75)
        assert optimal_acceptance(p, q, 2).item() == pytest.approx(0.75)


@given(seeds, st.integers(3, 6), st.integers(1, 4), st.floats(0, 6))
@settings(max_examples=60)
def test_one_drawn_draft_against_the_linear_programme(seed: int, d: int, drafts: int, sharpness: float) -> None:
    p, q = problem(seed, batch=(), d=d, sharpness=sharpness)
    drafts = min(drafts, d)
    sure = q.topk(drafts - 1).indices.tolist()
    rest = q.scatter(0, torch.tensor(sure, dtype=torch.long), 0.0)
    cost = np.array([[float(token not in (*sure, drawn)) for token in range(d)] for drawn in range(d)])
    refused = ot.emd2((rest / rest.sum()).numpy(), p.numpy(), cost)
    assert one_drawn(p, q, drafts).item() == pytest.approx(1 - refused, abs=1e-9)


@given(seeds, st.integers(2, 4), st.integers(1, 3), st.floats(0, 5))
@settings(max_examples=60)
def test_k_sequential_selection_is_lossless_and_between_its_bounds(
    seed: int, d: int, drafts: int, sharpness: float
) -> None:
    """All tuples of drafts, draft after draft: what is emitted is p, a draft as often as it says; at least 1 - 1/e of
    the optimum, as SpecTr proves, and no more than it.
    """
    p, q = problem(seed, batch=(), d=d, sharpness=sharpness)
    rho = _least_rho(p, q, drafts)
    chance = (p / (rho * q)).clamp(max=1)
    emitted = torch.zeros_like(p)
    for drawn, mass in drawings(q.tolist(), drafts, replacement=True).items():
        for token in drawn:
            emitted[token] += mass * chance[token]
            mass *= 1 - float(chance[token])
    assert (emitted <= p + 1e-9).all()  # so that what is left of p can be drawn
    assert k_sequential(p, q, drafts).item() == pytest.approx(float(emitted.sum()), abs=1e-9)
    best = optimal_acceptance(p, q, drafts).item()
    assert (1 - 1 / np.e) * best - 1e-9 <= k_sequential(p, q, drafts).item() <= best + 1e-9
    assert drafts > 1 or k_sequential(p, q, 1).item() == pytest.approx(best, abs=1e-9)
