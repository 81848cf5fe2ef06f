"""How trees are grown on the host: the likeliest path first, depth by depth, or from given paths."""

from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush
from itertools import count
from math import inf, log
from operator import itemgetter
from typing import TypeVar

import numpy as np

from shape.drafters.base import TreeShape
from shape.verification.tree import Drafted

Place = TypeVar("Place")


def grow(
    start: Place,
    following: Callable[[Place], Mapping[int, float]],
    step: Callable[[Place, int], Place],
    *,
    nodes: int,
    depth: int,
    least: float = -inf,
) -> Drafted:
    """The likeliest nodes of all, each behind its parent.

    Args:
        start: where the root stands.
        following: tokens that may follow at a place, with their probabilities, above 0.
        step: where a token leads from a place.
        nodes: at most.
        depth: of the longest path, at most.
        least: joint log-probability below which a path is not proposed.
    """
    grown: Drafted = []
    found: list[tuple[float, int, int, int, int, Place]] = []
    numbers = count()  # breaks ties: what was found first goes first

    def look(parent: int, below: int, joint: float, place: Place) -> None:
        for token, probability in following(place).items():
            path = joint + log(probability)
            if path >= least:
                heappush(found, (-path, next(numbers), token, parent, below, place))

    look(0, 1, 0.0, start)
    while found and len(grown) < nodes:
        negative, _, token, parent, below, place = heappop(found)
        grown.append((token, parent, -negative))
        if below < depth:
            look(len(grown), below + 1, -negative, step(place, token))
    return grown


def grow_by_depth(
    scores_behind: Callable[[int, list[list[int]]], np.ndarray], rows: int, shape: TreeShape
) -> list[Drafted]:
    """Trees of this shape: of each depth the best nodes are expanded, all rows' at once.

    Where tensors are the host's own, deciding in lists takes half of the time that calls of tensor operations take.

    Args:
        scores_behind: gives what may follow the nodes that are expanded at a depth, from the depth and their tokens,
            (B, M): unnormalised log-probabilities, (B, M or 1, K), one for all nodes where there is one. They are
            overwritten. At depth 0 that node is the root, whose token is not given.
    """
    branching = shape.branching or shape.width
    grown: list[Drafted] = [[] for _ in range(rows)]
    expanded = [[(0.0, 0)] for _ in grown]  # joint log-probabilities and numbers
    tokens: list[list[int]] = [[] for _ in grown]
    for depth in range(shape.depth):
        scores = scores_behind(depth, tokens)
        each = scores.shape[1]
        children, shares = _likeliest(scores.reshape(-1, scores.shape[-1]), branching)
        for row, drafted in enumerate(grown):
            found = []
            for at, (joint, parent) in enumerate(expanded[row]):
                place = row * each + (at if each > 1 else 0)
                for child, share in zip(children[place], shares[place], strict=True):
                    drafted.append((child, parent, joint + share))
                    found.append((joint + share, len(drafted)))
            expanded[row] = sorted(found, key=itemgetter(0), reverse=True)[: shape.width]
            tokens[row] = [drafted[number - 1][0] for _, number in expanded[row]]
        if shape.threshold > 0 and max(best for (best, _), *_ in expanded) < log(shape.threshold):
            break
    if shape.nodes is None:
        return grown
    return [renumbered(drafted, likeliest(drafted, shape.nodes)) for drafted in grown]


def _likeliest(scores: np.ndarray, count: int) -> tuple[list[tuple[int, ...]], list[list[float]]]:
    """The best of (R, K) unnormalised log-probabilities, (R, count), and their log-probabilities; overwrites them."""
    rows = np.arange(len(scores))
    best = scores.argmax(1)
    top = scores[rows, best]
    mass = np.exp(scores - top[:, None]).sum(1)
    numbers, values = [best.tolist()], [top.tolist()]
    for _ in range(1, min(count, scores.shape[1])):
        scores[rows, best] = -inf
        best = scores.argmax(1)
        numbers.append(best.tolist())
        values.append(scores[rows, best].tolist())
    totals = [value + log(more) for value, more in zip(values[0], mass.tolist(), strict=True)]
    shares = [[value - total for value in row] for row, total in zip(zip(*values, strict=True), totals, strict=True)]
    return list(zip(*numbers, strict=True)), shares


def likeliest(drafted: Drafted, nodes: int) -> list[int]:
    """Which nodes of a tree are the likeliest, counted from 0; with all parents, as these are no less likely."""
    return sorted(sorted(range(len(drafted)), key=lambda at: -drafted[at][2])[:nodes])


def renumbered(drafted: Drafted, kept: list[int]) -> Drafted:
    """The tree of these nodes alone, whose parents are among them."""
    place = {0: 0} | {at + 1: new for new, at in enumerate(kept, 1)}
    return [(drafted[at][0], place[drafted[at][1]], drafted[at][2]) for at in kept]


class Paths:
    """Paths from the root as one tree: what they begin with alike is there once.

    Args:
        nodes: at most; what goes beyond is left out.
    """

    def __init__(self, nodes: float = inf) -> None:
        self.most = nodes
        self.grown: Drafted = []
        self._number: dict[tuple[int, int], int] = {}

    def add(self, tokens: Iterable[int], joint: float, share: float = 1.0, parent: int = 0) -> int:
        """One path.

        Args:
            joint: log-probability of its first token, if the parent stands for sure.
            share: of every further one, given the one before.
            parent: number of the node that it begins behind.

        Returns:
            The number of its last node, or of the last one that there was room for.
        """
        if parent:
            joint += self.grown[parent - 1][2]
        for token in tokens:
            number = self._number.get((parent, token))
            if number is None:
                if len(self.grown) >= self.most:
                    break
                above = self.grown[parent - 1][2] if parent else 0.0
                self.grown.append((token, parent, min(joint, above)))
                number = self._number[parent, token] = len(self.grown)
            parent = number
            joint += log(share)
        return parent
