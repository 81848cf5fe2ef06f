"""Turns as the target read and wrote them, with templates that rewrite what was said before."""

import hashlib
import json
import os
import subprocess
import sys
import warnings
from array import array
from pathlib import Path

import pytest
import torch
from helpers import ROOT, with_chat_template, write_rows
from transformers import AutoTokenizer

from shape import bundled
from shape.cli.generate import main as generate_main
from shape.data import encoding
from shape.data.backends import Request
from shape.data.conversations import Conversation, Tokens
from shape.data.encoding import encode, split_by_template
from shape.data.options import AnswerOptions
from shape.data.reading import load_conversations, load_prompts
from shape.data.regeneration import regenerate
from shape.data.turns import turn_of
from shape.errors import DataError
from shape.evaluation.methods import prompts_hash
from shape.features.extraction import split_conversations
from shape.features.storage import Storage
from shape.generation.answers import LocalBackend
from shape.generation.decoder import ShapeDecoder
from shape.target.chat import Message, answer_message, prompt_ids, spoken, thinks
from shape.training.options import TrainOptions
from shape.training.preparation import prepare, validation_prompts

FAMILIES = ["qwen3", "llama31", "deepseek-r1", "gpt-oss", "mistral"]
DATE = {"date_string": "1 May 2026"}
GREEDY = AnswerOptions(sampled_share=0.0)
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


@pytest.fixture(scope="module")
def shipped():
    return AutoTokenizer.from_pretrained(bundled.resolve("quickstart-target"))


def user(text: str) -> Message:
    return Message("user", text)


def bot(text: str, thought: str = "", finished: bool = True) -> Message:
    return Message("assistant", text, finished, {"reasoning_content": thought} if thought else {})


def shown(tokenizer, conversation: Conversation) -> list[str]:
    """Every text to learn from, what is supervised in brackets."""
    texts = []
    for part in split_by_template(conversation, tokenizer):
        encoded = encode(part, tokenizer, None)
        text, before = "", False
        for token, mark in zip(encoded.input_ids.tolist(), encoded.loss_mask.tolist(), strict=True):
            text += "[" * (mark and not before) + "]" * (before and not mark) + tokenizer.decode([token])
            before = mark
        texts.append(text + "]" * before)
    return texts


