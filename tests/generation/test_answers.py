"""Answers of a target on this machine: each as alone, and as transformers writes it."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from regenerated import conversation_of, many, messages_by_id

from shape.data.backends import Request
from shape.data.encoding import encode, split_by_template
from shape.data.options import AnswerOptions
from shape.data.reading import load_conversations
from shape.data.regeneration import regenerate
from shape.generation.answers import LocalBackend
from shape.generation.decoder import ShapeDecoder
from shape.target.chat import Message, prompt_ids
from shape.target.model import Target

KEPT = ("bounded", "whole")


@pytest.fixture(scope="module")
def talkative(tiny_model, tiny_tokenizer) -> Target:
    """A random float64 target that ends a turn with many of its tokens, so that answers do end."""
    model = tiny_model("llama", torch.float64, seed=3, vocab_size=len(tiny_tokenizer))
    model.generation_config.eos_token_id = [2, *range(3, 40)]
    model.generation_config.top_k = 5  # and asks for what must not matter here
    model.generation_config.repetition_penalty = 1.5
    return Target(model, tiny_tokenizer, name="talkative")


def test_local_answers_are_those_of_each_prompt_alone(talkative):
    backend = LocalBackend(ShapeDecoder(talkative), max_new_tokens=6)
    requests = [Request((Message("user", "q" * (5 + 3 * i)),), i % 2 == 0, 100 + i) for i in range(10)]
    together = backend.generate(requests)
    assert together == [backend.generate([request])[0] for request in requests]
    assert {answer.finished for answer in together} == {True, False}
    other = [Request(r.prompt, True, r.seed + 1) for r in requests]
    assert backend.generate(other) != together


def test_a_batch_without_memory_is_answered_in_halves(talkative, monkeypatch):
    decoder = ShapeDecoder(talkative)
    backend, original, asked = LocalBackend(decoder, max_new_tokens=6), decoder.generate, []
    requests = [Request((Message("user", "q" * (5 + 3 * i)),), i % 2 == 0, 100 + i) for i in range(10)]
    together = backend.generate(requests)

    def generate(ids, **options):
        asked.append(len(ids))
        if len(ids) > most:
            raise torch.OutOfMemoryError("no memory")
        return original(ids, **options)

    monkeypatch.setattr(decoder, "generate", generate)
    most = 2
    with pytest.warns(UserWarning, match="no memory for 5 answers to prompts of up to .* in two halves"):
        assert backend.generate(requests) == together
    # Those of the second kind have shorter prompts; that five are too many is known by then.
    assert asked == [5, 2, 3, 1, 2, 2, 3, 1, 2]
    most = 0
    with pytest.warns(UserWarning, match="halves"), pytest.raises(torch.OutOfMemoryError):
        backend.generate(requests)


def test_greedy_answers_are_those_of_transformers(talkative):
    messages = (Message("user", "hello there"),)
    (answer,) = LocalBackend(ShapeDecoder(talkative), 12).generate([Request(messages, False, 0)])
    ids = torch.tensor([prompt_ids(messages, talkative.tokenizer)])
    out = talkative.model.generate(ids, max_new_tokens=12, do_sample=False, repetition_penalty=1.0, pad_token_id=0)
    new = [t for t in out[0, ids.shape[1] :].tolist() if t not in talkative.eos_token_ids]
    assert answer.text == talkative.tokenizer.decode(new, skip_special_tokens=True).rstrip("\ufffd")


def test_drafter_changes_no_answer_and_long_prompts_are_refused(talkative, tmp_path):
    conversations = [*many(6), conversation_of("long", "x" * 300)]
    for name, drafter in (("plain", None), ("ngram", "ngram")):
        backend = LocalBackend(ShapeDecoder(talkative, drafter), max_new_tokens=8)
        with pytest.warns(UserWarning, match=r"long: a prompt of 3\d\d tokens does not fit the 256 positions"):
            regenerate(conversations, backend, tmp_path / f"{name}.jsonl", AnswerOptions(batch_size=3), progress=False)
    assert (tmp_path / "plain.jsonl").read_bytes() == (tmp_path / "ngram.jsonl").read_bytes()
    assert "long" not in messages_by_id(tmp_path / "plain.jsonl")


def learned(path, target: Target, length: int) -> list[tuple[list[int], list[bool]]]:
    """Of each text whose answer begins within the length: ids and mask, up to the last token of an answer."""
    parts = chain.from_iterable(split_by_template(each, target.tokenizer) for each in load_conversations(path))
    texts = [encode(part, target.tokenizer, length) for part in parts]
    ends = [int(text.loss_mask.nonzero()[-1]) + 1 if text.loss_mask.any() else 0 for text in texts]
    found = zip(texts, ends, strict=True)
    return [(text.input_ids[:end].tolist(), text.loss_mask[:end].tolist()) for text, end in found if end]


def test_answers_are_cut_where_training_cuts_their_conversation(talkative, monkeypatch):
    """Whatever is beside them in the batch, which ends with the last of them."""
    requests = [Request((Message("user", "q" * (5 + 9 * i)),), False, 0) for i in range(5)]
    decoder = ShapeDecoder(talkative)
    whole = LocalBackend(decoder, max_new_tokens=30).generate(requests)
    prompts, answers = zip(*(answer.tokens for answer in whole), strict=True)
    most = len(prompts[-1]) + 2
    original, asked = decoder.generate, []

    def generate(ids, **options):
        asked.append(options["max_new_tokens"])
        return original(ids, **options)

    monkeypatch.setattr(decoder, "generate", generate)
    backend = LocalBackend(decoder, max_new_tokens=30, max_length=most)
    for some in (slice(0, 5), slice(2, 5), slice(4, 5)):
        found = [answer.tokens for answer in backend.generate(requests[some])]
        assert [ids for _, ids in found] == [
            ids[: most - len(prompt)] for prompt, ids in zip(prompts[some], answers[some], strict=True)
        ]
    assert asked == [min(30, most - len(prompts[first])) for first in (0, 2, 4)] and asked[-1] == 2


@pytest.mark.filterwarnings("error:.*end early or are left out")
def test_what_training_would_throw_away_is_not_answered(talkative, tmp_path):
    """A conversation ends, quietly, once its prompt is as long as what is kept of it."""
    growing = [conversation_of(f"grows-{i}", "a" * (i + 1), "b" * 90, "c") for i in range(8)]
    bounded = LocalBackend(ShapeDecoder(talkative), max_new_tokens=24, max_length=100)
    whole = replace(bounded, max_length=None)
    for name, backend in zip(KEPT, (bounded, whole), strict=True):
        regenerate(growing, backend, tmp_path / f"{name}.jsonl", AnswerOptions(sampled_share=0.0), progress=False)
    regenerate([growing[0], conversation_of("long", "x" * 300)], bounded, tmp_path / "long.jsonl", progress=False)
    fewer, all_of_them = ([len(each) for each in messages_by_id(tmp_path / f"{name}.jsonl").values()] for name in KEPT)
    assert max(fewer) == 2 and max(all_of_them) == 6
    same = [learned(tmp_path / f"{name}.jsonl", talkative, 100) for name in KEPT]
    assert same[0] == same[1] and len(same[0]) == 8
    assert "long" not in messages_by_id(tmp_path / "long.jsonl") and bounded.describe() != whole.describe()
