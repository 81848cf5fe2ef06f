"""Conversations as token ids and the loss mask: the one place where either is derived."""

import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from shape.data.conversations import Conversation, Tokens
from shape.errors import DataError
from shape.target.chat import Message, first_tokens, name_of, render, template_of

Span = tuple[int, int]
_THOUGHT, _THOUGHT_END = "<think>", "</think>"
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Encoded:
    """A conversation as tokens: input_ids (T,) int64 and loss_mask (T,) bool, True on supervised tokens."""

    id: str
    input_ids: Tensor
    loss_mask: Tensor
    truncated: bool = False


@dataclass(frozen=True)
class EncodedSet:
    """What `encode_all` kept, how many of these were cut at `max_length`, and how many were dropped."""

    examples: list[Encoded]
    truncated: int
    dropped: int


def encode(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Encoded:
    """Tokens and loss mask of a conversation of one text.

    Supervised are, of each assistant turn, the tokens from the first one after the generation prompt to the
    end-of-turn token inclusive (not the newline that templates put after it); of prompt + completion rows the
    completion and the end-of-text token; of plain text everything but the first token. An answer with finished=False
    is supervised without its end token, which the target never wrote. What follows the last answer is left out. Known
    tokens (`Conversation.texts`) are taken as they are.

    The text is tokenised as a whole and turns are found by character offsets, so the tokens are those of the full
    text; only where a token would join the generation prompt and the answer is the text cut there, because decoding
    never sees such a token. Cut at `max_length` tokens; the mask may come out all False.

    Raises:
        DataError: a chat without a chat template, or a template that cannot be followed.
    """
    messages = conversation.messages
    ids: Sequence[int]
    mask: Sequence[int]
    if conversation.texts:
        (text,) = conversation.texts
        ids, mask = text.input_ids, list(text.loss_mask)
    elif conversation.kind == "chat":
        ids, mask = _tokenise(tokenizer, *_chat_spans(conversation, tokenizer))
    else:
        whole = "".join(message.content for message in messages)
        ids, mask = _tokenise(tokenizer, whole, [(len(whole) - len(messages[-1].content), len(whole))])
        first = first_tokens(tokenizer)
        ids, mask = [*first, *ids], [False for _ in first] + mask
        if conversation.kind == "completion" and messages[-1].finished and tokenizer.eos_token_id is not None:
            ids, mask = [*ids, tokenizer.eos_token_id], [*mask, True]
    input_ids, loss_mask = torch.tensor(ids, dtype=torch.int64), torch.tensor(mask, dtype=torch.bool)
    loss_mask[:1] = False  # nothing predicts the first token
    truncated = max_length is not None and len(ids) > max_length
    return Encoded(conversation.id, input_ids[:max_length], loss_mask[:max_length], truncated)


def encode_row(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, max_length: int | None, skip_bad_rows: bool
) -> Encoded:
    """`encode`, where with `skip_bad_rows` a chat that the template refuses becomes an empty text."""
    try:
        return encode(conversation, tokenizer, max_length)
    except DataError:
        if not skip_bad_rows:
            raise
        return Encoded(conversation.id, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool))


