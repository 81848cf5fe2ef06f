"""How acceptance, draft cost and speed-up move with the size of the target: one table of several ablations.

    python -m eval.by_size --render docs/research/baselines.md

The ablations are those of `configs/ablations/sizes.yaml`, one of each target, in a folder of the results.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from eval import commands
from eval.equal_terms import from_ablations, lengths_alike
from shape.evaluation.environment import Environment
from shape.evaluation.estimates import Estimate
from shape.evaluation.markdown import DASH, markdown, show

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
    document.write_text(rendered(document.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")


def rendered(document: str, results: Path) -> str:
    """The document with every region between `<!-- by-size:begin FOLDER -->` and `<!-- by-size:end -->` written anew,
    from the ablations below that folder of the results.
    """
    return from_ablations(document, "by-size", results, table)


def table(found: Mapping[str, Mapping[str, Any]], at: str) -> str:
    """Each method on every target, the smallest first.

    Args:
        found: ablations of the same variants, a target each, by name.
        at: the temperature, as they name it.
    """
    targets = sorted(found.values(), key=lambda one: one["settings"][at]["parameters"])
    first = targets[0]
    rows = [_row(name, one, one["others"][at][name]) for name in first["others"][at] for one in targets]
    for line in first["lines"]:
        for one in targets:
            if (own := next((each for each in one["lines"] if each["label"] == line["label"]), None)) is None:
                continue  # not measured on that target yet
            figures = own["at"][at]
            alike = show(mean(lengths_alike(one["trained"][line["variant"]].values())))
            rows.append(_row(line["label"], one, figures["summary"], alike, next(iter(figures["drafts"]))))
    settings = first["settings"][at]
    note = (
        f"Temperature {float(at):g}, {settings['dtype']}, {settings['count']} prompts; intervals are over prompts; "
        f"speed-ups are over {settings['baseline']} of the same target."
    )
    places = dict.fromkeys(Environment(**one["environment"]).line() for one in targets)
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


main = commands.program(run, BySizeOptions)


if __name__ == "__main__":
    main()
