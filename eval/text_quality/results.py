"""What a measurement of quality found (`eval.quality`), and the figures derived from it.

Every figure is a ratio of sums over prompts, with an interval by bootstrap over prompts (see
`shape.evaluation.results`).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from eval.text_quality.similarity import f1
from shape.evaluation.estimates import Estimate, Sums, number, over_prompts, ratio
from shape.evaluation.files import Results
from shape.evaluation.markdown import DASH, Table, markdown, share, show
from shape.files import typed


@dataclass(frozen=True)
class Compared(Sums):
    """Sums over pairs of texts (see `similarity.Likeness`)."""

    pairs: Any = 0
    precision: Any = 0.0
    recall: Any = 0.0
    sentence: Any = 0.0


@dataclass(frozen=True)
class Written(Compared):
    """Sums over one mode's answers to a prompt. Pairs are of its answers and the target's own."""

    answers: Any = 0
    tokens: Any = 0
    nats: Any = 0.0  # -log p of these tokens under the target, at temperature 1 and without processors
    ended: Any = 0  # answers that ended by an end token
    equal: Any = 0  # answers token for token the target's own
    bigrams: Any = 0
    distinct_bigrams: Any = 0
    sums: Any = 0  # answers whose reference is a number, and of these the right ones
    sums_right: Any = 0
    programs: Any = 0  # answers that are tested, and of these the ones that pass
    programs_right: Any = 0
    seconds: Any = 0.0  # prefill included; 0 where the machine was not quiet


@dataclass(frozen=True)
class Ahead(Compared):
    """Sums over a prompt's drafts at one distance. Pairs are of the text that these drafts make and the true one."""

    positions: Any = 0
    right: Any = 0


@dataclass(frozen=True)
class QualityRecord:
    """One prompt: what every mode wrote, by label, and how far ahead the drafter was right (empty without one)."""

    id: str
    category: str
    written: dict[str, Written]
    ahead: list[Ahead]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "QualityRecord":
        typed(dict[str, dict[str, float]], values["written"])  # whose fields may be arrays too
        typed(list[dict[str, float]], values["ahead"])
        return typed(cls, values)


@dataclass(frozen=True)
class Figures:
    """One mode's line. None is undefined: nothing of the kind was asked, or no encoder was given."""

    answers: int
    tokens: int
    perplexity: Estimate
    tokens_per_answer: float | None
    equal: int
    ended: float | None
    distinct_2: float | None
    precision: float | None
    recall: float | None
    bert_score: float | None
    sentence: float | None
    sums: int
    sums_right: Estimate
    programs: int
    programs_right: Estimate
    tokens_per_second: float | None
    speed_up: Estimate


@dataclass(frozen=True)
class AheadFigures:
    """The line of one distance."""

    positions: int
    accuracy: Estimate
    precision: float | None
    recall: float | None
    bert_score: float | None
    sentence: float | None


