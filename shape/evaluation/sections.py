"""What the report shows: each section's drawings, tables and captions, from whatever results were found."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

from matplotlib.figure import Figure

from shape.evaluation import plots
from shape.evaluation.environment import Environment
from shape.evaluation.estimates import Estimate
from shape.evaluation.markdown import DASH, share, show
from shape.evaluation.results import COLUMNS, SpeedResults, Summary
from shape.evaluation.traced import Traced
from shape.generation.stats import quantile

T = TypeVar("T")
Table = tuple[list[str], list[list[str]]]
ORACLE = "oracle (simulated)"
_SHOWN_STEPS = 60  # of a trace in the drawing of its cache
_SHOWN_TOKENS = 10  # of a choice, the drafted and the chosen ones among them


@dataclass(frozen=True)
class Source(Generic[T]):
    """One file of results.

    Attributes:
        name: its path below the folder of results.
        title: heading of what it holds; about: target, prompts, temperature and the like in a sentence.
        environment: None where it was not recorded.
    """

    name: str
    title: str
    about: str
    environment: Environment | None
    data: T


@dataclass(frozen=True)
class Found:
    """Everything that a folder of results holds."""

    speed: list[Source[SpeedResults]] = field(default_factory=list)
    efficiency: list[Source[Any]] = field(default_factory=list)
    ablations: list[Source[Any]] = field(default_factory=list)
    analyses: list[Source[Any]] = field(default_factory=list)
    checks: list[Source[Any]] = field(default_factory=list)
    traces: list[Source[Traced]] = field(default_factory=list)

    @property
    def all(self) -> list[Source[Any]]:
        return [source for group in vars(self).values() for source in group]


@dataclass(frozen=True)
class Plot:
    """A drawing with what has to stand beside it.

    Attributes:
        draw: makes it; not before it is wanted.
        table: the same figures, header and rows.
        caution: what a reader must not overlook: simulated, projected, lossy.
        told: what is to be seen.
    """

    title: str
    source: Source[Any]
    draw: Callable[[], Figure]
    table: Table
    caution: str = ""
    told: str = ""

    @property
    def label(self) -> str:
        """For who cannot see it: the title and the first figures of the table."""
        header, rows = self.table
        told = "; ".join(f"{row[0]}: {row[1]}" for row in rows[:12] if len(row) > 1)
        more = f"; and {len(rows) - 12} more" if len(rows) > 12 else ""
        return f"{self.title}, {self.source.title}. {header[1] if len(header) > 1 else ''} by {header[0]}: {told}{more}"


@dataclass(frozen=True)
class Token:
    """A token of an answer. `told` is what the page says of it on demand."""

    text: str
    event: str
    source: str | None
    told: str


@dataclass(frozen=True)
class Answer:
    """An answer with what became of each of its tokens."""

    source: Source[Traced]
    prompt: str
    tokens: list[Token]
    note: str


@dataclass(frozen=True)
class Headline:
    """What one measurement comes to."""

    source: Source[SpeedResults]
    method: str
    speed_up: str
    interval: str
    acceptance_length: str
    identical: str
    caution: str


@dataclass(frozen=True)
class Section:
    """A part of the page; without content it is only named, with the command that makes its data.

    Attributes:
        key: of its anchor and its images.
        note: how to read it.
    """

    key: str
    title: str
    note: str
    command: str
    content: Sequence[Plot | Answer | Headline]


def sections(found: Found) -> list[Section]:
    """All of them, in the order of the page."""
    bench = "python -m shape.bench --output RESULTS/bench"
    trace = 'python -m shape.generate --prompt "..." --trace RESULTS/trace.jsonl'
    rejection = f"{trace} --temperature 1 --acceptance rejection"
    efficiency = "python -m shape.efficiency --output RESULTS/efficiency"
    kinds: list[tuple[str, str, str, str, Iterator[Any]]] = [
        ("summary", "Summary", _SUMMARY, bench, _summary(found)),
        ("speed", "Speed-up by method and task", _SPEED, bench, _speed(found)),
        ("lengths", "Acceptance lengths", _LENGTHS, bench, _lengths(found)),
        ("depths", "Acceptance by depth", _DEPTHS, trace, _depths(found)),
        ("latency", "Where the time goes", _LATENCY, bench, _latency(found)),
        ("tail", "Waiting for tokens", _TAIL, efficiency, _tail(found)),
        ("text", "The text, token by token", _TEXT, trace, _text(found)),
        ("drafts", "History of the draft length", _DRAFTS, trace, _drafts(found)),
        ("cache", "The cache and its rollbacks", _CACHE, trace, _cache(found)),
        ("rejection", "One rejected draft", _REJECTION, rejection, _rejection(found)),
        ("odds", "The target's odds against the drafter's", _ODDS, trace, _odds(found)),
        ("entropy", "Entropy against acceptance", _ENTROPY, trace, _entropy(found)),
        ("sources", "Who proposed what stood", _SOURCES, f"{trace} --drafter suffix+shape", _sources(found)),
        ("batches", "Batch sizes", _BATCHES, f"{efficiency} --batch_size '[1,2,4,8]'", _batches(found)),
        ("ablations", "Ablations", _ABLATIONS, "python -m eval.ablate default --output RESULTS/ablation",
         _ablations(found)),
        ("analysis", "Does transport pay?", _ANALYSIS, "python -m eval.analyze --output RESULTS/analysis",
         _analysis(found)),
        ("check", "What would pay on this machine", _CHECK, "python -m shape.check --output RESULTS/check.json",
         _check(found)),
    ]  # fmt: skip
    return [Section(key, title, note, command, list(content)) for key, title, note, command, content in kinds]


_SUMMARY = (
    "Per measurement the fastest lossless method. Speed-up is time per token of the stronger of plain decoding and "
    "transformers' generate over that of the method, prefill left out; the range is a 95 % bootstrap interval over "
    "prompts. Acceptance length: tokens per forward of the target after the prefill; plain decoding is 1. Identical "
    "samples are to be expected of match alone: other lossless rules draw others, of the same distribution."
)
_SPEED = (
    "Points are ratios of sums over prompts, bars 95 % bootstrap intervals over prompts. The dotted line is plain "
    "decoding (or transformers' generate, where that is faster)."
)
_LENGTHS = (
    "Of each prompt's answers (dots, and the median), and of single steps: how many tokens a forward of the target "
    "settled."
)
_DEPTHS = (
    "Of the drafts of which all tokens above a depth stood and that had one there, the share of which one stood there "
    "as well; from measurements without drafts looked into, the share of steps that settled more than so many tokens."
)
_LATENCY = "Drafting, verifying by the target, and committing what stood; the rest is streaming and bookkeeping."
_TAIL = (
    "Between arrivals of tokens, of one or of several that a step settled at once: the median, and what one in twenty "
    "exceeds. Speculation makes the sum smaller and may make the longest gap longer."
)
_TEXT = (
    "Colour and underline say how a token came about; of hybrids a small name says which drafter proposed what "
    "follows. Point at a token, tap it, or walk with the arrow keys, to read its probabilities."
)
_DRAFTS = "How deep each step's draft went, and how many of its tokens stood."
_CACHE = (
    "Rows are steps. Keys and values of a whole draft are written behind the text; those of rejected tokens are rolled "
    "back by setting the length, and accepted ones of a tree's later branches move up."
)
_REJECTION = (
    "The two distributions where a draft was rejected, at the tokens that matter there. Under rejection sampling a "
    "draft stands with probability min(1, p / q), else the target draws from what it has beyond the drafter; under "
    "match the target's choice is the greatest log p + noise, whatever was drafted."
)
_ODDS = (
    "p: under the target, at the node above; q: with which it was drawn, or the drafter's own estimate. Rejection "
    "sampling accepts everything above the line; match and greedy decoding accept what the target chooses."
)
_ENTROPY = (
    "Ticks are single questions to the target, below where it rejected all drafts, above where it accepted one; points "
    "are shares among equal numbers of them."
)
_SOURCES = "Of hybrids; a token that two drafters proposed counts for both."
_BATCHES = "Tokens per second of all rows together, over those of the plain loop with as many rows."
_ABLATIONS = "Variants trained alike and measured side by side, always drafting; intervals are over prompts."
_ANALYSIS = (
    "Cosines of successive hidden states, and how often one of K drafts can be accepted: the best that any rule could "
    "do (an optimal transport cost) beside the rules that exist."
)
_CHECK = (
    "What forwards cost here by the number of tokens, how the text goes on, and what drafters bring on these prompts."
)


# ------------------------------------------------------------------------------------------- measurements of speed


def _summary(found: Found) -> Iterator[Headline]:
    for source in found.speed:
        results = source.data
        rivals = {name: line for name, line in results.summary.items() if line.speed_up.value is not None}
        drafted = {
            name: line
            for name, line in rivals.items()
            if results.methods[name] not in ("autoregressive", "transformers")
        }
        lossless = {name: line for name, line in drafted.items() if not _lossy(results, name)}
        if not lossless:
            continue
        best = max(lossless, key=lambda name: lossless[name].speed_up.value or 0.0)
        line = lossless[best]
        faster = [n for n, other in drafted.items() if (other.speed_up.value or 0) > (line.speed_up.value or 0)]
        yield Headline(
            source,
            best,
            show(line.speed_up.value, unit="x"),
            line.speed_up.text("x"),
            line.acceptance_length.text(),
            _identical(line),
            f"Faster, but lossy: {', '.join(faster)}." if faster else "",
        )


def _identical(line: Summary) -> str:
    if line.equal_autoregressive is not None:
        return f"{share(line.equal_autoregressive, line.answers)} as autoregressive decoding"
    return f"{share(line.equal_transformers, line.answers)} as transformers"


def _lossy(results: SpeedResults, name: str) -> bool:
    return "lossy" in name or "lossy" in results.methods[name]


def _name(results: SpeedResults, name: str) -> str:
    """A method's, with what must be known of it."""
    mark = " (baseline)" if name == results.baseline else ""
    return name + (" (lossy)" if _lossy(results, name) and "lossy" not in name else "") + mark


