"""A checkpoint as its files hold it: a configuration and named weights, of whatever package."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig

from shape.errors import CheckpointError
from shape.files import reading, written_whole
from shape.target.loading import HUB_OPTIONS, only

Weights = dict[str, Tensor]
# What hub repositories are read for; the first kind that is there has the weights.
_WEIGHTS = ("model*.safetensors", "medusa_lm_head.safetensors", "pytorch_model*.bin", "medusa_lm_head.pt")
_INDEX = "model.safetensors.index.json"  # which file has which weight
_MASK = "mask_embedding.pt"


class Checkpoint(NamedTuple):
    """What `config.json` says, and the weights by name."""

    config: dict[str, Any]
    weights: Weights


def architectures(config: dict[str, Any]) -> set[str]:
    """Names of the classes that a configuration is for."""
    given = config.get("architectures")
    return {str(name) for name in given} if isinstance(given, list) else set()


def read_checkpoint(source: str | Path, prefix: str = "", **hub: Any) -> Checkpoint:
    """Configuration and weights of a folder or hub repository.

    Pickled files are read with torch's restricted unpickler, which makes tensors and nothing else.

    Args:
        prefix: of the names of the weights that are wanted, and whose files alone are fetched and opened.

    Raises:
        CheckpointError: nothing that can be read there.
    """
    with reading(f"checkpoint {source}", CheckpointError, "give a folder or hub id with config.json and safetensors"):
        folder = Path(source)
        if not folder.is_dir():
            options = only(HUB_OPTIONS - {"proxies"}, hub)
            patterns = ["*.json", _MASK, *(() if prefix else _WEIGHTS)]
            folder = Path(snapshot_download(str(source), allow_patterns=patterns, **options))
            if prefix:
                snapshot_download(str(source), allow_patterns=[*(_indexed(folder, prefix) or _WEIGHTS)], **options)
        if (folder / _MASK).exists():
            raise CheckpointError(
                f"checkpoint {source} has a mask embedding of its own ({_MASK}), which is not a token's: give one "
                "whose mask is a token"
            )
        files = [folder / name for name in _indexed(folder, prefix)]
        files = files or next((found for pattern in _WEIGHTS if (found := sorted(folder.glob(pattern)))), [])
        if not files:
            raise CheckpointError(f"checkpoint {source} has no weights; it needs one of {', '.join(_WEIGHTS)}")
        weights: Weights = {}
        for file in files:
            weights |= _weights_in(file, prefix)
        return Checkpoint(PretrainedConfig.get_config_dict(str(folder))[0], weights)


def _weights_in(file: Path, prefix: str) -> Weights:
    """Those whose names begin so; of safetensors the others are not read."""
    if file.suffix != ".safetensors":
        held: Weights = torch.load(file, map_location="cpu", weights_only=True)
        return {name: weight for name, weight in held.items() if name.startswith(prefix)}
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys() if name.startswith(prefix)}  # noqa: SIM118


def _indexed(folder: Path, prefix: str) -> list[str]:
    """Names of the files that have weights whose names begin so; none where no index says so."""
    if not prefix or not (folder / _INDEX).exists():
        return []
    known: dict[str, str] = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
    return sorted({file for name, file in known.items() if name.startswith(prefix)})


def write_checkpoint(folder: str | Path, checkpoint: Checkpoint) -> None:
    """Write `config.json` and `model.safetensors`, each whole or not at all."""
    folder = Path(folder)
    with written_whole(folder / "model.safetensors") as path:
        weights = {name: weight.detach().cpu().contiguous() for name, weight in checkpoint.weights.items()}
        save_file(weights, path, metadata={"format": "pt"})
    with written_whole(folder / "config.json") as path:
        path.write_text(json.dumps(checkpoint.config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
