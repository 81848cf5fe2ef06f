"""Figures as text: cells, Markdown tables, and tables for the screen. An undefined figure is shown as a dash, never as
a number.
"""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table as ScreenTable

DASH = "–"
Table = tuple[list[str], list[list[str]]]  # header and lines


def show(value: float | None, spec: str = ".2f", unit: str = "") -> str:
    """A number formatted by `spec`, or a dash."""
    return DASH if value is None else f"{value:{spec}}{unit}"


def share(count: int | None, of: int) -> str:
    """`38 / 40`, or a dash."""
    return DASH if count is None else f"{count} / {of}"


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table: the first column to the left, the others to the right."""
    every = [header, ["---", *["---:"] * (len(header) - 1)], *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in every)


def on_screen(header: Sequence[str], lines: Sequence[Sequence[str]], title: str = "", notes: str = "") -> ScreenTable:
    """A table for the screen, where a column for each line fits better."""
    # Brackets of a recorded command are no markup.
    shown = ScreenTable(title=escape(title), caption=escape(notes), caption_justify="left")
    names, *figures = zip(header, *lines, strict=True)
    for place, name in enumerate(names):
        shown.add_column(name, justify="right" if place else "left")
    for line in figures:
        shown.add_row(*line)
    return shown
