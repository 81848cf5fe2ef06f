"""Optimisers and the learning rate's schedule."""

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from shape.training.options import TrainingOptions

_ADAM_BETAS = (0.9, 0.95)
_TABLES = ("heads", "markov.expand", "embed_tokens", "lm_head")  # of tokens, which Muon is not for


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


def make_optimizer(network: nn.Module, matrices: Collection[str], options: TrainingOptions) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices alone, or Muon for matrices between states and AdamW for the rest.

    Args:
        matrices: names of the parameters that are matrices.
    """
    named = [(name, weight) for name, weight in network.named_parameters() if weight.requires_grad]
    inner = {name for name, weight in named if options.optimizer == "muon" and _is_inner(name, weight)}
    others = [(name, weight) for name, weight in named if name not in inner]
    groups = [
        {"params": [weight for name, weight in others if name in matrices], "weight_decay": options.weight_decay},
        {"params": [weight for name, weight in others if name not in matrices], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=options.learning_rate, betas=_ADAM_BETAS)
    if not inner:
        return adam
    taken = [weight for name, weight in named if name in inner]
    muon = torch.optim.Muon(taken, options.learning_rate, options.weight_decay, adjust_lr_fn="match_rms_adamw")
    return CombinedOptimizer(muon, adam)


def _is_inner(name: str, weight: nn.Parameter) -> bool:
    return weight.ndim == 2 and len(weight) > 1 and not any(table in name for table in _TABLES)


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimisers as one, each with parameters of its own."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share_groups()

    def _share_groups(self) -> None:
        """The very groups of the parts, so that a schedule reaches them."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()
