"""SHAPE beside other drafters on equal terms, on two targets and three sets of prompts.

    python -m eval.equal_terms --work WORK --estimate true                 # what it takes
    SHAPE_SHARED=SHARED python -m eval.equal_terms --work WORK             # all of it
    python -m eval.equal_terms --work WORK --targets '[shipped]' --comparisons '[time]' --prompts '[bench]'
    python -m eval.equal_terms --render docs/research/baselines.md         # the tables between a document's markers

First a search, in the same seconds or steps for every method, finds learning rate, draft tokens and draft vocabulary by
the acceptance length on validation prompts (`configs/ablations/baselines.yaml`, `eval.ablation.search`). Then all are
trained in the same *time*, with the same *positions*, and, at a constant learning rate with averaged weights, until
that length has *no rise* any more; each is given the shape of draft that decodes the validation prompts fastest. Only
then they meet the prompts that are reported: `bench` (like the training text), `kinds` (unlike it), and `public` ones.

Of the second target, chat-12m, and the public prompts SHAPE_SHARED names the folder; neither ships. Finished parts are
kept in the work folder, so the same command goes on, with more methods too. In the end tables go to the results folder.
"""

import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import chdir
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from eval import commands
from eval.ablate import ablate, parse
from eval.ablation.options import AblationOptions, SearchOptions
from eval.ablation.plan import merged_options
from eval.ablation.results import where_trained
from eval.ablation.search import SHAPES, search
from shape import bundled
from shape.data.conversations import evenly
from shape.drafters import TreeShape
from shape.errors import ConfigError, DataError
from shape.evaluation.environment import Environment
from shape.evaluation.estimates import Estimate
from shape.evaluation.markdown import DASH, markdown, show
from shape.evaluation.render import rewritten

RESULTS = Path(__file__).resolve().parent / "results/ablations/equal-terms"
EVERY = 8  # of 12,200 dialogues are learned from, and others validated and measured on
HELD_OUT = 96
SUITES = ("mt_bench", "alpaca", "gsm8k", "humaneval", "qa", "summarization")
PROMPTS = ("bench", "kinds", "public")
_NOT_YET = "Not measured yet."
# What each target changes in the file's common options.
TARGETS: dict[str, dict[str, Any]] = {
    "shipped": {},
    "chat-12m": {
        "target": "chat-12m",
        "data": "train.jsonl",
        "validation_data": "validation.jsonl",
        "regeneration": {"max_new_tokens": 128, "batch_size": 32},
    },
}


@dataclass
class EqualTermsOptions:
    """What to compare.

    Args:
        work: folder for everything that is made on the way.
        targets: shipped, chat-12m.
        methods: variants of the file; default: all.
        comparisons: time, positions, no-rise.
        prompts: bench, kinds, public.
        seeds: one training of each method with each; default: the file's.
        search_seconds: of training in the search, for each method; default: the file's.
        search_steps: of 1,024 positions in the search, for each method, instead of seconds.
        minutes: of each training in the comparison by time.
        steps: of 1,024 positions in the comparison by positions; ten times as many at most where validation ends it.
        file: the ablation's, below configs/ablations or a path.
        jobs: trainings at once.
        estimate: say how long it takes, and do nothing.
        results: folder that the tables go to, and what the searches tried; what is there already is not searched for
            again. Default: eval/results/ablations/equal-terms.
        render: a document whose tables are written anew from the results, and nothing else.
    """

    work: str = "equal-terms"
    targets: list[str] = field(default_factory=lambda: list(TARGETS))
    methods: list[str] | None = None
    comparisons: list[str] = field(default_factory=lambda: ["time", "positions", "no-rise"])
    prompts: list[str] = field(default_factory=lambda: list(PROMPTS))
    seeds: list[int] | None = None
    search_seconds: float | None = None
    search_steps: int | None = None
    minutes: float = 3.0
    steps: int = 400
    file: str = "baselines"
    jobs: int = 2
    estimate: bool = False
    results: str | None = None
    render: str | None = None


def run(options: EqualTermsOptions) -> None:
    results, work = Path(options.results or RESULTS).resolve(), Path(options.work)
    if options.render is not None:
        document = Path(options.render)
        document.write_text(rendered(document.read_text(encoding="utf-8"), results.parent), encoding="utf-8")
        return
    for given, known in (
        (options.targets, TARGETS),
        (options.comparisons, EqualTermsOptions().comparisons),
        (options.prompts, PROMPTS),
    ):
        if unknown := [one for one in given if one not in known]:
            raise ConfigError(f"{unknown[0]} is unknown; choose among {', '.join(known)}")
    file = options.file if not Path(options.file).exists() else str(Path(options.file).resolve())
    work.mkdir(parents=True, exist_ok=True)
    shared = Path(os.environ["SHAPE_SHARED"]).resolve() if "SHAPE_SHARED" in os.environ else None
    with chdir(work):  # so that no record holds a path of this machine
        if not options.estimate:
            prepare(options, shared)
        for target in options.targets:
            base = ablation_options(parse([file]), options, target)
            restore_search(results / target, Path(base.output))
            if options.estimate:
                print("\n".join(estimate(base, options, target)))
                continue
            found = search(base)
            for comparison in options.comparisons:
                for prompts in options.prompts:
                    compare(found, Path(base.output, comparison, prompts), *training(options, comparison))
        if not options.estimate:  # not before, so that what is measured is measured from a clean checkout
            shutil.copytree("runs", results, ignore=_but_tables, dirs_exist_ok=True)


