"""What speculation can bring for a target on this machine, before anyone trains, and after (`shape check`)."""

from contextlib import nullcontext, suppress
from dataclasses import asdict, astuple
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shape import bundled
from shape.data.backends import announce_sampling, sampling
from shape.drafters import Drafter, TrainedDrafter, TreeShape, make_drafter
from shape.drafters.cost import Costs, break_even, expected_length
from shape.drafters.recipes.drafter import RecipeDrafter
from shape.drafters.recipes.pack import Pack
from shape.errors import CheckpointError, ConfigError, DataError, require
from shape.evaluation.doctor import diagnose
from shape.evaluation.environment import Environment
from shape.evaluation.estimates import ENOUGH, Estimate
from shape.evaluation.markdown import show
from shape.evaluation.options import CheckOptions
from shape.evaluation.prompts import chosen_prompts, refuse_shared_ids, refuse_unfilled, that_fit
from shape.evaluation.results import SpeedResults
from shape.evaluation.speed import SpeedSetting, measure
from shape.generation.decoder import ShapeDecoder
from shape.generation.loading import draft_dtype, names_of, refuse_unknown
from shape.generation.planning import CANDIDATES, acceptance, plan, record_drafts
from shape.generation.timing import measure_costs
from shape.networks.config import MTP_TARGETS, ShapeConfig
from shape.networks.shape import ShapePredictor
from shape.networks.sizing import draft_vocab_size, parameters, width
from shape.target.loading import SOURCE, of_pair, of_target, only
from shape.target.model import Target
from shape.target.prepack import prepack
from shape.target.size import size_of

_RATES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_DEEPEST = 16  # of chains
_SHOWN_PLANS = 6
_EXAMINED = 4  # prompts on which the doctor tries its suspicions


