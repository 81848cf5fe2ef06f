"""What a training would take, said before anything is done: by config.json, and measured where weights are here."""

import errno
import json
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import LLAMA_8B, QWEN_06B
from training_runs import write_conversations
from transformers import LlamaConfig, Qwen3Config

from shape.cli.train import main
from shape.data.conversations import Conversation
from shape.data.statistics import DataStatistics
from shape.target.chat import Message
from shape.target.size import size_of
from shape.training import dry_run
from shape.training.defaults import resolve
from shape.training.forecast import Forecast
from shape.training.options import TrainOptions


@pytest.mark.parametrize("flag", ["--dry-run", "--dry_run"])
def test_a_target_of_8b_is_planned_for_by_its_configuration(flag, tmp_path, capsys):
    LlamaConfig(**LLAMA_8B, dtype="bfloat16").save_pretrained(tmp_path / "T")
    main([f"--target={tmp_path / 'T'}", f"--output={tmp_path / 'out'}", flag])
    said = capsys.readouterr().out
    assert "target: 8,030.3M parameters, 131072 positions" in said and "target 16.1 GB" in said
    (parameters,) = re.findall(r"plan: shape of ([\d.]+)M parameters", said)
    assert 250 < float(parameters) < 310  # 780 before
    assert "drafting from 32,064 of 128,256 tokens" in said and "by the weights read, not measured" in said
    assert "not measured: an accelerator" in said and "there is no tokenizer" in said and "4 letters" in said
    (steps,) = re.findall(r"tokens; ([\d,]+) steps of 1,024", said)
    (positions,) = re.findall(r"plan: ([\d,]+) positions of 4,000 conversations", said)
    assert 600 <= int(steps.replace(",", "")) == pytest.approx(4 * int(positions.replace(",", "")) / 1024, abs=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("method", "more", "weights"),
    [
        (None, [], 16.1),
        ({"quant_method": "awq", "bits": 4}, [], 5.6),
        ({"quant_method": "mxfp4"}, [], 5.8),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, [], 9.1),
        (None, ["--quantize=int4"], 5.6),
        (None, ["--quantization_config={load_in_4bit: true}"], 5.6),
    ],
)
def test_weights_in_fewer_bits_take_less_memory(method, more, weights, tmp_path, capsys):
    """7.0 of 8.0 billion are in blocks; embedding and output layer keep their dtype."""
    config = LlamaConfig(**LLAMA_8B, dtype="bfloat16", **({"quantization_config": method} if method else {}))
    config.save_pretrained(tmp_path / "T")
    main([f"--target={tmp_path / 'T'}", *more, "--dry-run"])
    found, *_ = re.findall(r"target ([\d.]+) GB", capsys.readouterr().out)
    assert float(found) == pytest.approx(weights, abs=0.06)


def test_what_answering_takes_is_said(tmp_path, capsys):
    """Keys and values of 16 texts of 1,024 tokens, with room for answers of half as many, of 114,688 bytes a token."""
    Qwen3Config(**QWEN_06B, dtype="bfloat16").save_pretrained(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 9)
    main([f"--target={tmp_path}", f"--data={tmp_path / 'prompts.jsonl'}", "--dry-run"])
    assert "; while answering up to about 4.13 GB (target 1.19 GB, keys and values 2.94 GB)" in capsys.readouterr().out


def test_what_the_user_gives_is_planned_with(tmp_path, capsys):
    Qwen3Config(**QWEN_06B, dtype="bfloat16").save_pretrained(tmp_path)
    write_conversations(tmp_path / "talks.jsonl")
    more = ["--training.steps=77", "--predictor.intermediate_size=256", "--online=true", "--regenerate=false"]
    main([f"--target={tmp_path}", f"--data={tmp_path / 'talks.jsonl'}", *more, "--dry-run"])
    said = capsys.readouterr().out
    assert "596.0M parameters" in said and "77 steps of 1,024" in said and "width 256" in said
    (disk,) = re.findall(r"disk: .*", said)
    assert "checkpoints" in disk and "features" not in disk and "answers" not in said and "answering" not in said


@pytest.mark.parametrize(("dtype", "size"), [("auto", "1.19 GB"), ("float32", "2.38 GB")])
def test_dtype_auto_is_the_checkpoints(dtype, size, tmp_path, capsys):
    Qwen3Config(**QWEN_06B, dtype="bfloat16").save_pretrained(tmp_path)
    write_conversations(tmp_path / "talks.jsonl")
    main([f"--target={tmp_path}", f"--data={tmp_path / 'talks.jsonl'}", f"--dtype={dtype}", "--dry-run"])
    assert f"target {size}" in capsys.readouterr().out


def keeps_what_is_mapped(monkeypatch, folder):
    """As Windows does; temporary files then go to a folder."""
    unlink = os.unlink

    def refuses(path, *, dir_fd=None):
        if os.path.basename(path) in Path("/proc/self/maps").read_text():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refuses)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


@pytest.mark.parametrize("windows", [False, True])
def test_where_weights_are_here_it_is_measured(
    windows, tiny_target_folder, tmp_path, tmp_path_factory, monkeypatch, capsys, caplog
):
    """Prompts without answers: the target writes some. Nothing is left behind, where what is open can be deleted."""
    elsewhere = tmp_path_factory.mktemp("temporary")
    if windows:
        keeps_what_is_mapped(monkeypatch, elsewhere)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"id": "p{i}", "turns": ["say {i}"]}}\n' for i in range(20)))
    sizes = ["--training.batch_size=32", "--regeneration.max_new_tokens=16", "--regeneration.batch_size=4"]
    main([f"--target={tiny_target_folder}", f"--data={prompts}", f"--output={tmp_path / 'out'}", *sizes, "--dry-run"])
    said = capsys.readouterr().out
    assert "measuring answers, features, steps and drafts; this takes a while" in caplog.text
    assert "ms, measured on" in said and "measured here on" in said and "not measured" not in said
    (parts,) = re.findall(r"time: about \S+ \S+ \((.*?)\)", said)
    times = [part.split() for part in parts.split(", ")]
    assert [name for name, _, _ in times] == ["answers", "features", "training"]
    assert all(float(each) > 0 for _, each, _ in times)
    assert "answers: taken to be half as long as they may be, 8 tokens" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.jsonl"]
    assert bool([*elsewhere.rglob("shard-*")]) == windows


