"""Fixtures of EAGLE-3: tiny random checkpoints of `speculators` 0.9, and what its training forward makes of them. Runs
in the environment of that package, without ours:

    python eval/reference/eagle3.py tests/fixtures

Each folder has the checkpoint as speculators saves it (config.json, model.safetensors) and `reference.safetensors`: the
inputs, features (1, T, 3 H) of g_0..g_{T-1} and tokens (1, T) x_1..x_T, and the logits of the unrolled steps,
(1, S, T, K): step k at position i reads x_{i+1+k} and drafts x_{i+2+k}.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

VOCABULARY, DRAFTED, LENGTH, STEPS = 40, 24, 12, 4
LAYERS = [2, 4, 5]
# Grouped heads and a head_dim that is not hidden_size / heads tell a wrong layout from a right one.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}
# Scaling that changes the frequencies of so short a text.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
PLAIN = {"rope_type": "default", "rope_theta": 500000.0}


def method(algorithm: str, tokens: int = STEPS) -> SpeculatorsConfig:
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tokens)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )


def randomise(model: Any, drafted: int) -> Any:
    """The model with weights at which all parts matter: norms away from one, biases away from zero."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(1 + 0.3 * torch.randn_like(weight) if weight.ndim == 1 else torch.randn_like(weight))
            if weight.ndim > 1:
                weight.mul_(weight.shape[-1] ** -0.5)
        if model.use_draft_vocab:
            chosen = torch.randperm(VOCABULARY)[:drafted].sort().values
            model.t2d.zero_()
            model.t2d[chosen] = True
            model.d2t.copy_(chosen - torch.arange(drafted))  # a delta
    return model


def widened(model: Any, target: int) -> Any:
    """The model for a target of another width. Its forward is the same; its constructor, of 0.9, leaves the option
    target_hidden_size out, which its configuration has, and which the package's converter and vLLM build so.
    """
    if target == model.hidden_size:
        return model
    count = len(LAYERS)
    model.fc = torch.nn.Linear(count * target, model.hidden_size, bias=False)
    norm, eps = type(model.norm), SIZES["rms_norm_eps"]
    if model.input_norm is not None:
        model.input_norm = norm(count * target, eps=eps)
    if model.fc_norm is not None:
        model.fc_norm = torch.nn.ModuleList(norm(target, eps=eps) for _ in range(count))
    return model


def model_of(layers: PretrainedConfig, drafted: int, **options: Any) -> Eagle3DraftModel:
    layers._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=drafted,
        eagle_aux_hidden_state_layer_ids=LAYERS,
        speculators_config=method("eagle3"),
        **options,
    )
    model = Eagle3DraftModel(config).eval()
    return randomise(widened(model, config.target_hidden_size or SIZES["hidden_size"]), drafted)


@torch.no_grad()
def record(model: Eagle3DraftModel, folder: Path) -> None:
    """Save the checkpoint, and the logits of every step of the package's own forward."""
    features = 3 * torch.randn(1, LENGTH, model.fc.in_features)
    tokens = torch.randint(VOCABULARY, (1, LENGTH))
    logits: list[torch.Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda module, given, found: logits.append(found))
    model(features, tokens, torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=STEPS)
    handle.remove()
    model.save_pretrained(folder)
    (folder / "config.py").unlink(missing_ok=True)  # a copy of the package's own
    found = {"features": features, "tokens": tokens, "logits": torch.stack(logits, dim=1)}
    save_file(found, folder / "reference.safetensors")


def main(out: Path) -> None:
    torch.manual_seed(0)
    llama = LlamaConfig(**SIZES, rope_parameters=LLAMA3, attention_bias=True)
    record(model_of(llama, DRAFTED), out / "eagle3-llama")
    qwen = Qwen3Config(**SIZES, rope_parameters=PLAIN)
    record(model_of(qwen, DRAFTED, norm_before_residual=True, norm_before_fc=True), out / "eagle3-qwen3")
    yarn = LlamaConfig(**SIZES, rope_parameters=YARN)
    record(model_of(yarn, VOCABULARY, fc_norm=True, norm_output=True), out / "eagle31-llama")
    deep = LlamaConfig(**{**SIZES, "num_hidden_layers": 3}, rope_parameters=PLAIN)
    record(model_of(deep, DRAFTED), out / "eagle3-deep")
    narrow = model_of(
        LlamaConfig(**SIZES, rope_parameters=PLAIN), DRAFTED, target_hidden_size=24, fc_norm=True, norm_output=True
    )
    record(narrow, out / "eagle3-narrow")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
