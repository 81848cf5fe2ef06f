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

import json
import os
import re
import subprocess
import sys
from argparse import ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import count
from pathlib import Path
from statistics import mean
from threading import Event
from typing import Any, cast, get_args

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace
from safetensors import safe_open
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from eval.ablation import Ablation, Anatomy, Figures, Line, Trained
from eval.equal_size import as_large_as
from shape import bundled
from shape.data.conversations import Prompt, evenly
from shape.data.reading import load_prompts
from shape.drafters import Drafter, TreeShape, make_drafter
from shape.drafters.base import Committed, Wrapped
from shape.errors import CheckpointError, ConfigError, ShapeError, exit_on_error
from shape.evaluation.environment import Environment
from shape.evaluation.methods import Method, Outside
from shape.evaluation.results import SpeedResults, Tally
from shape.evaluation.runner import sampling
from shape.evaluation.speed import measure
from shape.features.trainer import quiet
from shape.files import reading, typed
from shape.generation.decoder import ShapeDecoder
from shape.generation.engine import ShapeOutput
from shape.networks.config import ShapeConfig
from shape.networks.sizing import parameters
from shape.target.loading import of_target
from shape.target.model import Target, announce
from shape.target.options import TargetOptions
from shape.target.size import size_of
from shape.training import parsing
from shape.training.defaults import network_config, resolve
from shape.training.joint import require_alike
from shape.training.options import TrainOptions
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree

# Decided here for every run, and what all variants have to share to be comparable.
_OURS = ("output", "seed", "ckpt_path")
_SHARED = (
    "target", "data", "validation_data", "regenerate", "features", "online", "max_length", "limit", "skip_bad_rows",
    "dtype", "measurement", "regeneration",
    *(entry.name for entry in fields(TargetOptions)),
)  # fmt: skip
# Differences between an earlier run's options and these do not make it another run: where it lies.
_PLACES = {"output", "features"}


