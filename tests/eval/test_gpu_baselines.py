"""The GPU program, with sizes for a CPU."""

import json
from time import monotonic

import pytest
from helpers import program

TARGET = {
    "hidden_size": 32, "layers": 4, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate_size": 64,
    "vocabulary": 512, "batch": 2, "portion": 2, "steps": 4, "generated": 60, "save_every": 2, "held_out_blocks": 2,
}  # fmt: skip
VARIANTS = {
    "training.max_minutes": 0.05,
    "training.batch_size": 32,
    "predictor.intermediate_size": 32,
    "predictor.draft_vocab_size": 128,
    "regeneration.max_new_tokens": 8,
    "validation.prompts": 2,
    "validation.max_new_tokens": 4,
}
MEASURED = ["--measure.limit=2", "--measure.max_new_tokens=8", "--measure.examined=1", "--measure.warmup=0"]


@pytest.fixture(name="program")
def _program(monkeypatch):
    with program("gpu_baselines") as module:
        for name, value in {"TARGET": TARGET, "VARIANTS": VARIANTS, "CONVERSATIONS": 40}.items():
            monkeypatch.setattr(module, name, value)
        yield module


def test_a_call_ends_in_time(program, tmp_path):
    started = monotonic()
    with pytest.raises(program.Out):
        program.run(monotonic() + 1, tmp_path, "-c", "import time; time.sleep(60)")
    assert monotonic() - started < 30
    with pytest.raises(SystemExit, match="status 3"):
        program.run(monotonic() + 60, tmp_path, "-c", "raise SystemExit(3)")


@pytest.mark.slow
def test_call_by_call(program, tmp_path, capfd):
    chosen = ["--seeds=[0]", "--only=[medusa,shape]", *MEASURED]
    arguments = [str(tmp_path / "work"), "--output", str(tmp_path / "table"), *chosen]
    program.main([*arguments, "--minutes=0"])
    assert "call it again" in capfd.readouterr().out and not (tmp_path / "table").exists()
    program.main(arguments)
    assert "finished" in capfd.readouterr().out
    found = json.loads((tmp_path / "table/ablation.json").read_text())
    assert [line["label"] for line in found["lines"]] == ["medusa", "shape"]
    assert found["environment"]["versions"]["torch"]
