"""The transport optimum of acceptance beside what the rules of this package reach."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from eval.analysis.optimal_acceptance import k_sequential, one_drawn, optimal_acceptance
from eval.analysis.states import Progress
from shape.verification.acceptance import match, reject_in_turn
from shape.verification.noise import gumbel, sequence_keys, token_hashes
from shape.verification.tree import TokenTree

DRAFTS = (1, 2, 4)
_CLOSED: dict[str, Callable[..., Tensor]] = {
    "independent": optimal_acceptance, "without_replacement": partial(optimal_acceptance, replacement=False),
    "one_drawn": one_drawn, "k_sequential": k_sequential,
}  # fmt: skip


@dataclass(frozen=True)
class Acceptance:
    """Mean chances that one of so many drafts is emitted, at depth 1 and temperature 1.

    Attributes:
        independent: optimum for drafts drawn independently from q (SpecTr's).
        without_replacement: optimum for drafts drawn from q one after the other without replacement (our drafters').
        one_drawn: optimum for the likeliest tokens of q beside one that is drawn from the rest, which rule `transport`
            reaches.
        likeliest: for the likeliest tokens of q, not drawn: what any lossless rule reaches, the sum of their p.
        k_sequential: what SpecTr's k-sequential selection reaches for independent drafts.
        match, rejection: what these rules reach for drafts without replacement, and `error` the standard error of both.
    """

    drafts: int
    independent: float
    without_replacement: float
    one_drawn: float
    likeliest: float
    k_sequential: float
    match: float
    rejection: float
    error: float


def acceptances(p: Tensor, q: Tensor, draws: int, seed: int, progress: Progress) -> list[Acceptance]:
    """For pairs of distributions (P, d), float64. The rules are run, not computed: `draws` times for each pair."""
    most = max(DRAFTS)
    reached: list[tuple[Tensor, Tensor]] = []
    optima: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
    for number, (one, other) in enumerate(zip(p.split(16), q.split(16), strict=True)):
        reached.append(simulate(one, other, draws, seed + number))
        for (name, limit), drafts in product(_CLOSED.items(), DRAFTS):
            optima[name, drafts].append(limit(one, other, drafts))
        progress()
    matched, rejected = (torch.cat(parts) for parts in zip(*reached, strict=True))
    best = p.gather(-1, q.topk(most, -1).indices).cumsum(-1).mean(0)
    return [
        Acceptance(
            drafts,
            likeliest=float(best[drafts - 1]),
            match=float(matched[:, at].mean()),
            rejection=float(rejected[:, at].mean()),
            error=0.5 / (len(p) * draws) ** 0.5,  # at most
            **{name: float(torch.cat(optima[name, drafts]).mean()) for name in _CLOSED},
        )
        for at, drafts in enumerate(DRAFTS)
    ]


def simulate(p: Tensor, q: Tensor, draws: int, seed: int) -> tuple[Tensor, Tensor]:
    """Shares of draws in which the rules `match` and `rejection` emit a draft, (P, len(DRAFTS)) each."""
    pairs, size = p.shape
    words = token_hashes(torch.arange(size, device=p.device))
    keys = sequence_keys(seed, pairs * draws, device=p.device)
    coupled, drawing, residual = (gumbel(keys, torch.full_like(keys, use), words).double() for use in range(3))
    p, q = (x.repeat_interleave(draws, 0) for x in (p, q))
    choices = (p.log() + coupled).argmax(-1, keepdim=True)
    foreseen, drawn = ((q.log() + noise).topk(max(DRAFTS), -1).indices for noise in (coupled, drawing))
    uniforms = torch.rand(drawn.shape, generator=torch.Generator().manual_seed(seed), dtype=p.dtype).to(p.device)
    shares: list[list[Tensor]] = [[], []]
    for drafts in DRAFTS:
        tokens = F.pad(foreseen[:, :drafts], (1, 0))
        tree = TokenTree(tokens, torch.zeros_like(tokens).index_fill(1, torch.tensor(0, device=p.device), -1))
        emitted = reject_in_turn(p, q, drawn[:, :drafts], uniforms[:, :drafts], residual)
        hits = (
            match(tree, choices.expand(-1, drafts + 1)).drafted > 0,
            (drawn[:, :drafts] == emitted[:, None]).any(-1),
        )
        for rule, hit in enumerate(hits):
            shares[rule].append(hit.double().view(pairs, draws).mean(-1))
    return torch.stack(shares[0], -1), torch.stack(shares[1], -1)
