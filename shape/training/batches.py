"""Batches: the portion of every step's examples that a process works on, read from features or conversations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from shape.data.conversations import Conversation
from shape.data.encoding import Encoded
from shape.features.positions import eligible, followers
from shape.features.store import FeatureStore
from shape.networks.teacher_forcing import Texts
from shape.training.order import StepOrder, cuts, derive_seed

STEPS_POOLED = 16  # steps whose texts are sorted by size together


@dataclass(frozen=True)
class Partition:
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

    def counts(self, steps: int) -> Tensor:
        """(steps,) int64: of each unrolled step n, how many count in the whole optimiser step.

        A loss is a mean over these, so that a position weighs the same whatever portion it is in.
        """
        return (self.followers > torch.arange(steps)[:, None]).sum(-1)

    def to(self, device: torch.device) -> "Batch":
        moved = self.texts and Texts(*(tensor.to(device, non_blocking=True) for tensor in self.texts))
        return replace(self, samples=self.samples.to(device, non_blocking=True), texts=moved)

    def pin_memory(self) -> "Batch":
        pinned = self.texts and Texts(*(tensor.pin_memory() for tensor in self.texts))
        return replace(self, samples=self.samples.pin_memory(), texts=pinned)


class Batches(Dataset[Batch]):
    """Item k is this process's k-th portion since step 0: a pure function of k, wherever a run starts."""

    def __init__(self, order: StepOrder, partition: Partition, steps: int) -> None:
        self.order, self.partition, self.steps = order, partition, steps

    def __len__(self) -> int:
        return self.steps * self.partition.accumulate

    def __getitem__(self, index: int) -> Batch:
        if index >= len(self):
            raise IndexError(index)
        step, portion = divmod(index, self.partition.accumulate)
        part, whole = portion * self.partition.world + self.partition.rank, self._step(step)
        samples, followers = self._portions(whole)[part], self._followers(whole)
        if len(samples):
            return self._load(Batch(step, part, self.partition.parts, samples, followers))
        # All processes run the same networks, those without a text of their own on one without a supervised position.
        return _unsupervised(self._load(Batch(step, part, self.partition.parts, whole[:1], followers)))

    def _step(self, step: int) -> Tensor:
        """The samples of a step, whatever the number of its portions."""
        return self.order.step(step)

    def _portions(self, samples: Tensor) -> Sequence[Tensor]:
        """Samples of a step by portion; where there are too few, the first portions have one each."""
        return samples.tensor_split(self.partition.parts)

    def _load(self, batch: Batch) -> Batch:
        """The same with its texts, or the conversations to compute them from."""
        raise NotImplementedError

    def _followers(self, samples: Tensor) -> Tensor:
        """Supervised positions directly behind each root of some samples."""
        raise NotImplementedError


class StoredBatches(Batches):
    """Examples around random roots of a feature store."""

    def __init__(
        self,
        store: FeatureStore,
        roots: Tensor,
        window: int,
        ahead: int,
        order: StepOrder,
        partition: Partition,
        steps: int,
    ) -> None:
        super().__init__(order, partition, steps)
        self.store, self.roots, self.window, self.ahead = store, roots, window, ahead
        self.followers = store.followers(roots)

    def _followers(self, samples: Tensor) -> Tensor:
        return self.followers[samples]

    def _load(self, batch: Batch) -> Batch:
        around = self.store.gather(self.roots[batch.samples], self.window, self.ahead)
        roots = torch.full((len(batch.samples), 1), self.window)
        return replace(batch, texts=Texts(around.hidden, around.input_ids, around.loss_mask, roots))


