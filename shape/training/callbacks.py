"""Watching a run: whether it diverged, and how many operations a step takes."""

import math
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from shape.errors import TrainingDiverged
from shape.training.batches import Batch


class StopOnDivergence(pl.Callback):
    """Ends a run whose loss or weights are not finite any more, before they get into a checkpoint.

    All processes check together, every few steps and before a checkpoint, since checking makes an accelerator wait.

    Args:
        every: steps between checks.

    Raises:
        TrainingDiverged: naming the first step, the last checkpoint, and what to change.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._first: Tensor | None = None
        self._saved: int | None = None

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._saved = checkpoint["global_step"]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        first = torch.where(outputs["loss"].isfinite(), math.inf, batch.step)
        self._first = first if self._first is None else torch.minimum(self._first, first)
        if trainer.global_step % self.every == 0:
            self._check(trainer, self._first)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._first is not None:
            weights = (each.to_local() if isinstance(each, DTensor) else each for each in pl_module.parameters())
            finite = torch.stack([weight.isfinite().all() for weight in weights]).all()
            self._check(trainer, torch.where(finite, self._first, self._first.clamp(max=trainer.global_step - 1)))
        self._saved = trainer.global_step

    def _check(self, trainer: pl.Trainer, first_here: Tensor) -> None:
        first = -float(trainer.strategy.reduce(-first_here, reduce_op="max"))  # of all processes
        if math.isfinite(first):
            on = "train anew with" if self._saved is None else f"go on from the one of step {self._saved} with"
            resume = "" if self._saved is None else "--ckpt_path last and "
            raise TrainingDiverged(
                f"the loss or the weights are not numbers any more at step {first:.0f}, and no checkpoint holds them; "
                f"{on} {resume}a smaller --training.learning_rate or --trainer.gradient_clip_val"
            )


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    """torch's formula, which before 2.12 refuses fewer heads of keys and values than of queries."""
    return int(sdpa_flop_count(query, *(_of_heads(query, one) for one in (key, value))))


def _attention_backward_flops(
    gradient: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(gradient, query, *(_of_heads(query, one) for one in (key, value))))


def _of_heads(query: torch.Size, shape: torch.Size) -> torch.Size:
    return torch.Size([shape[0], query[1], *shape[2:]])


_KINDS = ("flash", "efficient", "cudnn")
_ATTENTION = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention{suffix}"): formula
    for kind in _KINDS
    for suffix, formula in (("", _attention_flops), ("_backward", _attention_backward_flops))
}


class CountFlops(pl.Callback):
    """Counts the operations of the first step's matrix products, forwards and backwards, two per multiply-add.

    Of the run's first step, and never again when it is resumed: counting may round otherwise. Lightning's
    ThroughputMonitor does not count but is told, and its share of the peak is of listed accelerators alone.

    Attributes:
        flops: of one optimiser step, all processes taken to be alike; 0 before there was one.
    """

    def __init__(self) -> None:
        self.flops = 0
        self._counter: FlopCounterMode | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"flops": self.flops}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.flops = state_dict["flops"]

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 0:
            self._counter = FlopCounterMode(display=False, custom_mapping=_ATTENTION)
            self._counter.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self.flops += self._counter.get_total_flops() * trainer.world_size
            self._counter = None

    def on_exception(self, *_: Any) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