THOUGHTFUL = (user("Q1"), bot("A1", "T1"), user("Q2"), bot("A2", "T2"))
RAW = (user("Q1"), bot("<think>\nT1\n</think>\n\nA1"), user("Q2"), bot("<think>\nT2\n</think>\n\nA2"))
CUT = (user("Q1"), bot("<think>\nhalf a", finished=False))
CUT_APART = (user("Q1"), bot("", "half a", finished=False))
TOOLS = (
    user("Q1"),
    Message("assistant", "", more={"reasoning_content": "T0", "tool_calls": [CALL]}),
    Message("tool", "R", more={"name": "f"}),
    bot("A1", "T1"),
)
TOLD = (Message("system", "S"), *THOUGHTFUL)
QWEN = "<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\n"
QWEN_TEXTS = [
    f"{QWEN}[<think>\nT1\n</think>\n\nA1<|im_end|>]\n",
    f"{QWEN}A1<|im_end|>\n<|im_start|>user\nQ2<|im_end|>\n<|im_start|>assistant\n"
    "[<think>\nT2\n</think>\n\nA2<|im_end|>]\n",
]
R1_TEXTS = [
    "<|begin|><|User|>Q1<|Assistant|><think>\n[T1\n</think>\n\nA1<|end|>]",
    "<|begin|><|User|>Q1<|Assistant|>A1<|end|><|User|>Q2<|Assistant|><think>\n[T2\n</think>\n\nA2<|end|>]",
]
LLAMA = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 1 May 2026\n\n<|eot_id|>"
LLAMA_ASKED = f"{LLAMA}<|start_header_id|>user<|end_header_id|>\n\nQ1<|eot_id|>"
LLAMA_BOT = "<|start_header_id|>assistant<|end_header_id|>\n\n"
OSS = "<|start|>system<|message|>Reasoning: medium<|end|><|start|>user<|message|>Q1<|end|><|start|>assistant"
OSS_THINKS, OSS_SAYS = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"
CASES = {
    "qwen3, reasoning apart": ("qwen3", THOUGHTFUL, QWEN_TEXTS),
    "qwen3, reasoning in the content": ("qwen3", RAW, QWEN_TEXTS),
    "qwen3, cut": ("qwen3", CUT, [f"{QWEN}[<think>\nhalf a]"]),
    "qwen3, cut, reasoning apart": ("qwen3", CUT_APART, [f"{QWEN}[<think>\nhalf a]"]),
    "qwen3, tools": (
        "qwen3",
        TOOLS,
        [
            f'{QWEN}[<think>\nT0\n</think>\n\n<tool_call>\n{{"name": "f", "arguments": {{"x": 1}}}}\n</tool_call>'
            "<|im_end|>]\n<|im_start|>user\n<tool_response>\nR\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
            "[<think>\nT1\n</think>\n\nA1<|im_end|>]\n"
        ],
    ),
    "llama, two turns are one text": (
        "llama31",
        (user("Q1"), bot("A1"), user("Q2"), bot("A2")),
        [
            f"{LLAMA_ASKED}{LLAMA_BOT}[A1<|eot_id|>]<|start_header_id|>user<|end_header_id|>\n\nQ2<|eot_id|>"
            f"{LLAMA_BOT}[A2<|eot_id|>]"
        ],
    ),
    "llama, tools": (
        "llama31",
        TOOLS,
        [
            f'{LLAMA_ASKED}{LLAMA_BOT}[{{"name": "f", "parameters": {{"x": 1}}}}<|eot_id|>]'
            f'<|start_header_id|>ipython<|end_header_id|>\n\n"R"<|eot_id|>{LLAMA_BOT}[A1<|eot_id|>]'
        ],
    ),
    "llama has no place for reasoning": ("llama31", CUT_APART, [f"{LLAMA_ASKED}{LLAMA_BOT}"]),
    "r1, reasoning apart": ("deepseek-r1", THOUGHTFUL, R1_TEXTS),
    "r1, reasoning in the content": ("deepseek-r1", RAW, [R1_TEXTS[0], R1_TEXTS[1].replace("A1", "\n\nA1")]),
    "r1, cut": ("deepseek-r1", CUT, ["<|begin|><|User|>Q1<|Assistant|><think>\n[half a]"]),
    "r1, cut behind an opened thought": (
        "deepseek-r1",
        (user("Q1"), bot("half a", finished=False)),
        ["<|begin|><|User|>Q1<|Assistant|><think>\n[half a]"],
    ),
    "gpt-oss, analysis": (
        "gpt-oss",
        THOUGHTFUL,
        [
            f"{OSS}[{OSS_THINKS}T1<|end|>{OSS_SAYS}A1<|return|>]",
            f"{OSS}<|channel|>final<|message|>A1<|end|><|start|>user<|message|>Q2<|end|><|start|>assistant"
            f"[{OSS_THINKS}T2<|end|>{OSS_SAYS}A2<|return|>]",
        ],
    ),
    "gpt-oss, cut": ("gpt-oss", CUT_APART, [f"{OSS}[{OSS_THINKS}half a]"]),
    "gpt-oss, tools": (
        "gpt-oss",
        TOOLS,
        [
            f"{OSS}[{OSS_THINKS}T0<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>"
            '{"x": 1}<|call|>]'
            "<|start|>functions.f to=assistant<|channel|>commentary<|message|>R<|end|><|start|>assistant"
            f"[{OSS_THINKS}T1<|end|>{OSS_SAYS}A1<|return|>]"
        ],
    ),
    "mistral, where the system message moves on": (
        "mistral",
        TOLD,
        ["<s>[INST] S\n\nQ1[/INST][ A1</s>]", "<s>[INST] Q1[/INST] A1</s>[INST] S\n\nQ2[/INST][ A2</s>]"],
    ),
    "mistral, cut": (
        "mistral",
        (Message("system", "S"), user("Q1"), bot("half a", finished=False)),
        ["<s>[INST] S\n\nQ1[/INST][ half a]"],
    ),
    "mistral, the same again": (
        "mistral",
        (TOLD[0], user("Q"), bot("A"), user("Q"), bot("A")),
        ["<s>[INST] S\n\nQ[/INST][ A</s>]", "<s>[INST] Q[/INST] A</s>[INST] S\n\nQ[/INST][ A</s>]"],
    ),
}


