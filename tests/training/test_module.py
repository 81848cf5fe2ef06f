"""The training step: the same however its batch is divided, a pure function of the seed, beside a frozen target."""

import math
from dataclasses import replace

import pytest
import pytorch_lightning as pl
import torch
from helpers import BASELINES, WIDTHS, without_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from training_runs import (
    CONVERSATIONS,
    OPTIONS,
    STEPS,
    UNEQUAL,
    WINDOW,
    data_of,
    extracted,
    fit,
    network,
    portions,
    trainable,
    weights,
)

from shape.errors import ConfigError
from shape.features.extraction import compute_features
from shape.features.store import FeatureStore
from shape.networks import layers
from shape.target.model import Target
from shape.training import chunks
from shape.training import module as training_module
from shape.training.batches import Partition
from shape.training.distillation import DistillModule, draft_model
from shape.training.module import (
    DrafterModule,
    ShapeModule,
    add_noise,
    draftable,
    likeliest_tokens,
    positions_ahead,
)
from shape.training.options import Losses, TrainingOptions
from shape.training.validation import (
    DecodingValidation,
)

NETWORKS = {"shape": {}, **BASELINES}
KL = Losses(smooth_l1=0.0, soft_cross_entropy=0.0, kl=1.0)


def test_the_transport_loss_trains(store, tiny_target):
    options = TrainingOptions(steps=40, batch_size=32)
    losses = Losses(smooth_l1=0.0, soft_cross_entropy=0.0, sinkhorn=1.0, sinkhorn_support=8)
    module = fit(tiny_target, store, losses=losses, options=options)
    before = network(tiny_target)
    assert any(not torch.equal(a, b) for a, b in zip(module.predictor.parameters(), before.parameters(), strict=True))
    assert all(parameter.isfinite().all() for parameter in module.predictor.parameters())


@pytest.mark.parametrize("kind", WIDTHS)
def test_drafters_of_another_width_learn(store, tiny_target, kind):
    options = TrainingOptions(steps=30, batch_size=32, learning_rate=3e-3, warmup_steps=2)
    before, after = (fit(tiny_target, store, losses=KL, options=each, **WIDTHS[kind]) for each in (OPTIONS, options))
    assert float(after.trainer.callback_metrics["train/loss"]) < float(before.trainer.callback_metrics["train/loss"])
    assert all(parameter.isfinite().all() for parameter in after.predictor.parameters())


@given(st.floats(0.01, 1.0), st.integers(1, 2))
@settings(max_examples=10)
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
    plain = (add_noise(window, keys, amount, 64, absolute=True) - window)[:, 1:]
    assert plain.abs().max() <= amount * math.sqrt(3) * 1.001 + 1e-5
    assert abs(plain.mean()) < 0.05 * amount and abs(plain.std() / amount - 1) < 0.03
    assert torch.equal(add_noise(window, keys, amount, 64, absolute=True)[:, 0], window[:, 0])


def test_same_seed_same_weights(store, tiny_target):
    options = TrainingOptions(steps=4, batch_size=16, noise=0.2)
    torch.manual_seed(1)
    first = fit(tiny_target, store, options=options, dropout=0.3)
    torch.manual_seed(2)  # the global generator has no say
    second = fit(tiny_target, store, options=options, dropout=0.3)
    other = fit(tiny_target, store, options=options, dropout=0.3, seed=1)
    assert torch.equal(weights(first), weights(second))
    assert not torch.equal(weights(first), weights(other))


