"""How drafters that count on the host grow their trees: the likeliest path first, or from given paths."""

from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush
from itertools import count
from math import inf, log
from typing import TypeVar

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
