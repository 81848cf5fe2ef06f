"""Every format and every kind of damage, of conversations and prompts."""

import gzip
import json
from array import array
from dataclasses import replace

import pytest
from helpers import write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from regenerated import turns

from shape.data.conversations import Checks, Conversation, Tokens, fingerprint
from shape.data.reading import load_conversations, load_prompts
from shape.errors import DataError
from shape.target.chat import Message

SYSTEM, USER, BOT = Message("system", "S"), Message("user", "Q"), Message("assistant", "A")
THINKS = Message("assistant", "A", more={"reasoning_content": "T"})
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
ROWS = [
    (
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        (USER, BOT),
        "chat",
    ),
    (
        {"conversations": [{"from": "User", "value": "Q"}, {"from": "chatgpt", "value": "A"}]},
        (USER, BOT),
        "chat",
    ),
    (
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        (USER, BOT),
        "chat",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}]}, (USER,), "chat"),
    ({"instruction": "Q", "input": "", "output": "A", "text": "all"}, (USER, BOT), "chat"),
    ({"instruction": "Q", "input": "x", "output": "A"}, (Message("user", "Q\n\nx"), BOT), "chat"),
    ({"prompt": "Q", "completion": "A"}, (USER, BOT), "completion"),
    (
        {"prompt": [{"role": "user", "content": "Q"}], "completion": [{"role": "assistant", "content": "A"}]},
        (USER, BOT),
        "chat",
    ),
    ({"text": "A"}, (BOT,), "text"),
    ({"turns": ["Q", "Q"]}, (USER, USER), "chat"),
    ({"system": "S", "prompt": "Q"}, (SYSTEM, USER), "chat"),
    ({"system": "S", "turns": ["Q", "Q"]}, (SYSTEM, USER, USER), "chat"),
    ({"system": "S", "instruction": "Q", "output": "A"}, (SYSTEM, USER, BOT), "chat"),
    ({"system": "S", "messages": [{"role": "user", "content": "Q"}]}, (SYSTEM, USER), "chat"),
    ({"system": "S", "conversations": [{"from": "human", "value": "Q"}]}, (SYSTEM, USER), "chat"),
    ({"system": "", "conversations": [{"from": "human", "value": "Q"}]}, (USER,), "chat"),
    (
        {"system": "S", "messages": [{"role": "developer", "content": "D"}, {"role": "user", "content": "Q"}]},
        (Message("system", "D"), USER),
        "chat",
    ),
    (
        {
            "system": "S",
            "prompt": [{"role": "user", "content": "Q"}],
            "completion": [{"role": "assistant", "content": "A"}],
        },
        (SYSTEM, USER, BOT),
        "chat",
    ),
    ({"system": "S", "prompt": "Q", "completion": "A"}, (Message("user", "S\n\nQ"), BOT), "completion"),
    ({"messages": [{"role": "assistant", "content": "A", "reasoning_content": "T"}]}, (THINKS,), "chat"),
    ({"messages": [{"role": "assistant", "content": "A", "reasoning": "T", "tool_calls": None}]}, (THINKS,), "chat"),
    ({"messages": [{"role": "assistant", "content": "A", "weight": 0}]}, (replace(BOT, learned=False),), "chat"),
    (
        {
            "messages": [
                {"role": "user", "content": "Q"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
                },
                {"role": "tool", "content": "R", "tool_call_id": "1", "name": "f"},
                {"role": "assistant", "content": "A"},
            ]
        },
        (
            USER,
            Message("assistant", "", more={"tool_calls": [{"id": "1", **CALL}]}),
            Message("tool", "R", more={"tool_call_id": "1", "name": "f"}),
            BOT,
        ),
        "chat",
    ),
    (
        {
            "conversations": [
                {"from": "human", "value": "Q"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                {"from": "observation", "value": "R"},
                {"from": "gpt", "value": "A"},
            ]
        },
        (USER, Message("assistant", "", more={"tool_calls": [CALL]}), Message("tool", "R"), BOT),
        "chat",
    ),
]


