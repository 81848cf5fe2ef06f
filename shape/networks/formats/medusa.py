"""Medusa's checkpoints: those that vLLM serves, and those of FasterDecoding (`0.0.linear.weight`, `0.1.weight`)."""

import re
import warnings

from torch import Tensor

from shape.errors import CheckpointError
from shape.networks.base import Predictor
from shape.networks.config import ShapeConfig
from shape.networks.formats.files import Checkpoint, Weights
from shape.networks.formats.layers import require_no_token_heads
from shape.networks.formats.targets import TargetFacts

_PREFIX = re.compile(r"^(medusa_heads?\.)")
_RESIDUAL = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
_HEAD = re.compile(r"^(\d+)\.\d+\.weight$")
_BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.weight$")


def recognise(config: dict) -> bool:
    return config.get("model_type") == "medusa" or "medusa_num_heads" in config


def read(checkpoint: Checkpoint, target: TargetFacts) -> tuple[ShapeConfig, Weights]:
    """Ours of either layout. What its configuration may leave out, vLLM's defaults aside, the weights say.

    Raises:
        CheckpointError: weights that are no Medusa's.
    """
    config = checkpoint.config
    weights = {_renamed(name): weight for name, weight in checkpoint.weights.items()}
    drafted = weights.pop("token_map", None)
    blocks = [found for name in weights if (found := _BLOCK.match(name))]
    steps = 1 + max((int(found[1]) for found in blocks), default=0)
    if "lm_heads.0.weight" in weights and (config.get("original_lm_head") or steps == 1):
        weights["lm_head.weight"] = weights.pop("lm_heads.0.weight")  # vLLM takes it for the shared one
    head = weights.get("lm_head.weight", weights.get("lm_heads.0.weight"))
    if not blocks or head is None:
        raise CheckpointError("no Medusa head is among the weights; it needs blocks and lm_heads, or one lm_head")
    rows = len(head)
    if drafted is not None:
        weights = {name: _rows(name, weight, drafted) for name, weight in weights.items()}
        weights["draft_vocabulary"] = drafted.long()
    made = ShapeConfig(
        kind="medusa",
        hidden_size=head.shape[1],
        vocab_size=config.get("vocab_size") or target.vocab_size or rows,
        draft_vocab_size=None if drafted is None else len(drafted),
        num_steps=steps,
        num_layers=1 + max(int(found[2]) for found in blocks),
        residual_bias="blocks.0.layers.0.bias" in weights,
        own_heads=True,
        shared_head="lm_head.weight" in weights,
    )
    return made, weights


def write(predictor: Predictor, target: TargetFacts) -> Checkpoint:
    """As vLLM reads it.

    Raises:
        CheckpointError: several output embeddings of a part of the vocabulary, which vLLM does not read; none; or what
            Medusa's layout has no place for.
    """
    config, weights = predictor.config, predictor.state_dict()
    require_no_token_heads(config)
    if config.own_embeddings:
        raise CheckpointError("it has own_embeddings, which Medusa's layout has no place for; train without them")
    if not predictor.heads:
        raise CheckpointError(
            "it drafts with the target's own output embedding, which engines want in the file: give --target"
        )
    drafted = weights.pop("draft_vocabulary", None)
    if drafted is not None:
        if predictor.lm_head is None:
            raise CheckpointError(
                "vLLM reads no draft vocabulary of Medusa with an output embedding for each step; train with "
                "--predictor.draft_vocab_size null"
            )
        warnings.warn(
            "vLLM 0.32 does not load the token_map that Medusa's draft vocabulary becomes; for it train with "
            "--predictor.draft_vocab_size null",
            stacklevel=2,
        )
        weights["token_map"] = drafted
    written = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_heads": config.num_steps,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": config.residual_bias,
        "original_lm_head": predictor.lm_head is not None,
        "truncated_vocab_size": config.draft_size,
        "base_model_name_or_path": target.name,
    }
    return Checkpoint(written, weights)


def _renamed(name: str) -> str:
    name = _PREFIX.sub("", name)
    if found := _RESIDUAL.match(name):
        return f"blocks.{found[1]}.layers.{found[2]}.{found[3]}"
    return f"lm_heads.{found[1]}.weight" if (found := _HEAD.match(name)) else name


def _rows(name: str, weight: Tensor, drafted: Tensor) -> Tensor:
    """Of an output embedding, the rows that are drafted from."""
    return weight[drafted] if name.startswith("lm_head") and len(weight) > len(drafted) else weight
