"""Measured tables in documents, written from the JSON of the results, so that the two cannot disagree."""

import re
from pathlib import Path

from shape.errors import DataError
from shape.evaluation.markdown import markdown
from shape.evaluation.results import SHORT, SpeedResults

_REGION = re.compile(r"<!-- results:begin(?P<asked>[^>]*?) *-->.*?<!-- results:end -->", re.DOTALL)


def render(document: str, results: Path) -> str:
    """The document with every region between `<!-- results:begin ... -->` and `<!-- results:end -->` written anew.

    Behind `begin` may be folders below `results`, of which tables are shown; without any, all tables. `short` as the
    first word makes one table with few columns of them, in which `FOLDER:METHOD,METHOD` chooses lines:
    `<!-- results:begin short shipped/bfloat16-t0:transformers,shape shipped/float32-t0 -->`.

    Raises:
        DataError: no such region, or no results for it.
    """
    if not _REGION.search(document):
        raise DataError(
            "the document has no lines <!-- results:begin --> and <!-- results:end --> to write between; add them"
        )
    return _REGION.sub(lambda region: _filled(region["asked"], results), document)


def _filled(asked: str, results: Path) -> str:
    words = asked.split()
    is_short = words[:1] == ["short"]
    chosen = [word.partition(":") for word in words[is_short:]] or [("", "", "")]
    found = [(one, names.split(",") if names else None) for name, _, names in chosen for one in _load(results / name)]
    text = _short(found) if is_short else "\n".join(one.to_markdown(detail=False) for one, _ in found)
    return f"<!-- results:begin{' ' * bool(words)}{' '.join(words)} -->\n\n{text.strip()}\n\n<!-- results:end -->"


def _load(folder: Path) -> list[SpeedResults]:
    """Every `results.json` below a folder, in the order of their paths."""
    paths = sorted(folder.rglob("results.json"))
    if not paths:
        raise DataError(f"no results.json lies under {folder}; measure with python -m shape.bench --output first")
    return [SpeedResults.from_json(path.read_text()) for path in paths]


def _short(found: list[tuple[SpeedResults, list[str] | None]]) -> str:
    """One table; where measurements differ in dtype, temperature or prompts, each line says its own. Below it stands
    how much of each source of prompts occurs in the training text, where that is known.
    """
    lines = []
    for results, methods in found:
        if unknown := sorted(set(methods or ()) - results.methods.keys()):
            raise DataError(f"{results.label} has no method {unknown[0]}; it has {', '.join(results.methods)}")
        lines += [[f"{line[0]}{_setting(results, found)}", *line[1:]] for line in results.lines(SHORT, methods)]
    seen = {one.settings["prompts"]: one.overlap_note() for one, _ in found if one.overlap()}
    return "\n\n".join([markdown(["method", *SHORT], lines), *(f"{name}: {note}" for name, note in seen.items())])


def _setting(results: SpeedResults, found: list[tuple[SpeedResults, list[str] | None]]) -> str:
    names = [name for name in ("target", "prompts", "dtype") if len({other.settings[name] for other, _ in found}) > 1]
    told = [results.settings[name].partition(",")[0] for name in names]
    if len({other.settings["temperature"] for other, _ in found}) > 1:
        told.append(f"T = {results.settings['temperature']:g}")
    return "".join(f", {one}" for one in told)
