"""Layers that several networks share."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shape.networks import layers
from shape.networks.config import ShapeConfig
from shape.networks.layers import ContextAttention, MarkovBias, attend, rotary_table, rotate


def attention(**options) -> ContextAttention:
    torch.manual_seed(0)
    return ContextAttention(12, 6, ShapeConfig(hidden_size=8, num_heads=2, **options)).double()


@pytest.mark.parametrize("ends", [None, (5, 2)])
@pytest.mark.parametrize("own", [0, 3])
def test_attention_is_softmax_over_what_a_node_sees(ends, own):
    """Known positions up to each row's end, and keys of the node's own path, one by one."""
    module, rows, nodes, known = attention(), 2, 3, 5
    places, query = torch.randn(rows, known, 12).double(), torch.randn(rows, nodes, 12).double()
    positions = rotary_table(torch.arange(known).expand(rows, -1), 4, torch.float64)
    at = rotary_table(torch.tensor([[7], [9]]), 4, torch.float64)
    memory = module.remember(places, places, positions)
    visible = None if ends is None else torch.arange(known) < torch.tensor(ends)[:, None, None]
    path = torch.randn(rows, nodes, own, 12).double()
    path_keys, path_values = (
        linear(path).unflatten(-1, (2, 4)).permute(0, 3, 1, 2, 4) for linear in (module.key, module.value)
    )
    found = module(query, at, memory, visible, (path_keys, path_values) if own else None)
    asked = rotate(module.query(query).unflatten(-1, (2, 4)).transpose(1, 2), at)
    for row in range(rows):
        seen = known if ends is None else ends[row]
        for node in range(nodes):
            heads = []
            for head in range(2):
                keys = torch.cat([memory[0][row, head, :seen], path_keys[row, head, node]])
                values = torch.cat([memory[1][row, head, :seen], path_values[row, head, node]])
                weights = (keys @ asked[row, head, node] / 2.0).softmax(-1)
                heads.append(weights @ values)
            torch.testing.assert_close(found[row, node], module.out(torch.cat(heads)))


@pytest.mark.parametrize("blocks", [None, 7, 21])
@pytest.mark.parametrize("budget", [1, 2000, 5000])
def test_attention_in_parts_is_attention_at_once(blocks, budget, monkeypatch):
    """Values and gradients, of grouped heads, with keys of their own for each query or for blocks of three."""
    rows, groups, heads, queries, known, size = 2, 2, 4, 21, 30, 8
    generator = torch.Generator().manual_seed(0)

    def states(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, size, generator=generator, dtype=torch.float64).requires_grad_()

    memory = states(rows, groups, known), states(rows, groups, known)
    own = () if blocks is None else (states(rows, groups, blocks, 3), states(rows, groups, blocks, 3))
    ends = torch.randint(1, known, (rows, blocks or queries), generator=generator).sort(-1).values
    inputs = (states(rows, heads, queries), *memory, *own)

    def found() -> tuple[torch.Tensor, ...]:
        result = attend(inputs[0], memory, torch.arange(known) < ends[..., None], own or None)
        return result, *torch.autograd.grad(result.square().sum(), inputs)

    whole = found()
    counted = []
    monkeypatch.setattr(layers, "_attend", lambda *given, once=layers._attend: counted.append(1) or once(*given))
    monkeypatch.setattr(layers, "SCORES_BYTES", budget)
    torch.testing.assert_close(found(), whole, rtol=1e-4, atol=1e-5)  # softmax is of float32
    assert len(counted) > 2


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 50))
@settings(max_examples=30)
def test_rotary_products_depend_on_distance_alone(first, second, shift):
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8).double().unbind(0)

    def product(at: int, other: int) -> torch.Tensor:
        rotary = [rotary_table(torch.tensor([[where]]), 8, torch.float64) for where in (at, other)]
        return (rotate(query, rotary[0]) * rotate(key, rotary[1])).sum()

    torch.testing.assert_close(product(first, second), product(first + shift, second + shift), rtol=1e-3, atol=1e-3)
    assert torch.equal(rotate(query, rotary_table(torch.tensor([[0]]), 8, torch.float64)), query)


def test_a_root_that_sees_nothing_gives_numbers():
    """Padding among a batch's roots: no NaN may reach the gradient of the others."""
    module = attention()
    places = torch.randn(1, 4, 12, dtype=torch.float64, requires_grad=True)
    memory = module.remember(places, places, rotary_table(torch.arange(4)[None], 4, torch.float64))
    visible = torch.arange(4) < torch.tensor([[[0], [3]]])
    for own in (None, tuple(torch.randn(1, 2, 2, 1, 4).double() for _ in range(2))):
        found = module(places[:, :2], rotary_table(torch.tensor([[0, 3]]), 4, torch.float64), memory, visible, own)
        assert found.isfinite().all()
        (gradient,) = torch.autograd.grad(found.sum(), places, retain_graph=True)
        assert gradient.isfinite().all()


def test_nor_where_autocast_casts_the_mask():
    """A float32 query, as normalising and rotating leave it, beside values in bfloat16."""
    query, keys, values = (
        torch.randn(1, 2, 2, 4),
        torch.randn(1, 2, 4, 4),
        torch.randn(1, 2, 4, 4, dtype=torch.bfloat16),
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(query, (keys, values), torch.zeros(1, 2, 4, dtype=torch.bool)).isfinite().all()


@given(st.integers(0, 10**6), st.integers(2, 6))
@settings(max_examples=30)
def test_coupled_steps_keep_their_marginals(seed, size):
    """With the whole vocabulary as candidates, chaining the conditionals gives back what the steps said alone."""
    generator = torch.Generator().manual_seed(seed)
    bias = MarkovBias(5, 3, size).double()
    torch.nn.init.normal_(bias.expand.weight, std=0.5, generator=generator)
    logits = torch.randn(2, 4, size, generator=generator).double()
    tokens = torch.randn(size, 5, generator=generator).double()
    reduced = bias.reduced(torch.arange(size), tokens)
    coupled = bias.couple(logits, reduced, candidates=size, iterations=400)
    assert torch.equal(coupled[:, 0], logits[:, 0])
    pushed = logits[:, 0].softmax(-1)
    for n in range(1, 4):
        conditional = (coupled[:, n, None] + bias(reduced)).softmax(-1)  # (B, before, after)
        pushed = (pushed[:, :, None] * conditional).sum(1)
        torch.testing.assert_close(pushed, logits[:, n].softmax(-1), rtol=1e-3, atol=1e-4)
    biased = (logits[:, 0].softmax(-1)[:, :, None] * (logits[:, 1, None] + bias(reduced)).softmax(-1)).sum(1)
    assert (biased - logits[:, 1].softmax(-1)).abs().max() > 1e-6  # without the coupling they are not kept
