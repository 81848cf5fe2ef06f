"""The target as its own drafter: its weights at lower rank or in 8 bits, its cache at lower rank. Needs no training."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from threading import local
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shape.drafters.lengths import DraftLength, make_length
from shape.drafters.model import ModelDrafter
from shape.errors import ConfigError, require
from shape.networks.layers import eigh
from shape.target.integers import supports
from shape.target.model import Target
from shape.target.openvino import OpenVinoTarget
from shape.target.prepack import is_plain, linear, matrix_of
from shape.target.quantize import QuantizedLinear
from shape.target.support import LayerShape
from shape.verification.cache import KVCache, KVCacheLayer, Slots
from shape.verification.forward import new_cache, prefill
from shape.verification.fused import FusedLayers
from shape.verification.probe import support_of

_LEVELS = 127  # of 8 bits, on either side of zero
_LEAST_ROWS, _MULTIPLE = 17, 8  # what CUDA's 8-bit product asks of sizes
_BLOCKS = 8  # about so many that residuals are mixed between, of equal numbers of layers
_OWN_TEXTS, _OWN_LENGTH = 16, 128  # of the target's own text, where none is given to calibrate with


@dataclass(frozen=True)
class Compression:
    """What is left of the target.

    Args:
        attention: rank of the attention's matrices, as a share of the hidden size; None leaves them.
        mlp: likewise, of the other matrices of its blocks.
        calibrated: choose the directions that outputs have in texts (PCA of activations), rather than those of the
            matrix itself (SVD).
        int8: matrices and output embedding in 8 bits, a scale per output; activations in 8 bits, a scale per token. On
            a CPU in float32 or bfloat16 by the kernels of ``shape.target.integers``, which round activations less.
        cache: rank of the cached keys and values of a head, as a share of its size, in the directions that they have in
            texts; None keeps them whole.
        residuals: strength of block attention residuals (0.35 in OTT-Decode): see ``BlockResiduals``.
    """

    attention: float | None = None
    mlp: float | None = None
    calibrated: bool = True
    int8: bool = False
    cache: float | None = None
    residuals: float = 0.0

    def __post_init__(self) -> None:
        require(self, "attention mlp cache", above=0, most=1, group="compression.")
        require(self, "residuals", least=0, most=1, group="compression.")
        if self.attention is None and self.mlp is None and self.cache is None and not self.int8 and not self.residuals:
            raise ConfigError("this compression changes nothing; set at least one of its parts")

    @property
    def needs_texts(self) -> bool:
        low = self.attention is not None or self.mlp is not None
        return self.cache is not None or (low and self.calibrated)


class CompressedDrafter(ModelDrafter):
    """Drafts with a compressed copy of the target, which shares with it whatever is not compressed.

    The default is the one that measured best: 8 bits and full rank.

    Args:
        compression: what is left.
        texts: token ids of texts to calibrate with; without any the target writes some, where the compression needs
            them.
        num_draft_tokens: see ``ModelDrafter``.
    """

    name = "compressed"

    def __init__(
        self,
        compression: Compression | None = None,
        texts: Iterable[Sequence[int]] = (),
        num_draft_tokens: str | int | DraftLength = "adaptive",
    ) -> None:
        self.compression = Compression(int8=True) if compression is None else compression
        self.texts, self.length = [list(text) for text in texts], make_length(num_draft_tokens)
        self._as_given = deepcopy(self.length)

    def __str__(self) -> str:
        texts = f", calibrated with {len(self.texts)} texts" if self.texts else ""
        return f"{self.compression}{texts}, {self._as_given}"

    def bind(self, target: Target) -> None:
        if isinstance(target, OpenVinoTarget):
            raise ConfigError(f"drafter {self.name} copies a target in torch, and the backend is openvino; use another")
        if any(weight.is_meta for weight in target.model.parameters()):
            raise ConfigError(
                f"drafter {self.name} copies a target whose weights are in memory, and some of {target.name} are "
                "offloaded; use another"
            )
        if support_of(target).recurrent and self.compression.cache is not None:
            raise ConfigError(
                f"compression.cache is of keys and values, and target {target.name} has recurrent layers; leave it out"
            )
        if self.compression.int8 and target.device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"drafter {self.name} is given target {target.name} on {target.device}, and products in 8 bits are for "
                "CPUs and CUDA; give device cpu, or use another drafter"
            )
        texts = self.texts or (own_texts(target) if self.compression.needs_texts else [])
        self.model, self.energy = compress(target, self.compression, texts)
        self._bases = None if self.compression.cache is None else cache_bases(self.model, self.compression.cache, texts)
        super().bind(target)

    def _new_cache(self, rows: int, capacity: int) -> KVCache:
        if self._bases is None:
            return super()._new_cache(rows, capacity)
        layers = support_of(self.model).layers
        return LowRankCache(self._bases, layers, rows, capacity, self.model.dtype, self.model.device)


@torch.no_grad()
def compress(
    target: Target, compression: Compression, texts: Sequence[Sequence[int]] = ()
) -> tuple[Target, float | None]:
    """A compressed copy of a target, whose other weights are the target's own.

    Decoding with it by itself is lossy.

    Args:
        texts: needed where ``compression.needs_texts``.

    Returns:
        The copy, and the mean share of energy (of outputs if calibrated, of weights else) that matrices of lower rank
        keep; None where there are none.

    Raises:
        ConfigError: nothing in the target can be compressed so, or there is no text to calibrate with.
    """
    own: dict[int, Any] = {id(tensor): tensor for tensor in (*target.model.parameters(), *target.model.buffers())}
    model = deepcopy(target.model, own)
    blocks = _blocks(model, target.config.num_hidden_layers)
    shares = {
        name: compression.attention if "attn" in name or "attention" in name else compression.mlp
        for name, _ in _matrices(blocks)
    }
    if not shares and (compression.int8 or compression.attention or compression.mlp):
        raise ConfigError(f"target {target.name} has no matrices of plain floats to compress; use another drafter")
    chosen = {name: share for name, share in shares.items() if share is not None}
    if chosen and compression.calibrated and not texts:
        raise ConfigError("no text to calibrate with is given; give some, for instance own_texts(target)")
    moments = _output_moments(model, blocks, chosen, texts, target.device) if compression.calibrated and chosen else {}
    kept = []
    for name, share in chosen.items():
        rank = max(round(share * target.hidden_size), 1)
        smaller, energy = lower_rank(blocks.get_submodule(name), rank, moments.get(name))
        blocks.set_submodule(name, smaller)
        kept.append(energy)
    if compression.int8:
        for name, module in _matrices(blocks):
            blocks.set_submodule(name, in_8_bits(module))
        head = model.get_output_embeddings()
        if is_plain(head):
            model.set_output_embeddings(in_8_bits(head))
    if compression.residuals:
        BlockResiduals(compression.residuals).attach(blocks)
    small = Target(model, target.tokenizer, name=f"{target.name}, compressed")
    if (known := target.support) is not None:  # fused layers hold the target's modules: the copy has its own
        fused = None if known.fused is None else FusedLayers.of(small.model.base_model, small.config, small.head)
        small.support = replace(known, fused=fused)
    return small, sum(kept) / len(kept) if kept else None


def own_texts(target: Target, rows: int = _OWN_TEXTS, length: int = _OWN_LENGTH) -> list[list[int]]:
    """Texts that the target writes from nothing but a first token, (rows, length) token ids."""
    device = target.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        first = torch.randint(target.vocab_size, (rows, 1), device=device)
        begin = getattr(target.tokenizer, "bos_token_id", None)
        if begin is not None:
            first.fill_(begin)
        written = target.model.generate(
            first, attention_mask=torch.ones_like(first), do_sample=True, max_new_tokens=length - 1,
            min_new_tokens=length - 1, top_k=0, top_p=1.0,
        )  # fmt: skip
    return cast(Tensor, written).tolist()


def lower_rank(module: nn.Module, rank: int, moment: Tensor | None) -> tuple[nn.Module, float]:
    """A matrix at lower rank, U U^T W, with the directions U that matter most, as two factors where these are smaller.

    Args:
        moment: (out, out), sum of y y^T of its outputs y without bias; None takes W W^T, as the SVD of W does.

    Returns:
        The new module, and the share of ``moment``'s trace that U keeps.
    """
    weight, bias = matrix_of(module)
    outputs, inputs = weight.shape
    full = weight.float()
    values, vectors = eigh(full @ full.T if moment is None else moment)  # ascending
    energy = float(values[-rank:].clamp(min=0).sum() / values.clamp(min=0).sum().clamp(min=1e-30))
    basis = vectors[:, -rank:]
    down = basis.T @ full
    if basis.shape[1] * (outputs + inputs) >= outputs * inputs:
        return linear((basis @ down).to(weight.dtype), bias), energy
    return nn.Sequential(linear(down.to(weight.dtype), None), linear(basis.to(weight.dtype).contiguous(), bias)), energy


def in_8_bits(module: nn.Module) -> nn.Module:
    """A linear layer with weights of 8 bits: by our own kernels where these serve, by torch's elsewhere."""
    weight = cast(Tensor, module.weight)
    return QuantizedLinear(module, 8) if weight.is_cpu and supports(weight.dtype) else Int8Linear(module)


