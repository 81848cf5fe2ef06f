"""Biases that read the states along the paths of a tree, in the host's loops."""

from typing import NamedTuple

import numpy as np

from shape.loops import add_product
from shape.verification.compiled import compiled, compiled_sum, exp

_ZERO, _ONE, _TWO, _MOST = np.float32(0), np.float32(1), np.float32(2), np.float32(80)


class PathState(NamedTuple):
    """What is added to logits along paths by a state of their own (``RecurrentMarkov.step``), or by the product of
    W_1 e and what the depth says (``SelectorMarkov.step``), all float32.

    Attributes:
        roots, tokens: (B, rank) and (K, rank), W_1 e of the roots and of the tokens that can be drafted.
        states: (B, depth, 3 rank), what every depth adds; or (B, depth, rank), what it multiplies by.
        expand: (rank, K), W_2; or (K, rank).
        joint: (2 rank, 3 rank), by what is carried and by W_1 e; of no rows for the product.
    """

    roots: np.ndarray
    tokens: np.ndarray
    states: np.ndarray
    expand: np.ndarray
    joint: np.ndarray


_NOTHING = np.empty((0, 0), np.float32)
NO_STATE = PathState(_NOTHING, _NOTHING, np.empty((0, 0, 0), np.float32), _NOTHING, _NOTHING)


@compiled
def go_along(
    path: PathState,
    carried: np.ndarray,
    row: int,
    depth: int,
    node: int,
    above: int,
    number: int,
    logits: np.ndarray,
    out: np.ndarray,
) -> None:
    """What is added to the logits behind a node, (K,), and what it carries, into its place among (room, rank).

    Args:
        number: of its token; -1 for the root.
    """
    token = path.roots[row] if number < 0 else path.tokens[number]
    sums = path.states[row, depth : depth + 1].copy()
    if len(path.joint) > 0:
        _go_on(path, token, carried, node, above, sums, out)
        return
    sums[0] *= token
    for k in range(len(out)):
        out[k] = _ZERO
        if logits[k] > -np.inf:  # one of the few that can be drafted
            out[k] = _dot(sums[0], path.expand[k])


@compiled
def _go_on(
    path: PathState, token: np.ndarray, carried: np.ndarray, node: int, above: int, sums: np.ndarray, out: np.ndarray
) -> None:
    """The same with a state of the path's own, of what the depth adds, (1, 3 rank), which is written over."""
    rank = len(token)
    seen, read = np.zeros((1, 2 * rank), np.float32), out.reshape(1, -1)
    if above >= 0:
        seen[0, :rank] = carried[above]
    seen[0, rank:] = token
    add_product(seen, path.joint, sums)
    for i in range(rank):
        gate = _ONE / (_ONE + _exp_of_minus(sums[0, i]))
        carried[node, i] = gate * seen[0, i] + (_ONE - gate) * _tanh(sums[0, rank + i])
        sums[0, i] = _tanh(sums[0, 2 * rank + i])
    read[:] = _ZERO
    add_product(sums[:, :rank], path.expand, read)


@compiled_sum
def _dot(x: np.ndarray, y: np.ndarray) -> np.float32:
    total = _ZERO
    for i in range(len(x)):
        total += x[i] * y[i]
    return total


@compiled
def _exp_of_minus(x: np.float32) -> np.float32:
    """exp(-x), as far as a sigmoid needs it."""
    return exp(-x) if x >= _ZERO else _ONE / exp(max(x, -_MOST))


@compiled
def _tanh(x: np.float32) -> np.float32:
    small = exp(-_TWO * abs(x))
    return np.copysign((_ONE - small) / (_ONE + small), x)
