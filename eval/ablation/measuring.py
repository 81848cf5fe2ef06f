"""Measures trained variants side by side, and looks into their drafts."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any, cast, get_args

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from eval.ablation.options import AblationOptions, folder_name
from eval.ablation.plan import Run
from eval.ablation.results import Ablation, Anatomy, Figures, Line, Trained
from eval.ablation.search import SHAPES, shaped, speeds_by_shape
from eval.ablation.texts import texts_of
from shape.data.conversations import Prompt, evenly_by_category
from shape.drafters import Drafter, TrainedDrafter, TreeShape, make_drafter
from shape.drafters.base import Committed, Wrapped
from shape.errors import ConfigError
from shape.evaluation.environment import Environment
from shape.evaluation.methods import Method, Outside
from shape.evaluation.prompts import chosen_prompts
from shape.evaluation.results import AUTOREGRESSIVE, SpeedResults, Tally
from shape.evaluation.runner import sampling
from shape.evaluation.speed import measure
from shape.generation.decoder import ShapeDecoder
from shape.generation.engine import ShapeOutput
from shape.target.loading import of_target
from shape.target.model import Target, announce
from shape.training.options import TrainOptions
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree


class _Counting(Wrapped):
    """Another drafter, whose operations are counted: of drafts, and of taking in what verification made known, where
    some drafters run their network too. One per draft; shared by the copies that the decoder makes.
    """

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.flops = []  # type: ignore[var-annotated]

    def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        if isinstance(self.inner, TrainedDrafter):
            self.inner.single = None  # what its compiled loop computes is not seen
        with FlopCounterMode(display=False) as counter:
            tree = self.inner.draft(committed, sampler)
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


def prompts_of(options: AblationOptions, runs: TrainOptions) -> tuple[list[Prompt], str]:
    """The prompts to measure on, and what they are called."""
    given = options.measure.prompts
    if given is None and runs.data is not None:
        raise ConfigError("measure.prompts is not given, and the bundled prompts go with the bundled data; give a file")
    return chosen_prompts(given, options.measure.limit, runs.chat_template_kwargs)


def beside(names: Sequence[str]) -> dict[str, Method]:
    """The methods without training, by name."""
    return {
        name: cast(Outside, name)
        if name in get_args(Outside)
        else None
        if name == AUTOREGRESSIVE
        else make_drafter(name)
        for name in names
    }


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
    others = beside(chosen.methods)
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
    contexts = [
        target.encode(prompt.opening, prompt.template) for prompt in evenly_by_category(prompts, chosen.examined)
    ]
    room = (target.max_positions or sys.maxsize) - chosen.max_new_tokens
    contexts = [context for context in contexts if context.shape[1] <= room]
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
        max_new_tokens=chosen.max_new_tokens,
        temperature=temperature,
        repeats=chosen.repeats,
        warmup=chosen.warmup,
        seed=chosen.seed,
        label=f"{options.title}, temperature {temperature:g}",
        source=source,
        journal=journal_of(output, temperature),
        fall_back=False,
    )
    journal_of(output, temperature).with_suffix(".json").write_text(results.to_json())
    return results


def journal_of(output: Path, temperature: float) -> Path:
    return output / f"measured-t{temperature:g}.jsonl"


def _label(variant: str, tree: str | None, variants: Mapping[str, Any]) -> str:
    if tree is None:
        return variant
    return tree if len(variants) == 1 else f"{variant}, {tree}"


def _step_ms(total: Tally) -> dict[str, float | None]:
    parts = {"draft": total.draft_seconds, "verify": total.verify_seconds, "commit": total.commit_seconds}
    return {name: 1e3 * seconds / total.forwards if total.forwards else None for name, seconds in parts.items()}


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