@pytest.mark.parametrize("kind", [*NETWORKS, "online", "model"])
def test_one_position_has_one_weight(unequal, tiny_target, kind):
    """However a step of very unequal texts is dealt to processes and portions, its loss and gradient are those of one
    big batch; and these are what a plain mean over its positions has.
    """
    options, changes = replace(OPTIONS, batch_size=300), NETWORKS.get(kind, {"attention": True})
    if kind == "model":
        module: DrafterModule = DistillModule(draft_model(tiny_target, 32, 1, 2), tiny_target, KL, options)
        store, window = unequal, None
    else:
        module = ShapeModule(trainable(tiny_target, **changes), tiny_target, Losses(mse=0.5), options, log_every=1000)
        store = UNEQUAL if kind == "online" else FeatureStore(unequal.storage, layers=module.layers)
        window = None if module.predictor.memory_shapes else WINDOW
    data = data_of(store, tiny_target, options, window=window, max_length=160)
    module.log = module.log_dict = lambda *_, **__: None  # type: ignore[method-assign,assignment]

    def taught(step: int, split: tuple[int, int]) -> tuple[float, torch.Tensor]:
        """The step's loss and its gradient, averaged over portions as Lightning and DDP do."""
        module.zero_grad()
        batches, loss = portions(data, step, *split), 0.0
        for batch in batches:
            one = module.training_step(batch, 0) / len(batches)
            one.backward()
            loss += float(one)
        return loss, torch.cat([weight.grad.flatten() for weight in module.predictor.parameters()])

    for step in range(2):
        loss, gradient = taught(step, (1, 1))
        assert gradient.norm() > 1e-3
        for split in ((1, 3), (4, 2)):
            other, summed = taught(step, split)
            assert other == pytest.approx(loss, rel=1e-5), split
            assert (summed - gradient).norm() < 1e-5 * gradient.norm(), split


CHUNKED = {
    **NETWORKS,
    "coupled": {"step_mode": "parallel", "token_conditioning": "root", "markov_rank": 8, "coupling": 4},
    "unsure": {"confidence": True, "draft_vocab_size": 200},
}


