"""Checkpoints: a resumed run ends in the same weights, and what is written is whole."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from training_runs import (
    OPTIONS,
    SaveAt,
    fit,
    weights,
)

from shape.errors import CheckpointError, exit_on_error
from shape.training import checkpoints
from shape.training.checkpoints import (
    AtomicCheckpointIO,
    LastCheckpoint,
    checkpoint_to_resume,
    require_same_run,
    set_aside,
)
from shape.training.options import TrainingOptions


@pytest.mark.parametrize("accumulate", [1, 2])
def test_resumed_run_ends_in_the_same_weights(store, tiny_target, tmp_path, accumulate):
    options = TrainingOptions(steps=9, batch_size=16, noise=0.2)
    path = tmp_path / "some.ckpt"
    whole = fit(tiny_target, store, options=options, dropout=0.3, accumulate=accumulate, callbacks=[SaveAt(5, path)])
    resumed = fit(tiny_target, store, options=options, dropout=0.3, accumulate=accumulate, ckpt_path=path, seed=0)
    assert resumed.trainer.global_step == whole.trainer.global_step == 9
    assert torch.equal(weights(whole), weights(resumed))
    saved = torch.load(path, weights_only=True)
    assert all(name.startswith("predictor.") for name in saved["state_dict"])
    with pytest.raises(CheckpointError, match=r"training.batch_size was 16 and is 8"):
        fit(tiny_target, store, options=TrainingOptions(steps=9, batch_size=8, noise=0.2), ckpt_path=path)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 1)])
def test_a_run_goes_on_with_another_number_of_portions(store, tiny_target, tmp_path, before, after):
    path = tmp_path / "some.ckpt"
    whole = fit(tiny_target, store, accumulate=before, callbacks=[SaveAt(1, path)])
    resumed = fit(tiny_target, store, accumulate=after, ckpt_path=path)
    assert resumed.trainer.global_step == OPTIONS.steps
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=1e-3, atol=1e-4)


class StopAfter(pl.Callback):
    """Ends the training behind a portion, as a time limit does."""

    def __init__(self, portion: int) -> None:
        self.portion = portion

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        trainer.should_stop = batch_idx == self.portion


def test_a_run_that_ended_amid_a_step_goes_on_with_the_whole_step(store, tiny_target, tmp_path):
    straight = fit(tiny_target, store, accumulate=2)
    stopped = fit(tiny_target, store, accumulate=2, callbacks=[StopAfter(8), LastCheckpoint(tmp_path, 100)])
    assert stopped.trainer.global_step == 4
    resumed = fit(tiny_target, store, accumulate=2, ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(weights(resumed), weights(straight))


def test_a_run_that_had_ended_goes_on_with_more_steps(store, tiny_target, tmp_path):
    options, path = TrainingOptions(steps=9, batch_size=16, decay="none"), tmp_path / "some.ckpt"
    whole = fit(tiny_target, store, options=options)
    fit(tiny_target, store, options=replace(options, steps=5), callbacks=[SaveAt(5, path)])
    resumed = fit(tiny_target, store, options=options, ckpt_path=path)
    assert resumed.trainer.global_step == 9 and torch.equal(weights(whole), weights(resumed))


def test_a_run_goes_on_with_another_learning_rate(store, tiny_target, tmp_path):
    """As one that diverged must."""
    path = tmp_path / "some.ckpt"
    fit(tiny_target, store, callbacks=[SaveAt(5, path)])
    still = fit(tiny_target, store, options=replace(OPTIONS, learning_rate=1e-12), ckpt_path=path)
    kept = torch.load(path, weights_only=True)["state_dict"]
    assert still.trainer.global_step == OPTIONS.steps
    for name, value in still.state_dict().items():
        torch.testing.assert_close(value, kept[name], rtol=0, atol=1e-9)


class WrittenSteps(pl.Callback):
    """Which step last.ckpt is of, as each portion begins."""

    def __init__(self, path) -> None:
        self.path, self.steps = path, []

    def on_train_batch_start(self, *args) -> None:
        self.steps.append(torch.load(self.path, weights_only=True)["global_step"] if self.path.exists() else None)


@pytest.mark.parametrize(
    ("every", "seconds", "written"), [(2, 0, [None, None, 2, 2]), (None, 0, [None, 1, 2, 3]), (None, 300, [None] * 4)]
)
def test_checkpoints_are_written_every_so_many_steps_or_minutes(
    store, tiny_target, tmp_path, monkeypatch, every, seconds, written
):
    monkeypatch.setattr(checkpoints, "_SECONDS", seconds)
    found = WrittenSteps(tmp_path / "last.ckpt")
    options = replace(OPTIONS, steps=4)
    fit(tiny_target, store, options=options, accumulate=2, callbacks=[found, LastCheckpoint(tmp_path, every)])
    assert found.steps[::2] == written
    assert torch.load(found.path, weights_only=True)["global_step"] == 4


def test_an_option_that_was_not_there_yet_and_is_off_makes_no_other_run():
    saved, now = {"losses": {"a": 1.0}}, {"losses": {"a": 1.0, "b": 0.0}, "group": {"c": None}}
    require_same_run(saved, now)
    with pytest.raises(CheckpointError, match=r"another run: group.c was None and is 2, losses.b was None and is 0.5;"):
        require_same_run(saved, {"losses": {"a": 1.0, "b": 0.5}, "group": {"c": 2}})
    require_same_run({"training": {"steps": 3}}, {"training": {"steps": 4}})
    with pytest.raises(CheckpointError, match=r"another run: steps was 3 and is 4;"):
        require_same_run({"steps": 3}, {"steps": 4})  # free in its group alone


def test_checkpoint_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path, writer = tmp_path / "last.ckpt", AtomicCheckpointIO()
    writer.save_checkpoint({"step": 1}, path)

    def interrupted(checkpoint, file):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.save_checkpoint({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}


class InterruptAt(pl.Callback):
    """Signals in the middle of a step's first portion."""

    def __init__(self, step: int, *signals: signal.Signals) -> None:
        self.step, self.signals = step, signals

    def on_before_backward(self, trainer, *args) -> None:
        if trainer.global_step == self.step:
            self.step = -1
            for each in self.signals:
                os.kill(os.getpid(), each)


