"""Products in float32 and bfloat16 by kernels of our own: sums in float32, for every token by itself."""

import pytest
import torch
from helpers import numbers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from shape.generation.decoder import ShapeDecoder
from shape.target import floats, kernels, prepack
from shape.target.floats import Packed, product
from shape.target.model import Target

DTYPES = [torch.float32, torch.bfloat16]
STEP = {torch.float32: 2**-24, torch.bfloat16: 2**-8}

pytestmark = pytest.mark.skipif(not floats.supports(torch.float32), reason="this CPU lacks AVX2, or torch GNU's OpenMP")


@pytest.fixture(params=["as it is", "no matrices", "avx2"])
def cpu(request, monkeypatch):
    """This one, without instructions for matrices, and with half of its registers and no products in bfloat16."""
    has = kernels.has
    if request.param == "no matrices":
        monkeypatch.setattr(kernels, "has", lambda feature: has(feature) and not feature.startswith("amx"))
    if request.param == "avx2":
        monkeypatch.setattr(kernels, "has", lambda feature: feature in ("avx2", "fma"))
    monkeypatch.setattr(kernels, "_PRODUCTS", kernels.Pool(16))  # of those that are kept, none was made elsewhere
    floats._multiplier.cache_clear()
    yield request.param
    floats._multiplier.cache_clear()


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(DTYPES), st.lists(st.integers(1, 3), max_size=2), st.integers(1, 20), st.integers(1, 70),
    st.integers(1, 90), st.booleans(),
)  # fmt: skip
def test_products_are_sums_in_float32(cpu, dtype, batch, tokens, inputs, outputs, biased):
    weight, x = numbers(dtype, outputs, inputs), numbers(dtype, *batch, tokens, inputs, seed=1)
    bias = numbers(dtype, outputs, seed=2) if biased else None
    found = product(x, Packed.of(weight, bias))
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0)
    assert found.dtype == dtype and found.shape == expected.shape
    size = x.double().abs() @ weight.double().abs().T + 1  # which rounding in float32 is relative to
    assert ((found.double() - expected).abs() <= STEP[dtype] * expected.abs() + inputs * 2**-24 * size).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_does_not_depend_on_the_others(cpu, dtype, threads):
    """Bit for bit, for every number of tokens, by one thread and by two."""
    packed, x = Packed.of(numbers(dtype, 1040, 256)), numbers(dtype, 30, 256, seed=1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([product(one[None], packed) for one in x])
        for count in range(2, 31):
            assert torch.equal(product(x[:count], packed), alone[:count])
    finally:
        torch.set_num_threads(before)
    x[0], x[2] = torch.inf, torch.nan
    beside = product(x[:5], packed)
    assert torch.equal(beside[[1, 3, 4]], alone[[1, 3, 4]]) and beside[2].isnan().all()


def test_results_are_rounded_to_nearest(cpu):
    """Ties to even, as torch rounds."""
    x = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3e38, 1e-40]).bfloat16()
    x = torch.stack([x, torch.full_like(x, 2**-8)], dim=1)
    packed = Packed.of(torch.tensor([[1.0, 1.0], [1.0, 0.5], [0.0, 0.0]]).bfloat16())
    found = product(x, packed)
    assert torch.equal(found, (x.float() @ torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.5, 0.0]])).bfloat16())
    assert product(x[:0], packed).shape == (0, 3)


@torch.no_grad()
def test_prepacked_layers_take_them():
    layer = nn.Linear(24, 40).bfloat16().requires_grad_(False)
    model = nn.Sequential(layer)
    x, expected = numbers(torch.bfloat16, 3, 24), layer(numbers(torch.bfloat16, 3, 24))
    assert prepack.prepack(model, True)
    torch.testing.assert_close(model(x), expected, rtol=2**-6, atol=2**-6)
    assert layer.forward.packed() is not None
    layer.bias.add_(1)  # which is noticed too
    torch.testing.assert_close(model(x), expected + 1, rtol=2**-6, atol=2**-6)


def test_drafted_decoding_writes_what_plain_decoding_writes():
    """The layers add up alike for one token and for a tree; what attention rounds otherwise is not seen here."""
    target = Target.load("quickstart-target", dtype="bfloat16", device_map="cpu")
    assert target.prepacked
    ids = target.encode([{"role": "user", "content": "Please book a table for two in Paris tonight."}])
    plain, drafted = (
        ShapeDecoder.from_pretrained(target=target, **options).generate(ids, max_new_tokens=32, do_sample=False)
        for options in ({"drafter": "none"}, {"predictor": "quickstart-shape"})
    )
    assert torch.equal(plain, drafted)
