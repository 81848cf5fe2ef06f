"""How little the engine adds to the forwards that decoding is made of (`shape efficiency`)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.table import Table as ScreenTable
from tqdm.auto import tqdm

from shape.data.backends import announce_sampling, sampling
from shape.data.conversations import Prompt
from shape.drafters import Drafter, OracleDrafter, make_drafter
from shape.errors import ConfigError, UnsupportedTarget, require
from shape.evaluation.environment import Environment, code_commit
from shape.evaluation.estimates import ENOUGH, Estimate, estimate, few_units_note, number, quantile, ratio
from shape.evaluation.files import json_by_line
from shape.evaluation.markdown import Table, markdown, on_screen, show
from shape.evaluation.options import EfficiencyOptions, several
from shape.evaluation.prompts import chosen_prompts, refuse_unfilled, that_fit
from shape.evaluation.results import AUTOREGRESSIVE
from shape.evaluation.runner import Run, by_decoder, by_transformers, rotated
from shape.evaluation.speed import refuse_results
from shape.files import write_whole
from shape.generation.clock import synchronise
from shape.generation.decoder import ShapeDecoder
from shape.generation.stats import Step
from shape.target.loading import dtype_name, of_pair, recorded, resolve_dtype
from shape.target.model import Target
from shape.verification.forward import new_cache, tree_inputs, tree_logits
from shape.verification.tree import chain

ORACLE_ERROR_RATE, ORACLE_DEPTH = 0.2, 6


@dataclass
class Case:
    """One method under one setting, summed over its answers.

    Attributes:
        steps, forwards: steps, and sequences that took part in them, summed.
        tokens: emitted after the prefill.
        seconds: of decoding, the drafter's reading of the prompt included, prefill excluded.
        forward_seconds, draft_seconds: of the bare forwards of target and drafter.
        shares: (bare forwards / measured time) of each answer, or group of answers decoded together.
        answers: tokens and seconds of each of these, in the same order for all methods of a setting: every prompt's
            first one, then every prompt's second one, and so on.
        gaps: seconds between arrivals of tokens.
        repeats: answers to each prompt.
    """

    dtype: str
    temperature: float
    batch: int
    method: str
    repeats: int = 1
    steps: int = 0
    forwards: int = 0
    tokens: int = 0
    seconds: float = 0.0
    forward_seconds: float = 0.0
    draft_seconds: float = 0.0
    shares: list[float] = field(default_factory=list)
    answers: list[tuple[int, float]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    @property
    def efficiency(self) -> float | None:
        """The median over answers, so that other load during a few of them does not dominate. None for
        transformers, whose steps are not ours to look into.
        """
        return median(self.shares) if self.shares else None

    @property
    def efficiency_interval(self) -> Estimate:
        """``efficiency`` with its 95 % bootstrap interval over prompts."""
        shares = np.array(self.shares)
        order = shares.argsort()

        def figure(weights: np.ndarray) -> Any:
            below = weights[..., order].cumsum(-1)
            return shares[order][(2 * below >= below[..., -1:]).argmax(-1)]

        if not self.shares or (self.repeats > 1 and len(self.shares) < len(self.answers)):  # some had no step
            return Estimate(self.efficiency)
        return replace(estimate(figure, len(shares) // self.repeats, self.repeats), value=self.efficiency)

    @property
    def groups(self) -> int:
        """The units of intervals: prompts, or groups of prompts decoded together."""
        return len(self.answers) // self.repeats

    @property
    def rate(self) -> float:
        """Tokens per second; nan where all answers ended with the prefill."""
        return float(ratio(self.tokens, self.seconds))

    def speed_up(self, other: "Case") -> Estimate:
        """This rate over that of another method of the same setting, with its interval over prompts."""
        if not self.answers or len(self.answers) != len(other.answers):  # of records from before they were kept
            return Estimate(number(ratio(self.rate, other.rate)))

        def rate(case: Case, weights: np.ndarray) -> Any:
            tokens, seconds = np.array(case.answers).T
            return ratio(weights @ tokens, weights @ seconds)

        return estimate(lambda weights: ratio(rate(self, weights), rate(other, weights)), self.groups, self.repeats)

    def add(self, tokens: int, seconds: float) -> None:
        """One answer, or group of answers decoded together."""
        self.tokens += tokens
        self.seconds += seconds
        self.answers.append((tokens, seconds))

    def milliseconds(self, seconds: float) -> float | None:
        """Per step."""
        return 1e3 * seconds / self.steps if self.steps else None

    def gap(self, share: float) -> float:
        """Quantile of the milliseconds between arrivals."""
        return 1e3 * quantile(self.gaps, share)


def bare_seconds(decoder: ShapeDecoder, steps: Sequence[Step]) -> tuple[float, float]:
    """(target, drafter) seconds of the bare forwards of some steps, in their order."""
    target, support, drafter = decoder.target, decoder.support, decoder.drafter
    with decoder.gradientless():
        capacity = max((max(step.lengths) + step.nodes for step in steps), default=0)
        caches = {size: new_cache(target, support, size, capacity) for size in {len(step.sequences) for step in steps}}
        verify = draft = 0.0
        for step in steps:
            size, length = len(step.sequences), max(step.lengths)
            cache = caches[size]
            cache.set_lengths([length] * size)
            tokens = torch.zeros(size, step.nodes, dtype=torch.long, device=target.device)
            tree = chain(tokens[:, 0], tokens[:, 1:])
            inputs = tree_inputs(target, support, cache, tree)
            synchronise(target.device)
            start = perf_counter()
            if drafter is not None and step.passes:
                drafter.run_forwards(size, step.passes)
            synchronise(target.device)
            draft += perf_counter() - start
            start = perf_counter()
            tree_logits(target, support, cache, tree, inputs=inputs)
            synchronise(target.device)
            verify += perf_counter() - start
    return verify, draft


def measure(
    target: Target,
    drafters: dict[str, Drafter],
    contexts: Sequence[list[int]],
    *,
    batch: int,
    temperature: float,
    max_new_tokens: int,
    repeats: int = 1,
    progress: Callable[[], Any] = lambda: None,
) -> list[Case]:
    """transformers, our autoregressive loop, the oracle and some drafters on the same prompts in groups of `batch`.

    Args:
        contexts: token ids of prompts; a last group that is not full is left out.
        repeats: how often each group is answered.
        progress: called after each group.
    """
    dtype = dtype_name(target.dtype)
    options = {"max_new_tokens": max_new_tokens, **sampling(temperature)}
    decoders = {name: ShapeDecoder(target, drafter, fall_back=False) for name, drafter in drafters.items()}
    decoders[AUTOREGRESSIVE] = ShapeDecoder(target, None, fall_back=False)
    runners = {name: by_decoder(decoder, **options) for name, decoder in decoders.items()}
    runners["transformers"] = by_transformers(target, **options)
    names = ["transformers", AUTOREGRESSIVE, "oracle", *drafters]

    def answer(group: Sequence[list[int]], turn: int, cases: dict[str, Case]) -> None:
        seeds = [turn * batch + place for place in range(batch)]
        oracle = _oracle(target, group, runners[AUTOREGRESSIVE](group, seeds), turn)
        decoders["oracle"], runners["oracle"] = oracle, by_decoder(oracle, **options)
        for name in rotated(names, turn):
            _add(cases[name], runners[name](group, seeds), decoders.get(name))

    def empty() -> dict[str, Case]:
        return {name: Case(dtype, temperature, batch, name, repeats) for name in names}

    groups = [contexts[start : start + batch] for start in range(0, len(contexts) - batch + 1, batch)]
    answer(groups[0], 0, empty())  # warms up
    cases = empty()
    for turn, group in enumerate(groups * repeats):
        answer(group, turn, cases)
        progress()
    return list(cases.values())


def _oracle(target: Target, group: Sequence[list[int]], answers: Run, seed: int) -> ShapeDecoder:
    """Drafts what the autoregressive loop answers, with a fifth of its tokens corrupted at random."""
    texts = [[*context, *answer] for context, answer in zip(group, answers.sequences, strict=True)]
    return ShapeDecoder(target, OracleDrafter(texts, ORACLE_ERROR_RATE, ORACLE_DEPTH, seed=seed), fall_back=False)


def _add(case: Case, run: Run, decoder: ShapeDecoder | None) -> None:
    """What a run took and, of one of our decoders, its bare forwards, run again."""
    case.gaps += run.gaps
    if decoder is None:
        case.steps += len(run.gaps)
        case.add(run.timed_tokens, sum(run.gaps))
        return
    stats = run.stats
    assert stats is not None
    forward, draft = bare_seconds(decoder, stats.steps)
    case.steps += len(stats.steps)
    case.forwards += stats.forwards
    case.add(stats.emitted, stats.decode_seconds)
    case.forward_seconds += forward
    case.draft_seconds += draft
    if stats.decode_seconds:
        case.shares.append((forward + draft) / stats.decode_seconds)


def figures(cases: Sequence[Case]) -> Table:
    """A line for each case; ratios are to the autoregressive loop and to transformers of the same setting."""
    head = [
        "dtype", "T", "batch", "method", "efficiency (95 %)", "step ms", "target ms", "drafter ms", "rest ms",
        "acceptance length", "tokens/s", "against autoregressive (95 %)", "against transformers (95 %)",
        "gap ms, median", "p95",
    ]  # fmt: skip
    found = {(case.dtype, case.temperature, case.batch, case.method): case for case in cases}
    lines = []
    for case in cases:
        setting = (case.dtype, case.temperature, case.batch)
        rest = case.seconds - case.forward_seconds - case.draft_seconds
        ours = case.method != "transformers"
        lines.append(
            [
                case.dtype,
                f"{case.temperature:g}",
                f"{case.batch} (one group)" if case.groups == 1 < case.batch else str(case.batch),
                case.method,
                case.efficiency_interval.text(),
                show(case.milliseconds(case.seconds)),
                *(
                    show(case.milliseconds(s) if ours else None)
                    for s in (case.forward_seconds, case.draft_seconds, rest)
                ),
                show(number(ratio(case.tokens, case.forwards)) if ours else None),
                show(number(case.rate), ".0f"),
                *(case.speed_up(found[*setting, base]).text("x") for base in (AUTOREGRESSIVE, "transformers")),
                show(case.gap(0.5)),
                show(case.gap(0.95)),
            ]
        )
    return head, lines


def screens(cases: Sequence[Case]) -> Iterator[ScreenTable]:
    """A table for the screen of each setting."""
    head, lines = figures(cases)
    for (dtype, temperature, batch), own in groupby(lines, key=lambda line: line[:3]):
        title = f"{dtype}, temperature {temperature}, batch size {batch}"
        yield on_screen(head[3:], [line[3:] for line in own], title)


def run(options: EfficiencyOptions) -> list[Case]:
    """Measures, and writes efficiency.json and efficiency.md."""
    _check(options)
    code_commit()  # as it is now: others may follow while it measures
    batches = several(options.batch_size)
    prompts, source = chosen_prompts(options.prompts, options.limit, options.chat_template_kwargs)
    refuse_unfilled(max(batches), len(prompts), source)
    Path(options.output).mkdir(parents=True, exist_ok=True)  # where it cannot be made, nothing is measured in vain
    asked = {name: value for name, value in recorded(options).items() if name not in ("output", "label")}
    refuse_results(Path(options.output) / "efficiency.json", asked, "options")
    cases: list[Case] = []
    for dtype in several(options.dtype):
        own, name, environment = _of_dtype(options, dtype, prompts, source)
        cases += own
    _write(options, name, environment, f"{_counted(cases)} of {source}", cases)
    return cases


def _of_dtype(
    options: EfficiencyOptions, dtype: str, prompts: Sequence[Prompt], source: str
) -> tuple[list[Case], str, Environment]:
    """Cases, the target's name, and where they were measured. The target is let go of before the next one is loaded,
    which is prepacked where the memory allows it.
    """
    predictor, batches = None if options.predictor == "none" else options.predictor, several(options.batch_size)
    cases: list[Case] = []
    with ShapeDecoder.from_pretrained(
        predictor=predictor,
        target=options.target,
        dtype=dtype,
        drafter="none" if predictor is None else None,
        prepacked=options.prepacked,
        **of_pair(options),
    ) as decoder:
        target = decoder.target
        if decoder.support.recurrent:
            raise UnsupportedTarget(
                f"target {target.name} has recurrent layers, whose bare forwards cannot be run behind a text that is "
                "not there; measure its speed with shape bench"
            )
        hottest = max(several(options.temperature))
        announce_sampling(target, hottest)
        drafters = {name: made for name in options.drafter if (made := make_drafter(name)) is not None}
        if decoder.drafter is not None:
            drafters[decoder.drafter.name] = decoder.drafter
        contexts = [ids for _, ids in that_fit(target, prompts, options.max_new_tokens)]
        room = f"{source} that leave room for {options.max_new_tokens} new tokens"
        refuse_unfilled(max(batches), len(contexts), room)
        for batch in batches:
            for temperature in several(options.temperature):
                with tqdm(
                    total=len(contexts) // batch * options.repeats, desc=f"{dtype}, T {temperature:g}, batch {batch}"
                ) as bar:
                    cases += measure(
                        target,
                        drafters,
                        contexts,
                        batch=batch,
                        temperature=temperature,
                        max_new_tokens=options.max_new_tokens,
                        repeats=options.repeats,
                        progress=bar.update,
                    )
        return cases, target.name, Environment.capture(target.device)


def _counted(cases: Sequence[Case]) -> str:
    """How many prompts were measured, and at which batch sizes fewer, as a group that is not full is left out."""
    counts = {case.batch: case.batch * case.groups for case in cases}
    most = max(counts.values())
    fewer = ", ".join(f"{count} at batch {batch}" for batch, count in counts.items() if count < most)
    return f"{most} prompts" + (f" ({fewer})" if fewer else "")


def _check(options: EfficiencyOptions) -> None:
    """Raises ConfigError for values out of range, before anything is loaded."""
    require(options, "limit repeats batch_size", least=1)
    require(options, "temperature", least=0)
    for name in ("batch_size", "temperature", "dtype"):
        if not several(getattr(options, name)):
            raise ConfigError(f"{name} holds no value; give at least one")
    if (most := max(several(options.batch_size))) > options.limit:
        raise ConfigError(f"batch_size {most} cannot be filled with limit {options.limit} prompts; raise the limit")
    if options.max_new_tokens < 2:
        raise ConfigError(
            f"max_new_tokens is {options.max_new_tokens}, and the first token comes with the prefill, which is not "
            "measured; give at least 2"
        )
    for dtype in several(options.dtype):
        resolve_dtype(dtype)
    for name in options.drafter:
        make_drafter(name)


def _write(
    options: EfficiencyOptions, target: str, environment: Environment, measured: str, cases: Sequence[Case]
) -> None:
    folder = Path(options.output)
    figures = [{**asdict(case), "gaps": [case.gap(0.5), case.gap(0.95)]} for case in cases]
    head = {"options": recorded(options), "measured": measured, "environment": asdict(environment)}
    write_whole(folder / "efficiency.json", json_by_line(head, "cases", figures))
    title = options.label or f"Engine efficiency, {Path(target).name}"
    write_whole(folder / "efficiency.md", page(title, measured, options.max_new_tokens, cases, environment))


def page(title: str, measured: str, max_new_tokens: int, cases: Sequence[Case], environment: Environment) -> str:
    """The table and what has to be said of it."""
    times = f"each answered {cases[0].repeats} times, " if cases[0].repeats > 1 else ""
    groups = "prompts" if all(case.batch == 1 for case in cases) else "prompts, or over groups decoded together"
    if any(1 < case.groups < ENOUGH for case in cases):
        groups += f"; {few_units_note('prompts or groups')}"
    note = (
        f"{measured}, {times}at most {max_new_tokens} new tokens. Efficiency: "
        "bare forwards of target and drafter over measured time, median over answers; the parts of a step are means, "
        "and a drafter's reading of the prompt is in the rest; "
        f"ranges are 95 % bootstrap intervals over {groups} (`shape/evaluation/efficiency.py`). `oracle` drafts the "
        "truth with a fifth of its tokens corrupted at random, at no cost: its speed-up is simulated. Gaps are between "
        "arrivals of tokens, several at a time where a draft was accepted."
    )
    return "\n\n".join([f"### {title}", markdown(*figures(cases)), note, environment.line()]) + "\n"
