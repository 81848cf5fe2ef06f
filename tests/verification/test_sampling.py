"""Noise and choice: distribution, independence, and agreement with transformers' warpers."""

import math
from functools import partial

import pytest
import torch
from enumeration import chi_square
from helpers import words
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from shape.verification import sampling
from shape.verification.acceptance import Accepted, follow, match
from shape.verification.noise import all_hashes, gumbel, sequence_keys, token_hashes
from shape.verification.sampling import Sampler, best
from shape.verification.tree import TokenTree, chain, root_only

# Every statistical check below rejects a correct implementation with a probability of about 1e-6 (|z| < 4.9);
# seeds are fixed, so that the outcome does not change from run to run.
Z = 4.9


@given(st.lists(st.lists(st.integers(-2, 2), min_size=5, max_size=5), min_size=1, max_size=4))
def test_the_best_is_the_first_of_equal_ones(scores):
    given = torch.tensor(scores, dtype=torch.float32)
    assert best(given).tolist() == [row.index(max(row)) for row in scores] == given.argmax(-1).tolist()
    given[0, 3] = float("nan")
    assert best(given)[0] == given[0].argmax() == 3


def sampler(**options) -> Sampler:
    options.setdefault("prompt_lengths", torch.tensor([4]))
    if options.get("temperature"):
        options.setdefault("keys", sequence_keys(0, len(options["prompt_lengths"])))
    return Sampler(**options)


def warpers(temperature: float, top_k: int = 0, top_p: float = 1.0) -> tuple:
    found = [TemperatureLogitsWarper(temperature)]
    found += [TopKLogitsWarper(top_k)] if top_k else []
    return (*found, TopPLogitsWarper(top_p))


@given(st.integers(0, 12), st.floats(0.05, 1.0), st.floats(0.2, 3.0), st.integers(0, 1000))
def test_following_the_path_chooses_what_looking_everywhere_would(top_k, top_p, temperature, seed):
    """Where to look at every node costs more than to wait, choices are made along the path; they are the same."""
    generator = torch.Generator().manual_seed(seed)
    tree = TokenTree(torch.randint(10, (3, 7), generator=generator), torch.tensor([-1, 0, 0, 1, 1, 2, 3]).expand(3, 7))
    logits = 3 * torch.randn(3, 7, 10, generator=generator)
    for row in range(3):  # a choice is a function of the text, so nodes with equal text have equal logits
        first: dict[tuple[int, ...], int] = {}
        for node in range(7):
            path = tuple(tree.tokens[row, tree.ancestors[row, node]].tolist())
            logits[row, node] = logits[row, first.setdefault(path, node)]
    lengths = torch.tensor([4, 6, 9])
    chooser = sampler(prompt_lengths=lengths, temperature=temperature, warpers=warpers(temperature, top_k, top_p))
    assert chooser.node_by_node
    noise = torch.stack([chooser.noise(offset, 10) for offset in range(4)], dim=1)
    everywhere = (chooser.warp(logits) + noise[torch.arange(3)[:, None], tree.depth]).argmax(-1)
    assert torch.equal(chooser.choose(logits, tree), everywhere)
    assert torch.equal(chooser.choose_roots(logits, tree), everywhere[:, 0])
    same(tree, follow(tree, partial(chooser.choose_at, logits, tree)), match(tree, everywhere))


def same(tree: TokenTree, followed: Accepted, looked: Accepted) -> None:
    """The same tokens, along a path."""
    assert torch.equal(followed.counts, looked.counts) and torch.equal(followed.drafted, looked.drafted)
    for row, count in enumerate(followed.counts.tolist()):
        assert torch.equal(followed.tokens[row, :count], looked.tokens[row, :count])
        path = followed.path[row, :count].tolist()
        assert path[0] == 0 and tree.parent[row, path[1:]].tolist() == path[:-1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_choices_of_the_compiled_loop_are_those_of_tensors(temperature, dtype):
    """Over 300 trees of two rows, with settled texts of unequal length and too early EOS in some."""
    generator = torch.Generator().manual_seed(1)
    for step in range(300):
        tree = TokenTree(
            torch.randint(5, (2, 9), generator=generator), torch.tensor([-1, 0, 0, 0, 1, 1, 2, 4, -1]).expand(2, 9)
        )
        logits = 3 * torch.randn(2, 9, 5, generator=generator)
        for row in range(2):
            first: dict[tuple[int, ...], int] = {}
            for node in range(9):
                path = tuple(tree.tokens[row, tree.ancestors[row, node]].tolist())
                logits[row, node] = logits[row, first.setdefault(path, node)]
        chooser = sampler(
            prompt_lengths=torch.tensor([4, 6]), temperature=temperature, min_new_tokens=3 * (step % 2),
            eos_token_ids=(2,), warpers=(TemperatureLogitsWarper(temperature),) if temperature else (),
        )  # fmt: skip
        chooser.commit(torch.tensor([5 + step, 6]))
        assert chooser.on_host and not chooser.node_by_node
        logits = logits.to(dtype)
        same(tree, chooser.match(logits, tree), match(tree, chooser.choose(logits, tree)))
        assert torch.equal(chooser.choose_roots(logits, tree), chooser.choose(logits, tree)[:, 0])


def test_processors_see_each_rows_own_text():
    """A token that stands in the text already, or on the path to the node, is repelled there and nowhere else."""
    processors = (
        LogitsProcessorList([RepetitionPenaltyLogitsProcessor(9.0)]),
        LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)]),
    )
    chooser = sampler(prompt_lengths=torch.tensor([2, 4]), processors=processors)
    chooser.commit(torch.tensor([2, 4]), [[5, 6], [1, 2, 7, 1]])
    scores = torch.tensor([0.0, 1.0, 9.0, 8.0, 7.0, 10.0, 1.0, 1.0])
    tree = TokenTree(torch.tensor([[6, 2, 3], [1, 3, 2]]), torch.tensor([[-1, 0, 1], [-1, 0, 1]]))
    accepted = follow(tree, partial(chooser.choose_at, scores.expand(2, 3, 8), tree))
    assert accepted.counts.tolist() == [3, 1]
    assert accepted.tokens[0].tolist() == [2, 3, 4]  # 5 is in the text, then 2 on the path, then 3
    assert accepted.tokens[1, 0] == 5  # [1, 2] has been there, 5 has not; nothing follows it in the tree


