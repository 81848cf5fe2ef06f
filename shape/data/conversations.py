"""What data sets hold: conversations to learn from, and prompts to answer."""

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, Literal, TypeVar

from shape.target.chat import Message

Kind = Literal["chat", "completion", "text", "tokens"]
Item = TypeVar("Item")
_PLASTIC = 0.5698402909980532  # 1 / p^2 with p^3 = p + 1: its multiples spread evenly, and follow no short period
_SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}  # ShareGPT's names of roles


@dataclass(frozen=True)
class Tokens:
    """A text as the target read and wrote it.

    Attributes:
        input_ids: (T,) int32.
        loss_mask: (T,), 1 for each token that is learned from, else 0.
    """

    input_ids: array
    loss_mask: bytes


@dataclass(frozen=True)
class Conversation:
    """One row of data.

    kind "chat": messages go through the target's chat template. "completion": a user and an assistant message that
    are joined as they are. "text": one assistant message, plain text. "tokens": no messages, token ids alone.

    Attributes:
        template: what the chat template is given beside the messages: `tools`, `enable_thinking`, ...
        texts: the tokens to learn from, where they are known; otherwise they are made of the messages.
    """

    id: str
    messages: tuple[Message, ...]
    kind: Kind = "chat"
    template: Mapping[str, Any] = field(default_factory=dict, repr=False)
    texts: tuple[Tokens, ...] = field(default=(), repr=False)

    @property
    def asks(self) -> bool:
        """Whether there is a prompt that can be answered anew."""
        return self.kind in ("chat", "completion")

    def to_row(self) -> dict[str, Any]:
        """The row (ShareGPT form for chats) that `load_conversations` reads back as this conversation."""
        row: dict[str, Any] = {"id": self.id}
        cut = {} if not self.messages or self.messages[-1].finished else {"finished": False}
        if self.kind == "text":
            row |= {"text": self.messages[0].content, **cut}
        elif self.kind == "completion":
            prompt, completion = self.messages
            row |= {"prompt": prompt.content, "completion": completion.content, **cut}
        elif self.kind == "chat":
            row |= {"conversations": [_sharegpt(message) for message in self.messages]}
        if self.template:
            row |= {"chat_template_kwargs": dict(self.template)}
        if self.texts:
            ids, masks = [list(text.input_ids) for text in self.texts], [list(text.loss_mask) for text in self.texts]
            several = len(self.texts) > 1
            row |= {"input_ids": ids if several else ids[0], "loss_mask": masks if several else masks[0]}
        return row


@dataclass(frozen=True)
class Checks:
    """Tests of code as in HumanEval (arXiv 2107.03374): `test` defines check(candidate) for a function's name."""

    test: str
    entry_point: str


@dataclass(frozen=True)
class Prompt:
    """A benchmark prompt.

    Attributes:
        turns: what the user says, one after the other, each after an answer.
        messages: what the first answer follows; the last one is turns[0].
        template: what the chat template is given beside the messages.
        references: known answers to the turns, in their order, as far as there are any.
        checks: for code, its tests.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    messages: tuple[Message, ...]
    template: Mapping[str, Any] = field(default_factory=dict, repr=False)
    # Not in repr, which identifies a set of prompts in measurements of speed.
    references: tuple[str, ...] = field(default=(), repr=False)
    checks: Checks | None = field(default=None, repr=False)

    @property
    def opening(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them."""
        return [message.chat for message in self.messages]


def fingerprint(conversations: Iterable[Conversation]) -> str:
    """SHA-256 (hex) over the conversations, in order; empty fields leave no trace in it."""
    digest = hashlib.sha256()
    for conversation in conversations:
        turns = [
            [m.role, m.content, m.finished, *([m.more] if m.more else []), *([] if m.learned else [0])]
            for m in conversation.messages
        ]
        more = [conversation.template] if conversation.template else []
        digest.update(json.dumps([conversation.id, conversation.kind, turns, *more]).encode() + b"\n")
        for text in conversation.texts:
            digest.update(text.input_ids.tobytes() + b"\n" + text.loss_mask + b"\n")
    return digest.hexdigest()


def evenly(items: Sequence[Item], count: int | None) -> list[Item]:
    """At most `count` items, or all, in order: one of each of `count` stretches of equal length.

    The places within the stretches follow an irrational step: with a fixed place, data whose kinds take turns, as in
    those that ship, would give some kinds only.
    """
    count = len(items) if count is None else min(count, len(items))
    edges = [index * len(items) // count for index in range(count + 1)] if count else []
    return [
        items[start + int(index * _PLASTIC % 1 * (end - start))] for index, (start, end) in enumerate(pairwise(edges))
    ]


def evenly_by_category(prompts: Sequence[Prompt], count: int | None) -> list[Prompt]:
    """At most `count` prompts, or all, in order: of every category its share, spread evenly over it."""
    places: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        places.setdefault(prompt.category, []).append(place)
    return [prompts[place] for place in sorted(evenly(list(chain.from_iterable(places.values())), count))]


def _sharegpt(message: Message) -> dict[str, Any]:
    row = {"from": _SPEAKERS[message.role], "value": message.content, **message.more}
    return row | ({} if message.finished else {"finished": False}) | ({} if message.learned else {"weight": 0})
