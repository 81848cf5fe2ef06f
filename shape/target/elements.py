"""What lies between the products of a Llama-like layer, as kernels for the CPU at hand: norms, rotary embedding,
attention over a KV cache, and the activation.

Numbers are float32 or bfloat16 where they are stored and float32 in between, and are rounded where transformers rounds
them. Each token is computed by itself. Kernels divide their work over threads by rows, or by units that are named.
Strides and sizes are in bytes where their names say so.
"""

from collections.abc import Callable
from functools import cache
from math import gcd
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

from shape.target import kernels
from shape.target.kernels import F32, FLOATS, I32, I64, TILE, Code, Program, begin, every, own_units, row_bytes

_MOST_ROWS = 6  # queries whose results stay in registers
_PIECES = 4  # vectors of a value that do
_DOUBLES = ir.VectorType(ir.DoubleType(), TILE)


@cache
def norm(dtype: torch.dtype, width: int, adds: bool) -> int:
    """y = RMS norm of x (rows, width), where each stored row holds `inner` of them (the heads of a token), or one.
    Before, x += added where it adds.

    Arguments: x, x_bytes, added, added_bytes, y, y_bytes, weight (width,), epsilon's bits, inner, rows.
    """
    names = ("x", "x_bytes", "added", "added_bytes", "y", "y_bytes", "weight", "epsilon", "inner", "rows")
    lanes, size, module = gcd(width, TILE), dtype.itemsize, ir.Module()
    code, given = begin(module, "norm", names)
    epsilon = code.bitcast(code.trunc(given["epsilon"], I32), F32)
    row, code, done = own_units(code, given["rows"], "rows")
    outer, within = code.udiv(row, given["inner"]), code.times(code.urem(row, given["inner"]), width * size)
    x, added, y = (
        code.plus(given[name], code.times(outer, given[f"{name}_bytes"]), within) for name in ("x", "added", "y")
    )
    kind = ir.VectorType(F32, lanes)
    at, inner, behind = code.counted(I64(width // lanes), "squares")
    squares = inner.phi(kind)
    squares.add_incoming(every(0.0, kind), code.block)
    offset = inner.times(at, lanes * size)
    value = inner.take(dtype, inner.plus(x, offset), lanes)
    if adds:
        value = inner.stored(dtype, inner.fadd(value, inner.take(dtype, inner.plus(added, offset), lanes)))
        inner.put(dtype, value, inner.plus(x, offset))
    total = inner.fma(value, value, squares)
    squares.add_incoming(total, inner.block)
    code = inner.again(at, behind)
    mean = code.fdiv(code.total(total), F32(width))
    root = code.intrinsic("llvm.sqrt.f32", F32, code.fadd(mean, epsilon))
    scale = code.spread(code.fdiv(F32(1.0), root), lanes)
    at, inner, behind = code.counted(I64(width // lanes), "normed")
    offset = inner.times(at, lanes * size)
    value = inner.stored(dtype, inner.fmul(inner.take(dtype, inner.plus(x, offset), lanes), scale))
    weight = inner.take(dtype, inner.plus(given["weight"], offset), lanes)
    inner.put(dtype, inner.fmul(value, weight), inner.plus(y, offset))
    code = inner.again(at, behind)
    code.again(row, done).ret_void()
    return kernels.compiled(module)["norm"]


@cache
def gather(dtype: torch.dtype, lanes: int) -> int:
    """y = rows of a table, by their numbers, (rows,) int64; the last row for numbers that it has not.

    Arguments: y, y_bytes, vectors (of a row, of so many numbers), now, and where its table, last row's number and
    numbers are, rows.
    """
    size, module = dtype.itemsize, ir.Module()
    code, given = begin(module, "gather", ("y", "y_bytes", "vectors", "now", "table", "last", "numbers", "rows"))
    table, last, numbers = (_now(code, given, name) for name in ("table", "last", "numbers"))
    row, code, done = own_units(code, given["rows"], "rows")
    number = code.read(I64, code.plus(numbers, code.times(row, 8)))
    number = code.select(code.icmp_unsigned("<", number, last), number, last)
    x = code.plus(table, code.times(number, given["vectors"], lanes * size))
    y = code.plus(given["y"], code.times(row, given["y_bytes"]))
    at, inner, behind = code.counted(given["vectors"], "vectors")
    offset = inner.times(at, lanes * size)
    inner.put(dtype, inner.take(dtype, inner.plus(x, offset), lanes), inner.plus(y, offset))
    inner.again(at, behind).again(row, done).ret_void()
    return kernels.compiled(module)["gather"]


@cache
def turn(dtype: torch.dtype, size: int, cached: bool) -> int:
    """Rotary embedding of projected heads, whose units are rows times heads.

    Arguments: x, x_bytes, heads, rows, nodes (rows of a sequence), now, where its cosines and sines (P, size) and
    positions (rows,) int64 are, and
    y: queries go there as (B, heads, nodes, size) float32; or, where they are cached,
    v, v_bytes, and where now's keys, values, lengths (B,) int64, slots between these and the first node, and slots per
    sequence are: keys go to the cache, and values as they are.
    """
    names: tuple[str, ...] = ("x", "x_bytes", "heads", "rows", "nodes", "now", "cos", "sin", "positions")
    names += ("v", "v_bytes", "keys", "values", "lengths", "between", "capacity") if cached else ("y",)
    half = size // 2
    lanes, width, module = gcd(half, TILE), dtype.itemsize, ir.Module()
    code, given = begin(module, "turn", names)
    heads, nodes = given["heads"], given["nodes"]
    cos, sin, positions = (_now(code, given, name) for name in ("cos", "sin", "positions"))
    if cached:
        keys, values, lengths, between, capacity = (_now(code, given, name) for name in names[11:])
    unit, code, done = own_units(code, code.times(given["rows"], heads))
    row, head = code.udiv(unit, heads), code.urem(unit, heads)
    batch, node = code.udiv(row, nodes), code.urem(row, nodes)
    x = code.plus(given["x"], code.times(row, given["x_bytes"]), code.times(head, size * width))
    position = code.read(I64, code.plus(positions, code.times(row, 8)))
    cos, sin = (code.plus(table, code.times(position, size * width)) for table in (cos, sin))
    if cached:
        length = code.read(I64, code.plus(lengths, code.times(batch, 8)))
        slot = code.plus(length, between, node, code.times(batch, capacity))
        place = code.times(code.plus(code.times(slot, heads), head), size * width)
        y = code.plus(keys, place)
        v = code.plus(given["v"], code.times(row, given["v_bytes"]), code.times(head, size * width))
    else:
        place = code.plus(code.times(code.plus(code.times(batch, heads), head), nodes), node)
        y = code.plus(given["y"], code.times(place, size * 4))
    for at in range(0, half, lanes):
        here, there = (code.take(dtype, code.plus(x, (at + some) * width), lanes) for some in (0, half))
        for some, one, other, add in ((0, here, there, code.fsub), (half, there, here, code.fadd)):
            places = (at + some) * width
            turned = [
                code.stored(dtype, code.fmul(value, code.take(dtype, code.plus(table, places), lanes)))
                for value, table in ((one, cos), (other, sin))
            ]
            value = code.stored(dtype, add(*turned))
            if cached:
                code.put(dtype, value, code.plus(y, places))
                code.put(dtype, code.take(dtype, code.plus(v, places), lanes), code.plus(values, place, places))
            else:
                code.write(value, code.plus(y, (at + some) * 4))
    code.again(unit, done).ret_void()
    return kernels.compiled(module)["turn"]


def queries_at_a_time(count: int) -> int:
    """Of so many queries that share a key head, those that ``attend`` takes at a time."""
    return -(-count // -(-count // _MOST_ROWS))


@cache
def attend(dtype: torch.dtype, size: int, rows: int, masked: bool) -> int:
    """Attention of queries that share a key head, so many at a time, over a KV cache (B, slots, heads, size).

    Scores of all keys are written down, in a part of `scratch` that is the thread's own; units are sequences times key
    heads times groups of `rows` queries.

    Arguments: query (B, heads, queries, size) float32, out, out_bytes (of a token), scale's bits, batch, heads (of
    keys), nodes (N, which divides `queries`), queries, now, and where its keys, values, end (how many keys are seen),
    slots per sequence, scratch, scratch_bytes (of a query, for whole vectors) are, and, where it is masked, the mask's
    address, bytes of a sequence, bytes of a node, and first slot, before which no keys are read.
    """
    names: tuple[str, ...] = ("query", "out", "out_bytes", "scale", "batch", "heads", "nodes", "queries", "now")
    names += ("keys", "values", "end", "capacity", "scratch", "scratch_bytes")
    names += ("mask", "mask_batch", "mask_node", "first") if masked else ()
    width, lanes, module = dtype.itemsize, gcd(size, TILE), ir.Module()
    code, given = begin(module, "attend", names)
    heads, queries, nodes = given["heads"], given["queries"], given["nodes"]
    keys, values, end, capacity, scratch, scratch_bytes = (_now(code, given, name) for name in names[9:15])
    scale, step = code.bitcast(code.trunc(given["scale"], I32), F32), code.times(heads, size * width)
    groups = code.udiv(code.plus(queries, rows - 1), I64(rows))
    scratch = code.plus(scratch, code.times(code.function.args[1], scratch_bytes, rows))
    scores = [code.plus(scratch, code.times(scratch_bytes, row)) for row in range(rows)]
    if masked:
        mask, mask_batch, mask_node, first = (_now(code, given, name) for name in names[15:])
        keys, values = (code.plus(one, code.times(first, step)) for one in (keys, values))
        end = code.sub(end, first)
    unit, code, done = own_units(code, code.times(given["batch"], heads, groups))
    pair, group = code.udiv(unit, groups), code.urem(unit, groups)
    batch, head = code.udiv(pair, heads), code.urem(pair, heads)
    last = code.sub(queries, I64(1))
    those = [code.plus(code.times(group, rows), row) for row in range(rows)]
    those = [code.select(code.icmp_unsigned("<", one, last), one, last) for one in those]
    place = code.times(code.plus(code.times(batch, capacity, heads), head), size * width)
    keys, values = code.plus(keys, place), code.plus(values, place)
    query = [
        code.plus(given["query"], code.times(code.plus(code.times(pair, queries), one), size * 4)) for one in those
    ]
    seen = [
        code.plus(mask, code.times(batch, mask_batch), code.times(code.urem(one, nodes), mask_node))
        for one in those * masked
    ]
    # What a vector of scores has beyond the last key counts nothing.
    vectors = code.udiv(code.plus(end, TILE - 1), I64(TILE))
    for score in scores:
        tail = code.plus(score, code.times(code.sub(vectors, I64(1)), 4 * TILE))
        code.write(every(float("-inf"), FLOATS), tail)

    key, inner, behind = code.counted(end, "keys")
    where = inner.plus(keys, inner.times(key, step))
    pieces = [inner.take(dtype, inner.plus(where, at * width), lanes) for at in range(0, size, lanes)]
    for row in range(rows):
        total: Any = every(0.0, pieces[0].type)
        for at, piece in enumerate(pieces):
            total = inner.fma(inner.read(piece.type, inner.plus(query[row], at * lanes * 4)), piece, total)
        score = inner.fmul(inner.total(total), scale)
        if masked:
            added = inner.take(dtype, inner.plus(seen[row], inner.times(key, width)), 1)
            score = inner.fadd(score, inner.extract_element(added, I32(0)))
        inner.write(score, inner.plus(scores[row], inner.times(key, 4)))
    code = inner.again(key, behind)

    inverse = []
    for score in scores:
        most, code = _largest(code, score, vectors, TILE)
        # In float64 the sum is the same in whatever slots a path's keys lie, of a tree or of committed tokens.
        at, inner, behind = code.counted(vectors, "exponentials")
        totals = inner.phi(_DOUBLES)
        totals.add_incoming(every(0.0, _DOUBLES), code.block)
        there = inner.plus(score, inner.times(at, 4 * TILE))
        value = inner.exp(inner.fsub(inner.read(FLOATS, there), most))
        inner.write(inner.stored(dtype, value), there)  # as torch takes them to the products with values
        new = inner.fadd(totals, inner.fpext(value, _DOUBLES))
        totals.add_incoming(new, inner.block)
        code = inner.again(at, behind)
        total = code.fptrunc(code.total(new), F32)
        inverse.append(code.spread(code.fdiv(F32(1.0), total), lanes))

    for begins in range(0, size, lanes * _PIECES):
        some = range(begins, min(size, begins + lanes * _PIECES), lanes)
        key, inner, behind = code.counted(end, "values")
        sums = [[inner.phi(ir.VectorType(F32, lanes)) for _ in some] for _ in range(rows)]
        where = inner.plus(values, inner.times(key, step))
        pieces = [inner.take(dtype, inner.plus(where, at * width), lanes) for at in some]
        found: list[list[Any]] = []
        for row, totals_of in enumerate(sums):
            share_of = inner.spread(inner.read(F32, inner.plus(scores[row], inner.times(key, 4))), lanes)
            found.append([inner.fma(share_of, piece, one) for piece, one in zip(pieces, totals_of, strict=True)])
            for one, new in zip(totals_of, found[row], strict=True):
                one.add_incoming(every(0.0, one.type), code.block)
                one.add_incoming(new, inner.block)
        code = inner.again(key, behind)
        for row, one in enumerate(those):
            token = code.plus(code.times(batch, nodes), code.urem(one, nodes))
            place = code.plus(code.times(head, code.udiv(queries, nodes)), code.udiv(one, nodes))
            out = code.plus(given["out"], code.times(token, given["out_bytes"]), code.times(place, size * width))
            for at, value in zip(some, found[row], strict=True):
                code.put(dtype, code.fmul(value, inverse[row]), code.plus(out, at * width))
    code.again(unit, done).ret_void()
    return kernels.compiled(module)["attend"]


@cache
def gated(dtype: torch.dtype, grain: int) -> int:
    """y = silu(gate) up, whose units are so many columns of a row.

    Arguments: gate, gate_bytes, up, up_bytes, y, y_bytes, grains (of a row), rows.
    """
    names = ("gate", "gate_bytes", "up", "up_bytes", "y", "y_bytes", "grains", "rows")
    lanes, size, module = gcd(grain, TILE), dtype.itemsize, ir.Module()
    code, given = begin(module, "gated", names)
    unit, code, done = own_units(code, code.times(given["rows"], given["grains"]))
    row, column = code.udiv(unit, given["grains"]), code.times(code.urem(unit, given["grains"]), grain * size)
    gate, up, y = (
        code.plus(given[name], code.times(row, given[f"{name}_bytes"]), column) for name in ("gate", "up", "y")
    )
    for at in range(0, grain * size, lanes * size):
        value = code.take(dtype, code.plus(gate, at), lanes)
        value = code.stored(dtype, code.fdiv(value, _opening(code, value)))
        code.put(dtype, code.fmul(value, code.take(dtype, code.plus(up, at), lanes)), code.plus(y, at))
    code.again(unit, done).ret_void()
    return kernels.compiled(module)["gated"]


@cache
def add(dtype: torch.dtype, lanes: int) -> int:
    """x += y by rows, so many numbers at a time. Arguments: x, x_bytes, y, y_bytes, vectors (of a row), rows."""
    return _by_rows("add", dtype, dtype, lanes)


@cache
def copy(dtype: torch.dtype, source: torch.dtype, lanes: int) -> int:
    """x = y, of another dtype perhaps, as ``add``."""
    return _by_rows("copy", dtype, source, lanes)


def copy_rows(program: Program, x: Tensor, y: Tensor) -> None:
    """Go on with x = y, of as many columns and rows as y has."""
    lanes = gcd(y.shape[1], TILE)
    program.add(copy(x.dtype, y.dtype, lanes), x, row_bytes(x), y, row_bytes(y), y.shape[1] // lanes, len(y))


def _by_rows(name: str, dtype: torch.dtype, source: torch.dtype, lanes: int) -> int:
    module, code, given, number, done, (x, y) = _begin_rows(name, ("x", "y"), "vectors")
    at, inner, behind = code.counted(given["vectors"], "vectors")
    x, y = (inner.plus(row, inner.times(at, lanes * one.itemsize)) for row, one in ((x, dtype), (y, source)))
    value = inner.take(source, y, lanes)
    if name == "add":
        value = inner.fadd(inner.take(dtype, x, lanes), value)
    inner.put(dtype, value, x)
    inner.again(at, behind).again(number, done).ret_void()
    return kernels.compiled(module)[name]


@cache
def standardise(width: int) -> int:
    """y = layer normalisation of x, float32, without weights. Arguments: x, x_bytes, y, y_bytes, rows."""
    lanes = gcd(width, TILE)
    module, code, _, number, done, (x, y) = _begin_rows("standardise", ("x", "y"))
    total, code = _summed(code, width, lanes, lambda inner, at: inner.take(torch.float32, inner.plus(x, at), lanes))
    mean = code.spread(code.fdiv(total, F32(width)), lanes)

    def centred(inner: Code, at: Any) -> Any:
        return inner.fsub(inner.take(torch.float32, inner.plus(x, at), lanes), mean)

    def square(inner: Code, at: Any) -> Any:
        value = centred(inner, at)
        return inner.fmul(value, value)

    squares, code = _summed(code, width, lanes, square)
    root = code.intrinsic("llvm.sqrt.f32", F32, code.fadd(code.fdiv(squares, F32(width)), F32(1e-5)))
    scale = code.spread(code.fdiv(F32(1.0), root), lanes)

    def scaled(inner: Code, at: Any) -> None:
        inner.write(inner.fmul(centred(inner, at), scale), inner.plus(y, at))

    code = _each(code, width, lanes, scaled)
    code.again(number, done).ret_void()
    return kernels.compiled(module)["standardise"]


@cache
def combine(width: int, adds: bool, active: bool) -> int:
    """y = x, plus `added` where it adds, through silu where it is active, float32.

    Arguments: x, x_bytes, added, added_bytes, y, y_bytes, rows.
    """
    lanes = gcd(width, TILE)
    module, code, _, number, done, (x, added, y) = _begin_rows("combine", ("x", "added", "y"))

    def one(inner: Code, at: Any) -> None:
        value = inner.take(torch.float32, inner.plus(x, at), lanes)
        if adds:
            value = inner.fadd(value, inner.take(torch.float32, inner.plus(added, at), lanes))
        inner.write(inner.fdiv(value, _opening(inner, value)) if active else value, inner.plus(y, at))

    _each(code, width, lanes, one).again(number, done).ret_void()
    return kernels.compiled(module)["combine"]


@cache
def residual(width: int) -> int:
    """y = state + size sigmoid(gate + shared) delta, float32, where the size is the state's root mean square.

    Arguments: state, gate, shared, delta and y, each with its bytes of a row, rows.
    """
    lanes = gcd(width, TILE)
    names = ("state", "gate", "shared", "delta", "y")
    module, code, _, number, done, (state, gate, shared, delta, y) = _begin_rows("residual", names)
    size, code = _root_mean_square(code, state, width, lanes)

    def one(inner: Code, at: Any) -> None:
        here, opens, more, change = (
            inner.take(torch.float32, inner.plus(place, at), lanes) for place in (state, gate, shared, delta)
        )
        share_of = inner.fdiv(size, _opening(inner, inner.fadd(opens, more)))
        inner.write(inner.fma(share_of, change, here), inner.plus(y, at))

    _each(code, width, lanes, one).again(number, done).ret_void()
    return kernels.compiled(module)["residual"]


@cache
def softmax(width: int) -> int:
    """y = softmax of x, float32. Arguments: x, x_bytes, y, y_bytes, rows."""
    lanes = gcd(width, TILE)
    module, code, _, number, done, (x, y) = _begin_rows("softmax", ("x", "y"))
    most, code = _largest(code, x, I64(width // lanes), lanes)

    def exponential(inner: Code, at: Any) -> Any:
        value = inner.exp(inner.fsub(inner.take(torch.float32, inner.plus(x, at), lanes), most))
        inner.write(value, inner.plus(y, at))
        return value

    total, code = _summed(code, width, lanes, exponential)
    inverse = code.spread(code.fdiv(F32(1.0), total), lanes)

    def scaled(inner: Code, at: Any) -> None:
        place = inner.plus(y, at)
        inner.write(inner.fmul(inner.take(torch.float32, place, lanes), inverse), place)

    _each(code, width, lanes, scaled).again(number, done).ret_void()
    return kernels.compiled(module)["softmax"]


@cache
def mix(width: int, sized: bool) -> int:
    """y = (1 - share) y + share x, float32, where x counts in units of a state's root mean square if it is sized.

    Arguments: x, state and y, each with its bytes of a row, the share's bits, rows.
    """
    lanes = gcd(width, TILE)
    module, code, given, number, done, (x, state, y) = _begin_rows("mix", ("x", "state", "y"), "share")
    amount = code.spread(code.bitcast(code.trunc(given["share"], I32), F32), lanes)
    rest = code.fsub(every(1.0, amount.type), amount)
    if sized:
        size, code = _root_mean_square(code, state, width, lanes)
        amount = code.fmul(amount, size)

    def one(inner: Code, at: Any) -> None:
        place = inner.plus(y, at)
        before = inner.fmul(rest, inner.take(torch.float32, place, lanes))
        inner.write(inner.fma(amount, inner.take(torch.float32, inner.plus(x, at), lanes), before), place)

    _each(code, width, lanes, one).again(number, done).ret_void()
    return kernels.compiled(module)["mix"]


def _begin_rows(name: str, tensors: tuple[str, ...], *others: str) -> tuple[Any, ...]:
    """A kernel whose units are rows of tensors, each an argument with its bytes of a row (none, where all rows read the
    same): module, the code of a row, arguments, the loop's number and end, and where the row is in each tensor.
    """
    module = ir.Module()
    names = tuple(part for one in tensors for part in (one, f"{one}_bytes"))
    code, given = begin(module, name, (*names, *others, "rows"))
    row, code, done = own_units(code, given["rows"], "rows")
    places = [code.plus(given[one], code.times(row, given[f"{one}_bytes"])) for one in tensors]
    return module, code, given, row, done, places


def _each(code: Code, width: int, lanes: int, what: Callable[[Code, Any], None]) -> Code:
    """Something for every vector of a row of float32, by its offset."""
    at, inner, behind = code.counted(I64(width // lanes), "each")
    what(inner, inner.times(at, lanes * 4))
    return inner.again(at, behind)


def _summed(code: Code, width: int, lanes: int, term: Callable[[Code, Any], Any]) -> tuple[Any, Code]:
    """The sum over a row, a number, of what there is for every vector, and the code behind."""
    kind = ir.VectorType(F32, lanes)
    at, inner, behind = code.counted(I64(width // lanes), "sum")
    sums = inner.phi(kind)
    sums.add_incoming(every(0.0, kind), code.block)
    new = inner.fadd(sums, term(inner, inner.times(at, lanes * 4)))
    sums.add_incoming(new, inner.block)
    code = inner.again(at, behind)
    return code.total(new), code


def _largest(code: Code, x: Any, vectors: Any, lanes: int) -> tuple[Any, Code]:
    """Of so many vectors of float32, as a vector, and the code behind."""
    kind = ir.VectorType(F32, lanes)
    at, inner, behind = code.counted(vectors, "largest")
    largest = inner.phi(kind)
    largest.add_incoming(every(float("-inf"), kind), code.block)
    value = inner.read(kind, inner.plus(x, inner.times(at, lanes * 4)))
    new = inner.intrinsic(f"llvm.maxnum.v{lanes}f32", kind, largest, value)
    largest.add_incoming(new, inner.block)
    code = inner.again(at, behind)
    return code.spread(code.intrinsic(f"llvm.vector.reduce.fmax.v{lanes}f32", F32, new), lanes), code


def _root_mean_square(code: Code, x: Any, width: int, lanes: int) -> tuple[Any, Code]:
    """Of a row of float32, as a vector, and the code behind."""

    def square(inner: Code, at: Any) -> Any:
        value = inner.take(torch.float32, inner.plus(x, at), lanes)
        return inner.fmul(value, value)

    squares, code = _summed(code, width, lanes, square)
    return code.spread(code.intrinsic("llvm.sqrt.f32", F32, code.fdiv(squares, F32(width))), lanes), code


def _opening(code: Code, x: Any) -> Any:
    """1 + exp(-x), by which the sigmoid and silu divide."""
    return code.fadd(code.exp(code.fneg(x)), every(1.0, x.type))


def _now(code: Code, given: dict[str, Any], name: str) -> Any:
    """`now[i]`, where the argument of this name is i: `now` holds what changes from call to call."""
    return code.read(I64, code.plus(given["now"], code.times(given[name], 8)))
