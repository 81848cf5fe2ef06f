"""What a user of `shape train` can get wrong, and that it is said before any work."""

import shutil

import pytest
import pytorch_lightning as pl
from helpers import write_rows
from training_runs import arguments

from shape.cli.train import main


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--online=true", "--features=somewhere"], "choose one"),
        (["--ckpt_path=last"], "no checkpoint"),
        (["--max_length=9999"], "256 positions"),
        (["--data=missing.jsonl"], "missing.jsonl"),
        (["--validation_data=missing.jsonl"], "missing.jsonl"),
        (["--target=no/such/folder"], "no/such/folder"),
        (["--measurement.prompts=missing.jsonl"], "missing.jsonl"),
        (["--training.steps=0"], "training.steps"),
        (["--validation.every=0"], "validation.every"),
        (["--predictor.token_conditioning=path", "--predictor.markov_rank=0"], "recursive"),
        (["--limit=2"], "2 conversation(s), too few to train on"),
        (["--predictor.draft_vocab_size=1000"], "259 tokens"),
        (["--regeneration.sampled_share=2"], "regeneration.sampled_share is 2.0; give a number from 0 to 1"),
        (["--regeneration.temperature=0"], "for greedy answers give regeneration.sampled_share 0"),
        (["--extraction.batch_size=0"], "extraction.batch_size is 0; give a positive number"),
        (["--measurement.limit=-1"], "measurement.limit is -1; give 0 or more"),
        (["--training.noise=.nan"], "training.noise is nan; give 0 or more"),
        (["--trainer.gradient_clip_val=-1"], "trainer.gradient_clip_val is -1.0; give 0 or more"),
        (["--regenerate=true", "--validation_data=missing.jsonl"], "missing.jsonl"),
        (["--logger=wandb"], "the logger wandb is not installed; pip install wandb"),
        (["--losses.kl=-1"], "the weight of the loss kl is -1.0"),
        (["--predictor.kind=model"], "on states (smooth_l1)"),
        (["--extraction.before=4"], "reads a window of 8; give --extraction.before 8"),
        (["--extraction.before=8", "--predictor.attention=true"], "whole texts; give --extraction.before null"),
        (["--extraction.before=8", "--predictor.kind=eagle", "--predictor.markov_rank=0"], "attends to whole texts"),
        (["--features=memory://there", "--predictor.attention=true"], "copy it into a folder"),
        (["--trainer.devices=999"], "trainer.devices is 999, which on a CPU are as many processes"),
        (["--trainer.precision=fp4"], "Lightning's Trainer cannot be made with these options"),
        (["--trainer.max_time=forever"], "Lightning's Trainer cannot be made with these options"),
        (["--trainer.accelerator=gpu"], "Lightning's Trainer cannot be made with these options"),
        (["--trainer.strategy=ddd"], "Lightning's Trainer cannot be made with these options"),
        (["--trainer.accumulate_grad_batches=0"], "trainer.accumulate_grad_batches is 0; give at least 1"),
        (["--trainer.log_every_n_steps=0"], "trainer.log_every_n_steps is 0; give at least 1"),
        (["--predictor.kind=block", "--losses.smooth_l1=0", "--predictor.mask_token_id=999"], "tokens are 0 to 258"),
        (["--tree.depth=0"], "tree.depth is 0; give at least 1"),
        (["--trainer.nonsense=3"], "trainer.nonsense is no option of Lightning's Trainer"),
        (["--trainer.max_steps=3"], "trainer.max_steps is no option of Lightning's Trainer that can be given here"),
        (["--trainer.max_epochs=3"], "did you mean --training.steps?"),
    ],
)
def test_mistakes_get_one_sentence_before_any_work(
    tiny_target_folder, data, tmp_path, monkeypatch, refused, more, message
):
    monkeypatch.setattr(pl.Trainer, "predict", lambda *args, **kwargs: pytest.fail("work has begun"))
    given = arguments(tiny_target_folder, data, tmp_path / "out", *more)
    assert message in refused(main, *given, alone=True)


def test_what_files_alone_can_say_is_said_before_the_target_answers(
    tiny_target_folder, tiny_tokenizer, data, tmp_path, monkeypatch, refused
):
    monkeypatch.setattr("shape.training.preparation._regenerated", lambda *_: pytest.fail("the target answers"))
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    strange = [{"role": "system", "content": "S"}, *turns]
    target = tmp_path / "target"
    shutil.copytree(tiny_target_folder, target)
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with user') }}{% endif %}"
    (target / "chat_template.jinja").write_text(strict + tiny_tokenizer.chat_template)
    one, bad = write_rows(tmp_path / "1.jsonl", {"id": "1", "messages": turns}), tmp_path / "2.jsonl"
    write_rows(bad, *({"id": str(n), "messages": row} for n, row in enumerate([turns, strange, turns])))
    cases = {
        f"--data={one}": "too few to train on",
        f"--validation_data={one}": "there is one conversation to validate on",
        f"--validation_data={bad}": "begin with user",
    }
    for more, said in cases.items():
        given = arguments(target, data, tmp_path / "out", "--regenerate=true", "--measurement.limit=4", more)
        assert said in refused(main, *given, alone=True)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data=missing.jsonl"], "missing.jsonl"),
        (["--validation_data=missing.jsonl"], "missing.jsonl"),
        (["--measurement.prompts=missing.jsonl"], "missing.jsonl"),
        (["--predictor.kind=eagle"], "markov_rank is 64"),
        (["--max_length=9999"], "256 positions"),
    ],
)
def test_what_needs_no_weights_is_said_before_they_are_loaded(
    tiny_target_folder, data, tmp_path, monkeypatch, refused, more, message
):
    monkeypatch.setattr("shape.training.preparation.load_target", lambda *_: pytest.fail("the target is loaded"))
    given = arguments(tiny_target_folder, data, tmp_path / "out", *more)
    assert message in refused(main, *given, alone=True)


def test_the_target_is_not_replaced(tiny_target_folder, data, tmp_path, refused):
    shutil.copytree(tiny_target_folder, tmp_path / "target")
    given = arguments(tmp_path / "target", data, tmp_path / "target")
    assert "is the target's folder, which would be replaced" in refused(main, *given, alone=True)


def test_a_target_for_several_processes_is_not_loaded_by_one(tiny_target_folder, data, tmp_path, monkeypatch, refused):
    monkeypatch.setattr("shape.training.preparation.load_target", lambda *_: pytest.fail("the target is loaded"))
    given = arguments(tiny_target_folder, data, tmp_path, "--online=true", "--shard_target=true")
    assert "shares the target out among processes, and there is one" in refused(main, *given)


def test_unwritable_output(tiny_target_folder, data, tmp_path, refused):
    (tmp_path / "file").touch()
    given = arguments(tiny_target_folder, data, tmp_path / "file" / "below")
    assert "cannot be written" in refused(main, *given)
