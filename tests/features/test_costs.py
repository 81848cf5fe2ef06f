"""The calculator: its sizes are those of real models and stores, its rule is what it says."""

from dataclasses import replace

import pytest
import torch
from helpers import tiny_config, write_rows
from training_runs import extraction_trainer
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3Config

from shape.cli.extract import main
from shape.data.options import AnswerOptions
from shape.data.reading import load_conversations
from shape.data.statistics import DataStatistics
from shape.features import costs
from shape.features.extraction import extract
from shape.features.options import CostOptions, FeatureOptions, StorageOptions
from shape.target.size import Size, size_of
from shape.training.defaults import resolve
from shape.training.forecast import Forecast
from shape.training.options import TrainOptions

LLAMA_70B = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip


@pytest.mark.parametrize("arch", ["llama", "gpt2", "qwen3"])
def test_sizes_are_those_of_the_model(arch):
    model = AutoModelForCausalLM.from_config(tiny_config(arch))
    size = size_of(model.config)
    assert size.parameters == model.num_parameters() and size.hidden_size == 32
    keys = model.eval()(torch.arange(7)[None], use_cache=True).past_key_values
    kept = sum(part.numel() for layer in keys.layers for part in (layer.keys, layer.values))
    assert size.cache == 2 * kept / 7  # in bfloat16
    body = sum(weight.numel() for weight in model.base_model.parameters())
    assert size.active == body - model.get_input_embeddings().weight.numel()


def test_a_token_meets_some_of_a_mixtures_experts():
    config = MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    two = MixtralConfig(**{**config.to_dict(), "num_local_experts": 2})
    router = 2 * (8 - 2) * 32
    assert size_of(config).active == size_of(two).active + router
    assert size_of(config).parameters > 2 * size_of(config).active


def test_bytes_are_those_of_a_real_store(tiny_target, tmp_path):
    rows = [{"id": f"c{i}", "messages": [
        {"role": "user", "content": "what " * (3 + i % 4)}, {"role": "assistant", "content": "it is " * (2 + i % 5)},
    ]} for i in range(24)]  # fmt: skip
    conversations = load_conversations(write_rows(tmp_path / "d.jsonl", *rows))
    tiny_target.tokenizer.save_pretrained(tmp_path / "t")
    tiny_target.model.config.save_pretrained(tmp_path / "t")
    trainer = extraction_trainer()
    for dtype, before in (("bfloat16", None), ("int8", 8)):
        options = CostOptions(
            target=str(tmp_path / "t"),
            data=str(tmp_path / "d.jsonl"),
            feature_dtype=dtype,
            before=before,
            max_length=256,
        )
        text = costs.measured(options)
        found = costs.costs(Size(1e6, 1e6, tiny_target.hidden_size), text, options, 1e12)
        folder = tmp_path / dtype
        stored = FeatureOptions(max_length=256, feature_dtype=dtype, before=before, shard_size=24)
        extract(tiny_target, conversations, folder, stored, trainer)
        (shard,) = folder.glob("shard-*")
        needed = next(iter(found.stored.values()))
        assert needed == pytest.approx(shard.stat().st_size, rel=0.05)
        training = TrainOptions(max_length=256, extraction=StorageOptions(feature_dtype=dtype, before=before))
        resolved = resolve(training, size_of(tiny_target.model), text)
        assert Forecast(resolved, size_of(tiny_target.model), text, torch.float32).disk["features"] == needed


