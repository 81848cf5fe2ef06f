"""How far the prompts and answers of a measurement are from the text that was trained on.

Acceptance on text like the training text says little about other text, so a table says how like it was: the share of
4-grams of words that occur in the training text, and of the user's whole turns that occur there once names and numbers
are masked. Words are runs of letters and digits, and single other signs, in small letters.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shape.data.conversations import Conversation
from shape.evaluation.estimates import Sums

_LENGTH = 4
_WORD = re.compile(r"\w+|[^\w\s]")
_NUMBER = re.compile(r"\d+")
_NAME = re.compile(r"(?<=[^.!?:\s])(\s+)[A-Z]\w*")  # a capital that begins no sentence
Exchange = Sequence[str]  # what the user said, and the answer


@dataclass(frozen=True)
class Overlap(Sums):
    """Sums over turns: 4-grams of what the user said and of the answers, turns, and of each how many were seen."""

    prompt_grams: Any = 0
    prompt_grams_seen: Any = 0
    answer_grams: Any = 0
    answer_grams_seen: Any = 0
    turns: Any = 0
    turns_seen: Any = 0


def overlaps(records: Sequence[Sequence[Exchange]], training: Iterable[Conversation]) -> list[Overlap]:
    """Of each record. The training text is read once, and of it only what the records ask for is kept."""
    wanted = {gram for exchanges in records for exchange in exchanges for text in exchange for gram in grams(text)}
    turns = {masked(said) for exchanges in records for said, _ in exchanges}
    seen_grams, seen_turns = set[tuple[str, ...]](), set[str]()
    for conversation in training:
        for message in conversation.messages:
            seen_grams |= wanted.intersection(grams(message.content))
            if (turn := masked(message.content)) in turns:
                seen_turns.add(turn)

    def one(said: str, answer: str) -> Overlap:
        asked, answered = list(grams(said)), list(grams(answer))
        seen = [sum(gram in seen_grams for gram in some) for some in (asked, answered)]
        return Overlap(len(asked), seen[0], len(answered), seen[1], 1, int(masked(said) in seen_turns))

    return [Overlap.total([one(*exchange) for exchange in exchanges]) for exchanges in records]


def grams(text: str) -> Iterator[tuple[str, ...]]:
    """Every four words in a row; of a shorter text all of it."""
    words = _WORD.findall(text.lower())
    for start in range(max(1, len(words) - _LENGTH + 1) if words else 0):
        yield tuple(words[start : start + _LENGTH])


def masked(text: str) -> str:
    """A turn without its numbers, and without the names that do not begin a sentence."""
    return " ".join(_WORD.findall(_NUMBER.sub("0", _NAME.sub(r"\1_", text)).lower()))
