"""Validation by decoding: with the weights of the moment, without a trace in the training, and its interval."""

import hashlib
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from training_runs import (
    OPTIONS,
    fit,
    weights,
)

from shape.drafters import TrainedDrafter, TreeShape
from shape.evaluation.doctor import acceptance, in_chains
from shape.training import validation as program
from shape.training.checkpoints import LastCheckpoint
from shape.training.options import Losses, TrainingOptions
from shape.training.validation import (
    DecodingValidation,
    acceptance_length,
    decode_counts,
    load_weights,
    measured_in,
)


def prompts(store) -> list[torch.Tensor]:
    return [stored.input_ids[:length] for stored, length in zip(store, (12, 20, 9, 15), strict=False)]


def test_validation_decodes_with_the_weights_of_the_moment(store, tiny_target, tmp_path):
    validation = DecodingValidation(prompts(store), every=4, max_new_tokens=12, best_path=tmp_path / "best")
    options = TrainingOptions(steps=10, batch_size=16)
    module = fit(tiny_target, store, options=options, callbacks=[validation], dropout=0.5)
    assert [entry["step"] for entry in validation.history] == [4, 8, 10]
    module.predictor.eval()
    one_by_one = [decode_counts(tiny_target, module.drafter(module.network), [p], 12) for p in prompts(store)]
    emitted, forwards = ([counts[i][0] for counts in one_by_one] for i in (0, 1))
    counts = validation._counts(module.trainer, module, module.drafter(module.network))
    assert counts.dtype == torch.int64 and counts.tolist() == [emitted, forwards]  # Apple's GPUs have no float64
    last = validation.history[-1]
    assert last["value"] == acceptance_length(emitted, forwards)["value"] == sum(emitted) / sum(forwards)
    assert last["low"] <= last["value"] <= last["high"]
    load_weights(module.predictor, tmp_path / "best")
    best = decode_counts(tiny_target, module.drafter(module.network), prompts(store), 12)
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


def test_a_process_without_a_prompt_counts_none(store, tiny_target, tmp_path):
    validation = DecodingValidation(prompts(store), every=4, max_new_tokens=12, best_path=tmp_path / "best")
    module, last = fit(tiny_target, store), SimpleNamespace(global_rank=4, world_size=5)
    assert validation._counts(last, module, module.drafter(module.network)).tolist() == [[0] * 4] * 2


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=12))
@settings(max_examples=20)
def test_interval_holds_the_ratio_of_sums(counts):
    emitted, forwards = zip(*counts, strict=True)
    measured = acceptance_length(emitted, forwards)
    assert measured["value"] == pytest.approx(sum(emitted) / sum(forwards))
    ratios = [a / b for a, b in counts]
    assert min(ratios) - 1e-9 <= measured["low"] <= measured["high"] <= max(ratios) + 1e-9
    assert measured == acceptance_length(emitted, forwards)


def test_a_network_fed_otherwise_than_in_training_shows(store, tiny_target, monkeypatch):
    """What `shape.train` warns of: decoding that cuts its windows one position off."""
    predictor = fit(tiny_target, store, losses=Losses(smooth_l1=0.0), options=replace(OPTIONS, steps=60)).predictor
    texts = [stored.input_ids[:20] for stored in list(store)[:4]]
    answers, decoded = in_chains(tiny_target, predictor, texts, 40)
    forced = acceptance(tiny_target, predictor, answers)
    assert forced == decoded > 1.0
    begin = TrainedDrafter.start

    def start(self, settled, hidden):
        begin(self, settled, hidden.roll(1, dims=1))

    update = TrainedDrafter.update
    monkeypatch.setattr(TrainedDrafter, "start", start)
    monkeypatch.setattr(TrainedDrafter, "update", lambda self, s, hidden, n: update(self, s, 0 * hidden, n))
    answers, decoded = in_chains(tiny_target, predictor, texts, 40)
    assert decoded < acceptance(tiny_target, predictor, answers) == forced


@pytest.mark.parametrize("values", [[3.0, 2.0, 2.0, 3.0, 9.0], [1.0, 2.0, 2.0, 3.0, 1.0, 3.0, 2.0, 9.0]])
def test_patience_ends_training_without_a_new_best(store, tiny_target, tmp_path, monkeypatch, values):
    validation = DecodingValidation(prompts(store), 2, 4, tmp_path / "best", patience=3)
    told = iter(values)
    monkeypatch.setattr(program, "acceptance_length", lambda *_: {"value": next(told), "low": 1.0, "high": 9.0})
    module = fit(tiny_target, store, options=TrainingOptions(steps=40, batch_size=16), callbacks=[validation])
    best = values.index(3.0)
    assert [entry["value"] for entry in validation.history] == values[: best + 4] and validation.best["value"] == 3.0
    assert module.trainer.global_step == 2 * (best + 4)


