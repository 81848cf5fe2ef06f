"""Products in bfloat16 by kernels of our own: sums in float32, for every token by itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shape.generation.decoder import ShapeDecoder
from shape.target import bfloat16, kernels, prepack
from shape.target.bfloat16 import pack, pack_bias, product
from shape.target.model import Target

pytestmark = pytest.mark.skipif(not bfloat16.serves(), reason="this CPU lacks AVX2")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@settings(max_examples=20)
@given(
    st.lists(st.integers(1, 3), max_size=2), st.integers(1, 7), st.integers(1, 70), st.integers(1, 90), st.booleans()
)
def test_products_are_sums_in_float32(batch, tokens, inputs, outputs, biased):
    weight, x, bias = numbers(outputs, inputs), numbers(*batch, inputs, seed=1), numbers(outputs, seed=2)
    packed = pack(weight)
    found = product(x, packed, pack_bias(bias if biased else None, packed), outputs)
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0)
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape
    size = x.double().abs() @ weight.double().abs().T + 1  # which rounding in float32 is relative to
    assert ((found.double() - expected).abs() <= 2**-8 * expected.abs() + inputs * 2**-24 * size).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_does_not_depend_on_the_others(threads):
    """Bit for bit, for every number of tokens, by one thread and by two."""
    packed, x = pack(numbers(1040, 256)), numbers(14, 256, seed=1)
    bias = pack_bias(None, packed)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([product(one[None], packed, bias, 1040) for one in x])
        for count in range(2, 15):
            assert torch.equal(product(x[:count], packed, bias, 1040), alone[:count])
    finally:
        torch.set_num_threads(before)
    x[0], x[2] = torch.inf, torch.nan
    beside = product(x[:5], packed, bias, 1040)
    assert torch.equal(beside[[1, 3, 4]], alone[[1, 3, 4]]) and beside[2].isnan().all()


def test_results_are_rounded_to_nearest():
    """Ties to even, as torch rounds."""
    x = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3e38, 1e-40]).bfloat16()
    x = torch.stack([x, torch.full_like(x, 2**-8)], dim=1)
    packed = pack(torch.tensor([[1.0, 1.0], [1.0, 0.5], [0.0, 0.0]]).bfloat16())
    found = product(x, packed, pack_bias(None, packed), 3)
    assert torch.equal(found, (x.float() @ torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.5, 0.0]])).bfloat16())
    assert product(x[:0], packed, pack_bias(None, packed), 3).shape == (0, 3)


@pytest.fixture
def without_onednn(monkeypatch):
    """As on a CPU on which oneDNN does not multiply in bfloat16, whatever this one is."""
    monkeypatch.setattr(prepack, "onednn_multiplies", lambda dtype: dtype == torch.float32)


@torch.no_grad()
def test_prepacked_layers_take_them(without_onednn):
    layer = nn.Linear(24, 40).bfloat16().requires_grad_(False)
    model = nn.Sequential(layer)
    x, expected = numbers(3, 24), layer(numbers(3, 24))
    assert prepack.prepack(model, True)
    torch.testing.assert_close(model(x), expected, rtol=2**-6, atol=2**-6)
    assert layer.forward._tiles is not None
    layer.bias.add_(1)  # which is noticed too
    torch.testing.assert_close(model(x), expected + 1, rtol=2**-6, atol=2**-6)


def test_drafted_decoding_writes_what_plain_decoding_writes(without_onednn):
    """The layers add up alike for one token and for a tree; what attention rounds otherwise is not seen here."""
    target = Target.load("quickstart-target", dtype="bfloat16", device_map="cpu")
    assert target.prepacked
    ids = target.encode([{"role": "user", "content": "Please book a table for two in Paris tonight."}])
    plain, drafted = (
        ShapeDecoder.from_pretrained(target=target, **options).generate(ids, max_new_tokens=32, do_sample=False)
        for options in ({"drafter": "none"}, {"predictor": "quickstart-shape"})
    )
    assert torch.equal(plain, drafted)


def test_on_threads_of_another_library(monkeypatch):
    packed, x = pack(numbers(40, 96)), numbers(3, 96, seed=1)
    expected = product(x, packed, pack_bias(None, packed), 40)
    bfloat16._kernel.cache_clear()
    monkeypatch.setattr(kernels, "openmp", lambda: None)
    try:
        assert torch.equal(product(x, packed, pack_bias(None, packed), 40), expected)
    finally:
        bfloat16._kernel.cache_clear()
