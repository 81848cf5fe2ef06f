"""The generator's promises: the same text every time, disjoint splits, rows that are what their kind says."""

import ast
import gzip
import json
import re
import sys
from collections import Counter
from importlib import import_module

import pytest
from helpers import ROOT

DATA = ROOT / "data"


sys.path.append(str(DATA))
generator = import_module("make_conversations")


@pytest.fixture(scope="module")
def splits():
    return generator.make_splits()


@pytest.fixture(scope="module")
def answers(splits):
    """(user turn, answer) pairs of both splits with answers, by kind."""
    pairs = {kind: [] for kind in generator.KINDS}
    for row in splits["train"] + splits["validation"]:
        texts = [turn["value"] for turn in row["conversations"]]
        pairs[row["category"]] += zip(texts[::2], texts[1::2], strict=True)
    return pairs


def test_shipped_files_are_what_the_generator_makes(splits):
    for name in ("train", "validation"):
        packed = (DATA / f"{name}.jsonl.gz").read_bytes()
        assert packed[4:8] == bytes(4), "the clock is in the header"
        # the text is compared, not the compressed bytes: zlib may pack differently from version to version
        assert gzip.decompress(packed) == generator.json_lines(splits[name])
    assert (DATA / "bench.jsonl").read_bytes() == generator.json_lines(splits["bench"])


def test_shipped_files_are_small():
    assert (
        sum((DATA / name).stat().st_size for name in ("train.jsonl.gz", "validation.jsonl.gz", "bench.jsonl")) < 1.5e6
    )


def test_writing_twice_gives_the_same_bytes(tmp_path):
    for run in ("one", "two"):
        generator.write_splits(tmp_path / run, seed=3, train_rows=60)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_a_longer_split_begins_with_the_shorter_one_and_moves_nothing(splits):
    longer = generator.make_splits(train_rows=generator.TRAIN_ROWS + 20)
    assert (
        longer["train"][: generator.TRAIN_ROWS] == splits["train"] and len(longer["train"]) == len(splits["train"]) + 20
    )
    assert {name: longer[name] for name in ("validation", "bench")} == {
        name: splits[name] for name in ("validation", "bench")
    }


def test_seeds_differ():
    assert generator.make_rows(12, 1, "x") != generator.make_rows(12, 2, "x")


def test_sizes_and_kinds(splits):
    assert {name: len(rows) for name, rows in splits.items()} == {
        "train": 4000,
        "validation": 200,
        "bench": 96,
    }
    assert Counter(row["category"] for row in splits["bench"]) == dict.fromkeys(generator.KINDS, 16)


def test_no_prompt_or_id_occurs_twice(splits):
    rows = [row for split in splits.values() for row in split]
    assert len({generator.first_prompt(row) for row in rows}) == len(rows)
    assert len({row["id"] for row in rows}) == len(rows)


def test_turns_alternate_and_are_not_empty(splits):
    for row in splits["train"] + splits["validation"]:
        assert set(row) == {"id", "category", "conversations"}
        turns = row["conversations"]
        assert len(turns) >= 2
        assert [turn["from"] for turn in turns] == ["human", "gpt"] * (len(turns) // 2)
        assert all(turn["value"].strip() == turn["value"] != "" for turn in turns)
        assert not any("{" in turn["value"] for turn in turns if row["category"] == "dialogue"), "an open slot"


def test_bench_rows_hold_user_turns_only(splits):
    for row in splits["bench"]:
        assert set(row) == {"id", "category", "turns"}
        assert all(row["turns"])
        assert (len(row["turns"]) > 1) == (row["category"] == "dialogue")


def test_json_answers_parse_and_are_found_in_the_text(answers):
    for prompt, answer in answers["json"]:
        facts = json.loads(answer)
        items = facts.pop("items", [])
        values = [*facts.values(), *(value for item in items for value in item.values())]
        assert all(str(value) in prompt for value in values if not isinstance(value, bool))
        assert ("on one line" in prompt) == ("\n" not in answer)


def test_code_answers_are_python(answers):
    for prompt, answer in answers["code"]:
        body = re.fullmatch(r"```python\n(.*)\n```", answer, flags=re.DOTALL)[1]
        ast.parse(body)
        names = re.findall(r"^(?:def|class) (\w+)", body, flags=re.MULTILINE)
        assert all(name in prompt for name in names)


def test_sums_are_right(answers):
    calculate = {"+": float.__add__, "-": float.__sub__, "x": float.__mul__, "/": float.__truediv__}
    number = r"(\d+(?:\.\d+)?)"
    for _, answer in answers["sums"]:
        equations = re.findall(rf"{number} ([-+x/]) {number} = {number}", answer)
        for left, sign, right, result in equations:
            assert calculate[sign](float(left), float(right)) == pytest.approx(float(result)), answer
        assert answer.splitlines()[-1] == f"Answer: {equations[-1][3]}"


def test_rewrites_keep_the_words(answers):
    for prompt, answer in answers["rewrite"]:
        if prompt.startswith("Repeat"):
            assert prompt.endswith(answer)
        if names := re.match(r"Replace the name (\w+) by (\w+) in this text:\n\n(.*)", prompt):
            assert names[3].replace(names[1], names[2]) == answer


def test_answers_have_a_useful_length(answers):
    for kind, pairs in answers.items():
        assert 60 < sum(len(answer) for _, answer in pairs) / len(pairs) < 400, kind
