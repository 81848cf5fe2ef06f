"""What an ablation found, and its tables: see `eval.ablate`, which makes it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any

from eval.text_quality.results import AHEAD_NOTE, AheadFigures
from eval.text_quality.results import Figures as TextFigures
from shape.evaluation.environment import Environment
from shape.evaluation.markdown import DASH, markdown, share, show
from shape.evaluation.results import Summary

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Trained:
    """What a training took.

    Attributes:
        parameters: numbers in the exported weights, the list of draft tokens not counted.
        steps: of the optimiser.
        seconds: of training; validation, extraction and export are left out.
        positions_per_second: that were learned from.
        record: what shape.train says about the run.
        environment: where it ran.
    """

    parameters: int
    steps: int
    seconds: float
    positions_per_second: float | None
    record: dict[str, Any]
    environment: dict[str, Any]


@dataclass(frozen=True)
class Anatomy:
    """Drafts looked at one by one.

    Attributes:
        asked: [depth - 1] drafts of which all tokens above that depth were accepted and that had one there.
        accepted: of these, the ones of which a token was accepted there too.
    """

    asked: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def shares(self) -> list[float]:
        """[depth - 1]: accepted of those asked."""
        return [yes / of for yes, of in zip(self.accepted, self.asked, strict=True)]


@dataclass(frozen=True)
class Figures:
    """One line of the table at one temperature; seeds are pooled, so that intervals are over prompts.

    Attributes:
        acceptance_lengths, speed_ups: of each seed.
        step_ms: draft, verify and commit of a step.
        drafts: tokens per second on validation prompts by the shape of the drafts, the chosen one first; empty where
            none was chosen.
    """

    summary: Summary
    acceptance_lengths: dict[int, float | None]
    speed_ups: dict[int, float | None]
    step_ms: dict[str, float | None]
    anatomy: Anatomy
    drafts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """A variant with a tree. `at` has its figures by temperature."""

    label: str
    variant: str
    tree: str | None
    at: dict[float, Figures]


@dataclass(frozen=True)
class Text:
    """What a variant wrote by lossy rules, beside the target's own text; seeds are pooled.

    Attributes:
        modes: by rule and temperature, as in "trs-lossy, T = 0".
        perplexities: of each seed.
        ahead: how often its drafts are right on the target's own text, by distance from 1.
    """

    modes: dict[str, TextFigures]
    perplexities: dict[str, dict[int, float | None]]
    ahead: list[AheadFigures]


@dataclass(frozen=True)
class Ablation:
    """Everything that was found out.

    Attributes:
        seeds, examined, max_new_tokens: as asked for; `options` has all that was.
        trained: by variant and seed.
        others: by temperature, the methods without training.
        settings: of the measurements, by temperature.
        texts: by variant, where lossy rules were asked for.
    """

    title: str
    seeds: list[int]
    examined: int
    max_new_tokens: int
    options: dict[str, Any]
    trained: dict[str, dict[int, Trained]]
    lines: list[Line]
    others: dict[float, dict[str, Summary]]
    settings: dict[float, dict[str, Any]]
    environment: Environment
    texts: dict[str, Text] = field(default_factory=dict)

    def to_json(self) -> str:
        """Everything but single prompts, indented."""
        return json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, indent=1)

    def to_markdown(self) -> str:
        """The table, one by depth and parts of a step, and what has to be said about both."""
        parts = [f"### {self.title}", markdown(*self._main()), *self._notes()]
        for temperature in self.others:
            parts += [f"Drafts looked into, temperature {temperature:g}:", markdown(*self._detail(temperature))]
        if self.texts:
            parts += [_TEXTS, markdown(*self._written()), AHEAD_NOTE, markdown(*self._ahead())]
        return "\n\n".join(parts) + "\n"

    @property
    def _fitted(self) -> bool:
        return any(figures.drafts for line in self.lines for figures in line.at.values())

    def _main(self) -> tuple[list[str], list[list[str]]]:
        several = len(self.seeds) > 1
        header = ["variant", "parameters", "trained s", "positions/s", "GFLOP/s (of peak)"]
        for temperature in self.others:
            at = f"T = {temperature:g}"
            for figure in (f"acceptance length, {at}", f"speed-up, {at}"):
                header += [f"{figure} (95 %)", *([f"{figure}, over seeds"] if several else [])]
            header += [f"accepted at 1, 2, ..., {at}", *([f"draft, {at}"] if self._fitted else [])]
        rows = []
        for name in next(iter(self.others.values())):
            cells = [name, *[DASH] * 4]
            for found in self.others.values():
                cells += _cells(found[name], {} if several else None, {} if several else None)
                cells += [DASH] * (1 + self._fitted)
            rows.append(cells)
        for line in self.lines:
            trained = list(self.trained[line.variant].values())
            speeds = [one.positions_per_second for one in trained if one.positions_per_second is not None]
            cells = [
                line.label,
                f"{trained[0].parameters / 1e6:.2f}M",
                f"{mean(one.seconds for one in trained):.0f}",
                show(mean(speeds) if speeds else None, ",.0f"),
                _throughput([one.record for one in trained]),
            ]
            for figures in line.at.values():
                by_seed = (figures.acceptance_lengths, figures.speed_ups) if several else (None, None)
                cells += [*_cells(figures.summary, *by_seed), " ".join(map(show, figures.anatomy.shares))]
                cells += [next(iter(figures.drafts), DASH)] * self._fitted
            rows.append(cells)
        return header, rows

    def _detail(self, temperature: float) -> tuple[list[str], list[list[str]]]:
        found = [(line.label, line.at[temperature]) for line in self.lines]
        depths = max(len(figures.anatomy.asked) for _, figures in found)
        parts = ("draft", "verify", "commit")
        header = ["variant", *(f"accepted at {depth}" for depth in range(1, depths + 1)), "tokens per draft step"]
        header += [f"{part} ms" for part in parts] + ["tokens/s", "equal to autoregressive"]
        rows = []
        for label, figures in found:
            shares = list(map(show, figures.anatomy.shares))
            summary = figures.summary
            rows.append(
                [
                    label,
                    *shares,
                    *[DASH] * (depths - len(shares)),
                    show(summary.tokens_per_draft_step),
                    *(show(figures.step_ms[part]) for part in parts),
                    show(summary.tokens_per_second, ".0f"),
                    share(summary.equal_autoregressive, summary.answers),
                ]
            )
        return header, rows

    def _written(self) -> tuple[list[str], list[list[str]]]:
        several = len(self.seeds) > 1
        header = ["mode", "variant", "perplexity (95 %)", *(["over seeds"] if several else [])]
        header += ["equal to the target's own", "BERTScore F1", "sentence similarity", "tokens per answer"]
        rows = [
            [
                mode,
                variant,
                figures.perplexity.text(),
                *([_range(text.perplexities[mode])] if several else []),
                share(figures.equal, figures.answers),
                show(figures.bert_score, ".3f"),
                show(figures.sentence, ".3f"),
                show(figures.tokens_per_answer, ".1f"),
            ]
            for mode in next(iter(self.texts.values())).modes
            for variant, text in self.texts.items()
            for figures in [text.modes[mode]]
        ]
        return header, rows

    def _ahead(self) -> tuple[list[str], list[list[str]]]:
        depth = max(len(text.ahead) for text in self.texts.values())
        rows = [
            [variant, *(one.accuracy.text() for one in text.ahead), *[DASH] * (depth - len(text.ahead))]
            for variant, text in self.texts.items()
        ]
        return ["variant", *(f"{n} ahead (95 %)" for n in range(1, depth + 1))], rows

    def _notes(self) -> list[str]:
        settings = next(iter(self.settings.values()))
        baselines = ", ".join(f"{self.settings[t]['baseline']} at {t:g}" for t in self.settings)
        first = next(one for by_seed in self.trained.values() for one in by_seed.values())
        threads, seeds = first.environment.get("threads", "?"), self.seeds
        over = (
            f'Seeds {", ".join(map(str, seeds))}: counts are summed over them and intervals are over prompts; "over '
            'seeds" is the least and the greatest of their own figures. '
            if len(seeds) > 1
            else f"One seed ({seeds[0]}): intervals are over prompts, and say nothing about other trainings. "
        )
        joint = first.record.get("joint") or first.record.get("together")  # as it was called before
        trained = {name: [one.environment for one in each.values()] for name, each in self.trained.items()}
        at_once = " (all variants of a seed at once, and so the seconds of all)" if joint else ""
        return [
            f"Target {settings['target']} ({settings['parameters'] / 1e6:.1f}M parameters, {settings['dtype']} while "
            f"measuring), learned from {first.record.get('examples', 'online data')}; {settings['count']} prompts of "
            f"{settings['prompts']}, at most {self.max_new_tokens} new tokens, batch 1, interleaved, always "
            f"drafting; speed-ups leave prefill out and are over {baselines}.",
            f"{over}Trained s are seconds of optimisation alone, {threads} thread(s) each{at_once}; GFLOP/s are those "
            "of its matrix products, and peak is what a large one of the same precision reaches. Accepted at: of the "
            f"drafts of {min(self.examined, settings['count'])} prompts that reached a depth, the share of which a "
            "token was accepted there.",
            *filter(None, [where_trained(trained, self.environment.commit)]),
            self.environment.line(),
        ]


def where_trained(trained: Mapping[str, Iterable[Mapping[str, Any]]], measured: str | None) -> str:
    """A sentence with the commits of trainings, unless all are the measurement's: environments by variant."""
    found: dict[str, list[str]] = {}
    for variant, environments in trained.items():
        for commit in dict.fromkeys(str(one.get("commit")) for one in environments):
            found.setdefault(commit, []).append(variant)
    if found.keys() <= {str(measured)}:
        return ""
    if len(found) == 1:
        return f"Trained at commit {next(iter(found))}."
    several = [f"{commit} ({', '.join(names)})" for commit, names in found.items()]
    return f"Trained at commits {', '.join(several)}."


_TEXTS = (
    "Text by lossy rules, on the same prompts: perplexity is of what was written, under the target at temperature 1; "
    "equal, BERTScore and similarity are to the target's own text of the same temperature and seed, by the encoder "
    "that was named:"
)


def _cells(
    summary: Summary, lengths: Mapping[int, float | None] | None, speed_ups: Mapping[int, float | None] | None
) -> list[str]:
    length, speed_up = summary.acceptance_length, summary.speed_up
    return [
        length.text(),
        *([] if lengths is None else [_range(lengths)]),
        speed_up.text("x"),
        *([] if speed_ups is None else [_range(speed_ups)]),
    ]


def _throughput(records: Sequence[Mapping[str, Any]]) -> str:
    known = [one for one in records if "gflop_per_second" in one]
    if not known:
        return DASH
    rate, share = (mean(one[name] for one in known) for name in ("gflop_per_second", "share_of_peak"))
    return f"{rate:.0f} ({share:.0%})"


def _range(values: Mapping[int, float | None]) -> str:
    known = [value for value in values.values() if value is not None]
    return f"{min(known):.2f}–{max(known):.2f}" if known else DASH
