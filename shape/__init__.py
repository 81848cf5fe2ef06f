"""SHAPE: lossless speculative decoding by transported hidden states.

from shape import ShapeDecoder

decoder = ShapeDecoder.from_pretrained("path/or/hub-id")
ids = decoder.generate(**decoder.tokenizer("Hello", return_tensors="pt"), max_new_tokens=64)
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shape.errors import ShapeError
    from shape.generation.decoder import ShapeDecoder
    from shape.networks.config import ShapeConfig
    from shape.networks.shape import ShapePredictor
    from shape.target.model import Target

try:
    __version__ = version("shape-decoding")
except PackageNotFoundError:  # a checkout on the path, not installed
    __version__ = "0+checkout"

__all__ = ["ShapeConfig", "ShapeDecoder", "ShapeError", "ShapePredictor", "Target", "__version__"]

# Resolved on first use, so that `import shape` and every command's --help stay fast.
_HOMES = {
    "ShapeConfig": "shape.networks.config",
    "ShapeDecoder": "shape.generation.decoder",
    "ShapeError": "shape.errors",
    "ShapePredictor": "shape.networks.shape",
    "Target": "shape.target.model",
}


# `python -m shape.train` is `shape/cli/train.py`: the commands are found beside the folders of the library.
__path__.append(__path__[0] + "/cli")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shape' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
