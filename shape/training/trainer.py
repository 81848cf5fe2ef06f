"""The Lightning Trainer of a run: its devices, loggers and checkpoints."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytorch_lightning as pl
from pytorch_lightning.callbacks import LearningRateMonitor
from pytorch_lightning.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from shape.target.model import Target
from shape.target.sharding import ShardTarget
from shape.training.callbacks import StopOnDivergence
from shape.training.checkpoints import AtomicCheckpointIO, LastCheckpoint
from shape.training.options import TrainOptions


def make_loggers(options: TrainOptions, output: Path) -> list[Logger]:
    """Those of `options.loggers`. What csv and tensorboard write of one run is in one folder."""
    found: list[Logger] = []
    version: int | str | None = None
    for name in options.loggers:
        match name:
            case "wandb":
                project = os.environ.get("WANDB_PROJECT", "shape")
                found.append(WandbLogger(project=project, name=output.name, save_dir=output))
            case "mlflow":
                found.append(MLFlowLogger("shape", run_name=output.name, save_dir=str(output / "logs/mlruns")))
            case _:
                local = CSVLogger if name == "csv" else TensorBoardLogger
                found.append(local(output, name="logs", version=version))
                version = found[-1].version
    return found


def make_trainer(options: TrainOptions, target: Target, output: Path, callbacks: Sequence[pl.Callback]) -> pl.Trainer:
    """The Trainer of a run, with its loggers, checkpoints and more callbacks."""
    return options.trainer.for_training(
        cast(int, options.training.steps),
        logger=make_loggers(options, output),
        callbacks=[
            *([ShardTarget(target)] if options.shard_target else []),
            *([LearningRateMonitor()] if options.loggers else []),
            StopOnDivergence(options.trainer.log_every_n_steps),
            *callbacks,
            LastCheckpoint(
                output / "checkpoints", options.training.checkpoint_every, options.trainer.log_every_n_steps
            ),
        ],
        plugins=[AtomicCheckpointIO()],
    )
