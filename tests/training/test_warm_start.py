"""`--init`: training goes on from a predictor, ours or another package's."""

import csv

import pytest
import torch
from helpers import predictor, write_rows
from transformers import AutoConfig

from shape.errors import ConfigError, TargetMismatch
from shape.generation.loading import load_predictor
from shape.networks.base import Predictor
from shape.networks.config import ShapeConfig
from shape.networks.export import export
from shape.networks.formats import table
from shape.networks.formats.table import save
from shape.networks.formats.targets import TargetFacts
from shape.networks.registry import PREDICTORS
from shape.training.options import PredictorOptions, TrainOptions
from shape.training.run import train
from shape.training.warm_start import as_checkpoint, refuse_other_sizes, start_from

KINDS = {
    "shape": {"num_steps": 2},
    "eagle": {"kind": "eagle", "own_heads": True, "draft_vocab_size": 40, "feature_layers": [1, 2], "num_steps": 2},
    "medusa": {"kind": "medusa", "own_heads": True, "num_steps": 2},
    "peagle": {"kind": "peagle", "mask_token_id": 9, "feature_layers": [1, 2], "num_layers": 2, "num_steps": 3},
    "mtp": {"kind": "mtp", "num_steps": 2},
    "block": {"kind": "block", "mask_token_id": 9, "feature_layers": [1, 2], "num_steps": 3, "markov_rank": 0},
}
FORMATS = {"eagle": "eagle3", "medusa": "medusa", "peagle": "speculators", "block": "speculators"}


def checkpoint_of(kind: str, target, folder, form: str | None = None):
    config = ShapeConfig(hidden_size=32, vocab_size=target.vocab_size, **KINDS[kind])
    network = PREDICTORS[config.kind](config)
    if network.draft_vocabulary is not None:
        network.draft_vocabulary = torch.arange(40) * 3
    network.adopt(target)
    if form is None:
        export(network, folder, target.identity, {})
    else:
        save(network, folder, form, TargetFacts("org/target", None, target.vocab_size, 256))
    return network


def losses(output) -> list[float]:
    with open(output / "logs/version_0/metrics.csv") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


@pytest.mark.parametrize(("kind", "form"), [*[(kind, None) for kind in KINDS], *FORMATS.items()])
def test_network_weights_and_vocabulary_are_the_checkpoints(kind, form, tiny_target, tmp_path):
    network = checkpoint_of(kind, tiny_target, tmp_path, form)
    options = as_checkpoint(TrainOptions(init=str(tmp_path)))
    assert options.predictor.kind == kind and options == as_checkpoint(options)
    assert options.predictor.num_steps == (7 if form == "eagle3" else KINDS[kind]["num_steps"])
    fresh = type(network)(load_predictor(tmp_path).config)
    start_from(fresh, options, tiny_target)
    before, after = network.state_dict(), fresh.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_training_goes_on_from_what_was_learned(tiny_target_folder, tmp_path):
    lines = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"yes {n}, yes {n}!"}]}
        for n in range(24)
    ]
    write_rows(tmp_path / "data.jsonl", *lines)

    def run(name: str, init: str | None = None, learning_rate: float = 2e-3) -> Predictor:
        options = TrainOptions(
            target=str(tiny_target_folder), data=str(tmp_path / "data.jsonl"), output=str(tmp_path / name), init=init
        )
        if init is None:
            options.predictor = PredictorOptions(kind="medusa", own_heads=True, num_steps=2, markov_rank=0)
            options.predictor.draft_vocab_size = 40
        options.training.steps, options.training.batch_size, options.training.learning_rate = 30, 64, learning_rate
        options.validation.prompts, options.validation.max_new_tokens = 2, 8
        options.measurement.limit, options.logger, options.max_length = 0, "csv", 96
        options.trainer.accelerator, options.trainer.enable_progress_bar = "cpu", False
        options.trainer.log_every_n_steps = 5
        train(options)
        return load_predictor(tmp_path / name)

    first = run("first")
    learned = first.config.training["validation"]
    same = run("same", str(tmp_path / "first"), learning_rate=1e-12)
    assert {**learned, "step": 0} == same.config.training["validation"]  # measured before the first step
    second = run("second", str(tmp_path / "first"))
    assert first.config.num_steps == second.config.num_steps == 2
    assert torch.equal(first.draft_vocabulary, second.draft_vocabulary)
    assert second.config.training["validation"]["value"] >= learned["value"]
    before, after = losses(tmp_path / "first"), losses(tmp_path / "second")
    assert after[0] < before[0] and after[-1] < before[-1]


def test_what_contradicts_the_checkpoint_is_refused(tiny_target, tmp_path):
    checkpoint_of("medusa", tiny_target, tmp_path)
    given = PredictorOptions(num_steps=5)
    with pytest.raises(ConfigError, match=r"^predictor.num_steps is 5, and checkpoint .* has 2; leave it out"):
        as_checkpoint(TrainOptions(init=str(tmp_path), predictor=given))
    smaller = predictor(torch.float32, kind="medusa", own_heads=True)
    save(smaller, tmp_path / "smaller", "medusa", TargetFacts("", 2, 64, 256))
    with pytest.raises(TargetMismatch, match="is for targets with vocab_size 64, and tiny has 259"):
        refuse_other_sizes(TrainOptions(init=str(tmp_path / "smaller")), tiny_target)


def test_a_token_and_trust_reach_the_checkpoint_and_its_target(tiny_target, tiny_target_folder, tmp_path, monkeypatch):
    """But no setting of the model, nor the revision of another repository."""
    network, asked = checkpoint_of("medusa", tiny_target, tmp_path, "medusa"), []
    read_config, read_weights = AutoConfig.from_pretrained, table.read_checkpoint
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *a, **hub: asked.append(hub) or read_config(*a, **hub))
    monkeypatch.setattr(table, "read_checkpoint", lambda *a, **hub: asked.append(hub) or read_weights(*a, **hub))
    given = {"token": "T", "trust_remote_code": True, "revision": "main", "attn_implementation": "eager"}
    options = TrainOptions(target=str(tiny_target_folder), init=str(tmp_path), **given)
    as_checkpoint(options)
    start_from(network, options, tiny_target)
    assert asked == [{"token": "T", "trust_remote_code": True}] * 3
