"""The order in which training sees its data: a pure function of (seed, step), whatever was before and beside it.

So a resumed run goes on exactly where it stopped, and several processes see the batches that one would see.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

from shape.data.conversations import Conversation
from shape.data.encoding import Encoded, encode_row
from shape.errors import ConfigError, DataError
from shape.features.positions import eligible, followers
from shape.features.store import FeatureStore
from shape.networks.teacher_forcing import Texts
from shape.target.model import Target

_ROOTS_SAMPLE = 256
_STEPS_POOLED = 8  # whose texts are sorted together
_SHARDS_TOGETHER = 16  # among which samples are shuffled, where they have to be fetched
_EARLY = 0.5  # of such a group's steps, by which its shards are fetched before


@dataclass(frozen=True)
class Split:
    """Which part of every step's batch a process works on, and in how many portions."""

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
        part: its number among the step's portions, over all processes, of which there are `parts`.
        samples: (B,) int64 numbers of the texts in the data: of roots where each text is one root's surroundings, of
            conversations otherwise.
        followers: (R,) integers, supervised positions directly behind each root of the whole step, of all its portions.
    """

    step: int
    part: int
    parts: int
    samples: Tensor
    followers: Tensor
    texts: Texts | None = None
    conversations: list[Encoded] | None = None

    def whole(self, steps: int) -> Tensor:
        """(M,) int64: n of every unrolled step n < `steps` that counts in the whole optimiser step, in rising order.

        A loss is a mean over these, so that a position weighs the same whatever portion it is in.
        """
        each = torch.arange(steps)
        return each.repeat_interleave((self.followers > each[:, None]).sum(-1))

    def to(self, device: torch.device) -> "Batch":
        moved = self.texts and Texts(*(tensor.to(device, non_blocking=True) for tensor in self.texts))
        return replace(self, samples=self.samples.to(device), texts=moved)

    def pin_memory(self) -> "Batch":
        return replace(self, texts=self.texts and Texts(*(tensor.pin_memory() for tensor in self.texts)))


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
            self._epoch, self._permutation = epoch, self._draw(epoch, generator)
        return self._permutation

    def _draw(self, epoch: int, generator: torch.Generator) -> Tensor:
        return torch.randperm(self.count, generator=generator)


class ShardedOrder(StepOrder):
    """An order for samples that lie in shards elsewhere: shards are drawn in groups, samples within a group, so that
    few shards are needed at a time. Where there is one group, it is the order of `StepOrder`.

    Args:
        counts: (shards,) int64, samples in each, numbered on end.
        together: shards in a group.
    """

    def __init__(self, seed: int, counts: Tensor, batch_size: int, together: int = _SHARDS_TOGETHER) -> None:
        super().__init__(seed, int(counts.sum()), batch_size)
        self.counts, self.together = counts, together

    def _draw(self, epoch: int, generator: torch.Generator) -> Tensor:
        of_shards = torch.Generator().manual_seed(derive_seed(self.seed, epoch, "shards"))
        of_each = torch.arange(self.count).split(self.counts.tolist())
        groups = []
        for shards in torch.randperm(len(self.counts), generator=of_shards).split(self.together):
            samples = torch.cat([of_each[shard] for shard in shards.sort().values])
            groups.append(samples[torch.randperm(len(samples), generator=generator)])
        return torch.cat(groups)


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
        part, whole = portion * self.split.world + self.split.rank, self._step(step)
        samples, followers = self._portions(whole)[part], self._followers(whole)
        if len(samples):
            return self._load(Batch(step, part, self.split.parts, samples, followers))
        # All processes run the same networks, one without a text of its own too: on one that teaches it nothing.
        return _taught_nothing(self._load(Batch(step, part, self.split.parts, whole[:1], followers)))

    def _step(self, step: int) -> Tensor:
        """The samples of a step, whatever the number of its portions."""
        return self.order.step(step)

    def _portions(self, samples: Tensor) -> Sequence[Tensor]:
        """Samples of a step, dealt; where there are fewer than portions, the first ones have one each."""
        return samples.tensor_split(self.split.parts)

    def _load(self, batch: Batch) -> Batch:
        """The same with its texts, or the conversations to compute them from."""
        raise NotImplementedError

    def _followers(self, samples: Tensor) -> Tensor:
        """Supervised positions directly behind each root of some samples."""
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
        self.followers = store.followers(roots)

    def _followers(self, samples: Tensor) -> Tensor:
        return self.followers[samples]

    def _load(self, batch: Batch) -> Batch:
        around = self.store.gather(self.roots[batch.samples], self.window, self.ahead)
        roots = torch.full((len(batch.samples), 1), self.window)
        return replace(batch, texts=Texts(around.hidden, around.input_ids, around.loss_mask, roots))


class FetchedBatches(StoredBatches):
    """The same of a store that lies elsewhere. Each step's samples are dealt to portions by where they lie, so that a
    process needs its share of the shards alone, and those of later steps are fetched meanwhile.

    Args:
        early: steps that fetching goes ahead of training.
    """

    def __init__(self, *arguments: Any, early: int) -> None:
        super().__init__(*arguments)
        self.early = early

    def _step(self, step: int) -> Tensor:
        return super()._step(step).sort().values

    def _load(self, batch: Batch) -> Batch:
        coming = batch.step + self.early
        later = self._portions(self._step(coming))[batch.part] if coming < self.steps else batch.samples[:0]
        self.store.prefetch(self.roots[torch.cat([batch.samples, later])])
        return super()._load(batch)


class TextBatches(_Batches):
    """Whole conversations of a feature store, for networks that attend to everything before a root.

    Texts of a portion stand in rows of their own: no document sees another. Those of several steps are sorted by their
    number of roots and cut where these add up to a step's, and a step's to a portion's: little is padding, steps are
    about equally large, and so are portions.

    Args:
        roots: (R,) int64, rows of the store, ascending.
    """

    def __init__(self, store: FeatureStore, roots: Tensor, order: StepOrder, split: Split, steps: int) -> None:
        super().__init__(order, split, steps)
        self.store, self.followers = store, store.followers(roots)
        self.numbers, self.counts = store.owner(roots).unique(return_counts=True)  # texts with roots, and how many
        self.ends = self.counts.cumsum(0)

    def _step(self, step: int) -> Tensor:
        pool, turn = divmod(step, _STEPS_POOLED)
        samples = torch.cat([self.order.step(pool * _STEPS_POOLED + each) for each in range(_STEPS_POOLED)])
        samples = samples[self.counts[samples].sort(stable=True).indices]
        generator = torch.Generator().manual_seed(derive_seed(self.order.seed, "pool", pool))
        turn = int(torch.randperm(_STEPS_POOLED, generator=generator)[turn])
        return samples.tensor_split(cuts(self.counts[samples], _STEPS_POOLED))[turn]

    def _portions(self, samples: Tensor) -> Sequence[Tensor]:
        return samples.tensor_split(cuts(self.counts[samples], self.split.parts))

    def _followers(self, samples: Tensor) -> Tensor:
        spans = zip((self.ends - self.counts)[samples].tolist(), self.ends[samples].tolist(), strict=True)
        return torch.cat([self.followers[first:end] for first, end in spans])

    def _load(self, batch: Batch) -> Batch:
        stored = [self.store[int(self.numbers[sample])] for sample in batch.samples]
        hidden = pad_sequence([each.hidden for each in stored], batch_first=True)
        texts = Texts.whole(hidden, [each.input_ids for each in stored], [each.loss_mask for each in stored])
        return replace(batch, texts=texts)


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
        self._encoded: dict[int, Encoded] = {}  # of one step, for its portions

    def _load(self, batch: Batch) -> Batch:
        return replace(batch, conversations=self._texts(batch.samples))

    def _followers(self, samples: Tensor) -> Tensor:
        texts = self._texts(samples)
        self._encoded = dict(zip(samples.tolist(), texts, strict=True))
        return torch.cat([_followers_of_roots(text) for text in texts])

    def _texts(self, samples: Tensor) -> list[Encoded]:
        known, numbers = self._encoded, samples.tolist()
        return [known[number] if number in known else self.encode(self.conversations[number]) for number in numbers]


def cuts(sizes: Tensor, parts: int) -> Tensor:
    """Where to cut a row of samples so that the parts' sizes add up to about the same, (N,) -> (parts - 1,) int64.

    No part is empty as long as there are enough samples; of fewer the first parts have one each.
    """
    count, number, sizes = len(sizes), torch.arange(1, parts), sizes.double()
    found = torch.searchsorted(sizes.cumsum(0) - sizes / 2, sizes.sum() * number / parts)  # of samples' middles
    found = (found - number).clamp(min=0).cummax(0).values + number
    return found.minimum(number + max(count - parts, 0)).clamp(max=count)


def _taught_nothing(batch: Batch) -> Batch:
    """The same with no supervised position."""
    texts, rows = batch.texts, batch.conversations
    return replace(
        batch,
        texts=texts and texts._replace(loss_mask=torch.zeros_like(texts.loss_mask)),
        conversations=rows and [replace(row, loss_mask=torch.zeros_like(row.loss_mask)) for row in rows],
    )


def _followers_of_roots(text: Encoded) -> Tensor:
    whole = torch.tensor([0, len(text.loss_mask)])
    return followers(text.loss_mask, whole)[eligible(text.loss_mask, whole)]


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
        self.target, self.seed = target, seed
        self.steps, self.batch_size, self.workers = steps, batch_size, workers
        self.window, self.ahead = window, ahead
        self.encode = partial(
            encode_row, tokenizer=target.tokenizer, max_length=max_length, skip_bad_rows=skip_bad_rows
        )
        self.store = source if isinstance(source, FeatureStore) else None
        self.roots = source.roots(exclude) if isinstance(source, FeatureStore) else torch.empty(0)
        self.numbers = [number for number in range(len(source)) if number not in exclude]
        self.conversations: list[Conversation] = []
        self.roots_each = 0.0
        if self.store is not None:
            self._require_states(self.store, window)
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

    @staticmethod
    def _require_states(store: FeatureStore, window: int | None) -> None:
        """Raises ConfigError for a predictor that reads states which the store has left out, or all of a store that
        lies elsewhere at a time, and for too little room for copies of it.
        """
        before = store.manifest.before
        if before is not None and (window is None or window > before):
            reads = "attends to whole texts" if window is None else f"reads a window of {window}"
            raise ConfigError(
                f"features in {store.storage} hold {before} states before each answer, and this predictor {reads}; "
                f"extract with --before {'null' if window is None else window}"
            )
        if store.storage.folder is not None:
            return
        if window is None:
            raise ConfigError(
                f"this predictor attends to whole texts, whose order needs all of {store.storage} at hand; copy it "
                "into a folder, or compute features online"
            )
        store.require_room(math.ceil(_SHARDS_TOGETHER * (1 + _EARLY)))

    def texts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(input_ids, loss_mask) of every conversation that is learned from."""
        if self.store is not None:
            for number in self.numbers:
                yield self.store.text(number)
        for conversation in self.conversations:
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
        split = Split(trainer.global_rank, trainer.world_size, trainer.accumulate_grad_batches)
        data = self.batches(split)
        return _ResumableLoader(
            data,
            batch_size=None,
            sampler=_FromStep(trainer.global_step * split.accumulate, len(data)),
            num_workers=self.workers,
            pin_memory=trainer.strategy.root_device.type == "cuda",
            persistent_workers=self.workers > 0,
            generator=torch.Generator(),  # the loader draws a worker seed, and not from the global generator
        )

    def batches(self, split: Split) -> _Batches:
        """All portions of one process."""
        if self.store is not None and self.window is not None:
            reading = (self.store, self.roots, self.window, self.ahead)
            if self.store.storage.folder is not None:
                order = StepOrder(self.seed, len(self.roots), self.batch_size)
                return StoredBatches(*reading, order, split, self.steps)
            counts = self.store.shard_of(self.roots).bincount()
            group = min(_SHARDS_TOGETHER, len(counts)) * len(self.roots) / len(counts) / self.batch_size
            by_shard = ShardedOrder(self.seed, counts, self.batch_size)
            return FetchedBatches(*reading, by_shard, split, self.steps, early=math.ceil(_EARLY * group))
        texts = max(1, round(self.batch_size / self.roots_each))
        order = StepOrder(self.seed, len(self.conversations) or self.texts_with_roots, texts)
        if self.store is not None:
            return TextBatches(self.store, self.roots, order, split, self.steps)
        return ConversationBatches(self.conversations, self.encode, order, split, self.steps)

    def _mean_roots(self) -> float:
        sample = self.conversations[:: max(1, len(self.conversations) // _ROOTS_SAMPLE)]
        counts = [len(_followers_of_roots(self.encode(conversation))) for conversation in sample]
        return sum(counts) / max(len(counts), 1)


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from any parts, unrelated for unlike parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
