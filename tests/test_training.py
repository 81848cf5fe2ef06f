"""Examples, the order of data, the training step, validation by decoding and checkpoints."""

import logging
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shape.config import ShapeConfig
from shape.conversations import Conversation, Message
from shape.decoder import ShapeDecoder
from shape.drafters import PREDICTORS, TrainedDrafter, TreeShape
from shape.errors import CheckpointError, ConfigError, DataError
from shape.features import FeatureOptions, FeatureStore, Stored, TrainerOptions, eligible, extract
from shape.losses import Losses, supervised
from shape.network import Predictor
from shape.predictor import windows
from shape.training import (
    AtomicCheckpointIO,
    DecodingValidation,
    Reader,
    ShapeDataModule,
    ShapeModule,
    Split,
    StepOrder,
    Texts,
    TrainingOptions,
    acceptance_length,
    add_noise,
    as_trained_and_decoded,
    decode_counts,
    derive_seed,
    draft_vocabulary,
    examples,
    export,
    load_weights,
    teacher_forced,
)

WINDOW, STEPS = 3, 3
OPTIONS = TrainingOptions(steps=8, batch_size=16, learning_rate=3e-3, warmup_steps=2)


def talk(number: int) -> Conversation:
    messages = []
    for turn in range(1 + number % 2):
        messages += [
            Message("user", f"{turn}? " + "hm " * (number % 4)),
            Message("assistant", f"yes, {number}!"),
        ]
    return Conversation(f"c{number}", tuple(messages))


CONVERSATIONS = [talk(number) for number in range(9)]


@pytest.fixture(autouse=True, scope="module")
def _calm():
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


@pytest.fixture(scope="module")
def store(tiny_target, tmp_path_factory) -> FeatureStore:
    trainer = TrainerOptions(accelerator="cpu", devices=1, enable_progress_bar=False).for_extraction()
    options = FeatureOptions(max_length=128, shard_size=4, layers=[0, 1, 2, -1])
    folder = tmp_path_factory.mktemp("features")
    extract(tiny_target, CONVERSATIONS, folder, options, trainer)
    return FeatureStore(folder, layers=[-1])


def network(target, seed: int = 0, **changes) -> Predictor:
    values = {"step_mode": "recursive", "token_conditioning": "path", **changes}
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    config = ShapeConfig(window=WINDOW, num_steps=STEPS, **sizes, **values)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return PREDICTORS[config.kind](config)


def fit(
    target,
    source,
    *,
    options=OPTIONS,
    seed=0,
    losses=None,
    accumulate=1,
    callbacks=(),
    ckpt_path=None,
    **changes,
) -> ShapeModule:
    predictor = network(target, **changes)
    if isinstance(source, FeatureStore):
        source = FeatureStore(source.directory, layers=predictor.config.feature_layers)
    window = None if predictor.memory_shapes else predictor.config.window
    module = ShapeModule(predictor, target, losses or Losses(), options, seed=seed, log_every=2)
    data = ShapeDataModule(source, target, options, window=window, ahead=STEPS, max_length=128, seed=seed)
    if predictor.draft_vocabulary is not None:
        predictor.draft_vocabulary = draft_vocabulary(data.texts(), len(predictor.draft_vocabulary), target.vocab_size)
    if predictor.heads is not None:
        predictor.adopt_head(target.output_rows(predictor.draft_vocabulary))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=options.steps,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        log_every_n_steps=2,
        callbacks=list(callbacks),
        plugins=[AtomicCheckpointIO()],
    )
    trainer.fit(module, data, ckpt_path=ckpt_path, weights_only=True)
    return module


def weights(module: ShapeModule) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.predictor.parameters()])


# ------------------------------------------------------------------------------------------------- examples


