"""Does transport pay? The paper's claims about hidden states and transport, measured on real ones.

    python -m eval.analyze --output analysis-results
    python -m eval.analyze --target T --predictor P --refined Q --data own-answers.jsonl

1. *Similarity*: cosines of h_t and h_{t+n} (the paper's Tables 1 and 9), beside those of unrelated states.
2. *Bound*: exact transport between successive token distributions against L sqrt(1 - cos) (section 2.2).
3. *Refinement*: what the entropic plan adds to a trained predictor's read-out (section 3.2); needs a predictor whose
   refinement is "sinkhorn", which may be another one (`--refined`).
4. *Transition*: how far K_t^T p_t is from p_{t+n} at finite iterations (section 2.2).
5. *Acceptance*: the transport optimum for 1, 2 and 4 drafts (`eval.optimal_acceptance`), beside
   what the rules of this package reach for the same pairs of distributions.
6. *Losses*: the transport loss (`shape.training.losses.sinkhorn`) beside KL and total variation, by value and gradient.

Everything is read on the target's own answers, at positions drawn by seed. A state counts as part of an answer where
the token it predicts does. Distributions are those of temperature 1.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import ot
import torch
import torch.nn.functional as F
from jsonargparse import CLI
from rich.console import Console
from rich.markdown import Markdown
from torch import Tensor
from tqdm import tqdm

from eval.analysis_report import draw, report
from eval.optimal_acceptance import optimal_acceptance
from shape import bundled
from shape.data.conversations import evenly
from shape.data.encoding import Encoded, encode_all
from shape.data.reading import load_conversations, load_prompts
from shape.drafters import TrainedDrafter
from shape.errors import ConfigError, DataError, exit_on_error
from shape.evaluation.environment import Environment
from shape.features.extraction import compute_features
from shape.features.positions import eligible
from shape.features.store import Stored
from shape.generation.decoder import ShapeDecoder
from shape.generation.loading import load_predictor
from shape.networks.base import Known, Predictor
from shape.networks.teacher_forcing import Reader, Texts, examples, known_in
from shape.networks.transport import Plan, squared_distances
from shape.networks.transport import sinkhorn as entropic_plan
from shape.target.chat import prompt_ids
from shape.target.loading import SOURCE, of_pair, of_predictor, of_target, only, recorded
from shape.target.model import Target, announce
from shape.target.options import PairOptions
from shape.training.losses import kl, log_probabilities, mistake_costs, sinkhorn, total_variation
from shape.verification.acceptance import match, reject_in_turn
from shape.verification.noise import gumbel, row_keys, token_words
from shape.verification.tree import TokenTree

PERCENTILES = (5, 25, 50, 75, 95)
ITERATIONS = (1, 2, 5, 10, 20, 50, 100)
MANY = 1000
DRAFTS = (1, 2, 4)
SCALES = (0.1, 0.5, 1.0, 2.0, 4.0)
_OWN_ANSWERS = "quickstart-target"  # whose answers ship
_BATCH = 8

Progress = Callable[[], Any]


# ------------------------------------------------------------------------------------------------- what is read


def texts_of(target: Target, encoded: Sequence[Encoded]) -> list[Stored]:
    """States of some texts, float32 and on the CPU."""
    found = []
    for start in range(0, len(encoded), _BATCH):
        batch = encoded[start : start + _BATCH]
        states = compute_features(target, batch).float().cpu()
        found += [
            Stored(one.input_ids, one.loss_mask, row[: len(one.input_ids)])
            for one, row in zip(batch, states, strict=True)
        ]
    return found


def answered(decoder: ShapeDecoder, prompts: Sequence[list[int]], max_new_tokens: int) -> Iterator[Encoded]:
    """The target's greedy answers to prompts, as texts of which the answers count."""
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt], device=decoder.target.device)
        text = decoder.generate(ids, max_new_tokens=max_new_tokens)
        assert isinstance(text, Tensor)
        row = text[0].cpu()
        yield Encoded(str(number), row, torch.arange(len(row)) >= len(prompt))


