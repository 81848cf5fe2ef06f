"""What proposes tokens: one file per drafter, one protocol (``base.Drafter``), one registry of names."""

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points

from shape.drafters.base import Committed, Drafter
from shape.drafters.compressed import CompressedDrafter, Compression
from shape.drafters.geodesic import GeodesicDrafter
from shape.drafters.hybrid import HybridDrafter
from shape.drafters.lookahead import LookaheadDrafter
from shape.drafters.model import ModelDrafter
from shape.drafters.ngram import NgramDrafter
from shape.drafters.onedecode import OneDecodeDrafter
from shape.drafters.suffix import SuffixDrafter
from shape.drafters.testing import AdversaryDrafter, OracleDrafter
from shape.drafters.trained import TrainedDrafter
from shape.errors import ConfigError, did_you_mean
from shape.verification.tree_shape import TreeShape

_GROUP = "shape.drafters"
# Drafters that need nothing but the target.
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    drafter.name: drafter
    for drafter in (NgramDrafter, SuffixDrafter, LookaheadDrafter, OneDecodeDrafter, GeodesicDrafter, CompressedDrafter)
}


def make_drafter(
    name: str, given: Mapping[str, Drafter | None] | None = None, num_draft_tokens: int | None = None
) -> Drafter | None:
    """A drafter by name; "none" is autoregressive decoding, names joined by "+" a hybrid of these, cheap ones first.

    Other packages add theirs by an entry point of the group "shape.drafters", whose name is the drafter's and whose
    object makes one without arguments; a name that ships goes before theirs.

    Args:
        given: drafters at hand, by names that go before all others: predictors, packs, models.
        num_draft_tokens: the longest draft, see ``Drafter.limit_draft``; None leaves each drafter its own.

    Raises:
        ConfigError: no drafter of that name, one named twice, or one without a draft length where that is to be set.
    """
    if num_draft_tokens is not None and num_draft_tokens < 1:
        raise ConfigError(f"num_draft_tokens is {num_draft_tokens}; give a positive number")
    drafter = _make(name, given or {})
    if drafter is not None and num_draft_tokens is not None:
        drafter.limit_draft(num_draft_tokens)
    return drafter


def _make(name: str, given: Mapping[str, Drafter | None]) -> Drafter | None:
    if name == "none":
        return None
    names = name.split("+")
    if len(names) > 1:
        if len(set(names)) < len(names):
            raise ConfigError(f"drafter {name!r} names one twice; give each once")
        return HybridDrafter([each for part in names if (each := _make(part, given)) is not None])
    if name in given:
        return given[name]
    if name in DRAFTERS:
        return DRAFTERS[name]()
    others = entry_points(group=_GROUP)
    if name not in others.names:
        known = ["none", *DRAFTERS, *sorted(others.names - DRAFTERS.keys()), *given]
        meant = did_you_mean(name, [*known, "shape", "model", "mtp", "recipes"])
        advice = f"{meant} Known are" if meant else "; use one of"
        raise ConfigError(
            f"drafter {name!r} is unknown{advice} {', '.join(known)}, or several joined by +; with a predictor, "
            "pack or smaller model also shape, recipes or model"
        )
    try:
        return others[name].load()()
    except Exception as error:  # whatever another package does wrong
        raise ConfigError(
            f"drafter {name!r} of {others[name].value} cannot be made ({error}); see its package"
        ) from error


__all__ = [
    "DRAFTERS", "AdversaryDrafter", "Committed", "CompressedDrafter", "Compression", "Drafter", "GeodesicDrafter",
    "HybridDrafter", "LookaheadDrafter", "ModelDrafter", "NgramDrafter", "OneDecodeDrafter", "OracleDrafter",
    "SuffixDrafter", "TrainedDrafter", "TreeShape", "make_drafter",
]  # fmt: skip
