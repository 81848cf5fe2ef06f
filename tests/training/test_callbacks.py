"""How many operations a step takes."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from training_runs import (
    OPTIONS,
    fit,
)

from shape.training import callbacks
from shape.training.callbacks import CountFlops
from shape.training.options import Losses


def test_attention_of_grouped_queries_is_counted():
    """As a GPU computes it, and as torch counts it from 2.12 on; before, an error ended the training."""
    aten = torch.ops.aten
    query, key = torch.empty(2, 6, 10, 8, device="meta"), torch.empty(2, 2, 10, 8, device="meta")
    with FlopCounterMode(display=False, custom_mapping=callbacks._ATTENTION) as counter:
        aten._scaled_dot_product_flash_attention(query, key, key)
    assert counter.get_total_flops() == 2 * (2 * 2 * 6 * 10 * 10 * 8)  # scores, and values by them
    shapes = query.shape, key.shape, key.shape
    backwards = callbacks._ATTENTION[aten._scaled_dot_product_flash_attention_backward](query.shape, *shapes)
    assert 2 * backwards == 5 * counter.get_total_flops()  # with the scores once more


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
