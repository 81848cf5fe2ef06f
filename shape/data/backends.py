"""What writes answers: a target on this machine (`shape.generation.answers`) or a server (`shape.data.endpoint`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from transformers import GenerationConfig

from shape.errors import DataError
from shape.target.chat import Message
from shape.target.model import Target, announce


@dataclass(frozen=True)
class Request:
    """One answer to write: after messages (chat), or as the continuation of a string.

    Attributes:
        sampled: or greedy.
        seed: of the sampling.
        template: what the chat template is given beside the messages.
    """

    prompt: tuple[Message, ...] | str
    sampled: bool
    seed: int
    template: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What was written.

    Attributes:
        finished: False if the answer was cut before its end token.
        more: reasoning and calls of tools, as in `Message.more`.
        tokens: ids of the prompt and of the answer, its end token included, where they are known.
    """

    text: str
    finished: bool
    more: Mapping[str, Any] = field(default_factory=dict)
    tokens: tuple[list[int], list[int]] | None = None


def sampling(temperature: float) -> dict[str, Any]:
    """Options of `generate` that leave a target its own distribution, whatever cuts and penalties for repetition its
    generation config prefers: greedy at 0, else from all tokens.
    """
    if temperature == 0:
        return {"do_sample": False, "repetition_penalty": 1.0, "no_repeat_ngram_size": None}
    whole = {"top_k": 0, "top_p": 1.0, **dict.fromkeys(("min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"))}
    return {**sampling(0.0), "do_sample": True, "temperature": temperature, **whole}


# With what options of `sampling` change nothing; all others with 0.
_NEUTRAL = {"repetition_penalty": 1.0, "top_p": 1.0, "typical_p": 1.0}


def switched_off(config: GenerationConfig | None, temperature: float) -> dict[str, Any]:
    """Options of a target's generation config that `sampling` takes back, with the values that they have there."""
    names = sorted(sampling(temperature).keys() - {"do_sample", "temperature"})
    found = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in found.items() if value not in (None, _NEUTRAL.get(name, 0))}


def off_in_words(off: Mapping[str, Any]) -> str:
    """What was switched off, as an addition to a sentence; empty where nothing was."""
    return f"; switched off of the target's generation_config: {in_words(off)}" if off else ""


def announce_sampling(target: Target, temperature: float) -> dict[str, Any]:
    """Log what computes where, and what `sampling` switches off of the target's own generation config, which is
    returned.
    """
    off = switched_off(target.model.generation_config, temperature)
    announce(target, off_in_words(off))
    return off


def in_words(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def until_end(tokens: list[int], end_tokens: Sequence[int]) -> list[int]:
    """An answer without the padding behind its end token."""
    return tokens[: next((at for at, token in enumerate(tokens) if token in end_tokens), len(tokens)) + 1]


class Backend(Protocol):
    """Writes answers.

    Attributes:
        concurrency: conversations that it is asked about at a time, independently of each other; 1 for one batch at a
            time.
    """

    @property
    def concurrency(self) -> int: ...

    def describe(self) -> dict[str, Any]:
        """What the answers depend on, as JSON; a resumed run must agree with it."""
        ...

    def generate(self, requests: Sequence[Request]) -> Sequence[Answer | DataError | None]:
        """An answer to each request, in order, or why this one cannot be answered, or None where nobody would read it
        and its conversation ends.
        """
        ...
