"""The states of all steps of a parallel predictor for a single root, on the host, by one compiled loop.

A draft for one sequence reads every weight of the network once, and launches some forty operations for it, each of
which costs more than what it computes. Here it is one call that does the reading. `ShapePredictor.forward` is what it
computes, up to rounding: sums are in float32 here. Drafts may be rounded otherwise; no token depends on it.
"""

from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from shape.loops import compiled
from shape.networks.base import Predictor
from shape.networks.refinement import SinkhornRefinement
from shape.networks.shape import ShapePredictor
from shape.target.products import multiply, narrow, numbers, widen

_EPSILON = np.float32(1e-5)  # of layer normalisation


class _Weights(NamedTuple):
    """(outputs, inputs) and (outputs,); biases in float32. Of several blocks the rows are one behind the other."""

    window: np.ndarray
    window_bias: np.ndarray
    token: np.ndarray
    block_up: np.ndarray
    block_up_bias: np.ndarray
    block_down: np.ndarray
    block_down_bias: np.ndarray
    adapter_up: np.ndarray
    adapter_up_bias: np.ndarray
    adapter_down: np.ndarray
    adapter_down_bias: np.ndarray
    delta: np.ndarray
    delta_bias: np.ndarray
    gate_known: np.ndarray
    gate_delta: np.ndarray
    gate_bias: np.ndarray


class _Refinement(NamedTuple):
    """(d, H), (d,), (H, d) and (H,), none of them without refinement; biases, in float32, are a transport's.

    `row`: the last update; `barycentric`: the read-out.
    """

    reduce: np.ndarray
    reduce_bias: np.ndarray
    expand: np.ndarray
    expand_bias: np.ndarray
    iterations: int
    row: bool
    barycentric: bool


class SingleRoot:
    """A predictor's weights, where they lie, and what they make of a root."""

    def __init__(self, predictor: ShapePredictor) -> None:
        blocks, adapters, token = list(predictor.blocks), predictor.adapters, predictor.token_projection
        assert adapters is not None
        self._sizes, self._dtype = (predictor.config.num_steps, predictor.config.hidden_size), predictor.dtype
        none = torch.empty(0, predictor.config.hidden_size, dtype=self._dtype)

        known, delta = predictor.gate.weight.detach().chunk(2, dim=1)  # what it reads of either

        def bias(layer: nn.Linear) -> np.ndarray:
            return layer.bias.detach().float().numpy()

        def stacked(name: str) -> tuple[np.ndarray, np.ndarray]:
            """Of the blocks: a copy where there are several."""
            layers = [getattr(block, name) for block in blocks]
            if not layers:
                return numbers(none), np.empty(0, np.float32)
            weights = [layer.weight for layer in layers]
            weight = weights[0] if len(weights) == 1 else torch.cat(weights)
            return numbers(weight), np.concatenate([bias(layer) for layer in layers])

        def of(layer: nn.Linear) -> tuple[np.ndarray, np.ndarray]:
            return numbers(layer.weight), bias(layer)

        self._weights = _Weights(
            *of(predictor.window_projection),
            numbers(none if token is None else token.weight),
            *stacked("up"),
            *stacked("down"),
            *of(adapters.up),
            *of(adapters.down),
            *of(predictor.delta),
            gate_known=numbers(known.contiguous()),
            gate_delta=numbers(delta.contiguous()),
            gate_bias=bias(predictor.gate),
        )
        self._module, nothing = predictor.refinement, np.empty(0, np.float32)
        self._refinement = _Refinement(numbers(none), nothing, numbers(none), nothing, 0, False, False)
        if isinstance(refinement := self._module, SinkhornRefinement):
            self._refinement = _Refinement(
                *of(refinement.reduce),
                *of(refinement.expand),
                refinement.iterations,
                refinement.last_update == "row",
                refinement.barycentric,
            )
        elif refinement is not None:
            self._refinement = self._refinement._replace(
                reduce=numbers(refinement.reduce.weight), expand=numbers(refinement.expand.weight)
            )

    @classmethod
    def of(cls, predictor: Predictor) -> Self | None:
        """None where it does not serve: networks that repeat their step or attend, or are not the CPU's."""
        if not isinstance(predictor, ShapePredictor) or predictor.device.type != "cpu":
            return None
        plain = predictor.adapters is not None and predictor.attention is None
        return cls(predictor) if plain and predictor.dtype in (torch.bfloat16, torch.float32) else None

    @torch.no_grad()
    def __call__(self, window: Tensor, embedding: Tensor) -> Tensor:
        """(W, F) and the root's (H,), of any dtype -> (S, H) in the weights'."""
        states = torch.empty(self._sizes, dtype=self._dtype)
        window, token = window.to(self._dtype).contiguous(), embedding[None].to(self._dtype).contiguous()
        refinement, kernel, alpha = self._module, np.empty((0, 0), np.float32), np.float32(0)
        if refinement is not None:
            alpha = np.float32(float(refinement.share.alpha))
        if isinstance(refinement, SinkhornRefinement) and refinement.iterates:
            kernel = refinement.kernel().numpy()
        known = numbers(window), numbers(token), self._weights
        _predict(*known, self._refinement, kernel, alpha, numbers(states))
        return states


