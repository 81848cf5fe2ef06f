"""Measures everything that the report shows, and writes it: one command, from nothing.

    python -m eval.report                                          # the predictor that ships, into report/
    python -m eval.report --predictor DIR --prompts prompts.jsonl --output report-of-mine

Speed at temperature 0 and 1 with several drafters, efficiency and batches, what `shape.check` says, the analysis of
transport, four traced answers, and an ablation that is trained for it. Each part is a command of the package, which the
page names beside its figures; what is finished is kept, so that the same command continues after an interruption. By
default it takes about 25 minutes on two cores. Results lie in OUTPUT/results, the page is OUTPUT/report.html.
"""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from eval import commands
from shape.errors import ConfigError
from shape.evaluation.journal import refuse_other
from shape.evaluation.prompts import chosen_prompts
from shape.evaluation.report.page import write, write_images
from shape.evaluation.report.sources import find

METHODS = ("transformers", "autoregressive", "ngram", "suffix", "lookahead", "shape", "suffix+shape")
CHAIN = ("--tree.width", "1", "--tree.depth", "4")  # which rules other than match can judge
# Traced answers: name -> how.
TRACES = {
    "greedy": (),
    "hybrid": ("--drafter", "suffix+shape"),
    "match": ("--temperature", "1"),
    "rejection": ("--temperature", "1", "--acceptance", "rejection", *CHAIN),
}


@dataclass
class ReportOptions(commands.OfPredictor):
    """What to measure, and how much of it.

    Args:
        output: folder of everything that is made.
        prompts: JSON-lines file; default: those that ship, for the shipped target.
        data: conversations with the target's own answers, for analysis and ablation; default: those that ship. Given
            prompts but no data, the target answers the prompts for the analysis.
        ablation: a file below configs/ablations or a path; "none" trains nothing. What it learns from has to be known:
            for another than the shipped target there is one only with target, prompts and data given.
        variants: of the ablation; null is all of them.
        minutes: of training, each.
        dtype: of the target.
        limit: prompts of each measurement.
        max_new_tokens: longest answer.
        batches: numbers of rows decoded together.
        positions: of the analysis.
        images: whether to write the drawings as PNG and SVG as well.
    """

    output: str = "report"
    prompts: str | None = None
    data: str | None = None
    ablation: str = "default"
    variants: list[str] | None = field(
        default_factory=lambda: ["default", "no Markov bias", "no token known", "window 1"]
    )
    minutes: float = 0.75
    dtype: str = "bfloat16"
    limit: int = 32
    max_new_tokens: int = 96
    batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16])
    positions: int = 200
    images: bool = False


@dataclass(frozen=True)
class Part:
    """A command, and the file that is there when it has finished."""

    made: Path
    module: str
    arguments: Sequence[str]


