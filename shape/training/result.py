"""After training: the best weights exported, what was exported measured, and what came out said."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from shlex import quote
from textwrap import shorten
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from shape.data.backends import sampling
from shape.data.conversations import Prompt, evenly, evenly_by_category
from shape.evaluation.doctor import acceptance, in_chains
from shape.evaluation.environment import Environment, matrix_product_peak, peak_memory
from shape.evaluation.methods import Configured
from shape.evaluation.results import SpeedResults
from shape.evaluation.speed import SpeedSetting, measure
from shape.files import write_whole
from shape.generation.decoder import ShapeDecoder
from shape.generation.engine import ShapeOutput
from shape.networks.base import Predictor
from shape.networks.export import export, export_model
from shape.target.model import Target
from shape.target.options import TargetOptions
from shape.training.callbacks import CountFlops
from shape.training.module import DrafterModule
from shape.training.options import TrainOptions
from shape.training.validation import DecodingValidation

_WHOLE = "shape, drafts verified whole"
_COMPARED = 8  # validation prompts on which decoding is compared with training
_LONGEST_EXAMPLE = 200  # characters of the prompt in the command to try
_LEAST_OF_TRAINED = 0.9  # rounding moves single tokens, a mismatch most of them


def export_and_measure(
    options: TrainOptions,
    module: DrafterModule,
    validation: DecodingValidation,
    prompts: Sequence[Prompt],
    more: Mapping[str, Any],
) -> None:
    """Export the best weights, measure what was exported, and say what came out.

    Args:
        more: of the training, for its record.
    """
    output, target, console = Path(options.output), module.target, Console(markup=False)
    predictor = type(module.predictor)(module.predictor.config)  # of its own: processes may have shared the other's
    validation.load_best(predictor)
    predictor.eval().to(target.device)  # type: ignore[arg-type]
    record: dict[str, Any] = {
        "command": Environment.capture(target.device).command,
        "target": options.target,
        "data": options.data or "the conversations that ship with shape",
        "steps": module.trainer.global_step,
        "validation_seconds": round(validation.seconds, 1),
        "validation": {"prompts": len(validation.prompts), **(validation.best or {})},
        "peak_memory_gb": round(peak_memory(module.trainer.strategy.root_device), 2),
        **more,
    }
    _export(predictor, output, target, record)
    if target.sharded:  # of which this process alone could not run a layer
        pair = f"--target {quote(options.target)} --predictor {quote(str(output))}{_as_in_training(options)}"
        command = f"shape bench {pair} --device_map auto"
        console.print(f"the predictor is in {output}; measure it:\n  {command}", highlight=False, soft_wrap=True)
        return
    decoder = ShapeDecoder.from_pretrained(output, target=target)
    if isinstance(predictor, Predictor):
        warn_of_mismatch(target, predictor, validation, console)
    if "positions_per_second" in record:
        console.print(
            f"training: {record['positions_per_second']:,.0f} positions/s, {record['gflop_per_second']:,.0f} GFLOP/s, "
            f"{record['share_of_peak']:.0%} of what a large matrix product reaches here"
        )
    if best := validation.best:
        console.print(
            f"validation: acceptance length {best['value']:.2f} [{best['low']:.2f}, {best['high']:.2f}] at step "
            f"{best['step']} of {module.trainer.global_step}, {len(validation.prompts)} prompts, which chose that step"
        )
    if prompts and options.measurement.limit:
        results = _measure(options, decoder, prompts)
        Console().print(results.table())
        record["acceptance_length"] = asdict(results.summary[_WHOLE].acceptance_length)
        record["measured_prompts"] = f"{min(len(prompts), options.measurement.limit)}, which chose nothing"
        record["speed_up"] = asdict(results.summary["shape"].speed_up)
        place = results.environment
        record["measured_on"] = f"{place.device}, {place.cpu}, {place.threads} threads, {place.date}"
        _export(predictor, output, target, record)
        write_whole(output / "measurement.json", results.to_json())
    elif options.measurement.limit:
        told = "the data has no chats to ask, or none within max_length that leave room for an answer"
        console.print(f"speed was not measured: {told}; give --measurement.prompts")
    _show_sample(decoder, prompts, options, console)
    console.print(f"the predictor is in {output}; try it:", highlight=False)
    text = shorten(prompts[0].turns[0], _LONGEST_EXAMPLE, placeholder="...") if prompts else "Hello"
    pair = "" if isinstance(predictor, Predictor) else f"--target {quote(options.target)} "
    given = _as_in_training(options)
    command = f"  shape generate {pair}--predictor {quote(str(output))}{given} --prompt {quote(text)}"
    console.print(command, highlight=False, soft_wrap=True)


def _as_in_training(options: TrainOptions) -> str:
    """The options by which other commands read the target, and its prompts, as training did."""
    names = [field.name for field in fields(TargetOptions) if field.name != "token"]
    given = {name: getattr(options, name) for name in (*names, "dtype", "chat_template_kwargs")}
    return "".join(
        f" --{name} {quote(value if isinstance(value, str) else json.dumps(value))}"
        for name, value in given.items()
        if value not in (None, False, {})
    )


def _export(predictor: PreTrainedModel, output: Path, target: Target, record: dict[str, Any]) -> None:
    if isinstance(predictor, Predictor):
        export(predictor, output, target.identity, record)
    else:
        export_model(predictor, output, target, record)


def throughput(options: TrainOptions, module: DrafterModule, seconds: float, counted: CountFlops) -> dict[str, float]:
    """How fast it trained: model-FLOPs use is against a large product in the precision of the training's own.

    Args:
        seconds: of optimisation alone.
    """
    steps = module.trainer.global_step
    if seconds <= 0 or not counted.flops:
        return {}
    mixed = "bf16" in options.trainer.chosen_precision()
    device = module.trainer.strategy.root_device
    peak = module.trainer.world_size * matrix_product_peak(device, torch.bfloat16 if mixed else torch.float32)
    rate = counted.flops * steps / seconds
    return {
        "positions_per_second": round(options.training.batch_size * steps / seconds, 1),
        "gflop_per_second": float(f"{rate / 1e9:.3g}"),
        "share_of_peak": float(f"{rate / peak:.2g}"),  # of a tiny predictor far below a thousandth
    }


def warn_of_mismatch(target: Target, predictor: Predictor, validation: DecodingValidation, console: Console) -> None:
    """Warn where decoding accepts less than teacher forcing on the same texts says it should."""
    prompts = evenly(validation.prompts, _COMPARED)
    answers, decoded = in_chains(target, predictor, prompts, validation.max_new_tokens)
    forced = acceptance(target, predictor, answers)
    if decoded < _LEAST_OF_TRAINED * forced:
        console.print(
            f"WARNING: chains decode with acceptance length {decoded:.2f} where the same texts, read as in "
            f"training, give {forced:.2f}: what the network reads in decoding is not what it was trained on. Do not "
            "trust this predictor; please report it, with the command and the target's architecture.",
            style="red",
            highlight=False,
        )


def _measure(options: TrainOptions, decoder: ShapeDecoder, prompts: Sequence[Prompt]) -> SpeedResults:
    """As a user decodes ("shape", whatever drafts), and so that the acceptance length is the predictor's own."""
    chosen, drafter = options.measurement, decoder.drafter
    return measure(
        decoder.target,
        {
            "transformers": "transformers",
            "autoregressive": None,
            "shape": drafter,
            _WHOLE: Configured(drafter, whole=True),
        },
        evenly_by_category(prompts, chosen.limit),
        SpeedSetting(chosen.max_new_tokens, chosen.temperature, seed=options.seed),
        progress=options.trainer.enable_progress_bar,
        label=f"{options.output}, measured after training",
    )


def _show_sample(decoder: ShapeDecoder, prompts: Sequence[Prompt], options: TrainOptions, console: Console) -> None:
    if not prompts:
        return
    ids = decoder.target.encode(prompts[0].opening, prompts[0].template)
    length = options.measurement.max_new_tokens
    out = decoder.generate(ids, **sampling(0.0), max_new_tokens=length, return_dict_in_generate=True)
    assert isinstance(out, ShapeOutput)
    answer = decoder.tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)
    console.print(f"\n> {prompts[0].turns[0]}\n{answer}\n", markup=False, highlight=False)
