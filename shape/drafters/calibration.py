"""Calibration of probabilities: how far to trust what a drafter says of its tokens. Statistics alone; for costs see
``shape.drafters.cost``.
"""

from collections.abc import Sequence

import numpy as np

from shape.verification.compiled import compiled
from shape.verification.tree import TokenTree


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


_BINS, _PRIOR, _MEMORY = 10, 4.0, 256.0  # as of `Calibration`
_MORE = 1 / 3  # of what is left to certainty, by which a likeliest child is right more often than it is said to be


class PathChances:
    """Chances that nodes of drafted trees are accepted, by what became of such nodes before.

    Of the nodes behind accepted ones the share that was accepted is counted by the probability that the drafter gave
    their tokens there, and that of a node's likeliest child apart: in doubt that one is right more often than drafters
    say, and others about as often. So what lies behind a doubtful token is worth more than joint probabilities say.
    """

    def __init__(self) -> None:
        self._drafted, self._accepted = np.zeros((2, _BINS)), np.zeros((2, _BINS))

    def __call__(self, tree: TokenTree) -> np.ndarray:
        """(B, N) float32, what ``tree.joint`` is by these counts: 0 at the roots, and nowhere above a parent's."""
        assert tree.joint is not None
        return _calibrated(tree.joint.numpy(), tree.parent.numpy(), self._drafted, self._accepted)

    def add(self, tree: TokenTree, accepted: Sequence[Sequence[int]]) -> None:
        """Trees that were verified, and which nodes of each were accepted."""
        assert tree.joint is not None
        taken = np.zeros(tree.joint.shape, np.bool_)
        for row, nodes in enumerate(accepted):
            taken[row, nodes] = True
        _count(tree.joint.numpy(), tree.parent.numpy(), taken, self._drafted, self._accepted)


@compiled
def _claim(joint: np.ndarray, row: int, node: int, above: int) -> float:
    """The probability that a drafter gave a node's token behind its parent."""
    behind = joint[row, node] - (joint[row, above] if above > 0 else np.float32(0))
    return np.exp(behind) if behind < 0 else 1.0  # what is no number, behind an impossible node, included


@compiled
def _calibrated(joint: np.ndarray, parents: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    found = np.zeros_like(joint)
    for row in range(len(joint)):
        seen = np.zeros(joint.shape[1], np.bool_)
        for node in range(1, joint.shape[1]):
            above = parents[row, node]
            if above < 0:
                found[row, node] = -np.inf
                continue
            claim, later = _claim(joint, row, node, above), int(seen[above])
            seen[above] = True
            at = min(int(claim * _BINS), _BINS - 1)
            prior = claim if later else claim + _MORE * (1 - claim)
            share = (accepted[later, at] + _PRIOR * prior) / (drafted[later, at] + _PRIOR)
            found[row, node] = found[row, above] + np.log(share) if share > 0 else -np.inf
    return found


@compiled
def _count(
    joint: np.ndarray, parents: np.ndarray, taken: np.ndarray, drafted: np.ndarray, accepted: np.ndarray
) -> None:
    for row in range(len(joint)):
        seen = np.zeros(joint.shape[1], np.bool_)
        for node in range(1, joint.shape[1]):
            above = parents[row, node]
            if above < 0:
                continue
            later = int(seen[above])
            seen[above] = True
            if above > 0 and not taken[row, above]:
                continue
            at = min(int(_claim(joint, row, node, above) * _BINS), _BINS - 1)
            if drafted[later, at] >= _MEMORY:
                drafted[later, at] /= 2
                accepted[later, at] /= 2
            drafted[later, at] += 1
            accepted[later, at] += taken[row, node]
