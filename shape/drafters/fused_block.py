"""Blocks of DFlash and DSpark on a CPU: all places in one call (see ``shape.drafters.fused``)."""

import torch
from torch import Tensor

from shape.drafters.fused import FusedPredictor
from shape.networks.block import BlockPredictor
from shape.verification.cache import KVCache
from shape.verification.program import Forward, all_rows


class _Memory(Forward):
    _of: FusedPredictor

    def _build(self, layers: tuple[int, ...]) -> None:
        of, network, size = self._of, self._of.predictor, self._y.shape[1]
        self._features = self._new(self._tokens, network.config.feature_size)
        (feature,) = self._linear(network._modules, ["fc"], self._features, [size])
        self._norm(network._modules, "hidden_norm", self._y, feature[:, :size])
        for number, layer in enumerate(of.layers):
            k, v = self._linear(layer.attention, ("k_proj", "v_proj"), self._y, [of.kv_heads * of.size] * 2)
            self._keep(layer, number, k, v)

    def write(self, features: Tensor, embeddings: Tensor) -> None:
        self._features.copy_(features.reshape(self._features.shape))


class FusedBlock(FusedPredictor):
    """A block predictor, by kernels."""

    kind, memory = BlockPredictor, _Memory

    def begin(self, features: Tensor, embedding: Tensor, cache: KVCache) -> Tensor:
        """States (B, S, H) of all steps behind tokens with embeddings (B, 1, H); what is known is remembered."""
        network, rows = self.predictor, len(embedding)
        size = network.config.block_size
        cache.reserve(size)
        x = torch.cat([embedding, network.mask.to(embedding).expand(rows, size - 1, -1)], dim=1).to(network.dtype)
        turns, mask = self.turns(cache.host_lengths, size), self.seen(cache, size)
        with self.program(Forward, rows, size, mask is not None, (-1,)) as forward:
            states, _ = forward(all_rows(x), turns, cache, cache.longest + size, [mask])
        return states[:, size - network.config.num_steps :]
