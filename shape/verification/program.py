"""The program of a forward over a few tokens through Llama-like layers on a CPU.

Roundings are where transformers has them: in bfloat16 many states are the same bit for bit, as sums alone are added in
another order. ``shape.verification.fused`` says for which targets it serves.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shape.target import elements, floats, integers
from shape.target.families import is_hooked, is_plain_mlp
from shape.target.kernels import TILE, Buffers, Program, bits, put, row_bytes
from shape.target.prepack import PrepackedForward
from shape.target.quantize import QuantizedLinear

if TYPE_CHECKING:
    from shape.verification.fused import FusedLayers

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
# Places of what changes from call to call.
_END, _CAPACITY, _SCRATCH, _SCRATCH_BYTES, _LENGTHS, _BETWEEN, _TABLE, _LAST, _NUMBERS = range(9)
_COSINES, _SINES, _POSITIONS, _MASKS = range(9, 13)
_OF_A_MASK = 4  # numbers: address, bytes of a sequence, bytes of a node, first slot


class Layer(NamedTuple):
    """Modules by name: what takes a module's place is found there."""

    parts: dict[str, Any]
    attention: dict[str, Any]
    kind: str


class Rows(NamedTuple):
    """Rows of a contiguous table (P, W), by their numbers, contiguous int64; the last row for those that it has not."""

    table: Tensor
    numbers: Tensor


class Turns(NamedTuple):
    """Cosines and sines (P, D), contiguous, and which of them each token is turned by: contiguous int64."""

    cosines: Tensor
    sines: Tensor
    positions: Tensor


