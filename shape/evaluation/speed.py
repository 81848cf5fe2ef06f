"""Speed of decoding methods on the same prompts, measured side by side in one process.

Every prompt is answered by every method in turn (interleaved, in rotating order, after a discarded warm-up),
so that a slow minute of the machine falls on all of them. A method is a drafter, `None` for our loop without
one, `"transformers"` for `model.generate` on the same loaded weights, `"transformers-lookup"` for the same
with transformers' own prompt lookup, or `Assisted` for the same with its assisted generation. Speed-up is
against the *stronger* of plain loop and plain `generate`, as time per decoded token; prefill is left out of
it and reported beside it. Several prompts may be answered at once, as a batch whose rows are decoded together, and
contexts may be filled up to a length with the text of other prompts.

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
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers.generation.streamers import BaseStreamer

from shape.data.conversations import Prompt
from shape.drafters import (
    Drafter,
)
from shape.errors import ConfigError, DataError
from shape.evaluation.environment import Environment
from shape.evaluation.journal import Journal
from shape.evaluation.results import Detail, PromptRecord, SpeedResults, Tally
from shape.generation.decoder import ShapeDecoder, ShapeOutput
from shape.generation.rules import Match, Rule
from shape.generation.stats import DecodeStats
from shape.target.model import Target


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
JOURNAL = "records.jsonl"
_LOOKUP: Outside = "transformers-lookup"
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
    batch: int = 1,
    context_length: int | None = None,
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
        batch: prompts answered at once; the record of a batch is that of its prompts together. What fills no batch is
            left out.
        context_length: tokens that every context is filled up to, with the text of other prompts before it; longer ones
            are left out. None takes contexts as they are.

    Raises:
        ConfigError: no baseline among the methods, numbers out of range, a method that takes no batches, or a journal
            of another run.
        DataError: no prompt can be measured, or two share an id.
    """
    if not any(method is None or method == "transformers" for method in methods.values()):
        raise ConfigError("the methods hold no baseline to compare with; add plain or transformers")
    if min(max_new_tokens, repeats) < 1 or warmup < 0 or temperature < 0:
        raise ConfigError(
            "max_new_tokens and repeats must be at least 1, warmup and temperature at least 0; "
            f"got {max_new_tokens}, {repeats}, {warmup} and {temperature:g}"
        )
    if batch < 1 or (context_length is not None and context_length < 1):
        raise ConfigError(f"batch is {batch} and context_length {context_length}; give positive numbers")
    single = [name for name, method in methods.items() if isinstance(method, Assisted) or method == _LOOKUP]
    if batch > 1 and single:
        raise ConfigError(f"transformers takes one row at a time for {single[0]}; leave it out, or give a batch of 1")
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
        "batch": batch,
        "context_length": context_length,
    }
    contexts = _Contexts(target, prompts, context_length, max_new_tokens)
    bench = _Bench(target, methods, contexts, max_new_tokens, temperature, repeats, fall_back)
    reasons = {prompt.id: contexts.refuse(contexts.of(prompt, prompt.opening)) for prompt in prompts}
    fitting = [prompt for prompt in prompts if reasons[prompt.id] is None]
    if not fitting:
        reason = next(iter(reasons.values()), None) or "none was given"
        raise DataError(f"no prompt can be measured: {reason}; give other prompts or a smaller max_new_tokens")
    groups = [fitting[start : start + batch] for start in range(0, len(fitting) - batch + 1, batch)]
    if not groups:
        raise DataError(
            f"a batch of {batch} cannot be filled with {len(fitting)} prompts; give more, or a smaller batch"
        )
    reasons |= {prompt.id: f"it fills no batch of {batch}" for prompt in fitting[len(groups) * batch :]}
    environment = Environment.capture(target.device)
    written = Journal(journal, settings | environment.machine())
    finished = {record.id: record for record in map(PromptRecord.from_dict, written.records)}
    for group in groups[:warmup]:
        openings = [contexts.of(prompt, prompt.opening) for prompt in group]
        for runner in bench.runners.values():
            runner(openings, [seed] * batch)
    unit = "prompt" if batch == 1 else "batch"
    for index, group in enumerate(tqdm(groups, desc="bench", unit=unit, disable=not progress)):
        if _name(group) not in finished:
            seeds = [seed + index * batch + row for row in range(batch)]
            finished[_name(group)] = bench.record(group, seeds, rotation=index)
            written.append(asdict(finished[_name(group)]))
    records = tuple(finished[_name(group)] for group in groups)
    return SpeedResults(
        label=label or f"{settings['target']}, temperature {temperature:g}",
        settings=settings,
        environment=environment,
        projected_cost={name: projected_draft_cost(method, target) for name, method in methods.items()},
        records=records,
        skipped={
            **{name: reason for name, reason in reasons.items() if reason is not None},
            **{record.id: record.cut for record in records if record.cut},
        },
    )


