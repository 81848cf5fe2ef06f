"""The paper's tables: each from results that are there, and from what is measured where they are missing."""

import json
from functools import partial

import pytest
from helpers import ROOT

from eval import tables
from eval.all_results import AllResults
from eval.paper_tables import NUMBERS, Table, is_missing, render, tables_for
from eval.tables import RUNS, TablesOptions, run
from shape import bundled
from shape.errors import ConfigError

COMMITTED = ROOT / "eval" / "results"


@pytest.fixture(scope="module")
def committed() -> AllResults:
    """Some of it: every interval is bootstrapped anew."""
    found = AllResults()
    for below in ("analysis/shipped", "shipped/float32-t1", "rules/chain", "batches", "ablations"):
        found.add(COMMITTED / below, f"{below}/")
    return found


def cells(table: Table) -> dict[str, list[str]]:
    """All rows by their first cell."""
    return {row[0]: row[1:] for part in table.parts for row in part.rows}


def test_every_table_of_the_paper_has_a_maker_and_a_way_to_be_measured():
    assert NUMBERS == ("1", "9", "2", "3", "4", "5", "10", "6", "7", "8", "11", "12", "13", "G.3")
    measured = {number for _, wanted in RUNS.values() for number in wanted}
    assert measured == set(NUMBERS) - {"G.3"}  # which every training and every predictor tells by itself
    for number in NUMBERS:
        assert number in tables_for(AllResults(), [number])[0].numbers and is_missing(AllResults(), number)


def test_ablations_that_tables_are_made_of_have_a_configuration():
    named = {run.keywords["name"] for run, _ in RUNS.values() if isinstance(run, partial) and "name" in run.keywords}
    assert named == {"refinement", "trees"}
    assert all(bundled.path("configs", "ablations", f"{name}.yaml").exists() for name in named)


def test_figures_are_those_of_the_results(committed):
    by_lag = json.loads((COMMITTED / "analysis/shipped/analysis.json").read_text())["similarity"]
    table = tables_for(committed, ["9"])[0]
    assert table.numbers == ["1", "9"] and "0.38–0.55 for Vicuna" in table.paper
    part = next(part for part in table.parts if "analysis/shipped" in part.notes[-1])
    assert [row[3] for row in part.rows] == [f"{row['mean']:.2f}" for row in by_lag]

    speed = tables_for(committed, ["2"])[0]
    path, results = next(item for item in committed.speed.items() if item[0] == "shipped/float32-t1/results.json")
    part = next(part for part in speed.parts if any(path in note for note in part.notes))
    row = next(row for row in part.rows if row[:3] == ["paper", "1", results.settings["dtype"]])
    task = part.header.index("json")
    assert row[task] == f"{results.summarise('paper', 'json').speed_up.value:.2f}x"
    assert not any("rules/" in note for part in speed.parts for note in part.notes)  # another question
    assert any("eagle" in row[0] for part in speed.parts for row in part.rows)

    batches = tables_for(committed, ["3"])[0]
    cases = {
        (case["method"], case["batch"]): case["tokens"] / case["seconds"]
        for case in json.loads((COMMITTED / "batches/shipped/efficiency.json").read_text())["cases"]
    }
    base = max(cases["autoregressive", 4], cases["transformers", 4])
    assert cells(batches)["shape"][-4] == f"{cases['shape', 4] / base:.2f}x"

    record = json.loads((COMMITTED / "ablations/refinement/ablation.json").read_text())
    line = next(line for line in record["lines"] if line["label"] == "transport, row 64")
    value = line["at"]["0.0"]["summary"]["acceptance_length"]["value"]
    assert cells(tables_for(committed, ["6"])[0])["transport, row 64"][0].startswith(f"{value:.2f} (")


def test_the_grid_is_read_off_the_names_of_trees():
    record = json.loads((COMMITTED / "ablations/refinement/ablation.json").read_text())
    lines = [
        {**line, "label": f"k = {k}, N = {n}"}
        for line, (k, n) in zip(record["lines"], [(1, 1), (2, 1), (1, 2)], strict=False)
    ]
    table = tables_for(AllResults(ablation={"grid": {**record, "lines": lines}}), ["7"])[0]
    speed = [line["at"]["0.0"]["summary"]["speed_up"]["value"] for line in lines]
    rows = cells(table)
    assert [rows["k = 1"][n].partition(" ")[0] for n in (0, 1)] == [f"{speed[0]:.2f}x", f"{speed[2]:.2f}x"]
    assert rows["k = 2"][1] == "–" and table.parts[0].header == ["", "N = 1", "N = 2"]
    assert rows["k = 1, N = 2"][1] == f"{lines[2]['at']['0.0']['step_ms']['verify']:.2f}"


