"""How many tokens the next draft has: fixed, adapted to acceptance, or what makes the most tokens per second."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from shape.drafters.cost import best_depth
from shape.errors import ConfigError

_MEMORY = 0.97  # of acceptance, per draft


class DraftLength(ABC):
    """How many tokens the next draft has; learns from the ones before.

    Attributes:
        reads_entropy: whether it looks at the drafter's entropy, which costs a pass over its logits.
    """

    reads_entropy: ClassVar[bool] = False

    @property
    @abstractmethod
    def length(self) -> int:
        """Of the next draft."""

    def observe(self, accepted: float, tested: float, drafted: int, entropy: float, cost: float | None) -> None:
        """What became of a draft, as means over the rows.

        Args:
            accepted: drafted tokens that were accepted.
            tested: these, and of every row the first that was refused, where there is one.
            drafted: how many there were.
            entropy: of the drafter's distributions, nats; 0 where it is not read.
            cost: seconds of one draft token over seconds of a verification; None where that is not known yet.
        """


@dataclass
class Fixed(DraftLength):
    """Always the same."""

    length: int = 4


@dataclass
class Adaptive(DraftLength):
    """One token more where acceptance is high, one more where it is fair and the drafter certain, so two where both
    hold; one less where acceptance is low (the rule and defaults of "Torch-Velocity").

    Args:
        length: at first.
        least: its lower bound.
        most: its upper bound.
        up: share of drafted tokens accepted, in the mean over some drafts, above which it grows.
        down: share below which it shrinks.
        sure: nats of entropy below which it grows too,
        fair: where this share is accepted.
    """

    reads_entropy: ClassVar[bool] = True
    length: int = 4
    least: int = 1
    most: int = 8
    up: float = 0.8
    down: float = 0.3
    sure: float = 2.0
    fair: float = 0.5
    _rate: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.length <= self.most:
            raise ConfigError(f"draft length {self.length} is not within {self.least} to {self.most}; correct them")

    def observe(self, accepted: float, tested: float, drafted: int, entropy: float, cost: float | None) -> None:
        rate = accepted / drafted
        self._rate = rate if self._rate is None else 0.5 * (self._rate + rate)
        certain = self._rate >= self.fair and entropy < self.sure
        change = (self._rate > self.up) + certain - (self._rate < self.down)
        self.length = min(max(self.length + change, self.least), self.most)


@dataclass
class ByCost(DraftLength):
    """The length with the most tokens per second (``cost.best_depth``), with the acceptance of a token and the cost of
    drafting one as measured while decoding (Leviathan et al., arXiv 2211.17192, theorem 3.8).

    Args:
        length: until both are known.
        most: its bound.
    """

    length: int = 4
    most: int = 12
    _reached: float = field(default=2.0, repr=False)  # a mild prior: one of two is accepted
    _accepted: float = field(default=1.0, repr=False)
    _cost: float | None = field(default=None, repr=False)

    def observe(self, accepted: float, tested: float, drafted: int, entropy: float, cost: float | None) -> None:
        self._reached = _MEMORY * self._reached + tested
        self._accepted = _MEMORY * self._accepted + accepted
        if cost is not None:
            self._cost = cost if self._cost is None else 0.8 * self._cost + 0.2 * cost
        if self._cost is not None:
            self.length = max(best_depth(min(self._accepted / self._reached, 0.99), self._cost, 1.0, self.most), 1)


def make_length(chosen: "str | int | DraftLength") -> DraftLength:
    """A draft length by name, "adaptive" or "cost", or always the same.

    Raises:
        ConfigError: no length of that name, or a number below 1.
    """
    if not isinstance(chosen, str | int):
        return chosen
    if str(chosen).isdecimal() and int(chosen) > 0:
        return Fixed(int(chosen))
    if chosen not in ("adaptive", "cost"):
        raise ConfigError(f"num_draft_tokens {chosen!r} is unknown; use adaptive, cost, or a number of tokens")
    return Adaptive() if chosen == "adaptive" else ByCost()