def _caution(results: SpeedResults) -> str:
    lossy = [name for name in results.methods if _lossy(results, name)]
    told = [f"Lossy, not the target's own distribution: {', '.join(lossy)}."] if lossy else []
    return " ".join([*told, *(f"Look into this: {warning}." for warning in results.warnings)])


def _speed(found: Found) -> Iterator[Plot]:
    for source in found.speed:
        results = source.data
        header, rows = ["method", *COLUMNS], results.lines()
        header = [*header[:-1], "projected for 8B (not measured)"]
        shown = {name: line.speed_up for name, line in results.summary.items() if line.speed_up.value is not None}
        ranked = sorted(shown, key=lambda name: -(shown[name].value or 0.0))
        drawing = partial(
            plots.intervals,
            {_name(results, name): _triple(shown[name]) for name in ranked},
            "speed-up",
            at=1.0,
            unit="x",
        )
        yield Plot("Speed-up by method", source, drawing, (header, rows), _caution(results))
        if len(results.categories) > 1:
            yield _by_task(source, ranked)


def _by_task(source: Source[SpeedResults], ranked: Sequence[str]) -> Plot:
    results = source.data
    fastest = [name for name in ranked if results.methods[name] not in ("autoregressive", "transformers")]
    drafted = [name for name in results.methods if name in fastest]
    lines = {one: {name: results.summarise(name, one) for name in drafted} for one in results.categories}
    groups = {
        category: {
            _name(results, name): _triple(line.speed_up)
            for name, line in found.items()
            if name in fastest[: plots.MOST_SERIES] and line.speed_up.value is not None
        }
        for category, found in lines.items()
    }
    rows = [
        [
            category,
            name,
            line.speed_up.text("x"),
            line.acceptance_length.text(),
        ]
        for category, found in lines.items()
        for name, line in found.items()
    ]
    left_out = len(drafted) - plots.MOST_SERIES
    told = f"Drawn are the {plots.MOST_SERIES} fastest; the table has all." if left_out > 0 else ""
    drawing = partial(plots.grouped, groups, "speed-up", at=1.0)
    return Plot(
        "Speed-up by task", source, drawing, (["task", "method", "speed-up (95 %)", "acceptance length (95 %)"], rows),
        told=told,
    )  # fmt: skip


