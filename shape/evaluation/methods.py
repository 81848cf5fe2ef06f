"""The ways of decoding that are measured against each other, described for the record."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from shape.data.conversations import Prompt
from shape.drafters import (
    Drafter,
    GeodesicDrafter,
    HybridDrafter,
    LookaheadDrafter,
    NgramDrafter,
    OneDecodeDrafter,
    SuffixDrafter,
    TrainedDrafter,
)
from shape.evaluation.results import AUTOREGRESSIVE
from shape.generation.rules import Rule
from shape.target.model import Target


@dataclass(frozen=True)
class Ruled:
    """A drafter under an acceptance rule other than "match"."""

    drafter: Drafter | None
    acceptance: Rule


@dataclass(frozen=True)
class Assisted:
    """transformers' own assisted generation, with a smaller model."""

    model: Target


# transformers' `generate`, by itself or with its prompt lookup.
Outside = Literal["transformers", "transformers-lookup"]
LOOKUP: Outside = "transformers-lookup"
Method = Drafter | Ruled | Assisted | Outside | None  # None is our loop without a drafter

# The 8B target of the projection: parameters, width and vocabulary of Llama-3.1-8B.
_LARGE_PARAMETERS, _LARGE_HIDDEN, _LARGE_VOCABULARY = 8.03e9, 4096, 128_256


def describe(method: Method, beside: torch.device | None = None) -> str:
    """What a method is, in words that change when its settings or weights do, or its device is not the given one."""
    if isinstance(method, Ruled):
        return f"{describe(method.drafter, beside)}, acceptance {method.acceptance}"
    if method is None or isinstance(method, str):
        return method or AUTOREGRESSIVE
    if isinstance(method, Assisted):
        return f"transformers, assisted by {method.model!r}"
    if isinstance(method, HybridDrafter):
        return f"{method.nodes} nodes of {' + '.join(describe(each, beside) for each in method.drafters)}"
    if not isinstance(method, TrainedDrafter):
        return str(method)
    sums = [parameter.double().sum().item() for parameter in method.predictor.parameters()]
    where = "" if beside in (None, method.predictor.device) else f", on {method.predictor.device}"
    return f"{method.name}, {method.tree}, weights {_digest(repr(sums))[:8]}{where}"


def projected_draft_cost(method: Method, target: Target) -> float | None:
    """Weights the drafter reads per step over those the target reads, at the size of Llama-3.1-8B.

    Assumes that both are bound by memory, so that a target forward over a tree costs what one over a token
    does; that the predictor's parameters grow with the square of the width, and tables of tokens with width and
    vocabulary (the same share of it that is drafted from here); that recursive predictors read their own weights and an
    output embedding once per depth of their tree, parallel ones once, but for a Markov bias. Cache traffic and
    overheads are left out, and the measured acceptance length is taken to hold for the large target.

    Returns:
        0 where nothing is read, None for the baselines and for drafters of unknown cost.
    """
    if isinstance(method, Ruled):
        method = method.drafter
    if isinstance(method, NgramDrafter | SuffixDrafter | LookaheadDrafter | OneDecodeDrafter):
        return 0.0
    if isinstance(method, GeodesicDrafter):
        return _LARGE_VOCABULARY * _LARGE_HIDDEN / _LARGE_PARAMETERS  # the output embedding, once for all depths
    if isinstance(method, HybridDrafter):
        parts = [projected_draft_cost(each, target) for each in method.drafters]
        return None if None in parts else sum(part for part in parts if part is not None)
    if not isinstance(method, TrainedDrafter):
        return None
    predictor, config = method.predictor, method.predictor.config
    drafted = (config.draft_vocab_size or target.vocab_size) / target.vocab_size * _LARGE_VOCABULARY
    heads, bias = predictor.heads, predictor.markov
    tables = (0 if heads is None else heads.numel()) + (0 if bias is None else bias.expand.weight.numel())
    own = (predictor.num_parameters() - tables) * (_LARGE_HIDDEN / target.hidden_size) ** 2
    read = own + drafted * _LARGE_HIDDEN * (1 if heads is None else len(heads))
    passes = method.tree.depth if config.step_mode == "recursive" else 1
    return (passes * read + method.tree.depth * config.markov_rank * drafted) / _LARGE_PARAMETERS


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
    """By which two measurements know that they asked the same."""
    asked = repr(list(prompts))
    more = [(prompt.template, [message.more for message in prompt.messages]) for prompt in prompts]
    if any(template or any(messages) for template, messages in more):  # the others keep the hash that they always had
        asked += repr(more)
    return _digest(asked)[:16]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
