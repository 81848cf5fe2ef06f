"""What a speed measurement found, and the figures derived from it.

Every figure is a ratio of sums over prompts, so that any subset and any bootstrap resample is computed alike.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from statistics import fmean, median
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from shape.errors import DataError
from shape.evaluation.environment import Environment
from shape.evaluation.markdown import json_by_line, markdown, share, show, show_interval
from shape.files import reading, typed

SCHEMA_VERSION = 1
_BOOTSTRAP_SAMPLES = 2000


@dataclass(frozen=True)
class Tally:
    """Sums over answers of one method. Additive, so every reported figure is a ratio of two of these sums.

    The fields may be numbers, or arrays of one length (as in the bootstrap, where each entry is a resample).
    """

    answers: Any = 0
    tokens: Any = 0  # emitted in all
    timed_tokens: Any = 0  # emitted after the prefill's own token: the ones that decode_seconds paid for
    decode_seconds: Any = 0.0
    prefill_seconds: Any = 0.0
    forwards: Any = 0  # target forwards after the prefill
    draft_steps: Any = 0  # of these, the ones that had a draft to verify
    accepted: Any = 0  # drafted tokens accepted
    draft_seconds: Any = 0.0
    verify_seconds: Any = 0.0
    commit_seconds: Any = 0.0
    bigrams: Any = 0
    distinct_bigrams: Any = 0  # distinct within their own answer
    ended: Any = 0  # answers that ended by an end-of-sequence token
    equal_plain: Any = 0  # answers token for token those of the plain loop with the same seed
    equal_transformers: Any = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Tally)))

    @property
    def seconds_per_token(self) -> Any:
        return ratio(self.decode_seconds, self.timed_tokens)

    @property
    def acceptance_length(self) -> Any:
        return ratio(self.timed_tokens, self.forwards)

    @property
    def tokens_per_draft_step(self) -> Any:
        return 1 + ratio(self.accepted, self.draft_steps)

    @property
    def distinct_2(self) -> Any:
        return ratio(self.distinct_bigrams, self.bigrams)

    @property
    def eos_share(self) -> Any:
        return ratio(self.ended, self.answers)


@dataclass(frozen=True)
class Detail:
    """How steps went, one by one rather than summed; additive as well.

    Attributes:
        histogram: tokens settled in a step -> number of such steps.
        gaps: milliseconds between arrivals of tokens, of one or of several settled together, to three digits.
        sources: name of a drafter in a hybrid -> [proposed, accepted]; what two proposed counts for both.
    """

    histogram: dict[int, int] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    sources: dict[str, list[int]] = field(default_factory=dict)

    def __add__(self, other: "Detail") -> "Detail":
        names = dict.fromkeys([*self.sources, *other.sources])
        none = [0, 0]
        return Detail(
            dict(sorted((Counter(self.histogram) + Counter(other.histogram)).items())),
            self.gaps + other.gaps,
            {
                name: [a + b for a, b in zip(self.sources.get(name, none), other.sources.get(name, none), strict=True)]
                for name in names
            },
        )


@dataclass(frozen=True)
class PromptRecord:
    """What every method did on one prompt, summed over its turns; `cut` says why turns were left out.

    `details` is empty in results of before it was kept.
    """

    id: str
    category: str
    tallies: dict[str, Tally]
    cut: str | None = None
    details: dict[str, Detail] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PromptRecord":
        numbers = typed(dict[str, dict[str, float]], values["tallies"])  # whose fields may be arrays too
        return typed(cls, {**values, "tallies": numbers})


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % bootstrap interval over prompts; None where it is undefined."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Summary:
    """One method's line in the table. Rates are per second, prefill is milliseconds per answer."""

    answers: int
    tokens: int
    tokens_per_second: float | None
    tokens_per_second_median: float | None  # over prompts
    prefill_ms: float | None
    speed_up: Estimate
    acceptance_length: Estimate
    tokens_per_draft_step: float | None
    draft_share: float | None  # drafting's part of the decode time
    distinct_2: float | None
    eos_share: float | None
    equal_plain: int | None
    equal_transformers: int | None
    projected_speed_up_8b: float | None


