"""Drafting networks on a CPU, in one call for each pass instead of sixty for each layer.

Beside a small target what each operation of torch costs before it begins is most of a draft. Here a pass is a program
of kernels, as the target's forward is (``shape.verification.fused``), and so is what committed positions leave. Nodes
and places of a draft lie in the drafter's own cache, behind what is committed, and see of each other what a mask lets
them; the next draft writes over them.
"""

from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from shape.networks.base import Predictor
from shape.target.rotary import RotaryTable
from shape.verification.cache import KVCache
from shape.verification.fused import MOST, FusedLayers
from shape.verification.program import Turns, blocks_of


class FusedPredictor(FusedLayers):
    """A predictor of decoder layers, by kernels.

    Attributes:
        kind: of the predictors that it is for.
        memory: the program of what committed positions leave, a ``Forward`` with a method ``write`` for it.
    """

    kind: ClassVar[type[Predictor]]
    memory: ClassVar[type[Any]]

    def __init__(self, predictor: Any) -> None:
        super().__init__(predictor, predictor.config.layer_config())
        self.predictor = predictor
        self.weights += [module._parameters for module in predictor.modules() if module._parameters]

    @classmethod
    def of_predictor(cls, predictor: Any) -> Self | None:
        """None for other kinds, for sliding windows, and where weights are not in the kernels' blocks."""
        if type(predictor) is not cls.kind or any(predictor.config.windows) or blocks_of(predictor.fc) is None:
            return None
        made = cls(predictor)
        return made if made._unchanged() else None

    def serves_behind(self, cache: KVCache, count: int) -> bool:
        """Whether so many tokens of each sequence can go through behind what this cache holds."""
        return cache.longest > 0 and count * len(cache.lengths) <= MOST and self.goes_behind(cache)

    def turns(self, lengths: list[int], count: int) -> Turns:
        """Of so many positions behind each of these, (B, count)."""
        assert self._table is not None
        return Turns(*self._table.until(max(lengths) + count), torch.tensor(lengths)[:, None] + torch.arange(count))

    def _rotary_table(self) -> RotaryTable:
        network = self.predictor
        return RotaryTable(lambda places: network.rotary(places, network.dtype).transpose(0, 1).repeat(1, 1, 2))

    def remember(self, features: Tensor, embeddings: Tensor, cache: KVCache) -> None:
        """Write what positions (B, N) leave behind the committed ones: of their features (B, N, F) and the embeddings
        (B, N, H) of the tokens after them.
        """
        rows, count = features.shape[:2]
        cache.reserve(count)
        turns, mask = self.turns(cache.host_lengths, count), self._in_order(cache, count)
        with self.program(self.memory, rows, count, mask is not None) as memory:
            memory.write(features, embeddings)
            memory.run(turns, cache, cache.longest + count, [mask])

    def _in_order(self, cache: KVCache, count: int) -> Tensor | None:
        """The mask of new positions; None where what they leave does not depend on others."""
        return None

    def seen(self, cache: KVCache, count: int, among: Tensor | None = None) -> Tensor | None:
        """The mask (B, 1, S, K) of so many places behind the committed positions, which see all of these.

        Args:
            among: (S, S) bool, which of the places each sees; all without.

        Returns:
            None where each sees all that is there.
        """
        if among is None and cache.uniform:
            return None
        places = torch.arange(cache.longest + count) - cache.lengths[:, None]
        found = (places < count)[:, None].expand(-1, count, -1)
        if among is not None:
            found = found & ((places < 0)[:, None] | among[:, places.clamp(0, count - 1)].transpose(0, 1))
        lowest = torch.finfo(self.predictor.dtype).min
        return torch.zeros(found.shape, dtype=self.predictor.dtype).masked_fill_(~found, lowest)[:, None]
