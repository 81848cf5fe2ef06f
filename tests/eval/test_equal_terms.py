"""The comparison of drafters on equal terms: from the search to the tables in a document, on the tiny target."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean

import pytest
import yaml
from helpers import ROOT

from eval import equal_terms as program
from eval.ablate import parse
from eval.equal_terms import RESULTS, main, rendered
from shape.errors import DataError

OPTIONS = ["--seeds=[0]", "--prompts=[bench,kinds]", "--targets=[tiny]", "--steps=2", "--minutes=1", "--jobs=1"]


@pytest.fixture
def tiny(file, tmp_path, monkeypatch) -> Path:
    """The ablation with a search, as the program's only target."""
    values = yaml.safe_load(file.read_text())
    talks = Path(values["common"]["data"]).read_text().replace("say", "tell").splitlines()
    (tmp_path / "validation.jsonl").write_text("\n".join(talks[:6]) + "\n")
    values["common"] |= {"validation_data": str(tmp_path / "validation.jsonl")}
    values["variants"]["root"]["predictor"]["feature_layers"] = [0, -1]  # which the others do not read
    values["search"] = {"over": {"training.learning_rate": [0.001, 0.01]}, "candidates": 2, "rounds": 1}
    values["measure"] |= {"methods": ["autoregressive"], "temperatures": [0], "fit": 1, "limit": 1}
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    prompts = Path(values["measure"]["prompts"]).read_text()
    monkeypatch.setattr(program, "TARGETS", {"tiny": {}})
    monkeypatch.setattr(
        program, "prepare", lambda *_: [Path(name).write_text(prompts) for name in ("tiny-bench.jsonl", "kinds.jsonl")]
    )
    return path


@pytest.mark.slow  # a dozen trainings, and as many measurements
def test_from_search_to_tables(tiny, tmp_path, launched, capsys):
    arguments = [f"--file={tiny}", f"--work={tmp_path / 'work'}", f"--results={tmp_path / 'results/equal'}", *OPTIONS]
    main([*arguments, "--methods=[path 1.0,root]", "--comparisons=[time,no-rise]", "--estimate=true"])
    said = capsys.readouterr().out
    assert "tiny: search" in said and "known once the search has run" in said and not (tmp_path / "results").exists()
    main([*arguments, "--methods=[path 1.0]", "--comparisons=[no-rise]"])
    trials = [told for told in launched if "search" in told[0]]
    assert len(trials) == 2 and len(launched) == 3  # two settings, and one training for both sets of prompts
    main([*arguments, "--methods=[path 1.0,root]", "--comparisons=[time,positions,no-rise]"])
    assert len(launched) == 3 + 2 + 1 + 2 + 2  # of root its search and one, and both in the others
    main([*arguments, "--methods=[path 1.0,root]", "--comparisons=[time,positions,no-rise]"])
    assert len(launched) == 10
    kept = {str(path.relative_to(tmp_path / "results")) for path in (tmp_path / "results").rglob("*") if path.is_file()}
    comparisons = [f"equal/tiny/{one}/{two}" for one in ("time", "positions", "no-rise") for two in ("bench", "kinds")]
    assert kept == {
        "equal/tiny/search/search.json",
        *(f"{folder}/ablation.{end}" for folder in comparisons for end in ("json", "md")),
    }
    found = json.loads((tmp_path / "results/equal/tiny/positions/kinds/ablation.json").read_text())
    assert {by_seed["0"]["steps"] for by_seed in found["trained"].values()} == {2}
    assert found["title"].endswith("from the same positions: target tiny, prompts kinds") and str(tmp_path) not in (
        json.dumps({**found, "environment": None}).replace(str(tmp_path / "validation.jsonl"), "")
    )
    main([*arguments, "--methods=[path 1.0,root]", "--estimate=true"])
    assert "tiny: positions" in capsys.readouterr().out
    fresh = [argument.replace("/work", "/elsewhere") for argument in arguments]
    main([*fresh, "--methods=[root]", "--comparisons=[positions]"])  # the results know what the search found
    assert len(launched) == 11 and "search" not in launched[-1][0]
    search = json.loads((tmp_path / "results/equal/tiny/search/search.json").read_text())
    assert search["found"].keys() == {"path 1.0", "root"}

    document = tmp_path / "page.md"
    begin, end = "<!-- equal-terms:begin {} -->", "<!-- equal-terms:end -->"
    document.write_text(f"a\n{begin.format('equal/tiny/time')}old{end}\n{begin.format('absent')}{end}\nz\n")
    main([f"--render={document}", f"--results={tmp_path / 'results/equal'}"])
    text = document.read_text()
    assert text.startswith("a\n") and text.endswith("z\n") and "old" not in text and "Not measured yet." in text
    header, _, plain, first, second = (line for line in text.splitlines() if line.startswith("|"))
    assert "accepted at 1, 2, ..., bench" in header and "speed-up (95 %), kinds" in header
    assert plain.startswith("| autoregressive | –") and first.startswith("| path 1.0 |") and "| root |" in second
    assert "learning_rate" in first or "as configured" in first
    assert "| acceptance length in one shape for all |" in header
    assert "8 deep, or as deep as a method predicts, 3 wide, 16 nodes" in text
    main([f"--render={document}", f"--results={tmp_path / 'results/equal'}"])
    assert document.read_text() == text


