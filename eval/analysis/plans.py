"""Entropic transport plans: what they add to the refinement of predictions, and how far they carry p_t to p_{t+n}."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.analysis.texts import Predictions, common_support, unrolled
from shape.evaluation.doctor import changed
from shape.networks.base import Predictor
from shape.networks.teacher_forcing import Reader
from shape.networks.transport import Plan, squared_distances
from shape.networks.transport import sinkhorn as entropic_plan
from shape.target.model import Target
from shape.training.losses import log_probabilities, total_variation

ITERATIONS = (1, 2, 5, 10, 20, 50, 100)
MANY = 1000


@dataclass(frozen=True)
class ReadOut:
    """One way to read a refined prediction, compared with the predictor's own.

    Attributes:
        changed: mean relative change of the predicted state. drafts: share of best drafts that are other tokens.
        agreement: share of best drafts that are the target's best token. acceptance: mean 1 - TV.
        agreement_gain, acceptance_gain: these less the own read-out's, each with its standard error over positions.
    """

    name: str
    positions: int
    changed: float
    drafts: float
    agreement: float
    agreement_gain: tuple[float, float]
    acceptance: float
    acceptance_gain: tuple[float, float]


@torch.no_grad()
def read_outs(predictor: Predictor, target: Target, found: Predictions) -> list[ReadOut]:
    """The predictor's own read-out first; all steps together."""
    config = predictor.config
    own = f"{config.refinement_last_update} last, {config.refinement_iterations} iterations (its own)"
    variants: dict[str, dict[str, Any]] = {
        own: {},
        f"row last, {MANY} iterations": {"refinement_last_update": "row", "refinement_iterations": MANY},
        "column last: P2 softmax(P1 h)": {"refinement_last_update": "column"},
        "no refinement: alpha 0": {"refinement_alpha": 0.0},
    }
    mask, reader = found.mask, Reader(predictor, target)
    true = reader.frozen(found.true).float()[mask]
    best = target.logits(found.true.to(target.dtype)).argmax(-1)[mask]
    vocabulary = predictor.draft_vocabulary
    rows: list[ReadOut] = []
    reference = None
    for name, changes in variants.items():
        states = unrolled(changed(predictor, **changes), found.read)
        logits = reader(states, found.tokens, found.embeddings).float()[mask]
        drafts = logits.argmax(-1)
        drafts = drafts if vocabulary is None else vocabulary[drafts]
        agrees = (drafts == best).double()
        states, accepted = states[mask], 1 - total_variation(log_probabilities(logits), log_probabilities(true))
        if reference is None:
            reference = states, drafts, agrees, accepted
        rows.append(
            ReadOut(
                name,
                len(states),
                float(((states - reference[0]).norm(dim=-1) / reference[0].norm(dim=-1)).mean()),
                float((drafts != reference[1]).double().mean()),
                float(agrees.mean()),
                _with_error(agrees - reference[2]),
                float(accepted.mean()),
                _with_error(accepted - reference[3]),
            )
        )
    return rows


def _with_error(values: Tensor) -> tuple[float, float]:
    """Mean and its standard error."""
    return float(values.mean()), float(values.std() / len(values) ** 0.5) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class Transition:
    """Total variation of K_t^T p_t and p_{t+n}, by the update that comes last; mean and 95 % quantile over pairs."""

    last_update: str
    iterations: int
    mean: float
    high: float


def transitions(
    target: Target, states: Tensor, lag: int, support: int, epsilon: float
) -> tuple[list[Transition], float, float]:
    """Also the mean total variation of p_t and p_{t+n} themselves, and the mean mass kept on the common support."""
    both = target.logits(states[:, [0, lag]].to(target.device, target.dtype)).double().softmax(-1)
    p, q, tokens, kept = common_support(both[:, 0], both[:, 1], support)
    embeddings = target.output_rows()
    cost = torch.stack([squared_distances(embeddings[some.to(embeddings.device)].double()) for some in tokens])
    cost = cost.to(p.device)
    found = []
    for last_update in ("row", "column"):
        for iterations in ITERATIONS:
            plan: Plan = entropic_plan(p, q, cost, epsilon, iterations, last_update)  # type: ignore[arg-type]
            error = (plan.push(p) - q).abs().sum(-1) / 2
            found.append(
                Transition(last_update, iterations, float(error.mean()), float(np.percentile(error.cpu().numpy(), 95)))
            )
    return found, float((p - q).abs().sum(-1).mean() / 2), kept