def test_a_run_that_ended_early_ends_at_once_when_resumed(store, tiny_target, tmp_path, monkeypatch):
    """By patience, or by its time: the same command gives the same again."""
    monkeypatch.setattr(program, "acceptance_length", lambda *_: {"value": 2.0, "low": 1.0, "high": 9.0})
    patient, timed = (
        TrainingOptions(steps=40, batch_size=16),
        TrainingOptions(steps=40, batch_size=16, max_minutes=1e-4),
    )
    for name, options, patience in (("patience", patient, 2), ("time", timed, None)):
        folder, found = tmp_path / name, []
        for resumed in (None, folder / "last.ckpt"):
            validation = DecodingValidation(prompts(store), 2, 4, tmp_path / "best", patience=patience)
            watching = [validation, LastCheckpoint(folder, 100)]
            module = fit(tiny_target, store, options=options, callbacks=watching, ckpt_path=resumed)
            found.append((module.trainer.global_step, weights(module)))
        assert 0 < found[0][0] == found[1][0] < 40 and torch.equal(found[0][1], found[1][1]), name


@pytest.fixture
def measuring(store, tiny_target, monkeypatch):
    """measuring(folder, values, steps, from) -> a run's module and validation, which is told what it measures."""

    def run(folder, values, steps, ckpt_path=None, left_out=0, max_new_tokens=4, tree=None):
        told = iter(values)
        monkeypatch.setattr(program, "acceptance_length", lambda *_: {"value": next(told), "low": 1.0, "high": 9.0})
        decoded = prompts(store)[left_out:]
        validation = DecodingValidation(decoded, 4, max_new_tokens, folder / "best.safetensors", tree=tree)
        options = TrainingOptions(steps=steps, batch_size=16, decay="none")
        watching = [validation, LastCheckpoint(folder, 100)]
        return fit(tiny_target, store, options=options, callbacks=watching, ckpt_path=ckpt_path), validation

    return run


def test_the_best_weights_are_those_of_the_history_that_is_resumed(measuring, tmp_path):
    """In another folder, over those of another run, and after an end that is none any more."""
    first, other, new = (tmp_path / name for name in ("first", "other", "new"))
    kept, _ = measuring(first, [2.0, 3.0], 6)
    for folder in (new, other):
        if folder is other:
            measuring(other, [9.0], 4)
        _, validation = measuring(folder, [1.0, 1.5], 9, first / "last.ckpt")
        assert validation.best["step"] == 6 and validation.best["value"] == 3.0
        assert measured_in(folder / "best.safetensors") == validation.best
        saved = load_file(folder / "best.safetensors")
        assert all(torch.equal(saved[name], value) for name, value in kept.predictor.state_dict().items())


def test_where_the_best_weights_are_lost_the_best_from_then_on_are_kept(measuring, tmp_path):
    measuring(tmp_path, [3.0], 4)
    (tmp_path / "best.safetensors").unlink()
    _, validation = measuring(tmp_path, [1.0, 2.0, 1.5], 14, tmp_path / "last.ckpt")
    assert measured_in(tmp_path / "best.safetensors") == validation.best
    assert (validation.best["step"], validation.best["value"]) == (12, 2.0)


@pytest.mark.parametrize("changed", [{"left_out": 1}, {"max_new_tokens": 5}, {"tree": TreeShape(depth=3)}])
def test_measurements_on_other_prompts_or_with_other_drafts_are_not_compared(measuring, tmp_path, capsys, changed):
    measuring(tmp_path, [3.0], 4)
    _, validation = measuring(tmp_path, [1.0, 2.0], 9, tmp_path / "last.ckpt", **changed)
    assert [entry["value"] for entry in validation.history] == [1.0, 2.0]
    assert measured_in(tmp_path / "best.safetensors") == validation.best
    assert "chosen anew" in capsys.readouterr().out


def test_a_checkpoint_that_does_not_say_what_was_decoded_is_taken_as_it_is(measuring, tmp_path):
    _, validation = measuring(tmp_path, [3.0], 4)
    saved = {name: value for name, value in validation.state_dict().items() if name != "asked"}
    validation.load_state_dict(saved)
    assert [entry["value"] for entry in validation.history] == [3.0]
    decoded = json.dumps([[prompt.tolist() for prompt in validation.prompts], validation.max_new_tokens])
    before = hashlib.sha256(decoded.encode()).hexdigest()[:16]  # as it was said once
    for said, kept in ((before, [3.0]), ("of other prompts", [])):
        validation.load_state_dict({**saved, "decoded": said})
        assert [entry["value"] for entry in validation.history] == kept


def test_answers_that_end_with_the_prefill_have_length_one():
    assert acceptance_length([0, 0], [0, 0]) == {"value": 1.0, "low": 1.0, "high": 1.0}