def encode_all(
    conversations: Iterable[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    *,
    skip_bad_rows: bool = False,
) -> EncodedSet:
    """`encode` each conversation; those without any supervised token are dropped and counted.

    Args:
        skip_bad_rows: also drop and count those that the chat template refuses, instead of raising.

    Raises:
        DataError: nothing is left.
    """
    parts = chain.from_iterable(unfolded(conversations, tokenizer))
    encoded = [encode_row(part, tokenizer, max_length, skip_bad_rows) for part in parts]
    examples = [each for each in encoded if each.loss_mask.any()]
    if not examples:
        raise DataError(
            f"none of the {len(encoded)} conversations has a supervised token within {max_length} tokens; "
            "raise max_length or give conversations with shorter prompts"
        )
    return EncodedSet(examples, sum(each.truncated for each in examples), len(encoded) - len(examples))


def joined(turns: Iterable[tuple[Sequence[int], Sequence[int]]]) -> tuple[Tokens, ...]:
    """Texts to learn from, of a dialogue's (prompt, answer), both token ids: one where each prompt continues the answer
    before it, and another one wherever the template rewrites earlier turns.
    """
    texts: list[Tokens] = []
    for prompt, answer in turns:
        mask = bytes(len(prompt))
        if texts and list(prompt[: len(texts[-1].input_ids)]) == texts[-1].input_ids.tolist():
            known = texts.pop().loss_mask
            mask = known + mask[len(known) :]
        texts.append(Tokens(array("i", [*prompt, *answer]), mask + bytes([1] * len(answer))))
    return tuple(texts)


def unfolded(conversations: Iterable[Conversation], tokenizer: PreTrainedTokenizerBase) -> list[list[Conversation]]:
    """For each conversation what `encode` takes: one of one text, or several where the chat template rewrites earlier
    turns (drops their reasoning, say), each with the turns that are learned from in it.

    A conversation that the template refuses stays as it is, for `encode` to say so.
    """
    return [_unfolded(conversation, tokenizer) for conversation in conversations]


def _unfolded(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> list[Conversation]:
    if conversation.texts:
        return [replace(conversation, texts=(text,)) for text in conversation.texts]
    messages, found = conversation.messages, []
    left = [number for number, m in enumerate(messages) if m.role == "assistant" and m.learned]
    if conversation.kind != "chat" or len(left) < 2:
        return [conversation]
    try:
        turns = {number: _written(conversation, number, tokenizer) for number in left}
    except DataError:
        return [conversation]
    while left:
        last = turns[left[-1]].text
        inside = [number for number in left if last.startswith(turns[number].learned)]
        found.append((left[-1], inside))
        left = [number for number in left if number not in inside]
    if len(found) == 1:
        return [conversation]
    return [
        replace(
            conversation,
            messages=tuple(replace(m, learned=number in inside) for number, m in enumerate(messages[: last + 1])),
        )
        for last, inside in reversed(found)
    ]


# Turns of a chat -------------------------------------------------------------------------------------


class _Written(NamedTuple):
    """A turn as the target wrote it behind its prompt: text[start:end], the end token included."""

    text: str
    start: int
    end: int

    @property
    def learned(self) -> str:
        return self.text[: self.end]


def _chat_spans(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Span]]:
    """The text that ends with the last answer, and the character spans of the answers in it that are learned from."""
    messages = conversation.messages
    answers = [number for number, m in enumerate(messages) if m.role == "assistant" and m.learned]
    if not answers:
        return render(tokenizer, messages, template=conversation.template), []
    turns = [_written(conversation, number, tokenizer) for number in answers]
    text = turns[-1].text
    return text, [(turn.start, turn.end) for turn in turns if text.startswith(turn.learned)]


def _written(conversation: Conversation, number: int, tokenizer: PreTrainedTokenizerBase) -> _Written:
    """The assistant turn of that number, where the text ends: only there is it sure to be as the target wrote it."""
    messages, template = conversation.messages[: number + 1], conversation.template
    answer, ends = messages[-1], _end_tokens(tokenizer)
    tagged = _THOUGHT_END in template_of(tokenizer, template)
    text = render(tokenizer, messages, template=template)
    try:
        prompt = render(tokenizer, messages[:-1], add_generation_prompt=True, template=template)
    except DataError:  # nothing was asked: the conversation begins with an answer
        prompt = None
    start = None if prompt is None else len(prompt)
    if prompt is not None and start is not None:
        shown = text[start:] if text.startswith(prompt) else None
        if not answer.finished and shown is not None and (length := _said(answer, shown)) is not None:
            return _Written(text[: start + length], start, start + length)
        if not answer.finished or (tagged and _loses_thought(answer, text)):
            token = next((token for token in ends if text.rstrip().endswith(token)), tokenizer.eos_token or "")
            text = prompt + _behind(prompt, answer, tagged) + (token if answer.finished else "")
            return _Written(text, start, len(text))
        if shown is None:
            start = None
    span = _marked_span(tokenizer, messages, text, template)
    if span is None and start is not None:
        span = start, len(text)
    if span is None:
        span = _slot_span(tokenizer, messages, text, template)
    if span is None:
        raise DataError(
            f"the assistant turns of conversation {conversation.id} cannot be found in its rendering, because the chat "
            f"template of {name_of(tokenizer)} rewrites them; mark them in the template with "
            "{% generation %} ... {% endgeneration %}"
        )
    return _Written(text, span[0], _with_end(text, *span, answer.finished, ends))


def _said(answer: Message, shown: str) -> int | None:
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
    inline, end, _ = answer.content.partition(_THOUGHT_END)
    thought = answer.reasoning or (inline.strip().removeprefix(_THOUGHT) if end else "")
    return thought.strip() not in text


def _behind(prompt: str, answer: Message, tagged: bool) -> str:
    """What the target wrote: its content, behind its reasoning if it puts that between tags (which the prompt may have
    opened).
    """
    text = answer.content
    if answer.reasoning and tagged:
        text = f"{_THOUGHT}\n{answer.reasoning.strip()}" + (f"\n{_THOUGHT_END}\n\n{text}" if text else "")
    if prompt.rstrip().endswith(_THOUGHT):
        text = text.lstrip().removeprefix(_THOUGHT).lstrip("\n")
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


def _end_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Texts of tokens that can end a turn: special ones, longest first."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True))


def _with_end(text: str, start: int, end: int, finished: bool, ends: tuple[str, ...]) -> int:
    """The supervised end of a turn that is known to reach, with or without its end token, to `end`."""
    body = text[start:end].rstrip()
    token = next((token for token in ends if body.endswith(token)), "")
    content_end = start + len(body) - len(token)
    if not finished:
        return content_end
    after = content_end + len(text[content_end:]) - len(text[content_end:].lstrip())
    return next((after + len(token) for token in ends if text.startswith(token, after)), content_end)


def _tokenise(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[Span]) -> tuple[list[int], list[bool]]:
    """Token ids of `text` and which of them lie in `spans`."""
    if not tokenizer.is_fast:  # no offsets: cut at every boundary
        edges = sorted({0, len(text), *(edge for span in spans for edge in span)})
        ids: list[int] = []
        mask: list[bool] = []
        for start, end in pairwise(edges):
            piece = tokenizer(text[start:end], add_special_tokens=False).input_ids
            ids += piece
            mask += [any(first <= start < last for first, last in spans)] * len(piece)
        return ids, mask
    found, starts, stops = _offsets(tokenizer, text, 0)
    cuts = [start for start, _ in spans if np.any((starts < start) & (start < stops))]
    if cuts:
        edges = [0, *cuts, len(text)]
        parts = [_offsets(tokenizer, text[a:b], a) for a, b in pairwise(edges)]
        found, starts, stops = (np.concatenate(column) for column in zip(*parts, strict=True))
    added = list(tokenizer.added_tokens_decoder)
    anew = starts[np.isin(found, added)]  # where reading begins anew
    for start, _ in spans:
        blank = len(text[:start].rstrip())
        # Some tokenizers read a run of blanks otherwise where words follow, and in decoding none do.
        if start - blank > 1:
            first = anew[anew <= blank].max(initial=0)
            prompt = _offsets(tokenizer, text[first:start], first)
            low, high, after = np.searchsorted(starts, [first, blank + 1, start])
            same = np.intersect1d(starts[low:high], prompt[1]).max(initial=first)
            before, tail = low + np.searchsorted(starts[low:high], same), np.searchsorted(prompt[1], same)
            found, starts, stops = (
                np.concatenate([now[:before], own[tail:], now[after:]])
                for now, own in zip((found, starts, stops), prompt, strict=True)
            )
    special = np.isin(found, added)  # may swallow the whitespace behind it
    inside = np.zeros(len(found), dtype=bool)
    for start, end in spans:
        inside |= (starts >= start) & (starts < end) & ((stops <= end) | special)
    return found.tolist(), inside.tolist()


def _offsets(tokenizer: PreTrainedTokenizerBase, text: str, shift: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, first character, end character), each (T,), of the tokens of `text`.

    Byte-level tokenizers report words without their leading space; here a gap belongs to the token after it,
    so that tokens tile the text (those of one character share its span).
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    reached = np.concatenate([[0], np.maximum.accumulate(offsets[:, 1])[:-1]])[: len(offsets)]
    ids = np.array(encoded["input_ids"], dtype=np.int64)
    return ids, np.minimum(offsets[:, 0], reached) + shift, offsets[:, 1] + shift
