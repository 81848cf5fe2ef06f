"""The table by the size of the target."""

import json

import pytest
from helpers import ROOT

from eval.by_size import RESULTS, rendered, table
from shape.errors import DataError

PAGE = ROOT / "docs/research/baselines.md"


def test_a_method_stands_once_for_each_target_the_smallest_first():
    kept = json.loads((RESULTS / "ablations/equal-terms/chat-12m/time/bench/ablation.json").read_text())
    larger = json.loads(json.dumps(kept))
    for one in larger["settings"].values():
        one["parameters"] *= 3
    for seeds in larger["trained"].values():
        for one in seeds.values():
            one["record"]["validation"]["value"] += 1
    at = next(iter(kept["settings"]))
    rows = [
        line.split(" | ") for line in table({"larger": larger, "kept": kept}, at).splitlines() if line.startswith("| ")
    ][2:]
    names = [*kept["others"][at], *(line["label"] for line in kept["lines"])]
    assert [row[0].removeprefix("| ") for row in rows] == [name for name in names for _ in range(2)]
    assert [row[1] for row in rows] == ["12.6M", "37.8M"] * len(names)
    small, large = (float(row[2]) for row in rows[-2:])
    assert large - small == pytest.approx(1, abs=0.011) and rows[-1][3:] == rows[-2][3:]


def test_the_document_says_what_was_measured():
    text = PAGE.read_text()
    assert rendered(text, RESULTS) == text, "run python -m eval.by_size --render docs/research/baselines.md"


def test_a_region_without_results(tmp_path):
    begin, end = "<!-- by-size:begin{} -->", "<!-- by-size:end -->"
    assert "Not measured yet." in rendered(f"{begin.format(' absent')}{end}", tmp_path)
    with pytest.raises(DataError, match="without a folder"):
        rendered(f"{begin.format('')}{end}", tmp_path)