def test_drafts_see_the_targets_own_noise_and_only_that_of_their_vocabulary():
    chooser, some = sampler(temperature=1.0, prompt_lengths=torch.tensor([4, 9])), torch.tensor([7, 3, 30])
    foreseen = chooser.draft_noise(3, token_hashes(some))
    for offset in (2, 0, 1):
        assert torch.equal(foreseen[offset][:, 0], chooser.noise(offset, 50)[:, some])
    assert sampler().draft_noise(2, token_hashes(some)) == [None, None]
    rejecting = sampler(temperature=1.0, prompt_lengths=torch.tensor([4, 9]), coupled=False)
    assert not torch.equal(rejecting.draft_noise(1, token_hashes(some))[0], foreseen[0])


def test_choices_follow_the_distribution():
    """20,000 choices over 6 tokens against softmax."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0])
    rows = 20_000
    chooser = sampler(
        prompt_lengths=torch.full((rows,), 4), temperature=0.8, keys=sequence_keys(3, rows), warpers=warpers(0.8)[:1]
    )
    tree = root_only(torch.zeros(rows, dtype=torch.long))
    counts = chooser.choose(logits.expand(rows, 1, 6), tree).flatten().bincount(minlength=6).double()
    assert chi_square(counts, rows * (logits / 0.8).softmax(-1).double()) < 1


def test_nodes_of_one_depth_share_their_noise_and_other_depths_do_not():
    chooser = sampler(temperature=1.0, prompt_lengths=torch.tensor([4]))
    flat = torch.zeros(1, 4, 5000)
    choices = chooser.pick(flat, TokenTree(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[-1, 0, 0, 1]])))[0, 1:]
    assert choices[0] == choices[1] != choices[2]
    # After one settled token, depth 1 of before is depth 0.
    chooser.commit(torch.tensor([5]))
    assert chooser.choose(flat[:, :1], root_only(torch.tensor([1])))[0, 0] == choices[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_eos_is_out_of_reach_until_the_minimum(temperature):
    chooser = sampler(temperature=temperature, min_new_tokens=2, eos_token_ids=(1, 3))
    logits = torch.tensor([0.0, 50.0, 0.0, 40.0]).expand(1, 3, 4)
    tree = TokenTree(torch.tensor([[0, 0, 0]]), torch.tensor([[-1, 0, 1]]))
    choices = chooser.pick(chooser.tree_scores(logits, tree), tree)[0].tolist()
    assert set(choices[:2]) <= {0, 2} and choices[2] == 1
    assert chooser.choose(logits, tree)[0, 0] == choices[0]
    assert logits[0, 0, 1] == 50.0  # the model's logits are not written to
    noise = chooser.draft_noise(1, words(4))[0]
    assert chooser.draft_scores(logits[:, :1], 0, noise)[0, 0].argmax() in (0, 2)
    some = torch.tensor([1, 2])  # a draft vocabulary
    noise = chooser.draft_noise(1, token_hashes(some))[0]
    assert chooser.draft_scores(logits[:, :1, some], 0, noise, some)[0, 0].argmax() == 1


def test_draws_of_nodes_depths_and_steps_are_independent():
    """What a drafter draws at one node says nothing of another node, a deeper one, or the same position a step later.

    Correlations over 4,000 tokens within 4.9 standard errors, which the largest of 780 exceeds 7.5 times in 10,000.
    """
    drawing = sampler(temperature=1.0, prompt_lengths=torch.tensor([4, 4]), coupled=False)
    assert drawing.draws and not sampler(coupled=False).draws and not sampler(temperature=1.0).draws
    found = []
    for length in (4, 5):
        drawing.commit(torch.tensor([length, length]))
        noise = drawing.draft_noise(3, words(4000), nodes=2)
        assert all(
            torch.equal(one, again) for one, again in zip(noise, drawing.draft_noise(3, words(4000), 2), strict=True)
        )
        found += torch.cat(noise, dim=1).flatten(0, 1)
        found += [*drawing.residual_noise(4000), *drawing.residual_noise(4000, offset=1), *drawing.uniforms(4000)]
        found += drawing.noise(0, 4000)
    correlation = torch.corrcoef(torch.stack([one.double() for one in found])).fill_diagonal_(0)
    assert len(found) == 2 * (3 * 2 * 2 + 2 + 2 + 2 + 2)
    assert float(correlation.abs().max()) < Z / math.sqrt(4000)


class Strict(LogitsProcessor):
    """Forbids two tokens, and cannot be asked about a text that has them."""

    def __call__(self, input_ids, scores):
        assert not torch.isin(input_ids[:, 1:], torch.tensor([2, 3])).any()
        return scores.index_fill(1, torch.tensor([2, 3]), float("-inf")) + input_ids[:, -1:]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_at_every_node_are_those_along_its_own_path(temperature):
    """Of nodes that can be reached: those below a token without probability are not shown to processors."""
    processors = (LogitsProcessorList([Strict(), RepetitionPenaltyLogitsProcessor(2.0)]),) * 2
    chooser = sampler(
        prompt_lengths=torch.tensor([2, 2]), temperature=temperature, processors=processors, min_new_tokens=2,
        eos_token_ids=(4,),
    )  # fmt: skip
    texts = [[0, 1], [0, 5]]
    chooser.commit(torch.tensor([2, 2]), texts)
    tree = TokenTree(
        torch.tensor([[1, 0, 2, 5, 5], [5, 3, 6, 2, 1]]), torch.tensor([[-1, 0, 0, 1, 2], [-1, 0, 1, 0, -1]])
    )
    logits = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    kept = logits.clone()
    scores = chooser.tree_scores(logits, tree)
    assert torch.equal(logits, kept)
    for row, node, text in ((0, 0, [0, 1]), (0, 1, [0, 1, 0]), (0, 3, [0, 1, 0, 5]), (1, 0, [0, 5])):
        expected = logits[row, node].clone()
        expected[4] = float("-inf") if len(text) < 4 else expected[4]
        assert torch.equal(scores[row, node], processors[row](torch.tensor([text]), expected[None])[0])
    picked, accepted = chooser.pick(scores, tree), follow(tree, partial(chooser.choose_at, logits, tree))
    assert torch.equal(chooser.choose_roots(logits, tree), picked[:, 0])
    for row, count in enumerate(accepted.counts.tolist()):
        assert torch.equal(picked[row, accepted.path[row, :count]], accepted.tokens[row, :count])


def test_greedy_choices_leave_out_what_warpers_do():
    """Along the path and at all nodes at once."""
    chooser = sampler(warpers=(SuppressTokensLogitsProcessor([1], "cpu"),))
    logits = torch.tensor([[[0.0, 9.0, 5.0]]])
    tree = root_only(torch.zeros(1, dtype=torch.long))
    assert chooser.choose(logits, tree).item() == 2 == chooser.pick(chooser.tree_scores(logits, tree), tree).item()
    assert chooser.choose_roots(logits, tree).item() == 2


@pytest.mark.parametrize("deepest", [1, 3, 4])
def test_noise_that_drafting_made_is_not_made_again(monkeypatch, deepest):
    made = []

    def watched(keys: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        made.append(positions.shape[1])
        return gumbel(keys, positions, tokens)

    monkeypatch.setattr(sampling, "gumbel", watched)
    sampler = Sampler(torch.tensor([5, 2]), 1.0, keys=sequence_keys(0, 2))
    tree = chain(torch.tensor([3, 4]), torch.ones(2, deepest, dtype=torch.long))
    scores = torch.randn(2, tree.size, 32, generator=torch.Generator().manual_seed(0))
    sampler.commit(torch.tensor([7, 4]))
    expected = sampler.pick(scores, tree)
    for hashes, again in (
        (all_hashes(32, torch.device("cpu")), max(0, deepest + 1 - 3)),
        (token_hashes(torch.arange(32)), deepest + 1),  # not those of verification
    ):
        made.clear()
        sampler.draft_noise(3, hashes)
        assert torch.equal(sampler.pick(scores, tree), expected)
        assert made == [3, *([again] if again else [])]
    sampler.draft_noise(3, all_hashes(32, torch.device("cpu")))
    sampler.commit(torch.tensor([9, 5]))  # other positions, other noise
    moved = Sampler(torch.tensor([5, 2]), 1.0, keys=sequence_keys(0, 2))
    moved.commit(torch.tensor([9, 5]))
    assert torch.equal(sampler.pick(scores, tree), moved.pick(scores, tree))
