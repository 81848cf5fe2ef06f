"""The states of all steps of a parallel predictor for a single root, on the host, by kernels and compiled loops.

A draft for one sequence reads every weight of the network once, and launches some forty operations for it, each of
which costs more than what it computes. Here products are those of the target's kernels (``shape.target.floats``,
``shape.target.integers``), by all threads, and what lies between them are compiled loops. `ShapePredictor.forward` is
what it computes, up to rounding: activations and sums are in float32 here. Drafts may be rounded otherwise; no token
depends on it.
"""

from threading import Lock
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shape.loops import compiled
from shape.networks.base import Predictor
from shape.networks.refinement import SinkhornRefinement
from shape.networks.shape import ShapePredictor
from shape.target import elements, floats, integers
from shape.target.inference import state_of
from shape.target.kernels import TILE, Program, row_bytes
from shape.target.quantize import pack

_EPSILON = np.float32(1e-5)  # of layer normalisation


class _How(NamedTuple):
    """Of transport: `row`: the last update; `barycentric`: the read-out."""

    iterations: int
    row: bool
    barycentric: bool


class _Product:
    """y = x W^T + b for a number of rows, as steps of a program.

    Attributes:
        x, y: (rows, inputs) and (rows, outputs) float32, where the program reads and writes.
    """

    def __init__(self, program: Program, weight: Tensor, bias: Tensor | None, rows: int, bits: int | None) -> None:
        weight, bias = weight.detach(), None if bias is None else bias.detach().float()
        outputs, inputs = weight.shape
        self.work = rows * weight.numel()
        if bits is None:
            packed: Any = floats.Packed.of(weight, bias, wide=True)
            x = torch.zeros(rows, inputs)
            y = packed.multiply(program, x, torch.float32)
        else:
            blocks, scales = pack(weight, bits)
            packed = integers.Packed(blocks, scales.view(torch.uint8), bits, outputs)
            x = torch.zeros(rows, packed.inputs)
            digits = packed.prepare(program, x, integers.GROUP)
            program.wait()
            y = packed.multiply(program, digits, torch.float32)
            if bias is not None:
                program.wait()
                bias = F.pad(bias, (0, y.shape[1] - outputs))
                given = (y, row_bytes(y), bias, 0, y.shape[1] // TILE, rows)
                program.add(elements.add(torch.float32, TILE), *given)
        self.x, self.y = x[:, :inputs].numpy(), y[:rows, :outputs].numpy()


class _Products:
    """Several products that read nothing of each other: one call."""

    def __init__(self, bits: int | None, *given: tuple[Tensor, Tensor | None, int]) -> None:
        self._program = Program()
        self.of = [_Product(self._program, *one, bits) for one in given]
        self._work = sum(one.work for one in self.of)

    @property
    def x(self) -> np.ndarray:
        return self.of[0].x

    def __call__(self) -> np.ndarray:
        """The first one's results."""
        self._program.run(self._work)
        return self.of[0].y


class SingleRoot:
    """A predictor's weights in the kernels' layout, and what they make of a root.

    Args:
        bits: 8 where weights are to be quantised, as the target's are.
    """

    def __init__(self, predictor: ShapePredictor, bits: int | None = None) -> None:
        self._predictor, self._bits, self._dtype = predictor, bits, predictor.dtype
        self._lock, self._state = Lock(), list[Any]()
        self._weights = [own for module in predictor.modules() if (own := module._parameters)]
        self._renew()

    @classmethod
    def of(cls, predictor: Predictor, bits: int | None = None) -> Self | None:
        """None where it does not serve: networks that repeat their step or attend, or are not the CPU's."""
        if not isinstance(predictor, ShapePredictor) or predictor.device.type != "cpu":
            return None
        plain = predictor.adapters is not None and predictor.attention is None
        return cls(predictor, bits) if plain and predictor.dtype in (torch.bfloat16, torch.float32) else None

    def __call__(self, window: Tensor, embedding: Tensor) -> Tensor:
        """(W, F) and the root's (H,), of any dtype -> (S, H) in the weights'."""
        with self._lock, torch.no_grad():  # its buffers are for one root
            self._renew()
            return self._states(window, embedding)

    def _renew(self) -> None:
        """Take the weights as they are now, where they have changed."""
        state = [state_of(one) for own in self._weights for one in own.values() if one is not None]
        if state != self._state:
            with torch.inference_mode(False), torch.no_grad():
                self._make()
            self._state = state

    def _make(self) -> None:
        network, steps, bits = self._predictor, self._predictor.config.num_steps, self._bits
        adapters, token = network.adapters, network.token_projection
        assert adapters is not None

        def of(layer: nn.Linear, rows: int = 1) -> tuple[Tensor, Tensor | None, int]:
            return layer.weight, layer.bias, rows

        first = [of(network.window_projection), *([] if token is None else [of(token)])]
        self._window = _Products(bits, *first)
        blocks: Any = network.blocks
        self._blocks = [(_Products(bits, of(block.up)), _Products(bits, of(block.down))) for block in blocks]
        self._up = _Products(bits, of(adapters.up))
        downs = zip(adapters.down.weight.chunk(steps), adapters.down.bias.chunk(steps), strict=True)
        self._downs = _Products(bits, *((*one, 1) for one in downs))
        self._delta = _Products(bits, of(network.delta, steps))
        known, delta = network.gate.weight.chunk(2, dim=1)  # what it reads of either
        self._gate = _Products(bits, (delta, None, steps), (known, network.gate.bias, 1))
        if (refinement := network.refinement) is not None:
            self._reduce, self._expand = (
                _Products(bits, of(one, steps)) for one in (refinement.reduce, refinement.expand)
            )
            self._here = _Products(bits, of(refinement.reduce))

    def _states(self, window: Tensor, embedding: Tensor) -> Tensor:
        network, dtype, config = self._predictor, self._dtype, self._predictor.config
        known = window.to(dtype).to(torch.float32, copy=True).reshape(-1, config.hidden_size).numpy()
        current = known[-1:].copy()
        _normalise(known, known)
        self._window.x[:] = known.reshape(1, -1)
        if len(self._window.of) > 1:
            token = self._window.of[1].x
            _normalise(embedding[None].to(dtype).float().numpy(), token)
        x = self._window()
        if len(self._window.of) > 1:
            x += self._window.of[1].y
        _silu(x, x)
        for up, down in self._blocks:
            _normalise(x, up.x)
            _silu(up(), down.x)
            x += down()
        _normalise(x, self._up.x)
        own = self._up().reshape(config.num_steps, -1)
        for row, down_of in zip(own, self._downs.of, strict=True):
            _silu(row[None], down_of.x)
        self._downs()
        for n, down_of in enumerate(self._downs.of):
            self._delta.x[n] = x[0] + down_of.y[0]
        delta = self._gate.x
        delta[:] = self._delta()
        self._gate.of[1].x[:] = known[-1:]
        size = _gated(current, delta, self._gate(), self._gate.of[1].y)
        if network.refinement is not None:
            self._refine(delta, known[-1:], size)
        return torch.from_numpy(delta).to(dtype, copy=True)

    def _refine(self, raw: np.ndarray, known: np.ndarray, size: np.float32) -> None:
        """``shape.networks.refinement`` of states (S, H), in place; `known` is the current one, normalised, (1, H)."""
        refinement: Any = self._predictor.refinement
        alpha = np.float32(float(refinement.share.alpha))
        amount, transport = alpha, isinstance(refinement, SinkhornRefinement)
        if transport:
            amount = alpha * size
            _normalise(raw, self._reduce.x)
        else:
            self._reduce.x[:] = raw
        reduced = self._expand.x
        reduced[:] = self._reduce()
        if transport:
            _softmax(reduced)
            if refinement.iterates:
                self._here.x[:] = known
                how = _How(refinement.iterations, refinement.last_update == "row", refinement.barycentric)
                _transport(self._here(), reduced, refinement.kernel().numpy(), how)
        raw *= np.float32(1) - alpha
        raw += amount * self._expand()


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
def _silu(x: np.ndarray, y: np.ndarray) -> None:
    """y = silu(x) of a row, (1, K) both, which may be the same."""
    for k in range(x.shape[1]):
        y[0, k] = x[0, k] / (np.float32(1) + np.exp(-x[0, k]))


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
def _transport(here: np.ndarray, q: np.ndarray, kernel: np.ndarray, how: _How) -> None:
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
def _gated(current: np.ndarray, delta: np.ndarray, gate: np.ndarray, shared: np.ndarray) -> Any:
    """delta (S, H) becomes the states: gated residuals on the current one, (1, H), whose size is given back.

    Args:
        gate: (S, H), what the gate reads of delta; shared: (1, H), what it reads of the current state.
    """
    size = np.float32(0)
    for k in range(current.shape[1]):
        size += current[0, k] * current[0, k]
    size = np.sqrt(size / np.float32(current.shape[1]))
    for n in range(delta.shape[0]):
        for k in range(delta.shape[1]):
            share = np.float32(1) / (np.float32(1) + np.exp(-gate[n, k] - shared[0, k]))
            delta[n, k] = current[0, k] + size * share * delta[n, k]
    return size
