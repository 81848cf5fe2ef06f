"""Fixtures of Medusa: tiny random checkpoints, and what vLLM's own module makes of them. Runs in the environment of
vLLM (0.32, CPU), without this package:

    python eval/reference/medusa.py tests/fixtures

Each folder has a checkpoint that vLLM loads (config.json, model.safetensors) and `reference.safetensors`: `states`
(N, H), which enter the target's output embedding, and `logits` (heads, N, vocabulary), -inf where nothing is drafted.
The module is vLLM's `Medusa`, loaded by its own `load_weights`, with the one configuration it reads and no engine.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.models.medusa import Medusa
from vllm.transformers_utils.configs.medusa import MedusaConfig

HIDDEN, VOCABULARY, DRAFTED, HEADS, STATES = 16, 40, 24, 3, 5
FIXTURES: dict[str, dict[str, Any]] = {
    # As FasterDecoding trains: one output embedding for each head; two layers tell their order.
    "medusa": {"num_hidden_layers": 2, "medusa_fc_bias": True},
    # One output embedding of the most frequent tokens for all heads.
    "medusa-shared": {"num_hidden_layers": 1, "original_lm_head": True, "truncated_vocab_size": DRAFTED},
}


def weights_of(config: MedusaConfig) -> dict[str, Tensor]:
    """Random weights under the names that vLLM reads."""
    found: dict[str, Tensor] = {}
    for head in range(HEADS):
        for layer in range(config.num_hidden_layers):
            found[f"blocks.{head}.layers.{layer}.weight"] = torch.randn(HIDDEN, HIDDEN) * HIDDEN**-0.5
            if getattr(config, "medusa_fc_bias", False):
                found[f"blocks.{head}.layers.{layer}.bias"] = torch.randn(HIDDEN)
    if getattr(config, "original_lm_head", False):
        found["lm_head.weight"] = torch.randn(DRAFTED, HIDDEN)
        found["token_map"] = torch.randperm(VOCABULARY)[:DRAFTED].sort().values
    else:
        found |= {f"lm_heads.{head}.weight": torch.randn(VOCABULARY, HIDDEN) for head in range(HEADS)}
    return found


@torch.no_grad()
def record(folder: Path, options: dict[str, Any]) -> None:
    config = MedusaConfig(hidden_size=HIDDEN, vocab_size=VOCABULARY, num_heads=HEADS, **options)
    weights, states = weights_of(config), torch.randn(STATES, HIDDEN)
    draft = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    model = Medusa(vllm_config=SimpleNamespace(speculative_config=draft))  # type: ignore[arg-type]
    model.load_weights(weights.items())
    for head in {id(head): head for head in model.lm_heads}.values():  # as vLLM's loader ends
        head.quant_method.process_weights_after_loading(head)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config.to_json_string(use_diff=False), encoding="utf-8")
    save_file(weights, folder / "model.safetensors")
    logits = torch.stack(model.compute_logits(model(states)))
    save_file({"states": states, "logits": logits}, folder / "reference.safetensors")


def main(output: Path) -> None:
    torch.manual_seed(0)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:29577", 0, "gloo")
        initialize_model_parallel(1, 1)
        for name, options in FIXTURES.items():
            record(output / name, options)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
