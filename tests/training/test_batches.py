"""The order of data: everything once, the same for any number of processes, and what a batch holds."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import CONVERSATIONS, OPTIONS, STEPS, UNEQUAL, WINDOW, data_of, network, portions

from shape.data.conversations import Conversation
from shape.data.encoding import Encoded
from shape.errors import DataError
from shape.features.positions import eligible
from shape.networks.teacher_forcing import Texts, examples
from shape.target.chat import Message
from shape.training import datamodule
from shape.training.batches import STEPS_POOLED, Batch, Partition
from shape.training.module import ShapeModule, computed_texts
from shape.training.options import Losses
from shape.training.order import StepOrder, cuts, derive_seed


def test_stored_batches_equal_examples_of_whole_conversations(store, tiny_target):
    data = data_of(store, tiny_target)
    for batch in data.batches(Partition()):
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


def test_whole_texts_hold_every_root(store, tiny_target):
    options = replace(OPTIONS, batch_size=64, steps=STEPS_POOLED)
    data = data_of(store, tiny_target, options, window=None, exclude=[0])
    batches = data.batches(Partition(0, 1, 2))
    assert 0 not in batches.numbers.tolist()
    parts = list(batches)
    assert len(parts) == 2 * STEPS_POOLED
    drawn = torch.cat([batches.order.step(step) for step in range(STEPS_POOLED)])
    assert torch.cat([batch.samples for batch in parts]).sort().values.tolist() == drawn.sort().values.tolist()
    for batch in parts:
        for row, sample in enumerate(batch.samples.tolist()):
            stored = store[int(batches.numbers[sample])]
            length = len(stored.input_ids)
            assert torch.equal(batch.texts.hidden[row, :length], stored.hidden)
            assert not batch.texts.loss_mask[row, length:].any()
            roots = batch.texts.roots[row]
            ready = eligible(stored.loss_mask, torch.tensor([0, length])).nonzero()[:, 0]
            assert torch.equal(roots[roots > 0], ready)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 9))
@settings(max_examples=60)
def test_cuts_are_even(sizes, parts):
    found = torch.tensor(sizes).tensor_split(cuts(torch.tensor(sizes), parts))
    assert torch.cat(found).tolist() == sizes and len(found) == parts
    assert [len(part) > 0 for part in found] == [number < len(sizes) for number in range(parts)]
    if len(sizes) > parts * max(sizes):  # no sample is as large as a part
        assert max(part.sum() for part in found) - min(part.sum() for part in found) <= 2 * max(sizes)


# Of data, by how they are read; the batches are of fewer texts than there may be portions.
READ = {"windows": (True, WINDOW), "whole texts": (True, None), "online": (False, None)}


@pytest.mark.parametrize(("stored", "window"), READ.values(), ids=READ)
def test_order_is_the_same_for_any_number_of_processes(unequal, tiny_target, stored, window):
    options = replace(OPTIONS, batch_size=90)
    data = data_of(unequal if stored else UNEQUAL, tiny_target, options, window=window, seed=5, max_length=160)

    def samples(step: int, world: int, accumulate: int) -> list[int]:
        found = []
        for batch in portions(data, step, world, accumulate):
            texts = batch.texts or computed_texts(tiny_target, batch, (-1,), torch.device("cpu"))
            cut = examples(texts, WINDOW, STEPS, tiny_target.hidden_size)
            found += batch.samples[cut.mask.flatten(1).any(-1)].tolist()
        return found

    steps = [samples(step, 1, 1) for step in range(OPTIONS.steps)]
    assert len({tuple(step) for step in steps}) > 3
    for world, accumulate in ((2, 1), (3, 1), (1, 2), (2, 4), (5, 2)):
        assert steps == [samples(step, world, accumulate) for step in range(OPTIONS.steps)]


@pytest.mark.parametrize(("stored", "window"), READ.values(), ids=READ)
def test_a_portion_knows_what_counts_in_the_whole_step(unequal, tiny_target, stored, window):
    options = replace(OPTIONS, batch_size=90)
    data = data_of(unequal if stored else UNEQUAL, tiny_target, options, window=window, max_length=160)
    for step, (world, accumulate) in enumerate([(1, 1), (2, 1), (1, 3), (3, 2)]):
        count, batches = torch.zeros(STEPS, dtype=torch.int64), portions(data, step, world, accumulate)
        for batch in batches:
            texts = batch.texts or computed_texts(tiny_target, batch, (-1,), torch.device("cpu"))
            mask = examples(texts, WINDOW, STEPS, tiny_target.hidden_size).mask
            count += mask.flatten(0, -2).sum(0)
        for batch in batches:
            assert torch.equal(batch.counts(STEPS), count) and count[0] > 0


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "online"])
def test_steps_are_of_texts_of_like_size(unequal, tiny_target, stored):
    """Those of a pool do not overlap, and are in no order; nor do the portions of a step."""
    options = replace(OPTIONS, batch_size=90, steps=2 * STEPS_POOLED)
    data = data_of(unequal if stored else UNEQUAL, tiny_target, options, window=None, max_length=160)
    every = data.batches(Partition())
    for pool in range(2):
        steps = [every._sizes(every._step(STEPS_POOLED * pool + turn)) for turn in range(STEPS_POOLED)]
        spans = [(int(step.min()), int(step.max())) for step in steps if len(step)]
        assert len(set(spans)) > 3 and spans != sorted(spans)
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(spans)))
    parts = [every._sizes(part) for part in data.batches(Partition(0, 2, 1))._portions(every._step(0)) if len(part)]
    assert all(before.max() <= after.min() for before, after in pairwise(parts))


def test_the_target_reads_no_text_without_anything_to_learn(tiny_target):
    """As later turns are that lie behind the longest length; what is learned in each step stays the same."""
    message = [Message("user", "a " * 200), Message("assistant", "never reached")]
    dead = [Conversation(f"dead-{number}", tuple(message)) for number in range(len(CONVERSATIONS))]
    options = replace(OPTIONS, steps=4 * STEPS_POOLED)
    data = data_of([*CONVERSATIONS, *dead], tiny_target, options, max_length=128)
    batches = data.batches(Partition())
    read = torch.cat([batches[number].samples for number in range(4 * STEPS_POOLED)])
    assert read.max() < len(CONVERSATIONS) and len(read.unique()) == len(CONVERSATIONS)


def test_where_a_step_is_of_one_text_none_is_without(tiny_target):
    """Although most texts hold nothing to learn."""
    message = (Message("user", "a " * 200), Message("assistant", "never reached"))
    dead = [Conversation(f"dead-{number}", message) for number in range(3 * len(CONVERSATIONS))]
    options = replace(OPTIONS, batch_size=1, steps=2 * STEPS_POOLED)
    batches = data_of([*CONVERSATIONS, *dead], tiny_target, options, max_length=128).batches(Partition())
    assert all(len(batches[number].samples) > 0 for number in range(options.steps))


def test_online_examples_are_those_of_the_store(store, tiny_target):
    module = ShapeModule(network(tiny_target), tiny_target, Losses(), OPTIONS)
    data = data_of(CONVERSATIONS, tiny_target, max_length=128)
    batch = data.batches(Partition())[0]
    texts = module._texts(batch)
    cut = examples(texts, WINDOW, STEPS, tiny_target.hidden_size)
    assert cut.mask[..., 0].any()
    for row, conversation in enumerate(batch.samples.tolist()):
        for place in cut.mask[row, :, 0].nonzero()[:, 0].tolist():
            root = texts.roots[row, place]
            stored = store.gather(store.offsets[conversation][None] + root, WINDOW, STEPS)
            assert torch.equal(cut.tokens[row, place, 0], stored.input_ids[0, WINDOW])
            torch.testing.assert_close(cut.window[row, place], stored.hidden[0, :WINDOW], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", [False, True])
def test_a_portion_of_one_text_without_tokens_teaches_nothing(tiny_target, attention):
    """As a chat that the template refuses is, among bad rows that are skipped."""
    module = ShapeModule(network(tiny_target, attention=attention), tiny_target, Losses(), OPTIONS, log_every=1)
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    empty = Encoded("refused", torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool))
    batch = Batch(0, 0, 1, torch.tensor([0]), torch.tensor([], dtype=torch.int64), conversations=[empty])
    assert module.training_step(batch, 0) == 0


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 3), st.sampled_from([1, 2, 4]))
@settings(max_examples=40)
def test_order_visits_everything_once_per_epoch(count, batches, seed, parts):
    order = StepOrder(seed, count, batches * parts)
    seen = torch.cat([order.step(step) for step in range(count)])
    for epoch in range(batches * parts):
        assert sorted(seen[epoch * count : (epoch + 1) * count].tolist()) == list(range(count))
    again = StepOrder(seed, count, batches * parts)
    assert torch.equal(again.step(count - 1), order.step(count - 1))


def test_data_without_anything_to_learn_is_refused(store, tiny_target):
    with pytest.raises(DataError, match="nothing to learn"):
        data_of(store, tiny_target, exclude=range(len(store)))
    with pytest.raises(DataError, match="nothing to learn"):
        data_of(CONVERSATIONS, tiny_target, exclude=range(9))


def test_steps_are_sized_by_every_kind_of_kinds_that_take_turns(tiny_target, monkeypatch):
    monkeypatch.setattr(datamodule, "_ROOTS_SAMPLE", 4)
    short, long = (
        Conversation(text, (Message("user", "?"), Message("assistant", text))) for text in ("yes", "oh, yes")
    )
    least, mixed, most = (data_of(some, tiny_target).roots_each for some in ([short], [short, long] * 5, [long]))
    assert least < mixed < most


def test_frequent_tokens_are_counted_in_a_sample_of_many_conversations(tiny_target, monkeypatch):
    """Every process encodes what it counts, before the first step."""
    monkeypatch.setattr(datamodule, "_TEXTS_SAMPLE", 3)
    assert len(list(data_of(CONVERSATIONS, tiny_target).texts())) == 3 < len(CONVERSATIONS)


def test_seeds_are_unrelated():
    seeds = {derive_seed(a, b) for a in range(20) for b in range(20)} | {derive_seed(a) for a in range(20)}
    assert len(seeds) == 420 and derive_seed(1, 2) == derive_seed(1, 2) and max(seeds) < 2**63
