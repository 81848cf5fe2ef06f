"""Block-parallel drafting: all steps in one forward of mask tokens that read the target's features (DFlash, DFlash2,
DSpark).
"""

from typing import cast

import torch
from torch import Tensor, nn
from transformers import initialization as init

from shape.networks.base import Carried, Known, Remembered
from shape.networks.config import ShapeConfig
from shape.networks.convolution import ConvolvedLayer, GroupedConvolution
from shape.networks.decoder import DraftLayer, Rotary, norm_of
from shape.networks.layers import ConfidenceHead, GatedMarkov, MarkovTable, RecurrentMarkov, SelectorMarkov, recent
from shape.networks.masked import MaskedPredictor


class BlockPredictor(MaskedPredictor):
    """A block [x_t, mask, mask, ...] at positions t, t + 1, ... goes through the decoder layers at once.

    As DFlash (arXiv 2602.06036): raw features of several layers of the target are fused by one matrix, normalised, and
    go into the keys and values of *every* layer, kept per known position; places of the block see all of these and, in
    both directions, each other; embedding and head are the target's, frozen, and the mask is one of its tokens. With
    `sample_from_anchor` place n drafts x_{t+n+1}, so that blocks have S places; without, place n > 0 drafts the token
    at its own position, x_{t+n}, so that they have S + 1.

    Layers of the type "sliding_attention" see the last `sliding_window` known positions, counted from x_t, and of the
    block, unless `sliding_window_non_causal`, the places before and their own.

    As DSpark: `markov_rank` adds a bias by the token before, which parallel states lack, out of a learned table, alone
    or with the states (`markov_head_type`), and `confidence` estimates the probability 1 - TV that a draft is accepted.

    As DFlash2: `conv_kernel_size` gives every layer convolutions over the places of a block
    (`shape.networks.convolution`), and the `markov_head_type` "selector" chooses each step's token among its likeliest
    ones by the token before and the state.

    Weights, their names and what is computed are those of speculators 0.9 (compared in tests/networks/test_block.py)
    and, positions and places among them, of vLLM 0.32.
    """

    kind = "block"
    confidence_learns = "acceptance"

    def __init__(self, config: ShapeConfig) -> None:
        super().__init__(config)
        layer, size = config.layer_config(), config.hidden_size
        self.fc = nn.Linear(config.feature_size, size, bias=False)
        self.hidden_norm = norm_of(layer, size)
        taps, group = config.conv_kernel_size, config.conv_group_size
        self.layers = nn.ModuleList(
            ConvolvedLayer(layer, taps, group) if taps else DraftLayer(layer) for _ in range(config.num_layers)
        )
        self.norm = norm_of(layer, size)
        self.windows = config.windows
        self._rotary = Rotary(layer)
        self._add_read_out(heads=1 if config.own_heads else 0)

    def _add_token_heads(self) -> None:
        config, rank = self.config, self.config.markov_rank
        self.markov = self.confidence = None  # the base's
        self.markov_head = self._markov_head() if rank else None
        seen = config.hidden_size + (rank if config.confidence_head_with_markov else 0)
        self.confidence_head = ConfidenceHead(seen) if config.confidence else None

    def _markov_head(self) -> MarkovTable:
        config = self.config
        sizes = cast(int, config.vocab_size), config.markov_rank, config.draft_size
        if config.markov_head_type == "gated":
            return GatedMarkov(*sizes, config.hidden_size)
        if config.markov_head_type == "selector":
            return SelectorMarkov(*sizes, config.hidden_size, config.selector_top_k)
        return RecurrentMarkov(*sizes, config.hidden_size) if config.markov_head_type == "rnn" else MarkovTable(*sizes)

    @property
    def token_bias(self) -> MarkovTable | None:
        return self.markov_head

    def rotary_ahead(self, roots: Tensor, dtype: torch.dtype, steps: int | None = None) -> Tensor:
        return super().rotary_ahead(roots, dtype, max(steps or 0, self.config.block_size))

    def remember(
        self, features: Tensor, embeddings: Tensor, positions: Tensor, past: Remembered | None = None
    ) -> Remembered:
        seen = self.hidden_norm(self.fc(features[:, 1:].to(self.fc.weight.dtype)))
        rotary = self.rotary(positions, seen.dtype)
        return [layer.self_attn.remember(seen, rotary) for layer in self._layers()]

    def begin(self, known: Known, root: Tensor | None) -> Carried:
        assert root is not None and known.rotary is not None
        size = self.config.block_size
        x = self.masked(root.to(self.fc.weight.dtype), size)
        rotary, order = known.rotary[:, :, 1 : size + 1], None
        if not self.config.sliding_window_non_causal:
            order = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
        for layer, memory, window in zip(self._layers(), known.memory, self.windows, strict=True):
            seen, among = recent(known.visible, memory, window), None if window is None else order
            x = self.run(layer.over_blocks, x, rotary, memory, seen, among)
        return (self.norm(x[..., size - self.config.num_steps :, :]),)

    def estimate(self, states: Tensor, tokens: Tensor, embeddings: Tensor) -> Tensor:
        assert self.confidence_head is not None
        if self.markov_head is None or not self.config.confidence_head_with_markov:
            return self.confidence_head(states).expand(tokens.shape)
        before = self.markov_head.reduced(tokens, embeddings)
        return self.confidence_head(torch.cat([states.expand(*tokens.shape, -1).to(before), before], dim=-1))

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MarkovTable):
            init.normal_(module.markov_w1.weight, std=0.01)
        if isinstance(module, GroupedConvolution):  # at first the place itself
            itself = torch.zeros_like(module.base_kernel)
            itself[:, 0] = 1
            init.copy_(module.base_kernel, itself)
            init.zeros_(module.kernel_projection.weight)

    def _std(self, module: nn.Linear) -> float:
        if self.confidence_head is not None and module is self.confidence_head.proj:
            return 0.0  # at first no opinion
        return super()._std(module)
