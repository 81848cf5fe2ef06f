"""Targets with recurrent layers: whatever is rejected, states are those of the text that was accepted."""

import pytest
import torch
from helpers import prompts, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import arguments, write_conversations
from transformers import PreTrainedModel

from eval.architectures import FAMILIES, build
from eval.families import random_model
from shape.cli.train import main as train
from shape.drafters import AdversaryDrafter, HybridDrafter, ModelDrafter, NgramDrafter, OracleDrafter
from shape.drafters.compressed import CompressedDrafter, Compression
from shape.errors import ConfigError, UnsupportedTarget
from shape.evaluation.efficiency import run as measure_efficiency
from shape.evaluation.options import EfficiencyOptions
from shape.generation.decoder import ShapeDecoder
from shape.generation.eager import _MOST_AGAIN
from shape.generation.timing import measure_costs
from shape.target.model import Target
from shape.verification.forward import new_cache, prefill, tree_forward
from shape.verification.probe import support_of
from shape.verification.recurrent import RecurrentCache
from shape.verification.tree import chain

TARGETS = ["qwen3_5", "lfm2", "bamba", "falcon_h1"]


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    """In float64, as far as their own code is."""
    return {family: build(family) for family in TARGETS}


@pytest.fixture(scope="module")
def qwen(models) -> Target:
    return Target(models["qwen3_5"], name="qwen")


def ids(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 64, (1, length), generator=torch.Generator().manual_seed(seed))


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, root mean square; another text's states are off by 0.1 or more."""
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", TARGETS)
def test_they_are_decoded_as_chains(models, family):
    support = support_of(Target(models[family]))
    assert support.recurrent and support.mode == "chain" and "cannot forget" in support.reason


steps = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5)


@pytest.mark.parametrize("family", TARGETS)
@given(steps=steps)
@settings(max_examples=8, deadline=None)
def test_states_are_those_of_the_accepted_text(models, family, steps):
    """Drafts of which any number is accepted, one behind the other, and one that is forgotten as if it never was."""
    target = Target(models[family])
    support = support_of(target)
    cache, text = new_cache(target, support, 1, 0), ids(9)
    assert isinstance(cache, RecurrentCache)
    prefill(target, cache, text, [text.shape[1]], portion=4)
    assert (cache.longest, cache.again) == (9, 0)
    for number, (size, accepted) in enumerate(steps):
        drafts = ids(size, number)
        tree_forward(target, support, cache, chain(drafts[:, 0] + 1, drafts[:, 1:]))  # nobody says what became of it
        found = tree_forward(target, support, cache, chain(drafts[:, 0], drafts[:, 1:]))
        expected = target.hidden(torch.cat([text, drafts], dim=1))[:, text.shape[1] :]
        assert off(found, expected) < 1e-4  # their own code is in float32
        accepted = min(accepted, size)
        cache.commit([[*range(accepted)]])
        text = torch.cat([text, drafts[:, :accepted]], dim=1)
        assert cache.longest == text.shape[1] and (cache.again == 0) == (accepted == size)


def test_a_cache_holds_no_fewer_tokens_than_its_states_are_of(qwen):
    cache = RecurrentCache(qwen)
    prefill(qwen, cache, ids(9), [9])
    with pytest.raises(ValueError, match="states of 9 tokens cannot be made states of 8"):
        cache.set_lengths([8])
    with pytest.raises(NotImplementedError, match="one sequence at a time"):
        cache.select(torch.zeros(2, dtype=torch.long))
    cache.set_lengths([0])
    states = prefill(qwen, cache, ids(5, 1), [5])
    assert off(states, qwen.hidden(ids(5, 1))) < 1e-4


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_greedy_answers_are_the_targets_own(family, dtype):
    model = build(family).to(dtype)
    decoder, prompt = ShapeDecoder(model), ids(11)
    expected, accepted = model.generate(prompt, max_new_tokens=60, do_sample=False, eos_token_id=None), 0
    for drafter in (AdversaryDrafter(nodes=7, seed=1), OracleDrafter(expected.tolist(), error_rate=0.4, depth=6)):
        own = ShapeDecoder(decoder.target, drafter, fall_back=False)
        out = own.generate(prompt, max_new_tokens=60, eos_token_id=[], return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected)
        accepted += out.stats.accepted
    assert accepted > 10 and out.stats.forwards < 50


def test_few_tokens_go_through_again(qwen, monkeypatch):
    """Behind many a step does not draft, which leaves none."""
    fed: list[tuple[int, int]] = []
    through = RecurrentCache.through

    def seen(cache, tokens, layers=(-1,)):
        fed.append((cache.again, tokens.shape[1]))
        return through(cache, tokens, layers)

    expected = ShapeDecoder(qwen, None).generate(ids(11), max_new_tokens=80, eos_token_id=[])
    monkeypatch.setattr(RecurrentCache, "through", seen)
    drafter = OracleDrafter(expected.tolist(), error_rate=0.3, depth=6)
    found = ShapeDecoder(qwen, drafter, fall_back=False).generate(ids(11), max_new_tokens=80, eos_token_id=[])
    assert torch.equal(found, expected)
    drafted, alone = [[again for again, new in fed if (new > 1) == many] for many in (True, False)]
    assert 0 < max(drafted) <= _MOST_AGAIN < max(alone) <= _MOST_AGAIN + 7


