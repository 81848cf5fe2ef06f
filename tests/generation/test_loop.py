from contextlib import nullcontext
from statistics import median
from time import perf_counter, sleep
from types import SimpleNamespace

import pytest
import torch
from helpers import BASELINES, FAMILIES, predictor, prompts, tiny_config
from transformers import AutoModelForCausalLM

from shape.drafters import NgramDrafter, TrainedDrafter, TreeShape
from shape.drafters.base import Wrapped
from shape.errors import UnsupportedGeneration
from shape.generation import prefill
from shape.generation.decoder import ShapeDecoder
from shape.generation.eager import EagerSteps
from shape.generation.loop import Outcome, unfinished
from shape.generation.sequence import SequenceState
from shape.verification import forward
from shape.verification.cache import KVCache


def drafter(kind):
    if kind == "plain":
        return None
    return NgramDrafter() if kind == "ngram" else TrainedDrafter(predictor(), TreeShape(depth=3, width=2))


@pytest.mark.parametrize("arch", FAMILIES)
def test_a_prefill_in_portions_gives_the_same_states(tiny_model, arch):
    decoder, lengths = ShapeDecoder(tiny_model(arch)), [23, 5, 16]
    ids = prompts(lengths, side="right")["input_ids"]
    states = []
    for portion in (1024, 7):
        cache = forward.new_cache(decoder.target, decoder.support, 3, 32)
        hidden = forward.prefill(decoder.target, cache, ids, lengths, portion)
        states.append([hidden[row, :length] for row, length in enumerate(lengths)])
        assert cache.host_lengths == lengths
    for whole, parts in zip(*states, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("length", "grown"), [(3, True), (40, False)])
def test_answers_no_longer_than_their_prompt_do_not_grow_the_cache(tiny_model, monkeypatch, length, grown):
    """Growing copies it as a whole, beside the new one."""
    copied, decoder = [], ShapeDecoder(tiny_model("llama"), drafter("shape"))
    monkeypatch.setattr(prefill, "_NEW_SLOTS", 4)
    monkeypatch.setattr(prefill, "_TREE_SLOTS", 8)
    grow = KVCache._allocate
    monkeypatch.setattr(KVCache, "_allocate", lambda self, extra: copied.append(extra) or grow(self, extra))
    decoder.generate(**prompts([length, length - 1]), max_new_tokens=40, eos_token_id=[])
    assert bool(copied) == grown


