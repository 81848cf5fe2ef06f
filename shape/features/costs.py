"""`python -m shape.extract --dry-run`: what features of a target on some data would take, and which mode to train in.

    python -m shape.extract --dry-run --target meta-llama/Llama-3.1-70B-Instruct
    python -m shape.extract --dry-run --parameters 70e9 --hidden_size 8192 --conversations 100000
    python -m shape.extract --dry-run --target T --data D --output DIR

Of the target only config.json is read, and no weights. All figures are estimates from the assumptions that are printed
with them; measure a few conversations (`--limit`) before you rent machines for many.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from random import Random
from typing import Any

import torch
from jsonargparse import ArgumentParser
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from shape import bundled
from shape.data.conversations import Conversation, load_conversations, unfolded
from shape.errors import ConfigError, UnsupportedTarget
from shape.features.extraction import FeatureOptions, encode_row, human_bytes, longest
from shape.features.storage import Place
from shape.features.store import state_bytes
from shape.target.loading import FILE_OPTIONS, TargetOptions, of_target, only
from shape.target.model import read_config

_SAMPLE = 1000  # conversations whose tokens are counted
_COVERED = 0.995  # share of the answers' tokens
_WINDOW = 8  # states before an answer that the default predictor reads


@dataclass(kw_only=True)
class CostOptions(FeatureOptions, TargetOptions):
    """What would be extracted, and on what.

    Attributes:
        target: folder or hub id, of which config.json is read; or give parameters and hidden_size.
        parameters: of the target.
        hidden_size: of the target.
        data: conversations, a sample of which is measured with the target's tokenizer; null takes the numbers below.
        conversations: how many.
        tokens: of a conversation, in the mean.
        answers: share of the tokens that are the assistant's.
        turns: answers in a conversation, in the mean.
        chat_template_kwargs: given to the target's chat template, for example {"enable_thinking": false}.
        limit: at most so many conversations of `data`.
        output: where features would lie; its free space decides, unless disk_gigabytes says so.
        disk_gigabytes: free for features.
        passes: over the data in training; each costs online mode a forward of all of it.
        flops: of one accelerator, dense, in bfloat16, per second (989e12: an H100 SXM).
        utilisation: share of them that a forward over whole texts reaches.
        bandwidth: bytes per second of its memory.
        memory: bytes of it.
        answered_together: conversations, when the target writes its answers.
    """

    target: str | None = None
    parameters: float | None = None
    hidden_size: int | None = None
    data: str | None = None
    conversations: int = 100_000
    tokens: float = 1000.0
    answers: float = 0.6
    turns: float = 2.0
    chat_template_kwargs: dict[str, Any] | None = None
    limit: int | None = None
    output: str | None = None
    disk_gigabytes: float | None = None
    passes: float = 10.0
    flops: float = 989e12
    utilisation: float = 0.4
    bandwidth: float = 3.35e12
    memory: float = 80e9
    answered_together: int = 64

    def validate(self) -> None:
        """Raises ConfigError for values that cannot be meant."""
        sizes = (self.parameters, self.hidden_size)
        if (self.target is None) == (None in sizes) or (self.target is not None and sizes != (None, None)):
            raise ConfigError("give either a target, or its parameters and hidden_size")
        numbers = {name: value for name, value in asdict(self).items() if isinstance(value, int | float)}
        if wrong := [name for name, value in numbers.items() if value <= 0 and not isinstance(value, bool)]:
            raise ConfigError(f"{wrong[0]} is {numbers[wrong[0]]}; give a positive number")
        for name in ("answers", "utilisation"):
            if getattr(self, name) > 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, and it is a share; give at most 1")


@dataclass(frozen=True)
class Size:
    """Of a target: parameters, those that one token's forward multiplies with (without the head), width of a state,
    operations of attention per token and token before it, tokens it knows, and positions it has.
    """

    parameters: float
    active: float
    hidden_size: int
    attention: float = 0.0
    vocab_size: int = 0
    positions: int | None = None

    @property
    def read(self) -> float:
        """Weights that a step of one token reads, the output embedding among them."""
        return self.active + self.hidden_size * self.vocab_size


@dataclass(frozen=True)
class Text:
    """Of the data: conversations, mean tokens of one, share that are answers, answers in one; and how many of the
    vocabulary's tokens make up 99.5 % of the answers, where that was counted.
    """

    conversations: int
    tokens: float
    answers: float
    turns: float
    covering: int | None = None

    @property
    def positions(self) -> int:
        """To learn from (`shape.features.store.eligible`): all of an answer but its last token."""
        return round(self.conversations * max(self.tokens * self.answers - self.turns, 0.0))

    def stored(self, before: int | None) -> float:
        """Positions whose states are kept: all, or those of answers and so many before each."""
        if before is None:
            return self.conversations * self.tokens
        return self.conversations * min(self.tokens, self.tokens * self.answers + before * self.turns)


@dataclass(frozen=True)
class Costs:
    """GPU-hours of the answers and of one forward over all; bytes of each way of storing; the mode that follows."""

    answers: float
    forward: float
    stored: dict[str, float]
    free: float
    chosen: str | None


def size_of(target: PretrainedConfig | PreTrainedModel, trust_remote_code: bool = False) -> Size:
    """Of a model, or from a configuration alone: the model is then made without memory for its weights."""
    if isinstance(target, PreTrainedModel):
        model = target
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(target, trust_remote_code=trust_remote_code)
    text = model.config.get_text_config()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    outside = {id(weight): weight.numel() for each in (embedding, head) for weight in each.parameters()}
    parameters = sum(weight.numel() for weight in model.parameters())
    experts = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
    # Of a mixture's experts a token meets a few.
    count = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 1
    met = experts * (getattr(text, "num_experts_per_tok", None) or count) / count
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return Size(
        parameters=parameters,
        active=parameters - sum(outside.values()) - experts + met,
        hidden_size=text.hidden_size,
        attention=4.0 * width * text.num_hidden_layers,
        vocab_size=text.vocab_size,
        positions=getattr(text, "max_position_embeddings", None),
    )


def costs(size: Size, text: Text, options: CostOptions, free: float) -> Costs:
    """Estimates; `free` is the bytes that features may take."""
    tokens = text.conversations * text.tokens
    operations = (
        2 * size.active + size.attention * text.tokens / 2
    )  # causal: half of the text stands before, in the mean
    forward = tokens * operations / (options.flops * options.utilisation) / 3600
    # Writing is bound by reading the weights once per token of all answers; as many accelerators read as hold them.
    by_memory = 2 * size.parameters / options.bandwidth / options.answered_together
    by_operations = 2 * size.active / (options.flops * options.utilisation)
    writing = tokens * text.answers * max(by_memory, by_operations) / 3600
    layers, dtype = len(options.stored), options.dtype or "bfloat16"
    ways = dict.fromkeys(
        [(dtype, options.before), (dtype, options.before or _WINDOW), ("int8", options.before or _WINDOW)]
    )
    stored = {
        f"{kind}, {'all positions' if before is None else f'answers and {before} positions before each'}":
            text.stored(before) * state_bytes(kind, size.hidden_size, layers) + 5 * tokens
        for kind, before in ways
    }  # fmt: skip
    fitting = [way for way, bytes_ in stored.items() if bytes_ <= free]
    return Costs(writing, forward, stored, free, fitting[0] if fitting and options.passes > 1 else None)


def report(size: Size, text: Text, options: CostOptions, found: Costs) -> str:
    """For people."""
    weights = 2 * size.parameters
    passes = f"{options.passes:g} passes"
    lines = [
        f"target: {size.parameters / 1e9:.3g}B parameters ({size.active / 1e9:.3g}B meet a token), states of "
        f"{size.hidden_size:,} numbers; {human_bytes(weights)} in bfloat16, which is at least "
        f"{math.ceil(weights / options.memory)} accelerator(s) of {human_bytes(options.memory)}",
        f"data: {text.conversations:,} conversations of {text.tokens:,.0f} tokens, {text.answers:.0%} of them in "
        f"{text.turns:.3g} answers each: {text.conversations * text.tokens:,.0f} tokens",
        f"answers, if the target writes them: {found.answers:,.3g} GPU-hours",
        f"one forward over all: {found.forward:,.3g} GPU-hours",
        f"offline: {found.forward:,.3g} GPU-hours once, and, of {len(options.stored)} layer(s),",
        *(f"  {human_bytes(size_):>8}  {way}" for way, size_ in found.stored.items()),
        f"online: {found.forward * options.passes:,.3g} GPU-hours in {passes}, nothing stored",
    ]
    if found.chosen is not None:
        lines.append(
            f"use: offline, {found.chosen}: it fits the {human_bytes(found.free)} free, and online mode computes "
            "everything anew in each pass"
        )
    elif options.passes <= 1:
        lines.append("use: online (--online true of shape.train): in a single pass nothing would be read twice")
    else:
        least = min(found.stored.values())
        lines.append(
            f"use: online (--online true of shape.train): {human_bytes(least)}, the least of these, does not fit the "
            f"{human_bytes(found.free)} free; with --output s3://... features may lie elsewhere"
        )
    lines.append(
        f"assumed: {options.flops / 1e12:,.0f} TFLOP/s at {options.utilisation:.0%} in forwards; "
        f"{options.bandwidth / 1e12:.3g} TB/s to read the weights, and nothing else, when "
        f"{options.answered_together} answers are written together; {passes} over the data; the predictor's own "
        "training is not counted"
    )
    return "\n".join(lines)


def measured(options: CostOptions, positions: int | None = None) -> Text:
    """Of the data, by a sample of it; of the options where there is none.

    Args:
        positions: of the target.
    """
    if options.data is None:
        return Text(options.conversations, options.tokens, options.answers, options.turns)
    if options.target is None:
        raise ConfigError(f"data {options.data} is counted in a target's tokens; give --target, or leave out --data")
    conversations = load_conversations(
        options.data,
        skip_bad_rows=options.skip_bad_rows,
        limit=options.limit,
        chat_template_kwargs=options.chat_template_kwargs,
    )
    tokenizer = AutoTokenizer.from_pretrained(bundled.resolve(options.target), **only(FILE_OPTIONS, of_target(options)))
    return counted(conversations, tokenizer, longest(options.max_length, positions), options.skip_bad_rows)


def counted(conversations: Sequence[Conversation], tokenizer: Any, max_length: int, skip_bad_rows: bool) -> Text:
    """What conversations hold, by a sample of them: drawn, as many data sets go round by some period."""
    drawn = Random(0).sample(range(len(conversations)), min(_SAMPLE, len(conversations)))
    rows = list(chain.from_iterable(unfolded([conversations[number] for number in drawn], tokenizer)))
    sample = [encode_row(row, tokenizer, max_length, skip_bad_rows) for row in rows]
    tokens = sum(len(each.loss_mask) for each in sample)
    answers = torch.cat([each.input_ids[each.loss_mask] for each in sample])
    starts = (each.loss_mask.int().diff(prepend=torch.zeros(1, dtype=torch.int32)) == 1 for each in sample)
    often = answers.bincount().sort(descending=True).values.cumsum(0)
    return Text(
        round(len(conversations) * len(sample) / len(drawn)),
        tokens / len(sample),
        len(answers) / max(tokens, 1),
        sum(int(each.sum()) for each in starts) / len(sample),
        int((often < _COVERED * len(answers)).sum()) + 1,
    )


def free_space(options: CostOptions) -> float:
    """Bytes for features: as given, of the output's disk, or of the one worked on; without end elsewhere."""
    if options.disk_gigabytes is not None:
        return options.disk_gigabytes * 1e9
    folder = Place(options.output or ".").folder
    if folder is None:
        return math.inf
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    return shutil.disk_usage(there).free


def main(arguments: Sequence[str]) -> None:
    parser = ArgumentParser(prog="python -m shape.extract --dry-run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", action="config", help="a YAML file with these options")
    parser.add_class_arguments(CostOptions, as_group=False)
    values = parser.instantiate(parser.parse_args(list(arguments))).as_dict()
    values.pop("config")
    options = CostOptions(**values)
    options.validate()
    if options.target is None:
        assert options.parameters is not None and options.hidden_size is not None
        size = Size(options.parameters, options.parameters, options.hidden_size)
    else:
        try:
            config = read_config(options.target, **of_target(options))
        except UnsupportedTarget as error:
            raise UnsupportedTarget(f"{error}; or give --parameters and --hidden_size") from error
        size = size_of(config, options.trust_remote_code)
    text = measured(options, size.positions)
    print(report(size, text, options, costs(size, text, options, free_space(options))))
