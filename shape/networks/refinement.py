"""What is done to a predicted state (paper 3.2): nothing, an affine bottleneck, or entropic optimal transport."""

import torch
from torch import Tensor, nn

from shape.networks.config import ShapeConfig
from shape.networks.layers import normalise, scale
from shape.networks.transport import LastUpdate, sinkhorn, squared_distances


class Share(nn.Module):
    """(1 - alpha) raw + alpha refined, alpha fixed (the paper) or learned through a sigmoid."""

    def __init__(self, config: ShapeConfig) -> None:
        super().__init__()
        self.fixed = config.refinement_alpha
        start = torch.tensor([min(max(self.fixed, 0.01), 0.99)]).logit()
        self.logit = nn.Parameter(start) if config.refinement_alpha_learned else None

    def forward(self, raw: Tensor, refined: Tensor) -> Tensor:
        alpha = self.fixed if self.logit is None else self.logit.sigmoid().to(raw.dtype)
        return (1 - alpha) * raw + alpha * refined  # torch.lerp takes no mixed dtypes, which autocast makes


class AffineRefinement(nn.Module):
    """The paper's baseline for transport: (1 - alpha) h_raw + alpha P2(P1 h_raw), a bottleneck of width d.

    Without biases, so that it has no opinion on the size of the target's states.
    """

    expand_std = 0.0  # start without noise

    def __init__(self, config: ShapeConfig) -> None:
        super().__init__()
        self.share = Share(config)
        self.reduce = nn.Linear(config.hidden_size, config.refinement_dim, bias=False)
        self.expand = nn.Linear(config.refinement_dim, config.hidden_size, bias=False)

    def forward(self, raw: Tensor, current: Tensor) -> Tensor:
        return self.share(raw, self.expand(self.reduce(raw)))


class SinkhornRefinement(nn.Module):
    """The paper's refinement (section 3.2): (1 - alpha) h_raw + alpha P2(T^T 1).

    T is the entropic plan between p = softmax(P1 h_t) and q = softmax(P1 h_raw). The paper leaves "a cost in
    the reduced space" open. Here the points of that space are the columns of P2: P2 q is the mean of the
    columns under q, so a unit of mass at i *is* the state P2_i, as a unit of mass at token i is its embedding
    E_i in the paper's mu_t = sum_i p_t(i) delta_{E_i} with C_ij = |E_i - E_j|^2. The cost is the squared
    distance between columns, over its mean. States are normalised before P1 (large ones would saturate the
    softmax) and P2 speaks in units of the current state's size.

    With the read-out "marginal", the paper's, the plan has little or no influence (`shape.networks.transport`).
    "barycentric" lets it move something: the current state's reduced coordinates z = P1 h_t, of which each point gets
    the mean of what arrives there, P2 (diag(T^T 1)^-1 T^T z).
    """

    expand_std = 1.0  # columns of P2 are states, in units of their size

    def __init__(self, config: ShapeConfig) -> None:
        super().__init__()
        self.share = Share(config)
        self.barycentric = config.refinement_readout == "barycentric"
        self.epsilon = config.refinement_epsilon
        self.iterations = config.refinement_iterations
        self.last_update: LastUpdate = config.refinement_last_update
        self.reduce = nn.Linear(config.hidden_size, config.refinement_dim)
        self.expand = nn.Linear(config.refinement_dim, config.hidden_size)

    def forward(self, raw: Tensor, current: Tensor) -> Tensor:
        arriving, coordinates = self._distribution(self._reduced(raw)), self._reduced(current)
        # After a column update T^T 1 is q itself: nothing to iterate for, unless the plan is read otherwise.
        if self.last_update == "row" or self.barycentric:
            leaving = self._distribution(coordinates).expand_as(arriving)
            cost = squared_distances(self.expand.weight.T)
            plan = sinkhorn(leaving, arriving, cost, self.epsilon, self.iterations, self.last_update)
            arriving = plan.arrivals(coordinates.to(plan.u.dtype)) if self.barycentric else plan.column_marginal()
        return self.share(raw, scale(current) * self.expand(arriving.to(raw.dtype)))

    def _reduced(self, state: Tensor) -> Tensor:
        return self.reduce(normalise(state))

    @staticmethod
    def _distribution(logits: Tensor) -> Tensor:
        return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def refinement_of(config: ShapeConfig) -> AffineRefinement | SinkhornRefinement | None:
    if config.refinement == "none":
        return None
    return AffineRefinement(config) if config.refinement == "affine" else SinkhornRefinement(config)