def _lengths(found: Found) -> Iterator[Plot]:
    for source in found.speed:
        results = source.data
        values = {
            name: [
                tally.timed_tokens / tally.forwards for r in results.records if (tally := r.tallies[name]).forwards > 0
            ]
            for name, line in results.summary.items()
            if line.acceptance_length.value is not None and results.methods[name] != "autoregressive"
        }
        values = {name: lengths for name, lengths in values.items() if lengths}
        if values:
            rows = [
                [
                    name,
                    show(quantile(of, 0.5)),
                    show(min(of)),
                    show(quantile(of, 0.25)),
                    show(quantile(of, 0.75)),
                    show(max(of)),
                ]
                for name, of in values.items()
            ]
            drawing = partial(
                plots.strips, {_name(results, name): of for name, of in values.items()}, "acceptance length"
            )
            table = (["method", "median", "least", "25 %", "75 %", "greatest"], rows)
            yield Plot("Acceptance length of each prompt", source, drawing, table, _caution(results))
        histograms = _histograms(results)
        if histograms:
            sizes = sorted({size for counts in histograms.values() for size in counts})
            series = {
                name: [(size, counts[size] / counts.total()) for size in sizes] for name, counts in histograms.items()
            }
            drawing = partial(
                plots.curves, series, "tokens settled in a step", "share of steps", share=True, whole=True
            )
            rows = [[name, *(f"{counts[size]:,}" for size in sizes)] for name, counts in histograms.items()]
            yield Plot("Tokens settled in a step", source, drawing, (["method", *map(str, sizes)], rows))