@pytest.mark.parametrize("arch", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("kind", ["plain", "shape", "ngram"])
@pytest.mark.parametrize("sample", [False, True])
def test_a_session_gives_the_tokens_of_separate_calls(tiny_model, arch, kind, sample):
    decoder = ShapeDecoder(tiny_model(arch), drafter(kind))
    options = {"max_new_tokens": 13, "do_sample": sample, "seed": 3, "return_dict_in_generate": True}
    options["eos_token_id"] = []
    say, ids = decoder.session(), prompts([9])["input_ids"]
    generator, shared = torch.Generator().manual_seed(5), 1
    for turn in range(4):
        options["attention_mask"] = torch.ones_like(ids)
        separate = decoder.generate(ids, **options)
        out = say(ids, **options)
        assert torch.equal(out.sequences, separate.sequences)
        assert out.stats.prompt_tokens == ids.shape[1] and separate.stats.reused_tokens == 0
        # All but the last token of the old text: that one has not been through the target.
        assert out.stats.reused_tokens >= shared - 1
        answer = out.sequences
        if turn == 1:  # the user edits the history
            answer = answer[:, : ids.shape[1] - 2]
        shared = answer.shape[1]
        ids = torch.cat([answer, torch.randint(3, 64, (1, 5), generator=generator)], dim=1)


@pytest.mark.parametrize(
    "modes", [(torch.inference_mode, nullcontext), (nullcontext, torch.inference_mode, nullcontext)]
)
def test_turns_of_a_session_may_be_in_and_out_of_inference_mode(modes):
    """Of targets that compute without it by themselves, what it made cannot be written to outside."""
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        decoder = ShapeDecoder(AutoModelForCausalLM.from_config(config).double().eval())
    assert decoder.gradientless is torch.no_grad
    say, ids, options = decoder.session(), prompts([9])["input_ids"], {"max_new_tokens": 5, "eos_token_id": []}
    for mode in modes:
        with mode():
            expected = decoder.generate(ids, torch.ones_like(ids), **options)
            ids = say(ids, torch.ones_like(ids), **options)
        assert torch.equal(ids, expected)
        ids = ids.clone()


def test_a_session_survives_a_call_that_breaks_off(tiny_model):
    decoder = ShapeDecoder(tiny_model("llama"))
    say, ids = decoder.session(), prompts([9])["input_ids"]
    options = {"max_new_tokens": 20, "eos_token_id": []}

    def interrupt(text, scores):
        if text.shape[1] > other.shape[1] + 4:
            raise KeyboardInterrupt
        return torch.zeros(1, dtype=torch.bool)

    first = say(ids, torch.ones_like(ids), **options)
    other = torch.cat([first[:, :12], ids], dim=1)
    with pytest.raises(KeyboardInterrupt):
        say(other, torch.ones_like(other), stopping_criteria=[interrupt], **options)
    mask = torch.ones_like(first)
    assert torch.equal(say(first, mask, **options), decoder.generate(first, mask, **options))


def test_modules_are_looked_at_once_a_call(tiny_model, monkeypatch):
    """In a session, whose calls share a cache, too: what is put into their place in between is seen."""
    decoder = ShapeDecoder(tiny_model("llama", torch.float32), NgramDrafter())
    fused = decoder.support.fused
    looks, look = [], fused._look
    monkeypatch.setattr(fused, "_look", lambda cache: looks.append(1) or look(cache))
    say, options = decoder.session(), {"max_new_tokens": 20, "eos_token_id": []}
    text = prompts([9])["input_ids"]
    for turn in range(3):
        text = say(text, torch.ones_like(text), **options)
        assert len(looks) == turn + 1
    seen = []
    decoder.target.model.model.layers[1].register_forward_hook(lambda *given: seen.append(1))
    say(text, torch.ones_like(text), **options)
    assert seen


@pytest.mark.parametrize("first", [0, 4])
def test_turns_of_a_session_may_read_other_layers(tiny_model, first):
    """Without drafts the last one's states are read alone."""
    decoder = ShapeDecoder(tiny_model("llama"), TrainedDrafter(predictor(**BASELINES["eagle of three layers"])))
    say, ids, options = decoder.session(), prompts([9])["input_ids"], {"max_new_tokens": 8, "eos_token_id": []}
    for length in (first, 4 - first, 4 - first):
        mask = torch.ones_like(ids)
        expected = decoder.generate(ids, mask, **options)
        ids = say(ids, mask, num_draft_tokens=length, **options)
        assert torch.equal(ids, expected)


@pytest.mark.parametrize("layers", [[-1], [1, -1]], ids=["last", "inner"])
def test_a_session_forgets_what_another_state_of_the_target_computed(tiny_model, layers):
    """Hooks that transformers sets to read inner layers are no other state."""
    model = tiny_model("llama", torch.float32)
    decoder = ShapeDecoder(model, TrainedDrafter(predictor(torch.float32, feature_layers=layers), TreeShape(2, 1)))
    options = {"max_new_tokens": 6, "return_dict_in_generate": True}
    more, say = torch.arange(5, 15)[None], decoder.session()

    def turn(ids):
        return say(ids, attention_mask=torch.ones_like(ids), **options)

    first = torch.cat([turn(more).sequences, more], dim=1)
    second = turn(first)
    assert second.stats.reused_tokens
    hook = model.model.layers[0].register_forward_hook(lambda module, given, out: -out)
    ids = torch.cat([second.sequences, more], dim=1)
    third = turn(ids)
    own = decoder.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(third.sequences, own.sequences) and not third.stats.reused_tokens
    assert turn(torch.cat([third.sequences, more], dim=1)).stats.reused_tokens
    hook.remove()


def test_a_session_goes_on_behind_a_reader_who_leaves(tiny_model):
    decoder = ShapeDecoder(tiny_model("llama"), TrainedDrafter(predictor(), TreeShape(depth=3, width=2)))
    say, ids, options = decoder.session(), prompts([9])["input_ids"], {"max_new_tokens": 20, "eos_token_id": []}
    whole = decoder.generate(ids, torch.ones_like(ids), **options)
    for count in (1, 3):
        seen = []

        def leaves(value: torch.Tensor, seen=seen, count=count) -> None:
            seen.append(value.flatten())
            if len(seen) > count:  # behind the prompt
                raise BrokenPipeError

        with pytest.raises(BrokenPipeError):
            say(ids, torch.ones_like(ids), streamer=SimpleNamespace(put=leaves, end=lambda: None), **options)
        text = torch.cat(seen)[None]
        out = say(text, torch.ones_like(text), **options, return_dict_in_generate=True)
        assert out.stats.reused_tokens == text.shape[1] - 1
        assert torch.equal(out.sequences[:, : whole.shape[1]], whole)


@pytest.mark.parametrize("options", [{"max_new_tokens": 1}, {"max_new_tokens": 9, "eos_token_id": list(range(64))}])
def test_nothing_drafts_for_an_answer_of_one_token(tiny_model, options):
    started = []

    class Watched(NgramDrafter):
        def start(self, committed, hidden) -> None:
            started.append(committed)

    assert ShapeDecoder(tiny_model("llama"), Watched()).generate(**prompts([4]), **options).shape == (1, 5)
    assert not started


def test_a_streamer_that_raises_leaves_the_model_as_it_was(tiny_model):
    """At once, while the exception is held too."""
    model = tiny_model("llama").train()

    def fails(value: torch.Tensor) -> None:
        if value.numel() == 1:
            raise OSError("nobody listens")

    with pytest.raises(OSError, match="nobody listens") as held:
        ShapeDecoder(model).generate(
            **prompts([4]), max_new_tokens=8, eos_token_id=[], streamer=SimpleNamespace(put=fails, end=lambda: None)
        )
    assert held.value is not None and all(module.training for module in model.modules())


def test_a_session_is_for_one_text(tiny_model):
    with pytest.raises(UnsupportedGeneration, match="a session continues one text, and 2 sequences were asked for"):
        ShapeDecoder(tiny_model("llama")).session()(**prompts([4, 5]), max_new_tokens=3)


def test_samples_of_one_prompt_share_its_prefill(tiny_model):
    decoder = ShapeDecoder(tiny_model("llama"), NgramDrafter())
    options = {"max_new_tokens": 12, "do_sample": True, "seed": 1, "return_dict_in_generate": True}
    out = decoder.generate(**prompts([7, 4]), num_return_sequences=3, **options)
    assert out.stats.prompt_tokens == 11
    again = decoder.generate(**prompts([7, 4]), num_return_sequences=3, **options | {"max_new_tokens": 3})
    assert torch.equal(out.sequences[:, :10], again.sequences)


def test_the_time_of_who_takes_the_tokens_is_not_counted(tiny_model):
    """Not even in the times of steps, which say whether drafting pays."""

    def slowly(value: torch.Tensor) -> None:
        sleep(0.1)

    streamer = SimpleNamespace(put=slowly, end=lambda: None)
    began = perf_counter()
    out = ShapeDecoder(tiny_model("llama")).generate(
        **prompts([4]), max_new_tokens=8, eos_token_id=[], streamer=streamer, return_dict_in_generate=True
    )
    assert out.stats.prefill_seconds > 0 and out.stats.decode_seconds > 0
    assert out.stats.prefill_seconds + out.stats.decode_seconds < perf_counter() - began - 0.85
    assert len(out.stats.steps) >= 5 and median(step.seconds for step in out.stats.steps) < 0.1


@pytest.mark.parametrize("stopped", [[], [0], [4], [1, 2], [0, 3, 4], [0, 1, 2, 3], [0, 1, 2, 3, 4]])
def test_of_the_unfinished_only_the_last_change_their_place(stopped):
    sequences = [SequenceState(index, [1], 3, (), finished=index in stopped) for index in range(5)]
    found = [one.index for one in unfinished(sequences)]
    assert sorted(found) == [index for index in range(5) if index not in stopped]
    assert all(place == index or place in stopped for place, index in enumerate(found))


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("kind", ["plain", "shape", "ngram"])
def test_sequences_that_stop_early_change_nothing_for_the_others(tiny_model, kind, sample):
    """Each has the tokens that it has alone, whoever stops before it."""
    decoder, batch = ShapeDecoder(tiny_model("llama"), drafter(kind)), prompts([7, 4, 9, 5, 6])
    options = {"max_new_tokens": 24, "eos_token_id": [2, 9, 11, 30, 41], "pad_token_id": 0, "do_sample": sample}
    out = decoder.generate(**batch, seed=[4, 8, 15, 16, 23], return_dict_in_generate=True, **options)
    assert len({len(step.sequences) for step in out.stats.steps}) > 2
    width = batch["input_ids"].shape[1]
    for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)):
        alone = decoder.generate(ids[mask][None], seed=[[4, 8, 15, 16, 23][row]], **options)[0, mask.sum() :]
        assert torch.equal(out.sequences[row, width : width + len(alone)], alone)
        assert (out.sequences[row, width + len(alone) :] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("kind", ["plain", "shape", "ngram"])
def test_a_step_on_a_gpu_waits_for_nothing_but_its_answer(tiny_model, kind, sample, monkeypatch):
    """That is an event; whatever else would wait raises. Behind a stop, where the batch shrinks, a step may."""
    step, steps = EagerSteps.step, 0

    def strictly(self: EagerSteps, live: list[SequenceState]) -> Outcome:
        nonlocal steps
        if len(live) < len(self._live):
            return step(self, live)
        steps += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return step(self, live)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    made = drafter(kind)
    for network in () if made is None else made.networks:
        network.cuda()
    decoder = ShapeDecoder(tiny_model("llama").cuda(), made, fall_back=False, graphs=False)
    batch = {name: tensor.cuda() for name, tensor in prompts().items()}
    options = {"max_new_tokens": 12, "eos_token_id": [], "do_sample": sample, "top_k": 0, "seed": 3}
    expected = decoder.generate(**batch, **options)
    monkeypatch.setattr(EagerSteps, "step", strictly)
    assert torch.equal(decoder.generate(**batch, **options), expected) and steps


class Listening(Wrapped):
    """Compares what it was told of its sequences with their texts, and with the target's states, whenever it drafts."""

    def __init__(self, inner, target, drafts):
        super().__init__(inner)
        self.target, self.drafts = target, drafts

    def start(self, committed, hidden):
        super().start(committed, hidden)
        self.texts = [list(text) for text in committed.texts]
        self.states = [own[: len(text) - 1] for own, text in zip(hidden, self.texts, strict=True)]

    def update(self, tokens, hidden, counts):
        super().update(tokens, hidden, counts)
        for row, (own, count) in enumerate(zip(tokens, counts.tolist(), strict=True)):
            assert own[0] == self.texts[row][-1] and len(own) == count + 1
            self.texts[row] += own[1:]
            self.states[row] = torch.cat([self.states[row], hidden[row, :count]])

    def select(self, rows):
        super().select(rows)
        self.texts, self.states = ([kept[row] for row in rows.tolist()] for kept in (self.texts, self.states))

    def draft(self, committed, sampler):
        assert self.texts == committed.texts
        for text, states in zip(self.texts, self.states, strict=True):
            expected = self.target.hidden(torch.tensor([text[:-1]]))[0]
            torch.testing.assert_close(states, expected, rtol=1e-9, atol=1e-9)
        self.drafts.append(len(self.texts))
        return super().draft(committed, sampler)


@pytest.mark.parametrize("attention", [False, True])
def test_a_drafter_that_pauses_knows_all_when_it_is_asked_again(tiny_model, attention):
    """Though it is told of many autoregressive steps at once, between which a sequence ended."""
    target, options = ShapeDecoder(tiny_model("llama")).target, {**prompts([9, 4, 6]), "max_new_tokens": 80}
    whole = ShapeDecoder(target).generate(**options, eos_token_id=[])[:, 9:]
    end = next(int(one) for one in whole[1, 12:] if one not in whole[2])  # behind the first pause began
    drafts = []
    listening = Listening(TrainedDrafter(predictor(attention=attention), TreeShape(depth=3, width=2)), target, drafts)
    decoder = ShapeDecoder(target, listening, fall_back=100.0)
    out = decoder.generate(**options, eos_token_id=[end], pad_token_id=0, return_dict_in_generate=True)
    assert out.stats.autoregressive_steps > 16 and out.stats.pauses >= 2
    assert drafts[0] == 3 and drafts[-1] < 3 and len(drafts) > 3
    expected = ShapeDecoder(target).generate(**options, eos_token_id=[end], pad_token_id=0)
    assert torch.equal(out.sequences, expected)
