"""What a speed measurement found, and the figures derived from it.

Every figure is a ratio of sums over prompts, so that any subset and any bootstrap resample is computed alike.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from statistics import fmean, median
from typing import Any, Self

from rich.table import Table as ScreenTable

from shape import bundled
from shape.data.backends import off_in_words
from shape.data.conversations import Conversation
from shape.evaluation.estimates import ENOUGH, Estimate, Sums, few_units_note, number, over_prompts, ratio
from shape.evaluation.files import Results
from shape.evaluation.markdown import Table, markdown, on_screen, share, show
from shape.evaluation.overlap import Overlap, overlaps
from shape.files import typed

AUTOREGRESSIVE = "autoregressive"
BASELINES = ("transformers", AUTOREGRESSIVE)
SHIPPED_TEXT = ("train.jsonl.gz", "answers.jsonl.gz")  # a part of what the pair that ships learned from


@dataclass(frozen=True)
class Tally(Sums):
    """Sums over answers of one method."""

    answers: Any = 0
    tokens: Any = 0  # emitted in all
    timed_tokens: Any = 0  # emitted after the prefill's own token: the ones that decode_seconds paid for
    decode_seconds: Any = 0.0
    prefill_seconds: Any = 0.0
    forwards: Any = 0  # target forwards after the prefill
    draft_steps: Any = 0  # of these, the ones that had a draft to verify
    drafted: Any = 0  # tokens proposed; 0 in older results, which did not count it
    accepted: Any = 0  # drafted tokens accepted
    draft_seconds: Any = 0.0
    verify_seconds: Any = 0.0
    commit_seconds: Any = 0.0
    bigrams: Any = 0
    distinct_bigrams: Any = 0  # distinct within their own answer
    ended: Any = 0  # answers that ended by an end-of-sequence token
    equal_autoregressive: Any = 0  # answers token for token those of autoregressive decoding with the same seed
    equal_transformers: Any = 0
    wait_seconds: Any = 0.0  # of each answer until its first token: those of a batch wait for all of its prefill

    @property
    def split(self) -> bool:
        """Whether steps were timed by parts: those of fixed shapes have one time, which counts as verification, where
        others take some time to commit at least.
        """
        return bool(self.commit_seconds)

    @property
    def seconds_per_token(self) -> Any:
        return ratio(self.decode_seconds, self.timed_tokens)

    @property
    def acceptance_length(self) -> Any:
        return ratio(self.timed_tokens, self.forwards)

    @property
    def tokens_per_draft_step(self) -> Any:
        return 1 + ratio(self.accepted, self.draft_steps)


@dataclass(frozen=True)
class Detail:
    """How steps went, one by one rather than summed; additive as well.

    Attributes:
        histogram: tokens committed in a step -> number of such steps.
        accepted: tokens of a draft that were accepted -> number of such drafts.
        gaps: milliseconds between arrivals of tokens, of one or of several committed together, to three digits.
        sources: name of a drafter in a hybrid -> [proposed, accepted]; what two proposed counts for both.
    """

    histogram: dict[int, int] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    sources: dict[str, list[int]] = field(default_factory=dict)
    accepted: dict[int, int] = field(default_factory=dict)

    @classmethod
    def total(cls, parts: Iterable["Detail"]) -> "Detail":
        histogram, gaps, sources, accepted = Counter[int](), list[float](), dict[str, list[int]](), Counter[int]()
        for part in parts:
            histogram.update(part.histogram)
            accepted.update(part.accepted)
            gaps += part.gaps
            for name, counts in part.sources.items():
                sources[name] = [a + b for a, b in zip(sources.get(name, (0, 0)), counts, strict=True)]
        return cls(dict(sorted(histogram.items())), gaps, sources, dict(sorted(accepted.items())))


@dataclass(frozen=True)
class PromptRecord:
    """What every method did on one prompt, summed over its turns.

    Attributes:
        cut: why turns were left out.
        details: empty in older results, which did not keep it.
        overlap: with the training text, where that is known.
        texts: what the user said at every turn, and the answer that became the context; not in files of results.
    """

    id: str
    category: str
    tallies: dict[str, Tally]
    cut: str | None = None
    details: dict[str, Detail] = field(default_factory=dict)
    overlap: Overlap | None = None
    texts: list[list[str]] = field(default_factory=list, compare=False, repr=False)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PromptRecord":
        numbers = typed(dict[str, dict[str, float]], values["tallies"])  # whose fields may be arrays too
        # Before waiting was kept, it was taken to be the prefill's time, which at batch 1 it is.
        waits = {name: {"wait_seconds": each.get("prefill_seconds", 0.0), **each} for name, each in numbers.items()}
        return typed(cls, {**values, "tallies": waits})


@dataclass(frozen=True)
class Summary:
    """One method's line in the table. Rates are per second, prefill is milliseconds that an answer waits for it."""

    answers: int
    tokens: int
    tokens_per_second: float | None
    prefill_ms: float | None
    speed_up: Estimate
    acceptance_length: Estimate
    tokens_per_draft_step: float | None
    draft_share: float | None  # drafting's part of the decode time, where steps were timed by parts
    distinct_2: float | None
    eos_share: float | None
    equal_autoregressive: int | None
    equal_transformers: int | None

    @property
    def both(self) -> str:
        """Speed-up and acceptance length."""
        return speed_and_length(self.speed_up.value, self.acceptance_length.value)


