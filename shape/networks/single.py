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

    @classmethod
    def of(cls, predictor: Predictor) -> Self | None:
        """None where it does not serve: networks that repeat their step, attend or refine, or are not the CPU's."""
        if not isinstance(predictor, ShapePredictor) or predictor.device.type != "cpu":
            return None
        plain = predictor.adapters is not None and predictor.attention is None and predictor.refinement is None
        return cls(predictor) if plain and predictor.dtype in (torch.bfloat16, torch.float32) else None

    def __call__(self, window: Tensor, embedding: Tensor) -> Tensor:
        """(W, F) and the root's (H,), of any dtype -> (S, H) in the weights'."""
        states = torch.empty(self._sizes, dtype=self._dtype)
        window, token = window.to(self._dtype).contiguous(), embedding[None].to(self._dtype).contiguous()
        _predict(numbers(window), numbers(token), self._weights, numbers(states))
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
def _predict(window: np.ndarray, token: np.ndarray, weights: _Weights, states: np.ndarray) -> None:
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
    narrow(delta, states)
