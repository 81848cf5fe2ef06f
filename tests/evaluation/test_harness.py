"""`ShapeDecoder` as lm-evaluation-harness's model: local tasks, against that library's own class for the model."""

import json
import sys
from pathlib import Path

import pytest
import torch
from helpers import write_rows

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install -e '.[eval]'")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from shape.cli.harness import main
from shape.errors import TargetMismatch
from shape.evaluation.harness import ShapeLM, _StopsWithin

GENERATE = """
task: tiny_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["a"], max_gen_toks: 12, do_sample: false}}
metric_list:
  - metric: exact_match
"""
CHOOSE = """
task: tiny_choose
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["yes", "no"]
doc_to_target: 0
metric_list:
  - metric: acc
"""


def test_a_task_that_there_is_not_is_one_sentence(monkeypatch, refused):
    def unknown() -> None:
        raise ValueError("Tasks not found: nosuch")

    monkeypatch.setattr("shape.evaluation.harness.cli_evaluate", unknown)
    said = refused(main, "--model", "shape", "--tasks", "nosuch", alone=True)
    assert "(Tasks not found: nosuch); shape harness ls tasks lists its tasks" in said


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """Two tasks over a local file."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"question": text, "answer": "none"} for text in ("Hello", "Is it late?", "A longer question, then?")]
    write_rows(folder / "rows.jsonl", *rows)
    for name, text in (("generate", GENERATE), ("choose", CHOOSE)):
        (folder / f"{name}.yaml").write_text(text.format(file=folder / "rows.jsonl"))
    return folder


@pytest.fixture(scope="module")
def models(tiny_target, tiny_target_folder, tiny_predictor_folder) -> tuple[ShapeLM, HFLM]:
    ours = ShapeLM(predictor=str(tiny_predictor_folder), target=str(tiny_target_folder), dtype="float32", batch_size=2)
    theirs = HFLM(pretrained=tiny_target.model, tokenizer=tiny_target.tokenizer, batch_size=2)
    return ours, theirs


def test_tasks_have_the_results_of_the_same_model_without_drafts(models, tasks):
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = [
        simple_evaluate(model, tasks=["tiny_generate", "tiny_choose"], task_manager=manager, bootstrap_iters=0)
        for model in models
    ]
    ours, theirs = ({name: result["samples"][name] for name in result["results"]} for result in found)
    for name in ours:
        for one, other in zip(ours[name], theirs[name], strict=True):
            assert one["doc_id"] == other["doc_id"] and len(one["resps"]) == len(other["resps"])
            for (mine,), (own,) in zip(one["resps"], other["resps"], strict=True):
                # Of a log-likelihood the last digits depend on the order of sums.
                assert mine == (own if isinstance(own, str) else pytest.approx(own, rel=1e-5))
    assert found[0]["results"]["tiny_choose"] == found[1]["results"]["tiny_choose"]
    info = found[0]["config"]
    assert info["drafter"] == "shape" and info["acceptance_length"] >= 1
    assert models[0].emitted > 0


def test_sampled_text_follows_the_seed_alone(models):
    def texts(seed: int, **more) -> list[str]:
        torch.manual_seed(seed)
        options = {"until": ["\n\n\n"], "max_gen_toks": 16, "do_sample": True, "temperature": 1.0, **more}
        asked = [
            Instance("generate_until", {}, ("Hello", options), 0),
            Instance("generate_until", {}, ("Hi", options), 1),
        ]
        return models[0].generate_until(asked, disable_tqdm=True)

    assert texts(1) == texts(1) != texts(2)
    plain = texts(3, do_sample=False, temperature=0.0)
    assert plain == texts(4, do_sample=False, temperature=0.0)


def test_stop_strings_count_in_what_was_written_alone(tiny_target):
    """As in the library's own models, and for prompts with padding, or without, as decoding takes it off; also where a
    prompt begins with the token that pads.
    """
    tokenizer = tiny_target.tokenizer
    rows = [tokenizer(text, add_special_tokens=False).input_ids for text in ("ab", "longer ab")]
    rows.append([tokenizer.pad_token_id, *rows[0]])
    width = max(map(len, rows))
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    padded = [[tokenizer.pad_token_id] * (width - len(row)) + row for row in rows]
    stops = _StopsWithin(tokenizer, ["bc"], torch.tensor(padded), mask)
    for prompt in [*rows, *padded]:
        for text, met in (("c", False), ("bc", True), ("c bc", True)):
            written = tokenizer(text, add_special_tokens=False).input_ids
            assert bool(stops(torch.tensor([prompt + written]), None)) == met, (prompt, text)


@pytest.mark.slow  # the library indexes all of its own tasks first
def test_the_command_is_that_of_the_library(tiny_predictor_folder, tiny_target_folder, tasks, tmp_path, monkeypatch):
    given = f"predictor={tiny_predictor_folder},target={tiny_target_folder},dtype=float32"
    arguments = ["--model", "shape", "--model_args", given, "--tasks", "tiny_choose", "--include_path", str(tasks)]
    monkeypatch.setattr(sys, "argv", ["shape harness"])
    main([*arguments, "--output_path", str(tmp_path)])
    (path,) = tmp_path.rglob("results_*.json")
    record = json.loads(path.read_text())
    assert record["config"]["model"] == "shape" and "acc,none" in record["results"]["tiny_choose"]


def test_a_predictor_of_another_target_is_refused(tiny_predictor_folder):
    with pytest.raises(TargetMismatch, match="was trained for target tiny"):
        ShapeLM(predictor=str(tiny_predictor_folder), target="quickstart-target")


def test_without_the_library_it_is_said_what_to_install(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "shape.evaluation.harness")
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert 'pip install -e ".[eval]" in the checkout of shape' in capsys.readouterr().err
