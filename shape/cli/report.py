"""`python -m shape.report`: one HTML page of whatever was measured, without network or other files.

    python -m shape.report eval/results --output report.html
    python -m shape.report RESULTS --output report.html --images figures   # PNG and SVG as well, for papers

Looks below RESULTS for results of `shape.bench`, `shape.efficiency`, `eval.ablate` and
`eval.analyze`, reports of `shape.check --output` and traces of `shape.generate --trace`, and shows what is
there. Where a section has no data, the page ends with the command that makes it.
"""

from pathlib import Path

from jsonargparse import auto_cli

from shape.errors import exit_on_error
from shape.evaluation.report import find, page, write_images
from shape.evaluation.sections import sections


def report(results: str, output: str = "report.html", images: str | None = None) -> None:
    """Write one self-contained HTML page of what a folder of results holds.

    Args:
        results: the folder; everything below it is looked through.
        output: the page.
        images: a folder for the same drawings as PNG and SVG.
    """
    with exit_on_error():
        found = find(Path(results))
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        Path(output).write_text(page(found, progress=True), encoding="utf-8")
        print(f"{len(found.all)} files of results in {output} ({Path(output).stat().st_size / 1e6:.1f} MB)")
        if images is not None:
            write_images(sections(found), Path(images), progress=True)
            print(f"the drawings as PNG and SVG in {images}")


if __name__ == "__main__":
    auto_cli(report)
