"""The GPU program, with a tiny model on a CPU."""

import json
from dataclasses import replace

import pytest
import torch

from eval import gpu_efficiency as program
from eval.llamas import random_llama
from shape.evaluation.environment import Environment


def test_tiny(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program, "REPEATS", 3)
    program.main(["--tiny", "true", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "gpu-efficiency.json").read_text())
    assert found["left_out"] == [] and found["bandwidth"] > 0
    assert [(one["batch"], one["method"]) for one in found["cases"]] == [
        (batch, method) for batch in (1, 2) for method in ("autoregressive", "oracle (simulated)")
    ]
    plain, oracle = found["cases"][:2]
    assert plain["speed_up"] == plain["acceptance_length"] == 1 and plain["nodes"] == 1
    assert oracle["nodes"] == program.DEPTH + 1 and oracle["acceptance_length"] > 1
    assert all(one["efficiency"] > 0 for one in found["cases"])
    assert found["bounds"][0]["plain_ms"] == plain["step_ms"]
    assert [one["equal"] == one["answers"] for one in found["equal"]] == [True]
    assert found["environment"]["versions"]["torch"]
    text = (tmp_path / "gpu-efficiency.md").read_text()
    assert text.strip() in capsys.readouterr().out and "simulated" in text


def test_parts_that_fail_or_do_not_fit_are_named(tmp_path):
    record = program.Record(tmp_path, Environment.capture(torch.device("cpu")), minutes=1.0)
    with record.part("one that is too long", 3600) as go:
        assert not go
    with record.part("one that fails", 0) as go:
        raise RuntimeError("out of luck\nwith details")
    assert record.left_out == ["one that is too long: no time left", "one that fails: RuntimeError: out of luck"]
    assert "one that fails" in (tmp_path / "gpu-efficiency.md").read_text()


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="2"):
        program.main([])
    assert "no CUDA device is there" in capsys.readouterr().err


def test_weights_read_per_token():
    device, dtype = torch.device("cpu"), torch.float32
    sizes = {}
    for tied in (False, True):
        target = random_llama(replace(program.TINY, tie_word_embeddings=tied), dtype, device)
        sizes[tied] = program.weight_bytes(target)
        everything = sum(one.numel() * 4 for one in target.model.parameters())
        assert sizes[tied] == everything - (0 if tied else 97 * 32 * 4)
    assert sizes[False] == sizes[True]
