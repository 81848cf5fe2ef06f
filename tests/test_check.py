"""`python -m shape.check`: a report on a target before and after training."""

import json

import pytest
import torch
from helpers import predictor

from shape.check import main
from shape.export import export
from shape.predictor import ShapePredictor


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHAPE_CACHE", str(tmp_path))


@pytest.fixture
def questions(tmp_path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hello!", "What is the time?", "x" * 400)))
    return str(file)


def run(capsys, questions: str, *arguments: str) -> str:
    main([*arguments, "--prompts", questions, "--max_new_tokens", "8"])
    return capsys.readouterr().out


def test_before_training(capsys, questions, tiny_target_folder, tmp_path):
    file = tmp_path / "report.json"
    out = run(capsys, questions, "--target", str(tiny_target_folder), "--output", str(file))
    assert "verified as trees" in out and "breaks even" in out and "n-gram" in out
    report = json.loads(file.read_text())
    assert [one["acceptance"] for one in report["chains"]] == [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    speeds = [one["speed_up"] for one in report["chains"]]
    assert speeds == sorted(speeds) and speeds[0] > 0.999  # not to draft is among the choices
    assert "plans" not in report


def test_of_a_predictor(capsys, questions, tiny_target, tiny_target_folder, tmp_path):
    torch.manual_seed(0)
    network: ShapePredictor = predictor(torch.float32)
    export(network, tmp_path / "made", tiny_target.identity, {})
    file = tmp_path / "report.json"
    made = ["--predictor", str(tmp_path / "made"), "--target", str(tiny_target_folder), "--temperature", "1"]
    out = run(capsys, questions, *made, "--output", str(file))
    assert "rank 2" in out and "(its own)" in out
    report = json.loads(file.read_text())
    rates = [one["rate"] for one in report["plans"]]
    assert rates == sorted(rates, reverse=True) and report["own"] in report["plans"]
    assert all(sum(ranks) <= 1.0 + 1e-9 for ranks in report["acceptance"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--target", "/nowhere"], "target /nowhere cannot be loaded"),
        (["--rows", "0"], "rows, limit and max_new_tokens have to be at least 1"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(capsys, arguments, sentence):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


def test_prompts_that_do_not_fit(capsys, tiny_target_folder, tmp_path):
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"prompt": "x" * 400}) + "\n")
    with pytest.raises(SystemExit):
        main(["--target", str(tiny_target_folder), "--prompts", str(file)])
    assert "fit into the 256 positions" in capsys.readouterr().err
