"""Joint training: several predictors trained at once, on one forward of the target a step."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from shape.errors import CheckpointError, ConfigError
from shape.training.batches import Batch
from shape.training.module import DrafterModule, TrainingModule, computed_texts
from shape.training.options import TrainOptions

# What runs may differ in; of `training` these alone.
_OWN = {"predictor", "tree", "losses", "output"}
_OWN_OF_TRAINING = {
    "learning_rate", "warmup_steps", "decay", "weight_decay", "noise", "noise_absolute", "ema", "compile",
    "gradient_checkpointing",
}  # fmt: skip


class JointModule(TrainingModule):
    """Several networks on the same batches, of which the target's states are computed once.

    Args:
        modules: by name, all of one target.
    """

    def __init__(self, modules: Mapping[str, DrafterModule]) -> None:
        super().__init__()
        self._modules_by_name = dict(modules)
        for number, (name, module) in enumerate(modules.items()):
            self.add_module(f"module_{number}", module)  # a direct child gets the Trainer from Lightning
            self._log_here(name, module)
            self.target = module.target
        self.layers = sorted({layer for module in modules.values() for layer in module.layers})

    @property
    def trained(self) -> Mapping[str, DrafterModule]:
        return self._modules_by_name

    def _log_here(self, name: str, module: DrafterModule) -> None:
        """What a module logs goes to the one that Lightning trains, under its name and not into the progress bar."""

        def log(metric: str | None = None, value: Any = None, **options: Any) -> None:
            self.log(f"{name}/{metric or options.pop('name')}", value, **{**options, "prog_bar": False})

        module.log = log  # type: ignore[method-assign, assignment]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        texts = computed_texts(self.target, batch, self.layers, self.device)
        by_layer = dict(zip(self.layers, texts.hidden.split(self.target.hidden_size, -1), strict=True))
        losses: list[Tensor] = []
        for module in self.trained.values():
            hidden = torch.cat([by_layer[layer] for layer in module.layers], -1)
            module.on_train_batch_start(batch, batch_idx)
            own = replace(batch, texts=texts._replace(hidden=hidden))
            losses.append(cast(Tensor, module.training_step(own, batch_idx)))
        if next(iter(self.trained.values())).figures_are_written:
            whole = sum(module.step_totals["loss"] for module in self.trained.values())
            self.log("train/loss", whole, prog_bar=True, batch_size=len(batch.samples), sync_dist=True, reduce_fx="sum")
        return torch.stack(losses).sum()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        found: dict[str, dict[str, Any]] = {name: {} for name in self.trained}
        for name, module in self.trained.items():
            module.on_save_checkpoint(found[name])
        checkpoint["joint"] = {name: own["shape"] for name, own in found.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("joint", {})
        if list(saved) != list(self.trained):
            raise CheckpointError(
                f"the checkpoint is of {', '.join(saved) or 'no joint training'}, and these runs are "
                f"{', '.join(self.trained)}; give the same files in the same order, or leave out --ckpt_path"
            )
        for name, module in self.trained.items():
            try:
                module.on_load_checkpoint({**checkpoint, "shape": saved[name]})
            except CheckpointError as error:
                raise CheckpointError(f"{name}: {error}") from error


def require_alike(runs: Sequence[TrainOptions]) -> list[str]:
    """The names of the runs.

    Raises:
        ConfigError: they cannot share the forwards of one target.
    """
    names = [Path(run.output).name for run in runs]
    if len(runs) < 2 or len(set(names)) < len(names):
        raise ConfigError(
            f"runs of a joint training are named after their output folders, here {', '.join(names) or 'none'}; give "
            "at least two, with folders of unlike names"
        )
    for name, run in zip(names, runs, strict=True):
        run.check()
        if run.ckpt_path is not None:
            raise ConfigError(
                f"{name} has ckpt_path, and runs of a joint training are resumed together; leave it out, and give "
                "--ckpt_path to shape joint"
            )
        if not run.online:
            raise ConfigError(f"{name} reads stored features, which cost no forward to share; set online: true")
        if run.training.max_minutes is not None:
            raise ConfigError(f"{name} has training.max_minutes, which all runs would share; give training.steps")
        if run.validation.patience is not None:
            raise ConfigError(f"{name} has validation.patience, which would end all runs with it; leave it out")
        if run.trainer.strategy == "fsdp":
            raise ConfigError(f"{name} is cut by fsdp, which takes one network; give --trainer.strategy ddp")
        theirs, mine = shared_options(runs[0]), shared_options(run)
        if apart := [key for key in mine if mine[key] != theirs[key]]:
            raise ConfigError(
                f"{names[0]} has {apart[0]} {theirs[apart[0]]} and {name} has {mine[apart[0]]}; runs of a joint "
                f"training may differ in {', '.join(sorted(_OWN))} and of training in "
                f"{', '.join(sorted(_OWN_OF_TRAINING))} alone"
            )
    return names


def shared_options(run: TrainOptions) -> dict[str, Any]:
    """What all runs of a joint training have to agree on, by name."""
    values = {name: value for name, value in asdict(run).items() if name not in _OWN | {"training", "ckpt_path"}}
    kept = {name: value for name, value in asdict(run.training).items() if name not in _OWN_OF_TRAINING}
    return {**values, **{f"training.{name}": value for name, value in kept.items()}}
