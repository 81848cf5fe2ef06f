"""The program that measures targets in OpenVINO beside torch, here with torch alone."""

import json

from eval import openvino as program
from shape.evaluation.environment import Environment


def test_the_page_says_where_it_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "PRECISIONS", program.PRECISIONS[:1])
    program.main([f"--output={tmp_path}", "--name=tiny", "--limit=1", "--max_new_tokens=4", "--repeats=1"])
    page, record = (tmp_path / "tiny.md").read_text(), json.loads((tmp_path / "tiny.json").read_text())
    assert page.startswith(
        "# OpenVINO beside torch: quickstart-target, 1 prompts, at most 4 new tokens, batch 1, greedy\n"
    )
    assert "| torch | float32 | as computed | drafted |" in page and "| 100 % |" in page
    assert page.endswith(f"\n\n{Environment(**record['environment']).line()}\n")
    assert list(record["answers"]) == ["torch float32 None plain", "torch float32 None drafted"]
    asked = {"target": "quickstart-target", "predictor": "quickstart-shape", "name": "tiny"}
    assert record["settings"] == {**asked, "limit": 1, "max_new_tokens": 4, "repeats": 1}
