"""The program that measures weights in fewer bits, with a tiny size and few answers."""

import json

import pytest

from eval import precisions
from eval.llamas import Widths


@pytest.mark.slow  # kernels of all precisions are compiled for it
def test_every_precision_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(precisions, "SHAPES", {"tiny": Widths(64, 96, 4, 2, 1)})
    monkeypatch.setattr(precisions, "TOKENS", (1, 13))
    monkeypatch.setattr(precisions, "ANSWERED", (("float32", None), ("float32", "int4")))
    sizes = ["--sizes", '["tiny"]', "--rounds", "1", "--answers", "1", "--max_new_tokens", "12"]
    precisions.main([*sizes, "--output", str(tmp_path)])
    record = json.loads((tmp_path / "precisions.json").read_text())
    assert [one["precision"] for one in record["forwards"]] == list(precisions.PRECISIONS)
    assert all(one["ms"]["1"] > 0 and one["ms"]["13"] > 0 for one in record["forwards"])
    same, fewer = record["answers"]
    assert same["equal"] == same["count"] == 1 and same["common"] == 1.0
    assert same["drafted_equal"] == fewer["drafted_equal"] == 1 and fewer["acceptance_length"] >= 1
    assert (tmp_path / "precisions.md").read_text().strip() in capsys.readouterr().out


def test_tokens_in_common():
    assert precisions.in_common([1, 2, 3, 4], [1, 2, 3, 4], 2) == 1.0
    assert precisions.in_common([1, 2, 3, 9], [1, 2, 3, 4], 2) == 0.5
    assert precisions.in_common([1, 2, 3], [1, 2, 3, 4], 2) == 0.5
    assert precisions.in_common([1, 2, 9], [1, 2, 3, 4], 2) == 0.0


def test_what_is_not_known_is_named(refused):
    assert "7B is not measured; give some of 12.6M" in refused(precisions.main, "--sizes", '["7B"]')
