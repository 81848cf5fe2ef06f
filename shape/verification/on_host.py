"""The lossless acceptance rules in compiled loops, for a CPU, where scores are warped in ways that these know.

``acceptance`` has each of them by operations of tensors, for accelerators, and says why it is lossless.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shape.verification.acceptance import Accepted
from shape.verification.compiled import compiled, compiled_sum, exp, first_largest, largest, log, sum_of_exp
from shape.verification.noise import RESIDUALS, UNIFORMS, noisiest, numbered_bits, step_hash
from shape.verification.tree import TokenTree
from shape.verification.warping import Warps, warp

_NONE = np.empty(0, np.int64)
_NO_ROWS = np.empty((0, 0, 0), np.float32)
_NO_WARPS = Warps(_NONE, np.empty(0))
_ZERO, _ONE, _NEVER = np.float32(0), np.float32(1), np.float32(-np.inf)
_LEAST, _TINY = np.float32(-87.0), np.float32(1e-37)  # exp of less, and less, are taken for 0


def follow_scores(
    tree: TokenTree,
    scores: Tensor,
    warps: Warps = _NO_WARPS,
    keys: Tensor | None = None,
    positions: Tensor | None = None,
    hashes: Tensor | None = None,
) -> Accepted:
    """``acceptance.follow``, where a choice is the largest of warped scores, and with noise.

    Args:
        scores: (B, N, V) floats of the host, of at most 32 bits.
        keys: (B,) int64 of ``noise.sequence_keys``; None adds no noise.
        positions: (B,) int64 of the tokens chosen at the roots. hashes: (V,), ``noise.token_hashes`` of all tokens.
    """
    noise = (_NONE if one is None else one.numpy() for one in (keys, positions, hashes))
    given: tuple[Any, ...] = (*_shape_of(tree), *_bits_of(scores), warps, *noise)
    return _of_arrays(_follow(*given))


def reject_scores(
    tree: TokenTree, scores: Tensor, warps: Warps, keys: Tensor, lengths: Tensor, hashes: Tensor
) -> Accepted:
    """``acceptance.reject_in_turn`` at the root and wherever its token leads, where p is the softmax of warped scores.

    Args:
        scores: (B, N, V) floats of the host, of at most 32 bits.
        keys, lengths: (B,) int64, of ``noise.step_hash``. hashes: as of ``follow_scores``.
    """
    return _of_arrays(_reject(_given(tree, scores, warps, keys, lengths, hashes)))


def traverse_scores(
    tree: TokenTree, scores: Tensor, warps: Warps, keys: Tensor, lengths: Tensor, hashes: Tensor
) -> Accepted:
    """``acceptance.traverse``; arguments as of ``reject_scores``."""
    return _of_arrays(_traverse(_given(tree, scores, warps, keys, lengths, hashes)))


_Array = np.ndarray
_Given = tuple[_Array, _Array, _Array, _Array, _Array, bool, Warps, _Array, _Array, _Array]


def _given(tree: TokenTree, scores: Tensor, warps: Warps, keys: Tensor, lengths: Tensor, hashes: Tensor) -> _Given:
    """Arguments of ``reject_scores`` as numpy knows them, by the names that ``_reject`` gives to them."""
    drawn = tree.were_drawn.contiguous().numpy()
    log_q = _NO_ROWS if tree.log_q is None else tree.log_q.contiguous().numpy()  # not read where no node was drawn
    bits, brain = _bits_of(scores)
    noise = keys.numpy(), lengths.numpy(), hashes.numpy()
    return *_shape_of(tree), drawn, log_q, bits, brain, warps, *noise


def _shape_of(tree: TokenTree) -> tuple[np.ndarray, np.ndarray]:
    return tree.tokens.contiguous().numpy(), tree.parent.contiguous().numpy()


def _bits_of(scores: Tensor) -> tuple[np.ndarray, bool]:
    """Scores for numpy, and whether they are bfloat16's bits, which it does not know."""
    brain = scores.dtype == torch.bfloat16  # whose bits are the upper half of a float32's
    if scores.dtype == torch.float16:
        scores = scores.float()
    return (scores.contiguous().view(torch.int16) if brain else scores.contiguous()).numpy(), brain


