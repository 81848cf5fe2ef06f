"""What proposes tokens: one file per drafter, one protocol (``base.Drafter``), one registry of names."""

from collections.abc import Callable

from shape.drafters.base import Drafter, Settled, TreeShape
from shape.drafters.block import BlockPredictor
from shape.drafters.eagle import EaglePredictor
from shape.drafters.hybrid import HybridDrafter
from shape.drafters.medusa import MedusaPredictor
from shape.drafters.model import ModelDrafter
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


def make_drafter(name: str, trained: Drafter | None = None) -> Drafter | None:
    """A drafter by name; "none" is plain decoding, names joined by "+" are a hybrid of these, cheap ones first.

    Args:
        trained: what "shape" stands for, and its own name.

    Raises:
        ConfigError: no drafter of that name, or one named twice.
    """
    if name == "none":
        return None
    names = name.split("+")
    if len(names) > 1:
        if len(set(names)) < len(names):
            raise ConfigError(f"drafter {name!r} names one twice; give each once")
        return HybridDrafter([each for part in names if (each := make_drafter(part, trained)) is not None])
    if trained is not None and name in ("shape", trained.name):
        return trained
    if name not in DRAFTERS:
        known = ["none", *DRAFTERS, *([] if trained is None else ["shape"])]
        raise ConfigError(f"drafter {name!r} is unknown; use one of {', '.join(known)}, or several joined by +")
    return DRAFTERS[name]()


__all__ = [
    "DRAFTERS",
    "PREDICTORS",
    "AdversaryDrafter",
    "Drafter",
    "HybridDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "OracleDrafter",
    "Settled",
    "SuffixDrafter",
    "TrainedDrafter",
    "TreeShape",
    "make_drafter",
]
