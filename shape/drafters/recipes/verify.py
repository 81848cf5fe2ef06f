"""Which sampled answers a pack may be compiled from."""

import json
from collections.abc import Callable
from importlib import import_module
from inspect import signature

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
        ConfigError: no such function, or one of other arguments; in a call of it, whatever it raises.
    """
    if name == "json":
        return is_json
    module, _, function = name.partition(":")
    try:
        found: Verify = getattr(import_module(module), function)
    except Exception as error:  # a module runs when it is imported, and may raise anything
        raise ConfigError(f"verify {name!r} is neither json nor a MODULE:FUNCTION ({error}); correct it") from error
    try:
        signature(found).bind("prompt", "answer")
    except TypeError as error:
        raise ConfigError(
            f"verify {name!r} does not take a prompt and an answer ({error}); give a function that does"
        ) from error
    except ValueError:  # some builtins do not say what they take
        pass

    def verify(prompt: Prompt, answer: str) -> bool:
        try:
            return found(prompt, answer)
        except Exception as error:
            raise ConfigError(
                f"verify {name!r} raised {type(error).__name__} ({error}) for the answer to prompt {prompt.id}; "
                "correct the function, and give the same command again"
            ) from error

    return verify
