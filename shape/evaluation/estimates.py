"""Figures as ratios of sums over prompts, with their 95 % bootstrap intervals."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Self

import numpy as np

from shape.evaluation.markdown import show

_BOOTSTRAP_SAMPLES = 2000
# Units for an interval of 95 %: resampling hardly leaves the range of n units, in which the median lies with a
# probability of 1 - 2 ** (1 - n), 94 % of five.
ENOUGH = 6


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % bootstrap interval over prompts; None where it is undefined."""

    value: float | None
    low: float | None = None
    high: float | None = None

    def text(self, unit: str = "") -> str:
        """`1.52x (1.43–1.60)`; without the brackets where the interval is unknown."""
        figure = show(self.value, unit=unit)
        return figure if self.low is None or self.high is None else f"{figure} ({self.low:.2f}–{self.high:.2f})"


@dataclass(frozen=True)
class Sums:
    """Counts and seconds that add up over answers. Fields are numbers, or arrays of one length (as in the bootstrap,
    where each entry is a resample).
    """

    def __add__(self, other: Self) -> Self:
        return type(self)(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    @classmethod
    def total(cls, parts: Sequence[Self]) -> Self:
        return sum(parts, cls())


def over_prompts(figure: Callable[..., Any], *methods: Sequence[Sums]) -> Estimate:
    """A figure of the totals of one or more methods, resampled over their common prompts.

    Args:
        figure: takes the total of each method.
        methods: of each its sums, prompt by prompt.
    """
    tables = [(type(parts[0]), np.array([astuple(part) for part in parts], dtype=float)) for parts in methods]

    def weighted(weights: np.ndarray) -> Any:  # (..., prompts): how often each prompt counts
        return figure(*(kind(*np.moveaxis(weights @ table, -1, 0)) for kind, table in tables))

    return estimate(weighted, len(methods[0]))


def estimate(figure: Callable[[np.ndarray], Any], prompts: int, repeats: int = 1) -> Estimate:
    """A figure of answers' weights with the 95 % percentile bootstrap over prompts (Efron 1979).

    Args:
        figure: of weights (..., repeats * prompts): how often each answer counts, all prompts' first ones before their
            second ones.
        prompts: that are drawn; a prompt's answers stay together, for they are no independent evidence.
    """
    value = number(figure(np.ones(repeats * prompts)))
    if value is None or prompts < 2:
        return Estimate(value)
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=_BOOTSTRAP_SAMPLES)
    resamples = figure(np.tile(drawn, repeats))
    low, high = map(float, np.nanpercentile(resamples, [2.5, 97.5]))
    return Estimate(value) if low == high else Estimate(value, low, high)


def few_units_note(units: str) -> str:
    """What has to be said of intervals over fewer units than are enough."""
    return f"brackets over fewer than six {units} are about the range of these, and no 95 % intervals"


def ratio(numerator: Any, denominator: Any) -> Any:
    """Elementwise quotient, nan where nothing was counted."""
    top, bottom = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    return np.divide(top, bottom, out=np.full(np.broadcast(top, bottom).shape, np.nan), where=bottom != 0)


def relative_rate(one: Any, other: Any) -> Any:
    """Tokens per second of one over those of the other, where both are sums with tokens and seconds."""
    return ratio(ratio(one.tokens, one.seconds), ratio(other.tokens, other.seconds))


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which a share of them lies, between neighbours in proportion; 0 of none."""
    return float(np.quantile(values, share)) if values else 0.0


def number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None
