"""Compressed copies of a target: as close as their ranks allow, sharing what is not compressed, harmless to it."""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from helpers import FAMILIES, prompts
from torch import nn

from shape.drafters import CompressedDrafter, Compression
from shape.drafters.compressed import (
    BlockResiduals,
    Int8Linear,
    LowRankCache,
    attend,
    cache_bases,
    compress,
    int8_product,
    lower_rank,
    own_texts,
)
from shape.errors import ConfigError
from shape.generation.decoder import ShapeDecoder
from shape.target.model import Target
from shape.target.quantize import QuantizedLinear
from shape.target.support import Support
from shape.verification.forward import new_cache, prefill, tree_forward
from shape.verification.probe import probe, support_of
from shape.verification.tree import chain

TEXTS = [row.tolist() for row in torch.randint(64, (6, 24), generator=torch.Generator().manual_seed(1))]
IDS = torch.tensor(TEXTS[:2])


def off(small: Target, target: Target) -> float:
    """Mean total variation between next-token distributions."""
    p, q = (each.logits(each.features(IDS)).softmax(-1) for each in (small, target))
    return float((p - q).abs().sum(-1).mean() / 2)


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("arch", FAMILIES)
def test_full_rank_is_the_target_and_less_is_further_away(tiny_model, arch, calibrated):
    target = Target(tiny_model(arch))
    distances, energies = [], []
    for rank in (1.0, 0.5, 0.1):
        # Ranks are shares of the hidden size, and some matrices have more outputs.
        small, energy = compress(
            target, Compression(attention=rank, mlp=min(2 * rank, 1), calibrated=calibrated), TEXTS
        )
        distances.append(off(small, target))
        energies.append(energy)
    assert energies[0] > energies[1] > energies[2] and distances[1] < distances[2]
    only, energy = compress(target, Compression(attention=1.0, calibrated=calibrated), TEXTS)
    wide = arch in ("gpt2", "gpt_neox")  # queries, keys and values are one matrix of more outputs than inputs
    assert energy == pytest.approx(1.0, abs=1e-4) or (wide and calibrated)
    assert off(only, target) < 1e-4 or (wide and calibrated)


def test_calibrating_needs_texts(tiny_model):
    with pytest.raises(ConfigError, match="no text to calibrate with is given"):
        compress(Target(tiny_model("llama")), Compression(attention=0.5))


def test_calibrated_directions_are_the_best_for_outputs():
    torch.manual_seed(0)
    matrix, inputs = nn.Linear(12, 10), torch.randn(400, 12) * torch.linspace(0.1, 3, 12)
    outputs = (matrix(inputs) - matrix.bias).detach()
    with torch.no_grad():
        errors = {
            name: float((lower_rank(matrix, 4, moment)[0](inputs) - matrix(inputs)).square().sum())
            for name, moment in (("calibrated", outputs.T @ outputs), ("free", None))
        }
        _, energy = lower_rank(matrix, 4, outputs.T @ outputs)
    assert errors["calibrated"] < errors["free"]
    best = torch.linalg.svdvals(outputs)[4:].square().sum()  # Eckart and Young
    assert errors["calibrated"] == pytest.approx(float(best), rel=1e-3)
    assert energy == pytest.approx(1 - float(best / outputs.square().sum()), rel=1e-4)


def test_factors_are_kept_where_they_are_smaller():
    matrix = nn.Linear(12, 12)
    with torch.no_grad():
        assert isinstance(lower_rank(matrix, 3, None)[0], nn.Sequential)
        assert isinstance(lower_rank(matrix, 8, None)[0], nn.Linear)


