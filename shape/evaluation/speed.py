"""Speed of decoding methods on the same prompts, measured side by side in one process.

Every prompt is answered by every method in turn, in rotating order, after a discarded warm-up, so that a slow minute of
the machine falls on all of them. Speed-up is against the *faster* of our autoregressive loop and transformers'
`generate` on the same weights, as time per decoded token; prefill is left out of it and reported beside it. Several
prompts may be decoded together as a batch, and contexts may be filled up to a length with the text of other prompts.

Terms: *acceptance length* is tokens emitted per target forward after the prefill, bonus included. *Tokens per
draft step* is 1 + accepted / drafts, over the steps that had a draft. The token that the prefill itself
yields counts on neither side of any ratio (prompt lookup drafts in the prefill already: there, all tokens that
come with it are left out).
"""

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from shape.data.backends import sampling, switched_off
from shape.data.conversations import Conversation, Prompt
from shape.errors import ConfigError, DataError, require
from shape.evaluation.environment import Environment
from shape.evaluation.files import loads
from shape.evaluation.journal import JOURNAL, Journal, refuse_other
from shape.evaluation.methods import (
    ASSISTED,
    LOOKUP,
    Assisted,
    Configured,
    Method,
    describe,
    prompts_hash,
    target_settings,
)
from shape.evaluation.prompts import refuse_shared_ids, refuse_unfilled
from shape.evaluation.results import Detail, PromptRecord, SpeedResults, Tally
from shape.evaluation.runner import Run, Runner, by_decoder, by_transformers, rotated
from shape.files import reading, sole_writer, write_whole
from shape.generation.decoder import ShapeDecoder
from shape.target.model import Target

# How far transformers' prompt lookup drafts: the value of its documentation.
_LOOKUP_TOKENS = 10
RESULTS = "results.json"


