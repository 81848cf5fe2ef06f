"""`python -m shape.joint`: several predictors trained at once, on one forward of the target a step.

The command is `shape.cli.joint`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from torch import Tensor

from shape.errors import CheckpointError, ConfigError
from shape.features.storage import Storage
from shape.files import reading
from shape.training import run as training
from shape.training.batches import Batch
from shape.training.module import BesideTarget, Learner, Operations, Together, computed_texts
from shape.training.run import TrainOptions

# What runs may differ in; of `training` these alone.
_OWN = {"predictor", "tree", "losses", "output"}
_OWN_OF_TRAINING = {"optimizer", "learning_rate", "warmup_steps", "decay", "weight_decay", "noise", "ema"}


class SharedForward(BesideTarget):
    """Several learners on the same batches, of which the target's states are computed once.

    Args:
        learners: by name, all of one target.
    """

    def __init__(self, learners: Mapping[str, Learner]) -> None:
        super().__init__()
        self.learners = dict(learners)
        for number, (name, learner) in enumerate(learners.items()):
            self.add_module(f"learner_{number}", learner)  # a direct child gets the Trainer from Lightning
            self._log_here(name, learner)
        first, *_ = learners.values()
        self.target = first.target
        self.layers = sorted({layer for learner in learners.values() for layer in learner.layers})

    def _log_here(self, name: str, learner: Learner) -> None:
        """What a learner logs goes to the module that is trained, under the learner's name and not into the bar."""

        def log(metric: str | None = None, value: Any = None, **options: Any) -> None:
            self.log(f"{name}/{metric or options.pop('name')}", value, **{**options, "prog_bar": False})

        learner.log = log  # type: ignore[method-assign, assignment]

    # -- around the steps

    def start_clock(self) -> None:
        for learner in self.learners.values():
            learner.start_clock()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        texts = computed_texts(self.target, batch, self.layers, self.device)
        by_layer = dict(zip(self.layers, texts.hidden.split(self.target.hidden_size, -1), strict=True))
        losses: list[Tensor] = []
        for learner in self.learners.values():
            hidden = torch.cat([by_layer[layer] for layer in learner.layers], -1)
            learner.on_train_batch_start(batch, batch_idx)
            own = replace(batch, texts=texts._replace(hidden=hidden))
            losses.append(cast(Tensor, learner.training_step(own, batch_idx)))
        loss = torch.stack(losses).sum()
        whole = sum(learner.shares["loss"] for learner in self.learners.values())
        self.log("train/loss", whole, prog_bar=True, batch_size=len(batch.samples), sync_dist=True, reduce_fx="sum")
        return loss

    # -- optimisation

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizers, factors = [], []
        for learner in self.learners.values():
            made: Any = learner.configure_optimizers()
            optimizers.append(made["optimizer"])
            factors += made["lr_scheduler"]["scheduler"].lr_lambdas
        optimizer = Together(*optimizers)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def peaks(self) -> list[float]:
        return [peak for learner in self.learners.values() for peak in learner.peaks()]

    def average(self) -> None:
        for learner in self.learners.values():
            learner.average()

    def clipped(self, optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
        assert isinstance(optimizer, Together)
        return optimizer.parts

    # -- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        found: dict[str, dict[str, Any]] = {name: {} for name in self.learners}
        for name, learner in self.learners.items():
            learner.on_save_checkpoint(found[name])
        checkpoint["together"] = {name: own["shape"] for name, own in found.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("together", {})
        if list(saved) != list(self.learners):
            raise CheckpointError(
                f"the checkpoint is of {', '.join(saved) or 'no runs together'}, and these runs are "
                f"{', '.join(self.learners)}; give the same files in the same order, or leave out --ckpt_path"
            )
        for name, learner in self.learners.items():
            try:
                learner.on_load_checkpoint({**checkpoint, "shape": saved[name]})
            except CheckpointError as error:
                raise CheckpointError(f"{name}: {error}") from error


def train_together(runs: Sequence[TrainOptions], output: str | Path, ckpt_path: str | None = None) -> list[Path]:
    """Train them all, then export and measure each as `shape.train` does; returns the folders of the predictors.

    Raises:
        ConfigError: runs that cannot share a forward, before anything is loaded; else what `shape.train` raises.
    """
    names = require_alike(runs)
    shared = training.writable(Path(output))
    for run in runs:
        training.writable(Path(run.output))
    checkpoint = training.checkpoint_named(ckpt_path, shared)
    material = training.prepare(runs, Storage(shared))
    runs = material.runs
    made = [training.make_learner(run, material, None) for run in runs]
    learners = {name: learner for name, (learner, _) in zip(names, made, strict=True)}
    validations = [
        training.decoding_validation(run, material, name, learner)
        for run, (name, learner) in zip(runs, learners.items(), strict=True)
    ]
    module, (_, data) = SharedForward(learners), made[0]
    operations = Operations()
    trainer = training.make_trainer(runs[0], material.target, shared, [*validations, operations])
    if checkpoint is None:
        training.set_aside(shared / "checkpoints")
    trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    if trainer.is_global_zero:
        validating = sum(validation.seconds for validation in validations)
        first, *_ = learners.values()
        record = {  # of all, as it cannot be told apart
            "examples": data.size,
            "together": names,
            "validation_seconds": round(validating, 1),
            **training.throughput(runs[0], first, first.seconds - validating, operations),
        }
        for run, learner, validation in zip(runs, learners.values(), validations, strict=True):
            training.finish(run, learner, validation, material.prompts, record)
    return [Path(run.output) for run in runs]


def require_alike(runs: Sequence[TrainOptions]) -> list[str]:
    """The names of the runs.

    Raises:
        ConfigError: they cannot share the forwards of one target.
    """
    names = [Path(run.output).name for run in runs]
    if len(runs) < 2 or len(set(names)) < len(names):
        raise ConfigError(
            f"runs trained together are named after their output folders, here {', '.join(names) or 'none'}; give at "
            "least two, with folders of unlike names"
        )
    for name, run in zip(names, runs, strict=True):
        run.check()
        if not run.online:
            raise ConfigError(f"{name} reads stored features, which cost no forward to share; set online: true")
        if run.training.max_minutes is not None:
            raise ConfigError(f"{name} has training.max_minutes, and time is all runs' together; give training.steps")
        if run.trainer.strategy.startswith("fsdp"):
            raise ConfigError(f"{name} is cut by fsdp, which takes one network; give --trainer.strategy ddp")
        apart = [key for key, value in _shared(run).items() if value != _shared(runs[0])[key]]
        if apart:
            theirs, mine = _shared(runs[0])[apart[0]], _shared(run)[apart[0]]
            raise ConfigError(
                f"{names[0]} has {apart[0]} {theirs} and {name} has {mine}; runs together may differ in "
                f"{', '.join(sorted(_OWN))} and of training in {', '.join(sorted(_OWN_OF_TRAINING))} alone"
            )
    return names


def _shared(run: TrainOptions) -> dict[str, Any]:
    values = {name: value for name, value in asdict(run).items() if name not in _OWN | {"training", "ckpt_path"}}
    kept = {name: value for name, value in asdict(run.training).items() if name not in _OWN_OF_TRAINING}
    return {**values, **{f"training.{name}": value for name, value in kept.items()}}


# ------------------------------------------------------------------------------------------------- command


def options_of(file: str) -> TrainOptions:
    """Of one run, as `python -m shape.train --config FILE` reads them."""
    with reading(file, ConfigError, "give a YAML file with options of shape.train"):
        values = yaml.safe_load(Path(file).read_text())
    if not isinstance(values, dict):
        raise ConfigError(f"{file} has no options; give a YAML file with options of shape.train")
    return training.parse([f"--config={file}"])
