"""What tests of regeneration share: a backend that needs no target, and conversations to answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shape.data.backends import Answer, Request
from shape.data.conversations import Conversation
from shape.data.reading import load_conversations
from shape.errors import DataError
from shape.target.chat import Message


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


def asking(identity: str, *questions: str) -> Conversation:
    """Questions with answers of somebody else between them."""
    turns = [m for q in questions for m in (Message("user", q), Message("assistant", "somebody else's"))]
    return Conversation(identity, tuple(turns))


def many(count: int) -> list[Conversation]:
    return [asking(f"id-{i}", *(f"question {i} {'x' * (i * 7 % 23)}" for _ in range(1 + i % 3))) for i in range(count)]


def written(path) -> dict[str, list[str]]:
    return {c.id: [m.content for m in c.messages] for c in load_conversations(path)}
