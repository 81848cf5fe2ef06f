"""The GPU program, with tiny models on a CPU."""

import json
from dataclasses import replace
from time import monotonic

import pytest
import torch

from eval import gpu as program
from eval import gpu_steps
from eval.llamas import random_llama
from shape.errors import ConfigError
from shape.evaluation.environment import Environment

TARGET = {
    "hidden_size": 32, "layers": 4, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate_size": 64,
    "vocabulary": 512, "batch": 2, "portion": 2, "generated": 60, "save_every": 2, "held_out_blocks": 2,
}  # fmt: skip
VARIANTS = {
    "training.batch_size": 32,
    "predictor.intermediate_size": 32,
    "predictor.draft_vocab_size": 128,
    "regeneration.max_new_tokens": 8,
    "validation.prompts": 2,
    "validation.max_new_tokens": 4,
}
MEASURED = ["--measure.limit=2", "--measure.max_new_tokens=8", "--measure.examined=1", "--measure.warmup=0"]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(gpu_steps, "REPEATS", 3)
    for name, value in {"TARGET": TARGET, "VARIANTS": VARIANTS}.items():
        monkeypatch.setattr(program, name, value)


def test_tiny(tmp_path, capsys):
    program.main(["--tiny", "true", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["left_out"] == [] and found["bandwidth"][0] > 0
    assert [(one["batch"], one["steps"], one["method"]) for one in found["cases"]] == [
        (*part, method)
        for part in ((1, "graphs"), (1, "eager"), (2, "graphs"), (2, "eager"))
        for method in ("autoregressive", "oracle (simulated)")
    ]
    plain, oracle = found["cases"][:2]
    assert plain["speed_up"] == plain["acceptance_length"] == 1 and plain["nodes"] == 1
    assert oracle["nodes"] == gpu_steps.ORACLE_DEPTH + 1 and oracle["acceptance_length"] > 1
    assert all(one["efficiency"] > 0 for one in found["cases"])
    assert found["bounds"][0]["plain_ms"] == plain["step_ms"] and [one["steps"] for one in found["bounds"]] == [
        "graphs",
        "eager",
    ]
    assert [one["equal"] == one["answers"] for one in found["equal"]] == [True]
    assert found["environment"]["versions"]["torch"]
    text, said = (tmp_path / "gpu.md").read_text(), capsys.readouterr().out
    assert text.strip() in said and "simulated" in text and said.endswith("finished\n")


def test_a_call_goes_on_where_the_last_one_ended(tmp_path, monkeypatch, capsys):
    given = ["--tiny", "true", "--output", str(tmp_path)]
    program.main([*given, "--minutes", "0.02"])  # enough for what takes no time
    before = json.loads((tmp_path / "gpu.json").read_text())
    assert before["bandwidth"] and not before["cases"] and capsys.readouterr().out.endswith("call it again\n")
    program.main(given)
    after = json.loads((tmp_path / "gpu.json").read_text())
    assert after["bandwidth"] == before["bandwidth"] and len(after["cases"]) == 8 and not after["left_out"]
    monkeypatch.setattr(program, "measure", None)  # nothing is measured twice
    program.main(given)
    assert json.loads((tmp_path / "gpu.json").read_text())["cases"] == after["cases"]


def test_parts_that_fail_or_do_not_fit_are_named_and_tried_again(tmp_path):
    def record() -> program.Record:
        return program.Record(tmp_path, Environment.capture(torch.device("cpu")), {}, minutes=1.0)

    def fail() -> program.Found:
        raise RuntimeError("out of luck\nwith details")

    first = record()
    first.part("one that is too long", 3600, dict)
    first.part("one that fails", 0, fail)
    assert first.left_out == ["one that is too long: no time left", "one that fails: RuntimeError: out of luck"]
    assert "one that fails" in (tmp_path / "gpu.md").read_text()
    second = record()
    second.part("one that fails", 0, lambda: {"bandwidth": [2.0]})
    assert second.left_out == [] and record().bandwidth == 2.0


def test_without_a_gpu_it_says_so(refused):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "no CUDA device is there" in refused(program.main)


def test_weights_read_per_token():
    device, dtype = torch.device("cpu"), torch.float32
    sizes = {}
    for tied in (False, True):
        target = random_llama(replace(program.TINY, tie_word_embeddings=tied), dtype, device)
        sizes[tied] = program.weight_bytes(target)
        everything = sum(one.numel() * 4 for one in target.model.parameters())
        assert sizes[tied] == everything - (0 if tied else 97 * 32 * 4)
    assert sizes[False] == sizes[True]


@pytest.mark.slow  # it waits for commands that are cut off
def test_a_command_ends_in_time(tmp_path):
    started = monotonic()
    assert not program.launch(monotonic() + 1, tmp_path, "-c", "import time; time.sleep(60)")
    assert monotonic() - started < 30
    with pytest.raises(ConfigError, match="status 3"):
        program.launch(monotonic() + 60, tmp_path, "-c", "raise SystemExit(3)")


@pytest.mark.slow
def test_baselines_call_by_call(tmp_path, capfd):
    chosen = ["--seeds=[0]", "--only=[medusa,shape]", *MEASURED]
    arguments = ["--tiny=true", f"--output={tmp_path / 'gpu'}", f"--work={tmp_path / 'work'}"]
    arguments += ["--target_steps=4", "--conversations=40", "--training_minutes=0.05", f"--ablate={json.dumps(chosen)}"]
    program.main([*arguments, "--minutes=0"])
    assert "call it again" in capfd.readouterr().out and not (tmp_path / "gpu/baselines").exists()
    program.main(arguments)
    assert "finished" in capfd.readouterr().out
    found = json.loads((tmp_path / "gpu/baselines/ablation.json").read_text())
    assert [line["label"] for line in found["lines"]] == ["shape", "medusa"]  # in the order of the file
    assert found["environment"]["versions"]["torch"]
