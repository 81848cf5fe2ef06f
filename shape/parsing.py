"""The parser of every command: short and full help, and suggestions for typing mistakes."""

import re
import sys
from argparse import SUPPRESS, Action
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import islice
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin

from jsonargparse import ArgumentParser, Namespace

from shape.errors import ConfigError, ShapeError, did_you_mean

Options = TypeVar("Options")

HELP = ("-h", "--help", "--help-all", "--help_all")
DRY_RUN = ("--dry_run", "--dry-run")


_WRONG_TYPES = (
    re.compile(r"(--\S+): Does not validate .* Subtypes: \[(.*)\] Errors: .* Given value: (.*)"),
    re.compile(r"(--\S+): Expected an? (.*)\. Got value: (.*)"),
)
_KINDS = {
    "int": "an integer", "float": "a number", "str": "a text", "bool": "true or false", "NoneType": "null",
    "list[int]": "a list of integers", "list[float]": "a list of numbers", "list[str]": "a list of texts",
    "dict": "a mapping such as '{name: value}'",
}  # fmt: skip


# What is often asked for under other packages' names.
_MEANT = {
    "lr": "training.learning_rate", "wd": "training.weight_decay", "epochs": "training.steps",
    "max_epochs": "training.steps", "max_steps": "training.steps",
}  # fmt: skip


class CommandParser(ArgumentParser):
    """jsonargparse's parser, as all commands have it; `command_parser` makes one.

    `--help` shows the options that people use and `--help-all` all of them, both with the defaults that apply. Hyphens
    in names mean underscores, and lists may be written with commas alone. The command line takes precedence over
    files, whatever the order.
    """

    common: frozenset[str] = frozenset()  # what --help shows; nothing here means all
    _files: Sequence[str] = ()  # that --config names

    def parse_args(self, args: Sequence[str] | None = None, *rest: Any, **named: Any) -> Namespace:  # type: ignore[override]
        given = sys.argv[1:] if args is None else args
        if "--config" in self._option_string_actions:
            given, self._files = _files_first(given)
        return super().parse_args(self._with_lists(map(self._with_underscores, given)), *rest, **named)

    def options(self, kind: type[Options], args: Sequence[str] | None = None) -> Options:
        """The options of a command, of a dataclass, as its arguments give them."""
        return options_of(kind, self.instantiate(self.parse_args(args)))

    def instantiate(self, *args: Any, **named: Any) -> Any:
        """The dataclasses of what was parsed; a mistake that one of them finds stays as it is said there."""
        try:
            return super().instantiate(*args, **named)
        except (ValueError, TypeError) as error:
            behind: BaseException | None = error
            while behind is not None and not isinstance(behind, ShapeError):
                behind = behind.__cause__ or behind.__context__
            raise (behind or error) from None

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """One sentence and exit status 2."""
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        print(f"error: {parser._explained(message)} ({parser.prog} --help lists the options)", file=sys.stderr)
        sys.exit(2)

    def format_short_help(self) -> str:
        """The common options alone."""
        if not self.common:
            return self.format_help()
        shown = {SUPPRESS, "config", *self.common}  # SUPPRESS is what the two helps are stored under
        rare = [each for each in self._actions if each.dest not in shown and each.help != SUPPRESS]
        with _hidden(rare):
            return f"{self.format_help()}\n{len(rare)} more options: {self.prog} --help-all\n"

    def _with_underscores(self, argument: str) -> str:
        """An argument with the hyphens of its option as underscores."""
        option, equals, value = argument.partition("=")
        if not option.startswith("--") or option in self._option_string_actions:
            return argument
        name = "--" + option[2:].replace("-", "_")
        return f"{name}{equals}{value}" if name in self._option_string_actions else argument

    def _with_lists(self, arguments: Iterable[str]) -> list[str]:
        """Arguments in which what is given for lists is written as one: `--methods suffix,shape`."""
        found: list[str] = []
        option = ""  # whose value comes next
        for argument in arguments:
            name, equals, value = argument.partition("=")
            if not argument.startswith("--"):
                argument = self._as_list(option, argument)
            elif equals:
                argument = f"{name}={self._as_list(name, value)}"
            option = "" if equals or not argument.startswith("--") else name
            found.append(argument)
        return found

    def _kinds(self, option: str) -> tuple[Any, ...]:
        """What an option takes, one or several types."""
        hint = getattr(self._option_string_actions.get(option), "_typehint", None)
        return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)

    def _as_list(self, option: str, value: str) -> str:
        kinds = self._kinds(option)
        lists = [kind for kind in kinds if get_origin(kind) is list]
        if not lists or str in kinds or value.startswith("[") or value == "null":
            return value
        one = any(kind not in (*lists, NoneType) for kind in kinds) and "," not in value
        return value if one else f"[{value}]"

    def _explained(self, message: str) -> str:
        """What jsonargparse says, in one line, with a suggestion for an option that there is not."""
        files, options = " and ".join(self._files) or "what is given", self._option_string_actions
        if broken := re.match(r'Problems parsing config: (.*?)\s+in "<unicode string>", (.*)', message, re.DOTALL):
            return f"{files} is not YAML ({broken[1]}, {broken[2]})"
        if message.startswith("Unexpected config:"):
            return f"{files} holds no options; write them as NAME: VALUE"
        if other := re.match(r"Group '(.*)' does not accept option '(.*)'|Option '(.*)' is not accepted", message):
            option = "--" + (other[3] or f"{other[1]}.{other[2]}")
            return f"{files} has the unknown option {option[2:]}{did_you_mean(option, options)}"
        if nested := re.match(r"[^\"]*\"([\w.]+)\".* Option '(\w+)' is not accepted", message, re.DOTALL):
            group, option = f"--{nested[1]}", f"--{nested[1]}.{nested[2]}"
            kinds = filter(is_dataclass, self._kinds(group))
            known = [f"{group}.{field.name}" for kind in kinds for field in fields(kind)]
            return f"unknown option {option}{did_you_mean(option, known)}"
        unknown = re.match(r"[Uu]nrecognized arguments: (\S+)", message)
        if unknown is None:
            text = re.sub(r'^(Parser key|Key) "([^"]+)":', r"--\2:", message.strip())
            text = re.sub(r"<class '(\w+)'>", r"\1", text).replace("dict[str, typing.Any]", "dict")
            return _in_words(re.sub(r"\s*\n\s*", " ", text).removesuffix("."))
        option = unknown[1].partition("=")[0]
        if not option.startswith("-"):
            return f"{option!r} is no option of {self.prog}"
        if option == "--num_beams":
            return "unknown option --num_beams; beam search is not supported: answers are greedy or sampled"
        meant = f"--{_MEANT.get(option.removeprefix('--'))}"
        return f"unknown option {option}{did_you_mean(meant if meant in options else option, options)}"


