"""Compiled warpers against transformers' own."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from shape.verification.noise import all_hashes, gumbel, noisiest, sequence_keys
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree
from shape.verification.warping import Warps, warp

ROUNDING = 1e-5  # of a share, by which sums in float32 are off at most here
CHAINS: list[list[LogitsProcessor]] = [
    [],
    [TemperatureLogitsWarper(0.7)],
    [TopKLogitsWarper(1)],
    [TopKLogitsWarper(20)],
    [TopKLogitsWarper(500)],
    [TopPLogitsWarper(0.3)],
    [TopPLogitsWarper(0.9)],
    [MinPLogitsWarper(0.05)],
    [TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.8)],
    [TemperatureLogitsWarper(1.5), TopPLogitsWarper(0.95), MinPLogitsWarper(0.1)],
    [TopKLogitsWarper(30), MinPLogitsWarper(0.01), TemperatureLogitsWarper(2.0)],
]


def logits(size: int, scale: float, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))).to(dtype)


def warped(scores: torch.Tensor, warpers: list[LogitsProcessor]) -> np.ndarray:
    found, warps = scores.float().numpy().copy(), Warps.of(warpers)
    assert warps is not None
    warp(found, warps)
    return found


@pytest.mark.parametrize("warpers", CHAINS, ids=lambda chain: "-".join(type(one).__name__[:4] for one in chain))
def test_scores_are_those_of_transformers(warpers):
    for size, scale, seed in product([1, 7, 63, 64, 65, 1000, 5000], [0.3, 3.0, 12.0], range(3)):
        scores = logits(size, scale, seed)
        expected = scores[None]
        for one in warpers:
            expected = one(None, expected)
        assert np.array_equal(warped(scores, warpers), expected[0].numpy()), (size, scale, seed)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 300), st.sampled_from([0.0, 0.5, 4.0]), st.floats(0.0, 1.0), st.integers(0, 1000))
def test_top_p_keeps_the_fewest_that_have_the_share(size, scale, share, seed):
    """Also of many equal ones, as bfloat16 makes them; transformers keeps as many, but for rounding of the share."""
    scores = logits(size, scale, seed, torch.bfloat16)
    found = warped(scores, [TopPLogitsWarper(share)])
    kept, p = found > -np.inf, scores.double().softmax(-1).numpy()
    assert np.array_equal(found[kept], scores.float().numpy()[kept])
    assert p[kept].sum() >= share - ROUNDING
    assert kept.sum() == 1 or p[kept].sum() - p[kept].min() <= share + ROUNDING
    assert p[kept].min() >= p[~kept].max(initial=0)
    theirs = TopPLogitsWarper(share)(None, scores.float()[None])[0] > -np.inf
    assert abs(p[theirs.numpy()].sum() - p[kept].sum()) <= p[kept].min() + ROUNDING


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 300), st.integers(1, 320), st.integers(0, 1000))
def test_top_k_keeps_what_equals_the_last(size, count, seed):
    scores = logits(size, 2.0, seed, torch.bfloat16)
    assert np.array_equal(
        warped(scores, [TopKLogitsWarper(count)]), TopKLogitsWarper(count)(None, scores.float()[None])[0].numpy()
    )


def test_scores_that_are_impossible_already_stay_so():
    scores = logits(200, 2.0, 0)
    scores[50:] = -torch.inf
    for warpers in ([TopKLogitsWarper(100)], [TopPLogitsWarper(0.9)], [MinPLogitsWarper(0.2)], [TopPLogitsWarper(1.0)]):
        assert np.array_equal(warped(scores, warpers), warpers[0](None, scores[None])[0].numpy())


class Mine(TopKLogitsWarper):
    pass


@pytest.mark.parametrize(
    "other",
    [
        TypicalLogitsWarper(0.9),
        SuppressTokensLogitsProcessor([1], device="cpu"),
        TopPLogitsWarper(0.9, min_tokens_to_keep=2),
        TopKLogitsWarper(3, filter_value=-1e4),
        Mine(3),
    ],
    ids=lambda one: type(one).__name__,
)
def test_others_are_left_to_transformers(other):
    assert Warps.of([TemperatureLogitsWarper(0.5), other]) is None
    chooser = Sampler(torch.tensor([3]), 1.0, sequence_keys(0, 1), warpers=(other,))
    assert chooser.node_by_node and not chooser.on_host


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 400),
    st.sampled_from([0.0, 1.0, 6.0, 40.0]),
    st.integers(0, 10**6),
    st.sampled_from([1.0, 0.3, 0.02]),
)
def test_the_choice_is_where_scores_and_noise_are_largest(size, scale, seed, possible):
    """The noise that is not made would not have changed it; where most are impossible too."""
    generator = torch.Generator().manual_seed(seed)
    scores = scale * torch.randn(size, generator=generator)
    scores[torch.rand(size, generator=generator) > possible] = -torch.inf
    key, position = int(sequence_keys(seed, 1)), seed % 1000
    hashes = all_hashes(size, torch.device("cpu"))
    noise = gumbel(torch.tensor([key]), torch.tensor([position]), hashes)[0]
    assert noisiest(scores.numpy(), key, position, hashes.numpy()) == int((scores + noise).argmax())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_warpers_behind_what_looks_at_the_text_are_compiled_too(temperature):
    """Against transformers' whole chain, by its largest score, with the noise."""
    chain = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(3.0), TemperatureLogitsWarper(0.7)])
    chain += [TopKLogitsWarper(20), TopPLogitsWarper(0.8)]
    head, warps = Warps.at_end_of(chain)
    assert len(head) == 1 and len(warps.kinds) == 3
    assert len(Warps.at_end_of(LogitsProcessorList([*chain, TypicalLogitsWarper(0.9)]))[0]) == 5
    keys = None if temperature == 0 else sequence_keys(2, 2)
    chooser, changed = Sampler(torch.tensor([2, 3]), temperature, keys, processors=(chain, chain)), 0
    for step in range(100):
        scores = torch.stack([logits(60, 2.0, 2 * step + row) for row in range(2)])
        texts = [[1, 2, int(scores[0].argmax())], [3, 4, 5, int(scores[1].argmax())]]
        chooser.commit(torch.tensor([3 + step, 4 + step]), texts)
        expected = [chain(torch.tensor([text]), one[None])[0] for text, one in zip(texts, scores, strict=True)]
        noise = torch.zeros(2, 60) if keys is None else chooser.noise(0, 60)
        tree = TokenTree(torch.zeros(2, 1, dtype=torch.long), torch.full((2, 1), -1))
        found = chooser.match(scores[:, None], tree).tokens[:, 0]
        assert torch.equal(found, (torch.stack(expected) + noise).argmax(-1))
        changed += int((found != scores.argmax(-1)).sum())
    assert changed > 50


def test_choices_have_the_frequencies_of_the_warped_distribution():
    """Chi-squared over 20,000 draws, at a false-alarm rate of 1 in 10,000."""
    warpers = (TemperatureLogitsWarper(0.8), TopKLogitsWarper(8), TopPLogitsWarper(0.9))
    scores, draws = logits(100, 2.0, 5), 20_000
    expected = scores[None]
    for one in warpers:
        expected = one(None, expected)
    p = expected[0].softmax(-1)
    chooser = Sampler(torch.full((draws,), 3), 1.0, sequence_keys(1, draws), warpers=warpers)
    tree = TokenTree(torch.zeros(draws, 1, dtype=torch.long), torch.full((draws, 1), -1))
    assert chooser.on_host
    found = chooser.match(scores.expand(draws, 1, -1), tree).tokens[:, 0]
    counts, kept = found.bincount(minlength=100), p > 0
    assert counts[~kept].sum() == 0 and 3 < kept.sum() < 9
    squares = ((counts - draws * p) ** 2 / (draws * p))[kept].sum()
    assert squares < chi2.ppf(1 - 1e-4, int(kept.sum()) - 1)
