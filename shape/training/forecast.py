"""What a training takes: the network, memory, disk, steps and hours, and what a draft will cost.

Counted from the options, the target's size and a sample of the data; hours are those that `shape.training.dry_run`
measures, or follow from an accelerator that is assumed, and say which.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, cast

import torch

from shape.data.statistics import DataStatistics
from shape.features.costs import costs, writing
from shape.features.manifest import state_bytes
from shape.features.options import CostOptions
from shape.files import human_bytes, human_time
from shape.networks.config import ShapeConfig
from shape.networks.layers import SCORES_BYTES
from shape.networks.sizing import parameters
from shape.target.loading import dtype_name
from shape.target.size import Size, bits_of
from shape.training.chunks import CHUNK_BYTES
from shape.training.defaults import network_config
from shape.training.options import TrainOptions

_BYTES_LEARNED = 16  # of a parameter in training: float32 weight, gradient, and AdamW's two means
_BYTES_GATHERED = 8  # of a parameter that processes share, for a step: weight and gradient
_BYTES_KEPT = 12  # of a parameter in a checkpoint: weight and means
_CHECKPOINTS = 3  # the last, the one before, and one that is being written
_MANY_EPOCHS = 100  # over the data; those that follow from it are at most forty
_LOGITS = 6  # tensors of as many numbers as a chunk's logits: measured so on a CPU, a seventh less in mixed precision


class Draft(NamedTuple):
    """Cost of a whole draft over that of a step of one token."""

    relative: float
    how: str


class Hours(NamedTuple):
    """Of each part of the work, and how they are known."""

    parts: Mapping[str, float]
    how: str


class Forecast:
    """Of one training: what is counted, of memory that of one device, and what was measured where it was.

    Args:
        options: resolved.
        dtype: of the target.

    Attributes:
        learned: parameters of the network.
        memory, disk: bytes by what they are for.
    """

    def __init__(
        self,
        options: TrainOptions,
        size: Size,
        text: DataStatistics,
        dtype: torch.dtype,
        draft: Draft | None = None,
        hours: Hours | None = None,
    ) -> None:
        self.options, self.size, self.text = options, size, text
        self.learned = network_size(options, size)
        self.memory = {
            "weights, gradients, optimiser": _bytes_of_learned(options) * self.learned,
            "target": target_bytes(options, size, dtype),
            "a portion of a step": _portion(options, size, text),
        }
        written = options.regeneration.batch_size if options.writes_answers else 0
        # Of each text, and of the slots that are allocated behind it at most (`shape.generation.prefill`).
        tokens = written * (cast(int, options.max_length) + options.longest_answer + 64)
        self.answering = {"target": self.memory["target"], "keys and values": tokens * size.cache * dtype.itemsize / 2}
        self.disk: dict[str, float] = {"checkpoints": (_CHECKPOINTS * _BYTES_KEPT + 8) * self.learned}
        if not options.online:
            stored = options.extraction.feature_dtype or dtype_name(dtype)
            each = state_bytes(stored, size.hidden_size, len(options.feature_options().stored))
            self.disk = {"features": text.stored_bytes(options.extraction.before, each), **self.disk}
        read = weights_read(options, size, self.learned)
        self.draft = draft or Draft(read / size.read, "by the weights read, not measured")
        self.hours = hours or assumed(options, size, text, self.learned)

    @property
    def lines(self) -> list[str]:
        """For people; the first two are the plan."""
        predictor, training, size, text = self.options.predictor, self.options.training, self.size, self.text
        drafted = predictor.draft_vocab_size or size.vocab_size
        width = "" if predictor.intermediate_size is None else f"width {predictor.intermediate_size:,}, "
        parts = self.hours.parts
        times = ", ".join(f"{name} {human_time(3600 * hours)}" for name, hours in parts.items())
        epochs = cast(int, training.steps) * training.batch_size / max(text.positions, 1)
        advice = "" if epochs <= _MANY_EPOCHS else "; give more conversations, or fewer --training.steps"
        return [
            f"plan: {predictor.kind} of {self.learned / 1e6:,.1f}M parameters ({width}blocks {predictor.num_layers}), "
            f"drafting from {drafted:,} of {size.vocab_size:,} tokens; a draft costs {self.draft.relative:.2g} of a "
            f"step of one token ({self.draft.how})",
            f"plan: {text.positions:,} positions of {text.conversations:,} conversations of at most "
            f"{self.options.max_length:,} tokens; {training.steps:,} steps of {training.batch_size:,}, which is "
            f"{f'{epochs:,.0f}' if epochs > _MANY_EPOCHS else f'{epochs:.3g}'} epochs{advice}",
            f"target: {size.parameters / 1e6:,.1f}M parameters, {size.positions or 'unlimited'} positions",
            f"memory: about {_listed(self.memory)}"
            + (f"; while answering up to about {_listed(self.answering)}" if self.answering["keys and values"] else ""),
            f"disk: about {_listed(self.disk)}",
            f"time: about {human_time(3600 * sum(parts.values()))} ({times}), {self.hours.how}; without validation and "
            "the measurement at the end",
        ]


def _bytes_of_learned(options: TrainOptions) -> float:
    """Of each parameter in training, in one process."""
    if options.trainer.strategy == "fsdp":
        return _BYTES_LEARNED / options.trainer.processes + _BYTES_GATHERED
    return _BYTES_LEARNED + 4 * (options.training.ema is not None)


def target_bytes(options: TrainOptions, size: Size, dtype: torch.dtype) -> float:
    """Of the target's weights in one process: all, or embedding, output layer and its part of the blocks."""
    whole = min(2.0 * size.vocab_size * size.hidden_size, size.parameters)
    bits = {"int8": 8.0, "int4": 4.0}.get(options.quantize or "") or bits_of(options.quantization_config) or size.bits
    blocks = (size.parameters - whole) * (bits / 8 if bits else dtype.itemsize)
    return whole * dtype.itemsize + blocks / (options.trainer.processes if options.shard_target else 1)