class Forward:
    """The program of a forward, for a number of sequences and tokens, and the buffers that it computes in.

    Args:
        masked: whether masks are given.
        layers: whose states ``__call__`` gives.
        logits: whether it gives logits.
    """

    @torch.inference_mode(False)  # buffers outlive the mode in which they are made
    def __init__(
        self,
        of: "FusedLayers",
        batch: int,
        nodes: int,
        masked: bool = False,
        layers: tuple[int, ...] = (),
        logits: bool = False,
    ) -> None:
        self._of, self._shape, self._masked = of, (batch, nodes), masked
        weight: Tensor = of.norms[-1][0]["norm"].weight
        self._dtype, width = weight.dtype, len(weight)
        self._tokens = tokens = batch * nodes
        self._x, self._y = self._new(tokens, width), self._new(tokens, width)
        self._query = torch.empty(tokens, of.heads, of.size, dtype=torch.float32)
        self._attended, self._scratch = self._new(tokens, of.heads * of.size), torch.empty(0, dtype=torch.float32)
        self._rows = 0  # queries that a thread takes at a time
        self._keys = _MASKS + _OF_A_MASK * len(of.kinds)
        self._values = self._keys + len(of.layers)
        self._now = torch.zeros(self._values + len(of.layers), dtype=torch.int64)
        self._out = torch.empty(tokens, len(layers) * width, dtype=self._dtype, device="meta")
        # What to add to their address, and where it goes.
        self._out_places: list[tuple[int, list[tuple[Any, int]]]] = []
        self._steps: list[Callable[[], Any]] = []
        self._buffers = Buffers()
        self._program = Program(self._buffers)
        self._logits: tuple[torch.Size, list[tuple[Any, int]]] | None = None  # where their address goes
        self._build(layers)
        if logits:
            self._read()
        self._end()

    def _build(self, layers: tuple[int, ...]) -> None:
        y, count = self._y, len(self._of.layers)
        wanted = [layer % (count + 1) for layer in layers]  # transformers has the last block's behind the norm
        seen = self._begin()
        self._take(wanted, 0, self._x)
        for number, layer in enumerate(self._of.layers):
            self._through(layer, number, seen)
            self._take(wanted, number + 1, self._x if number + 1 < count else y)
            seen = y

    def _read(self) -> None:
        """Logits, into memory of each call's own."""
        if (packed := blocks_of(self._of.head)) is not None:
            self._program.buffers = Buffers()  # those that are kept would hold that memory
            (found,) = self._linear({"head": self._of.head}, ["head"], self._y, [packed.outputs])
            self._width, self._logits = packed.outputs, (found.shape, self._program.vacate(found))
            self._program.buffers = self._buffers

    def _through(self, layer: Layer, number: int, seen: Tensor) -> None:
        """A layer, and the norm behind it: y is what the next one attends from."""
        of, y = self._of, self._y
        self._buffers.again()
        self._norm(*of.norms[2 * number + 1], y, added=self._found(layer, number, seen))
        self._norm(*of.norms[2 * number + 2], y, added=self._mlp(layer.parts["mlp"], y))

    def _found(self, layer: Layer, number: int, seen: Tensor) -> Tensor:
        """What a layer's attention finds, to be added to the residual."""
        self._attend(layer, number, seen)
        grain = integers.grain_of(self._of.heads * self._of.size)
        return self._linear(layer.attention, ATTENTION[3:], self._attended, [self._y.shape[1]], grain)[0]

    def _begin(self) -> Tensor:
        """What the first layer attends from."""
        width = self._x.shape[1]
        lanes = gcd(width, TILE)
        given = (self._x, row_bytes(self._x), width // lanes, self._now, _TABLE, _LAST, _NUMBERS, self._tokens)
        self._program.add(elements.gather(self._dtype, lanes), *given)
        self._norm(*self._of.norms[0], self._y)
        return self._y

    def __call__(
        self, x: Rows, turns: Turns, cache: Any, end: int, masks: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """States (B, N, layers H), and logits (B, N, V) where it makes these.

        Args:
            x: embeddings of the tokens.
            end: slots of a sequence that are seen; tokens go into the first ones behind the committed ones.
            masks: by kind of attention, (B, 1, N, K) of the last K of these slots; those before are not read.
        """
        states, logits = torch.empty(*self._shape, self._out.shape[1], dtype=self._dtype), None
        for offset, places in self._out_places:
            put(places, states.data_ptr() + offset)
        if self._logits is not None:
            shape, places = self._logits
            logits = torch.empty(shape, dtype=self._dtype)
            put(places, logits.data_ptr())
        self.run(turns, cache, end, masks, x)
        if logits is None:
            return states, None
        if logits.shape[1] > self._width or logits.shape[0] > self._tokens:  # kernels fill both up
            logits = logits[: self._tokens, : self._width]
        return states, logits.reshape(*self._shape, self._width)

    def run(
        self,
        turns: Turns,
        cache: Any,
        end: int,
        masks: Sequence[Tensor | None],
        x: Rows | None = None,
        between: int = 0,
    ) -> None:
        """Run it: write this call's addresses and numbers where its kernels look for them, and go through its steps.

        Args:
            end, masks: as of ``__call__``. x: None where nothing is embedded.
            between: slots that are left as they are, between the committed ones and the tokens'.
        """
        scores = -(-end // TILE) * TILE * 4
        needed = torch.get_num_threads() * self._rows * scores // 4
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(2 * needed, dtype=torch.float32)
        slots = cache.slots
        now = [end, slots.capacity, self._scratch.data_ptr(), scores, slots.lengths.data_ptr(), between]
        now += (0, 0, 0) if x is None else (x.table.data_ptr(), len(x.table) - 1, x.numbers.data_ptr())
        now += map(Tensor.data_ptr, turns)
        size = self._dtype.itemsize
        for mask in masks:
            if mask is None:
                now += (0,) * _OF_A_MASK
            else:
                now += (mask.data_ptr(), mask.stride(0) * size, mask.stride(2) * size, end - mask.shape[-1])
        now += [layer.keys.data_ptr() for layer in cache.layers]
        now += [layer.values.data_ptr() for layer in cache.layers]
        self._now.numpy()[:] = now
        for step in self._steps:
            step()

    def _new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype)

    def _temporary(self, *shape: int) -> Tensor:
        return self._buffers.empty(*shape, dtype=self._dtype)

    def _end(self) -> None:
        """Of a program: what follows is called."""
        if len(self._program):
            self._steps.append(partial(self._program.run, 1 << 30))
        self._program = Program(self._buffers)

    def _norm(
        self, parts: dict[str, Any], name: str, y: Tensor, x: Tensor | None = None, added: Tensor | None = None
    ) -> None:
        """y = norm of x, which is the residual where none is given, after x += added."""
        norm, x = parts[name], self._x if x is None else x
        kernel = elements.norm(self._dtype, x.shape[1], added is not None)
        more = (0, 0) if added is None else (added, row_bytes(added))
        self._program.add(
            kernel, x, row_bytes(x), *more, y, row_bytes(y), norm.weight, bits(norm.variance_epsilon), 1, len(x)
        )

    def _attend(self, layer: Layer, number: int, seen: Tensor) -> None:
        of, (batch, nodes), tokens = self._of, self._shape, self._tokens
        widths = [heads * of.size for heads in (of.heads, of.kv_heads, of.kv_heads)]
        q, k, v = self._linear(layer.attention, ATTENTION[:3], seen, widths)
        self._norm_heads(layer, "q_norm", q, of.heads)
        self._program.add(
            elements.turn(self._dtype, of.size, False),
            *(q, row_bytes(q), of.heads, tokens, nodes, self._now, _COSINES, _SINES, _POSITIONS, self._query),
        )
        self._keep(layer, number, k, v)
        queries = of.heads // of.kv_heads * nodes
        self._rows = elements.queries_at_a_time(queries)
        mask = _MASKS + _OF_A_MASK * of.kinds.index(layer.kind)
        self._program.add(
            elements.attend(self._dtype, of.size, self._rows, self._masked),
            *(self._query, self._attended, row_bytes(self._attended), bits(of.scale)),
            *(batch, of.kv_heads, nodes, queries),
            *(self._now, self._keys + number, self._values + number, _END, _CAPACITY, _SCRATCH, _SCRATCH_BYTES),
            *(range(mask, mask + _OF_A_MASK) if self._masked else ()),
        )
        self._program.wait()

    def _norm_heads(self, layer: Layer, name: str, x: Tensor, heads: int) -> None:
        """Of every head by itself, in place, where the layer has such a norm."""
        if (norm := layer.attention.get(name)) is not None:
            kernel, epsilon = elements.norm(self._dtype, self._of.size, False), bits(norm.variance_epsilon)
            given = (x, row_bytes(x), 0, 0, x, row_bytes(x), norm.weight, epsilon, heads, self._tokens * heads)
            self._program.add(kernel, *given)
            self._program.wait()

    def _keep(self, layer: Layer, number: int, k: Tensor, v: Tensor) -> None:
        """Put keys, turned, and values into the cache."""
        of = self._of
        self._norm_heads(layer, "k_norm", k, of.kv_heads)
        self._program.add(
            elements.turn(self._dtype, of.size, True),
            *(k, row_bytes(k), of.kv_heads, self._tokens, self._shape[1], self._now, _COSINES, _SINES, _POSITIONS),
            *(v, row_bytes(v), self._keys + number, self._values + number, _LENGTHS, _BETWEEN, _CAPACITY),
        )
        self._program.wait()

    def _mlp(self, mlp: Any, y: Tensor) -> Tensor:
        if not is_plain_mlp(mlp):
            return self._called(mlp, y, y.shape[1])
        width = self._of._config.intermediate_size
        gate, up = self._linear(mlp._modules, MLP[:2], y, [width] * 2)
        active, grain = self._temporary(len(y), width), integers.grain_of(width)
        given = (gate, row_bytes(gate), up, row_bytes(up), active, row_bytes(active), width // grain, len(y))
        self._program.add(elements.gated(self._dtype, grain), *given)
        return self._linear(mlp._modules, MLP[2:], active, [y.shape[1]], grain)[0]

    def _linear(
        self, modules: dict[str, Any], names: Sequence[str], x: Tensor, widths: list[int], grain: int | None = None
    ) -> list[Tensor]:
        """Results of linear layers for x (T, K), each (T or more, its width or more).

        Args:
            grain: what each thread made of a row of x right before; None stands for all of it.
        """
        packed = [blocks_of(modules[name]) for name in names]
        kinds = {type(one) for one in packed if one is not None}
        prepared: dict[type, Any] = {}
        if len(kinds) > 1:
            self._program.wait()
        for one in packed:
            if one is not None and type(one) not in prepared:
                prepared[type(one)] = one.prepare(self._program, x, grain or x.shape[1])
        if len(self._program):
            self._program.wait()
        found: list[Tensor] = []
        for one, name, width in zip(packed, names, widths, strict=True):
            if one is None:
                found.append(self._called(modules[name], x, width))
            else:
                found.append(one.multiply(self._program, prepared[type(one)], self._dtype))
                if isinstance(modules[name], QuantizedLinear) and modules[name].bias is not None:
                    self._program.wait()  # kernels for floats add theirs themselves
                    lanes = gcd(width, TILE)
                    given = (found[-1], row_bytes(found[-1]), modules[name].bias, 0, width // lanes, len(x))
                    self._program.add(elements.add(self._dtype, lanes), *given)
        if len(self._program):
            self._program.wait()
        return found

    def _called(self, module: Any, x: Tensor, width: int) -> Tensor:
        """What a module that no kernel stands for gives for x, (T, width)."""
        found = self._temporary(len(x), width)
        self._end()
        self._steps.append(lambda: found.view(*self._shape, -1).copy_(module(x.view(*self._shape, -1))))
        return found

    def _take(self, wanted: list[int], layer: int, states: Tensor) -> None:
        """Put a layer's states where they are asked for."""
        width = states.shape[1]
        for at in (at * width for at, one in enumerate(wanted) if one == layer):
            out = self._out[:, at : at + width]
            elements.copy_rows(self._program, out, states)
            self._out_places.append((at * out.itemsize, self._program.vacate(out)))


def all_rows(x: Tensor) -> Rows:
    """Of (..., W), as a table of its own."""
    table = x.reshape(-1, x.shape[-1]).contiguous()
    return Rows(table, torch.arange(len(table)))


def blocks_of(module: Any) -> floats.Packed | integers.Packed | None:
    """A linear layer's weight in the blocks of a kernel, where it is one of ours as it came."""
    own = vars(module).get("forward")
    if is_hooked(module):
        return None
    if isinstance(own, PrepackedForward):
        packed = own.packed()
        return None if packed is None or packed.padding else packed
    if type(module) is QuantizedLinear and own is None:
        return module.blocks
    return None