@dataclass(frozen=True)
class SpeedResults:
    """The measured records of one run, and every figure derived from them.

    Attributes:
        settings: what was asked for: target, dtype, methods, temperature, lengths, repeats, seed, prompts.
        projected_cost: for each method, the weights its drafter would read per step beside an 8B target, as a
            share of that target's own; None where that is unknown (see `projected_draft_cost`).
        skipped: for each prompt left out, or cut after some of its turns, the reason.
    """

    label: str
    settings: dict[str, Any]
    environment: Environment
    projected_cost: dict[str, float | None]
    records: tuple[PromptRecord, ...]
    skipped: dict[str, str]

    @cached_property
    def total(self) -> dict[str, Tally]:
        return {name: sum((r.tallies[name] for r in self.records), Tally()) for name in self.methods}

    @cached_property
    def details(self) -> dict[str, Detail]:
        """Of the methods of which steps were looked at; empty in older results."""
        names = [name for name in self.methods if any(name in record.details for record in self.records)]
        return {name: sum((r.details.get(name, Detail()) for r in self.records), Detail()) for name in names}

    @property
    def methods(self) -> dict[str, str]:
        """What each method is: "transformers", "transformers-lookup", "plain", or its drafter's description."""
        return self.settings["methods"]

    @cached_property
    def baseline(self) -> str:
        """The stronger of transformers' generate and the plain loop: the divisor of every speed-up."""
        candidates = [name for name, what in self.methods.items() if what in ("transformers", "plain")]
        return min(candidates, key=lambda name: self.total[name].seconds_per_token)

    @property
    def categories(self) -> list[str]:
        return list(dict.fromkeys(record.category for record in self.records))

    @cached_property
    def summary(self) -> dict[str, Summary]:
        return {name: self.summarise(name) for name in self.methods}

    def summarise(self, name: str, category: str | None = None) -> Summary:
        """The figures of one method, over all prompts or those of one category."""
        records = [r for r in self.records if category is None or r.category == category]
        tallies = [r.tallies[name] for r in records]
        mine = _columns(tallies)
        base = _columns(r.tallies[self.baseline] for r in records)
        total, what = _weighted(mine, np.ones(len(records))), self.methods[name]
        ours = not what.startswith("transformers")
        is_drafted = ours and what != "plain"
        length = estimate(lambda w: _weighted(mine, w).acceptance_length, len(records)) if ours else None
        rates = [t.timed_tokens / t.decode_seconds for t in tallies if t.timed_tokens and t.decode_seconds]
        cost = self.projected_cost[name]
        greedy = self.settings["temperature"] == 0
        return Summary(
            answers=int(total.answers),
            tokens=int(total.tokens),
            tokens_per_second=number(1 / total.seconds_per_token),
            tokens_per_second_median=median(rates) if rates else None,
            prefill_ms=number(1e3 * total.prefill_seconds / total.answers),
            speed_up=estimate(
                lambda w: _weighted(base, w).seconds_per_token / _weighted(mine, w).seconds_per_token,
                len(records),
            ),
            acceptance_length=length or Estimate(None),
            tokens_per_draft_step=number(total.tokens_per_draft_step) if is_drafted else None,
            draft_share=number(ratio(total.draft_seconds, total.decode_seconds)) if is_drafted else None,
            distinct_2=number(total.distinct_2),
            eos_share=number(total.eos_share),
            equal_plain=int(total.equal_plain) if ours and "plain" in self.methods.values() else None,
            equal_transformers=(
                int(total.equal_transformers) if greedy and "transformers" in self.methods.values() else None
            ),
            projected_speed_up_8b=(
                None if cost is None or length is None else number(total.acceptance_length / (1 + cost))
            ),
        )

    def pooled(self, groups: Mapping[str, Sequence[str]]) -> "SpeedResults":
        """The same answers with methods taken together, for instance one predictor trained with several seeds.

        The counts of a group are summed prompt by prompt, so that every figure stays a ratio of sums and every interval
        is still over prompts.

        Args:
            groups: name in the new results -> methods, all of one kind, of these.
        """
        records = tuple(
            replace(
                record,
                tallies={
                    group: sum((record.tallies[name] for name in names), Tally()) for group, names in groups.items()
                },
                details={
                    group: sum((record.details[name] for name in names), Detail())
                    for group, names in groups.items()
                    if record.details
                },
            )
            for record in self.records
        )
        methods = {
            group: "; ".join(dict.fromkeys(self.methods[one] for one in names)) for group, names in groups.items()
        }
        cost = {group: self.projected_cost[names[0]] for group, names in groups.items()}
        return replace(self, settings={**self.settings, "methods": methods}, projected_cost=cost, records=records)

    @property
    def warnings(self) -> list[str]:
        """Figures that need an explanation before anyone believes them."""
        found = []
        for name, line in self.summary.items():
            speed_up, length = line.speed_up.value, line.acceptance_length.value
            if self.methods[name] != "plain" and speed_up and length and speed_up > length:
                found.append(f"{name}: the speed-up ({speed_up:.2f}) exceeds the acceptance length ({length:.2f})")
        if self.skipped:
            found.append(f"{len(self.skipped)} prompts left out or cut ({next(iter(self.skipped.values()))})")
        return found

    def to_json(self) -> str:
        """Everything; `from_json` reads it back (the summary is written for readers, not read)."""
        return json_by_line(
            {
                "schema_version": SCHEMA_VERSION,
                "label": self.label,
                "settings": self.settings,
                "environment": asdict(self.environment),
                "baseline": self.baseline,
                "summary": {name: asdict(line) for name, line in self.summary.items()},
                "categories": {
                    category: {name: asdict(self.summarise(name, category)) for name in self.methods}
                    for category in self.categories
                },
                "projected_cost": self.projected_cost,
                "warnings": self.warnings,
                "skipped": self.skipped,
            },
            "records",
            (asdict(record) for record in self.records),
        )

    @classmethod
    def from_json(cls, text: str) -> "SpeedResults":
        """Raises `DataError` on another schema, or where it is damaged."""
        with reading("this file of results", DataError, "measure again"):
            values = of_schema(text, SCHEMA_VERSION, "these results have")
            records = tuple(map(PromptRecord.from_dict, values["records"]))
            found = typed(cls, {each.name: values[each.name] for each in fields(cls)} | {"records": []})
            typed(dict[str, str], found.methods)
            return replace(found, records=records)

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Header and cells of the table, as text."""
        header = [
            "method",
            "tokens/s",
            "speed-up (95 %)",
            "acceptance length (95 %)",
            "tokens per draft step",
            "prefill ms",
            "draft share",
            "distinct-2",
            "ended by EOS",
            "equal to plain",
            "equal to transformers",
            "projected for 8B*",
        ]
        return header, [
            [
                f"{name} (baseline)" if name == self.baseline else name,
                show(line.tokens_per_second, ".0f"),
                interval(line.speed_up, "x"),
                interval(line.acceptance_length),
                show(line.tokens_per_draft_step),
                show(line.prefill_ms, ".1f"),
                show(line.draft_share, ".0%"),
                show(line.distinct_2),
                show(line.eos_share, ".0%"),
                share(line.equal_plain, line.answers),
                share(line.equal_transformers, line.answers),
                show(line.projected_speed_up_8b, ".2f", "x"),
            ]
            for name, line in self.summary.items()
        ]

    def notes(self) -> list[str]:
        """The lines under the table: what was measured, on what, and what to be careful about."""
        settings = self.settings
        answers = next(iter(self.summary.values())).answers
        batch = settings.get("batch", 1)
        return [
            f"Target {settings['target']} ({settings['parameters'] / 1e6:.1f}M parameters, "
            f"{settings['dtype']}), {len(self.records) * batch} prompts of {settings['prompts']} ({answers} "
            f"answers), at most {settings['max_new_tokens']} new tokens, temperature "
            f"{settings['temperature']:g}, batch {batch}{_filled(settings)}, median of "
            f"{settings['repeats']} run(s) per answer, interleaved; the speed-up leaves prefill out.",
            self.environment.line(),
            "*A projection, not a measurement: acceptance length / (1 + c), where c is what the drafter "
            "would read of weights per step, scaled to Llama-3.1-8B's width and vocabulary, over the "
            "target's own.",
            *(f"Look into this: {warning}." for warning in self.warnings),
        ]

    def to_markdown(self, detail: bool = True) -> str:
        """The table and its notes; with `detail` also speed-up and acceptance length by category."""
        parts = [markdown(*self.rows()), *self.notes()]
        if detail and len(self.categories) > 1:
            names = list(self.methods)
            lines = {one: [self.summarise(name, one) for name in names] for one in self.categories}
            cells = [[category, *map(_by_category, found)] for category, found in lines.items()]
            means = [
                fmean(line.speed_up.value or 0.0 for line in column) for column in zip(*lines.values(), strict=True)
            ]
            cells.append(["mean of these", *(show(mean, unit="x") for mean in means)])
            parts += [
                "Speed-up (acceptance length) by category:",
                markdown(["category", *names], cells),
            ]
        return "\n\n".join([f"### {self.label}", *parts]) + "\n"

    def table(self) -> Table:
        """The same for the screen, where a column per method fits better."""
        (corner, *figures), cells = self.rows()
        notes = escape("\n".join(self.notes()))  # brackets of a recorded command are no markup
        table = Table(title=escape(self.label), caption=notes, caption_justify="left")
        table.add_column(corner)
        for name, *_ in cells:
            table.add_column(name, justify="right")
        for position, figure in enumerate(figures, start=1):
            table.add_row(figure, *(row[position] for row in cells))
        return table


def _filled(settings: Mapping[str, Any]) -> str:
    length = settings.get("context_length")
    return "" if length is None else f", contexts filled up to {length} tokens with other prompts"


def of_schema(text: str, version: int, what: str) -> dict[str, Any]:
    """A JSON object; raises `DataError`, which begins with `what`, where it has another schema version."""
    values = json.loads(text)
    if values.get("schema_version") != version:
        raise DataError(
            f"{what} schema version {values.get('schema_version')}, this program reads {version}; measure again"
        )
    return values


def ratio(numerator: Any, denominator: Any) -> Any:
    """Elementwise quotient, nan where nothing was counted."""
    top, bottom = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    return np.divide(top, bottom, out=np.full(np.broadcast(top, bottom).shape, np.nan), where=bottom != 0)


def _columns(tallies: Iterable[Tally]) -> np.ndarray:
    """(prompts, fields) float64."""
    return np.array([[getattr(tally, f.name) for f in fields(Tally)] for tally in tallies], dtype=float)


def _weighted(columns: np.ndarray, weights: np.ndarray) -> Tally:
    """Sums over prompts counted `weights` times, (..., prompts) -> a Tally of arrays (...,)."""
    return Tally(*np.moveaxis(weights @ columns, -1, 0))


def estimate(figure: Callable[[np.ndarray], Any], prompts: int) -> Estimate:
    """A figure of prompt weights with the 95 % percentile bootstrap over prompts (Efron 1979)."""
    value = number(figure(np.ones(prompts)))
    if value is None or prompts < 2:
        return Estimate(value)
    rng = np.random.default_rng(0)
    resamples = figure(rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=_BOOTSTRAP_SAMPLES))
    low, high = map(float, np.nanpercentile(resamples, [2.5, 97.5]))
    return Estimate(value) if low == high else Estimate(value, low, high)


def number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _by_category(line: Summary) -> str:
    length = line.acceptance_length.value
    return show(line.speed_up.value, unit="x") + ("" if length is None else f" ({length:.2f})")


def interval(estimate: Estimate, unit: str = "") -> str:
    """A cell."""
    return show_interval(estimate.value, estimate.low, estimate.high, unit)
