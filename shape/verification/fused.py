"""Forwards over a few tokens of Llama-like targets on a CPU, in one call instead of sixty a layer.

A small target's forward over one token or a tree is bound by the number of operations and not by what they compute:
each of torch's costs some microseconds before it begins, and wakes the threads anew. Here a forward is a program of
kernels (``shape.verification.program``), made once for each number of tokens, that all threads go through together:
products by the weights' own blocks (``shape.target.floats``, ``shape.target.integers``), and what lies between them
(``shape.target.elements``). Layers that are something else, as with adapters, are called in between.

Which targets are served is a list of families whose code was read. ``shape.verification.probe`` compares a served
target's states with those of its own forward when it is loaded, and turns this off where they differ.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from shape.target.families import foreign, is_hooked, is_known
from shape.target.inference import keeps_frequencies, states_of
from shape.target.kernels import Made, Pool
from shape.target.rotary import RotaryTable
from shape.target.support import Masks
from shape.verification.program import ATTENTION, MLP, Forward, Layer, Rows, Turns, all_rows

MOST = 512  # tokens of all sequences together; for more torch's own calls cost little
_KEPT = 64  # programs, of which each has its own buffers

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
            Layer(block._modules, block.self_attn._modules, kind)
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
        self._embedding: Tensor | None = None

    @classmethod
    def of(cls, body: Any, config: PretrainedConfig, head: Any = None) -> Self | None:
        """None for targets of other families."""
        if not is_known(body) or len(body.layers) != config.num_hidden_layers:
            return None
        if body.layers[0].self_attn.head_dim != 2 * len(body.rotary_emb.inv_freq):  # all of a head is turned
            return None
        made = cls(body, config, getattr(config, "layer_types", None), head)
        return made if made._unchanged() else None

    def serves(self, input_ids: Tensor, mask: Masks, cache: Any) -> bool:
        """Whether these tokens can go through: few, behind a cache of ours, and seen as one token or under a mask."""
        return (
            input_ids.numel() <= self.most
            and input_ids.device.type == self.device
            and not torch.compiler.is_compiling()
            and (mask is not None or input_ids.shape[1] == 1)
            and (cache.checked_by is self or self._computes_as_here())
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
        return cache.checked_by is self or self._look(cache)

    def _look(self, cache: Any) -> bool:
        dtype = self._body._modules["norm"].weight.dtype
        in_place = all(getattr(held, "in_place", False) and held.keys.dtype == dtype for held in cache.layers)
        if not (in_place and self._unchanged()):
            return False
        self._renew()
        cache.checked_by = self
        return True

    def __call__(
        self, input_ids: Tensor, positions: Tensor, mask: Masks, cache: Any, layers: Sequence[int], logits: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """As ``shape.verification.forward.tree_forward``, and what the output embedding reads off the last layer's
        states, (B, N, V), where that is asked for and it is in the kernels' blocks.

        Args:
            mask: (B, 1, N, K) in the target's dtype, one for all layers or one for each kind, of the last K slots.
            cache: a ``shape.verification.cache.KVCache``, behind which tokens can go (``goes_behind``).
        """
        batch, nodes = input_ids.shape
        if self._embedding is None:
            x = all_rows(self._body._modules["embed_tokens"](input_ids))
        else:
            x = Rows(self._embedding, input_ids.contiguous())
        masks = [mask[kind] if isinstance(mask, dict) else mask for kind in self.kinds]
        end = cache.slots.longest + nodes
        turns = self._turns(x.table, positions, end)
        with self.program(Forward, batch, nodes, mask is not None, tuple(layers), logits) as forward:
            return forward(x, turns, cache, end, masks)

    def _renew(self) -> None:
        """Forget what was made of weights and modules that have changed."""
        if self._made_of is None or not self._made_of.holds():
            self._programs, self._made_of, self._table = Pool(_KEPT), _Sources(self), self._rotary_table()
            self._embedding = _plain_table(self._body._modules.get("embed_tokens"), self.weights[0]["weight"].dtype)

    def forget(self) -> None:
        """Let go of programs, which hold the weights' blocks."""
        self._programs, self._made_of = Pool(_KEPT), None

    def _rotary_table(self) -> RotaryTable | None:
        """None where its frequencies change with a text's length."""
        rotary, like = self._body._modules["rotary_emb"], torch.empty(0, dtype=self.weights[0]["weight"].dtype)
        if is_hooked(rotary) or not keeps_frequencies(rotary):
            return None
        return RotaryTable(lambda positions: [part[0] for part in rotary(like, positions[None])])

    def program(self, made: Callable[..., Made], *given: Any) -> AbstractContextManager[Made]:
        """What `made` gives for these layers and arguments, kept from call to call."""
        return self._programs.lend((made, *given), partial(made, self, *given))

    def _turns(self, like: Tensor, positions: Tensor, end: int) -> Turns:
        """Of positions (B, N) below `end`."""
        if self._table is not None:
            return Turns(*self._table.until(end), positions.contiguous())
        cosines, sines = map(all_rows, self._body._modules["rotary_emb"](like, positions))
        return Turns(cosines.table, *sines)

    def _unchanged(self) -> bool:
        return (
            _hold(self._places)
            and not any(map(foreign, self._hooks))
            and not any("forward" in own for own in self._attributes)
        )


class _Sources:
    """What programs are made of, and whether it still is as it was: modules may be replaced, and weights change."""

    def __init__(self, of: FusedLayers) -> None:
        self._places: list[_Place] = []
        for layer in of.layers:
            mlp = layer.parts["mlp"]
            self._places.append((layer.parts, "mlp", mlp))
            self._places += [(layer.attention, name, layer.attention[name]) for name in ATTENTION]
            self._places += [(mlp._modules, name, mlp._modules.get(name)) for name in MLP]
        around = of._body._modules
        rotary = around.get("rotary_emb")
        self._places += [(around, name, around.get(name)) for name in ("rotary_emb", "embed_tokens")]
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


def _plain_table(module: Any, dtype: torch.dtype) -> Tensor | None:
    """The weight of an embedding that does nothing but look its rows up."""
    if type(module) is not nn.Embedding or "forward" in vars(module) or is_hooked(module):
        return None
    weight = module.weight
    return weight if module.max_norm is None and weight.dtype == dtype and weight.is_contiguous() else None


def _hold(places: list[_Place]) -> bool:
    return all(parts.get(name) is module for parts, name, module in places)
