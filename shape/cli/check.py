"""`python -m shape.check`: what speculation can bring for a target on this machine, before anyone trains, and after.

python -m shape.check --target Qwen/Qwen3-0.6B                  # can it be verified, what forwards cost, what would pay
python -m shape.check --predictor checkpoints/mine --prompts prompts.jsonl    # the best draft shape, the best drafter
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from jsonargparse import ArgumentParser
from rich.console import Console

from shape.errors import exit_on_error
from shape.evaluation.check import check, show_report
from shape.evaluation.options import CheckOptions


def parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m shape.check", description=__doc__.splitlines()[0])
    parser.add_argument("--config", action="config", help="a YAML file with these options")
    parser.add_class_arguments(CheckOptions)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    reader = parser()
    values = reader.instantiate(reader.parse_args(arguments))
    with exit_on_error():
        options = CheckOptions(**{entry.name: values[entry.name] for entry in fields(CheckOptions)})
        report = check(options)
        show_report(report, Console(highlight=False))
        if options.output is not None:
            Path(options.output).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
