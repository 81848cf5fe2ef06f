"""Speed of decoding methods on the same prompts, measured side by side in one process.

Every prompt is answered by every method in turn (interleaved, in rotating order, after a discarded warm-up),
so that a slow minute of the machine falls on all of them. A method is a drafter, `None` for our loop without
one, `"transformers"` for `model.generate` on the same loaded weights, `"transformers-lookup"` for the same
with transformers' own prompt lookup, or `Assisted` for the same with its assisted generation. Speed-up is
against the *stronger* of plain loop and plain `generate`, as time per decoded token; prefill is left out of
it and reported beside it.

Terms: *acceptance length* is tokens emitted per target forward after the prefill, bonus included. *Tokens per
draft step* is 1 + accepted / drafts, over the steps that had a draft. The token that the prefill itself
yields counts on neither side of any ratio (prompt lookup drafts in the prefill already: there, all tokens that
come with it are left out).
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm
from transformers.generation.streamers import BaseStreamer

from shape.conversations import Prompt
from shape.decoder import ShapeDecoder, ShapeOutput
from shape.drafters import (
    Drafter,
    GeodesicDrafter,
    HybridDrafter,
    LookaheadDrafter,
    NgramDrafter,
    OneDecodeDrafter,
    SuffixDrafter,
    TrainedDrafter,
)
from shape.errors import ConfigError, DataError
from shape.evaluation.environment import Environment
from shape.evaluation.journal import Journal
from shape.evaluation.results import Detail, PromptRecord, SpeedResults, Tally
from shape.rules import Match, Rule
from shape.stats import DecodeStats
from shape.target import Target


@dataclass(frozen=True)
class Ruled:
    """A drafter under an acceptance rule other than "match"."""

    drafter: Drafter | None
    acceptance: Rule


@dataclass(frozen=True)
class Assisted:
    """transformers' own assisted generation, with a smaller model."""

    model: Target


Outside = Literal["transformers", "transformers-lookup"]
Method = Drafter | Ruled | Assisted | Outside | None

# The 8B target of the projection: parameters, width and vocabulary of Llama-3.1-8B.
_LARGE_PARAMETERS, _LARGE_HIDDEN, _LARGE_VOCABULARY = 8.03e9, 4096, 128_256
# How far transformers' prompt lookup drafts: the value of its documentation.
_LOOKUP_TOKENS = 10


def measure(
    target: Target,
    methods: Mapping[str, Method],
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    repeats: int = 1,
    warmup: int = 2,
    seed: int = 0,
    progress: bool = True,
    label: str = "",
    source: str = "",
    journal: Path | None = None,
    fall_back: bool | float = True,
) -> SpeedResults:
    """Answers every prompt with every method and returns what it took.

    Turns are answered in order, and the plain loop's answer (or else the first method's) is the context of
    the next turn for all methods, so that all decode from the same text. Prompts and turns that leave no room
    for `max_new_tokens` in the target's positions are left out, and the results say so. At a temperature all
    methods sample with the same seed per prompt, top_k = 0 and top_p = 1.

    Args:
        methods: name -> drafter, None (our loop without one), "transformers", "transformers-lookup" or Assisted; None
            or "transformers" has to be among them.
        repeats: timed runs per answer, of which the median counts.
        warmup: prompts whose first turn every method answers, untimed, before the measurement.
        label: heading of the table.
        source: what the prompts are, for the record.
        journal: a JSON-lines file to which finished prompts are appended. A journal of the same settings,
            machine and code is continued, another one raises.
        fall_back: see `ShapeDecoder`.

    Raises:
        ConfigError: no baseline among the methods, numbers out of range, or a journal of another run.
        DataError: no prompt can be measured, or two share an id.
    """
    if not any(method is None or method == "transformers" for method in methods.values()):
        raise ConfigError("the methods hold no baseline to compare with; add plain or transformers")
    if min(max_new_tokens, repeats) < 1 or warmup < 0 or temperature < 0:
        raise ConfigError(
            "max_new_tokens and repeats must be at least 1, warmup and temperature at least 0; "
            f"got {max_new_tokens}, {repeats}, {warmup} and {temperature:g}"
        )
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise DataError("two prompts share an id; give every prompt its own")
    if target.tokenizer is None:
        raise DataError(f"target {target.name} has no tokenizer to encode prompts with; give a folder that has one")
    settings = {
        **target_settings(target),
        "methods": {name: describe(method, target.device) for name, method in methods.items()},
        "prompts": source or "the given prompts",
        "prompts_hash": prompts_hash(prompts),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "repeats": repeats,
        "warmup": warmup,
        "seed": seed,
        "fall_back": fall_back,
    }
    bench = _Bench(target, methods, max_new_tokens, temperature, repeats, fall_back)
    rooms = {prompt.id: bench.fits(target.encode(prompt.opening)) for prompt in prompts}
    measured = [prompt for prompt in prompts if rooms[prompt.id]]
    if not measured:
        reason = bench.too_long if prompts else "none was given"
        raise DataError(f"no prompt can be measured: {reason}; give other prompts or a smaller max_new_tokens")
    environment = Environment.capture(target.device)
    written = Journal(journal, settings | environment.machine())
    finished = {record.id: record for record in map(PromptRecord.from_dict, written.records)}
    for prompt in measured[:warmup]:
        context = target.encode(prompt.opening)
        for runner in bench.runners.values():
            runner(context, seed)
    for index, prompt in enumerate(tqdm(measured, desc="bench", unit="prompt", disable=not progress)):
        if prompt.id not in finished:
            finished[prompt.id] = bench.record(prompt, seed + index, rotation=index)
            written.append(asdict(finished[prompt.id]))
    records = tuple(finished[prompt.id] for prompt in measured)
    return SpeedResults(
        label=label or f"{settings['target']}, temperature {temperature:g}",
        settings=settings,
        environment=environment,
        projected_cost={name: projected_draft_cost(method, target) for name, method in methods.items()},
        records=records,
        skipped={
            **{prompt.id: bench.too_long for prompt in prompts if not rooms[prompt.id]},
            **{record.id: record.cut for record in records if record.cut},
        },
    )


