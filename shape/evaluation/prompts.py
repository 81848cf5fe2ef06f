"""Which prompts a measurement asks: one convention for all of them."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shape import bundled
from shape.data.conversations import Prompt, evenly_by_category
from shape.data.reading import load_prompts
from shape.errors import ConfigError, DataError
from shape.target.model import Target

SUITES = ("bench", "kinds")


def chosen_prompts(
    given: str | Path | Sequence[str] | None, limit: int | None = None, template: Mapping[str, Any] | None = None
) -> tuple[list[Prompt], str]:
    """The prompts of a source, or so many of them, spread evenly over it and of every category its share; of several
    sources one after the other.

    Args:
        given: the name of a suite that ships, also beside a folder of that name (./bench is the folder), or what
            `load_prompts` takes; None is the bench split. Or several of these.
        limit: at most so many of each; None is all.
        template: given to the chat template with every prompt.

    Returns:
        The prompts in their order, and what results call their source, with + between several.

    Raises:
        ConfigError: a limit below 1. DataError: the source cannot be read.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit {limit} leaves no prompt; give at least 1")
    if isinstance(given, Sequence) and not isinstance(given, str):
        suites = [chosen_prompts(one, limit, template) for one in given]
        return [prompt for prompts, _ in suites for prompt in prompts], "+".join(name for _, name in suites)
    given = given or SUITES[0]
    source = bundled.path("data", f"{given}.jsonl") if given in SUITES else given
    return evenly_by_category(load_prompts(source, template), limit), Path(source).name


def refuse_shared_ids(prompts: Sequence[Prompt], source: str) -> None:
    """Measurements know a prompt by its id. Raises DataError, naming the source and an id that two prompts share."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise DataError(f"{source}: two prompts share the id {prompt.id}; give every prompt its own")
        seen.add(prompt.id)


def that_fit(target: Target, prompts: Sequence[Prompt], new_tokens: int) -> list[tuple[Prompt, list[int]]]:
    """The prompts that leave room for so many new tokens in the target's positions, with the token ids of each."""
    room = (target.max_positions or sys.maxsize) - new_tokens
    encoded = ((prompt, target.encode(prompt.opening, prompt.template)[0].tolist()) for prompt in prompts)
    return [(prompt, ids) for prompt, ids in encoded if len(ids) <= room]


def refuse_unfilled(batch_size: int, count: int, source: str) -> None:
    """Raises DataError where so many prompts of a source fill no batch."""
    if count < batch_size:
        raise DataError(
            f"batch_size {batch_size} cannot be filled with the {count} prompts of {source}; give more, or a smaller "
            "batch_size"
        )
