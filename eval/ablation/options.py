"""What to train and to measure in an ablation, and the files that say it."""

import re
from argparse import ArgumentError
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shape import bundled
from shape.drafters import TreeShape
from shape.errors import ConfigError, ShapeError, require
from shape.generation.rules import RULES


@dataclass
class MeasureOptions:
    """How the trained variants are measured.

    Attributes:
        prompts: JSON lines with prompts; null is the bundled bench split, for bundled data only.
        limit: at most so many, evenly chosen.
        max_new_tokens: longest answer.
        dtype: of the target while measuring; null is its checkpoint's.
        temperatures: one interleaved run each; 0 is greedy.
        methods: measured beside the variants: autoregressive, transformers, transformers-lookup and names of drafters
            without training; autoregressive or transformers has to be among them.
        repeats: timed runs per answer, of which the median counts.
        warmup: prompts answered once by every method before.
        seed: of the sampling.
        examined: so many of the prompts are decoded once more, untimed and traced, to count acceptance by depth.
        device_map: where the target is put; default: on a GPU where there is one.
        fit: on so many validation prompts every trained variant is measured with every shape of `eval.ablation.search`,
            at each temperature, and drafts in the fastest; 0 leaves each its own.
        lossy: lossy rules by which every variant answers, too, for the quality of the text (`eval.quality`).
        encoder: folder or hub id of what compares these texts with the target's own; null compares none.
    """

    prompts: str | None = None
    limit: int = 24
    max_new_tokens: int = 64
    dtype: str | None = None
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    methods: list[str] = field(default_factory=lambda: ["transformers", "autoregressive"])
    repeats: int = 1
    warmup: int = 2
    seed: int = 0
    examined: int = 8
    device_map: str | dict[str, str | int] | None = None
    fit: int = 0
    lossy: list[str] = field(default_factory=list)
    encoder: str | None = None

    def check(self) -> None:
        """Raises ConfigError for the first value out of range."""
        require(self, "limit max_new_tokens repeats examined", above=0, group="measure.")
        require(self, "temperatures warmup fit", least=0, group="measure.")
        if not self.temperatures:
            raise ConfigError("measure.temperatures holds no value; give at least one")
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ConfigError(f"measure.temperatures {self.temperatures} holds one twice; give each once")
        if not {"autoregressive", "transformers"} & set(self.methods):
            raise ConfigError("measure.methods holds no baseline to compare with; add autoregressive or transformers")
        lossy = [name for name, rule in RULES.items() if not rule.lossless]
        if unknown := [name for name in self.lossy if name not in lossy]:
            raise ConfigError(f"measure.lossy holds {unknown[0]}; use some of {', '.join(lossy)}")


@dataclass
class SearchOptions:
    """What is searched for every variant before it is trained: in equal time or equal steps, by validation alone.

    Attributes:
        over: option -> values, as in {training.learning_rate: [0.001, 0.002]}. A variant that lacks one of these has
            values of its own under `search`.
        seconds: of training for each variant, over all rounds alike.
        steps: of training for each, instead of seconds, so that what is found depends on no clock.
        candidates: settings that share the first round: the variant's own, and others, drawn so that each value is in
            as many.
        rounds: the best third of a round, two at least, share the next one.
        tree: shape of every candidate's drafts, by whose acceptance length in validation they are compared.
    """

    over: dict[str, list[Any]] = field(default_factory=dict)
    seconds: float = 600.0
    steps: int | None = None
    candidates: int = 6
    rounds: int = 2
    tree: TreeShape = field(default_factory=lambda: TreeShape(depth=8, width=3, nodes=16))

    def check(self) -> None:
        """Raises ConfigError for the first value out of range."""
        if min(self.seconds, self.candidates, self.rounds) <= 0 or not all(self.over.values()):
            raise ConfigError(
                "search needs seconds, candidates and rounds above 0, and a value of each option; give them"
            )
        if self.steps is not None and self.steps < self.candidates * self.rounds:
            raise ConfigError(f"search.steps is {self.steps}; give a step to every candidate in each round at least")


