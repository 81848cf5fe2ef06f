"""Does transport pay? The paper's claims about hidden states and transport, measured on real ones.

    python -m eval.analyze --output analysis-results
    python -m eval.analyze --target T --predictor P --refined Q --data own-answers.jsonl

1. *Similarity*: cosines of h_t and h_{t+n} (the paper's Tables 1 and 9), beside those of unrelated states.
2. *Bound*: exact transport between successive token distributions against L sqrt(1 - cos) (section 2.2).
3. *Refinement*: what the entropic plan adds to a trained predictor's read-out (section 3.2); needs a predictor whose
   refinement is "sinkhorn", which may be another one (`--refined`).
4. *Transition*: how far K_t^T p_t is from p_{t+n} at finite iterations (section 2.2).
5. *Acceptance*: the transport optimum for 1, 2 and 4 drafts (`eval.analysis.optimal_acceptance`), beside
   what the rules of this package reach for the same pairs of distributions.
6. *Losses*: the transport loss (`shape.training.losses.sinkhorn`) beside KL and total variation, by value and gradient.

Everything is read on the target's own answers, at positions drawn by seed. A state counts as part of an answer where
the token it predicts does. Distributions are those of temperature 1.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eval import commands
from eval.analysis.limits import DRAFTS, acceptances
from eval.analysis.losses import SCALES, loss_family
from eval.analysis.plans import read_outs, transitions
from eval.analysis.report import draw, report
from eval.analysis.states import distances, similarity
from eval.analysis.texts import answered, common_support, predictions, successive_states, texts_of
from shape import bundled
from shape.data.conversations import evenly
from shape.data.encoding import Encoded, encode_all
from shape.data.reading import load_conversations
from shape.drafters import TrainedDrafter
from shape.errors import ConfigError, DataError, require
from shape.evaluation.environment import Environment
from shape.evaluation.prompts import chosen_prompts, that_fit
from shape.generation.decoder import ShapeDecoder
from shape.generation.loading import load_predictor
from shape.networks.base import Predictor
from shape.networks.teacher_forcing import Reader
from shape.target.loading import SOURCE, of_pair, of_predictor, of_target, only, recorded
from shape.target.model import Target, announce
from shape.target.options import AnsweringOptions


@dataclass
class AnalyzeOptions(commands.OfPredictor, AnsweringOptions):
    """What to analyse, and whose drafts to judge.

    Args:
        output: folder for analysis.json, analysis.md and analysis.png.
        refined: a predictor whose refinement is "sinkhorn", for the section on it; default: the predictor itself.
        data: conversations with the target's own answers; default: those that ship, for the shipped target.
        prompts: instead of data, a JSON-lines file of prompts that the target answers first, greedily.
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
    refined: str | None = None
    data: str | None = None
    prompts: str | None = None
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
        logits = reader(first[:, None], found.tokens[:, :1], found.embeddings[:, :1])[:, 0].float()
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
    folder, title = Path(options.output), options.label or f"Does transport pay? {Path(target.name).name}"
    page = [f"# {title}", "![plots](analysis.png)", report(record)]
    commands.write_results(folder, "analysis", record, *page, environment=environment)
    draw(record, cosines, pairs, folder / "analysis.png")
    return record


def _check(options: AnalyzeOptions) -> None:
    """Raises ConfigError for values that cannot be meant."""
    require(options, "limit max_length max_new_tokens positions support loss_support epsilon draws", above=0)
    if options.support < max(DRAFTS):
        raise ConfigError(f"support is {options.support}; give at least {max(DRAFTS)}, as many as there are drafts")
    if not options.lags or min(options.lags) < 1:
        raise ConfigError(f"lags are {options.lags}; give one or more, each at least 1")
    if options.data and options.prompts:
        raise ConfigError("both data and prompts are given; give conversations or prompts to be answered")


def _predictor(name: str, target: Target, hub: dict[str, Any]) -> Predictor:
    """In float32, which decoding does not insist on.

    Raises:
        ConfigError: it reads other layers than the last. TargetMismatch: it is another target's.
    """
    predictor = load_predictor(name, **hub).float().to(target.device)
    TrainedDrafter(predictor).bind(target)
    if predictor.config.feature_layers != [-1]:
        raise ConfigError(
            f"predictor {name} reads layers {predictor.config.feature_layers}, and the analysis is of the last; give "
            "a predictor that reads that alone"
        )
    return predictor


def _texts(options: AnalyzeOptions, decoder: ShapeDecoder) -> Iterator[Encoded]:
    target = decoder.target
    if options.prompts:
        prompts, _ = chosen_prompts(options.prompts, options.limit, options.chat_template_kwargs)
        fitting = that_fit(target, prompts, options.max_new_tokens)
        contexts = [ids for _, ids in fitting if len(ids) + options.max_new_tokens <= options.max_length]
        if not contexts:
            raise DataError(f"no prompt of {options.prompts} leaves room for an answer; raise max_length")
        yield from answered(decoder, contexts, options.max_new_tokens)
        return
    if options.data is None and target.name != bundled.TARGET:
        raise ConfigError(
            f"the answers that ship are not those of target {target.name}; give --data with its own answers (see "
            "python -m shape.regenerate), or --prompts that it can answer now"
        )
    source = options.data or bundled.path("data", "answers.jsonl.gz")
    conversations = load_conversations(source, chat_template_kwargs=options.chat_template_kwargs)
    conversations = evenly(conversations, options.limit)
    room = min(options.max_length, target.max_positions or options.max_length)
    yield from encode_all(conversations, target.tokenizer, room).examples


main = commands.program(lambda options: print(report(run(options))), AnalyzeOptions)


if __name__ == "__main__":
    main()
