"""Steps of an EAGLE drafter on a CPU, in one call each instead of sixty.

Drafting goes token by token, so that what each operation of torch costs before it begins is paid for every one of them:
beside a small target most of a draft is that. Here a step is a program of kernels, as the target's forward is
(``shape.verification.fused``), and so is what committed positions leave. Drafted nodes lie in the drafter's own cache,
behind what is committed, and see of each other what a mask lets them; the next draft writes over them.
"""

from typing import Any, Self

import torch
from torch import Tensor

from shape.networks.base import Predictor
from shape.networks.eagle import EaglePredictor
from shape.target import elements
from shape.target.rotary import RotaryTable
from shape.verification.cache import KVCache
from shape.verification.fused import MOST, Forward, FusedLayers, blocks_of
from shape.verification.tree_shape import TreeShape


class FusedEagle(FusedLayers):
    """An EAGLE predictor of one layer, by kernels."""

    def __init__(self, predictor: EaglePredictor) -> None:
        super().__init__(predictor, predictor.config.layer_config())
        self.predictor = predictor
        self.weights += [module._parameters for module in predictor.modules() if module._parameters]

    @classmethod
    def of_predictor(cls, predictor: Predictor) -> Self | None:
        """None for other kinds, for several layers, and where weights are not in the kernels' blocks."""
        if type(predictor) is not EaglePredictor or len(predictor.layers) > 1 or blocks_of(predictor.fc) is None:
            return None
        made = cls(predictor)
        return made if made._unchanged() else None

    def serves_behind(self, cache: KVCache, count: int) -> bool:
        """Whether so many tokens of each sequence can go through behind what this cache holds."""
        return cache.longest > 0 and count * len(cache.lengths) <= MOST and self.goes_behind(cache)

    def turns(self, lengths: list[int], count: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of so many positions behind each of these, (B or 1, count, D) both."""
        assert self._table is not None
        cosines, sines = self._table.until(max(lengths) + count)
        if min(lengths) == max(lengths):
            places: Any = None, slice(lengths[0], lengths[0] + count)
        else:
            places = torch.tensor(lengths)[:, None] + torch.arange(count)
        return cosines[places], sines[places]

    def _rotary_table(self) -> RotaryTable:
        network = self.predictor
        return RotaryTable(lambda places: network.rotary(places, network.dtype).transpose(0, 1).repeat(1, 1, 2))

    def remember(self, features: Tensor, embeddings: Tensor, cache: KVCache) -> None:
        """Write what positions (B, N) leave behind the committed ones: of their features (B, N, F) and the embeddings
        (B, N, H) of the tokens after them.
        """
        rows, count = features.shape[:2]
        cache.reserve(count)
        self.renew()
        turn = self.turns(cache.host_lengths, count)
        with self.program(_Memory, rows, count) as memory:
            memory.write(features, embeddings, turn, cache, cache.slots.next(count, cache.device))


class EagleDraft:
    """A draft behind what the cache holds: nodes of one depth after the other, each behind one of those before.

    Args:
        shape: of the trees.
    """

    def __init__(self, of: FusedEagle, cache: KVCache, shape: TreeShape) -> None:
        nodes = shape.width * shape.depth
        cache.reserve(nodes)
        of.renew()
        self._of, self._cache, self._used, self._depth = of, cache, 0, 0
        self._slots = cache.slots.next(nodes, cache.device).view(-1, nodes)
        # The root's node is the last known position. (Where nothing is known yet what is made of it does not matter.)
        self._turns = of.turns([max(length - 1, 0) for length in cache.host_lengths], shape.depth)
        self._carried = torch.empty(0)
        self._above: Tensor | None = None
        if shape.width > 1 or not cache.uniform:  # who sees what
            self._known = torch.arange(cache.longest) < cache.lengths[:, None, None]
            self._above = torch.empty(len(cache.lengths), 1, 0, dtype=torch.int64)  # slots of each node's path
            self._own = cache.lengths[:, None] + torch.arange(nodes)

    def begin(self, features: Tensor, embedding: Tensor) -> Tensor:
        """States behind the last known positions: of their features (B, 1, F) and the embeddings (B, 1, H) of what
        follows, (B, 1, H).
        """
        return self._step(self._of.predictor.fused(features), embedding, 0)

    def go_on(self, embedding: Tensor, behind: Tensor) -> Tensor:
        """States (B, M, H) of tokens with these embeddings, each behind a node of the last depth, (B, M) int64."""
        nodes, feature = behind.shape[1], self._carried
        if self._above is not None:
            feature = feature.take_along_dim(behind[..., None], 1)
            above = self._above.take_along_dim(behind[..., None], 1)
            self._above = torch.cat([above, self._own[:, self._used : self._used + nodes, None]], dim=-1)
        return self._step(feature, embedding, nodes)

    def _step(self, feature: Tensor, embedding: Tensor, new: int) -> Tensor:
        """Args: new: nodes that are seen beside those before: not the root's, which is in the cache."""
        cache, nodes = self._cache, embedding.shape[1]
        slots = self._slots[:, self._used : self._used + nodes].contiguous()
        end = cache.longest + self._used + new
        cosines, sines = self._turns
        turn = cosines[:, self._depth : self._depth + 1], sines[:, self._depth : self._depth + 1]
        mask = None if self._above is None else self._mask(self._above, nodes, end)
        with self._of.program(_Step, len(embedding), nodes, mask is not None) as step:
            state, self._carried = step.advance(embedding, feature, turn, cache, slots, end, mask)
        self._used, self._depth = self._used + new, self._depth + 1
        return state

    def _mask(self, above: Tensor, nodes: int, end: int) -> Tensor:
        """(B, 1, M, end): what nodes see: known positions, and their own paths."""
        dtype = self._of.predictor.dtype
        seen = torch.full((len(above), nodes, end), torch.finfo(dtype).min, dtype=dtype)
        seen[..., : self._cache.longest].masked_fill_(self._known, 0)
        return seen.scatter_(2, above.expand(-1, nodes, -1), 0)[:, None]


class _Eagle(Forward):
    """What steps and committed positions have in common."""

    _of: FusedEagle

    def _joined(self, feature: Tensor) -> Tensor:
        """What the first layer attends from, of the embeddings and the features: both normalised, side by side."""
        size, layer = self._y.shape[1], self._of.layers[0]
        self._embedding, seen = torch.empty_like(self._y), self._new(self._tokens, 2 * size)
        self._norm(layer.parts, "input_layernorm", seen[:, :size], self._embedding)
        self._norm(layer.parts, "hidden_norm", seen[:, size:], feature)
        return seen


class _Step(_Eagle):
    def _begin(self) -> Tensor:
        seen, config = self._joined(self._x), self._of.predictor.config
        self._carries = self._y if config.norm_output else self._x
        if config.norm_before_residual:
            elements.copy_rows(self._program, self._x, seen[:, self._x.shape[1] :])
        return seen

    def advance(
        self,
        embedding: Tensor,
        feature: Tensor,
        turn: tuple[Tensor, Tensor],
        cache: KVCache,
        slots: Tensor,
        end: int,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        self._embedding.copy_(embedding.reshape(self._x.shape))
        self._x.copy_(feature.reshape(self._x.shape))
        self._run(turn, cache, slots, end, [mask])
        return self._y.view(*self._shape, -1).clone(), self._carries.view(*self._shape, -1).clone()


class _Memory(_Eagle):
    def _build(self, layers: tuple[int, ...]) -> None:
        of, network, layer = self._of, self._of.predictor, self._of.layers[0]
        fused = self._features = self._new(self._tokens, network.config.feature_size)
        if network.input_norm is not None:
            fused = torch.empty_like(self._features)
            self._norm(network._modules, "input_norm", fused, self._features)
        if network.fc_norm is not None:
            parts, before, fused = network.fc_norm._modules, fused, torch.empty_like(self._features)
            each = (x.chunk(len(parts), dim=1) for x in (before, fused))
            for name, here, there in zip(parts, *each, strict=True):
                self._norm(parts, name, there, here)
        (feature,) = self._linear(network._modules, ["fc"], fused, [self._y.shape[1]])
        seen = self._joined(feature[:, : self._y.shape[1]])
        k, v = self._linear(layer.attention, ("k_proj", "v_proj"), seen, [of.shared * of.size] * 2)
        self._keep(layer, 0, k, v)

    def write(
        self, features: Tensor, embeddings: Tensor, turn: tuple[Tensor, Tensor], cache: KVCache, slots: Tensor
    ) -> None:
        self._features.copy_(features.reshape(self._features.shape))
        self._embedding.copy_(embeddings.reshape(self._y.shape))
        self._run(turn, cache, slots, 0, [None])