def naive(hidden, tokens, mask, root, window, steps, size):
    """The definition, position by position."""
    length = len(tokens)
    before = [hidden[i] if i >= 0 else torch.zeros_like(hidden[0]) for i in range(root - window, root)]
    supervised = []
    for n in range(steps):
        known = root >= 1 and mask[root] and root + n + 1 < length
        supervised.append(bool(known and mask[root + 1 : root + n + 2].all()))
    return torch.stack(before), supervised


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_examples_equal_their_definition(data):
    length = data.draw(st.integers(2, 14))
    window, steps = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    hidden, tokens = torch.randn(1, length, 6), torch.randint(0, 9, (1, length))
    roots = torch.arange(length)[None]
    cut = examples(Texts(hidden, tokens, mask[None], roots), window, steps, hidden_size=2)
    for root in range(length):
        before, supervised = naive(hidden[0], tokens[0], mask, root, window, steps, 2)
        assert torch.equal(cut.window[0, root], before)
        assert cut.mask[0, root].tolist() == supervised
        for n in [n for n in range(steps) if supervised[n]]:
            assert cut.tokens[0, root, n] == tokens[0, root + n]
            assert torch.equal(cut.states[0, root, n], hidden[0, root + n, -2:])
    ready = eligible(mask, torch.tensor([0, length]))
    assert torch.equal(ready, cut.mask[0, :, 0])


def test_stored_batches_equal_examples_of_whole_conversations(store, tiny_target):
    data = ShapeDataModule(store, tiny_target, OPTIONS, window=WINDOW, ahead=STEPS)
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
    data = ShapeDataModule(store, tiny_target, options, window=None, ahead=STEPS, exclude=[0])
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


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"step_mode": "parallel", "token_conditioning": "none"},
        {"step_mode": "parallel", "token_conditioning": "root"},
        {"step_mode": "recursive", "token_conditioning": "none"},
        {"step_mode": "recursive", "token_conditioning": "root", "attention": True},
        {"step_mode": "parallel", "token_conditioning": "root", "markov_rank": 8},
        {"attention": True, "feature_layers": [1, -1], "draft_vocab_size": 200},
        {"kind": "medusa", "own_heads": True, "draft_vocab_size": 200},
        {"kind": "eagle", "feature_layers": [1, 2, -1]},
        {"kind": "eagle", "own_heads": True, "draft_vocab_size": 200},
        {"kind": "block", "num_layers": 2, "feature_layers": [0, -1], "markov_rank": 8, "confidence": True},
    ],
)
def test_teacher_forced_acceptance_equals_decoded(store, tiny_target, axes):
    """Windows, tokens and targets of training are those of decoding: chains accept the same tokens."""
    losses = Losses(smooth_l1=0.0)
    predictor = fit(tiny_target, store, losses=losses, options=replace(OPTIONS, steps=60, batch_size=32), **axes)
    predictor = predictor.predictor.eval()
    decoder = ShapeDecoder(tiny_target, TrainedDrafter(predictor, TreeShape(depth=STEPS, width=1)), fall_back=False)
    accepted_any = False
    for stored in list(store)[:4]:
        prompt = stored.input_ids[:20]
        out = decoder.generate(
            prompt[None], do_sample=False, max_new_tokens=40, eos_token_id=[], return_dict_in_generate=True
        )
        text = out.sequences[0]
        mask = torch.arange(len(text)) >= len(prompt)
        features = tiny_target.features(text[None], predictor.config.feature_layers)[0]
        forced = teacher_forced(predictor, tiny_target, [Stored(text, mask, features)])
        assert forced == (out.stats.emitted, out.stats.forwards)
        accepted_any |= out.stats.emitted > out.stats.forwards
    assert accepted_any


