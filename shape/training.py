"""Training a predictor: examples from features, the Lightning modules, validation by decoding, and export.

Everything random is a pure function of (seed, step, sample): which examples a step sees, their noise, the
dropout masks. So a resumed run goes on exactly where it stopped, and several processes see the batches that
one would see.
"""

import hashlib
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import MeanMetric

from shape import custom_generate
from shape.config import ShapeConfig
from shape.conversations import Conversation, Encoded
from shape.decoder import ShapeDecoder, ShapeOutput
from shape.drafters import TrainedDrafter, TreeShape
from shape.errors import CheckpointError, ConfigError, DataError
from shape.features import FeatureStore, Stored, compute_features, eligible, encode_row, place
from shape.losses import Losses, supervised, weighted_loss
from shape.network import Known, Predictor, known_at
from shape.predictor import windows
from shape.target import Target, TargetIdentity
from shape.verification.sampling import mix

_ADAM_BETAS = (0.9, 0.95)
_ROOTS_SAMPLE = 256
_VALIDATION_BATCH = 8
_STEPS_POOLED = 8  # whose texts are sorted together
# May change between a run and its resumption; everything else would make it another run.
_FREE_TO_CHANGE = {"steps", "max_minutes", "checkpoint_every", "workers"}


@dataclass
class TrainingOptions:
    """How the predictor is optimised.

    Attributes:
        steps: optimiser steps.
        batch_size: positions (roots) per optimiser step, over all processes and accumulated parts together.
        optimizer: "adamw", or "muon" for the network's matrices (its updates scaled to AdamW's size, so that the
            learning rate means the same) and AdamW for all else.
        learning_rate: its peak, reached after `warmup_steps`.
        decay: how the learning rate falls to zero over the remaining steps.
        weight_decay: on matrices only; biases, gates and norms are left alone.
        noise: standard deviation of uniform noise on the input states, in units of each state's root mean square.
            Off by default: `python -m shape.train --training.noise 0.2` was no better within its interval.
        max_minutes: stop after so long and shrink the learning rate's schedule to fit; such a run depends on
            the machine's speed and cannot be reproduced bit by bit.
        checkpoint_every: steps between resumable checkpoints.
        workers: processes that read features ahead; 0 reads in the training process.
    """

    steps: int = 1000
    batch_size: int = 1024
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    decay: Literal["cosine", "linear", "none"] = "cosine"
    weight_decay: float = 0.01
    noise: float = 0.0
    max_minutes: float | None = None
    checkpoint_every: int = 100
    workers: int = 0

    def check(self) -> None:
        """Raises ConfigError for the first value out of range."""
        for name in ("steps", "batch_size", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"training.{name} is {getattr(self, name)}; give a positive number")
        for name in ("warmup_steps", "weight_decay", "noise", "workers"):
            if getattr(self, name) < 0:
                raise ConfigError(f"training.{name} is {getattr(self, name)}; give 0 or more")
        if not 0 < self.learning_rate < 1:
            raise ConfigError(f"training.learning_rate is {self.learning_rate}; give a value between 0 and 1")
        if self.max_minutes is not None and self.max_minutes <= 0:
            raise ConfigError(f"training.max_minutes is {self.max_minutes}; give a positive number or null")

    def learning_rate_factor(self, step: int, progress: float) -> float:
        """Share of the peak learning rate at a step; `progress` in [0, 1] is how much of the run is over."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.decay == "none":
            return 1.0
        warm = min(self.warmup_steps / self.steps, 1 - 1e-9)
        left = 1 - min(max((progress - warm) / (1 - warm), 0.0), 1.0)
        return left if self.decay == "linear" else (1 - math.cos(math.pi * left)) / 2


# ------------------------------------------------------------------------------------------------- examples


class Texts(NamedTuple):
    """Texts, or the surroundings of single roots, and the roots in them.

    Attributes:
        hidden: (B, T, F) features of h_0..h_{T-1}.
        input_ids, loss_mask: (B, T'), T' >= T, False past a text's end.
        roots: (B, P) int64; padded with 0, which is no root.
    """

    hidden: Tensor
    input_ids: Tensor
    loss_mask: Tensor
    roots: Tensor


class Examples(NamedTuple):
    """What a predictor is trained on, for roots t and steps n = 0..S-1. `...` is (B, P).

    Attributes:
        window: (..., W, F) states h_{t-W}..h_{t-1}, zeros before the text.
        tokens: (..., S) int64, x_t..x_{t+S-1}, read where steps are conditioned on tokens.
        states: (..., S, H) true states h_t..h_{t+S-1}.
        mask: (..., S) bool, steps that count: x_t and all of x_{t+1}..x_{t+n+1} are supervised.
    """

    window: Tensor
    tokens: Tensor
    states: Tensor
    mask: Tensor


def examples(texts: Texts, window: int, steps: int, hidden_size: int) -> Examples:
    """Cut examples out of texts; the windows are cut by the function that decoding uses.

    A root that is not eligible (`shape.features.eligible`) gives an example whose mask is False throughout.

    Args:
        texts: the last `hidden_size` columns of their features are h.
        window: number W of states before the root.
        steps: number S of steps.
    """
    hidden, tokens, loss_mask, roots = texts
    rows = torch.arange(len(tokens), device=tokens.device)[:, None, None]
    ahead = roots[..., None] + torch.arange(steps + 1, device=roots.device)
    inside = ahead < tokens.shape[1]
    supervised = loss_mask[rows, ahead.clamp(max=tokens.shape[1] - 1)] & inside
    settled = supervised[..., :1] & (roots >= 1)[..., None]
    states = hidden[rows, ahead[..., :-1].clamp(max=hidden.shape[1] - 1), -hidden_size:]
    return Examples(
        window=windows(hidden, roots, window),
        tokens=tokens[rows, ahead[..., :-1].clamp(max=tokens.shape[1] - 1)],
        states=states,
        mask=settled & supervised[..., 1:].cumprod(-1).bool(),
    )


@torch.no_grad()
def teacher_forced(predictor: Predictor, target: Target, texts: Iterable[Stored]) -> tuple[int, int]:
    """Tokens and target forwards that decoding the answers of stored texts would take, without decoding them.

    Right for answers that the target itself wrote greedily, and for chains as deep as the predictor's steps. The
    first token of an answer comes from the prefill and counts on neither side; the ratio is the acceptance length.
    """
    config, vocabulary = predictor.config, predictor.draft_vocabulary
    reader = Reader(predictor, target)
    tokens = forwards = 0
    for ids, mask, hidden in texts:
        roots = eligible(mask, torch.tensor([0, len(ids)])).nonzero()[:, 0]
        text = Texts(*(each[None].to(target.device) for each in (hidden, ids, mask, roots)))
        cut = examples(text, config.window, config.num_steps, target.hidden_size)
        best = reader.greedy(known_in(predictor, target, text, cut.window), cut.tokens)[0]
        drafts = (best if vocabulary is None else vocabulary[best]).cpu()
        ahead = (roots[:, None] + torch.arange(1, config.num_steps + 1)).clamp(max=len(ids) - 1)
        accepted = torch.zeros_like(ids)
        accepted[roots] = ((drafts == ids[ahead]) & cut.mask[0].cpu()).cumprod(-1).sum(-1)
        for first, last in _answers(mask):
            emitted, steps = accepted_walk(accepted.tolist(), first, last)
            tokens, forwards = tokens + emitted, forwards + steps
    return tokens, forwards


def known_in(predictor: Predictor, target: Target, texts: Texts, window: Tensor) -> Known:
    """What the network knows at the roots of texts; `window` is theirs."""
    embeddings = target.embed(texts.input_ids[:, : texts.hidden.shape[1] + 1]) if predictor.memory_shapes else None
    if embeddings is not None and embeddings.shape[1] == texts.hidden.shape[1]:
        embeddings = F.pad(embeddings, (0, 0, 0, 1))  # behind the text's last token, which no root looks past
    return known_at(predictor, texts.hidden, embeddings, texts.roots, window)


class Reader:
    """Reads a predictor's states as decoding does: with its own head, or the target's for what can be drafted."""

    def __init__(self, predictor: Predictor, target: Target, dtype: torch.dtype | None = None) -> None:
        self.predictor, self.target = predictor, target
        self.dtype = dtype or predictor.dtype
        vocabulary = predictor.draft_vocabulary
        self.head = None if vocabulary is None else target.head_of(vocabulary.to(target.device), self.dtype)

    def frozen(self, states: Tensor) -> Tensor:
        """Logits of what can be drafted, (..., H) -> (..., K), by the target's head."""
        return self.target.logits(states.to(self.target.dtype if self.head is None else self.dtype), self.head)

    def __call__(self, states: Tensor, embeddings: Tensor | None) -> Tensor:
        """The predictor's logits, (B, P, S, H) -> (B, P, S, K), along tokens whose embeddings are given."""
        own = self.predictor.heads is not None
        logits = self.target.logits(states, self.predictor.own_head) if own else self.frozen(states)
        if self.predictor.config.coupling:
            logits = self.predictor.couple(logits, self.predictor.reduced(self._drafted))
        return self.predictor.bias(logits, embeddings)

    def at(self, chosen: tuple[Tensor, ...], states: Tensor, embeddings: Tensor | None) -> Tensor:
        """The same of some steps alone, (N, K), chosen out of (B, P, S) step by step (`shape.losses.supervised`)."""
        predictor = self.predictor
        if predictor.config.coupling:  # which needs a step's neighbour
            return self(states, embeddings)[chosen]
        if predictor.heads is None:
            logits = self.frozen(states[chosen])
        else:
            logits = self.target.logits(states[chosen], partial(predictor.own_head_at, steps=chosen[-1]))
        return predictor.bias(logits, None if embeddings is None else embeddings[chosen])

    @cached_property
    def _drafted(self) -> Tensor:
        """(K, H) embeddings of what can be drafted."""
        vocabulary = self.predictor.draft_vocabulary
        if vocabulary is None:
            vocabulary = torch.arange(self.target.vocab_size, device=self.target.device)
        return self.target.embed(vocabulary)

    def greedy(self, known: Known, tokens: Tensor) -> Tensor:
        """The best drafts along true tokens, (B, P, S) int64, as numbers in the draft vocabulary."""
        predictor = self.predictor
        embeddings = self.target.embed(tokens).to(predictor.dtype) if predictor.reads_tokens else None
        known = known._replace(window=known.window.to(predictor.dtype))
        return self(predictor.unroll(known, embeddings, tokens.shape[-1]), embeddings).argmax(-1)


def _answers(loss_mask: Tensor) -> list[tuple[int, int]]:
    """Positions of the first and the last token of each supervised run."""
    edges = F.pad(loss_mask.int(), (1, 1)).diff()
    return list(zip((edges == 1).nonzero()[:, 0].tolist(), ((edges == -1).nonzero()[:, 0] - 1).tolist(), strict=True))


def accepted_walk(accepted: Sequence[int], first: int, last: int) -> tuple[int, int]:
    """Tokens and target forwards of chain decoding, by teacher forcing on a text decoded greedily.

    Args:
        accepted: for each position t as root, how many drafted tokens in a row the target agrees with.
        first: position of the first root, the token that the prefill itself yields.
        last: position of the text's last token.

    Returns:
        Tokens emitted after `first`, and forwards; their ratio is the acceptance length.
    """
    root, forwards = first, 0
    while root < last:
        root += min(accepted[root] + 1, last - root)
        forwards += 1
    return last - first, forwards


def draft_vocabulary(texts: Iterable[tuple[Tensor, Tensor]], size: int, vocab_size: int) -> Tensor:
    """The tokens worth drafting, (size,) int64 in rising order: the most frequent among supervised ones.

    Args:
        texts: (input_ids, loss_mask) of each conversation, (T,) both.
        size: how many to keep; of equally frequent ones, those of lower number.

    Raises:
        ConfigError: the target has fewer tokens.
    """
    if size > vocab_size:
        raise ConfigError(f"predictor.draft_vocab_size is {size}, and the target has {vocab_size} tokens; give fewer")
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for input_ids, loss_mask in texts:
        counts += input_ids[loss_mask].long().bincount(minlength=vocab_size)
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def roots_of(loss_masks: Sequence[Tensor]) -> Tensor:
    """The eligible roots of texts, (B, P) int64, padded with 0."""
    starts = [eligible(mask, torch.tensor([0, len(mask)])).nonzero()[:, 0] for mask in loss_masks]
    return pad_sequence(starts, batch_first=True)


# ------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Split:
    """Which part of every step's batch a process works on, and in how many portions. Positions divide evenly, texts as
    evenly as they can.
    """

    rank: int = 0
    world: int = 1
    accumulate: int = 1

    @property
    def parts(self) -> int:
        return self.world * self.accumulate


@dataclass
class Batch:
    """One portion of one step's examples, or the conversations to compute them from.

    Attributes:
        step: the optimiser step it belongs to.
        part: its number among the step's portions, over all processes.
        samples: (B,) int64 numbers of the texts in the data: of roots where each text is one root's surroundings, of
            conversations otherwise.
    """

    step: int
    part: int
    samples: Tensor
    texts: Texts | None = None
    conversations: list[Encoded] | None = None

    def to(self, device: torch.device) -> "Batch":
        moved = self.texts and Texts(*(tensor.to(device, non_blocking=True) for tensor in self.texts))
        return Batch(self.step, self.part, self.samples.to(device), moved, self.conversations)

    def pin_memory(self) -> "Batch":
        pinned = self.texts and Texts(*(tensor.pin_memory() for tensor in self.texts))
        return Batch(self.step, self.part, self.samples, pinned, self.conversations)


class StepOrder:
    """The order of samples: a permutation per epoch from (seed, epoch), cut into steps across epoch ends."""

    def __init__(self, seed: int, count: int, batch_size: int) -> None:
        self.seed, self.count, self.batch_size = seed, count, batch_size
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.int64)

    def step(self, step: int) -> Tensor:
        """Sample numbers of one step's whole batch, (batch_size,) int64."""
        start, stop = step * self.batch_size, (step + 1) * self.batch_size
        parts = []
        while start < stop:
            epoch, offset = divmod(start, self.count)
            taken = min(stop - start, self.count - offset)
            parts.append(self._of(epoch)[offset : offset + taken])
            start += taken
        return torch.cat(parts)

    def _of(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
            self._epoch, self._permutation = epoch, torch.randperm(self.count, generator=generator)
        return self._permutation


class _Batches(Dataset[Batch]):
    """Item k is this process's k-th portion since step 0: a pure function of k, wherever a run starts."""

    def __init__(self, order: StepOrder, split: Split, steps: int) -> None:
        self.order, self.split, self.steps = order, split, steps

    def __len__(self) -> int:
        return self.steps * self.split.accumulate

    def __getitem__(self, index: int) -> Batch:
        if index >= len(self):
            raise IndexError(index)
        step, portion = divmod(index, self.split.accumulate)
        part = portion * self.split.world + self.split.rank
        return self._load(step, part, self._samples(step, part))

    def _samples(self, step: int, part: int) -> Tensor:
        """Those of a step that one of its portions has."""
        return self.order.step(step).tensor_split(self.split.parts)[part]

    def _load(self, step: int, part: int, samples: Tensor) -> Batch:
        raise NotImplementedError


class StoredBatches(_Batches):
    """Examples around random roots of a feature store."""

    def __init__(
        self,
        store: FeatureStore,
        roots: Tensor,
        window: int,
        ahead: int,
        order: StepOrder,
        split: Split,
        steps: int,
    ) -> None:
        super().__init__(order, split, steps)
        self.store, self.roots, self.window, self.ahead = store, roots, window, ahead

    def _load(self, step: int, part: int, samples: Tensor) -> Batch:
        around = self.store.gather(self.roots[samples], self.window, self.ahead)
        roots = torch.full((len(samples), 1), self.window)
        return Batch(step, part, samples, Texts(around.hidden, around.input_ids, around.loss_mask, roots))


class TextBatches(_Batches):
    """Whole conversations of a feature store, for networks that attend to everything before a root.

    Texts of a portion stand in rows of their own: no document sees another. Those of several steps are dealt to
    portions by their number of roots, so that little is padding, and every step gets short ones and long ones.

    Args:
        numbers: (N,) int64, the texts in the store. roots: (N,) int64, how many each has.
    """

    def __init__(
        self, store: FeatureStore, numbers: Tensor, roots: Tensor, order: StepOrder, split: Split, steps: int
    ) -> None:
        super().__init__(order, split, steps)
        self.store, self.numbers, self.roots = store, numbers, roots

    def _samples(self, step: int, part: int) -> Tensor:
        pool, turn = divmod(step, _STEPS_POOLED)
        samples = torch.cat([self.order.step(pool * _STEPS_POOLED + each) for each in range(_STEPS_POOLED)])
        portions = samples[self.roots[samples].sort(stable=True).indices].tensor_split(_STEPS_POOLED * self.split.parts)
        generator = torch.Generator().manual_seed(derive_seed(self.order.seed, "pool", pool))
        turn = int(torch.randperm(_STEPS_POOLED, generator=generator)[turn])
        # There and back, so that steps are about equally large.
        return portions[part * _STEPS_POOLED + (turn if part % 2 == 0 else _STEPS_POOLED - 1 - turn)]

    def _load(self, step: int, part: int, samples: Tensor) -> Batch:
        stored = [self.store[int(self.numbers[sample])] for sample in samples]
        hidden = pad_sequence([each.hidden for each in stored], batch_first=True)
        ids = pad_sequence([each.input_ids for each in stored], batch_first=True)
        masks = pad_sequence([each.loss_mask for each in stored], batch_first=True)
        return Batch(step, part, samples, Texts(hidden, ids, masks, roots_of([each.loss_mask for each in stored])))


class ConversationBatches(_Batches):
    """Whole conversations, of which the target computes the states inside the training step (online mode)."""

    def __init__(
        self,
        conversations: Sequence[Conversation],
        encode: Callable[[Conversation], Encoded],
        order: StepOrder,
        split: Split,
        steps: int,
    ) -> None:
        super().__init__(order, split, steps)
        self.conversations, self.encode = conversations, encode

    def _load(self, step: int, part: int, samples: Tensor) -> Batch:
        chosen = [self.encode(self.conversations[index]) for index in samples.tolist()]
        return Batch(step, part, samples, conversations=chosen)


class _FromStep(Sampler[int]):
    """Portions from the resumed step on. Its length counts those before as well, as Lightning's progress does."""

    def __init__(self, start: int, total: int) -> None:
        self.start, self.total = start, total

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.total))


