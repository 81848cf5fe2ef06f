"""An ablation of seconds, and trainings that run in the process of the test."""

from importlib import import_module
from pathlib import Path

import pytest
import yaml
from helpers import write_rows
from training_runs import write_conversations

from eval.ablation import training


@pytest.fixture(scope="module")
def file(tiny_target_folder, tmp_path_factory) -> Path:
    """An ablation of seconds: three variants on the tiny target."""
    folder = tmp_path_factory.mktemp("ablation")
    talks, prompts = write_conversations(folder / "talks.jsonl", 24), folder / "prompts.jsonl"
    write_rows(prompts, *({"id": str(i), "turns": [f"say {i}"]} for i in range(3)))
    values = {
        "title": "Tiny",
        "base": [],
        "common": {
            "target": str(tiny_target_folder),
            "data": str(talks),
            "regenerate": False,
            "max_length": 128,
            "predictor": {"intermediate_size": 16},
            "training": {"steps": 3, "batch_size": 16, "checkpoint_every": 2},
            "validation": {"every": 100, "prompts": 2, "max_new_tokens": 4},
            "trainer": {"accelerator": "cpu", "devices": 1, "log_every_n_steps": 2, "enable_progress_bar": False},
        },
        "seeds": [0, 1],
        "variants": {
            "path 1.0": None,
            "affine": {"predictor": {"refinement": "affine", "refinement_dim": 8}},
            "root": {"predictor": {"token_conditioning": "root", "step_mode": "parallel"}},
        },
        "measure": {
            "prompts": str(prompts),
            "limit": 2,
            "max_new_tokens": 6,
            "temperatures": [0, 1],
            "methods": ["transformers", "autoregressive", "transformers-lookup"],
            "warmup": 0,
            "examined": 1,
        },
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


@pytest.fixture
def launched(monkeypatch) -> list[list[str]]:
    """Trainings run in this process, for speed; the list of what each was told."""
    seen: list[list[str]] = []

    def launch(module: str, arguments: list[str], log: Path, threads: int) -> int:
        seen.append(arguments)
        log.touch()
        import_module(module).main(arguments)
        return 0

    monkeypatch.setattr(training, "_launch", launch)
    return seen
