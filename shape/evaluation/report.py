"""`python -m shape.report`: one HTML page of whatever was measured, without network or other files.

The command is `shape.cli.report`.
"""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from tqdm import tqdm

from shape.errors import DataError
from shape.evaluation import plots, traced
from shape.evaluation.environment import Environment
from shape.evaluation.files import loads
from shape.evaluation.results import SpeedResults
from shape.evaluation.sections import Found, Plot, Section, Source, sections, slug
from shape.files import reading

_PARTS_OF_CHECK = {"target", "costs", "chains", "break_even", "measured"}


@dataclass(frozen=True)
class _Kind:
    """A kind of results: where its sources go in `Found`, and how one is made of a file."""

    group: str
    source: Callable[[str, str], Source[Any]]


def find(folder: Path) -> Found:
    """Everything below a folder that the report knows, in the order of the paths.

    Raises:
        DataError: the folder is missing or holds nothing known, or a known file cannot be read.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; give the one that measurements were written to")
    found = Found()
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".json":
            text = path.read_text(encoding="utf-8", errors="replace")
            kind = _KINDS.get(path.name) or (_KINDS["check.json"] if _is_check(text) else None)
            if kind is not None:
                getattr(found, kind.group).append(_load(kind, name, text))
        elif path.suffix == ".jsonl" and (trace := traced.read(path)) is not None:
            found.traces.append(_trace(name, trace))
    if not found.all:
        raise DataError(
            f"{folder} holds no results that the report knows (results.json, efficiency.json, ablation.json, "
            "analysis.json, a report of shape.check, traces); measure with python -m shape.bench --output "
            f"{folder}/bench"
        )
    return found


def _load(kind: _Kind, name: str, text: str) -> Source[Any]:
    try:
        with reading("it", DataError, "it is damaged or of another version: measure again, or move it away"):
            return kind.source(name, text)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None


def _is_check(text: str) -> bool:
    try:
        values = loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(values, dict) and values.keys() >= _PARTS_OF_CHECK


# ------------------------------------------------------------------------------------------- from files to sources


def _speed(name: str, text: str) -> Source[SpeedResults]:
    results = SpeedResults.from_json(text)
    return Source(name, results.label, results.about, results.environment, results)


def _efficiency(name: str, text: str) -> Source[Any]:
    record = loads(text)
    options = record["options"]
    about = (
        f"Predictor {options['predictor']}, {options['limit']} prompts of {options['prompts'] or 'bench.jsonl'}, at "
        f"most {options['max_new_tokens']} new tokens."
    )
    return _recorded(name, options["label"] or "Engine efficiency", about, record)


def _ablation(name: str, text: str) -> Source[Any]:
    record = loads(text)
    first = next(iter(record["settings"].values()))
    about = (
        f"Target {first['target']} ({first['parameters'] / 1e6:.1f}M parameters, {first['dtype']}), {first['count']} "
        f"prompts of {first['prompts']}, at most {record['max_new_tokens']} new tokens, seeds "
        f"{', '.join(map(str, record['seeds']))}; speed-ups are over {first['baseline']}."
    )
    return _recorded(name, record["title"], about, record)


def _analysis(name: str, text: str) -> Source[Any]:
    record = loads(text)
    options = record["options"]
    about = (
        f"Target {options['target'] or 'of the predictor'}, predictor {options['predictor']}, {record['texts']} texts "
        f"of {options['prompts'] or options['data'] or 'answers.jsonl.gz'}, {record['positions']['drafts']} positions "
        "for drafts, temperature 1."
    )
    return _recorded(name, options["label"] or "Does transport pay?", about, record)


def _check(name: str, text: str) -> Source[Any]:
    record = loads(text)
    target, settings = record["target"], record.get("settings")
    about = (
        f"Target {target['name']} ({target['parameters'] / 1e6:.1f}M parameters, {target['dtype']}, {target['device']})"
    )
    if settings:
        about += (
            f", {settings['limit']} prompts of {settings['prompts']}, at most {settings['max_new_tokens']} new tokens, "
            f"temperature {settings['temperature']:g}, batch {settings.get('batch_size', settings.get('rows'))}"
        )
    return _recorded(name, f"shape.check, {Path(target['name']).name}", f"{about}.", record)


def _recorded(name: str, title: str, about: str, record: dict[str, Any]) -> Source[Any]:
    environment = record.get("environment")
    return Source(name, title, about, Environment(**environment) if environment else None, record)


def _trace(name: str, trace: traced.Traced) -> Source[traced.Traced]:
    call = trace.call
    if not call:
        return Source(name, Path(name).stem, "Target, prompt and sampling were not recorded.", None, trace)
    greedy = call["temperature"] == 0
    how = "greedy" if greedy else f"{call['acceptance']}, temperature {call['temperature']:g}"
    about = (
        f"One answer of target {call['target']} ({call['dtype']}), drafter {call['drafter']}, acceptance "
        f"{call['acceptance']}, temperature {call['temperature']:g}, seed {call['seed']}."
    )
    return Source(name, f"{call['drafter']}, {how}", about, Environment(**call["environment"]), trace)


_KINDS = {
    "results.json": _Kind("speed", _speed),
    "efficiency.json": _Kind("efficiency", _efficiency),
    "ablation.json": _Kind("ablations", _ablation),
    "analysis.json": _Kind("analyses", _analysis),
    "check.json": _Kind("checks", _check),  # or of any other name: the user chooses it
}


# ------------------------------------------------------------------------------------------- the page


def page(found: Found, title: str = "Speculative decoding, measured", progress: bool = False) -> str:
    """The page; the same results give the same page."""
    shown = sections(found)
    plots_shown = [one for section in shown for one in section.content if isinstance(one, Plot)]
    drawings = {
        id(plot): plots.inline(plot.draw(), f"f{number}", html.escape(plot.label))
        for number, plot in enumerate(tqdm(plots_shown, desc="drawing", unit="plot", disable=not progress))
    }
    loader = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    template = loader.from_string((files("shape.evaluation") / "report.html").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        shown=[section for section in shown if section.content],
        missing=[section for section in shown if not section.content],
        sources=found.all,
        drawing=lambda plot: drawings[id(plot)],
        colours=plots.COLOURS,
        events=list(plots.EVENTS),
    )


def write_images(shown: Sequence[Section], folder: Path, progress: bool = False) -> None:
    """Every drawing as PNG and SVG, named by section, file of results and title."""
    folder.mkdir(parents=True, exist_ok=True)
    named = [
        (f"{section.key}-{slug(str(Path(one.source.name).with_suffix('')))}-{slug(one.title)}", one)
        for section in shown
        for one in section.content
        if isinstance(one, Plot)
    ]
    for name, plot in tqdm(named, desc="images", unit="plot", disable=not progress):
        plots.write_images(plot.draw(), folder, name)