def _of_arrays(found: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Accepted:
    path, counts, tokens = map(torch.from_numpy, found)
    return Accepted(path, counts, tokens, counts - 1)


@compiled
def _follow(
    tokens: np.ndarray,
    parents: np.ndarray,
    scores: np.ndarray,
    brain: bool,
    warps: Warps,
    keys: np.ndarray,
    positions: np.ndarray,
    hashes: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Paths, counts and tokens of ``Accepted``."""
    rows, nodes, size = scores.shape
    paths, counts, emitted = _room(rows, nodes)
    held = np.empty(size, np.float32)
    for row in range(rows):
        depths = np.full(nodes, -1)  # of the nodes that choices lead to: several, if there are equal siblings
        depths[0] = node = last = count = 0
        while node >= 0:
            last = node
            _read(scores[row, node], brain, held)
            warp(held, warps)
            chosen = (
                first_largest(held) if len(keys) == 0 else noisiest(held, keys[row], positions[row] + count, hashes)
            )
            emitted[row, count] = chosen
            node = _child(tokens[row], parents[row], depths, count, chosen)
            count += 1
        counts[row] = count
        _write_path(parents[row], last, paths[row, :count])
    return paths, counts, emitted


@compiled
def _reject(given: _Given) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As ``_follow``, but for how a choice is made."""
    tokens, parents, drawn, log_q, scores, brain, warps, keys, lengths, hashes = given
    rows, nodes, size = scores.shape
    paths, counts, emitted = _room(rows, nodes)
    p, q = np.empty(size, np.float32), np.empty(size, np.float32)
    for row in range(rows):
        coins = step_hash(keys[row], lengths[row], UNIFORMS)
        depths = np.full(nodes, -1)
        depths[0] = node = last = count = 0
        while node >= 0:
            last, chosen, refused = node, -1, False
            _read(scores[row, node], brain, p)
            warp(p, warps)
            most = largest(p)
            total = sum_of_exp(p, most)
            for child in range(node + 1, nodes):
                if parents[row, child] != node or not drawn[row, child]:
                    continue
                token = tokens[row, child]
                wanted, offered = p[token], q[token]
                if not refused:  # most are accepted, and need no more of p and q
                    wanted, offered = _exp(wanted - most) / total, _exp(log_q[row, node, token])
                if offered <= 0:  # nothing is drawn where q has no mass left
                    continue
                if _uniform(coins, child) * offered < wanted:
                    chosen = token
                    break
                if not refused:
                    _fill_exp(p, most, total, p)
                    _fill_exp(log_q[row, node], _ZERO, _ONE, q)
                    refused = True
                _leave(p, q, _ONE)
                _take_out(q, token)
            if chosen < 0:
                chosen = _drawn(p, refused, step_hash(keys[row], lengths[row], RESIDUALS), count, hashes)
            emitted[row, count] = chosen
            node = _child(tokens[row], parents[row], depths, count, chosen)
            count += 1
        counts[row] = count
        _write_path(parents[row], last, paths[row, :count])
    return paths, counts, emitted


@compiled
def _traverse(given: _Given) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As ``_reject``: ``acceptance.stop_chances`` node by node, and the first in post-order that stops."""
    tokens, parents, drawn, log_q, scores, brain, warps, keys, lengths, hashes = given
    rows, nodes, size = scores.shape
    paths, counts, emitted = _room(rows, nodes)
    p, q = np.empty((nodes, size), np.float32), np.empty(size, np.float32)
    for row in range(rows):
        shares, holds = np.zeros(nodes), np.zeros(nodes, np.bool_)  # whether a node or one below it stops
        spent = np.zeros(nodes, np.bool_)  # where p is what is left of it, and not scores any more
        shares[0] = 1.0
        for node in range(nodes):
            left, share, known = p[node], shares[node], False
            for child in range(node + 1, nodes):
                if parents[row, child] != node or share <= 0:
                    continue
                token = tokens[row, child]
                if not spent[node]:
                    _read(scores[row, node], brain, left)
                    warp(left, warps)
                    most = largest(left)
                    _fill_exp(left, most, sum_of_exp(left, most), left)
                    spent[node] = True
                if drawn[row, child]:
                    if not known:
                        _fill_exp(log_q[row, node], _ZERO, _ONE, q)
                        known = True
                    if q[token] <= 0:
                        continue
                    shares[child] = min(share * left[token] / q[token], 1.0)
                    mass = _leave(left, q, np.float32(share))
                    _take_out(q, token)
                else:
                    shares[child] = share * left[token]
                    mass = np.float32(share) * _take_out(left, token)
                share = mass / max(mass + (1 - share), 1e-300)
            shares[node] = share if node > 0 else 1.0
        coins = step_hash(keys[row], lengths[row], UNIFORMS)
        for node in range(nodes - 1, -1, -1):
            holds[node] |= node == 0 or _uniform(coins, node) < shares[node]
            above = parents[row, node]
            if holds[node] and above >= 0:
                holds[above] = True
        last = count = 0
        for node in range(1, nodes):  # of siblings the first that holds
            if parents[row, node] == last and holds[node]:
                emitted[row, count], last = tokens[row, node], node
                count += 1
        if not spent[last]:
            _read(scores[row, last], brain, p[last])
            warp(p[last], warps)
        key = step_hash(keys[row], lengths[row], RESIDUALS)
        emitted[row, count] = _drawn(p[last], spent[last], key, 0, hashes)
        counts[row] = count + 1
        _write_path(parents[row], last, paths[row, : count + 1])
    return paths, counts, emitted


@compiled
def _room(rows: int, nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.zeros((rows, nodes), np.int64), np.empty(rows, np.int64), np.zeros((rows, nodes), np.int64)


@compiled
def _uniform(word: int, node: int) -> float:
    """In (0, 1), to decide over a node: that of ``Sampler.uniforms``."""
    return (numbered_bits(word, node + 1) + 0.5) * 2.0**-52


@compiled
def _read(scores: np.ndarray, brain: bool, out: np.ndarray) -> None:
    """Scores, or what ``brain`` says are bfloat16's bits, as numbers to compute with."""
    if brain:
        for k in range(len(out)):
            out[k] = np.int32(np.int32(scores[k]) << np.int32(16)).view(np.float32)
    else:
        out[:] = scores


@compiled
def _exp(x: np.float32) -> np.float32:
    return exp(x) if x >= _LEAST else _ZERO


@compiled
def _fill_exp(logs: np.ndarray, largest: np.float32, total: np.float32, out: np.ndarray) -> None:
    """exp(logs - largest) / total, where none of the logs is above ``largest``."""
    scale = _ONE / total
    for k in range(len(out)):
        x = logs[k] - largest
        out[k] = exp(x) * scale if x >= _LEAST else _ZERO


@compiled_sum
def _leave(p: np.ndarray, q: np.ndarray, share: np.float32) -> np.float32:
    """Makes of p what is left of share * p without q, over its sum, and returns that.

    Without any p equals q up to rounding, or is not asked for again.
    """
    mass = _ZERO
    for k in range(len(p)):
        left = max(share * p[k] - q[k], _ZERO)
        p[k] = left
        mass += left
    if mass > 0:
        scale = _ONE / mass
        for k in range(len(p)):
            p[k] *= scale
    else:
        p[:] = q
    return mass


@compiled_sum
def _take_out(q: np.ndarray, token: int) -> np.float32:
    """Takes a token out of q, renormalises where anything is left, and returns how much was."""
    q[token], rest = _ZERO, _ZERO
    for k in range(len(q)):
        rest += q[k]
    if rest > 0:
        scale = _ONE / rest
        for k in range(len(q)):
            q[k] *= scale
    return rest


@compiled
def _drawn(p: np.ndarray, spent: bool, key: int, position: int, hashes: np.ndarray) -> int:
    """A draw from p, or from softmax(p) where p is not ``spent``: where log p + g is largest. Uses p up."""
    if spent:
        for k in range(len(p)):
            p[k] = log(p[k]) if p[k] > _TINY else _NEVER
    return noisiest(p, key, position, hashes)


@compiled
def _child(tokens: np.ndarray, parents: np.ndarray, depths: np.ndarray, depth: int, token: int) -> int:
    """The first child with this token of nodes that were led to at this depth, -1 where there is none. All such are led
    to, one deeper.
    """
    found = -1
    for child in range(len(tokens) - 1, 0, -1):
        above = parents[child]
        if above >= 0 and depths[above] == depth and tokens[child] == token:
            depths[child] = depth + 1
            found = child
    return found


@compiled
def _write_path(parents: np.ndarray, last: int, out: np.ndarray) -> None:
    """The nodes from the root down to one."""
    for place in range(len(out) - 1, -1, -1):
        out[place] = last
        last = parents[last]