@pytest.mark.parametrize("asked", [1, 2, 5])
def test_a_later_answer_reads_the_conversation_before_it(asked):
    """Of turns of 10 tokens, answer `n` of a conversation reads n * 10 once more, in whichever texts it is learned."""
    message = Message("user", "a question")
    conversations = [Conversation(str(i), (message,) * asked) for i in range(3)]
    whole = DataStatistics(3, 10.0 * asked, 0.5, float(asked))
    for text in (whole, whole.turn_by_turn()):
        again = dry_run._read_again(text, conversations) * text.conversations * text.tokens
        assert again == pytest.approx(3 * sum(10 * before for before in range(asked)))


def test_answers_that_ship_cost_nothing(tiny_target):
    size, text = size_of(tiny_target.model), DataStatistics(100, 50.0, 0.5, 1.0)
    for data, written in ((None, False), ("prompts.jsonl", True)):
        options = resolve(TrainOptions(data=data), size, text)
        assert ("answers" in Forecast(options, size, text, torch.float32).hours.parts) == written


def test_very_many_epochs_are_advised_against(tiny_target):
    size, few = size_of(tiny_target.model), DataStatistics(1, 50.0, 0.5, 1.0)
    options = resolve(TrainOptions(data="prompts.jsonl"), size, few)
    for steps, said in (
        (10_000, "500,000 epochs; give more conversations, or fewer --training.steps"),
        (1, "50 epochs"),
    ):
        some = replace(options, training=replace(options.training, steps=steps, batch_size=1200))
        assert Forecast(some, size, few, torch.float32).lines[1].endswith(f"which is {said}")


def test_other_devices_than_here_are_planned_for(tiny_target_folder, tmp_path, capsys):
    given = [f"--target={tiny_target_folder}", "--trainer.strategy=ddp", "--dry-run"]
    main([*given, "--trainer.devices=8"])
    assert "measured here on cpu" in capsys.readouterr().out
    if not torch.cuda.is_available():
        main([*given, "--trainer.devices=8", "--trainer.accelerator=gpu"])
        assert "there is no GPU here for --trainer.accelerator gpu" in capsys.readouterr().out


def test_of_many_processes_a_portion_is_measured_and_hours_are_shared(tiny_target_folder, monkeypatch, capsys):
    measured = []

    def seconds_of_a_step(options, module, data):
        measured.append(options.trainer)
        return 36.0

    monkeypatch.setattr(dry_run, "_seconds_of_a_step", seconds_of_a_step)
    given = [f"--target={tiny_target_folder}", "--training.steps=100", "--trainer.strategy=ddp", "--dry-run"]
    main([*given, "--trainer.accumulate_grad_batches=2", "--trainer.devices=4"])
    assert [(each.processes, each.accumulate_grad_batches) for each in measured] == [(1, 8)]
    said = capsys.readouterr().out
    assert "training 15 min)" in said and "shared without loss among 4 processes" in said


def test_steps_of_an_online_run_are_measured_with_their_states(tiny_target_folder, monkeypatch, capsys):
    stored = []
    monkeypatch.setattr(dry_run, "extract", lambda *arguments: stored.append(arguments))
    main([f"--target={tiny_target_folder}", "--online=true", "--training.batch_size=64", "--dry-run"])
    assert re.search(r"time: about .* \(.*features and training [^,]+\), measured here", capsys.readouterr().out)
    assert not stored


def test_steps_that_compute_states_are_measured_on_texts_of_their_length(tiny_target_folder, tmp_path, monkeypatch):
    """Those of the data, and not the short answers that the target is timed by."""
    words = " ".join("abcdefghij" * 4)
    rows = [{"prompt": f"say {i}", "completion": words} for i in range(20)]
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    lengths = []

    def seconds_of_a_step(options, module, data):
        lengths.append(max(len(ids) for ids, _ in data.texts()))
        return 1.0

    monkeypatch.setattr(dry_run, "_seconds_of_a_step", seconds_of_a_step)
    for online in ("false", "true"):
        given = [f"--target={tiny_target_folder}", f"--data={tmp_path / 'data.jsonl'}", f"--online={online}"]
        main([*given, "--regeneration.max_new_tokens=8", "--training.batch_size=64", "--dry-run"])
    assert lengths[1] > 40 > lengths[0]


def test_running_out_of_memory_is_one_of_the_notes(tiny_target_folder, monkeypatch, capsys):
    def measured(*_):
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    monkeypatch.setattr(dry_run, "_measured", measured)
    main([f"--target={tiny_target_folder}", "--dry-run"])
    said = capsys.readouterr().out
    assert "measured: nothing, as memory ran out" in said and "plan: shape of" in said


def test_mistakes_are_said_as_in_a_run(tiny_target_folder, refused):
    for more, message in [("--max_length=9999", "256 positions"), ("--data=missing.jsonl", "missing.jsonl")]:
        assert message in refused(main, f"--target={tiny_target_folder}", more, "--dry-run")
