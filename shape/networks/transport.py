"""Entropic optimal transport between many pairs of distributions.

Where all pairs share the d x d cost they share the Gibbs kernel K = exp(-C / epsilon), and every entropic plan has
the form T = diag(u) K diag(v). So a plan is kept as its two scalings, and everything asked of it is a product
with the shared d x d matrix, and no (batch, d, d) tensor exists.
Pairs on supports of their own bring a kernel each, (batch, d, d), and take the same functions.

Which update comes last matters. A column update sets v = q / (K^T u), after which

    T^T 1 = v * (K^T u) = q

holds exactly, after any number of iterations, converged or not, and for any cost. A read-out that uses only
T^T 1 (the paper's H_ot = P2(T^T 1), section 3.2) then equals P2(q): the plan has no influence on it and gets
no gradient. Ending on the row update makes T 1 = p exact instead, and T^T 1 differs from q by what is left to
converge: its limit is q too, so that a start nearer to the fixed point, or a gradient by implicit differentiation at
it, would give the column order's read-out, and not that of a number of iterations from u = 1. Read-outs that use the
plan itself (`Plan.push`, `Plan.arrivals`) do not have this weakness.

Sources: Cuturi, Sinkhorn distances (arXiv 1306.0895); Peyre and Cuturi, Computational optimal transport
(arXiv 1803.00567), sections 4.1-4.2; Feydy et al., Interpolating between optimal transport and MMD using Sinkhorn
divergences (arXiv 1810.08278).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LastUpdate = Literal["column", "row"]

# Scalings stay within exp(2 C / epsilon) * d of the marginals, so this keeps them finite in float32 without
# a log domain (which would need a (batch, d, d) tensor). exp(-40) = 4e-18 is far below float32's resolution.
MAX_EXPONENT = 40.0


@dataclass(frozen=True)
class Plan:
    """Transport plans T = diag(u) K diag(v) for a batch of pairs (p, q), never built as matrices.

    `u` and `v` are (..., d) in the kernel's dtype; `kernel` is (d, d), shared, or each pair's own, (..., d, d).
    `reached` is K^T u, (..., d), which the iterations have at hand.
    """

    u: Tensor
    v: Tensor
    kernel: Tensor
    reached: Tensor

    def column_marginal(self) -> Tensor:
        """T^T 1, (..., d): how much arrives at each point. Equals q after a column update."""
        return self.v * self.reached

    def push(self, mass: Tensor) -> Tensor:
        """Move other mass (..., d) as the plan moves its own: diag(T 1)^-1 T, transposed, times `mass`.

        This is the transition p_{t+n} = K_t^T p_t of the paper (section 2.2); the total of `mass` is kept.
        """
        return self.v * _columns(self.kernel, mass / _rows(self.kernel, self.v))

    def arrivals(self, values: Tensor) -> Tensor:
        """Mean of source values (..., d) over what arrives at each point: diag(T^T 1)^-1 T^T values."""
        return _columns(self.kernel, self.u * values) / self.reached


def sinkhorn(
    p: Tensor, q: Tensor, cost: Tensor, epsilon: float, iterations: int, last_update: LastUpdate = "row"
) -> Plan:
    """Plans between p and q (both (..., d), each summing to 1) that minimise <T, C> + epsilon KL(T || p q^T).

    The cost is shared, (d, d), or each pair's own, (..., d, d).

    Each iteration is one row update u = p / (K v) and one column update v = q / (K^T u), in the order that
    ends on `last_update`, from v = 1 (u = 1 when the column update comes first). Differentiable in p, q and
    the cost through every iteration; memory is O(batch d) per iteration.

    Computed in float32 (float64 if an input is float64) whatever the inputs are, autocast included. The cost must not
    be negative, p and q must each have some mass in every row; single entries may be zero.
    """
    return scaled(p, q, gibbs_kernel(_widest(cost, p, q)[0], epsilon), iterations, last_update)


def gibbs_kernel(cost: Tensor, epsilon: float) -> Tensor:
    """K = exp(-cost / epsilon), in float32 or wider. Exponents are capped at `MAX_EXPONENT`: dearer pairs cost as much
    as the cap.
    """
    return (_widest(cost)[0] / epsilon).clamp(max=MAX_EXPONENT).neg().exp()


def scaled(p: Tensor, q: Tensor, kernel: Tensor, iterations: int, last_update: LastUpdate = "row") -> Plan:
    """`sinkhorn` with a Gibbs kernel that is at hand."""
    with torch.autocast(p.device.type, enabled=False):
        p, q, kernel = _widest(p, q, kernel)
        p, q = torch.broadcast_tensors(p, q)
        if last_update == "row":
            u, v, reached = _scale(p, q, kernel, iterations, True)
        else:
            v, u, reached = _scale(q, p, kernel.mT, iterations, False)
        return Plan(u, v, kernel, reached)


def squared_distances(points: Tensor) -> Tensor:
    """Ground cost between points, (d, k) -> (d, d): squared Euclidean distances over their mean.

    Dividing by the mean over pairs of different points makes epsilon a pure number: at epsilon = 0.1 an
    average move is weighed by exp(-10), however long the points are. The diagonal is exactly zero.
    Differentiable; float32 or wider.
    """
    with torch.autocast(points.device.type, enabled=False):
        points = points.to(torch.promote_types(points.dtype, torch.float32))
        points = points - points.mean(0)  # distances do not change, cancellation gets smaller
        squares = points.square().sum(-1)
        distances = squares[:, None] + squares[None, :] - 2 * points @ points.T
        diagonal = torch.eye(len(points), dtype=torch.bool, device=points.device)
        distances = distances.clamp(min=0).masked_fill(diagonal, 0)
        pairs = max(len(points) * (len(points) - 1), 1)
        return distances / (distances.sum() / pairs).clamp(min=torch.finfo(points.dtype).tiny)


def sinkhorn_divergence(log_p: Tensor, log_q: Tensor, cost: Tensor, epsilon: float, iterations: int) -> Tensor:
    """OT(p, q) - OT(p, p) / 2 - OT(q, q) / 2 with the entropic cost OT of `sinkhorn`'s problem, (..., d) -> (...).

    Zero at p = q, which OT alone is not, and the transport cost itself as epsilon falls (Feydy et al., theorem 1
    and equation 3); under the 0/1 cost that is total variation. Worked out from dual potentials in the log domain
    with epsilon lowered from 1 over the first quarter of the iterations: scalings that start from 1 need about
    1 / (epsilon |log p_i / q_i|) iterations where p and q are alike, these a few.

    Differentiable in log_p and log_q by the envelope theorem: the potentials, held fixed, are the gradient, so
    nothing is unrolled, memory is one (..., d, d) tensor, and entries are bounded by the largest cost. The
    gradient is as exact as the potentials have converged. None flows to the cost.

    Args:
        log_p, log_q: each with exponentials that sum to 1; single entries may be -inf.
        cost: (d, d) or (..., d, d), symmetric, in [0, 1] or about that, zero on the diagonal.
        iterations: at least 1.
    """
    dtype = torch.promote_types(torch.promote_types(log_p.dtype, log_q.dtype), torch.float32)
    with torch.autocast(log_p.device.type, enabled=False):
        log_p, log_q, cost = log_p.to(dtype), log_q.to(dtype), cost.to(dtype)
        with torch.no_grad():
            both = torch.stack([log_p, log_q])
            f, g, own = torch.zeros_like(log_p), torch.zeros_like(log_q), torch.zeros_like(both)
            for iteration in range(1, iterations + 1):
                level = epsilon ** min(1.0, 4 * iteration / iterations)
                f = _soft_minimum(log_q, g, cost, level)
                g = _soft_minimum(log_p, f, cost, level)
                own = (own + _soft_minimum(both, own, cost, level)) / 2
        return (log_p.exp() * (f - own[0]) + log_q.exp() * (g - own[1])).sum(-1)


def _soft_minimum(log_weight: Tensor, potential: Tensor, cost: Tensor, epsilon: float) -> Tensor:
    """-epsilon log sum_j w_j exp((g_j - C_ij) / epsilon), (..., d): the best potential against a given one."""
    exponent = (log_weight + potential / epsilon).unsqueeze(-2) - cost / epsilon
    return -epsilon * exponent.logsumexp(-1)


def _scale(p: Tensor, q: Tensor, kernel: Tensor, iterations: int, once_more: bool) -> tuple[Tensor, Tensor, Tensor]:
    """u and v after iterations that end on the row update, and K^T u; or K v, of which u was made, instead.

    Its gradient is autograd's own: the same chain rule written out by hand took as long, as products with K are what
    takes the time.
    """
    reached = kernel.sum(-2).expand_as(q)  # u = 1
    for iteration in range(iterations):
        v = q / reached
        left = _rows(kernel, v)
        u = p / left
        if once_more or iteration + 1 < iterations:
            reached = _columns(kernel, u)
    return u, v, reached if once_more else left


def _rows(kernel: Tensor, v: Tensor) -> Tensor:
    """K v for a batch of v."""
    return v @ kernel.T if kernel.dim() == 2 else (kernel @ v.unsqueeze(-1)).squeeze(-1)


def _columns(kernel: Tensor, u: Tensor) -> Tensor:
    """K^T u for a batch of u."""
    return u @ kernel if kernel.dim() == 2 else (u.unsqueeze(-2) @ kernel).squeeze(-2)


def _widest(*tensors: Tensor) -> list[Tensor]:
    """All in the widest of their dtypes, float32 at least."""
    dtype = torch.float32
    for each in tensors:
        dtype = torch.promote_types(dtype, each.dtype)
    return [each.to(dtype) for each in tensors]
