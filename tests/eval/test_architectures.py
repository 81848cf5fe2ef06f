"""Every family of the table: verified as the table says, and token for token equal to transformers."""

import pytest
from helpers import ROOT
from transformers import __version__ as transformers_version

from eval.architectures import FAMILIES, examine, others, table

TABLE = ROOT / "eval/results/architectures.md"


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(kind, marks=pytest.mark.slow) for kind in others())])
def test_answers_are_the_targets_own(family):
    verdict = examine(family)
    if verdict.mode in ("refused", "not built"):
        assert verdict.reason and "\n" not in verdict.reason
    else:
        assert verdict.equal == verdict.answers == 6 and verdict.drafts > 0
    written = TABLE.read_text()
    if f"transformers {transformers_version}," in written:  # other versions may build a family differently
        assert table([verdict]).splitlines()[-1] in written


def test_the_table_has_every_family():
    written = TABLE.read_text()
    kinds = [line.split("|")[1].strip() for line in written.splitlines() if line.startswith("| ")][2:]
    assert kinds[: len(FAMILIES)] == [*FAMILIES]
    if f"transformers {transformers_version}," in written:  # other versions have other families
        assert kinds[len(FAMILIES) :] == others()


def test_what_is_said_of_the_table_is_in_it():
    rows = [line.split("|") for line in TABLE.read_text().splitlines() if line.startswith("| ")][2:]
    refused, unbuilt = (sum(row[3].strip() == kind for row in rows) for kind in ("refused", "not built"))
    equal = sum(row[5].strip() == "6 / 6" for row in rows)
    said = f"[the table of {len(rows)} families](eval/results/architectures.md): {equal} are shown equal"
    documents = (ROOT / name for name in ("README.md", "docs/concepts/losslessness.md"))
    readme, page = (" ".join(document.read_text().split()) for document in documents)
    assert said in readme and f"{refused} are refused, {unbuilt} could not be built small." in readme
    assert f"The table of {len(rows)} families" in page and f"({equal}) or refused ({refused})" in page
    assert f"names the {unbuilt} that it could not build" in page
