"""Medusa: independent heads on the last known state, one for each step (Cai et al., arXiv 2401.10774)."""

import torch
from torch import Tensor, nn

from shape.networks.base import Carried, Known, Predictor
from shape.networks.config import ShapeConfig
from shape.networks.layers import normalise, scale


class MedusaPredictor(Predictor):
    """Head n drafts x_{t+n+1} from h_{t-1} alone: W_n (h + silu(R_n h)) (section 2.1.1).

    R_n starts at zero and W_n as a copy of the target's output embedding, for the draft vocabulary. Heads know nothing
    of each other nor of x_t, the token that h_{t-1} itself yields; candidates are combined as a tree. With `own_heads`
    off the target's frozen head reads all steps.

    Medusa-1 trains the heads on a frozen target, as here, head n weighed by 0.8^n. Medusa-2 trains target and heads
    jointly, which changes what the target writes, so it is not offered; what is joint here is the loss
    `negative_log_acceptance`, the negative log probability that all drafted steps are accepted.
    """

    kind = "medusa"

    def __init__(self, config: ShapeConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.residuals = nn.ModuleList(nn.Linear(size, size) for _ in range(config.num_steps))
        self._add_read_out(heads=config.num_steps if config.own_heads else 0)

    def begin(self, known: Known, root: Tensor | None) -> Carried:
        current = self.current(known)
        size, seen = scale(current), normalise(current)
        states = [current + size * nn.functional.silu(residual(seen)) for residual in self.residuals]
        return (torch.stack(states, dim=-2),)

    def _std(self, module: nn.Linear) -> float:
        return 0.0 if module in self.residuals else super()._std(module)