@pytest.mark.parametrize(("family", "messages", "texts"), CASES.values(), ids=CASES)
def test_every_turn_is_learned_as_the_target_writes_it(shipped, family, messages, texts):
    given = DATE if family == "llama31" else {}
    assert shown(with_chat_template(shipped, family), Conversation("c", messages, template=given)) == texts


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("messages", [THOUGHTFUL, RAW, CUT, TOLD], ids=["apart", "raw", "cut", "told"])
def test_training_sees_the_prompts_that_decoding_sees(shipped, family, messages):
    tokenizer = with_chat_template(shipped, family)
    found = []
    for part in split_by_template(Conversation("c", messages), tokenizer):
        encoded = encode(part, tokenizer, None)
        starts = (encoded.loss_mask & ~encoded.loss_mask.roll(1)).nonzero()[:, 0].tolist()
        found += [encoded.input_ids[:start].tolist() for start in starts]
    turns = [number for number, message in enumerate(messages) if message.role == "assistant"]
    prompts = [prompt_ids(messages[:number], tokenizer) for number in turns]
    assert found[0] == prompts[0]  # to the token, also where the prompt ends in a run of blanks
    assert [tokenizer.decode(ids) for ids in found] == [tokenizer.decode(ids) for ids in prompts]


@pytest.mark.parametrize("family", ["qwen3", "llama31"])
def test_of_a_very_long_dialogue_turns_out_of_reach_are_not_rendered(shipped, family, monkeypatch):
    """Nothing that is learned is lost."""
    tokenizer, counted, length = with_chat_template(shipped, family), [], 64
    turns = [message for n in range(60) for message in (user(f"tell me of {n} " * 4), bot(f"of {n} I know this"))]
    dialogue = Conversation("long", tuple(turns), template=DATE if family == "llama31" else {})
    learned = [encode(part, tokenizer, length) for part in split_by_template(dialogue, tokenizer)]
    monkeypatch.setattr(encoding, "turn_of", lambda *given: counted.append(given[1]) or turn_of(*given))
    parts = split_by_template(dialogue, tokenizer, length)
    assert len(counted) < 20 and all(len(part.messages) <= 2 * len(counted) for part in parts)
    pairs = zip(learned, (encode(part, tokenizer, length) for part in parts), strict=False)
    assert all(a.input_ids.equal(b.input_ids) and a.loss_mask.equal(b.loss_mask) for a, b in pairs)
    assert not any(each.loss_mask.any() for each in learned[len(parts) :])


def test_options_of_the_template_reach_prompt_and_text(shipped, tmp_path):
    tokenizer = with_chat_template(shipped, "qwen3")
    row = {"messages": [{"role": "user", "content": "Q1"}, {"role": "assistant", "content": "A1"}], "tools": [CALL]}
    write_rows(tmp_path / "d.jsonl", row)
    off = {"enable_thinking": False}
    (plain,), (closed,) = (load_conversations(tmp_path / "d.jsonl", chat_template_kwargs=c) for c in (None, off))
    tools = f"<|im_start|>system\nTools:\n{json.dumps(CALL)}<|im_end|>\n{QWEN}"
    assert shown(tokenizer, plain) == [f"{tools}[<think>\n\n</think>\n\nA1<|im_end|>]\n"]
    assert shown(tokenizer, closed) == [f"{tools}<think>\n\n</think>\n\n[A1<|im_end|>]\n"]
    (prompt,) = load_prompts(tmp_path / "d.jsonl", off)
    assert (
        tokenizer.decode(prompt_ids(prompt.messages, tokenizer, prompt.template)) == f"{tools}<think>\n\n</think>\n\n"
    )
    own = {**row, "chat_template_kwargs": {"enable_thinking": True}}
    write_rows(tmp_path / "own.jsonl", own)
    assert shown(tokenizer, *load_conversations(tmp_path / "own.jsonl", chat_template_kwargs=off)) == shown(
        tokenizer, plain
    )


def test_measurements_know_prompts_with_other_options_apart():
    source = bundled.path("data", "kinds.jsonl")
    assert prompts_hash(load_prompts(source)) == "a18758138eaf8306"  # as in results of before
    assert prompts_hash(load_prompts(source, {"enable_thinking": False})) != "a18758138eaf8306"