def test_a_second_interrupt_ends_at_once(store, tiny_target, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_ONCE", -1.0)
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit), exit_on_error():
            watching = [InterruptAt(2, signal.SIGTERM, signal.SIGTERM), LastCheckpoint(tmp_path, 100)]
            fit(tiny_target, store, callbacks=watching)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not (tmp_path / "last.ckpt").exists()


@pytest.mark.parametrize(
    "accumulate, asked",
    [(1, [signal.SIGTERM]), (2, [signal.SIGINT]), (1, [signal.SIGTERM, signal.SIGINT, signal.SIGTERM])],
)
def test_an_interrupted_run_is_in_its_checkpoint_to_the_step(store, tiny_target, tmp_path, accumulate, asked):
    straight = fit(tiny_target, store, accumulate=accumulate)
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            watching = [InterruptAt(4, *asked), LastCheckpoint(tmp_path, 100)]
            fit(tiny_target, store, accumulate=accumulate, callbacks=watching)
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning lets the rest of the process ignore it
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 5
    last = LastCheckpoint(tmp_path, 100)
    resumed = fit(tiny_target, store, accumulate=accumulate, callbacks=[last], ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(weights(resumed), weights(straight)) and signal.getsignal(signal.SIGINT) is handler


class AtTheEnd(pl.Callback):
    """Notes which step last.ckpt is of while the last validation goes on, and interrupts that."""

    def __init__(self, path) -> None:
        self.path, self.step = path, None

    def on_train_end(self, *args) -> None:
        self.step = torch.load(self.path, weights_only=True)["global_step"]
        os.kill(os.getpid(), signal.SIGTERM)


def test_an_interrupt_in_the_last_validation_ends_behind_it(store, tiny_target, tmp_path):
    """Until then no checkpoint is of the last step: resumed from one, a run would not validate there."""
    handler, watching = signal.getsignal(signal.SIGINT), AtTheEnd(tmp_path / "last.ckpt")
    try:
        with pytest.raises(SystemExit):
            fit(
                tiny_target, store, options=replace(OPTIONS, steps=4), callbacks=[watching, LastCheckpoint(tmp_path, 2)]
            )
    finally:
        signal.signal(signal.SIGINT, handler)
    assert watching.step == 2 and torch.load(watching.path, weights_only=True)["global_step"] == 4


def test_best_weights_alone_are_set_aside(tmp_path):
    """Of one of several runs that were trained jointly."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/best.safetensors").write_bytes(b"best")
    set_aside(tmp_path)
    assert (tmp_path / "checkpoints.1/best.safetensors").read_bytes() == b"best"
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("content", [{"a": 1}, {"a": Path("x")}, [1]], ids=["other", "objects", "list"])
def test_a_file_that_is_no_checkpoint_of_a_training_is_refused(content, tmp_path):
    torch.save(content, tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match=r"last.ckpt.*give (a last.ckpt of shape train|one of its last.ckpt)"):
        checkpoint_to_resume(str(tmp_path / "last.ckpt"), tmp_path)
