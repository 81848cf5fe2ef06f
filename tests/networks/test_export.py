"""The exported folder."""

import torch
from training_runs import network

from shape.generation.decoder import ShapeDecoder
from shape.networks.export import export


def test_export_can_be_loaded(tiny_target, tmp_path):
    predictor = network(tiny_target, seed=3)
    record = {
        "command": "python -m shape.train", "steps": 7, "acceptance_length": {"value": 2.5, "low": 2.0, "high": 3.0},
    }  # fmt: skip
    export(predictor, tmp_path, tiny_target.identity, record)
    card = (tmp_path / "README.md").read_text()
    assert "| acceptance length | 2.50 [2.00, 3.00] |" in card and "base_model: tiny" in card
    decoder = ShapeDecoder.from_pretrained(tmp_path, target=tiny_target)
    loaded = decoder.drafter.predictor
    assert loaded.config.training == record
    assert loaded.config.target_identity == tiny_target.identity.to_dict()
    for name, value in predictor.state_dict().items():
        found = loaded.state_dict()[name]
        assert torch.equal(found, value.to(found.dtype))  # drafting may run in bfloat16
