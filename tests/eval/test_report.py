"""The one command that makes the report from nothing: what it runs, what it keeps, and that it works."""

import runpy
import sys
from pathlib import Path

import pytest
import yaml
from helpers import save_untrained, write_rows
from training_runs import write_conversations

from eval import report as program
from shape.errors import ConfigError

SECTIONS = ("rate", "all", "trace", "speed", "efficiency", "check", "analysis")


@pytest.fixture
def options(tiny_target, tiny_target_folder, tmp_path, monkeypatch):
    """Seconds of work on the tiny target, an untrained predictor of which is exported."""
    monkeypatch.setenv("SHAPE_CACHE", str(tmp_path / "cache"))
    untrained = save_untrained(tiny_target, tiny_target_folder, tmp_path / "predictor")
    prompts = write_rows(
        tmp_path / "prompts.jsonl", *({"id": text, "prompt": text} for text in ("Hello", "one two one two"))
    )
    return program.ReportOptions(
        output=str(tmp_path / "report"), predictor=untrained, prompts=str(prompts), ablation="none",
        dtype="float32", limit=2, max_new_tokens=6, batches=[1, 2], positions=4,
    )  # fmt: skip


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """Commands run in this process, for speed; the names of those that ran."""
    seen: list[str] = []

    def launch(module: str, arguments: list[str]) -> int:
        seen.append(module)
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0

    monkeypatch.setattr(program, "launch", launch)
    return seen


@pytest.mark.slow
def test_everything_is_measured_once_and_shown(options, launched, tmp_path, capsys):
    program.make(options)
    everything = ["shape.generate"] * 4 + ["shape.check"] + ["shape.bench"] * 3
    everything += ["shape.efficiency"] * 2 + ["eval.analyze"]
    assert launched == everything
    written = tmp_path / "report" / "report.html"
    first = written.read_text()
    assert all(f'<h2 id="{name}"' in first for name in SECTIONS) and '<h2 id="ablation"' not in first
    assert "python -m eval.ablate" in first  # what is missing is said
    (tmp_path / "report" / "results" / "bench-t1" / "results.json").unlink()
    launched.clear()
    program.make(options)
    assert launched == ["shape.bench"] and written.exists()
    assert capsys.readouterr().out.count("kept: ") == len(everything) - 1
    options.limit = 1
    with pytest.raises(ConfigError, match=r"options.json holds a measurement with other settings \(limit\)"):
        program.make(options)


def test_a_part_that_fails_ends_it(options, monkeypatch):
    monkeypatch.setattr(program, "launch", lambda module, arguments: 2)
    with pytest.raises(ConfigError, match=r"shape\.generate failed with status 2"):
        program.make(options)
    monkeypatch.setattr(program, "launch", lambda module, arguments: 130)
    with pytest.raises(KeyboardInterrupt):
        program.make(options)
    assert not (Path(options.output) / "report.html").exists()


def test_commands_are_those_of_the_package(options):
    """The default has an ablation, which is trained beside the results and of which only the figures are kept."""
    found = program.parts(program.ReportOptions())
    assert [part.module for part in found][-1] == "eval.ablate"
    assert "work" in found[-1].made.parts and all("results" in part.made.parts for part in found[:-1])
    assert not {"--data", "--prompts"} & {argument for part in found for argument in part.arguments}
    assert len({part.made for part in found}) == len(found)
    # For another target an ablation has to be told of all three.
    options.ablation, options.target = "default", "T"
    assert "eval.ablate" not in [part.module for part in program.parts(options)]
    options.data = "D"
    last = program.parts(options)[-1].arguments
    assert last[last.index("--target") + 1] == "T" and "--data=D" in last


@pytest.mark.slow
def test_with_an_ablation_in_processes_of_their_own(options, tiny_target_folder, tmp_path):
    talks, file = write_conversations(tmp_path / "talks.jsonl", 24), tmp_path / "tiny.yaml"
    common = {
        "target": str(tiny_target_folder), "regenerate": False, "max_length": 128,
        "predictor": {"intermediate_size": 16}, "training": {"steps": 3, "batch_size": 16},
        "validation": {"every": 100, "prompts": 2, "max_new_tokens": 4},
        "trainer": {"accelerator": "cpu", "devices": 1, "log_every_n_steps": 2, "enable_progress_bar": False},
    }  # fmt: skip
    ablation = {"title": "Tiny", "base": [], "common": common, "variants": {"default": None}}
    file.write_text(yaml.safe_dump(ablation | {"measure": {"max_new_tokens": 6, "warmup": 0, "examined": 1}}))
    options.target, options.data, options.ablation = str(tiny_target_folder), str(talks), str(file)
    options.variants, options.images = ["default"], True
    program.make(options)
    output = Path(options.output)
    assert '<h2 id="ablation">' in (output / "report.html").read_text()
    assert (output / "results" / "ablation" / "ablation.json").exists()
    images = [path.name for path in (output / "images").iterdir()]
    assert sum(name.endswith(".svg") for name in images) == sum(name.endswith(".png") for name in images) > 30
