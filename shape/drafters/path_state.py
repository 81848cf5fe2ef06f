"""A bias's own state along the paths of a tree, in the host's loops."""

from typing import NamedTuple

import numpy as np

from shape.loops import add_product
from shape.verification.compiled import compiled, exp

_ZERO, _ONE, _TWO, _MOST = np.float32(0), np.float32(1), np.float32(2), np.float32(80)


class PathState(NamedTuple):
    """How a bias's own state goes along paths, and what is added to logits by it (``PathMarkov.step``), all float32.

    Attributes:
        roots, tokens: (B, rank) and (K, rank), W_1 e of the roots and of the tokens that can be drafted.
        joint: (2 rank, 3 rank), by what is carried and by these. states: (B, depth, 3 rank), what every depth adds.
        expand: (rank, K), W_2; of no rows where there is no such state.
    """

    roots: np.ndarray
    tokens: np.ndarray
    joint: np.ndarray
    states: np.ndarray
    expand: np.ndarray


_NO_BIASES = np.empty((0, 0), np.float32)
NO_STATE = PathState(_NO_BIASES, _NO_BIASES, _NO_BIASES, np.empty((0, 0, 0), np.float32), _NO_BIASES)


@compiled
def go_along(
    path: PathState, carried: np.ndarray, row: int, depth: int, node: int, above: int, number: int, out: np.ndarray
) -> None:
    """What is added to the logits behind a node, (K,), and what it carries, into its place among (room, rank).

    Args:
        number: of its token; -1 for the root.
    """
    rank = len(path.expand)
    seen, read = np.zeros((1, 2 * rank), np.float32), out.reshape(1, -1)
    sums = path.states[row, depth : depth + 1].copy()
    if above >= 0:
        seen[0, :rank] = carried[above]
    seen[0, rank:] = path.roots[row] if number < 0 else path.tokens[number]
    add_product(seen, path.joint, sums)
    for i in range(rank):
        gate = _ONE / (_ONE + _exp_of_minus(sums[0, i]))
        carried[node, i] = gate * seen[0, i] + (_ONE - gate) * _tanh(sums[0, rank + i])
        sums[0, i] = _tanh(sums[0, 2 * rank + i])
    read[:] = _ZERO
    add_product(sums[:, :rank], path.expand, read)


@compiled
def _exp_of_minus(x: np.float32) -> np.float32:
    """exp(-x), as far as a sigmoid needs it."""
    return exp(-x) if x >= _ZERO else _ONE / exp(max(x, -_MOST))


@compiled
def _tanh(x: np.float32) -> np.float32:
    small = exp(-_TWO * abs(x))
    return np.copysign((_ONE - small) / (_ONE + small), x)
