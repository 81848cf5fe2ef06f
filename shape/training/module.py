"""The Lightning modules that train a drafter's network beside a frozen target.

Everything random is a pure function of (seed, step, sample): which examples a step sees (`shape.training.batches`),
their noise, the dropout masks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from time import monotonic
from typing import Any, cast

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import ModelParallelStrategy
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchmetrics import MeanMetric
from transformers import PreTrainedModel

from shape.drafters import Drafter, TrainedDrafter
from shape.errors import CheckpointError
from shape.features.extraction import compute_features, place
from shape.networks.base import Predictor
from shape.networks.shape import windows
from shape.networks.teacher_forcing import Examples, Reader, Texts, examples, known_in
from shape.target.model import Target
from shape.target.prepack import onednn_multiplies
from shape.target.sharding import blocks
from shape.training.batches import Batch
from shape.training.checkpoints import require_same_run
from shape.training.chunks import chunked_sum, rows_in_chunk
from shape.training.compiling import compiled
from shape.training.losses import acceptance_loss, agreement_loss, selector_loss, step_sum, supervised, weighted_loss
from shape.training.optimization import learning_rate_factor, parameter_groups
from shape.training.options import Losses, PredictorOptions, TrainingOptions
from shape.training.order import derive_seed
from shape.verification.noise import mix

_ADAM_BETAS = (0.9, 0.95)
_SHOWN = ("loss", "agreement")  # in the progress bar
_AGREEMENT_CHUNKS = 8  # of the target's logits, in which it is measured


class TrainingModule(pl.LightningModule):
    """Trains one drafter's network, or several at once (`shape.training.joint`).

    Attributes:
        target: the frozen model, which is no submodule: no checkpoint and no process group sees it.
    """

    target: Target

    @property
    def trained(self) -> Mapping[str, "DrafterModule"]:
        """One for each network, by the name of its run, in the order of their parameter groups."""
        raise NotImplementedError

    def on_fit_start(self) -> None:
        place(self.target, self.device)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        groups: list[dict[str, Any]] = []
        factors: list[Callable[[int], float]] = []
        for module in self.trained.values():
            own = module.parameter_groups()
            groups += own
            factors += [module.learning_rate_factor] * len(own)
        self._peaks = [group["lr"] for group in groups]
        optimizer = torch.optim.AdamW(groups, betas=_ADAM_BETAS)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        for module in self.trained.values():
            module.start_clock()
        schedule = self.lr_schedulers()
        assert isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
        schedule.base_lrs = list(self._peaks)  # a checkpoint has those, and the rates, of its own options
        for group, peak, factor in zip(schedule.optimizer.param_groups, self._peaks, schedule.lr_lambdas, strict=True):
            group["lr"] = peak * factor(self.global_step)

    def optimizer_step(self, *arguments: Any, **options: Any) -> None:
        super().optimizer_step(*arguments, **options)
        for module in self.trained.values():
            if module.averaged is not None:
                module.averaged.update_parameters(module.predictor)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips the norm of each network's gradients by itself."""
        if gradient_clip_val is None or gradient_clip_val <= 0:  # which is Lightning's word for none
            return
        clip = clip_grad_value_ if gradient_clip_algorithm == "value" else clip_grad_norm_
        for module in self.trained.values():
            clip([weight for group in module.parameter_groups() for weight in group["params"]], gradient_clip_val)


