"""The program that measures prepacked weights, with few sizes and one round."""

import json
import sys

import pytest
from helpers import program


@pytest.fixture(name="program")
def _program():
    with program("prepack") as module:
        yield module


def test_every_target_is_measured_with_and_without(program, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program, "SHAPES", {"tiny": (64, 96, 4, 2, 1)})
    monkeypatch.setattr(program, "SIZES", (1, 13))
    monkeypatch.setattr(sys, "argv", ["prepack.py", "--rounds", "1", "--output", str(tmp_path)])
    program.main()
    rows = json.loads((tmp_path / "prepack.json").read_text())["rows"]
    assert [(one["target"], one["dtype"], one["prepacked"]) for one in rows] == [
        (target, dtype, prepacked)
        for target in ("quickstart-target", "tiny")
        for dtype in ("float32", "bfloat16")
        for prepacked in (False, True)
    ]
    assert all(one["ms"][size] > 0 for one in rows for size in ("1", "13"))
    text = (tmp_path / "prepack.md").read_text()
    assert text.strip() in capsys.readouterr().out and "| tiny | bfloat16 | yes |" in text
