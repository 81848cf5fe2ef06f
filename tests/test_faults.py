"""Faults that long work meets: each is noticed, named in one sentence, and costs nothing that was finished."""

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from training_runs import (
    CONVERSATIONS,
    arguments,
    command,
    extraction_trainer,
    network,
    require_the_same_end,
    write_conversations,
)

from shape.cli.train import main
from shape.errors import DiskSpaceError, FeatureStoreError
from shape.features.extraction import extract
from shape.features.manifest import Manifest
from shape.features.options import FeatureOptions
from shape.features.shards import load_shard, write_shard
from shape.features.storage import Storage
from shape.networks.export import export
from shape.training.checkpoints import AtomicCheckpointIO, sound_checkpoint

SHORT = ["--training.steps=24", "--validation.every=12"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "talks.jsonl", 40)


@pytest.fixture(scope="module")
def undisturbed(tiny_target_folder, data, tmp_path_factory) -> Path:
    """What a short run without faults ends in, with checkpoints of steps 14 and 21; copy it before changing it."""
    output = tmp_path_factory.mktemp("undisturbed") / "predictor"
    main(arguments(tiny_target_folder, data, output, *SHORT))
    return output


@pytest.fixture
def copy(undisturbed, tmp_path) -> Path:
    return Path(shutil.copytree(undisturbed, tmp_path / "copy"))


def flip(path: Path, at: float = 0.5) -> None:
    """One bit of a file."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 4
    path.write_bytes(content)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing behind so many bytes of a file fails in the middle, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ------------------------------------------------------------------------------------------------- features


def test_damaged_shards_are_noticed_and_computed_again(undisturbed, copy, tiny_target_folder, data, capsys):
    cut, shard = (copy / f"features/shard-0000{number}.safetensors" for number in (1, 2))
    cut.write_bytes(cut.read_bytes()[:-100])
    flip(shard)
    main(arguments(tiny_target_folder, data, copy, *SHORT))
    assert f"{shard.name} of {copy / 'features'} is damaged" in capsys.readouterr().out
    for each in (cut, shard):
        assert each.read_bytes() == (undisturbed / "features" / each.name).read_bytes()
    require_the_same_end(copy, undisturbed)


def test_a_disk_that_fills_up_keeps_finished_shards(tiny_target, tmp_path):
    growing = [CONVERSATIONS[0]] * 4 + [CONVERSATIONS[7]] * 4

    def run(folder: Path) -> list[bytes]:
        trainer = extraction_trainer()
        extract(tiny_target, growing, folder, FeatureOptions(max_length=128, shard_size=4), trainer)
        return [path.read_bytes() for path in sorted(folder.glob("shard-*"))]

    first, second = run(tmp_path / "whole")
    assert len(first) < len(second) - 64
    full = tmp_path / "full"
    with files_of_at_most(len(second) - 64), pytest.raises(DiskSpaceError, match=r"shard-00001.*same command again"):
        run(full)
    assert sorted(path.name for path in full.glob("[!.]*")) == ["manifest.json", "shard-00000.safetensors"]
    assert not list(full.glob(".*.tmp")), "which would keep the disk full"
    assert run(full) == [first, second]


def test_a_disk_that_fills_up_leaves_an_earlier_export_as_it_was(tiny_target, tmp_path):
    export(network(tiny_target, seed=1), tmp_path, tiny_target.identity, {})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with files_of_at_most(4096), pytest.raises(DiskSpaceError, match="no space left to write"):
        export(network(tiny_target, seed=2), tmp_path, tiny_target.identity, {"steps": 2})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not list(tmp_path.glob(".*")), "which would keep the disk full"


def test_states_that_are_not_finite_are_not_stored(tiny_target, tmp_path, monkeypatch):
    """As in float16, whose largest number is 65,504."""
    features = tiny_target.features
    monkeypatch.setattr(tiny_target, "features", lambda *given, **options: features(*given, **options) * 1e6)
    trainer = extraction_trainer()
    with pytest.raises(FeatureStoreError, match=r"conversation c\d .* not finite in float16 .*--dtype bfloat16"):
        extract(tiny_target, CONVERSATIONS, tmp_path, FeatureOptions(max_length=128, feature_dtype="float16"), trainer)
    assert not list(tmp_path.glob("shard-*"))


def test_changed_data_is_noticed_before_work(copy, tiny_target_folder, tmp_path, refused):
    other = write_conversations(tmp_path / "other.jsonl", 41)
    said = refused(main, *arguments(tiny_target_folder, other, copy, *SHORT, "--ckpt_path=last"))
    assert "made from something else" in said and "the conversations" in said
    answered = refused(main, *arguments(tiny_target_folder, other, copy, *SHORT, "--regenerate=true"))
    assert "have changed since" in answered and "--regenerate false" in answered
    online = refused(main, *arguments(tiny_target_folder, other, copy, *SHORT, "--online=true", "--ckpt_path=last"))
    assert "checkpoint is of another run: conversations (data" in online


# ------------------------------------------------------------------------------------------------- checkpoints


def test_a_damaged_checkpoint_leaves_the_one_before(undisturbed, copy, tiny_target_folder, data, capsys):
    flip(copy / "checkpoints/last.ckpt")
    main(arguments(tiny_target_folder, data, copy, *SHORT, "--ckpt_path=last"))
    assert "going on from the one before" in capsys.readouterr().out
    require_the_same_end(copy, undisturbed)


def test_without_a_sound_checkpoint_training_says_so(copy, tiny_target_folder, data, refused):
    (copy / "checkpoints/last.before.ckpt").write_bytes(b"")
    last = copy / "checkpoints/last.ckpt"
    last.write_bytes(last.read_bytes()[:-1000])
    said = refused(main, *arguments(tiny_target_folder, data, copy, *SHORT, "--ckpt_path=last"))
    assert "last.ckpt" in said and "is damaged or no checkpoint at all" in said
    said = refused(main, *arguments(tiny_target_folder, data, copy, *SHORT, f"--ckpt_path={copy / 'config.json'}"))
    assert "config.json is damaged or no checkpoint at all" in said


def test_a_disk_that_fills_up_keeps_the_checkpoint(copy, undisturbed, tiny_target_folder, data, refused):
    """Of step 21, where that of step 24 does not fit any more."""
    last = copy / "checkpoints/last.ckpt"
    os.replace(last.with_name("last.before.ckpt"), last)
    with files_of_at_most(last.stat().st_size // 2):
        said = refused(main, *arguments(tiny_target_folder, data, copy, *SHORT, "--ckpt_path=last"))
    assert "no space left to write" in said and "same command again" in said
    assert torch.load(sound_checkpoint(last), weights_only=True)["global_step"] == 21
    assert not list(last.parent.glob(".*.tmp"))
    main(arguments(tiny_target_folder, data, copy, *SHORT, "--ckpt_path=last"))
    require_the_same_end(copy, undisturbed)


def test_a_checkpoint_is_never_alone_once_there_were_two(tmp_path):
    path, writer = tmp_path / "last.ckpt", AtomicCheckpointIO()
    for step in range(3):
        writer.save_checkpoint({"step": step}, path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["last.before.ckpt", "last.ckpt"]
    path.unlink()
    assert torch.load(sound_checkpoint(path), weights_only=True) == {"step": 1}


# ------------------------------------------------------------------------------------------------- training


def test_a_loss_that_is_no_number_stops_the_run(undisturbed, copy, tiny_target_folder, data, refused):
    """By a feature that is infinite in spite of all: the checkpoint before is kept, and serves once it is right."""
    shutil.rmtree(copy / "checkpoints")
    shard = copy / "features/shard-00001.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_shard(shard).items()}
    for end in tensors["offsets"][[2, 4, 6]].tolist():  # whichever is learned from first
        assert tensors["loss_mask"][end - 2]
        tensors["hidden"][end - 8] = float("inf")
    write_shard(Storage(copy / "features"), Manifest.read(Storage(copy / "features")), 1, tensors)
    options = arguments(tiny_target_folder, data, copy, "--training.batch_size=4", "--training.steps=12")
    said = refused(main, *options, "--training.checkpoint_every=1")
    assert "not numbers any more at step" in said and "--ckpt_path last" in said
    step = int(said.split("at step ")[1].split(",")[0])
    kept = torch.load(copy / "checkpoints/last.ckpt", weights_only=True)
    assert kept["global_step"] == step > 0
    assert all(tensor.isfinite().all() for tensor in kept["state_dict"].values())
    shutil.copy(undisturbed / "features" / shard.name, shard)
    main([*options, "--training.checkpoint_every=1", "--ckpt_path=last"])
    whole = copy.with_name("whole")
    main(arguments(tiny_target_folder, data, whole, "--training.batch_size=4", "--training.steps=12"))
    require_the_same_end(copy, whole)


# ------------------------------------------------------------------------------------------------- processes


def child_of(process: subprocess.Popen) -> int:
    """The process that Lightning's launcher has started beside the first."""
    task = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    children = [int(child) for child in task.read_text().split()]
    names = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return next(child for child, name in names.items() if b"shape" in name)