class DrafterModule(TrainingModule):
    """A drafter's network in training: how it is optimised, timed and resumed; what it is trained for is a subclass's.

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
        # Of the network alone: Lightning's EMAWeightAveraging copies the whole module, with the target beside it.
        self.averaged: AveragedModel | None = None
        if options.ema is not None:
            self.averaged = AveragedModel(predictor, multi_avg_fn=get_ema_multi_avg_fn(options.ema))
            self.averaged.requires_grad_(False)
        self._weighted = compiled(weighted_loss, options.compile)
        self._seconds_before = 0.0
        self._started = monotonic()
        self._elapsed = 0.0
        self._step, self.step_totals = -1, dict[str, float | Tensor]()

    @property
    def trained(self) -> Mapping[str, "DrafterModule"]:
        return {"": self}

    @property
    def layers(self) -> Sequence[int]:
        """Of the target, whose features are read."""
        return (-1,)

    @property
    def network(self) -> PreTrainedModel:
        """What is validated and exported: the predictor, or the average of its weights."""
        return self.predictor if self.averaged is None else cast(PreTrainedModel, self.averaged.module)

    def drafter(self, network: PreTrainedModel) -> Drafter:
        """What decodes with the present weights: those of `network`, or of a copy of it."""
        raise NotImplementedError

    def configure_model(self) -> None:
        """Cuts weights, gradients and optimiser state among the processes of a strategy that asks for it (torch's
        `fully_shard`): blocks by themselves, gathered when they are computed, and what is left for a step at a time.
        """
        strategy = self.trainer.strategy
        if not isinstance(strategy, ModelParallelStrategy) or isinstance(self, FSDPModule):
            return
        mesh = strategy.device_mesh["data_parallel"]
        for part in [*blocks(self.predictor), self]:
            fully_shard(part, mesh=mesh)
        register_fsdp_forward_method(self, "training_step")

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        torch.manual_seed(derive_seed(self.seed, batch.step, batch.part))  # for dropout

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self._look_at_clock()

    def _look_at_clock(self) -> None:
        if self.options.max_minutes is None:
            return
        # One clock for all processes: learning rates that differ would let their weights drift apart.
        self._elapsed = self.trainer.strategy.broadcast(self.seconds)
        if self._elapsed >= 60 * self.options.max_minutes:
            self.trainer.should_stop = True

    def _texts(self, batch: Batch) -> Texts:
        return batch.texts or computed_texts(self.target, batch, self.layers, self.device)

    @property
    def figures_are_written(self) -> bool:
        """Whether this step's are logged. Several processes synchronise for each, and log at Lightning's steps only."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return not several or (self.global_step + 1) % self.log_every == 0

    def _log_and_scale(self, batch: Batch, loss: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """What training returns for a portion, given its shares of the whole step's losses, and of other figures: these
        have to add up, where Lightning and DDP take means. What is logged is the whole step's.
        """
        shares = {"loss": loss, **parts}
        if batch.step != self._step:
            self._step, self.step_totals = batch.step, dict.fromkeys(shares, 0.0)
        written = self.figures_are_written
        for name, share in shares.items():
            self.step_totals[name] = self.step_totals[name] + share.detach()
            if written:
                self.log(
                    f"train/{name}", self.step_totals[name], prog_bar=name in _SHOWN, batch_size=len(batch.samples),
                    sync_dist=True, reduce_fx="sum",
                )  # fmt: skip
        return loss * batch.parts

    # -- optimisation and time

    def parameter_groups(self) -> Sequence[dict[str, Any]]:
        return parameter_groups(self.predictor, self.options)

    def learning_rate_factor(self, step: int) -> float:
        assert self.options.steps is not None
        progress = step / self.options.steps
        if self.options.max_minutes is not None:
            progress = max(progress, self._elapsed / (60 * self.options.max_minutes))
        return learning_rate_factor(self.options, step, progress)

    def start_clock(self) -> None:
        self._started = monotonic()
        self._look_at_clock()  # a run whose time was up is not resumed for a step

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of training so far, before a resumption too."""
        return self._seconds_before + monotonic() - self._started

    # -- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["shape"] = {"recipe": self.recipe, "seconds": self.seconds}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("shape")
        if saved is None:
            raise CheckpointError("the checkpoint was not written by shape train; give one of its last.ckpt files")
        recipe = dict(saved["recipe"])
        if "predictor" in recipe:  # of a version with fewer options
            recipe["predictor"] = {**asdict(PredictorOptions()), **recipe["predictor"]}
        require_same_run(recipe, self.recipe)
        if checkpoint["global_step"] > cast(int, self.options.steps):
            raise CheckpointError(
                f"the checkpoint is at step {checkpoint['global_step']} and training.steps is {self.options.steps}; "
                "give more steps to train further"
            )
        self._seconds_before = saved.get("seconds", 0.0)
        # A run that had ended goes on where more steps are asked for: its last batch is not the last any more, nor its
        # one epoch over.
        loop = checkpoint["loops"]["fit_loop"]
        progress = loop["epoch_loop.batch_progress"]
        progress["is_last_batch"] = False
        # Lightning counts portions, of which a step may have another number now, and of a step that was broken off
        # none counts: its batches begin anew.
        count, current = checkpoint["global_step"] * self.trainer.accumulate_grad_batches, progress["current"]
        under_way = current["ready"] - current["completed"]  # the portion at whose end was saved
        current |= {"ready": count, "started": count, "processed": count, "completed": count - under_way}
        for counted in ("total", "current"):
            loop["epoch_progress"][counted] |= {"processed": 0, "completed": 0}


class ShapeModule(DrafterModule):
    """A predictor in training: the target's own logit function scores the states that it predicts."""

    predictor: Predictor

    def __init__(self, predictor: Predictor, target: Target, losses: Losses, *arguments: Any, **options: Any) -> None:
        reads = losses.on_logits or predictor.selector is not None
        for parameter in () if reads else predictor.head_parameters:
            parameter.requires_grad_(False)  # no loss reaches it, and processes would wait for its gradient
        super().__init__(predictor, target, losses, *arguments, **options)
        predictor.gradient_checkpointing = self.options.gradient_checkpointing
        # Attention in parts, whose sizes are each batch's own, takes minutes to compile.
        self._unroll = compiled(predictor.unroll, self.options.compile and not predictor.memory_shapes)
        self.metrics = nn.ModuleList(MeanMetric() for _ in range(predictor.config.num_steps + 1))

    @property
    def layers(self) -> Sequence[int]:
        return self.predictor.config.target_layers

    def drafter(self, network: PreTrainedModel) -> Drafter:
        return TrainedDrafter(cast(Predictor, network))

    @cached_property
    def _reader(self) -> Reader:
        """In the target's dtype, or in float32 where a CPU would multiply one number at a time."""
        dtype, on_cpu = self.target.dtype, self.target.device.type == "cpu"
        slow = on_cpu and dtype.itemsize == 2 and not onednn_multiplies(dtype)
        return Reader(self.predictor, self.target, torch.float32 if slow else dtype)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        predictor, texts = self.predictor, self._texts(batch)
        config = predictor.config
        cut = examples(texts, config.window, config.num_steps, config.state_size, config.feature_size)
        known, window = texts, cut.window
        if self.options.noise:
            keys = mix(batch.samples + derive_seed(self.seed, batch.step, "noise"))
            size, absolute = cut.states.shape[-1], self.options.noise_absolute
            known = texts._replace(hidden=add_noise(texts.hidden, keys, self.options.noise, size, absolute))
            read = known.hidden[..., : predictor.config.feature_size]
            window = windows(read, known.roots, predictor.config.window)
        embeddings = predictor.embed(cut.tokens, self.target) if predictor.reads_tokens else None
        predicted = self._unroll(known_in(predictor, self.target, known, window), embeddings)
        learned = cut.mask
        if predictor.learns_draftable_alone and predictor.draft_vocabulary is not None:
            best = draftable(self.target, predictor.draft_vocabulary, texts.hidden[..., -self.target.hidden_size :])
            ahead = positions_ahead(texts, config.num_steps)
            learned = learned & best.flatten()[ahead].unflatten(0, texts.roots.shape)
        measuring = (self.global_step + 1) % self.log_every == 0
        loss, parts, drafts = self._chunked_loss(batch, texts, cut, learned, predicted, embeddings, measuring)
        if measuring:
            self._log_agreement(drafts, cut, batch.step != self._step)
        return self._log_and_scale(batch, loss, parts)

    def _chunked_loss(
        self,
        batch: Batch,
        texts: Texts,
        cut: Examples,
        learned: Tensor,
        predicted: Tensor,
        embeddings: Tensor | None,
        measuring: bool,
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The loss of predicted states (B, P, S, H), its parts, and the best drafts (B, P, S) where they are measured;
        of some roots at a time, whose logits alone are held.

        Args:
            learned: (B, P, S) bool, steps that count.
        """
        predictor, reader, losses = self.predictor, self._reader, self.losses
        steps, counts = predictor.config.num_steps, batch.counts(predictor.config.num_steps)
        count, whole = int(counts.sum()), step_sum(losses, counts)
        selector = predictor.selector
        reading = bool(losses.on_logits) or predictor.config.confidence or selector is not None or measuring
        reduced = predictor.reduced(cut.tokens, embeddings, predicted) if reading else None
        vocabulary = reader.reduced_vocabulary() if reading else None
        estimate, of_acceptance = None, predictor.confidence_learns == "acceptance"
        if predictor.config.confidence and embeddings is not None:
            estimate = predictor.estimate(predicted if of_acceptance else predicted.detach(), cut.tokens, embeddings)
        output = self.target.output_rows(predictor.draft_vocabulary) if losses.sinkhorn > 0 else None
        true, mask = cut.states.flatten(0, 1), learned.flatten(0, 1)
        positions = positions_ahead(texts, steps)
        drafts = torch.full_like(cut.tokens.flatten(0, 1), -1)
        sums: dict[str, Tensor] = {}

        def loss_of(chunk: slice, states: Tensor, reduced: Tensor | None, estimate: Tensor | None) -> Tensor:
            kept = supervised(mask[chunk])
            predicted_logits = target_logits = None
            if reading:
                predicted_logits = reader.at(kept, states, reduced, vocabulary)
                target_logits = self._by_true_states(texts, positions[chunk][kept], reader.frozen)
            logits, step = (predicted_logits, target_logits), kept[-1]
            loss, parts = self._weighted(losses, states[kept], true[chunk][kept], *logits, step, output, whole)
            if predicted_logits is not None and target_logits is not None:
                if estimate is not None:
                    along, drafted = (estimate[kept], predicted_logits, target_logits), None
                    if predictor.draft_vocabulary is not None and not predictor.learns_draftable_alone:
                        of = partial(log_share if of_acceptance else draftable, self.target, predictor.draft_vocabulary)
                        drafted = self._by_true_states(texts, positions[chunk][kept], of)
                    parts["confidence"] = (
                        acceptance_loss(losses, *along, step, whole, drafted)
                        if of_acceptance
                        else agreement_loss(*along, count, drafted)
                    )
                    loss = loss + parts["confidence"]
                if selector is not None and reduced is not None:
                    read = reduced[kept]
                    parts["selector"] = selector_loss(
                        losses, selector, read, predicted_logits, target_logits, step, whole
                    )
                    loss = loss + parts["selector"]
                    if measuring:
                        predicted_logits = predictor.bias(selector.likeliest(predicted_logits), read)
                if measuring:
                    drafts[chunk].index_put_(kept, predicted_logits.argmax(-1))
            for name, part in parts.items():
                sums[name] = sums.get(name, 0.0) + part.detach()
            return loss

        rows = [each if each is None else each.flatten(0, 1) for each in (predicted, reduced, estimate)]
        shared = [] if not reading else predictor.matrices_over_tokens
        shared = shared if vocabulary is None else [*shared, vocabulary]
        size = rows_in_chunk(4 * steps * predictor.config.draft_size) if reading else len(mask)
        return chunked_sum(loss_of, rows, shared, size, count), sums, drafts.view_as(cut.tokens)

    @torch.no_grad()
    def _by_true_states(self, texts: Texts, positions: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """What a function makes of the target's true states at some positions of all texts, (N,) int64 -> (N, ...)."""
        states = texts.hidden[..., -self.target.hidden_size :].flatten(0, 1)
        if texts.roots.shape[1] == 1:
            return function(states[positions])
        distinct, which = positions.unique(return_inverse=True)  # steps of neighbouring roots meet
        return function(states[distinct])[which]

    @torch.no_grad()
    def _log_agreement(self, drafts: Tensor, cut: Examples, begins: bool) -> None:
        """Share of steps whose best draft is the target's best token, and the acceptance length of chains, in all
        portions of an optimiser step.

        Args:
            begins: whether this portion is the first.
        """
        most = _AGREEMENT_CHUNKS * rows_in_chunk(4 * self.target.vocab_size) // drafts.shape[-1]
        every = -(-drafts[..., 0].numel() // max(most, 1))
        drafts, states, mask = (each.flatten(0, 1)[::every] for each in (drafts, cut.states, cut.mask))
        if self.predictor.draft_vocabulary is not None:
            drafts = self.predictor.draft_vocabulary[drafts]
        agree = (drafts == likeliest_tokens(self.target, states)) & mask
        found = {f"agreement_{n + 1}": agree[:, n][mask[:, n]] for n in range(len(self.metrics) - 1)}
        found["chain_AL"] = 1 + agree.cumprod(-1).sum(-1)[mask[:, 0]]
        for (name, values), metric in zip(found.items(), self.metrics, strict=True):
            assert isinstance(metric, MeanMetric)
            if begins:
                metric.reset()
            metric.update(values.float())
            self.log(f"train/{name}", metric.compute(), prog_bar=name == "chain_AL", batch_size=len(cut.mask))


@torch.no_grad()
def likeliest_tokens(target: Target, states: Tensor) -> Tensor:
    """By the target's states, (..., H) -> (...) int64."""
    return _of_logits(target, states, lambda logits: logits.argmax(-1))


def _of_logits(target: Target, states: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """What a function says of the target's logits, (N, V) -> (N,), for states (..., H) -> (...); of some at a time."""
    chunks = states.reshape(-1, states.shape[-1]).split(rows_in_chunk(4 * target.vocab_size))
    return torch.cat([function(target.logits(some.to(target.dtype))) for some in chunks]).view(states.shape[:-1])


def positions_ahead(texts: Texts, steps: int) -> Tensor:
    """Where h_t..h_{t+S-1} of roots t lie among the states of all texts: (B P, S) int64, within their text."""
    length = texts.hidden.shape[1]
    ahead = texts.roots[..., None] + torch.arange(steps, device=texts.roots.device)
    first = torch.arange(len(ahead), device=ahead.device)[:, None, None] * length
    return (first + ahead.clamp(max=length - 1)).flatten(0, 1)


@torch.no_grad()
def draftable(target: Target, vocabulary: Tensor, states: Tensor) -> Tensor:
    """Where the target's likeliest token is one of a draft vocabulary, (K,): by states (..., H) -> (...) bool."""
    best = likeliest_tokens(target, states)
    drafted = torch.zeros(target.vocab_size, dtype=torch.bool, device=best.device)
    drafted[vocabulary.to(best.device)] = True
    return drafted[best]


@torch.no_grad()
def log_share(target: Target, vocabulary: Tensor, states: Tensor) -> Tensor:
    """Logarithm of the target's probability of a draft vocabulary, (K,): by states (..., H) -> (...) float32."""

    def of(logits: Tensor) -> Tensor:
        logits = logits.float()
        return logits[:, vocabulary.to(logits.device)].logsumexp(-1) - logits.logsumexp(-1)

    return _of_logits(target, states, of)


def computed_texts(target: Target, batch: Batch, layers: Sequence[int], device: torch.device) -> Texts:
    """Texts of conversations, with features computed now (online mode)."""
    encoded = batch.conversations
    assert encoded is not None
    hidden = compute_features(target, encoded, layers)
    texts = Texts.whole(hidden, [each.input_ids for each in encoded], [each.loss_mask for each in encoded])
    return Texts(hidden, *(each.to(device) for each in texts[1:]))


def add_noise(hidden: Tensor, keys: Tensor, amount: float, hidden_size: int, absolute: bool = False) -> Tensor:
    """Uniform noise on known states: EAGLE's remedy (arXiv 2401.15077) for inputs that are predictions later.

    Args:
        hidden: (B, T, F), F a multiple of `hidden_size`: one state per layer.
        keys: (B,) int64; a text's noise depends on its key alone.
        amount: standard deviation in units of each state's root mean square; states of zeros stay zeros.
        absolute: in the states' own units instead; zeros, which stand for states before the text, stay zeros there too.
    """
    states = hidden.unflatten(-1, (-1, hidden_size)).float()
    counter = torch.arange(states[0].numel(), device=hidden.device).view(states.shape[1:])
    bits = mix(mix(keys).view(-1, 1, 1, 1) + counter) & 0xFFFFFF
    uniform = (bits.float() + 0.5) * 2.0**-23 - 1.0
    size = states.pow(2).mean(-1, keepdim=True).sqrt()
    scale = (size > 0 if absolute else size) * (amount * math.sqrt(3))
    return (states + scale * uniform).flatten(-2).to(hidden.dtype)
