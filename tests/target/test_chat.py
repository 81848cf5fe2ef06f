"""Options of chat templates. What templates make of conversations is checked in tests/data/test_encoding.py."""

import copy
import warnings

import pytest
from helpers import with_chat_template

from shape.target.chat import prompt_ids, spoken, thinks

QUESTION = [{"role": "user", "content": "a question"}]


def test_an_option_that_the_template_does_not_read_is_told(tiny_tokenizer):
    tokenizer = with_chat_template(tiny_tokenizer, "qwen3")
    with pytest.warns(UserWarning, match=r"reads no enable_thinkng, so giving it has no effect"):
        mistyped = prompt_ids(QUESTION, tokenizer, {"enable_thinkng": False})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prompt_ids(QUESTION, tokenizer, {"enable_thinking": False}) != mistyped
        assert prompt_ids(QUESTION, tokenizer) == mistyped


def test_magistrals_reasoning_stands_between_special_tokens(tiny_tokenizer):
    """Its template reads reasoning as blocks of a content alone."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "[THINK]", "[/THINK]"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.content is string %}"
        "{{ m.content }}<|im_end|>{% else %}{% for b in m.content %}[THINK]{{ b.thinking }}[/THINK]{% endfor %}"
        "{% endif %}{% endfor %}"
    )
    prompt = prompt_ids(QUESTION, tokenizer)
    assert thinks(prompt, tokenizer)

    def said(text: str) -> str:
        return spoken(tokenizer(text, add_special_tokens=False).input_ids, prompt, tokenizer, None)

    assert said("[THINK]T1, or\nT2[/THINK]A [1]") == "A [1]"
    assert said("[THINK][/THINK]A") == "A" and said("A") == "A"
    with pytest.warns(UserWarning, match="ends within its reasoning"):
        assert said("[THINK]half a") == ""


def test_reasoning_may_hold_special_tokens(tiny_tokenizer):
    """Which text does not show, so that what is left out is told by the end of the reasoning."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
    )
    answer = tokenizer("call <|tool|> now</think>The answer", add_special_tokens=False).input_ids
    assert spoken(answer, prompt_ids(QUESTION, tokenizer), tokenizer, None) == "The answer"
