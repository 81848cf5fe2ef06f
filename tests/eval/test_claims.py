"""The page of claims: it says what committed results say, and what becomes of a claim."""

import json

import pytest
from helpers import ROOT

from eval.claims.__main__ import main, page
from eval.claims.committed import UNDECIDED, Claim, Committed, above
from eval.claims.systems import SYSTEMS
from shape.errors import DataError


def test_the_page_follows_the_committed_results():
    written = (ROOT / "docs/research/claims.md").read_text()
    assert written == page(ROOT / "eval/results"), "run python -m eval.claims"


def test_every_system_and_every_source_is_there():
    text = page(ROOT / "eval/results")
    assert all(f"## {system}" in text and claims for system, claims in SYSTEMS.items()) and len(SYSTEMS) == 6
    linked = {part.partition(")")[0] for part in text.split("](../../")[1:]}
    assert len(linked) > 20 and all((ROOT / name).exists() for name in linked)


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (0.97, "reproduced"), (0.5, "contradicted"), (0.92, UNDECIDED), (None, "not comparable"),
        (-1, "not measured yet"),
    ],
)  # fmt: skip
def test_verdicts_are_read_from_results(tmp_path, value, verdict):
    (tmp_path / "some.json").write_text(json.dumps({"share": value}))

    def ours(read: Committed) -> tuple[str, bool | str | None]:
        share = read.json("some.json")["share"]
        if share is None:
            return "none", None
        figure = {"value": share, "low": share - 0.02, "high": share + 0.02}
        return f"{share}", above(figure, {"value": 0.93, "low": 0.92, "high": 0.94})

    claim = Claim("much", "95 %", None if value == -1 else ours, "so it is")
    read = Committed(tmp_path)
    row = claim.row(read)
    assert row[3] == verdict and read.used == ([] if value == -1 else ["some.json"])


def test_what_is_missing_is_one_sentence(tmp_path, refused):
    claim = Claim("much", "95 %", lambda read: (read.json("none.json")["share"], True), "")
    with pytest.raises(DataError, match=r"none\.json cannot be read; measure it, or correct eval/claims/systems\.py"):
        claim.row(Committed(tmp_path))
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(DataError, match="what is measured of 'much' cannot be read"):
        claim.row(Committed(tmp_path))
    refused(main, "--results", str(tmp_path), "--output", str(tmp_path / "page.md"))
    assert not (tmp_path / "page.md").exists()
