"""Noise and choice: distribution, independence, and agreement with transformers' warpers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from shape.verification.sampling import Sampler, gumbel, mix, row_keys

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
    noise = gumbel(row_keys(0, 50), torch.arange(50), 4000).double().flatten()
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
        "seed 0 row 0": row_keys(0, 2)[:1],
        "seed 0 row 1": row_keys(0, 2)[1:],
        "seed 1 row 0": row_keys(1, 2)[:1],
        "seed -1 row 0": row_keys(-1, 2)[:1],
        "seed 2**62 row 0": row_keys(2**62, 2)[:1],
    }
    draws = {name: gumbel(key, position, 1000)[0] for name, key in keys.items()}
    draws["next position"] = gumbel(keys["seed 0 row 0"], position + 1, 1000)[0]
    names = list(draws)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            correlation = float(torch.corrcoef(torch.stack([draws[one], draws[other]]))[0, 1])
            assert abs(correlation) < Z / math.sqrt(1000), (one, other)
    neighbours = gumbel(keys["seed 0 row 0"], position, 1001)[0]
    assert abs(float(torch.corrcoef(torch.stack([neighbours[1:], neighbours[:-1]]))[0, 1])) < Z / math.sqrt(1000)


def test_a_prompts_own_seed_is_independent_of_its_batch():
    alone = row_keys([5], 1, samples=3)
    together = row_keys([9, 5], 2, samples=3)
    assert torch.equal(alone, together[3:])


def sampler(**options) -> Sampler:
    options.setdefault("prompt_lengths", torch.tensor([4]))
    if options.get("temperature"):
        options.setdefault("keys", row_keys(0, len(options["prompt_lengths"])))
    return Sampler(**options)


@given(st.integers(0, 12), st.floats(0.05, 1.0), st.floats(0.2, 3.0), st.integers(0, 1000))
def test_warp_equals_transformers(top_k, top_p, temperature, seed):
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(seed))
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    expected = TopPLogitsWarper(top_p)(None, expected)
    found = sampler(temperature=temperature, top_k=top_k, top_p=top_p).warp(logits)
    assert torch.equal(found, expected)


def test_choices_follow_the_distribution():
    """Chi-square of 20,000 choices over 6 tokens against softmax; threshold at a false-alarm rate of 1e-6."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0])
    rows = 20_000
    chooser = sampler(prompt_lengths=torch.full((rows,), 4), temperature=0.8, keys=row_keys(3, rows))
    depth = torch.zeros(rows, 1, dtype=torch.long)
    counts = chooser.choose(logits.expand(rows, 1, 6), depth).flatten().bincount(minlength=6).double()
    expected = rows * (logits / 0.8).softmax(-1).double()
    assert float(((counts - expected) ** 2 / expected).sum()) < 35.9  # chi-square, 5 degrees of freedom


def test_nodes_of_one_depth_share_their_noise_and_other_depths_do_not():
    chooser = sampler(temperature=1.0, prompt_lengths=torch.tensor([4]))
    flat = torch.zeros(1, 3, 5000)
    choices = chooser.choose(flat, torch.tensor([[1, 1, 2]]))[0]
    assert choices[0] == choices[1] != choices[2]
    # After one settled token, depth 1 of before is depth 0.
    chooser.settle(torch.tensor([5]))
    assert chooser.choose(flat[:, :1], torch.tensor([[0]]))[0, 0] == choices[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_eos_is_out_of_reach_until_the_minimum(temperature):
    chooser = sampler(temperature=temperature, min_new_tokens=2, eos_token_ids=(1, 3))
    logits = torch.tensor([0.0, 50.0, 0.0, 40.0]).expand(1, 3, 4)
    choices = chooser.choose(logits, torch.tensor([[0, 1, 2]]))[0].tolist()
    assert set(choices[:2]) <= {0, 2} and choices[2] == 1
    assert logits[0, 0, 1] == 50.0  # the model's logits are not written to
    assert chooser.draft_scores(logits[:, :1], 0, 4)[0, 0].argmax() in (0, 2)
    some = torch.tensor([1, 2])  # a draft vocabulary
    assert chooser.draft_scores(logits[:, :1, some], 0, 4, some)[0, 0].argmax() == 1


def test_a_draft_vocabulary_sees_the_noise_of_its_own_tokens():
    chooser = sampler(temperature=1.0)
    some = torch.tensor([7, 3, 90])
    scores = chooser.draft_scores(torch.zeros(1, 1, 3), 0, 100, some)[0, 0]
    assert torch.equal(scores, chooser.noise(0, 100)[0, some])