@pytest.mark.parametrize(("row", "messages", "kind"), ROWS)
def test_formats(tmp_path, row, messages, kind):
    (found,) = load_conversations(write_rows(tmp_path / "rows.jsonl", row), require_answers=False)
    assert found == Conversation("rows-0", messages, kind)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz", ".json.gz"])
def test_files(tmp_path, suffix):
    row, messages, kind = ROWS[0]
    text = json.dumps([row]) if ".json" in suffix and "l" not in suffix else json.dumps(row) + "\n"
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    (found,) = load_conversations(path, require_answers=False)
    assert found == Conversation("rows-0", messages, kind)


@settings(max_examples=50)
@given(messages=turns, kind=st.sampled_from(["chat", "completion", "text"]), finished=st.booleans())
def test_rows_round_trip(tmp_path_factory, messages, kind, finished):
    last = Message("assistant", messages[-1].content, finished)
    parts = {
        "chat": (*messages, last),
        "completion": (Message("user", messages[0].content), last),
        "text": (last,),
    }
    conversation = Conversation("an id", parts[kind], kind)
    more = {"reasoning_content": "so", "tool_calls": [CALL]}
    text = Tokens(array("i", [5, 70_000, 9]), bytes([0, 1, 0]))
    others = [
        replace(conversation, messages=(replace(last, more=more, learned=False),), template={"tools": [CALL]}),
        replace(conversation, texts=(text,)),
        replace(conversation, texts=(text, replace(text, loss_mask=bytes(3)))),
        Conversation("ids", (), "tokens", texts=(text,)),
    ]
    every = [conversation, *(others if kind == "chat" else others[1:])]
    path = write_rows(tmp_path_factory.getbasetemp() / "round-trip.jsonl", *(each.to_row() for each in every))
    assert load_conversations(path) == every
    assert len({fingerprint([each]) for each in every}) == len(every)


def test_folder_text_order_limit_and_exclusion(tmp_path):
    (tmp_path / "b.txt").write_text("\n\none\ntwo\n\nthree\u2028four\n")
    write_rows(tmp_path / "a.jsonl", {"id": "keep-1", "text": "x\u2028y"}, {"id": "out-1", "text": "y"})
    (tmp_path / "README.md").write_text("not data")
    found = load_conversations(tmp_path)
    assert [c.id for c in found] == ["keep-1", "out-1", "b-0", "b-1"]
    assert [c.messages[0].content for c in found] == ["x\u2028y", "y", "one\ntwo", "three\u2028four"]
    assert [c.id for c in load_conversations(tmp_path, exclude_ids=("out-",), limit=2)] == ["keep-1", "b-0"]
    with pytest.raises(DataError, match="limit is 0; give at least 1"):
        load_conversations(tmp_path, limit=0)
    both = load_conversations([tmp_path / "b.txt", str(tmp_path / "a.jsonl")])
    assert [c.id for c in both] == ["b-0", "b-1", "keep-1", "out-1"]


def test_json_lines_under_the_name_json_and_a_single_object(tmp_path):
    assert len(load_conversations(write_rows(tmp_path / "lines.json", {"text": "a\u2028"}, {"text": "b"}))) == 2
    assert len(load_conversations(write_rows(tmp_path / "one.json", {"text": "a"}))) == 1


