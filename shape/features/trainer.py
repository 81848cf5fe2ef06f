"""Lightning's Trainer, which decides about devices, processes and nodes, for extraction and training alike.

Options are made of this, so what is heavy is imported where it is used.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from inspect import signature
from typing import TYPE_CHECKING, Any

from shape.errors import ConfigError, did_you_mean, require

if TYPE_CHECKING:
    import pytorch_lightning as pl

_SET_BY_TRAINING = {"max_steps", "max_epochs", "logger", "callbacks", "plugins", "use_distributed_sampler"} | {
    "enable_checkpointing",
    "enable_model_summary",
    "inference_mode",
}


@dataclass
class TrainerOptions:
    """Options of Lightning's Trainer, under its names and with its meaning.

    Attributes:
        accelerator: cpu, cuda, mps, or auto.
        devices: how many, a list of indices, or auto.
        num_nodes: machines.
        strategy: ddp for several devices; fsdp where the predictor, its gradients and its optimiser are too large for
            one (torch's fully_shard, by Lightning's ModelParallelStrategy); auto chooses.
        precision: of training, for example 32-true; auto is bf16-mixed where the hardware multiplies in bfloat16.
            Extraction runs in the target's own dtype.
        accumulate_grad_batches: portions that a step's batch is computed in, to save memory.
        gradient_clip_val: largest norm of the gradients; null does not clip.
        log_every_n_steps: steps between logged metrics; then several processes also ask one another whether to end, or
            to write a checkpoint.
        enable_progress_bar: show one.
        deterministic: refuse operations that are not reproducible on an accelerator.
        more: any other option of Lightning's Trainer, for training alone, for example {"max_time": "00:08:00:00"};
            `--trainer.max_time 00:08:00:00` is short for that.
    """

    accelerator: str = "auto"
    devices: int | str | list[int] = "auto"
    num_nodes: int = 1
    strategy: str = "auto"
    precision: str = "auto"
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = 1.0
    log_every_n_steps: int = 20
    enable_progress_bar: bool = True
    deterministic: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raises ConfigError for an option in `more` that Lightning does not know, or that is set elsewhere, and for
        kinds of FSDP that are not offered.
        """
        import pytorch_lightning as pl

        require(self, "accumulate_grad_batches log_every_n_steps", least=1, group="trainer.")
        require(self, "gradient_clip_val", least=0, group="trainer.")
        if self.strategy.startswith("fsdp") and self.strategy != "fsdp":
            raise ConfigError(f"trainer.strategy {self.strategy} is not offered; give fsdp, or ddp")
        own = {each.name for each in fields(self)}
        free = signature(pl.Trainer).parameters.keys() - own - _SET_BY_TRAINING
        for name in sorted(self.more.keys() - free):
            counts = name in ("max_steps", "max_epochs")
            meant = "; did you mean --training.steps?" if counts else did_you_mean(name, own | free)
            raise ConfigError(f"trainer.{name} is no option of Lightning's Trainer that can be given here{meant}")

    def _check_processes(self) -> None:
        """Raises ConfigError for more processes on a CPU than it has cores, where Lightning would start them all."""
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return
        most = max(os.cpu_count() or 1, 2)
        if self.accelerator in ("cpu", "auto") and self._device() == "cpu" and self.processes > most * self.num_nodes:
            raise ConfigError(
                f"trainer.devices is {self.devices}, which on a CPU are as many processes, and this machine has "
                f"{os.cpu_count()} cores; give at most {most}"
            )

    @property
    def processes(self) -> int:
        """Over all machines; auto and -1 are every GPU that is here, or one process."""
        import torch

        if str(self.devices) in ("auto", "-1", "[-1]"):
            each = 1 if self.accelerator == "cpu" else max(torch.cuda.device_count(), 1)
        elif isinstance(self.devices, list):
            each = len(self.devices)
        elif isinstance(self.devices, int) or self.devices.isdigit():
            each = int(self.devices)
        else:
            each = len([one for one in self.devices.split(",") if one])
        return each * self.num_nodes

    def for_training(self, steps: int, **others: Any) -> "pl.Trainer":
        """A Trainer for so many steps of batches that are dealt to processes already."""
        self._check_processes()
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "more"}
        return _made(
            **{**own, "precision": self.chosen_precision(), "strategy": self._chosen_strategy(), **self.more},
            max_steps=steps,
            max_epochs=1,  # one run over the loader, which counts in steps
            use_distributed_sampler=False,
            enable_model_summary=False,
            **others,
        )

    def chosen_precision(self) -> str:
        """What auto stands for on this machine."""
        if self.precision != "auto":
            return self.precision
        import torch

        from shape.target.inference import multiplies_bfloat16

        return "bf16-mixed" if multiplies_bfloat16(torch.device(self._device())) else "32-true"

    def _device(self) -> str:
        """The kind that trains."""
        import torch

        if self.accelerator in ("auto", "cuda", "gpu") and torch.cuda.is_available():
            return "cuda"
        # Lightning prefers mps where there is one
        return "mps" if self.accelerator != "cpu" and torch.backends.mps.is_available() else "cpu"

    def _chosen_strategy(self) -> Any:
        """What Lightning takes for the name."""
        from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy

        match self.strategy:
            case "ddp":  # which would hold gradients twice
                return DDPStrategy(gradient_as_bucket_view=True)
            case "fsdp":
                return ModelParallelStrategy(self.processes, tensor_parallel_size=1, save_distributed_checkpoint=False)
        return self.strategy

    def for_extraction(self) -> "pl.Trainer":
        """A Trainer for `extract`. No inference mode: its tensors could not be used in training afterwards."""
        self._check_processes()
        return _made(
            accelerator=self.accelerator,
            devices=self.devices,
            num_nodes=self.num_nodes,
            strategy="ddp" if self.strategy == "fsdp" else self.strategy,  # nothing is trained
            enable_progress_bar=self.enable_progress_bar,
            inference_mode=False,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )


def _made(**options: Any) -> "pl.Trainer":
    """Raises ConfigError for what Lightning does not take, or not on this machine; its errors are of many kinds."""
    import pytorch_lightning as pl
    from pytorch_lightning.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

    try:
        if SLURMEnvironment.detect() and not TorchElasticEnvironment.detect():  # torchrun's own, also in a job
            # No requeueing: its checkpoints would lie in the working directory, and be taken for those of any Trainer
            # there, of another run or of extraction.
            options["plugins"] = [*options.get("plugins", ()), SLURMEnvironment(auto_requeue=False)]
        return pl.Trainer(**options)
    except Exception as error:
        said = " ".join(str(error).split())
        raise ConfigError(
            f"Lightning's Trainer cannot be made with these options ({said}); give other --trainer.accelerator, "
            "devices, strategy, precision, or whatever it names"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep libraries to the progress bars of the work itself: no tips, and no hints that do not apply here."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    log = logging.getLogger("pytorch_lightning.utilities.rank_zero")
    level = log.level
    log.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        for message in ("does not have many workers", "LeafSpec"):
            warnings.filterwarnings("ignore", message=f".*{message}.*")
        try:
            yield
        finally:
            log.setLevel(level)
            transformers_logging.enable_progress_bar()
