"""EAGLE: one decoder layer that continues the target's features (Li et al., arXiv 2401.15077, 2503.01840)."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from shape.networks.base import Carried, Known, Predictor, Remembered
from shape.networks.config import ShapeConfig
from shape.networks.decoder import DraftLayer, Rotary, norm_of


class EaglePredictor(Predictor):
    """Position i reads the feature of h_i and the embedding of x_{i+1}; its output drafts x_{i+2} and, where the true
    feature is unknown, is the next position's input.

    Weights, their names and what is computed are those of the published checkpoints (SafeAILab, SpecForge, speculators;
    compared in tests/networks/test_eagle.py): raw features of low, middle and high layers are fused by one matrix
    (section 3.1), the layer reads that beside the token, each normalised, and training unrolls it on its own outputs
    with the attention of decoding ("training-time test", section 3.2): a later step sees the true features of known
    positions and its own outputs behind them. `own_heads` gives it a trained output embedding, as published ones have.
    Training leaves out positions whose likeliest token is outside the draft vocabulary, as SafeAILab's and SpecForge's.
    With `feature_layers` [-1] and a loss on states it is EAGLE-1 with this layer.

    The layer's position is that of h_i, as in vLLM; speculators counts from one, which rotary positions, relative as
    they are, do not see.
    """

    kind = "eagle"
    learns_draftable_alone = True

    def __init__(self, config: ShapeConfig) -> None:
        super().__init__(config)
        layer, size = config.layer_config(), config.hidden_size
        self.input_norm = norm_of(layer, config.feature_size) if config.norm_before_fc else None
        norms = [norm_of(layer, size) for _ in config.feature_layers]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.fc = nn.Linear(config.feature_size, size, bias=False)
        self.layers = nn.ModuleList([EagleLayer(layer, config.norm_before_residual)])
        self.norm = norm_of(layer, size)
        self._rotary = Rotary(layer)
        self._add_read_out(heads=1 if config.own_heads else 0)

    @property
    def memory_shapes(self) -> list[tuple[int, int]]:
        return [(self._layer.self_attn.key_heads, self._layer.self_attn.head_size)]

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        return self._rotary(positions, dtype)

    def remember(self, features: Tensor, embeddings: Tensor, positions: Tensor) -> Remembered:
        seen, _ = self._layer.inputs(self._fused(features[:, 1:]), embeddings[:, 1:])
        return [self._layer.self_attn.remember(seen, self.rotary(positions, seen.dtype))]

    def begin(self, known: Known, root: Tensor | None) -> Carried:
        feature, (groups, size) = self._fused(known.window[..., -1, :]), self.memory_shapes[0]
        nothing = feature.new_zeros(*feature.shape[:2], 0, groups, size)
        return feature, nothing, nothing

    def advance(self, known: Known, carried: Carried, embedding: Tensor | None, n: int) -> tuple[Tensor, Carried]:
        assert embedding is not None and known.rotary is not None
        feature, keys, values = carried
        seen, x = self._layer.inputs(feature, embedding)
        rotary, own, attention = known.rotary[:, :, n], None, self._layer.self_attn
        if n > 0:  # at the first step the node is position t - 1 itself, which is remembered
            key, value = attention.remember(seen, rotary)
            keys = torch.cat([keys, key.transpose(1, 2).unsqueeze(2)], dim=2)
            values = torch.cat([values, value.transpose(1, 2).unsqueeze(2)], dim=2)
            own = keys.permute(0, 3, 1, 2, 4), values.permute(0, 3, 1, 2, 4)
        x = x + attention(seen, rotary, known.memory[0], known.visible, own)
        x = x + self._layer.mlp(self._layer.post_attention_layernorm(x))
        state = self.norm(x)
        return state, (state if self.config.norm_output else x, keys, values)

    @property
    def _layer(self) -> "EagleLayer":
        return self.layers[0]  # type: ignore[return-value]

    def _fused(self, features: Tensor) -> Tensor:
        """(..., F) -> (..., H)."""
        features = features.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            each = zip(self.fc_norm, features.chunk(len(self.fc_norm), dim=-1), strict=True)
            features = torch.cat([norm(layer) for norm, layer in each], dim=-1)
        return self.fc(features)


class EagleLayer(DraftLayer):
    """A decoder layer that attends from states beside tokens, each normalised by itself."""

    def __init__(self, config: PreTrainedConfig, norm_before_residual: bool) -> None:
        super().__init__(config, in_size=2 * config.hidden_size)
        self.hidden_norm = norm_of(config, config.hidden_size)
        self.norm_before_residual = norm_before_residual

    def inputs(self, feature: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """(..., H) twice -> what attention reads, (..., 2 H), and the residual, (..., H)."""
        normed = self.hidden_norm(feature)
        seen = torch.cat([self.input_layernorm(embedding.to(feature.dtype)), normed], dim=-1)
        return seen, normed if self.norm_before_residual else feature
