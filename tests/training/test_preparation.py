"""Before training, which conversations are learned from, validated on and measured on; after it, what is printed."""

import json
import re
import shlex
import shutil
from array import array
from collections import Counter
from dataclasses import replace

import pytest
from helpers import write_rows
from training_runs import arguments, write_conversations

from shape.cli.train import main
from shape.data.conversations import Conversation, Tokens
from shape.errors import DataError
from shape.features.storage import Storage
from shape.target.chat import Message
from shape.training.options import TrainOptions
from shape.training.preparation import Material, excluded_numbers, held_out_numbers, prepare


def test_chats_that_the_template_refuses_are_not_measured_on(tiny_target_folder, tiny_tokenizer, tmp_path):
    target, given = tmp_path / "target", tmp_path / "given.jsonl"
    data = write_conversations(tmp_path / "talks.jsonl", 5)
    shutil.copytree(tiny_target_folder, target)
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with user') }}{% endif %}"
    (target / "chat_template.jinja").write_text(strict + tiny_tokenizer.chat_template)
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    rows = [[*([{"role": "system", "content": "S"}] if number < 2 else []), *turns] for number in range(4)]
    write_rows(given, *({"id": str(id), "messages": row} for id, row in enumerate(rows)))
    options = TrainOptions(target=str(target), data=str(data), validation_data=str(given), regenerate=False)
    options.max_length, options.skip_bad_rows = 128, True
    assert [prompt.id for prompt in prepare([options], Storage(tmp_path)).prompts] == ["3"]
    with pytest.raises(DataError, match="begin with user"):
        prepare([replace(options, skip_bad_rows=False)], Storage(tmp_path))


def test_conversations_are_learned_from_or_left_out_as_a_whole(tiny_target_folder, tmp_path):
    """With each of their texts, which are several where the template rewrites earlier turns."""
    text, given = Tokens(array("i", [5, 6, 7, 8]), bytes([0, 1, 1, 1])), tmp_path / "given.jsonl"
    rows = [Conversation(str(number), (), "tokens", texts=(text,) * (1 + number % 3)) for number in range(20)]
    write_rows(given, *(row.to_row() for row in rows))
    options = TrainOptions(target=str(tiny_target_folder), data=str(given), regenerate=False, max_length=128)
    options.training.conversations = 5
    material = prepare([options], Storage(tmp_path))
    texts = Counter(row.id for row in material.conversations)
    learned = Counter(row.id for n, row in enumerate(material.conversations) if n not in material.excluded)
    assert len(texts) == 20 and len(learned) == 5 and all(texts[name] == count for name, count in learned.items())


@pytest.mark.parametrize("given", [False, True])
def test_copies_of_what_is_validated_on_are_not_learned(given, tiny_target_folder, tmp_path, capsys):
    """Under other ids, and with other answers: what counts is what is asked."""
    rows = [
        {"id": f"{n}-{copy}", "messages": [
            {"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": f"answer {n} {copy}"}
        ]}
        for copy in "ab" for n in range(20)
    ]  # fmt: skip
    data = write_rows(tmp_path / "data.jsonl", *rows)
    options = TrainOptions(target=str(tiny_target_folder), data=str(data), regenerate=False, max_length=128)
    if given:
        options.validation_data = str(write_rows(tmp_path / "validation.jsonl", *rows[:3]))
    material = prepare([options], Storage(tmp_path))
    learned = {row.id.split("-")[0] for n, row in enumerate(material.conversations) if n not in material.excluded}
    validated = {row.id.split("-")[0] for row in material.for_validation}
    measured = {prompt.id.split("-")[0] for prompt in material.prompts}
    assert validated and measured and not learned & (validated | measured) and len(learned) >= 16
    assert re.search(r"left out: \d conversations that ask the same as one that is validated", capsys.readouterr().out)


def test_where_most_are_copies_they_are_learned_from(tmp_path):
    rows = [Conversation(str(n), (Message("user", "go on"), Message("assistant", str(n)))) for n in range(10)]
    with pytest.warns(UserWarning, match="9 of 10 conversations ask the same as one that is validated"):
        assert excluded_numbers(TrainOptions(data="D"), rows, {3}) == {3}


def test_prompts_longer_than_what_is_learned_are_not_measured_on(tiny_target_folder, tmp_path):
    data, asked = write_conversations(tmp_path / "talks.jsonl", 20), {"role": "user", "content": "word " * 100}
    long = [{"id": f"long-{n}", "messages": [asked, {"role": "assistant", "content": "A"}]} for n in range(4)]
    given = write_rows(tmp_path / "given.jsonl", *(json.loads(row) for row in data.read_text().splitlines()[:4]), *long)
    options = TrainOptions(target=str(tiny_target_folder), data=str(data), validation_data=str(given))
    options.max_length, options.regenerate = 64, False
    assert 0 < len(prepare([options], Storage(tmp_path)).prompts) <= 2


def test_of_kinds_that_take_turns_every_one_is_held_out():
    rows = [Conversation(str(number), (Message("assistant", "A"),), "text") for number in range(400)]
    assert {number % 10 for number in held_out_numbers(TrainOptions(data="D"), rows)} == set(range(10))


@pytest.mark.parametrize(
    ("kinds", "regenerate", "said"),
    [
        ({"text"}, True, "as given"),
        ({"chat", "text"}, True, "the target's own; texts without a prompt as given"),
        ({"chat"}, True, "the target's own"),
        ({"chat"}, False, "as given"),
    ],
)
def test_the_record_says_whose_the_answers_are(kinds, regenerate, said):
    rows = [Conversation(kind, (Message("assistant", "A"),), kind) for kind in sorted(kinds)]
    material = Material([TrainOptions(regenerate=regenerate)], None, rows, set(), [], [], None, None)
    assert material.answers == said


def test_the_command_to_try_is_one_for_the_shell_whatever_the_prompt_says(tiny_target_folder, tmp_path, capsys):
    rows = ({"id": str(i), "turns": [f"it's [/INST] {i}"]} for i in range(4))
    asked, output = write_rows(tmp_path / "asked.jsonl", *rows), tmp_path / "my [b]"
    data = write_conversations(tmp_path / "talks.jsonl", 20)
    more = ["--measurement.limit=2", "--measurement.max_new_tokens=4", f"--measurement.prompts={asked}"]
    more += ["--chat_template_kwargs.enable_thinking=false", "--dtype=float32", "--attn_implementation=eager"]
    main(arguments(tiny_target_folder, data, output, "--training.steps=3", "--training.decay=none", *more))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "shape generate" in line)
    given = shlex.split(line)
    assert given[2:4] == ["--predictor", str(output)] and given[-2:] == ["--prompt", "it's [/INST] 0"]
    as_trained = ["--attn_implementation", "eager", "--dtype", "float32"]
    assert given[4:-2] == [*as_trained, "--chat_template_kwargs", '{"enable_thinking": false}']