def test_the_command_says_what_a_70b_target_takes_without_weights(tmp_path, capsys):
    LlamaConfig(**LLAMA_70B).save_pretrained(tmp_path)
    command = ["--dry-run", "--target", str(tmp_path), "--conversations", "100000", "--tokens", "1000"]
    main([*command, "--disk_gigabytes", "2000"])
    said = capsys.readouterr().out
    assert "70.6B parameters" in said and "100,000,000 tokens" in said
    assert "1.64 TB  bfloat16, all positions" in said and "use: offline, bfloat16, all positions" in said
    # 2 x 68.5e9 x 1e8 operations, and attention's 1.3e6 x 500, at 40 % of 989 TFLOP/s.
    assert "one forward over all: 9.71 GPU-hours" in said and "online: 38.8 GPU-hours in 4 epochs" in said
    # 6e7 tokens, each of which reads 2 x 70.6e9 bytes / (64 x 0.4), and 328 kB of half of 1,000 tokens, at 3.35 TB/s.
    assert "if the target writes them: 28.2 GPU-hours" in said
    assert "batches of 64 answers, 40% of them unfinished in the mean, and 328 kB of keys and values of each" in said
    main([*command, "--occupancy", "1", "--disk_gigabytes", "600"])
    assert "if the target writes them: 11.8 GPU-hours" in capsys.readouterr().out
    main([*command, "--disk_gigabytes", "600"])
    assert "use: offline, int8, answers and 8 positions before each" in capsys.readouterr().out
    main([*command, "--disk_gigabytes", "100"])
    assert "use: online" in capsys.readouterr().out
    main([*command, "--disk_gigabytes", "2000", "--epochs", "1"])
    assert "use: online" in capsys.readouterr().out
    main(["--dry-run", "--parameters", "70.6e9", "--hidden_size", "8192", "--output", "memory://x"])
    said = capsys.readouterr().out
    assert "use: offline, bfloat16" in said and "no keys and values, whose size is not known" in said
    assert not torch.cuda.is_initialized()


def test_hours_of_answers_in_training_are_those_of_the_calculator():
    """With the batch size of the run, and what is assumed beside them; where none are written nothing is said."""
    size, text = size_of(LlamaConfig(**LLAMA_70B)), DataStatistics(1000, 1000.0, 0.5, 2.0)
    options = TrainOptions(data="d", target="t", regeneration=AnswerOptions(batch_size=32))
    found = Forecast(resolve(options, size, text), size, text, torch.bfloat16).hours
    expected = 5e5 * (2 * size.parameters / (32 * 0.4) + 327_680 * 500) / 3.35e12 / 3600
    assert found.parts["answers"] == pytest.approx(expected)
    assert "32 answers, 40% of them unfinished in the mean, and 328 kB of keys and values of each token" in found.how
    without = Forecast(resolve(replace(options, regenerate=False), size, text), size, text, torch.bfloat16).hours
    assert "answers" not in without.parts and "unfinished" not in without.how


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "give either a target, or its parameters"),
        (["--target=T", "--parameters=1"], "give either a target"),
        (["--target=no/such"], "no/such cannot be loaded"),
        (["--parameters=1", "--hidden_size=1", "--utilisation=2"], "it is a share"),
        (["--parameters=1", "--hidden_size=1", "--occupancy=2"], "occupancy is 2.0, and it is a share"),
        (["--parameters=1", "--hidden_size=1", "--epochs=0"], "epochs is 0"),
        (
            ["--parameters=1", "--hidden_size=1", "--feature_dtype=bf16"],
            "feature_dtype is bf16; give one of float32",
        ),
        (["--parameters=1", "--hidden_size=1", "--layers=[3]"], "end them in -1"),
        (["--parameters=1", "--hidden_size=1", "--data=D"], "give --target"),
    ],
)
def test_mistakes_get_one_sentence(given, message, refused):
    assert message in refused(main, "--dry-run", *given, alone=True)


# For which transformers makes no tokenizer, and an empty one.
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_text_is_not_counted_without_a_tokenizer(kind, tmp_path, refused):
    kind(**LLAMA_70B).save_pretrained(tmp_path / "T")
    (tmp_path / "d.jsonl").write_text('{"text": "words"}\n')
    given = [f"--target={tmp_path / 'T'}", f"--data={tmp_path / 'd.jsonl'}"]
    assert "has no tokenizer to count it with" in refused(main, "--dry-run", *given, alone=True)
