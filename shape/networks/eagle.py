"""EAGLE: decoder layers that continue the target's features (Li et al., arXiv 2401.15077, 2503.01840), step by step or,
as P-EAGLE, all steps at once.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from shape.networks.base import Carried, Known, Predictor, Remembered
from shape.networks.config import ShapeConfig
from shape.networks.decoder import DecoderPredictor, DraftLayer, Rotary, norm_of
from shape.networks.layers import recent
from shape.networks.masked import MaskedPredictor


class EaglePredictor(DecoderPredictor):
    """Position i reads the feature of h_i and the embedding of x_{i+1}; its output drafts x_{i+2} and, where the true
    feature is unknown, is the next position's input.

    Weights, their names and what is computed are those of the published checkpoints (SafeAILab, SpecForge, speculators;
    compared in tests/networks/test_eagle.py): raw features of low, middle and high layers are fused by one matrix
    (section 3.1), the layer reads that beside the token, each normalised, and training unrolls it on its own outputs
    with the attention of decoding ("training-time test", section 3.2): a later step sees the true features of known
    positions and its own outputs behind them. `own_heads` gives it a trained output embedding, as published ones have.
    Training leaves out positions whose likeliest token is outside the draft vocabulary, as SafeAILab's and SpecForge's.
    With `feature_layers` [-1] and a loss on states it is EAGLE-1 with this layer.

    There is one layer unless `num_layers` says more, as in speculators and vLLM: only the first reads tokens. What a
    known position leaves in the later ones depends on all positions before it, so that training runs them over the
    text, in order, and decoding over what is new.

    Layers of the type "sliding_attention" see the last `sliding_window` known positions, at every step, as speculators
    trains them, and a step's own path.

    The layer's position is that of h_i, as in vLLM; speculators counts from one, which rotary positions, relative as
    they are, do not see.
    """

    kind = "eagle"
    learns_draftable_alone = True
    feeds_normed = False  # whether the next step reads the normalised output even without norm_output

    def __init__(self, config: ShapeConfig) -> None:
        super().__init__(config)
        layer = config.layer_config()
        first = self._add_inputs(layer)
        self.layers = nn.ModuleList([first, *(DraftLayer(layer) for _ in range(config.num_layers - 1))])
        self.norm = norm_of(layer, config.hidden_size)
        self.windows = config.windows
        self._rotary = Rotary(layer)
        self._add_read_out(heads=1 if config.own_heads else 0)

    def _add_inputs(self, layer: PreTrainedConfig) -> DraftLayer:
        """What features and tokens go through, and the layer that reads them."""
        config = self.config
        self.input_norm = norm_of(layer, config.feature_size) if config.norm_before_fc else None
        norms = [norm_of(layer, config.state_size) for _ in config.feature_layers]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        return EagleLayer(layer, config.norm_before_residual)

    def remember(
        self, features: Tensor, embeddings: Tensor, positions: Tensor, past: Remembered | None = None
    ) -> Remembered:
        x, layers = self._joined(self.fused(features[:, 1:]), embeddings[:, 1:]), self._layers()
        rotary, left = self.rotary(positions, x.dtype), []
        for number, layer in enumerate(layers):
            seen, residual = layer.inputs(x)
            new = layer.self_attn.remember(seen, rotary)
            left.append(new)
            if number + 1 < len(layers):  # nothing reads the last one's output
                before = None if past is None else past[number]
                window = self.windows[number]
                found = layer.self_attn.in_order(seen, rotary, new, before, positions[:, 0], window)
                x = layer.behind(residual, found)
        return left

    def begin(self, known: Known, root: Tensor | None) -> Carried:
        feature = self.fused(known.window[..., -1, :])
        nothing = [feature.new_zeros(*feature.shape[:2], 0, groups, size) for groups, size in self.memory_shapes]
        return feature, *nothing, *nothing

    def advance(self, known: Known, carried: Carried, embedding: Tensor | None, n: int) -> tuple[Tensor, Carried]:
        assert embedding is not None and known.rotary is not None
        count = len(known.memory)
        # Of the path, in each layer.
        feature, keys, values = carried[0], list(carried[1 : count + 1]), list(carried[count + 1 :])
        x, rotary = self._joined(feature, embedding), known.rotary[:, :, n]
        for number, (layer, memory) in enumerate(zip(self._layers(), known.memory, strict=True)):
            (seen, residual), own = layer.inputs(x), None
            visible = recent(known.visible, memory, self.windows[number])
            if n > 0:  # at the first step the node is position t - 1 itself, which is remembered
                key, value = layer.self_attn.remember(seen, rotary)
                keys[number] = torch.cat([keys[number], key.transpose(1, 2).unsqueeze(2)], dim=2)
                values[number] = torch.cat([values[number], value.transpose(1, 2).unsqueeze(2)], dim=2)
                own = keys[number].permute(0, 3, 1, 2, 4), values[number].permute(0, 3, 1, 2, 4)
            x = layer.behind(residual, layer.self_attn(seen, rotary, memory, visible, own))
        state = self.norm(x)
        return state, (state if self.feeds_normed or self.config.norm_output else x, *keys, *values)

    def _joined(self, feature: Tensor, embedding: Tensor) -> Tensor:
        """What the first layer reads: (..., H) twice -> (..., 2 H)."""
        return torch.cat([embedding.to(feature.dtype), feature], dim=-1)

    def fused(self, features: Tensor) -> Tensor:
        """(..., F) -> (..., H)."""
        features = features.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            each = zip(self.fc_norm, features.chunk(len(self.fc_norm), dim=-1), strict=True)
            features = torch.cat([norm(layer) for norm, layer in each], dim=-1)
        return self.fc(features)


class ParallelEaglePredictor(MaskedPredictor, EaglePredictor):
    """P-EAGLE (arXiv 2602.01469): EAGLE whose steps behind the first read a learned feature and a mask token.

    So they need no draft and no output of the step before: [g_{t-1} beside x_t, mask, mask, ...] at positions t - 1, t,
    ... goes through the layers at once, each place seeing the known positions and the places before it. Weights, names
    and what is computed are those of speculators 0.9 (compared in tests/networks/test_eagle.py), which trains its
    depths on samples of the places that ours trains on (conditional drop token). A window counts known positions from
    each place; of the places before it each sees all.

    Attributes:
        mask_hidden: (1, 1, F), what places behind the first read for a feature.
    """

    kind = "peagle"

    def _add_read_out(self, heads: int = 0) -> None:
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, self.config.feature_size))
        super()._add_read_out(heads)

    def begin(self, known: Known, root: Tensor | None) -> Carried:
        assert root is not None and known.rotary is not None
        feature, steps = self.fused(known.window[..., -1, :]), self.config.num_steps
        masked = self._joined(self.fused(self.mask_hidden[0, 0]), self.mask)
        x = self._joined(feature, root).unsqueeze(-2)
        x = torch.cat([x, masked.to(x).expand(*root.shape[:-1], steps - 1, -1)], dim=-2)
        among = self.among(x.device)
        for layer, memory, window in zip(self._layers(), known.memory, self.windows, strict=True):
            visible = recent(known.visible, memory, window, steps)
            x = self.run(layer.over_blocks, x, known.rotary[:, :, :steps], memory, visible, among)
        return (self.norm(x),)

    def among(self, device: torch.device | None = None) -> Tensor:
        """(S, S) bool, which places each sees: itself and those before it, but for the first, which is remembered."""
        steps = self.config.num_steps
        seen = torch.ones(steps, steps, dtype=torch.bool, device=device).tril()
        seen[:, 0] = False
        return seen

    advance = Predictor.advance

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            init.normal_(self.mask_hidden)


class EagleLayer(DraftLayer):
    """A decoder layer that attends from states beside tokens, each normalised by itself."""

    def __init__(self, config: PreTrainedConfig, norm_before_residual: bool) -> None:
        super().__init__(config, in_size=2 * config.hidden_size)
        self.hidden_norm = norm_of(config, config.hidden_size)
        self.norm_before_residual = norm_before_residual

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        embedding, feature = x.chunk(2, dim=-1)
        normed = self.hidden_norm(feature)
        seen = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        return seen, normed if self.norm_before_residual else feature
