"""Grouped queries without repeats: the same attention, used by the model only while it verifies."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from eval.architectures import build
from shape.drafters import AdversaryDrafter
from shape.generation.decoder import ShapeDecoder
from shape.target.model import Target
from shape.target.support import cache_name
from shape.verification import attention
from shape.verification.attention import grouped_queries, grouped_sdpa
from shape.verification.probe import probe

GROUPED = ["llama", "qwen2", "qwen3", "mistral, sliding", "mixtral", "gemma3", "granite", "phi3", "cohere2", "smollm3"]


class Layer(nn.Module):
    """What the stock function reads of a model's attention layer."""

    is_causal = True

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


def tensors(batch: int, heads: int, key_heads: int, nodes: int, keys: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    mask = torch.zeros(batch, 1, nodes, keys, dtype=torch.float64)
    hidden = torch.rand(mask.shape, generator=generator) < 0.4
    hidden[..., 0] = False
    mask.masked_fill_(hidden, torch.finfo(torch.float64).min)
    return random(batch, nodes, heads, 6).transpose(1, 2), random(batch, key_heads, keys, 6), random(
        batch, key_heads, keys, 5
    ), mask  # fmt: skip


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_equals_the_stock_function(batch, key_heads, groups, nodes, keys, masked):
    query, key, value, mask = tensors(batch, key_heads * groups, key_heads, nodes, keys)
    if nodes == 1 and not masked:
        mask = None
    options: dict[str, Any] = {"scaling": 0.3, "dropout": 0.0, "sliding_window": None}
    expected, _ = sdpa_attention_forward(Layer(groups), query, key, value, mask, **options)
    found, weights = grouped_sdpa(Layer(groups), query, key, value, mask, **options)
    assert weights is None and found.shape == expected.shape and found.is_contiguous()
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_leaves_to_the_stock_function_what_it_does_not_know():
    query, key, value, mask = tensors(2, 4, 2, 3, 7)
    bias = torch.randn(1, 4, 3, 7, dtype=torch.float64)
    causal = (query, key[:, :, :3], value[:, :, :3], None)
    for given_ in ((query, key, value, mask.expand(2, 4, 3, 7) + bias), causal):
        expected = sdpa_attention_forward(Layer(2), *given_)[0]
        assert torch.equal(grouped_sdpa(Layer(2), *given_)[0], expected)
    expected = sdpa_attention_forward(Layer(2), query, key, value, mask, position_bias=bias)[0]
    assert torch.equal(grouped_sdpa(Layer(2), query, key, value, mask, position_bias=bias)[0], expected)
    # Older versions ignore a softcap, newer ones refuse it.
    try:
        expected = sdpa_attention_forward(Layer(2), query, key, value, mask, softcap=30.0)[0]
    except ValueError:
        with pytest.raises(ValueError, match="softcap"):
            grouped_sdpa(Layer(2), query, key, value, mask, softcap=30.0)
    else:
        assert torch.equal(grouped_sdpa(Layer(2), query, key, value, mask, softcap=30.0)[0], expected)


@pytest.mark.parametrize("drafter", [AdversaryDrafter(nodes=6), None], ids=["trees", "single tokens"])
@pytest.mark.parametrize("family", GROUPED)
def test_keys_are_not_repeated_and_tokens_are_those_of_the_target(family, drafter, monkeypatch):
    model = build(family)
    assert model.config._attn_implementation == "sdpa"
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False)
    decoder = ShapeDecoder(model, drafter)
    assert decoder.support.grouped_queries
    stock, heads = F.scaled_dot_product_attention, set()

    def watched(query: torch.Tensor, key: torch.Tensor, *more: Any, **options: Any):
        if key.shape[2] > 9:  # not the prefill
            heads.add((key.shape[1], options.get("enable_gqa", False)))
        return stock(query, key, *more, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    assert torch.equal(decoder.generate(ids, mask, max_new_tokens=16), expected)
    assert heads == {(2, False)}
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["llama", "mistral, sliding", "gemma3"])
def test_a_mask_is_repeated_once_for_all_layers(family, monkeypatch):
    made, real = [], attention.repeated
    monkeypatch.setattr(attention, "repeated", lambda mask, groups: made.append(mask) or real(mask, groups))
    decoder = ShapeDecoder(build(family), AdversaryDrafter(nodes=6))
    made.clear()
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    out = decoder.generate(ids, torch.ones_like(ids), max_new_tokens=8, return_dict_in_generate=True)
    kinds = 1 + decoder.support.mask_by_layer_type
    assert len(made) == kinds * len(out.stats.steps) and decoder.target.config.num_hidden_layers > 1
    assert attention._step.masks is None  # nothing is held between steps


@pytest.mark.parametrize("nodes", [1, 3])
def test_rows_of_a_repeated_mask_stay_aligned(nodes):
    aligned = torch.randn(2, 1, nodes, 16)[..., :13]
    for mask in (aligned, aligned.contiguous(), torch.randn(2, 1, 4, 90)[:, :, :nodes, :13]):
        found = attention.repeated(mask, 3)
        assert torch.equal(found, torch.cat([mask] * 3, dim=2))
        assert found.stride(2) == (16 if mask is aligned else 13)


def test_the_configuration_is_put_back(tiny_model):
    config = tiny_model("llama").config
    with pytest.raises(KeyError), grouped_queries(config):
        assert config._attn_implementation == attention._NAME
        raise KeyError
    assert config._attn_implementation == "sdpa"
    config._attn_implementation = "eager"  # the user's choice stands
    with grouped_queries(config):
        assert config._attn_implementation == "eager"
    assert config._attn_implementation == "eager"


@pytest.mark.parametrize("family", ["llama", "mistral, sliding", "gemma3"])
@torch.no_grad()
def test_who_asks_the_model_meanwhile_gets_what_it_always_gives(family):
    """Another thread may: with padding, with a cache, with a single token."""
    model = build(family)
    ids = torch.randint(3, 64, (2, 14), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0

    def asked() -> list[torch.Tensor]:
        cache, found = DynamicCache(config=model.config), []
        name = cache_name(type(model).forward)
        for start, end in ((0, 8), (8, 13), (13, 14)):
            found.append(model(ids[:, start:end], attention_mask=mask[:, :end], **{name: cache}).logits)
        return [found[0][:, 4:], *found[1:], model(ids).logits]

    expected = asked()
    with grouped_queries(model.config):
        for found, same in zip(asked(), expected, strict=True):
            torch.testing.assert_close(found, same, rtol=1e-9, atol=1e-9)


def test_the_probe_falls_back_to_the_stock_function(tiny_model):
    def wrong(*args: Any, **options: Any):
        return grouped_sdpa(*args, **options)[0] * 1.01, None

    AttentionInterface.register(attention._NAME, wrong)
    try:
        support = probe(Target(tiny_model("llama")))
    finally:
        AttentionInterface.register(attention._NAME, grouped_sdpa)
    assert support.mode == "tree" and not support.grouped_queries
