"""``model.generate(..., custom_generate=FOLDER, trust_remote_code=True)``, FOLDER being an exported predictor.

transformers copies ``custom_generate/generate.py`` of the folder or hub repository to a cache of its own and calls its
``generate`` with what the caller gave, and not with where it comes from. The copy's name says which repository and
commit of the hub that is; of a folder here it keeps the last name alone, so that the caller names it as the predictor.
"""

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, proxy

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from shape.errors import CheckpointError
from shape.generation.decoder import ShapeDecoder
from shape.generation.engine import ShapeOutput
from shape.target.loading import HUB_OPTIONS
from shape.target.model import Target

# Decoders, and what their targets were when they were made: device, dtype and ``Target.version``.
_Decoders = dict[tuple[str, Any], tuple[tuple[Any, ...], ShapeDecoder]]
_DECODERS: WeakKeyDictionary[PreTrainedModel, _Decoders] = WeakKeyDictionary()
_CONFIGURED = GenerationConfig().to_dict().keys()
# How transformers names its copy of a hub repository's code: by its id, each part of it as a Python name, and commit.
_COPY = re.compile(r"transformers_modules\.(?P<id>.+)\.(?P<commit>[0-9a-f]{40})\.custom_generate\.generate")


def generate_of(module: str) -> Callable[..., Tensor | ShapeOutput]:
    """``generate`` for the copy of an exported folder's code that has this module name."""
    if (found := _COPY.fullmatch(module)) is None:
        return generate
    return partial(generate, repository=_repository(found["id"]), commit=found["commit"])


def _repository(name: str) -> str:
    """The id of a hub repository from the module name that transformers makes of it, ``owner.name``."""
    parts = [re.sub(r"^_(?=\d)", "", part) for part in name.split(".")]
    return "/".join(part.replace("_hyphen_", "-").replace("_dot_", ".") for part in parts)


def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    input_ids: Tensor | None = None,
    predictor: str | Path | None = None,
    streamer: BaseStreamer | None = None,
    repository: str | None = None,
    commit: str | None = None,
    **options: Any,
) -> Tensor | ShapeOutput:
    """``ShapeDecoder.generate`` of a model, called by transformers in place of ``model.generate``.

    The decoder is made at the first call, and made anew once the model has been moved or cast, or its tables of tokens
    written to, as in training. Nothing is attached to the model, and with it the decoder is gone.

    Args:
        model: the target.
        inputs: another name of input_ids, as for transformers.
        predictor: folder or hub id of the exported predictor; None takes the repository.
        repository, commit: where on the hub the code that calls this comes from.
        options: those of ``ShapeDecoder.generate``, and those of transformers that say where hub repositories are read.

    Raises:
        CheckpointError: no predictor can be read there, or it is not said where.
        TargetMismatch: the predictor was trained for another model.
        UnsupportedGeneration: see ``ShapeDecoder.generate``.
    """
    # None takes back what the model's configuration says of an option, and means nothing to others.
    given = {name: value for name, value in options.items() if value is not None or name in _CONFIGURED}
    with ExitStack() as until_decoding:
        if streamer is not None:
            until_decoding.callback(streamer.end)
        source = predictor or repository
        if source is None:
            raise CheckpointError(
                "transformers does not say which folder custom_generate names; give the same one as predictor=FOLDER "
                "too"
            )
        hub = {name: given.pop(name) for name in HUB_OPTIONS & given.keys()}
        if predictor is None:
            hub["revision"] = commit  # of the code, so that both are of one export
        decoder = _decoder(model, source, hub)
        until_decoding.pop_all()  # from here on the decoder ends it
    return decoder.generate(input_ids, inputs=inputs, streamer=streamer, **given)


def _decoder(model: PreTrainedModel, source: str | Path, hub: dict[str, Any]) -> ShapeDecoder:
    """One per model and predictor."""
    path = Path(source)
    where = str(path.resolve() if path.is_dir() else source)
    revision = hub.pop("revision", None)
    made, key = _DECODERS.setdefault(model, {}), (where, revision)
    target = Target(model)
    now = (model.device, model.dtype, target.version)
    if (known := made.get(key)) is not None:
        before, decoder = known
        if before == now:
            return decoder
        # Training changes the head by which the target was known; it stays the one that was accepted.
        target.identity = replace(target.identity, head_hash=decoder.target.identity.head_hash)
    target.model = proxy(model)  # or the decoder would keep alive what it is kept for
    decoder = ShapeDecoder.from_pretrained(where, target=target, predictor_revision=revision, **hub)
    made[key] = now, decoder
    return decoder