def measure_in(
    folder: Path,
    target: Target,
    methods: Mapping[str, Method],
    prompts: Sequence[Prompt],
    *,
    keep: bool = False,
    **settings: Any,
) -> SpeedResults:
    """`measure`, with results.json and results.md in a folder, and its journal, records.jsonl, there until then.

    Args:
        keep: leave the journal, for whoever measures more.
    """
    folder.mkdir(parents=True, exist_ok=True)
    journal = folder / JOURNAL
    results = measure(target, methods, prompts, journal=journal, **settings)
    (folder / "results.json").write_text(results.to_json())
    (folder / "results.md").write_text(results.to_markdown())
    if not keep:
        journal.unlink()
    return results


def _name(group: Sequence[Prompt]) -> str:
    """The id of a record."""
    return "+".join(prompt.id for prompt in group)


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
    asked = repr(list(prompts))
    more = [(prompt.template, [message.more for message in prompt.messages]) for prompt in prompts]
    if any(template or any(messages) for template, messages in more):  # the others keep the hash that they always had
        asked += repr(more)
    return hashlib.sha256(asked.encode()).hexdigest()[:16]


def describe(method: Method, beside: torch.device | None = None) -> str:
    """What a method is, in words that change when its settings or weights do, or its device is not the given one."""
    if isinstance(method, Ruled):
        return f"{describe(method.drafter, beside)}, acceptance {method.acceptance}"
    if method is None or isinstance(method, str):
        return method or "plain"
    if isinstance(method, Assisted):
        return f"transformers, assisted by {method.model!r}"
    return method.describe(beside)


def projected_draft_cost(method: Method, target: Target) -> float | None:
    """Weights the drafter reads per step over those the target reads, at the size of Llama-3.1-8B.

    Assumes that both are bound by memory, so that a target forward over a tree costs what one over a token does; see
    ``Drafter.weights_read``. Cache traffic and overheads are left out, and the measured acceptance length is taken to
    hold for the large target.

    Returns:
        0 where nothing is read, None for the baselines and for drafters of unknown cost.
    """
    if isinstance(method, Ruled):
        method = method.drafter
    if not isinstance(method, Drafter):
        return None
    read = method.weights_read(target, _LARGE_HIDDEN, _LARGE_VOCABULARY)
    return None if read is None else read / _LARGE_PARAMETERS


