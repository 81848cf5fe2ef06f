"""Block-parallel drafting: all steps in one forward of mask tokens that read the target's features (DFlash, DSpark)."""

import torch
from torch import Tensor, nn

from shape.networks.base import Carried, Known, Predictor, Remembered
from shape.networks.config import ShapeConfig
from shape.networks.layers import ContextAttention, Fusion, GatedMLP, RMSNorm, normalise, rotary_table, scale


class BlockPredictor(Predictor):
    """A block [x_t, mask, mask, ...] of S tokens goes through `num_layers` decoder layers at once; the state at place n
    drafts x_{t+n+1}.

    As DFlash (arXiv 2602.06036): features of several layers of the target are fused by one matrix and go into the keys
    and values of *every* layer, kept per known position; tokens of the block see all of these and, in both directions,
    each other; embedding and head are the target's, frozen. As DSpark, on request: `markov_rank` adds a low-rank bias
    by the token before, which parallel states lack, and `confidence` estimates whether a place is worth drafting.

    DFlash's mask token is a vector here, not a row of a vocabulary.
    """

    kind = "block"

    def __init__(self, config: ShapeConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.fuse, self.norm_features = Fusion(config), RMSNorm(size)
        self.mask = nn.Parameter(torch.randn(size))
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(size)
        self._add_read_out(heads=1 if config.own_heads else 0)

    @property
    def memory_shapes(self) -> list[tuple[int, int]]:
        return [(layer.attention.heads, layer.attention.head_size) for layer in self._layers()]

    def remember(self, features: Tensor, embeddings: Tensor, positions: Tensor) -> Remembered:
        seen = self.norm_features(self.fuse(features[:, 1:].to(self.mask.dtype)))
        rotary = rotary_table(positions, self._layers()[0].attention.head_size, seen.dtype)
        return [layer.attention.remember(seen, seen, rotary) for layer in self._layers()]

    def begin(self, known: Known, root: Tensor | None) -> Carried:
        assert root is not None and known.rotary is not None
        steps = self.config.num_steps
        masks = self.mask.expand(*root.shape[:-1], steps - 1, -1)
        x = torch.cat([normalise(root.to(self.mask.dtype)).unsqueeze(-2), masks], dim=-2)
        for layer, memory in zip(self._layers(), known.memory, strict=True):
            x = layer(x, known.rotary[:, :, 1 : steps + 1], memory, known.visible)
        return (scale(self.current(known)).unsqueeze(-2) * self.norm(x),)

    def _layers(self) -> list["BlockLayer"]:
        return list(self.layers)  # type: ignore[arg-type]


class BlockLayer(nn.Module):
    """A decoder layer over blocks: attention to known positions and within the block, then a feed-forward part."""

    def __init__(self, config: ShapeConfig) -> None:
        super().__init__()
        size = config.hidden_size
        assert config.intermediate_size is not None  # the configuration fills it in
        self.norm_attention, self.norm_mlp = RMSNorm(size), RMSNorm(size)
        self.attention = ContextAttention(size, size, config)
        self.mlp = GatedMLP(size, config.intermediate_size)

    def forward(self, x: Tensor, rotary: Tensor, memory: tuple[Tensor, Tensor], visible: Tensor | None) -> Tensor:
        """(B, P, S, H), rotary (B, P, S, 2, D / 2), known keys and values (B, G, T, D), (B, P, T) -> (B, P, S, H)."""
        steps = x.shape[2]
        seen, rotary = self.norm_attention(x).flatten(1, 2), rotary.flatten(1, 2)
        if visible is not None:
            visible = visible.repeat_interleave(steps, dim=1)
        keys, values = self.attention.remember(seen, seen, rotary)
        own = keys.unflatten(2, (-1, steps)), values.unflatten(2, (-1, steps))
        found = self.attention(seen, rotary, memory, visible, own)
        x = x + found.unflatten(1, (-1, steps))
        return x + self.mlp(self.norm_mlp(x))