def test_parquet(tmp_path):
    import datasets

    rows = [
        {
            "id": "a",
            "messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}],
            "tools": None,
        },
        {"id": None, "messages": [{"role": "user", "content": "Q"}], "tools": None},
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    assert load_conversations(tmp_path) == [
        Conversation("a", (USER, BOT)),
        Conversation("rows-1", (USER,)),
    ]
    datasets.Dataset.from_list([{"foo": 1}]).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet: row 1: unknown format"):
        load_conversations(tmp_path)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read") as caught:
        load_conversations(tmp_path)
    assert "\n" not in str(caught.value)


def test_null_is_no_value_wherever_rows_come_from(tmp_path, monkeypatch):
    """Tables give every row, and every message, the columns of all."""
    import datasets

    nothing = {"id": None, "category": None, "question_id": None, "messages": None, "prompt": None, "completion": None}
    message = {"from": None, "value": None, "role": "user", "content": "Q", "weight": None}
    rows = [{**nothing, "messages": [message]}, {**nothing, "prompt": "Q"}]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)
    for source in (write_rows(tmp_path / "rows.jsonl", *rows), "org/rows"):
        found = load_conversations(source, require_answers=False)
        assert found == [Conversation("rows-0", (USER,)), Conversation("rows-1", (USER,))]
        assert [(one.id, one.category, one.turns) for one in load_prompts(source)] == [
            ("rows-0", "", ("Q",)),
            ("rows-1", "", ("Q",)),
        ]
    monkeypatch.undo()
    assert load_conversations(tmp_path / "rows.parquet", require_answers=False) == found


def test_tables_fill_no_argument_of_a_call_and_no_option(tmp_path):
    import datasets

    def row(name: str, options: dict) -> dict:
        call = {"name": "f", "arguments": {name: 1}}
        said = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
        return {"messages": [{"role": "user", "content": "Q"}, said], "chat_template_kwargs": options}

    table = datasets.Dataset.from_list([row("a", {"enable_thinking": True}), row("b", {"words": "few"})])
    table.to_parquet(tmp_path / "rows.parquet")
    first, second = load_conversations(tmp_path / "rows.parquet", chat_template_kwargs={"enable_thinking": False})
    calls = [one.messages[1].more["tool_calls"][0]["function"]["arguments"] for one in (first, second)]
    assert calls == [{"a": 1}, {"b": 1}]
    assert first.template == {"enable_thinking": True}
    assert second.template == {"enable_thinking": False, "words": "few"}


def test_prompts_of_messages_alone(tmp_path):
    """As preference sets and those of prompts have them."""
    asked = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    path = write_rows(tmp_path / "rows.jsonl", {"prompt": asked})
    (found,) = load_conversations(path, require_answers=False)
    assert [(message.role, message.content) for message in found.messages] == [("system", "S"), ("user", "Q")]
    assert load_prompts(path)[0].opening == asked


GOOD = {"text": "fine"}


