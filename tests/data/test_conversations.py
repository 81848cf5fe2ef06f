"""Reading every format, and the loss mask proven on adversarial contents and templates."""

import gzip
import json
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shape.cli.preview import main
from shape.data.conversations import Checks, Conversation, Tokens, fingerprint
from shape.data.encoding import encode, encode_all, unfolded
from shape.data.reading import load_conversations, load_prompts
from shape.errors import DataError
from shape.target.chat import Message, prompt_ids, render

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The last answer gets an empty thought that earlier answers lose: what Qwen3's template does.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# No generation prompt, contents stripped, a space before the answer: what Llama 2's template does.
INSTRUCT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' <|im_end|>' }}{% endif %}{% endfor %}"
)
SHOUTED = CHATML.replace("+ m['content'] +", "+ m['content'] | upper +")
NO_END = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
COUNTING = "{{ messages | length }}" + SHOUTED
STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with user') }}{% endif %}" + CHATML


def bpe_tokenizer(template: str | None, pre=None, decoder=None) -> PreTrainedTokenizerFast:
    """A real byte-level BPE without a regular expression, so that tokens join across words and lines."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoder or decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", IM_START, IM_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = ["\n\nhello world\n\n  user assistant\n the answer  is 42.\n\n [INST] [/INST]: é 😀"] * 4
    backend.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=IM_END,
        pad_token="<|endoftext|>",
        additional_special_tokens=[IM_START],
    )
    tokenizer.chat_template = template
    return tokenizer


MERGING = bpe_tokenizer(CHATML)
TRIMMING = bpe_tokenizer(CHATML)
TRIMMING.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
contents = st.lists(
    st.one_of(
        st.sampled_from(["\n", " ", "hello", "é😀", IM_END, f"{IM_START}assistant\n", "slot0z", "\u2028", "\t"]),
        st.text(max_size=6),
    ),
    max_size=5,
).map("".join)
turns = st.lists(st.builds(Message, st.sampled_from(["system", "user", "assistant"]), contents), min_size=1, max_size=6)


def chat(*texts: str) -> Conversation:
    roles = ("user", "assistant")
    return Conversation("c", tuple(Message(roles[i % 2], text) for i, text in enumerate(texts)))


def runs(tokenizer, conversation, max_length=None) -> list[tuple[bool, str]]:
    """(supervised, decoded text) of each stretch of equal mask, text after text."""
    stretches: list[tuple[bool, list[int]]] = []
    for part in unfolded([conversation], tokenizer)[0]:
        encoded = encode(part, tokenizer, max_length)
        for number, (token, mark) in enumerate(
            zip(encoded.input_ids.tolist(), encoded.loss_mask.tolist(), strict=True)
        ):
            if not number or stretches[-1][0] != mark:
                stretches.append((mark, []))
            stretches[-1][1].append(token)
    return [(m, tokenizer.decode(ids, clean_up_tokenization_spaces=False)) for m, ids in stretches]


def supervised(tokenizer, conversation) -> list[str]:
    return [text for mark, text in runs(tokenizer, conversation) if mark]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def real_tokenizer(shared):
    return AutoTokenizer.from_pretrained(shared / "targets" / "chat-12m")


# The mask --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, MARKED])
@settings(max_examples=150, deadline=None)
@given(messages=turns)
def test_supervised_tokens_are_the_answers_and_their_end(template, messages):
    MERGING.chat_template = template
    found = runs(MERGING, Conversation("c", tuple(messages)))
    assert [text for mark, text in found if mark] == [m.content + IM_END for m in messages if m.role == "assistant"]
    answers = [number for number, message in enumerate(messages, 1) if message.role == "assistant"]
    whole = render(MERGING, messages[: answers[-1]] if answers else messages)
    assert "".join(text for _, text in found) == whole  # so the rest is not supervised


@settings(max_examples=50, deadline=None)
@given(messages=turns)
def test_real_tokenizer(messages, real_tokenizer):
    answers = [m.content + IM_END for m in messages if m.role == "assistant"]
    assert supervised(real_tokenizer, Conversation("c", tuple(messages))) == answers


@settings(max_examples=60, deadline=None)
@given(messages=turns, cut=st.integers(1, 60))
def test_truncation_keeps_the_beginning(messages, cut):
    MERGING.chat_template = CHATML
    conversation = Conversation("c", tuple(messages))
    whole, short = encode(conversation, MERGING, None), encode(conversation, MERGING, cut)
    assert short.input_ids.tolist() == whole.input_ids[:cut].tolist()
    assert short.loss_mask.tolist() == whole.loss_mask[:cut].tolist()
    assert short.truncated == (len(whole.input_ids) > cut)


def test_tiny_tokenizer_first_and_last_token(tiny_tokenizer):
    encoded = encode(chat("hi", "yo", "bye", ""), tiny_tokenizer, None)
    ids, mask = encoded.input_ids, encoded.loss_mask
    assert tiny_tokenizer.convert_ids_to_tokens(ids[mask].tolist()) == ["y", "o", IM_END, IM_END]
    assert str(ids.dtype) == "torch.int64" and str(mask.dtype) == "torch.bool"
    first = mask.nonzero()[0].item()
    prompt = tiny_tokenizer(render(tiny_tokenizer, chat("hi").messages, True)).input_ids
    assert ids[:first].tolist() == prompt  # training sees the prompt that decoding sees
    assert prompt_ids(chat("hi").messages, tiny_tokenizer) == prompt


def test_tokens_are_those_of_the_whole_text_unless_one_would_join_prompt_and_answer():
    MERGING.chat_template = CHATML
    plain = chat("hello world", "the answer is 42.\n\n")
    assert encode(plain, MERGING, None).input_ids.tolist() == MERGING(render(MERGING, plain.messages)).input_ids
    joined = chat("hello", "\nworld")  # "\n\n" is one token of this tokenizer
    assert "\n\n" in MERGING.get_vocab() or "ĊĊ" in MERGING.get_vocab()
    ids = encode(joined, MERGING, None).input_ids.tolist()
    prompt = MERGING(render(MERGING, joined.messages[:1], True)).input_ids
    assert ids[: len(prompt)] == prompt
    assert supervised(MERGING, joined) == ["\nworld" + IM_END]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (THINKING, ["<think>\n\n</think>\n\none" + IM_END, "<think>\n\n</think>\n\ntwo" + IM_END]),
        (INSTRUCT, [" one " + IM_END, " two " + IM_END]),
        (SHOUTED, ["ONE" + IM_END, "TWO" + IM_END]),
        (NO_END, ["one", "two"]),
    ],
    ids=["rewrites earlier turns", "no generation prompt", "transforms contents", "no end token"],
)
def test_other_templates(template, expected):
    assert supervised(bpe_tokenizer(template), chat("q", "one", "r", "two")) == expected


def test_sentencepiece_style_tokens():
    spaces = (pre_tokenizers.Metaspace(), decoders.Metaspace())
    tokenizer = bpe_tokenizer(INSTRUCT, *spaces)
    encoded = encode(chat("user", "the answer", "user", "answer"), tokenizer, None)
    whole = tokenizer(render(tokenizer, chat("user", "the answer", "user", "answer").messages)).input_ids
    assert encoded.input_ids.tolist() == whole
    kept = tokenizer.convert_ids_to_tokens(encoded.input_ids[encoded.loss_mask].tolist())
    assert "".join(kept) == f"▁the▁answer▁{IM_END}▁answer▁{IM_END}"


@settings(max_examples=100, deadline=None)
@given(messages=turns)
def test_offsets_that_leave_out_spaces(messages):
    """As GPT-2's: spaces belong to no token's span, and here the prompt ends with one."""
    TRIMMING.chat_template = CHATML.replace("assistant\n", "assistant ").replace("'\n' + m", "' ' + m")
    answers = [m.content + IM_END for m in messages if m.role == "assistant"]
    assert supervised(TRIMMING, Conversation("c", tuple(messages))) == answers


def test_end_token_that_swallows_the_newline():
    tokenizer = bpe_tokenizer(CHATML)
    tokenizer.add_special_tokens({"eos_token": AddedToken(IM_END, rstrip=True, special=True)})
    encoded = encode(chat("q", "one"), tokenizer, None)
    assert encoded.loss_mask[-1] and encoded.input_ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("template", [CHATML, MARKED, SHOUTED])
def test_an_unfinished_answer_has_no_end_to_learn(template):
    messages = (Message("user", "Q"), Message("assistant", "A", finished=False))
    assert supervised(bpe_tokenizer(template), Conversation("c", messages)) == ["A"]


def test_slow_tokenizer(tmp_path):
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IM_START, IM_END]})
    tokenizer.chat_template = CHATML
    assert not tokenizer.is_fast
    assert supervised(tokenizer, chat("hi", "é yo", "bye", "")) == ["é yo" + IM_END, IM_END]


def test_plain_text_and_completion_need_no_template():
    tokenizer = bpe_tokenizer(None)
    text = Conversation("t", (Message("assistant", "hello world"),), "text")
    encoded = encode(text, tokenizer, None)
    assert tokenizer.decode(encoded.input_ids) == "hello world"
    assert not encoded.loss_mask[0] and encoded.loss_mask[1:].all()
    pair = Conversation("p", (Message("user", "the "), Message("assistant", "answer")), "completion")
    assert runs(tokenizer, pair) == [(False, "the "), (True, "answer" + IM_END)]
    with pytest.raises(DataError, match="no chat template; use an instruction-tuned"):
        encode(chat("a", "b"), tokenizer, None)


def test_bos_of_raw_text_is_there_and_not_supervised():
    from tokenizers.processors import TemplateProcessing

    tokenizer = bpe_tokenizer(None)
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    pair = Conversation("p", (Message("user", ""), Message("assistant", "answer")), "completion")
    assert runs(tokenizer, pair) == [(False, "<|endoftext|>"), (True, "answer" + IM_END)]
    assert prompt_ids("", tokenizer) == [0] and prompt_ids("é", tokenizer)[0] == 0
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"<|endoftext|> {IM_START} $A {IM_END}",
        special_tokens=[("<|endoftext|>", 0), (IM_START, 1), (IM_END, 2)],
    )
    words = tokenizer("the answer", add_special_tokens=False).input_ids
    assert prompt_ids("the answer", tokenizer) == [0, 1, *words]  # a prompt has not ended


def test_templates_that_cannot_be_followed():
    with pytest.raises(DataError, match="conversation c cannot be found in its rendering"):
        encode(chat("q", "a"), bpe_tokenizer(COUNTING), None)
    wrong = Conversation("c", (Message("assistant", "a"),))
    with pytest.raises(DataError, match="refuses the turns assistant: begin with user"):
        encode(wrong, bpe_tokenizer(STRICT), None)
    kept = encode_all([wrong, chat("q", "a")], bpe_tokenizer(STRICT), None, skip_bad_rows=True)
    assert (len(kept.examples), kept.dropped) == (1, 1)


def test_encode_all_counts(tiny_tokenizer):
    asked = Conversation("user-only", (Message("user", "hi"),))
    kept = encode_all([asked, chat("q" * 90, "a"), chat("q", "a" * 90), chat("q", "a")], tiny_tokenizer, 60)
    assert (len(kept.examples), kept.truncated, kept.dropped) == (2, 1, 2)
    with pytest.raises(DataError, match="none of the 1 conversations has a supervised token within 60"):
        encode_all([asked], tiny_tokenizer, 60)


# Reading ---------------------------------------------------------------------------------------------

USER, BOT = Message("user", "Q"), Message("assistant", "A")
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
    ({"system": "S", "prompt": "Q"}, (Message("system", "S"), USER), "chat"),
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
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz", ".json.gz"])
def test_formats(tmp_path, row, messages, kind, suffix):
    text = json.dumps([row]) if ".json" in suffix and "l" not in suffix else json.dumps(row) + "\n"
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    (found,) = load_conversations(path, require_answers=False)
    assert found == Conversation("rows-0", messages, kind)


@settings(max_examples=50, deadline=None)
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
    path = write(tmp_path_factory.getbasetemp() / "round-trip.jsonl", *(each.to_row() for each in every))
    assert load_conversations(path) == every
    assert len({fingerprint([each]) for each in every}) == len(every)


def test_folder_text_order_limit_and_exclusion(tmp_path):
    (tmp_path / "b.txt").write_text("\n\none\ntwo\n\nthree\u2028four\n")
    write(tmp_path / "a.jsonl", {"id": "keep-1", "text": "x\u2028y"}, {"id": "out-1", "text": "y"})
    (tmp_path / "README.md").write_text("not data")
    found = load_conversations(tmp_path)
    assert [c.id for c in found] == ["keep-1", "out-1", "b-0", "b-1"]
    assert [c.messages[0].content for c in found] == ["x\u2028y", "y", "one\ntwo", "three\u2028four"]
    assert [c.id for c in load_conversations(tmp_path, exclude_ids=("out-",), limit=2)] == ["keep-1", "b-0"]
    both = load_conversations([tmp_path / "b.txt", str(tmp_path / "a.jsonl")])
    assert [c.id for c in both] == ["b-0", "b-1", "keep-1", "out-1"]


def test_json_lines_under_the_name_json_and_a_single_object(tmp_path):
    assert len(load_conversations(write(tmp_path / "lines.json", {"text": "a\u2028"}, {"text": "b"}))) == 2
    assert len(load_conversations(write(tmp_path / "one.json", {"text": "a"}))) == 1


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
        ("a.jsonl", [{"text": None}], r"a\.jsonl:1: text is null; expected a string"),
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
        load_conversations(write(tmp_path / name, *lines))
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
    (tmp_path / "latin.jsonl").write_bytes('{"text": "é"}'.encode("latin-1"))
    with pytest.raises(DataError, match="is not UTF-8 text"):
        load_conversations(tmp_path / "latin.jsonl")


def test_skip_bad_rows_counts_and_continues(tmp_path):
    path = write(tmp_path / "mixed.jsonl", GOOD, "{oops", {"foo": 1}, GOOD)
    with pytest.warns(UserWarning, match=r"skipped 2 malformed of 4 rows \(the first: .*mixed\.jsonl:2: not valid"):
        assert len(load_conversations(path, skip_bad_rows=True)) == 2
    hopeless = write(tmp_path / "hopeless.jsonl", {"foo": 1})
    with (
        pytest.warns(UserWarning, match="skipped 1"),
        pytest.raises(DataError, match="none of its 1 rows can be read"),
    ):
        load_conversations(hopeless, skip_bad_rows=True)
    with pytest.raises(DataError, match="no conversation is left of 1 rows"):
        load_conversations(write(tmp_path / "one.jsonl", {"id": "x", **GOOD}), exclude_ids=("x",))


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
    ("row", "turns", "references"),
    [
        ({"prompt_id": 81, "category": "writing", "prompt": ["First", "Then"], "reference": []}, ("First", "Then"), ()),
        ({"question": "2 + 2?", "answer": "It is 4.\n#### 4"}, ("2 + 2?",), ("It is 4.\n#### 4",)),
        ({"prompt": "def f():", "test": "def check(f): pass", "entry_point": "f"}, ("def f():",), ()),
    ],
    ids=["MT-Bench", "GSM8K", "HumanEval"],
)
def test_prompts_of_the_hub_as_their_collections_have_them(monkeypatch, row, turns, references):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list([row] * 2))
    found = load_prompts("org/name:main:test")
    assert [one.id for one in found] == ["name-0", "name-1"]
    assert found[1].turns == turns and found[1].references == references
    assert (found[0].checks is None) == ("test" not in row)


def test_hub_failure_is_one_sentence(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="nobody/nothing is neither a file nor a folder here") as caught:
        load_conversations("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_fingerprint_sees_every_part():
    base = chat("q", "a")
    others = [
        chat("q", "b"),
        chat("qa", ""),
        Conversation("d", base.messages),
        Conversation("c", base.messages, "completion"),
        Conversation("c", (base.messages[0], Message("assistant", "a", finished=False))),
    ]
    prints = [fingerprint([c]) for c in [base, *others]] + [fingerprint([base, base]), fingerprint([])]
    assert len(set(prints)) == len(prints)
    assert fingerprint([base, others[0]]) != fingerprint([others[0], base])
    assert fingerprint([base]) == fingerprint([chat("q", "a")])


def test_prompts(tmp_path):
    path = write(
        tmp_path / "prompts.jsonl",
        {"id": 7, "category": "math", "turns": ["one", "two"], "reference": ["x"]},
        {"prompt": "ask"},
        {"messages": [{"role": r, "content": c} for r, c in [("system", "S"), ("user", "Q"), ("assistant", "A")]]},
    )
    turns, prompt, messages = load_prompts(path)
    assert (turns.id, turns.category, turns.turns) == ("7", "math", ("one", "two"))
    assert turns.messages == (Message("user", "one"),)
    assert (prompt.id, prompt.category, prompt.turns) == ("prompts-1", "", ("ask",))
    assert (messages.turns, messages.messages) == (("Q",), (Message("system", "S"), USER))
    with pytest.raises(DataError, match=r"bad\.jsonl:2: no user message to answer"):
        load_prompts(write(tmp_path / "bad.jsonl", {"prompt": "x"}, {"text": "x"}))
    with pytest.raises(DataError, match=r"bad\.jsonl:1: unknown format"):
        load_prompts(write(tmp_path / "bad.jsonl", {"asked": "x"}))


def test_prompts_at_hand(shared):
    for path in sorted((shared / "prompts").glob("*.jsonl")):
        prompts = load_prompts(path)
        assert len(prompts) >= 80 and all(p.category and p.turns[0] == p.messages[-1].content for p in prompts)


# Command ---------------------------------------------------------------------------------------------


def test_preview_prints_samples_and_a_summary(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    MERGING.chat_template = CHATML
    MERGING.save_pretrained(tmp_path / "target")
    data = write(tmp_path / "data.jsonl", chat("hello", "world [bold]").to_row(), chat("hello", "again").to_row())
    main(["--data", str(data), "--target", str(tmp_path / "target"), "-n", "1"])
    out = capsys.readouterr().out
    assert "\x1b[1;32mworld [bold]<|im_end|>" in out and "again" not in out
    assert "2 rows, " in out and "% supervised" in out


def test_preview_of_bad_input_exits_with_status_2(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--data", str(tmp_path / "none.jsonl"), "--target", str(tmp_path)])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "none.jsonl does not exist" in error and error.count("\n") == 1


def test_known_answers_and_tests_of_prompts(tmp_path):
    rows = [
        {"prompt": "One?", "reference": "#### 1"},
        {"turns": ["Two?", "And three?"], "reference": [2, None]},
        {"prompt": "def four():\n", "test": "def check(f): ...", "entry_point": "four"},
        {"prompt": "Five?", "test": "no function to test"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, two, four, five = load_prompts(path)
    assert (one.references, two.references) == (("#### 1",), ("2", ""))
    assert five.references == ()
    assert one.checks is None and four.checks == Checks("def check(f): ...", "four") and five.checks is None
