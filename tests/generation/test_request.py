"""Options are understood once, and again whenever anything that they mean has changed."""

import pytest
import torch
from transformers import GenerationConfig

from shape.errors import UnsupportedGeneration
from shape.generation import request
from shape.generation.request import Request
from shape.target.model import Target


@pytest.fixture
def target(tiny_model) -> Target:
    return Target(tiny_model("llama", seed=3))


@pytest.fixture
def preparations(monkeypatch) -> list[int]:
    """The lengths of the prompts for which transformers was asked."""
    asked, prepare = [], request._prepare
    monkeypatch.setattr(
        request, "_prepare", lambda target, ids, *more: asked.append(len(ids)) or prepare(target, ids, *more)
    )
    return asked


def resolved(target: Target, length: int = 4, config: GenerationConfig | None = None, **options) -> Request:
    ids = torch.full((1, length), 5)
    return Request.resolve(target, ids, torch.ones_like(ids), config, options)


def test_calls_with_equal_options_are_prepared_once_whatever_their_prompts(target, preparations):
    options = {
        "max_new_tokens": 9,
        "min_new_tokens": 3,
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 0,
        "top_p": 0.8,
    }
    first, second = resolved(target, 4, **options), resolved(target, 7, **options)
    assert preparations == [4]
    assert first.max_new_tokens == second.max_new_tokens == 9
    assert first.min_new_tokens == second.min_new_tokens == 3
    assert first.warpers == second.warpers and len(first.warpers) == 2
    resolved(target, **options | {"top_p": 0.9})
    assert len(preparations) == 2


def test_a_changed_configuration_is_noticed(target):
    config = GenerationConfig(max_new_tokens=5)
    assert resolved(target, config=config).max_new_tokens == 5
    config.max_new_tokens = 6
    assert resolved(target, config=config).max_new_tokens == 6
    assert resolved(target, max_new_tokens=6).eos_token_ids == (2,)
    target.model.generation_config.eos_token_id = [2, 7]
    assert resolved(target, max_new_tokens=6).eos_token_ids == (2, 7)
    target.model.generation_config.eos_token_id.append(9)
    assert resolved(target, max_new_tokens=6).eos_token_ids == (2, 7, 9)
    target.model.config.temperature = 0.3
    with pytest.raises(UnsupportedGeneration, match="modified the pretrained model configuration"):
        resolved(target, max_new_tokens=6)


def test_none_takes_back_what_the_targets_configuration_says(target):
    target.model.generation_config.update(max_new_tokens=50, stop_strings=["a"], temperature=0.0)
    assert [
        resolved(target, length, max_length=20, max_new_tokens=None, stop_strings=None).max_new_tokens
        for length in (4, 7)
    ] == [16, 13]
    assert resolved(target, do_sample=True, temperature=None, stop_strings=None).temperature == 1.0
    with pytest.raises(UnsupportedGeneration, match="stop_strings need a tokenizer"):
        resolved(target, max_new_tokens=3)


def test_values_that_are_equal_and_mean_something_else_are_told_apart(target):
    resolved(target, max_new_tokens=1)
    with pytest.raises(UnsupportedGeneration, match="max_new_tokens is True"):
        resolved(target, max_new_tokens=True)


def test_lengths_that_count_the_prompt_are_prepared_for_it(target, preparations):
    assert [resolved(target, length, max_length=20).max_new_tokens for length in (4, 7, 4)] == [16, 13, 16]
    options = {"max_new_tokens": 30, "min_length": 10}
    assert [resolved(target, length, **options).min_new_tokens for length in (4, 7)] == [6, 3]
    assert preparations == [4, 7, 4, 4, 7]


def test_what_looks_at_the_text_or_the_clock_is_prepared_for_every_call(target, preparations):
    for options in ({"repetition_penalty": 1.2}, {"max_time": 60.0}):
        preparations.clear()
        first, second = (resolved(target, max_new_tokens=3, **options) for _ in range(2))
        assert len(preparations) == 4
        assert (first.processors or first.criteria) is not (second.processors or second.criteria)


def test_only_so_many_kinds_of_calls_are_kept(target):
    for count in range(1, 3 * request._MOST_RESOLVED):
        resolved(target, max_new_tokens=count)
    assert len(request._resolved[target]) <= request._MOST_RESOLVED
