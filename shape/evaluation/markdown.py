"""Figures as text: cells and Markdown tables. An undefined figure is shown as a dash, never as a number."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

DASH = "–"


def show(value: float | None, spec: str = ".2f", unit: str = "") -> str:
    """A number formatted by `spec`, or a dash."""
    return DASH if value is None else f"{value:{spec}}{unit}"


def show_interval(value: float | None, low: float | None, high: float | None, unit: str = "") -> str:
    """`1.52x (1.43–1.60)`; without the brackets where the interval is unknown."""
    if low is None or high is None:
        return show(value, unit=unit)
    return f"{show(value, unit=unit)} ({low:.2f}–{high:.2f})"


def share(count: int | None, of: int) -> str:
    """`38 / 40`, or a dash."""
    return DASH if count is None else f"{count} / {of}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table: the first column to the left, the others to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def json_by_line(head: dict[str, Any], name: str, records: Iterable[dict[str, Any]]) -> str:
    """A JSON object, indented, whose last entry is a list of records, each on a line: they hold many numbers."""
    lines = ",\n".join(map(json.dumps, records))
    return f'{json.dumps(head, indent=1)[:-2]},\n "{name}": [\n{lines}\n]}}\n'