@dataclass
class AblationOptions:
    """What to train and to measure.

    Attributes:
        title: heading of the table.
        variants: name -> what it changes, options of shape.train, after those of a file (`config`) where it names one;
            null or {} changes nothing. Its `search` takes the place of the search's `over`.
        base: files of such options to start from, names below configs/ or paths, later ones over earlier ones.
        common: options of all variants, over those of the files.
        seeds: one training of every variant with each.
        trees: name -> shape of draft; every trained variant is measured with each, and the names stand in the table.
            Without any, each variant drafts with its own `tree`.
        measure: how.
        search: find options of every variant first; null trains them as they are.
        output: folder of ablation.json, ablation.md, and of the trainings.
        trainings: folder of the trainings, if they are measured more than once; default: the output folder.
        only: these variants alone.
        target: see shape.train; goes before the file's.
        data: see shape.train; goes before the file's.
        features: folder of stored features; default: in the output folder.
        jobs: trainings at once, each with its part of the threads. Small networks use two cores better by two trainings
            than by one. A time budget is a training's own, so compare only what was trained with as many.
        together: train all variants of a seed in one run, on one forward of the target a step (`shape.training.joint`).
            They have to compute features online, and be counted in steps.
        override: more common options, on the command line, for instance '[training.steps=20,limit=200]'.
    """

    title: str
    variants: dict[str, dict[str, Any] | None]
    base: list[str] = field(default_factory=lambda: ["quickstart.yaml"])
    common: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0])
    trees: dict[str, TreeShape] = field(default_factory=dict)
    measure: MeasureOptions = field(default_factory=MeasureOptions)
    search: SearchOptions | None = None
    output: str = "ablation-results"
    trainings: str | None = None
    only: list[str] | None = None
    target: str | None = None
    data: str | None = None
    features: str | None = None
    jobs: int = 1
    together: bool = False
    override: list[str] = field(default_factory=list)

    def chosen(self) -> dict[str, dict[str, Any]]:
        """The variants to train, in the order of the file.

        Raises:
            ConfigError: there is none, an unknown name is asked for, or two would lie in one folder.
        """
        unknown = [name for name in self.only or () if name not in self.variants]
        if unknown:
            raise ConfigError(f"variant {unknown[0]} is not in the file, which has {', '.join(self.variants)}")
        asked = {name: what or {} for name, what in self.variants.items() if self.only is None or name in self.only}
        found = {name: {key: value for key, value in what.items() if key != "search"} for name, what in asked.items()}
        if not found:
            raise ConfigError("the ablation has no variant; name at least one under variants")
        if len({folder_name(name) for name in found}) < len(found):
            raise ConfigError("two variants differ in punctuation alone, and their folders would be one; rename one")
        if self.trees and self.measure.fit:
            raise ConfigError("trees and measure.fit both say how drafts grow; give one of them")
        if self.jobs < 1:
            raise ConfigError(f"jobs is {self.jobs}; give a positive number")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds are {self.seeds}; give at least one, and each once")
        return found

    @property
    def home(self) -> Path:
        """The folder of the trainings."""
        return Path(self.trainings or self.output)


def folder_name(variant: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", variant)


def find_config(name: str, *below: str) -> Path:
    """A configuration by its name below configs/, or else by its path."""
    shipped = bundled.root().joinpath("configs", *below)
    for path in (shipped / name, shipped / f"{name}.yaml", Path(name)):
        if path.is_file():
            return path
    raise ConfigError(
        f"there is no configuration {name}, neither in {'/'.join(['configs', *below])} nor as a path; give one that "
        f"exists ({', '.join(sorted(path.name for path in shipped.glob('*.yaml')))} ship)"
    )


@contextmanager
def one_sentence(what: str) -> Iterator[None]:
    """Whatever options are refused with becomes a ConfigError that says of which part."""
    try:
        yield
    except (ShapeError, ArgumentError, TypeError, KeyError) as error:
        raise ConfigError(f"{what}: {' '.join(str(error).split())}") from error
