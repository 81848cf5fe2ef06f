"""The drawings and tables of measured results: speed, efficiency, ablations, analyses and checks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from shape.evaluation.estimates import Estimate, number, quantile, ratio
from shape.evaluation.markdown import DASH, Table, show
from shape.evaluation.report import plots
from shape.evaluation.report.sources import Source
from shape.evaluation.results import AUTOREGRESSIVE, COLUMNS, SpeedResults

ORACLE = "oracle (simulated)"
_PARTS = ("draft", "verify", "commit")


@dataclass(frozen=True)
class Plot:
    """Figures as a table, and as a drawing where they have one.

    Attributes:
        draw: makes the drawing; not before it is wanted.
        note: how to read it, and what must not be overlooked: simulated, lossy.
    """

    title: str
    table: Table
    draw: Callable[[], Figure] | None = None
    note: str = ""

    @property
    def label(self) -> str:
        """For readers who cannot see the drawing: the title and the first figures of the table."""
        header, lines = self.table
        told = "; ".join(f"{line[0]}: {line[1]}" for line in lines[:12] if len(line) > 1)
        more = f"; and {len(lines) - 12} more" if len(lines) > 12 else ""
        return f"{self.title}. {header[1] if len(header) > 1 else ''} by {header[0]}: {told}{more}"


# ------------------------------------------------------------------------------------------------- speed


def speed(source: Source[SpeedResults]) -> Iterator[Plot]:
    results = source.data
    summary = results.summary
    by_speed = sorted(summary, key=lambda name: -(summary[name].speed_up.value or 0.0))
    known = {results.marked(name): astuple(summary[name].speed_up) for name in by_speed if summary[name].speed_up.value}
    header = ["method", *COLUMNS]
    drawing = partial(plots.intervals, known, "speed-up", at=1.0, unit="x")
    yield Plot("Speed-up by method", (header, results.lines()), drawing, caution(results))
    if len(results.categories) > 1 and results.drafted:
        drawn = results.drafted[: plots.MOST_SERIES]
        groups = {
            category: {
                results.marked(name): astuple(line.speed_up)
                for name in drawn
                if (line := results.summarise(name, category)).speed_up.value is not None
            }
            for category in results.categories
        }
        left_out = f"Drawn are the {len(drawn)} fastest." if len(drawn) < len(results.drafted) else ""
        drawing = partial(plots.grouped, groups, "speed-up", at=1.0)
        yield Plot("Speed-up (acceptance length) by task", results.by_category(), drawing, left_out)
    yield from _committed(results)
    yield _times(results)
    yield _spread(results)
    for name, detail in results.details.items():
        if detail.sources:
            yield proposals(f"Proposed by each drafter of {name}", detail.sources)


def caution(results: SpeedResults) -> str:
    lossy = [name for name in results.methods if results.is_lossy(name)]
    told = [f"Lossy, not the target's own distribution: {', '.join(lossy)}."] if lossy else []
    return " ".join([*told, *(f"Look into this: {warning}." for warning in results.warnings)])


def _committed(results: SpeedResults) -> Iterator[Plot]:
    """How many tokens a forward of the target committed, of the fastest methods that drafted."""
    counts = {name: results.details[name].histogram for name in results.drafted if name in results.details}
    drawn = {name: one for name, one in list(counts.items())[: plots.MOST_SERIES] if one}
    if drawn:
        sizes = sorted({size for one in drawn.values() for size in one})
        totals = {name: sum(one.values()) for name, one in drawn.items()}
        series = {name: [(size, one.get(size, 0) / totals[name]) for size in sizes] for name, one in drawn.items()}
        lines = [[name, *(f"{one.get(size, 0):,}" for size in sizes)] for name, one in drawn.items()]
        drawing = partial(plots.curves, series, "tokens committed in a step", "share of steps", share=True, whole=True)
        yield Plot("Tokens committed in a step", (["method", *map(str, sizes)], lines), drawing)


def _times(results: SpeedResults) -> Plot:
    """Drafting, verifying by the target, and committing what was accepted; the rest is the drafter's reading of the
    prompt, streaming and bookkeeping.
    """
    found = {}
    for name, total in results.total.items():
        parts = {part: getattr(total, f"{part}_seconds") for part in _PARTS}
        rest = max(total.decode_seconds - sum(parts.values()), 0.0)
        parts = {**parts, "the rest": rest} if total.split else {"not split": total.decode_seconds}
        if total.timed_tokens:
            found[name] = {part: 1e3 * seconds / total.timed_tokens for part, seconds in parts.items()}
    order = [*_PARTS, "the rest", "not split"]
    drawn = {name: {part: parts.get(part, 0.0) for part in order} for name, parts in found.items()}
    lines = [
        [name, show(sum(parts.values())), *(show(parts.get(part)) for part in order)] for name, parts in found.items()
    ]
    table = (["method", "ms per token", *order], lines)
    return Plot("Where the time goes", table, partial(plots.stacks, drawn, "ms per token"))


def _spread(results: SpeedResults) -> Plot:
    """Of prompts' acceptance lengths, and of the waits between arrivals of tokens."""
    lines = []
    for name in results.methods:
        tallies = [record.tallies[name] for record in results.records]
        lengths = [one.timed_tokens / one.forwards for one in tallies if one.forwards]
        gaps = results.details[name].gaps if name in results.details else []
        spread = (min(lengths), quantile(lengths, 0.5), max(lengths)) if lengths else (None, None, None)
        waits = (quantile(gaps, 0.5), quantile(gaps, 0.95)) if gaps else (None, None)
        lines.append([name, *map(show, spread), *map(show, waits)])
    header = ["method", "acceptance length of a prompt, least", "median", "greatest", "ms between arrivals, median",
              "95 %"]  # fmt: skip
    note = "Speculation makes the sum of waits smaller and may make the longest one longer."
    return Plot("Acceptance lengths of prompts, and waiting for tokens", (header, lines), None, note)