def measure_in(
    folder: Path, target: Target, methods: Mapping[str, Method], prompts: Sequence[Prompt], **settings: Any
) -> SpeedResults:
    """`measure`, with results.json and results.md in a folder, and its journal, records.jsonl, there until then."""
    folder.mkdir(parents=True, exist_ok=True)
    journal = folder / "records.jsonl"
    results = measure(target, methods, prompts, journal=journal, **settings)
    (folder / "results.json").write_text(results.to_json())
    (folder / "results.md").write_text(results.to_markdown())
    journal.unlink()
    return results


def target_settings(target: Target) -> dict[str, Any]:
    """What a record of a measurement says of its target."""
    return {
        # Not where it lies: a moved folder is the same target.
        "target": Path(target.name).name if Path(target.name).exists() else target.name,
        "target_identity": replace(target.identity, name="").to_dict(),
        "parameters": target.model.num_parameters(),
        "dtype": target.precision,
    }


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """By which two measurements know that they asked the same."""
    return hashlib.sha256(repr(list(prompts)).encode()).hexdigest()[:16]


def describe(method: Method, beside: torch.device | None = None) -> str:
    """What a method is, in words that change when its settings or weights do, or its device is not the given one."""
    if isinstance(method, Ruled):
        return f"{describe(method.drafter, beside)}, acceptance {method.acceptance}"
    if method is None or isinstance(method, str):
        return method or "plain"
    if isinstance(method, Assisted):
        return f"transformers, assisted by {method.model!r}"
    if isinstance(method, HybridDrafter):
        return f"{method.nodes} nodes of {' + '.join(describe(each, beside) for each in method.drafters)}"
    if not isinstance(method, TrainedDrafter):
        return str(method)
    sums = [parameter.double().sum().item() for parameter in method.predictor.parameters()]
    where = "" if beside in (None, method.predictor.device) else f", on {method.predictor.device}"
    return f"{method.name}, {method.tree}, weights {hashlib.sha256(repr(sums).encode()).hexdigest()[:8]}{where}"


