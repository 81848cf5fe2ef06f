"""What lies between products, against torch's own functions."""

import pytest
import torch
import torch.nn.functional as F
from helpers import numbers
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from shape.target import elements
from shape.target.kernels import Program, bits, row_bytes

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [8, 48, 64, 80, 128]  # of a head: halves that vectors of 16 divide, and others
ALL = 1 << 30  # work that all threads are woken for


def run(kernel: int, *arguments: int | Tensor) -> None:
    program = Program()
    program.add(kernel, *arguments)
    program.run(ALL)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 64])
def test_norms_are_those_of_llama(dtype, width):
    x, added = numbers(dtype, 5, width), numbers(dtype, 7, width + 8, seed=1)
    norm = LlamaRMSNorm(width, eps=1e-5).to(dtype).requires_grad_(False)
    norm.weight.copy_(numbers(dtype, width, seed=2))
    expected, y = x + added[:5, :width], torch.zeros_like(x)
    run(
        elements.norm(dtype, width, True),
        x,
        row_bytes(x),
        added,
        row_bytes(added),
        y,
        row_bytes(y),
        norm.weight,
        bits(1e-5),
        1,
        5,
    )
    assert torch.equal(x, expected)
    near = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]  # a sum in another order may be rounded otherwise
    torch.testing.assert_close(y, norm(expected), rtol=near, atol=near)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_heads_take_rows_that_lie_in_one(dtype):
    x, weight = numbers(dtype, 5, 3 * 16 + 2), numbers(dtype, 16, seed=1)
    expected = F.rms_norm(x[:, :48].reshape(5, 3, 16).float(), (16,), eps=1e-5).to(dtype) * weight
    beyond = x[:, 48:].clone()
    run(elements.norm(dtype, 16, False), x, row_bytes(x), 0, 0, x, row_bytes(x), weight, bits(1e-5), 3, 15)
    near = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(x[:, :48].reshape(5, 3, 16), expected, rtol=near, atol=near)
    assert torch.equal(x[:, 48:], beyond)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_units_are_silu_times_up(dtype):
    gate, up = 8 * numbers(dtype, 5, 96), numbers(dtype, 5, 100, seed=1)
    gate[0, :6] = torch.tensor([-1e4, -100, -1e-30, 0, 100, 1e4])
    y = torch.zeros(5, 96, dtype=dtype)
    run(elements.gated(dtype, 24), gate, row_bytes(gate), up, row_bytes(up), y, row_bytes(y), 4, 5)
    near = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(y, F.silu(gate) * up[:, :96], rtol=near, atol=near)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_added_and_copied(dtype):
    x, y, bias = numbers(dtype, 5, 30), numbers(dtype, 5, 26, seed=1), numbers(dtype, 24, seed=2)
    expected = x.clone()
    expected[:, :24] += bias
    run(elements.add(dtype, 8), x, row_bytes(x), bias, 0, 3, 5)
    assert torch.equal(x, expected)
    run(elements.copy(dtype, dtype, 2), x, row_bytes(x), y, row_bytes(y), 13, 5)
    assert torch.equal(x, torch.cat([y, expected[:, 26:]], dim=1))
    for other in DTYPES:
        found = torch.zeros(5, 30, dtype=other)
        run(elements.copy(other, dtype, 1), found, row_bytes(found), y, row_bytes(y), 26, 5)
        assert torch.equal(found, torch.cat([y.to(other), torch.zeros(5, 4, dtype=other)], dim=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_table_are_gathered_by_their_numbers(dtype):
    """Of numbers that it has not, the last one's: nothing beside the table is read."""
    table, asked = numbers(dtype, 4, 24), torch.tensor([2, 0, 2, 3, 4, -1, 1 << 40])
    found, now = torch.zeros(7, 26, dtype=dtype), torch.tensor([table.data_ptr(), 3, asked.data_ptr()])
    run(elements.gather(dtype, 8), found, row_bytes(found), 3, now, 0, 1, 2, 7)
    assert torch.equal(found[:, :24], table[[2, 0, 2, 3, 3, 3, 3]])
    assert not found[:, 24:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_heads_are_turned_as_llama_turns_them(dtype, size):
    batch, nodes, heads, slots = 2, 3, 4, 10
    x, v = numbers(dtype, 6, heads * size + 8), numbers(dtype, 6, heads * size, seed=1)
    cos, sin = numbers(dtype, 6, size, seed=2), numbers(dtype, 6, size, seed=3)
    states = x[:, : heads * size].reshape(batch, nodes, heads, size).transpose(1, 2)
    tables = (one.view(batch, nodes, size) for one in (cos, sin))
    expected = apply_rotary_pos_emb(states, states, *tables)[0]
    found = torch.zeros(batch, heads, nodes, size)
    keys, values = torch.zeros(2, batch * slots, heads, size, dtype=dtype)
    lengths, order = torch.tensor([1, 5]), torch.tensor([5, 0, 3, 1, 2, 4])
    where = torch.tensor([3, 4, 5, 17, 18, 19])  # two slots behind either length
    cos, sin = (torch.empty_like(one).index_copy_(0, order, one) for one in (cos, sin))
    now = torch.tensor([*(one.data_ptr() for one in (cos, sin, order, keys, values, lengths)), 2, slots])
    given = x, row_bytes(x), heads, 6, nodes, now, 0, 1, 2
    run(elements.turn(dtype, size, False), *given, found)
    assert torch.equal(found.to(dtype), expected)
    run(elements.turn(dtype, size, True), *given, v, row_bytes(v), *range(3, 8))
    assert torch.equal(keys[where], expected.transpose(1, 2).reshape(6, heads, size))
    assert torch.equal(values[where], v.view(6, heads, size))
    assert not keys[[0, 6, 20 - 4]].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("shared", "groups", "nodes", "masked"), [(2, 3, 7, True), (4, 1, 1, False), (1, 4, 1, True)])
@pytest.mark.parametrize(("first", "end"), [(0, 1), (0, 16), (0, 37), (5, 37), (20, 37)])
def test_attention_is_that_of_the_keys_that_are_seen(dtype, size, shared, groups, nodes, masked, first, end):
    """Those before a mask's first slot are not read: they are no numbers here."""
    first *= masked
    batch, slots, heads, queries = 2, 40, shared * groups, groups * nodes
    query = numbers(dtype, batch, heads, nodes, size)
    keys, values = (numbers(dtype, batch, slots, shared, size, seed=seed) for seed in (1, 2))
    for one in (keys, values):
        one[:, :first] = torch.nan
    mask = numbers(torch.float32, batch, 1, nodes, end - first + 3, seed=3)
    mask = torch.where(mask < -0.5, torch.finfo(dtype).min, 0.0).to(dtype)[..., : end - first]
    mask[..., 0] = 0
    rows = elements.queries_at_a_time(queries)
    scratch = torch.full((torch.get_num_threads() * rows * 48,), torch.nan)
    scores = -(-end // 16) * 64
    now = [keys.data_ptr(), values.data_ptr(), end, slots, scratch.data_ptr(), scores]
    now += [mask.data_ptr(), mask.stride(0) * mask.itemsize, mask.stride(2) * mask.itemsize, first]
    found, wide = torch.zeros(batch, nodes, heads, size, dtype=dtype), query.float()
    given = (wide, found, heads * size * found.itemsize, bits(0.3), batch, shared, nodes, queries, torch.tensor(now))
    run(elements.attend(dtype, size, rows, masked), *given, *range(10 if masked else 6))
    seen = [one[:, first:end].transpose(1, 2).double() for one in (keys, values)]
    given_mask = mask.double() if masked else None
    expected = F.scaled_dot_product_attention(query.double(), *seen, given_mask, scale=0.3, enable_gqa=True)
    near = {torch.float32: 1e-5, torch.bfloat16: 2**-6}[dtype]
    torch.testing.assert_close(found.double(), expected.transpose(1, 2), rtol=near, atol=near)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_a_number_stays_none(dtype):
    gate = torch.tensor([[torch.nan, torch.inf, 1.0, 0.0]], dtype=dtype)
    y = torch.zeros_like(gate)
    run(elements.gated(dtype, 4), gate, row_bytes(gate), torch.ones_like(gate), 0, y, 0, 1, 1)
    assert y[0, 0].isnan() and y[0, 1] == torch.inf and y[0, 2] > 0.7 and y[0, 3] == 0
    query, keys, scratch = torch.zeros(1, 2, 1, 8), numbers(dtype, 2, 1, 4, 1, 8), torch.zeros(1000)
    query[0, 1, 0, 3] = torch.nan
    now = torch.tensor([keys[0].data_ptr(), keys[1].data_ptr(), 4, 4, scratch.data_ptr(), 64])
    found = torch.zeros(1, 2, 8, dtype=dtype)
    run(elements.attend(dtype, 8, 2, False), query, found, 16 * found.itemsize, bits(1.0), 1, 1, 1, 2, now, *range(6))
    assert found[0, 0].isfinite().all() and found[0, 1].isnan().all()


WIDTHS = [6, 24, 64]  # which vectors of 2, 8 and 16 divide


def by_rows(kernel: int, *rows: Tensor, others: tuple[int, ...] = ()) -> Tensor:
    """The last tensor, behind a kernel of as many rows; one row of another serves for all of them."""
    count = len(rows[-1])
    run(kernel, *(part for x in rows for part in (x, row_bytes(x) if len(x) == count else 0)), *others, count)
    return rows[-1]


def apart(width: int, seed: int, rows: int = 5) -> Tensor:
    """Rows that are not one behind the other."""
    return 3 * numbers(torch.float32, rows, width + 3, seed=seed)[:, :width]


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_standardised_and_made_distributions(width):
    x = apart(width, 0)
    found = by_rows(elements.standardise(width), x, torch.zeros_like(x))
    torch.testing.assert_close(found, F.layer_norm(x, (width,)), rtol=1e-5, atol=1e-5)
    assert not by_rows(elements.standardise(width), torch.zeros_like(x), torch.ones_like(x)).any()
    torch.testing.assert_close(by_rows(elements.softmax(width), x, torch.zeros_like(x)), x.softmax(-1))


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_combined(width):
    x, more = apart(width, 0), apart(width, 1, rows=1)
    for adds, active in ((False, True), (True, False), (True, True)):
        expected = x + more if adds else x
        found = by_rows(elements.combine(width, adds, active), x, more, torch.zeros_like(x))
        torch.testing.assert_close(found, F.silu(expected) if active else expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_residuals_are_gated_and_mixed_in_units_of_a_state(width):
    state, shared = apart(width, 0, rows=1), apart(width, 1, rows=1)
    gate, delta = apart(width, 2), apart(width, 3)
    size = state.square().mean().sqrt()
    found = by_rows(elements.residual(width), state, gate, shared, delta, torch.zeros_like(gate))
    expected = state + size * (gate + shared).sigmoid() * delta
    torch.testing.assert_close(found, expected)
    for sized in (False, True):
        mixed = by_rows(elements.mix(width, sized), delta, state, found.clone(), others=(bits(0.3),))
        torch.testing.assert_close(mixed, 0.7 * found + 0.3 * delta * (size if sized else 1))