def _in_words(message: str) -> str:
    """What jsonargparse says of a value of a wrong type, as a sentence; other messages as they are."""
    for pattern in _WRONG_TYPES:
        if (found := pattern.fullmatch(message)) is None:
            continue
        option, kinds, value = found.groups()
        words: list[str] = []
        for kind in re.findall(r"typing\.Literal\[.*?\]|\w+(?:\[\w+\])?", kinds):
            words += re.findall(r"'(.*?)'", kind) if kind.startswith("typing") else [_KINDS.get(kind, "")]
        if words and all(words):
            return f"{option} is {value}; give {' or '.join(filter(None, [', '.join(words[:-1]), words[-1]]))}"
    return message


def _files_first(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments with `--config FILE` before all else, as what is read later wins, and these files."""
    files, others, left = [], [], iter(arguments)
    for argument in left:
        if argument.partition("=")[0] != "--config":
            others.append(argument)
        else:
            files += [argument] if "=" in argument else [argument, *islice(left, 1)]
    named = (each.removeprefix("--config=") for each in files)
    return [*files, *others], [name for name in named if name != "--config"]


def command_parser(
    name: str,
    docstring: str | None,
    kind: type | None = None,
    common: Sequence[str] = (),
    *,
    usage: str = "[options]",
    skip: set[str] | None = None,
    config: bool = True,
    **others: Any,
) -> CommandParser:
    """The parser of a command.

    Args:
        name: the command, for example "train" or "recipes merge".
        docstring: of its module, of which the first sentence is shown.
        kind: dataclass of the command's options.
        common: names of the options that `--help` shows; without any it shows all.
        usage: what follows the name.
        skip: options of `kind` that are added by themselves.
        config: whether there is `--config`.
        others: for jsonargparse.
    """
    parser = CommandParser(
        prog=f"shape {name}",
        usage=f"shape {name} {usage}",
        description=summary(docstring),
        allow_abbrev=False,
        add_help=False,
        **others,
    )
    parser.common = frozenset(common)
    text = "show the options that people use" if common else "show the options"
    parser.add_argument(*HELP[:2], action=_Help, help=text)
    if common:
        parser.add_argument(*HELP[2:], action=_Help, help="show all options")
    if config:
        parser.add_argument("--config", action="config", help="a YAML file with these options")
    if kind is not None:
        parser.add_class_arguments(kind, as_group=False, skip=skip)
    return parser


def refuse_dry_run_of_file(values: Namespace, arguments: Iterable[str], work: str) -> None:
    """Raises ConfigError where a file, and not the command line, asks for a dry run."""
    if values.dry_run and not set(DRY_RUN) & set(arguments):
        raise ConfigError(f"dry_run stands in a file, which is read for {work} too; give --dry-run instead")


def options_of(kind: type[Options], values: Namespace) -> Options:
    """The options of a dataclass among those that were parsed and instantiated."""
    return kind(**{entry.name: values[entry.name] for entry in fields(kind)})  # type: ignore[arg-type]


def summary(docstring: str | None) -> str:
    """A command in a line: the first sentence of its module, without its name."""
    first = " ".join((docstring or "").split("\n\n")[0].split())
    told = re.sub(r"^`[^`]+`: ", "", first)
    return told[:1].upper() + told[1:]


class _Help(Action):
    """Prints the common options, or all, and ends the command."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None, **_: Any) -> None:
        super().__init__(option_strings, dest=SUPPRESS, default=SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        short = not (option_string or "").endswith("all")
        print(parser.format_short_help() if short else parser.format_help(), end="")
        parser.exit()


@contextmanager
def _hidden(actions: Sequence[Action]) -> Iterator[None]:
    """Leave options out of the help."""
    told = [action.help for action in actions]
    for action in actions:
        action.help = SUPPRESS
    try:
        yield
    finally:
        for action, text in zip(actions, told, strict=True):
            action.help = text
