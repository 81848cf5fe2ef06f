"""What tests of data share: conversations, texts that are easily misread, and a backend that needs no target."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from shape.data.backends import Answer, Request
from shape.data.conversations import Conversation
from shape.data.reading import load_conversations
from shape.errors import DataError
from shape.target.chat import Message

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
contents = st.lists(
    st.one_of(
        st.sampled_from(["\n", " ", "hello", "é😀", IM_END, f"{IM_START}assistant\n", "slot0z", "\u2028", "\t"]),
        st.text(max_size=6),
    ),
    max_size=5,
).map("".join)
turns = st.lists(st.builds(Message, st.sampled_from(["system", "user", "assistant"]), contents), min_size=1, max_size=6)


def chat(*texts: str) -> Conversation:
    """The user begins."""
    roles = ("user", "assistant")
    return Conversation("c", tuple(Message(roles[i % 2], text) for i, text in enumerate(texts)))


@dataclass
class Echo:
    """A backend whose answers tell what was asked; "cut" is cut and "long" cannot be answered."""

    name: str = "echo"
    batches: list[list[Request]] = field(default_factory=list)
    concurrency: int = 1

    def describe(self) -> dict[str, Any]:
        return {"name": self.name}

    def generate(self, requests: Sequence[Request]) -> list[Answer | DataError]:
        self.batches.append(list(requests))
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Answer | DataError:
        history = request.prompt if isinstance(request.prompt, tuple) else (Message("user", request.prompt),)
        last = history[-1].content
        if last == "long":
            return DataError("too long")
        return Answer(f"{len(history)}:{last}:{request.sampled}:{request.seed}", last != "cut")


def conversation_of(identity: str, *questions: str) -> Conversation:
    """Questions with answers of somebody else between them."""
    turns = [m for q in questions for m in (Message("user", q), Message("assistant", "somebody else's"))]
    return Conversation(identity, tuple(turns))


def many(count: int) -> list[Conversation]:
    """Of one to three turns."""
    questions = ([f"question {i} {'x' * (i * 7 % 23)}"] * (1 + i % 3) for i in range(count))
    return [conversation_of(f"id-{i}", *each) for i, each in enumerate(questions)]


def messages_by_id(path) -> dict[str, list[str]]:
    return {c.id: [m.content for m in c.messages] for c in load_conversations(path)}
