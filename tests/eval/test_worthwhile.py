"""Whole drafts beside what is worth its time, on a tiny random target: figures, not findings."""

import json

import pytest
from helpers import predictor, write_rows

from eval.worthwhile import WHOLE, WORTHWHILE, main
from shape.generation.control import SpeculationControl, StepCosts
from shape.networks.export import export


def test_both_ways_are_measured_side_by_side(tiny_target, tiny_target_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(StepCosts, "least_chance", lambda self, context: 2.0)  # one node is worth it
    monkeypatch.setattr(SpeculationControl, "draft_next", lambda self, context: True)
    prompts = write_rows(
        tmp_path / "prompts.jsonl", *({"id": str(n), "turns": [f"say {n}", "again"]} for n in range(4))
    )
    export(predictor(), tmp_path / "predictor", tiny_target.identity, {})
    given = {
        "predictor": tmp_path / "predictor", "target": tiny_target_folder, "dtype": "float32",
        "prompts": [str(prompts)], "temperatures": [0.0, 1.0], "batch_sizes": [2], "max_new_tokens": 8,
        "output": tmp_path / "out",
    }  # fmt: skip
    main([f"--{name}={value}" for name, value in given.items()])
    found = json.loads((tmp_path / "out/worthwhile.json").read_text())
    assert list(found["summaries"]) == ["prompts, T = 0", "prompts, T = 1", "prompts, T = 0, batches of 2"]
    for by_method in found["summaries"].values():
        whole, worthwhile = by_method[WHOLE], by_method[WORTHWHILE]
        assert whole["answers"] == 4 == whole["equal_autoregressive"] == worthwhile["equal_autoregressive"]
        assert 1 <= worthwhile["acceptance_length"]["value"] <= min(2, whole["acceptance_length"]["value"])
        assert worthwhile["over_whole"]["value"] == pytest.approx(
            worthwhile["speed_up"]["value"] / whole["speed_up"]["value"]
        )
    table = (tmp_path / "out/worthwhile.md").read_text()
    assert "| prompts, T = 1 | whole drafts |" in table and table == capsys.readouterr().out.rstrip("\n") + "\n"


@pytest.mark.parametrize("wrong", ["--predictor=absent", "--prompts=[]"])
def test_mistakes_get_one_sentence(refused, wrong):
    assert wrong.strip("-").partition("=")[0] in refused(main, wrong)
