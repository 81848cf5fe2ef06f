"""Checkpoints of the package `speculators`, which vLLM serves by themselves: their configuration names the target."""

from typing import Any

from shape.errors import CheckpointError
from shape.networks.base import Predictor
from shape.networks.config import ShapeConfig
from shape.networks.formats import block, eagle
from shape.networks.formats.files import Checkpoint, Weights
from shape.networks.formats.targets import TargetFacts

_VERSION = "0.9.0"  # of the package whose files these are
# By `speculators_model_type`.
_ALGORITHMS = {"eagle3": eagle, "peagle": eagle, "dflash": block, "dflash2": block, "dspark": block}


def recognise(config: dict[str, Any]) -> bool:
    return "speculators_model_type" in config


def verifier(config: dict[str, Any]) -> str | None:
    """Name of the target, where the configuration says it."""
    return ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")


def read(checkpoint: Checkpoint, target: TargetFacts) -> tuple[ShapeConfig, Weights]:
    """Ours of speculators'.

    Raises:
        CheckpointError: an algorithm that has no network here.
    """
    config = checkpoint.config
    if (kind := config["speculators_model_type"]) not in _ALGORITHMS:
        raise CheckpointError(f"its algorithm is {kind}, and there are networks for {', '.join(_ALGORITHMS)}")
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return _ALGORITHMS[kind].read_speculators(checkpoint, methods[0].get("speculative_tokens") or 1, target)


def write(predictor: Predictor, target: TargetFacts) -> Checkpoint:
    """Speculators' of ours.

    Raises:
        CheckpointError: the target is unknown, or there is no place for something in the layout.
    """
    config = predictor.config
    if not target.name:
        raise CheckpointError("its configuration names the target, which is not known: give --target")
    own, weights = (block if config.kind == "block" else eagle).write_speculators(predictor, target)
    algorithm = own["speculators_model_type"]
    written = {
        **own,
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_steps}],
            "verifier": {"name_or_path": target.name, "architectures": list(target.architectures)},
        },
        "tie_word_embeddings": False,
    }
    return Checkpoint(written, weights)