def _histograms(results: SpeedResults) -> dict[str, Counter[int]]:
    """Of the drafted methods, as many as can be told apart."""
    drafted = [
        name
        for name in results.details
        if results.methods[name] != "autoregressive" and results.details[name].histogram
    ]
    fastest = sorted(drafted, key=lambda name: -(results.summary[name].speed_up.value or 0.0))[: plots.MOST_SERIES]
    # In the order of the table, so that a method looks alike from drawing to drawing.
    return {_name(results, name): Counter(results.details[name].histogram) for name in drafted if name in fastest}


def _depths(found: Found) -> Iterator[Plot]:
    for source in found.traces:
        counts = source.data.by_depth
        if counts:
            told = f"One answer: the target was asked {sum(asked for asked, _ in counts)} times, as the table counts."
            named = {source.data.call.get("drafter", "draft"): counts}
            yield replace(_stands("Drafts that stood, by depth", source, named), told=told)
    for ablation in found.ablations:
        for temperature in ablation.data["others"]:
            lines = [(one["label"], one["at"][temperature]["anatomy"]) for one in ablation.data["lines"]]
            anatomies = {label: list(zip(a["asked"], a["accepted"], strict=True)) for label, a in lines}
            anatomies = {label: counts for label, counts in anatomies.items() if counts}
            if anatomies:
                yield _stands(f"Drafts that stood, by depth, T = {float(temperature):g}", ablation, anatomies)
    for measured in found.speed:
        histograms = _histograms(measured.data)
        if histograms:
            last = max(size for counts in histograms.values() for size in counts)
            series = {
                name: [
                    (size, sum(n for at, n in counts.items() if at > size) / counts.total()) for size in range(1, last)
                ]
                for name, counts in histograms.items()
            }
            if last > 1:
                drawing = partial(plots.curves, series, "tokens", "steps that settled more", share=True, whole=True)
                rows = [[name, *(f"{y:.0%}" for _, y in points)] for name, points in series.items()]
                table = (["method", *(f"more than {size}" for size in range(1, last))], rows)
                yield Plot("Steps that settled more than so many tokens", measured, drawing, table)


def _stands(title: str, source: Source[Any], counts: Mapping[str, Sequence[tuple[int, int]]]) -> Plot:
    """Curves of (asked, stood) by depth; as many as can be told apart, and all in the table."""
    points = {
        name: [(depth, stood / asked) for depth, (asked, stood) in enumerate(found, start=1) if asked]
        for name, found in counts.items()
    }
    drawn = dict(list({name: line for name, line in points.items() if line}.items())[: plots.MOST_SERIES])
    drawing = partial(plots.curves, drawn, "depth", "share that stood", share=True, whole=True)
    deepest = max(map(len, counts.values()))
    rows = [
        [name, *(f"{stood} / {asked}" for asked, stood in found), *[DASH] * (deepest - len(found))]
        for name, found in counts.items()
    ]
    told = f"Drawn are the first {plots.MOST_SERIES}; the table has all." if len(points) > len(drawn) else ""
    return Plot(title, source, drawing, (["drafter", *(f"depth {d}" for d in range(1, deepest + 1))], rows), told=told)


def _latency(found: Found) -> Iterator[Plot]:
    for source in found.speed:
        results = source.data
        rows = {}
        for name, total in results.total.items():
            parts = {part: getattr(total, f"{part}_seconds") for part in ("draft", "verify", "commit")}
            split = parts if sum(parts.values()) else {}
            parts = {
                **split,
                "the rest" if split else "not split": max(total.decode_seconds - sum(parts.values()), 0.0),
            }
            if total.timed_tokens:
                rows[name] = {part: 1e3 * seconds / total.timed_tokens for part, seconds in parts.items()}
        order = ["draft", "verify", "commit", "the rest", "not split"]
        drawn = {_name(results, name): {part: parts.get(part, 0.0) for part in order} for name, parts in rows.items()}
        cells = [
            [name, show(sum(parts.values())), *(show(parts.get(part)) for part in order)]
            for name, parts in rows.items()
        ]
        table = (["method", "ms per token", *order], cells)
        yield Plot("Milliseconds per token", source, partial(plots.stacks, drawn, "ms per token"), table)
    for measured in found.efficiency:
        for setting, cases in _settings(measured.data):
            split = {
                _oracle(case["method"]): {
                    "target's forward": _per_step(case, "forward_seconds"),
                    "drafter's forwards": _per_step(case, "draft_seconds"),
                    "the engine": max(
                        _per_step(case, "seconds")
                        - _per_step(case, "forward_seconds")
                        - _per_step(case, "draft_seconds"),
                        0.0,
                    ),
                }
                for case in cases
                if case["forward_seconds"]
            }
            if split and setting[2] == 1:
                cells = [[name, *(show(value) for value in parts.values())] for name, parts in split.items()]
                table = (["method", *next(iter(split.values()))], cells)
                title = f"A step against bare forwards, {_setting(setting)}"
                drawing = partial(plots.stacks, split, "ms per step")
                yield Plot(title, measured, drawing, table, _simulated(split))
    for trace in found.traces:
        if trace.data.steps:
            parts = trace.data.milliseconds
            cells = [
                [str(number), *(show(ms) for ms in step)]
                for number, step in enumerate(zip(*parts.values(), strict=True), start=1)
            ]
            yield Plot(
                "Every step of one answer", trace, partial(plots.timeline, parts, "ms"), (["step", *parts], cells)
            )


