"""The Lightning data module: which batches a process gets, and where a resumed run goes on in them."""

import math
import signal
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from shape.data.conversations import Conversation, evenly
from shape.data.encoding import encode_row
from shape.errors import DataError
from shape.features.store import FeatureStore
from shape.target.model import Target
from shape.training.batches import (
    Batch,
    Batches,
    ConversationBatches,
    FetchedBatches,
    Partition,
    StoredBatches,
    TextBatches,
    followers_of_roots,
)
from shape.training.order import SHARDS_SHUFFLED, ShardedOrder, StepOrder

_ROOTS_SAMPLE = 256
_TEXTS_SAMPLE = 20_000  # encoded, by every process, before training: some ten million tokens say which are frequent
_EARLY = 0.5  # share of a shard group's steps (`SHARDS_SHUFFLED`) by which its shards are fetched ahead


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


def _leave_interrupts(worker: int) -> None:
    """Ignore Ctrl-C and requests to end in data workers: the process that trains handles them, and needs the workers
    until its step ends. They end when it does.
    """
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)


class ShapeDataModule(pl.LightningDataModule):
    """Training batches, from a feature store or, without one, from conversations (online mode).

    Args:
        source: a feature store, or conversations.
        target: needed for its tokenizer in online mode.
        steps, batch_size: optimiser steps, and positions (roots) in each.
        window, ahead: states before the root, and steps after it, that examples hold; a window of None holds all.
        exclude: numbers of conversations that are not learned from, such as those kept for validation.
        workers: processes that read ahead; 0 reads in the training process.

    Raises:
        DataError: nothing in the data can be learned from.
    """

    def __init__(
        self,
        source: FeatureStore | Sequence[Conversation],
        target: Target,
        *,
        steps: int,
        batch_size: int,
        window: int | None,
        ahead: int,
        workers: int = 0,
        exclude: Collection[int] = (),
        max_length: int = 1024,
        skip_bad_rows: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.seed, self.workers = seed, workers
        self.steps, self.batch_size = steps, batch_size
        self.window, self.ahead = window, ahead
        self.encode = partial(
            encode_row, tokenizer=target.tokenizer, max_length=max_length, skip_bad_rows=skip_bad_rows
        )
        self.store = source if isinstance(source, FeatureStore) else None
        self.roots = source.roots(exclude) if isinstance(source, FeatureStore) else torch.empty(0)
        self.numbers = [number for number in range(len(source)) if number not in exclude]
        self.conversations: list[Conversation] = []
        self.roots_each = 0.0
        if self.store is not None and self.store.storage.folder is None:
            self.store.require_room(math.ceil(SHARDS_SHUFFLED * (1 + _EARLY)))
        if self.store is not None and window is None:
            self.texts_with_roots = len(self.store.owner(self.roots).unique())
            self.roots_each = len(self.roots) / max(self.texts_with_roots, 1)
        if not isinstance(source, FeatureStore):
            self.conversations = [source[number] for number in self.numbers]
            self.roots_each = self._mean_roots()
        if not len(self.roots) and not self.roots_each:
            raise DataError(
                "the data has no two supervised tokens in a row within max_length, so there is nothing to learn; "
                "raise max_length, or give conversations with longer assistant turns"
            )

    def texts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(input_ids, loss_mask) of what is learned from: of all that is stored, else of a sample."""
        if self.store is not None:
            for number in self.numbers:
                yield self.store.text(number)
        for conversation in evenly(self.conversations, _TEXTS_SAMPLE):
            encoded = self.encode(conversation)
            yield encoded.input_ids, encoded.loss_mask

    @property
    def size(self) -> str:
        """How much there is to learn from, for people."""
        if self.store is not None:
            return f"{len(self.roots):,} positions of {len(self.numbers):,} conversations"
        return f"{len(self.conversations):,} conversations of about {self.roots_each:.0f} positions"

    def train_dataloader(self) -> DataLoader[Batch]:
        trainer = self.trainer
        assert trainer is not None
        partition = Partition(trainer.global_rank, trainer.world_size, trainer.accumulate_grad_batches)
        data = self.batches(partition)
        return _ResumableLoader(
            data,
            batch_size=None,
            sampler=_FromStep(trainer.global_step * partition.accumulate, len(data)),
            num_workers=self.workers,
            pin_memory=trainer.strategy.root_device.type == "cuda",
            persistent_workers=self.workers > 0,
            worker_init_fn=_leave_interrupts,
            generator=torch.Generator(),  # the loader draws a worker seed, and not from the global generator
        )

    def batches(self, partition: Partition) -> Batches:
        """All portions of one process."""
        if self.store is not None and self.window is not None:
            reading = (self.store, self.roots, self.window, self.ahead)
            if self.store.storage.folder is not None:
                order = StepOrder(self.seed, len(self.roots), self.batch_size)
                return StoredBatches(*reading, order, partition, self.steps)
            counts = self.store.shard_of(self.roots).bincount()
            group = min(SHARDS_SHUFFLED, len(counts)) * len(self.roots) / len(counts) / self.batch_size
            by_shard = ShardedOrder(self.seed, counts, self.batch_size)
            return FetchedBatches(*reading, by_shard, partition, self.steps, early=math.ceil(_EARLY * group))
        texts = max(1, round(self.batch_size / self.roots_each))
        order = StepOrder(self.seed, len(self.conversations) or self.texts_with_roots, texts)
        if self.store is not None:
            return TextBatches(self.store, self.roots, order, partition, self.steps)
        return ConversationBatches(self.conversations, self.encode, order, partition, self.steps)

    def _mean_roots(self) -> float:
        sample = evenly(self.conversations, _ROOTS_SAMPLE)
        counts = [len(followers_of_roots(self.encode(conversation))) for conversation in sample]
        return sum(counts) / max(len(counts), 1)
