"""`eval.recurrent` on tiny targets: what it writes. Speed itself is no test's business."""

import json

import pytest

from eval import recurrent
from eval.architectures import FAMILIES


def test_answers_are_the_same_and_lengths_are_those_asked_for(tmp_path, monkeypatch):
    _, kind, values = FAMILIES["qwen3_5"]
    tiny = {name: value for name, value in values.items() if "token_id" not in name} | {"tie_word_embeddings": True}
    monkeypatch.setattr(recurrent, "TARGETS", {"tiny": (kind, tiny)})
    command = ["--output", str(tmp_path), "--targets", "[tiny]", "--lengths", "[3]", "--dtype", "float32"]
    recurrent.main([*command, "--prompts", "2", "--new_tokens", "20", "--rounds", "1"])
    rows = json.loads((tmp_path / "recurrent.json").read_text())["rows"]
    layers = ["MTP layer, 3", "MTP layer, fewer tokens, 3"]
    assert [row["method"] for row in rows] == ["transformers", "autoregressive", "drafted, 3", *layers]
    assert all(row["equal"] == 1 and row["rate"] > 0 for row in rows)
    assert [row["length"] for row in rows[:2]] == [1, 1]
    assert [row["length"] for row in rows[2:]] == [pytest.approx(2.5, abs=0.5)] * 3
    assert "| tiny | drafted, 3 |" in (tmp_path / "recurrent.md").read_text()
