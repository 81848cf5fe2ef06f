"""`shape efficiency`: how little the engine adds to the forwards that decoding is made of.

    shape efficiency --predictor checkpoints/quickstart --output eval/results/efficiency/shipped

*Engine efficiency* is (bare target forward + bare drafter forwards) / measured time of a step, the median over answers.
A bare target forward is one over as many tokens as the step verified, behind as many cached ones, with masks and
positions at hand and nothing done with its logits; bare drafter forwards are its network alone, as many passes as the
draft took. Both are run again for every step right after each answer, so that a slow spell of the machine affects all
of them alike. What is left is ours: growing trees, masks, noise, acceptance, cache, bookkeeping. Without drafts it is
t(1) / step.

Methods answer the same prompts in turn, in rotating order. `oracle` drafts the true continuation with a fifth of its
tokens corrupted at random, at no cost: its speed-up is simulated, its efficiency is not.
"""

from collections.abc import Sequence

from shape.errors import NOTHING_WRITTEN, exit_on_error
from shape.evaluation.options import EfficiencyOptions
from shape.parsing import CommandParser, command_parser

COMMON = (
    *("output", "predictor", "target", "prompts", "limit", "max_new_tokens", "dtype", "temperature", "batch_size"),
    "drafter",
)


def parser() -> CommandParser:
    return command_parser("efficiency", __doc__, EfficiencyOptions, COMMON)


def main(arguments: Sequence[str] | None = None) -> None:
    with exit_on_error(NOTHING_WRITTEN):
        options = parser().options(EfficiencyOptions, arguments)
        from rich.console import Console

        from shape.evaluation.efficiency import run, screens

        Console().print(*screens(run(options)))


if __name__ == "__main__":
    main()