@contextmanager
def uncollected() -> Iterator[None]:
    """Within it what is loaded already is left to no collection of garbage: a look through it, a third of a second,
    would fall on some answer.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True)
class SpeedSetting:
    """How prompts are answered, by every method alike.

    Attributes:
        temperature: 0 decodes greedily; above, all methods sample with the same seed per prompt, top_k = 0 and
            top_p = 1.
        repeats: timed runs per answer, of which the one of median decode time counts.
        warmup: prompts whose first turn every method answers, untimed, before the measurement.
        fall_back: see `ShapeDecoder`.
        batch: prompts answered at once; the record of a batch is that of its prompts together. What fills no batch is
            left out.
        context_length: tokens that every context is filled up to, with the text of other prompts before it; longer ones
            are left out. None takes contexts as they are.
    """

    max_new_tokens: int
    temperature: float = 0.0
    repeats: int = 1
    warmup: int = 2
    seed: int = 0
    fall_back: bool | float = True
    batch: int = 1
    context_length: int | None = None

    def check(self, methods: Mapping[str, Method | str], prompts: Sequence[Prompt], source: str) -> None:
        """What can be said before anything is loaded, as `measure` raises it.

        Args:
            methods: as of `measure`; a name stands for one that is not made yet.
        """
        if not any(method is None or method == "transformers" for method in methods.values()):
            raise ConfigError("the methods hold no baseline to compare with; add autoregressive or transformers")
        require(self, "max_new_tokens repeats batch context_length", least=1)
        require(self, "warmup temperature", least=0)
        single = [name for name, one in methods.items() if isinstance(one, Assisted) or one in (LOOKUP, ASSISTED)]
        if self.batch > 1 and single:
            raise ConfigError(
                f"transformers decodes one prompt at a time for {single[0]}; leave it out, or give batch size 1"
            )
        refuse_shared_ids(prompts, source or "the given prompts")
        if prompts:
            refuse_unfilled(self.batch, len(prompts), source or "this call")


def measure(
    target: Target,
    methods: Mapping[str, Method],
    prompts: Sequence[Prompt],
    setting: SpeedSetting,
    *,
    progress: bool = True,
    label: str = "",
    source: str = "",
    journal: Path | None = None,
) -> SpeedResults:
    """Answers every prompt with every method and returns what it took.

    Turns are answered in order, and the autoregressive loop's answer (or else the first method's) is the context of
    the next turn for all methods, so that all decode from the same text. Prompts and turns that leave no room
    for `max_new_tokens` in the target's positions are left out, and the results say so.

    Args:
        methods: name -> drafter, Configured, None (our loop without one), "transformers", "transformers-lookup" or
            Assisted; None or "transformers" has to be among them.
        label: heading of the table.
        source: what the prompts are, for the record.
        journal: a JSON-lines file to which finished prompts are appended. A journal of the same settings,
            machine and code is continued, another one raises.

    Raises:
        ConfigError: no baseline among the methods, numbers out of range, a method that takes no batches, or a journal
            of another run.
        DataError: no prompt can be measured, or two share an id.
    """
    setting.check(methods, prompts, source)
    if target.tokenizer is None:
        raise DataError(f"target {target.name} has no tokenizer to encode prompts with; give a folder that has one")
    settings, batch = settings_of(target, methods, prompts, source, setting), setting.batch
    contexts = Contexts(target, prompts, setting.context_length, setting.max_new_tokens)
    options = {"max_new_tokens": setting.max_new_tokens, **sampling(setting.temperature)}
    runners = {name: _runner(method, target, setting.fall_back, options) for name, method in methods.items()}
    bench = Bench(target, runners, methods, contexts, setting.repeats)
    reasons = {prompt.id: contexts.refuse(contexts.of(prompt, prompt.opening)) for prompt in prompts}
    fitting = [prompt for prompt in prompts if reasons[prompt.id] is None]
    if not fitting:
        reason = next(iter(reasons.values()), None) or "none was given"
        raise DataError(f"no prompt can be measured: {reason}; give other prompts or a smaller max_new_tokens")
    refuse_unfilled(batch, len(fitting), f"{source or 'this call'} that fit")
    groups = [fitting[start : start + batch] for start in range(0, len(fitting) - batch + 1, batch)]
    reasons |= {prompt.id: f"it fills no batch of {batch}" for prompt in fitting[len(groups) * batch :]}
    environment = Environment.capture(target.device)
    written = Journal(journal, settings | environment.machine())
    finished = {record.id: record for record in map(PromptRecord.from_dict, written.records)}
    for group in groups[: setting.warmup]:
        openings = [contexts.of(prompt, prompt.opening) for prompt in group]
        for runner in runners.values():
            runner(openings, [setting.seed] * batch)
    unit = "prompt" if batch == 1 else "batch"
    with uncollected():
        for index, group in enumerate(tqdm(groups, desc="bench", unit=unit, disable=not progress)):
            if _name(group) not in finished:
                seeds = [setting.seed + index * batch + place for place in range(batch)]
                finished[_name(group)] = bench.record(group, seeds, turn=index)
                written.append(asdict(finished[_name(group)]))
    records = tuple(finished[_name(group)] for group in groups)
    return SpeedResults(
        label=label or f"{settings['target']}, temperature {setting.temperature:g}",
        settings=settings,
        environment=environment,
        records=records,
        skipped={
            **{name: reason for name, reason in reasons.items() if reason is not None},
            **{record.id: record.cut for record in records if record.cut},
        },
    )


def settings_of(
    target: Target, methods: Mapping[str, Method], prompts: Sequence[Prompt], source: str, setting: SpeedSetting
) -> dict[str, Any]:
    """What results say that was asked for, and what that switches off of the target's generation config."""
    off = switched_off(target.model.generation_config, setting.temperature)
    return {
        **target_settings(target),
        "methods": {name: describe(method, target.device) for name, method in methods.items()},
        "prompts": source or "the given prompts",
        "prompts_hash": prompts_hash(prompts),
        **asdict(setting),
        **({"switched_off": off} if off else {}),  # left out where empty, so that older results match
    }


