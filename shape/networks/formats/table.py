"""The formats by name: which is which, reading into a predictor of ours, and writing what engines load."""

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

from shape.errors import CheckpointError, ConfigError
from shape.networks.base import Predictor
from shape.networks.config import ShapeConfig
from shape.networks.formats import block, eagle, medusa, mtp, speculators
from shape.networks.formats.files import Checkpoint, Weights, read_checkpoint, write_checkpoint
from shape.networks.formats.targets import TargetFacts, TargetUnknown
from shape.networks.registry import PREDICTORS
from shape.target.identity import TargetIdentity
from shape.target.loading import SOURCE, only


class Format(NamedTuple):
    """A layout of files.

    Attributes:
        kinds: of our networks that it has a place for.
        recognise: whether a configuration is of it; None for a language model's, of which it has to be asked for.
        read: ours of a checkpoint: the configuration, and the weights by our names.
        write: the way back; None where engines read the target's own files.
        prefix: of the names of its weights, where others lie beside them.
    """

    kinds: tuple[str, ...]
    recognise: Callable[[dict[str, Any]], bool] | None
    read: Callable[[Checkpoint, TargetFacts], tuple[ShapeConfig, Weights]]
    write: Callable[[Predictor, TargetFacts], Checkpoint] | None
    prefix: str = ""


# The first that recognises a configuration reads it.
FORMATS = {
    "speculators": Format(("eagle", "peagle", "block"), speculators.recognise, speculators.read, speculators.write),
    "medusa": Format(("medusa",), medusa.recognise, medusa.read, medusa.write),
    "dspark": Format(("block",), block.recognise, block.read, block.write),
    "eagle3": Format(("eagle",), eagle.recognise, eagle.read, eagle.write),
    "mtp": Format(("mtp",), None, mtp.read, None, mtp.PREFIX),
}


def format_of(config: dict[str, Any]) -> str | None:
    """The name of a configuration's format; None for ours and for language models."""
    return next((name for name, each in FORMATS.items() if each.recognise and each.recognise(config)), None)


def load(
    source: str | Path, target: str | Path | PretrainedConfig | None = None, form: str = "auto", **hub: Any
) -> Predictor:
    """A predictor of ours with the configuration and the weights of another package's checkpoint, in their dtype.

    Args:
        source: folder or hub id.
        target: of which the checkpoint leaves something open, or whose name it does not say.
        form: a name of `FORMATS`, or "auto".
        hub: where it is read from, and the target too but for the revision.

    Raises:
        CheckpointError: not a checkpoint of a known format; a weight that is missing, or that the network has not.
    """
    checkpoint = read_checkpoint(source, FORMATS[form].prefix if form in FORMATS else "", **hub)
    name = format_of(checkpoint.config) if form == "auto" else form
    if name is None:
        raise CheckpointError(f"checkpoint {source} is of no known format ({', '.join(FORMATS)}); name it with --from")
    named = speculators.verifier(checkpoint.config) or checkpoint.config.get("base_model_name_or_path")
    named = str(source) if FORMATS[name].prefix else named
    known = only(SOURCE | {"trust_remote_code"}, hub)
    facts = TargetFacts() if target is None else TargetFacts.of(target, **known)
    try:
        try:
            config, weights = FORMATS[name].read(checkpoint, facts)
        except TargetUnknown:  # the one that the checkpoint names, which is read only if need be
            if target is not None or not named:
                raise
            config, weights = FORMATS[name].read(checkpoint, TargetFacts.of(named, **known))
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"checkpoint {source} cannot be read as {name}: {error}") from error
    if named:
        assert config.vocab_size is not None
        blank = TargetIdentity(str(named), "", config.state_size, config.vocab_size, "", "", "")
        config.target_identity = blank.to_dict()
    with torch.device("meta"):
        predictor = PREDICTORS[config.kind](config)
    _fill(predictor, weights, str(source))
    return predictor.eval().requires_grad_(False)


def save(predictor: Predictor, folder: str | Path, form: str, target: TargetFacts) -> None:
    """Write a predictor in another package's format.

    Raises:
        CheckpointError: the format has no place for it.
    """
    kinds, write = FORMATS[form].kinds, FORMATS[form].write
    if write is None:
        raise CheckpointError("engines read it from the target's own files; use --to shape")
    if (kind := predictor.config.kind) not in kinds:
        raise CheckpointError(f"the predictor is of kind {kind}, and the format {form} is for {' and '.join(kinds)}")
    write_checkpoint(folder, write(predictor, target))


def with_head(predictor: Predictor, rows: torch.Tensor) -> Predictor:
    """The predictor with an output embedding of its own, (K, H), where it had the target's."""
    config = deepcopy(predictor.config)
    config.own_heads, config.shared_head = True, config.kind == "medusa"
    return _remade(predictor, config, {"lm_head.weight": rows.to(predictor.dtype)})


def drafting_from(predictor: Predictor, tokens: torch.Tensor) -> Predictor:
    """The predictor with a draft vocabulary, (K,) int64 token ids in rising order, where it drafted from all tokens."""
    config = deepcopy(predictor.config)
    config.draft_vocab_size = len(tokens)
    by_token = {id(matrix) for matrix in predictor.matrices_over_tokens}
    rows = {name: weight[tokens] for name, weight in predictor.named_parameters() if id(weight) in by_token}
    return _remade(predictor, config, {**rows, "draft_vocabulary": tokens})


def _remade(predictor: Predictor, config: ShapeConfig, weights: Weights) -> Predictor:
    """A network of another configuration with the predictor's weights, but for these."""
    with torch.device("meta"):
        made = PREDICTORS[config.kind](config)
    made.load_state_dict({**predictor.state_dict(), **weights}, assign=True)
    return made.eval().requires_grad_(False)


def _fill(predictor: Predictor, weights: Weights, source: str) -> None:
    """Give the network its weights.

    Raises:
        CheckpointError: one is missing, too many, or of another shape.
    """
    wanted = predictor.state_dict()
    missing, unknown = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    shaped = [name for name in wanted.keys() & weights.keys() if wanted[name].shape != weights[name].shape]
    for names, what in ((missing, "lacks"), (unknown, "has unknown"), (sorted(shaped), "has another shape of")):
        if names:
            parts = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})
            raise CheckpointError(
                f"checkpoint {source} {what} weights: {', '.join(parts[:4])}; it is damaged, or of a network that is "
                "not known here"
            )
    predictor.load_state_dict(weights, assign=True)
