"""Every training of an ablation, checked before any work begins."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from eval.ablation.options import AblationOptions, find_config, folder_name, one_sentence
from shape.errors import ConfigError
from shape.target.loading import of_target
from shape.target.model import Target
from shape.target.options import TargetOptions
from shape.target.size import size_of
from shape.training import parsing
from shape.training.checkpoints import differences
from shape.training.defaults import network_config, resolve
from shape.training.joint import require_alike
from shape.training.options import TrainOptions

# Decided here for every run, and what all variants have to share to be comparable.
_OURS = ("output", "seed", "ckpt_path")
_SHARED = (
    "target", "data", "validation_data", "regenerate", "features", "online", "max_length", "limit", "skip_bad_rows",
    "dtype", "measurement", "regeneration",
    *(entry.name for entry in fields(TargetOptions)),
)  # fmt: skip
# Differences between an earlier run's options and these that do not make it another run: where it lies, and how often a
# checkpoint of it is written.
_ALIKE = {"output", "features", "training.checkpoint_every"}


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
    with one_sentence("base and common"):
        values = reader.parse_args([f"--config={find_config(name)}" for name in options.base])
        given = {name: getattr(options, name) for name in ("target", "data", "features")}
        places = {name: place for name, place in given.items() if place is not None}
        for changes in (options.common, *map(_nested, options.override), places):
            values = _with(reader, values, changes)
    output = options.home
    # All of them, so that others find their layers among the features if they are trained later.
    every = replace(options, only=None).chosen()
    runs = [_run(reader, values, name, changes, 0, output) for name, changes in every.items()]
    # What only the target can tell is checked with it. It is not kept, since the trainings have it to themselves.
    first = runs[0].options
    if first.token is not None:
        raise ConfigError("token would be written into the options of every training; leave it out, and set HF_TOKEN")
    target = Target.load(first.target, dtype=first.dtype, device_map="cpu", **of_target(first))
    if not values.online:
        values = _with(reader, values, {"extraction": {"more_layers": _layers(values, runs, target)}})
    runs = [
        _run(reader, values, name, changes, seed, output) for seed in options.seeds for name, changes in chosen.items()
    ]
    for run in runs:
        _require_fit(run, target)
        _require_unchanged(run)
    if options.together:
        for group in by_seed(runs):
            with one_sentence("together"):
                require_alike([run.options for run in group])
    return runs


def by_seed(runs: Sequence[Run]) -> list[list[Run]]:
    """What is trained together."""
    return [[run for run in runs if run.seed == seed] for seed in dict.fromkeys(run.seed for run in runs)]


def _run(reader: ArgumentParser, values: Namespace, name: str, changes: dict[str, Any], seed: int, output: Path) -> Run:
    folder = output / "runs" / f"{folder_name(name)}-{seed}"
    with one_sentence(f"variant {name}"):
        changes = dict(changes)
        if file := changes.pop("config", None):
            values = _with(reader, values, yaml.safe_load(Path(find_config(file)).read_text(encoding="utf-8")))
        values = _with(reader, values, changes)
        # Features that are stored otherwise have a folder of their own.
        otherwise = [f"{option}-{value}" for option, value in changes.get("extraction", {}).items()]
        store = output / "-".join(["features", *otherwise])
        ours: dict[str, Any] = {"seed": seed, "output": str(folder), "measurement": {"limit": 0}}
        if values.features is None and not values.online:
            ours["features"] = str(store)
        values = _with(reader, values, ours)
        options = parsing.as_options(reader.instantiate(values).as_dict())
        options.check()
    # Nulls too: where shape.train reads the file, they go before the defaults of the target that ships.
    text = reader.dump(values, skip_unset=False)
    return Run(name, seed, folder, options, {k: v for k, v in yaml.safe_load(text).items() if k != "config"})


def _layers(values: Namespace, runs: Sequence[Run], target: Target) -> list[int]:
    """What has to be stored for all variants to read the same features."""
    found, size = set(values.extraction.more_layers), size_of(target.model)
    for run in runs:
        with one_sentence(f"variant {run.variant}"):
            found |= set(resolve(run.options, size, None).predictor.feature_layers)
    return sorted(found - {-1})


def _with(reader: ArgumentParser, values: Namespace, changes: Mapping[str, Any]) -> Namespace:
    """Options with some of them changed."""
    for name, given in changes.items():
        if isinstance(values.get(name), Namespace) and not isinstance(given, Mapping):
            raise ConfigError(f"{name} is {given!r}, which names several options; give these as a mapping")
    return reader.parse_object(dict(changes), values)


def _nested(change: str) -> dict[str, Any]:
    """ "a.b=1" -> {"a": {"b": 1}}."""
    names, equals, value = change.partition("=")
    if not equals:
        raise ConfigError(f"override {change} has no value; give NAME=VALUE")
    return nested(names, yaml.safe_load(value))


def nested(names: str, value: Any) -> dict[str, Any]:
    """ "a.b", 1 -> {"a": {"b": 1}}."""
    for name in reversed(names.split(".")):
        value = {name: value}
    return value


def merged_options(options: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Options with changes, group by group."""
    merged = dict(options)
    for name, value in changes.items():
        merged[name] = merged_options(merged.get(name, {}), value) if isinstance(value, Mapping) else value
    return merged


def _require_fit(run: Run, target: Target) -> None:
    with one_sentence(f"variant {run.variant}"):
        options = resolve(run.options, size_of(target.model), None)
        options.feature_options().check(target)
        network_config(options, target)


def _require_unchanged(run: Run) -> None:
    path = run.folder / "options.yaml"
    if not path.exists():
        return
    if found := differences(yaml.safe_load(path.read_text(encoding="utf-8")), run.values, _ALIKE):
        raise ConfigError(
            f"{run.folder} holds a training of {run.name} with other options ({', '.join(found)}); give another output "
            "folder, or delete it"
        )
