"""`python -m shape.extract` as a command: its output, its errors, and SIGKILL in the middle."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from training_runs import write_conversations

from shape.cli import train
from shape.cli.extract import main
from shape.errors import FeatureStoreError
from shape.features.store import FeatureStore


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "talks.jsonl", 300)


def arguments(target: Path, data: Path, output: Path, *more: str) -> list[str]:
    command = ["--target", str(target), "--data", str(data), "--output", str(output), "--max_length", "128"]
    command += ["--shard_size", "4", "--trainer.accelerator", "cpu", "--trainer.devices", "1"]
    return [*command, "--trainer.enable_progress_bar", "false", *more]


def test_what_needs_no_weights_is_said_before_they_are_loaded(tiny_target_folder, data, tmp_path, monkeypatch, refused):
    monkeypatch.setattr("shape.target.model.Target.load", lambda *given, **named: pytest.fail("the target is loaded"))
    given = arguments(tiny_target_folder, data, tmp_path / "out")
    for more, said in (("--shard_size=0", "shard_size is 0; give a positive number"), ("--layers=9,-1", "layers")):
        assert said in refused(main, *given, more, alone=True)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_killed_extraction_ends_in_the_same_bytes(tiny_target_folder, data, tmp_path, capsys):
    threads = torch.get_num_threads()
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = subprocess.Popen(
        [sys.executable, "-m", "shape.extract", *arguments(tiny_target_folder, data, killed)],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not (killed / "shard-00002.safetensors").exists() and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = len(list(killed.glob("shard-*")))
    assert 3 <= done < 75

    main(arguments(tiny_target_folder, data, killed))
    assert f"in {75 - done} shard(s)" in capsys.readouterr().out
    main(arguments(tiny_target_folder, data, whole))
    assert "300 conversations" in capsys.readouterr().out
    assert contents(killed) == contents(whole)


def test_options_reach_the_store(tiny_target_folder, data, tmp_path):
    more = ["--limit", "7", "--layers", "[0, -1]", "--feature_dtype", "bfloat16", "--batch_size", "2"]
    main(arguments(tiny_target_folder, data, tmp_path / "out", *more))
    store = FeatureStore(tmp_path / "out")
    assert len(store) == 7 and store.manifest.layers == (0, -1) and store.manifest.dtype == "bfloat16"


def test_a_dry_run_is_asked_for_by_adding_it_to_the_command(tiny_target_folder, data, tmp_path, capsys, monkeypatch):
    """Options of where the target runs are taken, also those of a file."""
    monkeypatch.setattr("shape.features.costs.free_space", lambda *_: 1e12)  # which others may take in between
    given = arguments(tiny_target_folder, data, tmp_path / "out")
    main([*given, "--dry-run"])
    estimate = capsys.readouterr().out
    file = tmp_path / "extract.yaml"
    file.write_text("device_map: auto\ntrainer:\n  devices: 1\n  num_nodes: 2\n")
    more = ["--dtype", "float32", "--endpoint", "http://localhost:1/v1", "--model", "served", "--config", str(file)]
    main([*given, *more, "--dry-run"])
    assert capsys.readouterr().out == estimate and "300 conversations" in estimate
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", [main, train.main], ids=["extract", "train"])
def test_a_dry_run_stands_in_no_file(tiny_target_folder, data, tmp_path, refused, command):
    (tmp_path / "dry.yaml").write_text("dry_run: true\n")
    given = [f"--target={tiny_target_folder}", f"--data={data}", f"--output={tmp_path / 'out'}"]
    assert "give --dry-run instead" in refused(command, *given, f"--config={tmp_path / 'dry.yaml'}", alone=True)


def test_a_folder_of_another_target_is_refused_before_texts_are_read(tiny_model, data, tmp_path, refused, monkeypatch):
    """And where several devices hold one target, one process extracts."""
    monkeypatch.setattr("shape.features.extraction.split_conversations", lambda *_: pytest.fail("texts are read"))
    monkeypatch.setattr("shape.features.extraction.refuse_others", lambda *_: (_ for _ in ()).throw(other))
    folder, other = tmp_path / "target", FeatureStoreError("features of another target")
    tiny_model("llama", torch.float32).save_pretrained(folder)
    given = arguments(folder, data, tmp_path / "out", "--device_map", "cpu", "--trainer.devices", "2")
    assert "features of another target" in refused(main, *given, alone=True)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max_length", "100000"], "256 positions"),
        (["--data", "missing.jsonl"], "missing.jsonl"),
        (["--target", "no/such/folder"], "no/such/folder"),
        (["--layers", "[7, -1]"], "do not exist"),
        (["--model", "served"], "model is the name of the target at an endpoint; give --endpoint"),
        (["--target", "no/such/folder", "--data", "missing.jsonl"], "missing.jsonl"),  # before a target is loaded
    ],
)
def test_mistakes_get_one_sentence(tiny_target_folder, data, tmp_path, refused, more, message):
    given = arguments(tiny_target_folder, data, tmp_path / "out", *more)
    assert message in refused(main, *given, alone=True)
    assert not (tmp_path / "out").exists()
