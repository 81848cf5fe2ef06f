"""What a pack did not know: look-ups of which nothing, or something else, came true. Logged while decoding."""

import json
import os
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from shape.drafters.base import common_length
from shape.drafters.recipes.pack import Counts, recipes_of
from shape.errors import CheckpointError, ConfigError
from shape.files import reading, typed


class Miss(NamedTuple):
    """A line of the log.

    Attributes:
        prefix: the last tokens before it.
        tokens: what the target then wrote, until the next look-up.
        wrong: what the pack said instead, and verification refused; empty where it said nothing.
    """

    prefix: list[int]
    tokens: list[int]
    wrong: list[int]


def miss_of(text: Sequence[int], start: int, found: Sequence[Sequence[int]], prefix: int) -> Miss | None:
    """What a look-up behind ``text[:start]`` missed, as far as the text has come; None where what it found came true.

    Args:
        found: continuations, of which the one that came furthest counts.
        prefix: tokens that are looked up.
    """
    new = text[start:]
    said = max(found, key=lambda tokens: common_length(tokens, new), default=())
    right = common_length(said, new)
    at = start + right
    if at < prefix or right == len(new) or 0 < len(said) == right:
        return None
    return Miss(list(text[at - prefix : at]), list(text[at:]), list(said[right:]))


def open_log(path: Path) -> None:
    """Check now that misses can be written there, rather than find out in the middle of a text that they cannot.

    Raises:
        ConfigError: they cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            if file.tell() and (file.seek(-1, os.SEEK_END), file.read())[1] != b"\n":
                file.write(b"\n")  # behind a line that was cut off
    except OSError as error:
        raise ConfigError(f"misses cannot be written to {path} ({error}); give another file") from error


def write_misses(path: Path, misses: Sequence[Miss]) -> None:
    """Add them to the log; where that fails, say so and go on: the answer is worth more."""
    if not misses:
        return
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(miss._asdict())}\n" for miss in misses)
    except OSError as error:
        warnings.warn(f"misses cannot be written to {path} ({error}); some are lost", stacklevel=2)


def read_misses(path: str | Path) -> list[Miss]:
    """All but a line that was cut off. Raises CheckpointError: no such log."""
    with reading(f"log {path}", CheckpointError, "give one that RecipeDrafter wrote"):
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line and (line[0] != "{" or line[-1] == "}")]
        parts = ([row["prefix"], row["tokens"], row.get("wrong", [])] for row in rows)  # older logs have no wrong ones
        return [Miss(*typed(list[list[int]], part)) for part in parts]


def recipes_of_misses(misses: Sequence[Miss], prefix: int, depth: int) -> Counts:
    """Recipes for what was missed at least twice: of each miss the beginning that another one has too."""
    return recipes_of(_repeated([[*miss.prefix, *miss.tokens] for miss in misses], prefix), prefix, depth)


def _repeated(texts: list[list[int]], prefix: int) -> Iterator[list[int]]:
    ordered = sorted(texts)
    shared = [0, *(common_length(one, other) for one, other in pairwise(ordered)), 0]
    for text, before, after in zip(ordered, shared, shared[1:], strict=False):
        if max(before, after) > prefix:
            yield text[: max(before, after)]
