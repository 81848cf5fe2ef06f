"""``model.generate(..., custom_generate=FOLDER, trust_remote_code=True)``, FOLDER being an exported predictor.

transformers copies ``custom_generate/generate.py`` of the folder or hub repository to a cache of its own and calls its
``generate`` with what the caller gave.
"""

import sys
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from shape.decoder import ShapeDecoder, ShapeOutput
from shape.errors import CheckpointError
from shape.loading import HUB_OPTIONS

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

    The decoder is made at the first call, stays with the model, and puts it in eval mode and freezes it.

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
    """One per model, predictor and place; kept by the model, so that it is gone when the model is."""
    path = Path(source)
    where = str(path.resolve() if path.is_dir() else source)
    made = vars(model).setdefault("_shape_decoders", {})
    revision = hub.pop("revision", None)
    key = (where, revision, model.device, model.dtype)
    if key not in made:
        made[key] = ShapeDecoder.from_pretrained(where, target=model, predictor_revision=revision, **hub)
    return made[key]
