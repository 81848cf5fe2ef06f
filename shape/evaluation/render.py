"""Measured tables in documents, written from the JSON of the results, so that the two cannot disagree."""

import re
from collections.abc import Callable
from pathlib import Path

from shape.errors import DataError
from shape.evaluation.markdown import DASH, markdown
from shape.evaluation.results import SHORT, SpeedResults


def render(document: str, results: Path) -> str:
    """The document with every region between `<!-- results:begin ... -->` and `<!-- results:end -->` written anew.

    Behind `begin` may be folders below `results`, of which tables are shown; without any, all tables. `short` as the
    first word makes one table with few columns of them, in which `FOLDER:METHOD,METHOD` chooses lines:
    `<!-- results:begin short shipped/bfloat16-t0:transformers,shape shipped/float32-t0 -->`. `across` makes one table
    with a column for each folder, in which methods have their speed-up and acceptance length.

    Raises:
        DataError: no such region, or no results for it.
    """
    return rewritten(document, "results", lambda words: _tables(words, results))


def rewritten(document: str, name: str, text: Callable[[list[str]], str]) -> str:
    """The document with every region between `<!-- NAME:begin ... -->` and `<!-- NAME:end -->` written anew.

    Args:
        text: what a region is to hold, by the words behind `begin`.

    Raises:
        DataError: no such region.
    """
    region = re.compile(f"<!-- {name}:begin([^>]*?) *-->.*?<!-- {name}:end -->", re.DOTALL)
    if not region.search(document):
        raise DataError(
            f"the document has no lines to write between, no <!-- {name}:begin --> and <!-- {name}:end -->; add them"
        )

    def filled(found: re.Match[str]) -> str:
        words = found[1].split()
        return f"<!-- {' '.join([f'{name}:begin', *words])} -->\n\n{text(words).strip()}\n\n<!-- {name}:end -->"

    return region.sub(filled, document)


def _tables(words: list[str], results: Path) -> str:
    into_one = {"short": _short, "across": _across}.get(words[0]) if words else None
    chosen = [word.partition(":") for word in words[into_one is not None :]] or [("", "", "")]
    found = [(one, names.split(",") if names else None) for name, _, names in chosen for one in _load(results / name)]
    for one, names in found:
        if unknown := sorted(set(names or ()) - one.methods.keys()):
            raise DataError(f"{one.label} has no method {unknown[0]}; it has {', '.join(one.methods)}")
    return into_one(found) if into_one else "\n".join(one.to_markdown(detail=False) for one, _ in found)


def _load(folder: Path) -> list[SpeedResults]:
    """Every `results.json` below a folder, in the order of their paths."""
    paths = sorted(folder.rglob("results.json"))
    if not paths:
        raise DataError(f"no results.json lies under {folder}; measure with shape bench --output first")
    found = []
    for path in paths:
        try:
            found.append(SpeedResults.from_json(path.read_text(encoding="utf-8")))
        except DataError as error:
            raise DataError(f"{path}: {error}") from None
    return found


def _short(found: list[tuple[SpeedResults, list[str] | None]]) -> str:
    """One table; where measurements differ in dtype, temperature or prompts, each line says its own. Below it stands
    how much of each source of prompts occurs in the training text, where that is known.
    """
    lines = []
    for results, methods in found:
        lines += [[f"{line[0]}{_setting(results, found)}", *line[1:]] for line in results.lines(SHORT, methods)]
    seen = {one.settings["prompts"]: one.overlap_note() for one, _ in found if one.overlap()}
    return "\n\n".join([markdown(["method", *SHORT], lines), *(f"{name}: {note}" for name, note in seen.items())])


def _across(found: list[tuple[SpeedResults, list[str] | None]]) -> str:
    """One table; the methods are those of the first results, or what was chosen of them."""
    first, methods = found[0]
    columns = [_setting(one, found).removeprefix(", ") for one, _ in found]
    lines = {name: [one.summary.get(name) for one, _ in found] for name in methods or first.methods}
    rows = [[name, *(DASH if line is None else line.both for line in own)] for name, own in lines.items()]
    return markdown(["speed-up (acceptance length)", *columns], rows)


def _setting(results: SpeedResults, found: list[tuple[SpeedResults, list[str] | None]]) -> str:
    names = [name for name in ("target", "prompts", "dtype") if len({other.settings[name] for other, _ in found}) > 1]
    told = [results.settings[name].partition(",")[0] for name in names]
    if len({other.settings["temperature"] for other, _ in found}) > 1:
        told.append(f"T = {results.settings['temperature']:g}")
    return "".join(f", {one}" for one in told)
