"""The command line of the programs here: options from dataclasses and functions, errors and results."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

from shape.errors import exit_on_error


def run(command: Callable[[Any], Any], options: type, arguments: Sequence[str] | None) -> None:
    """Call a command with its options, read from the command line if `arguments` is None."""
    with exit_on_error():
        command(auto_cli(options, as_positional=False, args=None if arguments is None else list(arguments)))


def run_one_of(commands: list[Callable[..., Any]], arguments: Sequence[str] | None) -> None:
    """Call the command that is named first, with what follows."""
    with exit_on_error():
        auto_cli(commands, as_positional=False, args=None if arguments is None else list(arguments))


def write_results(folder: Path, name: str, record: dict[str, Any], *parts: str) -> str:
    """Write `NAME.json` and, of some paragraphs, `NAME.md`, whose text is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(parts) + "\n"
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / f"{name}.md").write_text(text)
    return text
