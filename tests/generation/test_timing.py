"""Costs of forwards, as measured and kept."""

import torch
from helpers import predictor

from shape.drafters import NgramDrafter, TrainedDrafter
from shape.generation.decoder import ShapeDecoder
from shape.generation.timing import draft_cost, measure_costs
from shape.target.model import Target


def test_costs_are_kept(tiny_model, tmp_path, monkeypatch):
    decoder, file = ShapeDecoder(tiny_model("llama"), TrainedDrafter(predictor())), tmp_path / "kept" / "costs.json"
    costs = measure_costs(decoder, context=40, cache=file)
    assert costs.context == 64 and min(costs.verify.values()) > 0 and set(costs.draft) == {1, 2, 3, 4}
    assert measure_costs(decoder, context=40, cache=file) == costs
    assert measure_costs(decoder, batch_size=2, context=40, cache=file).batch_size == 2
    monkeypatch.setenv("SHAPE_CACHE", str(tmp_path / "other"))
    assert measure_costs(ShapeDecoder(tiny_model("gpt2"), NgramDrafter()), context=40).draft == {}
    assert (tmp_path / "other" / "costs.json").exists()


def test_drafts_from_few_tokens_by_prepacked_layers_are_timed(tiny_model, tmp_path):
    """As those of the shipped predictor, whose heads were once made in inference mode, where they cannot be used."""
    network = predictor(torch.float32, draft_vocab_size=24)
    network.draft_vocabulary = torch.arange(24)
    target = Target.load(tiny_model("llama", torch.float32), prepacked=True)
    decoder = ShapeDecoder(target, TrainedDrafter(network))
    costs = measure_costs(decoder, context=40, repeats=1, cache=tmp_path / "costs.json")
    assert costs.draft.keys() == {1, 2, 3, 4} and min(costs.draft.values()) > 0
    assert min(draft_cost(decoder, repeats=1)) > 0