def proposals(title: str, counts: Mapping[str, Sequence[int]]) -> Plot:
    """Of hybrids: tokens proposed and accepted by each drafter; a token that two proposed counts for both."""
    drawn = {
        name: {"accepted": float(accepted), "not accepted": float(proposed - accepted)}
        for name, (proposed, accepted) in counts.items()
    }
    lines = [
        [name, str(proposed), str(accepted), show(accepted / proposed if proposed else None, ".0%")]
        for name, (proposed, accepted) in counts.items()
    ]
    drawing = partial(plots.stacks, drawn, "tokens proposed", spec=".0f")
    return Plot(title, (["drafter", "proposed", "accepted", "share"], lines), drawing)


def by_depth(title: str, counts: Mapping[str, Sequence[tuple[int, int]]], note: str = "") -> Plot:
    """Of drafts whose tokens above a depth were all accepted, the share of which one was accepted there too.

    Args:
        counts: drafter -> (asked, accepted) by depth.
    """
    points = {
        name: [(depth, accepted / asked) for depth, (asked, accepted) in enumerate(found, start=1) if asked]
        for name, found in counts.items()
    }
    drawn = dict([item for item in points.items() if item[1]][: plots.MOST_SERIES])
    deepest = max(map(len, counts.values()))
    lines = [
        [name, *(f"{accepted} / {asked}" for asked, accepted in found), *[DASH] * (deepest - len(found))]
        for name, found in counts.items()
    ]
    left_out = f"Drawn are the first {len(drawn)}." if len(points) > len(drawn) else ""
    drawing = partial(plots.curves, drawn, "depth", "share accepted", share=True, whole=True)
    header = ["drafter", *(f"depth {depth}" for depth in range(1, deepest + 1))]
    return Plot(title, (header, lines), drawing, " ".join(filter(None, [note, left_out])))


# ------------------------------------------------------------------------------------------------- efficiency


def efficiency(source: Source[Any]) -> Iterator[Plot]:
    groups: dict[tuple[str, float], dict[int, list[dict[str, Any]]]] = {}
    for case in source.data["cases"]:
        by_batch = groups.setdefault((case["dtype"], case["temperature"]), {})
        method = ORACLE if case["method"] == "oracle" else case["method"]
        by_batch.setdefault(case["batch"], []).append({**case, "method": method})
    for (dtype, temperature), by_batch in groups.items():
        setting = f"{dtype}, T = {temperature:g}"
        if 1 in by_batch:
            yield _steps(f"A step against bare forwards, {setting}", by_batch[1])
        if len(by_batch) > 1:
            yield _batches(f"Speed-up by batch size, {setting}", by_batch)


_SIMULATED = "The oracle drafts the truth with known errors, at no cost: simulated."


def _steps(title: str, cases: Sequence[Mapping[str, Any]]) -> Plot:
    drawn, lines = {}, []
    for case in cases:
        target, drafter, whole = (
            1e3 * case[part] / case["steps"] if case["steps"] else 0.0
            for part in ("forward_seconds", "draft_seconds", "seconds")
        )
        parts = {"target's forward": target, "drafter's forwards": drafter}
        parts["the engine"] = max(whole - target - drafter, 0.0)
        if target:
            drawn[case["method"]] = parts
        cells = parts.values() if target else [None] * 3
        lines.append([case["method"], *map(show, cells), *map(show, case["gaps"])])
    header = ["method", "target's forward, ms", "drafter's", "the engine", "ms between arrivals, median", "95 %"]
    return Plot(title, (header, lines), partial(plots.stacks, drawn, "ms per step"), _SIMULATED)


def _batches(title: str, by_batch: Mapping[int, Sequence[Mapping[str, Any]]]) -> Plot:
    series: dict[str, list[tuple[float, float]]] = {}
    lines = []
    for batch, cases in sorted(by_batch.items()):
        rates = {case["method"]: ratio(case["tokens"], case["seconds"]) for case in cases}
        for method, rate in rates.items():
            gain = number(ratio(rate, rates[AUTOREGRESSIVE]))
            lines.append([str(batch), method, show(number(rate), ".0f"), show(gain, unit="x")])
            if method != AUTOREGRESSIVE and gain is not None:
                series.setdefault(method, []).append((batch, gain))
    drawing = partial(plots.curves, series, "batch size", "speed-up", log=True, at=1.0)
    table = (["batch size", "method", "tokens/s", "against autoregressive"], lines)
    return Plot(title, table, drawing, _SIMULATED)


