"""How many operations a step takes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from training_runs import (
    OPTIONS,
    fit,
)

from shape.training import callbacks
from shape.training.callbacks import CountFlops
from shape.training.options import Losses


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_attention_of_grouped_queries_is_counted(kind, monkeypatch):
    """As a GPU computes it. torch's formulas refuse it before 2.12, which ended the training."""
    query, key = torch.empty(2, 6, 10, 8, device="meta"), torch.empty(2, 2, 10, 8, device="meta")
    forwards, backwards = callbacks.sdpa_flop_count, callbacks.sdpa_backward_flop_count

    def refusing(formula):
        def count(*shapes):
            assert len({shape[1] for shape in shapes}) == 1  # heads
            return formula(*shapes)

        return count

    monkeypatch.setattr(callbacks, "sdpa_flop_count", refusing(forwards))
    monkeypatch.setattr(callbacks, "sdpa_backward_flop_count", refusing(backwards))
    counted, trainer = CountFlops(), SimpleNamespace(global_step=0, world_size=1)
    counted.on_train_batch_start(trainer)
    attention = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")
    attention(query, key, key, *{"flash": (), "efficient": (None, False), "cudnn": (None, False)}[kind])
    counted.on_train_batch_end(trainer)
    assert counted.flops == 2 * (2 * 2 * 6 * 10 * 10 * 8)  # scores, and values by them
    behind = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention_backward")
    # With the scores once more.
    assert 2 * callbacks._ATTENTION[behind](query.shape, query.shape, key.shape, key.shape) == 5 * counted.flops


@pytest.mark.parametrize("accumulate", [1, 2])
def test_operations_of_a_step_are_counted_once(store, tiny_target, accumulate):
    """By hand, for a predictor of one matrix of each kind: two per multiply-add, and twice as many backwards."""
    counted = CountFlops()
    module = fit(
        tiny_target, store, options=replace(OPTIONS, steps=3), losses=Losses(soft_cross_entropy=0.0),
        accumulate=accumulate, callbacks=[counted], token_conditioning="none", num_layers=0,
    )  # fmt: skip
    config, roots = module.predictor.config, OPTIONS.batch_size
    steps, size, width = config.num_steps, config.hidden_size, config.intermediate_size
    first, others = config.window * size * width, size * width + 2 * size * size
    # Forwards and twice backwards; nothing flows back into the known states of the first step's window.
    forwards = steps * (first + others)
    backwards = 2 * steps * others + steps * first + (steps - 1) * first
    assert counted.flops == 2 * roots * (forwards + backwards)