def speaking(text: Stored, run: int) -> Tensor:
    """Positions t whose states h_t..h_{t+run-1} all predict tokens of one answer, (R,) int64."""
    predicts = text.loss_mask[1:]
    if len(predicts) < run:
        return torch.empty(0, dtype=torch.int64)
    return predicts.unfold(0, run, 1).all(-1).nonzero()[:, 0]


def chosen(counts: Sequence[int], positions: int, seed: int) -> list[Tensor]:
    """Which of so many positions of each text are drawn: at most `positions` of all together."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randperm(sum(counts), generator=generator)[:positions].sort().values
    ends = torch.tensor([0, *counts]).cumsum(0)
    return [
        numbers[(numbers >= a) & (numbers < b)] - a for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]


def successive_states(texts: Sequence[Stored], last: int, positions: int, seed: int) -> Tensor:
    """(P, last + 1, H): h_t..h_{t+last} at positions drawn from all that stay within one answer."""
    found = [speaking(text, last + 1) for text in texts]
    parts = []
    for text, places, kept in zip(texts, found, chosen([len(f) for f in found], positions, seed), strict=True):
        parts.append(text.hidden[places[kept][:, None] + torch.arange(last + 1)])
    states = torch.cat(parts)
    if not len(states):
        raise DataError(f"no answer has {last + 1} tokens in a row; give longer answers or smaller lags")
    return states


@dataclass(frozen=True)
class Predictions:
    """A predictor's states beside the target's, for roots drawn by seed.

    Attributes:
        predicted, true: (P, S, H) steps n = 0..S-1. mask: (P, S) bool, steps within the answer.
        read: what the predictor read, text by text: what is known, and embeddings (1, P', S, H).
    """

    predicted: Tensor
    true: Tensor
    mask: Tensor
    read: list[tuple[Known, Tensor]]

    @property
    def embeddings(self) -> Tensor:
        """(P, S, H), of the tokens along each path."""
        return torch.cat([embeddings[0] for _, embeddings in self.read])


@torch.no_grad()
def predictions(
    predictor: Predictor, target: Target, texts: Sequence[Stored], positions: int, seed: int
) -> Predictions:
    config = predictor.config
    roots = [eligible(text.loss_mask, torch.tensor([0, len(text.input_ids)])).nonzero()[:, 0] for text in texts]
    true, masks, read = [], [], []
    for text, places, kept in zip(texts, roots, chosen([len(r) for r in roots], positions, seed), strict=True):
        if not len(kept):
            continue
        ids, mask, hidden = (part[None].to(target.device) for part in text)
        whole = Texts(hidden, ids, mask, places[kept][None].to(target.device))
        cut = examples(whole, config.window, config.num_steps, target.hidden_size)
        read.append((known_in(predictor, target, whole, cut.window), target.embed(cut.tokens)))
        true.append(cut.states[0])
        masks.append(cut.mask[0])
    if not read:
        raise DataError("no answer has two tokens in a row; give longer answers")
    return Predictions(unrolled(predictor, read), torch.cat(true), torch.cat(masks), read)


def unrolled(predictor: Predictor, read: Sequence[tuple[Known, Tensor]]) -> Tensor:
    """(P, S, H) float32."""
    return torch.cat([predictor.unroll(known, embeddings)[0] for known, embeddings in read]).float()


# ------------------------------------------------------------------------------------------------- 1 similarity


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
        places = [speaking(text, lag + 1) for text in texts]
        pairs = [(text.hidden[at], text.hidden[at + lag]) for text, at in zip(texts, places, strict=True)]
        found[lag] = torch.cat([F.cosine_similarity(one, other, dim=-1) for one, other in pairs])
    places = [speaking(text, 1) for text in texts]
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


# ------------------------------------------------------------------------------------------------- 2 bound


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


# ------------------------------------------------------------------------------------------------- 3 refinement


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
        states = unrolled(varied(predictor, changes), found.read)
        logits = reader(states, found.embeddings).float()[mask]
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


def varied(predictor: Predictor, changes: dict[str, Any]) -> Predictor:
    """The same weights under another configuration."""
    config = deepcopy(predictor.config)
    for name, value in changes.items():
        setattr(config, name, value)
    other = type(predictor)(config)
    other.load_state_dict(predictor.state_dict())
    return other.to(predictor.device, predictor.dtype).eval()  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- 4 transition


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


def common_support(p: Tensor, q: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """The tokens with most of p + q, (P, K), both distributions renormalised on them, and the mean mass kept."""
    tokens = (p + q).topk(min(size, p.shape[-1]), -1).indices
    p, q = p.gather(-1, tokens), q.gather(-1, tokens)
    kept = float((p.sum(-1) + q.sum(-1)).mean() / 2)
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True), tokens, kept


# ------------------------------------------------------------------------------------------------- 5 acceptance


@dataclass(frozen=True)
class Acceptance:
    """Mean chances that one of so many drafts is emitted, at depth 1 and temperature 1.

    Attributes:
        independent: optimum for drafts drawn independently from q (SpecTr's).
        without_replacement: optimum for drafts drawn from q one after the other without replacement (our drafters').
        likeliest: for the likeliest tokens of q, not drawn: what any lossless rule reaches, the sum of their p.
        match, rejection: what these rules reach for drafts without replacement, and `error` the standard error of both.
    """

    drafts: int
    independent: float
    without_replacement: float
    likeliest: float
    match: float
    rejection: float
    error: float


def acceptances(p: Tensor, q: Tensor, draws: int, seed: int, progress: Progress) -> list[Acceptance]:
    """For pairs of distributions (P, d), float64. The rules are run, not computed: `draws` times for each pair."""
    most = max(DRAFTS)
    reached: list[tuple[Tensor, Tensor]] = []
    optima: list[list[Tensor]] = []
    for number, (one, other) in enumerate(zip(p.split(16), q.split(16), strict=True)):
        reached.append(simulate(one, other, draws, seed + number))
        optima.append([optimal_acceptance(one, other, drafts, kind) for kind in (True, False) for drafts in DRAFTS])
        progress()
    matched, rejected = (torch.cat(parts) for parts in zip(*reached, strict=True))
    optimum = [torch.cat(parts).mean() for parts in zip(*optima, strict=True)]
    best = p.gather(-1, q.topk(most, -1).indices).cumsum(-1).mean(0)
    return [
        Acceptance(
            drafts,
            float(optimum[at]),
            float(optimum[len(DRAFTS) + at]),
            float(best[drafts - 1]),
            float(matched[:, at].mean()),
            float(rejected[:, at].mean()),
            0.5 / (len(p) * draws) ** 0.5,  # at most
        )
        for at, drafts in enumerate(DRAFTS)
    ]


def simulate(p: Tensor, q: Tensor, draws: int, seed: int) -> tuple[Tensor, Tensor]:
    """Shares of draws in which the rules `match` and `rejection` emit a draft, (P, len(DRAFTS)) each."""
    pairs, size = p.shape
    words = token_words(torch.arange(size, device=p.device))
    keys = row_keys(seed, pairs * draws, device=p.device)
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


# ------------------------------------------------------------------------------------------------- 6 losses


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


# ------------------------------------------------------------------------------------------------- the command


@dataclass
class AnalyzeOptions(PairOptions):
    """What to analyse.

    Args:
        output: folder for analysis.json, analysis.md and analysis.png.
        target: path or hub id; default: the predictor's own.
        predictor: folder, hub id or bundled name of a trained predictor: whose drafts are judged.
        refined: a predictor whose refinement is "sinkhorn", for the section on it; default: the predictor itself.
        data: conversations with the target's own answers; default: those that ship, for the shipped target.
        prompts: instead of data, a JSON-lines file of prompts that the target answers first, greedily.
        chat_template_kwargs: given to the target's chat template, for example {"enable_thinking": false}.
        limit: conversations or prompts, evenly chosen.
        max_length: tokens kept of each conversation.
        max_new_tokens: longest answer to a prompt.
        positions: drawn for everything but the cosines, which are of all.
        lags: distances n between states.
        support: tokens that distributions are truncated to where transport is computed.
        loss_support: the same within the transport losses.
        epsilon: entropic regularisation of the transition, in units of the mean ground cost (paper: 0.1).
        draws: of each acceptance rule at each position.
        seed: of positions and draws.
        dtype: of the target.
        label: heading of the report.
    """

    output: str = "analysis-results"
    target: str | None = None
    predictor: str = "quickstart-shape"
    refined: str | None = None
    data: str | None = None
    prompts: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    limit: int = 120
    max_length: int = 512
    max_new_tokens: int = 96
    positions: int = 300
    lags: list[int] = field(default_factory=lambda: [1, 2, 3])
    support: int = 64
    loss_support: int = 16
    epsilon: float = 0.1
    draws: int = 256
    seed: int = 0
    dtype: str = "float32"
    label: str = ""


def run(options: AnalyzeOptions) -> dict[str, Any]:
    """Measures, and writes analysis.json, analysis.md and analysis.png. Returns what is in the first."""
    _check(options)
    decoder = ShapeDecoder.from_pretrained(
        predictor=options.predictor, target=options.target, dtype=options.dtype, **of_pair(options)
    )
    target = decoder.target
    announce(target)
    predictor = refined = _predictor(options.predictor, target, of_predictor(options))
    if options.refined:
        refined = _predictor(options.refined, target, only(SOURCE, of_target(options)))
        if refined.config.refinement != "sinkhorn":
            raise ConfigError(f'refined predictor {options.refined} has no refinement "sinkhorn"; give one that has')
    parts = [*range(0, options.positions, 16)]
    with tqdm(total=6 + options.positions + len(parts), desc="analysis") as bar:
        texts = texts_of(target, list(_texts(options, decoder)))
        bar.update()
        similar, cosines = similarity(texts, options.lags, options.seed)
        bar.update()
        states = successive_states(texts, max(options.lags), options.positions, options.seed)
        bounds, pairs = distances(target, states, options.lags, options.support, bar.update)
        steps, unmoved, common = transitions(target, states, options.lags[0], options.support, options.epsilon)
        bar.update()
        rows = None
        if refined.config.refinement == "sinkhorn":
            rows = read_outs(refined, target, predictions(refined, target, texts, options.positions, options.seed))
        bar.update()
        found = predictions(predictor, target, texts, options.positions, options.seed)
        first, true = found.predicted[:, 0], found.true[:, 0]
        p = target.logits(true.to(target.dtype)).double().softmax(-1)
        reader = Reader(predictor, target)
        logits = reader(first[:, None], found.embeddings[:, :1])[:, 0].float()
        vocabulary = predictor.draft_vocabulary
        q = torch.zeros_like(p) if vocabulary is not None else logits.double().softmax(-1)
        if vocabulary is not None:
            q[:, vocabulary] = logits.double().softmax(-1)
        p, q, _, kept = common_support(p, q, options.support)
        accepted = acceptances(p, q, options.draws, options.seed, bar.update)
        bar.update()
        family, apart = loss_family(
            logits, reader.frozen(true).float(), target.output_rows(vocabulary), options.loss_support
        )
        bar.update()
    environment = Environment.capture(target.device)
    environment = replace(environment, versions=environment.versions | {"POT": version("POT")})
    record = {
        "options": recorded(options),
        "environment": asdict(environment),
        "texts": len(texts),
        "positions": {"states": len(states), "drafts": len(p)},
        "similarity": [asdict(row) for row in similar],
        "bound": [asdict(row) for row in bounds],
        "refinement": None if rows is None else [asdict(row) for row in rows],
        "transition": {"unmoved": unmoved, "kept": common, "steps": [asdict(row) for row in steps]},
        "acceptance": {"kept": kept, "rows": [asdict(row) for row in accepted]},
        "losses": {"scales": SCALES, "apart": apart, "rows": [asdict(row) for row in family]},
    }
    _write(options, target, record, environment, cosines, pairs)
    return record


def _check(options: AnalyzeOptions) -> None:
    """Raises ConfigError for values that cannot be meant."""
    for name in ("limit", "max_length", "max_new_tokens", "positions", "support", "loss_support", "draws"):
        if getattr(options, name) < 1:
            raise ConfigError(f"{name} is {getattr(options, name)}; give a positive number")
    if options.support < max(DRAFTS):
        raise ConfigError(f"support is {options.support}; give at least {max(DRAFTS)}, as many as there are drafts")
    if not options.lags or min(options.lags) < 1:
        raise ConfigError(f"lags are {options.lags}; give one or more, each at least 1")
    if not options.epsilon > 0:
        raise ConfigError(f"epsilon is {options.epsilon}; give a number greater than 0")
    if options.data and options.prompts:
        raise ConfigError("both data and prompts are given; give conversations or prompts to be answered")


def _predictor(name: str, target: Target, hub: dict[str, Any]) -> Predictor:
    """In float32, which decoding does not insist on.

    Raises:
        ConfigError: it reads other layers than the last. TargetMismatch: it is another target's.
    """
    predictor = load_predictor(name, **hub).float().to(target.device)
    TrainedDrafter(predictor).bind(target)
    if len(predictor.config.feature_layers) > 1:
        raise ConfigError(
            f"predictor {name} reads layers {predictor.config.feature_layers}, and the analysis is of the last; give "
            "a predictor that reads that alone"
        )
    return predictor


def _texts(options: AnalyzeOptions, decoder: ShapeDecoder) -> Iterator[Encoded]:
    target = decoder.target
    room = min(options.max_length, target.max_positions or options.max_length)
    if options.prompts:
        prompts = evenly(load_prompts(options.prompts, options.chat_template_kwargs), options.limit)
        contexts = [prompt_ids(prompt.messages, target.tokenizer, prompt.template) for prompt in prompts]
        contexts = [ids for ids in contexts if len(ids) + options.max_new_tokens <= room]
        if not contexts:
            raise DataError(f"no prompt of {options.prompts} leaves room for an answer; raise max_length")
        yield from answered(decoder, contexts, options.max_new_tokens)
        return
    if options.data is None and target.name != _OWN_ANSWERS:
        raise ConfigError(
            f"the answers that ship are not those of target {target.name}; give --data with its own answers (see "
            "python -m shape.regenerate), or --prompts that it can answer now"
        )
    source = options.data or bundled.path("data", "answers.jsonl.gz")
    conversations = load_conversations(source, chat_template_kwargs=options.chat_template_kwargs)
    conversations = evenly(conversations, options.limit)
    yield from encode_all(conversations, target.tokenizer, room).examples


def _write(
    options: AnalyzeOptions,
    target: Target,
    record: dict[str, Any],
    environment: Environment,
    cosines: dict[str, Tensor],
    pairs: dict[str, Tensor],
) -> None:
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "analysis.json").write_text(json.dumps(record, indent=1) + "\n")
    title = options.label or f"Does transport pay? {Path(target.name).name}"
    text = [f"# {title}", "![plots](analysis.png)", report(record), environment.line()]
    (folder / "analysis.md").write_text("\n\n".join(text) + "\n")
    draw(record, cosines, pairs, folder / "analysis.png")


def main(options: AnalyzeOptions) -> None:
    with exit_on_error():
        Console().print(Markdown(report(run(options))))


if __name__ == "__main__":
    main(CLI(AnalyzeOptions, as_positional=False))
