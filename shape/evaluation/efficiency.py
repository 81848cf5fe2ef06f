"""How little the engine adds to the forwards that decoding is made of: engine efficiency, by measurement.

The command is `shape.cli.efficiency`.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from shape import bundled
from shape.data.conversations import Prompt, evenly
from shape.data.reading import load_prompts
from shape.drafters import Drafter, OracleDrafter, make_drafter
from shape.errors import ConfigError
from shape.evaluation.environment import Environment
from shape.evaluation.markdown import json_by_line, markdown, show
from shape.evaluation.results import Estimate, estimate, interval, ratio
from shape.generation.decoder import ShapeDecoder, ShapeOutput
from shape.generation.stats import Step, quantile
from shape.generation.streams import Arrivals
from shape.target.chat import prompt_ids
from shape.target.loading import PairOptions, of_pair, recorded
from shape.target.model import Target, announce
from shape.target.support import Support
from shape.verification.forward import attending, new_cache, tree_inputs
from shape.verification.tree import chain

ORACLE_ERROR_RATE, ORACLE_DEPTH = 0.2, 6


@dataclass
class Case:
    """One method under one setting, summed over its answers.

    Attributes:
        steps, rows: steps, and rows that took part in them, summed.
        tokens: emitted after the prefill.
        seconds: of decoding, prefill excluded.
        forward_seconds, draft_seconds: of the bare forwards of target and drafter.
        shares: (bare forwards / measured time) of each answer, or group of answers decoded together.
        answers: tokens and seconds of each of these, in the same order for all methods of a setting.
        gaps: seconds between arrivals of tokens.
    """

    dtype: str
    temperature: float
    batch: int
    method: str
    steps: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    forward_seconds: float = 0.0
    draft_seconds: float = 0.0
    shares: list[float] = field(default_factory=list)
    answers: list[tuple[int, float]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    @property
    def efficiency(self) -> float | None:
        """The median over answers, so that what a machine did beside a few of them does not decide. None for
        transformers, whose steps are not ours to look into.
        """
        return median(self.shares) if self.shares else None

    @property
    def efficiency_interval(self) -> Estimate:
        """``efficiency`` with its 95 % bootstrap interval over answers."""
        shares = np.array(self.shares)
        order = shares.argsort()

        def figure(weights: np.ndarray) -> Any:
            below = weights[..., order].cumsum(-1)
            return shares[order][(2 * below >= below[..., -1:]).argmax(-1)]

        return replace(estimate(figure, len(shares)), value=self.efficiency) if self.shares else Estimate(None)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def speed_up(self, other: "Case") -> Estimate:
        """This rate over that of another method of the same setting, with its interval over pairs of answers."""
        if not self.answers or len(self.answers) != len(other.answers):  # of records from before they were kept
            return Estimate(self.rate / other.rate)

        def rate(case: Case, weights: np.ndarray) -> Any:
            tokens, seconds = np.array(case.answers).T
            return ratio(weights @ tokens, weights @ seconds)

        return estimate(lambda weights: rate(self, weights) / rate(other, weights), len(self.answers))

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
    with decoder.gradientless():
        return _bare_seconds(decoder.target, decoder.support, decoder.drafter, steps)


def _bare_seconds(
    target: Target, support: Support, drafter: Drafter | None, steps: Sequence[Step]
) -> tuple[float, float]:
    capacity = max((max(step.lengths) + step.nodes for step in steps), default=0)
    arenas = {rows: new_cache(target, support, rows, capacity) for rows in {len(step.rows) for step in steps}}
    forward = draft = 0.0
    for step in steps:
        rows, length = len(step.rows), max(step.lengths)
        arena = arenas[rows]
        arena.set_lengths([length] * rows)
        tokens = torch.zeros(rows, step.nodes, dtype=torch.long, device=target.device)
        tree = chain(tokens[:, 0], tokens[:, 1:])
        positions, masks = tree_inputs(target, support, arena, tree)
        _wait(target)
        start = perf_counter()
        if drafter is not None and step.passes:
            drafter.run_forwards(rows, step.passes)
        _wait(target)
        drafted = perf_counter()
        with attending(target, support):
            begun = perf_counter()
            target.logits(target.hidden(tokens, attention_mask=masks, position_ids=positions, cache=arena))
            _wait(target)
            forward += perf_counter() - begun
        draft += drafted - start
    return forward, draft


def _wait(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


def measure(
    target: Target,
    drafters: dict[str, Drafter],
    contexts: Sequence[list[int]],
    *,
    batch: int,
    temperature: float,
    max_new_tokens: int,
    progress: Callable[[], Any] = lambda: None,
) -> list[Case]:
    """transformers, our plain loop, the oracle and some drafters on the same prompts in groups of `batch`.

    Args:
        contexts: token ids of prompts; a last group that is not full is left out.
        progress: called after each group.
    """
    dtype = str(target.dtype).removeprefix("torch.")
    names = ["transformers", "plain", "oracle", *drafters]
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}

    def answer(group: Sequence[list[int]], number: int, cases: dict[str, Case]) -> None:
        ids, mask = _padded(group, target)
        oracle = _oracle(target, ids, mask, options, number)
        methods: dict[str, Drafter | None] = {"plain": None, "oracle": oracle, **drafters}
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if name == "transformers":
                _run_transformers(target, cases[name], ids, mask, options, number)
            else:
                _run(target, methods[name], cases[name], ids, mask, options, number)

    def empty() -> dict[str, Case]:
        return {name: Case(dtype, temperature, batch, name) for name in names}

    groups = [contexts[start : start + batch] for start in range(0, len(contexts) - batch + 1, batch)]
    answer(groups[0], 0, empty())  # warms up
    cases = empty()
    for number, group in enumerate(groups):
        answer(group, number, cases)
        progress()
    return list(cases.values())


def _run(
    target: Target,
    drafter: Drafter | None,
    case: Case,
    ids: Tensor,
    mask: Tensor,
    options: dict[str, Any],
    seed: int,
) -> None:
    decoder = ShapeDecoder(target, drafter, fall_back=False)
    out = decoder.generate(ids, mask, seed=seed, return_dict_in_generate=True, **options)
    assert isinstance(out, ShapeOutput)
    forward, draft = bare_seconds(decoder, out.stats.steps)
    case.steps += len(out.stats.steps)
    case.rows += out.stats.forwards
    case.add(out.stats.emitted, out.stats.decode_seconds)
    case.forward_seconds += forward
    case.draft_seconds += draft
    if out.stats.decode_seconds:
        case.shares.append((forward + draft) / out.stats.decode_seconds)
    case.gaps += [step.seconds for step in out.stats.steps]


def _run_transformers(
    target: Target, case: Case, ids: Tensor, mask: Tensor, options: dict[str, Any], seed: int
) -> None:
    arrivals = Arrivals()
    with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
        torch.manual_seed(seed)
        sequences = target.model.generate(ids, attention_mask=mask, streamer=arrivals, **options)
    tokens = 0
    for row in sequences[:, ids.shape[1] :].tolist():
        ends = [at for at, token in enumerate(row) if token in target.eos_token_ids]
        tokens += min([*ends, len(row) - 1])  # the first token is the prefill's
    case.steps += len(arrivals.gaps)
    case.add(tokens, sum(arrivals.gaps))
    case.gaps += arrivals.gaps


def _oracle(target: Target, ids: Tensor, mask: Tensor, options: dict[str, Any], seed: int) -> OracleDrafter:
    """Drafts what the plain loop answers."""
    answers = ShapeDecoder(target).generate(ids, mask, seed=seed, **options)
    assert isinstance(answers, Tensor)
    new = answers[:, ids.shape[1] :].tolist()
    texts = [row[keep].tolist() + more for row, keep, more in zip(ids, mask.bool(), new, strict=True)]
    return OracleDrafter(texts, ORACLE_ERROR_RATE, ORACLE_DEPTH, seed=seed)


def _padded(group: Sequence[list[int]], target: Target) -> tuple[Tensor, Tensor]:
    """Ids and mask of a batch, padded on the left, as transformers wants it."""
    longest = max(map(len, group))
    ids = torch.tensor([[0] * (longest - len(one)) + one for one in group], device=target.device)
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in group], device=target.device)
    return ids, mask


def report(cases: Sequence[Case]) -> str:
    """The cases as Markdown; ratios are to the plain loop and to transformers of the same setting."""
    head = [
        "dtype", "T", "batch", "method", "efficiency (95 %)", "step ms", "target ms", "drafter ms", "rest ms",
        "acceptance length", "tokens/s", "against plain (95 %)", "against transformers (95 %)", "gap ms, median", "p95",
    ]  # fmt: skip
    found = {(case.dtype, case.temperature, case.batch, case.method): case for case in cases}
    rows = []
    for case in cases:
        setting = (case.dtype, case.temperature, case.batch)
        rest = case.seconds - case.forward_seconds - case.draft_seconds
        ours = case.method != "transformers"
        rows.append(
            [
                case.dtype,
                f"{case.temperature:g}",
                str(case.batch),
                case.method,
                interval(case.efficiency_interval),
                show(case.milliseconds(case.seconds)),
                show(case.milliseconds(case.forward_seconds) if ours else None),
                show(case.milliseconds(case.draft_seconds) if ours else None),
                show(case.milliseconds(rest) if ours else None),
                show(case.tokens / case.rows if ours else None),
                show(case.rate, ".0f"),
                interval(case.speed_up(found[*setting, "plain"]), "x"),
                interval(case.speed_up(found[*setting, "transformers"]), "x"),
                show(case.gap(0.5)),
                show(case.gap(0.95)),
            ]
        )
    return markdown(head, rows)


@dataclass
class EfficiencyOptions(PairOptions):
    """What to measure.

    Args:
        output: folder for efficiency.json and efficiency.md.
        predictor: folder, hub id or bundled name of a trained predictor; "none" measures without one.
        target: path or hub id; default: the predictor's own.
        prompts: JSON-lines file of prompts; default: the bundled bench split.
        chat_template_kwargs: given to the target's chat template, for example {"enable_thinking": false}.
        limit: prompts, evenly chosen; at larger batches their answers are measured together.
        repeats: how often each is answered, by every method in turn, for narrower intervals.
        max_new_tokens: longest answer.
        dtypes: of the target.
        temperatures: 0 is greedy.
        batches: numbers of rows.
        drafters: measured beside the predictor.
        prepacked: weights in the layout of the CPU's matrix kernels (see `shape.target.prepack`); default: if there is
        room.
        label: heading of the table.
    """

    output: str = "efficiency-results"
    predictor: str = "quickstart-shape"
    target: str | None = None
    prompts: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    limit: int = 24
    repeats: int = 1
    max_new_tokens: int = 64
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    batches: list[int] = field(default_factory=lambda: [1])
    drafters: list[str] = field(default_factory=lambda: ["ngram"])
    prepacked: bool | None = None
    label: str = ""


def run(options: EfficiencyOptions) -> list[Case]:
    """Measures, and writes efficiency.json and efficiency.md."""
    if max(options.batches, default=0) > options.limit or min(options.batches, default=0) < 1:
        raise ConfigError(f"batches {options.batches} have to lie between 1 and limit {options.limit}; raise the limit")
    source = Path(options.prompts) if options.prompts else bundled.path("data", "bench.jsonl")
    prompts: list[Prompt] = evenly(load_prompts(source, options.chat_template_kwargs), options.limit)
    cases: list[Case] = []
    for dtype in options.dtypes:
        predictor = None if options.predictor == "none" else options.predictor
        decoder = ShapeDecoder.from_pretrained(
            predictor=predictor,
            target=options.target,
            dtype=dtype,
            drafter="none" if predictor is None else None,
            prepacked=options.prepacked,
            **of_pair(options),
        )
        target = decoder.target
        announce(target)
        drafters = {name: made for name in options.drafters if (made := make_drafter(name)) is not None}
        if decoder.drafter is not None:
            drafters[decoder.drafter.name] = decoder.drafter
        contexts = [prompt_ids(prompt.messages, target.tokenizer, prompt.template) for prompt in prompts]
        contexts *= options.repeats
        for batch in options.batches:
            for temperature in options.temperatures:
                with tqdm(total=len(contexts) // batch, desc=f"{dtype}, T {temperature:g}, batch {batch}") as bar:
                    cases += measure(
                        target,
                        drafters,
                        contexts,
                        batch=batch,
                        temperature=temperature,
                        max_new_tokens=options.max_new_tokens,
                        progress=bar.update,
                    )
    environment = Environment.capture(target.device)
    _write(options, target, source, cases, environment)
    return cases


def _write(
    options: EfficiencyOptions, target: Target, source: Path, cases: Sequence[Case], environment: Environment
) -> None:
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    figures = [{**asdict(case), "gaps": [case.gap(0.5), case.gap(0.95)]} for case in cases]
    head = {"options": recorded(options), "environment": asdict(environment)}
    (folder / "efficiency.json").write_text(json_by_line(head, "cases", figures))
    times = f"each answered {options.repeats} times, " if options.repeats > 1 else ""
    title = options.label or f"Engine efficiency, {Path(target.name).name}"
    note = (
        f"{options.limit} prompts of {source.name}, {times}at most {options.max_new_tokens} new tokens. Efficiency: "
        "bare forwards of target and drafter over measured time, median over answers; the parts of a step are means; "
        "ranges are 95 % bootstrap intervals over answers (`shape/evaluation/efficiency.py`). `oracle` drafts the "
        "truth with every fifth token corrupted, at no cost: its speed-up is simulated. Gaps are between arrivals of "
        "tokens, several at a time where a draft stood."
    )
    text = "\n\n".join([f"### {title}", report(cases), note, environment.line()])
    (folder / "efficiency.md").write_text(text + "\n")