def refuse_results(path: Path, settings: dict[str, Any], name: str = "settings") -> None:
    """Raises ConfigError where a file that is there already holds results of other settings, which would be lost.

    Args:
        name: under which the file has its own.
    """
    if path.exists():
        with reading(str(path), ConfigError, "give another output folder, or delete it"):
            refuse_other(path, loads(path.read_text(encoding="utf-8"))[name], json.loads(json.dumps(settings)))


def measure_in(
    folder: Path,
    target: Target,
    methods: Mapping[str, Method],
    prompts: Sequence[Prompt],
    setting: SpeedSetting,
    *,
    keep_journal: bool = False,
    training: Mapping[str, Sequence[Conversation]] | None = None,
    progress: bool = True,
    label: str = "",
    source: str = "",
) -> SpeedResults:
    """`measure`, with results.json and results.md in a folder, and until then its journal, records.jsonl.

    Args:
        training: the training text by the name of its file, to which prompts and answers are compared.
    """
    folder.mkdir(parents=True, exist_ok=True)
    journal, file = folder / JOURNAL, folder / RESULTS
    with sole_writer(folder / ".bench.lock", f"a measurement into {folder}"):
        refuse_results(file, settings_of(target, methods, prompts, source, setting))
        results = measure(
            target, methods, prompts, setting, progress=progress, label=label, source=source, journal=journal
        )
        if training:
            results = results.with_overlap(chain.from_iterable(training.values()), ", ".join(training))
        write_whole(file, results.to_json())
        write_whole(folder / "results.md", results.to_markdown())
        if not keep_journal:
            journal.unlink()
    return results


def _runner(method: Method, target: Target, fall_back: bool | float, options: dict[str, Any]) -> Runner:
    if method == "transformers":
        return by_transformers(target, **options)
    if method == LOOKUP:
        return by_transformers(target, prompt_lookup_num_tokens=_LOOKUP_TOKENS, **options)
    if isinstance(method, Assisted):
        return by_transformers(target, assistant_model=method.model.model, **options)
    how = method if isinstance(method, Configured) else Configured(method)  # type: ignore[arg-type]
    decoder = ShapeDecoder(target, how.drafter, fall_back=False if how.whole else fall_back)
    # A seed is for the sampling alone: the clock decides when to fall back, as in a call without one.
    return by_decoder(decoder, how.acceptance, reproducible=False, **options)


def _name(group: Sequence[Prompt]) -> str:
    """The id of a record."""
    return "+".join(prompt.id for prompt in group)


class Contexts:
    """What is answered: the prompts' ids, filled up to a length where one is given."""

    def __init__(self, target: Target, prompts: Sequence[Prompt], length: int | None, max_new_tokens: int) -> None:
        self.target, self.length, self.max_new_tokens = target, length, max_new_tokens
        self._numbers = {prompt.id: number for number, prompt in enumerate(prompts)}
        self._openings = [] if length is None else [target.encode(p.opening, p.template) for p in prompts]

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
            return f"the prompt and {self.max_new_tokens} new tokens exceed the target's {limit} positions"
        if self.length is not None and context.shape[1] > self.length:
            return f"the prompt is longer than the contexts of {self.length} tokens"
        return None


