"""How trees are grown, on the host: the likeliest path first, depth by depth, or from given paths; and what is made of
depths that were grown on a device.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from math import inf, log
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from shape.drafters.path_state import NO_STATE, PathState, go_along
from shape.verification.compiled import compiled, first_largest, sum_of_exp
from shape.verification.noise import fill_gumbel
from shape.verification.tree import Drafted, TokenTree, best_nodes, keep_best, of_arrays, rows_of
from shape.verification.tree_shape import TreeShape

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
        start: the root's place.
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

    if depth > 0:
        look(0, 1, 0.0, start)
    while found and len(grown) < nodes:
        negative, _, token, parent, below, place = heappop(found)
        grown.append((token, parent, -negative))
        if below < depth:
            look(len(grown), below + 1, -negative, step(place, token))
    return grown


class Biases(NamedTuple):
    """What is added to the logits behind a node, by its token, or by its path.

    Attributes:
        table: (R, K) float32; of no columns if nothing is added.
        by_number: whether a node's row is its token's number; if not there is one for each node, row after row.
        estimates: log-probability, by an estimate of its own, that a node's likeliest child is accepted, row after row,
            float32; of its other children the odds to that one stay as they are. Empty where the logits tell.
        path: adds what the table does not.
    """

    table: np.ndarray
    by_number: bool
    estimates: np.ndarray = np.empty(0, np.float32)
    path: PathState = NO_STATE


class Noise(NamedTuple):
    """The noise of drafts: the target's own, which they share with it, or their own, by which they are drawn.

    Attributes:
        keys, positions, hashes: (B,), (B,) and (K,) int64 of ``noise.gumbel``; hashes are those of the ids.
        vocab_size: V, of the distributions that drawn trees say they were drawn from; 0 if the noise is the target's.
        one: of a node's children one alone is drawn (``Sampler.candidates``), if not all are.
    """

    keys: Tensor
    positions: Tensor
    hashes: Tensor
    vocab_size: int = 0
    one: bool = False


class _Given(NamedTuple):
    """What does not change as trees grow: arguments and shape of ``grow_by_depth``, as numpy's."""

    logits: np.ndarray
    ids: np.ndarray
    temperature: float
    keys: np.ndarray
    positions: np.ndarray
    hashes: np.ndarray
    width: int
    branching: int
    least: float
    room: int
    nodes: int
    log_q: np.ndarray
    one: bool
    rank: int


def grow_by_depth(
    root: Tensor,
    numbers: np.ndarray,
    logits: Tensor,
    ids: np.ndarray,
    first: Biases,
    later: Biases | Callable[[np.ndarray], Biases],
    shape: TreeShape,
    estimate: Callable[[int, np.ndarray], np.ndarray] | None = None,
    temperature: float = 1.0,
    noise: Noise | None = None,
) -> TokenTree:
    """Trees of this shape, where one prediction serves all nodes of a depth: of each the best nodes are expanded.

    Args:
        root, numbers: (B,) int64, tokens, and which of the ids they are.
        logits: (B, depth, K) float32, over the temperature, of as many depths as the trees are to have.
        ids: (K,) int64, the tokens that they are for.
        first, later: biases behind the roots, and behind all other nodes: in one table, or from the numbers of the
            tokens, (B, M), that are expanded at a depth.
        estimate: makes the estimates of the biases, of the depth and these numbers.
        temperature: that of the biases.
        noise: None where drafts are the likeliest ones.
    """
    rank = first.path.tokens.shape[1]
    given, depths = _given(logits, ids, shape, temperature, noise, rank), logits.shape[1]
    if isinstance(later, Biases) and estimate is None:
        return _with_draws(_grow_with_tables(root.numpy(), numbers, given, first, later), given)
    so_far = tokens, parents, joint, frontier, _ = _new_trees(root.numpy(), numbers, given)
    grown, width, depth = 1, 1, 0
    while depth < depths and width > 0:
        expanded = frontier[1, :, :width]
        biases = first if depth == 0 else later if isinstance(later, Biases) else later(expanded)
        if estimate is not None:
            biases = biases._replace(estimates=estimate(depth, expanded))
        grown, width = _expand(*so_far, grown, width, depth, depth + 1, given, biases)
        depth += 1
    return _with_draws(best_nodes(tokens, parents, joint, joint, grown, given.nodes), given)


