"""`shape check`: what speculation can bring for a target on this machine, before anyone trains, and after.

shape check --target Qwen/Qwen3-0.6B                  # can it be verified, what forwards cost, what would pay
shape check --predictor checkpoints/mine --prompts prompts.jsonl    # the best draft shape, the best drafter
"""

from collections.abc import Sequence

from shape.errors import NOTHING_WRITTEN, exit_on_error
from shape.evaluation.options import CheckOptions
from shape.files import prepare_file, write_whole
from shape.parsing import CommandParser, command_parser

COMMON = (
    *("target", "predictor", "drafter", "prompts", "limit", "max_new_tokens", "batch_size", "temperature", "seed"),
    *("dtype", "backend", "output"),
)


def parser() -> CommandParser:
    return command_parser("check", __doc__, CheckOptions, COMMON)


def main(arguments: Sequence[str] | None = None) -> None:
    with exit_on_error(NOTHING_WRITTEN):
        options = parser().options(CheckOptions, arguments)
        if options.output is not None:
            prepare_file(options.output)
        import json

        from rich.console import Console

        from shape.evaluation.check import check, show_report

        report = check(options)
        show_report(report, Console(highlight=False, markup=False))
        if options.output is not None:
            write_whole(options.output, json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
