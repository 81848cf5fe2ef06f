"""What a predictor is trained for: pure functions per position, and their weighted sum over unrolled steps.

Functions on states take `(..., H)`, functions on logits `(..., V)`; all return `(...)`, one value per
position, computed in float32 (float64 for float64 inputs). p is the target's distribution, q the predictor's,
both softmaxes of logits, which have to be finite. Nothing flows back into the target's side unless its
tensors ask.

Memory: a vocabulary-sized float32 tensor is the unit that matters (4,096 positions of 128k tokens are 2 GB).
Each function makes two of them (log p, log q) and at most two more; `weighted_loss` makes log p and log q
once for all terms.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shape.errors import ConfigError
from shape.networks.transport import sinkhorn_divergence

# Transport costs are made for so many positions at once: their embeddings, not their costs, are what takes memory.
_POSITIONS = 256
_ROWS_SAMPLE = 1024


def mse(predicted: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of a state, (..., H) -> (...): the paper's regression loss (section 3.2.2)."""
    return F.mse_loss(_widen(predicted), _widen(target), reduction="none").mean(-1)


def smooth_l1(predicted: Tensor, target: Tensor) -> Tensor:
    """Huber loss (threshold 1) of a state, (..., H) -> (...): EAGLE's regression loss (arXiv 2401.15077)."""
    return F.smooth_l1_loss(_widen(predicted), _widen(target), reduction="none").mean(-1)


def soft_cross_entropy(predicted_logits: Tensor, target_logits: Tensor) -> Tensor:
    """-sum_i p_i log q_i, in nats: the paper's second loss (3.2.2). It is least, H(p), at q = p."""
    return _soft_cross_entropy(_log_softmax(predicted_logits), _log_softmax(target_logits))


