"""`shape report`: one HTML page of whatever was measured, which needs no network.

    shape report eval/results --output report.html
    shape report RESULTS --output report.html --images figures   # PNG and SVG as well, for papers

Looks below RESULTS for results of `shape bench`, `shape efficiency`, `eval.ablate` and `eval.analyze`, reports of
`shape check --output` and traces of `shape generate --trace`. The page begins with tokens per second by method and one
table of all measurements; details fold out, and each trace has a page of its own beside it.
"""

from collections.abc import Sequence
from pathlib import Path

from shape.errors import NOTHING_WRITTEN, ConfigError, exit_on_error
from shape.parsing import CommandParser, command_parser


def parser() -> CommandParser:
    parser = command_parser("report", __doc__, usage="RESULTS [options]", config=False)
    parser.add_argument("results", type=str, help="a folder; everything below it is looked through")
    parser.add_argument("--output", type=str, default="report.html", help="the page")
    parser.add_argument("--images", type=str | None, help="a folder for the same drawings as PNG and SVG")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    given = parser().parse_args(arguments)
    with exit_on_error(NOTHING_WRITTEN):
        from shape.evaluation.report.page import write, write_images
        from shape.evaluation.report.sources import find

        if not given.output.endswith((".html", ".htm")):  # it may be one of the results
            raise ConfigError(f"output {given.output} is no name of a page; let it end in .html")
        found = find(Path(given.results))
        if given.images is not None:  # where it cannot be made, nothing is drawn in vain
            Path(given.images).mkdir(parents=True, exist_ok=True)
        page, *traces = write(found, Path(given.output), progress=True)
        beside = f" and {len(traces)} pages of traces beside it" if traces else ""
        print(f"{len(found)} files of results in {page} ({page.stat().st_size / 1e6:.1f} MB){beside}")
        if given.images is not None:
            write_images(found, Path(given.images), progress=True)
            print(f"the drawings as PNG and SVG in {given.images}")


if __name__ == "__main__":
    main()