def test_sampling_is_the_same_with_and_without_drafts(qwen):
    """The same seed gives the same tokens, one by one and several of a prompt, and in streams."""
    drafter = OracleDrafter(ShapeDecoder(qwen, None).generate(ids(11), max_new_tokens=40, eos_token_id=[]).tolist())
    options = {"max_new_tokens": 30, "do_sample": True, "temperature": 0.7, "seed": 5, "num_return_sequences": 2}
    plain, drafted = (ShapeDecoder(qwen, one, fall_back=False) for one in (None, drafter))
    assert torch.equal(plain.generate(ids(11), **options), drafted.generate(ids(11), **options))
    options["num_return_sequences"] = 1
    pieces = [token for piece in drafted.stream(ids(11), **options) for token in piece]
    assert pieces == plain.generate(ids(11), **options)[0, 11:].tolist()


def test_a_session_reads_what_is_new(qwen):
    """Behind an answer whose last draft was rejected too; a text that goes another way is read anew."""
    decoder = ShapeDecoder(qwen, "suffix", fall_back=False)
    say, text = decoder.session(), ids(20)
    for turn in range(3):
        out = say(text, max_new_tokens=12, eos_token_id=[], return_dict_in_generate=True)
        assert torch.equal(out.sequences, decoder.generate(text, max_new_tokens=12, eos_token_id=[]))
        assert out.stats.reused_tokens == (0 if turn == 0 else text.shape[1] - 6)
        text = torch.cat([out.sequences, ids(5, turn)], dim=1)
    out = say(text[:, :30], max_new_tokens=12, eos_token_id=[], return_dict_in_generate=True)
    assert out.stats.reused_tokens == 0
    assert torch.equal(out.sequences, decoder.generate(text[:, :30], max_new_tokens=12, eos_token_id=[]))


def test_costs_are_measured_and_efficiency_is_not(qwen, tmp_path):
    costs = measure_costs(ShapeDecoder(qwen, "suffix"), context=16, repeats=1, cache=tmp_path / "costs.json")
    assert costs.autoregressive > 0 and max(costs.verify) == 17
    qwen.model.save_pretrained(tmp_path / "qwen")
    asked = write_rows(tmp_path / "prompts.jsonl", {"id": "a", "prompt": "a"})
    options = EfficiencyOptions(
        predictor="none", target=str(tmp_path / "qwen"), prompts=str(asked), output=str(tmp_path / "out"), limit=1
    )
    with pytest.raises(UnsupportedTarget, match="has recurrent layers, whose bare forwards cannot be run"):
        measure_efficiency(options)


@pytest.mark.parametrize("family", TARGETS)
def test_a_model_with_such_layers_drafts(models, tiny_model, family):
    """For itself, of whose choices all are accepted, and for others, of which nearly none are."""
    for target in (models[family], tiny_model("llama")):
        drafter = ModelDrafter(Target(models[family], name="draft model"), 4)
        decoder = ShapeDecoder(target, drafter, fall_back=False)
        out = decoder.generate(ids(11), max_new_tokens=41, eos_token_id=[], return_dict_in_generate=True)
        assert torch.equal(out.sequences, ShapeDecoder(target).generate(ids(11), max_new_tokens=41, eos_token_id=[]))
        assert out.stats.drafted > 0 and (out.stats.acceptance_length > 4) == (target is models[family])


def test_a_model_that_drafts_for_one_sequence_is_asked_one_by_one(models, tiny_model):
    small = Target(models["qwen3_5"], name="small")
    decoder = ShapeDecoder(tiny_model("llama"), HybridDrafter([NgramDrafter(), ModelDrafter(small)]))
    options = {"max_new_tokens": 12, "eos_token_id": [], "return_dict_in_generate": True}
    out = decoder.generate(**prompts([4, 7]), **options)
    plain = ShapeDecoder(decoder.target).generate(**prompts([4, 7]), **options)
    assert torch.equal(out.sequences, plain.sequences) and out.stats.drafted > 0


def test_a_compressed_copy_drafts(qwen):
    decoder = ShapeDecoder(qwen, "compressed", fall_back=False)
    out = decoder.generate(ids(11), max_new_tokens=41, eos_token_id=[], return_dict_in_generate=True)
    assert torch.equal(out.sequences, ShapeDecoder(qwen).generate(ids(11), max_new_tokens=41, eos_token_id=[]))
    assert out.stats.acceptance_length > 2
    low_rank = CompressedDrafter(Compression(cache=0.5))
    with pytest.raises(ConfigError, match=r"compression\.cache is of keys and values, and target qwen has recurrent"):
        ShapeDecoder(qwen, low_rank)


def test_a_predictor_is_trained_for_such_a_target(tiny_tokenizer, tmp_path):
    _, _, values = FAMILIES["qwen3_5"]
    folder = tmp_path / "qwen"
    ends = {"eos_token_id": tiny_tokenizer.eos_token_id, "vocab_size": len(tiny_tokenizer)}
    random_model(type(build("qwen3_5").config)(**values | ends)).float().save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    data = write_conversations(tmp_path / "talks.jsonl")
    train(arguments(folder, data, tmp_path / "out", "--training.steps=4", "--measurement.limit=2"))
    decoder = ShapeDecoder.from_pretrained(tmp_path / "out", target=folder, fall_back=False)
    prompt = decoder.target.encode([{"role": "user", "content": "say a b c"}])
    expected = decoder.target.model.generate(prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(decoder.generate(prompt, max_new_tokens=20), expected)
