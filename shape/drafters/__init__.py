"""What proposes tokens: one file per drafter, one protocol (``base.Drafter``), one registry of names."""

from collections.abc import Callable

from shape.drafters.base import Drafter, Settled, TreeShape
from shape.drafters.ngram import NgramDrafter
from shape.drafters.shape import ShapeDrafter
from shape.drafters.testing import AdversaryDrafter, OracleDrafter
from shape.errors import ConfigError

# Drafters that need nothing but the target. "shape" needs a trained predictor and is made by ShapeDecoder.
DRAFTERS: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter}


def make_drafter(name: str) -> Drafter | None:
    """A drafter by name; "none" is plain decoding.

    Raises:
        ConfigError: no drafter of that name.
    """
    if name == "none":
        return None
    if name not in DRAFTERS:
        raise ConfigError(f"drafter {name!r} is unknown; use one of {', '.join(['none', *DRAFTERS])}")
    return DRAFTERS[name]()


__all__ = [
    "DRAFTERS",
    "AdversaryDrafter",
    "Drafter",
    "NgramDrafter",
    "OracleDrafter",
    "Settled",
    "ShapeDrafter",
    "TreeShape",
    "make_drafter",
]
