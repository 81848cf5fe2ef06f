"""Lightning's Trainer, which decides about devices, processes and nodes, for extraction and training alike."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytorch_lightning as pl
import torch
from transformers.utils import logging as transformers_logging


@dataclass
class TrainerOptions:
    """Options of Lightning's Trainer, under its names and with its meaning.

    Attributes:
        accelerator: cpu, cuda, mps, or auto.
        devices: how many, a list of indices, or auto.
        num_nodes: machines.
        strategy: ddp for several devices; fsdp where the predictor, its gradients and its optimiser are too large for
            one (GPUs only); auto chooses.
        precision: of training, for example 32-true; auto is bf16-mixed where the hardware multiplies in bfloat16.
            Extraction runs in the target's own dtype.
        accumulate_grad_batches: portions that a step's batch is computed in, to save memory.
        gradient_clip_val: largest norm of the gradients; null does not clip.
        log_every_n_steps: steps between logged metrics.
        enable_progress_bar: show one.
        deterministic: refuse operations that are not reproducible on an accelerator.
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

    def chosen_precision(self) -> str:
        """What auto stands for on this machine."""
        if self.precision != "auto":
            return self.precision
        if self.accelerator in ("auto", "cuda", "gpu") and torch.cuda.is_available():
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:  # Lightning would prefer mps where there is one, and that has no fast bfloat16 to rely on
            on_cpu = self.accelerator == "cpu" or not torch.backends.mps.is_available()
            fast = on_cpu and torch.cpu._is_avx512_bf16_supported()  # type: ignore[attr-defined]
        return "bf16-mixed" if fast else "32-true"

    def for_extraction(self) -> pl.Trainer:
        """A Trainer for `extract`. No inference mode: its tensors could not be used in training afterwards."""
        return pl.Trainer(
            accelerator=self.accelerator,
            devices=self.devices,
            num_nodes=self.num_nodes,
            strategy="ddp" if self.strategy.startswith("fsdp") else self.strategy,  # nothing is trained
            enable_progress_bar=self.enable_progress_bar,
            inference_mode=False,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Keep libraries to the progress bars of the work itself: no tips, and no hints that do not apply here."""
    transformers_logging.disable_progress_bar()
    log = logging.getLogger("pytorch_lightning.utilities.rank_zero")
    level = log.level
    log.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        for message in ("does not have many workers", "overridden `transfer_batch_to_device`", "LeafSpec"):
            warnings.filterwarnings("ignore", message=f".*{message}.*")
        try:
            yield
        finally:
            log.setLevel(level)
            transformers_logging.enable_progress_bar()
