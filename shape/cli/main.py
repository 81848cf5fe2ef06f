"""`shape NAME ...`: runs the command of that name, which is the file of that name beside this one."""

import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from shape.errors import did_you_mean
from shape.parsing import summary

GROUPS = {
    "Decode": ("generate", "check", "bench"),
    "Train": ("train", "joint", "preview", "regenerate", "extract", "recipes", "convert"),
    "Evaluate": ("efficiency", "harness", "report"),
}
COMMANDS = tuple(name for names in GROUPS.values() for name in names)
# Until 0.4: commands that are gone, and what to use now.
MOVED = {"quality": "use shape harness, or `python -m eval.quality` in a checkout for the paper's own measures"}


def line(name: str) -> str:
    """A command in a line. Its module is not imported for it."""
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return summary(ast.get_docstring(ast.parse(source)))


def overview() -> str:
    """What `shape --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [
        "usage: shape COMMAND [options]",
        "",
        "Lossless speculative decoding: faster text from a language model, with the same tokens.",
    ]
    for group, names in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {name:{width}}  {line(name)}" for name in names)]
    return "\n".join([*lines, "", "shape COMMAND --help shows a command's options.", ""])


def main(arguments: Sequence[str] | None = None) -> None:
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if name in ("-h", "--help", "--help-all", "help"):
        print(overview(), end="")
    elif name == "--version":
        print(f"shape {import_module('shape').__version__}")
    elif name in COMMANDS:
        import_module(f"shape.cli.{name}").main(rest)
    elif name in MOVED:
        print(f"error: shape {name} has moved; {MOVED[name]}", file=sys.stderr)
        sys.exit(2)
    else:
        print(f"error: unknown command {name}{did_you_mean(name, COMMANDS)}; see shape --help", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
