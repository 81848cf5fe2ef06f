"""`shape convert`: a predictor from one format to another, with what has to be known of the target."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from warnings import warn

from torch import Tensor
from tqdm.auto import tqdm

from shape import bundled
from shape.data.conversations import evenly
from shape.data.encoding import encode_all
from shape.data.reading import load_conversations
from shape.data.statistics import count_tokens
from shape.errors import CheckpointError, ConfigError, UnsupportedTarget
from shape.generation.loading import load_predictor
from shape.networks import sizing
from shape.networks.base import Predictor
from shape.networks.config import ShapeConfig
from shape.networks.export import export
from shape.networks.formats.table import FORMATS, drafting_from, save, with_head
from shape.networks.formats.targets import TargetFacts
from shape.target.identity import TargetIdentity
from shape.target.loading import SOURCE, only, read_tokenizer
from shape.target.model import Target

OURS = ShapeConfig.model_type
# Conversations, and tokens of each: more change little of which tokens are frequent.
_COUNTED, _MAX_LENGTH = 20_000, 4096


def convert(
    source: str | Path,
    to: str,
    output: str | Path,
    form: str = "auto",
    target: str | None = None,
    data: str | None = None,
    draft_vocab_size: int | None = None,
    **hub: Any,
) -> Predictor:
    """Write a checkpoint in another format; returns what was written, as a predictor of ours.

    Args:
        source: folder or hub id of a predictor, ours or of another package.
        to: "shape", or a name of `shape.networks.formats.table.FORMATS`.
        output: folder that has no checkpoint yet.
        form: format of the source, or "auto".
        target: folder or hub id of the target; needed where the source does not say it, or leaves something open.
        data: conversations; the predictor then drafts from the most frequent tokens of their answers alone.
        draft_vocab_size: how many; None is as many as training would take (`shape.networks.sizing`).
        hub: where the source is read from.

    Raises:
        CheckpointError, ConfigError, TargetMismatch, DataError: what cannot be read, or has no place in the format.
    """
    written = [OURS, *(name for name, each in FORMATS.items() if each.write)]
    for name, known in ((to, written), (form, ["auto", OURS, *FORMATS])):
        if name not in known and name not in FORMATS:
            raise ConfigError(f"format {name} is unknown; choose one of {', '.join(known)}")
    if (Path(output) / "config.json").exists():
        raise ConfigError(f"output {output} has a checkpoint already; give another folder")
    if draft_vocab_size is not None and data is None:
        raise ConfigError("draft_vocab_size is given, and no data to count tokens in; give --data")
    predictor, how = load_predictor(source, target, "auto" if form == OURS else form, **hub), {}
    of_target = only(SOURCE | {"trust_remote_code"}, hub)  # the revision is the source's own
    if data is not None:
        predictor = _drafting_frequent(predictor, data, draft_vocab_size, target, **of_target)
        if predictor.draft_vocabulary is not None:
            how = {"draft vocabulary": f"the most frequent tokens of the answers in {data}"}
    if to == OURS:
        export(
            predictor, output, _identity(predictor, source, target, **of_target), {"converted from": str(source), **how}
        )
        return predictor
    if not predictor.heads and predictor.config.kind in FORMATS[to].kinds and _needs_head(predictor):
        predictor = _with_head(predictor, target, **of_target)
    try:
        save(predictor, output, to, _facts(predictor, target, **of_target))
    except CheckpointError as error:
        raise CheckpointError(f"predictor {source} cannot be written as {to}: {error}") from error
    return predictor


def _drafting_frequent(predictor: Predictor, data: str, size: int | None, target: str | None, **hub: Any) -> Predictor:
    """With a draft vocabulary, counted in the answers of conversations; as it is where the target has few tokens."""
    config, named = predictor.config, target or _its_target(predictor)
    if predictor.draft_vocabulary is not None:
        raise ConfigError(
            f"data is given, and the predictor drafts from {config.draft_vocab_size} tokens already; leave --data out"
        )
    if not named:
        raise ConfigError("data is given, and the predictor does not say whose tokens to count; give --target")
    if (tokenizer := read_tokenizer(named, hub)) is None:
        raise ConfigError(f"target {named} has no tokenizer that can be read, and data is text; give --target")
    conversations = evenly(load_conversations(data), _COUNTED)
    vocab_size = config.vocab_size or len(tokenizer)
    if size is None:
        size = sizing.draft_vocab_size(vocab_size, count_tokens(conversations, tokenizer, _MAX_LENGTH))
    if size is None:
        warn(
            f"{named} has few tokens, from all of which the predictor drafts on: draft_vocab_size changes it",
            stacklevel=3,
        )
        return predictor

    def texts() -> Iterator[tuple[Tensor, Tensor]]:
        for each in encode_all(tqdm(conversations, desc="count tokens"), tokenizer, _MAX_LENGTH).examples:
            yield each.input_ids, each.loss_mask

    return drafting_from(predictor, sizing.draft_vocabulary(texts(), size, vocab_size))


def _with_head(predictor: Predictor, target: str | None, **hub: Any) -> Predictor:
    """With the rows of the target's output embedding; as it is where the target that it names is out of reach."""
    named = target or _its_target(predictor)
    if not named:
        return predictor
    try:
        return with_head(predictor, Target.load(named, **hub).output_rows(predictor.draft_vocabulary))
    except UnsupportedTarget:
        if target is not None:
            raise
        return predictor  # writing it says that a target is missing


def _its_target(predictor: Predictor) -> str:
    """Name of the target that it was trained for, or read from; empty where its checkpoint does not say it."""
    return (predictor.config.target_identity or {}).get("name", "")


def _needs_head(predictor: Predictor) -> bool:
    """Whether engines lack the output embedding that it reads with: they have the target's whole one alone."""
    return predictor.draft_vocabulary is not None or predictor.config.kind == "medusa"


def _identity(predictor: Predictor, source: str | Path, target: str | None, **hub: Any) -> TargetIdentity:
    if target is not None:
        return Target.load(target, **hub).identity
    if (known := predictor.config.target_identity) is None:
        raise ConfigError(f"checkpoint {source} does not say which target it is for; give --target")
    return TargetIdentity.from_dict(known)


def _facts(predictor: Predictor, target: str | None, **hub: Any) -> TargetFacts:
    """Of the target that is given, or else of the one that it was trained for, as far as that can be read."""
    if target is not None:
        return TargetFacts.of(target, **hub)
    name = bundled.resolve(_its_target(predictor))
    try:
        return TargetFacts.of(name, **hub)
    except CheckpointError:  # a hub id without a network, or a folder that has moved
        return TargetFacts(name)