def check(options: CheckOptions) -> dict[str, Any]:
    """The report as plain data: target, costs, what a drafter of some acceptance would bring, and plans.

    Raises:
        UnsupportedTarget: the target cannot be verified exactly, with the reason.
        DataError: no prompt fits into the target's positions.
    """
    require(options, "batch_size limit", least=1)
    require(options, "max_new_tokens", least=2)  # the first comes with the prefill
    require(options, "temperature", least=0)
    if options.limit < options.batch_size:
        raise ConfigError(
            f"batch_size {options.batch_size} cannot be filled with limit {options.limit} prompts; raise the limit"
        )
    asked = options.prompts or bundled.path("data", "validation.jsonl.gz")
    prompts, source = chosen_prompts(asked, options.limit, options.chat_template_kwargs)
    refuse_shared_ids(prompts, source)
    refuse_unknown(options.drafter or (), options.predictor, options.pack)
    pack = None if options.pack is None else Pack.load(options.pack)
    drafted = None
    if options.predictor is not None:
        decoder = ShapeDecoder.from_pretrained(
            predictor=options.predictor, target=options.target, dtype=options.dtype, **of_pair(options)
        )
    else:
        target = Target.load(options.target or "quickstart-target", dtype=options.dtype, **of_target(options))
        untrained = _untrained(target)
        decoder, drafted = ShapeDecoder(target, untrained), untrained.predictor.config.draft_size
    target = decoder.target
    off = announce_sampling(target, options.temperature)
    methods = _methods(options, target, decoder.drafter, pack)
    placed = that_fit(target, prompts, options.max_new_tokens)
    if not placed:
        raise DataError(
            f"no prompt of {source} and {options.max_new_tokens} new tokens fit into the {target.max_positions} "
            f"positions of target {target.name}; give shorter ones or a smaller max_new_tokens"
        )
    fitting, contexts = [prompt for prompt, _ in placed], [ids for _, ids in placed]
    if len(methods) > 1:
        refuse_unfilled(options.batch_size, len(fitting), f"{source} that fit")
    refused = f"a prompt and {options.max_new_tokens} new tokens exceed the target's {target.max_positions} positions"
    known = {prompt.id for prompt in fitting}
    skipped = {prompt.id: refused for prompt in prompts if prompt.id not in known}
    costs = measure_costs(decoder, options.batch_size, max(map(len, contexts)) + options.max_new_tokens)
    deep = None if decoder.drafter is None else decoder.drafter.with_tree(TreeShape(depth=_DEEPEST, width=1))
    deepest = _DEEPEST if deep is None or deep.tree is None else deep.tree.depth
    depths = [depth for depth in (1, 2, 4, 8) if depth <= deepest] if costs.draft else []
    report: dict[str, Any] = {
        "environment": asdict(Environment.capture(target.device)),
        "settings": {
            "prompts": source,
            "limit": len(contexts),
            "max_new_tokens": options.max_new_tokens,
            "temperature": options.temperature,
            "batch_size": options.batch_size,
            "switched_off": off,
        },
        "target": {
            "name": target.name,
            "parameters": target.model.num_parameters(),
            "dtype": target.precision,
            "device": str(target.device),
            "positions": target.max_positions,
            "verified_as": decoder.support.mode,
            "reason": decoder.support.reason,
            "identity": target.identity.to_dict(),
        },
        "predictor": options.predictor,
        "draft_vocab_size": drafted,
        "costs": asdict(costs),
        "chains": [_chain(costs, rate, deepest) for rate in _RATES] if costs.draft else [],
        "break_even": {depth: _break_even(costs, depth) for depth in depths},
    }
    how = {"max_new_tokens": options.max_new_tokens, "seed": options.seed, **sampling(options.temperature)}
    own = None if decoder.drafter is None else decoder.drafter.tree
    if options.predictor is not None and own is not None:
        answers = record_drafts(decoder, contexts, **how)
        if any(answers):  # not all of them ended with the prefill's own token
            trees = CANDIDATES if decoder.support.mode == "tree" else [one for one in CANDIDATES if one.width == 1]
            plans = plan(costs, answers, list(dict.fromkeys([own, *trees])))
            report["acceptance"] = acceptance(answers)
            report["plans"] = [asdict(one) for one in plans]
            report["own"] = next(asdict(one) for one in plans if one.shape == own)
    if isinstance(decoder.drafter, TrainedDrafter) and options.predictor is not None:
        found = diagnose(target, decoder.drafter.predictor, fitting[:_EXAMINED], options.max_new_tokens)
        report["doctor"] = asdict(found)
    report["measured"], count = [], len(fitting)
    if len(methods) > 1:
        setting = SpeedSetting(
            options.max_new_tokens, options.temperature, warmup=1, seed=options.seed, batch=options.batch_size
        )
        results = measure(target, methods, fitting, setting, label="check")
        report["measured"], report["brackets"] = _lines(results), "95 %" if len(results.records) >= ENOUGH else "range"
        skipped |= results.skipped
        count = len(results.records) * options.batch_size
    reasons = list(dict.fromkeys(skipped.values()))
    report["prompts"] = {"given": len(prompts), "measured": count, "reasons": reasons}
    return report


def _methods(
    options: CheckOptions, target: Target, own: Drafter | None, pack: Pack | None
) -> dict[str, Drafter | None]:
    """The drafters to measure, bound to the target: what does not fit it is said before anything is measured."""
    given: dict[str, Drafter] = {}
    learned: list[str] = []
    if options.predictor is not None and own is not None:
        given, learned = dict.fromkeys(names_of(own.name), own), [own.name]
    if pack is not None:
        given["recipes"] = RecipeDrafter(pack)
    names = options.drafter
    asked = names is not None and any("mtp" in each.split("+") for each in names)
    if "mtp" not in given and (asked or (names is None and target.config.model_type in MTP_TARGETS)):
        with nullcontext() if asked else suppress(CheckpointError):  # files may have left the layer out
            hub = only(SOURCE, of_target(options))
            if (layer := ShapeDecoder.from_pretrained(target=target, drafter="mtp", **hub).drafter) is not None:
                given["mtp"] = layer
    if names is None:
        learned += [name for name in ("recipes", "mtp") if name in given and name not in learned]
        names = ["ngram", "suffix", "lookahead", *learned, *(f"suffix+{one}" for one in learned)]
    methods: dict[str, Drafter | None] = {"none": None}
    for each in names:
        methods[each] = ShapeDecoder(target, make_drafter(each, given)).drafter
    return methods