def _tail(found: Found) -> Iterator[Plot]:
    ends = ("median", "95 %")
    for source in found.efficiency:
        for setting, cases in _settings(source.data):
            gaps = {_oracle(case["method"]): (case["gaps"][0], case["gaps"][1]) for case in cases}
            title = f"Milliseconds between arrivals, {_setting(setting)}"
            if setting[2] == 1:
                yield _gaps(title, source, gaps, ends)
    for measured in found.speed:
        results = measured.data
        gaps = {
            _name(results, name): (quantile(detail.gaps, 0.5), quantile(detail.gaps, 0.95))
            for name, detail in results.details.items()
            if detail.gaps
        }
        if gaps:
            yield _gaps("Milliseconds between arrivals", measured, gaps, ends)


def _gaps(title: str, source: Source[Any], gaps: dict[str, tuple[float, float]], ends: tuple[str, str]) -> Plot:
    rows = [[name, show(low), show(high)] for name, (low, high) in gaps.items()]
    return Plot(title, source, partial(plots.spans, gaps, "ms", ends), (["method", *ends], rows), _simulated(gaps))


# ------------------------------------------------------------------------------------------- traces


def _text(found: Found) -> Iterator[Answer]:
    for source in found.traces:
        trace = source.data
        counts = ", ".join(f"{count} {event}" for event, count in trace.events.most_common())
        lossy = "" if trace.call.get("lossless", True) else " Lossy: not the target's own distribution."
        note = f"Acceptance length {trace.acceptance_length:.2f}: {counts}.{lossy}"
        tokens = [
            Token(spelt(token), token["event"], token["source"] if token["event"] == "accepted" else None, _told(token))
            for token in trace.emitted
        ]
        yield Answer(source, trace.call.get("prompt", "not recorded"), tokens, note)


def spelt(token: Mapping[str, Any]) -> str:
    """A token's text, or its id where the trace has none."""
    return token.get("text", f"⟨{token['token']}⟩")


def visible(text: str) -> str:
    """A token in quotation marks of its own, with its control characters to be seen."""
    return "‘" + repr(text)[1:-1] + "’"


def _told(token: Mapping[str, Any]) -> str:
    values = {
        "p": (token["p"], ".3f"),
        "q": (token["q"], ".3f"),
        "noise": (token["noise"], ".2f"),
        "margin": (token["margin"], ".2f"),
        "draw": (token["draw"], ".3f"),
        "entropy": (token.get("entropy"), ".2f"),
    }
    parts = [f"{name} {value:{spec}}" for name, (value, spec) in values.items() if value is not None]
    by = f" (by {token['source'].replace('+', ' and ')})" if token["source"] else ""
    depth = f", depth {token['depth']}" if token["depth"] else ""
    return f"{visible(spelt(token))} {token['event']}{by}, step {token['step']}{depth}" + "".join(
        f" · {p}" for p in parts
    )


def _drafts(found: Found) -> Iterator[Plot]:
    for source in found.traces:
        lengths = source.data.lengths
        if any(drafted for drafted, _ in lengths):
            rows = [[str(at), str(drafted), str(stood)] for at, (drafted, stood) in enumerate(lengths, start=1)]
            table = (["step", "drafted, tokens deep", "stood"], rows)
            yield Plot("Draft length by step", source, partial(plots.lengths, lengths), table)


