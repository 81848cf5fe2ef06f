"""`shape bench`: how fast a predictor decodes, beside autoregressive decoding and the other drafters.

    shape bench --output results                 # the quickstart pair on the bundled prompts
    shape bench --target T --output results      # a target alone, with drafters that need no training
    shape bench --predictor ours=DIR --predictor paper=DIR --prompts FILE --output results
    shape bench --temperature '[0,1]' --batch_size '[1,4,16]' --context_length '[256,512]' --output results
    shape bench --render RESULTS_FOLDER README.md  # measured tables into a document

Writes `results.json` (everything, per prompt) and `results.md` (the table and its environment) to the
output folder, or to one folder in it for every combination of several temperatures, batch sizes and context lengths.
Until then finished prompts are kept in `records.jsonl` there, by which the same command continues after an
interruption.
"""

from collections.abc import Sequence
from pathlib import Path

from shape.errors import GO_ON, DataError, exit_on_error
from shape.evaluation.options import BenchOptions
from shape.files import write_whole
from shape.parsing import CommandParser, command_parser, options_of

COMMON = (
    *("output", "predictor", "target", "prompts", "methods", "limit", "max_new_tokens", "temperature", "batch_size"),
    *("dtype", "backend", "device", "seed"),
)


def parser() -> CommandParser:
    parser = command_parser("bench", __doc__, BenchOptions, COMMON, skip={"predictor"})
    parser.add_argument(
        "--predictor",
        action="append",
        metavar="[NAME=]DIR",
        help="a trained predictor and its name in the table; may be repeated; without one it is quickstart-shape, "
        "or none beside a target",
    )
    parser.add_argument(
        "--render",
        nargs=2,
        metavar=("RESULTS", "DOCUMENT"),
        help="write the tables of every results.json under RESULTS between the markers of DOCUMENT, and stop",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    reader = parser()
    with exit_on_error(GO_ON):
        values = reader.instantiate(reader.parse_args(arguments))
        from rich.console import Console

        from shape.evaluation.bench import bench
        from shape.evaluation.render import render

        if values.render:
            results, document = map(Path, values.render)
            try:
                text = document.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"document {document} is not UTF-8 text ({error.reason}); save it as that") from None
            write_whole(document, render(text, results))
            return
        options = options_of(BenchOptions, values)
        console = Console(highlight=False)
        found = bench(options)
        for measured in found:
            console.print(measured.table())
        below = "" if len(found) == 1 else "*/"
        console.print(f"written to {options.output}/{below}results.json and results.md", markup=False)


if __name__ == "__main__":
    main()
