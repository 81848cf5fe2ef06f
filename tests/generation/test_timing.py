"""Costs of forwards, as measured and kept."""

from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import BASELINES, predictor

from shape.drafters import NgramDrafter, TrainedDrafter
from shape.drafters.cost import Costs
from shape.generation import timing
from shape.generation.decoder import ShapeDecoder
from shape.generation.timing import _line, draft_cost, measure_costs
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


def test_costs_that_cannot_be_kept_are_measured(tiny_model, tmp_path, monkeypatch):
    decoder, file = ShapeDecoder(tiny_model("llama")), tmp_path / "file"
    file.write_text("")
    assert measure_costs(decoder, context=40, repeats=1, cache=file / "costs.json").context == 64
    monkeypatch.setattr(timing, "cache_folder", no_home)
    assert measure_costs(decoder, context=40, repeats=1).context == 64


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_an_accelerator_is_waited_for(kind, monkeypatch):
    waited: list[object] = []
    monkeypatch.setattr(getattr(torch, kind), "synchronize", lambda *device: waited.append(device))
    timing._seconds([partial(int)] * 2, 3, torch.device(kind))
    assert len(waited) == 2 * 3 * 2


@pytest.mark.parametrize(("seconds", "calls"), [(0.001, 2 * 5), (1.0, 1 + 5)])
def test_what_is_short_is_timed_when_it_repeats(seconds, calls):
    """Where others come between, weights have left the processor's caches; of long calls only the first is extra."""
    ran, now = [], [0.0]

    def call(name: str) -> None:
        now[0] += seconds * (1 if ran and ran[-1] == name else 3)
        ran.append(name)

    found = timing._seconds([partial(call, "a"), partial(call, "b")], 5, torch.device("cpu"), lambda: now[0])
    assert ran.count("a") == ran.count("b") == calls
    assert found == pytest.approx([seconds if calls == 10 else 3 * seconds] * 2)


def test_a_target_without_a_limit_of_positions_is_timed_behind_as_much_context(tiny_model, tmp_path):
    decoder = ShapeDecoder(tiny_model("llama"))
    decoder.target.max_positions = None
    assert measure_costs(decoder, context=40, repeats=1, cache=tmp_path / "costs.json").context == 64


@pytest.mark.parametrize("name", ["shape of three layers", "eagle of three layers"])
def test_drafters_that_read_several_layers_are_timed(tiny_model, tmp_path, name):
    decoder = ShapeDecoder(tiny_model("llama"), TrainedDrafter(predictor(**BASELINES[name])))
    costs = measure_costs(decoder, context=40, repeats=1, cache=tmp_path / "costs.json")
    assert min(costs.verify.values()) > 0 and costs.draft
    assert min(draft_cost(decoder, repeats=1)) > 0


def test_drafts_from_few_tokens_by_prepacked_layers_are_timed(tiny_model, tmp_path):
    """As those of the shipped predictor, whose heads were once made in inference mode, where they cannot be used."""
    network = predictor(torch.float32, draft_vocab_size=24)
    network.draft_vocabulary = torch.arange(24)
    target = Target.load(tiny_model("llama", torch.float32), prepacked=True)
    decoder = ShapeDecoder(target, TrainedDrafter(network))
    costs = measure_costs(decoder, context=40, repeats=1, cache=tmp_path / "costs.json")
    assert costs.draft.keys() == {1, 2, 3, 4} and all(
        start >= 0 and start + each > 0 for start, each in costs.draft.values()
    )
    assert min(draft_cost(decoder, repeats=1)) > 0


@pytest.mark.parametrize(
    ("ends", "line"),
    [
        (((2, 3.0), (8, 9.0)), (1.0, 1.0)),
        (((2, 5.0), (8, 5.6)), (4.8, 0.1)),  # parallel steps
        (((2, 5.0), (2, 6.0)), (5.0, 0.0)),  # that has no deeper ones
        (((2, 5.0), (8, 4.0)), (5.0, 0.0)),  # a hiccup
        (((2, 1.0), (8, 9.0)), (0.0, 0.5)),
    ],
)
def test_a_draft_is_what_it_takes_before_its_passes_and_these(ends, line):
    assert _line(*ends) == pytest.approx(line)
    costs = Costs(1, 64, {1: 1.0}, {1: line, 2: line})
    assert costs.draft_seconds(8, 4) == pytest.approx(line[0] + 8 * line[1])
    assert costs.draft_seconds(0, 1) == Costs(1, 64, {1: 1.0}, {}).draft_seconds(8, 1) == 0.0