# The table's columns behind the method's name.
COLUMNS: dict[str, Callable[[Summary], str]] = {
    "tokens/s": lambda line: show(line.tokens_per_second, ".0f"),
    "speed-up (95 %)": lambda line: line.speed_up.text("x"),
    "acceptance length (95 %)": lambda line: line.acceptance_length.text(),
    "tokens per draft step": lambda line: show(line.tokens_per_draft_step),
    "prefill ms": lambda line: show(line.prefill_ms, ".1f"),
    "draft share": lambda line: show(line.draft_share, ".0%"),
    "distinct-2": lambda line: show(line.distinct_2),
    "ended by EOS": lambda line: show(line.eos_share, ".0%"),
    "equal to autoregressive": lambda line: share(line.equal_autoregressive, line.answers),
    "equal to transformers": lambda line: share(line.equal_transformers, line.answers),
}
SHORT = ("tokens/s", "speed-up (95 %)", "acceptance length (95 %)", "equal to autoregressive")


@dataclass(frozen=True)
class SpeedResults(Results):
    """The measured records of one run, and every figure derived from them.

    Attributes:
        settings: what was asked for: target, dtype, methods, temperature, lengths, repeats, seed, prompts.
        skipped: for each prompt left out, or cut after some of its turns, the reason.
    """

    what, record, named = "this file of results", PromptRecord, "methods"
    records: tuple[PromptRecord, ...]

    @cached_property
    def total(self) -> dict[str, Tally]:
        return {name: Tally.total([r.tallies[name] for r in self.records]) for name in self.methods}

    @cached_property
    def details(self) -> dict[str, Detail]:
        """Of the methods of which steps were looked at; empty in older results."""
        names = [name for name in self.methods if any(name in record.details for record in self.records)]
        return {name: Detail.total(r.details[name] for r in self.records if name in r.details) for name in names}

    def with_overlap(self, training: Iterable[Conversation], name: str) -> Self:
        """The same with each prompt's overlap with the training text, which is called so."""
        found = overlaps([record.texts for record in self.records], training)
        records = tuple(replace(record, overlap=one) for record, one in zip(self.records, found, strict=True))
        return replace(self, records=records, settings={**self.settings, "training_data": name})

    def overlap(self, category: str | None = None) -> dict[str, float | None]:
        """Shares that occur in the training text; empty where that is not known."""
        chosen = [record for record in self.records if category in (None, record.category)]
        if not all(record.overlap for record in chosen):
            return {}
        total = Overlap.total([record.overlap for record in chosen if record.overlap])
        parts = ("prompt_grams", "answer_grams", "turns")
        return {part: number(ratio(getattr(total, f"{part}_seen"), getattr(total, part))) for part in parts}

    @property
    def methods(self) -> dict[str, str]:
        """What each method is: "transformers", "transformers-lookup", "autoregressive", or a drafter's description."""
        return self.settings["methods"]

    @cached_property
    def baseline(self) -> str:
        """The faster of transformers' `generate` and our autoregressive loop: the divisor of every speed-up."""
        candidates = [name for name, what in self.methods.items() if what in BASELINES]
        return min(candidates, key=lambda name: self.total[name].seconds_per_token)

    @property
    def drafted(self) -> list[str]:
        """The methods that are no baselines, the fastest first."""
        names = [name for name, what in self.methods.items() if what not in BASELINES]
        return sorted(names, key=lambda name: -(self.summary[name].speed_up.value or 0.0))

    def is_lossy(self, name: str) -> bool:
        return "lossy" in name or "lossy" in self.methods[name]

    @property
    def categories(self) -> list[str]:
        return list(dict.fromkeys(record.category for record in self.records))

    @cached_property
    def summary(self) -> dict[str, Summary]:
        return {name: self.summarise(name) for name in self.methods}

    def speed_up(self, name: str, over: str, category: str | None = None) -> Estimate:
        """Tokens per second of one method over those of another."""
        records = [r for r in self.records if category is None or r.category == category]
        return over_prompts(
            lambda mine, base: base.seconds_per_token / mine.seconds_per_token,
            *([r.tallies[each] for r in records] for each in (name, over)),
        )

    def summarise(self, name: str, category: str | None = None) -> Summary:
        """The figures of one method, over all prompts or those of one category."""
        records = [r for r in self.records if category is None or r.category == category]
        tallies = [r.tallies[name] for r in records]
        total, what, kinds = Tally.total(tallies), self.methods[name], self.methods.values()
        ours = not what.startswith("transformers")
        is_drafted = ours and what != AUTOREGRESSIVE
        compares_greedily = self.settings["temperature"] == 0 and "transformers" in kinds
        return Summary(
            answers=int(total.answers),
            tokens=int(total.tokens),
            tokens_per_second=number(ratio(1, total.seconds_per_token)),
            prefill_ms=number(1e3 * ratio(total.wait_seconds, total.answers)),
            speed_up=self.speed_up(name, self.baseline, category),
            acceptance_length=over_prompts(lambda mine: mine.acceptance_length, tallies) if ours else Estimate(None),
            tokens_per_draft_step=number(total.tokens_per_draft_step) if is_drafted else None,
            draft_share=number(ratio(total.draft_seconds, total.decode_seconds))
            if is_drafted and total.split
            else None,
            distinct_2=number(ratio(total.distinct_bigrams, total.bigrams)),
            eos_share=number(ratio(total.ended, total.answers)),
            equal_autoregressive=int(total.equal_autoregressive) if ours and AUTOREGRESSIVE in kinds else None,
            equal_transformers=int(total.equal_transformers) if compares_greedily else None,
        )

    def in_vllm_names(self, name: str) -> dict[str, Any]:
        """A method's figures under the names of `vllm bench serve`, whose acceptance rate is in percent. Drafts are
        counted as there: a rate by position is of all drafts, and the tokens of all branches of a tree are drafted.
        """
        total, detail = self.total[name], self.details.get(name, Detail())
        found: dict[str, Any] = {
            "completed": int(total.answers),
            "total_output_tokens": int(total.tokens),
            "output_throughput": number(ratio(total.tokens, total.prefill_seconds + total.decode_seconds)),
            "mean_ttft_ms": number(1e3 * ratio(total.wait_seconds, total.answers)),
        }
        if detail.gaps:
            found |= {"mean_itl_ms": fmean(detail.gaps), "median_itl_ms": median(detail.gaps)}
        if total.draft_steps and total.drafted:
            deepest = max(detail.accepted, default=0)
            reached = [sum(n for length, n in detail.accepted.items() if length > at) for at in range(deepest)]
            found |= {
                "spec_decode_num_drafts": int(total.draft_steps),
                "spec_decode_draft_tokens": int(total.drafted),
                "spec_decode_accepted_tokens": int(total.accepted),
                "spec_decode_acceptance_rate": 100 * total.accepted / total.drafted,
                "spec_decode_acceptance_length": number(total.tokens_per_draft_step),
                "spec_decode_per_position_acceptance_rates": [count / total.draft_steps for count in reached],
            }
        return found

    @property
    def warnings(self) -> list[str]:
        """Figures that need an explanation before anyone believes them."""
        found = []
        for name, line in self.summary.items():
            speed_up, length = line.speed_up.value, line.acceptance_length.value
            if self.methods[name] != AUTOREGRESSIVE and speed_up and length and speed_up > length:
                found.append(f"{name}: the speed-up ({speed_up:.2f}) exceeds the acceptance length ({length:.2f})")
        if 1 < len(self.records) < ENOUGH:
            found.append(few_units_note("prompts" if self.settings.get("batch", 1) == 1 else "batches"))
        if self.skipped:
            found.append(f"{len(self.skipped)} prompts left out or cut ({next(iter(self.skipped.values()))})")
        return found

    def to_json(self) -> str:
        """Everything; `from_json` reads it back (the summary is written for readers, not read)."""
        by_category = {
            category: {name: asdict(self.summarise(name, category)) for name in self.methods}
            for category in self.categories
        }
        shares = {category or "all": self.overlap(category) for category in (None, *self.categories)}
        return replace(self, records=tuple(replace(record, texts=[]) for record in self.records)).write(
            {
                "baseline": self.baseline,
                "summary": {name: asdict(line) for name, line in self.summary.items()},
                "categories": by_category,
                "vllm": {name: self.in_vllm_names(name) for name in self.methods},
                "training_overlap": shares if shares["all"] else None,
                "warnings": self.warnings,
            }
        )

    def marked(self, name: str) -> str:
        """A method's name with what has to be known of it."""
        lossy = " (lossy)" if self.is_lossy(name) and "lossy" not in name else ""
        return f"{name}{lossy}{' (baseline)' if name == self.baseline else ''}"

    def lines(self, columns: Sequence[str] = tuple(COLUMNS), methods: Sequence[str] | None = None) -> list[list[str]]:
        """The cells of some methods, all if None, under "method" and these columns."""
        chosen = self.methods if methods is None else methods
        return [[self.marked(name), *(COLUMNS[one](self.summary[name]) for one in columns)] for name in chosen]

    @property
    def about(self) -> str:
        """What was measured, in a sentence."""
        settings = self.settings
        batch, length = settings.get("batch", 1), settings.get("context_length")
        middle = "median" if settings["repeats"] % 2 else "lower median"
        filled = "" if length is None else f", contexts filled up to {length} tokens with other prompts"
        return (
            f"Target {settings['target']} ({settings['parameters'] / 1e6:.1f}M parameters, {settings['dtype']}), "
            f"{len(self.records) * batch} prompts of {settings['prompts']} "
            f"({next(iter(self.summary.values())).answers} answers), at most {settings['max_new_tokens']} new tokens, "
            f"temperature {settings['temperature']:g}, batch {batch}{filled}, {middle} of {settings['repeats']} run(s) "
            f"per answer, interleaved; the speed-up leaves prefill out{off_in_words(settings.get('switched_off', {}))}."
        )

    def notes(self) -> list[str]:
        """The lines under the table: what was measured, on what, and what to be careful about."""
        overlap = [self.overlap_note()] if self.overlap() else []
        return [self.about, self.environment.line(), *overlap, *(f"Look into this: {one}." for one in self.warnings)]

    def overlap_note(self) -> str:
        """How much of prompts and answers occurs in the training text, in a sentence."""
        shares = {name: show(share, ".0%") for name, share in self.overlap().items()}
        known = f"Overlap with the training text ({self.settings['training_data']}):"
        if (self.settings["target"], self.settings["training_data"]) == (bundled.TARGET, ", ".join(SHIPPED_TEXT)):
            known = f"Overlap with the training text, of which a part ships ({', '.join(SHIPPED_TEXT)}): at least"
        return (
            f"{known} {shares['prompt_grams']} of the prompts' 4-grams of words, {shares['answer_grams']} of the "
            f"answers', and {shares['turns']} of the user's whole turns (names and numbers masked)."
        )

    def by_category(self) -> Table:
        """Speed-up and acceptance length of every method in every category, and the share of seen 4-grams."""
        found = {one: [self.summarise(name, one) for name in self.methods] for one in self.categories}
        lines = [[category, *(one.both for one in summaries)] for category, summaries in found.items()]
        means = [_mean_speed_up(column) for column in zip(*found.values(), strict=True)]
        lines.append(["mean of these", *(show(mean, unit="x") for mean in means)])
        if not self.overlap():
            return ["category", *self.methods], lines
        for category, line in zip([*self.categories, None], lines, strict=True):
            shares = self.overlap(category)
            line.append(" / ".join(show(shares[part], ".0%") for part in ("prompt_grams", "answer_grams")))
        return ["category", *self.methods, "seen 4-grams, prompts / answers"], lines

    def to_markdown(self, detail: bool = True) -> str:
        """The table and its notes; with `detail` also speed-up and acceptance length by category."""
        parts = [f"### {self.label}", markdown(["method", *COLUMNS], self.lines()), *self.notes()]
        if detail and len(self.categories) > 1:
            parts += ["Speed-up (acceptance length) by category:", markdown(*self.by_category())]
        return "\n\n".join(parts) + "\n"

    def table(self) -> ScreenTable:
        """The same for the screen."""
        return on_screen(["method", *COLUMNS], self.lines(), self.label, "\n".join(self.notes()))


def _mean_speed_up(lines: Sequence[Summary]) -> float | None:
    """Over those where it is defined."""
    known = [line.speed_up.value for line in lines if line.speed_up.value is not None]
    return fmean(known) if known else None


def speed_and_length(speed_up: float | None, length: float | None) -> str:
    """`1.52x (2.31)`; without the brackets where the acceptance length is unknown."""
    return show(speed_up, unit="x") + ("" if length is None else f" ({length:.2f})")