@pytest.mark.parametrize(
    "axes",
    [
        {"draft_vocab_size": 200},
        {"step_mode": "parallel", "token_conditioning": "root", "markov_rank": 8},
        {"step_mode": "parallel", "token_conditioning": "root", "markov_rank": 8, "coupling": 4},
        {"kind": "medusa", "own_heads": True},
        {"kind": "eagle", "own_heads": True},
    ],
)
def test_logits_of_supervised_steps_are_those_of_all_steps(tiny_target, axes):
    predictor = network(tiny_target, **axes)
    generator = torch.Generator().manual_seed(0)
    for parameter in predictor.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    if predictor.draft_vocabulary is not None:
        predictor.draft_vocabulary = torch.arange(len(predictor.draft_vocabulary))
    states, embeddings = torch.randn(2, 2, 5, STEPS, tiny_target.hidden_size, generator=generator)
    kept = supervised(torch.rand(2, 5, STEPS, generator=generator) < 0.6)
    reader = Reader(predictor, tiny_target)
    torch.testing.assert_close(reader.at(kept, states, embeddings), reader(states, embeddings)[kept])


def test_the_transport_loss_trains(store, tiny_target):
    options = TrainingOptions(steps=40, batch_size=32)
    losses = Losses(smooth_l1=0.0, soft_cross_entropy=0.0, sinkhorn=1.0, sinkhorn_support=8)
    module = fit(tiny_target, store, losses=losses, options=options)
    before = network(tiny_target)
    assert any(not torch.equal(a, b) for a, b in zip(module.predictor.parameters(), before.parameters(), strict=True))
    assert all(parameter.isfinite().all() for parameter in module.predictor.parameters())


# ------------------------------------------------------------------------------------------------- order


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
    data = ShapeDataModule(store, tiny_target, OPTIONS, window=WINDOW, ahead=STEPS, seed=5)

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
        assert one == samples(step, 2, 1) == samples(step, 1, 2) == samples(step, 2, 4)
    assert samples(0, 1, 1) != samples(1, 1, 1)


def test_data_without_anything_to_learn_is_refused(store, tiny_target):
    with pytest.raises(DataError, match="nothing to learn"):
        ShapeDataModule(store, tiny_target, OPTIONS, window=3, ahead=3, exclude=range(len(store)))
    with pytest.raises(DataError, match="nothing to learn"):
        ShapeDataModule(CONVERSATIONS, tiny_target, OPTIONS, window=3, ahead=3, exclude=range(9))


def test_online_examples_are_those_of_the_store(store, tiny_target):
    module = ShapeModule(network(tiny_target), tiny_target, Losses(), OPTIONS)
    data = ShapeDataModule(CONVERSATIONS, tiny_target, OPTIONS, window=WINDOW, ahead=STEPS, max_length=128)
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


# ------------------------------------------------------------------------------------------------- randomness


@given(st.floats(0.01, 1.0), st.integers(1, 2))
@settings(max_examples=10, deadline=None)
def test_noise_is_uniform_relative_and_keyed(amount, layers):
    window = torch.randn(40, 4, layers * 64) * torch.rand(40, 4, 1).mul(10)
    window[:, 0] = 0
    keys = torch.arange(40)
    noisy = add_noise(window, keys, amount, hidden_size=64)
    relative = (noisy - window).unflatten(-1, (layers, 64))
    scale = window.unflatten(-1, (layers, 64)).pow(2).mean(-1, keepdim=True).sqrt()
    assert torch.equal(noisy[:, 0], window[:, 0])
    relative = (relative / scale)[:, 1:]
    assert relative.abs().max() <= amount * math.sqrt(3) * 1.001
    assert abs(relative.mean()) < 0.05 * amount and abs(relative.std() / amount - 1) < 0.03
    assert torch.equal(add_noise(window[7:9], keys[7:9], amount, 64), noisy[7:9])


def test_seeds_are_unrelated():
    seeds = {derive_seed(a, b) for a in range(20) for b in range(20)} | {derive_seed(a) for a in range(20)}
    assert len(seeds) == 420 and derive_seed(1, 2) == derive_seed(1, 2) and max(seeds) < 2**63