@pytest.mark.parametrize(
    ("name", "lines", "sentence"),
    [
        (
            "a.jsonl",
            [GOOD, '{"text": "cut'],
            r"a\.jsonl:2: not valid JSON \(Invalid control character at column 14\)",
        ),
        (
            "a.jsonl",
            [GOOD, "", {"foo": 1}],
            r"a\.jsonl:3: unknown format \(it has foo\); expected conversations",
        ),
        ("a.jsonl", [GOOD, [1]], r"a\.jsonl:2: expected an object with .*, found \[1\]"),
        ("a.jsonl", [{"text": None}], r"a\.jsonl:1: unknown format \(it has no values\)"),
        ("a.jsonl", [{"text": 1}], r"a\.jsonl:1: text is 1; expected a string"),
        ("a.jsonl", [{"messages": []}], r"a\.jsonl:1: 'messages' is \[\]; expected a list of messages"),
        ("a.jsonl", [{"messages": ["hi"]}], r"message 1 of 'messages' is \"hi\"; expected an object"),
        ("a.jsonl", [{"messages": [{"role": "user"}]}], r"message 1 of 'messages' lacks its text"),
        ("a.jsonl", [{"messages": [{"content": "x"}]}], r"message 1 of 'messages' lacks its role"),
        ("a.jsonl", [{"messages": [{"role": "narrator", "content": "x"}]}], r"unknown role \"narrator\""),
        ("a.jsonl", [{"input_ids": [1, 2]}], r"'input_ids' and 'loss_mask' belong together"),
        ("a.jsonl", [{"input_ids": [1, 2], "loss_mask": [1]}], r"two lists of the same length"),
        ("a.jsonl", [{"input_ids": [[1, 2]], "loss_mask": [[1]]}], r"'loss_mask' is not as long as 'input_ids'"),
        ("a.jsonl", [{"input_ids": [1, -2], "loss_mask": [0, 1]}], r"'input_ids' holds -2; expected token ids"),
        ("a.jsonl", [{"input_ids": [1, "2"], "loss_mask": [0, 1]}], r"'input_ids' holds \"2\"; expected token ids"),
        ("a.jsonl", [{"input_ids": [1, 2], "loss_mask": [0, 0.5]}], r"'loss_mask' holds 0\.5; expected 1 for"),
        ("a.jsonl", [{"messages": [{"role": "user", "content": "x"}], "tools": "{"}], r"tools has \"{\" where JSON"),
        (
            "a.jsonl",
            [{"prompt": "x", "chat_template_kwargs": [1]}],
            r"'chat_template_kwargs' is \[1\]; expected an object",
        ),
        (
            "a.jsonl",
            [{"conversations": [{"from": "function_call", "value": "f(x)"}]}],
            r"message 1 of 'conversations' has \"f\(x\)\" where JSON is expected",
        ),
        (
            "a.jsonl",
            [{"messages": [{"role": "assistant", "tool_calls": [{"arguments": {}}]}]}],
            r"message 1 of 'messages' has a call of a tool without a name",
        ),
        (
            "a.jsonl",
            [{"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]}],
            r"message 1 of 'messages' has a part without text, of type \"image\": leave the row out",
        ),
        ("a.jsonl", [{"turns": "hi"}], r"'turns' is \"hi\"; expected a list"),
        ("a.jsonl", ['{"text": "\\ud800"}'], r"a\.jsonl:1: text has half a surrogate pair"),
        ("a.json", ["[", '{"text": "x"},', "oops]"], r"a\.json:3: not valid JSON"),
        ("a.json", [[GOOD, {"foo": 1}]], r"a\.json: row 2: unknown format"),
        ("a.jsonl", [], r"a\.jsonl is empty"),
        ("a.json", [[]], r"a\.json is empty"),
        ("a.txt", ["", ""], r"a\.txt is empty"),
        ("a.csv", ["x,y"], r"a\.csv is of an unknown type; expected \.jsonl, \.json, \.txt"),
        ("a.jsonl.gz", ["not gzip"], r"a\.jsonl\.gz cannot be read: Not a gzipped file"),
        (
            "a.jsonl",
            [{"turns": ["only", "questions"]}],
            r"no assistant turn in any of its 1 rows, so there is nothing",
        ),
    ],
)
def test_bad_input_gets_its_sentence(tmp_path, name, lines, sentence):
    with pytest.raises(DataError, match=sentence) as caught:
        load_conversations(write_rows(tmp_path / name, *lines))
    assert "\n" not in str(caught.value)


def test_missing_truncated_and_undecodable_files(tmp_path):
    for source in (tmp_path / "no.jsonl", "no-such-file.jsonl.gz", "./no/such/folder", tmp_path / "folder"):
        with pytest.raises(DataError, match="does not exist; give a file, a folder or the name"):
            load_conversations(source)
    with pytest.raises(DataError, match=r"is a folder without any \.jsonl"):
        load_conversations(tmp_path)
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 1000)[:-12])
    with pytest.raises(DataError, match="cannot be read: Compressed file ended"):
        load_conversations(tmp_path / "cut.jsonl.gz")
    latin = b'{"text": "fine"}\r\n{"text": "\xe9"}\n'
    for name, row in (("latin.jsonl", 2), ("latin.json", 2), ("latin.txt", 2)):
        (tmp_path / name).write_bytes(latin)
        with pytest.raises(DataError, match=rf"{name}:{row}: not UTF-8 text \(byte 11 of the line"):
            load_conversations(tmp_path / name)
    with pytest.warns(UserWarning, match=r"skipped 1 malformed of 2 rows"):
        assert len(load_conversations(tmp_path / "latin.jsonl", skip_bad_rows=True)) == 1