@pytest.mark.parametrize(
    ("family", "text", "content", "thought"),
    [
        ("qwen3", "<think>\nT\n</think>\n\nA", "A", "T"),
        ("qwen3", "<think>\nhalf a", "<think>\nhalf a", ""),
        ("gpt-oss", f"{OSS_THINKS}T<|end|>{OSS_SAYS}A", "A", "T"),
        ("gpt-oss", "<|channel|>final<|message|>A", "A", ""),  # without a thought
        ("deepseek-r1", "T\n</think>\n\nA", "T\n</think>\n\nA", ""),  # its template takes it out itself
        ("llama31", "A", "A", ""),
    ],
)
def test_an_answer_becomes_the_message_that_its_template_knows(shipped, family, text, content, thought):
    tokenizer = with_chat_template(shipped, family)
    for given in ({}, {"tools": [lambda place: place]}):  # which say nothing of how an answer is written
        message = answer_message(tokenizer(text, add_special_tokens=False).input_ids, tokenizer, given)
        assert (message.content, message.reasoning) == (content, thought)


@pytest.mark.parametrize(
    ("family", "text", "says"),
    [
        ("qwen3", "<think>\nT\n</think>\n\nA", "A"),
        ("qwen3", "<think>\nhalf a", ""),
        ("gpt-oss", f"{OSS_THINKS}T<|end|>{OSS_SAYS}A", "A"),
        ("gpt-oss", f"{OSS_THINKS}half a", ""),
        ("deepseek-r1", "T\n</think>\n\nA", "A"),  # the prompt opens it
        ("deepseek-r1", "half a", ""),
        ("llama31", "A", "A"),
        ("llama31", "Split at </think>, and so on", "Split at </think>, and so on"),
        ("qwen3", "<think>\nT\n</think>\n\nSplit at </think>", "Split at </think>"),
        ("qwen3", "<think>\n\n</think>\n\nSplit at </think>", "Split at </think>"),
    ],
)
def test_what_an_answer_says_is_told_from_its_reasoning(shipped, family, text, says):
    tokenizer = with_chat_template(shipped, family)
    prompt = prompt_ids([user("Q1")], tokenizer)
    with warnings.catch_warnings(record=True) as told:
        assert spoken(tokenizer(text, add_special_tokens=False).input_ids, prompt, tokenizer, None) == says
    assert [str(one.message)[:38] for one in told] == ["the answer ends within its reasoning, "] * (says == "")
    assert thinks(prompt, tokenizer) == (family != "llama31")
    if family == "qwen3":
        assert not thinks(prompt_ids([user("Q1")], tokenizer, {"enable_thinking": False}), tokenizer)


def test_the_data_that_ship_have_the_ids_and_masks_that_they_always_had(shipped):
    """Of before token ids were kept; measured then."""
    digest = hashlib.sha256()
    for conversation in load_conversations(bundled.path("data", "answers.jsonl.gz"))[::8]:
        (part,) = split_by_template(conversation, shipped)
        encoded = encode(part, shipped, 1024)
        digest.update(encoded.input_ids.numpy().tobytes() + encoded.loss_mask.numpy().tobytes())
    assert digest.hexdigest()[:16] == "2e4b411ca52fa789"


# The target's own answers ----------------------------------------------------------------------------


def asked(identity: str, *questions: str) -> Conversation:
    turns = [m for question in questions for m in (user(question), bot("somebody else's"))]
    return Conversation(identity, tuple(turns))


def own_ids(target, messages: list[dict], new: int = 60) -> tuple[list[int], list[int]]:
    ids = target.encode(messages)
    out = target.model.generate(ids, max_new_tokens=new, do_sample=False)
    return ids[0].tolist(), out[0, ids.shape[1] :].tolist()


def test_a_dialogue_is_learned_from_in_the_ids_that_were_read_and_written(thinking_target, tmp_path):
    backend = LocalBackend(ShapeDecoder(thinking_target), 60)
    regenerate([asked("a", "one", "two")], backend, tmp_path / "a.jsonl", GREEDY, progress=False)
    (found,) = load_conversations(tmp_path / "a.jsonl")
    first, second = [{"role": "user", "content": "one"}], [{"role": "user", "content": "two"}]
    prompt, answer = own_ids(thinking_target, first)
    again, reply = own_ids(thinking_target, [*first, thinking_target.message(answer), *second])
    assert thinking_target.tokenizer.decode(answer) == "<think>\nhm, well\n</think>\n\nyes!<|im_end|>"
    assert "hm, well" not in thinking_target.tokenizer.decode(again)  # so the second turn is a text of its own
    parts = [encode(part, None, None) for part in split_conversations(thinking_target, [found])[0]]
    assert [part.input_ids.tolist() for part in parts] == [prompt + answer, again + reply]
    assert [part.input_ids[part.loss_mask].tolist() for part in parts] == [answer, reply]
    assert [m.content for m in found.messages] == ["one", "yes!", "two", "yes!"]
    assert [m.reasoning for m in found.messages[1::2]] == ["hm, well"] * 2


