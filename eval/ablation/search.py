"""What each variant is trained with and how it drafts, found on validation prompts alone, for all by the same rule."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

from eval.ablation.options import AblationOptions, MeasureOptions, SearchOptions
from eval.ablation.plan import merged_options, nested, plan
from eval.ablation.training import train_all
from eval.draft_shapes import shape_name, shaped
from shape import bundled
from shape.data.conversations import Prompt
from shape.data.reading import load_prompts
from shape.drafters import Drafter, TreeShape
from shape.errors import CheckpointError, ConfigError
from shape.evaluation.methods import Method
from shape.evaluation.results import AUTOREGRESSIVE, SpeedResults
from shape.evaluation.speed import SpeedSetting, measure_in, refuse_results, settings_of
from shape.target.model import Target
from shape.training.options import TrainOptions

_SHAPES = (
    *(TreeShape(width=1, depth=depth) for depth in (2, 4, 6, 8)),
    *(TreeShape(width=1, depth=8, threshold=limit) for limit in (0.1, 0.2)),
    *(TreeShape(width=2, depth=depth, nodes=nodes) for depth, nodes in ((4, 6), (6, 8), (8, 12))),
    TreeShape(width=2, depth=8, nodes=12, threshold=0.1),
    *(TreeShape(width=width, depth=depth, nodes=nodes) for width, depth, nodes in ((3, 4, 8), (4, 4, 16), (4, 8, 24))),
)
SHAPES = {shape_name(shape): shape for shape in _SHAPES}


def tuning_prompts(given: TrainOptions, measured: Sequence[Prompt]) -> list[Prompt]:
    """Those of validation, by which settings and shapes are chosen.

    Raises:
        ConfigError: there are none of their own, or one of them is measured too.
    """
    if given.validation_data is None and given.data is not None:
        raise ConfigError("a search needs prompts of its own: give common.validation_data")
    source = given.validation_data or bundled.path("data", "validation.jsonl.gz")
    found = load_prompts(source, given.chat_template_kwargs)
    seen = {_text(prompt) for prompt in measured}
    if both := [prompt.id for prompt in found if _text(prompt) in seen]:
        raise ConfigError(f"prompt {both[0]} of {source} is measured too, and must not choose anything; leave it out")
    return found


def _text(prompt: Prompt) -> tuple[str, ...]:
    return tuple(message.content for message in prompt.messages)


def candidates(chosen: SearchOptions, own: Mapping[str, Sequence[Any]] | None) -> list[dict[str, Any]]:
    """What a variant is tried with, option by option; the first is the variant as it is.

    Args:
        own: options and values of this variant, instead of the search's.
    """
    draw, columns = Random(0), []
    for values in (over := own or chosen.over).values():
        columns.append([values[place % len(values)] for place in range(chosen.candidates - 1)])
        draw.shuffle(columns[-1])
    found: list[dict[str, Any]] = [{}]
    for row in zip(*columns, strict=True):
        if (drawn := dict(zip(over, row, strict=True))) not in found:
            found.append(drawn)
    return found


def search(options: AblationOptions) -> AblationOptions:
    """The options with those of every variant that its search found; the same options where none is asked for.

    A round is a training of every candidate. What was tried is kept in `search/search.json` of the trainings' folder,
    and a variant for which that already has the answer of the same search is not searched for again.

    Raises:
        CheckpointError: no training of a variant came to its end.
    """
    if options.search is None:
        return options
    chosen, home = options.search, options.home / "search"
    chosen.check()
    variants = options.chosen()
    every = {
        label: json.loads(json.dumps(candidates(chosen, (options.variants[label] or {}).get("search"))))
        for label in variants
    }
    kept = home / "search.json"
    tried, asked_before = _tried(kept, chosen)
    left = {
        label: found
        for label, found in every.items()
        if asked_before.get(label, found) != found or not _same(found, tried.get(label, []))
    }
    tried |= {label: [] for label in left}
    for number in range(chosen.rounds if left else 0):
        shares = {label: _share(chosen, len(found)) for label, found in left.items()}
        trials: dict[str, dict[str, Any] | None] = {
            f"{label} {place}": _merged(variants[label], candidate, chosen.tree, shares[label])
            for label, found in left.items()
            for place, candidate in enumerate(found)
        }
        asked = replace(
            options, variants={**options.variants, **trials}, only=list(trials), search=None, seeds=options.seeds[:1],
            trainings=None, output=str(home / f"round-{number + 1}"),
            features=options.features or str(options.home / "features"),
        )  # fmt: skip
        runs = plan(asked)
        trained = train_all(runs, options.jobs, needed=False)
        for label, found in left.items():
            ended = [(trained.get(f"{label} {place}"), candidate) for place, candidate in enumerate(found)]
            records = [(next(iter(one.values())), candidate) for one, candidate in ended if one is not None]
            if not records:
                raise CheckpointError(f"no training of {label} came to its end in the search; see {home}")
            records.sort(key=lambda one: -one[0].record["validation"]["value"])
            tried[label] += [
                {"round": number + 1, "commit": one.environment.get("commit"), "given": shares[label],
                 "options": candidate, "steps": one.steps, "positions_per_second": one.positions_per_second,
                 **one.record["validation"]}
                for one, candidate in records
            ]  # fmt: skip
            left[label] = [candidate for _, candidate in records[: max(2, -(-len(found) // 3))]]
    best = {label: _best(records)["options"] for label, records in tried.items()}
    if left:
        home.mkdir(parents=True, exist_ok=True)
        kept.write_text(
            json.dumps(
                {"asked": asdict(chosen), "candidates": asked_before | every, "found": best, "tried": tried}, indent=1
            ),
            encoding="utf-8",
        )
    settled: dict[str, dict[str, Any] | None] = {
        label: _merged(what, best[label], chosen.tree) for label, what in variants.items()
    }
    return replace(options, variants={**options.variants, **settled}, search=None)


def _tried(kept: Path, chosen: SearchOptions) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """What an earlier search tried, by variant, where it was asked for the same, and the candidates that it had, of
    which older records say nothing.
    """
    if not kept.exists():
        return {}, {}
    record = json.loads(kept.read_text(encoding="utf-8"))
    return (record["tried"], record.get("candidates", {})) if record["asked"] == asdict(chosen) else ({}, {})


def _same(found: Sequence[dict[str, Any]], tried: Sequence[dict[str, Any]]) -> bool:
    """Whether these candidates were tried, of which some may not have come to their end."""
    return bool(tried) and all(one["options"] in found for one in tried)


def _best(tried: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the last round, whose records are behind the others', the first, which has the longest acceptance."""
    return next(one for one in tried if one["round"] == tried[-1]["round"])


