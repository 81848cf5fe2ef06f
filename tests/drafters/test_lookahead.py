"""Lookahead decoding: the window's tokens are what the target said, the pool's n-grams what it went through."""

import torch
from helpers import GREEDY, committed, prompts
from hypothesis import given
from hypothesis import strategies as st

from shape.drafters import LookaheadDrafter
from shape.generation.decoder import ShapeDecoder
from shape.verification.tree import TokenTree

VOCABULARY = 97


def says(path: list[int]) -> int:
    """A target that looks at the last two tokens."""
    return (path[-1] * 5 + path[-2] * 3 + 1) % VOCABULARY


def answered(text: list[int], tree: TokenTree) -> torch.Tensor:
    """Its logits behind every node of a one-window tree."""
    paths: dict[int, list[int]] = {}
    for node, (token, parent) in enumerate(zip(tree.tokens[0].tolist(), tree.parent[0].tolist(), strict=True)):
        paths[node] = [*paths[parent], token] if node else list(text)
    return torch.nn.functional.one_hot(torch.tensor([[says(path) for path in paths.values()]]), VOCABULARY).float()


@given(st.integers(1, 4), st.integers(2, 4), st.lists(st.integers(1, 3), min_size=4, max_size=12))
def test_the_pool_has_what_the_target_said(window, size, moves):
    """By steps of one to three tokens, whatever was accepted."""
    drafter = LookaheadDrafter(window, size, guesses=4, from_text=False)
    text = [3, 1, 4, 1, 5]
    drafter.start(committed(text), torch.empty(0))
    kept = drafter.kept[0]
    for moved in moves:
        tree = drafter.draft(committed(text), GREEDY)
        assert tree.size - 1 <= window * (size - 1) + 4 * (size - 1)
        last = len(kept.levels) - 1
        asked = [list(path) for path in kept.drafted]
        drafter.inspect(tree, answered(text, tree))
        # Behind each column's path the window has what the target says there.
        assert kept.levels[-1] == [says([*text, *path]) for path in asked]
        assert len(kept.levels) <= size - 1 and (last + 2 < size or any(kept.pool.values()))
        for _ in range(moved):
            text = [*text, says(text)]
    for first, following in kept.pool.items():
        assert len(following) <= 4 and len(set(following)) == len(following)
        assert all(len(gram) == size - 1 for gram in following) and 0 <= first < VOCABULARY


def test_a_guess_of_the_text_comes_first_and_hangs_on_the_root():
    drafter = LookaheadDrafter(window=1, size=3, guesses=2)
    text = [1, 2, 3, 1, 4, 5, 1, 2, 6, 1]
    drafter.start(committed(text), torch.empty(0))
    tree = drafter.draft(committed(text), GREEDY)
    assert tree.tokens[0, :5].tolist() == [1, 2, 6, 4, 5] and tree.parent[0, :5].tolist() == [-1, 0, 1, 0, 3]


def test_nodes_that_were_not_verified_begin_anew():
    drafter = LookaheadDrafter(window=3, size=3, from_text=False)
    text = [1, 2]
    drafter.start(committed(text), torch.empty(0))
    tree = drafter.draft(committed(text), GREEDY)
    cut = TokenTree(tree.tokens[:, :2], tree.parent[:, :2])
    drafter.inspect(cut, answered(text, cut))
    drafter.inspect(cut, answered(text, cut))  # nothing was drafted since
    kept = drafter.kept[0]
    assert [len(level) for level in kept.levels] == [1, 1]
    drafter.draft(committed([1, 2, 3]), GREEDY)
    assert [len(level) for level in kept.levels] == [3, 3]


def test_a_target_that_repeats_itself_is_foreseen(tiny_model):
    batch = prompts([4])
    decoder = ShapeDecoder(tiny_model("llama"), LookaheadDrafter(from_text=False), fall_back=False)
    out = decoder.generate(**batch, max_new_tokens=120, eos_token_id=[], return_dict_in_generate=True)
    assert torch.equal(
        out.sequences, ShapeDecoder(tiny_model("llama")).generate(**batch, max_new_tokens=120, eos_token_id=[])
    )
    assert out.stats.acceptance_length > 1.3