@compiled
def _normalise(x: np.ndarray, y: np.ndarray) -> None:
    """Layer normalisation of every row, (R, K) both, which may be the same."""
    for row in range(x.shape[0]):
        mean, square = np.float32(0), np.float32(0)
        for k in range(x.shape[1]):
            mean += x[row, k]
        mean /= np.float32(x.shape[1])
        for k in range(x.shape[1]):
            square += (x[row, k] - mean) ** 2
        factor = np.float32(1) / np.sqrt(square / np.float32(x.shape[1]) + _EPSILON)
        for k in range(x.shape[1]):
            y[row, k] = (x[row, k] - mean) * factor


@compiled
def _silu(x: np.ndarray) -> None:
    for k in range(x.shape[1]):
        x[0, k] /= np.float32(1) + np.exp(-x[0, k])


@compiled
def _softmax(x: np.ndarray) -> None:
    """Of every row."""
    for row in range(x.shape[0]):
        most, total = x[row, 0], np.float32(0)
        for k in range(x.shape[1]):
            most = max(most, x[row, k])
        for k in range(x.shape[1]):
            x[row, k] = np.exp(x[row, k] - most)
            total += x[row, k]
        for k in range(x.shape[1]):
            x[row, k] /= total


@compiled
def _through(x: np.ndarray, kernel: np.ndarray, y: np.ndarray) -> None:
    """y = x K, (R, d) both, of a K that need not be symmetric: four of its rows at a time, each read once."""
    rows, size = x.shape
    y[:] = np.float32(0)
    for i in range(0, size - 3, 4):
        for row in range(rows):
            first, second, third, fourth = x[row, i], x[row, i + 1], x[row, i + 2], x[row, i + 3]
            for k in range(size):
                y[row, k] += (
                    first * kernel[i, k]
                    + second * kernel[i + 1, k]
                    + third * kernel[i + 2, k]
                    + fourth * kernel[i + 3, k]
                )
    for i in range(size - size % 4, size):
        for row in range(rows):
            for k in range(size):
                y[row, k] += x[row, i] * kernel[i, k]


@compiled
def _transport(here: np.ndarray, q: np.ndarray, kernel: np.ndarray, how: _Refinement) -> None:
    """``scaled`` between the softmax of coordinates (1, d) and every row of q, (S, d), which becomes the read-out.

    The kernel is symmetric but for rounding, so that K serves for its transpose.
    """
    p = here.copy()
    _softmax(p)
    u, v = np.ones(q.shape, np.float32), np.ones(q.shape, np.float32)
    left, reached = np.empty(q.shape, np.float32), np.empty(q.shape, np.float32)
    _through(u[:1], kernel, reached[:1])
    for row in range(len(q)):
        reached[row] = reached[0]
        left[row] = reached[0]
    for n in range(how.iterations):
        if how.row:
            v[:] = q / reached
            _through(v, kernel, left)
            u[:] = p / left
            _through(u, kernel, reached)
        else:
            u[:] = p / left
            _through(u, kernel, reached)
            if n + 1 < how.iterations:
                v[:] = q / reached
                _through(v, kernel, left)
    if how.barycentric:
        u *= here
        _through(u, kernel, left)
        q[:] = left / reached
    else:
        q[:] = v * reached


