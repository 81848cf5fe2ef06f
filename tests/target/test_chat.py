"""Options of chat templates. What templates make of conversations is checked in tests/data/test_encoding.py."""

import warnings

import pytest
from helpers import with_chat_template

from shape.target.chat import prompt_ids

QUESTION = [{"role": "user", "content": "a question"}]


def test_an_option_that_the_template_does_not_read_is_told(tiny_tokenizer):
    tokenizer = with_chat_template(tiny_tokenizer, "qwen3")
    with pytest.warns(UserWarning, match=r"reads no enable_thinkng, so giving it has no effect"):
        mistyped = prompt_ids(QUESTION, tokenizer, {"enable_thinkng": False})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prompt_ids(QUESTION, tokenizer, {"enable_thinking": False}) != mistyped
        assert prompt_ids(QUESTION, tokenizer) == mistyped
