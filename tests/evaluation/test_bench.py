"""The bench command: files, tables, several predictors, continuing, documents, errors."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import ROOT, save_untrained, write_rows
from transformers import GenerationConfig

from shape.cli.bench import main, parser
from shape.data import backends
from shape.errors import ConfigError, DataError
from shape.evaluation.bench import load_methods, named_predictors
from shape.evaluation.options import BenchOptions
from shape.evaluation.render import render
from shape.evaluation.speed import Bench


@pytest.fixture(scope="module")
def predictors(tiny_target, tiny_target_folder, tmp_path_factory) -> list[str]:
    """Two untrained predictors of the tiny target."""
    return [
        save_untrained(tiny_target, tiny_target_folder, tmp_path_factory.mktemp("predictor"), seed, num_steps)
        for seed, num_steps in enumerate((2, 3))
    ]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "few.jsonl"
    rows = [
        {"id": "a", "category": "one", "turns": ["Hello"]},
        {"id": "b", "category": "two", "turns": ["Hi", "Again"]},
        {"id": "c", "category": "two", "prompt": "Count"},
    ]
    return write_rows(path, *rows)


@pytest.fixture
def arguments(predictors, prompts, tmp_path) -> list[str]:
    return [
        *("--predictor", predictors[0], "--prompts", str(prompts), "--output", str(tmp_path / "out")),
        *("--max_new_tokens", "8", "--warmup", "1"),
    ]


def test_measures_and_writes(arguments, tmp_path, capsys):
    main(arguments)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(results["summary"]) == ["transformers", "autoregressive", "ngram", "shape"]
    assert results["summary"]["shape"]["equal_autoregressive"] == results["summary"]["shape"]["answers"] == 4
    assert results["schema_version"] == 3 and results["environment"]["versions"]["torch"] == torch.__version__
    table = (tmp_path / "out" / "results.md").read_text()
    assert "| shape |" in table and "| two |" in table
    assert not (tmp_path / "out" / "records.jsonl").exists()
    assert "tokens/s" in capsys.readouterr().out


def test_limit_methods_and_several_predictors(arguments, predictors, tmp_path):
    asked = ["--methods", "[autoregressive,transformers-lookup,shape]"]
    main([*arguments, "--predictor", f"other={predictors[1]}", "--limit", "1", *asked])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(results["summary"]) == ["autoregressive", "transformers-lookup", "shape", "other"]
    assert [record["id"] for record in results["records"]] == ["a"]


def test_other_acceptance_rules_stand_in_the_name(arguments, tmp_path, refused):
    asked = ["autoregressive", "shape", "shape@rejection", "shape@traversal", "shape@trs-lossy", "ngram@typical-lossy"]
    arguments += ["--limit", "1", "--temperature", "1", "--tree.width", "2"]
    main([*arguments, "--methods", f"[{','.join(asked)},ngram@match]", "--typical_lossy.epsilon", "0.2"])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(results["summary"]) == [*asked, "ngram"]
    assert "acceptance rejection" in results["settings"]["methods"]["shape@rejection"]
    assert "typical-lossy(epsilon=0.2, delta=0.3)" in results["settings"]["methods"]["ngram@typical-lossy"]
    for extra, sentence in (
        (["--methods", "[autoregressive,shape@typical]"], "acceptance rule 'typical' is unknown"),
        (
            ["--methods", "[autoregressive,shape@traversal]", "--tree.nodes", "3"],
            "acceptance 'traversal' is biased where",
        ),
        (["--trs_lossy.k", "0"], "trs_lossy.k is 0; give at least 1"),
    ):
        said = refused(main, *arguments, *extra, "--output", str(tmp_path / "other"))
        assert said.startswith(f"error: {sentence}")


def test_so_many_turns_are_answered_at_most(arguments, tmp_path):
    asked = [*arguments, "--methods", "[autoregressive,ngram]", "--max_turns"]
    for turns, counts in (("1", [1, 1, 1]), ("2", [1, 2, 1])):
        main([*asked, turns, "--output", str(tmp_path / turns)])
        records = json.loads((tmp_path / turns / "results.json").read_text())["records"]
        assert [record["id"] for record in records] == ["a", "b", "c"]
        for method in ("autoregressive", "ngram"):
            assert [record["tallies"][method]["answers"] for record in records] == counts


def test_the_tree_is_the_one_asked_for(arguments, tmp_path):
    main([*arguments, "--limit", "1", "--methods", "[autoregressive,shape]", "--tree.width", "1", "--tree.depth", "2"])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert "depth=2, width=1" in results["settings"]["methods"]["shape"]


def test_suites_and_the_assisted_generation_of_transformers(arguments, prompts, tiny_target_folder, tmp_path, refused):
    arguments += ["--limit", "1", "--methods", "[transformers,autoregressive,transformers-assisted]"]
    assert "transformers-assisted needs a smaller language model" in refused(main, *arguments)
    both = ["--prompts", f"[{prompts},kinds]"]
    main([*arguments, *both, "--predictor", f"same={tiny_target_folder}"])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [record["id"] for record in results["records"]] == ["a", "factual-0"]
    assisted = results["summary"]["transformers-assisted by same"]
    assert assisted["equal_transformers"] == assisted["answers"] == 2
    assert results["settings"]["prompts"] == "few.jsonl+kinds.jsonl"


def test_an_interrupted_measurement_continues(arguments, tmp_path, monkeypatch, refused):
    """The finished prompt is not measured again, and no other measurement may take the folder meanwhile."""
    arguments = [*arguments, "--methods", "[autoregressive,ngram]"]
    original = Bench.record
    done = []

    def record(self, prompts, *rest, **options):
        if prompts[0].id == "b" and len(done) == 1:
            raise KeyboardInterrupt
        done.append(prompts[0].id)
        return original(self, prompts, *rest, **options)

    monkeypatch.setattr(Bench, "record", record)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 130
    refused(main, *arguments, "--seed", "1")
    done.append("b is next")
    main(arguments)
    assert done == ["a", "b is next", "b", "c"]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [entry["id"] for entry in results["records"]] == ["a", "b", "c"]


def test_finished_results_of_other_settings_are_not_overwritten(arguments, tmp_path, monkeypatch, refused):
    arguments = [*arguments, "--limit", "1", "--methods", "[autoregressive,ngram]", "--label", "First"]
    main([*arguments, "--temperature", "[0,1]"])
    before = {path: path.read_text() for path in tmp_path.rglob("results.json")}
    (tmp_path / "out" / "results.json").write_text(before[tmp_path / "out/t1-b1/results.json"])
    with monkeypatch.context() as patch:
        patch.setattr(Bench, "record", lambda *_, **__: pytest.fail("measured before it is refused"))
        for more, place in ((["--temperature", "0"], "out"), (["--temperature", "[2,1]", "--seed", "1"], "out/t1-b1")):
            said = refused(main, *arguments, *more)
            assert f"{tmp_path / place}/results.json holds a measurement with other" in said
    assert {path: path.read_text() for path in before} == before
    main([*arguments, "--temperature", "1", "--label", "Again"])
    assert json.loads((tmp_path / "out" / "results.json").read_text())["label"] == "Again"


def test_several_temperatures_batches_and_contexts(arguments, tmp_path, monkeypatch, capsys):
    """One folder each; interrupted in the last, those before are taken over."""
    arguments = [*arguments, "--methods", "[transformers,autoregressive,shape]", "--temperature", "[0,1]"]
    arguments += ["--batch_size", "[1,3]", "--context_length", "[64]"]
    original, done = Bench.record, []

    def record(self, prompts, *rest, **options):
        done.append("+".join(prompt.id for prompt in prompts))
        if len(done) == 8:
            raise KeyboardInterrupt
        return original(self, prompts, *rest, **options)

    monkeypatch.setattr(Bench, "record", record)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 130
    main(arguments)
    assert done == [*"abc", "a+b+c", *"abc", "a+b+c", "a+b+c"]
    assert not list(tmp_path.rglob("records.jsonl"))
    folders = sorted(path.parent.name for path in tmp_path.rglob("results.json"))
    assert folders == ["t0-b1-c64", "t0-b3-c64", "t1-b1-c64", "t1-b3-c64"]
    for folder in folders:
        results = json.loads((tmp_path / "out" / folder / "results.json").read_text())
        assert results["settings"]["batch"] == int(folder[4]) and results["settings"]["context_length"] == 64
        line = results["summary"]["shape"]
        assert line["answers"] == line["equal_autoregressive"] == 4
        assert results["settings"]["temperature"] == float(folder[1])
    assert "temperature 1, batch 3, contexts of 64" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (["--max_turns", "0"], "max_turns is 0; give at least 1"),
        (["--temperature", "-1"], "temperature is -1.0; give 0 or more"),
        (["--temperature", "[0,-1]"], "temperature is -1.0; give 0 or more"),
        (["--context_length", "0"], "context_length is 0; give at least 1"),
        (["--context_length", "[64,0]"], "context_length is 0; give at least 1"),
        (["--batch_size", "9"], "batch_size 9 cannot be filled with the 3 prompts of few.jsonl"),
        (["--batch_size", "[1,9]"], "batch_size 9 cannot be filled with the 3 prompts of few.jsonl"),
        (["--methods", "[shape]"], "no baseline"),
        (["--methods", "[ngram,shape@rejection]"], "no baseline"),
        (
            ["--batch_size", "2", "--methods", "[autoregressive,transformers-lookup]"],
            "one prompt at a time for transformers-lookup",
        ),
        (["--batch_size", "[1,2]", "--methods", "[autoregressive,transformers-lookup]"], "one prompt at a time for"),
        (["--batch_size", "[1,2]", "--methods", "[transformers,transformers-assisted]"], "one prompt at a time for"),
    ],
)
def test_every_setting_is_checked_before_anything_is_loaded(prompts, tmp_path, refused, extra, sentence):
    given = ["--target", "/nowhere", "--prompts", str(prompts), "--output", str(tmp_path / "out")]
    assert sentence in refused(main, *given, *extra) and not (tmp_path / "out").exists()


def test_sampling_is_the_same_for_every_drafter(arguments, tmp_path):
    main([*arguments, "--temperature", "1"])
    summary = json.loads((tmp_path / "out" / "results.json").read_text())["summary"]
    assert summary["shape"]["equal_autoregressive"] == summary["ngram"]["equal_autoregressive"] == 4
    assert summary["autoregressive"]["equal_transformers"] is None


def test_mistyped_drafters_are_told_before_a_target_is_loaded(prompts, tmp_path, refused):
    given = ["--target", "/nowhere", "--prompts", str(prompts), "--output", str(tmp_path / "out")]
    said = refused(main, *given, "--methods", "[autoregressive,suffix+sufix@match]")
    assert "drafter 'sufix' is unknown; did you mean suffix?" in said


def test_a_file_may_name_one_predictor(prompts, tmp_path, refused):
    (tmp_path / "bench.yaml").write_text(f"predictor: {tmp_path / 'nowhere'}\n")
    given = ["--config", str(tmp_path / "bench.yaml"), "--prompts", str(prompts), "--output", str(tmp_path / "out")]
    assert f"{tmp_path / 'nowhere'} cannot be read" in refused(main, *given)


def test_names_of_predictors():
    assert named_predictors(["here/x"]) == {"shape": "here/x"}
    assert named_predictors(["a=x", "y", "b=z=1"]) == {"a": "x", "shape": "y", "b": "z=1"}
    for taken in (["x", "y"], ["ngram=x"], ["transformers-lookup=x"]):
        with pytest.raises(ConfigError, match="is taken; give each its own"):
            named_predictors(taken)


def test_the_results_file_is_as_documented(arguments, tmp_path):
    main([*arguments, "--methods", "[autoregressive,shape]"])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    page = (ROOT / "docs/guides/evaluate.md").read_text()
    section = page[page.index("## The results file") : page.index("## How to read a table")]
    named = set(re.findall(r"`([^`]+)`", section))
    assert results.keys() <= named, "a field is not described"
    line = results["summary"]["shape"]
    parts = (line, line["speed_up"], results["records"][0], results["vllm"]["shape"])
    known = results.keys() | {"methods", "shape.evaluation.results.SpeedResults.from_json", "results.json"}.union(
        *parts
    )
    assert named <= known, "a field is described that is not there"
    assert re.search(rf"now {results['schema_version']}\b", section)


def test_renders_into_a_document(arguments, tmp_path, capsys, refused):
    main([*arguments, "--limit", "1", "--label", "Tiny [shape]"])
    assert "Tiny [shape]" in capsys.readouterr().out  # no markup on the screen
    document = tmp_path / "doc.md"
    document.write_text("before\n<!-- results:begin -->\nold\n<!-- results:end -->\nafter\n")
    main(["--render", str(tmp_path / "out"), str(document)])
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text and "### Tiny [shape]" in text
    main(["--render", str(tmp_path / "out"), str(document)])
    assert document.read_text() == text
    document.write_text("<!-- results:begin short out:ngram,shape -->\n<!-- results:end -->\n")
    main(["--render", str(tmp_path), str(document)])
    lines = document.read_text().splitlines()
    assert lines[2].startswith("| method | tokens/s | speed-up") and [line[:9] for line in lines[4:6]] == [
        "| ngram |",
        "| shape |",
    ]
    for kind in ("short", "across"):
        document.write_text(f"<!-- results:begin {kind} out:magic -->\n<!-- results:end -->\n")
        assert "has no method magic" in refused(main, "--render", str(tmp_path), str(document))
    text = render("<!-- results:begin across out out -->\n<!-- results:end -->\n", tmp_path).splitlines()
    assert text[2] == "| speed-up (acceptance length) |  |  |" and len(text) > 7  # nothing in which the two differ
    assert re.fullmatch(
        r"\| shape \| (\d+\.\d\dx \(\d\.\d\d\)) \| \1 \|", next(one for one in text if "| shape" in one)
    )
    with pytest.raises(DataError, match="has no lines"):
        render("nothing here", tmp_path / "out")


@pytest.mark.parametrize(
    ("results", "document"),
    [
        ("eval/results", "README.md"),
        ("eval/results/shipped", "docs/results/shipped.md"),
        ("eval/results", "eval/results/README.md"),
        ("eval/results", "docs/research/drafters.md"),
    ],
)
def test_documents_show_the_committed_results(results, document):
    """After new results: python -m shape.bench --render RESULTS DOCUMENT, for each."""
    text = (ROOT / document).read_text()
    assert render(text, ROOT / results) == text


def test_methods_without_any_named(tiny_target_folder, capsys):
    """The quickstart pair, or a target alone with drafters that need no training."""
    usual = ["transformers", "autoregressive", "ngram"]
    assert list(load_methods(BenchOptions())[1]) == [*usual, "shape"]
    assert list(load_methods(BenchOptions(predictor=[], methods=["autoregressive", "shape"]))[1]) == [usual[1], "shape"]
    target, methods = load_methods(BenchOptions(target=str(tiny_target_folder)))
    assert list(methods) == [*usual, "suffix"] and f"target {target.name}: float32" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="drafter 'shape' needs a predictor"):
        load_methods(BenchOptions(target=str(tiny_target_folder), methods=["autoregressive", "shape"]))


def test_what_is_switched_off_is_announced(tiny_target_folder, tmp_path, monkeypatch):
    folder, said = shutil.copytree(tiny_target_folder, tmp_path / "target"), []
    config = GenerationConfig.from_pretrained(folder)
    config.update(top_p=0.8, do_sample=True)
    config.save_pretrained(folder)
    monkeypatch.setattr(backends, "announce", lambda target, more="": said.append(more))
    for temperature in (0.0, [0.0, 1.0]):
        load_methods(BenchOptions(target=str(folder), temperature=temperature))
    assert said == ["", "; switched off of the target's generation_config: top_p=0.8"]


def test_by_default_the_shipped_pair_is_measured_greedily():
    values = parser().parse_args([])
    assert values.temperature == 0 and values.predictor is None and values.prompts is None


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (["--output", "TWICE", "--predictor", "other=/nowhere"], "twice.jsonl is a file; give a folder"),
        (["--limit", "0"], "limit 0 leaves no prompt"),
        (["--prompts", "TWICE", "--predictor", "other=/nowhere"], "twice.jsonl: two prompts share the id 7;"),
        (["--prompts", "absent.jsonl"], "absent.jsonl"),
        (["--methods", "[autoregressive,magic]", "--target", "TARGET"], "drafter 'magic' is unknown"),
        (["--methods", "[autoregressive,suffix+eagle3]"], "method eagle3 is a kind of predictor; the method shape"),
        (["--methods", "[autoregressive@typical-lossy,shape]"], "method autoregressive takes no acceptance rule"),
        (["--max_new_tokens", "4000"], "no prompt can be measured"),
        (["--temperature", "[]"], "temperature [] holds no value, or one twice"),
        (["--batch_size", "[1,-1]"], "batch_size is -1; give at least 1"),
        (["--warmup", "-1"], "warmup is -1; give 0 or more"),
        (["--temperature", ".nan"], "temperature is nan; give 0 or more"),
        (["--batch_size", "[2,2]"], "holds no value, or one twice"),
        (["--context_length", "[64,250]"], "contexts of 250 tokens and"),
        (["--target", "/nowhere"], "target /nowhere cannot be loaded"),
        (["--predictor", "other=/nowhere"], "predictor /nowhere cannot be read"),
        (["--render", "EMPTY", "README.md"], "no results.json"),
    ],
)
def test_errors_are_one_sentence_and_status_2(refused, arguments, extra, sentence, tiny_target_folder, tmp_path):
    twice = tmp_path / "twice.jsonl"
    twice.write_text('{"id": 7, "prompt": "Hello"}\n' * 2)
    places = {"TARGET": str(tiny_target_folder), "EMPTY": str(tmp_path), "TWICE": str(twice)}
    assert sentence in refused(main, *arguments, *(places.get(argument, argument) for argument in extra))
