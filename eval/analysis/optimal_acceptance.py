"""The greatest acceptance of any lossless rule, by optimal transport (Sun et al., SpecTr, arXiv 2310.15141), and what
rules in closed form reach of it.
"""

import torch
from torch import Tensor

# Nodes of the quadrature of draws without replacement; tanh-sinh from -3.2 to 3.2 is exact to about 1e-9 with them.
_NODES, _REACH = 96, 3.2


def optimal_acceptance(p: Tensor, q: Tensor, drafts: int, replacement: bool = True) -> Tensor:
    """The greatest chance of any lossless rule to emit one of `drafts` tokens drawn from q, (..., d) -> (...).

    A rule that emits y ~ p beside drafts X ~ Q is a coupling of the two; the best one moves as much mass as
    possible at no cost under c(X, y) = 0 where y is among X, else 1: a transport problem over d^K x d pairs
    (SpecTr, section 3). As a flow it is bounded by its cuts, of which the least is the optimum:

        1 + min over sets H of tokens of p(H) - Q(all drafts lie in H).

    Only sets of the tokens with the least p / q can attain it: Q(all in H) is q(H)^K for independent drafts, convex
    in q(H), so the minimum lies at an extreme point of the attainable (p(H), q(H)); without replacement by Hu et al.,
    Towards optimal multi-draft speculative decoding (arXiv 2502.18779). So d + 1 sets are enough. One draft gives
    1 - TV(p, q). Without replacement drafts arrive in the order of exponential clocks with rates q_i, so that Q is
    the chance that K clocks of H ring before any outside it: one integral over the time of the latter.

    Args:
        p, q: each summing to 1. Without replacement q needs `drafts` tokens above 0.
        replacement: independent drafts from q; False for drafts drawn one after the other, q being renormalised
            without what was drawn (what our drafters do).

    Returns:
        float64.
    """
    p, q = p.double(), q.double()
    order = torch.where(q > 0, p / q, torch.inf).argsort(-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    inside = q.cumsum(-1)
    together = inside**drafts if replacement or drafts == 1 else _drawn_together(q, drafts)
    return 1 + (p.cumsum(-1) - together).amin(-1).clamp(max=0)


def _drawn_together(q: Tensor, drafts: int) -> Tensor:
    """(..., d) -> (..., d): chance that so many draws without replacement lie among the first 1, 2, ..., d tokens."""
    outside = (q.flip(-1).cumsum(-1).flip(-1) - q).clamp(min=0)  # rates beyond each prefix
    x = torch.linspace(-_REACH, _REACH, _NODES, dtype=q.dtype, device=q.device)
    share = torch.sigmoid(torch.pi * x.sinh())  # tanh-sinh quadrature over the quantile of the first clock outside
    weight = share * torch.sigmoid(-torch.pi * x.sinh()) * torch.pi * x.cosh() * (2 * _REACH / (_NODES - 1))
    clock = torch.nn.functional.softplus(-torch.pi * x.sinh())  # -log share
    time = clock / outside.clamp(min=torch.finfo(q.dtype).tiny).unsqueeze(-1)
    rung = q.new_zeros(*q.shape, _NODES, drafts)  # chance that exactly so many of the prefix's clocks have rung
    rung[..., 0] = 1
    for token in range(q.shape[-1]):
        rings = -torch.expm1(-q[..., token, None, None] * time[..., token:, :]).unsqueeze(-1)
        of_prefix = rung[..., token:, :, :]  # prefixes that hold the token
        one_more = torch.nn.functional.pad(of_prefix, (1, -1))
        rung[..., token:, :, :] = of_prefix + rings * (one_more - of_prefix)
    together = ((1 - rung.sum(-1)) * weight).sum(-1)
    return torch.where(outside > 0, together, 1.0)


def one_drawn(p: Tensor, q: Tensor, drafts: int) -> Tensor:
    """The optimum where all drafts but one are the likeliest of q and one is drawn from the rest, (..., d) -> (...).

    The likeliest can always be emitted, the others as often as they are drawn: p(likeliest) + sum min(p, rest of q). No
    flow is larger, as no token has more, and rule "transport" is that flow (Hu et al., arXiv 2502.18779).
    """
    p, q = p.double(), q.double()
    sure = torch.zeros_like(q, dtype=torch.bool).scatter_(-1, q.topk(drafts - 1, -1).indices, True)
    rest = q.masked_fill(sure, 0.0)
    rest = rest / rest.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
    return torch.where(sure, p, torch.minimum(p, rest)).sum(-1)


def k_sequential(p: Tensor, q: Tensor, drafts: int) -> Tensor:
    """What SpecTr's k-sequential selection reaches for independent drafts, (..., d) -> (...).

    Draft after draft is accepted with chance min(1, p / (rho q)), each time b = sum min(p / rho, q) in all, so that x
    is emitted with chance min(q, p / rho) (1 - (1 - b)^K) / b; the least rho at which that is nowhere above p solves
    1 - (1 - b)^K = rho b, and the token is drawn from what is left of p otherwise (SpecTr, section 4).
    """
    rho = _least_rho(p.double(), q.double(), drafts)
    accepted = torch.minimum(p / rho, q.double()).sum(-1)
    return 1 - (1 - accepted) ** drafts


def _least_rho(p: Tensor, q: Tensor, drafts: int) -> Tensor:
    """(..., d) -> (..., 1), by bisection between 1 and the number of drafts."""
    low, high = torch.ones_like(p[..., :1]), torch.full_like(p[..., :1], drafts)
    for _ in range(52):
        rho = (low + high) / 2
        accepted = torch.minimum(p / rho, q).sum(-1, keepdim=True)
        too_low = 1 - (1 - accepted) ** drafts > rho * accepted
        low, high = torch.where(too_low, rho, low), torch.where(too_low, high, rho)
    return high
