"""Forwards over a few tokens of Llama-like targets on a CPU, in one call instead of sixty a layer.

A small target's forward over one token or a tree is bound by the number of operations and not by what they compute:
each of torch's costs some microseconds before it begins, and wakes the threads anew. Here a forward is a program of
kernels (``shape.target.kernels``), made once for each number of tokens, that all threads go through together: products
by the weights' own blocks (``shape.target.floats``, ``shape.target.integers``), and what lies between them
(``shape.target.elements``). Layers that are something else, as with adapters, are called in between. Roundings are
where transformers has them: in bfloat16 many states are the same bit for bit, as sums alone are added in another order.

Which targets are served is a list of families whose code was read. ``shape.verification.probe`` compares a served
target's states with those of its own forward when it is loaded, and turns this off where they differ.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from math import gcd
from operator import is_
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig

from shape.target import elements, floats, integers
from shape.target.families import has_foreign_hooks, is_hooked, is_known, is_plain_mlp
from shape.target.inference import keeps_frequencies, states_of
from shape.target.kernels import TILE, Buffers, Made, Pool, Program, bits, row_bytes
from shape.target.prepack import PrepackedForward
from shape.target.quantize import QuantizedLinear
from shape.target.rotary import RotaryTable

MOST = 512  # tokens of all sequences together; for more torch's own calls cost little
_KEPT = 64  # programs, of which each has its own buffers
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
_END, _CAPACITY, _SCRATCH, _SCRATCH_BYTES, _SLOTS, _MASKS = range(6)  # places of what changes from call to call


class _Layer(NamedTuple):
    """Modules by name: what takes a module's place is found there."""

    parts: dict[str, Any]
    attention: dict[str, Any]
    kind: str


_Place = tuple[dict[str, Any], str, Any]  # modules by name, and which is found under one of these