@dataclass
class MeasureOptions:
    """How the trained variants are measured.

    Attributes:
        prompts: JSON lines with prompts; null is the bundled bench split, for bundled data only.
        limit: at most so many, evenly chosen.
        max_new_tokens: longest answer.
        dtype: of the target while measuring; null is its checkpoint's.
        temperatures: one interleaved run each; 0 is greedy.
        methods: measured beside the variants: plain, transformers, transformers-lookup and names of drafters without
            training; plain or transformers has to be among them.
        repeats: timed runs per answer, of which the median counts.
        warmup: prompts answered once by every method before.
        seed: of the sampling.
        examined: so many of the prompts are decoded once more, untimed and traced, to count acceptance by depth and the
            operations of a draft.
        device_map: where the target is put; default: on a GPU where there is one.
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

    def check(self) -> None:
        """Raises ConfigError for the first value out of range."""
        for name in ("limit", "max_new_tokens", "repeats", "examined"):
            if getattr(self, name) < 1:
                raise ConfigError(f"measure.{name} is {getattr(self, name)}; give a positive number")
        if not self.temperatures or min(self.temperatures) < 0 or self.warmup < 0:
            raise ConfigError("measure needs at least one temperature, none below 0, and warmup >= 0; correct them")
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ConfigError(f"measure.temperatures {self.temperatures} holds one twice; give each once")
        if not {"autoregressive", "transformers"} & set(self.methods):
            raise ConfigError("measure.methods holds no baseline to compare with; add autoregressive or transformers")


@dataclass
class AblationOptions:
    """What to train and to measure.

    Attributes:
        title: heading of the table.
        variants: name -> what it changes, options of shape.train, after those of a file (`config`) where it names one;
            null or {} changes nothing.
        base: files of such options to start from, names below configs/ or paths, later ones over earlier ones.
        common: options of all variants, over those of the files.
        seeds: one training of every variant with each.
        trees: name -> shape of draft; every trained variant is measured with each, and the names stand in the table.
            Without any, each variant drafts with its own `tree`.
        measure: how.
        output: folder of ablation.json, ablation.md, and of the trainings.
        same_size_as: the variant that gives all others its number of parameters, by their inner width, or for Medusa by
            the tokens that it drafts from; null leaves every size as it is given.
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
    output: str = "ablation-results"
    same_size_as: str | None = None
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
        unknown = [name for name in (*(self.only or ()), self.same_size_as) if name and name not in self.variants]
        if unknown:
            raise ConfigError(f"variant {unknown[0]} is not in the file, which has {', '.join(self.variants)}")
        found = {name: what or {} for name, what in self.variants.items() if self.only is None or name in self.only}
        if not found:
            raise ConfigError("the ablation has no variant; name at least one under variants")
        if len({_folder_name(name) for name in found}) < len(found):
            raise ConfigError("two variants differ in punctuation alone, and their folders would be one; rename one")
        if self.jobs < 1:
            raise ConfigError(f"jobs is {self.jobs}; give a positive number")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds are {self.seeds}; give at least one, and each once")
        return found


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        folder: of the exported predictor; `options.yaml` there has all options of the run.
    """

    variant: str
    seed: int
    folder: Path
    options: TrainOptions
    values: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.variant}, seed {self.seed}"


# ------------------------------------------------------------------------------------------------- what to train


def plan(options: AblationOptions) -> list[Run]:
    """Every training, checked, with all of its options; a seed's variants follow each other.

    Raises:
        ConfigError: whatever is wrong with the file or any variant, or a run in the output folder had other options.
    """
    options.measure.check()
    chosen = options.chosen()
    for name, given in {"common": options.common, **{f"variant {name}": what for name, what in chosen.items()}}.items():
        if wrong := [key for key in _OURS if key in given]:
            raise ConfigError(f"{name} sets {wrong[0]}, which follows from the ablation's own options; leave it out")
        if name != "common" and (wrong := [key for key in _SHARED if key in given]):
            raise ConfigError(f"{name} sets {wrong[0]}, which all variants have to share; put it under common")
    reader = parsing.parser(None)
    reader.exit_on_error = False
    with _one_sentence("base and common"):
        values = reader.parse_args([f"--config={_find(name)}" for name in options.base])
        given = {name: getattr(options, name) for name in ("target", "data", "features")}
        places = {name: place for name, place in given.items() if place is not None}
        for changes in (options.common, *map(_nested, options.override), places):
            values = _with(reader, values, changes)
    output = Path(options.output)
    runs = [_run(reader, values, name, changes, 0, output) for name, changes in chosen.items()]
    # What only the target can tell is checked with it. It is not kept, since the trainings have it to themselves.
    first = runs[0].options
    if first.token is not None:
        raise ConfigError("token would be written into the options of every training; leave it out, and set HF_TOKEN")
    target = Target.load(first.target, dtype=first.dtype, device_map="cpu", **of_target(first))
    sizes: dict[str, dict[str, int]] = {}
    if (like := options.same_size_as) is not None:
        model = _run(reader, values, like, options.variants[like] or {}, 0, output)
        wanted = _size_of(model, target)
        others = {run.variant: _checked(run, target) for run in runs if run.variant != like}
        sizes = {name: as_large_as(wanted, config) for name, config in others.items() if config is not None}
    runs = [
        _run(reader, values, name, changes, seed, output, sizes.get(name))
        for seed in options.seeds
        for name, changes in chosen.items()
    ]
    for run in runs:
        _checked(run, target)
        _require_unchanged(run)
    if options.together:
        for group in _by_seed(runs):
            with _one_sentence("together"):
                require_alike([run.options for run in group])
    return runs


def _by_seed(runs: Sequence[Run]) -> list[list[Run]]:
    """What is trained together."""
    return [[run for run in runs if run.seed == seed] for seed in dict.fromkeys(run.seed for run in runs)]


def _run(
    reader: ArgumentParser,
    values: Namespace,
    name: str,
    changes: dict[str, Any],
    seed: int,
    output: Path,
    size: Mapping[str, int] | None = None,
) -> Run:
    folder = output / "runs" / f"{_folder_name(name)}-{seed}"
    with _one_sentence(f"variant {name}"):
        changes = dict(changes)
        if file := changes.pop("config", None):
            values = _with(reader, values, yaml.safe_load(Path(_find(file)).read_text()))
        values = _with(reader, values, changes)
        values = _with(reader, values, {"predictor": size or {}})
        # Variants that read other layers than those stored for all, or features stored otherwise, have a folder of
        # their own.
        layers = values.predictor.feature_layers
        apart = set(layers) - {-1, *values.extraction.more_layers}
        otherwise = [f"{option}-{value}" for option, value in changes.get("extraction", {}).items()]
        store = output / "-".join(["features", *(map(str, layers) if apart else []), *otherwise])
        ours: dict[str, Any] = {"seed": seed, "output": str(folder), "measurement": {"limit": 0}}
        if values.features is None and not values.online:
            ours["features"] = str(store)
        values = _with(reader, values, ours)
        options = parsing.as_options(reader.instantiate(values).as_dict())
        options.check()
    # Nulls too: where shape.train reads the file, they go before the defaults of the target that ships.
    text = reader.dump(values, skip_unset=False)
    return Run(name, seed, folder, options, {k: v for k, v in yaml.safe_load(text).items() if k != "config"})


def _with(reader: ArgumentParser, values: Namespace, changes: Mapping[str, Any]) -> Namespace:
    """Options with some of them changed."""
    for name, given in changes.items():
        if isinstance(values.get(name), Namespace) and not isinstance(given, Mapping):
            raise ConfigError(f"{name} is {given!r}, and it stands for several options; give these as a mapping")
    return reader.parse_object(dict(changes), values)


def _nested(change: str) -> dict[str, Any]:
    """ "a.b=1" -> {"a": {"b": 1}}."""
    names, equals, value = change.partition("=")
    if not equals:
        raise ConfigError(f"override {change} has no value; give NAME=VALUE")
    found = yaml.safe_load(value)
    for name in reversed(names.split(".")):
        found = {name: found}
    return found


@contextmanager
def _one_sentence(what: str) -> Iterator[None]:
    """Whatever options are refused with becomes a ConfigError that says of which part."""
    try:
        yield
    except (ShapeError, ArgumentError, TypeError, KeyError) as error:
        raise ConfigError(f"{what}: {' '.join(str(error).split())}") from error


def _checked(run: Run, target: Target) -> ShapeConfig | None:
    """The network's configuration for this target; None for a language model."""
    with _one_sentence(f"variant {run.variant}"):
        run.options.feature_options().check(target)
        return network_config(resolve(run.options, size_of(target.model), None), target)