def test_a_cut_answer_is_learned_from_as_it_is(thinking_target, tmp_path):
    backend = LocalBackend(ShapeDecoder(thinking_target), 6)
    regenerate([asked("a", "one", "two")], backend, tmp_path / "a.jsonl", GREEDY, progress=False)
    (found,) = load_conversations(tmp_path / "a.jsonl")
    prompt, answer = own_ids(thinking_target, [{"role": "user", "content": "one"}], 6)
    assert found.texts == (Tokens(array("i", prompt + answer), bytes(len(prompt)) + bytes([1] * 6)),)
    words = Conversation("a", found.messages)  # what a file of text holds
    assert shown(thinking_target.tokenizer, words) == [f"{QWEN.replace('Q1', 'one')}[<think>\nhm, ]"]


def test_ids_that_are_no_text_are_kept(tiny_target, tmp_path):
    """A random target writes halves of characters and unmatched special tokens, which text loses."""
    backend = LocalBackend(ShapeDecoder(tiny_target), 40)
    regenerate([asked("a", "one")], backend, tmp_path / "a.jsonl", GREEDY, progress=False)
    (found,) = load_conversations(tmp_path / "a.jsonl")
    prompt, answer = own_ids(tiny_target, [{"role": "user", "content": "one"}], 40)
    assert list(found.texts[0].input_ids) == prompt + answer
    words = encode(Conversation("a", found.messages), tiny_target.tokenizer, None)
    assert words.input_ids.tolist()[: len(prompt + answer)] != prompt + answer


def test_turns_of_one_text_where_the_template_keeps_what_was_said(thinking_target, tmp_path):
    backend = LocalBackend(ShapeDecoder(thinking_target), 20)
    plain = Conversation("a", asked("a", "one", "two").messages, template={"enable_thinking": False})
    messages = tuple(message for message in plain.messages if message.role == "user")
    (first,) = backend.generate([Request(messages[:1], False, 0, plain.template)])
    assert first.text == "yes!" and first.more == {}  # the prompt has closed the thought
    regenerate([plain], backend, tmp_path / "a.jsonl", GREEDY, progress=False)
    (found,) = load_conversations(tmp_path / "a.jsonl")
    assert found.template == {"enable_thinking": False} and len(found.texts) == 2  # the empty thought is dropped


def test_raw_completions_are_not_taken_apart(thinking_target):
    prompt = thinking_target.tokenizer.decode(thinking_target.encode([{"role": "user", "content": "one"}])[0])
    (answer,) = LocalBackend(ShapeDecoder(thinking_target), 60).generate([Request(prompt, False, 0)])
    assert (answer.text, answer.more) == ("<think>\nhm, well\n</think>\n\nyes!", {})


def test_recorded_calls_stay_and_the_target_is_asked_there_too(thinking_target, tmp_path):
    conversation = Conversation("a", (*TOOLS, user("Q2"), bot("A2")))
    backend = LocalBackend(ShapeDecoder(thinking_target), 60)
    done = regenerate([conversation], backend, tmp_path / "a.jsonl", GREEDY, progress=False)
    assert (done.answers, done.questions) == (2, 2)
    (found,) = load_conversations(tmp_path / "a.jsonl")
    assert [m.role for m in found.messages] == [m.role for m in conversation.messages]
    assert found.messages[1].more == TOOLS[1].more and not found.messages[1].learned
    texts = [thinking_target.tokenizer.decode(list(text.input_ids)) for text in found.texts]
    assert len(texts) == 3 and all(text.endswith("yes!<|im_end|>") for text in texts)
    assert ["<tool_response>\nR" in text for text in texts] == [False, True, True]


# The commands ----------------------------------------------------------------------------------------


@pytest.fixture
def dialogues(tmp_path) -> Path:
    return write_rows(
        tmp_path / "dialogues.jsonl", *(asked(f"d{i}", f"one {i}", f"two {i}").to_row() for i in range(12))
    )


