"""Checkpoints: written as a whole, the one before kept, checked before they are resumed from, and of which run."""

import os
import shutil
import signal
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from threading import current_thread, main_thread
from time import monotonic
from typing import Any
from zipfile import ZipFile

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from shape.errors import CheckpointError
from shape.files import reading, written_whole

_SECONDS = 300.0  # between checkpoints, where steps are not given
_ONCE = 1.0  # second, within which signals are one: schedulers send theirs to a process and to what began it

# Options that may differ when a run is resumed (the last two so that one that diverged can go on); any other change
# makes it a different run.
_FREE_TO_CHANGE = {
    "training.gradient_checkpointing", "training.compile", "training.steps", "training.max_minutes",
    "training.checkpoint_every", "training.workers", "training.learning_rate", "gradient_clip_val",
}  # fmt: skip


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint as a whole, and keeps the one before it: one of the two is sound, whatever happens."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        final = Path(path)
        with written_whole(final) as temporary:
            with open(temporary, "wb") as file:
                torch.save(checkpoint, file)
            if final.exists():
                os.replace(final, _previous(final))


class LastCheckpoint(Checkpoint):
    """last.ckpt: every so often, at the end, with the last validation in it, and where the run is interrupted.

    A step that is broken off may have changed a part of the weights. So the first Ctrl-C, or request to end (SIGTERM),
    waits for a step's end, and the next one does not, unless it is the same that comes by another way at once. Several
    processes are at different steps then: they ask one another every few steps, and write and end together.

    Args:
        every: steps between checkpoints; None is five minutes.
        asking: steps after which several processes ask one another.
    """

    def __init__(self, folder: Path, every: int | None = None, asking: int = 1) -> None:
        self._last, self._every, self._asking = folder / "last.ckpt", every, asking
        self._step, self._written, self._interrupted, self._asked = 0, 0.0, False, 0.0
        self._handlers: dict[int, Any] = {}  # of these signals, elsewhere than in training

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step, self._written = trainer.global_step, monotonic()
        if current_thread() is main_thread():
            self._handlers = {each: signal.signal(each, self._on_signal) for each in (signal.SIGINT, signal.SIGTERM)}

    def _on_signal(self, number: int, _: Any) -> None:
        if not self._interrupted:
            self._interrupted, self._asked = True, monotonic()
            rank_zero_only(print)("interrupted: a checkpoint follows; once more ends at once", flush=True)
        elif monotonic() - self._asked > _ONCE:
            self._restore_handlers()
            signal.raise_signal(number)

    def _restore_handlers(self) -> None:
        for each, handler in self._handlers.items():
            signal.signal(each, handler)
        self._handlers = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        ended, self._step = trainer.global_step > self._step, trainer.global_step
        if not ended or trainer.global_step == trainer.max_steps:  # a portion of a step, or what follows writes at once
            return
        interrupted, due = self._interrupted, self._every is None and monotonic() - self._written > _SECONDS
        if trainer.world_size > 1:
            asks = self._step % self._asking == 0
            interrupted, due = _any_process(trainer, interrupted, due) if asks else (False, False)
        if due or interrupted or (self._every is not None and self._step % self._every == 0):
            trainer.save_checkpoint(self._last)
            self._written = monotonic()
        if interrupted:
            raise KeyboardInterrupt

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self._last)
        interrupted = self._interrupted
        if trainer.world_size > 1:
            (interrupted,) = _any_process(trainer, interrupted)
        if interrupted:  # in the last steps, or in the validation behind them
            raise KeyboardInterrupt
        self._restore_handlers()

    def on_exception(self, *_: Any) -> None:
        self._restore_handlers()


def _any_process(trainer: pl.Trainer, *here: bool) -> tuple[bool, ...]:
    """Which of these are true in one process at least; all processes have to ask."""
    found = trainer.strategy.reduce(torch.tensor(here, device=trainer.strategy.root_device).float(), reduce_op="max")
    return tuple(each > 0 for each in found.tolist())


def _previous(path: Path) -> Path:
    """The name of the checkpoint before this one."""
    return path.with_name(f"{path.stem}.before{path.suffix}")


