"""``model.generate(..., custom_generate=FOLDER, trust_remote_code=True)``, FOLDER being an exported predictor.

transformers copies ``custom_generate/generate.py`` of the folder or hub repository to a cache of its own and calls its
``generate`` with what the caller gave.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, proxy

from torch import Tensor
from transformers import PreTrainedModel

from shape.decoder import ShapeDecoder, ShapeOutput
from shape.errors import CheckpointError
from shape.loading import HUB_OPTIONS
from shape.target import Target


class _Made(NamedTuple):
    """A decoder, and what its target was when it was made: device, dtype and ``Target.version``."""

    made_of: tuple[Any, ...]
    decoder: ShapeDecoder


_DECODERS: WeakKeyDictionary[PreTrainedModel, dict[tuple[str, Any], _Made]] = WeakKeyDictionary()
# The import stands in a try, or else transformers asks for a package named "shape".
_CODE = '''"""transformers' generate with this predictor, in a few lines: shape does the work."""

try:
    from shape.custom_generate import generate
except ImportError as error:
    raise ImportError("this predictor needs the package shape-decoding; install it, then try again") from error

__all__ = ["generate"]
'''


def write(folder: Path) -> None:
    """Make an exported predictor's folder one that ``custom_generate`` takes."""
    (folder / "custom_generate").mkdir(exist_ok=True)
    (folder / "custom_generate" / "generate.py").write_text(_CODE)


def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    input_ids: Tensor | None = None,
    predictor: str | Path | None = None,
    **options: Any,
) -> Tensor | ShapeOutput:
    """``ShapeDecoder.generate`` of a model, called by transformers in place of ``model.generate``.

    The decoder is made at the first call, and made anew once the model has been moved or cast, or its tables of tokens
    written to, as in training. Nothing is attached to the model, and with it the decoder is gone.

    Args:
        model: the target.
        inputs: another name of input_ids, as for transformers.
        predictor: folder or hub id of the exported predictor; None takes the caller's ``custom_generate``.
        options: those of ``ShapeDecoder.generate``, and those of transformers that say where hub repositories are read.

    Raises:
        CheckpointError: no predictor can be read there.
        TargetMismatch: the predictor was trained for another model.
        UnsupportedGeneration: see ``ShapeDecoder.generate``.
    """
    # transformers tells its custom functions neither the folder nor the id that they come from, and runs a copy.
    source = predictor or sys._getframe(1).f_locals.get("custom_generate")
    if not isinstance(source, str | Path):
        raise CheckpointError(
            "transformers does not say which folder custom_generate names; give the same one as predictor=FOLDER too"
        )
    given = {name: value for name, value in options.items() if value is not None}
    hub = {name: given.pop(name) for name in HUB_OPTIONS & given.keys()}
    prompt: Any = inputs if input_ids is None else input_ids
    return _decoder(model, source, hub).generate(prompt, **given)


def _decoder(model: PreTrainedModel, source: str | Path, hub: dict[str, Any]) -> ShapeDecoder:
    """One per model and predictor."""
    path = Path(source)
    where = str(path.resolve() if path.is_dir() else source)
    revision = hub.pop("revision", None)
    made, key = _DECODERS.setdefault(model, {}), (where, revision)
    target = Target(model)
    now = (model.device, model.dtype, target.version)
    if (known := made.get(key)) is not None:
        if known.made_of == now:
            return known.decoder
        # Training changes the head by which the target was known; it stays the one that was accepted.
        target.identity = replace(target.identity, head_hash=known.decoder.target.identity.head_hash)
    target.model = proxy(model)  # or the decoder would keep alive what it is kept for
    decoder = ShapeDecoder.from_pretrained(where, target=target, predictor_revision=revision, **hub)
    made[key] = _Made(now, decoder)
    return decoder