def _require_unchanged(run: Run) -> None:
    path = run.folder / "options.yaml"
    if not path.exists():
        return
    before, now = (_flat(values) for values in (yaml.safe_load(path.read_text()), run.values))
    differences = [
        f"{name} was {before.get(name)} and is {now.get(name)}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
        and name not in _PLACES
        # An option that there was not yet, and that is not made use of.
        and (name in before or now[name])
    ]
    if differences:
        raise ConfigError(
            f"{run.folder} holds a training of {run.name} with other options ({', '.join(differences)}); give another "
            "output folder, or delete it"
        )


def _size_of(run: Run, target: Target) -> int:
    config = _checked(run, target)
    if config is None:
        raise ConfigError(f"same_size_as is {run.variant}, a language model; name a predictor")
    return parameters(config)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _folder_name(variant: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", variant)


def _find(name: str, *below: str) -> Path:
    """A configuration by its name below configs/, or else by its path."""
    shipped = bundled.root().joinpath("configs", *below)
    for path in (shipped / name, shipped / f"{name}.yaml", Path(name)):
        if path.is_file():
            return path
    raise ConfigError(
        f"there is no configuration {name}, neither in {'/'.join(['configs', *below])} nor as a path; give one that "
        f"exists ({', '.join(sorted(path.name for path in shipped.glob('*.yaml')))} ship)"
    )


# ------------------------------------------------------------------------------------------------- training


def train_all(runs: Sequence[Run], jobs: int) -> dict[str, dict[int, Trained]]:
    """Train what is missing, `jobs` at once: by variant and seed.

    Raises:
        CheckpointError: a training failed; those that have not begun by then never do.
    """
    threads = max(1, torch.get_num_threads() // jobs)
    numbers, failed = count(1), Event()

    def one(run: Run) -> Trained | None:
        if failed.is_set():
            return None
        print(f"training {next(numbers)} of {len(runs)}: {run.name}; output in {run.folder / 'train.log'}", flush=True)
        try:
            return train(run, threads)
        except BaseException:
            failed.set()
            raise

    found: dict[str, dict[int, Trained]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for run, trained in zip(runs, pool.map(one, runs), strict=True):
            if trained is not None:
                found.setdefault(run.variant, {})[run.seed] = trained
    return found


def train(run: Run, threads: int) -> Trained:
    """Train unless that is done; an interrupted run goes on from its last checkpoint.

    In a process of its own: the next run starts with a clean memory, a crash costs one run, and several devices are
    launched as for any other command.

    Raises:
        CheckpointError: the training failed.
    """
    if not _is_done(run):
        _carry_out("shape.train", [f"--config={_options_file(run)}"], run.name, run.folder, threads)
        _keep(run, threads)
    return _kept(run)


def train_together(runs: Sequence[Run], output: Path) -> dict[str, dict[int, Trained]]:
    """The same of all runs of a seed at once.

    Raises:
        CheckpointError: the training failed.
    """
    threads = torch.get_num_threads()
    for group in _by_seed(runs):
        if not all(map(_is_done, group)):
            folder, names = output / "runs" / f"together-{group[0].seed}", ", ".join(run.name for run in group)
            print(f"training together: {names}; output in {folder / 'train.log'}", flush=True)
            files = [str(_options_file(run)) for run in group]
            _carry_out("shape.joint", [*files, f"--output={folder}"], folder.name, folder, threads)
            for run in group:
                _keep(run, threads)
    return {run.variant: {each.seed: _kept(each) for each in runs if each.variant == run.variant} for run in runs}


def _options_file(run: Run) -> Path:
    run.folder.mkdir(parents=True, exist_ok=True)
    options = run.folder / "options.yaml"
    options.write_text(yaml.safe_dump(run.values, sort_keys=False))
    return options


def _carry_out(module: str, arguments: list[str], name: str, folder: Path, threads: int) -> None:
    """A command from its beginning, or from the last checkpoint in its folder.

    Raises:
        CheckpointError: it failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "train.log"
    resume = ["--ckpt_path=last"] if (folder / "checkpoints/last.ckpt").exists() else []
    if status := _launch(module, [*arguments, *resume], log, threads):
        last = next((line for line in reversed(log.read_text().splitlines()) if line.strip()), "it said nothing")
        raise CheckpointError(
            f"the training of {name} ended with status {status} ({last.strip()}); see {log}, and run the same command "
            "again to go on"
        )


def _launch(module: str, arguments: list[str], log: Path, threads: int) -> int:
    """A command as a process, its exit status; what it says goes to the end of a file."""
    with log.open("a") as file:
        command = [sys.executable, "-m", module, *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        return subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment).returncode


def _is_done(run: Run) -> bool:
    return (run.folder / "run.json").exists()


def _keep(run: Run, threads: int) -> None:
    """Write down what a finished training was."""
    done = run.folder / "run.json"
    part = done.with_suffix(".part")
    part.write_text(json.dumps(asdict(_trained(run, threads)), indent=1))
    part.replace(done)


def _kept(run: Run) -> Trained:
    done = run.folder / "run.json"
    with reading(str(done), CheckpointError, "delete it, and the training is looked at again"):
        return typed(Trained, json.loads(done.read_text()))


def _trained(run: Run, threads: int) -> Trained:
    record = json.loads((run.folder / "config.json").read_text())["training"]
    on_gpu = run.options.trainer.accelerator != "cpu" and torch.cuda.is_available()
    return Trained(
        parameters=_parameters(run.folder / "model.safetensors"),
        steps=record["steps"],
        seconds=max(record["seconds"] - record["validation_seconds"], 0.0),
        positions_per_second=record.get("positions_per_second"),
        record=record,
        environment={**asdict(Environment.capture(torch.device("cuda" if on_gpu else "cpu"))), "threads": threads},
    )


def _parameters(weights: Path) -> int:
    """Numbers in an exported predictor of any kind; integers are no parameters."""
    with safe_open(weights, framework="pt") as file:
        slices = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118 - not a mapping
    return sum(torch.Size(one.get_shape()).numel() for one in slices if "F" in one.get_dtype())


# ------------------------------------------------------------------------------------------------- measuring


class _Counting(Wrapped):
    """Another drafter, whose operations are counted: of drafts, and of taking in what verification made known, where
    some drafters run their network too. One per draft; shared by the copies that the decoder makes.
    """

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.flops = []  # type: ignore[var-annotated]

    def draft(self, settled: Committed, sampler: Sampler) -> TokenTree:
        with FlopCounterMode(display=False) as counter:
            tree = self.inner.draft(settled, sampler)
        self.flops.append(counter.get_total_flops())
        return tree

    def update(self, tokens: list[list[int]], hidden: Tensor, counts: Tensor) -> None:
        with FlopCounterMode(display=False) as counter:
            self.inner.update(tokens, hidden, counts)
        self.flops[-1] += counter.get_total_flops()


def examine(
    target: Target, drafter: Drafter, contexts: Sequence[Tensor], temperature: float, max_new_tokens: int, seed: int = 0
) -> Anatomy:
    """Decode prompts, (1, L) ids each, and look into every draft.

    Args:
        seed: of the first prompt; the others count up, as in `shape.evaluation.speed.measure`.
    """
    counting = _Counting(drafter)
    decoder = ShapeDecoder(target, counting, fall_back=False)
    options = sampling(temperature)
    asked: list[int] = []
    accepted: list[int] = []
    for index, context in enumerate(contexts):
        out = decoder.generate(
            context,
            torch.ones_like(context),
            seed=seed + index,
            max_new_tokens=max_new_tokens,
            trace=True,
            return_dict_in_generate=True,
            **options,
        )
        assert isinstance(out, ShapeOutput) and out.trace is not None
        drafted = [one for one in out.trace.records if one.get("event") in ("accepted", "rejected")]
        for counts, events in ((asked, ("accepted", "rejected")), (accepted, ("accepted",))):
            for _, depth in {(one["step"], one["depth"]) for one in drafted if one["event"] in events}:
                counts += [0] * (depth - len(counts))
                counts[depth - 1] += 1
    accepted += [0] * (len(asked) - len(accepted))
    return Anatomy(tuple(asked), tuple(accepted), mean(counting.flops) if counting.flops else None)


def _joined(anatomies: Sequence[Anatomy]) -> Anatomy:
    """Of several seeds."""
    depths = range(max(len(one.asked) for one in anatomies))
    asked, accepted = (
        tuple(sum(counts[depth] for counts in all_ if depth < len(counts)) for depth in depths)
        for all_ in ([one.asked for one in anatomies], [one.accepted for one in anatomies])
    )
    flops = [one.flops for one in anatomies if one.flops is not None]
    return Anatomy(asked, accepted, mean(flops) if flops else None)


def _load_prompts(options: AblationOptions, runs: TrainOptions) -> tuple[list[Prompt], str]:
    """The prompts to measure on, and what they are called."""
    given = options.measure.prompts
    if given is None and runs.data is not None:
        raise ConfigError("measure.prompts is not given, and the bundled prompts go with the bundled data; give a file")
    source = bundled.path("data", "bench.jsonl") if given is None else Path(given)
    return evenly(load_prompts(source, runs.chat_template_kwargs), options.measure.limit), source.name


def _others(names: Sequence[str]) -> dict[str, Method]:
    return {
        name: cast(Outside, name)
        if name in get_args(Outside)
        else None
        if name in ("autoregressive", "plain")
        else make_drafter(name)
        for name in names
    }


def _measure(
    options: AblationOptions,
    runs: Sequence[Run],
    trained: dict[str, dict[int, Trained]],
    prompts: list[Prompt],
    source: str,
) -> Ablation:
    chosen, given = options.measure, runs[0].options
    target = Target.load(given.target, dtype=chosen.dtype, device_map=chosen.device_map, **of_target(given))
    announce(target)
    others = _others(chosen.methods)
    trees: dict[str | None, TreeShape | None] = {name: tree for name, tree in options.trees.items()} or {None: None}
    lines = {_label(name, tree, trained): (name, tree) for name in trained for tree in trees}
    # Method names of the measurement, by line and seed.
    names = {
        label: {seed: label if len(options.seeds) == 1 else f"{label}, seed {seed}" for seed in options.seeds}
        for label in lines
    }
    folders = {(run.variant, run.seed): run.folder for run in runs}
    drafters: dict[str, Drafter] = {}
    for label, (variant, tree) in lines.items():
        for seed, name in names[label].items():
            decoder = ShapeDecoder.from_pretrained(folders[variant, seed], target=target, tree=trees[tree])
            assert decoder.drafter is not None
            drafters[name] = decoder.drafter
    results = {
        temperature: _speed(options, target, {**others, **drafters}, prompts, source, temperature)
        for temperature in chosen.temperatures
    }
    contexts = [target.encode(prompt.opening, prompt.template) for prompt in evenly(prompts, chosen.examined)]
    room = (target.max_positions or sys.maxsize) - chosen.max_new_tokens
    contexts = [context for context in contexts if context.shape[1] <= room]
    found: dict[str, dict[float, Figures]] = {label: {} for label in lines}
    for temperature, result in results.items():
        groups = {**{name: [name] for name in others}, **{label: list(own.values()) for label, own in names.items()}}
        pooled = result.pooled(groups)
        for label, own in names.items():
            anatomies = [
                examine(target, drafters[name], contexts, temperature, chosen.max_new_tokens, chosen.seed)
                for name in own.values()
            ]
            found[label][temperature] = Figures(
                pooled.summary[label],
                {seed: result.summary[name].acceptance_length.value for seed, name in own.items()},
                {seed: result.summary[name].speed_up.value for seed, name in own.items()},
                _step_ms(pooled.total[label]),
                _joined(anatomies),
            )
    return Ablation(
        options.title,
        options.seeds,
        chosen.examined,
        chosen.max_new_tokens,
        asdict(options),
        trained,
        [Line(label, variant, tree, found[label]) for label, (variant, tree) in lines.items()],
        {temperature: {name: result.summary[name] for name in others} for temperature, result in results.items()},
        {
            temperature: {**result.settings, "baseline": result.baseline, "count": len(result.records)}
            for temperature, result in results.items()
        },
        Environment.capture(target.device),
    )


def _speed(
    options: AblationOptions,
    target: Target,
    methods: Mapping[str, Method],
    prompts: Sequence[Prompt],
    source: str,
    temperature: float,
) -> SpeedResults:
    """One interleaved measurement, kept prompt by prompt."""
    chosen, output = options.measure, Path(options.output)
    results = measure(
        target,
        methods,
        prompts,
        max_new_tokens=chosen.max_new_tokens,
        temperature=temperature,
        repeats=chosen.repeats,
        warmup=chosen.warmup,
        seed=chosen.seed,
        label=f"{options.title}, temperature {temperature:g}",
        source=source,
        journal=_journal(output, temperature),
        fall_back=False,
    )
    _journal(output, temperature).with_suffix(".json").write_text(results.to_json())
    return results


def _journal(output: Path, temperature: float) -> Path:
    return output / f"measured-t{temperature:g}.jsonl"


def _label(variant: str, tree: str | None, variants: Mapping[str, Any]) -> str:
    if tree is None:
        return variant
    return tree if len(variants) == 1 else f"{variant}, {tree}"


def _step_ms(total: Tally) -> dict[str, float | None]:
    parts = {"draft": total.draft_seconds, "verify": total.verify_seconds, "commit": total.commit_seconds}
    return {name: 1e3 * seconds / total.forwards if total.forwards else None for name, seconds in parts.items()}


# ------------------------------------------------------------------------------------------------- command


def ablate(options: AblationOptions) -> Ablation:
    """Train what is missing, measure everything, and write ablation.json and ablation.md."""
    runs = plan(options)
    prompts, source = _load_prompts(options, runs[0].options)
    taken = {*options.measure.methods} & {label for run in runs for label in (run.variant, *options.trees)}
    if taken:
        raise ConfigError(f"the name {min(taken)} is a method's and a variant's; rename the variant")
    _others(options.measure.methods)  # unknown names are said before the work
    output = Path(options.output)
    trained = train_together(runs, output) if options.together else train_all(runs, options.jobs)
    with quiet():
        found = _measure(options, runs, trained, prompts, source)
    (output / "ablation.json").write_text(found.to_json())
    (output / "ablation.md").write_text(found.to_markdown())
    for temperature in options.measure.temperatures:
        _journal(output, temperature).unlink()
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
        name, first = first, f"--config={_find(first, 'ablations')}"
    with _one_sentence(name):
        values = reader.instantiate(reader.parse_args([first, *rest])).as_dict()
        values.pop("config")
        options = AblationOptions(**values)
    return replace(options, trees={tree: _shape(shape) for tree, shape in options.trees.items()})


def _shape(given: TreeShape | dict[str, Any]) -> TreeShape:
    return given if isinstance(given, TreeShape) else TreeShape(**given)


def main(arguments: Sequence[str] | None = None) -> None:
    with exit_on_error():
        print(ablate(parse(sys.argv[1:] if arguments is None else list(arguments))).to_markdown())


if __name__ == "__main__":
    main()
