"""Steps of EAGLE on a CPU, in one call each, and those of P-EAGLE, all in one (see ``shape.drafters.fused``).

EAGLE drafts token by token: nodes of one depth after the other. P-EAGLE's places all go through at once.
"""

import torch
from torch import Tensor

from shape.drafters.fused import FusedPredictor
from shape.networks.eagle import EaglePredictor, ParallelEaglePredictor
from shape.target import elements
from shape.verification.cache import KVCache
from shape.verification.program import Forward, Turns
from shape.verification.tree_shape import TreeShape


class _Eagle(Forward):
    """What steps and committed positions have in common."""

    _of: FusedPredictor

    def _joined(self, feature: Tensor) -> Tensor:
        """What the first layer attends from, of the embeddings and the features: both normalised, side by side."""
        size, layer = self._y.shape[1], self._of.layers[0]
        self._embedding, seen = torch.empty_like(self._y), self._new(self._tokens, 2 * size)
        self._norm(layer.parts, "input_layernorm", seen[:, :size], self._embedding)
        self._norm(layer.parts, "hidden_norm", seen[:, size:], feature)
        if self._of.predictor.config.norm_before_residual:
            elements.copy_rows(self._program, self._x, seen[:, size:])
        elif feature is not self._x:
            elements.copy_rows(self._program, self._x, feature)
        return seen


class _Step(_Eagle):
    def _begin(self) -> Tensor:
        self._carries = self._y if self._of.predictor.config.norm_output else self._x
        return self._joined(self._x)

    def advance(
        self,
        embedding: Tensor,
        feature: Tensor,
        turns: Turns,
        cache: KVCache,
        end: int,
        mask: Tensor | None,
        between: int = 0,
    ) -> tuple[Tensor, Tensor]:
        self._embedding.copy_(embedding.reshape(self._x.shape))
        self._x.copy_(feature.reshape(self._x.shape))
        self.run(turns, cache, end, [mask], between=between)
        return self._y.view(*self._shape, -1).clone(), self._carries.view(*self._shape, -1).clone()


class _Memory(_Eagle):
    def _build(self, layers: tuple[int, ...]) -> None:
        of, network, size = self._of, self._of.predictor, self._y.shape[1]
        fused = self._features = self._new(self._tokens, network.config.feature_size)
        if network.input_norm is not None:
            fused = torch.empty_like(self._features)
            self._norm(network._modules, "input_norm", fused, self._features)
        if network.fc_norm is not None:
            parts, before, fused = network.fc_norm._modules, fused, torch.empty_like(self._features)
            each = (x.chunk(len(parts), dim=1) for x in (before, fused))
            for name, here, there in zip(parts, *each, strict=True):
                self._norm(parts, name, there, here)
        (feature,) = self._linear(network._modules, ["fc"], fused, [size])
        seen, last = self._joined(feature[:, :size]), len(of.layers) - 1
        for number, layer in enumerate(of.layers[:last]):
            self._through(layer, number, seen)
            seen = self._y
        k, v = self._linear(of.layers[last].attention, ("k_proj", "v_proj"), seen, [of.kv_heads * of.size] * 2)
        self._keep(of.layers[last], last, k, v)

    def write(self, features: Tensor, embeddings: Tensor) -> None:
        self._features.copy_(features.reshape(self._features.shape))
        self._embedding.copy_(embeddings.reshape(self._y.shape))


class FusedEagle(FusedPredictor):
    """An EAGLE predictor, by kernels."""

    kind, memory = EaglePredictor, _Memory

    def _in_order(self, cache: KVCache, count: int) -> Tensor | None:
        several = len(self.layers) > 1 and not (count == 1 and cache.uniform)
        return self.seen(cache, count, torch.ones(count, count, dtype=torch.bool).tril()) if several else None


class FusedParallelEagle(FusedEagle):
    """The same of P-EAGLE."""

    kind = ParallelEaglePredictor

    def begin(self, features: Tensor, embedding: Tensor, cache: KVCache) -> Tensor:
        """States (B, S, H) of all steps, behind the last known positions: of their features (B, 1, F) and the
        embeddings (B, 1, H) of what follows.
        """
        network, rows = self.predictor, len(features)
        steps = network.config.num_steps
        cache.reserve(steps)
        read = torch.cat([features, network.mask_hidden.expand(rows, -1, -1)], dim=1)
        first, masked = network.fused(read).chunk(2, dim=1)
        feature = torch.cat([first, masked.expand(-1, steps - 1, -1)], dim=1)
        embedding = network.masked(embedding[:, 0], steps)
        turns = self.turns([max(length - 1, 0) for length in cache.host_lengths], steps)
        mask = self.seen(cache, steps, network.among())
        with self.program(_Step, rows, steps, True) as step:
            return step.advance(embedding, feature, turns, cache, cache.longest + steps, mask)[0]


class EagleDraft:
    """A draft behind what the cache holds: nodes of one depth after the other, each behind one of those before.

    Args:
        shape: of the trees.
    """

    def __init__(self, of: FusedPredictor, cache: KVCache, shape: TreeShape) -> None:
        nodes = shape.width * shape.depth
        cache.reserve(nodes)
        self._of, self._cache, self._used, self._depth = of, cache, 0, 0
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
        """States (B, M, H) of the nodes of one depth.

        Args:
            feature: (B, M, H), of the nodes above. embedding: (B, M, H).
            new: how many of these nodes join those that are seen; 0 for the root's, which is in the cache.
        """
        cache, nodes = self._cache, embedding.shape[1]
        end = cache.longest + self._used + new
        positions = self._turns.positions[:, self._depth : self._depth + 1].expand(-1, nodes).contiguous()
        mask = None if self._above is None else self._mask(self._above, nodes, end)
        with self._of.program(_Step, len(embedding), nodes, mask is not None) as step:
            turns = self._turns._replace(positions=positions)
            state, self._carried = step.advance(embedding, feature, turns, cache, end, mask, self._used)
        self._used, self._depth = self._used + new, self._depth + 1
        return state

    def _mask(self, above: Tensor, nodes: int, end: int) -> Tensor:
        """(B, 1, M, end): what nodes see: known positions, and their own paths."""
        dtype = self._of.predictor.dtype
        seen = torch.full((len(above), nodes, end), torch.finfo(dtype).min, dtype=dtype)
        seen[..., : self._cache.longest].masked_fill_(self._known, 0)
        return seen.scatter_(2, above.expand(-1, nodes, -1), 0)[:, None]
