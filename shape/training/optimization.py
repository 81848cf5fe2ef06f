"""AdamW's groups of parameters, and the learning rate's schedule."""

import math
from typing import Any

from torch import nn

from shape.training.options import TrainingOptions


def learning_rate_factor(options: TrainingOptions, step: int, progress: float) -> float:
    """Share of the peak learning rate at a step; `progress` in [0, 1] is how much of the run is over.

    Not a schedule of transformers: those know steps alone, and a time budget ends a run before its steps do.
    """
    assert options.steps is not None
    if step < options.warmup_steps:
        return (step + 1) / (options.warmup_steps + 1)
    if options.decay == "none":
        return 1.0
    warm = min(options.warmup_steps / options.steps, 1 - 1e-9)
    left = 1 - min(max((progress - warm) / (1 - warm), 0.0), 1.0)
    return left if options.decay == "linear" else (1 - math.cos(math.pi * left)) / 2


def parameter_groups(network: nn.Module, options: TrainingOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is trained, at the peak learning rate: matrices, with weight decay, and the rest."""
    learned = [weight for weight in network.parameters() if weight.requires_grad]
    decayed = {"params": [each for each in learned if each.ndim >= 2], "weight_decay": options.weight_decay}
    others = {"params": [each for each in learned if each.ndim < 2], "weight_decay": 0.0}
    return {**decayed, "lr": options.learning_rate}, {**others, "lr": options.learning_rate}
