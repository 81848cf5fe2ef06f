"""`TrainOptions` from the command line and from YAML files. Precedence: CLI > --config files > defaults."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os.path import expanduser
from pathlib import Path
from typing import Any

import yaml

from shape import bundled
from shape.errors import ConfigError, exit_on_error
from shape.features.trainer import TrainerOptions
from shape.files import reading
from shape.parsing import DRY_RUN, HELP, CommandParser, command_parser, refuse_dry_run_of_file
from shape.training.options import TrainOptions


def parser(defaults: Path | None, docstring: str | None = None, common: Sequence[str] = ()) -> CommandParser:
    """The command's options; those of the file `defaults` go before the dataclasses' own."""
    files = [str(defaults)] if defaults else None
    parser = command_parser("train", docstring, TrainOptions, common, default_config_files=files)
    if files:
        parser.epilog = "Defaults are those for the target that ships; give --target T --help for your own."
    parser.add_argument(*DRY_RUN, action="store_true", help="say what the training would take, and do nothing")
    return parser


def parse(arguments: Sequence[str], docstring: str | None = None, common: Sequence[str] = ()) -> TrainOptions:
    """Options from the command line. The quickstart's sizes are for its own target and no other."""
    arguments = [_trainer_option(argument) for argument in arguments]
    with exit_on_error():
        defaults = bundled.path("configs", "quickstart.yaml")
    first = [each for each in arguments if not each.startswith("--print_config") and each not in HELP]
    is_bundled = parser(defaults).parse_args(first).target == bundled.TARGET
    reader = parser(defaults if is_bundled else None, docstring, common)
    values = reader.parse_args(arguments)
    with exit_on_error():
        refuse_dry_run_of_file(values, arguments, "trainings")
        options = as_options(reader.instantiate(values).as_dict())
        if options.init is None:
            return options
        from shape.training.warm_start import as_checkpoint  # which reads it, by what is slow to import

        return as_checkpoint(options, as_options(reader.instantiate(reader.get_defaults()).as_dict()).predictor)


def _trainer_option(argument: str) -> str:
    """`--trainer.NAME`, for an option of Lightning's Trainer that `TrainerOptions` does not name, in full."""
    name = argument.removeprefix("--trainer.").partition("=")[0].partition(".")[0]
    if not argument.startswith("--trainer.") or name in TrainerOptions.__dataclass_fields__:
        return argument
    return argument.replace("--trainer.", "--trainer.more.", 1)


def as_options(values: Mapping[str, Any]) -> TrainOptions:
    """Out of all that the parser knows."""
    options = TrainOptions(**{name: value for name, value in values.items() if name not in ("config", "dry_run")})
    return replace(options, output=expanduser(options.output))


def read_options(file: str) -> TrainOptions:
    """Of one run, as `shape train --config FILE` reads them.

    Raises:
        ConfigError: it is no file with options.
    """
    with reading(file, ConfigError, "give a YAML file with options of shape train"):
        values = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ConfigError(f"{file} has no options; give a YAML file with options of shape train")
    return parse([f"--config={file}"])