def _cache(found: Found) -> Iterator[Plot]:
    for source in found.traces:
        steps = source.data.steps[:_SHOWN_STEPS]
        if not any(step["nodes"] > 1 for step in steps):
            continue
        slots = [(step["lengths"][0], *source.data.slots(step)) for step in steps]
        rows = [
            [
                str(at),
                str(length),
                str(len(kept) + len(rolled)),
                str(len(kept)),
                str(len(rolled)),
                str(sum(a != b for a, b in kept)),
            ]
            for at, (length, kept, rolled) in enumerate(slots, start=1)
        ]
        table = (["step", "slots filled before", "written", "kept", "rolled back", "moved"], rows)
        cut = f"The first {_SHOWN_STEPS} steps." if len(source.data.steps) > _SHOWN_STEPS else ""
        yield Plot("Slots of the cache", source, partial(plots.waterfall, slots), table, told=cut)


def _rejection(found: Found) -> Iterator[Plot]:
    for source in found.traces:
        choices = source.data.choices
        if not choices:
            continue
        # The most telling one: a single draft, as surprising a rejection as there is, with both distributions known.
        best = max(
            choices,
            key=lambda one: (one["overlap"] is not None, len(one["drafted"]) == 1, _rejected_q(one)),
        )
        yield _choice(source, best)


def _rejected_q(choice: Mapping[str, Any]) -> float:
    known = zip(choice["tokens"], choice["q"], strict=True)
    return max((q for token, q in known if token in choice["drafted"] and q is not None), default=0.0)


def _choice(source: Source[Traced], choice: Mapping[str, Any]) -> Plot:
    texts = choice.get("texts") or [f"⟨{token}⟩" for token in choice["tokens"]]
    labels = []
    for token, text in zip(choice["tokens"], texts, strict=True):
        fate = " drafted" if token in choice["drafted"] else " chosen" if token == choice["token"] else ""
        labels.append(visible(text) + fate)
    noise, scores = choice["noise"], None
    if noise[0] is not None:
        scores = [math.log(max(p, 1e-30)) + g for p, g in zip(choice["p"], noise, strict=True)]
    header = ["token", "p, target", "q, drafter", "noise", "log p + noise"]
    rows = [
        [label, show(p, ".4f"), show(q, ".4f"), show(g), show(None if scores is None else scores[at])]
        for at, (label, p, q, g) in enumerate(zip(labels, choice["p"], choice["q"], noise, strict=True))
    ]
    drawn = [
        token
        for token in source.data.judged
        if token["step"] == choice["step"] and token["parent"] == choice["node"] and token["draw"] is not None
    ]
    told = [
        f"{visible(spelt(one))}: the draw {one['draw']:.3f} times q {one['q']:.3f} is {one['draw'] * one['q']:.3f}, "
        f"{'less than' if one['event'] == 'accepted' else 'not less than'} p {one['p']:.3f}, so it is {one['event']}."
        for one in drawn[:1]
        if one["q"] is not None and source.data.call.get("acceptance") == "rejection"
    ]
    if choice["overlap"] is not None:
        told.append(
            f"Over all tokens min(p, q) sums to {choice['overlap']:.3f}, the chance to accept one draft; the residual "
            f"is the other {1 - choice['overlap']:.3f}."
        )
    else:
        told.append("Of the drafter only the estimates of its own drafts are known here.")
    matters = sorted(
        range(len(labels)),
        key=lambda at: (
            choice["tokens"][at] not in (*choice["drafted"], choice["token"]),
            -max(choice["p"][at], choice["q"][at] or 0.0),
        ),
    )
    shown = sorted(matters[:_SHOWN_TOKENS])
    drawing = partial(
        plots.choice,
        [labels[at] for at in shown],
        [choice["p"][at] for at in shown],
        [choice["q"][at] for at in shown],
        None if scores is None else [scores[at] for at in shown],
    )
    return Plot(
        f"Step {choice['step']}, position {choice['position']}", source, drawing, (header, rows), told=" ".join(told)
    )


def _odds(found: Found) -> Iterator[Plot]:
    for source in found.traces:
        judged = [token for token in source.data.judged if token["q"] and token["p"] is not None]
        if not judged:
            continue
        pairs = {
            event: [(token["p"], token["q"]) for token in judged if token["event"] == event]
            for event in ("accepted", "rejected")
        }
        rows = [
            [
                visible(spelt(t)),
                show(t["p"] / t["q"], ".3g"),
                show(t["p"], ".4f"),
                show(t["q"], ".4f"),
                t["event"],
                show(t["draw"], ".3f"),
            ]
            for t in judged
        ]
        table = (["token", "p / q", "p", "q", "became", "draw"], rows)
        yield Plot(
            "p against q", source, partial(plots.odds, {event: found for event, found in pairs.items() if found}), table
        )


