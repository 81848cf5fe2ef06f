"""Training a predictor: the Lightning module, its optimisation, checkpoints, and validation by decoding.

Everything random is a pure function of (seed, step, sample): which examples a step sees (`shape.training.batches`),
their noise, the dropout masks.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple, cast
from zipfile import ZipFile

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.flop_counter import FlopCounterMode
from torchmetrics import MeanMetric
from transformers import PreTrainedModel

from shape.drafters import Drafter, TrainedDrafter, TreeShape
from shape.errors import CheckpointError, ConfigError, TrainingDiverged
from shape.features.extraction import compute_features, place
from shape.features.store import Stored
from shape.files import written_whole
from shape.generation.decoder import ShapeDecoder, ShapeOutput
from shape.networks.base import Predictor
from shape.networks.shape import windows
from shape.target.inference import evaluating
from shape.target.model import Target
from shape.training.batches import Batch, derive_seed
from shape.training.examples import Examples, Reader, Texts, examples, known_in, teacher_forced, whole_texts
from shape.training.losses import Losses, supervised, weighted_loss
from shape.verification.noise import mix

_ADAM_BETAS = (0.9, 0.95)
_VALIDATION_BATCH = 8
# May change between a run and its resumption, the last two to go on where it diverged; all else would make it another
# run.
_FREE_TO_CHANGE = {"steps", "max_minutes", "checkpoint_every", "workers", "learning_rate", "gradient_clip_val"}


@dataclass
class TrainingOptions:
    """How the predictor is optimised.

    Attributes:
        steps: optimiser steps; null follows from the data (`shape.training.defaults`).
        batch_size: positions (roots) per optimiser step, over all processes and accumulated parts together.
        optimizer: "adamw", or "muon" for the network's matrices (its updates scaled to AdamW's size, so that the
            learning rate means the same) and AdamW for all else.
        learning_rate: its peak, reached after `warmup_steps`.
        warmup_steps: steps over which the learning rate rises to its peak.
        decay: how the learning rate falls to zero over the remaining steps.
        weight_decay: on matrices only; biases, gates and norms are left alone.
        noise: standard deviation of uniform noise on the input states, in units of each state's root mean square.
            Off by default: `python -m shape.train --training.noise 0.2` was no better within its interval.
        ema: validate and export an exponential moving average of the weights, with this decay per step; null takes the
            weights themselves.
        max_minutes: stop after so long and shrink the learning rate's schedule to fit; such a run depends on
            the machine's speed and cannot be reproduced bit by bit.
        conversations: learn from so many of the conversations alone, evenly chosen; null is all. For learning curves,
            which say whether more data would help.
        checkpoint_every: steps between resumable checkpoints.
        workers: processes that read features ahead; 0 reads in the training process.
    """

    steps: int | None = None
    batch_size: int = 1024
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    decay: Literal["cosine", "linear", "none"] = "cosine"
    weight_decay: float = 0.01
    noise: float = 0.0
    ema: float | None = None
    max_minutes: float | None = None
    conversations: int | None = None
    checkpoint_every: int = 100
    workers: int = 0

    def check(self) -> None:
        """Raises ConfigError for the first value out of range."""
        for name in ("steps", "batch_size", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"training.{name} is {value}; give a positive number")
        for name in ("warmup_steps", "weight_decay", "noise", "workers"):
            if getattr(self, name) < 0:
                raise ConfigError(f"training.{name} is {getattr(self, name)}; give 0 or more")
        if self.conversations is not None and self.conversations < 1:
            raise ConfigError(f"training.conversations is {self.conversations}; give a positive number or null")
        if not 0 < self.learning_rate < 1:
            raise ConfigError(f"training.learning_rate is {self.learning_rate}; give a value between 0 and 1")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigError(f"training.ema is {self.ema}; give a decay between 0 and 1, or null")
        if self.max_minutes is not None and self.max_minutes <= 0:
            raise ConfigError(f"training.max_minutes is {self.max_minutes}; give a positive number or null")

    def learning_rate_factor(self, step: int, progress: float) -> float:
        """Share of the peak learning rate at a step; `progress` in [0, 1] is how much of the run is over."""
        assert self.steps is not None
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.decay == "none":
            return 1.0
        warm = min(self.warmup_steps / self.steps, 1 - 1e-9)
        left = 1 - min(max((progress - warm) / (1 - warm), 0.0), 1.0)
        return left if self.decay == "linear" else (1 - math.cos(math.pi * left)) / 2


# ------------------------------------------------------------------------------------------------- the module


class BesideTarget(pl.LightningModule):
    """What is trained beside a frozen target, which no checkpoint and no process group sees.

    Attributes:
        target: the frozen model.
    """

    target: Target

    def on_fit_start(self) -> None:
        place(self.target, self.device)

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return batch.to(device)

    def start_clock(self) -> None:
        """Time counts from now on."""
        raise NotImplementedError

    def peaks(self) -> list[float]:
        """The options' peak learning rate of each group of parameters."""
        raise NotImplementedError

    def average(self) -> None:
        """Take the weights after a step into their average, where there is one."""
        raise NotImplementedError

    def on_train_start(self) -> None:
        self.start_clock()
        schedule, peaks = self.lr_schedulers(), self.peaks()
        assert isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
        if schedule.base_lrs != peaks:  # those of the checkpoint
            schedule.base_lrs = list(peaks)
            for group, peak, factor in zip(schedule.optimizer.param_groups, peaks, schedule.lr_lambdas, strict=True):
                group["lr"] = peak * factor(self.global_step)

    def optimizer_step(self, *arguments: Any, **options: Any) -> None:
        super().optimizer_step(*arguments, **options)
        self.average()

    def clipped(self, optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
        """Optimisers whose gradients have a norm each."""
        return [optimizer]

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        whole = self.trainer.strategy.model
        if gradient_clip_val is not None and isinstance(whole, FullyShardedDataParallel):
            whole.clip_grad_norm_(gradient_clip_val)  # no process has all gradients, of which it is the norm
            return
        for part in self.clipped(optimizer):
            self.clip_gradients(part, gradient_clip_val, gradient_clip_algorithm)


class Learner(BesideTarget):
    """A drafter's network in training: how it is optimised, timed and resumed; what it is trained for is a subclass's.

    The target is beside it, not inside: no checkpoint and no process group sees it.

    Args:
        predictor: the network, in float32 unless the Trainer says otherwise.
        target: the frozen model that is drafted for.
        losses: weights of the terms.
        options: optimisation.
        seed: of noise and dropout.
        log_every: steps between measurements of agreement; as the Trainer's `log_every_n_steps`.
        recipe: plain values that define the run beyond `options` and `losses`; resuming with others is
            refused.
    """

    predictor: PreTrainedModel

    def __init__(
        self,
        predictor: PreTrainedModel,
        target: Target,
        losses: Losses,
        options: TrainingOptions,
        *,
        seed: int = 0,
        log_every: int = 20,
        recipe: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.predictor = predictor
        self.target = target
        self.losses = losses
        self.options = options
        self.seed = seed
        self.log_every = log_every
        self.recipe = {"seed": seed, "losses": asdict(losses), "training": asdict(options), **(recipe or {})}
        # Asked now: to a process of several that share the weights, each looks like a vector.
        self._matrices = {name for name, weight in predictor.named_parameters() if weight.ndim >= 2}
        self.averaged: AveragedModel | None = None
        if options.ema is not None:
            self.averaged = AveragedModel(predictor, multi_avg_fn=get_ema_multi_avg_fn(options.ema))
            self.averaged.requires_grad_(False)
        self._seconds_before = 0.0
        self._started = monotonic()
        self._elapsed = 0.0
        self._step, self.shares = -1, dict[str, float | Tensor]()

    @property
    def layers(self) -> Sequence[int]:
        """Of the target, whose features are read."""
        return (-1,)

    @property
    def network(self) -> PreTrainedModel:
        """What is validated and exported: the predictor, or the average of its weights."""
        return self.predictor if self.averaged is None else cast(PreTrainedModel, self.averaged.module)

    def drafter(self) -> Drafter:
        """What decodes with the present weights."""
        raise NotImplementedError

    # -- around the steps

    def start_clock(self) -> None:
        self._started = monotonic()

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        torch.manual_seed(derive_seed(self.seed, batch.step, batch.part))  # for dropout

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if self.options.max_minutes is None:
            return
        elapsed = self._seconds_before + monotonic() - self._started
        # One clock for all processes: learning rates that differ would let their weights drift apart.
        self._elapsed = self.trainer.strategy.broadcast(elapsed)
        if self._elapsed >= 60 * self.options.max_minutes:
            self.trainer.should_stop = True

    def _texts(self, batch: Batch) -> Texts:
        return batch.texts or computed_texts(self.target, batch, self.layers, self.device)

    def _share(self, batch: Batch, loss: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """What training returns for a portion, given its shares of the whole step's losses: these have to add up, where
        Lightning and DDP take means. What is logged is the whole step's.
        """
        shares = {"loss": loss, **parts}
        if batch.step != self._step:
            self._step, self.shares = batch.step, dict.fromkeys(shares, 0.0)
        for name, share in shares.items():
            self.shares[name] = self.shares[name] + share.detach()
            self.log(
                f"train/{name}", self.shares[name], prog_bar=name == "loss", batch_size=len(batch.samples),
                sync_dist=True, reduce_fx="sum",
            )  # fmt: skip
        return loss * batch.parts

    # -- optimisation

    def configure_optimizers(self) -> OptimizerLRScheduler:
        options = self.options
        named = [(name, p) for name, p in self.predictor.named_parameters() if p.requires_grad]
        inner = {name for name, p in named if options.optimizer == "muon" and _is_inner(name, p)}
        others = [(name, p) for name, p in named if name not in inner]
        groups = [
            {"params": [p for name, p in others if name in self._matrices], "weight_decay": options.weight_decay},
            {"params": [p for name, p in others if name not in self._matrices], "weight_decay": 0.0},
        ]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=_ADAM_BETAS)
        if inner:
            matrices = [p for name, p in named if name in inner]
            muon = torch.optim.Muon(
                matrices, options.learning_rate, options.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
            optimizer = Together(muon, optimizer)
        self._groups = len(optimizer.param_groups)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: self.options.learning_rate_factor(step, self._progress(step))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def peaks(self) -> list[float]:
        return [self.options.learning_rate] * self._groups

    def average(self) -> None:
        if self.averaged is not None:
            self.averaged.update_parameters(self.predictor)

    def _progress(self, step: int) -> float:
        assert self.options.steps is not None
        by_steps = step / self.options.steps
        if self.options.max_minutes is None:
            return by_steps
        return max(by_steps, self._elapsed / (60 * self.options.max_minutes))

    # -- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        seconds = self._seconds_before + monotonic() - self._started
        checkpoint["shape"] = {"recipe": self.recipe, "seconds": seconds}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("shape")
        if saved is None:
            raise CheckpointError("the checkpoint was not written by shape.train; give one of its last.ckpt files")
        if differences := _differences(saved["recipe"], self.recipe):
            raise CheckpointError(
                f"the checkpoint is of another run: {', '.join(differences)}; resume with the options it was made "
                "with, or train anew without --ckpt_path"
            )
        self._seconds_before = saved["seconds"]
        # A run that had ended goes on where more steps are asked for: its last batch is not the last any more.
        checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of training so far, earlier sittings included."""
        return self._seconds_before + monotonic() - self._started


def _is_inner(name: str, parameter: nn.Parameter) -> bool:
    """Matrices between states: Muon is not for tables of tokens, nor for vectors."""
    table = any(part in name for part in ("heads", "markov.expand", "embed_tokens", "lm_head"))
    return parameter.ndim == 2 and not table and len(parameter) > 1


def computed_texts(target: Target, batch: Batch, layers: Sequence[int], device: torch.device) -> Texts:
    """Texts of conversations, with features computed now (online mode)."""
    assert batch.conversations is not None
    encoded = batch.conversations
    hidden = compute_features(target, encoded, layers)
    texts = whole_texts(hidden, [each.input_ids for each in encoded], [each.loss_mask for each in encoded])
    return Texts(hidden, *(each.to(device) for each in texts[1:]))


class Together(torch.optim.Optimizer):
    """Several optimisers as one, each with parameters of its own."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        # The very groups of the parts, so that a schedule reaches them.
        self.param_groups = [group for part in parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


class ShapeModule(Learner):
    """A predictor in training: the target's own logit function scores the states that it predicts."""

    predictor: Predictor

    def __init__(self, predictor: Predictor, target: Target, losses: Losses, *arguments: Any, **options: Any) -> None:
        for parameter in () if losses.on_logits else predictor.reading:
            parameter.requires_grad_(False)  # no loss reaches it, and processes would wait for its gradient
        super().__init__(predictor, target, losses, *arguments, **options)
        steps = predictor.config.num_steps
        self.agreement = nn.ModuleList(MeanMetric() for _ in range(steps))
        self.acceptance_length = MeanMetric()
        self._made_reader: Reader | None = None

    @property
    def layers(self) -> Sequence[int]:
        return self.predictor.config.feature_layers

    def drafter(self) -> Drafter:
        return TrainedDrafter(cast(Predictor, self.network))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        predictor, texts = self.predictor, self._texts(batch)
        cut = examples(texts, predictor.config.window, predictor.config.num_steps, predictor.config.hidden_size)
        known, window = texts, cut.window
        if self.options.noise:
            keys = mix(batch.samples + derive_seed(self.seed, batch.step, "noise"))
            known = texts._replace(hidden=add_noise(texts.hidden, keys, self.options.noise, cut.states.shape[-1]))
            window = windows(known.hidden, known.roots, predictor.config.window)
        embeddings = self.target.embed(cut.tokens) if predictor.reads_tokens else None
        predicted = predictor.unroll(known_in(predictor, self.target, known, window), embeddings)
        kept = supervised(cut.mask)
        states, true = predicted[kept], cut.states[kept]
        predicted_logits = target_logits = None
        measuring = (self.global_step + 1) % self.log_every == 0
        if self.losses.on_logits or predictor.confidence is not None or measuring:
            reader = self._reader()
            predicted_logits = reader.at(kept, predicted, embeddings)
            with torch.no_grad():
                target_logits = reader.frozen(true)
        rows = self.target.output_rows(predictor.draft_vocabulary) if self.losses.sinkhorn > 0 else None
        whole = batch.whole(predictor.config.num_steps)
        loss, parts = weighted_loss(self.losses, states, true, predicted_logits, target_logits, kept[-1], rows, whole)
        if predictor.confidence is not None and embeddings is not None:
            assert predicted_logits is not None and target_logits is not None
            agree = predicted_logits.argmax(-1) == target_logits.argmax(-1)
            estimate = predictor.estimate(states.detach(), embeddings[kept]).float()
            refuted = F.binary_cross_entropy_with_logits(estimate, agree.float(), reduction="sum")
            parts["confidence"] = refuted / max(len(whole), 1)
            loss = loss + parts["confidence"]
        if measuring and predicted_logits is not None:
            drafts = torch.full_like(cut.tokens, -1)
            drafts[kept] = predicted_logits.argmax(-1)
            self._log_agreement(drafts, cut)
        return self._share(batch, loss, parts)

    def _reader(self) -> Reader:
        """With a draft vocabulary both distributions are restricted to it, as in EAGLE-3, which also saves most of a
        step's time.
        """
        if self._made_reader is None:
            self._made_reader = Reader(self.predictor, self.target, self.target.dtype)
        return self._made_reader

    @torch.no_grad()
    def _log_agreement(self, drafts: Tensor, cut: Examples) -> None:
        """Share of steps whose best draft is the target's best token, and the acceptance length that chains would
        have.
        """
        if self.predictor.draft_vocabulary is not None:
            drafts = self.predictor.draft_vocabulary[drafts]
        mask = cut.mask
        agree = drafts == self.target.logits(cut.states.to(self.target.dtype)).argmax(-1)
        for n, metric in enumerate(self.agreement):
            assert isinstance(metric, MeanMetric)
            metric(agree[..., n][mask[..., n]].float())
            self.log(f"train/agreement_{n + 1}", metric, on_step=True, on_epoch=False, batch_size=len(mask))
        in_a_row = (agree & mask).cumprod(-1).sum(-1)
        self.acceptance_length(1.0 + in_a_row[mask[..., 0]])
        self.log(
            "train/chain_AL", self.acceptance_length, on_step=True, on_epoch=False, prog_bar=True,
            batch_size=len(mask),
        )  # fmt: skip


class Operations(pl.Callback):
    """Counts the operations of the first step's matrix products, forwards and backwards, two per multiply-add.

    Of the run's first, and never again when it is resumed: counting may round otherwise.

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

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 0:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._counter is not None:
            self._stop()
            self.flops += self._counter.get_total_flops() * trainer.world_size
            self._counter = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._counter is not None:
            self._stop()

    def _stop(self) -> None:
        assert self._counter is not None
        self._counter.__exit__(None, None, None)


def add_noise(hidden: Tensor, keys: Tensor, amount: float, hidden_size: int) -> Tensor:
    """Uniform noise on known states: EAGLE's remedy (arXiv 2401.15077) for inputs that are predictions later.

    Args:
        hidden: (B, T, F), F a multiple of `hidden_size`: one state per layer.
        keys: (B,) int64; a text's noise depends on its key alone.
        amount: standard deviation in units of each state's root mean square; states of zeros stay zeros.
    """
    states = hidden.unflatten(-1, (-1, hidden_size)).float()
    counter = torch.arange(states[0].numel(), device=hidden.device).view(states.shape[1:])
    bits = mix(mix(keys).view(-1, 1, 1, 1) + counter) & 0xFFFFFF
    uniform = (bits.float() + 0.5) * 2.0**-23 - 1.0
    scale = states.pow(2).mean(-1, keepdim=True).sqrt() * (amount * math.sqrt(3))
    return (states + scale * uniform).flatten(-2).to(hidden.dtype)


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name in sorted(saved.keys() | current.keys()):
        mine, theirs = saved.get(name), current.get(name)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            found += _differences(mine, theirs, f"{prefix}{name}.")
        elif mine != theirs and name not in _FREE_TO_CHANGE:
            found.append(f"{prefix}{name} was {mine} and is {theirs}")
    return found


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint as a whole, and keeps the one before it: one of the two is sound, whatever happens."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        final = Path(path)
        with written_whole(final) as temporary:
            with open(temporary, "wb") as file:
                torch.save(checkpoint, file)
            if final.exists():
                os.replace(final, _before(final))


def _before(path: Path) -> Path:
    """The name of the checkpoint before this one."""
    return path.with_name(f"{path.stem}.before{path.suffix}")


def sound_checkpoint(path: Path) -> Path:
    """The checkpoint itself, or the one before it where it is damaged or was lost while being replaced.

    Raises:
        CheckpointError: there is none, or none whose checksums are right.
    """
    present = [each for each in (path, _before(path)) if each.is_file()]
    if not present:
        raise CheckpointError(f"there is no checkpoint {path} to resume from; leave out --ckpt_path to start anew")
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


class StopWhereDiverged(pl.Callback):
    """Ends a run whose loss or weights are not numbers any more, before they get into a checkpoint.

    All processes look together, every few steps and before a checkpoint, since looking makes an accelerator wait.

    Args:
        every: steps between looks.

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
            self._look(trainer, self._first)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._first is not None:
            weights = torch.stack([parameter.isfinite().all() for parameter in pl_module.parameters()]).all()
            self._look(trainer, torch.where(weights, self._first, self._first.clamp(max=trainer.global_step - 1)))
        self._saved = trainer.global_step

    def _look(self, trainer: pl.Trainer, mine: Tensor) -> None:
        first = -float(trainer.strategy.reduce(-mine, reduce_op="max"))  # of all processes
        if math.isfinite(first):
            on = "train anew with" if self._saved is None else f"go on from the one of step {self._saved} with"
            resume = "" if self._saved is None else "--ckpt_path last and "
            raise TrainingDiverged(
                f"the loss or the weights are not numbers any more at step {first:.0f}, and no checkpoint holds them; "
                f"{on} {resume}a smaller --training.learning_rate or --trainer.gradient_clip_val"
            )


# ------------------------------------------------------------------------------------------------- validation


class Measured(NamedTuple):
    """Acceptance length on a set of prompts, with a 95 % bootstrap interval over them."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def acceptance_length(emitted: Sequence[int], forwards: Sequence[int]) -> Measured:
    """Sum of tokens over sum of forwards; resampling prompts gives the interval. Fixed seed, so reproducible."""
    counts = torch.tensor([list(emitted), list(forwards)], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(counts.shape[1], (2000, counts.shape[1]), generator=generator)
    tokens, steps = counts[:, chosen].sum(-1)
    low, high = (tokens / steps).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Measured(float(counts[0].sum() / counts[1].sum()), low, high)


class DecodingValidation(pl.Callback):
    """Measures the acceptance length by decoding fixed prompts with the current weights, and keeps the best ones.

    Prompts are dealt to processes by number, none twice; processes that share the target decode all of them together.
    Sums are reduced over processes, and each prompt's own counts are kept for the interval. Decoding runs without
    autocast, in evaluation mode, without gradients.

    Args:
        prompts: token ids, (T,) int64 each.
        every: steps between measurements; one more comes at the end.
        max_new_tokens: per prompt.
        best_path: where the best weights go (safetensors), written by the first process.
        name: of the run, where several are trained together.
        learner: whose weights are measured; None is the module that is trained.

    Attributes:
        history: acceptance length and its interval by step.
        seconds: that validation took, earlier sittings included.
    """

    def __init__(
        self,
        prompts: Sequence[Tensor],
        every: int,
        max_new_tokens: int,
        best_path: Path,
        name: str = "",
        learner: Learner | None = None,
    ) -> None:
        self.prompts, self.every, self.max_new_tokens = list(prompts), every, max_new_tokens
        self.best_path, self.name, self.learner = best_path, name, learner
        self.history: list[dict[str, float]] = []
        self.seconds = 0.0

    @property
    def state_key(self) -> str:
        return f"{super().state_key} {self.name}".strip()

    @property
    def best(self) -> dict[str, float] | None:
        return max(self.history, key=lambda entry: entry["value"], default=None)

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history, self.seconds = list(state_dict["history"]), state_dict["seconds"]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step and step % self.every == 0 and not self._measured(step):
            self._validate(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._measured(trainer.global_step):
            self._validate(trainer, pl_module)

    def _measured(self, step: int) -> bool:
        return bool(self.history) and self.history[-1]["step"] == step

    def _validate(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        module = self.learner or module
        assert isinstance(module, Learner)
        started = monotonic()
        counts = torch.zeros(2, len(self.prompts), dtype=torch.float64, device=module.device)
        every, rank, world = module.target.sharded, trainer.global_rank, trainer.world_size
        mine = range(0 if every else rank, len(self.prompts), 1 if every else world)
        with _whole(trainer), evaluating([module.network]), torch.autocast(module.device.type, enabled=False):
            drafter = module.drafter()
            emitted, forwards = decode_counts(
                module.target, drafter, [self.prompts[i] for i in mine], self.max_new_tokens
            )
        if not every or rank == 0:  # of those that decoded the same, one counts
            counts[:, list(mine)] = torch.tensor([emitted, forwards], dtype=torch.float64, device=counts.device)
        counts = trainer.strategy.reduce(counts, reduce_op="sum")
        measured = acceptance_length(counts[0].long().tolist(), counts[1].long().tolist())
        best = self.best
        if best is None or measured.value > best["value"]:
            with _whole(trainer):
                if trainer.is_global_zero:
                    _save_weights(module.network, self.best_path)
        self.history.append({"step": trainer.global_step, **measured._asdict()})
        figures = {"acceptance_length": measured.value, "low": measured.low, "high": measured.high}
        values = {"/".join(filter(None, [self.name, "val", figure])): value for figure, value in figures.items()}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
        self.seconds += monotonic() - started


def decode_counts(
    target: Target, drafter: Drafter, prompts: Sequence[Tensor], max_new_tokens: int
) -> tuple[list[int], list[int]]:
    """Tokens emitted and target forwards, for each prompt, of greedy decoding with the drafter."""
    decoder = ShapeDecoder(target, drafter, fall_back=False)
    emitted: list[int] = []
    forwards: list[int] = []
    for start in range(0, len(prompts), _VALIDATION_BATCH):
        rows = prompts[start : start + _VALIDATION_BATCH]
        ids = pad_sequence(list(rows), batch_first=True, padding_side="left").to(target.device)
        ones = [torch.ones(len(row), dtype=torch.int64) for row in rows]
        mask = pad_sequence(ones, batch_first=True, padding_side="left").to(target.device)
        output = decoder.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
        )
        assert isinstance(output, ShapeOutput)
        emitted += output.stats.sequence_emitted
        forwards += output.stats.sequence_forwards
    return emitted, forwards


def _whole(trainer: pl.Trainer) -> AbstractContextManager[None]:
    """With all weights in every process, where processes share them between steps."""
    model = trainer.strategy.model
    if isinstance(model, FullyShardedDataParallel):
        return FullyShardedDataParallel.summon_full_params(model, writeback=False)
    return nullcontext()


def _save_weights(predictor: nn.Module, path: Path) -> None:
    with written_whole(path) as temporary:
        # It knows of weights that are one. A copy, for under FSDP weights are parts of one great tensor.
        save_model(deepcopy(predictor), str(temporary))


def as_trained_and_decoded(
    target: Target, predictor: Predictor, prompts: Sequence[Tensor], max_new_tokens: int
) -> tuple[float, float]:
    """Acceptance lengths of chains on the target's own answers: by teacher forcing, and decoded.

    The two are computed from the same texts on the two ways that a network is fed, so that they differ by rounding
    alone unless these ways differ.
    """
    config, texts, emitted, forwards = predictor.config, [], 0, 0
    decoder = ShapeDecoder(target, TrainedDrafter(predictor, TreeShape(config.num_steps, width=1)), fall_back=False)
    with evaluating([predictor]):
        for prompt in prompts:
            ids = prompt[None].to(target.device)
            options: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens}
            out = decoder.generate(ids, torch.ones_like(ids), return_dict_in_generate=True, **options)
            assert isinstance(out, ShapeOutput)
            text = out.sequences
            mask = torch.arange(text.shape[1]) >= ids.shape[1]
            features = target.features(text, config.feature_layers)[0]
            texts.append(Stored(text[0].cpu(), mask, features.cpu()))
            emitted, forwards = emitted + out.stats.emitted, forwards + out.stats.forwards
        tokens, steps = teacher_forced(predictor, target, texts)
    return tokens / max(steps, 1), emitted / max(forwards, 1)


def load_weights(predictor: nn.Module, path: Path) -> None:
    """Put weights kept by `DecodingValidation` into a predictor of the same configuration.

    Raises:
        CheckpointError: they are gone or damaged.
    """
    try:
        load_model(predictor, path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the best weights in {path} cannot be read ({error}); give the same command with --ckpt_path last and "
            "more --training.steps, whose validation writes them again"
        ) from error
