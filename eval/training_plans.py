"""What the recipes of `train/` are estimated to take, by `shape train --dry-run`'s rules and the targets' sizes alone.

    python -m eval.training_plans --output eval/results/training-plans

Nothing is trained, measured or downloaded: the targets' configurations are written out below, and the data is described
by the options. `--dry-run` on your machine counts your data in the target's own tokens.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from eval import commands
from eval.commands import REPOSITORY
from shape.data.statistics import DataStatistics
from shape.evaluation.markdown import markdown
from shape.features.options import CostOptions
from shape.files import human_bytes
from shape.target.size import size_of
from shape.training.defaults import resolve
from shape.training.forecast import Forecast
from shape.training.parsing import parse

_EIGHT = ["--trainer.devices=8", "--trainer.strategy=ddp", "--trainer.accumulate_grad_batches=1"]
_ONE = ["--trainer.devices=1"]
_LLAMA: dict[str, Any] = {"num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 131_072}
# As the targets' own config.json has them, as far as sizes depend on it.
TARGETS: dict[str, PretrainedConfig] = {
    "meta-llama/Llama-3.1-8B-Instruct": LlamaConfig(
        hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32, **_LLAMA
    ),
    "Qwen/Qwen3-8B": Qwen3Config(
        hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151_936, max_position_embeddings=40_960,
    ),
    "meta-llama/Llama-3.3-70B-Instruct": LlamaConfig(
        hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64, **_LLAMA
    ),
}  # fmt: skip


# Their templates leave out of a later prompt the empty thought before an answer.
_TURN_BY_TURN = ("Qwen/Qwen3-8B",)


@dataclass
class PlanOptions:
    """What is assumed of the data. The defaults are for UltraChat's train_sft, whose card gives 207,865 rows of 6,721
    bytes in the mean, the first prompt twice: at some four letters a token, less than 1,680 tokens.

    Args:
        output: folder of plans.json and plans.md.
        conversations: how many.
        tokens: of a conversation, in the mean.
        answers: share of the tokens that are the assistant's.
        turns: answers in a conversation, in the mean.
    """

    output: str = "plan-results"
    conversations: int = 207_865
    tokens: float = 1500.0
    answers: float = 0.8
    turns: float = 3.0


def recipes() -> list[Path]:
    """All that ship."""
    return sorted((REPOSITORY / "train").glob("*.yaml"))


def plan(recipe: Path, network: str, more: Sequence[str], text: DataStatistics) -> dict[str, Any]:
    """One row: bytes of memory by GPU, bytes of disk, GPUs, hours by part."""
    own = [f"--config={recipe}", *more]
    if network == "EAGLE-3":
        width = TARGETS[parse(own).target].intermediate_size
        eagle = [f"--predictor.intermediate_size={width}", "--predictor.num_steps=7"]
        own = [f"--config={REPOSITORY / 'configs/eagle.yaml'}", *own, *eagle, "--training.gradient_checkpointing=true"]
    options = parse(own)
    options.check()
    size = size_of(TARGETS[options.target])
    resolved = resolve(options, size, text)
    whole, training = Forecast(resolved, size, text, torch.bfloat16), resolved.training
    assert training.steps is not None
    if options.target in _TURN_BY_TURN:
        text = text.turn_by_turn()
    found = Forecast(resolved, size, text, torch.bfloat16)
    written = {name: each for name, each in whole.hours.parts.items() if name == "answers"}
    states = text.conversations * text.tokens * len(resolved.feature_options().stored) * size.hidden_size * 2
    return {
        "recipe": recipe.stem, "network": network, "gpus": resolved.trainer.processes, "learned": found.learned,
        "positions": training.steps * training.batch_size, "epochs": training.steps * training.batch_size
        / text.positions, "memory": found.memory, "disk": found.disk, "stored": states,
        "hours": {**found.hours.parts, **written}, "how": found.hours.how,
    }  # fmt: skip


def run(options: PlanOptions) -> None:
    text = DataStatistics(options.conversations, options.tokens, options.answers, options.turns)
    rows = []
    for recipe in recipes():
        sharded = parse([f"--config={recipe}"]).shard_target
        for network in ("SHAPE", "EAGLE-3"):
            rows += [plan(recipe, network, more, text) for more in ([[]] if sharded else [_ONE, _EIGHT])]
    print(write(options, rows))


def write(options: PlanOptions, rows: Sequence[dict[str, Any]]) -> str:
    header = [
        "recipe", "network", "GPUs", "parameters", "positions", "epochs", "memory of a GPU", "disk",
        "features, if stored", "hours", "of these",
    ]  # fmt: skip
    table = [
        [
            row["recipe"], row["network"], str(row["gpus"]), f"{row['learned'] / 1e6:,.0f}M",
            f"{row['positions'] / 1e6:,.0f}M", f"{row['epochs']:.2g}", human_bytes(sum(row["memory"].values())),
            human_bytes(sum(row["disk"].values())), human_bytes(row["stored"]), f"{sum(row['hours'].values()):.2g}",
            ", ".join(f"{name} {each:.2g}" for name, each in row["hours"].items()),
        ]
        for row in rows
    ]  # fmt: skip
    machine = CostOptions()
    parts = [
        "# What the training recipes would take",
        "**Estimates, not measurements: none of these recipes has been run.** Assumed: "
        f"{options.conversations:,} conversations of {options.tokens:,.0f} tokens, {options.answers:.0%} of them in "
        f"{options.turns:g} answers, each with all before it a text of its own by Qwen3's template, which is twice as "
        f"many tokens for the target's forwards; GPUs of {machine.flops / 1e12:,.0f} TFLOP/s in bfloat16 at "
        f"{machine.utilisation:.0%}, of which eight are eight times as fast as one; a forward is two operations per "
        f"parameter and token; answers are bound by reading, at {machine.bandwidth / 1e12:.3g} TB/s, the weights in "
        f"batches of {machine.answered_together} answers, {machine.occupancy:.0%} of them unfinished in the mean, and, "
        "for each token, the keys and values of half a conversation. Memory is without what the target's own forward "
        "takes; validation, measurement, padding and the gathering of a sharded target's blocks are not in the hours.",
        markdown(header, table),
    ]
    record = {"assumed": asdict(options), "rows": rows}
    return commands.write_results(Path(options.output), "plans", record, *parts)


main = commands.program(run, PlanOptions)


if __name__ == "__main__":
    main()
