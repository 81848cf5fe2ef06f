"""What a predictor is trained for: pure functions per position, and their weighted sum over unrolled steps.

Functions on states take `(..., H)`; functions on distributions take log-probabilities `(..., V)` of the predictor, q,
and of the target, p (`log_probabilities`). All return `(...)`, one value per position, computed in float32 (float64 for
float64 inputs). Nothing flows back into the target's side unless its tensors ask.

Memory: a vocabulary-sized float32 tensor is the unit that matters (4,096 positions of 128k tokens are 2 GB).
`weighted_loss` makes log p and log q once for all terms, each of which makes at most two more.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from shape.networks.layers import SelectorMarkov
from shape.networks.transport import sinkhorn_divergence
from shape.training.options import Losses

# Transport costs are made for so many positions at once: their embeddings, not their costs, are what takes memory.
_POSITIONS = 256
_EMBEDDINGS_SAMPLE = 1024


def mse(predicted: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of a state, (..., H) -> (...): `squared_norm` over H."""
    return F.mse_loss(_widen(predicted), _widen(target), reduction="none").mean(-1)


def squared_norm(predicted: Tensor, target: Tensor) -> Tensor:
    """|h' - h|^2 of a state, (..., H) -> (...): the paper's regression loss (section 3.2.2)."""
    return F.mse_loss(_widen(predicted), _widen(target), reduction="none").sum(-1)


def smooth_l1(predicted: Tensor, target: Tensor) -> Tensor:
    """Huber loss (threshold 1) of a state, (..., H) -> (...): EAGLE's regression loss (arXiv 2401.15077)."""
    return F.smooth_l1_loss(_widen(predicted), _widen(target), reduction="none").mean(-1)


def log_probabilities(logits: Tensor) -> Tensor:
    """log softmax over the last dimension, in float32 at least; logits have to be finite."""
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def soft_cross_entropy(log_q: Tensor, log_p: Tensor) -> Tensor:
    """-sum_i p_i log q_i, in nats: the paper's second loss (3.2.2). It is least, H(p), at q = p."""
    return -(log_p.exp() * log_q).sum(-1)  # not a dot product: autocast would take that to bfloat16


def kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """KL(p || q) = sum_i p_i (log p_i - log q_i), in nats: `soft_cross_entropy` less H(p), same gradient."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def total_variation(log_q: Tensor, log_p: Tensor) -> Tensor:
    """1/2 sum_i |p_i - q_i| = 1 - sum_i min(p_i, q_i), in [0, 1].

    One less it is the probability that one token drawn from q is accepted by speculative sampling
    (arXiv 2211.17192, 3.2), the best any rule can do with one draft. Its gradient fades where p and q hardly
    overlap; `negative_log_acceptance` keeps it.
    """
    return (1 - torch.minimum(log_p, log_q).exp().sum(-1)).clamp(0, 1)  # min(p, q) sums to one up to rounding


def negative_log_acceptance(log_q: Tensor, log_p: Tensor) -> Tensor:
    """-log sum_i min(p_i, q_i), in nats (LK losses, arXiv 2602.23881).

    Its gradient is that of total variation divided by the acceptance probability. Along a text these terms add up to
    the negative log probability that a draft of one token is accepted at each of its steps; for a whole chain, whose
    later steps may lie behind other tokens, that holds where acceptance does not depend on the path. Worked out from
    logarithms, so that it stays finite and keeps its gradient where the overlap underflows.
    """
    return -torch.minimum(log_p, log_q).logsumexp(-1)


def sinkhorn(
    log_q: Tensor,
    log_p: Tensor,
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
        sample = _widen(embeddings[:: max(1, len(embeddings) // _EMBEDDINGS_SAMPLE)])
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


def supervised(mask: Tensor) -> tuple[Tensor, ...]:
    """Where a mask (..., S) is True, step by step, as an index into (..., S): the last of its parts is each one's step.

    What is elsewhere never enters a loss, not even as NaN, and costs no logits.
    """
    step, *positions = mask.movedim(-1, 0).nonzero(as_tuple=True)
    return (*positions, step)


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
        whole: scalar, the `step_sum` of the whole batch of which these are a portion; None where they are all of it.

    Returns:
        The scalar sum_k weight_k mean_k, and every mean_k detached, by name: mean_k is the mean of term k over the
        whole batch, step n counting `step_decay ** n`, as far as these states go. The divisor is that of `whole`: where
        some of the batch's supervised steps are not among the states, as those whose target cannot be drafted, they
        count as 0, so that means of predictors with different draft vocabularies do not compare. With N = 0 all are 0.

    Raises:
        ValueError: logits or embeddings are None but needed.
    """
    weight = _step_weights(losses, steps, whole)
    values = {name: _ON_STATES[name](predicted, target) for name in losses.on_states}
    if losses.on_logits:
        if predicted_logits is None or target_logits is None:
            raise ValueError(f"the losses {', '.join(losses.on_logits)} need logits")
        logs = log_probabilities(predicted_logits), log_probabilities(target_logits)
        values |= {name: _ON_LOGITS[name](*logs) for name in losses.on_logits if name in _ON_LOGITS}
        if losses.sinkhorn > 0:
            if embeddings is None:
                raise ValueError("the loss sinkhorn needs the rows of the output embedding")
            values["sinkhorn"] = sinkhorn(
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


def agreement_loss(
    estimate: Tensor, predicted_logits: Tensor, target_logits: Tensor, count: int, draftable: Tensor | None = None
) -> Tensor:
    """Cross-entropy of estimates, as logits (N,), that the best draft is the target's best token, over `count`.

    Args:
        draftable: (N,) bool, where the target's best token is in the draft vocabulary, which both logits are of; None
            where that has all tokens.
    """
    agree = predicted_logits.argmax(-1) == target_logits.argmax(-1)
    if draftable is not None:
        agree = agree & draftable
    return F.binary_cross_entropy_with_logits(estimate.float(), agree.float(), reduction="sum") / max(count, 1)


def acceptance_loss(
    losses: Losses,
    estimate: Tensor,
    predicted_logits: Tensor,
    target_logits: Tensor,
    steps: Tensor,
    whole: Tensor | None = None,
    log_share: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of estimates, as logits (N,), of the probability 1 - TV that rejection sampling accepts a draft.

    DSpark's loss of its confidence head: steps count as in `weighted_loss`, whose other arguments these are.

    Args:
        log_share: (N,), the logarithm of the target's probability of the draft vocabulary, which both logits are of;
            None where that has all tokens.
    """
    with torch.no_grad():
        predicted, true = log_probabilities(predicted_logits), log_probabilities(target_logits)
        if log_share is not None:
            true = true + log_share.to(true.dtype)[:, None]
        accepted = torch.minimum(predicted, true).exp().sum(-1)
    each = F.binary_cross_entropy_with_logits(estimate.to(accepted.dtype), accepted, reduction="none")
    return (each * _step_weights(losses, steps, whole)).sum()


def selector_loss(
    losses: Losses,
    selector: SelectorMarkov,
    read: Tensor,
    predicted_logits: Tensor,
    target_logits: Tensor,
    steps: Tensor,
    whole: Tensor | None = None,
) -> Tensor:
    """Cross-entropy among a selector's candidates, whose label is the target's likeliest token; where that is no
    candidate, it takes the last one's place.

    DFlash2's loss of its candidate selector, as speculators 0.9 has it: steps count as in `weighted_loss`, whose other
    arguments these are.

    Args:
        read: (N, rank), what the selector makes of the tokens before and the states.
    """
    best, chosen = target_logits.argmax(-1, keepdim=True), predicted_logits.topk(selector.candidates).indices
    missing = (chosen != best).all(-1, keepdim=True)
    chosen = torch.cat([chosen[:, :-1], torch.where(missing, best, chosen[:, -1:])], dim=-1)
    scores = _widen(predicted_logits.gather(-1, chosen)) + selector.among(read, chosen)
    each = F.cross_entropy(scores, (chosen == best).int().argmax(-1), reduction="none")
    return (each * _step_weights(losses, steps, whole)).sum()


def step_sum(losses: Losses, counts: Tensor) -> Tensor:
    """What all steps of a batch count together, a scalar; of step n there are counts[n], (S,) int64."""
    return (losses.step_decay ** torch.arange(len(counts)) * counts).sum()


def _step_weights(losses: Losses, steps: Tensor, whole: Tensor | None) -> Tensor:
    """(N,): step n counts `step_decay ** n`, as a share of the whole batch's."""
    weights = losses.step_decay ** steps.float()
    whole = weights.sum() if whole is None else whole
    return weights / whole.clamp(min=torch.finfo(weights.dtype).tiny)


_ON_STATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": mse,
    "squared_norm": squared_norm,
    "smooth_l1": smooth_l1,
}
_ON_LOGITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "soft_cross_entropy": soft_cross_entropy,
    "kl": kl,
    "total_variation": total_variation,
    "negative_log_acceptance": negative_log_acceptance,
}


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
