"""EAGLE: one decoder layer that continues the target's features (Li et al., arXiv 2401.15077, 2503.01840)."""

import torch
from torch import Tensor

from shape.networks.base import Carried, Known, Predictor, Remembered
from shape.networks.config import ShapeConfig
from shape.networks.layers import ContextAttention, Fusion, GatedMLP, RMSNorm, rotary_table, scale


class EaglePredictor(Predictor):
    """Position i reads the feature of h_i and the embedding of x_{i+1}; its output drafts x_{i+2} and, where the true
    feature is unknown, is the next position's input.

    As EAGLE-3: features of low, middle and high layers are fused by one matrix (section 3.1), the layer's input is that
    beside the token, each normalised, and training unrolls the head on its own outputs with the attention of decoding
    ("training-time test", section 3.2): a later step sees the true features of known positions and its own outputs
    behind them. With `feature_layers` [-1] and a loss on states it is EAGLE-1, whose feature is h alone. `own_heads`
    gives it a trained output embedding, as EAGLE-3 has, instead of the target's frozen one.

    The layer is Llama's: attention with rotary positions, a gated feed-forward part of width `intermediate_size`.
    """

    kind = "eagle"

    def __init__(self, config: ShapeConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        assert config.intermediate_size is not None  # the configuration fills it in
        self.fuse = Fusion(config)
        self.norm_token, self.norm_feature = RMSNorm(size), RMSNorm(size)
        self.attention = ContextAttention(2 * size, size, config)
        self.norm_mlp, self.mlp = RMSNorm(size), GatedMLP(size, config.intermediate_size)
        self.norm = RMSNorm(size)
        self._add_read_out(own_heads=1 if config.own_heads else 0)

    @property
    def memory_shapes(self) -> list[tuple[int, int]]:
        return [(self.attention.heads, self.attention.head_size)]

    def remember(self, features: Tensor, embeddings: Tensor, positions: Tensor) -> Remembered:
        seen = self._inputs(self._fused(features[:, 1:]), embeddings[:, 1:])
        return [self.attention.remember(seen, seen, rotary_table(positions, self.attention.head_size, seen.dtype))]

    def begin(self, known: Known, root: Tensor | None) -> Carried:
        feature = self._fused(known.window[..., -1, :])
        nothing = feature.new_zeros(*feature.shape[:2], 0, self.attention.heads, self.attention.head_size)
        return feature, nothing, nothing

    def advance(self, known: Known, carried: Carried, embedding: Tensor | None, n: int) -> tuple[Tensor, Carried]:
        assert embedding is not None and known.rotary is not None
        feature, keys, values = carried
        seen = self._inputs(feature, embedding)
        rotary, own = known.rotary[:, :, n], None
        if n > 0:  # at the first step the node is position t - 1 itself, which is remembered
            key, value = self.attention.remember(seen, seen, rotary)
            keys = torch.cat([keys, key.transpose(1, 2).unsqueeze(2)], dim=2)
            values = torch.cat([values, value.transpose(1, 2).unsqueeze(2)], dim=2)
            own = keys.permute(0, 3, 1, 2, 4), values.permute(0, 3, 1, 2, 4)
        x = feature + self.attention(seen, rotary, known.memory[0], known.visible, own)
        x = x + self.mlp(self.norm_mlp(x))
        return scale(self.current(known)) * self.norm(x), (x, keys, values)

    def _fused(self, features: Tensor) -> Tensor:
        return self.fuse(features.to(self.fuse.mix.weight.dtype))

    def _inputs(self, feature: Tensor, embedding: Tensor) -> Tensor:
        return torch.cat([self.norm_token(embedding.to(feature.dtype)), self.norm_feature(feature)], dim=-1)
