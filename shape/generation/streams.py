"""What is decoded, while it is decoded: iterators over token ids or text, for a loop or an event loop."""

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from transformers import TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from shape.errors import UnsupportedGeneration

T = TypeVar("T")


def ids(steps: Iterable[tuple[int, list[int]]]) -> Generator[list[int], None, None]:
    """The token ids of a single sequence, step by step."""
    for _, tokens in steps:
        yield tokens


def text(tokens: Iterable[list[int]], tokenizer: Any) -> Generator[str, None, None]:
    """The text of token ids without special tokens, in pieces that later tokens cannot change.

    What can be shown is for transformers' TextStreamer to say: whole words, finished lines and CJK characters.
    """
    words = TextIteratorStreamer(tokenizer, skip_special_tokens=True)

    def ready() -> Iterator[str]:  # without empty texts, and without the sign that no more will come
        held = words.text_queue
        return filter(None, [held.get() for _ in range(held.qsize())])

    for new in tokens:
        words.put(torch.tensor(new))
        yield from ready()
    words.end()
    yield from ready()


async def in_threads(pieces: Iterator[T]) -> AsyncGenerator[T, None]:
    """An iterator as an asynchronous one, each step of it in a worker thread, in order, and only when asked for.

    A task that is cancelled leaves at most the step under way, which the thread finishes.
    """
    done: Any = object()  # StopIteration cannot pass through a future
    while (piece := await asyncio.to_thread(next, pieces, done)) is not done:
        yield piece


@contextmanager
def ended(streamer: BaseStreamer | None) -> Iterator[None]:
    """Ends a streamer, whether what it follows ends well or not: another thread may wait for more.

    Raises:
        UnsupportedGeneration: it is none.
    """
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise UnsupportedGeneration(f"streamer is {streamer!r}; give one of transformers', with put and end")
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()