def kl(predicted_logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL(p || q) = sum_i p_i (log p_i - log q_i), in nats: `soft_cross_entropy` less H(p), same gradient."""
    return _kl(_log_softmax(predicted_logits), _log_softmax(target_logits))


def total_variation(predicted_logits: Tensor, target_logits: Tensor) -> Tensor:
    """1/2 sum_i |p_i - q_i| = 1 - sum_i min(p_i, q_i), in [0, 1].

    One less it is the probability that one token drawn from q is accepted by speculative sampling
    (arXiv 2211.17192, 3.2), the best any rule can do with one draft. Its gradient fades where p and q hardly
    overlap; `negative_log_acceptance` keeps it.
    """
    return _total_variation(_log_softmax(predicted_logits), _log_softmax(target_logits))


def negative_log_acceptance(predicted_logits: Tensor, target_logits: Tensor) -> Tensor:
    """-log sum_i min(p_i, q_i), in nats (LK losses, arXiv 2602.23881).

    Its gradient is that of total variation divided by the acceptance probability. Over the steps of a chain
    these terms add up to the negative log probability that the whole chain is accepted. Worked out from
    logarithms, so that it stays finite and keeps its gradient where the overlap underflows.
    """
    return _negative_log_acceptance(_log_softmax(predicted_logits), _log_softmax(target_logits))


def sinkhorn(
    predicted_logits: Tensor,
    target_logits: Tensor,
    embeddings: Tensor,
    scale: float = 1.0,
    epsilon: float = 0.1,
    support: int = 16,
    iterations: int = 10,
) -> Tensor:
    """Sinkhorn divergence of p and q where it costs less to mistake a token for one of similar meaning.

    Mass moves from token i to token j at the cost min(1, |E_i - E_j|^2 / s), s in units of the mean squared distance
    between tokens' output embeddings E. As s falls all mistakes cost 1, and the loss is total variation, that is the
    chance of refusal (up to `epsilon` and the support); as it grows the loss becomes the paper's transport between
    mu_t = sum_i p_t(i) delta_{E_i} (section 2.2), over its cost s.

    The support is the target's likeliest tokens and a bucket for the rest, one unit away from each of them. Nothing
    is renormalised: mass that q puts elsewhere is in the bucket and pulled out of it, each logit having a gradient.
    Only what p and q have in common there is free, so that the limit lies below total variation by at most the
    lesser of their rests. (A union of both supports would need a size for each position, and renormalised supports
    would hide exactly the mass that is wrong.)

    Args:
        embeddings: (V, H), row i for logit i; no gradient flows to them.
        scale: s. epsilon, iterations: of `shape.networks.transport.sinkhorn_divergence`.
        support: tokens kept, at most V.
    """
    logs = _log_softmax(predicted_logits), _log_softmax(target_logits)
    return _sinkhorn(*logs, embeddings, scale, epsilon, support, iterations)


@dataclass(frozen=True)
class Losses:
    """Weights of the terms, and the factor by which each further step counts less.

    Attributes:
        mse: weight of the mean squared error of states (the paper's).
        smooth_l1: weight of the Huber loss of states (EAGLE's).
        soft_cross_entropy: weight of the cross-entropy of the target's distribution (the paper's).
        kl: weight of the Kullback-Leibler divergence, which has the same gradient.
        total_variation: weight of the distance that one minus acceptance is.
        negative_log_acceptance: weight of the logarithm of acceptance.
        sinkhorn: weight of the transport loss; off by default.
        step_decay: factor by which each further step counts less; 1 counts all alike.
        sinkhorn_scale: squared distance at which a mistake costs all, in units of the mean one.
        sinkhorn_epsilon: entropic regularisation of the transport loss.
        sinkhorn_support: the target's likeliest tokens, between which mass is moved.
        sinkhorn_iterations: of the transport loss.

    Raises:
        ConfigError: a negative weight, no weight at all, or a parameter out of range.
    """

    mse: float = 0.0
    smooth_l1: float = 0.5
    soft_cross_entropy: float = 1.0
    kl: float = 0.0
    total_variation: float = 0.0
    negative_log_acceptance: float = 0.0
    sinkhorn: float = 0.0
    step_decay: float = 0.8
    sinkhorn_scale: float = 1.0
    sinkhorn_epsilon: float = 0.1
    sinkhorn_support: int = 16
    sinkhorn_iterations: int = 10

    def __post_init__(self) -> None:
        weights = {name: getattr(self, name) for name in (*_ON_STATES, *_ON_LOGITS, "sinkhorn")}
        for name, weight in weights.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise ConfigError(f"the weight of the loss {name} is {weight}: it has to be 0 or more")
        if not any(weights.values()):
            raise ConfigError(f"all losses have weight 0: give one of {', '.join(weights)} a positive weight")
        if not 0 < self.step_decay <= 1:
            raise ConfigError(f"step_decay is {self.step_decay}: it has to be greater than 0 and at most 1")
        for name in ("sinkhorn_scale", "sinkhorn_epsilon"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0):
                raise ConfigError(f"{name} is {value}: it has to be greater than 0")
        for name in ("sinkhorn_support", "sinkhorn_iterations"):
            if (count := getattr(self, name)) < 1:
                raise ConfigError(f"{name} is {count}: it has to be 1 or more")

    @property
    def on_states(self) -> dict[str, float]:
        """The positive weights of losses that compare hidden states."""
        return self._positive(*_ON_STATES)

    @property
    def on_logits(self) -> dict[str, float]:
        """The positive weights of losses that compare distributions: without any, no logits are needed."""
        return self._positive(*_ON_LOGITS, "sinkhorn")

    def _positive(self, *names: str) -> dict[str, float]:
        return {name: getattr(self, name) for name in names if getattr(self, name) > 0}


def supervised(mask: Tensor) -> tuple[Tensor, ...]:
    """Where a mask (..., S) is True, step by step, as an index into (..., S): the last of its parts is each one's step.

    What stands elsewhere never enters a loss, not even as NaN, and costs no logits.
    """
    step, *places = mask.movedim(-1, 0).nonzero(as_tuple=True)
    return (*places, step)


def weighted_loss(
    losses: Losses,
    predicted: Tensor,
    target: Tensor,
    predicted_logits: Tensor | None,
    target_logits: Tensor | None,
    steps: Tensor,
    embeddings: Tensor | None = None,
    whole: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The training loss over unrolled steps, and its parts; of a portion of a batch, what it adds to the batch's.

    Args:
        losses: the weights.
        predicted, target: (N, H) states of supervised steps (`supervised`).
        predicted_logits, target_logits: (N, V); None where `losses.on_logits` is empty.
        steps: (N,) int64, the step n = 0..S-1 that each one is.
        embeddings: (V, H) rows of the output embedding that the logits are for; only `losses.sinkhorn` asks for them.
        whole: (M,) int64, `steps` of the whole batch of which these are a portion; None where they are all of it.

    Returns:
        The scalar sum_k weight_k mean_k, and every mean_k detached, by name: mean_k is the mean of term k over the
        whole batch, step n counting `step_decay ** n`, as far as these states go. With N = 0 all are 0.

    Raises:
        ValueError: logits or embeddings are None but needed.
    """
    every = losses.step_decay ** (steps if whole is None else whole).float()
    weight = losses.step_decay ** steps.float() / every.sum().clamp(min=torch.finfo(every.dtype).tiny)
    values = {name: _ON_STATES[name](predicted, target) for name in losses.on_states}
    if losses.on_logits:
        if predicted_logits is None or target_logits is None:
            raise ValueError(f"the losses {', '.join(losses.on_logits)} need logits")
        logs = _log_softmax(predicted_logits), _log_softmax(target_logits)
        values |= {name: _ON_LOGITS[name](*logs) for name in losses.on_logits if name in _ON_LOGITS}
        if losses.sinkhorn > 0:
            if embeddings is None:
                raise ValueError("the loss sinkhorn needs the rows of the output embedding")
            values["sinkhorn"] = _sinkhorn(
                *logs,
                embeddings,
                losses.sinkhorn_scale,
                losses.sinkhorn_epsilon,
                losses.sinkhorn_support,
                losses.sinkhorn_iterations,
            )
    means = {name: (value * weight).sum() for name, value in values.items()}
    total = torch.stack([getattr(losses, name) * mean for name, mean in means.items()]).sum()
    return total, {name: mean.detach() for name, mean in means.items()}


def _soft_cross_entropy(log_q: Tensor, log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_q).sum(-1)  # not a dot product: autocast would take that to bfloat16


def _kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _negative_log_acceptance(log_q: Tensor, log_p: Tensor) -> Tensor:
    return -torch.minimum(log_p, log_q).logsumexp(-1)


def _total_variation(log_q: Tensor, log_p: Tensor) -> Tensor:
    # min(p, q) sums to one up to rounding, hence the clamp
    return (1 - torch.minimum(log_p, log_q).exp().sum(-1)).clamp(0, 1)


def _sinkhorn(
    log_q: Tensor, log_p: Tensor, embeddings: Tensor, scale: float, epsilon: float, support: int, iterations: int
) -> Tensor:
    with torch.no_grad():
        tokens = log_p.topk(min(support, log_p.shape[-1]), -1).indices
        cost = mistake_costs(embeddings, tokens, scale)
    p, q = _with_rest(log_p, tokens), _with_rest(log_q, tokens)
    return sinkhorn_divergence(p, q, cost[..., : p.shape[-1], : p.shape[-1]], epsilon, iterations)


def _with_rest(logs: Tensor, tokens: Tensor) -> Tensor:
    """(..., V) -> (..., K + 1): log-probabilities of some tokens, and of all others together if there are any."""
    kept = logs.gather(-1, tokens)
    if tokens.shape[-1] == logs.shape[-1]:
        return kept
    rest = logs.scatter(-1, tokens, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([kept, rest], dim=-1)


def mistake_costs(embeddings: Tensor, tokens: Tensor, scale: float) -> Tensor:
    """min(1, |E_i - E_j|^2 / s) between tokens (..., K), and 1 to a bucket behind them: (..., K + 1, K + 1).

    s is `scale` times the mean squared distance between rows of `embeddings`, (V, H), evenly sampled.
    """
    with torch.autocast(embeddings.device.type, enabled=False):
        sample = _widen(embeddings[:: max(1, len(embeddings) // _ROWS_SAMPLE)])
        centre = sample.mean(0)
        unit = 2 * (sample - centre).square().sum(-1).mean()  # the mean squared distance of two rows
        apart = 1 - torch.eye(tokens.shape[-1] + 1, dtype=sample.dtype, device=tokens.device)
        costs = apart.repeat(*tokens.shape[:-1], 1, 1)
        flat = tokens.reshape(-1, tokens.shape[-1]), costs.view(-1, *apart.shape)
        for some, into in zip(*(tensor.split(_POSITIONS) for tensor in flat), strict=True):
            points = _widen(embeddings[some]) - centre
            squares = points.square().sum(-1)
            distances = squares.unsqueeze(-1) + squares.unsqueeze(-2) - 2 * points @ points.mT
            into[:, :-1, :-1] *= (distances / (scale * unit)).clamp(0, 1)
    return costs


_ON_STATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mse": mse, "smooth_l1": smooth_l1}
_ON_LOGITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "soft_cross_entropy": _soft_cross_entropy,
    "kl": _kl,
    "total_variation": _total_variation,
    "negative_log_acceptance": _negative_log_acceptance,
}


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