class _ResumableLoader(DataLoader[Batch]):
    """Says to Lightning that it resumes mid-epoch; its position is the trainer's step, so it stores nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


class ShapeDataModule(pl.LightningDataModule):
    """Training batches, from a feature store or, without one, from conversations (online mode).

    Args:
        source: a feature store, or conversations.
        target: needed for its tokenizer in online mode.
        window, ahead: states before the root, and steps after it, that examples hold; a window of None holds all.
        exclude: numbers of conversations that are kept for validation.

    Raises:
        DataError: nothing in the data can be learned from.
    """

    def __init__(
        self,
        source: FeatureStore | Sequence[Conversation],
        target: Target,
        options: TrainingOptions,
        *,
        window: int | None,
        ahead: int,
        exclude: Collection[int] = (),
        max_length: int = 1024,
        skip_bad_rows: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.target, self.options, self.seed = target, options, seed
        self.window, self.ahead = window, ahead
        self.encode = partial(
            encode_row, tokenizer=target.tokenizer, max_length=max_length, skip_bad_rows=skip_bad_rows
        )
        self.store = source if isinstance(source, FeatureStore) else None
        self.roots = source.roots(exclude) if isinstance(source, FeatureStore) else torch.empty(0)
        self.conversations: list[Conversation] = []
        self.roots_each = 0.0
        self.texts_with_roots = self.roots_of_texts = torch.empty(0, dtype=torch.int64)
        if self.store is not None and window is None:
            self.texts_with_roots, self.roots_of_texts = self.store.owner(self.roots).unique(return_counts=True)
            self.roots_each = len(self.roots) / max(len(self.texts_with_roots), 1)
        if not isinstance(source, FeatureStore):
            self.conversations = [each for index, each in enumerate(source) if index not in exclude]
            self.roots_each = self._mean_roots()
        if not len(self.roots) and not self.roots_each:
            raise DataError(
                "the data has no two supervised tokens in a row within max_length, so there is nothing to learn; "
                "raise max_length, or give conversations with longer assistant turns"
            )

    def texts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(input_ids, loss_mask) of every conversation."""
        if self.store is not None:
            yield from ((stored.input_ids, stored.loss_mask) for stored in self.store)
        for conversation in self.conversations:
            encoded = self.encode(conversation)
            yield encoded.input_ids, encoded.loss_mask

    @property
    def size(self) -> str:
        """How much there is to learn from, for people."""
        if self.store is not None:
            return f"{len(self.roots):,} positions of {len(self.store):,} conversations"
        return f"{len(self.conversations):,} conversations of about {self.roots_each:.0f} positions"

    def train_dataloader(self) -> DataLoader[Batch]:
        trainer = self.trainer
        assert trainer is not None
        split = Split(trainer.global_rank, trainer.world_size, trainer.accumulate_grad_batches)
        data = self.batches(split)
        return _ResumableLoader(
            data,
            batch_size=None,
            sampler=_FromStep(trainer.global_step * split.accumulate, len(data)),
            num_workers=self.options.workers,
            pin_memory=trainer.strategy.root_device.type == "cuda",
            persistent_workers=self.options.workers > 0,
            generator=torch.Generator(),  # the loader draws a worker seed, and not from the global generator
        )

    def batches(self, split: Split) -> _Batches:
        """All portions of one process."""
        options = self.options
        if self.store is not None and self.window is not None:
            order = StepOrder(self.seed, len(self.roots), options.batch_size)
            return StoredBatches(self.store, self.roots, self.window, self.ahead, order, split, options.steps)
        texts = max(split.parts, round(options.batch_size / self.roots_each))
        count = len(self.conversations) if self.store is None else len(self.texts_with_roots)
        order = StepOrder(self.seed, count, texts)
        if self.store is not None:
            return TextBatches(self.store, self.texts_with_roots, self.roots_of_texts, order, split, options.steps)
        return ConversationBatches(self.conversations, self.encode, order, split, options.steps)

    def _mean_roots(self) -> float:
        sample = self.conversations[:: max(1, len(self.conversations) // _ROOTS_SAMPLE)]
        counts = []
        for conversation in sample:
            mask = self.encode(conversation).loss_mask
            counts.append(int(eligible(mask, torch.tensor([0, len(mask)])).sum()))
        return sum(counts) / max(len(counts), 1)


# ------------------------------------------------------------------------------------------------- the module


class ShapeModule(pl.LightningModule):
    """A predictor in training. The target is beside it, not inside: no checkpoint and no process group sees it.

    Args:
        predictor: the network, in float32 unless the Trainer says otherwise.
        target: the frozen model whose states are predicted; its own logit function scores them.
        losses: weights of the terms.
        options: optimisation.
        seed: of noise and dropout.
        log_every: steps between measurements of agreement; as the Trainer's `log_every_n_steps`.
        recipe: plain values that define the run beyond `options` and `losses`; resuming with others is
            refused.
    """

    def __init__(
        self,
        predictor: Predictor,
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
        steps = predictor.config.num_steps
        self.agreement = nn.ModuleList(MeanMetric() for _ in range(steps))
        self.acceptance_length = MeanMetric()
        self._made_reader: Reader | None = None
        self._seconds_before = 0.0
        self._started = monotonic()
        self._elapsed = 0.0

    # -- the step

    def on_fit_start(self) -> None:
        place(self.target, self.device)

    def on_train_start(self) -> None:
        self._started = monotonic()

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return batch.to(device)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        torch.manual_seed(derive_seed(self.seed, batch.step, batch.part))  # for dropout

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        predictor, texts = self.predictor, batch.texts or self._texts(batch)
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
        loss, parts = weighted_loss(self.losses, states, true, predicted_logits, target_logits, kept[-1], rows)
        if predictor.confidence is not None and embeddings is not None:
            assert predicted_logits is not None and target_logits is not None
            agree = predicted_logits.argmax(-1) == target_logits.argmax(-1)
            estimate = predictor.estimate(states.detach(), embeddings[kept]).float()
            parts["confidence"] = F.binary_cross_entropy_with_logits(estimate, agree.float())
            loss = loss + parts["confidence"]
        if measuring and predicted_logits is not None:
            drafts = torch.full_like(cut.tokens, -1)
            drafts[kept] = predicted_logits.argmax(-1)
            self._log_agreement(drafts, cut)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(cut.mask))
        self.log_dict({f"train/{name}": value for name, value in parts.items()}, batch_size=len(cut.mask))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if self.options.max_minutes is None:
            return
        elapsed = self._seconds_before + monotonic() - self._started
        # One clock for all processes: learning rates that differ would let their weights drift apart.
        self._elapsed = self.trainer.strategy.broadcast(elapsed)
        if self._elapsed >= 60 * self.options.max_minutes:
            self.trainer.should_stop = True

    def _texts(self, batch: Batch) -> Texts:
        """Texts of conversations, with features computed now (online mode)."""
        assert batch.conversations is not None
        encoded = batch.conversations
        hidden = compute_features(self.target, encoded, self.predictor.config.feature_layers)
        ids = pad_sequence([sample.input_ids for sample in encoded], batch_first=True)
        masks = pad_sequence([sample.loss_mask for sample in encoded], batch_first=True)
        roots = roots_of([sample.loss_mask for sample in encoded])
        return Texts(hidden, *(each.to(self.device) for each in (ids, masks, roots)))

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

    # -- optimisation

    def configure_optimizers(self) -> OptimizerLRScheduler:
        options = self.options
        named = [(name, p) for name, p in self.predictor.named_parameters() if p.requires_grad]
        inner = {name for name, p in named if options.optimizer == "muon" and _is_inner(name, p)}
        others = [p for name, p in named if name not in inner]
        groups = [
            {"params": [p for p in others if p.ndim >= 2], "weight_decay": options.weight_decay},
            {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=_ADAM_BETAS)
        if inner:
            matrices = [p for name, p in named if name in inner]
            muon = torch.optim.Muon(
                matrices, options.learning_rate, options.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
            optimizer = Together(muon, optimizer)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: self.options.learning_rate_factor(step, self._progress(step))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _progress(self, step: int) -> float:
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

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of training so far, earlier sittings included."""
        return self._seconds_before + monotonic() - self._started


def _is_inner(name: str, parameter: nn.Parameter) -> bool:
    """Matrices between states: Muon is not for tables of tokens, nor for vectors."""
    return parameter.ndim == 2 and not name.startswith("heads") and "markov.expand" not in name and len(parameter) > 1


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


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from any parts, unrelated for unlike parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


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
    """Writes a checkpoint beside its place and then renames it: a killed run leaves the one before."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        final = Path(path)
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = final.with_name(f".{final.name}.tmp")
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, final)


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

    Prompts are dealt to processes by number, none twice; sums are reduced over processes, and each prompt's
    own counts are kept for the interval. Decoding runs without autocast, in evaluation mode, without
    gradients.

    Args:
        prompts: token ids, (T,) int64 each.
        every: steps between measurements; one more comes at the end.
        max_new_tokens: per prompt.
        best_path: where the best weights go (safetensors), written by the first process.

    Attributes:
        history: acceptance length and its interval by step.
        seconds: that validation took, earlier sittings included.
    """

    def __init__(self, prompts: Sequence[Tensor], every: int, max_new_tokens: int, best_path: Path) -> None:
        self.prompts, self.every, self.max_new_tokens = list(prompts), every, max_new_tokens
        self.best_path = best_path
        self.history: list[dict[str, float]] = []
        self.seconds = 0.0

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
        assert isinstance(module, ShapeModule)
        started = monotonic()
        counts = torch.zeros(2, len(self.prompts), dtype=torch.float64, device=module.device)
        mine = range(trainer.global_rank, len(self.prompts), trainer.world_size)
        with _evaluating(module.predictor), torch.autocast(module.device.type, enabled=False):
            emitted, forwards = decode_counts(
                module.target, module.predictor, [self.prompts[i] for i in mine], self.max_new_tokens
            )
        counts[:, list(mine)] = torch.tensor([emitted, forwards], dtype=torch.float64, device=counts.device)
        counts = trainer.strategy.reduce(counts, reduce_op="sum")
        measured = acceptance_length(counts[0].long().tolist(), counts[1].long().tolist())
        best = self.best
        if trainer.is_global_zero and (best is None or measured.value > best["value"]):
            _save_weights(module.predictor, self.best_path)
        self.history.append({"step": trainer.global_step, **measured._asdict()})
        values = {"val/acceptance_length": measured.value, "val/low": measured.low, "val/high": measured.high}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
        self.seconds += monotonic() - started


def decode_counts(
    target: Target, predictor: Predictor, prompts: Sequence[Tensor], max_new_tokens: int
) -> tuple[list[int], list[int]]:
    """Tokens emitted and target forwards, for each prompt, of greedy decoding with the predictor."""
    decoder = ShapeDecoder(target, TrainedDrafter(predictor), fall_back=False)
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
        emitted += output.stats.row_emitted
        forwards += output.stats.row_forwards
    return emitted, forwards


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


def _save_weights(predictor: Predictor, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    weights = {name: value.detach().cpu().contiguous() for name, value in predictor.state_dict().items()}
    save_file(weights, temporary)
    os.replace(temporary, path)


def as_trained_and_decoded(
    target: Target, predictor: Predictor, prompts: Sequence[Tensor], max_new_tokens: int
) -> tuple[float, float]:
    """Acceptance lengths of chains on the target's own answers: by teacher forcing, and decoded.

    The two are computed from the same texts on the two ways that a network is fed, so that they differ by rounding
    alone unless these ways differ.
    """
    config, texts, emitted, forwards = predictor.config, [], 0, 0
    decoder = ShapeDecoder(target, TrainedDrafter(predictor, TreeShape(config.num_steps, width=1)), fall_back=False)
    with _evaluating(predictor):
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


def load_weights(predictor: Predictor, path: Path) -> None:
    """Put weights kept by `DecodingValidation` into a predictor of the same configuration."""
    predictor.load_state_dict(load_file(path))


# ------------------------------------------------------------------------------------------------- export


def export(predictor: Predictor, directory: str | Path, identity: TargetIdentity, training: Mapping[str, Any]) -> None:
    """Write what `ShapeDecoder.from_pretrained` reads: config, weights (safetensors), a model card, and what
    transformers' `custom_generate` runs.

    Args:
        training: plain values: command, data, steps, seconds, and, once measured, acceptance_length (with
            `low` and `high`) and speed_up.
    """
    directory = Path(directory)
    predictor.config.target_identity = identity.to_dict()
    predictor.config.training = dict(training)
    predictor.save_pretrained(directory)
    (directory / "README.md").write_text(model_card(predictor, identity, training))
    custom_generate.write(directory)


def model_card(predictor: Predictor, identity: TargetIdentity, training: Mapping[str, Any]) -> str:
    """Markdown: what the predictor is for, how it came about, what was measured."""
    config = predictor.config
    millions = sum(parameter.numel() for parameter in predictor.parameters()) / 1e6
    revision = f" (revision {identity.revision})" if identity.revision else ""
    title = {"shape": "SHAPE", "medusa": "Medusa", "eagle": "EAGLE", "block": "Block-parallel"}[config.kind]
    rows = "\n".join(f"| {name.replace('_', ' ')} | {_cell(value)} |" for name, value in training.items())
    return f"""---
library_name: shape
base_model: {identity.name}
tags: [speculative-decoding, custom_generate]
---
# {title} predictor for {identity.name}

Drafts tokens for lossless speculative decoding of `{identity.name}`{revision}: it reads the target's hidden
states, continues them to draft tokens, and the target verifies these. It
is of no use with another target; loading refuses one whose tokenizer, head or chat template differ.

```python
from shape import ShapeDecoder

decoder = ShapeDecoder.from_pretrained("path/or/id/of/this")
```

or, with the package `shape-decoding` installed, from the target as transformers loads it:

```python
model.generate(**inputs, custom_generate="path/or/id/of/this", trust_remote_code=True)
```

{millions:.1f}M parameters: {describe(config)}.

| | |
|---|---|
{rows}
"""


def describe(config: ShapeConfig) -> str:
    """One phrase that says what the network is."""
    vocabulary = f", drafts from {config.draft_vocab_size} tokens" if config.draft_vocab_size else ""
    extras = "".join(
        phrase
        for phrase, given in (
            (", attention to known positions", config.attention),
            (f", Markov bias of rank {config.markov_rank}", config.markov_rank),
            (", confidence estimate", config.confidence),
            (", own output embedding", config.own_heads),
        )
        if given
    )
    layers = f", reads layers {config.feature_layers}" if len(config.feature_layers) > 1 else ""
    if config.kind != "shape":
        return f"{config.num_steps} steps{layers}{extras}{vocabulary}"
    return (
        f"window {config.window}, {config.num_steps} {config.step_mode} steps, token conditioning "
        f"{config.token_conditioning}, refinement {config.refinement}{layers}{extras}{vocabulary}"
    )


def _cell(value: Any) -> str:
    if isinstance(value, Mapping) and {"value", "low", "high"} <= value.keys():
        if value["value"] is None or value["low"] is None:  # no interval from a single prompt
            return _cell(value["value"])
        return f"{value['value']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|")
