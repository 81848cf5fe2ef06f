"""How acceptance, draft cost and speed-up move with the size of the target: one table of several ablations.

    python -m eval.by_size --render docs/research/baselines.md

The ablations are those of `configs/ablations/sizes.yaml`, one of each target, in a folder of the results.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval import commands
from eval.equal_terms import NOT_YET
from shape.errors import DataError
from shape.evaluation.environment import Environment
from shape.evaluation.estimates import Estimate
from shape.evaluation.markdown import DASH, markdown, show
from shape.evaluation.render import rewritten

RESULTS = Path(__file__).resolve().parent / "results"
_HEADER = [
    "method", "target", "acceptance length in one shape for all", "its own draft", "acceptance length (95 %)",
    "draft, of a step", "tokens/s", "speed-up (95 %)",
]  # fmt: skip


@dataclass
class BySizeOptions:
    """What to write.

    Args:
        render: a document.
    """

    render: str


def run(options: BySizeOptions) -> None:
    document = Path(options.render)
    document.write_text(rendered(document.read_text(), RESULTS))


def rendered(document: str, results: Path) -> str:
    """The document with every region between `<!-- by-size:begin FOLDER -->` and `<!-- by-size:end -->` written anew,
    from the ablations below that folder of the results.
    """

    def tables(words: list[str]) -> str:
        if not words:
            raise DataError("the document has <!-- by-size:begin --> without a folder; name one behind begin")
        found = [json.loads(path.read_text()) for path in sorted((results / words[0]).rglob("ablation.json"))]
        return "\n\n".join(table(found, at) for at in found[0]["settings"]) if found else NOT_YET

    return rewritten(document, "by-size", tables)


def table(found: Sequence[Mapping[str, Any]], at: str) -> str:
    """Each method on every target, the smallest first.

    Args:
        found: ablations of the same variants, a target each.
        at: the temperature, as they name it.
    """
    found = sorted(found, key=lambda one: one["settings"][at]["parameters"])
    rows = [_row(name, one, one["others"][at][name]) for name in found[0]["others"][at] for one in found]
    for number, line in enumerate(found[0]["lines"]):
        for one in found:
            figures = one["lines"][number]["at"][at]
            lengths = [each["record"]["validation"]["value"] for each in one["trained"][line["variant"]].values()]
            alike = show(sum(lengths) / len(lengths))
            rows.append(_row(line["label"], one, figures["summary"], alike, next(iter(figures["drafts"]))))
    settings = found[0]["settings"][at]
    note = (
        f"Temperature {float(at):g}, {settings['dtype']}, {settings['count']} prompts; intervals are over prompts; "
        f"speed-ups are over {settings['baseline']} of the same target."
    )
    places = dict.fromkeys(Environment(**one["environment"]).line() for one in found)
    return "\n\n".join([markdown(_HEADER, rows), note, *places])


def _row(
    name: str, one: Mapping[str, Any], summary: Mapping[str, Any], alike: str = DASH, draft: str = DASH
) -> list[str]:
    size = next(iter(one["settings"].values()))["parameters"]
    length, speed_up = (Estimate(**summary[key]) for key in ("acceptance_length", "speed_up"))
    return [
        name,
        f"{size / 1e6:.1f}M",
        alike,
        draft,
        length.text(),
        show(summary["draft_share"], ".0%"),
        show(summary["tokens_per_second"], ",.0f"),
        speed_up.text("x"),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    commands.run(run, BySizeOptions, arguments)


if __name__ == "__main__":
    main()