def grow_by_path(
    root: Tensor,
    numbers: np.ndarray,
    step: Callable[[int, np.ndarray, np.ndarray], Tensor],
    ids: np.ndarray,
    shape: TreeShape,
    noise: Noise | None = None,
) -> tuple[TokenTree, int]:
    """Trees of this shape, where every node has a prediction of its own; other arguments as of ``grow_by_depth``.

    Args:
        step: makes logits (B, M, K) float32, over the temperature, of the nodes that are expanded at a depth. It is
            given the depth, the numbers of their tokens, (B, M), and which of the nodes expanded before each is behind,
            (B, M). Both are 0 where there is nothing to expand.

    Returns:
        The trees, and how many steps there were.
    """
    nothing = torch.zeros(len(numbers), shape.depth, len(ids), dtype=torch.float32)
    given = _given(nothing, ids, shape, 1.0, noise)
    so_far = tokens, parents, joint, frontier, _ = _new_trees(root.numpy(), numbers, given)
    behind, grown, width, depth = np.zeros((len(numbers), 1), np.int64), 1, 1, 0
    while width > 0 and depth < shape.depth:
        logits = step(depth, np.maximum(frontier[1, :, :width], 0), behind)
        first, depth = grown, depth + 1
        biases = Biases(logits.flatten(0, 1).numpy(), False)
        grown, width = _expand(*so_far, grown, width, depth - 1, depth, given, biases)
        behind = np.maximum(frontier[0, :, :width] - first, 0) // given.branching
    return _with_draws(best_nodes(tokens, parents, joint, joint, grown, given.nodes), given), depth


def _given(
    logits: Tensor, ids: np.ndarray, shape: TreeShape, temperature: float, noise: Noise | None, rank: int = 0
) -> _Given:
    _, depths, size = logits.shape
    branching = min(shape.branching or shape.width, size)
    counts = [branching]
    while len(counts) < depths:
        counts.append(min(shape.width, counts[-1]) * branching)
    room = 1 + sum(counts)
    most = room if shape.nodes is None else min(shape.nodes + 1, room)
    least = log(shape.threshold) if shape.threshold > 0 else -inf
    keys, positions, hashes = _NO_NOISE if noise is None else (part.numpy() for part in noise[:3])
    drawn, one = (0, False) if noise is None else noise[3:]
    log_q = np.zeros((len(keys), room, drawn), np.float32) if drawn else _NO_ROWS
    noise_of = keys, positions, hashes
    return _Given(
        logits.numpy(), ids, temperature, *noise_of, shape.width, branching, least, room, most, log_q, one, rank
    )


_NO_NOISE = [np.empty(0, np.int64)] * 3
_NO_ROWS = np.empty((0, 0, 0), np.float32)


def _with_draws(best: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], given: _Given) -> TokenTree:
    """The tree of these nodes, and what was drawn of them, and from what."""
    tree = of_arrays(*best[:3])
    if given.log_q.size == 0:
        return tree
    nodes, log_q = torch.from_numpy(best[3]), torch.from_numpy(given.log_q)
    if nodes.shape[1] < given.room:
        log_q = rows_of(log_q, nodes)
    return replace(tree, log_q=log_q, drawn=first_children(nodes, given.branching) if given.one else None)


def first_children(nodes: Tensor, branching: int) -> Tensor:
    """Which nodes are the first of their parents' children, by their numbers in trees that were grown by depth."""
    return (nodes - 1) % branching == 0