def wait_until(true, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the child process as Linux shows it")
@pytest.mark.parametrize("killed", [1, 0])
def test_a_killed_process_ends_the_others_and_the_run_goes_on(undisturbed, copy, tiny_target_folder, data, killed):
    """SIGKILL to either of two processes, in the middle of training."""
    shutil.rmtree(copy / "checkpoints")
    more = ["--trainer.devices=2", "--trainer.strategy=ddp", "--training.steps=100000", "--training.decay=none"]
    options = arguments(tiny_target_folder, data, copy, *more, "--validation.every=100000")
    process = command(*options)
    wait_until(lambda: process.poll() is not None or (copy / "checkpoints/last.ckpt").exists())
    assert process.poll() is None, process.communicate()[0]
    child = child_of(process)
    os.kill(child if killed else process.pid, signal.SIGKILL)
    said = process.communicate(timeout=120)[0]  # until the last of them has closed the pipe
    assert process.returncode == (2 if killed else -signal.SIGKILL), said
    assert (
        f"rank {1 - killed} has lost a process beside it" in said
        and "--ckpt_path last" in said
        and "Traceback" not in said
    )
    wait_until(lambda: not Path(f"/proc/{child}").exists(), 20)

    step = torch.load(copy / "checkpoints/last.ckpt", weights_only=True)["global_step"]
    assert step >= 7
    options = [option for option in options if not option.startswith("--training.steps")]
    process = command(*options, f"--training.steps={step + 7}", "--ckpt_path=last")
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 0, said
    assert torch.load(copy / "checkpoints/last.ckpt", weights_only=True)["global_step"] == step + 7
    for shard in (undisturbed / "features").glob("shard-*"):
        assert (copy / "features" / shard.name).read_bytes() == shard.read_bytes()
