"""The options of every command as Markdown, read from the parser that the command itself makes.

Nothing is written down twice: names, types and defaults are the parser's, explanations are the docstrings of the
dataclasses.
"""

import ast
import json
import re
import runpy
import sys
import warnings
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin
from unittest.mock import patch

from jsonargparse import capture_parser

from shape.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
_RUNS = '\nif __name__ == "__main__":\n'
_NOT_OPTIONS = ("help", "help_all", "print_config", "subcommand")  # they are every parser's, or no option


def modules() -> list[str]:
    """Every command of `shape`, by the name of its module."""
    return [f"shape.{name}" for name in COMMANDS]


def has_options(module: str) -> bool:
    """Whether a command has a parser of jsonargparse; lm-evaluation-harness has its own."""
    parsers = ("jsonargparse", "commands.program(", "commands.one_of(")
    return (module in modules() and module != "shape.harness") or any(each in _source(module) for each in parsers)


def can_be_run(module: str) -> bool:
    """Whether `python -m MODULE` does anything; what has no parser of ours then has no page."""
    return _RUNS in _source(module)


def run(module: str, arguments: Sequence[str] = ()) -> None:
    """`python -m MODULE ARGUMENTS` in this process."""
    with patch.object(sys, "argv", [module, *arguments]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'shape.* found in sys.modules")  # imported before, which harms nothing
        runpy.run_module(module, run_name="__main__")


def parser_of(module: str) -> ArgumentParser:
    """The parser of a command, which is run up to the point where it would parse."""
    return capture_parser(run, module)


def subcommands(parser: ArgumentParser) -> dict[str, ArgumentParser]:
    """The parsers of a command's subcommands by name; none for most."""
    chosen = [action.choices for action in parser._actions if action.dest == "subcommand"]
    return dict(chosen[0]) if chosen else {}  # type: ignore[arg-type]


def options(parser: ArgumentParser) -> Iterator[tuple[str, list[Action]]]:
    """A parser's options by group, (title, options); those of the library's own are left out."""
    for group in parser._action_groups:
        found = [action for action in group._group_actions if _is_told(action)]
        if found:
            yield _title(group), found


def page(module: str) -> str:
    """The page of a command."""
    parts = [f"# {module.replace('.', ' ')}", _docstring(module)]
    if not has_options(module):
        return "\n\n".join(parts) + "\n"
    parser = parser_of(module)
    parts += [f"Usage: `{parser.usage}`"] if parser.usage else []
    parts += _sections(parser, "##")
    for name, sub in subcommands(parser).items():
        parts += [f"## {name}", sub.description or "", *_sections(sub, "###")]
    return "\n\n".join(part for part in parts if part) + "\n"


def _source(module: str) -> str:
    package, *rest = module.split(".")
    whole = ROOT.joinpath(package, *rest)
    places = (whole.with_suffix(".py"), ROOT.joinpath(package, "cli", *rest).with_suffix(".py"), whole / "__main__.py")
    return next((path.read_text() for path in places if path.exists()), "")


def _docstring(module: str) -> str:
    """What a module says of itself; lines that are commands become code, whether it indents them or not."""
    told = ast.get_docstring(ast.parse(_source(module))) or ""
    return re.sub(r"^(?=shape |python -m )", "    ", told, flags=re.MULTILINE)


def _sections(parser: ArgumentParser, heading: str) -> Iterator[str]:
    for title, found in options(parser):
        yield f"{heading} {title}"
        yield from map(_described, found)


def _is_told(action: Action) -> bool:
    # Options that load or explain a whole group at once stand for the options below them.
    of_a_group = action.default == SUPPRESS and getattr(action, "_typehint", None) is None
    return action.dest not in _NOT_OPTIONS and not action.dest.endswith(".help") and not of_a_group


def _title(group: Any) -> str:
    """What a group is about, and the beginning that its options share."""
    title = group.title[:1].upper() + group.title[1:]
    stems = {action.dest.partition(".")[0] for action in group._group_actions if "." in action.dest}
    whole = all(action.dest.partition(".")[0] in stems for action in group._group_actions)
    return f"{title}: `--{stems.pop()}.*`" if whole and len(stems) == 1 else title


def _described(action: Action) -> str:
    """An option as an entry of a list of definitions."""
    name = next((each for each in action.option_strings if not each.endswith("+")), action.dest)
    facts = [_kind(action)]
    if action.required:
        facts.append("required")
    elif action.default not in (None, "", SUPPRESS) and action.nargs != 0:
        facts.append(f"default `{_shown(action.default)}`")
    text = "\n    ".join((action.help or "").splitlines())
    return f"`{name}` {', '.join(fact for fact in facts if fact)}\n:   {text}{_parts(action)}"


def _kind(action: Action) -> str:
    """The type in words."""
    hint = getattr(action, "_typehint", action.type)
    if hint is not None:
        return _in_words(hint)
    shown = action.metavar if isinstance(action.metavar, tuple) else [action.metavar] if action.metavar else []
    return " ".join(f"`{each}`" for each in shown)


def _in_words(hint: Any) -> str:
    inner = get_args(hint)
    if get_origin(hint) is Literal:
        return " or ".join(f"`{_shown(value)}`" for value in inner)
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_in_words(each) for each in inner)
    if get_origin(hint) in (list, tuple):
        return f"list of {_in_words(inner[0])}"
    if get_origin(hint) is dict:
        return "mapping"
    return "null" if hint is NoneType else getattr(hint, "__name__", str(hint))


def _shown(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _parts(action: Action) -> str:
    """The options below one that is a dataclass or nothing, which no parser lists."""
    hint = getattr(action, "_typehint", None)
    found = [each for each in get_args(hint) if is_dataclass(each)]
    if get_origin(hint) is dict or not found:
        return ""
    names = ", ".join(f"`--{action.dest}.{each.name}`" for each in fields(found[0]))
    return f" Its parts: {names}."