def _share(chosen: SearchOptions, among: int) -> dict[str, Any]:
    """The options that end the training of each of so many candidates of a round."""
    if chosen.steps is not None:
        return {"training.steps": chosen.steps // chosen.rounds // among, "training.max_minutes": None}
    return {"training.max_minutes": chosen.seconds / chosen.rounds / among / 60}


def _merged(
    variant: Mapping[str, Any], candidate: Mapping[str, Any], tree: TreeShape, share: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a variant changes, with a candidate's options, the search's shape of draft, and its share of training."""
    merged = {**variant, "tree": asdict(tree)}
    for option, value in {**candidate, **(share or {})}.items():
        merged = merged_options(merged, nested(option, value))
    return merged


# ------------------------------------------------------------------------------------------------- shapes of drafts


def speeds_by_shape(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    temperature: float,
    chosen: MeasureOptions,
    folder: Path,
) -> dict[str, float]:
    """Tokens per second of a drafter on these prompts with every shape, by its name, the fastest first; measured side
    by side, once, and kept in the folder.

    Raises:
        ConfigError: what is kept is of another predictor, target or way of measuring.
    """
    kept, source = folder / "results.json", "validation prompts"
    shapes = {label: shaped(drafter, shape) for label, shape in SHAPES.items()}
    methods: dict[str, Method] = {AUTOREGRESSIVE: None}
    methods |= {label: other for label, other in shapes.items() if other is not None}
    setting = SpeedSetting(chosen.max_new_tokens, temperature, seed=chosen.seed, fall_back=False)
    refuse_results(kept, settings_of(target, methods, prompts, source, setting))
    if not kept.exists():
        measure_in(folder, target, methods, prompts, setting, source=source)
    summary = SpeedResults.from_json(kept.read_text(encoding="utf-8")).summary
    found = {label: summary[label].tokens_per_second or 0.0 for label in SHAPES if label in summary}
    return dict(sorted(found.items(), key=lambda one: -one[1]))
