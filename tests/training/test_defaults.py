"""What follows from target and data: the rules by themselves, and what they come to for models that people have."""

from types import SimpleNamespace

import pytest
import torch
from helpers import LLAMA_8B, QWEN_06B
from transformers import LlamaConfig, Qwen3Config

from shape.data.statistics import DataStatistics
from shape.errors import ConfigError
from shape.target.size import Size, size_of
from shape.training import defaults
from shape.training.defaults import mask_token, network_config, resolve
from shape.training.forecast import Forecast, network_size
from shape.training.options import PredictorOptions, TrainOptions
from shape.training.parsing import parse

SHAREGPT = DataStatistics(conversations=50_000, tokens=1000.0, answers=0.6, turns=2.0, covering=11_800)


@pytest.mark.parametrize("config", [LlamaConfig(**LLAMA_8B), Qwen3Config(**QWEN_06B)], ids=["8B", "0.6B"])
def test_a_draft_costs_a_small_part_of_a_step(config):
    """Before, for the 8B target: 780 million parameters, all 128,256 tokens drafted, 0.18 of a step, 1,000 steps."""
    size = size_of(config)
    options = resolve(TrainOptions(target="T"), size, SHAREGPT)
    assert network_size(options, size) <= size.read / 25
    assert (
        options.predictor.intermediate_size == size.hidden_size or network_size(wider(options), size) > size.read / 25
    )
    assert options.predictor.draft_vocab_size == 12_032  # 11,800, in steps of 256
    assert Forecast(options, size, SHAREGPT, torch.bfloat16).draft.relative < 0.07
    assert options.training.steps == 40_000 and options.validation.every == 8000
    wide = ["--target=T", f"--predictor.intermediate_size={2 * size.hidden_size}", "--predictor.draft_vocab_size=null"]
    before = resolve(parse(wide), size, SHAREGPT)
    assert Forecast(before, size, SHAREGPT, torch.bfloat16).draft.relative > 0.17


def test_a_draft_model_that_cannot_be_made_is_told_before_anything_is_loaded():
    options = TrainOptions(target="T", predictor=PredictorOptions(kind="model", num_heads=5))
    with pytest.raises(ConfigError, match="with 5 heads and 1 layers cannot be made"):
        network_config(options, size_of(LlamaConfig(**LLAMA_8B)))


def test_processes_share_what_is_learned():
    size = size_of(LlamaConfig(**LLAMA_8B))
    given = ["--target=T", "--trainer.devices=8", "--trainer.accelerator=cpu"]

    def learning(strategy: str) -> float:
        options = resolve(parse([*given, f"--trainer.strategy={strategy}"]), size, SHAREGPT)
        return Forecast(options, size, SHAREGPT, torch.bfloat16).memory["weights, gradients, optimiser"]

    assert learning("fsdp") == learning("ddp") * (2 + 8) / 16  # an eighth, and what is gathered for a step


def wider(options: TrainOptions) -> TrainOptions:
    changed = TrainOptions(predictor=options.predictor)
    changed.predictor.intermediate_size += 64
    return changed


@pytest.mark.parametrize(("kind", "read"), [("shape", [2, 14, 25, -1]), ("eagle", [2, 14, 25]), ("medusa", [-1])])
def test_published_layers_go_with_every_kind(kind, read):
    size = size_of(Qwen3Config(**QWEN_06B))
    given = PredictorOptions(kind=kind, feature_layers="auto", markov_rank=0)
    options = resolve(TrainOptions(target="T", predictor=given), size, SHAREGPT)
    config = network_config(options, size)
    assert config.feature_layers == read and options.feature_options().layers == config.target_layers


def test_a_network_of_the_last_state_takes_no_other_layers():
    given = PredictorOptions(kind="medusa", feature_layers=[1])
    with pytest.raises(ConfigError, match=r"feature_layers is \[1\]: kind medusa reads"):
        resolve(TrainOptions(target="T", predictor=given), size_of(Qwen3Config(**QWEN_06B)), SHAREGPT)


