"""Medusa's network is the published one."""

import pytest
import torch
from helpers import ROOT
from safetensors.torch import load_file

from shape.networks.base import Known
from shape.networks.config import ShapeConfig
from shape.networks.formats.table import load
from shape.networks.medusa import MedusaPredictor


@pytest.mark.parametrize("name", ["medusa", "medusa-shared"])
def test_logits_are_those_of_vllm(name):
    folder = ROOT / "tests/fixtures" / name
    reference = load_file(folder / "reference.safetensors")
    states, wanted = reference["states"], reference["logits"]
    network = load(folder)
    (predicted,) = network.begin(Known(states[None, :, None], [], None, None), None)
    logits = network.own_head(predicted)[0].transpose(0, 1)
    drafted = torch.arange(wanted.shape[-1]) if network.draft_vocabulary is None else network.draft_vocabulary
    torch.testing.assert_close(logits, wanted[..., drafted], rtol=1e-5, atol=1e-5)
    assert int(wanted.isfinite().sum()) == logits.numel()


@pytest.mark.parametrize("options", [{}, {"shared_head": True, "num_layers": 2, "residual_bias": True}])
def test_before_training_all_heads_repeat_the_state(options):
    network = MedusaPredictor(ShapeConfig(kind="medusa", hidden_size=8, vocab_size=9, own_heads=True, **options))
    state = torch.randn(2, 3, 1, 8)
    (predicted,) = network.begin(Known(state, [], None, None), None)
    assert predicted.equal(state.expand(-1, -1, 4, -1))
    assert len(network.heads) == (1 if options else 4)
