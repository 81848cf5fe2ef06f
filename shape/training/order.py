"""The order in which training sees its data: a pure function of (seed, step), whatever was before and beside it.

So a resumed run goes on exactly where it stopped, and several processes see the batches that one would see.
"""

import hashlib

import torch
from torch import Tensor

SHARDS_SHUFFLED = 16  # shards among which samples are shuffled together, where shards have to be fetched


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from any parts, unrelated for unlike parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


class StepOrder:
    """The order of samples: a permutation per epoch from (seed, epoch), cut into steps across epoch ends."""

    def __init__(self, seed: int, count: int, batch_size: int) -> None:
        self.seed, self.count, self.batch_size = seed, count, batch_size
        self._permutations: dict[int, Tensor] = {}  # of two epochs: what is fetched ahead may be the next one's

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
        if epoch not in self._permutations:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
            self._permutations[epoch] = self._draw(epoch, generator)
            for other in sorted(self._permutations, key=lambda one: abs(one - epoch))[2:]:
                del self._permutations[other]
        return self._permutations[epoch]

    def _draw(self, epoch: int, generator: torch.Generator) -> Tensor:
        return torch.randperm(self.count, generator=generator)


class ShardedOrder(StepOrder):
    """An order for samples that lie in shards elsewhere: shards are drawn in groups, samples within a group, so that
    few shards are needed at a time. Where there is one group, it is the order of `StepOrder`.

    Args:
        counts: (shards,) int64, samples in each, numbered on end.
        group_size: shards in a group.
    """

    def __init__(self, seed: int, counts: Tensor, batch_size: int, group_size: int = SHARDS_SHUFFLED) -> None:
        super().__init__(seed, int(counts.sum()), batch_size)
        self.counts, self.group_size = counts, group_size

    def _draw(self, epoch: int, generator: torch.Generator) -> Tensor:
        of_shards = torch.Generator().manual_seed(derive_seed(self.seed, epoch, "shards"))
        of_each = torch.arange(self.count).split(self.counts.tolist())
        groups = []
        for shards in torch.randperm(len(self.counts), generator=of_shards).split(self.group_size):
            samples = torch.cat([of_each[shard] for shard in shards.sort().values])
            groups.append(samples[torch.randperm(len(samples), generator=generator)])
        return torch.cat(groups)


def cuts(sizes: Tensor, parts: int) -> Tensor:
    """Where to cut a sequence of samples so that the parts' sizes add up to about the same, (N,) -> (parts - 1,) int64.

    No part is empty as long as there are enough samples; of fewer the first parts have one each.
    """
    count, number, sizes = len(sizes), torch.arange(1, parts), sizes.double()
    found = torch.searchsorted(sizes.cumsum(0) - sizes / 2, sizes.sum() * number / parts)  # of samples' middles
    found = (found - number).clamp(min=0).cummax(0).values + number
    return found.minimum(number + max(count - parts, 0)).clamp(max=count)
