"""Memory of a training step: the bounds bind, the count without storage is the real one, and the forecast is near."""

from dataclasses import replace

import pytest

from eval.training_memory import (
    NETWORKS,
    WAYS,
    MemoryOptions,
    Sizes,
    config_of,
    learned,
    made,
    peak,
    run,
    target_config,
)
from shape.errors import ConfigError
from shape.networks.decoder import layers_like
from shape.training import forecast
from shape.training.forecast import portion_bytes

SIZES = Sizes(width=256, tokens=320, vocab_size=8192, feed_forward=896)
SCALE = 16


@pytest.mark.parametrize(
    "name",
    [name if number == 0 else pytest.param(name, marks=pytest.mark.slow) for number, name in enumerate(NETWORKS)],
)
def test_bounds_hold_and_the_forecast_is_near(name, monkeypatch):
    network = NETWORKS[name]
    measured = {way: peak(network, SIZES, fake=False, scale=SCALE, **how) for way, how in WAYS.items()}
    assert measured["in parts"] < 0.8 * measured["at once"]
    assert measured["checkpointed"] <= measured["in parts"]
    found = peak(network, SIZES, fake=True, scale=SCALE, **WAYS["in parts"])
    assert 0.9 < found / measured["in parts"] < 1.25  # it takes what depends on numbers as large as can be
    bounds = (0.7, 1.4) if network is NETWORKS["EAGLE-3, 7 steps"] else (0.45, 1.7)
    assert_near(network, measured, bounds, monkeypatch)


@pytest.mark.slow
def test_the_forecast_of_p_eagle_is_near(monkeypatch):
    network = {
        "kind": "peagle", "num_layers": 4, "own_heads": True, "feature_layers": [2, 16, 29], "num_steps": 8,
        "mask_token_id": 0, "transformer_layer_config": layers_like(target_config(SIZES)),
    }  # fmt: skip
    measured = {way: peak(network, SIZES, fake=False, scale=SCALE, **WAYS[way]) for way in ("in parts", "checkpointed")}
    assert_near(network, measured, (0.7, 1.4), monkeypatch)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_step_that_is_counted_is_a_real_one(name):
    module, batch = made(NETWORKS[name], SIZES.smaller(), checkpointing=False)
    loss = module.training_step(batch, 0)
    assert 0 < float(loss.detach()) < 1e3
    assert batch.counts(NETWORKS[name]["num_steps"]).tolist() == [39] * NETWORKS[name]["num_steps"]


def assert_near(network, measured, bounds, monkeypatch):
    for bound in ("CHUNK_BYTES", "SCORES_BYTES"):
        monkeypatch.setattr(forecast, bound, getattr(forecast, bound) // SCALE**2)
    config, roots, (least, most) = config_of(network, SIZES), SIZES.tokens - 1, bounds
    for way in ("in parts", "checkpointed"):
        said = portion_bytes(config, roots, SIZES.tokens, "bf16-mixed", way == "checkpointed")
        assert least < said / measured[way] < most, (way, said, measured[way])


def test_rows_of_other_tokens_are_not_taken_for_these(tmp_path):
    options = MemoryOptions(str(tmp_path), networks=["SHAPE, 8 steps"], widths=[64, 32], tokens=16)
    run(options)
    before = (tmp_path / "memory.md").read_text()
    run(options)
    assert (tmp_path / "memory.md").read_text().splitlines()[:-1] == before.splitlines()[:-1]
    with pytest.raises(ConfigError, match=r"memory.json holds a measurement with other settings \(tokens\)"):
        run(replace(options, tokens=8))


def test_parameters_are_counted_without_storage():
    assert learned(NETWORKS["EAGLE-3, 7 steps"], Sizes(4096, 8192)) > 3e8
