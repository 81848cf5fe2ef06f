"""The ways of decoding that are measured against each other, described for the record."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from shape.data.conversations import Prompt
from shape.drafters import Drafter
from shape.evaluation.results import AUTOREGRESSIVE
from shape.generation.rules import Rule
from shape.target.model import Target


@dataclass(frozen=True)
class Configured:
    """A drafter that is decoded with otherwise than by default.

    Attributes:
        acceptance: a rule other than "match".
        whole: it drafts in every step and is verified whole, so that its acceptance length depends on no clock.
    """

    drafter: Drafter | None
    acceptance: Rule | None = None
    whole: bool = False


@dataclass(frozen=True)
class Assisted:
    """transformers' own assisted generation, with a smaller model."""

    model: Target


# transformers' `generate`, by itself or with its prompt lookup.
TransformersMethod = Literal["transformers", "transformers-lookup"]
LOOKUP: TransformersMethod = "transformers-lookup"
ASSISTED = "transformers-assisted"  # with each predictor that is a smaller model
Method = Drafter | Configured | Assisted | TransformersMethod | None  # None is our loop without a drafter


def describe(method: Method, beside: torch.device | None = None) -> str:
    """What a method is, in words that change when its settings or weights do, or its device is not the given one."""
    if isinstance(method, Configured):
        whole = ", drafts verified whole" if method.whole else ""
        rule = "" if method.acceptance is None else f", acceptance {method.acceptance}"
        return f"{describe(method.drafter, beside)}{whole}{rule}"
    if method is None or isinstance(method, str):
        return method or AUTOREGRESSIVE
    if isinstance(method, Assisted):
        return f"transformers, assisted by {method.model!r}"
    return method.describe(beside)


def target_settings(target: Target) -> dict[str, Any]:
    """What a record of a measurement says of its target."""
    return {
        # Not where it lies: a moved folder is the same target.
        "target": Path(target.name).name if Path(target.name).exists() else target.name,
        "target_identity": replace(target.identity, name="").to_dict(),
        "parameters": target.model.num_parameters(),
        "dtype": target.precision,
    }


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """A hash that tells whether two measurements used the same prompts."""
    asked = repr(list(prompts))
    more = [(prompt.template, [message.more for message in prompt.messages]) for prompt in prompts]
    if any(template or any(messages) for template, messages in more):  # the others keep the hash that they always had
        asked += repr(more)
    return hashlib.sha256(asked.encode()).hexdigest()[:16]
