"""What a hybrid learns of its sources on the way: how far to believe them, what they cost and what they add."""

from collections import deque
from statistics import median

NODE = 0.02  # what a node adds to a verification, as a share of its time, until that is known


class Calibration:
    """How often a source's tokens stood, by what it said of their odds and by whether they were its first, which decide
    whether it is on the right path at all; before anything is known it is taken at its word.

    Args:
        prior: tokens that its word counts for.
        memory: after so many of a kind, old ones count half.
        bins: kinds of odds that are told apart.
    """

    def __init__(self, prior: float = 4.0, memory: float = 256.0, bins: int = 10) -> None:
        self.prior, self.memory, self.bins = prior, memory, bins
        self._asked, self._stood = [0.0] * 2 * bins, [0.0] * 2 * bins

    def __call__(self, claim: float, first: bool) -> float:
        kind = self._kind(claim, first)
        return (self._stood[kind] + self.prior * max(claim, 1e-6)) / (self._asked[kind] + self.prior)

    def add(self, claim: float, first: bool, stood: bool) -> None:
        kind = self._kind(claim, first)
        if self._asked[kind] >= self.memory:
            self._asked[kind] /= 2
            self._stood[kind] /= 2
        self._asked[kind] += 1
        self._stood[kind] += stood

    def _kind(self, claim: float, first: bool) -> int:
        return min(int(claim * self.bins), self.bins - 1) + first * self.bins


class Times:
    """Seconds of a verification by its nodes: a straight line through medians, since machines have hiccups.

    Attributes:
        line: (seconds without nodes, seconds of a node); None until something has been seen.
        usual: median of the last verifications, whatever their size.
    """

    _KEPT, _FITTED = 9, 8  # times of a size; verifications between one line and the next

    def __init__(self) -> None:
        self.line: tuple[float, float] | None = None
        self._count = 0
        self._last: deque[float] = deque(maxlen=self._KEPT)
        self._seen: dict[int, deque[float]] = {}

    @property
    def usual(self) -> float | None:
        return median(self._last) if self._last else None

    def add(self, nodes: int, seconds: float) -> None:
        self._last.append(seconds)
        self._seen.setdefault(nodes, deque(maxlen=self._KEPT)).append(seconds)
        self._count += 1
        if self._count % self._FITTED == 1:
            self.line = self._fitted()

    def _fitted(self) -> tuple[float, float]:
        points = [(size, median(times), len(times)) for size, times in self._seen.items()]
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


class Worth:
    """What a source costs and brings: seconds per draft, the median of the last ones, since machines have hiccups; and
    tokens that stand because it was asked too, by how many are expected without it, a mean in which what is old fades.
    """

    _KEPT, _SHARE = 9, 0.1
    _MOST = 8  # tokens expected, from which on there is no difference
    _DOUBT = 1.15  # so much better has it to be without, since what is expected is a guess
    _PAUSE, _LONGEST_PAUSE = 16, 256  # drafts without a source, until it is asked in spite of what is known

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=self._KEPT)
        self._gained: list[float | None] = [None] * (self._MOST + 1)
        self._skipped, self._pause = 0, self._PAUSE

    def add(self, expected: float, gained: float) -> None:
        """What one draft of it brought where so many tokens were expected without."""
        kind = self._kind(expected)
        before = self._gained[kind]
        self._gained[kind] = gained if before is None else before + self._SHARE * (gained - before)

    def pays(self, expected: float, spent: float, verify: float | None) -> bool:
        """Whether asking it makes more tokens per second than going on with the `expected` ones that are drafted
        already, for `spent` seconds; yes as long as that is not known. Texts change, so that it is asked again after a
        while, which gets longer from one time to the next in vain.
        """
        gained = self._gained[self._kind(expected)]
        if gained is None or not self.seconds or verify is None:
            return True
        cost = median(self.seconds)
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