def network_size(options: TrainOptions, size: Size) -> int:
    """Parameters that are learned; of a language model about."""
    config = network_config(options, size)
    if config is not None:
        return parameters(config)
    width = options.predictor.intermediate_size or size.hidden_size // 3
    return width * size.vocab_size + 12 * options.predictor.num_layers * width**2


def weights_read(options: TrainOptions, size: Size, learned: int) -> float:
    """By one draft: recursive steps read the network and an output embedding each, parallel ones once for all."""
    config, depth = network_config(options, size), options.tree.depth
    if config is None:
        return depth * learned
    heads = config.num_steps if config.kind == "medusa" else 1
    tables = config.draft_size * (config.markov_rank + (heads * config.hidden_size if config.own_heads else 0))
    tables += size.vocab_size * config.markov_rank if config.kind == "block" else 0  # looked up, not multiplied
    tables += size.vocab_size * config.hidden_size if config.own_embeddings else 0  # this, too
    read = learned - tables + config.draft_size * config.hidden_size * (heads if config.own_heads else 1)
    passes = depth if config.step_mode == "recursive" else 1
    return passes * read + depth * config.draft_size * config.markov_rank


def portion_bytes(config: ShapeConfig, roots: float, known: float, precision: str, checkpointing: bool) -> float:
    """Bytes of what a portion's forward keeps for its backward pass, and of the chunks within both.

    Compared with counted tensors in tests/eval/test_training_memory.py.

    Args:
        roots: in the portion. known: positions of the texts that they are in.
        precision: of the Trainer. checkpointing: `training.gradient_checkpointing`.
    """
    size, steps = config.hidden_size, config.num_steps
    half = 2 if "16-mixed" in precision else 4  # bytes of what autocast makes smaller
    rows = roots * steps
    logits = _LOGITS * min(4 * rows * config.draft_size, CHUNK_BYTES)
    states = rows * size * (3 * 4 + half)  # predicted, stacked, their gradient, and the true ones
    if not config.has_decoder_layers:
        width, reads = cast(int, config.intermediate_size), config.window * config.feature_size
        passes = steps if config.step_mode == "recursive" else 1
        inner = passes * roots * 2 * 4 * reads + rows * 4 * (3 * width + 6 * size)
        return logits + states + (inner / passes if checkpointing and config.step_mode == "recursive" else inner)
    layer = config.layer_config()
    heads, inner_size = layer.num_attention_heads, layer.intermediate_size
    passes = steps if config.step_mode == "recursive" else config.num_layers  # of one place, or of all through a layer
    inputs = 4 * roots * config.places * size  # of a step, or of a layer
    each = roots * config.places * (size * (40 + 8 * half) + 4 * half * inner_size)
    read = known * (4 + half) * (config.feature_size + 2 * size)
    scores = 4 * min(4 * roots * config.places * heads * (known + steps), SCORES_BYTES)
    return logits + states + read + scores + (passes * inputs + each if checkpointing else passes * each)


def _portion(options: TrainOptions, size: Size, text: DataStatistics) -> float:
    """Bytes of a portion of a step beside weights."""
    config = network_config(options, size)
    roots = options.training.batch_size / (options.trainer.accumulate_grad_batches * options.trainer.processes)
    if config is None:
        return _LOGITS * min(4 * roots * size.vocab_size, CHUNK_BYTES)
    known = roots * text.conversations * text.tokens / max(text.positions, 1)
    checkpointing = options.training.gradient_checkpointing
    return portion_bytes(config, roots, known, options.trainer.chosen_precision(), checkpointing)


def assumed(options: TrainOptions, size: Size, text: DataStatistics, learned: int) -> Hours:
    """Hours of as many accelerators as processes, which share the work without loss, by operations and bytes."""
    machine, processes = CostOptions(answered_together=options.regeneration.batch_size), options.trainer.processes
    found = costs(size, text, machine, math.inf)
    config = network_config(options, size)
    steps, drafted, passes, own = (1, size.vocab_size, 1, 0)
    if config is not None:
        steps, drafted = config.num_steps, config.draft_size
        passes = steps if config.step_mode == "recursive" else 1
        own = drafted * size.hidden_size if config.own_heads and config.kind != "medusa" else 0
    # Six per weight and pass, and per output embedding and step, whether it is learned or frozen.
    each = 6 * passes * (learned - own) + 6 * steps * drafted * size.hidden_size
    done = cast(int, options.training.steps) * options.training.batch_size
    parts = {
        "answers": found.answers if options.writes_answers else 0.0,
        "features": found.forward * (done / max(text.positions, 1) if options.online else 1),
        "training": done * each / (machine.flops * machine.utilisation) / 3600,
    }
    return Hours(
        {name: hours / processes for name, hours in parts.items() if hours},
        f"not measured: {'an accelerator' if processes == 1 else f'{processes} accelerators'} of "
        f"{machine.flops / 1e12:,.0f} TFLOP/s at {machine.utilisation:.0%} {'is' if processes == 1 else 'are'} assumed"
        + (f", and that {writing(size, machine)}" if options.writes_answers else "")
        + ("" if options.online else "; reading features is not counted"),
    )


def _listed(parts: Mapping[str, float]) -> str:
    named = ", ".join(f"{name} {human_bytes(size)}" for name, size in parts.items())
    return f"{human_bytes(sum(parts.values()))} ({named})"
