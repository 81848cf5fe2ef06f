"""What a Llama-like layer computes for a few tokens on a GPU, in seven kernels instead of fifty, in Triton.

A step over a few tokens takes as long as its weights take to be read, and each kernel some microseconds more, in which
nothing is read. So products take the norm before them and the activation or residual behind them along; queries, keys
and values are products of one kernel, as gate and up projection are, from the weights as they lie. Attention reads the
slots that are in use, whatever a step of fixed shapes could see. Roundings are where transformers has them.

Imported only where Triton is: torch brings it for CUDA. Kernels are compiled at their first use on a machine, which
takes a second or so each, and kept in Triton's cache.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_LEAST, _MOST = 16, 64  # tokens of a product's tile, of which matrix units take the least
_SPAN, _MOST_SPANS = 64, 64  # slots that a program attends to at least; and how many programs share a head at most
_QUERIES = 32  # that a program attends for


class Tile(NamedTuple):
    """What a program of a product takes at a time: outputs, inputs, loads under way, and its warps."""

    outputs: int
    inputs: int
    stages: int
    warps: int


class Squares(NamedTuple):
    """Sums of squares of states, of which each program that wrote them knows its part: (parts, T) float32."""

    sums: Tensor
    parts: int


@triton.jit(do_not_specialize=["tokens", "parts", "epsilon", "rows_second", "rows_third"])
def _linear(
    x,
    weight,
    out,
    bias,
    gain,
    squares,
    residual,
    new_squares,
    second: tl.int64,
    third: tl.int64,
    bias_second: tl.int64,
    bias_third: tl.int64,
    rows,
    rows_second,
    rows_third,
    tokens,
    width,
    epsilon,
    parts,
    INPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
):
    """out (T, width): norm of x (T, INPUTS) by up to three weights, one beside the other; see ``linear``."""
    block = tl.program_id(0)
    behind_first = tl.cdiv(rows, ROWS)
    behind_second = behind_first + tl.cdiv(rows_second, ROWS)
    in_third = (block >= behind_second) & (rows_third > 0)
    in_second = (block >= behind_first) & (block < behind_second)
    start = tl.where(in_third, behind_second, tl.where(in_second, behind_first, 0))
    skip = tl.multiple_of(tl.where(in_third, third, tl.where(in_second, second, 0)), 8)
    skip_bias = tl.where(in_third, bias_third, tl.where(in_second, bias_second, 0))
    own = tl.where(in_third, rows_third, tl.where(in_second, rows_second, rows))
    column = tl.where(in_third, rows + rows_second, tl.where(in_second, rows, 0))

    row = (block - start) * ROWS + tl.arange(0, ROWS)
    depth, token = tl.arange(0, DEPTH), tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    there = token[:, None] < tokens
    x_at = x + token[:, None] * INPUTS + depth[None, :]
    row_at = tl.minimum(row, own - 1).to(tl.int64) * INPUTS
    weight_at = weight + skip + row_at[None, :] + depth[:, None]
    scale = tl.zeros((TOKENS,), tl.float32)
    if NORM:
        part = tl.arange(0, PARTS)
        held = (part[:, None] < parts) & (token[None, :] < tokens)
        total = tl.sum(tl.load(squares + part[:, None] * tokens + token[None, :], mask=held, other=0.0), 0)
        scale = tl.rsqrt(total / INPUTS + epsilon)
    found = tl.zeros((TOKENS, ROWS), tl.float32)
    other = tl.zeros((TOKENS, ROWS), tl.float32)
    for at in tl.range(0, INPUTS, DEPTH):
        if INPUTS % DEPTH == 0:
            some = tl.load(x_at + at, mask=there, other=0.0)
            weights = tl.load(weight_at + at)
        else:
            inside = depth < INPUTS - at
            some = tl.load(x_at + at, mask=there & inside[None, :], other=0.0)
            weights = tl.load(weight_at + at, mask=inside[:, None], other=0.0)
        if NORM:
            if INPUTS % DEPTH == 0:
                gains = tl.load(gain + at + depth)
            else:
                gains = tl.load(gain + at + depth, mask=depth < INPUTS - at, other=0.0)
            scaled = (some.to(tl.float32) * scale[:, None]).to(some.dtype).to(tl.float32)
            some = (gains.to(tl.float32)[None, :] * scaled).to(some.dtype)
        found = tl.dot(some, weights, found, input_precision="ieee")
        if GATED:
            if INPUTS % DEPTH == 0:
                weights = tl.load(weight_at + second + at)
            else:
                weights = tl.load(weight_at + second + at, mask=depth[:, None] < INPUTS - at, other=0.0)
            other = tl.dot(some, weights, other, input_precision="ieee")

    kind = out.dtype.element_ty
    written = there & (row < own)[None, :]
    if BIAS:
        found += tl.load(bias + skip_bias + row, mask=row < own, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gate = found.to(kind).to(tl.float32)
        active = (gate / (1 + tl.exp(-gate))).to(kind).to(tl.float32)
        found = active * other.to(kind).to(tl.float32)
    target = token[:, None] * width + (column + row)[None, :]
    if RESIDUAL:
        before = tl.load(residual + target, mask=written, other=0.0).to(tl.float32)
        found = (found.to(kind).to(tl.float32) + before).to(kind).to(tl.float32)
        found = tl.where(written, found, 0.0)
        tl.store(new_squares + block * tokens + token, tl.sum(found * found, 1), mask=token < tokens)
    tl.store(out + target, found.to(kind), mask=written)


@triton.jit
def _turned(low, high, cosine, sine, place, HALF: tl.constexpr):
    """Both halves of a head at its position, rounded as transformers does."""
    half = tl.arange(0, HALF)
    kind = cosine.dtype.element_ty
    cos_low, cos_high = tl.load(cosine + place + half), tl.load(cosine + place + HALF + half)
    sin_low, sin_high = tl.load(sine + place + half), tl.load(sine + place + HALF + half)
    first = (low * cos_low.to(tl.float32)).to(kind).to(tl.float32)
    first -= (high * sin_low.to(tl.float32)).to(kind).to(tl.float32)
    last = (high * cos_high.to(tl.float32)).to(kind).to(tl.float32)
    last += (low * sin_high.to(tl.float32)).to(kind).to(tl.float32)
    return first.to(kind), last.to(kind)


@triton.jit(do_not_specialize=["epsilon"])
def _turn(
    states,
    cosine,
    sine,
    slots,
    keys,
    values,
    query_gain,
    key_gain,
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
):
    """Of one token and head: queries turned in place, keys turned into the cache, values as they are."""
    token, head = tl.program_id(0), tl.program_id(1)
    half = tl.arange(0, HALF)
    at = states + (token * (HEADS + 2 * KV_HEADS) + head) * (2 * HALF)
    low, high = tl.load(at + half).to(tl.float32), tl.load(at + HALF + half).to(tl.float32)
    kind = states.dtype.element_ty
    if NORM:  # noqa: SIM102  # known when it is compiled
        if head < HEADS + KV_HEADS:
            gain = query_gain if head < HEADS else key_gain
            total = tl.sum(low * low, 0) + tl.sum(high * high, 0)
            scale = tl.rsqrt(total / (2 * HALF) + epsilon)
            low, high = (low * scale).to(kind).to(tl.float32), (high * scale).to(kind).to(tl.float32)
            low = (tl.load(gain + half).to(tl.float32) * low).to(kind).to(tl.float32)
            high = (tl.load(gain + HALF + half).to(tl.float32) * high).to(kind).to(tl.float32)
    if head < HEADS:
        first, last = _turned(low, high, cosine, sine, token * (2 * HALF), HALF)
        tl.store(at + half, first)
        tl.store(at + HALF + half, last)
    elif head < HEADS + KV_HEADS:
        first, last = _turned(low, high, cosine, sine, token * (2 * HALF), HALF)
        slot = (tl.load(slots + token) * KV_HEADS + head - HEADS) * (2 * HALF)
        tl.store(keys + slot + half, first)
        tl.store(keys + slot + HALF + half, last)
    else:
        slot = (tl.load(slots + token) * KV_HEADS + head - HEADS - KV_HEADS) * (2 * HALF)
        tl.store(values + slot + half, low.to(kind))
        tl.store(values + slot + HALF + half, high.to(kind))


@triton.jit(do_not_specialize=["nodes", "mask_batch"])
def _attend(
    states,
    keys,
    values,
    mask,
    lengths,
    found,
    weights,
    scale,
    nodes,
    capacity,
    mask_batch,
    mask_row,
    SPAN: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A part of attention: what queries that share a key head find in a span of slots, before it is divided.

    Writes found (B, KV_HEADS, spans, rows, SIZE) and weights (B, KV_HEADS, spans, rows, 2): the largest score, and the
    sum.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    pair, part, spans = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    batch, head = pair // KV_HEADS, pair % KV_HEADS
    end = (tl.load(lengths + batch) + nodes).to(tl.int32)  # slots in use; those behind are not read
    begin = part * SPAN
    if begin >= end:
        return
    row, d, slot = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE), tl.arange(0, SLOTS)
    node, rows = row // GROUP, nodes * GROUP
    there = row < rows
    token = batch * nodes + node
    query_at = states + (token * (HEADS + 2 * KV_HEADS) + head * GROUP + row % GROUP)[:, None] * SIZE + d[None, :]
    query = tl.load(query_at, mask=there[:, None], other=0.0)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    gathered = tl.zeros((ROWS, SIZE), tl.float32)
    first = batch.to(tl.int64) * capacity * KV_HEADS + head
    for some in tl.range(0, SPAN, SLOTS):
        seen = begin + some + slot < end
        place = (first + (begin + some + slot).to(tl.int64) * KV_HEADS) * SIZE
        key = tl.load(keys + place[None, :] + d[:, None], mask=seen[None, :], other=0.0)
        value = tl.load(values + place[:, None] + d[None, :], mask=seen[:, None], other=0.0)
        scores = tl.dot(query, key, input_precision="ieee") * scale
        looks = there[:, None] & seen[None, :]
        if MASKED:
            where = mask + batch * mask_batch + node[:, None] * mask_row + (begin + some + slot)[None, :]
            looks &= tl.load(where, mask=looks, other=0.0).to(tl.float32) == 0.0
        scores = tl.where(looks, scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        shrink, share = tl.exp(largest - safe), tl.exp(scores - safe[:, None])
        gathered = tl.dot(share.to(value.dtype), value, gathered * shrink[:, None], input_precision="ieee")
        total, largest = total * shrink + tl.sum(share, 1), new
    at = (pair * spans + part) * rows + row
    tl.store(found + at[:, None] * SIZE + d[None, :], gathered, mask=there[:, None])
    tl.store(weights + 2 * at, largest, mask=there)
    tl.store(weights + 2 * at + 1, total, mask=there)


@triton.jit(do_not_specialize=["nodes", "span", "spans"])
def _join(
    found,
    weights,
    lengths,
    out,
    nodes,
    span,
    spans,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SPANS: tl.constexpr,
):
    """out (T, HEADS * SIZE), of one query, from what it found in each span."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    token, head = tl.program_id(0), tl.program_id(1)
    batch = token // nodes
    rows = nodes * GROUP
    row = (token % nodes) * GROUP + head % GROUP
    part, d = tl.arange(0, SPANS), tl.arange(0, SIZE)
    used = part * span < tl.load(lengths + batch) + nodes
    at = ((batch * KV_HEADS + head // GROUP) * spans + part) * rows + row
    largest = tl.load(weights + 2 * at, mask=used, other=float("-inf"))
    share = tl.exp(largest - tl.max(largest, 0))
    total = tl.sum(share * tl.load(weights + 2 * at + 1, mask=used, other=0.0), 0)
    gathered = tl.load(found + at[:, None] * SIZE + d[None, :], mask=used[:, None], other=0.0)
    joined = tl.sum(gathered * share[:, None], 0) / total
    tl.store(out + (token * HEADS + head) * SIZE + d, joined.to(out.dtype.element_ty))


def tile_of(tokens: int, inputs: int, normed: bool, added: bool) -> Tile:
    """How a product is cut: what was fast of seventeen ways, for the widths of Llama-3.2-1B and 3.1-8B on an H200.

    Args:
        normed: whether a norm comes before it. added: whether a residual is added behind it.
    """
    few = tokens <= _LEAST
    if inputs < 2048:
        return Tile(16, 128, 4, 4)
    if normed:
        return Tile(32, 256, 3, 4) if few else Tile(64, 64, 8, 4)
    if added:
        return Tile(16, 512, 4, 2) if few else Tile(32, 128, 6, 4)
    return Tile(32, 256, 4, 4) if few else Tile(128, 64, 5, 4)


def linear(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None] | None = None,
    norm: tuple[Tensor, float, Squares] | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> tuple[Tensor, Squares | None]:
    """Products of x with up to three weights, (T, sum of their outputs), in one kernel.

    Args:
        x: (T, K), contiguous.
        weights: (N, K) each, contiguous, of x's dtype and device.
        biases: (N,) each, or None for all.
        norm: of x before: gain (K,), epsilon, and sums of its squares.
        residual: (T, N), added behind; the sums of squares are then those of the result.
        gated: the two weights are gate and up: the result is silu(gate x) * up x, (T, N).
    """
    tokens, inputs = x.shape
    outputs = [len(one) for one in weights]
    rows = [*outputs[: 1 if gated else 3], 0, 0]
    width = sum(rows)
    tile = tile_of(tokens, inputs, norm is not None, residual is not None)
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    block = min(_MOST, max(_LEAST, triton.next_power_of_2(tokens)))
    blocks = sum(triton.cdiv(some, tile.outputs) for some in rows)
    gain, epsilon, squares = norm or (x, 0.0, Squares(x, 1))
    sums = None if residual is None else torch.empty(blocks, tokens, dtype=torch.float32, device=x.device)
    _linear[blocks, triton.cdiv(tokens, block)](
        x, weights[0], out, weights[0] if biases is None else biases[0], gain, squares.sums,
        x if residual is None else residual, x if sums is None else sums,
        *_behind(weights), *_behind(biases or []), *rows[:3], tokens, width, epsilon, squares.parts,
        INPUTS=inputs, TOKENS=block, ROWS=tile.outputs, DEPTH=tile.inputs,
        PARTS=triton.next_power_of_2(triton.cdiv(inputs, _LEAST)), NORM=norm is not None, BIAS=biases is not None,
        RESIDUAL=residual is not None, GATED=gated, num_stages=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out, None if sums is None else Squares(sums, blocks)


def squares_of(x: Tensor) -> Squares:
    """Of states (T, H) that no kernel of ours has made."""
    return Squares(x.float().square().sum(-1)[None], 1)


def _behind(tensors: list[Any]) -> tuple[int, int]:
    """Where the second and the third lie behind the first, in numbers of their dtype."""
    distances = [(one.data_ptr() - tensors[0].data_ptr()) // one.itemsize for one in tensors[1:]]
    return (*distances, 0, 0)[:2]


def turn(
    states: Tensor,
    turned: tuple[Tensor, Tensor],
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
    norms: tuple[Tensor, Tensor, float] | None,
) -> None:
    """Queries are turned in place; keys, turned, and values go into the cache.

    Args:
        states: (T, (heads + 2 S) D): queries, keys and values.
        turned: cosines and sines, (T, D) each.
        slots: (T,) int64, where the tokens go.
        keys, values: (B, S, capacity, D), of which tokens lie one behind the other.
        norms: gains of queries and keys, (D,) each, and epsilon.
    """
    kv_heads, size = keys.shape[1], keys.shape[3]
    gains = norms or (states, states, 0.0)
    _turn[len(states), heads + 2 * kv_heads](
        states, *turned, slots, keys, values, *gains,
        HEADS=heads, KV_HEADS=kv_heads, HALF=size // 2, NORM=norms is not None, num_warps=1,
    )  # fmt: skip


def attend(
    states: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    lengths: Tensor,
    end: int,
    heads: int,
    scale: float,
) -> Tensor:
    """What queries (see ``turn``) find in the cache, (T, heads * D).

    Args:
        mask: (B, 1, N, K), 0 where a node may look, for the last K of the ``end`` slots: it looks at none before these.
            None: at all slots up to its own, for N = 1.
        lengths: (B,) int64: slots in use before these tokens, whatever ``end`` says, of those that may be looked at.
        end: slots that are seen at most.
    """
    batch, kv_heads, capacity, size = keys.shape
    nodes = len(states) // batch
    if mask is not None and (first := end - mask.shape[-1]) > 0:
        keys, values, end = keys[:, :, first:], values[:, :, first:], end - first
    span = max(_SPAN, triton.next_power_of_2(triton.cdiv(end, _MOST_SPANS)))
    spans, rows = triton.cdiv(end, span), nodes * (heads // kv_heads)
    tile = min(_QUERIES, max(_LEAST, triton.next_power_of_2(rows)))
    shape = (batch, kv_heads, spans, rows)
    found = torch.empty(*shape, size, dtype=torch.float32, device=states.device)
    weights = torch.empty(*shape, 2, dtype=torch.float32, device=states.device)
    strides = (0, 0) if mask is None else (mask.stride(0), mask.stride(2))
    _attend[batch * kv_heads, spans, triton.cdiv(rows, tile)](
        states, keys, values, states if mask is None else mask, lengths, found, weights,
        scale, nodes, capacity, *strides, SPAN=span,
        HEADS=heads, KV_HEADS=kv_heads, SIZE=size, ROWS=tile, SLOTS=_SPAN,
        MASKED=mask is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
    out = torch.empty(len(states), heads * size, dtype=states.dtype, device=states.device)
    _join[len(states), heads](
        found, weights, lengths, out, nodes, span, spans,
        HEADS=heads, KV_HEADS=kv_heads, SIZE=size, SPANS=triton.next_power_of_2(spans),
        num_warps=1 if spans <= 8 else 4,
    )  # fmt: skip
    return out
