"""Targets with an MTP layer in their files, as the hub has them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from eval.architectures import FAMILIES, build
from eval.families import random_model
from shape.networks.decoder import layer_class

MTP_TARGET = "Qwen/Qwen3.5-4B"  # which the documentation names


class Layer(nn.Module):
    """What the files hold, of transformers' own classes."""

    def __init__(self, config: PretrainedConfig, model_type: str) -> None:
        super().__init__()
        norm, size = layer_class(model_type, "RMSNorm"), config.hidden_size
        config.layer_types, config._attn_implementation = ["full_attention"], "eager"
        config._experts_implementation = "eager"
        self.pre_fc_norm_hidden, self.pre_fc_norm_embedding = norm(size), norm(size)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([layer_class(model_type, "DecoderLayer")(config, 0)])
        self.norm = norm(size)
        self.turns = layer_class(model_type, "RotaryEmbedding")(config)
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


def write(folder: Path, model: PreTrainedModel) -> Layer:
    """A model and a random layer, which lies in two of three shards; of Qwen3-Next each expert by itself."""
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
    joins = {name: weights.pop(name) for name in list(weights) if not name.startswith("mtp.layers.")}
    parts = enumerate((own, joins, weights), 1)
    files = {f"model-{number:05}-of-00003.safetensors": part for number, part in parts}
    for name, held in files.items():
        save_file(held, folder / name, metadata={"format": "pt"})
    index = {weight: name for name, held in files.items() for weight in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return layer


def write_small(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """A tiny Qwen3.5 of a tokenizer's tokens, in float32, and a random layer."""
    _, _, values = FAMILIES["qwen3_5"]
    own = {"eos_token_id": tokenizer.eos_token_id, "vocab_size": len(tokenizer)}
    write(folder, random_model(type(build("qwen3_5").config)(**values | own)).float())
    tokenizer.save_pretrained(folder)