class FusedLayers:
    """The body of a Llama-like target, from token ids to states.

    Args:
        kinds: of attention, by layer; None stands for one kind.
        head: the output embedding, where logits are asked for.

    Attributes:
        most: tokens that are served, of all sequences together. dtypes, device: of targets that are.
    """

    most = MOST
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    device = "cpu"

    def __init__(self, body: Any, config: PretrainedConfig, kinds: list[str] | None = None, head: Any = None) -> None:
        self._body, self._config, self.head = body, config, head
        attention = body.layers[0].self_attn
        self.scale, self.size = attention.scaling, attention.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        kinds = kinds or ["full_attention"] * len(body.layers)
        self.layers = [
            _Layer(block._modules, block.self_attn._modules, kind)
            for block, kind in zip(body.layers, kinds, strict=True)
        ]
        self.kinds = sorted(set(kinds))
        self.norms = [
            *((layer.parts, name) for layer in self.layers for name in ("input_layernorm", "post_attention_layernorm")),
            (body._modules, "norm"),
        ]
        # What is not called, and must be as it was: whose place is taken, who has hooks or a forward of its own.
        seen = [(body._modules, "layers"), *self.norms]
        seen += [(body.layers._modules, name) for name in body.layers._modules]
        for layer in self.layers:
            seen += [(layer.parts, "self_attn")]
            seen += [(layer.attention, name) for name in ("q_norm", "k_norm") if name in layer.attention]
        self._places = [(parts, name, parts[name]) for parts, name in seen]
        modules = [body, *(module for _, _, module in self._places)]
        self._hooks = [own for one in modules for own in (one._forward_hooks, one._forward_pre_hooks)]
        self._attributes = [vars(module) for module in modules]
        self.weights = [parts[name]._parameters for parts, name in self.norms]
        self.weights += [
            one._parameters for layer in self.layers for name, one in layer.attention.items() if "norm" in name
        ]
        self._made_of: _Sources | None = None
        self._table: RotaryTable | None = None

    @classmethod
    def of(cls, body: Any, config: PretrainedConfig, head: Any = None) -> Self | None:
        """None for targets of other families."""
        if not is_known(body) or len(body.layers) != config.num_hidden_layers:
            return None
        if body.layers[0].self_attn.head_dim != 2 * len(body.rotary_emb.inv_freq):  # all of a head is turned
            return None
        made = cls(body, config, getattr(config, "layer_types", None), head)
        return made if made._unchanged() else None

    def serves(self, input_ids: Tensor, mask: Tensor | dict[str, Tensor] | None, cache: Any) -> bool:
        """Whether these tokens can go through: few, behind a cache of ours, and seen as one token or under a mask."""
        return (
            input_ids.numel() <= self.most
            and input_ids.device.type == self.device
            and not torch.compiler.is_compiling()
            and cache is not None
            and (mask is not None or input_ids.shape[1] == 1)
            and (getattr(cache, "checked_by", None) is self or self._computes_as_here())
            and self.goes_behind(cache)
        )

    def _computes_as_here(self) -> bool:
        dtype = self._body._modules["norm"].weight.dtype
        alike = dtype in self.dtypes and all(parameters["weight"].dtype == dtype for parameters in self.weights)
        return alike and "sdpa" in self._config._attn_implementation

    def goes_behind(self, cache: Any) -> bool:
        """Whether tokens can go through behind what a cache holds, as modules and modes are now.

        Modules and weights are looked at once for a call of ``generate``, by its cache: that takes as long as a layer.
        """
        if torch.is_grad_enabled() or torch.is_autocast_enabled(self.device):
            return False
        return getattr(cache, "checked_by", None) is self or self._look(cache)

    def _look(self, cache: Any) -> bool:
        dtype = self._body._modules["norm"].weight.dtype
        in_place = all(getattr(held, "in_place", False) and held.keys.dtype == dtype for held in cache.layers)
        if not (in_place and self._unchanged()):
            return False
        self._renew()
        cache.checked_by = self
        return True

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor | dict[str, Tensor] | None,
        cache: Any,
        layers: Sequence[int],
        logits: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``shape.verification.forward.node_states``, and what the output embedding reads off the last layer's
        states, (B, N, V), where that is asked for and it is in the kernels' blocks.

        Args:
            mask: (B, 1, N, K) in the target's dtype, one for all layers or one for each kind.
            cache: a ``shape.verification.cache.KVCache``, behind which tokens can go (``goes_behind``).
        """
        parts, (batch, nodes) = self._body._modules, input_ids.shape
        x: Tensor = parts["embed_tokens"](input_ids)
        masks = [mask[kind] if isinstance(mask, dict) else mask for kind in self.kinds]
        end = cache.slots.longest + nodes
        turn = self._turned(x, position_ids, end)
        with self.program(Forward, batch, nodes, mask is not None, tuple(layers), logits) as forward:
            return forward(x, turn, cache, cache.slots.next(nodes, x.device), end, masks)

    def _renew(self) -> None:
        """Forget what was made of weights and modules that have changed."""
        if self._made_of is None or not self._made_of.holds():
            self._programs, self._made_of, self._table = Pool(_KEPT), _Sources(self), self._rotary_table()

    def _rotary_table(self) -> RotaryTable | None:
        """None where its frequencies change with a text's length."""
        rotary, like = self._body._modules["rotary_emb"], torch.empty(0, dtype=self.weights[0]["weight"].dtype)
        if is_hooked(rotary) or not keeps_frequencies(rotary):
            return None
        return RotaryTable(lambda positions: [part[0] for part in rotary(like, positions[None])])

    def program(self, made: Callable[..., Made], *given: Any) -> AbstractContextManager[Made]:
        """What `made` gives for these layers and arguments, kept from call to call."""
        return self._programs.lend((made, *given), partial(made, self, *given))

    def _turned(self, x: Tensor, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines (B or 1, N or 1, D) of positions below `end`."""
        if self._table is None:
            return self._body._modules["rotary_emb"](x, positions)
        cosines, sines = self._table.until(end)
        return torch.embedding(cosines, positions), torch.embedding(sines, positions)

    def _unchanged(self) -> bool:
        return (
            _hold(self._places)
            and not any(map(has_foreign_hooks, self._hooks))
            and not any("forward" in own for own in self._attributes)
        )


class _Sources:
    """What programs are made of, and whether it still is as it was: modules may be replaced, and weights change."""

    def __init__(self, of: FusedLayers) -> None:
        self._places: list[_Place] = []
        for layer in of.layers:
            mlp = layer.parts["mlp"]
            self._places.append((layer.parts, "mlp", mlp))
            self._places += [(layer.attention, name, layer.attention[name]) for name in _ATTENTION]
            self._places += [(mlp._modules, name, mlp._modules.get(name)) for name in _MLP]
        rotary = of._body._modules.get("rotary_emb")
        self._places.append((of._body._modules, "rotary_emb", rotary))
        modules = [module for module in (*(one for *_, one in self._places), of.head) if module is not None]
        self._hooks = [own for one in modules for own in (one._forward_hooks, one._forward_pre_hooks)]
        self._attributes = [vars(one) for one in modules]
        self._forwards = [own.get("forward") for own in self._attributes]
        self._weights = [*of.weights, *(one._parameters for one in modules)]
        self._weights += [] if rotary is None else [rotary._buffers]
        self._state = self._now()

    def holds(self) -> bool:
        return (
            _hold(self._places)
            and all(map(is_, (own.get("forward") for own in self._attributes), self._forwards))
            and self._state == self._now()
        )

    def _now(self) -> list[Any]:
        weights = chain.from_iterable(map(dict.values, self._weights))
        return [*map(len, self._hooks), *states_of([one for one in weights if one is not None])]


class Forward:
    """The program of a forward, for a number of sequences and tokens, and the buffers that it computes in.

    Args:
        masked: whether masks are given.
        layers: whose states are asked for.
        logits: whether logits are.
    """

    @torch.inference_mode(False)  # buffers outlive the mode in which they are made
    def __init__(
        self,
        of: FusedLayers,
        batch: int,
        nodes: int,
        masked: bool = False,
        layers: tuple[int, ...] = (-1,),
        logits: bool = False,
    ) -> None:
        self._of, self._shape, self._masked = of, (batch, nodes), masked
        weight: Tensor = of.norms[-1][0]["norm"].weight
        self._dtype, width = weight.dtype, len(weight)
        self._tokens = tokens = batch * nodes
        self._x, self._y = self._new(tokens, width), self._new(tokens, width)
        self._turn = self._new(tokens, of.size), self._new(tokens, of.size)
        self._query = torch.empty(tokens, of.heads, of.size, dtype=torch.float32)
        self._attended, self._scratch = self._new(tokens, of.heads * of.size), torch.empty(0, dtype=torch.float32)
        self._rows = 0  # queries that a thread takes at a time
        self._keys = _MASKS + 3 * len(of.kinds)
        self._values = self._keys + len(of.layers)
        self._now = torch.zeros(self._values + len(of.layers), dtype=torch.int64)
        self._out = self._y if layers == (-1,) else self._new(tokens, len(layers) * width)
        self._steps: list[Program | Callable[[], Any]] = []
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

    def _through(self, layer: _Layer, number: int, seen: Tensor) -> None:
        """A layer, and the norm behind it: y is what the next one attends from."""
        of, y = self._of, self._y
        self._buffers.again()
        self._attend(layer, number, seen)
        grain = integers.grain_of(of.heads * of.size)
        (found,) = self._linear(layer.attention, _ATTENTION[3:], self._attended, [y.shape[1]], grain)
        self._norm(*of.norms[2 * number + 1], y, added=found)
        self._norm(*of.norms[2 * number + 2], y, added=self._mlp(layer.parts["mlp"], y))

    def _begin(self) -> Tensor:
        """What the first layer attends from."""
        self._norm(*self._of.norms[0], self._y)
        return self._y

    def __call__(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        cache: Any,
        slots: Tensor,
        end: int,
        masks: Sequence[Tensor | None],
    ) -> tuple[Tensor, Tensor | None]:
        """States (B, N, layers H), and logits (B, N, V) where it makes these.

        Args:
            x: (B, N, H), embeddings. turn: cosines and sines (B or 1, N or 1, D).
            slots: (B * N,) int64, where the tokens go if the sequences' slots lie one behind the other.
            end: slots of a sequence that are seen.
            masks: by kind of attention.
        """
        self._x.copy_(x.view(self._x.shape))
        logits = None
        if self._logits is not None:
            shape, places = self._logits
            logits = torch.empty(shape, dtype=self._dtype)
            for array, at in places:
                array[at] = logits.data_ptr()
        self.run(turn, cache, slots, end, masks)
        states = self._out.view(*self._shape, -1).clone()
        return states, None if logits is None else logits[: self._tokens, : self._width].reshape(*self._shape, -1)

    def run(
        self,
        turn: tuple[Tensor, Tensor],
        cache: Any,
        slots: Tensor,
        end: int,
        masks: Sequence[Tensor | None],
    ) -> None:
        for held, given in zip(self._turn, turn, strict=True):
            held.view(*self._shape, -1).copy_(given)
        scores = -(-end // TILE) * TILE * 4
        needed = torch.get_num_threads() * self._rows * scores // 4
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(2 * needed, dtype=torch.float32)
        now = [end, cache.slots.capacity, self._scratch.data_ptr(), scores, slots.data_ptr()]
        size = self._dtype.itemsize
        for mask in masks:
            now += (0, 0, 0) if mask is None else (mask.data_ptr(), mask.stride(0) * size, mask.stride(2) * size)
        now += [layer.keys.data_ptr() for layer in cache.layers]
        now += [layer.values.data_ptr() for layer in cache.layers]
        self._now.numpy()[:] = now
        for step in self._steps:
            if isinstance(step, Program):
                step.run(1 << 30)
            else:
                step()

    def _new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype)

    def _temporary(self, *shape: int) -> Tensor:
        return self._buffers.empty(*shape, dtype=self._dtype)

    def _end(self) -> None:
        """Of a program: what follows is called."""
        if len(self._program):
            self._steps.append(self._program)
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

    def _attend(self, layer: _Layer, number: int, seen: Tensor) -> None:
        of, (batch, nodes), tokens = self._of, self._shape, self._tokens
        widths = [heads * of.size for heads in (of.heads, of.kv_heads, of.kv_heads)]
        q, k, v = self._linear(layer.attention, _ATTENTION[:3], seen, widths)
        self._norm_heads(layer, "q_norm", q, of.heads)
        self._program.add(
            elements.turn(self._dtype, of.size, False),
            *(q, row_bytes(q), *self._turn, of.heads, tokens, self._query, nodes),
        )
        self._keep(layer, number, k, v)
        queries = of.heads // of.kv_heads * nodes
        self._rows = elements.queries_at_a_time(queries)
        mask = _MASKS + 3 * of.kinds.index(layer.kind)
        self._program.add(
            elements.attend(self._dtype, of.size, self._rows, self._masked),
            *(self._query, self._attended, row_bytes(self._attended), bits(of.scale)),
            *(batch, of.kv_heads, nodes, queries),
            *(self._now, self._keys + number, self._values + number, _END, _CAPACITY, _SCRATCH, _SCRATCH_BYTES),
            *((mask, mask + 1, mask + 2) if self._masked else ()),
        )
        self._program.wait()

    def _norm_heads(self, layer: _Layer, name: str, x: Tensor, heads: int) -> None:
        """Of every head by itself, in place, where the layer has such a norm."""
        if (norm := layer.attention.get(name)) is not None:
            kernel, epsilon = elements.norm(self._dtype, self._of.size, False), bits(norm.variance_epsilon)
            given = (x, row_bytes(x), 0, 0, x, row_bytes(x), norm.weight, epsilon, heads, self._tokens * heads)
            self._program.add(kernel, *given)
            self._program.wait()

    def _keep(self, layer: _Layer, number: int, k: Tensor, v: Tensor) -> None:
        """Put keys, turned, and values into the cache."""
        of = self._of
        self._norm_heads(layer, "k_norm", k, of.kv_heads)
        self._program.add(
            elements.turn(self._dtype, of.size, True),
            *(k, row_bytes(k), *self._turn, of.kv_heads, self._tokens, v, row_bytes(v)),
            *(self._now, self._keys + number, self._values + number, _SLOTS),
        )
        self._program.wait()

    def _mlp(self, mlp: Any, y: Tensor) -> Tensor:
        if not is_plain_mlp(mlp):
            return self._called(mlp, y, y.shape[1])
        width = self._of._config.intermediate_size
        gate, up = self._linear(mlp._modules, _MLP[:2], y, [width] * 2)
        active, grain = self._temporary(len(y), width), integers.grain_of(width)
        given = (gate, row_bytes(gate), up, row_bytes(up), active, row_bytes(active), width // grain, len(y))
        self._program.add(elements.gated(self._dtype, grain), *given)
        return self._linear(mlp._modules, _MLP[2:], active, [y.shape[1]], grain)[0]

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
        if self._out is states:
            return
        for at in (at for at, one in enumerate(wanted) if one == layer):
            elements.copy_rows(self._program, self._out[:, at * states.shape[1] :], states)


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


def _hold(places: list[_Place]) -> bool:
    return all(parts.get(name) is module for parts, name, module in places)