def test_what_is_given_stays():
    given = parse(
        ["--target=T", "--max_length=64", "--training.steps=7", "--validation.every=3", "--predictor.num_layers=2",
         "--predictor.intermediate_size=96", "--predictor.draft_vocab_size=null"]
    )  # fmt: skip
    assert resolve(given, size_of(LlamaConfig(**LLAMA_8B)), SHAREGPT) == given


def test_the_embedded_default_is_what_it_was():
    size = Size(12.6e6, 9.44e6, 384, vocab_size=8192, positions=2048)
    options = parse([])
    resolved = resolve(options, size, SHAREGPT)
    assert resolved.predictor == options.predictor and resolved.training == options.training
    assert resolved.validation == options.validation and resolved.max_length == 1024
    assert (resolved.predictor.intermediate_size, resolved.predictor.draft_vocab_size) == (512, 2048)


@pytest.mark.parametrize(
    ("positions", "steps", "epochs"),
    [(1_000, 200, 205), (10_000, 391, 40), (100_000, 600, 6.1), (1_000_000, 3906, 4), (50_000_000, 40_000, 0.82)],
)
def test_steps_follow_from_positions(positions, steps, epochs):
    found = defaults.steps(positions, 1024)
    assert found == steps and found * 1024 / positions == pytest.approx(epochs, rel=0.01)
    assert defaults.steps(positions, 512) * 512 == pytest.approx(found * 1024, rel=0.01) or found in (200, 40_000)


def test_a_blocks_layers_and_mask_are_the_targets(tiny_target):
    options = TrainOptions(predictor=PredictorOptions(kind="block", markov_rank=0, draft_vocab_size=None))
    config = network_config(options, tiny_target)
    layer, own = config.transformer_layer_config, tiny_target.config
    assert layer["model_type"] == "qwen3" and layer["num_key_value_heads"] == own.num_key_value_heads
    assert config.mask_token_id == mask_token(tiny_target)


@pytest.mark.parametrize(
    ("mask", "length", "pad", "chosen"), [(7, 50, 0, 7), (None, 50, 0, 50), (None, 64, 0, 0), (None, 64, None, 2)]
)
def test_the_mask_is_the_tokenizers_or_an_unused_row_or_padding(mask, length, pad, chosen):
    class Tokenizer:
        mask_token_id, pad_token_id, eos_token_id, unk_token_id = mask, pad, 2, 3

        def __len__(self):
            return length

    assert mask_token(SimpleNamespace(tokenizer=Tokenizer(), vocab_size=64, name="T")) == chosen


def test_a_drafter_of_another_width_has_the_targets_heads_as_far_as_they_fit():
    size, given = (
        size_of(LlamaConfig(**LLAMA_8B)),
        ["--target=T", "--predictor.kind=eagle", "--predictor.hidden_size=1024"],
    )
    given += ["--predictor.own_heads=true", "--predictor.own_embeddings=true", "--predictor.markov_rank=0"]
    losses = ["--losses.kl=1.0", "--losses.soft_cross_entropy=0.0", "--losses.smooth_l1=0.0"]
    config = network_config(resolve(parse([*given, *losses]), size, SHAREGPT), size)
    assert (config.hidden_size, config.target_hidden_size, config.state_size) == (1024, 4096, 4096)
    layers = config.layer_config()
    assert (layers.num_attention_heads, layers.num_key_value_heads, layers.head_dim) == (8, 8, 128)
    assert layers.intermediate_size == LlamaConfig(**LLAMA_8B).intermediate_size // 4
    same = network_config(resolve(parse([*given, *losses, "--predictor.hidden_size=4096"]), size, SHAREGPT), size)
    assert same.target_hidden_size is None and same.layer_config().num_attention_heads == 32
    with pytest.raises(ConfigError, match="losses are on states"):
        network_config(resolve(parse([*given, "--losses.smooth_l1=1.0"]), size, SHAREGPT), size)
