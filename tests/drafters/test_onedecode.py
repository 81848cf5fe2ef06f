"""The table of what follows one token."""

import pytest
import torch
from helpers import GREEDY, committed

from shape.drafters import OneDecodeDrafter
from shape.drafters.onedecode import bake_texts, bake_tokens
from shape.target.model import Target


def test_tokens_by_themselves_are_what_the_target_says_of_them(tiny_model):
    target = Target(tiny_model("llama"))
    baked = bake_tokens(target, 40, candidates=3)
    assert baked.keys() == set(range(40))
    for token in (0, 17, 39):
        expected = target.model(torch.tensor([[token]])).logits[0, -1].float().softmax(-1).topk(3)
        assert list(baked[token]) == expected.indices.tolist()
        assert list(baked[token].values()) == pytest.approx(expected.values.tolist(), rel=1e-4)


def test_texts_give_the_mean_over_a_tokens_occurrences(tiny_model):
    target, texts = Target(tiny_model("llama", vocab_size=12)), [[3, 5, 3, 7, 5, 3], [5, 3]]
    baked = bake_texts(target, 6, texts)
    assert baked.keys() == {3, 5}
    found = [target.model(torch.tensor([text])).logits[0].float().softmax(-1) for text in texts]
    places = [found[0][0], found[0][2], found[0][5], found[1][1]]
    assert [baked[3][token] for token in range(12)] == pytest.approx((sum(places) / 4).tolist(), rel=1e-4)


def test_what_is_not_sure_is_not_offered(tiny_model):
    target = Target(tiny_model("llama"))
    drafter = OneDecodeDrafter(vocabulary=40, threshold=0.3, candidates=2, depth=3)
    drafter.bind(target)
    baked = bake_tokens(target, 40, 2)
    sure = {token for token, following in baked.items() if max(following.values()) >= 0.3}
    assert drafter.table.keys() == sure and 0 < len(sure) < 40
    unsure = next(token for token in range(40) if token not in sure)
    first = next(iter(sure))
    tree = drafter.draft(committed([1, first], [1, unsure], [1, 63]), GREEDY)
    assert (tree.parent[1:, 1:] == -1).all()
    children = [
        token for token, parent in zip(tree.tokens[0].tolist(), tree.parent[0].tolist(), strict=True) if parent == 0
    ]
    assert set(children) == set(baked[first])


@pytest.mark.parametrize("candidates", [1, 2, 8, 64])
def test_any_number_of_candidates_fits(tiny_model, candidates):
    """The source's K = 8 crashed."""
    drafter = OneDecodeDrafter(threshold=0.0, candidates=candidates, depth=2, nodes=1000)
    drafter.bind(Target(tiny_model("llama")))
    tree = drafter.draft(committed([1, 2]), GREEDY)
    assert tree.size == 1 + min(candidates + candidates**2, 1000)
