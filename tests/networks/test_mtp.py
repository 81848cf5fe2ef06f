"""A target's own MTP layer: read from its files, compared with transformers' own modules, drafted with and trained."""

import csv
import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from training_runs import arguments, write_conversations
from transformers import AutoConfig, PreTrainedModel

from eval.architectures import FAMILIES as ARCHITECTURES
from eval.architectures import build
from eval.families import random_model
from shape.cli.train import main as train
from shape.errors import CheckpointError, ConfigError
from shape.generation.conversion import convert
from shape.generation.decoder import ShapeDecoder
from shape.networks.base import known_at
from shape.networks.config import ShapeConfig
from shape.networks.decoder import _classes
from shape.networks.formats.table import load
from shape.networks.mtp import MtpPredictor
from shape.networks.shape import windows

_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
FAMILIES = ("qwen3_5", "qwen3_next", "qwen3_5_moe")


class Layer(nn.Module):
    """What the files hold, of transformers' own classes."""

    def __init__(self, config: AutoConfig, model_type: str) -> None:
        super().__init__()
        classes, size = _classes(model_type), config.hidden_size
        config.layer_types, config._attn_implementation = ["full_attention"], "eager"
        config._experts_implementation = "eager"
        self.pre_fc_norm_hidden, self.pre_fc_norm_embedding = classes.norm(size), classes.norm(size)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([classes.layer(config, 0)])
        self.norm = classes.norm(size)
        self.turns = classes.rotary(config)
        generator = torch.Generator().manual_seed(0)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.3, generator=generator)

    def forward(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """(B, N, H) twice -> (B, N, H)."""
        both = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        x, places = self.fc(torch.cat(both, dim=-1)), torch.arange(hidden.shape[1])[None]
        mask = torch.full((len(places[0]),) * 2, -torch.inf, dtype=x.dtype).triu(1)[None, None]
        axes = places.expand(3, 1, -1) if hasattr(self.turns, "mrope_section") else places  # time, height and width
        turns = tuple(part.to(x.dtype) for part in self.turns(x, axes))
        return self.norm(self.layers[0](x, position_embeddings=turns, attention_mask=mask, position_ids=places))


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
    """A folder as the hub has it: in shards, MTP weights in one of them, of Qwen3-Next each expert by itself."""
    folder, model = tmp_path_factory.mktemp(request.param), model_of(request.param)
    return Target(folder, model, write(folder, model))


def write(folder: Path, model: PreTrainedModel) -> Layer:
    """A model and a random layer."""
    model.save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    layer = Layer(config, config.model_type).to(model.dtype).eval()
    weights = {f"mtp.{name}": weight.detach().clone() for name, weight in layer.state_dict().items()}
    if config.model_type == "qwen3_next":
        start = "mtp.layers.0.mlp.experts"
        both, down = weights.pop(f"{start}.gate_up_proj"), weights.pop(f"{start}.down_proj")
        for number in range(len(both)):
            gate, up = both[number].chunk(2)
            parts = {"gate": gate, "up": up, "down": down[number]}
            weights |= {f"{start}.{number}.{part}_proj.weight": weight.clone() for part, weight in parts.items()}
    own = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {"model-00001-of-00002.safetensors": own, "model-00002-of-00002.safetensors": weights}
    for name, held in files.items():
        save_file(held, folder / name, metadata={"format": "pt"})
    index = {weight: name for name, held in files.items() for weight in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return layer


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
    _, _, values = ARCHITECTURES["qwen3_5"]
    ends = {"eos_token_id": tiny_tokenizer.eos_token_id, "vocab_size": len(tiny_tokenizer)}
    folder, start, trained = (tmp_path / name for name in ("target", "start", "trained"))
    write(folder, random_model(type(build("qwen3_5").config)(**values | ends)).float())
    tiny_tokenizer.save_pretrained(folder)
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