class FetchedBatches(StoredBatches):
    """The same of a store that lies elsewhere. Each step's samples are shared out by where they lie, so that a process
    needs its share of the shards alone, and those of later steps are fetched meanwhile.

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


class WholeTextBatches(Batches):
    """Whole conversations, for networks that attend to everything before a root, and where states are computed.

    Each text of a portion is a sequence of its own: no document sees another. Texts of several steps are sorted by
    size and cut where their roots add up to a step's, and a step's to a portion's: little is padding, steps are about
    equally large, and so are portions. Which padding costs most is the subclass's to say.
    """

    def __init__(self, order: StepOrder, partition: Partition, steps: int) -> None:
        super().__init__(order, partition, steps)
        self._pool, self._dealt = -1, list[Tensor]()

    def _step(self, step: int) -> Tensor:
        pool, turn = divmod(step, STEPS_POOLED)
        if pool != self._pool:
            self._pool, self._dealt = pool, self._deal(pool)
        return self._dealt[turn]

    def _deal(self, pool: int) -> list[Tensor]:
        """The samples of a pool's steps."""
        samples = torch.cat([self.order.step(pool * STEPS_POOLED + each) for each in range(STEPS_POOLED)])
        # A long dialogue's later turns, as texts of their own, may hold nothing to learn within the longest length.
        roots = self._roots(samples)
        if int((known := roots > 0).sum()) >= STEPS_POOLED:  # else there would be a step without any
            samples, roots = samples[known], roots[known]
        order = self._sizes(samples).sort(stable=True).indices
        steps = samples[order].tensor_split(cuts(roots[order], STEPS_POOLED))
        generator = torch.Generator().manual_seed(derive_seed(self.order.seed, "pool", pool))
        return [steps[turn] for turn in torch.randperm(STEPS_POOLED, generator=generator).tolist()]

    def _portions(self, samples: Tensor) -> Sequence[Tensor]:
        return samples.tensor_split(cuts(self._roots(samples), self.partition.parts))

    def _sizes(self, samples: Tensor) -> Tensor:
        """What texts are sorted by."""
        raise NotImplementedError

    def _roots(self, samples: Tensor) -> Tensor:
        """Number of roots in each."""
        raise NotImplementedError


class TextBatches(WholeTextBatches):
    """Those of a feature store, sorted by roots, for which the network runs.

    Args:
        roots: (R,) int64 positions in the store, ascending.
    """

    def __init__(self, store: FeatureStore, roots: Tensor, order: StepOrder, partition: Partition, steps: int) -> None:
        super().__init__(order, partition, steps)
        self.store, self.followers = store, store.followers(roots)
        self.numbers, self.counts = store.owner(roots).unique(return_counts=True)  # texts with roots, and how many
        self.ends = self.counts.cumsum(0)

    def _roots(self, samples: Tensor) -> Tensor:
        return self.counts[samples]

    _sizes = _roots

    def _followers(self, samples: Tensor) -> Tensor:
        spans = zip((self.ends - self.counts)[samples].tolist(), self.ends[samples].tolist(), strict=True)
        return torch.cat([self.followers[first:end] for first, end in spans])

    def _load(self, batch: Batch) -> Batch:
        stored = [self.store[int(self.numbers[sample])] for sample in batch.samples]
        hidden = pad_sequence([each.hidden for each in stored], batch_first=True)
        texts = Texts.whole(hidden, [each.input_ids for each in stored], [each.loss_mask for each in stored])
        return replace(batch, texts=texts)


class ConversationBatches(WholeTextBatches):
    """Those of which the target computes the states inside the training step (online mode), sorted by its tokens."""

    def __init__(
        self,
        conversations: Sequence[Conversation],
        encode: Callable[[Conversation], Encoded],
        order: StepOrder,
        partition: Partition,
        steps: int,
    ) -> None:
        super().__init__(order, partition, steps)
        self.conversations, self.encode = conversations, encode
        self._encoded: dict[int, Encoded] = {}  # of one pool

    def _deal(self, pool: int) -> list[Tensor]:
        self._encoded = {}
        return super()._deal(pool)

    def _sizes(self, samples: Tensor) -> Tensor:
        return torch.tensor([len(text.input_ids) for text in self._texts(samples)])

    def _roots(self, samples: Tensor) -> Tensor:
        return torch.tensor([len(followers_of_roots(text)) for text in self._texts(samples)])

    def _load(self, batch: Batch) -> Batch:
        return replace(batch, conversations=self._texts(batch.samples))

    def _followers(self, samples: Tensor) -> Tensor:
        return torch.cat([followers_of_roots(text) for text in self._texts(samples)])

    def _texts(self, samples: Tensor) -> list[Encoded]:
        for number in set(samples.tolist()) - self._encoded.keys():
            self._encoded[number] = self.encode(self.conversations[number])
        return [self._encoded[number] for number in samples.tolist()]


def _unsupervised(batch: Batch) -> Batch:
    """The same with no supervised position."""
    texts, conversations = batch.texts, batch.conversations
    return replace(
        batch,
        texts=texts and texts._replace(loss_mask=torch.zeros_like(texts.loss_mask)),
        conversations=conversations
        and [replace(each, loss_mask=torch.zeros_like(each.loss_mask)) for each in conversations],
    )


def followers_of_roots(text: Encoded) -> Tensor:
    whole = torch.tensor([0, len(text.loss_mask)])
    return followers(text.loss_mask, whole)[eligible(text.loss_mask, whole)]