def _lines(results: SpeedResults) -> list[dict[str, Any]]:
    """What each drafter brings, the fastest first: tokens per second, acceptance length, and speed-up against
    autoregressive decoding with its interval.
    """
    lines = [
        {
            "drafter": name,
            "tokens_per_second": line.tokens_per_second,
            "acceptance_length": line.acceptance_length.value,
            **dict(zip(("speed_up", "speed_up_low", "speed_up_high"), astuple(line.speed_up), strict=True)),
        }
        for name, line in results.summary.items()
    ]
    return sorted(lines, key=lambda line: -(line["tokens_per_second"] or 0.0))


def _untrained(target: Target) -> TrainedDrafter:
    """What `shape train` would make for this target: a draft costs the same whatever was learned."""
    size = size_of(target.model)

    def of_width(intermediate_size: int) -> ShapeConfig:
        return ShapeConfig(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            window=8,
            intermediate_size=intermediate_size,
            num_steps=8,
            token_conditioning="root",
            markov_rank=64,
            refinement="sinkhorn",
            refinement_dim=64,
            refinement_last_update="column",
            draft_vocab_size=draft_vocab_size(size.vocab_size, None),
            draft=asdict(TreeShape(depth=8, width=2, nodes=12)),
        )

    config = of_width(width(size, lambda intermediate_size: parameters(of_width(intermediate_size))))
    predictor = ShapePredictor(config)
    if config.draft_vocab_size is not None:
        predictor.draft_vocabulary = torch.arange(config.draft_vocab_size)
    predictor = predictor.to(target.device, draft_dtype(target, target.device)).eval()  # type: ignore[arg-type]
    prepack(predictor)
    return TrainedDrafter(predictor)


def _chain(costs: Costs, rate: float, deepest: int) -> dict[str, float]:
    """The best chain, up to some depth, if each drafted token is accepted with some probability; its forward is taken
    to cost as much as one over as many tokens.
    """

    def speed(depth: int) -> float:
        return expected_length(rate, depth) / costs.step_seconds(depth + 1, depth, 1)

    depth = max(range(deepest + 1), key=speed)
    return {
        "acceptance": rate,
        "depth": depth,
        "acceptance_length": expected_length(rate, depth),
        "speed_up": speed(depth) * costs.autoregressive,
    }


def _break_even(costs: Costs, depth: int) -> float | None:
    return break_even(
        depth, costs.draft_seconds(depth, 1) / depth, costs.step_seconds(depth + 1, 0, 1), costs.autoregressive
    )


def shape_name(shape: dict[str, Any] | None) -> str:
    """A shape in words."""
    if shape is None:
        return "no draft"
    form = f"chain of {shape['depth']}" if shape["width"] == 1 else f"tree {shape['width']} x {shape['depth']}"
    nodes = "" if shape["nodes"] is None or shape["width"] == 1 else f", {shape['nodes']} nodes"
    return form + nodes + (f", until {shape['threshold']:g}" if shape["threshold"] else "")