def test_the_data_path_of_training_by_target_and_data_alone(thinking_target_folder, dialogues, tmp_path):
    options = TrainOptions(target=str(thinking_target_folder), data=str(dialogues), output=str(tmp_path / "out"))
    options.regeneration.sampled_share = 0.0
    options.trainer.accelerator, options.trainer.enable_progress_bar = "cpu", False
    material = prepare([options], Storage(tmp_path / "out"))
    tokenizer = material.target.tokenizer
    # Two dialogues are held out, to validate on and to measure on, each of two turns.
    assert len(material.conversations) == 24 and material.excluded == {0, 1, 18, 19}
    for row in material.conversations:
        encoded = encode(row, tokenizer, None)
        text, learned = tokenizer.decode(encoded.input_ids), tokenizer.decode(encoded.input_ids[encoded.loss_mask])
        assert learned == "<think>\nhm, well\n</think>\n\nyes!<|im_end|>"
        assert text.count("<think>") == 1 and text.endswith(f"<|im_start|>assistant\n{learned}")
    asked_for = validation_prompts(material.for_validation, material.target, material.runs[0])
    asked_for = [tokenizer.decode(ids) for ids in asked_for]
    assert len(asked_for) == 2 and all(text.endswith("<|im_start|>assistant\n") for text in asked_for)
    assert [prompt.turns for prompt in material.prompts] == [("one 9",)]
    options.chat_template_kwargs = {"enable_thinking": False}
    closed = prepare([options], Storage(tmp_path / "out"))  # other answers, beside the first
    encoded = encode(closed.conversations[0], tokenizer, None)
    assert tokenizer.decode(encoded.input_ids[encoded.loss_mask]) == "yes!<|im_end|>"
    assert closed.prompts[0].template == {"enable_thinking": False}


def test_rows_of_token_ids_are_learned_from_as_they_are(thinking_target, thinking_target_folder, tmp_path):
    rows = [{"id": f"r{i}", "input_ids": [5, 6, 7, i], "loss_mask": [0, 0, 1, 1]} for i in range(12)]
    data = write_rows(tmp_path / "ids.jsonl", *rows)
    options = TrainOptions(target=str(thinking_target_folder), data=str(data), output=str(tmp_path / "out"))
    options.trainer.accelerator = "cpu"
    material = prepare([options], Storage(tmp_path / "out"))
    assert [encode(row, None, None).input_ids.tolist() for row in material.conversations] == [
        r["input_ids"] for r in rows
    ]
    assert encode(material.conversations[3], None, None).loss_mask.tolist() == [False, False, True, True]
    beyond = Conversation("far", (), "tokens", texts=(Tokens(array("i", [1, 9999]), bytes([0, 1])),))
    with pytest.raises(DataError, match="conversation far holds token 9999, and target thinking has 261 tokens"):
        split_conversations(thinking_target, [beyond])


def test_the_command_that_answers_thinks_or_not(thinking_target_folder, capsys):
    command = [f"--target={thinking_target_folder}", "--drafter=ngram", "--prompt=Well?", "--max_new_tokens=40"]
    generate_main(command)
    assert "hm, well" in capsys.readouterr().out
    generate_main([*command, "--chat_template_kwargs.enable_thinking=false"])
    out = capsys.readouterr().out
    assert "yes!" in out and "hm, well" not in out


def test_a_stream_is_given_what_its_template_asks_for(thinking_target):
    decoder = ShapeDecoder(thinking_target)
    messages = [{"role": "user", "content": "Well?"}]
    options = {"max_new_tokens": 40, "do_sample": False}
    assert "hm, well" in "".join(decoder.stream(messages, **options))
    closed = decoder.stream(messages, chat_template_kwargs={"enable_thinking": False}, **options)
    assert "".join(closed) == "yes!"


@pytest.mark.slow
def test_train_on_and_decode_with_a_thinking_target_by_target_and_data_alone(
    thinking_target_folder, dialogues, tmp_path
):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "shape.train", f"--target={thinking_target_folder}", f"--data={dialogues}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    predictor = tmp_path / "checkpoints/shape"
    record = json.loads((predictor / "config.json").read_text())["training"]
    assert record["acceptance_length"]["value"] > 2, record
    command = [sys.executable, "-m", "shape.generate", f"--predictor={predictor}", "--prompt=one 3"]
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert said.returncode == 0, said.stderr
    assert "hm, well" in said.stdout and "yes!" in said.stdout
    decoder = ShapeDecoder.from_pretrained(predictor)
    ids = decoder.target.encode([{"role": "user", "content": "one 3"}])
    plain = ShapeDecoder(decoder.target).generate(ids, max_new_tokens=40, do_sample=False)
    assert torch.equal(decoder.generate(ids, max_new_tokens=40, do_sample=False), plain)
