"""Medusa: independent heads on the last known state, one for each step (Cai et al., arXiv 2401.10774)."""

import torch
from torch import Tensor, nn

from shape.networks.base import Carried, Known, Predictor
from shape.networks.config import ShapeConfig


class MedusaPredictor(Predictor):
    """Head n drafts x_{t+n+1} from h_{t-1} alone: W_n (h + silu(R_n h)).

    R_n starts at zero and W_n as a copy of the target's output embedding, for the draft vocabulary; with `num_layers`
    above one residual layers follow each other. Heads know nothing of each other nor of x_t, the token that h_{t-1}
    itself yields; candidates are combined as a tree. `shared_head` gives one W to all steps, and with `own_heads` off
    it is the target's frozen one. Names and numbers are those of the published checkpoints (compared with vLLM's in
    tests/networks/test_medusa.py).

    Medusa-1 trains the heads on a frozen target, as here, head n weighed by 0.8^n. Medusa-2 trains target and heads
    jointly, which changes what the target writes, so it is not offered; what is joint here is the loss
    `negative_log_acceptance`, which adds up over steps to the negative log probability that each accepts its draft.
    """

    kind = "medusa"

    def __init__(self, config: ShapeConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(ResidualLayers(config) for _ in range(config.num_steps))
        heads = 1 if config.shared_head else config.num_steps
        self._add_read_out(heads=heads if config.own_heads else 0)

    def begin(self, known: Known, root: Tensor | None) -> Carried:
        state = known.window[..., -1, :].to(self.dtype)
        return (torch.stack([block(state) for block in self.blocks], dim=-2),)

    def _std(self, module: nn.Linear) -> float:
        return 0.0 if any(module is own for own in self.blocks.modules()) else super()._std(module)


class ResidualLayers(nn.Module):
    """x + silu(R x), `num_layers` times, (..., H) -> (..., H)."""

    def __init__(self, config: ShapeConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=config.residual_bias) for _ in range(config.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.silu(layer(x))
        return x