@compiled
def _refine(
    raw: np.ndarray, known: np.ndarray, size: np.float32, how: _Refinement, kernel: np.ndarray, alpha: np.float32
) -> None:
    """``shape.networks.refinement`` of states (S, H), in place; `known` is the current one, normalised, (1, H)."""
    amount, refined = alpha, np.empty(raw.shape, np.float32)
    reduced = np.empty((raw.shape[0], how.reduce.shape[0]), np.float32)
    if len(how.reduce_bias):
        amount = alpha * size
        _normalise(raw, refined)
        multiply(how.reduce, how.reduce_bias, refined, reduced)
        _softmax(reduced)
        if len(kernel):
            here = np.empty((1, reduced.shape[1]), np.float32)
            multiply(how.reduce, how.reduce_bias, known, here)
            _transport(here, reduced, kernel, how)
    else:
        multiply(how.reduce, how.reduce_bias, raw, reduced)
    multiply(how.expand, how.expand_bias, reduced, refined)
    rest = np.float32(1) - alpha
    for n in range(raw.shape[0]):
        for k in range(raw.shape[1]):
            raw[n, k] = rest * raw[n, k] + amount * refined[n, k]


@compiled
def _predict(
    window: np.ndarray,
    token: np.ndarray,
    weights: _Weights,
    how: _Refinement,
    kernel: np.ndarray,
    alpha: np.float32,
    states: np.ndarray,
) -> None:
    """``SingleRoot``: window (W, F), token (1, H), states (S, H) to be filled, all of them ``numbers``."""
    steps, size = states.shape
    width, none = weights.window.shape[0], np.empty(0, np.float32)
    # The window, each layer's state normalised by itself.
    known = np.empty((window.size // size, size), np.float32)
    widen(window.reshape(known.shape), known)
    current, rms = known[-1:].copy(), np.float32(0)
    for k in range(size):
        rms += current[0, k] * current[0, k]
    rms = np.sqrt(rms / np.float32(size))
    _normalise(known, known)
    x, y = np.empty((1, width), np.float32), np.empty((1, width), np.float32)
    multiply(weights.window, weights.window_bias, known.reshape(1, -1), x)
    if len(weights.token):
        read = np.empty(token.shape, np.float32)
        widen(token, read)
        _normalise(read, read)
        multiply(weights.token, none, read, y)
        x += y
    _silu(x)
    for start in range(0, len(weights.block_up_bias), width):
        end = start + width
        inner, added = np.empty((1, width), np.float32), np.empty((1, width), np.float32)
        _normalise(x, y)
        multiply(weights.block_up[start:end], weights.block_up_bias[start:end], y, inner)
        _silu(inner)
        multiply(weights.block_down[start:end], weights.block_down_bias[start:end], inner, added)
        x += added
    # The steps' adapters: as one matrix up, and down each by its own.
    adapted, each = np.empty((steps, width), np.float32), len(weights.adapter_up) // steps
    wide = np.empty((1, steps * each), np.float32)
    _normalise(x, y)
    multiply(weights.adapter_up, weights.adapter_up_bias, y, wide)
    _silu(wide)
    own = wide.reshape(steps, each)
    for n in range(steps):
        start, end = n * width, (n + 1) * width
        down, bias = weights.adapter_down[start:end], weights.adapter_down_bias[start:end]
        multiply(down, bias, own[n : n + 1], adapted[n : n + 1])
        adapted[n] += x[0]
    # Gated residuals on the current state; what the gate reads of it is one product for all steps.
    delta, gate = np.empty((steps, size), np.float32), np.empty((steps, size), np.float32)
    shared = np.empty((1, size), np.float32)
    multiply(weights.delta, weights.delta_bias, adapted, delta)
    multiply(weights.gate_known, weights.gate_bias, known[-1:], shared)
    multiply(weights.gate_delta, none, delta, gate)
    for n in range(steps):
        for k in range(size):
            share = np.float32(1) / (np.float32(1) + np.exp(-gate[n, k] - shared[0, k]))
            delta[n, k] = current[0, k] + rms * share * delta[n, k]
    if len(how.reduce):
        _refine(delta, known[-1:], rms, how, kernel, alpha)
    narrow(delta, states)
