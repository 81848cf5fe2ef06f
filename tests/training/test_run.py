"""`python -m shape.train` as a command: the whole way, resuming, several processes, options and errors."""

import csv
import json
import re
import shutil
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import yaml
from helpers import write_rows
from rich.console import Console
from safetensors.torch import load_file, save_file
from training_runs import arguments, command, ended, kill_when, require_the_same_end, write_conversations
from transformers import AutoTokenizer

from shape import bundled
from shape.cli.train import main
from shape.data.conversations import Conversation
from shape.drafters import TreeShape
from shape.errors import ConfigError, DataError
from shape.features.storage import Storage
from shape.features.store import FeatureStore
from shape.features.trainer import TrainerOptions
from shape.files import sole_writer
from shape.generation.decoder import ShapeDecoder
from shape.networks.config import ShapeConfig
from shape.networks.registry import PREDICTORS
from shape.target.chat import Message
from shape.target.size import size_of
from shape.training.defaults import network_config, resolve
from shape.training.options import MeasurementOptions, PredictorOptions, TrainOptions
from shape.training.parsing import parse
from shape.training.preparation import prepare, validation_prompts
from shape.training.result import warn_of_mismatch
from shape.training.run import _alone, train
from shape.training.trainer import make_loggers
from shape.training.validation import DecodingValidation


@pytest.fixture(scope="module")
def trained(tiny_target_folder, data, tmp_path_factory) -> Path:
    """The output of an undisturbed run, measured at the end; do not change it."""
    output = tmp_path_factory.mktemp("trained") / "predictor"
    more = ["--measurement.limit=2", "--measurement.max_new_tokens=8"]
    main(arguments(tiny_target_folder, data, output, *more))
    return output