@pytest.mark.parametrize("kind", CHUNKED)
def test_losses_in_chunks_are_those_of_all_roots_at_once(unequal, tiny_target, kind, monkeypatch):
    losses = Losses(mse=0.5, total_variation=0.5, negative_log_acceptance=0.1, sinkhorn=0.2, sinkhorn_support=8)

    def taught(size: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor | None]]:
        """What is logged, the drafts among it, and gradients."""
        monkeypatch.setattr(chunks, "CHUNK_BYTES", size)
        module = ShapeModule(trainable(tiny_target, **CHUNKED[kind]), tiny_target, losses, OPTIONS, log_every=1)
        logged: dict[str, torch.Tensor] = {}
        module.log = lambda name, value, **_: logged.update({name: value})  # type: ignore[method-assign,assignment]
        module._log_agreement = lambda drafts, *_: logged.update(drafts=drafts)  # type: ignore[method-assign]
        window = None if module.predictor.memory_shapes else WINDOW
        data = data_of(FeatureStore(unequal.storage, layers=module.layers), tiny_target, window=window, max_length=160)
        module.training_step(data.batches(Partition())[0], 0).backward()
        return logged, {name: weight.grad for name, weight in module.predictor.named_parameters()}

    for whole, parts in zip(taught(2**30), taught(20_000), strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rows", "every"), [(10_000, 1), (STEPS, 4)])
def test_agreement_is_measured_in_as_many_roots_as_it_has_logits_for(unequal, tiny_target, rows, every, monkeypatch):
    """With a large vocabulary all of them would take as long as some steps."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", rows * 4 * tiny_target.vocab_size)
    options = replace(OPTIONS, batch_size=8 * every)
    module = ShapeModule(trainable(tiny_target), tiny_target, Losses(), options, log_every=1)
    logged: dict[str, torch.Tensor] = {}
    module.log = lambda name, value, **_: logged.update({name: value})  # type: ignore[method-assign,assignment]
    given, measure = [], module._log_agreement
    module._log_agreement = lambda *each: given.append(each) or measure(*each)  # type: ignore[method-assign,func-returns-value]
    store = FeatureStore(unequal.storage, layers=module.layers)
    module.training_step(data_of(store, tiny_target, options, window=WINDOW, max_length=160).batches(Partition())[0], 0)
    (drafts, cut, _), sample = given[0], slice(None, None, every)
    best = likeliest_tokens(tiny_target, cut.states).flatten(0, 1)[sample]
    mask = cut.mask.flatten(0, 1)[sample]
    agree = (drafts.flatten(0, 1)[sample] == best) & mask
    assert len(mask) == 8
    assert float(logged["train/agreement_1"]) == pytest.approx(float(agree[:, 0][mask[:, 0]].float().mean()))
    lengths = 1 + agree.cumprod(-1).sum(-1)[mask[:, 0]]
    assert float(logged["train/chain_AL"]) == pytest.approx(float(lengths.float().mean()))


@pytest.mark.parametrize("kind", ["eagle", "block", "shape with attention"])
def test_checkpointing_and_attention_in_parts_change_no_gradient(unequal, tiny_target, kind, monkeypatch):
    def gradients(checkpointing: bool) -> dict[str, torch.Tensor | None]:
        options = replace(OPTIONS, batch_size=300, gradient_checkpointing=checkpointing)
        predictor = trainable(tiny_target, **NETWORKS[kind])
        module = ShapeModule(predictor, tiny_target, Losses(mse=0.5), options, log_every=1000)
        module.log = lambda *_, **__: None  # type: ignore[method-assign,assignment]
        store = FeatureStore(unequal.storage, layers=module.layers)
        module.training_step(data_of(store, tiny_target, options, window=None).batches(Partition())[0], 0).backward()
        return {name: weight.grad for name, weight in predictor.named_parameters()}

    whole = gradients(False)
    torch.testing.assert_close(gradients(True), whole)
    monkeypatch.setattr(layers, "SCORES_BYTES", 20_000)
    torch.testing.assert_close(gradients(True), whole, rtol=1e-4, atol=1e-6)


def test_accumulated_parts_are_the_whole_batch(unequal, tiny_target):
    options = replace(OPTIONS, batch_size=300)
    whole, parts = (fit(tiny_target, unequal, accumulate=n, attention=True, options=options) for n in (1, 3))
    assert parts.trainer.global_step == whole.trainer.global_step == OPTIONS.steps
    begin = torch.cat([weight.flatten() for weight in network(tiny_target, attention=True).parameters()])
    assert (weights(whole) - weights(parts)).norm() < 1e-3 * (weights(whole) - begin).norm()
    logged = [run.trainer.callback_metrics for run in (whole, parts)]
    for name in ("loss", "soft_cross_entropy", "smooth_l1", "agreement_1", f"agreement_{STEPS}", "chain_AL"):
        assert logged[0][f"train/{name}"] == pytest.approx(float(logged[1][f"train/{name}"]), rel=1e-4), name


def test_online_training_in_half_precision(tiny_target):
    """Where Lightning casts all that is in a batch."""
    module = fit(tiny_target, UNEQUAL, precision="bf16-true", options=replace(OPTIONS, steps=2))
    assert module.predictor.dtype == torch.bfloat16 and module.global_step == 2


def test_online_features_are_computed_outside_of_autocast(tiny_target, monkeypatch):
    """In the target's dtype, to the last bit what extraction would have stored."""
    found = []
    texts = ShapeModule._texts
    monkeypatch.setattr(ShapeModule, "_texts", lambda *its: found.append((its[1], texts(*its))) or found[-1][1])
    fit(tiny_target, UNEQUAL, precision="bf16-mixed", options=replace(OPTIONS, steps=2))
    assert len(found) == 2
    for batch, computed in found:
        assert computed.hidden.dtype == tiny_target.dtype == torch.float32
        assert torch.equal(computed.hidden, compute_features(tiny_target, batch.conversations))


def test_where_bfloat16_is_slow_the_head_is_read_in_float32(tiny_model, tiny_tokenizer, tmp_path, monkeypatch):
    """Such a CPU takes a hundred times as long for it, number by number."""
    model = tiny_model("llama", torch.bfloat16, seed=1, vocab_size=len(tiny_tokenizer))
    target = Target(model, tiny_tokenizer, name="tiny")
    source = extracted(target, tmp_path)
    for fast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("shape.training.module.onednn_multiplies", lambda _, fast=fast: fast)
        module = fit(target, source, options=replace(OPTIONS, steps=2))
        states = torch.randn(3, target.hidden_size)
        assert module._reader.dtype == module._reader.frozen(states).dtype == dtype
        expected = target.logits(states.bfloat16()).float()
        torch.testing.assert_close(module._reader.frozen(states).float(), expected, rtol=0.02, atol=0.02)
        assert float(module.trainer.callback_metrics["train/loss"]) < math.inf


@pytest.mark.parametrize("kind", NETWORKS)
def test_what_no_loss_reaches_is_not_trained(unequal, tiny_target, kind):
    """Processes wait for the gradient of every weight that is trained."""
    for losses in (Losses(soft_cross_entropy=0.0), Losses(smooth_l1=0.0)):
        predictor = trainable(tiny_target, **NETWORKS[kind])
        module = ShapeModule(predictor, tiny_target, losses, OPTIONS, log_every=1)
        module.log = module.log_dict = lambda *_, **__: None  # type: ignore[method-assign,assignment]
        window = None if predictor.memory_shapes else WINDOW
        data = data_of(FeatureStore(unequal.storage, layers=module.layers), tiny_target, window=window)
        module.training_step(data.batches(Partition())[0], 0).backward()
        named = list(predictor.named_parameters())
        assert not [name for name, weight in named if weight.requires_grad and weight.grad is None]
        frozen = {name for name, weight in named if not weight.requires_grad}
        assert all(name.startswith(("lm_head", "markov")) for name in frozen)
        reached = bool(losses.on_logits) or predictor.selector is not None  # which has a loss of its own
        assert bool(frozen) == (not reached and bool(predictor.head_parameters))


def test_eagle_learns_nothing_where_the_likeliest_token_cannot_be_drafted(unequal, tiny_target):
    """As published: such a position has no part in the loss, at whatever step of whatever root."""
    predictor = trainable(tiny_target, kind="eagle", own_heads=True, draft_vocab_size=50)
    module = ShapeModule(predictor, tiny_target, Losses(smooth_l1=0.0), OPTIONS, log_every=10**6)
    module.log = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    options = replace(OPTIONS, batch_size=300)  # all texts
    data = data_of(FeatureStore(unequal.storage, layers=module.layers), tiny_target, options, window=None)
    batch = data.batches(Partition())[0]
    texts, steps = batch.texts, predictor.config.num_steps
    best = draftable(tiny_target, predictor.draft_vocabulary, texts.hidden)
    learned = best.flatten()[positions_ahead(texts, steps)].unflatten(0, texts.roots.shape)
    for row, roots in enumerate(texts.roots):
        best = tiny_target.logits(texts.hidden[row]).argmax(-1)
        for number, root in enumerate(roots.tolist()):
            for n in range(min(steps, len(best) - root)):
                assert learned[row, number, n] == (best[root + n] < 50)
    assert learned.any() and not learned.all()
    assert module.training_step(batch, 0) > 0
    likeliest = set(tiny_target.logits(texts.hidden).argmax(-1).flatten().tolist())
    never = [token for token in range(tiny_target.vocab_size) if token not in likeliest]
    predictor.draft_vocabulary = torch.tensor(never[:50])
    assert module.training_step(batch, 0) == 0


@pytest.mark.parametrize("learns,kind", [("agreement_loss", {}), ("acceptance_loss", NETWORKS["block"])])
def test_estimates_know_what_cannot_be_drafted(unequal, tiny_target, monkeypatch, learns, kind):
    """Their labels, through a step of training, are of the target's whole distribution."""
    predictor = trainable(tiny_target, **{**kind, "confidence": True, "draft_vocab_size": 50})
    module = ShapeModule(predictor, tiny_target, Losses(), replace(OPTIONS, batch_size=300), log_every=10**6)
    module.log = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    store = FeatureStore(unequal.storage, layers=module.layers)
    window = None if predictor.memory_shapes else WINDOW
    batch = data_of(store, tiny_target, module.options, window=window).batches(Partition())[0]
    given, original = [], getattr(training_module, learns)
    monkeypatch.setattr(training_module, learns, lambda *all: [given.append(all), original(*all)][1])
    module.training_step(batch, 0).backward()
    known = torch.cat([each[-1] for each in given])
    reduced = torch.cat([each[3 if learns == "acceptance_loss" else 2] for each in given])
    whole = tiny_target.logits(batch.texts.hidden[..., -tiny_target.hidden_size :]).flatten(0, -2).float()
    for row, logits in zip(known, reduced.float(), strict=True):  # each at the position with these logits
        at = (whole[:, predictor.draft_vocabulary] - logits).abs().sum(-1).argmin()
        if learns == "agreement_loss":
            assert row == (whole[at].argmax() in predictor.draft_vocabulary)
        else:
            share = whole[at].softmax(-1)[predictor.draft_vocabulary].sum()
            torch.testing.assert_close(row.exp(), share, rtol=1e-4, atol=1e-5)
    assert known.unique().numel() > 1


@pytest.mark.parametrize("online", [False, True])
def test_training_learns(store, tiny_target, online):
    source = CONVERSATIONS if online else store
    options = TrainingOptions(steps=60, batch_size=32, learning_rate=3e-3, warmup_steps=5)
    module = fit(tiny_target, source, options=options)
    metrics = module.trainer.callback_metrics
    assert metrics["train/agreement_1"] > 0.3 and metrics["train/chain_AL"] > 1.3
    assert {"train/loss", "train/soft_cross_entropy", "train/smooth_l1"} <= metrics.keys()


class KeepWeights(pl.Callback):
    """The weights after every step."""

    def __init__(self) -> None:
        self.kept: dict[int, torch.Tensor] = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.kept[trainer.global_step] = weights(pl_module)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_average_of_the_weights(store, tiny_target, tmp_path, accumulate):
    """One per step, whatever the portions; it is what is validated and kept, and training itself is not touched."""
    keep, options = KeepWeights(), replace(OPTIONS, ema=0.75)
    best = tmp_path / "best.safetensors"
    validation = DecodingValidation([torch.tensor([3, 4, 5])], 1000, 4, best)
    module = fit(tiny_target, store, options=options, accumulate=accumulate, callbacks=[keep, validation])
    steps = [keep.kept[step] for step in range(1, options.steps + 1)]
    expected = steps[0]
    for step in steps[1:]:
        expected = 0.75 * expected + 0.25 * step
    mean = torch.cat([parameter.flatten() for parameter in module.network.parameters()])
    torch.testing.assert_close(mean, expected)
    plain = fit(tiny_target, store, accumulate=accumulate)
    assert torch.equal(weights(plain), weights(module)) and not torch.equal(mean, weights(module))
    saved = load_file(best)
    assert all(torch.equal(saved[name], one) for name, one in module.network.named_parameters() if name in saved)
    assert any(name.startswith("averaged.") for name in module.state_dict())  # and resumed from


def test_target_stays_outside(store, tiny_target):
    module = fit(tiny_target, store)
    assert all(name.startswith("predictor.") for name in module.state_dict())
    assert sum(p.numel() for p in module.parameters()) == sum(p.numel() for p in module.predictor.parameters())
    weights = list(tiny_target.model.parameters())
    assert all(weight.requires_grad and weight.grad is None for weight in weights)  # as their owner left them


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shape", "eagle", "block"])
def test_compiled_steps_are_the_same_to_rounding(unequal, tiny_target, kind, monkeypatch):
    """Losses and gradients of several batches of unlike sizes, in chunks and attention in parts."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2**16)
    monkeypatch.setattr(layers, "SCORES_BYTES", 2**14)

    def taught(compile: bool) -> tuple[list[float], torch.Tensor]:
        options = replace(OPTIONS, batch_size=90, compile=compile)
        module = ShapeModule(trainable(tiny_target, **NETWORKS[kind]), tiny_target, Losses(), options, log_every=1000)
        module.log = lambda *_, **__: None  # type: ignore[method-assign,assignment]
        window = None if module.predictor.memory_shapes else WINDOW
        store = FeatureStore(unequal.storage, layers=module.layers)
        data = data_of(store, tiny_target, options, window=window, max_length=160)
        losses = []
        for batch in list(data.batches(Partition()))[:4]:
            loss = module.training_step(batch, 0)
            loss.backward()
            losses.append(float(loss))
        return losses, torch.cat([weight.grad.flatten() for weight in module.predictor.parameters()])

    (plain, gradient), (traced, traced_gradient) = taught(False), taught(True)
    assert traced == pytest.approx(plain, rel=1e-5)
    assert (traced_gradient - gradient).norm() < 1e-4 * gradient.norm()


@pytest.mark.slow
def test_what_cannot_be_compiled_says_so(store, tiny_target):
    torch.compiler.reset()
    said = pytest.raises(ConfigError, match=r"training\.compile is on, and torch cannot compile this training here")
    with without_compiler(), said:
        fit(tiny_target, store, options=replace(OPTIONS, steps=2, compile=True))