def _entropy(found: Found) -> Iterator[Plot]:
    for source in found.traces:
        asked = source.data.questions
        whose = {"the target's": "entropy", "the drafter's": "draft_entropy"}
        cases = {
            name: [(token[key], stood) for token, stood in asked if token.get(key) is not None]
            for name, key in whose.items()
        }
        cases = {name: known for name, known in cases.items() if known}
        if not cases:
            continue
        rows = [
            [
                str(token["position"]),
                show(token.get("entropy")),
                show(token.get("draft_entropy")),
                "yes" if stood else "no",
            ]
            for token, stood in asked
        ]
        table = (["position", "entropy of the target, nats", "of the drafter", "a draft stood"], rows)
        yield Plot("Whether a draft stood, by entropy", source, partial(plots.by_entropy, cases), table)


def _sources(found: Found) -> Iterator[Plot]:
    for source in found.traces:
        if source.data.sources:
            yield _shares("Tokens of one answer, by drafter", source, source.data.sources)
    for measured in found.speed:
        for name, detail in measured.data.details.items():
            if detail.sources:
                counts = {one: (proposed, accepted) for one, (proposed, accepted) in detail.sources.items()}
                yield _shares(f"Proposed by each drafter of {name}", measured, counts)


def _shares(title: str, source: Source[Any], counts: Mapping[str, tuple[int, int]]) -> Plot:
    drawn = {
        name: {"accepted": float(accepted), "not accepted": float(proposed - accepted)}
        for name, (proposed, accepted) in counts.items()
    }
    rows = [
        [name, str(proposed), str(accepted), show(accepted / proposed if proposed else None, ".0%")]
        for name, (proposed, accepted) in counts.items()
    ]
    drawing = partial(plots.stacks, drawn, "tokens proposed", spec=".0f")
    return Plot(title, source, drawing, (["drafter", "proposed", "accepted", "share"], rows))


# ------------------------------------------------------------------------------------------- the other records

Setting = tuple[str, float, int]


def _settings(record: Mapping[str, Any]) -> list[tuple[Setting, list[dict[str, Any]]]]:
    """Cases of an efficiency record by dtype, temperature and batch."""
    groups: dict[Setting, list[dict[str, Any]]] = {}
    for case in record["cases"]:
        groups.setdefault((case["dtype"], case["temperature"], case["batch"]), []).append(case)
    return list(groups.items())


def _setting(setting: Setting) -> str:
    return f"{setting[0]}, T = {setting[1]:g}"


def _per_step(case: Mapping[str, Any], seconds: str) -> float:
    return 1e3 * case[seconds] / case["steps"] if case["steps"] else 0.0


def _oracle(method: str) -> str:
    return ORACLE if method == "oracle" else method


def _simulated(names: Mapping[str, Any]) -> str:
    return "The oracle drafts the truth with known errors, at no cost: simulated." if ORACLE in names else ""


def _batches(found: Found) -> Iterator[Plot]:
    for source in found.efficiency:
        grouped = dict(_settings(source.data))
        for dtype, temperature in dict.fromkeys((dtype, temperature) for dtype, temperature, _ in grouped):
            batches = sorted(batch for kind, at, batch in grouped if (kind, at) == (dtype, temperature))
            if len(batches) < 2:
                continue
            series: dict[str, list[tuple[float, float]]] = {}
            rows = []
            for batch in batches:
                rates = {
                    case["method"]: case["tokens"] / case["seconds"] for case in grouped[dtype, temperature, batch]
                }
                for method, rate in rates.items():
                    rows.append(
                        [str(batch), _oracle(method), f"{rate:.0f}", show(rate / rates["autoregressive"], unit="x")]
                    )
                    if method != "autoregressive":
                        series.setdefault(_oracle(method), []).append((batch, rate / rates["autoregressive"]))
            drawing = partial(plots.curves, series, "rows decoded together", "speed-up", log=True, at=1.0)
            table = (["rows", "method", "tokens/s", "against plain"], rows)
            title = f"Speed-up by batch size, {dtype}, T = {temperature:g}"
            yield Plot(title, source, drawing, table, _simulated(series))


