"""`python -m shape.check`: a report on a target before and after training."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from helpers import predictor, write_rows
from mtp_targets import write_small
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from shape.cli.check import main
from shape.drafters.cost import Costs
from shape.drafters.recipes.pack import Pack, Recipe
from shape.evaluation.check import _chain, _untrained
from shape.evaluation.speed import Bench
from shape.generation.loading import draft_dtype
from shape.networks.export import export
from shape.networks.shape import ShapePredictor
from shape.target.model import Target
from shape.target.prepack import is_prepacked
from shape.target.size import size_of
from shape.training.defaults import network_config, resolve
from shape.training.options import TrainOptions


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHAPE_CACHE", str(tmp_path))


@pytest.fixture
def questions(tmp_path) -> str:
    file = write_rows(
        tmp_path / "prompts.jsonl", *({"prompt": text} for text in ("Hello!", "What is the time?", "x" * 400))
    )
    return str(file)


def short(questions: str, *arguments: str) -> list[str]:
    return [*arguments, "--prompts", questions, "--max_new_tokens", "8"]


def run(capsys, questions: str, *arguments: str) -> str:
    main(short(questions, *arguments))
    return capsys.readouterr().out


def test_a_targets_own_layer_is_among_them(capsys, questions, tiny_tokenizer, tmp_path):
    folder, file = tmp_path / "target", tmp_path / "report.json"
    write_small(folder, tiny_tokenizer)
    run(capsys, questions, "--target", str(folder), "--output", str(file))
    measured = {one["drafter"] for one in json.loads(file.read_text())["measured"]}
    assert measured == {"none", "ngram", "suffix", "lookahead", "mtp", "suffix+mtp"}
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())
    names["weight_map"] = {name: file for name, file in names["weight_map"].items() if not name.startswith("mtp.")}
    index.write_text(json.dumps(names))
    for path in folder.glob("*.safetensors"):
        kept = {name: weight for name, weight in load_file(path).items() if not name.startswith("mtp.")}
        save_file(kept, path, metadata={"format": "pt"})
    run(capsys, questions, "--target", str(folder), "--output", str(file))
    assert "mtp" not in {one["drafter"] for one in json.loads(file.read_text())["measured"]}
    with pytest.raises(SystemExit):
        main(short(questions, "--target", str(folder), "--drafter", "mtp"))
    assert "of an MTP layer" in capsys.readouterr().err


def test_before_training(capsys, questions, tiny_target_folder, tmp_path):
    file = tmp_path / "report.json"
    folder = shutil.copytree(tiny_target_folder, tmp_path / "[b]")
    out = run(capsys, questions, "--target", str(folder), "--output", str(file))
    assert "[b]: " in out and "verified as trees" in out and "breaks even" in out
    report = json.loads(file.read_text())
    assert [one["acceptance"] for one in report["chains"]] == [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    speeds = [one["speed_up"] for one in report["chains"]]
    assert speeds == sorted(speeds) and speeds[0] > 0.999  # not to draft is among the choices
    assert "plans" not in report and "the default predictor of shape train, drafting from" in out
    target = Target.load("quickstart-target")
    network = _untrained(target).predictor
    options = resolve(TrainOptions(target="another"), size_of(target.model), None)
    wanted, config = network_config(options, target), network.config
    wanted.target_identity = None
    assert config.to_diff_dict() == wanted.to_diff_dict() and config.intermediate_size == 512
    assert is_prepacked(network) and network.dtype == draft_dtype(target, target.device)  # as one that is loaded
    measured = {one["drafter"]: one for one in report["measured"]}
    assert measured.keys() == {"none", "ngram", "suffix", "lookahead"} and measured["none"]["speed_up"] == 1.0
    assert report["target"]["identity"]["hidden_size"] == 32 and f"--drafter {report['measured'][0]['drafter']}" in out


def test_a_chain_is_no_deeper_than_the_drafter_reaches():
    costs = Costs(1, 64, dict.fromkeys((1, 9, 17), 1.0), {1: (0.1, 0.0)})
    assert [_chain(costs, 0.9, deepest)["depth"] for deepest in (4, 8, 16)] == [4, 8, 16]


def test_what_is_switched_off_is_told(capsys, questions, tiny_target_folder, tmp_path):
    folder, file = shutil.copytree(tiny_target_folder, tmp_path / "target"), tmp_path / "report.json"
    config = GenerationConfig.from_pretrained(folder)
    config.update(repetition_penalty=1.05)
    config.save_pretrained(folder)
    main(short(questions, "--target", str(folder), "--output", str(file), "--drafter", "[ngram]"))
    assert "switched off of the target's generation_config: repetition_penalty=1.05" in capsys.readouterr().err
    assert json.loads(file.read_text())["settings"]["switched_off"] == {"repetition_penalty": 1.05}


def test_of_a_predictor(capsys, questions, tiny_target, tiny_target_folder, tmp_path):
    torch.manual_seed(0)
    network: ShapePredictor = predictor(torch.float32)
    export(network, tmp_path / "made", tiny_target.identity, {})
    file = tmp_path / "report.json"
    made = ["--predictor", str(tmp_path / "made"), "--target", str(tiny_target_folder), "--temperature", "1"]
    out = run(capsys, questions, *made, "--output", str(file))
    assert "rank 2" in out and "(its own)" in out
    assert "Far below what it should accept. Fits best: " in out  # it is untrained
    report = json.loads(file.read_text())
    assert report["doctor"]["cause"] in out and report["doctor"]["forced"] == report["doctor"]["decoded"]
    rates = [one["rate"] for one in report["plans"]]
    assert rates == sorted(rates, reverse=True) and report["own"] in report["plans"]
    assert all(sum(ranks) <= 1.0 + 1e-9 for ranks in report["acceptance"])


def test_answers_that_end_with_the_prefill(capsys, questions, tiny_target, tiny_target_folder, tmp_path, monkeypatch):
    """There is no draft to learn from: neither acceptance nor plans."""
    torch.manual_seed(0)
    export(predictor(torch.float32), tmp_path / "made", tiny_target.identity, {})
    target = Target.load(tiny_target_folder)
    target.model.generation_config.eos_token_id = list(range(target.vocab_size))
    target.model.generation_config.save_pretrained(tmp_path / "ends")
    for file in tiny_target_folder.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / "ends" / file.name).symlink_to(file)
    made = ["--predictor", str(tmp_path / "made"), "--target", str(tmp_path / "ends"), "--drafter", "[]"]
    run(capsys, questions, *made, "--output", str(tmp_path / "report.json"))
    assert not {"acceptance", "plans"} & json.loads((tmp_path / "report.json").read_text()).keys()


def test_which_drafter_suits_the_task(capsys, questions, tiny_target, tiny_target_folder, tmp_path):
    pack, file = tmp_path / "task.pack", tmp_path / "report.json"
    Pack(tiny_target.identity, (Recipe((5, 6), (7,), 3),), 1, 1).save(pack)
    own = ["--target", str(tiny_target_folder), "--output", str(file)]
    run(capsys, questions, *own, "--predictor", str(tiny_target_folder), "--pack", str(pack))
    measured = {one["drafter"]: one for one in json.loads(file.read_text())["measured"]}
    assert measured.keys() == {
        "none", "ngram", "suffix", "lookahead", "model", "recipes", "suffix+model", "suffix+recipes"
    }  # fmt: skip
    assert measured["model"]["acceptance_length"] > 1
    run(capsys, questions, *own, "--predictor", str(tiny_target_folder), "--drafter", "[shape,suffix+model]")
    assert {one["drafter"] for one in json.loads(file.read_text())["measured"]} == {"none", "shape", "suffix+model"}
    out = run(capsys, questions, *own, "--drafter", "[onedecode]")
    assert "onedecode" in out and "lookahead" not in out
    assert "measured on these prompts" not in run(capsys, questions, *own, "--drafter", "[]")


def test_drafters_are_measured_in_the_batch_that_was_asked_for(
    capsys, questions, tiny_target_folder, tmp_path, monkeypatch, refused
):
    groups, record = [], Bench.record
    monkeypatch.setattr(
        Bench,
        "record",
        lambda self, group, *rest, **more: groups.append(len(group)) or record(self, group, *rest, **more),
    )
    own = ["--target", str(tiny_target_folder), "--drafter", "[ngram,suffix]"]
    assert "measured on these prompts" in run(capsys, questions, *own, "--batch_size", "2")
    assert groups == [2]  # the third prompt does not fit
    said = refused(main, *short(questions, *own, "--batch_size", "3"))
    assert "batch_size 3 cannot be filled with the 2 prompts of prompts.jsonl that fit" in said
    with open(questions, "a") as file:
        file.write(json.dumps({"prompt": "One more"}) + "\n")
    report = tmp_path / "report.json"
    out = " ".join(run(capsys, questions, *own, "--batch_size", "2", "--output", str(report)).split())
    asked = json.loads(report.read_text())["prompts"]
    assert asked == {"given": 4, "measured": 2, "reasons": [
        "a prompt and 8 new tokens exceed the target's 256 positions", "it fills no batch of 2"
    ]}  # fmt: skip
    assert f"2 of 4 prompts measured ({'; '.join(asked['reasons'])})" in out and "speed-up (range)" in out


def test_what_does_not_belong_together_is_said_at_once(questions, tiny_target, tiny_target_folder, tmp_path, refused):
    pack = tmp_path / "task.pack"
    Pack(replace(tiny_target.identity, tokenizer_hash="others"), (Recipe((5, 6), (7,), 3),), 1, 1).save(pack)
    broken = tmp_path / "broken.pack"
    broken.write_bytes(pack.read_bytes()[:-9])
    torch.manual_seed(0)
    for name, changes in (("other-tokens", {"tokenizer_hash": "others"}), ("other-target", {"hidden_size": 48})):
        export(predictor(torch.float32), tmp_path / name, replace(tiny_target.identity, **changes), {})
    for arguments, sentence in (
        (["--pack", str(pack)], "has other tokens; compile one for it"),
        (["--pack", str(broken)], f"pack {broken} cannot be read"),
        (["--predictor", str(tmp_path / "other-tokens")], "tokenizer"),
        (["--predictor", str(tmp_path / "other-target")], "48"),
    ):
        assert sentence in refused(main, *short(questions, "--target", str(tiny_target_folder), *arguments))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--target", "/nowhere"], "target /nowhere cannot be loaded"),
        (["--target", "/nowhere", "--drafter", "[suffix+sufix]"], "drafter 'sufix' is unknown; did you mean suffix?"),
        (["--batch_size", "0"], "batch_size is 0; give at least 1"),
        (["--max_new_tokens", "1"], "max_new_tokens is 1; give at least 2"),
        (["--batch_size", "16"], "batch_size 16 cannot be filled with limit 12 prompts; raise the limit"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(refused, arguments, sentence):
    assert sentence in refused(main, *arguments)


def test_what_a_drafter_needs_is_told_before_anything_is_loaded(refused):
    given = ["--target", "/nowhere", "--drafter"]
    assert "drafter 'recipes' needs a pack; give --pack FILE" in refused(main, *given, "suffix+recipes", alone=True)
    assert "drafter 'eagle3' needs a predictor; give --predictor DIR" in refused(main, *given, "eagle3", alone=True)


def test_prompts_that_share_an_id_are_refused_before_anything_is_loaded(refused, tmp_path):
    file = write_rows(tmp_path / "twice.jsonl", {"id": 7, "prompt": "Hello"}, {"id": 7, "prompt": "Hi"})
    said = refused(main, "--target", "/nowhere", "--prompts", str(file))
    assert "twice.jsonl: two prompts share the id 7;" in said


def test_the_report_has_its_place_before_anything_is_loaded(capsys, questions, tiny_target_folder, tmp_path, refused):
    file = tmp_path / "made" / "report.json"
    run(capsys, questions, "--target", str(tiny_target_folder), "--drafter", "[]", "--output", str(file))
    assert json.loads(file.read_text())["measured"] == []
    for wrong, said in (
        (tmp_path, "is a folder; give a file"),
        (file / "below.json", "report.json is a file; give a folder"),
    ):
        assert said in refused(main, "--target", "/nowhere", "--output", str(wrong))


def test_prompts_that_do_not_fit(refused, tiny_target_folder, tmp_path):
    file = write_rows(tmp_path / "long.jsonl", {"prompt": "x" * 400})
    said = refused(main, "--target", str(tiny_target_folder), "--prompts", str(file))
    assert "fit into the 256 positions" in said
