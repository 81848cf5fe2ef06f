"""What each part of a predictor is worth: variants trained alike, then measured side by side, in one table.

    python -m eval.ablate refinement --output refinement      # configs/ablations/refinement.yaml
    python -m eval.ablate FILE --output DIR --seeds '[0]' --only '[none,affine-128]'
    python -m eval.ablate FILE --output DIR --target T --data D --features F --measure.prompts P

A file names configurations of `shape.train` to start from, options common to all variants, and what each variant
changes. Variants share target, data, order of examples and stored features; a seed is one training of each. Trainings
are processes of `python -m shape.train`, variant by variant within a seed, so that a slow hour falls on all of them:
one after the other, or several at once that share the processor's threads (`--jobs 2`). Then all of them decode the
same prompts in one interleaved run per temperature, as in `shape.bench`, always drafting.

Everything is checked before anything is trained. What is finished is not done again: the same command continues after
an interruption. It writes `ablation.json` (all figures) and `ablation.md` (the table) to the output folder, which also
keeps each training (`runs/`) and each measurement prompt by prompt (`measured-t0.json`).
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

from jsonargparse import ArgumentParser

from eval.ablation.measuring import journal_of, measure_all, prompts_of, untrained_methods
from eval.ablation.options import AblationOptions, find_config, one_sentence
from eval.ablation.plan import plan
from eval.ablation.results import Ablation
from eval.ablation.search import search, tuning_prompts
from eval.ablation.texts import FOLDER
from eval.ablation.training import train_all, train_together
from shape.data.conversations import evenly
from shape.errors import ConfigError, exit_on_error
from shape.features.trainer import quiet


def ablate(options: AblationOptions) -> Ablation:
    """Train what is missing, measure everything, and write ablation.json and ablation.md."""
    # Before a search the options are checked alone: what it once found may be trained already.
    runs = plan(options if options.search is None else replace(options, trainings=str(options.home / "search")))
    prompts, source = prompts_of(options, runs[0].options)
    tuning = tuning_prompts(runs[0].options, prompts) if options.search or options.measure.fit else []
    taken = {*options.measure.methods} & {label for run in runs for label in (run.variant, *options.trees)}
    if taken:
        raise ConfigError(f"the name {min(taken)} is a method's and a variant's; rename the variant")
    untrained_methods(options.measure.methods)  # unknown names are said before the work
    output = Path(options.output)
    if options.search is not None:
        options = search(options)
        runs = plan(options)
    trained = train_together(runs, options.home) if options.together else train_all(runs, options.jobs)
    output.mkdir(parents=True, exist_ok=True)
    with quiet():
        found = measure_all(options, runs, trained, prompts, source, evenly(tuning, options.measure.fit))
    (output / "ablation.json").write_text(found.to_json(), encoding="utf-8")
    (output / "ablation.md").write_text(found.to_markdown(), encoding="utf-8")
    for temperature in options.measure.temperatures:
        journal_of(output, temperature).unlink()
    if options.measure.lossy:
        rmtree(output / FOLDER)
    return found


def parse(arguments: Sequence[str]) -> AblationOptions:
    """Options from the command line, whose first argument names the file.

    Raises:
        ConfigError: no file of that name, or options that do not exist.
    """
    reader = ArgumentParser(
        prog="python -m eval.ablate",
        usage="python -m eval.ablate FILE [--output DIR] [options]",
        description=__doc__.splitlines()[0],
        exit_on_error=False,
    )
    reader.add_argument("--config", action="config", help="a YAML file with these options; the first argument is one")
    reader.add_class_arguments(AblationOptions)
    first, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    name = "the command line"
    if not first.startswith("-"):
        name, first = first, f"--config={find_config(first, 'ablations')}"
    with one_sentence(name):
        values = reader.instantiate(reader.parse_args([first, *rest])).as_dict()
        values.pop("config")
        return AblationOptions(**values)


def main(arguments: Sequence[str] | None = None) -> None:
    with exit_on_error():
        print(ablate(parse(sys.argv[1:] if arguments is None else list(arguments))).to_markdown())


if __name__ == "__main__":
    main()
