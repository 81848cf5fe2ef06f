"""The training step, its optimisation, validation by decoding and checkpoints."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from helpers import BASELINES
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from training_runs import (
    CONVERSATIONS,
    OPTIONS,
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

from shape.drafters import TrainedDrafter
from shape.errors import CheckpointError, ConfigError
from shape.features.extraction import compute_features
from shape.features.store import FeatureStore
from shape.training.batches import Split
from shape.training.callbacks import CountFlops
from shape.training.checkpoints import AtomicCheckpointIO
from shape.training.distillation import DistillModule, draft_model
from shape.training.module import DrafterModule, ShapeModule, add_noise
from shape.training.optimization import learning_rate_factor
from shape.training.options import Losses, TrainingOptions
from shape.training.validation import (
    DecodingValidation,
    acceptance_length,
    decode_counts,
    forced_and_decoded,
    load_weights,
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


def test_same_seed_same_weights(store, tiny_target):
    options = TrainingOptions(steps=4, batch_size=16, noise=0.2)
    torch.manual_seed(1)
    first = fit(tiny_target, store, options=options, dropout=0.3)
    torch.manual_seed(2)  # the global generator has no say
    second = fit(tiny_target, store, options=options, dropout=0.3)
    other = fit(tiny_target, store, options=options, dropout=0.3, seed=1)
    assert torch.equal(weights(first), weights(second))
    assert not torch.equal(weights(first), weights(other))


@pytest.fixture(scope="module")
def unequal(tiny_target, tmp_path_factory):
    return extracted(tiny_target, tmp_path_factory.mktemp("unequal"), UNEQUAL)


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


def test_accumulated_parts_are_the_whole_batch(unequal, tiny_target):
    options = replace(OPTIONS, batch_size=300)
    whole, parts = (fit(tiny_target, unequal, accumulate=n, attention=True, options=options) for n in (1, 3))
    assert parts.trainer.global_step == whole.trainer.global_step == OPTIONS.steps
    begin = torch.cat([weight.flatten() for weight in network(tiny_target, attention=True).parameters()])
    assert (weights(whole) - weights(parts)).norm() < 1e-3 * (weights(whole) - begin).norm()
    logged = [run.trainer.callback_metrics for run in (whole, parts)]
    for name in ("train/loss", "train/soft_cross_entropy", "train/smooth_l1"):
        assert logged[0][name] == pytest.approx(float(logged[1][name]), rel=1e-4), name


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


@pytest.mark.parametrize("kind", NETWORKS)
def test_what_no_loss_reaches_is_not_trained(unequal, tiny_target, kind):
    """Processes wait for the gradient of every weight that is trained."""
    for losses in (Losses(soft_cross_entropy=0.0), Losses(smooth_l1=0.0)):
        predictor = trainable(tiny_target, **NETWORKS[kind])
        module = ShapeModule(predictor, tiny_target, losses, OPTIONS, log_every=1)
        module.log = module.log_dict = lambda *_, **__: None  # type: ignore[method-assign,assignment]
        window = None if predictor.memory_shapes else WINDOW
        data = data_of(FeatureStore(unequal.storage, layers=module.layers), tiny_target, window=window)
        module.training_step(data.batches(Split())[0], 0).backward()
        named = list(predictor.named_parameters())
        assert not [name for name, weight in named if weight.requires_grad and weight.grad is None]
        frozen = {name for name, weight in named if not weight.requires_grad}
        assert all(name.startswith(("heads", "markov")) for name in frozen)
        assert bool(frozen) == (not losses.on_logits and bool(predictor.reading))


@pytest.mark.parametrize("online", [False, True])
def test_training_learns(store, tiny_target, online):
    source = CONVERSATIONS if online else store
    options = TrainingOptions(steps=60, batch_size=32, learning_rate=3e-3, warmup_steps=5)
    module = fit(tiny_target, source, options=options)
    metrics = module.trainer.callback_metrics
    assert metrics["train/agreement_1"] > 0.3 and metrics["train/chain_AL"] > 1.3
    assert {"train/loss", "train/soft_cross_entropy", "train/smooth_l1"} <= metrics.keys()


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


def prompts(store) -> list[torch.Tensor]:
    return [stored.input_ids[:length] for stored, length in zip(store, (12, 20, 9, 15), strict=False)]


def test_validation_decodes_with_the_weights_of_the_moment(store, tiny_target, tmp_path):
    validation = DecodingValidation(prompts(store), every=4, max_new_tokens=12, best_path=tmp_path / "best")
    options = TrainingOptions(steps=10, batch_size=16)
    module = fit(tiny_target, store, options=options, callbacks=[validation], dropout=0.5)
    assert [entry["step"] for entry in validation.history] == [4, 8, 10]
    module.predictor.eval()
    one_by_one = [decode_counts(tiny_target, module.drafter(), [p], 12) for p in prompts(store)]
    emitted, forwards = ([counts[i][0] for counts in one_by_one] for i in (0, 1))
    last = validation.history[-1]
    assert last["value"] == acceptance_length(emitted, forwards).value == sum(emitted) / sum(forwards)
    assert last["low"] <= last["value"] <= last["high"]
    load_weights(module.predictor, tmp_path / "best")
    best = decode_counts(tiny_target, module.drafter(), prompts(store), 12)
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


def test_a_run_that_had_ended_goes_on_with_more_steps(store, tiny_target, tmp_path):
    options, path = TrainingOptions(steps=9, batch_size=16, decay="none"), tmp_path / "some.ckpt"
    whole = fit(tiny_target, store, options=options)
    fit(tiny_target, store, options=replace(options, steps=5), callbacks=[SaveAt(5, path)])
    resumed = fit(tiny_target, store, options=options, ckpt_path=path)
    assert resumed.trainer.global_step == 9 and torch.equal(weights(whole), weights(resumed))


def test_a_run_goes_on_with_another_learning_rate(store, tiny_target, tmp_path):
    """As one that diverged must."""
    path = tmp_path / "some.ckpt"
    fit(tiny_target, store, callbacks=[SaveAt(5, path)])
    still = fit(tiny_target, store, options=replace(OPTIONS, learning_rate=1e-12), ckpt_path=path)
    kept = torch.load(path, weights_only=True)["state_dict"]
    assert still.trainer.global_step == OPTIONS.steps
    for name, value in still.state_dict().items():
        torch.testing.assert_close(value, kept[name], rtol=0, atol=1e-9)


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


def test_a_network_fed_otherwise_than_in_training_shows(store, tiny_target, monkeypatch):
    """What `shape.train` warns of: decoding that cuts its windows one position off."""
    predictor = fit(tiny_target, store, losses=Losses(smooth_l1=0.0), options=replace(OPTIONS, steps=60)).predictor
    texts = [stored.input_ids[:20] for stored in list(store)[:4]]
    forced, decoded = forced_and_decoded(tiny_target, predictor, texts, 40)
    assert forced == decoded > 1.0
    begin = TrainedDrafter.start

    def start(self, settled, hidden):
        begin(self, settled, hidden.roll(1, dims=1))

    update = TrainedDrafter.update
    monkeypatch.setattr(TrainedDrafter, "start", start)
    monkeypatch.setattr(TrainedDrafter, "update", lambda self, s, hidden, n: update(self, s, 0 * hidden, n))
    again, decoded = forced_and_decoded(tiny_target, predictor, texts, 40)
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
