"""Conversations as token ids and the loss mask: the one place where either is derived."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from shape.data.conversations import Conversation, Tokens
from shape.data.turns import Span, Turn, answer_spans, learned_turns, specials_of, turn_of
from shape.errors import DataError
from shape.target.chat import first_tokens

_LETTERS = 8  # more than a token has in the mean


@dataclass  # not frozen: Lightning rebuilds what is in a batch where it casts it
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
    completion to the special token at its end, or else, and the end-of-text token behind it; of plain text everything
    but the tokenizer's first tokens, which rows without a template begin with once, whether they hold them or not. An
    answer with finished=False is supervised without its end token, which the target never wrote. What follows the last
    answer is left out. Known tokens (`Conversation.texts`) are taken as they are.

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
        ids, mask = _tokenise(tokenizer, *answer_spans(conversation, tokenizer))
    else:
        whole = "".join(message.content for message in messages)
        start, end, eos = len(whole) - len(messages[-1].content), len(whole), tokenizer.eos_token_id
        completed = conversation.kind == "completion" and messages[-1].finished
        if completed and specials_of(tokenizer).behind(whole[start:].rstrip()):  # by its own end token
            end, completed = len(whole.rstrip()), False
        ids, mask = _tokenise(tokenizer, whole, [(start, end)])
        first = first_tokens(tokenizer)
        if ids[: len(first)] == first:  # as text that a chat template has made
            ids, mask = ids[len(first) :], mask[len(first) :]
        ids, mask = [*first, *ids], [False for _ in first] + mask
        if completed and eos is not None:
            ids, mask = [*ids, eos], [*mask, True]
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
    except DataError as error:
        if not skip_bad_rows:
            raise DataError(f"conversation {conversation.id}: {error}") from None
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
    encoded = [
        encode_row(part, tokenizer, max_length, skip_bad_rows)
        for conversation in conversations
        for part in split_by_template(conversation, tokenizer, max_length)
    ]
    examples = [each for each in encoded if each.loss_mask.any()]
    if not examples:
        raise DataError(
            f"none of the {len(encoded)} conversations has a supervised token within {max_length} tokens; "
            "raise max_length or give conversations with shorter prompts"
        )
    return EncodedSet(examples, sum(each.truncated for each in examples), len(encoded) - len(examples))


def supervised_runs(loss_mask: Tensor) -> list[tuple[int, int]]:
    """Positions of the first and the last token of each answer, as far as a mask (T,) tells them apart."""
    edges = F.pad(loss_mask.int(), (1, 1)).diff()
    return list(zip((edges == 1).nonzero()[:, 0].tolist(), ((edges == -1).nonzero()[:, 0] - 1).tolist(), strict=True))


def texts_of_turns(turns: Iterable[tuple[Sequence[int], Sequence[int]]]) -> tuple[Tokens, ...]:
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


def split_by_template(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, max_length: int | None = None
) -> list[Conversation]:
    """What `encode` takes: a conversation of one text, or several where the chat template rewrites earlier turns (drops
    their reasoning, say), each with the turns that are learned from in it.

    A conversation that the template refuses stays as it is, for `encode` to say so.

    Args:
        max_length: of a very long dialogue, turns whose prompt alone is longer are left out, as each would be rendered
            and encoded with all before it; None keeps all.
    """
    if conversation.texts:
        return [replace(conversation, texts=(text,)) for text in conversation.texts]
    messages, left, found = conversation.messages, learned_turns(conversation), []
    if conversation.kind != "chat" or len(left) < 2:
        return [conversation]
    turns: dict[int, Turn] = {}
    try:
        for number in left:
            turn = turn_of(conversation, number, tokenizer)
            if turns and max_length is not None and _is_behind(turn, tokenizer, max_length):
                break
            turns[number] = turn
    except DataError:
        return [conversation]
    whole, left = len(turns) == len(left), list(turns)
    while left:
        last = turns[left[-1]].text
        inside = [number for number in left if last.startswith(turns[number].learned)]
        found.append((left[-1], inside))
        left = [number for number in left if number not in inside]
    if whole and len(found) == 1:
        return [conversation]
    return [
        replace(
            conversation,
            messages=tuple(replace(m, learned=number in inside) for number, m in enumerate(messages[: last + 1])),
        )
        for last, inside in reversed(found)
    ]


def _is_behind(turn: Turn, tokenizer: PreTrainedTokenizerBase, max_length: int) -> bool:
    """Whether so many tokens precede an answer; only a very long prompt is looked into."""
    if turn.start <= _LETTERS * max_length:
        return False
    return len(tokenizer(turn.text[: turn.start], add_special_tokens=False).input_ids) >= max_length


def _tokenise(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[Span]) -> tuple[list[int], list[bool]]:
    """Token ids of `text` and which of them lie in `spans`."""
    if not tokenizer.is_fast:  # no offsets: cut at every boundary
        edges = sorted({0, len(text), *chain.from_iterable(spans)})
        pieces = [tokenizer(text[start:end], add_special_tokens=False).input_ids for start, end in pairwise(edges)]
        marks = [any(first <= start < last for first, last in spans) for start in edges[:-1]]
        ids = list(chain.from_iterable(pieces))
        return ids, [mark for piece, mark in zip(pieces, marks, strict=True) for _ in piece]
    found, starts, stops = _offsets(tokenizer, text, 0)
    cuts = [start for start, _ in spans if np.any((starts < start) & (start < stops))]
    if cuts:
        edges = [0, *cuts, len(text)]
        parts = [_offsets(tokenizer, text[a:b], a) for a, b in pairwise(edges)]
        found, starts, stops = (np.concatenate(column) for column in zip(*parts, strict=True))
    added = specials_of(tokenizer).added
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