def projected_draft_cost(method: Method, target: Target) -> float | None:
    """Weights the drafter reads per step over those the target reads, at the size of Llama-3.1-8B.

    Assumes that both are bound by memory, so that a target forward over a tree costs what one over a token
    does; that the predictor's parameters grow with the square of the width, and tables of tokens with width and
    vocabulary (the same share of it that is drafted from here); that recursive predictors read their own weights and an
    output embedding once per depth of their tree, parallel ones once, but for a Markov bias. Cache traffic and
    overheads are left out, and the measured acceptance length is taken to hold for the large target.

    Returns:
        0 where nothing is read, None for the baselines and for drafters of unknown cost.
    """
    if isinstance(method, Ruled):
        method = method.drafter
    if isinstance(method, NgramDrafter | SuffixDrafter | LookaheadDrafter | OneDecodeDrafter):
        return 0.0
    if isinstance(method, GeodesicDrafter):
        return _LARGE_VOCABULARY * _LARGE_HIDDEN / _LARGE_PARAMETERS  # the output embedding, once for all depths
    if isinstance(method, HybridDrafter):
        parts = [projected_draft_cost(each, target) for each in method.drafters]
        return None if None in parts else sum(part for part in parts if part is not None)
    if not isinstance(method, TrainedDrafter):
        return None
    predictor, config = method.predictor, method.predictor.config
    drafted = (config.draft_vocab_size or target.vocab_size) / target.vocab_size * _LARGE_VOCABULARY
    heads, bias = predictor.heads, predictor.markov
    tables = (0 if heads is None else heads.numel()) + (0 if bias is None else bias.expand.weight.numel())
    own = (predictor.num_parameters() - tables) * (_LARGE_HIDDEN / target.hidden_size) ** 2
    read = own + drafted * _LARGE_HIDDEN * (1 if heads is None else len(heads))
    passes = method.tree.depth if config.step_mode == "recursive" else 1
    return (passes * read + method.tree.depth * config.markov_rank * drafted) / _LARGE_PARAMETERS


@dataclass(frozen=True)
class _Run:
    """One timed call of one method on one context; `prefilled` tokens came with the prefill."""

    tokens: list[int]
    prefilled: int
    decode_seconds: float
    prefill_seconds: float
    gaps: Sequence[float]  # seconds between arrivals behind the prefill
    stats: DecodeStats | None = None

    @property
    def detail(self) -> Detail:
        gaps = [float(f"{1e3 * gap:.3g}") for gap in self.gaps]
        if self.stats is None:
            return Detail(gaps=gaps)
        return Detail(dict(self.stats.histogram), gaps, self.stats.sources)


class _Clock(BaseStreamer):
    """One stopwatch for every method: what is streamed first after the prompt ends the prefill."""

    def __init__(self) -> None:
        self.calls = self.prefilled = 0
        self.start = self.first = time.perf_counter()
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.calls += 1
        self.times.append(time.perf_counter())
        if self.calls == 2:
            self.first, self.prefilled = self.times[-1], value.numel()

    def end(self) -> None: ...

    def run(self, output: Tensor, prompt: int, stats: DecodeStats | None = None) -> _Run:
        """The finished call: its output (1, L) is read to the host before the watch stops."""
        tokens = output[0, prompt:].tolist()
        seconds = time.perf_counter() - self.first
        # Our loop streams what a step settled token by token; to whoever reads it arrives at once.
        gaps = [step.seconds for step in stats.steps] if stats else [b - a for a, b in pairwise(self.times[1:])]
        return _Run(tokens, self.prefilled, seconds, self.first - self.start, gaps, stats)


