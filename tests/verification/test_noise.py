"""Noise: its distribution and independence, however it is made."""

import math

import pytest
import torch
from helpers import words
from hypothesis import given
from hypothesis import strategies as st

from shape.verification import noise
from shape.verification.noise import GOLDEN, gumbel, mix, sequence_keys

# Every statistical check below rejects a correct implementation with a probability of about 1e-6 (|z| < 4.9);
# seeds are fixed, so that the outcome does not change from run to run.
Z = 4.9


@given(st.integers(-(2**63), 2**63 - 1))
def test_mix_is_splitmix64(x):
    def reference(z: int) -> int:
        z %= 1 << 64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % (1 << 64)
        return z ^ (z >> 31)

    assert int(mix(torch.tensor(x))) % (1 << 64) == reference(x)


def test_gumbel_has_the_standard_distribution():
    noise = gumbel(sequence_keys(0, 50), torch.arange(50), words(4000)).double().flatten()
    count = noise.numel()
    mean, deviation = 0.5772156649, math.pi / math.sqrt(6)
    assert abs(float(noise.mean()) - mean) < Z * deviation / math.sqrt(count)
    for x in (-1.5, 0.0, 1.0, 3.0, 8.0):
        p = math.exp(-math.exp(-x))
        share = float((noise <= x).double().mean())
        assert abs(share - p) < Z * math.sqrt(p * (1 - p) / count), x


def test_gumbel_differs_by_seed_row_sample_position_and_token():
    position = torch.tensor([7])
    keys = {
        "seed 0 row 0": sequence_keys(0, 2)[:1],
        "seed 0 row 1": sequence_keys(0, 2)[1:],
        "seed 1 row 0": sequence_keys(1, 2)[:1],
        "seed -1 row 0": sequence_keys(-1, 2)[:1],
        "seed 2**62 row 0": sequence_keys(2**62, 2)[:1],
    }
    draws = {name: gumbel(key, position, words(1000))[0] for name, key in keys.items()}
    draws["next position"] = gumbel(keys["seed 0 row 0"], position + 1, words(1000))[0]
    names = list(draws)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            correlation = float(torch.corrcoef(torch.stack([draws[one], draws[other]]))[0, 1])
            assert abs(correlation) < Z / math.sqrt(1000), (one, other)
    neighbours = gumbel(keys["seed 0 row 0"], position, words(1001))[0]
    assert abs(float(torch.corrcoef(torch.stack([neighbours[1:], neighbours[:-1]]))[0, 1])) < Z / math.sqrt(1000)


def test_noise_is_uncorrelated_between_positions_and_between_tokens():
    """All pairs of 60 positions over 20,000 tokens, and tokens at small distances; false alarms below 1e-4 in all."""
    keys, positions = sequence_keys(0, 1).expand(60), torch.arange(1000, 1060)
    noise = gumbel(keys, positions, words(20_000)).double()
    between = torch.corrcoef(noise) * math.sqrt(20_000)
    assert (between - torch.diag(between.diag())).abs().max() < 5.5
    flat = noise - noise.mean()
    for distance in (1, 2, 64, 1024, 4096):
        products = flat[:, distance:] * flat[:, :-distance]
        assert abs(float(products.mean())) < 5.5 * float(flat.var()) / math.sqrt(products.numel())
    # The signs of neighbouring positions' differences are independent too, which a linear measure would not see.
    ranks = (noise[1:] > noise[:-1]).double() - 0.5
    pairs = (ranks[:, 1:] * ranks[:, :-1]).mean()
    assert abs(float(pairs)) < 5.5 * 0.25 / math.sqrt(ranks[:, 1:].numel())


def test_a_prompts_own_seed_is_independent_of_its_batch():
    alone = sequence_keys([5], 1, samples=3)
    together = sequence_keys([9, 5], 2, samples=3)
    assert torch.equal(alone, together[3:])


MAKERS = pytest.mark.parametrize("make", [gumbel, noise._gumbel_on_device], ids=["compiled", "tensors"])


def landing_on(word: int, key: int, position: int) -> int:
    """The token's word whose hash at this place is ``word``: every round of the hash can be undone."""
    whole = (1 << 64) - 1
    word = word * pow(0x94D049BB133111EB, -1, 1 << 64) & whole
    word ^= word >> 32
    word = word * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & whole
    word ^= int(mix(torch.tensor(key) + torch.tensor(position) * GOLDEN)) & whole
    return word - (1 << 64) if word >= 1 << 63 else word


@MAKERS
def test_noise_is_finite_and_keeps_its_tail(make):
    """Wherever the hash lands: a choice among the tokens that are left must stay one of them."""
    key, position = sequence_keys(3, 1), torch.tensor([9])

    def at(words: list[int]) -> torch.Tensor:
        return make(key, position, torch.tensor([landing_on(word, int(key), 9) for word in words]))[0]

    assert torch.isfinite(at([0, 1, -1, 2**40, -(2**62), 2**63 - 1, -(2**63)])).all()
    words = [1, 3, -5, 2**20, 2**40 + 12345, -(2**52), 2**61, -(2**62), 2**63 - 2**40]
    exact = [-math.log(-math.log1p(-abs(word) / 2**63)) for word in words]
    assert at(words).tolist() == pytest.approx(exact, rel=2e-6, abs=2e-7)


def test_the_host_makes_the_noise_of_a_device():
    keys, positions = sequence_keys([1, -(2**70), 3], 3)[:, None], torch.tensor([[0, 7], [1, 2**40], [9, 9]])
    here, there = (make(keys, positions, words(20_000)) for make in (gumbel, noise._gumbel_on_device))
    assert here.shape == (3, 2, 20_000)
    torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)