@compiled
def _grow_with_tables(
    root: np.ndarray, numbers: np.ndarray, given: _Given, first: Biases, later: Biases
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """All of ``grow_by_depth`` where one table serves all later depths: what ``best_nodes`` finds."""
    tokens, parents, joint, frontier, carried = _new_trees(root, numbers, given)
    grown, width = _expand(tokens, parents, joint, frontier, carried, 1, 1, 0, 1, given, first)
    if width > 0:
        depths = given.logits.shape[1]
        grown, _ = _expand(tokens, parents, joint, frontier, carried, grown, width, 1, depths, given, later)
    return best_nodes(tokens, parents, joint, joint, grown, given.nodes)


@compiled
def _new_trees(
    root: np.ndarray, numbers: np.ndarray, given: _Given
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Room for tokens, parents and joint log-probabilities, (B, room), with the roots in it, the first frontier, (2, B,
    width): nodes to expand, and the numbers of their tokens, and room for what paths carry, (B, room, rank).
    """
    rows, size = len(root), given.room
    tokens, parents = np.empty((rows, size), np.int64), np.empty((rows, size), np.int64)
    joint, frontier = np.empty((rows, size), np.float32), np.zeros((2, rows, given.width), np.int64)
    tokens[:, 0], parents[:, 0], joint[:, 0], frontier[1, :, 0] = root, -1, 0.0, numbers
    return tokens, parents, joint, frontier, np.zeros((rows, size if given.rank > 0 else 0, given.rank), np.float32)


@compiled
def _expand(
    tokens: np.ndarray,
    parents: np.ndarray,
    joint: np.ndarray,
    frontier: np.ndarray,
    carried: np.ndarray,
    grown: int,
    width: int,
    depth: int,
    end: int,
    given: _Given,
    biases: Biases,
) -> tuple[int, int]:
    """Expand ``width`` nodes of each row at every depth from this one to the end: their children are written behind
    ``grown`` nodes, and the best of these are the next frontier.

    Nodes below one that will not be kept will not be either: such a place in the frontier has the node -1.

    Returns:
        How many nodes there are, and how many to expand; none where none will be kept, or all paths are less likely
        than ``least``.
    """
    logits, hashes, branching, divisor = given.logits, given.hashes, given.branching, np.float32(given.temperature)
    rows, size, draws = tokens.shape[0], logits.shape[2], given.log_q.shape[0] > 0
    noise, shared, scores = np.empty(len(hashes), np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    numbers, along = np.empty(given.width * branching, np.int64), np.empty(size, np.float32)
    for n in range(depth, end):
        best, count, going = -np.inf, width * branching, False
        following = min(given.width, count) if n + 1 < logits.shape[1] else 0
        for row in range(rows):
            shared[:] = logits[row, n]
            if len(hashes) > 0 and not draws:
                fill_gumbel(given.keys[row], given.positions[row] + n, hashes, noise)
                for k in range(size):
                    shared[k] += noise[k]
            at = grown
            for place in range(width):
                above = frontier[0, row, place]
                if above < 0:
                    tokens[row, at : at + branching], parents[row, at : at + branching] = 0, -1
                    joint[row, at : at + branching], numbers[at - grown : at - grown + branching] = -np.inf, -1
                    at += branching
                    continue
                scores[:] = shared
                if given.rank > 0:
                    number = frontier[1, row, place] if above > 0 else -1
                    go_along(biases.path, carried[row], row, n, above, parents[row, above], number, shared, along)
                    for k in range(size):
                        scores[k] = shared[k] + along[k] / divisor
                elif biases.table.shape[1] > 0:
                    added = biases.table[frontier[1, row, place] if biases.by_number else row * width + place]
                    for k in range(size):
                        scores[k] = shared[k] + added[k] / divisor
                number = first_largest(scores)
                total = _log_sum(scores, number)
                for child in range(branching):
                    if child > 0:
                        number = first_largest(scores)
                    gain, slot = scores[number] - total, at + child
                    if given.one:  # the likeliest, and then the first, drawn from the rest
                        slot = at + (child + 1) % branching
                    if draws and slot == at:
                        rest = _log_sum(scores, number)
                        _write_rest(scores, rest, given.ids, given.log_q[row, above])
                        fill_gumbel(given.keys[row], n * given.width + place, hashes, noise)
                        for k in range(size):
                            scores[k] += noise[k]
                        number = first_largest(scores)
                        if not given.one:
                            total = _log_sum(scores, number)
                        gain = (rest if given.one else scores[number]) - total
                    if child == 0 and len(biases.estimates) > 0:
                        total += gain - biases.estimates[row * width + place]
                        gain = biases.estimates[row * width + place]
                    tokens[row, slot], parents[row, slot] = given.ids[number], above
                    joint[row, slot] = joint[row, above] + gain
                    numbers[slot - grown] = number
                    scores[number] = -np.inf
                at += branching
            enough = np.sort(joint[row, :at])[at - given.nodes] if at > given.nodes else -np.inf
            for place in range(following):
                first = -1
                for node in range(grown, at):
                    likely = numbers[node - grown] >= 0 and joint[row, node] > enough
                    if likely and (first < 0 or joint[row, node] > joint[row, first]):
                        first = node
                frontier[0, row, place], frontier[1, row, place] = first, 0
                if first >= 0:
                    frontier[1, row, place] = numbers[first - grown]
                    numbers[first - grown], going = -1, True
                    best = max(best, joint[row, first])
        grown, width = grown + count, following
        if not going or best < given.least:
            return grown, 0
    return grown, width


@compiled
def _log_sum(scores: np.ndarray, largest: int) -> np.float32:
    """log of the sum of exp, given where the largest is."""
    most = scores[largest]
    return most + np.log(sum_of_exp(scores, most)) if most > -np.inf else most


@compiled
def _write_rest(scores: np.ndarray, total: np.float32, ids: np.ndarray, out: np.ndarray) -> None:
    """Log-probabilities of the ids, (K,), as those of all tokens, (V,)."""
    out[:] = -np.inf
    if total > -np.inf:
        for k in range(len(ids)):
            out[ids[k]] = scores[k] - total


def tree_of_depths(
    root: Tensor,
    numbers: Sequence[Tensor],
    children: Sequence[Tensor],
    scores: Sequence[Tensor],
    branching: int,
    drawn: Sequence[Tensor],
    one_drawn: bool,
    vocabulary: Tensor | None,
    nodes: int | None,
) -> TokenTree:
    """The best of what was grown on a device, behind the roots (B, 1).

    Args:
        numbers, children, scores: of every depth which nodes were expanded, (B, M), their children's numbers among
            the tokens that can be drafted, and these ones' joint log-probabilities, (B, M branching).
        drawn: of every depth the log-probabilities, (B, M, V), that children were drawn from; none where they were not.
        one_drawn: of a node's children one alone was.
        vocabulary: (K,), the tokens that can be drafted; None is all.
        nodes: at most, beside the root; None keeps all.
    """
    drafted = torch.cat([*children], dim=1)
    if vocabulary is not None:
        drafted = vocabulary[drafted]
    expanded = torch.cat([*numbers], dim=1)
    parents = expanded.repeat_interleave(branching, dim=1)
    # Above every log-probability, so that the root always stays.
    joint = torch.cat([torch.ones(root.shape, device=root.device), *scores], dim=1)
    tree = TokenTree(
        torch.cat([root, drafted], dim=1),
        torch.cat([torch.full_like(root, -1), parents], dim=1),
        _scattered(expanded, drawn, joint.shape[1]),
        joint,
        deepest=len(children),
    )
    if drawn and one_drawn:
        numbered = torch.arange(tree.size, device=root.device).expand_as(joint)
        tree = replace(tree, drawn=first_children(numbered, branching))
    return tree if nodes is None or nodes + 1 >= tree.size else keep_best(tree, nodes + 1)


def _scattered(expanded: Tensor, drawn: Sequence[Tensor], nodes: int) -> Tensor | None:
    """(B, N, V): what the children of expanded nodes were drawn from, laid out by the nodes' numbers."""
    if not drawn:
        return None
    log_q = torch.cat([*drawn], dim=1)
    full = log_q.new_zeros(log_q.shape[0], nodes, log_q.shape[2])
    return full.scatter_(1, expanded[..., None].expand_as(log_q), log_q)


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
            joint: log-probability of its first token, given its parent.
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
