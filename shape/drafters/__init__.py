"""What proposes tokens: one file per drafter, one protocol (``base.Drafter``), one registry of names."""

from collections.abc import Callable

from shape.drafters.base import Drafter, Settled, TreeShape
from shape.drafters.block import BlockPredictor
from shape.drafters.eagle import EaglePredictor
from shape.drafters.medusa import MedusaPredictor
from shape.drafters.ngram import NgramDrafter
from shape.drafters.suffix import SuffixDrafter
from shape.drafters.testing import AdversaryDrafter, OracleDrafter
from shape.drafters.trained import TrainedDrafter
from shape.errors import ConfigError
from shape.network import Predictor
from shape.predictor import ShapePredictor

# Networks by ``ShapeConfig.kind``; trained, each is drafted with by a ``TrainedDrafter``.
PREDICTORS: dict[str, type[Predictor]] = {
    network.kind: network for network in (ShapePredictor, MedusaPredictor, EaglePredictor, BlockPredictor)
}
# Drafters that need nothing but the target.
DRAFTERS: dict[str, Callable[[], Drafter]] = {drafter.name: drafter for drafter in (NgramDrafter, SuffixDrafter)}


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
    "PREDICTORS",
    "AdversaryDrafter",
    "Drafter",
    "NgramDrafter",
    "OracleDrafter",
    "Settled",
    "SuffixDrafter",
    "TrainedDrafter",
    "TreeShape",
    "make_drafter",
]
