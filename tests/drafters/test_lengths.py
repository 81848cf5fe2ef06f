"""How long drafts get."""

import pytest
import torch
from helpers import predictor, weaker_model

from shape.drafters import ModelDrafter, TrainedDrafter, make_drafter
from shape.drafters.lengths import Adaptive, ByCost, Fixed, make_length
from shape.errors import ConfigError
from shape.target.model import Target


def test_adaptive_length_follows_acceptance_and_entropy():
    lengths = Adaptive()
    for _ in range(10):
        lengths.observe(lengths.length, lengths.length, lengths.length, entropy=3.0, cost=None)
    assert lengths.length == 8
    for _ in range(20):
        lengths.observe(0, 1, lengths.length, entropy=3.0, cost=None)
    assert lengths.length == 1
    lengths = Adaptive()
    for _ in range(10):
        lengths.observe(0.6 * lengths.length, lengths.length, lengths.length, entropy=3.0, cost=None)
    assert lengths.length == 4
    for _ in range(10):
        lengths.observe(0.6 * lengths.length, lengths.length, lengths.length, entropy=1.0, cost=None)
    assert lengths.length == 8
    for share, entropy, expected in ((1.0, 1.0, 6), (1.0, 3.0, 5), (0.6, 1.0, 5), (0.6, 3.0, 4), (0.2, 1.0, 3)):
        lengths = Adaptive()
        lengths.observe(share * 4, 4, 4, entropy, cost=None)
        assert lengths.length == expected  # two more where acceptance and entropy both say so
    with pytest.raises(ConfigError, match="not within 1 to 8"):
        Adaptive(length=9)


@pytest.mark.parametrize(("share", "cost"), [(0.5, 0.3), (0.9, 0.1), (0.8, 0.05), (0.3, 0.5)])
def test_length_by_cost_is_the_best_of_the_closed_form(share, cost):
    """Against the expected tokens and times of each length, with geometric acceptance."""
    generator, lengths = torch.Generator().manual_seed(0), ByCost()
    for _ in range(4000):
        accepted = int((torch.rand(lengths.length, generator=generator) < share).long().cumprod(0).sum())
        lengths.observe(accepted, min(accepted + 1, lengths.length), lengths.length, 0.0, cost)

    def rate(length: int) -> float:
        return sum(share**n for n in range(length + 1)) / (1 + cost * length)

    best = max(range(1, 13), key=rate)
    assert rate(lengths.length) > 0.95 * rate(best)


def test_length_by_name():
    assert make_length(5) == Fixed(5) == make_length("5") and make_length("adaptive") == Adaptive()
    assert isinstance(make_length("cost"), ByCost) and make_length(chosen := ByCost()) is chosen
    for wrong in ("0", "fast"):
        with pytest.raises(ConfigError, match="is unknown; use adaptive, cost, or a number"):
            make_length(wrong)


def test_drafts_by_name_are_of_the_length_asked_for():
    given = {"model": ModelDrafter(Target(weaker_model())), "shape": TrainedDrafter(predictor())}
    for name in ("ngram", "suffix", "onedecode"):
        assert make_drafter(name, num_draft_tokens=3).depth == 3
    assert make_drafter("geodesic", num_draft_tokens=2).tree.depth == 2
    model, shape = make_drafter("model+shape", given, num_draft_tokens=6).drafters
    assert model.length == Fixed(6) == model.reproducible().length and shape.tree.depth == 6
    assert make_drafter("none", num_draft_tokens=3) is None
    with pytest.raises(ConfigError, match="lookahead has no draft length"):
        make_drafter("suffix+lookahead", num_draft_tokens=3)
    with pytest.raises(ConfigError, match="num_draft_tokens is 0; give a positive number"):
        make_drafter("ngram", num_draft_tokens=0)
