"""EAGLE-3 against the package `speculators`: the same weights and inputs give the same logits (eval/reference)."""

import json
from pathlib import Path

import pytest
import torch
from helpers import LLAMA_8B
from safetensors.torch import load_file
from transformers import LlamaConfig, Qwen3Config

from shape.networks.base import known_at
from shape.networks.config import ShapeConfig
from shape.networks.decoder import layers_like
from shape.networks.eagle import EaglePredictor
from shape.networks.shape import windows

FIXTURES = Path(__file__).parents[1] / "fixtures"
VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
THEIRS_ALONE = {"d2t", "t2d", "verifier_lm_head.weight", "verifier_norm.weight"}


def reference(name: str) -> tuple[EaglePredictor, dict[str, torch.Tensor]]:
    """Our network with the weights of a checkpoint, by their own names, and what the package made of it."""
    folder = FIXTURES / name
    theirs = json.loads((folder / "config.json").read_text())
    recorded = load_file(folder / "reference.safetensors")
    layers = theirs["transformer_layer_config"]
    config = ShapeConfig(
        kind="eagle", hidden_size=layers["hidden_size"], vocab_size=layers["vocab_size"], own_heads=True,
        own_embeddings=True, draft_vocab_size=theirs["draft_vocab_size"], num_steps=recorded["logits"].shape[1],
        feature_layers=theirs["eagle_aux_hidden_state_layer_ids"], transformer_layer_config=layers,
        **{variant: theirs[variant] for variant in VARIANTS},
    )  # fmt: skip
    network = EaglePredictor(config)
    weights = load_file(folder / "model.safetensors")
    wrong = network.load_state_dict(
        {name: part for name, part in weights.items() if name not in THEIRS_ALONE}, strict=False
    )
    assert not wrong.unexpected_keys and wrong.missing_keys == ["draft_vocabulary"]
    return network.eval(), recorded


@pytest.mark.parametrize("name", ["eagle3-llama", "eagle3-qwen3", "eagle31-llama"])
@torch.no_grad()
def test_logits_of_all_steps_are_those_of_speculators(name):
    """Position i of theirs, which reads h_i and x_{i+1}, is our root t = i + 1."""
    network, recorded = reference(name)
    steps, length = recorded["logits"].shape[1:3]
    tokens = torch.cat([torch.zeros(1, 1, dtype=torch.long), recorded["tokens"]], dim=1)
    roots = torch.arange(1, length + 2 - steps)[None]
    window = windows(recorded["features"], roots, 1)
    known = known_at(network, recorded["features"], network.embed_tokens(tokens), roots, window)
    along = network.embed_tokens(tokens[0, roots[..., None] + torch.arange(steps)])
    logits = network.own_head(network.unroll(known, along))
    expected = recorded["logits"][:, :, : roots.shape[1]].transpose(1, 2)
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_layers_have_the_geometry_of_the_target():
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip
    llama = LlamaConfig(**LLAMA_8B, rope_parameters=rope, rms_norm_eps=1e-5)
    found = ShapeConfig(
        kind="eagle", hidden_size=4096, transformer_layer_config={**layers_like(llama), "num_hidden_layers": 1}
    ).layer_config()
    assert found.model_type == "llama" and found.rope_parameters == rope and found.rms_norm_eps == 1e-5
    assert (found.num_attention_heads, found.num_key_value_heads, found.head_dim) == (32, 8, 128)
    assert found.intermediate_size == llama.intermediate_size
    wide = Qwen3Config(hidden_size=64, num_attention_heads=2, head_dim=128, num_hidden_layers=1)
    assert layers_like(wide)["head_dim"] == 128


def test_rotary_parameters_that_change_with_the_text_are_left_out():
    rope = {"rope_type": "dynamic", "rope_theta": 2e4, "factor": 2.0}
    assert layers_like(LlamaConfig(rope_parameters=rope))["rope_parameters"] == {
        "rope_type": "default", "rope_theta": 2e4,
    }  # fmt: skip


def test_options_replace_what_the_layers_have():
    layers = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 24}
    config = ShapeConfig(
        kind="eagle", hidden_size=32, transformer_layer_config=layers, num_heads=2, intermediate_size=40
    )
    found = config.layer_config()
    assert (found.num_attention_heads, found.num_key_value_heads, found.head_dim) == (2, 2, 16)
    assert found.intermediate_size == 40
    kept = ShapeConfig(kind="eagle", hidden_size=32, transformer_layer_config=layers)
    assert (kept.num_heads, kept.intermediate_size) == (4, 24)
