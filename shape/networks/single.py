"""The states and logits of all steps of a parallel predictor for a single root, on the host, in one call.

A draft for one sequence reads every weight of the network once, and launches some forty operations for it, each of
which costs more than what it computes. Here it is a program of kernels, as the target's forward is
(``shape.verification.fused``): products (``shape.target.floats``, ``shape.target.integers``), by all threads, and what
lies between them (``shape.target.elements``). `ShapePredictor.begin` is what it computes, up to rounding: activations
and sums are in float32 here, and products in 8 bits where that is asked for. Drafts may be rounded otherwise; no token
depends on it.
"""

from collections.abc import Callable
from threading import Lock
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shape.loops import add_product, compiled
from shape.networks.base import Predictor
from shape.networks.refinement import SinkhornRefinement
from shape.networks.shape import ShapePredictor
from shape.target import elements, floats, integers
from shape.target.inference import states_of
from shape.target.kernels import TILE, Program, bits, put, row_bytes
from shape.target.memory import in_large_pages
from shape.target.quantize import QuantizedLinear, pack


class _Product:
    """y = x W^T + b for a number of rows.

    Args:
        bias: what the weight's kernels do not add themselves.

    Attributes:
        x, y: (rows, inputs) and (rows, outputs) float32, where a program reads and, once the product is part of it,
            writes.
        whole: what y is part of.
    """

    y: Tensor
    whole: Tensor

    def __init__(self, packed: floats.Packed | integers.Packed, inputs: int, bias: Tensor | None, rows: int) -> None:
        self._packed, self._bias, self._outputs = packed, bias, packed.outputs
        self.work = rows * inputs * packed.outputs
        self._x = torch.zeros(rows, packed.inputs, dtype=torch.float32)
        self.x = self._x[:, :inputs]

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, rows: int, weight_bits: int | None) -> Self:
        """Of a weight (outputs, inputs), to be quantised where weight_bits, 8, are given."""
        weight, bias = weight.detach(), None if bias is None else bias.detach().float()
        outputs, inputs = weight.shape
        if weight_bits is None:
            return cls(floats.Packed.of(weight, bias, wide=True), inputs, None, rows)
        blocks, scales = map(in_large_pages, pack(weight, weight_bits))
        packed = integers.Packed(blocks, scales.view(torch.uint8), weight_bits, outputs, digits=1)
        return cls(packed, inputs, bias, rows)

    def add_to(self, program: Program) -> None:
        """Go on with it, behind a wait for x; a wait for y has to follow."""
        packed, rows = self._packed, len(self._x)
        if isinstance(packed, floats.Packed):
            y = packed.multiply(program, self._x, torch.float32)
        else:
            digits = packed.prepare(program, self._x, integers.grain_of(packed.inputs))
            program.wait()
            y = packed.multiply(program, digits, torch.float32)
            if self._bias is not None:
                program.wait()
                bias = F.pad(self._bias, (0, y.shape[1] - self._outputs))
                given = (y, row_bytes(y), bias, 0, y.shape[1] // TILE, rows)
                program.add(elements.add(torch.float32, TILE), *given)
        self.whole, self.y = y, y[:rows, : self._outputs]


class SingleRoot:
    """A predictor's weights in the kernels' layout, and what they make of a root.

    Args:
        weight_bits: 8 where weights are to be quantised, and activations rounded to 8 bits for every product.
        head: what reads logits off the states; None leaves that to the caller, as all heads do that are not quantised.
    """

    def __init__(self, predictor: ShapePredictor, weight_bits: int | None = None, head: Any = None) -> None:
        self._predictor, self._weight_bits, self._dtype = predictor, weight_bits, predictor.dtype
        self._head = head if isinstance(head, QuantizedLinear) else None
        self._lock, self._state = Lock(), list[Any]()
        self._weights = [own for module in predictor.modules() if (own := module._parameters)]
        self.renew()

    @classmethod
    def of(cls, predictor: Predictor, weight_bits: int | None = None, head: Any = None) -> Self | None:
        """None where it does not serve: networks that repeat their step or attend, or are not the CPU's."""
        if not isinstance(predictor, ShapePredictor) or predictor.device.type != "cpu":
            return None
        plain = predictor.adapters is not None and predictor.attention is None
        served = plain and predictor.dtype in (torch.bfloat16, torch.float32)
        return cls(predictor, weight_bits, head) if served else None

    def __call__(self, windows: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of roots, one after the other: (B, W, F) and their (B, H), of any dtype -> states (B, S, H) in the weights',
        and logits (B, S, K) float32 where it has a head.
        """
        rows, logits = len(windows), None
        states = torch.empty(rows, *self._states.shape, dtype=self._dtype)
        given = [windows.to(self._dtype).contiguous(), embeddings.to(self._dtype).contiguous(), states]
        if self._logits is not None:
            logits = torch.empty(rows, *self._logits, dtype=torch.float32)
            given.append(logits)
        with self._lock:  # its buffers are for one root
            for row in range(rows):
                for places, one in zip(self._places, given, strict=True):
                    put(places, one.data_ptr() + row * row_bytes(one))
                for part in self._parts:
                    if isinstance(part, Program):
                        part.run(self._work)
                    else:
                        part()
        if logits is not None and self._logits != self._wanted:
            logits = logits[:, : self._wanted[0], : self._wanted[1]].contiguous()
        return states, logits

    def renew(self) -> None:
        """Take the weights as they are now, where they have changed."""
        state = states_of([one for own in self._weights for one in own.values() if one is not None])
        with self._lock:
            if state != self._state:
                with torch.inference_mode(False), torch.no_grad():
                    self._make()
                self._state = state

    # -- the program

    def _make(self) -> None:
        network, config, adapters = self._predictor, self._predictor.config, self._predictor.adapters
        assert adapters is not None
        size, steps, projection = config.hidden_size, config.num_steps, network.token_projection
        self._parts: list[Program | Callable[[], None]] = []
        self._program, self._work = Program(), 0
        known = torch.zeros(config.window * config.feature_size // size, size, dtype=torch.float32)
        token = torch.zeros(1, size, dtype=torch.float32)
        self._places = [self._outside(own, reads=True) for own in (known, token)]
        window = self._of(network.window_projection)
        normed = window.x[0].view(-1, size)
        current, here = known[-1:], normed[-1:]  # the current state, and as the network reads it
        self._add(elements.standardise(size), known, normed)
        first = [window]
        if projection is not None:
            first.append(self._of(projection))
            self._add(elements.standardise(size), token, first[1].x)
        self._multiply(*first)
        x = torch.zeros_like(window.y)
        self._silu(x, *(one.y for one in first))
        blocks: Any = network.blocks
        for block in blocks:
            up, down = self._of(block.up), self._of(block.down)
            self._add(elements.standardise(x.shape[1]), x, up.x)
            self._multiply(up)
            self._silu(down.x, up.y)
            self._multiply(down)
            self._sum(x, x, down.y)
        up = self._of(adapters.up)
        self._add(elements.standardise(x.shape[1]), x, up.x)
        self._multiply(up)
        each = zip(adapters.down.weight.chunk(steps), adapters.down.bias.chunk(steps), strict=True)
        downs = [_Product.of(*one, 1, self._weight_bits) for one in each]
        for own, down in zip(up.y.chunk(steps, 1), downs, strict=True):
            self._silu(down.x, own, wait=False)
        self._program.wait()
        self._multiply(*downs)
        delta = self._of(network.delta, steps)
        for row, down in zip(delta.x.split(1), downs, strict=True):
            self._sum(row, x, down.y, wait=False)
        self._program.wait()
        self._multiply(delta)
        known, own = network.gate.weight.chunk(2, dim=1)  # what it reads of either
        gate, shared = (
            _Product.of(own, None, steps, self._weight_bits),
            _Product.of(known, network.gate.bias, 1, self._weight_bits),
        )
        self._copy(gate.x, delta.y)
        self._copy(shared.x, here)
        self._multiply(gate, shared)
        self._states = torch.zeros(steps, size, dtype=torch.float32)
        self._add(elements.residual(size), current, gate.y, shared.y, delta.y, self._states)
        if network.refinement is not None:
            self._refine(network.refinement, current, here)
        self._places.append(self._outside(self._states, reads=False))
        self._logits: tuple[int, ...] | None = None
        if (head := self._head) is not None:
            digits = 1 if self._dtype == torch.bfloat16 else 2
            read = integers.Packed(head.packed, head.scales, head.bits, head.out_features, digits)
            logits = _Product(read, size, None if head.bias is None else head.bias.float(), steps)
            self._copy(logits.x, self._states)
            self._multiply(logits)
            self._logits, self._wanted = tuple(logits.whole.shape), tuple(logits.y.shape)  # kernels fill both up
            self._places.append(self._program.vacate(logits.whole))
        self._end()

    def _refine(self, refinement: Any, current: Tensor, here: Tensor) -> None:
        """``shape.networks.refinement`` of the states, in place."""
        steps, size = self._states.shape
        reduce, expand = self._of(refinement.reduce, steps), self._of(refinement.expand, steps)
        transport = isinstance(refinement, SinkhornRefinement)
        if transport:
            self._add(elements.standardise(size), self._states, reduce.x)
            self._multiply(reduce)
            self._add(elements.softmax(reduce.y.shape[1]), reduce.y, expand.x)
            if refinement.iterates:
                reduced = self._of(refinement.reduce)
                known = torch.zeros(1, refinement.reduce.out_features, dtype=torch.float32)
                self._copy(reduced.x, here)
                self._multiply(reduced)
                self._add(elements.softmax(known.shape[1]), reduced.y, known)
                self._end()
                given = reduced.y.numpy(), known.numpy(), expand.x.numpy(), refinement.kernel().numpy()
                how = refinement.iterations, refinement.last_update == "row", refinement.barycentric
                self._parts.append(lambda: _transport(*given, how))
        else:
            self._copy(reduce.x, self._states)
            self._multiply(reduce)
            self._copy(expand.x, reduce.y)
        self._multiply(expand)
        share = bits(float(refinement.share.alpha))
        self._add(elements.mix(size, transport), expand.y, current, self._states, others=(share,))

    def _of(self, layer: Any, rows: int = 1) -> _Product:
        return _Product.of(layer.weight, layer.bias, rows, self._weight_bits)

    def _multiply(self, *products: _Product) -> None:
        """Products that read nothing of each other."""
        for one in products:
            one.add_to(self._program)
            self._work += one.work
        self._program.wait()

    def _add(self, kernel: int, *rows: Tensor, others: tuple[int, ...] = (), wait: bool = True) -> None:
        """Go on with a kernel of rows: as many as the last tensor has; where another has one, that is all rows' own."""
        count = len(rows[-1])
        given = [part for x in rows for part in (x, row_bytes(x) if len(x) == count else 0)]
        self._program.add(kernel, *given, *others, count)
        if wait:
            self._program.wait()

    def _silu(self, out: Tensor, x: Tensor, *more: Tensor, wait: bool = True) -> None:
        """out = silu of x, or of a sum."""
        self._add(elements.combine(x.shape[1], len(more) > 0, True), x, *more or (x,), out, wait=wait)

    def _sum(self, out: Tensor, x: Tensor, y: Tensor, wait: bool = True) -> None:
        self._add(elements.combine(x.shape[1], True, False), x, y, out, wait=wait)

    def _outside(self, held: Tensor, reads: bool) -> list[tuple[Any, int]]:
        """Go on with what each run is given, or gives, like this, in the weights' dtype: the places of its address."""
        other = torch.empty(held.shape, dtype=self._dtype, device="meta")
        self._copy(*(held, other) if reads else (other, held))
        return self._program.vacate(other)

    def _copy(self, out: Tensor, x: Tensor) -> None:
        elements.copy_rows(self._program, out, x)
        self._program.wait()

    def _end(self) -> None:
        """Of a program: what follows is a loop."""
        if len(self._program):
            self._parts.append(self._program)
        self._program = Program()


@compiled
def _times(x: np.ndarray, kernel: np.ndarray, y: np.ndarray) -> None:
    """y = x K, (R, d) both."""
    y[:] = np.float32(0)
    add_product(x, kernel, y)


@compiled
def _transport(here: np.ndarray, p: np.ndarray, q: np.ndarray, kernel: np.ndarray, how: tuple[int, bool, bool]) -> None:
    """``scaled`` between p, the softmax of coordinates here, (1, d) both, and every row of q, (S, d), which becomes the
    read-out.

    The kernel is symmetric but for rounding, so that K serves for its transpose. `how`: iterations, whether the row
    update is the last, and whether the read-out is barycentric.
    """
    iterations, row_last, barycentric = how
    u, v = np.ones(q.shape, np.float32), np.ones(q.shape, np.float32)
    left, reached = np.empty(q.shape, np.float32), np.empty(q.shape, np.float32)
    _times(u[:1], kernel, reached[:1])
    for row in range(len(q)):
        reached[row] = reached[0]
        left[row] = reached[0]
    for n in range(iterations):
        if row_last:
            v[:] = q / reached
            _times(v, kernel, left)
            u[:] = p / left
            _times(u, kernel, reached)
        else:
            u[:] = p / left
            _times(u, kernel, reached)
            if n + 1 < iterations:
                v[:] = q / reached
                _times(v, kernel, left)
    if barycentric:
        u *= here
        _times(u, kernel, left)
        q[:] = left / reached
    else:
        q[:] = v * reached
