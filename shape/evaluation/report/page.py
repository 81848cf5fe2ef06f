"""The page of the report, a page for each trace beside it, and the drawings as images for papers."""

import html
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any

import jinja2
from tqdm.auto import tqdm

from shape.evaluation.markdown import show
from shape.evaluation.report import figures, plots, traces
from shape.evaluation.report.figures import Plot
from shape.evaluation.report.sources import Source
from shape.evaluation.results import SpeedResults
from shape.files import prepare_file, write_whole

TITLE = "Speculative decoding, measured"
_MAKERS: dict[str, Callable[[Source[Any]], Iterator[Plot]]] = {
    "speed": figures.speed,
    "efficiency": figures.efficiency,
    "check": figures.check,
    "ablation": figures.ablation,
    "analysis": figures.analysis,
    "trace": traces.plots_of,
}
# Kind of results -> heading, and the command that makes it.
KINDS = {
    "speed": ("Speed", "shape bench --output RESULTS/bench"),
    "efficiency": ("Engine efficiency and batch sizes", "shape efficiency --output RESULTS/efficiency"),
    "check": ("What would pay on this machine", "shape check --output RESULTS/check.json"),
    "ablation": ("Ablations", "python -m eval.ablate default --output RESULTS/ablation"),
    "analysis": ("Does transport pay?", "python -m eval.analyze --output RESULTS/analysis"),
    "trace": ("Answers, token by token", 'shape generate --prompt "..." --trace RESULTS/trace.jsonl'),
}
COLUMNS = ("method", "tokens/s", "speed-up", "acceptance length", "equal to autoregressive", "measurement")


@dataclass(frozen=True)
class Bar:
    """A line of the chart: tokens per second, as a share of the fastest as well."""

    method: str
    rate: str
    note: str
    share: float
    is_baseline: bool


def plots_of(source: Source[Any]) -> list[Plot]:
    return list(_MAKERS[source.kind](source))


def bars(results: SpeedResults) -> list[Bar]:
    """Tokens per second of every method, the fastest first."""
    rates = {name: line.tokens_per_second or 0.0 for name, line in results.summary.items()}
    most = max(rates.values()) or 1.0
    return [
        Bar(
            results.marked(name),
            f"{rate:.0f}",
            results.summary[name].speed_up.text("x"),
            rate / most,
            name not in results.drafted,
        )
        for name, rate in sorted(rates.items(), key=lambda item: -item[1])
    ]


def lines(sources: Sequence[Source[SpeedResults]]) -> list[list[tuple[str, float | None]]]:
    """The table: every method of every measurement, each cell with what it is sorted by."""
    found = []
    for source in sources:
        for name, line in source.data.summary.items():
            speed_up, length, equal = line.speed_up, line.acceptance_length, line.equal_autoregressive
            share = None if equal is None else equal / line.answers
            found.append(
                [
                    (source.data.marked(name), None),
                    (show(line.tokens_per_second, ".0f"), line.tokens_per_second),
                    (speed_up.text("x"), speed_up.value),
                    (length.text(), length.value),
                    (show(share, ".0%"), share),
                    (source.title, None),
                ]
            )
    return found


def pages(found: Sequence[Source[Any]], stem: str = "report", progress: bool = False) -> dict[str, str]:
    """The pages by file name: STEM.html first, and one for each trace. The same results give the same pages."""
    names: set[str] = set()
    own = [one for one in found if one.kind == "trace"]
    pages_of = {f"{numbered(f'{stem}-trace-{slug(one.name)}', names)}.html": one for one in own}
    others = [one for one in found if one.kind != "trace"]
    speed = [one for one in others if one.kind == "speed"]
    latest = max(speed, key=lambda one: one.date, default=None)  # a user's own run is newer than what came with it
    with tqdm(total=len(found), desc="drawing", unit="file", disable=not progress) as bar:

        def shown(source: Source[Any], number: int, styles: dict[str, str]) -> dict[str, Any]:
            bar.update()
            drawn = [(plot, _drawing(plot, f"f{number}-{at}", styles)) for at, plot in enumerate(plots_of(source))]
            return {"source": source, "plots": drawn}

        styles: dict[str, str] = {}

        groups = [
            (kind, KINDS[kind][0], [shown(one, at, styles) for at, one in enumerate(others) if one.kind == kind])
            for kind in KINDS
            if kind != "trace"
        ]
        made = {
            f"{stem}.html": _render(
                "report.html",
                title=TITLE,
                charts=[(one, bars(one.data)) for one in speed],
                latest=latest,
                columns=COLUMNS,
                lines=lines(speed),
                groups=[group for group in groups if group[2]],
                traces=[(file, one, traces.summary(one.data)) for file, one in pages_of.items()],
                missing=[KINDS[kind] for kind in KINDS if kind not in {one.kind for one in found}],
                sources=found,
                styles=styles,
            )
        }
        for file, source in pages_of.items():
            styles = {}
            made[file] = _render(
                "trace.html",
                title=source.title,
                home=f"{stem}.html",
                tokens=traces.tokens(source.data),
                prompt=source.data.call.get("prompt", "not recorded"),
                summary=traces.summary(source.data),
                **shown(source, 0, styles),
                styles=styles,
            )
    return made


def write(found: Sequence[Source[Any]], output: Path, progress: bool = False) -> list[Path]:
    """The page, and beside it those of the traces."""
    prepare_file(output)
    made = pages(found, output.stem, progress)
    paths = [output.with_name(name) if number else output for number, name in enumerate(made)]
    for path, text in zip(paths, made.values(), strict=True):
        write_whole(path, text)
    return paths


def write_images(found: Sequence[Source[Any]], folder: Path, progress: bool = False) -> None:
    """Every drawing as PNG and SVG, named by kind, file of results and title."""
    folder.mkdir(parents=True, exist_ok=True)
    names: set[str] = set()
    for source in tqdm(found, desc="images", unit="file", disable=not progress):
        for plot in plots_of(source):
            if plot.draw is not None:
                name = f"{source.kind}-{slug(str(Path(source.name).with_suffix('')))}-{slug(plot.title)}"
                plots.write_images(plot.draw(), folder, numbered(name, names))


def _drawing(plot: Plot, prefix: str, styles: dict[str, str]) -> str:
    return "" if plot.draw is None else plots.inline(plot.draw(), prefix, html.escape(plot.label), styles)


def _render(template: str, **values: Any) -> str:
    folder = files("shape.evaluation.report")
    loader = jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8"))
    made = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return made.get_template(template).render(colours=plots.COLOURS, **values)


def numbered(name: str, taken: set[str]) -> str:
    """The name, with a number behind it where it is taken already; it is then."""
    found = next(each for n in count(1) if (each := name if n == 1 else f"{name}--{n}") not in taken)
    taken.add(found)
    return found


def slug(text: str) -> str:
    """For file names."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
