"""A smaller model drafts its own continuation, feeds no token twice, and adapts how far it looks."""

import pytest
import torch
from helpers import committed, prompts, tiny_config, weaker_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from shape.drafters import HybridDrafter, ModelDrafter, make_drafter
from shape.drafters.lengths import Fixed
from shape.errors import ConfigError, TargetMismatch
from shape.generation.decoder import ShapeDecoder
from shape.target.model import Target
from shape.verification.noise import sequence_keys
from shape.verification.sampling import Sampler


@pytest.fixture(scope="module")
def small() -> Target:
    return Target(weaker_model())


def bound(small: Target, target: Target, length: int = 4) -> ModelDrafter:
    drafter = ModelDrafter(small, Fixed(length))
    drafter.bind(target)
    return drafter


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(1, 5), st.booleans(), st.integers(0, 99))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_drafts_its_own_continuation_whatever_became_of_the_last(tiny_model, small, accepted, length, sampling, seed):
    """Rows accept unequal parts of each draft; one row leaves on the way."""
    drafter = bound(small, Target(tiny_model()), length)
    texts = [[7, 8, 9, 10], [11, 12], [13, 14, 15, 16, 17, 18, 19]]
    keys = sequence_keys(seed, 3) if sampling else None
    sampler = Sampler(torch.tensor([1, 1, 1]), temperature=0.8 if sampling else 0.0, keys=keys)
    drafter.start(committed(*texts), torch.empty(0))
    alone = ShapeDecoder(small)
    for step, count in enumerate(accepted):
        if step == 2:
            texts, sampler = texts[:2], sampler.select(torch.tensor([0, 1]))
            drafter.select(torch.tensor([0, 1]))
        now = committed(*texts)
        sampler.commit(now.lengths, now.texts)
        drafted = drafter.draft(now, sampler).tokens[:, 1:].tolist()
        for row, text in enumerate(texts):
            if not sampling:
                ids = torch.tensor([text])
                own = alone.generate(ids, torch.ones_like(ids), max_new_tokens=length, eos_token_id=[])
                assert drafted[row] == own[0, len(text) :].tolist()
            else:
                assert drafted[row] == sampled(small, text, length, sampler, row)
        drafter.update([], torch.empty(0), torch.empty(0))
        texts = [
            [*text, *drafts[: (count + row) % (length + 1)], (drafts[-1] + 31 + row) % 64]
            for row, (text, drafts) in enumerate(zip(texts, drafted, strict=True))
        ]


def sampled(small: Target, text: list[int], length: int, sampler: Sampler, row: int) -> list[int]:
    """Token by token, argmax(log q + g)."""
    found: list[int] = []
    with torch.no_grad():
        for offset in range(length):
            logits = small.model(torch.tensor([[*text, *found]])).logits[:, -1]
            noise = sampler.noise(offset, logits.shape[-1])[row]
            found.append(int((logits[0].float() / 0.8 + noise).argmax()))
    return found


def test_no_token_is_fed_twice(tiny_model, small, monkeypatch):
    target, fed = Target(tiny_model()), []
    hidden = Target.hidden

    def counting(self: Target, input_ids: torch.Tensor, **options: object) -> torch.Tensor:
        if self is small:
            fed.append(input_ids.shape[1])
        return hidden(self, input_ids, **options)

    small.support = None
    drafter = bound(small, target)
    monkeypatch.setattr(Target, "hidden", counting)
    out = ShapeDecoder(target, drafter, fall_back=False).generate(
        prompts([9])["input_ids"], max_new_tokens=40, eos_token_id=[], return_dict_in_generate=True
    )
    assert out.stats.acceptance_length > 1.2
    rejected = out.stats.drafted - out.stats.accepted
    # All that went out but the last token, and of rejected drafts what had been fed: at most all of them.
    assert 9 + out.stats.emitted <= sum(fed) <= 9 + out.stats.emitted + rejected + 4


def test_texts_longer_than_its_positions_are_decoded_without_drafts(tiny_model):
    model, config = tiny_model("llama"), tiny_config("gpt2")
    config.n_positions = 32
    small = Target(AutoModelForCausalLM.from_config(config).double().eval())
    decoder = ShapeDecoder(model, ModelDrafter(small), fall_back=False)
    for lengths, drafts in (([40], False), ([32], False), ([20], True), ([40, 20], False)):
        batch = prompts(lengths)
        out = decoder.generate(**batch, max_new_tokens=20, eos_token_id=[], return_dict_in_generate=True)
        assert torch.equal(out.sequences, ShapeDecoder(model).generate(**batch, max_new_tokens=20, eos_token_id=[]))
        assert (out.stats.drafted > 0) == drafts


def test_a_row_drafts_once_the_one_that_is_too_long_for_it_has_left(tiny_model):
    config = tiny_config("gpt2")
    config.n_positions = 32
    drafter = bound(Target(AutoModelForCausalLM.from_config(config).double().eval()), Target(tiny_model()), 3)
    texts = [[5, 6, 7] * 12, [8, 9, 10]]
    sampler = Sampler(torch.tensor([1, 1]))
    drafter.start(committed(*texts), torch.empty(0))
    assert drafter.draft(committed(*texts), sampler).size == 1
    drafter.select(torch.tensor([1]))
    found = drafter.draft(committed(texts[1]), Sampler(torch.tensor([1])))
    drafter.start(committed(texts[1]), torch.empty(0))
    assert torch.equal(found.tokens, drafter.draft(committed(texts[1]), Sampler(torch.tensor([1]))).tokens)


