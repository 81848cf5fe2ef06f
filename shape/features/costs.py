"""What features of a target would take, and whether to store them: by its config.json alone, without any weights.

All figures are estimates from the assumptions that are printed with them; measure a few conversations (`--limit`)
before you rent machines for many.
"""

import math
import shutil
from dataclasses import dataclass

from shape.data.reading import conversations_of
from shape.data.statistics import DataStatistics, count_tokens
from shape.errors import ConfigError, UnsupportedTarget
from shape.features.manifest import state_bytes
from shape.features.options import CostOptions, longest
from shape.features.storage import Storage
from shape.files import human_bytes
from shape.target.loading import of_target, read_config, tokenizer_of
from shape.target.size import Size, size_of

_WINDOW = 8  # states before an answer that the default predictor reads


@dataclass(frozen=True)
class Costs:
    """GPU-hours of the answers and of one forward over all; bytes of each way of storing; the mode that follows."""

    answers: float
    forward: float
    stored: dict[str, float]
    free: float
    chosen: str | None


def dry_run(options: CostOptions) -> str:
    """The estimate, for people. Raises ConfigError, DataError, UnsupportedTarget."""
    options.validate()
    if options.target is None:
        assert options.parameters is not None and options.hidden_size is not None
        size, depth = Size(options.parameters, options.parameters, options.hidden_size), None
    else:
        try:
            config = read_config(options.target, **of_target(options))
        except UnsupportedTarget as error:
            raise UnsupportedTarget(f"{error}; or give --parameters and --hidden_size") from error
        size = size_of(config, options.trust_remote_code)
        depth = config.get_text_config().num_hidden_layers
    options.check_for(options.target or "of these sizes", size.positions, depth)
    text = measured(options, size.positions)
    return report(size, text, options, costs(size, text, options, free_space(options)))


def costs(size: Size, text: DataStatistics, options: CostOptions, free: float) -> Costs:
    """Estimates; `free` is the bytes that features may take."""
    tokens = text.conversations * text.tokens
    # Causal attention: half of the text comes before a token, in the mean.
    operations = 2 * size.active + size.attention * text.tokens / 2
    forward = tokens * operations / (options.flops * options.utilisation) / 3600
    # Writing is bound by reading, for each token, a share of the weights and the keys and values of all before it: half
    # of a conversation, in the mean. As many accelerators read as hold the weights.
    sharing = options.answered_together * options.occupancy
    by_memory = (2 * size.parameters / sharing + size.cache * text.tokens / 2) / options.bandwidth
    by_operations = 2 * size.active / (options.flops * options.utilisation)
    answers = tokens * text.answers * max(by_memory, by_operations) / 3600
    layers, dtype, window = len(options.stored), options.feature_dtype or "bfloat16", options.before or _WINDOW
    stored = {
        f"{kind}, {'all positions' if before is None else f'answers and {before} positions before each'}":
            text.stored_bytes(before, state_bytes(kind, size.hidden_size, layers))
        for kind, before in ((dtype, options.before), (dtype, window), ("int8", window))
    }  # fmt: skip
    fitting = [way for way, needed in stored.items() if needed <= free]
    return Costs(answers, forward, stored, free, fitting[0] if fitting and options.epochs > 1 else None)


def report(size: Size, text: DataStatistics, options: CostOptions, found: Costs) -> str:
    """For people."""
    weights = 2 * size.parameters
    epochs = f"{options.epochs:g} epochs"
    lines = [
        f"target: {size.parameters / 1e9:.3g}B parameters ({size.active / 1e9:.3g}B meet a token), states of "
        f"{size.hidden_size:,} numbers; {human_bytes(weights)} in bfloat16, which is at least "
        f"{math.ceil(weights / options.memory)} accelerator(s) of {human_bytes(options.memory)}",
        f"data: {text.conversations:,} conversations of {text.tokens:,.0f} tokens, {text.answers:.0%} of them in "
        f"{text.turns:.3g} answers each: {text.conversations * text.tokens:,.0f} tokens",
        f"answers, if the target writes them: {found.answers:,.3g} GPU-hours",
        f"one forward over all: {found.forward:,.3g} GPU-hours",
        f"offline: {found.forward:,.3g} GPU-hours once, and, of {len(options.stored)} layer(s),",
        *(f"  {human_bytes(needed):>8}  {way}" for way, needed in found.stored.items()),
        f"online: {found.forward * options.epochs:,.3g} GPU-hours in {epochs}, nothing stored",
    ]
    if found.chosen is not None:
        lines.append(
            f"use: offline, {found.chosen}: it fits the {human_bytes(found.free)} free, and online mode computes "
            "everything anew in each pass"
        )
    elif options.epochs <= 1:
        lines.append("use: online (--online true of shape train): in a single pass nothing would be read twice")
    else:
        least = min(found.stored.values())
        lines.append(
            f"use: online (--online true of shape train): {human_bytes(least)}, the least of these, does not fit the "
            f"{human_bytes(found.free)} free; with --output s3://... features may be stored elsewhere"
        )
    lines.append(
        f"assumed: {options.flops / 1e12:,.0f} TFLOP/s at {options.utilisation:.0%} in forwards; "
        f"{writing(size, options)} (--occupancy 1 for a server, which replaces finished ones); {epochs} over "
        "the data; the predictor's own training is not counted"
    )
    return "\n".join(lines)


def writing(size: Size, options: CostOptions) -> str:
    """What is assumed of answers, for people."""
    kept = f"{human_bytes(size.cache)} of keys and values of each token before"
    return (
        f"answers read, at {options.bandwidth / 1e12:.3g} TB/s, the weights in batches of {options.answered_together} "
        f"answers, {options.occupancy:.0%} of them unfinished in the mean, and "
        + (kept if size.cache else "no keys and values, whose size is not known")
    )


def measured(options: CostOptions, positions: int | None = None) -> DataStatistics:
    """What the data hold, by a sample of them; by the options where there are none.

    Args:
        positions: of the target.
    """
    if options.data is None:
        return DataStatistics(options.conversations, options.tokens, options.answers, options.turns)
    if options.target is None:
        raise ConfigError(f"data {options.data} is counted in a target's tokens; give --target, or leave out --data")
    conversations = conversations_of(options)
    tokenizer = tokenizer_of(options.target, options)
    if tokenizer is None and not all(conversation.texts for conversation in conversations):
        raise ConfigError(
            f"data {options.data} is text, and target {options.target} has no tokenizer to count it with; leave out "
            "--data, and give --conversations, --tokens, --answers and --turns"
        )
    return count_tokens(conversations, tokenizer, longest(options.max_length, positions), options.skip_bad_rows)


def free_space(options: CostOptions) -> float:
    """Bytes for features: as given, of the output's disk, or of the one worked on; infinite elsewhere."""
    if options.disk_gigabytes is not None:
        return options.disk_gigabytes * 1e9
    folder = Storage(options.output or ".").folder
    if folder is None:
        return math.inf
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    return shutil.disk_usage(there).free