@pytest.mark.parametrize("rows", [1, 5, 17])
def test_products_of_eight_bits_are_exact(rows):
    generator = torch.Generator().manual_seed(rows)
    first = torch.randint(-127, 128, (rows, 24), generator=generator, dtype=torch.int8)
    second = torch.randint(-127, 128, (9, 24), generator=generator, dtype=torch.int8)
    assert torch.equal(int8_product(first, second).long(), first.long() @ second.long().T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_eight_bits_are_close_and_tokens_do_not_depend_on_others(dtype):
    torch.manual_seed(0)
    matrix, x = nn.Linear(32, 20).to(dtype), torch.randn(2, 7, 32).to(dtype)
    small = Int8Linear(matrix)
    with torch.no_grad():
        found, expected = small(x), matrix(x)
        assert found.dtype == dtype and (found - expected).norm() < 0.02 * expected.norm()
        other = x.clone()
        other[:, -1] *= 50
        assert torch.equal(small(other)[:, :-1], found[:, :-1])


def test_what_is_not_compressed_is_shared_and_the_target_unchanged(tiny_model):
    target = Target(tiny_model("llama"))
    before = {name: weight.clone() for name, weight in target.model.named_parameters()}
    expected = target.features(IDS)
    everything = Compression(attention=0.3, mlp=0.3, int8=True, residuals=0.35)
    small, _ = compress(target, everything, TEXTS)
    assert off(small, target) > 0
    assert torch.equal(target.features(IDS), expected)
    assert all(torch.equal(weight, before[name]) for name, weight in target.model.named_parameters())
    own = {weight.data_ptr() for weight in target.model.parameters()}
    kept = list(small.model.parameters())
    assert kept and all(weight.data_ptr() in own for weight in kept)
    assert small.model.get_input_embeddings().weight is target.model.get_input_embeddings().weight


@pytest.mark.parametrize(
    "compression",
    [Compression(int8=True), Compression(attention=0.3, mlp=0.3, calibrated=False), Compression(residuals=0.35)],
)
def test_the_copy_goes_through_its_own_layers(tiny_model, compression):
    """Fused forwards hold the modules of the model that they were made of."""
    target = Target(tiny_model("llama", torch.float32))
    fused = support_of(target).fused is not None
    small, _ = compress(target, compression)

    def states(model: Target, support: Support) -> torch.Tensor:
        with torch.inference_mode():
            cache = new_cache(model, support, len(IDS), 40)
            return tree_forward(model, support, cache, chain(IDS[:, 0], IDS[:, 1:]))

    found, whole = states(small, support_of(small)), states(target, support_of(target))
    own = states(small, replace(support_of(small), fused=None))
    assert (found - own).norm() < 0.1 * (found - whole).norm()
    assert (support_of(small).fused is not None) == (fused and not compression.residuals)  # which are hooks


def test_eight_bits_are_multiplied_by_the_kernels_that_are_there(tiny_model):
    kinds = {torch.float32: QuantizedLinear, torch.bfloat16: QuantizedLinear, torch.float64: Int8Linear}
    for dtype, kind in kinds.items():
        small, _ = compress(Target(tiny_model("llama", dtype)), Compression(int8=True))
        assert {type(each) for each in (small.model.model.layers[0].mlp.up_proj, small.head)} == {kind}


def test_equal_attention_is_the_residual_stream():
    torch.manual_seed(0)
    part = torch.randn(3, 5)
    assert torch.allclose(attend(torch.randn(3, 5), [part, part]), 2 * part)
    parts = list(torch.randn(3, 4, 5))
    leaning = attend(parts[0] * 100, parts)
    assert (leaning - 3 * parts[0]).norm() < (leaning - sum(parts)).norm()


def test_residuals_change_nothing_at_no_strength_and_all_tokens_by_themselves(tiny_model):
    target = Target(tiny_model("llama"))
    small, _ = compress(target, Compression(residuals=0.35))
    assert off(small, target) > 1e-4
    still = target.features(IDS)
    blocks = small.model.model.layers
    for layer in blocks:
        layer._forward_pre_hooks.clear()
    BlockResiduals(0.0).attach(blocks)
    assert torch.allclose(small.features(IDS), still)
    BlockResiduals(0.5).attach(blocks)
    assert torch.allclose(small.features(IDS[:, :5]), small.features(IDS)[:, :5])


def test_residuals_of_several_threads_are_each_their_own(tiny_model):
    small, _ = compress(Target(tiny_model("llama")), Compression(residuals=0.35))
    texts = [IDS[:1, :9], IDS]
    expected = [small.features(text) for text in texts]
    assert torch.equal(Target(deepcopy(small.model)).features(IDS), expected[1])
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(small.features, texts * 40))
    assert all(torch.allclose(one, expected[at % 2]) for at, one in enumerate(found))


def test_the_cache_keeps_ranks_and_gives_back_what_they_hold(tiny_model):
    target = Target(tiny_model("llama"))
    support, heads = probe(target), 2
    target.support = support
    expected = target.features(IDS)
    distances = []
    for share in (1.0, 0.5):
        bases = cache_bases(target, share, TEXTS)
        cache = LowRankCache(bases, support.layers, 2, 30, target.dtype, target.device)
        found = prefill(target, cache, IDS, [24, 24], portion=5)
        distances.append(float((found - expected).norm() / expected.norm()))
        assert cache.layers[0].keys.shape == (2, heads, 30, round(8 * share))
    assert distances[0] < 1e-4 < distances[1]
    whole = new_cache(target, support, 2, 30)
    assert whole.layers[0].keys.shape[-1] == 8


def test_the_target_writes_texts_to_calibrate_with(tiny_model):
    target = Target(tiny_model("llama"))
    texts = own_texts(target, rows=3, length=10)
    assert [len(text) for text in texts] == [10, 10, 10] and len(set(map(tuple, texts))) == 3
    assert texts == own_texts(target, rows=3, length=10)


def test_less_is_drafted_right_the_more_is_left_out(tiny_model):
    model, batch = tiny_model("llama"), prompts()
    expected = ShapeDecoder(model).generate(**batch, max_new_tokens=30)
    lengths = []
    for compression in (
        Compression(int8=True),
        Compression(attention=0.5, cache=0.5),
        Compression(attention=0.1, mlp=0.1),
    ):
        drafter = CompressedDrafter(compression)
        out = ShapeDecoder(model, drafter, fall_back=False).generate(
            **batch, max_new_tokens=30, return_dict_in_generate=True
        )
        assert torch.equal(out.sequences, expected)
        lengths.append(out.stats.acceptance_length)
    assert lengths[0] > 2.5 and lengths[0] > lengths[1] > lengths[2]


def test_binding_again_keeps_the_length_that_was_given(tiny_model):
    drafter = CompressedDrafter(Compression(int8=True))
    said = drafter.describe()
    for _ in range(2):
        decoder = ShapeDecoder(tiny_model("llama"), drafter, fall_back=False)
        decoder.generate(**prompts([9]), max_new_tokens=30, eos_token_id=[])
        assert drafter.length.length > 4 == drafter.reproducible().length.length
        assert drafter.describe() == said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "changes nothing; set at least one"),
        ({"attention": 1.5}, "compression.attention is 1.5; give a number above 0 and at most 1"),
        ({"cache": 0.0}, "compression.cache is 0.0; give"),
        ({"residuals": 2.0}, "compression.residuals is 2.0; give a number from 0 to 1"),
    ],
)
def test_senseless_compressions_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Compression(**options)