class Int8Linear(nn.Module):
    """A linear map in 8 bits: a scale per output for weights, a scale per token for activations, sums in 32 bits.

    For devices and dtypes that ``QuantizedLinear`` does not serve. A token's result does not depend on other tokens.
    """

    weight_int8: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        weight, bias = matrix_of(module)
        scale = weight.float().abs().amax(1).clamp(min=1e-12) / _LEVELS
        self.register_buffer("weight_int8", (weight.float() / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.float())

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        step = rows.abs().amax(1, keepdim=True).clamp_(min=1e-12).div_(_LEVELS)
        numbers = (rows / step).round_().to(torch.int8)
        found = int8_product(numbers, self.weight_int8).float().mul_(step).mul_(self.scale)
        if self.bias is not None:
            found += self.bias
        return found.to(x.dtype).reshape(*x.shape[:-1], -1)


def int8_product(rows: Tensor, weight: Tensor) -> Tensor:
    """(M, K) int8 times (N, K) int8 -> (M, N) int32, exactly."""
    (count, inputs), outputs = rows.shape, len(weight)
    if rows.device.type == "cuda" and (inputs % _MULTIPLE or outputs % _MULTIPLE):
        return (rows.double() @ weight.T.double()).to(torch.int32)
    if rows.device.type == "cuda" and count < _LEAST_ROWS:
        rows = F.pad(rows, (0, 0, 0, _LEAST_ROWS - count))
    return torch._int_mm(rows, weight.T)[:count]


class BlockResiduals:
    """Attention over what earlier blocks added to the residual stream, mixed into it (after "Attention Residuals", Kimi
    Team 2026, whose queries are learned).

    Where a block of layers begins, the n parts v_i of the stream h are embeddings, and what each block before added.
    With weights a = softmax(<norm h, norm v_i> sqrt(H)) the stream becomes h + strength (n sum a_i v_i - h). At the
    first mixing the parts add up to h, so that equal weights would change nothing. What mixing adds belongs to no part:
    later the parts add up to h less the mixings before, and equal weights would take a share of these back.

    Args:
        strength: 0 changes nothing.
    """

    def __init__(self, strength: float) -> None:
        self.strength = strength
        self._of = local()  # parts and stream of the forward that is under way, of each thread its own

    def __reduce__(self) -> tuple[type, tuple[float]]:
        return type(self), (self.strength,)

    def attach(self, layers: nn.ModuleList) -> None:
        for number in range(0, len(layers), ceil(len(layers) / _BLOCKS)):
            hook = self._begin if number == 0 else self._mix
            layers[number].register_forward_pre_hook(hook, with_kwargs=True)

    def _begin(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._of.stream = given[0] if given else named["hidden_states"]
        self._of.parts = [self._of.stream]

    def _mix(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        stream = given[0] if given else named["hidden_states"]
        self._of.parts.append(stream - self._of.stream)
        mixed = stream + self.strength * (attend(stream, self._of.parts) - stream)
        self._of.stream = mixed
        return ((mixed, *given[1:]), named) if given else (given, {**named, "hidden_states": mixed})


def attend(stream: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """n sum a_i v_i of ``BlockResiduals``, (..., H), for parts v_i of the same shape."""
    values = torch.stack(list(parts))
    query, keys = F.normalize(stream, dim=-1), F.normalize(values, dim=-1)
    weights = ((query * keys).sum(-1) * stream.shape[-1] ** 0.5).softmax(0)
    return len(parts) * (weights[..., None] * values).sum(0)


Bases = list[tuple[Tensor, Tensor]]  # per layer, for keys and for values: (heads, size, rank), orthonormal


@torch.no_grad()
def cache_bases(target: Target, share: float, texts: Sequence[Sequence[int]]) -> Bases:
    """The directions that cached keys and values of every head have in texts, the strongest first."""
    sums = [
        [torch.zeros(heads, size, size, device=one.device or target.device) for heads, size in (one.keys, one.values)]
        for one in support_of(target).layers
    ]
    for text in texts:
        cache = new_cache(target, support_of(target), 1, len(text))
        prefill(target, cache, torch.tensor([list(text)], device=target.device), [len(text)])
        for moments, layer in zip(sums, cache.layers, strict=True):
            for moment, states in zip(moments, (layer.keys, layer.values), strict=True):
                own = states[0].to(moment)
                moment += own.mT @ own

    def basis(moment: Tensor) -> Tensor:
        rank = max(round(share * moment.shape[-1]), 1)
        return eigh(moment)[1].flip(-1)[..., :rank].to(target.dtype).contiguous()

    return [(basis(keys), basis(values)) for keys, values in sums]


class LowRankCache(KVCache):
    """A KV cache that keeps the coordinates of keys and values in given bases, and gives them back in full.

    Args:
        bases: of every layer.
        others: those of ``KVCache``, for full ranks.
    """

    def __init__(self, bases: Bases, shapes: list[LayerShape], *others: Any) -> None:
        self._bases = bases
        low = [
            LayerShape((one.keys[0], keys.shape[-1]), (one.values[0], values.shape[-1]), one.dtype, one.device)
            for one, (keys, values) in zip(shapes, bases, strict=True)
        ]
        super().__init__(low, *others)

    def _views(self) -> Iterator[KVCacheLayer]:
        for layer, bases in zip(super()._views(), self._bases, strict=True):
            yield LowRankLayer(self.slots, layer.keys, layer.values, bases)


class LowRankLayer(KVCacheLayer):
    """A layer that holds coordinates in place of keys and values, and gives these back whole."""

    def __init__(self, slots: Slots, keys: Tensor, values: Tensor, bases: tuple[Tensor, Tensor]) -> None:
        super().__init__(slots, keys, values)
        self.bases = bases

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        keys, values = self.bases
        low_keys, low_values = super().update(key_states @ keys, value_states @ values)
        return low_keys @ keys.mT, low_values @ values.mT


def _blocks(model: nn.Module, count: int) -> nn.ModuleList:
    """The model's layers, which architectures name differently."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ConfigError(f"a {type(model).__name__} has no list of its {count} layers; use another drafter")


def _matrices(blocks: nn.ModuleList) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in blocks.named_modules() if is_plain(module)]


def _output_moments(
    model: nn.Module, blocks: nn.ModuleList, names: Iterable[str], texts: Sequence[Sequence[int]], device: torch.device
) -> dict[str, Tensor]:
    """Sums of y y^T over texts, (out, out) per matrix, y being its outputs without bias."""
    moments: dict[str, Tensor] = {}
    body = cast(nn.Module, model.base_model)

    def gather(name: str, module: nn.Module, given: Any, found: Tensor) -> None:
        bias = cast("Tensor | None", module.bias)
        outputs = (found if bias is None else found - bias).float().flatten(0, -2)
        moments[name] = moments.get(name, 0) + outputs.mT @ outputs

    with ExitStack() as hooks:
        for name in names:
            hooks.enter_context(blocks.get_submodule(name).register_forward_hook(partial(gather, name)))
        for text in texts:
            body(input_ids=torch.tensor([list(text)], device=device), use_cache=False)
    return moments