class _Contexts:
    """What is answered: the prompts' ids, filled up to a length where one is given."""

    def __init__(self, target: Target, prompts: Sequence[Prompt], length: int | None, max_new_tokens: int) -> None:
        self.target, self.length, self.max_new_tokens = target, length, max_new_tokens
        self._numbers = {prompt.id: number for number, prompt in enumerate(prompts)}
        self._openings = [] if length is None else [target.encode(p.opening, p.template) for p in prompts]
        self.too_long = (
            f"the prompt and {max_new_tokens} new tokens exceed the target's {target.max_positions} positions"
        )

    def of(self, prompt: Prompt, messages: Sequence[dict[str, Any]]) -> Tensor:
        """(1, L) ids of a prompt's conversation so far, behind other prompts' texts where there is room."""
        ids = self.target.encode(messages, prompt.template)
        missing = 0 if self.length is None else self.length - ids.shape[1]
        if missing <= 0:
            return ids
        number = self._numbers[prompt.id]
        others = self._openings[number + 1 :] + self._openings[:number] or self._openings
        text = torch.cat(others, dim=1)
        text = text.repeat(1, -(-missing // text.shape[1]))
        return torch.cat([text[:, text.shape[1] - missing :], ids], dim=1)

    def refuse(self, context: Tensor) -> str | None:
        """Why a context is not answered."""
        limit = self.target.max_positions
        if limit is not None and context.shape[1] + self.max_new_tokens > limit:
            return self.too_long
        if self.length is not None and context.shape[1] > self.length:
            return f"the prompt is longer than the contexts of {self.length} tokens"
        return None


@dataclass(frozen=True)
class _Run:
    """One timed call of one method on the contexts of a batch; `prefilled` tokens came with the prefill."""

    rows: list[list[int]]
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

    def run(self, output: Tensor, prompt: int, eos: Sequence[int], stats: DecodeStats | None = None) -> _Run:
        """The finished call: its output (B, L) is read to the host before the watch stops."""
        rows = output[:, prompt:].tolist()
        end = time.perf_counter()
        prefilled, prefill = self.prefilled, self.first - self.start
        if stats is not None and len(rows) > 1:  # our loop streams single rows, and has a watch of its own
            prefilled, prefill = len(rows), stats.prefill_seconds
        # Our loop streams what a step settled token by token; to whoever reads it arrives at once.
        gaps = [step.seconds for step in stats.steps] if stats else [b - a for a, b in pairwise(self.times[1:])]
        return _Run([_ended(row, eos) for row in rows], prefilled, end - self.start - prefill, prefill, gaps, stats)


def _ended(row: list[int], eos: Sequence[int]) -> list[int]:
    """A row without the padding behind its end."""
    end = next((place for place, token in enumerate(row) if token in eos), len(row))
    return row[: end + 1]


class _Bench:
    """The methods, ready to run on one target."""

    def __init__(
        self,
        target: Target,
        methods: Mapping[str, Method],
        contexts: _Contexts,
        max_new_tokens: int,
        temperature: float,
        repeats: int,
        fall_back: bool | float,
    ) -> None:
        self.target, self.contexts, self.repeats, self.fall_back = target, contexts, repeats, fall_back
        self.eos = target.eos_token_ids
        self.options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
        if temperature > 0:
            self.options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        self.runners: dict[str, Callable[[Sequence[Tensor], list[int]], _Run]] = {
            name: self._runner(method) for name, method in methods.items()
        }
        self.plain = next((name for name, method in methods.items() if method is None), None)
        self.transformers = next((name for name, method in methods.items() if method == "transformers"), None)
        self.reference = self.plain or next(iter(methods))

    def _runner(self, method: Method) -> Callable[[Sequence[Tensor], list[int]], _Run]:
        if method == "transformers":
            return self._run_transformers
        if method == _LOOKUP:
            return partial(self._run_transformers, prompt_lookup_num_tokens=_LOOKUP_TOKENS)
        if isinstance(method, Assisted):
            return partial(self._run_transformers, assistant_model=method.model.model)
        drafter, rule = (method.drafter, method.acceptance) if isinstance(method, Ruled) else (method, Match())
        decoder = ShapeDecoder(self.target, drafter, fall_back=self.fall_back)
        rule.fit(decoder.drafter, decoder.target)  # what cannot be served is said before anything is measured
        return lambda contexts, seeds: self._run_ours(decoder, contexts, seeds, rule)

    def _run_transformers(self, contexts: Sequence[Tensor], seeds: list[int], **more: Any) -> _Run:
        device, (ids, mask) = self.target.device, _side_by_side(contexts)
        if len(contexts) > 1:
            more["pad_token_id"] = self.eos[0] if self.eos else 0  # it is cut off again
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seeds[0])
            clock = _Clock()
            output = self.target.model.generate(ids, attention_mask=mask, streamer=clock, **self.options, **more)
            return clock.run(output, ids.shape[1], self.eos)

    def _run_ours(self, decoder: ShapeDecoder, contexts: Sequence[Tensor], seeds: list[int], acceptance: Rule) -> _Run:
        ids, mask = _side_by_side(contexts)
        clock = _Clock()
        output = decoder.generate(
            ids,
            attention_mask=mask,
            seed=seeds,
            streamer=clock if len(contexts) == 1 else None,
            acceptance=acceptance,
            return_dict_in_generate=True,
            **self.options,
        )
        assert isinstance(output, ShapeOutput)
        return clock.run(output.sequences, ids.shape[1], self.eos, output.stats)

    def record(self, group: Sequence[Prompt], seeds: Sequence[int], rotation: int) -> PromptRecord:
        """Every method's answers to every turn of a batch of prompts."""
        tallies, details = dict.fromkeys(self.runners, Tally()), dict.fromkeys(self.runners, Detail())
        messages, going, cut = [prompt.opening for prompt in group], list(range(len(group))), None
        for turn in range(max(len(prompt.turns) for prompt in group)):
            asked, going = [row for row in going if turn < len(group[row].turns)], []
            contexts = []
            for row in asked:
                if turn > 0:
                    messages[row] = [*messages[row], {"role": "user", "content": group[row].turns[turn]}]
                context = self.contexts.of(group[row], messages[row])
                if reason := self.contexts.refuse(context):
                    cut = f"{reason} at turn {turn + 1}"
                else:
                    going.append(row)
                    contexts.append(context)
            if not going:
                break
            runs = self._answers(contexts, [seeds[row] for row in going], rotation + turn)
            for name in self.runners:
                tallies[name] += self._tally(runs, name)
                details[name] += runs[name].detail
            for row, tokens in zip(going, runs[self.reference].rows, strict=True):
                messages[row] = [*messages[row], self.target.message(tokens, group[row].template)]
        categories = {prompt.category for prompt in group}
        category = categories.pop() if len(categories) == 1 else "several"
        return PromptRecord(_name(group), category, tallies, cut, details)

    def _answers(self, contexts: Sequence[Tensor], seeds: list[int], rotation: int) -> dict[str, _Run]:
        """One run per method: the interleaved repeats with their median times."""
        names = list(self.runners)
        runs: dict[str, list[_Run]] = {name: [] for name in names}
        for repeat in range(self.repeats):
            first = (rotation + repeat) % len(names)
            for name in names[first:] + names[:first]:
                runs[name].append(self.runners[name](contexts, seeds))
        return {
            name: replace(
                tries[0],
                decode_seconds=median(run.decode_seconds for run in tries),
                prefill_seconds=median(run.prefill_seconds for run in tries),
            )
            for name, tries in runs.items()
        }

    def _tally(self, runs: dict[str, _Run], name: str) -> Tally:
        run, rows, stats = runs[name], runs[name].rows, runs[name].stats
        bigrams = [list(pairwise(row)) for row in rows]
        tokens = sum(map(len, rows))

        def equal(other: str | None) -> int:
            return 0 if other is None else sum(map(list.__eq__, rows, runs[other].rows))

        return Tally(
            answers=len(rows),
            tokens=tokens,
            timed_tokens=tokens - run.prefilled,
            decode_seconds=run.decode_seconds,
            prefill_seconds=run.prefill_seconds,
            forwards=stats.forwards if stats else 0,
            draft_steps=stats.draft_steps if stats else 0,
            accepted=stats.accepted if stats else 0,
            draft_seconds=stats.draft_seconds if stats else 0.0,
            verify_seconds=stats.verify_seconds if stats else 0.0,
            commit_seconds=stats.commit_seconds if stats else 0.0,
            bigrams=sum(map(len, bigrams)),
            distinct_bigrams=sum(len(set(own)) for own in bigrams),
            ended=sum(row[-1] in self.eos for row in rows),
            equal_plain=equal(self.plain),
            equal_transformers=equal(self.transformers),
        )


def _side_by_side(contexts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Ids (B, L) of contexts (1, any) each, padded on the left, and their mask."""
    longest = max(context.shape[1] for context in contexts)
    ids = torch.cat([F.pad(context, (longest - context.shape[1], 0)) for context in contexts])
    mask = torch.cat([F.pad(torch.ones_like(context), (longest - context.shape[1], 0)) for context in contexts])
    return ids, mask
