"""The order of data: everything once, the same for any number of processes, and what a batch holds."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import CONVERSATIONS, OPTIONS, STEPS, WINDOW, data_of, network

from shape.batches import Split, StepOrder, derive_seed
from shape.errors import DataError
from shape.examples import Texts, examples
from shape.losses import Losses
from shape.store import eligible
from shape.training import (
    ShapeModule,
)


def test_stored_batches_equal_examples_of_whole_conversations(store, tiny_target):
    data = data_of(store, tiny_target)
    for batch in data.batches(Split()):
        for index, row in enumerate(data.roots[batch.samples].tolist()):
            number = int((store.offsets <= row).sum()) - 1
            while store.offsets[number + 1] <= row:
                number += 1
            stored, root = store[number], torch.tensor([[row - int(store.offsets[number])]])
            whole = Texts(stored.hidden[None], stored.input_ids[None], stored.loss_mask[None], root)
            expected = examples(whole, WINDOW, STEPS, tiny_target.hidden_size)
            cut = examples(batch.texts, WINDOW, STEPS, tiny_target.hidden_size)
            counts = cut.mask[index, 0]
            assert torch.equal(counts, expected.mask[0, 0]) and counts[0]
            assert torch.equal(cut.window[index, 0], expected.window[0, 0])
            assert torch.equal(cut.tokens[index, 0][counts], expected.tokens[0, 0][counts])
            assert torch.equal(cut.states[index, 0][counts], expected.states[0, 0][counts])


def test_whole_texts_are_dealt_by_roots_and_hold_every_root(store, tiny_target):
    options = replace(OPTIONS, batch_size=64)
    data = data_of(store, tiny_target, options, window=None, exclude=[0])
    assert 0 not in data.texts_with_roots.tolist()
    order, parts = data.batches(Split(0, 1, 2)).order, list(data.batches(Split(0, 1, 2)))
    assert len(parts) == 2 * OPTIONS.steps == 2 * 8, "one pool"
    drawn = torch.cat([order.step(step) for step in range(8)])
    assert torch.cat([batch.samples for batch in parts]).sort().values.tolist() == drawn.sort().values.tolist()
    for batch in parts:
        for row, sample in enumerate(batch.samples.tolist()):
            stored = store[int(data.texts_with_roots[sample])]
            length = len(stored.input_ids)
            assert torch.equal(batch.texts.hidden[row, :length], stored.hidden)
            assert not batch.texts.loss_mask[row, length:].any()
            roots = batch.texts.roots[row]
            ready = eligible(stored.loss_mask, torch.tensor([0, length])).nonzero()[:, 0]
            assert torch.equal(roots[roots > 0], ready)
    counts = [data.roots_of_texts[batch.samples] for batch in parts]
    by_size = sorted(counts, key=lambda each: each.sum())
    for fewer, more in pairwise(by_size):
        assert fewer.max() <= more.min()


def test_online_examples_are_those_of_the_store(store, tiny_target):
    module = ShapeModule(network(tiny_target), tiny_target, Losses(), OPTIONS)
    data = data_of(CONVERSATIONS, tiny_target, max_length=128)
    batch = data.batches(Split())[0]
    texts = module._texts(batch)
    cut = examples(texts, WINDOW, STEPS, tiny_target.hidden_size)
    assert cut.mask[..., 0].any()
    for row, conversation in enumerate(batch.samples.tolist()):
        for place in cut.mask[row, :, 0].nonzero()[:, 0].tolist():
            root = texts.roots[row, place]
            stored = store.gather(store.offsets[conversation][None] + root, WINDOW, STEPS)
            assert torch.equal(cut.tokens[row, place, 0], stored.input_ids[0, WINDOW])
            torch.testing.assert_close(cut.window[row, place], stored.hidden[0, :WINDOW], rtol=1e-4, atol=1e-4)


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 3), st.sampled_from([1, 2, 4]))
@settings(max_examples=40, deadline=None)
def test_order_visits_everything_once_per_epoch(count, batches, seed, parts):
    order = StepOrder(seed, count, batches * parts)
    seen = torch.cat([order.step(step) for step in range(count)])
    for epoch in range(batches * parts):
        assert sorted(seen[epoch * count : (epoch + 1) * count].tolist()) == list(range(count))
    again = StepOrder(seed, count, batches * parts)
    assert torch.equal(again.step(count - 1), order.step(count - 1))


def test_order_is_the_same_for_any_number_of_processes(store, tiny_target):
    data = data_of(store, tiny_target, seed=5)

    def samples(step: int, world: int, accumulate: int) -> list[int]:
        found = []
        for portion in range(accumulate):
            for rank in range(world):
                batch = data.batches(Split(rank, world, accumulate))[step * accumulate + portion]
                assert (batch.step, batch.part) == (step, portion * world + rank)
                found += batch.samples.tolist()
        return found

    for step in (0, 3, 7):
        one = samples(step, 1, 1)
        assert len(one) == OPTIONS.batch_size
        assert one == samples(step, 2, 1) == samples(step, 3, 1) == samples(step, 1, 2) == samples(step, 2, 4)
    assert samples(0, 1, 1) != samples(1, 1, 1)


def test_data_without_anything_to_learn_is_refused(store, tiny_target):
    with pytest.raises(DataError, match="nothing to learn"):
        data_of(store, tiny_target, exclude=range(len(store)))
    with pytest.raises(DataError, match="nothing to learn"):
        data_of(CONVERSATIONS, tiny_target, exclude=range(9))


def test_seeds_are_unrelated():
    seeds = {derive_seed(a, b) for a in range(20) for b in range(20)} | {derive_seed(a) for a in range(20)}
    assert len(seeds) == 420 and derive_seed(1, 2) == derive_seed(1, 2) and max(seeds) < 2**63
