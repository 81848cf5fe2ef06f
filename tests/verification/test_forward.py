"""The probe tells trees, chains and refusals apart by experiment."""

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from shape.errors import UnsupportedTarget
from shape.target import Target
from shape.verification.forward import probe

FAMILIES = ["llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "mistral"]


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_trees_are_supported(tiny_model, arch, dtype):
    support = probe(Target(tiny_model(arch, dtype)))
    assert support.mode == "tree" and support.reason == ""
    assert support.sliding_window == (6 if arch == "mistral" else None)
    assert len(support.layers) == 2
    assert support.grouped_queries == (arch not in ("gpt2", "gpt_neox"))


def test_local_attention_is_decoded_as_chains():
    config = GPTNeoConfig(
        vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, window_size=5, max_position_embeddings=128,
        attention_types=[[["global", "local"], 1]], initializer_range=0.3,
    )  # fmt: skip
    support = probe(Target(GPTNeoForCausalLM(config).double()))
    assert support.mode == "chain" and "off by" in support.reason


def test_alibi_in_the_mask_is_decoded_as_chains_or_refused():
    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)).double()
    try:
        assert probe(Target(model)).mode == "chain"
    except UnsupportedTarget as error:
        assert "cannot verify drafts exactly" in str(error)


def test_recurrent_states_are_refused():
    model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4))
    with pytest.raises(UnsupportedTarget, match=r"target .* c"):
        probe(Target(model))


def test_unknown_logit_scaling_is_refused(tiny_model):
    target = Target(tiny_model("llama"))
    head = target.head
    target.head = lambda hidden: head(hidden) * 1.5  # type: ignore[assignment]
    with pytest.raises(UnsupportedTarget, match="logits in a way that is not known"):
        probe(target)