@pytest.fixture
def options(tiny_predictor_folder, tiny_target_folder, tmp_path):
    """Everything small."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hello", "category": "a"}\n{"prompt": "Good day to you", "category": "b"}\n')

    def make(**more) -> TablesOptions:
        return TablesOptions(
            predictor=[f"tiny={tiny_predictor_folder}"],
            target=str(tiny_target_folder),
            prompts=str(prompts),
            results=str(tmp_path / "results"),
            output=str(tmp_path / "out"),
            limit=2,
            max_new_tokens=8,
            dtype="float32",
            run=True,
            **more,
        )

    return make


def test_what_is_missing_is_measured_once(options, tmp_path, monkeypatch):
    numbers = [2, 3, 12, 13, "G.3"]
    made_now = run(options(tables=numbers))
    found = {table.numbers[0]: table for table in made_now}
    assert list(found) == ["2", "3", "12", "13", "G.3"]
    assert found["3"].parts[0].header[3:] == ["batch 1", "batch 2"]
    assert {"tiny", "ngram", "lookahead"} == {row[0] for row in found["2"].parts[0].rows}
    assert [row[0] for row in found["12"].parts[0].rows] == ["1", "2"]
    strategies = cells(found["13"])
    assert "greedy (autoregressive, T = 0)" in strategies and "beam search (beam, T = 0)" in strategies
    assert strategies["greedy (autoregressive, T = 0)"][2] == "1.00x"
    minutes = cells(found["G.3"])
    assert next(iter(minutes.values()))[1:] == ["1.5", "3", "7", "0.25"]
    out = tmp_path / "out"
    text = (out / "tables.md").read_text()
    assert text == render(json.loads((out / "tables.json").read_text()))
    assert "no encoder was named" in text and "1.92 / 1.75 / 1.61 / 1.52 / 1.41x" in text

    def never(*arguments, **options):
        raise AssertionError("measured again")

    monkeypatch.setattr(tables, "RUNS", {name: (never, wanted) for name, (_, wanted) in RUNS.items()})
    assert run(options(tables=numbers)) == made_now


def test_a_part_that_fails_leaves_the_others(options, monkeypatch):
    def fails(*arguments):
        raise ConfigError("nothing fits")

    monkeypatch.setitem(RUNS, "batches", (fails, ("3",)))
    batches, by_lookahead = run(options(tables=[3, 11]))
    assert batches.absent == ["it could not be measured: nothing fits."] and not batches.parts
    assert [row[0] for row in by_lookahead.parts[0].rows] == ["1", "2", "3"]
    assert by_lookahead.parts[0].header == ["lookahead", "all", "a", "b"]


def test_without_run_it_is_said_how_to_get_a_table(options, tmp_path):
    (tmp_path / "results").mkdir()
    given = options(tables=["8"])
    given.run = False
    (table,) = run(given)
    assert not table.parts and "--run true --tables '[8]'" in table.absent[0]
    given.results = str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="there is no folder"):
        run(given)
    with pytest.raises(ConfigError, match=r"table 14 is unknown; give some of 1, 9"):
        run(options(tables=[14]))


def test_what_lm_evaluation_harness_found_is_shown(tmp_path):
    record = {
        "results": {"mmlu": {"alias": "mmlu", "acc,none": 0.25, "acc_stderr,none": 0.004}},
        "config": {"model": "shape", "model_args": "predictor=DIR", "limit": None},
        "model_name": "DIR",
        "lm_eval_version": "0.4.13",
    }
    (tmp_path / "results_2026.json").write_text(json.dumps(record))
    found = AllResults()
    found.add(tmp_path)
    (table,) = tables_for(found, ["10"])
    assert (
        table.parts[0].rows == [["mmlu", "acc", "0.250 ± 0.004"]]
        and "model shape (predictor=DIR)" in table.parts[0].notes[0]
    )
    assert not any("MMLU" in reason for reason in table.absent)


def test_committed_tables_are_what_their_json_says():
    folder = COMMITTED / "tables"
    assert (folder / "tables.md").read_text() == render(json.loads((folder / "tables.json").read_text()))


def test_numbers_on_the_command_line(tmp_path, refused):
    said = refused(tables.main, "--tables", "[2,13,G.3]", "--results", str(tmp_path / "nowhere"))
    assert "there is no folder" in said
