"""A target's own MTP layer: read from its files, compared with transformers' own modules, drafted with and trained."""

import csv
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from mtp_targets import Layer, write, write_small
from safetensors.torch import load_file, save_file
from torch import Tensor
from training_runs import arguments, write_conversations
from transformers import AutoConfig, PreTrainedModel

from eval.architectures import build
from eval.families import random_model
from shape.cli.train import main as train
from shape.errors import CheckpointError, ConfigError
from shape.generation.conversion import convert
from shape.generation.decoder import ShapeDecoder
from shape.networks.base import known_at
from shape.networks.config import ShapeConfig
from shape.networks.formats.table import load
from shape.networks.mtp import MtpPredictor
from shape.networks.shape import windows

_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
FAMILIES = ("qwen3_5", "qwen3_next", "qwen3_5_moe")


class Target(NamedTuple):
    folder: Path
    model: PreTrainedModel
    layer: Layer


def model_of(family: str) -> PreTrainedModel:
    if family != "qwen3_5_moe":
        return build(family)
    dense = {name: value for name, value in build("qwen3_5").config.to_dict().items() if name != "model_type"}
    return random_model(AutoConfig.for_model("qwen3_5_moe_text", **dense, **_MOE))


@pytest.fixture(scope="module", params=FAMILIES)
def target(request, tmp_path_factory) -> Target:
    folder, model = tmp_path_factory.mktemp(request.param), model_of(request.param)
    return Target(folder, model, write(folder, model))