class Bench:
    """The methods, ready to answer prompts."""

    def __init__(
        self,
        target: Target,
        runners: Mapping[str, Runner],
        methods: Mapping[str, Method],
        contexts: Contexts,
        repeats: int,
    ) -> None:
        self.target, self.runners, self.contexts, self.repeats = target, runners, contexts, repeats
        self.autoregressive = next((name for name, method in methods.items() if method is None), None)
        self.transformers = next((name for name, method in methods.items() if method == "transformers"), None)
        self.reference = self.autoregressive or next(iter(methods))

    def record(self, group: Sequence[Prompt], seeds: Sequence[int], turn: int) -> PromptRecord:
        """Every method's answers to every turn of a batch of prompts.

        Args:
            turn: of the rotation.
        """
        tallies: dict[str, list[Tally]] = {name: [] for name in self.runners}
        details: dict[str, list[Detail]] = {name: [] for name in self.runners}
        messages, going, cut = [prompt.opening for prompt in group], list(range(len(group))), None
        texts: list[list[str]] = []
        for number in range(max(len(prompt.turns) for prompt in group)):
            asked, going = [place for place in going if number < len(group[place].turns)], []
            contexts = []
            for place in asked:
                if number > 0:
                    messages[place] = [*messages[place], {"role": "user", "content": group[place].turns[number]}]
                context = self.contexts.of(group[place], messages[place])
                if reason := self.contexts.refuse(context):
                    cut = f"{reason} at turn {number + 1}"
                else:
                    going.append(place)
                    contexts.append(context)
            if not going:
                break
            runs = self._answers(contexts, [seeds[place] for place in going], turn + number)
            for name, run in runs.items():
                tallies[name].append(self._tally(run, runs))
                details[name].append(_detail(run))
            for place, tokens in zip(going, runs[self.reference].sequences, strict=True):
                answer = self.target.message(tokens, group[place].template)
                messages[place] = [*messages[place], answer]
                texts.append([group[place].turns[number], str(answer.get("content", ""))])
        categories = {prompt.category for prompt in group}
        return PromptRecord(
            _name(group),
            categories.pop() if len(categories) == 1 else "several",
            {name: Tally.total(parts) for name, parts in tallies.items()},
            cut,
            {name: Detail.total(parts) for name, parts in details.items()},
            texts=texts,
        )

    def _answers(self, contexts: Sequence[Tensor], seeds: list[int], turn: int) -> dict[str, Run]:
        """One run per method: of the interleaved repeats the one of median decode time, whole, so that its parts are
        parts of that time.
        """
        runs: dict[str, list[Run]] = {name: [] for name in self.runners}
        for repeat in range(self.repeats):
            for name in rotated(list(runs), turn + repeat):
                runs[name].append(self.runners[name](contexts, seeds))
        return {
            name: sorted(tries, key=lambda run: run.decode_seconds)[(len(tries) - 1) // 2]
            for name, tries in runs.items()
        }

    def _tally(self, run: Run, runs: Mapping[str, Run]) -> Tally:
        answers, stats = run.sequences, run.stats
        bigrams = [list(pairwise(answer)) for answer in answers]

        def equal(other: str | None) -> int:
            return 0 if other is None else sum(map(list.__eq__, answers, runs[other].sequences))

        counted = (
            "forwards", "draft_steps", "drafted", "accepted", "draft_seconds", "verify_seconds", "commit_seconds"
        )  # fmt: skip
        return Tally(
            answers=len(answers),
            tokens=sum(map(len, answers)),
            timed_tokens=run.timed_tokens,
            decode_seconds=run.decode_seconds,
            prefill_seconds=run.prefill_seconds,
            wait_seconds=run.prefill_seconds * len(answers),
            **({} if stats is None else {name: getattr(stats, name) for name in counted}),
            bigrams=sum(map(len, bigrams)),
            distinct_bigrams=sum(len(set(own)) for own in bigrams),
            ended=sum(answer[-1] in self.target.eos_token_ids for answer in answers),
            equal_autoregressive=equal(self.autoregressive),
            equal_transformers=equal(self.transformers),
        )


def _detail(run: Run) -> Detail:
    gaps = [float(f"{1e3 * gap:.3g}") for gap in run.gaps]
    if run.stats is None:
        return Detail(gaps=gaps)
    return Detail(dict(run.stats.histogram), gaps, run.stats.sources, dict(run.stats.accepted_lengths))
