"""EAGLE-3 and P-EAGLE against the package `speculators`: the same weights and inputs give the same logits
(eval/reference).
"""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import LLAMA_8B, ROOT
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, Qwen3Config

from shape.networks.base import Known, known_at
from shape.networks.config import ShapeConfig
from shape.networks.decoder import layers_like
from shape.networks.eagle import EaglePredictor, ParallelEaglePredictor
from shape.networks.formats.table import load
from shape.networks.shape import windows

FIXTURES = ROOT / "tests/fixtures"
NAMES = (
    "eagle3-llama", "eagle3-qwen3", "eagle31-llama", "eagle3-deep", "eagle3-narrow", "peagle-llama", "peagle-qwen3",
    "peagle-wide",
)  # fmt: skip


class Reference(NamedTuple):
    """Our network with the weights of a checkpoint, and what the package made of it.

    Position i of theirs, which reads g_i and x_{i+1}, is our root t = i + 1.

    Attributes:
        features: (1, T, F). tokens: (1, T + 1), x_0..x_T, of which x_0 is not read.
        roots: (1, P), those of which all S steps are known. logits: (1, P, S, K), theirs.
    """

    network: EaglePredictor
    features: Tensor
    tokens: Tensor
    roots: Tensor
    logits: Tensor

    @property
    def along(self) -> Tensor:
        """Embeddings of x_t..x_{t+S-1}, (1, P, S, H)."""
        ahead = self.roots[0, :, None] + torch.arange(self.logits.shape[2])
        return self.network.embed_tokens(self.tokens[:, ahead.clamp(max=self.tokens.shape[1] - 1)])


@pytest.fixture(params=NAMES)
def reference(request) -> Reference:
    found, network = load_file(FIXTURES / request.param / "reference.safetensors"), load(FIXTURES / request.param)
    features, tokens = found["features"], F.pad(found["tokens"], (1, 0))
    if isinstance(network, ParallelEaglePredictor):  # which is trained at a sample of all places
        places = zip(found["anchors"].tolist(), found["depth"].tolist(), strict=True)
        logits, steps = dict(zip(places, found["logits"], strict=True)), range(network.config.num_steps)
        anchors = [i for i in range(features.shape[1]) if all((i, n) in logits for n in steps)]
        assert len(anchors) > 5
        expected = torch.stack([torch.stack([logits[i, n] for n in steps]) for i in anchors])[None]
        return Reference(network, features, tokens, torch.tensor([anchors]) + 1, expected)
    steps, length = found["logits"].shape[1:3]
    roots = torch.arange(1, length + 2 - steps)[None]
    return Reference(network, features, tokens, roots, found["logits"][:, :, : roots.shape[1]].transpose(1, 2))


@torch.no_grad()
def test_what_training_unrolls_is_the_reference(reference):
    network, features, tokens, roots, expected = reference
    known = known_at(network, features, network.embed_tokens(tokens), roots, windows(features, roots, 1))
    logits = network.own_head(network.unroll(known, reference.along, expected.shape[2]))
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_what_decoding_computes_is_the_reference(reference):
    """Known positions are remembered part by part, behind slots that hold something else, as in a batch."""
    network, features, tokens, roots, expected = reference
    embeddings, before = network.embed_tokens(tokens), F.pad(features, (0, 0, 1, 0))
    for number, root in enumerate(roots[0].tolist()):
        memory = [(torch.randn(1, heads, 3, size),) * 2 for heads, size in network.memory_shapes]
        for start, end in ((0, root // 2), (root // 2, root)):
            if start == end:
                continue
            positions, part = torch.arange(start, end)[None], slice(start, end + 1)
            new = network.remember(before[:, part], embeddings[:, part], positions, memory)
            memory = [
                tuple(torch.cat([a[:, :, :start], b, a[:, :, :3]], dim=2) for a, b in zip(held, fresh, strict=True))
                for held, fresh in zip(memory, new, strict=True)
            ]
        visible = torch.arange(memory[0][0].shape[2])[None, None] < root
        ahead = network.rotary_ahead(torch.tensor([[root]]), torch.float32, expected.shape[2])
        known = Known(features[:, None, root - 1 : root], memory, visible, ahead)
        logits = network.own_head(network.unroll(known, reference.along[:, number : number + 1], expected.shape[2]))
        torch.testing.assert_close(logits[0, 0], expected[0, number], rtol=1e-5, atol=1e-5)


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
    of_each_layer = AutoConfig.for_model("gemma3n_text", num_hidden_layers=2, intermediate_size=[64, 96])
    assert layers_like(of_each_layer)["intermediate_size"] == 96


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
