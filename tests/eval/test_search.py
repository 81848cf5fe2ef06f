"""The search before training: what it tries, in how much time, by what it chooses, and that it sees no other prompt."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from helpers import predictor

from eval.ablate import main, parse
from eval.ablation import search as program
from eval.ablation.options import SearchOptions
from eval.ablation.results import Trained
from eval.ablation.search import SHAPES, candidates, search, shaped
from shape.drafters import ModelDrafter, TrainedDrafter
from shape.errors import CheckpointError, ConfigError
from shape.evaluation.speed import Bench
from shape.training.validation import DecodingValidation

OVER = {"training.learning_rate": [0.001, 0.002, 0.004], "predictor.num_steps": [2, 3], "predictor.dropout": [0.0]}


def test_candidates_share_out_the_values():
    found = candidates(SearchOptions(OVER, candidates=7), None)
    assert found[0] == {} and 2 < len(found) <= 7 and all(found.count(one) == 1 for one in found)
    assert found == candidates(SearchOptions(OVER, candidates=7), None)
    drawn = candidates(SearchOptions({"a": [1, 2, 3], "b": list(range(6))}, candidates=7), None)[1:]
    assert Counter(one["a"] for one in drawn) == {1: 2, 2: 2, 3: 2} and {one["b"] for one in drawn} == set(range(6))
    assert len(candidates(SearchOptions(OVER, candidates=9), {"predictor.num_layers": [1, 2]})) == 3


@pytest.fixture
def searched(file, tmp_path) -> Path:
    """The ablation with a search, and validation of its own."""
    values = yaml.safe_load(file.read_text())
    talks = (
        Path(values["common"]["data"]).read_text().replace("say", "tell").replace('"id": "c', '"id": "v').splitlines()
    )
    (tmp_path / "validation.jsonl").write_text("\n".join(talks[:6]) + "\n")
    values["common"] |= {"validation_data": str(tmp_path / "validation.jsonl")}
    values["search"] = {"over": OVER, "seconds": 60.0, "candidates": 5, "tree": {"depth": 3, "width": 2}}
    values["variants"]["affine"]["search"] = {"predictor.refinement_dim": [4, 8]}
    path = tmp_path / "searched.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


@pytest.fixture
def rounds(monkeypatch):
    """Trainings of a search that are not carried out: a learning rate of 0.004 is best, more time is worse, and of
    "root" the first candidate fails.
    """
    seen = []

    def train_all(runs, jobs, needed=True):
        assert not needed
        seen.append(runs)
        found = {}
        for run in runs:
            value = 100 * run.options.training.learning_rate - (run.options.training.max_minutes or 0)
            record = {"validation": {"prompts": 2, "value": value, "low": value, "high": value, "step": 3}}
            if run.variant != "root 0" or len(seen) > 1:
                found[run.variant] = {run.seed: Trained(1, 3, 1.0, 7.0, record, {})}
        return found

    monkeypatch.setattr(program, "train_all", train_all)
    return seen


def test_a_search_chooses_by_validation_in_equal_time(searched, tmp_path, rounds):
    options = parse([str(searched), f"--output={tmp_path}"])
    found = search(options)
    assert found.search is None and [run.seed for run in rounds[0]] == [0] * len(rounds[0])
    for variant in ("path 1.0", "affine", "root"):  # the same time for each, in both rounds
        spent = [[r.options.training.max_minutes for r in runs if r.variant.startswith(variant)] for runs in rounds]
        assert [60 * sum(each) for each in spent] == pytest.approx([30, 30]) and len(spent[1]) == 2 <= len(spent[0])
    assert {run.options.tree.depth for runs in rounds for run in runs} == {3}
    settled = found.variants["path 1.0"]
    assert settled["training"] == {"learning_rate": 0.004} and settled["tree"]["width"] == 2
    assert found.variants["affine"]["predictor"].keys() <= {"refinement", "refinement_dim"}
    kept = json.loads((tmp_path / "search/search.json").read_text())
    assert kept["asked"]["seconds"] == 60 and kept["found"]["root"]["training.learning_rate"] == 0.004
    tried = kept["tried"]["root"]
    assert {one["round"] for one in tried} == {1, 2} and {} not in [one["options"] for one in tried]
    by_round = [one["value"] for one in tried if one["round"] == 1]
    assert by_round == sorted(by_round, reverse=True) and all(one["positions_per_second"] == 7.0 for one in tried)


def test_what_a_search_has_answered_is_not_searched_for_again(searched, tmp_path, rounds):
    first = search(parse([str(searched), f"--output={tmp_path}", "--only=[path 1.0,root]"]))
    assert len(rounds) == 2
    again = search(parse([str(searched), f"--output={tmp_path}"]))
    assert {run.variant.split(" ")[0] for runs in rounds[2:] for run in runs} == {"affine"} and len(rounds) == 4
    assert all(again.variants[name] == first.variants[name] for name in ("path 1.0", "root"))
    kept = json.loads((tmp_path / "search/search.json").read_text())
    assert kept["tried"].keys() == kept["found"].keys() == {"path 1.0", "root", "affine"}
    search(parse([str(searched), f"--output={tmp_path}", "--only=[root]"]))
    assert len(rounds) == 4 and json.loads((tmp_path / "search/search.json").read_text()) == kept
    search(parse([str(searched), f"--output={tmp_path}", "--only=[root]", "--search.candidates=4"]))  # another search
    assert len(rounds) == 6


def test_a_variant_with_other_values_is_searched_for_again(searched, tmp_path, rounds):
    """Where the earlier search is taken along: in the same folder its trainings would be others."""
    first = parse([str(searched), f"--output={tmp_path / 'first'}", "--only=[root]"])
    options = parse([str(searched), f"--output={tmp_path / 'second'}", "--only=[root]"])
    search(first)
    shutil.copytree(tmp_path / "first/search", tmp_path / "second/search")
    search(options)
    assert len(rounds) == 2
    values = [0.001, 0.03]
    root = options.variants["root"] or {}
    more = {**options.variants, "root": {**root, "search": {"training.learning_rate": values}}}
    search(replace(options, variants=more))
    assert len(rounds) == 4 and any(run.options.training.learning_rate == 0.03 for run in rounds[2])


def test_a_search_by_steps_asks_no_clock(searched, tmp_path, rounds):
    options = parse([str(searched), f"--output={tmp_path}", "--search.steps=40"])
    search(options)
    for variant, first in (("path 1.0", 5), ("affine", 3), ("root", 5)):
        spent = [[r.options.training.steps for r in runs if r.variant.startswith(variant)] for runs in rounds]
        assert spent == [[20 // first] * first, [10, 10]]
    assert {run.options.training.max_minutes for runs in rounds for run in runs} == {None}
    kept = json.loads((tmp_path / "search/search.json").read_text())
    assert kept["tried"]["root"][0]["given"] == {"training.steps": 4, "training.max_minutes": None}


def test_a_variant_without_any_finished_training_ends_the_search(searched, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "train_all", lambda *_, **__: {})
    with pytest.raises(CheckpointError, match=r"no training of path 1\.0 came to its end"):
        search(parse([str(searched), f"--output={tmp_path}"]))


@pytest.mark.slow  # two searches
def test_measured_prompts_choose_nothing(searched, tmp_path, launched, monkeypatch, refused):
    """Whatever is decoded before the last measurement, in validation and for shapes of drafts, is of validation."""
    decoded, shapes = [], []
    validate, record = DecodingValidation._validate, Bench.record

    def validating(self, trainer, trained):
        texts = [trained.target.tokenizer.decode(prompt) for prompt in self.prompts]
        decoded.extend(texts)
        return validate(self, trainer, trained)

    def recording(self, prompts, *rest, **options):
        shapes.append([prompt.id for prompt in prompts])
        return record(self, prompts, *rest, **options)

    monkeypatch.setattr(DecodingValidation, "_validate", validating)
    monkeypatch.setattr(Bench, "record", recording)
    arguments = [str(searched), f"--output={tmp_path}", "--only=[root]", "--seeds=[0]", "--measure.fit=2"]
    arguments += ["--search.candidates=2", "--search.rounds=1"]
    main([*arguments, "--measure.temperatures=[0]"])
    assert decoded and all("tell" in text and "say" not in text for text in decoded)
    assert shapes == [["v0"], ["v4"], ["0"], ["2"]]
    found = json.loads((tmp_path / "ablation.json").read_text())
    drafts = found["lines"][0]["at"]["0.0"]["drafts"]
    rates = list(drafts.values())
    assert drafts.keys() <= SHAPES.keys() and rates == sorted(rates, reverse=True) and len(rates) > 1
    best = SHAPES[next(iter(drafts))]
    assert f"depth={best.depth}, width={best.width}" in found["settings"]["0.0"]["methods"]["root"]
    assert "draft, T = 0" in (tmp_path / "ablation.md").read_text()
    count, trainings = len(shapes), len(launched)
    main([*arguments, "--measure.temperatures=[0]"])  # what is finished is not done again
    assert len(launched) == trainings == 2 + 1
    assert shapes[count:] == [["0"], ["2"]]
    copied = tmp_path / "measured.jsonl"
    copied.write_text((tmp_path / "validation.jsonl").read_text().splitlines()[2] + "\n")
    said = refused(main, *arguments, f"--measure.prompts={copied}")
    assert "is measured too, and must not choose anything" in said


def test_a_search_needs_prompts_of_its_own(file, tmp_path, refused):
    said = refused(main, str(file), f"--output={tmp_path}", "--measure.fit=2")
    assert "give common.validation_data" in said


def test_shapes_that_a_drafter_can_have(tiny_target):
    parallel = TrainedDrafter(predictor(torch.float32, step_mode="parallel", token_conditioning="root", num_steps=4))
    found = {label: shaped(parallel, shape) for label, shape in SHAPES.items()}
    assert all((other is None) == (SHAPES[label].depth > 4) for label, other in found.items())
    model = ModelDrafter(tiny_target)
    lengths = {label: other.length.length for label, shape in SHAPES.items() if (other := shaped(model, shape))}
    assert lengths == {f"chain {depth}": depth for depth in (2, 4, 6, 8)} and str(model.length) != str(8)


@pytest.mark.parametrize("wrong", [{"seconds": 0}, {"over": {"training.learning_rate": []}}])
def test_wrong_searches(wrong):
    with pytest.raises(ConfigError, match="search needs"):
        SearchOptions(**wrong).check()
    with pytest.raises(ConfigError, match=r"search\.steps is 11; give a step"):
        SearchOptions(OVER, steps=11).check()
