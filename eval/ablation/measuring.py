"""Measures trained variants side by side, and looks into their drafts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from eval.ablation.options import AblationOptions, folder_name
from eval.ablation.plan import Run
from eval.ablation.results import Ablation, Anatomy, Figures, Line, Trained
from eval.ablation.search import SHAPES, speeds_by_shape
from eval.ablation.texts import texts_of
from eval.draft_shapes import shaped
from shape.data.backends import sampling
from shape.data.conversations import Prompt, evenly_by_category
from shape.drafters import Drafter, TreeShape, make_drafter
from shape.errors import ConfigError
from shape.evaluation.environment import Environment
from shape.evaluation.methods import Method, TransformersMethod
from shape.evaluation.prompts import chosen_prompts, that_fit
from shape.evaluation.results import AUTOREGRESSIVE, SpeedResults, Tally
from shape.evaluation.speed import SpeedSetting, measure
from shape.generation.decoder import ShapeDecoder
from shape.generation.engine import ShapeOutput
from shape.target.loading import of_target
from shape.target.model import Target, announce
from shape.training.options import TrainOptions


def examine(
    target: Target, drafter: Drafter, contexts: Sequence[Tensor], temperature: float, max_new_tokens: int, seed: int = 0
) -> Anatomy:
    """Decode prompts, (1, L) ids each, and look into every draft.

    Args:
        seed: of the first prompt; the others count up, as in `shape.evaluation.speed.measure`.
    """
    decoder = ShapeDecoder(target, drafter, fall_back=False)
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
    return Anatomy(tuple(asked), tuple(accepted))


def _joined(anatomies: Sequence[Anatomy]) -> Anatomy:
    """Of several seeds."""
    sides = ([one.asked for one in anatomies], [one.accepted for one in anatomies])
    return Anatomy(*(tuple(map(sum, zip_longest(*counts, fillvalue=0))) for counts in sides))


def prompts_of(options: AblationOptions, runs: TrainOptions) -> tuple[list[Prompt], str]:
    """The prompts to measure on, and what they are called."""
    given = options.measure.prompts
    if given is None and runs.data is not None:
        raise ConfigError("measure.prompts is not given, and the bundled prompts go with the bundled data; give a file")
    return chosen_prompts(given, options.measure.limit, runs.chat_template_kwargs)


def untrained_methods(names: Sequence[str]) -> dict[str, Method]:
    """The methods without training, by name."""
    known: dict[str, Method] = {AUTOREGRESSIVE: None, **{name: name for name in get_args(TransformersMethod)}}
    return {name: known[name] if name in known else make_drafter(name) for name in names}


def measure_all(
    options: AblationOptions,
    runs: Sequence[Run],
    trained: dict[str, dict[int, Trained]],
    prompts: list[Prompt],
    source: str,
    tuning: Sequence[Prompt] = (),
) -> Ablation:
    """Every trained variant, side by side.

    Args:
        tuning: prompts on which each is first given its shape of draft, by its first seed, at every temperature.
    """
    chosen, given = options.measure, runs[0].options
    target = Target.load(given.target, dtype=chosen.dtype, device_map=chosen.device_map, **of_target(given))
    announce(target)
    others = untrained_methods(chosen.methods)
    trees: dict[str | None, TreeShape | None] = {name: tree for name, tree in options.trees.items()} or {None: None}
    lines = {_label(name, tree, trained): (name, tree) for name in trained for tree in trees}
    # Method names of the measurement, by line and seed.
    names = {
        label: {seed: label if len(options.seeds) == 1 else f"{label}, seed {seed}" for seed in options.seeds}
        for label in lines
    }
    folders = {(run.variant, run.seed): run.folder for run in runs}
    drafters: dict[float, dict[str, Drafter]] = {temperature: {} for temperature in chosen.temperatures}
    fitted: dict[tuple[str, float], dict[str, float]] = {}
    for label, (variant, tree) in lines.items():
        for seed, name in names[label].items():
            decoder = ShapeDecoder.from_pretrained(folders[variant, seed], target=target, tree=trees[tree])
            assert decoder.drafter is not None
            for temperature, at in drafters.items():
                at[name] = decoder.drafter
                if tuning:
                    if seed == options.seeds[0]:
                        folder = options.home / "shapes" / f"{folder_name(variant)}-t{temperature:g}"
                        by_shape = speeds_by_shape(target, decoder.drafter, tuning, temperature, chosen, folder)
                        fitted[label, temperature] = by_shape
                    best = shaped(decoder.drafter, SHAPES[next(iter(fitted[label, temperature]))])
                    assert best is not None  # it was measured
                    at[name] = best
    results = {
        temperature: _speed(options, target, {**others, **at}, prompts, source, temperature)
        for temperature, at in drafters.items()
    }
    examined = that_fit(target, evenly_by_category(prompts, chosen.examined), chosen.max_new_tokens)
    contexts = [torch.tensor([ids], device=target.device) for _, ids in examined]
    found: dict[str, dict[float, Figures]] = {label: {} for label in lines}
    for temperature, result in results.items():
        groups = {**{name: [name] for name in others}, **{label: list(own.values()) for label, own in names.items()}}
        together = pooled(result, groups)
        for label, own in names.items():
            anatomies = [
                examine(target, drafters[temperature][name], contexts, temperature, chosen.max_new_tokens, chosen.seed)
                for name in own.values()
            ]
            found[label][temperature] = Figures(
                together.summary[label],
                {seed: result.summary[name].acceptance_length.value for seed, name in own.items()},
                {seed: result.summary[name].speed_up.value for seed, name in own.items()},
                _step_ms(together.total[label]),
                _joined(anatomies),
                fitted.get((label, temperature), {}),
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
        texts_of(options, runs, target, prompts, source),
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
        SpeedSetting(
            chosen.max_new_tokens, temperature, chosen.repeats, chosen.warmup, seed=chosen.seed, fall_back=False
        ),
        label=f"{options.title}, temperature {temperature:g}",
        source=source,
        journal=journal_of(output, temperature),
    )
    journal_of(output, temperature).with_suffix(".json").write_text(results.to_json(), encoding="utf-8")
    return results


def journal_of(output: Path, temperature: float) -> Path:
    return output / f"measured-t{temperature:g}.jsonl"


def _label(variant: str, tree: str | None, variants: Mapping[str, Any]) -> str:
    if tree is None:
        return variant
    return tree if len(variants) == 1 else f"{variant}, {tree}"


def _step_ms(total: Tally) -> dict[str, float | None]:
    parts = {"draft": total.draft_seconds, "verify": total.verify_seconds, "commit": total.commit_seconds}
    return {name: 1e3 * seconds / total.forwards if total.split else None for name, seconds in parts.items()}


def pooled(results: SpeedResults, groups: Mapping[str, Sequence[str]]) -> SpeedResults:
    """The same answers with methods taken together, for instance one predictor trained with several seeds.

    Without details. The counts of a group are summed prompt by prompt, so that every figure stays a ratio of sums and
    every interval is still over prompts.

    Args:
        groups: name in the new results -> methods, all of one kind, of these.
    """
    records = tuple(
        replace(
            record,
            tallies={group: Tally.total([record.tallies[name] for name in names]) for group, names in groups.items()},
            details={},
        )
        for record in results.records
    )
    methods = {
        group: "; ".join(dict.fromkeys(results.methods[one] for one in names)) for group, names in groups.items()
    }
    return replace(results, settings={**results.settings, "methods": methods}, records=records)
