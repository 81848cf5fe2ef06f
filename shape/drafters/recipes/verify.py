"""Which sampled answers a pack may be compiled from."""

import json
from collections.abc import Callable
from importlib import import_module

from shape.data.conversations import Prompt
from shape.errors import ConfigError

Verify = Callable[[Prompt, str], bool]


def is_json(prompt: Prompt, answer: str) -> bool:
    """Whether an answer is one JSON value."""
    try:
        json.loads(answer)
    except ValueError:
        return False
    return True


def make_verify(name: str) -> Verify:
    """By name: json, or a function of prompt and answer as MODULE:FUNCTION.

    Raises:
        ConfigError: no such function.
    """
    if name == "json":
        return is_json
    module, _, function = name.partition(":")
    try:
        found: Verify = getattr(import_module(module), function)
    except Exception as error:  # a module runs when it is imported, and may raise anything
        raise ConfigError(f"verify {name!r} is neither json nor a MODULE:FUNCTION ({error}); correct it") from error
    return found