def texts(count: int = 1, length: int = 14) -> Tensor:
    return torch.randint(3, 64, (count, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_two_steps_are_those_of_transformers_modules(target):
    """The first at every position, and the second, which reads the first one's output, at several."""
    network, model, layer = load(target.folder, form="mtp"), target.model, target.layer
    assert isinstance(network, MtpPredictor) and network.dtype == torch.float64
    tokens = texts()
    hidden, embeddings = model.model(tokens).last_hidden_state, model.get_input_embeddings()(tokens)
    once = layer(hidden[:, :-1], embeddings[:, 1:])  # place i reads h_i and x_{i+1}
    assert once.std() > 0.1
    roots = torch.arange(1, tokens.shape[1] - 1)[None]
    known = known_at(network, hidden[:, :-1], embeddings, roots, windows(hidden[:, :-1], roots, 1))
    along = torch.stack([embeddings[:, roots[0]], embeddings[:, roots[0] + 1]], dim=2)
    found = network.unroll(known, along, 2)
    torch.testing.assert_close(found[0, :, 0], once[0, roots[0] - 1], rtol=1e-6, atol=1e-6)
    for place, root in enumerate(roots[0].tolist()):
        read = torch.cat([hidden[:, :root], once[:, root - 1 : root]], dim=1)
        twice = layer(read, embeddings[:, 1 : root + 2])[0, -1]
        torch.testing.assert_close(found[0, place, 1], twice, rtol=1e-6, atol=1e-6)


def test_a_multimodal_models_configuration_has_it_one_level_down(target, tmp_path):
    shutil.copytree(target.folder, tmp_path, dirs_exist_ok=True)
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    once, again = load(target.folder, form="mtp"), load(tmp_path, form="mtp")
    assert again.config.transformer_layer_config == once.config.transformer_layer_config
    assert torch.equal(again.fc.weight, once.fc.weight)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_drafts_for_itself(target, temperature):
    """By one word, from its own files, of which only the weights that are wanted are read; every token is its own."""
    decoder = ShapeDecoder.from_pretrained(target.folder, drafter="mtp", dtype="float32", fall_back=False)
    plain = ShapeDecoder.from_pretrained(target.folder, drafter="none", dtype="float32")
    options = {"max_new_tokens": 20, "do_sample": temperature > 0, "return_dict_in_generate": True}
    found, expected = [], []
    for each, outputs in ((decoder, found), (plain, expected)):
        torch.manual_seed(0)
        outputs.append(each.generate(texts(2), **options))
    assert decoder.drafter.name == "mtp" and found[0].stats.drafted > 0
    assert found[0].sequences.tolist() == expected[0].sequences.tolist()


def test_weights_in_eight_bits_are_read(target, tmp_path):
    """Matrices in float8 with a scale for each block, here of 16 x 24, as the hub's -FP8 models have them."""
    shutil.copytree(target.folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 24]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for file in tmp_path.glob("model-*.safetensors"):
        held = load_file(file)
        for name in [name for name in held if name.startswith("mtp.layers.") and held[name].dim() > 1]:
            weight = held[name]
            blocks = [row.split(24, dim=-1) for row in weight.split(16, dim=-2)]
            peaks = [torch.stack([block.abs().amax((-2, -1)) for block in row], dim=-1) for row in blocks]
            scales = torch.stack(peaks, dim=-2) / torch.finfo(torch.float8_e4m3fn).max
            rows = [
                torch.cat([block / scales[..., i, j, None, None] for j, block in enumerate(row)], dim=-1)
                for i, row in enumerate(blocks)
            ]
            held[name] = torch.cat(rows, dim=-2).to(torch.float8_e4m3fn)
            held[f"{name}_scale_inv"] = scales.float()
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        index["weight_map"] |= dict.fromkeys(held, file.name)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        save_file(held, file, metadata={"format": "pt"})
    once, again = load(target.folder, form="mtp"), load(tmp_path, form="mtp")
    assert again.config.transformer_layer_config == once.config.transformer_layer_config
    read = again.state_dict()
    for name, weight in once.state_dict().items():
        if name.startswith("layers.") and weight.dim() > 1:
            assert read[name].dtype == torch.bfloat16
            torch.testing.assert_close(read[name].to(weight), weight, rtol=0.07, atol=0.01)
        else:
            assert torch.equal(read[name], weight)


def test_it_becomes_a_predictor_of_ours(target, tmp_path):
    """For `shape train --init`; engines read it where it was."""
    converted = tmp_path / "mtp"
    convert(target.folder, "shape", converted, "mtp", str(target.folder))
    again, once = MtpPredictor.from_pretrained(converted), load(target.folder, form="mtp")
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in once.state_dict().items())
    decoder = ShapeDecoder.from_pretrained(converted, target=target.folder, drafter="mtp", dtype="float32")
    assert decoder.drafter.name == "mtp"
    with pytest.raises(ConfigError, match="kind mtp"):
        ShapeDecoder.from_pretrained(converted, target=target.folder, drafter="eagle3")
    with pytest.raises(CheckpointError, match="from the target's own files"):
        convert(converted, "mtp", tmp_path / "back", target=str(target.folder))


def test_a_model_at_hand_names_its_files(target):
    model = type(target.model).from_pretrained(target.folder, dtype="float32")
    assert ShapeDecoder.from_pretrained(model, drafter="mtp").drafter.name == "mtp"
    model.config.name_or_path = model.name_or_path = ""
    with pytest.raises(ConfigError, match="does not say where these are"):
        ShapeDecoder.from_pretrained(model, drafter="mtp")


def test_it_is_trained_on(tiny_tokenizer, tmp_path):
    """`shape train --init`, from what `shape convert` wrote; the layer stays the target's own kind."""
    folder, start, trained = (tmp_path / name for name in ("target", "start", "trained"))
    write_small(folder, tiny_tokenizer)
    convert(folder, "shape", start, "mtp", str(folder))
    data = write_conversations(tmp_path / "talks.jsonl")
    given = [f"--init={start}", "--training.steps=40", "--losses.kl=1", "--predictor.dropout=0"]
    train(arguments(folder, data, trained, *given))
    after = MtpPredictor.from_pretrained(trained)
    assert after.config.transformer_layer_config["model_type"] == "qwen3_5_text"
    with open(trained / "logs/version_0/metrics.csv") as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert losses[-1] < losses[0]
    decoder = ShapeDecoder.from_pretrained(trained, fall_back=False)
    prompt = decoder.target.encode([{"role": "user", "content": "say a b c"}])
    expected = decoder.target.model.generate(prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(decoder.generate(prompt, max_new_tokens=20), expected)


def test_targets_without_one_are_told(tmp_path):
    build("qwen3_5").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no weights mtp\.\*"):
        ShapeDecoder.from_pretrained(tmp_path, drafter="mtp")
    save_file({"mtp.fc.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks weights: fc|lacks weights: layers"):
        load(tmp_path, form="mtp")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(CheckpointError, match="model_type 'gpt2'"):
        load(tmp_path, form="mtp")


def test_options_that_do_not_go_together():
    with pytest.raises(ConfigError, match="one decoder layer"):
        ShapeConfig(kind="mtp", hidden_size=32, num_layers=2)
    with pytest.raises(ConfigError, match="model_type 'qwen3_5_text'"):
        ShapeConfig(kind="eagle", hidden_size=32, transformer_layer_config={"model_type": "qwen3_5_text"})