def sound_checkpoint(path: Path) -> Path:
    """The checkpoint itself, or the one before it where it is damaged or was lost while being replaced.

    Raises:
        CheckpointError: there is none, or none whose checksums are right.
    """
    present = [each for each in (path, _previous(path)) if each.is_file()]
    if not present:
        raise CheckpointError(
            f"there is no checkpoint {path} to resume from; leave out --ckpt_path: finished answers and features "
            "are kept"
        )
    for each in present:
        if _is_sound(each):
            return each
    raise CheckpointError(
        f"checkpoint {' and '.join(map(str, present))} is damaged or no checkpoint at all; give another one, or leave "
        "out --ckpt_path to train anew: features and answers are kept"
    )


def _is_sound(checkpoint: Path) -> bool:
    """Whether a file of torch.save holds what was written; torch itself does not look at its checksums."""
    try:
        with ZipFile(checkpoint) as file:
            return file.testzip() is None
    except Exception:  # a damaged directory of the archive has errors of many kinds
        return False


def checkpoint_to_resume(name: str | None, output: Path) -> str | None:
    """The checkpoint to resume from; "last" is the one in the output folder."""
    if name is None:
        return None
    path = output / "checkpoints/last.ckpt" if name == "last" else Path(name)
    if (found := sound_checkpoint(path)) != path:
        said = f"checkpoint {path} is damaged or lost; going on from the one before, {found}"
        rank_zero_only(print)(said, flush=True)
    with reading(f"checkpoint {found}", CheckpointError, "give a last.ckpt of shape train"):
        content = torch.load(found, map_location="cpu", weights_only=True, mmap=True)
        if not {"state_dict", "loops", "pytorch-lightning_version"} <= content.keys():
            raise CheckpointError(f"checkpoint {found} was not written by shape train; give one of its last.ckpt files")
    return str(found)


class SetAside(pl.Callback):
    """Sets aside what a run replaces that goes on from a checkpoint elsewhere, once that is known to be its own."""

    def __init__(self, outputs: Iterable[str | Path]) -> None:
        self._outputs = [Path(output) for output in outputs]

    def on_load_checkpoint(self, *_: Any) -> None:  # the module, which refuses others, comes first
        for output in self._outputs:
            set_aside(output)


@rank_zero_only
def set_aside(output: Path) -> None:
    """Move an earlier run's checkpoints, so that `--ckpt_path last` can never mean another run's, and copy its
    predictor, which the new one will replace.
    """
    checkpoints = output / "checkpoints"
    begun, finished = any(checkpoints.glob("*")), (output / "model.safetensors").exists()
    if not (begun or finished):
        return
    number = 1
    while (aside := output / f"checkpoints.{number}").exists():
        number += 1
    if begun:
        checkpoints.rename(aside)
        print(f"moved an earlier run's checkpoints to {aside} (--ckpt_path last would have continued it)", flush=True)
    if finished:
        aside.mkdir(exist_ok=True)
        for file in (file for file in output.iterdir() if file.is_file() and not file.name.startswith(".")):
            shutil.copy2(file, aside / file.name)
        if (output / "custom_generate").exists():
            shutil.copytree(output / "custom_generate", aside / "custom_generate")
        print(f"copied the predictor in {output} to {aside}", flush=True)


def require_same_run(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raises CheckpointError, with every difference, for a checkpoint of a run with another recipe."""
    if found := differences(saved, current, _FREE_TO_CHANGE):
        data = "conversations (data, limit, validation_data, or validation.prompts, which holds out others)"
        found = [data if phrase.startswith("conversations was") else phrase for phrase in found]
        raise CheckpointError(
            f"the checkpoint is of another run: {', '.join(found)}; resume with the options it was made "
            "with, or train anew without --ckpt_path"
        )


def differences(
    saved: Mapping[str, Any], current: Mapping[str, Any], free: Collection[str], prefix: str = ""
) -> list[str]:
    """Phrases for what differs, but for what is free to change and options that there were not yet and that are off.

    Args:
        free: names with their groups', as in "training.steps".
    """
    found = []
    for name in sorted(saved.keys() | current.keys()):
        old, new, full = saved.get(name), current.get(name), f"{prefix}{name}"
        if isinstance(new, Mapping) and (isinstance(old, Mapping) or name not in saved):
            found += differences(old or {}, new, free, f"{full}.")
        elif old != new and full not in free and (name in saved or new):
            found.append(f"{full} was {old} and is {new}")
    return found