def test_skip_bad_rows_counts_and_continues(tmp_path):
    path = write_rows(tmp_path / "mixed.jsonl", GOOD, "{oops", {"foo": 1}, GOOD)
    with pytest.warns(UserWarning, match=r"skipped 2 malformed of 4 rows \(the first: .*mixed\.jsonl:2: not valid"):
        assert len(load_conversations(path, skip_bad_rows=True)) == 2
    hopeless = write_rows(tmp_path / "hopeless.jsonl", {"foo": 1})
    with (
        pytest.warns(UserWarning, match="skipped 1"),
        pytest.raises(DataError, match="none of its 1 rows can be read"),
    ):
        load_conversations(hopeless, skip_bad_rows=True)
    with pytest.raises(DataError, match="no conversation is left of 1 rows"):
        load_conversations(write_rows(tmp_path / "one.jsonl", {"id": "x", **GOOD}), exclude_ids=("x",))


def test_hub_names(monkeypatch):
    import datasets

    asked = []

    def load(name, config, split):
        asked.append((name, config, split))
        return datasets.Dataset.from_list([{"instruction": "Q", "input": "", "output": "A"}] * 3)

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = load_conversations("org/name:validation", limit=2)
    assert [c.id for c in found] == ["name-0", "name-1"] and found[0].messages == (USER, BOT)
    load_conversations("name")
    load_conversations("org/name:main:test")
    assert asked == [("org/name", None, "validation"), ("name", None, "train"), ("org/name", "main", "test")]


@pytest.mark.parametrize(
    ("row", "ids", "turns", "references"),
    [
        (
            {"prompt_id": 81, "category": "writing", "prompt": ["First", "Then"], "reference": []},
            ["name-81", "name-81"],
            ("First", "Then"),
            (),
        ),
        (
            {"question": "2 + 2?", "answer": "It is 4.\n#### 4"},
            ["name-0", "name-1"],
            ("2 + 2?",),
            ("It is 4.\n#### 4",),
        ),
        ({"problem": "2 + 2?", "answer": "4", "id": 60}, ["60", "60"], ("2 + 2?",), ("4",)),
        (
            {"task_id": "HumanEval/0", "prompt": "def f():", "test": "def check(f): pass", "entry_point": "f"},
            ["name-HumanEval/0"] * 2,
            ("def f():",),
            (),
        ),
    ],
    ids=["MT-Bench", "GSM8K", "AIME", "HumanEval"],
)
def test_prompts_of_the_hub_as_their_collections_have_them(monkeypatch, row, ids, turns, references):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list([row] * 2))
    found = load_prompts("org/name:main:test")
    assert [one.id for one in found] == ids
    assert found[1].turns == turns and found[1].references == references
    assert (found[0].checks is None) == ("test" not in row)


def test_speed_bench_by_name_and_as_its_program_writes_it(tmp_path, monkeypatch):
    """A folder in the working directory is laid out as the hub has the dataset, so that `datasets` itself reads it."""
    import datasets

    elsewhere = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    shared = {"source": "s", "src_id": "1", "difficulty": "", "multiturn": True}
    rows = [
        {"question_id": "a" * 32, "category": "coding", "sub_category": "x", "turns": ["Sort.", "Again."], **shared},
        {"question_id": "b" * 32, "category": "rag", "sub_category": "y", "turns": [elsewhere], **shared},
    ]
    folder = tmp_path / "nvidia" / "SPEED-Bench"
    for config in ("qualitative", "throughput_1k"):
        (folder / config).mkdir(parents=True)
        datasets.Dataset.from_list(rows).to_parquet(folder / config / "test-00000-of-00001.parquet")
    configs = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: test\n    path: {name}/test-*\n"
        for name in ("qualitative", "throughput_1k")
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    with pytest.warns(UserWarning, match="1 of 2 rows name a source in place of their text and are left out"):
        (found,) = load_prompts("nvidia/SPEED-Bench:qualitative:test")
    assert found.id == f"SPEED-Bench-{'a' * 32}"
    assert (found.category, found.turns) == ("coding", ("Sort.", "Again."))
    messages = [{"role": "user", "content": turn} for turn in found.turns]
    prepared = {"question_id": "a" * 32, "category": "coding", "messages": messages}
    (again,) = load_prompts(write_rows(tmp_path / "qualitative.jsonl", prepared))
    assert again.turns == found.turns and again.messages == found.messages
    with pytest.raises(DataError, match="1 of 1 rows name a source"):
        load_prompts(write_rows(tmp_path / "bare.jsonl", rows[1]))