def restore_search(results: Path, output: Path) -> None:
    """Take what a search tried elsewhere into the work folder, which may be a new one."""
    known, kept = (folder / "search/search.json" for folder in (results, output))
    if known.exists() and not kept.exists():
        kept.parent.mkdir(parents=True)
        shutil.copy(known, kept)


def training(options: EqualTermsOptions, comparison: str) -> tuple[str, dict[str, Any]]:
    """Title and common options of a comparison."""
    steps = options.steps
    whole = {"steps": steps, "max_minutes": None}
    patient = {**whole, "steps": 10 * steps, "decay": "none", "ema": 0.99}
    found: dict[str, tuple[str, dict[str, Any]]] = {
        "time": ("in the same time", {"training": {"max_minutes": options.minutes}}),
        "positions": ("from the same positions", {"training": whole}),
        "no-rise": (
            "until validation does not rise",
            {"training": patient, "validation": {"every": max(steps // 4, 1), "patience": 5}},
        ),
    }
    return found[comparison]


def ablation_options(base: AblationOptions, options: EqualTermsOptions, target: str) -> AblationOptions:
    """The file's options, as they are asked for, for a target."""
    chosen = base.search or SearchOptions()
    seconds = chosen.seconds if options.search_seconds is None else options.search_seconds
    steps = chosen.steps if options.search_steps is None else options.search_steps
    return replace(
        base,
        common=merged_options(base.common, TARGETS[target]),
        search=replace(chosen, seconds=seconds, steps=steps),
        seeds=base.seeds if options.seeds is None else options.seeds,
        only=options.methods,
        jobs=options.jobs,
        features=base.features or f"runs/{target}/features",
        output=f"runs/{target}",
        measure=replace(base.measure, prompts=f"{target}-bench.jsonl"),
    )


def compare(found: AblationOptions, place: Path, title: str, common: dict[str, Any]) -> None:
    """Train as far as that is missing, and measure, unless the same methods, options and seeds have been already."""
    kept, target, prompts = place / "ablation.json", place.parts[1], place.name
    asked = replace(
        found,
        title=f"{found.title.partition(',')[0]}, {title}: target {target}, prompts {prompts}",
        common=merged_options(found.common, common),
        output=str(place),
        trainings=str(place.parent),
        measure=replace(found.measure, prompts=f"{target}-bench.jsonl" if prompts == "bench" else f"{prompts}.jsonl"),
    )
    before = json.loads(kept.read_text(encoding="utf-8"))["options"] if kept.exists() else None
    if before is None or _compared(before) != _compared(asdict(asked)):
        ablate(asked)


def _compared(options: Mapping[str, Any]) -> Any:
    """What of an ablation's options decides what is compared, as JSON has it."""
    variants = {name: what for name, what in options["variants"].items() if name in (options["only"] or (name,))}
    measure = {name: value for name, value in options["measure"].items() if name != "prompts"}  # of another folder
    others = [options[name] for name in ("base", "common", "seeds", "target", "jobs")]
    return json.loads(json.dumps([list(variants), variants, measure, *others]))


def _but_tables(folder: str, names: Sequence[str]) -> list[str]:
    """Of what lies in the work folder, what is no result."""
    files = ("ablation.json", "ablation.md", "search.json")
    kept = (*files, *TARGETS, "search", *EqualTermsOptions().comparisons, *PROMPTS)
    return [name for name in names if name not in kept]


# ------------------------------------------------------------------------------------------------- what it takes

_STARTS = 20  # seconds of a training beside its clock: the process, validation, export
_ANSWERS = 0.3  # seconds of an answer, of all methods and examined prompts alike


def estimate(base: AblationOptions, options: EqualTermsOptions, target: str) -> list[str]:
    """Hours of each part, where all is still to be done."""
    methods, seeds, chosen = list(base.chosen()), len(base.seeds), base.search or SearchOptions()
    trials = chosen.candidates + (chosen.rounds - 1) * max(2, -(-chosen.candidates // 3))
    kept = Path(base.output, "search/search.json")
    tried = json.loads(kept.read_text(encoding="utf-8"))["tried"] if kept.exists() else {}
    left = sum(name not in tried for name in methods)
    seconds = {} if chosen.steps else {"search": left * (chosen.seconds + trials * _STARTS) / base.jobs}
    rates = {name: tried[name][0]["positions_per_second"] for name in methods if name in tried}
    known = len(rates) == len(methods)
    positions = [1024 * options.steps / rate for rate in rates.values() if rate]
    for comparison in options.comparisons:
        each = {
            "time": 60 * options.minutes * len(methods),
            "positions": sum(positions),
            "no-rise": 10 * sum(positions),
        }
        if comparison == "time" or known:
            seconds[comparison] = seeds * (each[comparison] + len(methods) * _STARTS) / base.jobs
    answers = base.measure.limit * (len(methods) * seeds + len(base.measure.methods)) * len(base.measure.temperatures)
    seconds["measuring"] = len(options.comparisons) * len(options.prompts) * answers * _ANSWERS
    shapes = len(methods) * base.measure.fit * len(SHAPES) * len(base.measure.temperatures)
    seconds["shapes of drafts"] = len(options.comparisons) * shapes * _ANSWERS
    lines = [f"{target}: {part} {taken / 3600:.1f} h" for part, taken in seconds.items()]
    unknown = f"{'a search by steps, ' if chosen.steps else ''}positions and no-rise"
    note = "at most; it ends by itself" if known else f"{unknown} are known once the search has run"
    return [*lines, f"{target}: {sum(seconds.values()) / 3600:.1f} h in all ({note})"]


# ------------------------------------------------------------------------------------------------- data


def prepare(options: EqualTermsOptions, shared: Path | None) -> None:
    """Prompts, and training dialogues of the second target, in the working folder."""
    shutil.copy(bundled.path("data", "bench.jsonl"), "shipped-bench.jsonl")
    shutil.copy(bundled.path("data", "kinds.jsonl"), "kinds.jsonl")
    if "public" not in options.prompts and "chat-12m" not in options.targets:
        return
    if shared is None:
        raise ConfigError(
            "chat-12m and public prompts do not ship: name their folder by SHAPE_SHARED, or leave them out"
        )
    write(
        Path("public.jsonl"),
        (
            {"id": f"{suite}-{row['id']}", "category": suite, "turns": row["turns"][:1]}
            for suite in SUITES
            for row in read(shared / f"prompts/{suite}.jsonl")[::10]
        ),
    )
    if "chat-12m" not in options.targets:
        return
    rows = read(shared / "data/sgd_train.jsonl.gz")
    held_out = [row for row in rows if row["id"].startswith("sgd-dev-")]
    chosen = evenly(held_out, HELD_OUT)
    write(Path("train.jsonl"), [row for row in rows if not row["id"].startswith("sgd-dev-")][::EVERY])
    write(Path("chat-12m-bench.jsonl"), (up_to(row, index, 1) for index, row in enumerate(chosen[::2])))
    write(Path("validation.jsonl"), (up_to(row, index, 2) for index, row in enumerate(chosen[1::2])))
    Path("chat-12m").unlink(missing_ok=True)
    Path("chat-12m").symlink_to(shared / "targets/chat-12m")


def read(path: Path) -> list[dict[str, Any]]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def up_to(row: dict[str, Any], index: int, more: int) -> dict[str, Any]:
    """The dialogue up to a question, in rotation, as the last ones are all good-byes; `more` = 2: to its answer."""
    turns = row["conversations"]
    questions = [place for place, turn in enumerate(turns[:-1]) if turn["from"] == "human"]
    return {"id": row["id"], "conversations": turns[: questions[index % len(questions)] + more]}


# ------------------------------------------------------------------------------------------------- tables


def rendered(document: str, results: Path) -> str:
    """The document with every region between `<!-- equal-terms:begin FOLDER -->` and `<!-- equal-terms:end -->` written
    anew: an ablation of that folder, or those of several sets of prompts in folders of it, side by side.
    """
    return from_ablations(document, "equal-terms", results, table)


def from_ablations(
    document: str, region: str, results: Path, table: Callable[[Mapping[str, dict[str, Any]], str], str]
) -> str:
    """The document with every such region written anew, of the ablations below the folder that it names.

    Args:
        table: of these ablations by the names of their folders, at a temperature as they name it.
    """

    def tables(words: list[str]) -> str:
        if not words:
            raise DataError(f"the document has <!-- {region}:begin --> without a folder; name one behind begin")
        paths = sorted((results / words[0]).rglob("ablation.json"))
        found = {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}
        return "\n\n".join(table(found, at) for at in next(iter(found.values()))["others"]) if found else _NOT_YET

    return rewritten(document, region, tables)


def table(found: Mapping[str, dict[str, Any]], at: str) -> str:
    """Ablations of the same trainings on several sets of prompts, in one table, and what they were measured on.

    Args:
        at: the temperature, as they name it.
    """
    names = sorted(found, key=lambda name: PROMPTS.index(name) if name in PROMPTS else -1)
    first = found[names[0]]
    same = ("seeds", "trained")  # a part of the methods may be all that is measured on the others yet
    names = [name for name in names if all(list(found[name][key]) == list(first[key]) for key in same)]
    searched = any(line["at"][at].get("drafts") for line in first["lines"])
    header = ["method", "parameters", "positions/s", "steps", *(_SEARCHED if searched else [])]
    for name in names:
        header += [f"{part}{f', {name}' if len(names) > 1 else ''}" for part in _COLUMNS]
    rows = [
        [
            name,
            *[DASH] * (3 + len(_SEARCHED) * searched),
            *(cell for each in names for cell in _cells(found[each]["others"][at][name])),
        ]
        for name in first["others"][at]
    ]
    for number, line in enumerate(first["lines"]):
        trained = list(first["trained"][line["variant"]].values())
        rates = [one["positions_per_second"] for one in trained if one["positions_per_second"]]
        steps = sorted({one["steps"] for one in trained})
        settled = []
        if searched:
            lengths = lengths_alike(trained)
            alike = f"{mean(lengths):.2f} ({min(lengths):.2f}–{max(lengths):.2f})"
            settled = [_found(first, line["variant"]), alike, next(iter(line["at"][at]["drafts"]))]
        ours = [found[each]["lines"][number]["at"][at] for each in names]
        rows.append([
            line["label"],
            f"{trained[0]['parameters'] / 1e6:.2f}M",
            show(mean(rates) if rates else None, ",.0f"),
            "–".join(map(str, dict.fromkeys((steps[0], steps[-1])))),
            *settled,
            *(cell for one in ours for cell in _cells(one["summary"], one["anatomy"])),
        ])  # fmt: skip
    settings, place = first["settings"][at], Environment(**first["environment"])
    note = (
        f"Temperature {float(at):g}, target {settings['target']} ({settings['parameters'] / 1e6:.1f}M parameters, "
        f"{settings['dtype']}), "
        f"{settings['count']} prompts{f' of {names[0]}' if len(names) > 1 else ''}, seeds "
        f"{', '.join(map(str, first['seeds']))} summed up; intervals are over prompts; speed-ups are over "
        f"{settings['baseline']}. Accepted: at each depth, of the drafts accepted so far."
    )
    if searched:
        note += (
            " In one shape for all: acceptance length on validation prompts at temperature 0, a mean over the seeds "
            f"and their range, where all draft alike, {_alike(first)}."
        )
    trained_at = {name: [one["environment"] for one in each.values()] for name, each in first["trained"].items()}
    measured = {one.commit: one.line() for one in (Environment(**found[name]["environment"]) for name in names[::-1])}
    where = [where_trained(trained_at, place.commit), *reversed(measured.values())]
    return "\n\n".join([markdown(header, rows), note, *filter(None, where)])


def lengths_alike(trained: Iterable[Mapping[str, Any]]) -> list[float]:
    """Acceptance lengths on validation prompts, where all draft alike, of each training."""
    return [one["record"]["validation"]["value"] for one in trained]


def _found(record: Mapping[str, Any], name: str) -> str:
    """What was searched of a variant's options, where it is not as configured."""
    variant = record["options"]["variants"][name]
    given = {**variant.get("training", {}), **variant.get("predictor", {})}
    return ", ".join(f"{name} {'all' if value is None else value}" for name, value in given.items()) or "as configured"


def _alike(record: Mapping[str, Any]) -> str:
    """The shape of drafts in the search."""
    tree = TreeShape(**record["options"]["variants"][record["lines"][0]["variant"]]["tree"])
    return f"{tree.depth} deep, or as deep as a method predicts, {tree.width} wide, {tree.nodes} nodes"


_SEARCHED = ("found by the search", "acceptance length in one shape for all", "its own draft")
_COLUMNS = ("acceptance length (95 %)", "accepted at 1, 2, ...", "speed-up (95 %)")


def _cells(summary: Mapping[str, Any], anatomy: Mapping[str, Any] | None = None) -> list[str]:
    asked, accepted = ((), ()) if anatomy is None else (anatomy["asked"], anatomy["accepted"])
    shares = " ".join(show(yes / of) for yes, of in zip(accepted, asked, strict=True))
    length, speed_up = Estimate(**summary["acceptance_length"]), Estimate(**summary["speed_up"])
    return [length.text(), shares or DASH, speed_up.text("x")]


main = commands.program(run, EqualTermsOptions)


if __name__ == "__main__":
    main()
