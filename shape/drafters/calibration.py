"""Calibration of probabilities: how far to trust what a drafter says of its tokens. Statistics alone; for costs see
``shape.drafters.cost``.
"""

from collections.abc import Sequence

import numpy as np

from shape.verification.compiled import compiled
from shape.verification.tree import TokenTree

_BINS = 10  # of probabilities
_PRIOR = 4.0  # tokens that the drafter's own probability counts for
_MEMORY = 256.0  # after so many tokens of a bin, old ones count half
_MORE = 1 / 3  # prior of a likeliest child that was given probability c: c + (1 - c) / 3


class Calibration:
    """Share of a drafter's tokens that were accepted, by the probability that it gave them and by whether they were
    first in a draft, which decides whether the draft is on the right path at all. Until something is known, the
    drafter's own probability.
    """

    def __init__(self) -> None:
        self._drafted, self._accepted = [0.0] * 2 * _BINS, [0.0] * 2 * _BINS

    def __call__(self, claim: float, first: bool) -> float:
        """The chance that a token is accepted.

        Args:
            claim: the drafter's probability. first: whether the token is the first of its draft.
        """
        at = self._bin(claim, first)
        return (self._accepted[at] + _PRIOR * max(claim, 1e-6)) / (self._drafted[at] + _PRIOR)

    def add(self, claim: float, first: bool, accepted: bool) -> None:
        """Count a token of that claim."""
        at = self._bin(claim, first)
        if self._drafted[at] >= _MEMORY:
            self._drafted[at] /= 2
            self._accepted[at] /= 2
        self._drafted[at] += 1
        self._accepted[at] += accepted

    def _bin(self, claim: float, first: bool) -> int:
        return min(int(claim * _BINS), _BINS - 1) + first * _BINS


class PathChances:
    """Chances that nodes of drafted trees are accepted, by what became of such nodes before.

    Counted is the share that was accepted among nodes whose parent was accepted, by the probability that the drafter
    gave their tokens there; a node's likeliest child is counted apart from its other children. Where drafters are in
    doubt, the likeliest child is right more often than they say, and the others about as often. So what lies behind a
    doubtful token is worth more than joint probabilities say.
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
            for node in nodes:  # quicker than a list of indices
                taken[row, node] = True
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
            # Other threads may count meanwhile, and no path may be likelier than its beginning.
            found[row, node] = found[row, above] + min(np.log(share), 0.0) if share > 0 else -np.inf
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
