"""A drafter of a target that was fine-tuned since, on a tiny one in moments: figures, not findings."""

import json

import torch
import yaml
from safetensors.torch import load_file
from training_runs import write_conversations

from eval import warm_start
from shape import bundled
from shape.data.conversations import Conversation
from shape.target.chat import Message


def test_only_what_the_assistant_says_is_in_lower_case():
    given = Conversation("a", (Message("system", "S"), Message("user", "Q"), Message("assistant", "Say IT")))
    assert [each.content for each in warm_start.in_lower_case(given).messages] == ["S", "Q", "say it"]


def test_the_whole_way(tiny_target_folder, tiny_predictor_folder, tmp_path, monkeypatch, capsys):
    config = {"max_length": 128, "training": {"steps": 3, "batch_size": 16}, "trainer": {"accelerator": "cpu"}}
    config |= {"validation": {"every": 3, "prompts": 2, "max_new_tokens": 4}}
    (tmp_path / "quickstart.yaml").write_text(yaml.safe_dump(config))
    own = {
        "quickstart.yaml": tmp_path / "quickstart.yaml",
        "train.jsonl.gz": write_conversations(tmp_path / "talks.jsonl", 16),
    }
    path = bundled.path
    monkeypatch.setattr(bundled, "path", lambda *parts: own.get(parts[-1]) or path(*parts))
    monkeypatch.setattr(warm_start, "_BASE", str(tiny_target_folder))
    monkeypatch.setattr(warm_start, "_PREDICTOR", str(tiny_predictor_folder))
    work, output = tmp_path / "work", tmp_path / "out"
    given = {"tuning_steps": 2, "conversations": 12, "prompts": 2, "work": work, "output": output}
    warm_start.main([f"--{name}={value}" for name, value in given.items()])

    before, tuned = (load_file(folder / "model.safetensors") for folder in (tiny_target_folder, work / "target"))
    assert any(not torch.equal(tuned[name], weight) for name, weight in before.items())
    configs = [json.loads((work / name / "config.json").read_text()) for name in ("warm", "fresh")]
    assert configs[0]["num_steps"] == 2, "as the predictor that it goes on from"
    found = json.loads((output / "warm-start.json").read_text())
    assert list(found["shipped"]["summary"]) == ["autoregressive", "as it is"]
    assert list(found["fine-tuned"]["summary"]) == ["autoregressive", "as it is", "--init", "from nothing"]
    assert (output / "warm-start.md").read_text().rstrip() in capsys.readouterr().out
