"""The paper's tables, as measured on one's own target and data, each beside what the paper says.

    python -m eval.tables --results RESULTS --output tables       # from results that are there
    python -m eval.tables --run true --target T --predictor P --prompts F --data D --output tables
    python -m eval.tables --tables '[2,8,G.3]' --run true --output tables

Reads every `results.json` (`shape.bench`), `efficiency.json`, `ablation.json`, `analysis.json`, `quality.json`,
`latency.json` and `results_*.json` (lm-evaluation-harness) below the folder of results, and below `runs/` in the output
folder, where `--run true` puts what it measures itself: the parts that no result covers, and no others, so that the
same command goes on after an interruption. Writes `tables.md` and `tables.json`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from eval import ablate, analyze, commands, latency, quality
from eval.all_results import AllResults
from eval.paper_tables import LOOKAHEAD, NUMBERS, Table, is_missing, render, tables_for
from shape.errors import ConfigError, ShapeError
from shape.evaluation import efficiency
from shape.evaluation.bench import bench, named_predictors
from shape.evaluation.environment import Environment
from shape.evaluation.options import BenchOptions, EfficiencyOptions, several
from shape.evaluation.prompts import chosen_prompts
from shape.evaluation.speed import SpeedSetting, measure_in
from shape.generation.decoder import ShapeDecoder
from shape.generation.loading import load_predictor
from shape.target.loading import of_pair, of_predictor, of_target
from shape.target.options import AnsweringOptions, PairOptions, PlacedOptions, TargetOptions

SCHEMA_VERSION = 1
BATCHES = (1, 2, 4, 8, 16, 24)
LOOKAHEADS = (1, 2, 3)


@dataclass
class TablesOptions(AnsweringOptions):
    """Which tables, from what.

    Args:
        tables: numbers of the paper's; default: all.
        results: folder that is searched for results.
        output: folder for tables.md and tables.json, and for `runs/`, where missing parts are measured.
        run: measure what no result covers.
        predictor: a trained predictor, or several as a list, each DIR or NAME=DIR; the first one is looked into, all
            are compared and described.
        target: path or hub id; default: the first predictor's own.
        prompts: JSON lines of prompts; default: the bundled bench split.
        data: conversations with the target's own answers, for tables 1, 6, 7 and 9; default: those that ship.
        targets: of Table 8, of several sizes; default: the target.
        encoder: compares texts, in tables 4 and 12.
        limit: prompts of each measurement, evenly chosen.
        max_new_tokens: longest answer.
    """

    tables: list[str | int] | None = None
    results: str = "results"
    output: str = "tables-results"
    run: bool = False
    predictor: list[str] | str = "quickstart-shape"
    target: str | None = None
    prompts: str | None = None
    data: str | None = None
    targets: list[str] | None = None
    encoder: str | None = None
    limit: int = 24
    max_new_tokens: int = 96


Run = Callable[[TablesOptions, Path], object]


def _first(options: TablesOptions) -> str:
    """The predictor that is looked into."""
    return next(iter(named_predictors(several(options.predictor)).values()))


def _loading(options: TablesOptions, kind: type[TargetOptions] = PairOptions) -> dict[str, Any]:
    """How models are loaded, for the options of another command."""
    return {entry.name: getattr(options, entry.name) for entry in fields(kind)}


def _measured(options: TablesOptions) -> dict[str, Any]:
    """What is measured, for the commands that answer prompts."""
    names = ("target", "prompts", "chat_template_kwargs", "limit", "max_new_tokens")
    return _loading(options) | {name: getattr(options, name) for name in names}


def _analysis(options: TablesOptions, folder: Path) -> object:
    return analyze.run(
        analyze.AnalyzeOptions(
            output=str(folder),
            target=options.target,
            predictor=_first(options),
            data=options.data,
            prompts=None if options.data else options.prompts,
            chat_template_kwargs=options.chat_template_kwargs,
            **_loading(options),
        )
    )


def _bench(options: TablesOptions, folder: Path) -> None:
    for temperature in (0.0, 1.0):
        output = folder / f"t{temperature:g}"
        if not (output / "results.json").exists():
            bench(
                BenchOptions(
                    output=str(output),
                    predictor=several(options.predictor),
                    methods=["transformers", "autoregressive", "ngram", "lookahead", "shape"],
                    temperature=temperature,
                    dtype=options.dtype,
                    **_measured(options),
                )
            )


def _batches(options: TablesOptions, folder: Path) -> object:
    return efficiency.run(
        EfficiencyOptions(
            output=str(folder),
            predictor=_first(options),
            dtype=[options.dtype or "bfloat16"],
            temperature=0.0,
            batch_size=[size for size in BATCHES if size <= options.limit],
            **_measured(options),
        )
    )


def _quality(options: TablesOptions, folder: Path, **more: Any) -> object:
    return quality.run(
        quality.QualityOptions(
            output=str(folder),
            predictor=_first(options),
            encoder=options.encoder,
            dtype=options.dtype,
            **_measured(options),
            **more,
        )
    )


def _ablation(options: TablesOptions, folder: Path, name: str) -> object:
    given = {"target": options.target, "data": options.data, "measure.prompts": options.prompts}
    arguments = [f"--{key}={value}" for key, value in given.items() if value is not None]
    if options.chat_template_kwargs:
        arguments.append(f"--chat_template_kwargs={json.dumps(options.chat_template_kwargs)}")
    loading = {key: value for key, value in _loading(options, TargetOptions).items() if value}
    if (place := of_target(options).get("device_map")) is not None:
        arguments.append(f"--measure.device_map={place}")
    overrides = json.dumps([f"{key}={json.dumps(value)}" for key, value in loading.items()])
    return ablate.ablate(ablate.parse([name, f"--output={folder}", f"--override={overrides}", *arguments]))


def _latency(options: TablesOptions, folder: Path) -> object:
    known = load_predictor(_first(options), **of_predictor(options)).config.target_identity
    target: str | None = options.target or (known["name"] if known else None)
    if target is None:
        raise ConfigError(f"predictor {_first(options)} does not say which target it was trained for; give it")
    return latency.run(
        latency.LatencyOptions(
            output=str(folder),
            targets=options.targets or [target],
            dtype=options.dtype,
            **_loading(options, PlacedOptions),
        )
    )


def _lookaheads(options: TablesOptions, folder: Path) -> object:
    decoder = ShapeDecoder.from_pretrained(
        predictor=_first(options), target=options.target, dtype=options.dtype, **of_pair(options)
    )
    drafter, _ = commands.trained(decoder, _first(options))
    assert drafter.tree is not None  # a trained network's
    prompts, source = chosen_prompts(options.prompts, options.limit, options.chat_template_kwargs)
    shorter = {f"{LOOKAHEAD}{depth}": drafter.with_tree(replace(drafter.tree, depth=depth)) for depth in LOOKAHEADS}
    return measure_in(
        folder,
        decoder.target,
        {"transformers": "transformers", "autoregressive": None, **shorter},
        prompts,
        SpeedSetting(options.max_new_tokens, fall_back=False),
        source=source,
    )


# Folder below runs/, what measures, and the tables that it is for.
RUNS: dict[str, tuple[Run, tuple[str, ...]]] = {
    "analysis": (_analysis, ("1", "9")),
    "speed": (_bench, ("2",)),
    "batches": (_batches, ("3",)),
    "quality": (_quality, ("4", "5", "10", "12")),
    "refinement": (partial(_ablation, name="refinement"), ("6",)),
    "grid": (partial(_ablation, name="trees"), ("7",)),
    "latency": (_latency, ("8",)),
    "lookahead": (_lookaheads, ("11",)),
    "strategies": (
        partial(_quality, methods=["autoregressive", "shape", "trs-lossy", "beam"], timed=True),
        ("13",),
    ),
}


def collect(options: TablesOptions) -> AllResults:
    """Everything that is there."""
    found = AllResults()
    results, runs = Path(options.results), Path(options.output) / "runs"
    found.add(results)
    if not runs.resolve().is_relative_to(results.resolve()):
        found.add(runs, "runs/")
    for name, folder in named_predictors(several(options.predictor)).items():
        network = load_predictor(folder, **of_predictor(options))
        if network.config.training:
            described = {"training": network.config.training, "parameters": network.num_parameters()}
            found.trained[f"{name} ({Path(folder).name})"] = described
    return found


def run(options: TablesOptions) -> list[Table]:
    """Makes the tables, measuring before what is missing where that is asked for, and writes them."""
    numbers = list(NUMBERS) if options.tables is None else [str(number) for number in options.tables]
    if unknown := [number for number in numbers if number not in NUMBERS]:
        raise ConfigError(f"table {unknown[0]} is unknown; give some of {', '.join(NUMBERS)}")
    if not options.run and not Path(options.results).is_dir():
        raise ConfigError(f"there is no folder {options.results} of results; give another, or measure with --run true")
    environment = Environment.capture(torch.device("cpu"))
    failed: dict[str, str] = {}
    found = collect(options)
    for name, (measure, wanted) in RUNS.items() if options.run else ():
        if any(number in numbers and is_missing(found, number) for number in wanted):
            print(f"measuring tables {', '.join(wanted)} in {Path(options.output) / 'runs' / name}", flush=True)
            try:
                measure(options, Path(options.output) / "runs" / name)
            except ShapeError as error:  # one table less, and the others still
                failed |= dict.fromkeys(wanted, str(error))
            found = collect(options)
    tables = [_complete(table, found, options, failed) for table in tables_for(found, numbers)]
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "schema_version": SCHEMA_VERSION,
        "environment": asdict(environment),
        "tables": [asdict(table) for table in tables],
    }
    (folder / "tables.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "tables.md").write_text(render(record), encoding="utf-8")
    return tables


def _complete(table: Table, found: AllResults, options: TablesOptions, failed: Mapping[str, str]) -> Table:
    """With a word on what is missing, and how to get it."""
    missing = [number for number in table.numbers if is_missing(found, number)]
    if not missing:
        return table
    if missing[0] in failed:
        return replace(table, absent=[*table.absent, f"it could not be measured: {failed[missing[0]]}."])
    again = (
        f"`python -m eval.tables --run true --tables '[{missing[0]}]' --predictor DIR --output "
        f"{options.output}` measures it."
    )
    return replace(table, absent=[*table.absent, again])


def make(options: TablesOptions) -> None:
    tables = run(options)
    count = sum(bool(table.parts) for table in tables)
    Console(highlight=False).print(
        f"{count} of {len(tables)} tables have figures; written to {options.output}/tables.md and tables.json"
    )


main = commands.program(make, TablesOptions)


if __name__ == "__main__":
    main()
