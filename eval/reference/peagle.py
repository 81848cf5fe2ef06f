"""Fixtures of P-EAGLE: tiny random checkpoints of `speculators` 0.9, and what its training forward makes of them. Runs
in the environment of that package, without ours:

    python eval/reference/peagle.py tests/fixtures

Each folder has the checkpoint as speculators saves it (config.json, model.safetensors) and `reference.safetensors`: the
inputs, features (1, T, 3 H) of g_0..g_{T-1} and tokens (1, T) x_1..x_T, and, for each place that was sampled, the
position where its path begins (`anchors`), its `depth`, and its logits (N, K): depth k of anchor i reads x_{i+1} and
drafts x_{i+2+k}.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from eagle3 import DRAFTED, LAYERS, LENGTH, LLAMA3, PLAIN, SIZES, VOCABULARY, method, randomise, widened
from safetensors.torch import save_file
from speculators.losses import resolve_loss_config
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.models.peagle import core as peagle
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

STEPS = 4


def model_of(layers: PretrainedConfig, drafted: int, **options: Any) -> PEagleDraftModel:
    layers._attn_implementation = "eager"
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=drafted,
        eagle_aux_hidden_state_layer_ids=LAYERS,
        mask_token_id=VOCABULARY - 1,
        speculators_config=method("peagle"),
        **options,
    )
    model, target = PEagleDraftModel(config).eval(), config.target_hidden_size
    if target is not None:
        model = widened(model, target)
        model.mask_hidden = torch.nn.Parameter(torch.empty(1, 1, model.fc.in_features))
        model.verifier_norm = type(model.norm)(target, eps=SIZES["rms_norm_eps"])
        model.verifier_lm_head = torch.nn.Linear(target, drafted, bias=False)
    return randomise(model, drafted)


@torch.no_grad()
def record(model: PEagleDraftModel, folder: Path) -> None:
    """Save the checkpoint, and the logits of every sampled place of the package's own forward."""
    features = 3 * torch.randn(1, LENGTH, model.fc.in_features)
    last = torch.randn(1, LENGTH, model.fc.in_features // len(LAYERS))
    tokens = torch.randint(VOCABULARY, (1, LENGTH))
    found: dict[str, torch.Tensor] = {}
    choose = peagle.generate_cod_sample_indices

    def chosen(*arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found["anchors"], found["depth"] = choose(*arguments, **named)
        return found["anchors"], found["depth"]

    peagle.generate_cod_sample_indices = chosen
    handle = model.lm_head.register_forward_hook(lambda module, given, logits: found.update(logits=logits[0]))
    documents = torch.zeros(1, LENGTH, dtype=torch.long)
    model(
        features,
        tokens,
        documents,
        verifier_last_hidden_states=last,
        num_depths=STEPS,
        down_sample_ratio=1.0,
        loss_config=resolve_loss_config('{"kl_div": 1.0}', "eager"),  # the other one needs a GPU
    )
    handle.remove()
    peagle.generate_cod_sample_indices = choose
    model.save_pretrained(folder)
    (folder / "config.py").unlink(missing_ok=True)  # a copy of the package's own
    save_file({"features": features, "tokens": tokens, **found}, folder / "reference.safetensors")


def main(out: Path) -> None:
    torch.manual_seed(0)
    llama = LlamaConfig(**{**SIZES, "num_hidden_layers": 2}, rope_parameters=LLAMA3)
    record(model_of(llama, DRAFTED), out / "peagle-llama")
    qwen = Qwen3Config(**{**SIZES, "num_hidden_layers": 3}, rope_parameters=PLAIN)
    record(model_of(qwen, VOCABULARY, norm_before_residual=True, norm_before_fc=True), out / "peagle-qwen3")
    wide = {"target_hidden_size": 12, "norm_before_fc": True}
    record(model_of(LlamaConfig(**SIZES, rope_parameters=PLAIN), DRAFTED, **wide), out / "peagle-wide")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
