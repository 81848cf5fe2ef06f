"""The transport loss beside KL and total variation, by value and gradient."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eval.analysis.states import PERCENTILES, correlation
from shape.training.losses import kl, log_probabilities, mistake_costs, sinkhorn, total_variation

SCALES = (0.1, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class LossFigures:
    """One loss on real pairs of distributions.

    Attributes:
        mean: its mean value. correlation: with the acceptance of one draft, 1 - TV, over positions.
        alignment: mean cosine of its gradient with respect to the logits and those of other losses. That with total
            variation is the gain of acceptance per length of a small step along its gradient, as a share of the most
            that any step of that length can gain.
    """

    name: str
    mean: float
    correlation: float
    alignment: dict[str, float]


def loss_family(
    predicted: Tensor, target_logits: Tensor, embeddings: Tensor, support: int
) -> tuple[list[LossFigures], dict[str, float]]:
    """KL, total variation and transport losses on logits (P, V), by name, and how far apart likely tokens lie.

    The latter are percentiles of |E_i - E_j|^2 between the target's likeliest tokens at each position, in units of the
    mean squared distance of all tokens: what a scale has to be compared with.
    """
    transport = partial(sinkhorn, embeddings=embeddings, support=support)
    family: dict[str, Callable[..., Tensor]] = {"KL": kl, "total variation": total_variation}
    family |= {f"transport, s = {scale:g}": partial(transport, scale=scale) for scale in SCALES}
    values, gradients = {}, {}
    for name, loss in family.items():
        logits = predicted.clone().requires_grad_()
        value = loss(log_probabilities(logits), log_probabilities(target_logits))
        (gradients[name],) = torch.autograd.grad(value.sum(), logits)
        values[name] = value.detach()
    acceptance = 1 - values["total variation"]
    rows = [
        LossFigures(
            name,
            float(values[name].mean()),
            correlation(values[name], acceptance),
            {other: _alignment(gradients[name], gradients[other]) for other in family},
        )
        for name in family
    ]
    far = 1000.0
    tokens = target_logits.topk(min(support, target_logits.shape[-1]), -1).indices
    costs = far * mistake_costs(embeddings, tokens, far)[:, :-1, :-1]
    above = torch.ones(costs.shape[1:], dtype=torch.bool, device=costs.device).triu(1)
    apart = costs[:, above].flatten().cpu().numpy()
    return rows, {str(at): float(np.percentile(apart, at)) for at in PERCENTILES} if apart.size else {}


def _alignment(one: Tensor, other: Tensor) -> float:
    """Mean cosine where neither vanishes."""
    there = (one.norm(dim=-1) > 1e-7) & (other.norm(dim=-1) > 1e-7)
    return float(F.cosine_similarity(one[there], other[there], dim=-1).mean().nan_to_num(0.0))