def test_same_seed_same_weights(store, tiny_target):
    options = TrainingOptions(steps=4, batch_size=16, noise=0.2)
    torch.manual_seed(1)
    first = fit(tiny_target, store, options=options, dropout=0.3)
    torch.manual_seed(2)  # the global generator has no say
    second = fit(tiny_target, store, options=options, dropout=0.3)
    other = fit(tiny_target, store, options=options, dropout=0.3, seed=1)
    assert torch.equal(weights(first), weights(second))
    assert not torch.equal(weights(first), weights(other))


def test_accumulated_parts_are_the_whole_batch(store, tiny_target):
    losses = Losses(step_decay=1.0, soft_cross_entropy=0.0, smooth_l1=1.0)
    whole, parts = (fit(tiny_target, store, losses=losses, accumulate=n, num_layers=0) for n in (1, 2))
    assert parts.trainer.global_step == whole.trainer.global_step == OPTIONS.steps
    # Means over parts weigh supervised steps slightly otherwise than the mean over the whole.
    assert (weights(whole) - weights(parts)).norm() < 0.2 * (weights(whole) - weights(parts) * 0).norm()


# ------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("online", [False, True])
def test_training_learns(store, tiny_target, online):
    source = CONVERSATIONS if online else store
    options = TrainingOptions(steps=60, batch_size=32, learning_rate=3e-3, warmup_steps=5)
    module = fit(tiny_target, source, options=options)
    metrics = module.trainer.callback_metrics
    assert metrics["train/agreement_1"] > 0.3 and metrics["train/chain_AL"] > 1.3
    assert {"train/loss", "train/soft_cross_entropy", "train/smooth_l1"} <= metrics.keys()


def test_draft_vocabulary_holds_the_most_frequent_supervised_tokens():
    texts = [
        (torch.tensor([5, 5, 5, 1, 2, 2, 7]), torch.tensor([False, False, False, True, True, True, True])),
        (torch.tensor([7, 3, 2]), torch.tensor([True, True, True])),
    ]
    assert draft_vocabulary(texts, 2, vocab_size=9).tolist() == [2, 7]
    assert draft_vocabulary(texts, 6, vocab_size=9).tolist() == [0, 1, 2, 3, 4, 7]  # unseen ones by number
    with pytest.raises(ConfigError, match="draft_vocab_size is 10, and the target has 9"):
        draft_vocabulary(texts, 10, vocab_size=9)


def test_target_stays_outside(store, tiny_target):
    module = fit(tiny_target, store)
    assert all(name.startswith("predictor.") for name in module.state_dict())
    assert sum(p.numel() for p in module.parameters()) == sum(p.numel() for p in module.predictor.parameters())
    assert not any(parameter.requires_grad for parameter in tiny_target.model.parameters())


def test_weight_decay_is_for_matrices(tiny_target):
    module = ShapeModule(network(tiny_target), tiny_target, Losses(), TrainingOptions(weight_decay=0.5))
    groups = module.configure_optimizers()["optimizer"].param_groups
    assert {p.ndim for p in groups[0]["params"]} == {2} and groups[0]["weight_decay"] == 0.5
    assert {p.ndim for p in groups[1]["params"]} == {1} and groups[1]["weight_decay"] == 0.0
    assert groups[0]["betas"] == (0.9, 0.95)


def test_learning_rate_schedule():
    options = TrainingOptions(steps=100, warmup_steps=10, decay="cosine")
    factors = [options.learning_rate_factor(step, step / 100) for step in range(101)]
    assert factors[:11] == sorted(factors[:11]) and factors[10] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True) and factors[100] < 1e-6
    linear = TrainingOptions(steps=100, warmup_steps=0, decay="linear")
    assert linear.learning_rate_factor(25, 0.25) == pytest.approx(0.75)
    assert linear.learning_rate_factor(25, 0.9) == pytest.approx(0.1)  # time runs out before the steps do
    assert TrainingOptions(decay="none").learning_rate_factor(999, 1.0) == 1.0