class _Bench:
    """The methods, ready to run on one target."""

    def __init__(
        self,
        target: Target,
        methods: Mapping[str, Method],
        max_new_tokens: int,
        temperature: float,
        repeats: int,
        fall_back: bool | float,
    ) -> None:
        self.target, self.repeats, self.max_new_tokens = target, repeats, max_new_tokens
        self.fall_back = fall_back
        self.options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
        if temperature > 0:
            self.options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        self.runners: dict[str, Callable[[Tensor, int], _Run]] = {
            name: self._runner(method) for name, method in methods.items()
        }
        self.plain = next((name for name, method in methods.items() if method is None), None)
        self.transformers = next((name for name, method in methods.items() if method == "transformers"), None)
        self.reference = self.plain or next(iter(methods))
        self.too_long = (
            f"the prompt and {max_new_tokens} new tokens exceed the target's {target.max_positions} positions"
        )

    def _runner(self, method: Method) -> Callable[[Tensor, int], _Run]:
        if method == "transformers":
            return self._run_transformers
        if method == "transformers-lookup":
            return partial(self._run_transformers, prompt_lookup_num_tokens=_LOOKUP_TOKENS)
        if isinstance(method, Assisted):
            return partial(self._run_transformers, assistant_model=method.model.model)
        drafter, rule = (method.drafter, method.acceptance) if isinstance(method, Ruled) else (method, Match())
        decoder = ShapeDecoder(self.target, drafter, fall_back=self.fall_back)
        rule.fit(decoder.drafter, decoder.target)  # what cannot be served is said before anything is measured
        return lambda context, seed: self._run_ours(decoder, context, seed, rule)

    def _run_transformers(self, context: Tensor, seed: int, **more: Any) -> _Run:
        device = self.target.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            clock = _Clock()
            output = self.target.model.generate(
                context, attention_mask=torch.ones_like(context), streamer=clock, **self.options, **more
            )
            return clock.run(output, context.shape[1])

    def _run_ours(self, decoder: ShapeDecoder, context: Tensor, seed: int, acceptance: Rule) -> _Run:
        clock = _Clock()
        output = decoder.generate(
            context,
            attention_mask=torch.ones_like(context),
            seed=seed,
            streamer=clock,
            acceptance=acceptance,
            return_dict_in_generate=True,
            **self.options,
        )
        assert isinstance(output, ShapeOutput)
        return clock.run(output.sequences, context.shape[1], output.stats)

    def fits(self, context: Tensor) -> bool:
        limit = self.target.max_positions
        return limit is None or context.shape[1] + self.max_new_tokens <= limit

    def record(self, prompt: Prompt, seed: int, rotation: int) -> PromptRecord:
        """Every method's answers to every turn of a prompt."""
        tallies, details = dict.fromkeys(self.runners, Tally()), dict.fromkeys(self.runners, Detail())
        messages, cut = prompt.opening, None
        for turn in range(len(prompt.turns)):
            if turn > 0:
                messages = [*messages, {"role": "user", "content": prompt.turns[turn]}]
            context = self.target.encode(messages)
            if not self.fits(context):
                cut = f"{self.too_long} at turn {turn + 1}"
                break
            runs = self._answers(context, seed, rotation + turn)
            for name in self.runners:
                tallies[name] += self._tally(runs, name)
                details[name] += runs[name].detail
            reply = self.target.tokenizer.decode(runs[self.reference].tokens, skip_special_tokens=True)
            messages = [*messages, {"role": "assistant", "content": reply}]
        return PromptRecord(prompt.id, prompt.category, tallies, cut, details)

    def _answers(self, context: Tensor, seed: int, rotation: int) -> dict[str, _Run]:
        """One run per method: the interleaved repeats with their median times."""
        names = list(self.runners)
        runs: dict[str, list[_Run]] = {name: [] for name in names}
        for repeat in range(self.repeats):
            first = (rotation + repeat) % len(names)
            for name in names[first:] + names[:first]:
                runs[name].append(self.runners[name](context, seed))
        return {
            name: replace(
                tries[0],
                decode_seconds=median(run.decode_seconds for run in tries),
                prefill_seconds=median(run.prefill_seconds for run in tries),
            )
            for name, tries in runs.items()
        }

    def _tally(self, runs: dict[str, _Run], name: str) -> Tally:
        run, tokens = runs[name], runs[name].tokens
        bigrams = list(pairwise(tokens))
        stats = run.stats
        return Tally(
            answers=1,
            tokens=len(tokens),
            timed_tokens=len(tokens) - run.prefilled,
            decode_seconds=run.decode_seconds,
            prefill_seconds=run.prefill_seconds,
            forwards=stats.forwards if stats else 0,
            draft_steps=stats.draft_steps if stats else 0,
            accepted=stats.accepted if stats else 0,
            draft_seconds=stats.draft_seconds if stats else 0.0,
            verify_seconds=stats.verify_seconds if stats else 0.0,
            commit_seconds=stats.commit_seconds if stats else 0.0,
            bigrams=len(bigrams),
            distinct_bigrams=len(set(bigrams)),
            ended=int(tokens[-1] in self.target.eos_token_ids),
            equal_plain=int(self.plain is not None and tokens == runs[self.plain].tokens),
            equal_transformers=int(self.transformers is not None and tokens == runs[self.transformers].tokens),
        )
