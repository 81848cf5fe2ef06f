"""What is done to a predicted state (paper 3.2): nothing, an affine bottleneck, or entropic optimal transport."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shape.networks.config import ShapeConfig
from shape.networks.layers import normalise, scale
from shape.networks.transport import LastUpdate, gibbs_kernel, scaled, squared_distances
from shape.target.inference import state_of


class Share(nn.Module):
    """(1 - alpha) raw + alpha refined, alpha fixed (the paper) or learned through a sigmoid."""

    def __init__(self, config: ShapeConfig) -> None:
        super().__init__()
        self.fixed = config.refinement_alpha
        start = torch.tensor([min(max(self.fixed, 0.01), 0.99)]).logit()
        self.logit = nn.Parameter(start) if config.refinement_alpha_learned else None

    @property
    def alpha(self) -> float | Tensor:
        if self.logit is None:
            return self.fixed
        return self.logit.to(torch.promote_types(self.logit.dtype, torch.float32)).sigmoid()

    def forward(self, raw: Tensor, layer: nn.Linear, reduced: Tensor, size: float | Tensor = 1.0) -> Tensor:
        """The refined state is `size` times what a layer makes of reduced coordinates: (..., H), (..., d) -> (..., H).

        Share and size are multiplied into the coordinates, of which there are fewer, and the bias into the product, so
        that two operations go over whole states.
        """
        alpha, weight = self.alpha, layer.weight
        reduced, amount = reduced.to(raw.dtype), alpha * size
        weighted = reduced * amount
        if layer.bias is not None:
            amount = torch.as_tensor(amount, dtype=raw.dtype, device=raw.device).expand(*reduced.shape[:-1], 1)
            weighted, weight = torch.cat([weighted, amount], -1), torch.cat([weight, layer.bias[:, None]], -1)
        refined = F.linear(weighted.to(raw.dtype), weight)
        if isinstance(alpha, Tensor):
            return refined + (1 - alpha).to(raw.dtype) * raw
        return torch.add(refined, raw, alpha=1 - alpha)  # torch.lerp takes no mixed dtypes, which autocast makes


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
        """(..., H) of a prediction; current is not read."""
        return self.share(raw, self.expand, self.reduce(raw))


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
        self._made: tuple[tuple[Any, ...], Tensor] | None = None

    @property
    def iterates(self) -> bool:
        """After a column update T^T 1 is q itself: nothing to iterate for, unless the plan is read otherwise."""
        return self.last_update == "row" or self.barycentric

    def forward(self, raw: Tensor, current: Tensor) -> Tensor:
        """(..., H) of a prediction and of h_t, the state before it -> (..., H)."""
        arriving = self._distribution(self._reduced(raw))
        if self.iterates:
            coordinates = self._reduced(current)
            plan = scaled(self._distribution(coordinates), arriving, self.kernel(), self.iterations, self.last_update)
            arriving = plan.arrivals(coordinates.to(plan.u.dtype)) if self.barycentric else plan.column_marginal()
        return self.share(raw, self.expand, arriving, scale(current))

    def kernel(self) -> Tensor:
        """The Gibbs kernel, (d, d), which depends on weights alone: on a CPU made once for each state of theirs."""
        weight = self.expand.weight
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or weight.device.type != "cpu":
            return gibbs_kernel(squared_distances(weight.T), self.epsilon)
        state = (*state_of(weight), weight.dtype)
        if self._made is None or self._made[0] != state:
            self._made = state, gibbs_kernel(squared_distances(weight.T), self.epsilon)
        return self._made[1]

    def _reduced(self, state: Tensor) -> Tensor:
        return self.reduce(normalise(state))

    @staticmethod
    def _distribution(logits: Tensor) -> Tensor:
        return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def refinement_of(config: ShapeConfig) -> AffineRefinement | SinkhornRefinement | None:
    if config.refinement == "none":
        return None
    return AffineRefinement(config) if config.refinement == "affine" else SinkhornRefinement(config)