def test_max_minutes_ends_the_run(store, tiny_target):
    options = TrainingOptions(steps=100_000, batch_size=16, max_minutes=0.02)
    module = fit(tiny_target, store, options=options)
    assert 0 < module.trainer.global_step < 100_000
    assert module.trainer.optimizers[0].param_groups[0]["lr"] < 0.2 * options.learning_rate


@pytest.mark.parametrize(
    "values", [{"steps": 0}, {"batch_size": 0}, {"noise": -1.0}, {"learning_rate": 0.0}, {"max_minutes": 0.0}]
)
def test_bad_training_options_are_refused(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        TrainingOptions(**values).check()


# ------------------------------------------------------------------------------------------------- validation


def prompts(store) -> list[torch.Tensor]:
    return [stored.input_ids[:length] for stored, length in zip(store, (12, 20, 9, 15), strict=False)]


def test_validation_decodes_with_the_weights_of_the_moment(store, tiny_target, tmp_path):
    validation = DecodingValidation(prompts(store), every=4, max_new_tokens=12, best_path=tmp_path / "best")
    options = TrainingOptions(steps=10, batch_size=16)
    module = fit(tiny_target, store, options=options, callbacks=[validation], dropout=0.5)
    assert [entry["step"] for entry in validation.history] == [4, 8, 10]
    module.predictor.eval()
    one_by_one = [decode_counts(tiny_target, module.predictor, [p], 12) for p in prompts(store)]
    emitted, forwards = ([counts[i][0] for counts in one_by_one] for i in (0, 1))
    last = validation.history[-1]
    assert last["value"] == acceptance_length(emitted, forwards).value == sum(emitted) / sum(forwards)
    assert last["low"] <= last["value"] <= last["high"]
    load_weights(module.predictor, tmp_path / "best")
    best = decode_counts(tiny_target, module.predictor, prompts(store), 12)
    assert sum(best[0]) / sum(best[1]) == validation.best["value"]


def test_validation_disturbs_nothing(store, tiny_target, tmp_path):
    options = TrainingOptions(steps=6, batch_size=16, noise=0.1)
    alone = fit(tiny_target, store, options=options, dropout=0.3)
    validation = DecodingValidation(prompts(store), every=1, max_new_tokens=6, best_path=tmp_path / "best")
    watched = fit(tiny_target, store, options=options, dropout=0.3, callbacks=[validation])
    assert len(validation.history) == 6
    assert torch.equal(weights(alone), weights(watched))
    assert not any(p.is_inference() for p in [*watched.parameters(), *tiny_target.model.parameters()])
    assert not any(buffer.is_inference() for buffer in tiny_target.model.buffers())


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=12))
@settings(max_examples=20, deadline=None)
def test_interval_holds_the_ratio_of_sums(counts):
    emitted, forwards = zip(*counts, strict=True)
    measured = acceptance_length(emitted, forwards)
    assert measured.value == pytest.approx(sum(emitted) / sum(forwards))
    ratios = [a / b for a, b in counts]
    assert min(ratios) - 1e-9 <= measured.low <= measured.high <= max(ratios) + 1e-9
    assert measured == acceptance_length(emitted, forwards)


# ------------------------------------------------------------------------------------------------- checkpoints


class SaveAt(pl.Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *args) -> None:
        if trainer.global_step == self.step and not self.path.exists():  # once: as ModelCheckpoint does
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_resumed_run_ends_in_the_same_weights(store, tiny_target, tmp_path, accumulate):
    options = TrainingOptions(steps=9, batch_size=16, noise=0.2)
    path = tmp_path / "some.ckpt"
    whole = fit(tiny_target, store, options=options, dropout=0.3, accumulate=accumulate, callbacks=[SaveAt(5, path)])
    resumed = fit(tiny_target, store, options=options, dropout=0.3, accumulate=accumulate, ckpt_path=path, seed=0)
    assert resumed.trainer.global_step == whole.trainer.global_step == 9
    assert torch.equal(weights(whole), weights(resumed))
    saved = torch.load(path, weights_only=True)
    assert all(name.startswith("predictor.") for name in saved["state_dict"])
    with pytest.raises(CheckpointError, match=r"training.batch_size was 16 and is 8"):
        fit(tiny_target, store, options=TrainingOptions(steps=9, batch_size=8, noise=0.2), ckpt_path=path)


