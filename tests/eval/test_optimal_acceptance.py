"""The bound against the linear programme that it solves."""

import itertools
from math import prod

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.analysis.optimal_acceptance import optimal_acceptance

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
    @settings(deadline=None, max_examples=60)
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
    @settings(deadline=None)
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
