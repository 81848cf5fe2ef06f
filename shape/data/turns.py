"""The assistant turns of a chat in the text that its template makes, as the target wrote them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from shape.data.conversations import Conversation
from shape.errors import DataError
from shape.target.chat import THOUGHT, THOUGHT_END, Message, name_of, render, template_of

Span = tuple[int, int]
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Turn(NamedTuple):
    """A turn behind its prompt: text[start:end], the end token included."""

    text: str
    start: int
    end: int

    @property
    def learned(self) -> str:
        return self.text[: self.end]


class Specials(NamedTuple):
    """What a tokenizer has beside pieces of text.

    Attributes:
        texts: of special tokens, all of which can end a turn.
        lengths: of these in characters, each once, the largest first.
        added: (N,) int64, ids of all tokens that were added to the vocabulary, special or not.
    """

    texts: frozenset[str]
    lengths: tuple[int, ...]
    added: np.ndarray

    def behind(self, text: str) -> str:
        """The longest that a text ends with; an empty one if there is none."""
        return next((text[-length:] for length in self.lengths if text[-length:] in self.texts), "")

    def at(self, text: str, start: int) -> str:
        """The longest that a text goes on with there; an empty one if there is none."""
        found = (text[start : start + length] for length in self.lengths)
        return next((token for token in found if token in self.texts), "")


def learned_turns(conversation: Conversation) -> list[int]:
    """Numbers of the messages that are learned from."""
    return [number for number, m in enumerate(conversation.messages) if m.role == "assistant" and m.learned]


def answer_spans(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Span]]:
    """The text that ends with the last answer, and the character spans of the answers in it that are learned from."""
    turns = [turn_of(conversation, number, tokenizer) for number in learned_turns(conversation)]
    if not turns:
        return render(tokenizer, conversation.messages, template=conversation.template), []
    text = turns[-1].text
    return text, [(turn.start, turn.end) for turn in turns if text.startswith(turn.learned)]


def turn_of(conversation: Conversation, number: int, tokenizer: PreTrainedTokenizerBase) -> Turn:
    """The assistant turn of that number, where the text ends: only there is it sure to be as the target wrote it.

    Raises:
        DataError: there is no template, it refuses the messages, or it rewrites them beyond recognition.
    """
    messages, template = conversation.messages[: number + 1], conversation.template
    answer, specials = messages[-1], specials_of(tokenizer)
    tagged = THOUGHT_END in template_of(tokenizer, template)
    text = render(tokenizer, messages, template=template)
    shown = None  # what the template makes of the answer, behind the prompt
    try:
        prompt = render(tokenizer, messages[:-1], add_generation_prompt=True, template=template)
    except DataError:  # nothing was asked: the conversation begins with an answer
        pass
    else:
        start, shown = len(prompt), _behind(prompt, messages, text)
        text = text if shown is None else prompt + shown
        if not answer.finished and shown is not None and (length := _end_of_cut_answer(answer, shown)) is not None:
            return Turn(text[: start + length], start, start + length)
        if not answer.finished or (tagged and _loses_thought(answer, text)):
            token = specials.behind(text.rstrip()) or tokenizer.eos_token or ""
            text = prompt + _as_written(prompt, answer, tagged) + (token if answer.finished else "")
            return Turn(text, start, len(text))
    span = _marked_span(tokenizer, messages, text, template)
    if span is None and shown is not None:
        span = len(text) - len(shown), len(text)
    if span is None:
        span = _slot_span(tokenizer, messages, text, template)
    if span is None:
        raise DataError(
            f"the assistant turns of conversation {conversation.id} cannot be found in its rendering, because the chat "
            f"template of {name_of(tokenizer)} rewrites them; mark them in the template with "
            "{% generation %} ... {% endgeneration %}"
        )
    return Turn(text, span[0], _with_end(text, *span, answer.finished, specials))


def _behind(prompt: str, messages: Sequence[Message], text: str) -> str | None:
    """What a rendering has behind the prompt, or behind the same question and the start of an answer.

    Mistral's templates write the system message into the last turn only if that is a question: once it is answered, the
    text lacks what the target was told, and the prompt has it.
    """
    if text.startswith(prompt):
        return text[len(prompt) :]
    *others, answer = messages
    question = others[-1].content.strip() if others else ""
    at = prompt.rfind(question) if question else -1
    _, found, shown = text.rpartition(prompt[at:]) if at >= 0 else ("", "", text)
    return shown if found and shown.strip().startswith(answer.content.strip()) else None


def _end_of_cut_answer(answer: Message, shown: str) -> int | None:
    """Where an answer that was cut ends in `shown`, its rendering; None if the template has put words before it."""
    end = 0
    for part in (answer.reasoning, answer.content):
        at = next((at for part in (part, part.strip()) if (at := shown.find(part, end)) >= 0), None)
        if at is None or (part is answer.content and not answer.reasoning and shown[:at].strip()):
            return None
        end = at + (len(part) if shown.startswith(part, at) else len(part.strip()))
    return end


def _loses_thought(answer: Message, text: str) -> bool:
    """Whether the template leaves out the reasoning with which the target wrote its answer."""
    inline, end, _ = answer.content.partition(THOUGHT_END)
    thought = answer.reasoning or (inline.strip().removeprefix(THOUGHT) if end else "")
    return thought.strip() not in text


def _as_written(prompt: str, answer: Message, tagged: bool) -> str:
    """What the target wrote: its content, behind its reasoning if it puts that between tags (which the prompt may have
    opened).
    """
    text = answer.content
    if answer.reasoning and tagged:
        text = f"{THOUGHT}\n{answer.reasoning.strip()}" + (f"\n{THOUGHT_END}\n\n{text}" if text else "")
    if prompt.rstrip().endswith(THOUGHT):
        text = text.lstrip().removeprefix(THOUGHT).lstrip("\n")
    return text


def _marked_span(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], text: str, template: Mapping[str, Any]
) -> Span | None:
    """The last turn as the template itself marks it with `{% generation %}`."""
    source = template_of(tokenizer, template)
    if not _GENERATION_MARK.search(source):
        return None
    rendered: Any = render_jinja_template(
        conversations=[[message.chat for message in messages]],
        chat_template=source,
        return_assistant_tokens_mask=True,
        **cast(dict[str, Any], {**tokenizer.special_tokens_map, **template}),
    )
    texts, marks = rendered
    return tuple(marks[0][-1]) if texts[0] == text and marks[0] else None


def _slot_span(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], text: str, template: Mapping[str, Any]
) -> Span | None:
    """From the last turn's content on, found by rendering an unmistakable word in its place. What lies around it is the
    template's own text, so the true text must be that around the true content (as it is, or stripped).
    """
    word = "slot"
    while word in text:
        word += "q"
    *others, answer = messages
    before, found, after = render(tokenizer, [*others, replace(answer, content=word)], template=template).partition(
        word
    )
    fits = found and any(text == before + content + after for content in (answer.content, answer.content.strip()))
    return (len(before), len(text)) if fits else None


def specials_of(tokenizer: PreTrainedTokenizerBase) -> Specials:
    """The special tokens of a tokenizer, collected once: Gemma 3 has 6,000 added tokens."""
    return _specials_of(tokenizer, len(tokenizer), tuple(tokenizer.all_special_tokens))


@lru_cache(maxsize=8)
def _specials_of(tokenizer: PreTrainedTokenizerBase, size: int, named: tuple[str, ...]) -> Specials:
    del size  # part of the cache's key: tokenizers are compared by identity, and may be given more tokens
    added = tokenizer.added_tokens_decoder
    texts = frozenset({token.content for token in added.values() if token.special}.union(named) - {""})
    return Specials(texts, tuple(sorted(set(map(len, texts)), reverse=True)), np.array(list(added), dtype=np.int64))


def _with_end(text: str, start: int, end: int, finished: bool, specials: Specials) -> int:
    """The supervised end of a turn that is known to reach, with or without its end token, to `end`."""
    body = text[start:end].rstrip()
    content_end = start + len(body) - len(specials.behind(body))
    if not finished:
        return content_end
    after = content_end + len(text[content_end:]) - len(text[content_end:].lstrip())
    token = specials.at(text, after)
    return after + len(token) if token else content_end
