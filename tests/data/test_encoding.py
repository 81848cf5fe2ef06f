"""The loss mask, proven on adversarial contents and templates."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from regenerated import IM_END, IM_START, chat, turns
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shape.data.conversations import Conversation
from shape.data.encoding import encode, encode_all, encode_row, split_by_template
from shape.data.turns import specials_of
from shape.errors import DataError
from shape.target.chat import Message, prompt_ids, render

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


def runs(tokenizer, conversation, max_length=None) -> list[tuple[bool, str]]:
    """(supervised, decoded text) of each stretch of equal mask, text after text."""
    stretches: list[tuple[bool, list[int]]] = []
    for part in split_by_template(conversation, tokenizer):
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


@pytest.fixture(scope="module")
def real_tokenizer(shared):
    return AutoTokenizer.from_pretrained(shared / "targets" / "chat-12m")


# The mask --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, MARKED])
@settings(max_examples=150)
@given(messages=turns)
def test_supervised_tokens_are_the_answers_and_their_end(template, messages):
    MERGING.chat_template = template
    found = runs(MERGING, Conversation("c", tuple(messages)))
    assert [text for mark, text in found if mark] == [m.content + IM_END for m in messages if m.role == "assistant"]
    answers = [number for number, message in enumerate(messages, 1) if message.role == "assistant"]
    whole = render(MERGING, messages[: answers[-1]] if answers else messages)
    assert "".join(text for _, text in found) == whole  # so the rest is not supervised


@settings(max_examples=50)
@given(messages=turns)
def test_real_tokenizer(messages, real_tokenizer):
    answers = [m.content + IM_END for m in messages if m.role == "assistant"]
    assert supervised(real_tokenizer, Conversation("c", tuple(messages))) == answers


@settings(max_examples=60)
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


@settings(max_examples=100)
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


def test_added_tokens_are_collected_once_and_again_where_there_are_more(monkeypatch):
    tokenizer, asked = bpe_tokenizer(CHATML), []
    added = type(tokenizer).added_tokens_decoder.fget
    monkeypatch.setattr(
        type(tokenizer), "added_tokens_decoder", property(lambda self: asked.append(self) or added(self))
    )
    for _ in range(3):
        assert supervised(tokenizer, chat("q", "one", "r", "two")) == ["one" + IM_END, "two" + IM_END]
    assert len(asked) == 1
    assert specials_of(tokenizer).behind(f"one{IM_END}<|over|>") == ""
    tokenizer.add_special_tokens({"additional_special_tokens": [IM_START, "<|over|>", "|>"]})
    assert specials_of(tokenizer).behind(f"one{IM_END}<|over|>") == "<|over|>"  # the longest
    assert specials_of(tokenizer).at(f"one{IM_END}<|over|>", 3) == IM_END


@pytest.mark.parametrize("template", [CHATML, MARKED, SHOUTED])
def test_an_unfinished_answer_has_no_end_to_learn(template):
    messages = (Message("user", "Q"), Message("assistant", "A", finished=False))
    assert supervised(bpe_tokenizer(template), Conversation("c", messages)) == ["A"]


def test_slow_tokenizer():
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


@pytest.mark.parametrize("first", [[IM_START], ["<|endoftext|>", IM_START]], ids=["one", "two"])
def test_first_and_end_tokens_of_rendered_text_are_there_once(first):
    """Rows that hold text as `apply_chat_template` writes it, as many SFT sets do."""
    tokenizer = bpe_tokenizer(None)
    tokenizer.eos_token = "<|endoftext|>"  # and turns end with another token, as Gemma's and Llama's
    known = [(token, tokenizer.convert_tokens_to_ids(token)) for token in first]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{' '.join(first)} $A", special_tokens=known
    )
    begin, asked = "".join(first), "user\nhello"
    for text in (begin + asked, asked):
        assert tokenizer.decode(prompt_ids(text, tokenizer)) == begin + asked
        whole = Conversation("t", (Message("assistant", text),), "text")
        assert runs(tokenizer, whole) == [(False, begin), (True, asked)]
        for answer, learned, rest in (
            (f"answer{IM_END}", f"answer{IM_END}", []),
            (f"answer{IM_END}\n", f"answer{IM_END}", [(False, "\n")]),
            ("answer\n", "answer\n<|endoftext|>", []),
            ("answer<|endoftext|>", "answer<|endoftext|>", []),
        ):
            pair = Conversation("p", (Message("user", text), Message("assistant", answer)), "completion")
            assert runs(tokenizer, pair) == [(False, begin + asked), (True, learned), *rest]


def test_a_tokenizer_that_always_adds_its_first_token():
    class Adding(PreTrainedTokenizerFast):
        def __call__(self, *texts, add_special_tokens=True, **more):
            return super().__call__(*texts, add_special_tokens=True, **more)

    plain = bpe_tokenizer(None)
    plain.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer = Adding(tokenizer_object=plain.backend_tokenizer, eos_token=IM_END)
    ids = prompt_ids("hello", tokenizer)
    assert ids[0] == 0 and 0 not in ids[1:]
    row = Conversation("t", (Message("assistant", "hello"),), "text")
    assert encode(row, tokenizer, None).input_ids.tolist() == ids


def test_templates_that_cannot_be_followed():
    with pytest.raises(DataError, match="conversation c cannot be found in its rendering"):
        encode(chat("q", "a"), bpe_tokenizer(COUNTING), None)
    wrong = Conversation("c", (Message("assistant", "a"),))
    with pytest.raises(DataError, match="refuses the turns assistant: begin with user"):
        encode(wrong, bpe_tokenizer(STRICT), None)
    with pytest.raises(DataError, match=r"conversation c: .*begin with user"):
        encode_row(wrong, bpe_tokenizer(STRICT), None, skip_bad_rows=False)
    kept = encode_all([wrong, chat("q", "a")], bpe_tokenizer(STRICT), None, skip_bad_rows=True)
    assert (len(kept.examples), kept.dropped) == (1, 1)


def test_encode_all_counts(tiny_tokenizer):
    asked = Conversation("user-only", (Message("user", "hi"),))
    kept = encode_all([asked, chat("q" * 90, "a"), chat("q", "a" * 90), chat("q", "a")], tiny_tokenizer, 60)
    assert (len(kept.examples), kept.truncated, kept.dropped) == (2, 1, 2)
    with pytest.raises(DataError, match="none of the 1 conversations has a supervised token within 60"):
        encode_all([asked], tiny_tokenizer, 60)
