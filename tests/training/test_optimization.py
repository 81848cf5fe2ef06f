"""Optimisers, their groups, and the schedule of the learning rate."""

import pytest
import torch
from training_runs import (
    fit,
    network,
)

from shape.errors import ConfigError
from shape.training.module import ShapeModule
from shape.training.optimization import learning_rate_factor
from shape.training.options import Losses, TrainingOptions


def test_weight_decay_is_for_matrices(tiny_target):
    module = ShapeModule(network(tiny_target), tiny_target, Losses(), TrainingOptions(steps=100, weight_decay=0.5))
    groups = module.configure_optimizers()["optimizer"].param_groups
    assert {p.ndim for p in groups[0]["params"]} == {2} and groups[0]["weight_decay"] == 0.5
    assert {p.ndim for p in groups[1]["params"]} == {1} and groups[1]["weight_decay"] == 0.0
    assert groups[0]["betas"] == (0.9, 0.95)


def test_learning_rate_schedule():
    options = TrainingOptions(steps=100, warmup_steps=10, decay="cosine")
    factors = [learning_rate_factor(options, step, step / 100) for step in range(101)]
    assert factors[:11] == sorted(factors[:11]) and factors[10] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True) and factors[100] < 1e-6
    linear = TrainingOptions(steps=100, warmup_steps=0, decay="linear")
    assert learning_rate_factor(linear, 25, 0.25) == pytest.approx(0.75)
    assert learning_rate_factor(linear, 25, 0.9) == pytest.approx(0.1)  # time runs out before the steps do
    assert learning_rate_factor(TrainingOptions(steps=100, decay="none"), 999, 1.0) == 1.0


@pytest.mark.parametrize(("most", "left"), [(None, 1.0), (0, 1.0), (1e-3, 0.0)])
def test_a_clip_of_nothing_clips_nothing(tiny_target, most, left):
    module = ShapeModule(network(tiny_target), tiny_target, Losses(), TrainingOptions(steps=1))
    for weight in module.predictor.parameters():
        weight.grad = torch.ones_like(weight)
    module.configure_gradient_clipping(torch.optim.SGD(module.predictor.parameters()), most)
    assert all(weight.grad.round().eq(left).all() for weight in module.predictor.parameters())


def test_max_minutes_ends_the_run(store, tiny_target):
    options = TrainingOptions(steps=100_000, batch_size=16, max_minutes=0.02, warmup_steps=1)
    module = fit(tiny_target, store, options=options)
    assert 0 < module.trainer.global_step < 100_000
    assert module.trainer.optimizers[0].param_groups[0]["lr"] < 0.2 * options.learning_rate


@pytest.mark.parametrize(
    "values",
    [{"steps": 0}, {"batch_size": 0}, {"noise": -1.0}, {"learning_rate": 0.0}, {"max_minutes": 0.0}, {"ema": 1.0}],
)
def test_bad_training_options_are_refused(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        TrainingOptions(**values).check()
