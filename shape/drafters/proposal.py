"""What several drafters propose for one sequence: their paths merged into one tree, and their probabilities."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log

from shape.drafters.calibration import Calibration
from shape.verification.tree import Drafted

_CERTAIN = 0.999  # no estimate is above it, so that no node is likelier than its parent
_UNKNOWN = 0.5  # where a drafter says nothing of its tokens


@dataclass
class Node:
    """A drafted token.

    Attributes:
        parent: number of the node before.
        joint: log-probability of the path to it.
        probability: given its parent, as calibrated; of several drafters' the highest.
        claims: by drafter, the probability that it gave.
    """

    token: int
    parent: int
    joint: float = 0.0
    probability: float = 0.0
    claims: dict[int, float] = field(default_factory=dict)


class Proposal:
    """Nodes are numbered from 1; 0 is the root.

    Args:
        length: of the committed text.

    Attributes:
        expected_before: by drafter that was called, the accepted tokens expected from those before it.
        only: where one drafter alone has a tree: which, and its tokens and parents as they are.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.expected_before: dict[int, float] = {}
        self.nodes: list[Node] = []
        self._number: dict[tuple[int, int], int] = {}  # by parent and token
        self._children: list[list[Node]] = [[]]
        self.only: tuple[int, list[int], list[int]] | None = None

    @property
    def expected(self) -> float:
        """Drafted tokens that will be accepted: the sum of all nodes' probabilities, if these are right."""
        return sum(exp(node.joint) for node in self.nodes)

    def add(
        self, drafter: int, calibration: Calibration, tokens: list[int], parents: list[int], joint: list[float] | None
    ) -> None:
        """One drafter's tree, whose paths may be known already."""
        here = {0: 0}
        for node in range(1, len(tokens)):
            if parents[node] not in here:  # padding, and its children
                continue
            parent = here[parents[node]]
            above = 0.0 if joint is None or parents[node] == 0 else joint[parents[node]]
            claim = _UNKNOWN if joint is None else min(exp(joint[node] - above), 1.0)
            here[node] = number = self._find(tokens[node], parent)
            merged = self.nodes[number - 1]
            merged.claims[drafter] = claim
            merged.probability = max(merged.probability, min(calibration(claim, parent == 0), _CERTAIN))
        for each in self.nodes:  # parents come first
            each.joint = log(each.probability) + (self.nodes[each.parent - 1].joint if each.parent else 0.0)

    def _find(self, token: int, parent: int) -> int:
        """The node's number, of a new one where there is none."""
        number = self._number.get((parent, token))
        if number is None:
            self.nodes.append(node := Node(token, parent))
            self._children.append([])
            self._children[parent].append(node)
            number = self._number[parent, token] = len(self.nodes)
        return number

    def best(self, count: int) -> tuple[Drafted, list[list[int]]]:
        """The likeliest nodes by falling probability, and each one's drafters. Parents, no less likely, come first."""
        kept = sorted(enumerate(self.nodes, 1), key=lambda one: -one[1].joint)[:count]
        place = {0: 0} | {number: new for new, (number, _) in enumerate(kept, 1)}
        drafted = [(node.token, place[node.parent], node.joint) for _, node in kept]
        return drafted, [sorted(node.claims) for _, node in kept]

    def outcomes(self, text: Sequence[int]) -> Iterator[tuple[int, float, bool, bool]]:
        """What became of each claim whose parent was accepted: drafter, claim, whether it was of a first token, and
        whether that was accepted.

        Args:
            text: what was committed behind the root.
        """
        path = [0, *walk(self._number, text)]
        for node, token in zip(path, text, strict=False):
            for child in self._children[node]:
                for drafter, claim in child.claims.items():
                    yield drafter, claim, node == 0, child.token == token

    def gains(self, text: Sequence[int]) -> dict[int, int]:
        """By drafter that was asked, how many accepted tokens would not have been accepted without it."""
        if self.only is not None:
            only, tokens, parents = self.only
            numbers = {(parents[at], tokens[at]): at for at in range(len(tokens) - 1, 0, -1)}  # the first of duplicates
            accepted = len(walk(numbers, text))
            return {drafter: accepted if drafter == only else 0 for drafter in self.expected_before}
        claims = [self.nodes[node - 1].claims for node in walk(self._number, text)]
        gained = {}
        for drafter in self.expected_before:
            without = (depth for depth, by in enumerate(claims) if by.keys() == {drafter})
            gained[drafter] = len(claims) - next(without, len(claims))
        return gained


def walk(numbers: Mapping[tuple[int, int], int], text: Sequence[int]) -> list[int]:
    """The nodes along a text from the root."""
    node, path = 0, []
    for token in text:
        if (following := numbers.get((node, token))) is None:
            break
        path.append(node := following)
    return path
