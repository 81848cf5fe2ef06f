"""Products with packed weights: those of the numbers that were packed, for every token by itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shape.target import integers, kernels
from shape.target.integers import GROUP, grain_of, product
from shape.target.quantize import dequantize, pack

KINDS = [(bits, dtype) for bits in (8, 4) for dtype in (torch.float32, torch.bfloat16)]


def packed(bits: int, outputs: int, inputs: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and scales in the kernels' layout, and the numbers that they stand for, (outputs, inputs) float64."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    weights, scales = pack(weight, bits)
    scales = scales.view(torch.uint8)
    return weights, scales, dequantize(weights, scales, torch.arange(outputs), bits).double()


def tokens(dtype: torch.dtype, *shape: int) -> Tensor:
    """Activations, of which some are large, as in real models."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x[..., ::37] *= 50
    return x.to(dtype)


def rounded(x: Tensor) -> Tensor:
    """Activations as the kernels round them, (..., K) float64."""
    groups = x.double().unflatten(-1, (-1, grain_of(x.shape[-1])))
    step = groups.abs().amax(-1, keepdim=True) / (127 if x.dtype == torch.bfloat16 else 127 * 256)
    return ((groups / step).round() * step).nan_to_num(0.0).flatten(-2)


@settings(max_examples=12)
@given(st.sampled_from(KINDS), st.lists(st.integers(1, 3), max_size=2), st.integers(1, 5), st.integers(1, 40))
def test_products_are_those_of_the_rounded_numbers(kind, batch, groups, outputs):
    bits, dtype = kind
    weights, scales, meant = packed(bits, outputs, groups * GROUP)
    x = tokens(dtype, *batch, 2, groups * GROUP)
    found = product(x, weights, scales, bits, outputs)
    expected = rounded(x) @ meant.T
    assert found.dtype == dtype and found.shape == expected.shape
    # A number that lies between two steps may be rounded to either in float32.
    error = (found.double() - expected).norm() / expected.norm()
    assert error < (4e-3 if dtype == torch.bfloat16 else 4e-5)


@pytest.mark.parametrize(("bits", "dtype"), KINDS)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_does_not_depend_on_the_others(bits, dtype, threads):
    """Bit for bit, in chunks of every size, by one thread and by two, beside tokens of any size."""
    weights, scales, _ = packed(bits, 1040, 256)  # enough for threads to be woken
    x = tokens(dtype, 18, 256)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.stack([product(one, weights, scales, bits, 1040) for one in x])
        for count in (2, 5, 8, 13, 14, 17):
            assert torch.equal(product(x[:count], weights, scales, bits, 1040), alone[:count])
    finally:
        torch.set_num_threads(before)
    x[0] *= 1e4
    x[2] = torch.nan
    beside = product(x[:5], weights, scales, bits, 1040)
    assert torch.equal(beside[[1, 3, 4]], alone[[1, 3, 4]])


@pytest.mark.parametrize("features", [(), ("avx2",), ("avx2", "avx512f", "avx512vnni")])
@pytest.mark.parametrize("count", [3, 9, 17])
@pytest.mark.parametrize(("bits", "dtype"), KINDS)
def test_other_instructions_give_the_same(bits, dtype, count, features, monkeypatch):
    """On a CPU with AVX2 alone and without it, and without those for matrices, and where torch computes with the
    threads of another library.
    """
    weights, scales, _ = packed(bits, 40, 96)
    x = tokens(dtype, count, 96)
    expected = product(x, weights, scales, bits, 40)
    made, has = (integers._kernels, kernels._runner), kernels.has
    monkeypatch.setattr(kernels, "has", lambda feature: feature in features and has(feature))
    monkeypatch.setattr(kernels, "openmp", lambda: None)
    monkeypatch.setattr(kernels, "_PRODUCTS", kernels.Pool(16))
    try:
        for one in made:
            one.cache_clear()
        assert torch.equal(product(x, weights, scales, bits, 40), expected)
    finally:
        for one in made:
            one.cache_clear()


@pytest.mark.parametrize("inputs", [64, 128])
@pytest.mark.parametrize(("bits", "dtype"), KINDS)
def test_the_largest_products_fit(bits, dtype, inputs):
    """Where an instruction would saturate: weights and activations, and their low digits, all as large as can be."""
    weights, scales = pack(torch.stack([torch.ones(inputs), -torch.ones(inputs)]), bits)
    meant = dequantize(weights, scales.view(torch.uint8), torch.arange(2), bits).double()
    x = torch.full((4, inputs), 127.0 * 256)
    x[1:3, 1:] = torch.tensor([[126 * 256 + 128.0], [128.0]])  # these digits are 127 and -128, 1 and -128
    x[3:] *= -1
    x = x.to(dtype)
    found = product(x, weights, scales.view(torch.uint8), bits, 2)
    torch.testing.assert_close(
        found.double(), rounded(x) @ meant.T, rtol=8e-3 if dtype == torch.bfloat16 else 1e-5, atol=0
    )


@pytest.mark.parametrize(("bits", "dtype"), KINDS)
def test_extremes(bits, dtype):
    weights, scales, _ = packed(bits, 16, 64)
    x = torch.zeros(5, 64, dtype=dtype)
    x[1, 3], x[2, 40] = torch.nan, torch.inf
    x[3], x[4] = 1e-38, 1e30
    found = product(x, weights, scales, bits, 16)
    assert torch.equal(found[0], torch.zeros_like(found[0]))
    assert found[1].isnan().all() and not found[2].isfinite().any()
    assert found[3].abs().max() < 1e-30 and found[4].isfinite().all()
    assert product(x[:0], weights, scales, bits, 16).shape == (0, 16)
