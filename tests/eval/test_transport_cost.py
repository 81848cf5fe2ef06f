"""The program that measures what refinement costs, with few prompts and positions."""

import json

import pytest

from eval import transport_cost


def test_drafting_and_training_are_measured(tmp_path, capsys):
    few = ["--limit=1", "--max_new_tokens=4", "--rounds=1", "--batch_size=8", "--widths=[4]"]
    transport_cost.main([*few, "--kinds=[column last,barycentric]", f"--output={tmp_path}"])
    lines = json.loads((tmp_path / "cost.json").read_text())["lines"]
    assert [(one["kind"], one["width"]) for one in lines] == [("none", None), ("column last", 4), ("barycentric", 4)]
    assert all(0 < one["draft"] < one["step"] and one["training"] > 0 for one in lines)
    assert (tmp_path / "cost.md").read_text().strip() in capsys.readouterr().out


def test_unknown_refinements_are_refused_before_anything_is_loaded(capsys):
    with pytest.raises(SystemExit):
        transport_cost.main(["--kinds=[sideways]", "--target=nowhere"])
    assert "sideways" in capsys.readouterr().err