def test_what_it_is_called_does_not_change_as_it_adapts(small):
    drafter = ModelDrafter(small)
    said = drafter.describe()
    drafter.length.observe(accepted=4.0, tested=4.0, drafted=4, entropy=0.0, cost=None)
    assert drafter.length.length > 4 and drafter.describe() == said


def test_how_many_tokens_were_tested_is_counted_row_by_row(tiny_model, small):
    """The least of a mean is above the mean of what is least, and acceptance would look lower."""
    seen = []

    class Recorder(Fixed):
        def observe(self, accepted, tested, drafted, entropy, cost):
            seen.append((accepted, tested, drafted))

    drafter = ModelDrafter(small, Recorder(4))
    drafter.bind(Target(tiny_model()))
    texts, sampler = [[7, 8, 9], [11, 12]], Sampler(torch.tensor([1, 1]))
    drafter.start(committed(*texts), torch.empty(0))
    all_right, first_wrong = drafter.draft(committed(*texts), sampler).tokens[:, 1:].tolist()
    texts = [[*texts[0], *all_right, 3], [*texts[1], (first_wrong[0] + 1) % 64]]
    drafter.draft(committed(*texts), sampler)
    assert seen == [(2.0, 2.5, 4)]


def test_another_tokenizer_is_refused(tiny_target, tiny_model, tiny_tokenizer):
    with pytest.raises(TargetMismatch, match="has 64 tokens and target tiny has 259"):
        ModelDrafter(Target(tiny_model())).bind(Target(tiny_target.model, None, name="tiny"))
    other = Target(tiny_model(vocab_size=len(tiny_tokenizer)), Swapped(tiny_tokenizer), name="other")
    with pytest.raises(TargetMismatch, match="draft model other has another tokenizer than target tiny"):
        ModelDrafter(other).bind(tiny_target)


class Swapped:
    """A tokenizer of the same size in which two tokens have changed places."""

    chat_template = ""

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer

    def get_vocab(self) -> dict[str, int]:
        vocabulary = self.tokenizer.get_vocab()
        first, second = list(vocabulary)[:2]
        return vocabulary | {first: vocabulary[second], second: vocabulary[first]}

    def __call__(self, text: str):
        return self.tokenizer(text)


def test_tables_of_tokens_may_be_padded(tiny_model, tiny_tokenizer, tiny_target):
    """As in families whose small members have larger tables than tokens; the rest is never drafted."""
    larger = tiny_model("llama", torch.float32, seed=1, vocab_size=len(tiny_tokenizer) + 29)
    decoder = ShapeDecoder(tiny_target, ModelDrafter(Target(larger, tiny_tokenizer)), fall_back=False)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(
        decoder.generate(ids, max_new_tokens=20), ShapeDecoder(tiny_target).generate(ids, max_new_tokens=20)
    )


def test_tokens_beyond_a_smaller_table_stand_in_a_text(tiny_model, tiny_tokenizer):
    """Padding that the target's larger table has rows for, and says: its answers are its own all the same."""
    size = len(tiny_tokenizer)
    larger = Target(tiny_model("llama", torch.float32, vocab_size=size + 29), tiny_tokenizer)
    smaller = Target(tiny_model("gpt2", torch.float32, seed=1, vocab_size=size), tiny_tokenizer)
    decoder = ShapeDecoder(larger, ModelDrafter(smaller), fall_back=False)
    ids = torch.tensor([[5, size + 3, 7, size + 28], [6, 7, 8, 9]])
    assert torch.equal(decoder.generate(ids, max_new_tokens=20), ShapeDecoder(larger).generate(ids, max_new_tokens=20))


def test_from_pretrained(tiny_target, tiny_target_folder, tmp_path, tiny_model, tiny_tokenizer):
    tiny_model("llama", torch.float32, seed=4, vocab_size=len(tiny_tokenizer)).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    ids = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    expected = ShapeDecoder(tiny_target).generate(**ids, max_new_tokens=10)
    for name in (None, "model", "suffix+model", "none"):
        decoder = ShapeDecoder.from_pretrained(tmp_path, target=tiny_target, drafter=name, num_draft_tokens=3)
        assert torch.equal(decoder.generate(**ids, max_new_tokens=10), expected), name
    assert decoder.drafter is None
    hybrid = ShapeDecoder.from_pretrained(tmp_path, target=tiny_target_folder, drafter=["suffix", "model"]).drafter
    assert isinstance(hybrid, HybridDrafter) and hybrid.name == "suffix+model"
    with pytest.raises(ConfigError, match="is a language model, which drafts for any with its tokens"):
        ShapeDecoder.from_pretrained(predictor=tmp_path)
    with pytest.raises(ConfigError, match="'model' is unknown"):
        make_drafter("model")