def test_a_comparison_of_other_options_is_not_taken_for_this_one(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base, place, done = parse([str(file), "--only=[affine,root]"]), Path("runs/tiny/time/bench"), []

    def ablate(asked):
        done.append(asked)
        place.mkdir(parents=True, exist_ok=True)
        (place / "ablation.json").write_text(json.dumps({"options": asdict(asked)}))

    monkeypatch.setattr(program, "ablate", ablate)
    narrower = {**base.variants, "root": {"predictor": {"intermediate_size": 8}}}
    unasked = {**base.variants, "path 1.0": {"predictor": {"intermediate_size": 8}}}
    for found, minutes, times in (
        (base, 3.0, 1),
        (base, 3.0, 1),
        (replace(base, variants=unasked), 3.0, 1),
        (base, 8.0, 2),
        (replace(base, variants=narrower), 8.0, 3),
        (replace(base, only=["affine"]), 8.0, 4),
        (replace(base, only=["affine"], seeds=[0]), 8.0, 5),
    ):
        program.compare(found, place, *program.training(program.EqualTermsOptions(minutes=minutes), "time"))
        assert len(done) == times
    assert done[1].common["training"]["max_minutes"] == 8 and done[1].title.startswith("Tiny, in the same time")


def test_documents_say_what_was_measured():
    page, readme = ((ROOT / name).read_text() for name in ("docs/research/baselines.md", "README.md"))
    assert rendered(page, RESULTS.parent) == page, "run python -m eval.equal_terms --render docs/research/baselines.md"
    told = readme.partition("**Compared with other drafters.**")[2].partition("**Compared with other engines.**")[0]
    found = [json.loads((RESULTS / f"shipped/{one}/bench/ablation.json").read_text()) for one in ("time", "positions")]
    time, positions = (
        {
            name: f"{mean(one['record']['validation']['value'] for one in seeds.values()):.2f}"
            for name, seeds in each["trained"].items()
        }
        for each in found
    )
    assert all(length in told for each in (time, positions) for length in each.values())


def test_wrong_requests(tmp_path, monkeypatch, refused):
    monkeypatch.delenv("SHAPE_SHARED", raising=False)
    for given, message in (
        (["--targets=[llama]"], "llama is unknown; choose among shipped, chat-12m"),
        (["--comparisons=[speed]"], "speed is unknown"),
        (["--methods=[lookahead]", "--estimate=true"], "variant lookahead is not in the file"),
        (["--targets=[chat-12m]"], "name their folder by SHAPE_SHARED"),
    ):
        assert message in refused(main, f"--work={tmp_path}", *given)
    with pytest.raises(DataError, match="no <!-- equal-terms:begin"):
        rendered("nothing", tmp_path)


def test_no_dialogue_serves_twice(shared, tmp_path, monkeypatch):
    """Of the second target: what is learned from, validated on, and measured."""
    monkeypatch.chdir(tmp_path)
    program.prepare(program.EqualTermsOptions(), shared)
    learned, validated, measured = (
        {row["id"]: row["conversations"] for row in program.read(Path(f"{name}.jsonl"))}
        for name in ("train", "validation", "chat-12m-bench")
    )
    assert len(learned) > 1000 and len(validated) == len(measured) == 48
    assert not {*learned} & {*validated, *measured} and not {*validated} & {*measured}
    assert {turns[-1]["from"] for turns in measured.values()} == {"human"}
    assert {turns[-1]["from"] for turns in validated.values()} == {"gpt"}
    assert len(program.read(Path("public.jsonl"))) == 48 and Path("chat-12m/config.json").exists()