@dataclass(frozen=True)
class QualityResults(Results):
    """The records of one measurement.

    Attributes:
        settings: target, predictor, prompts, modes by label ("shape, T = 0": what it is), and what else was asked for.
        own: by label, that of the target's own text at the same temperature.
        skipped: by prompt id, why it or its later turns were left out.
    """

    what, record, named = "this measurement of quality", QualityRecord, "modes"
    records: tuple[QualityRecord, ...]
    own: dict[str, str]

    @property
    def modes(self) -> dict[str, str]:
        return self.settings["modes"]

    @property
    def descriptions(self) -> dict[str, str]:
        """What each mode is, whatever the temperature."""
        return {label.partition(",")[0]: what for label, what in self.modes.items()}

    @cached_property
    def summary(self) -> dict[str, Figures]:
        return {label: self._figures(label) for label in self.modes}

    @cached_property
    def ahead(self) -> list[AheadFigures]:
        """By distance, from 1."""
        depth = len(self.records[0].ahead)
        return [_ahead_figures([record.ahead[n] for record in self.records]) for n in range(depth)]

    def _figures(self, label: str) -> Figures:
        parts = [record.written[label] for record in self.records]
        own = [record.written[self.own[label]] for record in self.records]
        total = Written.total(parts)
        return Figures(
            answers=total.answers,
            tokens=total.tokens,
            perplexity=over_prompts(lambda mine: np.exp(ratio(mine.nats, mine.tokens)), parts),
            tokens_per_answer=number(ratio(total.tokens, total.answers)),
            equal=total.equal,
            ended=number(ratio(total.ended, total.answers)),
            distinct_2=number(ratio(total.distinct_bigrams, total.bigrams)),
            **_likeness(total),
            sums=total.sums,
            sums_right=over_prompts(lambda mine: ratio(mine.sums_right, mine.sums), parts),
            programs=total.programs,
            programs_right=over_prompts(lambda mine: ratio(mine.programs_right, mine.programs), parts),
            tokens_per_second=number(ratio(total.tokens, total.seconds)),
            speed_up=over_prompts(
                lambda mine, base: ratio(ratio(base.seconds, base.tokens), ratio(mine.seconds, mine.tokens)),
                parts,
                own,
            ),
        )

    def to_json(self) -> str:
        """Everything; the figures are for readers and are not read back."""
        summary = {label: asdict(line) for label, line in self.summary.items()}
        return self.write({"summary": summary, "ahead": [asdict(line) for line in self.ahead]})

    def table(self) -> Table:
        """Header and cells: columns of what nobody was asked, or no encoder compared, are left out."""
        lines = self.summary
        columns: list[tuple[str, bool, Callable[[Figures], str]]] = [
            ("perplexity (95 %)", True, lambda line: line.perplexity.text()),
            ("equal to the target's own", True, lambda line: share(line.equal, line.answers)),
            ("tokens per answer", True, lambda line: show(line.tokens_per_answer, ".1f")),
            ("ended by EOS", True, lambda line: show(line.ended, ".0%")),
            ("distinct-2", True, lambda line: show(line.distinct_2)),
            ("BERTScore P / R / F1", self.compared, lambda line: _bert(line)),
            ("sentence similarity", self.compared, lambda line: show(line.sentence, ".3f")),
            ("sums right (95 %)", self.asked("sums"), lambda line: line.sums_right.text()),
            ("pass@1 (95 %)", self.asked("programs"), lambda line: line.programs_right.text()),
            ("tokens/s", self.timed, lambda line: show(line.tokens_per_second, ".0f")),
            ("speed-up (95 %)", self.timed, lambda line: line.speed_up.text("x")),
        ]
        kept = [(name, cell) for name, there, cell in columns if there]
        header = ["mode", *(name for name, _ in kept)]
        return header, [[label, *(cell(line) for _, cell in kept)] for label, line in lines.items()]

    def ahead_table(self) -> Table:
        more = ["BERTScore P / R / F1", "sentence similarity"] if self.compared else []
        return ["tokens ahead", "positions", "token accuracy (95 %)", *more], [
            [
                str(n),
                f"{line.positions:,}",
                line.accuracy.text(),
                *([_bert(line), show(line.sentence, ".3f")] if more else []),
            ]
            for n, line in enumerate(self.ahead, 1)
        ]

    @property
    def compared(self) -> bool:
        return self.settings["encoder"] is not None

    @property
    def encoder(self) -> str:
        """What compares texts."""
        given = self.settings
        partial = ", which is the target itself, and so no independent judge"
        return f"the last layer of {given['encoder']}{partial if given['encoder'] == given['target'] else ''}"

    @property
    def timed(self) -> bool:
        return bool(self.settings["timed"])

    def asked(self, what: str) -> bool:
        """Whether any answer is scored as one of the "sums" or "programs"."""
        return any(getattr(line, what) for line in self.summary.values())

    def notes(self) -> list[str]:
        """What was measured, on what, and what is missing and why."""
        given, lines = self.settings, list(self.summary.values())
        found = [
            f"Target {given['target']} ({given['parameters'] / 1e6:.1f}M parameters, {given['dtype']}), predictor "
            f"{given['predictor']}, {len(self.records)} prompts of {given['prompts']} ({lines[0].answers} answers "
            f"each), at most {given['max_new_tokens']} new tokens. Perplexity is of what a mode wrote, under the "
            "target at temperature 1: a text can be likely and dull.",
            "Modes: " + "; ".join(f"{mode}: {what}" for mode, what in self.descriptions.items()) + ".",
        ]
        if self.compared:
            found.append(
                "BERTScore (greedy matching, no weights, no rescaling) and sentence similarity are to the target's own "
                f"text of the same temperature and seed, by {self.encoder}."
            )
        else:
            found.append("BERTScore and sentence similarity are absent, because no encoder was named (`--encoder`).")
        if self.asked("programs"):
            limits = given["limits"]
            found.append(
                f"Programs ran with {limits['seconds']} s and {limits['megabytes']} MB, {given['isolation']}; pass@1 "
                "is of one answer per problem."
            )
        if not self.timed:
            found.append("Speed was not measured (`--timed true`, on a machine that does nothing else).")
        if self.skipped:
            found.append(f"{len(self.skipped)} prompts left out or cut ({next(iter(self.skipped.values()))}).")
        return [*found, self.environment.line()]

    def to_markdown(self) -> str:
        parts = [f"### {self.label}", markdown(*self.table()), *self.notes()]
        if self.ahead:
            parts += [AHEAD_NOTE, markdown(*self.ahead_table())]
        return "\n\n".join(parts) + "\n"


AHEAD_NOTE = (
    "By distance, on the target's own greedy text: whether the best draft n tokens ahead is the token that the target "
    "wrote. By teacher forcing: the drafter knows the target's states up to the root, and, where it reads drafted "
    "tokens, the true ones before. Texts that are compared are those of all n-th drafts, one after the other."
)


def _bert(line: Figures | AheadFigures) -> str:
    if line.bert_score is None:
        return DASH
    return f"{show(line.precision, '.3f')} / {show(line.recall, '.3f')} / {show(line.bert_score, '.3f')}"


def _ahead_figures(parts: Sequence[Ahead]) -> AheadFigures:
    total = Ahead.total(parts)
    accuracy = over_prompts(lambda mine: ratio(mine.right, mine.positions), parts)
    return AheadFigures(total.positions, accuracy, **_likeness(total))


def _likeness(total: Compared) -> dict[str, float | None]:
    precision, recall, sentence = (
        number(ratio(total_of, total.pairs)) for total_of in (total.precision, total.recall, total.sentence)
    )
    score = None if precision is None or recall is None else f1(precision, recall)
    return {"precision": precision, "recall": recall, "bert_score": score, "sentence": sentence}