def test_the_whole_way(trained, tiny_target):
    decoder = ShapeDecoder.from_pretrained(trained)
    assert decoder.target.identity.differences(tiny_target.identity) == []
    config = decoder.drafter.predictor.config
    assert config.token_conditioning == "root" and config.markov_rank == 64 and config.draft["depth"] == 8
    record = config.training
    assert record["answers"] == "as given"
    assert record["steps"] == 60 and "| acceptance length |" in (trained / "README.md").read_text()
    assert record["peak_memory_gb"] > 0
    assert record["validation"]["low"] <= record["validation"]["value"] <= record["validation"]["high"]
    assert record["acceptance_length"]["value"] >= 1 and record["speed_up"]["value"] > 0
    assert record["validation"]["step"] in (25, 50, 60)
    assert 0 < record["validation_seconds"] <= record["seconds"] + 0.5
    best = load_file(trained / "checkpoints/best.safetensors")
    exported = load_file(trained / "model.safetensors")
    assert all(torch.equal(best[name], exported[name]) for name in exported)
    with open(trained / "logs/version_0/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert {"train/loss", "train/agreement_1", "train/chain_AL", "val/acceptance_length"} <= rows[0].keys()
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    assert losses[-1] < losses[0]
    told = yaml.safe_load((trained / "logs/version_0/hparams.yaml").read_text())
    rates = [float(row["lr-AdamW/pg1"]) for row in rows if row["lr-AdamW/pg1"]]
    assert 0 < rates[-1] < max(rates) <= told["training"]["learning_rate"]
    assert list((trained / "logs/version_0").glob("events.out.tfevents*"))
    assert told["training"]["steps"] == 60 and told["predictor"]["kind"] == "shape" and told["token"] is None


def test_a_part_of_the_conversations_can_be_learned_from(trained, tiny_target_folder, data, tmp_path, refused):
    """With all of them stored, and others kept for validation."""
    more = ["--training.steps=2", "--training.conversations=7", f"--features={trained / 'features'}"]
    main(arguments(tiny_target_folder, data, tmp_path, *more))
    record = json.loads((tmp_path / "config.json").read_text())["training"]
    whole = json.loads((trained / "config.json").read_text())["training"]
    assert record["examples"].endswith("of 7 conversations") and whole["examples"].endswith("of 54 conversations")
    none = arguments(tiny_target_folder, data, tmp_path, "--training.conversations=0")
    assert "training.conversations is 0" in refused(main, *none)


def test_checkpoint_holds_the_predictor_alone_and_no_pickled_objects(trained):
    saved = torch.load(trained / "checkpoints/last.ckpt", weights_only=True)
    assert saved["global_step"] == 60
    assert all(name.startswith("predictor.") for name in saved["state_dict"])


@pytest.mark.slow
def test_killed_run_resumes_to_the_same_bytes(trained, tiny_target_folder, data, tmp_path):
    output = tmp_path / "killed"
    options = arguments(tiny_target_folder, data, output)
    kill_when(command(*options), output / "features/shard-00001.safetensors")
    assert len(list((output / "features").glob("shard-*"))) < 8
    kill_when(command(*options), output / "checkpoints/last.ckpt")
    assert not (output / "model.safetensors").exists()
    main([*options, "--ckpt_path=last"])
    for name in ("model.safetensors", "checkpoints/best.safetensors"):
        assert (output / name).read_bytes() == (trained / name).read_bytes()
    require_the_same_end(output, trained)
    for shard in sorted((trained / "features").glob("[!.]*")):
        assert (output / "features" / shard.name).read_bytes() == shard.read_bytes()


def test_a_finished_run_is_wholly_in_its_checkpoint(trained, tiny_target_folder, data, tmp_path):
    """Given again it has nothing left to do; with more steps it goes on where it ended, between two checkpoints."""
    more = [
        "--training.decay=none",
        "--validation.every=4",
        "--trainer.accumulate_grad_batches=2",
        f"--features={trained / 'features'}",
    ]
    output, whole = tmp_path / "out", tmp_path / "whole"
    given = arguments(tiny_target_folder, data, output, *more)
    main([*given, "--training.steps=10"])
    assert ended(output)[1] == [4, 8, 10]
    first = (output / "model.safetensors").read_bytes()
    main([*given, "--training.steps=10", "--ckpt_path=last"])
    assert (output / "model.safetensors").read_bytes() == first
    main([*given, "--training.steps=17", "--ckpt_path=last"])
    main([*arguments(tiny_target_folder, data, whole, *more), "--training.steps=17"])
    require_the_same_end(output, whole)
    assert ended(output)[1] == [4, 8, 12, 16, 17]


def test_features_of_an_earlier_extraction_are_used(trained, tiny_target_folder, data, tmp_path, capsys):
    options = arguments(tiny_target_folder, data, tmp_path / "other", "--training.steps=2")
    main([*options, f"--features={trained / 'features'}"])
    assert "features: about" not in capsys.readouterr().out
    assert not (tmp_path / "other/features").exists()


def test_features_may_lie_elsewhere(trained, tiny_target_folder, data, tmp_path):
    there, cache = tmp_path / "there", tmp_path / "cache"
    more = [f"--features=file://{there}", f"--extraction.cache={cache}", "--training.steps=3"]
    main(arguments(tiny_target_folder, data, tmp_path / "out", *more))
    shards = sorted(path.name for path in there.glob("shard-*"))
    assert shards == sorted(path.name for path in (trained / "features").glob("shard-*"))
    assert shards == sorted(path.name for path in cache.rglob("shard-*")) and not (tmp_path / "out/features").exists()


def test_one_training_writes_to_a_folder(tiny_target_folder, data, tmp_path):
    options = TrainOptions(target=str(tiny_target_folder), data=str(data), output=str(tmp_path / "out"))
    lock = tmp_path / "out/.train.lock"
    with sole_writer(lock, "it"), pytest.raises(ConfigError, match="another process does a training into"):
        train(options)
    assert [*(tmp_path / "out").iterdir()] == []


def test_one_training_writes_to_each_of_several_folders(tmp_path, monkeypatch):
    """Of several machines the first asks; what trains together holds all of its folders."""
    with _alone([tmp_path / "a", tmp_path / "b", tmp_path / "a"]):
        for taken in ("a", "b"):
            with pytest.raises(ConfigError, match="another process does a training into"), _alone([tmp_path / taken]):
                pass
        monkeypatch.setenv("NODE_RANK", "1")
        with _alone([tmp_path / "a"]):
            pass
    assert not list(tmp_path.rglob(".train.lock"))


def test_online_mode_stores_nothing(tiny_target_folder, data, tmp_path):
    main(arguments(tiny_target_folder, data, tmp_path, "--online=true", "--training.steps=3"))
    assert (tmp_path / "model.safetensors").exists() and not (tmp_path / "features").exists()


def test_texts_are_learned_from_and_ask_nothing(tiny_target_folder, tmp_path, capsys):
    data = write_rows(tmp_path / "texts.jsonl", *({"id": str(i), "text": f"{i} times " * 20} for i in range(20)))
    more = ["--training.steps=3", "--training.decay=none", "--measurement.limit=2"]
    main(arguments(tiny_target_folder, data, tmp_path / "out", *more))
    assert "speed was not measured: the data has no chats to ask" in capsys.readouterr().out


def test_the_target_answers_first_unless_told_otherwise(
    tiny_target_folder, data, tmp_path, capsys, refused, monkeypatch
):
    """Prompts without answers are data enough; a second run, or one with other features, finds the answers."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [json.loads(line) for line in data.read_text().splitlines()[:20]]
    asked = [{"id": row["id"], "turns": [row["conversations"][0]["value"]]} for row in rows]
    write_rows(prompts, *asked, {"id": "text", "text": "plain text has no prompt " * 4})
    more = ["--regenerate=true", "--regeneration.max_new_tokens=24", "--training.steps=3", "--limit=21"]
    closed: list[ShapeDecoder] = []
    with monkeypatch.context() as patched:
        patched.setattr(ShapeDecoder, "close", lambda decoder: closed.append(decoder))
        main(arguments(tiny_target_folder, prompts, tmp_path / "out", *more))
    assert closed[0].drafter is None  # that answered: what it captured leaves the accelerator
    (answers,) = (tmp_path / "out/features").glob("answers-*.jsonl")
    written, store = answers.stat().st_mtime_ns, FeatureStore(tmp_path / "out/features")
    assert len(store) == 21 and "the target's own" in (tmp_path / "out/README.md").read_text()
    assert all("gpt" in line or '"assistant"' in line for line in answers.read_text().splitlines())
    capsys.readouterr()
    main(arguments(tiny_target_folder, prompts, tmp_path / "out", *more))
    assert answers.stat().st_mtime_ns == written
    # Without their answers there is nothing to learn from.
    without = arguments(tiny_target_folder, prompts, tmp_path / "no", *more, "--regenerate=false", "--limit=20")
    assert "assistant" in refused(main, *without)


def test_a_new_run_sets_older_checkpoints_aside(trained, tiny_target_folder, data, tmp_path, capsys):
    output = Path(shutil.copytree(trained, tmp_path / "again"))
    main(arguments(tiny_target_folder, data, output, "--training.steps=2"))
    assert "checkpoints.1" in capsys.readouterr().out
    steps = {name: torch.load(output / name / "last.ckpt", weights_only=True)["global_step"]
             for name in ("checkpoints", "checkpoints.1")}  # fmt: skip
    assert steps == {"checkpoints": 2, "checkpoints.1": 60}
    before, after = (load_file(folder / "model.safetensors") for folder in (output / "checkpoints.1", output))
    assert all(torch.equal(weight, load_file(trained / "model.safetensors")[name]) for name, weight in before.items())
    assert any(not torch.equal(weight, after[name]) for name, weight in before.items())


def test_a_run_resumed_from_elsewhere_sets_aside_what_it_replaces(trained, tiny_target_folder, data, tmp_path):
    output = tmp_path / "other"
    main(arguments(tiny_target_folder, data, output, "--training.steps=2"))
    other = (output / "model.safetensors").read_bytes()
    main(arguments(tiny_target_folder, data, output, f"--ckpt_path={trained / 'checkpoints/last.ckpt'}"))
    assert (output / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    assert (output / "checkpoints.1/model.safetensors").read_bytes() == other
    assert (output / "checkpoints.1/last.ckpt").exists()


def test_a_checkpoint_that_is_refused_moves_nothing(trained, tiny_target_folder, data, tmp_path, refused):
    output = Path(shutil.copytree(trained, tmp_path / "other"))
    given = f"--ckpt_path={trained / 'checkpoints/last.ckpt'}", "--seed=5"
    assert "seed was 0 and is 5" in refused(main, *arguments(tiny_target_folder, data, output, *given))
    assert (output / "checkpoints/last.ckpt").exists() and not (output / "checkpoints.1").exists()


def test_best_weights_of_another_run_are_not_exported(trained, tiny_target_folder, data, tmp_path, refused):
    """Where those of the checkpoint are lost."""
    output = Path(shutil.copytree(trained, tmp_path / "again"))
    best = output / "checkpoints/best.safetensors"
    save_file(load_file(best), best, {"measured": json.dumps({"step": 3, "value": 9.0, "low": 9.0, "high": 9.0})})
    before = (output / "model.safetensors").read_bytes()
    given = arguments(tiny_target_folder, data, output, "--ckpt_path=last")
    assert "the best weights of the checkpoint are not in" in refused(main, *given)
    assert (output / "model.safetensors").read_bytes() == before


def test_a_run_may_start_from_the_predictor_that_it_replaces(trained, tiny_target_folder, data, tmp_path):
    output = Path(shutil.copytree(trained, tmp_path / "again"))
    more = [f"--init={output}", "--training.steps=2", "--training.learning_rate=1e-12"]
    main(arguments(tiny_target_folder, data, output, *more))
    main(arguments(tiny_target_folder, data, output, *more, "--ckpt_path=last"))
    # Which it starts with, and hardly leaves.
    before, after = (load_file(folder / "model.safetensors") for folder in (trained, output))
    assert all(torch.allclose(after[name], weight, rtol=1e-6, atol=1e-9) for name, weight in before.items())
    records = [
        json.loads((folder / "config.json").read_text())["training"]["validation"] for folder in (trained, output)
    ]
    assert records[1] == {**records[0], "step": 0}


def test_a_checkpoint_of_a_version_with_fewer_options_is_resumed(trained, tiny_target_folder, data, tmp_path):
    output = Path(shutil.copytree(trained, tmp_path / "again"))
    last = output / "checkpoints/last.ckpt"
    saved = torch.load(last.with_name("last.before.ckpt"), weights_only=True)
    assert saved["global_step"] == 56
    del saved["shape"]["recipe"]["predictor"]["conv_kernel_size"]
    torch.save(saved, last)
    main(arguments(tiny_target_folder, data, output, "--ckpt_path=last"))
    require_the_same_end(output, trained)


def test_fewer_steps_than_are_done_are_refused(trained, tiny_target_folder, data, tmp_path, refused):
    output = Path(shutil.copytree(trained, tmp_path / "again"))
    more = arguments(tiny_target_folder, data, output, "--training.steps=20", "--ckpt_path=last")
    assert "is at step 60 and training.steps is 20; give more" in refused(main, *more)


# ------------------------------------------------------------------------------------------------- options


def test_the_default_is_the_quickstart_configuration():
    options = parse([])
    given = yaml.safe_load(bundled.path("configs", "quickstart.yaml").read_text())
    assert options.output == given["output"] and options.training.steps == given["training"]["steps"]
    assert options.predictor.token_conditioning == "root" and options.predictor.step_mode == "parallel"


def test_own_target_gets_the_same_kind_of_predictor_at_its_own_size():
    options = parse(["--target=T", "--data=D", "--output=O", "--predictor.dropout=0.2"])
    assert (options.target, options.data, options.output) == ("T", "D", "O")
    assert options.predictor == PredictorOptions(dropout=0.2)
    quickstart = parse([]).predictor
    steps = ("window", "attention", "step_mode", "token_conditioning", "markov_rank", "num_steps")
    for axis in (*steps, "refinement", "refinement_dim", "refinement_last_update"):
        assert getattr(options.predictor, axis) == getattr(quickstart, axis)
    assert options.tree == TreeShape(depth=8, width=2, nodes=12)  # larger targets verify a node in less of a step
    assert options.predictor.intermediate_size is None and options.predictor.draft_vocab_size == "auto"


def test_own_data_and_configuration_files_keep_the_other_defaults(tmp_path):
    assert parse(["--data=D"]).predictor == parse([]).predictor
    config = tmp_path / "mine.yaml"
    config.write_text("training: {steps: 3}\nseed: 5\n")
    options = parse([f"--config={config}", "--seed=6"])
    assert options.training.steps == 3 and options.seed == 6
    assert options.training.batch_size == parse([]).training.batch_size
    config.write_text("target: T\n")
    assert parse([f"--config={config}"]) == TrainOptions(target="T")


def test_paper_configuration_is_the_papers_model(tiny_target):
    options = parse([f"--config={bundled.path('configs', 'paper.yaml')}"])
    config = network_config(options, tiny_target)
    assert (config.window, config.step_mode, config.token_conditioning) == (4, "parallel", "none")
    assert (config.refinement, config.refinement_dim) == ("sinkhorn", 128)
    assert (config.refinement_epsilon, config.refinement_alpha) == (0.1, 0.5)
    assert set(options.losses.on_states) == {"mse"} and set(options.losses.on_logits) == {"soft_cross_entropy"}
    assert options.training.noise > 0 and config.dropout > 0 and config.markov_rank == 0


@pytest.mark.parametrize("name", ["medusa", "eagle", "peagle", "dflash", "dflash2", "dspark"])
def test_baselines_have_configurations_that_change_the_quickstarts_predictor_alone(tiny_target, name):
    options = parse([f"--config={bundled.path('configs', f'{name}.yaml')}"])
    assert options.predictor.draft_vocab_size == parse([]).predictor.draft_vocab_size
    options.predictor.draft_vocab_size = 50
    config = network_config(resolve(options, size_of(tiny_target.model), None), tiny_target)
    assert config.kind == {"dflash": "block", "dflash2": "block", "dspark": "block"}.get(name, name)
    assert config.feature_layers == ([1] if config.has_decoder_layers else [-1])  # all there are below the last of two
    assert (config.window, config.attention, config.refinement) == (1, False, "none")
    assert options.training == parse([]).training


@pytest.mark.parametrize("target", [[], ["--target=T"]])
def test_printed_configuration_gives_the_same_options(capsys, tmp_path, target):
    with pytest.raises(SystemExit):
        parse([*target, "--seed=9", "--trainer.devices=2", "--print_config"])
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    assert parse([f"--config={path}"]) == parse([*target, "--seed=9", "--trainer.devices=2"])


def test_options_mirror_what_they_become():
    config = {field.name: field.type for field in fields(ShapeConfig)}
    assert {field.name for field in fields(PredictorOptions)} <= config.keys()
    left_out = {"target_hidden_size", "vocab_size", "target_identity", "draft", "training"}
    own = set(vars(ShapeConfig())) & {name for name in config if name in ShapeConfig.__annotations__}
    assert own - left_out == {field.name for field in fields(PredictorOptions)}
    assert {field.name for field in fields(TrainerOptions)} - {"more"} <= signature(pl.Trainer).parameters.keys()


def test_any_option_of_the_trainer_can_be_given(tiny_target_folder, data, tmp_path):
    options = parse(["--target=T", "--trainer.max_time=00:00:01:00", "--trainer.detect_anomaly", "true"])
    assert options.trainer.more == {"max_time": "00:00:01:00", "detect_anomaly": True}
    more = ["--training.steps=3", "--trainer.limit_train_batches=2", "--logger=none"]
    main(arguments(tiny_target_folder, data, tmp_path, *more))
    assert json.loads((tmp_path / "config.json").read_text())["training"]["steps"] == 2
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("given", "written"),
    [(["csv"], {"metrics.csv"}), (["tensorboard"], {"events"}), (["tensorboard", "csv"], {"metrics.csv", "events"})],
)
def test_loggers_are_chosen(given, written, tmp_path):
    for number in (0, 1):
        loggers = make_loggers(TrainOptions(logger=given), tmp_path)
        for logger in loggers:
            logger.log_metrics({"loss": 1.0}, step=1)
            logger.save()
        files = {path.name for path in (tmp_path / f"logs/version_{number}").iterdir()}
        assert {"events" if name.startswith("events") else name for name in files} - {"hparams.yaml"} == written


def test_what_is_measured_on_chose_nothing(tiny_target_folder, data, tmp_path):
    """The conversations of the last measurement neither taught nor chose the weights."""
    options = TrainOptions(target=str(tiny_target_folder), data=str(data), regenerate=False, max_length=128)
    few = write_conversations(tmp_path / "few.jsonl", 7)
    for given, choosing, measured in ((None, 3, 3), (str(few), 4, 3)):
        material = prepare([replace(options, validation_data=given)], Storage(tmp_path))
        ids = {conversation.id for conversation in material.for_validation}
        asked = {prompt.id for prompt in material.prompts}
        assert (len(ids), len(asked)) == (choosing, measured) and not ids & asked
        held = {material.conversations[number].id for number in material.excluded}
        assert held == (ids | asked if given is None else set())
    unmeasured = replace(options, measurement=MeasurementOptions(limit=0))
    again = prepare([unmeasured], Storage(tmp_path))
    assert len(again.for_validation) == 3 and len(again.excluded) == 6, "what is learned depends on what is measured"
    (tmp_path / "one.jsonl").write_text(few.read_text().splitlines()[0])
    with pytest.raises(DataError, match="one conversation to validate on, and none is left to measure on"):
        prepare([replace(options, validation_data=str(tmp_path / "one.jsonl"))], Storage(tmp_path))


def test_ids_that_repeat_do_not_stop_the_measurement_at_the_end(tiny_target_folder, data, tmp_path):
    names = ["a", "a", "a-2", "b", "a", "a"]
    given = tmp_path / "given.jsonl"
    turns = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
    rows = [{"id": name, "conversations": turns} for name in names for _ in range(2)]
    write_rows(given, *rows)
    options = TrainOptions(target=str(tiny_target_folder), data=str(data), regenerate=False, max_length=128)
    material = prepare([replace(options, validation_data=str(given))], Storage(tmp_path))
    assert [prompt.id for prompt in material.prompts] == ["a", "a-2", "a-2-2", "b", "a-3", "a-4"]
    twice = tmp_path / "twice.jsonl"
    twice.write_text('{"id": 7, "prompt": "Hello"}\n' * 2)
    measured = MeasurementOptions(prompts=str(twice))
    with pytest.raises(DataError, match=r"twice\.jsonl: two prompts share the id 7;"):
        prepare([replace(options, measurement=measured)], Storage(tmp_path))
    unmeasured = replace(options, measurement=replace(measured, limit=0))
    assert len(prepare([unmeasured], Storage(tmp_path)).prompts) == 2


def test_validation_prompts_end_where_answers_begin(tiny_target):
    turns = [Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d")]
    conversations = [Conversation(str(i), tuple(turns[: 2 + 2 * (i % 2)])) for i in range(6)]
    options = TrainOptions(max_length=128)
    texts = [tiny_target.tokenizer.decode(ids) for ids in validation_prompts(conversations, tiny_target, options)]
    assert len(texts) == 6 and all(text.endswith("<|im_start|>assistant\n") for text in texts)
    assert {text.count("<|im_start|>assistant") for text in texts} == {1, 2}


def test_a_target_of_few_positions_needs_no_option(tiny_model, tiny_tokenizer, tmp_path):
    """Nothing but a target and data, whose conversations and prompts go beyond the positions."""
    folder, data = small_target(tiny_model, tiny_tokenizer, tmp_path), long_talks(tmp_path / "long.jsonl")
    options = parse([f"--target={folder}", f"--data={data}", f"--output={tmp_path}", "--regenerate=false"])
    material = prepare([options], Storage(tmp_path / "features"))
    (resolved,) = material.runs
    assert resolved.max_length == material.target.max_positions == 512
    assert resolved.feature_options().max_length == 512 and resolved.training.steps == 200
    lengths = [len(ids) for ids in validation_prompts(material.for_validation, material.target, resolved)]
    assert lengths and max(lengths) + resolved.validation.max_new_tokens <= 512
    room = 512 - resolved.measurement.max_new_tokens
    assert material.prompts and all(material.target.encode(each.opening).shape[1] <= room for each in material.prompts)
    with pytest.raises(ConfigError, match=r"max_length is 513, but target .* has 512 positions"):
        prepare([replace(options, max_length=513)], Storage(tmp_path / "features"))


@pytest.mark.slow
def test_a_target_of_few_positions_is_trained_for_and_decoded_with(tiny_model, tmp_path):
    """By the default commands, with the shipped tokenizer and its template: it answers, and nothing else is given."""
    tokenizer = AutoTokenizer.from_pretrained(bundled.path("checkpoints", "quickstart-target"))
    folder, data = small_target(tiny_model, tokenizer, tmp_path), long_talks(tmp_path / "long.jsonl")
    output = tmp_path / "out"
    main([f"--target={folder}", f"--data={data}", f"--output={output}"])
    record = json.loads((output / "config.json").read_text())
    assert record["training"]["steps"] == 200 and record["draft_vocab_size"] == 2048
    assert FeatureStore(output / "features").manifest.max_length == 512
    decoder = ShapeDecoder.from_pretrained(output, fall_back=False)
    ids = decoder.target.encode([{"role": "user", "content": "Book a table for two."}])
    out = decoder.generate(ids, max_new_tokens=512 - ids.shape[1])
    assert torch.equal(out, decoder.target.model.generate(ids, max_new_tokens=512 - ids.shape[1], do_sample=False))


def small_target(tiny_model, tokenizer, folder: Path) -> Path:
    """A tiny float32 Llama of 512 positions, saved with a tokenizer."""
    model = tiny_model("llama", torch.float32, vocab_size=len(tokenizer))
    model.config.max_position_embeddings = 512
    model.save_pretrained(folder / "small")
    tokenizer.save_pretrained(folder / "small")
    return folder / "small"


def long_talks(path: Path) -> Path:
    """Conversations of which each third is longer than 512 tokens, or its question is."""
    rows = [
        {"id": f"c{i}", "messages": [
            {"role": "user", "content": "why? " * (300 if i % 3 == 2 else 2)},
            {"role": "assistant", "content": "since it is so, " * (100 if i % 3 == 1 else 3)},
            {"role": "user", "content": "and then?"},
            {"role": "assistant", "content": f"then it is {i}"},
        ]}
        for i in range(24)
    ]  # fmt: skip
    return write_rows(path, *rows)


# ------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("kind", ["shape", "medusa", "eagle", "peagle", "mtp", "block"])
def test_what_options_say_is_read_is_what_networks_read(kind, tiny_target):
    for attention in (False, True) if kind == "shape" else (False,):
        chosen = PredictorOptions(kind=kind, attention=attention, markov_rank=0, draft_vocab_size=None)
        options = resolve(TrainOptions(predictor=chosen), size_of(tiny_target.model), None)
        predictor = PREDICTORS[kind](network_config(options, tiny_target))
        assert chosen.known_states == (None if predictor.memory_shapes else predictor.config.window)


def test_features_of_another_target(trained, tiny_model, tiny_tokenizer, data, tmp_path, refused):
    tiny_model("llama", torch.float32, 9, len(tiny_tokenizer)).save_pretrained(tmp_path / "other")
    tiny_tokenizer.save_pretrained(tmp_path / "other")
    given = arguments(tmp_path / "other", data, tmp_path / "out", f"--features={trained / 'features'}")
    assert "output embedding" in refused(main, *given)


def test_checkpoint_of_another_run(trained, tiny_target_folder, data, tmp_path, refused):
    output = Path(shutil.copytree(trained, tmp_path / "copy"))
    given = arguments(tiny_target_folder, data, output, "--ckpt_path=last", "--seed=1")
    assert "seed was 0 and is 1" in refused(main, *given)


def test_a_run_is_not_resumed_on_other_conversations(trained, tiny_target_folder, data, tmp_path, refused):
    """More to validate on leaves fewer to learn from, of the same data."""
    output = Path(shutil.copytree(trained, tmp_path / "copy"))
    given = arguments(tiny_target_folder, data, output, "--ckpt_path=last", "--validation.prompts=2")
    assert "conversations (data, limit, validation_data, or validation.prompts" in refused(main, *given)


@pytest.mark.parametrize(("decoded", "warned"), [(2.9, False), (2.6, True)])
def test_decoding_far_below_training_is_said_loudly(monkeypatch, capsys, decoded, warned):
    monkeypatch.setattr("shape.training.result.in_chains", lambda *_: ([], decoded))
    monkeypatch.setattr("shape.training.result.acceptance", lambda *_: 3.0)
    validation = DecodingValidation([torch.tensor([1, 2])], 1, 4, Path("best"))
    warn_of_mismatch(None, None, validation, Console())
    said = capsys.readouterr().out
    assert ("WARNING: chains decode with acceptance length 2.60" in said) == warned
    assert ("give 3.00" in said) == warned


@pytest.mark.slow
def test_conversations_of_8192_tokens_take_bounded_memory(tiny_target_folder, tmp_path):
    """Kept whole. One step's attention scores alone take more than a gigabyte, and some six such would be kept."""
    target, data = tmp_path / "target", tmp_path / "long.jsonl"
    shutil.copytree(tiny_target_folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192 + 64}))
    rows = [
        [{"from": "human", "value": "say"}, {"from": "gpt", "value": f"{number} a b " * 3000}] for number in range(4)
    ]
    write_rows(data, *({"id": str(n), "conversations": row} for n, row in enumerate(rows)))
    options = {
        "max_length": 8192, "online": "true", "predictor.kind": "eagle", "predictor.num_steps": 2,
        "predictor.markov_rank": 0, "predictor.dropout": 0, "training.steps": 1, "training.batch_size": 8192,
        "validation.prompts": 2,
    }  # fmt: skip
    ran = command(*arguments(target, data, tmp_path / "run", *(f"--{name}={value}" for name, value in options.items())))
    said, _ = ran.communicate()
    assert ran.returncode == 0, said
    assert re.search(r"on 2 conversations of about 8[01]\d\d positions", said), said
    assert ShapeConfig.from_pretrained(tmp_path / "run").training["peak_memory_gb"] < 4
