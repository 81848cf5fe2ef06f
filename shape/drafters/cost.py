"""What drafting brings and what it costs: one model behind every decision whether, how far and in what shape to draft.

A step commits tokens (the accepted ones and the target's own) in the seconds of its draft and of its verification.
Alternatives are compared by tokens per second, with acceptance and seconds

- assumed, for a chain whose tokens are accepted independently (`expected_length`, `throughput`),
- measured before (`Costs`; ``shape.generation.timing``, ``.planning``), or
- measured while decoding (`VerificationTimes`, `DraftValue`; ``shape.drafters.lengths``, ``.hybrid`` and
  ``shape.generation.control``).

Seconds are medians or lower quartiles throughout, since other work on a machine only ever adds.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import numpy as np

NODE = 0.02  # what a node adds to a verification, as a share of its time, until that is known


# The closed form of OTT-Decode (HyperTensor, paper C), for a chain whose tokens are accepted with one probability.


def expected_length(acceptance: float, depth: int) -> float:
    """Tokens per step, (1 - a^(g+1)) / (1 - a), the target's own token included."""
    if acceptance == 1.0:
        return depth + 1.0
    return (1.0 - acceptance ** (depth + 1)) / (1.0 - acceptance)


def throughput(acceptance: float, depth: int, draft: float, verify: float) -> float:
    """Tokens per second, with the seconds of one drafted token and of one verification."""
    return expected_length(acceptance, depth) / (depth * draft + verify)


def best_depth(acceptance: float, draft: float, verify: float, deepest: int = 32) -> int:
    """The depth of most throughput; 0 is not to draft."""
    return max(range(deepest + 1), key=lambda depth: throughput(acceptance, depth, draft, verify))


def break_even(depth: int, draft: float, verify: float, autoregressive: float) -> float | None:
    """The acceptance at which a chain is as fast as autoregressive decoding; None where even certainty is not enough.

    Args:
        autoregressive: seconds of a step without a draft.
    """
    if throughput(1.0, depth, draft, verify) < 1.0 / autoregressive:
        return None
    rates = range(1001)
    at = bisect_left(rates, 1.0 / autoregressive, key=lambda rate: throughput(rate / 1000, depth, draft, verify))
    return at / 1000


@dataclass(frozen=True)
class Costs:
    """Seconds on this machine, for a batch size and a length of text.

    Attributes:
        verify: by tokens per sequence: forward of the target, choice and acceptance.
        draft: by the tree's width: of a draft what does not depend on its passes, and each pass, in which the tree
            grows by a level. With parallel steps, which are one forward, nearly all is in the first. Empty without
            a network.
    """

    batch_size: int
    context: int
    verify: dict[int, float]
    draft: dict[int, tuple[float, float]]

    def step_seconds(self, nodes: int, passes: int, width: int) -> float:
        """A step that verifies `nodes` tokens per sequence, the root among them, after so many passes."""
        return self.draft_seconds(passes, width) + _between(self.verify, nodes)

    def draft_seconds(self, passes: int, width: int) -> float:
        """A draft of so many passes."""
        if not self.draft or not passes:
            return 0.0
        start, each = self.draft[min(width, max(self.draft))]
        return start + passes * each

    @property
    def autoregressive(self) -> float:
        """A step without a draft."""
        return self.verify[1]


def _between(known: dict[int, float], size: int) -> float:
    """Linear between the sizes that were measured; beyond the last one in proportion."""
    sizes = sorted(known)
    if size > sizes[-1]:
        return known[sizes[-1]] * size / sizes[-1]
    return float(np.interp(size, sizes, [known[one] for one in sizes]))


class RecentTimes(deque[float]):
    """Seconds of the last few runs of something; their median, which a hiccup does not move."""

    def __init__(self, seconds: Iterable[float] = (), kept: int = 9) -> None:  # deque's own copy gives both so
        super().__init__(seconds, kept)

    @property
    def median(self) -> float | None:
        """None where nothing has run yet."""
        return median(self) if self else None


class VerificationTimes:
    """Seconds of a verification by its nodes, measured while decoding: a straight line through medians.

    The first of a size is not counted, as it may include the making of its kernels.

    Attributes:
        line: (seconds without nodes, seconds of a node); None until something has been measured.
    """

    _FITTED = 8  # verifications between one line and the next
    _ENOUGH = 3  # of a size, for their median to count

    def __init__(self) -> None:
        self.line: tuple[float, float] | None = None
        self._count = 0
        self._by_size: dict[int, RecentTimes] = {}

    def add(self, nodes: int, seconds: float) -> None:
        if nodes not in self._by_size:
            self._by_size[nodes] = RecentTimes()
            return
        self._by_size[nodes].append(seconds)
        self._count += 1
        if self.line is None or self._count % self._FITTED == 0:
            self.line = self._fit()

    def _fit(self) -> tuple[float, float] | None:
        points = [
            (size, times.median or 0.0, len(times))
            for size, times in self._by_size.copy().items()  # another thread may add a size; only copy() is atomic
            if len(times) >= self._ENOUGH
        ]
        if not points:
            return None
        total = sum(weight for _, _, weight in points)
        size = sum(weight * at for at, _, weight in points) / total
        mean = sum(weight * time for _, time, weight in points) / total
        spread = sum(weight * (at - size) ** 2 for at, _, weight in points)
        if spread < 1:  # all of one size
            start = mean / (1 + NODE * size)
            return start, NODE * start
        slope = sum(weight * (at - size) * (time - mean) for at, time, weight in points) / spread
        slope = min(max(slope, 0.0), mean / size)
        return mean - slope * size, slope


class DraftValue:
    """Whether one more drafter is worth asking in a step, by what it has cost and brought so far.

    Attributes:
        seconds: of its drafts.
    """

    _SHARE = 0.1  # of the newest draft in the mean
    _MOST = 8  # tokens expected, from which on there is no difference
    _DOUBT = 1.15  # how much faster it has to be without the drafter, since what is expected is a guess
    _PAUSE, _LONGEST_PAUSE = 16, 256  # drafts without it, until it is asked in spite of what is known

    def __init__(self) -> None:
        self.seconds = RecentTimes()
        self._gained: list[float | None] = [None] * (self._MOST + 1)
        self._skipped, self._pause = 0, self._PAUSE

    def add(self, expected: float, gained: float) -> None:
        """What one draft of it added to the tokens expected without: a mean by these, in which what is old fades."""
        kind = self._kind(expected)
        before = self._gained[kind]
        self._gained[kind] = gained if before is None else before + self._SHARE * (gained - before)

    def pays(self, expected: float, spent: float, verify: float | None) -> bool:
        """Whether asking it commits more tokens per second than the `expected` ones that are drafted already do.

        Yes as long as that is not known. Texts change, so that it is asked again after a while, which gets longer each
        time that this was in vain.

        Args:
            spent: seconds of drafting so far.
            verify: seconds of a verification; None where unknown.
        """
        gained, cost = self._gained[self._kind(expected)], self.seconds.median
        if gained is None or cost is None or verify is None:
            return True
        if self._DOUBT * (1 + expected + gained) * (verify + spent) > (1 + expected) * (verify + spent + cost):
            self._skipped, self._pause = 0, self._PAUSE
            return True
        self._skipped += 1
        if self._skipped <= self._pause:
            return False
        self._skipped, self._pause = 0, min(2 * self._pause, self._LONGEST_PAUSE)
        return True

    def _kind(self, expected: float) -> int:
        return min(int(expected), self._MOST)