def parts(options: ReportOptions) -> list[Part]:
    """Everything, the quick ones first."""
    results, work = Path(options.output) / "results", Path(options.output) / "work"
    few = str(min(24, options.limit))
    suite = ["--prompts", options.prompts] if options.prompts else []
    target = ["--target", options.target] if options.target else []
    predictor = ["--predictor", options.predictor, *target]
    sizes = ["--max_new_tokens", str(options.max_new_tokens)]
    common = [*predictor, *suite, *sizes, "--limit", str(options.limit)]
    prompts, _ = chosen_prompts(options.prompts)
    found = []
    for number, (name, how) in enumerate(TRACES.items()):
        made = results / "traces" / f"{name}.jsonl"
        asked = ["--prompt", prompts[number % len(prompts)].turns[0], "--dtype", options.dtype]
        found.append(Part(made, "shape.generate", [*predictor, *asked, *sizes, *how, "--trace", str(made)]))
    made = results / "check.json"
    asked = ["--limit", str(min(12, options.limit)), "--dtype", options.dtype]
    found.append(Part(made, "shape.check", [*predictor, *suite, *sizes, *asked, "--output", str(made)]))
    rules = ["transformers", "autoregressive", "shape", "shape@rejection", "shape@traversal"]
    speed = {
        "bench-t0": ("Drafters, temperature 0", METHODS, 0, ()),
        "bench-t1": ("Drafters, temperature 1", METHODS, 1, ()),
        "rules": ("Acceptance rules on chains, temperature 1", rules, 1, CHAIN),
    }
    for name, (label, methods, temperature, tree) in speed.items():
        folder = results / name
        more = [f"--methods=[{','.join(methods)}]", "--temperature", str(temperature), "--dtype", options.dtype, *tree]
        more += ["--label", label]
        found.append(Part(folder / "results.json", "shape.bench", [*common, *more, "--output", str(folder)]))
    for name, batches, temperatures in (("efficiency", [1], [0.0, 1.0]), ("batches", options.batches, [0.0])):
        folder = results / name
        rows = [f"--batch_size={batches}", f"--temperature={temperatures}", f"--dtype=[{options.dtype}]"]
        limit = ["--limit", str(max(int(few), *batches))]
        arguments = [*predictor, *suite, *sizes, *limit, *rows, "--output", str(folder)]
        found.append(Part(folder / "efficiency.json", "shape.efficiency", arguments))
    folder = results / "analysis"
    texts = ["--data", options.data] if options.data else suite
    arguments = [*predictor, *texts, "--positions", str(options.positions), "--output", str(folder)]
    found.append(Part(folder / "analysis.json", "eval.analyze", arguments))
    own = (options.target, options.prompts, options.data)
    if options.ablation != "none" and (all(own) or not any(own)):
        folder = work / "ablation"
        given = [*target, f"--data={options.data}", f"--measure.prompts={options.prompts}"] if all(own) else []
        given += [f"--only={json.dumps(options.variants)}"] if options.variants else []
        measure = ["--seeds=[0]", "--measure.limit", few, f"--override=[training.max_minutes={options.minutes}]"]
        arguments = [options.ablation, *given, *measure, "--output", str(folder)]
        found.append(Part(folder / "ablation.json", "eval.ablate", arguments))
    return found


def launch(module: str, arguments: Sequence[str]) -> int:
    """A command of the package in a process of its own; its exit status."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, check=False, env=commands.child_variables()).returncode


def make(options: ReportOptions) -> None:
    """Measure what is missing, and write the page.

    Raises:
        ConfigError: the folder holds results of other options, or a part failed.
    """
    output = Path(options.output)
    _require_same(options, output / "options.json")
    todo = parts(options)
    for number, part in enumerate(todo, start=1):
        told = shlex.join(["python", "-m", part.module, *part.arguments])
        print(f"[{number}/{len(todo)}] {'kept: ' if part.made.exists() else ''}{told}", flush=True)
        if part.made.exists():
            continue
        part.made.parent.mkdir(parents=True, exist_ok=True)
        status = launch(part.module, part.arguments)
        if status == 130:
            raise KeyboardInterrupt
        if status != 0 or not part.made.exists():
            raise ConfigError(f"{part.module} failed with status {status}; mend what it says and repeat the command")
    trained = output / "work" / "ablation" / "ablation.json"
    if trained.exists():  # without the trainings, which are no results
        (output / "results" / "ablation").mkdir(exist_ok=True)
        shutil.copy(trained, output / "results" / "ablation")
    found = find(output / "results")
    print(f"written: {write(found, output / 'report.html', progress=True)[0]}")
    if options.images:
        write_images(found, output / "images", progress=True)


def _require_same(options: ReportOptions, file: Path) -> None:
    """What is kept has to have been measured with these options; where it lies and what is drawn does not matter."""
    mine = {name: value for name, value in asdict(options).items() if name not in ("output", "images")}
    if file.exists():
        refuse_other(file, json.loads(file.read_text(encoding="utf-8")), mine)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(mine, indent=1), encoding="utf-8")


main = commands.program(make, ReportOptions)


if __name__ == "__main__":
    main()