# ------------------------------------------------------------------------------------------------- the other records


def ablation(source: Source[Any]) -> Iterator[Plot]:
    for temperature, others in source.data["others"].items():
        lines = {line["label"]: line["at"][temperature] for line in source.data["lines"]}
        at = f"T = {float(temperature):g}"
        for key, title, unit, reference in (
            ("acceptance_length", "Acceptance length", "", None), ("speed_up", "Speed-up", "x", 1.0),
        ):  # fmt: skip
            found = {label: Estimate(**one["summary"][key]) for label, one in lines.items()}
            beside = {name: Estimate(**other[key]) for name, other in others.items()}
            known = {label: astuple(one) for label, one in found.items() if one.value is not None}
            cells = [[label, one.text(unit)] for label, one in {**found, **beside}.items()]
            if known:
                drawing = partial(plots.intervals, known, f"{title.lower()}, {at}", reference, unit)
                yield Plot(f"{title} by variant, {at}", (["variant", f"{title.lower()} (95 %)"], cells), drawing)
        drafts = {
            label: list(zip(one["anatomy"]["asked"], one["anatomy"]["accepted"], strict=True))
            for label, one in lines.items()
        }
        if any(drafts.values()):
            yield by_depth(f"Accepted drafts by depth, {at}", {label: one for label, one in drafts.items() if one})


def analysis(source: Source[Any]) -> Iterator[Plot]:
    found = source.data["similarity"]
    names = {"unrelated" if one["lag"] is None else f"lag {one['lag']}": one for one in found}
    spread = {name: tuple(one["percentiles"][at] for at in ("50", "5", "95")) for name, one in names.items()}
    cells = [
        [name, show(one["mean"]), f"{one['share']:.1%}", *(show(value) for value in one["percentiles"].values())]
        for name, one in names.items()
    ]
    table = (["lag", "mean", "0.5 or more", *(f"{at} %" for at in found[0]["percentiles"])], cells)
    drawing = partial(plots.intervals, spread, "cosine of states: median, 5 to 95 %", at=0.5)
    yield Plot("Are successive states similar?", table, drawing)
    rules = {
        "optimum, independent drafts": "independent",
        "optimum, without replacement": "without_replacement",
        "optimum, likeliest": "likeliest",
        "match": "match",
        "rejection": "rejection",
    }
    drafts = source.data["acceptance"]["rows"]
    series = {name: [(one["drafts"], one[key]) for one in drafts] for name, key in rules.items()}
    drawing = partial(
        plots.curves, series, "drafts at depth 1", "one is accepted, T = 1", share=True, whole=True, zero=False
    )
    cells = [[name, *(show(y, ".3f") for _, y in points)] for name, points in series.items()]
    table = (["rule", *(f"{one['drafts']} drafts" for one in drafts)], cells)
    note = "Optima are computed limits and match and rejection are simulated, on the distributions of real positions."
    yield Plot("Acceptance and its limits", table, drawing, note)


def check(source: Source[Any]) -> Iterator[Plot]:
    report = source.data
    costs = [(int(size), 1e3 * seconds) for size, seconds in report["costs"]["verify"].items()]
    cells = [[str(size), show(ms), show(ms / costs[0][1])] for size, ms in costs]
    drawing = partial(plots.curves, {"target": costs}, "tokens in a forward", "ms", log=True)
    yield Plot("What a forward costs", (["tokens", "ms", "of one"], cells), drawing)
    if rates := report.get("acceptance"):
        ranks = [f"rank {rank}" for rank in range(1, len(rates[0]) + 1)]
        series = {
            name: [(depth, line[at]) for depth, line in enumerate(rates, 1)]
            for at, name in enumerate(ranks[: plots.MOST_SERIES])
        }
        cells = [[str(depth), *(f"{rate:.2f}" for rate in line)] for depth, line in enumerate(rates, 1)]
        drawing = partial(plots.curves, series, "depth", "the text goes on so", share=True, whole=True)
        yield Plot("How the text goes on, by rank of the draft", (["depth", *ranks], cells), drawing)
    gains = {
        one["drafter"]: Estimate(one["speed_up"], one["speed_up_low"], one["speed_up_high"])
        for one in report["measured"]
    }
    if known := {name: astuple(gain) for name, gain in gains.items() if gain.value is not None}:
        cells = [
            [one["drafter"], gains[one["drafter"]].text("x"), show(one["acceptance_length"]),
             show(one["tokens_per_second"], ".0f")]
            for one in report["measured"]
        ]  # fmt: skip
        gain = f"speed-up ({report.get('brackets', '95 %')})"  # in older reports the prompts were not counted
        table = (["drafter", gain, "acceptance length", "tokens/s"], cells)
        drawing = partial(plots.intervals, known, "speed-up over autoregressive decoding", at=1.0, unit="x")
        yield Plot("Drafters on these prompts", table, drawing)
