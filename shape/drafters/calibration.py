"""Calibration of probabilities: how far to trust what a drafter says of its tokens. Statistics alone; for costs see
``shape.drafters.cost``.
"""


class Calibration:
    """Share of a drafter's tokens that were accepted, by the probability that it gave them and by whether they were
    first in a draft, which decides whether the draft is on the right path at all. Until something is known, the
    drafter's own probability.

    Args:
        prior: tokens that the drafter's probability counts for.
        memory: after so many tokens of a bin, old ones count half.
        bins: of probabilities.
    """

    def __init__(self, prior: float = 4.0, memory: float = 256.0, bins: int = 10) -> None:
        self.prior, self.memory, self.bins = prior, memory, bins
        self._drafted, self._accepted = [0.0] * 2 * bins, [0.0] * 2 * bins

    def __call__(self, claim: float, first: bool) -> float:
        at = self._bin(claim, first)
        return (self._accepted[at] + self.prior * max(claim, 1e-6)) / (self._drafted[at] + self.prior)

    def add(self, claim: float, first: bool, accepted: bool) -> None:
        at = self._bin(claim, first)
        if self._drafted[at] >= self.memory:
            self._drafted[at] /= 2
            self._accepted[at] /= 2
        self._drafted[at] += 1
        self._accepted[at] += accepted

    def _bin(self, claim: float, first: bool) -> int:
        return min(int(claim * self.bins), self.bins - 1) + first * self.bins