def test_spec_bench_and_deep_spec(tmp_path):
    first = {"question_id": 81, "category": "writing", "turns": ["One", "Two"], "reference": ["x"]}
    second = {"question_id": 241, "category": "summarization", "turns": ["S"]}
    spec = write_rows(tmp_path / "question.jsonl", first, second)
    found = load_prompts(spec)
    assert [(one.id, one.category, len(one.turns)) for one in found] == [
        ("question-81", "writing", 2),
        ("question-241", "summarization", 1),
    ]
    (deep,) = load_prompts(write_rows(tmp_path / "gsm8k.jsonl", {"turns": ["How many?"]}))
    assert (deep.id, deep.turns) == ("gsm8k-0", ("How many?",))


def test_hub_failure_is_one_sentence(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="nobody/nothing is neither a file nor a folder here") as caught:
        load_conversations("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_prompts(tmp_path):
    path = write_rows(
        tmp_path / "prompts.jsonl",
        {"id": 7, "category": "math", "turns": ["one", "two"], "reference": ["x"]},
        {"prompt": "ask"},
        {"messages": [{"role": r, "content": c} for r, c in [("system", "S"), ("user", "Q"), ("assistant", "A")]]},
        {"system": "S", "turns": ["Q", "Q"]},
    )
    turns, prompt, messages, led = load_prompts(path)
    assert (led.turns, led.messages) == (("Q", "Q"), (SYSTEM, USER))
    assert (turns.id, turns.category, turns.turns) == ("7", "math", ("one", "two"))
    assert turns.messages == (Message("user", "one"),)
    assert (prompt.id, prompt.category, prompt.turns) == ("prompts-1", "", ("ask",))
    assert (messages.turns, messages.messages) == (("Q",), (SYSTEM, USER))
    with pytest.raises(DataError, match=r"bad\.jsonl:2: no user message to answer"):
        load_prompts(write_rows(tmp_path / "bad.jsonl", {"prompt": "x"}, {"text": "x"}))
    with pytest.raises(DataError, match=r"bad\.jsonl:1: unknown format"):
        load_prompts(write_rows(tmp_path / "bad.jsonl", {"asked": "x"}))


def test_prompts_at_hand(shared):
    paths = sorted((shared / "prompts").glob("*.jsonl"))
    assert paths
    for path in paths:
        prompts = load_prompts(path)
        assert len(prompts) >= 80 and all(p.category and p.turns[0] == p.messages[-1].content for p in prompts)


def test_known_answers_and_tests_of_prompts(tmp_path):
    rows = [
        {"prompt": "One?", "reference": "#### 1"},
        {"turns": ["Two?", "And three?"], "reference": [2, None]},
        {"prompt": "def four():\n", "test": "def check(f): ...", "entry_point": "four"},
        {"prompt": "Five?", "test": "no function to test"},
    ]
    path = write_rows(tmp_path / "prompts.jsonl", *rows)
    one, two, four, five = load_prompts(path)
    assert (one.references, two.references) == (("#### 1",), ("2", ""))
    assert five.references == ()
    assert one.checks is None and four.checks == Checks("def check(f): ...", "four") and five.checks is None