def test_checkpoint_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path, writer = tmp_path / "last.ckpt", AtomicCheckpointIO()
    writer.save_checkpoint({"step": 1}, path)

    def interrupted(checkpoint, file):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.save_checkpoint({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}


def test_export_can_be_loaded(tiny_target, tmp_path):
    predictor = network(tiny_target, seed=3)
    record = {
        "command": "python -m shape.train", "steps": 7, "acceptance_length": {"value": 2.5, "low": 2.0, "high": 3.0},
    }  # fmt: skip
    export(predictor, tmp_path, tiny_target.identity, record)
    card = (tmp_path / "README.md").read_text()
    assert "| acceptance length | 2.50 [2.00, 3.00] |" in card and "base_model: tiny" in card
    decoder = ShapeDecoder.from_pretrained(tmp_path, target=tiny_target)
    loaded = decoder.drafter.predictor
    assert loaded.config.training == record
    assert loaded.config.target_identity == tiny_target.identity.to_dict()
    for name, value in predictor.state_dict().items():
        found = loaded.state_dict()[name]
        assert torch.equal(found, value.to(found.dtype))  # drafting may run in bfloat16


def test_windows_are_those_of_the_decoder(store):
    """The drafter's first window: `lengths - 1` ends, where the root's position is `lengths - 1`."""
    stored = store[1]
    root = 25
    around = store.gather(store.offsets[1][None] + root, WINDOW, STEPS)
    decoder_window = windows(stored.hidden[None, :root], torch.tensor([[root]]), WINDOW)[0, 0]
    assert torch.equal(around.hidden[0, :WINDOW], decoder_window)


def test_a_network_fed_otherwise_than_in_training_shows(store, tiny_target, monkeypatch):
    """What `shape.train` warns of: decoding that cuts its windows one position off."""
    predictor = fit(tiny_target, store, losses=Losses(smooth_l1=0.0), options=replace(OPTIONS, steps=60)).predictor
    texts = [stored.input_ids[:20] for stored in list(store)[:4]]
    forced, decoded = as_trained_and_decoded(tiny_target, predictor, texts, 40)
    assert forced == decoded > 1.0
    begin = TrainedDrafter.start

    def start(self, settled, hidden):
        begin(self, settled, hidden.roll(1, dims=1))

    update = TrainedDrafter.update
    monkeypatch.setattr(TrainedDrafter, "start", start)
    monkeypatch.setattr(TrainedDrafter, "update", lambda self, s, hidden, n: update(self, s, 0 * hidden, n))
    again, decoded = as_trained_and_decoded(tiny_target, predictor, texts, 40)
    assert decoded < again == forced


@pytest.mark.parametrize("changes", [{}, {"kind": "medusa", "own_heads": True, "draft_vocab_size": 200}])
def test_muon_trains_matrices_and_resumes_alike(store, tiny_target, tmp_path, changes):
    options = replace(OPTIONS, optimizer="muon", steps=6)
    path = tmp_path / "half.ckpt"
    whole = fit(tiny_target, store, options=options, callbacks=[SaveAt(3, path)], **changes)
    optimizer = whole.configure_optimizers()["optimizer"]
    muon, adam = optimizer.parts
    taken = [p for part in (muon, adam) for group in part.param_groups for p in group["params"]]
    assert len(taken) == len({id(p) for p in taken}) == len(list(whole.predictor.parameters()))
    assert all(p.ndim == 2 for group in muon.param_groups for p in group["params"])
    resumed = fit(tiny_target, store, options=options, ckpt_path=path, **changes)
    assert torch.equal(weights(resumed), weights(whole))