def _ablations(found: Found) -> Iterator[Plot]:
    for source in found.ablations:
        for temperature, others in source.data["others"].items():
            lines = [(line["label"], line["at"][temperature]["summary"]) for line in source.data["lines"]]
            at = f"T = {float(temperature):g}"
            kinds = (("acceptance_length", "Acceptance length", "", None), ("speed_up", "Speed-up", "x", 1.0))
            for key, title, unit, reference in kinds:
                estimates = {label: _triple(Estimate(**summary[key])) for label, summary in lines}
                known = {label: triple for label, triple in estimates.items() if triple[0] is not None}
                beside = {name: _triple(Estimate(**other[key])) for name, other in others.items()}
                rows = [[label, Estimate(*triple).text(unit)] for label, triple in {**estimates, **beside}.items()]
                if known:
                    drawing = partial(plots.intervals, known, f"{title.lower()}, {at}", reference, unit)
                    table = (["variant", f"{title.lower()} (95 %)"], rows)
                    yield Plot(f"{title} by variant, {at}", source, drawing, table)


def _analysis(found: Found) -> Iterator[Plot]:
    for source in found.analyses:
        rows = source.data["similarity"]
        names = {str(row["lag"]) if row["lag"] is not None else "unrelated": row for row in rows}
        spread = {
            f"lag {name}" if name != "unrelated" else name: (
                row["percentiles"]["50"], row["percentiles"]["5"], row["percentiles"]["95"]
            )
            for name, row in names.items()
        }  # fmt: skip
        cells = [
            [name, show(row["mean"]), f"{row['share']:.1%}", *(show(value) for value in row["percentiles"].values())]
            for name, row in names.items()
        ]
        table = (["lag", "mean", "0.5 or more", *(f"{at} %" for at in rows[0]["percentiles"])], cells)
        drawing = partial(plots.intervals, spread, "cosine of states: median, 5 to 95 %", at=0.5)
        yield Plot("Are successive states similar?", source, drawing, table)
        rules = {
            "optimum, independent drafts": "independent",
            "optimum, without replacement": "without_replacement",
            "optimum, likeliest": "likeliest",
            "match": "match",
            "rejection": "rejection",
        }
        found_rows = source.data["acceptance"]["rows"]
        series = {name: [(row["drafts"], row[key]) for row in found_rows] for name, key in rules.items()}
        drawing = partial(
            plots.curves, series, "drafts at depth 1", "one is accepted, T = 1", share=True, whole=True, zero=False
        )
        cells = [[name, *(show(y, ".3f") for _, y in points)] for name, points in series.items()]
        table = (["rule", *(f"{row['drafts']} drafts" for row in found_rows)], cells)
        note = (
            "Optima are computed limits and match and rejection are simulated, on the distributions of real positions."
        )
        yield Plot("Acceptance and its limits", source, drawing, table, told=note)


def _check(found: Found) -> Iterator[Plot]:
    for source in found.checks:
        report = source.data
        costs = [(int(size), 1e3 * seconds) for size, seconds in report["costs"]["verify"].items()]
        rows = [[str(size), show(ms), show(ms / costs[0][1])] for size, ms in costs]
        drawing = partial(plots.curves, {"target": costs}, "tokens in a forward", "ms", log=True)
        yield Plot("What a forward costs", source, drawing, (["tokens", "ms", "of one"], rows))
        if report.get("acceptance"):
            ranks = range(len(report["acceptance"][0]))
            series = {
                f"rank {rank + 1}": [(depth, row[rank]) for depth, row in enumerate(report["acceptance"], 1)]
                for rank in ranks
            }
            series = dict(list(series.items())[: plots.MOST_SERIES])
            cells = [
                [str(depth), *(f"{rate:.2f}" for rate in row)] for depth, row in enumerate(report["acceptance"], 1)
            ]
            drawing = partial(plots.curves, series, "depth", "the text goes on so", share=True, whole=True)
            table = (["depth", *(f"rank {rank + 1}" for rank in ranks)], cells)
            yield Plot("How the text goes on, by rank of the draft", source, drawing, table)
        measured = {
            one["drafter"]: (one["speed_up"], one["speed_up_low"], one["speed_up_high"])
            for one in report["measured"]
            if one["speed_up"] is not None
        }
        if measured:
            cells = [
                [one["drafter"], Estimate(one["speed_up"], one["speed_up_low"], one["speed_up_high"]).text("x"),
                 show(one["acceptance_length"]), show(one["tokens_per_second"], ".0f")]
                for one in report["measured"]
            ]  # fmt: skip
            table = (["drafter", "speed-up (95 %)", "acceptance length", "tokens/s"], cells)
            drawing = partial(plots.intervals, measured, "speed-up over the plain loop", at=1.0, unit="x")
            yield Plot("Drafters on these prompts", source, drawing, table)


def _triple(estimate: Estimate) -> tuple[Any, float | None, float | None]:
    return estimate.value, estimate.low, estimate.high


def slug(text: str) -> str:
    """For file names."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
