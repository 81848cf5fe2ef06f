"""`python -m shape.joint`: each predictor comes out as it would alone."""

import csv
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from training_runs import arguments, write_conversations

from shape.cli import joint
from shape.cli.train import main as train_alone
from shape.target.model import Target
from shape.training.joint import shared_options
from shape.training.parsing import parse, parser

# Different in everything that runs of a joint training may differ in.
RUNS = {
    "window": {"predictor": {"dropout": 0.1}, "training": {"noise": 0.1}},
    "two-layers": {
        "predictor": {"feature_layers": [0, -1], "draft_vocab_size": 40, "confidence": True},
        "training": {"learning_rate": 2e-3, "weight_decay": 0.1, "ema": 0.5},
    },
    "eagle": {"predictor": {"kind": "eagle", "own_heads": True, "markov_rank": 0}, "training": {"learning_rate": 3e-3}},
    "model": {"predictor": {"kind": "model", "markov_rank": 0}, "losses": {"smooth_l1": 0.0}},
}


@pytest.fixture(scope="module")
def files(tiny_target_folder, tmp_path_factory) -> list[str]:
    """Of the options of every run."""
    folder = tmp_path_factory.mktemp("joint")
    data = write_conversations(folder / "talks.jsonl")
    found = []
    for name, changes in RUNS.items():
        more = ["--online=true", "--training.steps=8", "--training.decay=none", "--training.checkpoint_every=4"]
        more += [f"--{group}.{key}={value}" for group, own in changes.items() for key, value in own.items()]
        options = arguments(tiny_target_folder, data, folder / name, *more)
        path = folder / f"{name}.yaml"
        path.write_text(parser(None).dump(parser(None).parse_args(options)))
        found.append(str(path))
    return found


@pytest.fixture(scope="module")
def alone(files) -> dict[str, dict[str, torch.Tensor]]:
    """The weights of every run by itself."""
    found = {}
    for file in files:
        output = Path(file).with_suffix("")
        train_alone([f"--config={file}", f"--output={output}-alone"])
        found[output.name] = load_file(Path(f"{output}-alone") / "model.safetensors")
    return found


def require_equal(files, alone) -> None:
    for file in files:
        mine, theirs = load_file(Path(file).with_suffix("") / "model.safetensors"), alone[Path(file).stem]
        assert mine.keys() == theirs.keys()
        apart = {name: float((mine[name] - theirs[name]).abs().max()) for name in mine}
        assert not any(apart.values()), f"{Path(file).stem}: {apart}"


def test_each_is_trained_as_it_would_be_alone_on_one_forward(files, alone, tmp_path, monkeypatch):
    forwards = []
    features = Target.features
    monkeypatch.setattr(Target, "features", lambda *a, **b: forwards.append(1) or features(*a, **b))
    joint.main([*files, f"--output={tmp_path}"])
    assert len(forwards) - len(RUNS) < 8 * 2, "more than one forward a step, beside the comparison at the end"
    require_equal(files, alone)
    with open(tmp_path / "logs/version_0/metrics.csv") as file:
        columns = next(csv.DictReader(file)).keys()
    assert {f"{name}/train/loss" for name in RUNS} <= columns
    assert {f"{name}/val/acceptance_length" for name in RUNS} <= columns


def test_they_go_on_where_they_stopped(files, alone, tmp_path):
    shorter = []
    for file in files:
        values = yaml.safe_load(Path(file).read_text())
        values["training"]["steps"] = 4
        shorter.append(tmp_path / Path(file).name)
        shorter[-1].write_text(yaml.safe_dump(values))
    joint.main([*map(str, shorter), f"--output={tmp_path}"])
    joint.main([*files, f"--output={tmp_path}", "--ckpt_path=last"])
    require_equal(files, alone)


def test_other_runs_cannot_go_on_from_their_checkpoint(files, tmp_path, refused):
    joint.main([*files[:2], f"--output={tmp_path}"])
    for others in (files[1:3], files[:1] + files[3:]):
        said = refused(joint.main, *others, f"--output={tmp_path}", "--ckpt_path=last")
        assert "the checkpoint is of window, two-layers, and these runs are" in said
    said = refused(train_alone, f"--config={files[0]}", f"--ckpt_path={tmp_path / 'checkpoints/last.ckpt'}")
    assert "not written by shape train" in said


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"online": False}, "stored features, which cost no forward to share"),
        ({"ckpt_path": "last"}, "runs of a joint training are resumed together"),
        ({"seed": 1}, "window has seed 0 and other has 1"),
        ({"training": {"steps": 9}}, "training.steps 8 and other has 9"),
        ({"training": {"max_minutes": 1}}, "training.max_minutes, which all runs would share"),
        ({"trainer": {"strategy": "fsdp"}}, "takes one network"),
    ],
)
def test_what_cannot_be_trained_jointly_is_refused(files, tmp_path, changes, sentence, refused):
    values = yaml.safe_load(Path(files[1]).read_text())
    values["training"] |= {"ema": None}
    for name, given in changes.items():
        values[name] = {**values[name], **given} if isinstance(given, dict) else given
    values["output"] = str(tmp_path / "other")
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump(values))
    assert sentence in refused(joint.main, files[0], str(other), f"--output={tmp_path}")


def test_files_that_are_none_are_refused(files, tmp_path, refused):
    (tmp_path / "empty.yaml").write_text("")
    for wrong, sentence in ((tmp_path / "none.yaml", "cannot be read"), (tmp_path / "empty.yaml", "has no options")):
        assert sentence in refused(joint.main, files[0], str(wrong))
    assert "give at least two, with folders of unlike names" in refused(joint.main, files[0], files[0])


def test_every_option_may_differ_or_is_shared(files):
    """An option that is added to `shape.train` belongs to one of the two."""
    shared = shared_options(parse([f"--config={files[0]}"]))
    assert {"target", "data", "seed", "online", "max_length", "training.steps", "training.batch_size"} <= shared.keys()
    assert not {"predictor", "losses", "tree", "output", "training", "training.learning_rate"} & shared.keys()
