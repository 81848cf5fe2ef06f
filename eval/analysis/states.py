"""Hidden states: how similar successive ones are, and whether that bounds the cost of transport between what they
predict."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ot
import torch
import torch.nn.functional as F
from torch import Tensor

from eval.analysis.texts import answer_positions
from shape.errors import DataError
from shape.features.store import Stored
from shape.target.model import Target

PERCENTILES = (5, 25, 50, 75, 95)
Progress = Callable[[], Any]


@dataclass(frozen=True)
class Similarity:
    """Cosines at one lag; None is for states of different texts.

    Attributes:
        share: with cosine at least 0.5.
    """

    lag: int | None
    pairs: int
    share: float
    mean: float
    percentiles: dict[str, float]


def similarity(texts: Sequence[Stored], lags: Sequence[int], seed: int) -> tuple[list[Similarity], dict[str, Tensor]]:
    """Over all positions, not only the drawn ones. Also the cosines themselves, by name."""
    found: dict[int | None, Tensor] = {}
    for lag in lags:
        places = [answer_positions(text, lag + 1) for text in texts]
        pairs = [(text.hidden[at], text.hidden[at + lag]) for text, at in zip(texts, places, strict=True)]
        found[lag] = torch.cat([F.cosine_similarity(one, other, dim=-1) for one, other in pairs])
    places = [answer_positions(text, 1) for text in texts]
    states = torch.cat([text.hidden[at] for text, at in zip(texts, places, strict=True)])
    owner = torch.cat([torch.full_like(at, number) for number, at in enumerate(places)])
    other = torch.randperm(len(states), generator=torch.Generator().manual_seed(seed))
    apart = owner != owner[other]
    found[None] = F.cosine_similarity(states[apart], states[other[apart]], dim=-1)
    if not all(len(cosines) for cosines in found.values()):
        raise DataError(f"the answers are too few or too short for lags {list(lags)}; give more, or smaller lags")
    rows = [
        Similarity(
            lag,
            len(cosines),
            float((cosines >= 0.5).float().mean()),
            float(cosines.mean()),
            {str(at): float(np.percentile(cosines.numpy(), at)) for at in PERCENTILES},
        )
        for lag, cosines in found.items()
    ]
    return rows, {"unrelated" if lag is None else f"lag {lag}": cosines for lag, cosines in found.items()}


@dataclass(frozen=True)
class Bound:
    """W(mu_t, mu_{t+n}) <= L sqrt(1 - cos(h_t, h_{t+n})).

    Attributes:
        ground: "distance" for |E_i - E_j|, "squared distance" for its square (the paper's).
        lag: None is for all lags together.
        kept: mean mass of a distribution on its truncated support.
        distance: mean W. least: the smallest L.
        tightness: mean of W over the bound with that L.
        empty: share of pairs at which the bound is no less than the largest ground cost between their tokens, which W
            cannot exceed anyway.
        correlation: of W and sqrt(1 - cos). share_explained is its square.
    """

    ground: str
    lag: int | None
    pairs: int
    kept: float
    distance: float
    least: float
    tightness: float
    empty: float
    correlation: float


def distances(
    target: Target, states: Tensor, lags: Sequence[int], support: int, progress: Progress
) -> tuple[list[Bound], dict[str, Tensor]]:
    """Exact transport between truncated distributions. Also, per pair, sqrt(1 - cos) and W by ground cost."""
    logits = target.logits(states.to(target.device, target.dtype)).double()
    mass, tokens = (part.cpu() for part in logits.softmax(-1).topk(min(support, logits.shape[-1]), -1))
    kept, mass = mass.sum(-1), mass / mass.sum(-1, keepdim=True)
    rows = target.output_rows()
    values: list[list[float]] = []
    for number in range(len(states)):
        points = rows[tokens[number].to(rows.device)].double().cpu()
        for lag in lags:
            ground = torch.cdist(points[0], points[lag])
            root = float((1 - F.cosine_similarity(states[number, 0], states[number, lag], dim=0)).clamp(min=0).sqrt())
            moved = [
                ot.emd2(mass[number, 0].numpy(), mass[number, lag].numpy(), cost.numpy(), numItermax=1_000_000)
                for cost in (ground, ground.square())
            ]
            farthest = float(ground.max())
            values.append([lag, root, float(kept[number, [0, lag]].mean()), *moved, farthest, farthest**2])
        progress()
    table = torch.tensor(values, dtype=torch.float64)
    found = []
    for column, ground_name in enumerate(("distance", "squared distance")):
        for some_lag in (None, *lags):
            some = table if some_lag is None else table[table[:, 0] == some_lag]
            roots, costs, most = some[:, 1], some[:, 3 + column], some[:, 5 + column]
            least = float((costs / roots.clamp(min=1e-6)).max())
            bound = least * roots
            found.append(
                Bound(
                    ground_name,
                    some_lag,
                    len(some),
                    float(some[:, 2].mean()),
                    float(costs.mean()),
                    least,
                    float((costs / bound.clamp(min=1e-12)).mean()),
                    float((bound >= most).double().mean()),
                    correlation(costs, roots),
                )
            )
    return found, {"root": table[:, 1], "distance": table[:, 3], "squared distance": table[:, 4]}


def correlation(one: Tensor, other: Tensor) -> float:
    """Pearson's; 0 where one of them does not vary."""
    both = torch.stack([one.double(), other.double()])
    return float(torch.corrcoef(both)[0, 1].nan_to_num(0.0)) if both.shape[1] > 1 else 0.0