def show_report(report: dict[str, Any], console: Console) -> None:
    """Print a report as tables."""
    target, costs = report["target"], report["costs"]
    reason = f" ({target['reason']})" if target["reason"] else ""
    told = (
        f": {target['parameters'] / 1e6:.1f}M parameters, {target['dtype']} on "
        f"{target['device']}, verified as {target['verified_as']}s{reason}"
    )
    console.print(Text.assemble((target["name"], "bold"), told))
    table = Table("tokens per forward", "ms", "of one", box=None)
    for size, seconds in costs["verify"].items():
        table.add_row(str(size), f"{1e3 * seconds:.2f}", f"{seconds / costs['verify'][1]:.2f}")
    console.print(table)
    if costs["draft"]:
        parts = [f"{1e3 * start:.2f} + {1e3 * each:.2f} a pass" for start, each in costs["draft"].values()]
        console.print(f"a draft, ms: {', '.join(f'{part} (width {width})' for width, part in enumerate(parts, 1))}")
    if report["chains"]:
        if report["predictor"] is None:
            drafted = f"drafting from {report['draft_vocab_size']:,} tokens"
            console.print(f"the default predictor of shape train, {drafted}, if the target agrees so often:")
        table = Table("a drafted token is accepted with", "best depth", "tokens per step", "speed-up", box=None)
        for one in report["chains"]:
            depth, length = str(one["depth"] or "none"), show(one["acceptance_length"])
            table.add_row(f"{one['acceptance']:.1f}", depth, length, show(one["speed_up"], unit="x"))
        console.print(table)
        shown = ", ".join(f"{show(rate)} (depth {depth})" for depth, rate in report["break_even"].items())
        console.print(f"a chain breaks even at: {shown}")
    if "acceptance" in report:
        ranks = range(1, len(report["acceptance"][0]) + 1)
        table = Table("depth", *(f"rank {rank}" for rank in ranks), box=None)
        for level, rates in enumerate(report["acceptance"], 1):
            table.add_row(str(level), *(f"{rate:.2f}" for rate in rates))
        console.print("how often the text goes on with a node's child of each rank, where it came as far as the node:")
        console.print(table)
    if "doctor" in report:
        _show_diagnosis(report["doctor"], console)
    if "plans" in report:
        console.print(_plans(report["own"], report["plans"]))
    if reasons := (asked := report["prompts"])["reasons"]:
        console.print(f"{asked['measured']} of {asked['given']} prompts measured ({'; '.join(reasons)})")
    if report["measured"]:
        gain = f"speed-up ({report['brackets']})"
        table = Table("measured on these prompts", "tokens/s", "tokens/step", gain, box=None)
        for one in report["measured"]:
            gain = Estimate(one["speed_up"], one["speed_up_low"], one["speed_up_high"]).text("x")
            speed = show(one["tokens_per_second"], ".0f")
            table.add_row(one["drafter"], speed, show(one["acceptance_length"]), gain)
        console.print(table)
        console.print(f"for such prompts: --drafter {report['measured'][0]['drafter']}")


def _show_diagnosis(found: dict[str, Any], console: Console) -> None:
    said = f"by teacher forcing, and {found['decoded']:.2f} decoded, in chains on the target's own answers"
    console.print(f"acceptance length {found['forced']:.2f} {said}")
    if found["cause"] is None:
        return
    table = Table("if it is", "acceptance length would be", box=None)
    for cause, length in sorted(found["tried"].items(), key=lambda tried: -tried[1])[:_SHOWN_PLANS]:
        table.add_row(cause, show(length))
    console.print(table)
    told = f" Fits best: {found['cause']}. {found['remedy']}."
    console.print(Text.assemble(("Far below what it should accept.", "bold red"), told))


def _plans(own: dict[str, Any], plans: list[dict[str, Any]]) -> Table:
    shown = plans[:_SHOWN_PLANS]
    if own not in shown:
        shown.append(own)
    table = Table("draft, the fastest first", "tokens/step", "nodes", "passes", "ms/step", "speed-up", box=None)
    table.columns[0].no_wrap = True
    for one in shown:
        label = shape_name(one["shape"]) + (" (its own)" if one == own else "")
        figures = [show(one[key], ".1f") for key in ("nodes", "passes")]
        milliseconds = show(1e3 * one["seconds"])
        table.add_row(label, show(one["acceptance_length"]), *figures, milliseconds, show(one["speed_up"], unit="x"))
    return table
