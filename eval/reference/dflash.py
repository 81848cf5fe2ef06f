"""Fixtures of DFlash, DFlash2 and DSpark: tiny random checkpoints of `speculators` 0.9, and what its training forward
makes of them. Runs in the environment of that package, without ours:

    python eval/reference/dflash.py tests/fixtures

Each folder has the checkpoint as speculators saves it (config.json, model.safetensors) and `reference.safetensors`:
the target's embed_tokens and lm_head, the inputs (features, states, tokens, loss_mask), the anchors that were drawn,
and, at each place of each anchor's block, logits, the target's logits, confidence and mask, and of DFlash2 its
selector's candidates and their scores; `loss` is the package's own of 0.1 KL divergence + 0.9 total variation (+ the
confidence's, or the selector's).
"""

import sys
from pathlib import Path
from typing import Any

import torch
from eagle3 import DRAFTED, VOCABULARY, method, randomise
from safetensors.torch import save_file
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash import core as dflash
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dflash2 import core as dflash2
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.dspark import core as dspark
from transformers import Qwen3Config

LENGTH, ANCHORS = 20, 3
LAYERS = [1, 3, 4]
LOSSES = '{"kl_div": 0.1, "tv": 0.9}'
# The q / k norms and a head_dim that is not hidden_size / heads tell a wrong layout from a right one.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}


# Two of three layers see three known positions.
SLIDING: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 3,
    "use_sliding_window": True,
}


def widened(model: Any, target: int) -> Any:
    """The model for a target of another width. Its forward is the same; its constructor, of 0.9, leaves the option
    target_hidden_size out, which its configuration has, and which vLLM builds so: with embeddings in the checkpoint.
    """
    if target == model.hidden_size:
        return model
    model.fc = torch.nn.Linear(len(LAYERS) * target, model.hidden_size, bias=False)
    model.verifier_norm = type(model.norm)(target, eps=SIZES["rms_norm_eps"])
    model.verifier_lm_head = torch.nn.Linear(target, model.draft_vocab_size, bias=False)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        model._keys_to_ignore_on_save.remove(name)
    return model


def config_of(kind: type, algorithm: str, tokens: int, sizes: dict[str, Any] = SIZES, **options: Any) -> Any:
    layers = Qwen3Config(**sizes)
    layers._attn_implementation = "eager"
    return kind(
        transformer_layer_config=layers,
        block_size=4,
        mask_token_id=VOCABULARY - 1,
        aux_hidden_state_layer_ids=LAYERS,
        speculators_config=method(algorithm, tokens),
        **options,
    )


def with_head(model: Any) -> torch.Tensor:
    """Gives the model weights at which all parts matter. Returns the target's output embedding, (V, H)."""
    head = torch.randn(VOCABULARY, model.verifier_lm_head.in_features) / 4
    randomise(model, DRAFTED)
    with torch.no_grad():
        rows = head[model.t2d] if model.use_draft_vocab else head
        if model.lm_head.weight.shape == rows.shape:
            model.lm_head.weight.copy_(rows)
        model.verifier_lm_head.weight.copy_(rows)
        model.verifier_norm.weight.fill_(1.0)
    return head


@torch.no_grad()
def record(model: Any, module: Any, folder: Path) -> None:
    """Save the checkpoint, and what the package's own forward computes on the way to its loss."""
    hidden = model.config.target_hidden_size or SIZES["hidden_size"]
    head = with_head(widened(model, hidden))
    features = torch.randn(1, LENGTH, hidden * len(LAYERS))
    last = torch.randn(1, LENGTH, hidden)
    tokens = torch.randint(VOCABULARY - 1, (1, LENGTH))
    loss_mask = torch.ones(1, LENGTH)
    loss_mask[:, :5] = 0
    found: dict[str, torch.Tensor] = {}
    choose, measure = dflash.select_anchors, module.compute_metrics

    def chosen(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found["anchors"], valid = choose(*arguments)
        return found["anchors"], valid

    def measured_with_selector(**given: Any) -> Any:
        found["logits"], found["targets"] = given["unary_logits"], given["targets"]
        found["candidates"], found["scores"] = given["training_candidate_ids"], given["candidate_logits"]
        found["mask"] = given["loss_mask"].bool()
        return measure(**given)

    def measured(logits: torch.Tensor, targets: torch.Tensor, *rest: Any, **options: Any) -> Any:
        found["logits"], found["targets"] = logits, targets
        if len(rest) == 3:
            found["confidence"] = rest[0]
        found["mask"] = rest[-2].bool()
        return measure(logits, targets, *rest, **options)

    dflash.select_anchors = chosen
    module.compute_metrics = measured_with_selector if module is dflash2 else measured
    options = {} if module is dflash else {"tv_loss_fn": resolve_loss_config("tv", "eager")["tv"][0]}
    losses = resolve_loss_config(LOSSES, "eager")
    documents = torch.zeros(1, LENGTH, dtype=torch.long)
    _, found["loss"], _ = model(
        features, tokens, loss_mask, last, documents, loss_config=losses, max_anchors=ANCHORS, **options
    )
    dflash.select_anchors, module.compute_metrics = choose, measure
    blocks = {name: found[name].unflatten(1, (ANCHORS, -1))[0] for name in found if found[name].ndim > 1}
    given = {"features": features, "states": model.verifier_norm(last), "tokens": tokens, "loss_mask": loss_mask}
    given |= {"embed_tokens": model.embed_tokens.weight, "lm_head": head}
    model.save_pretrained(folder)
    (folder / "config.py").unlink()  # a copy of the package's own
    save_file(
        {name: part.contiguous() for name, part in {**found, **given, **blocks}.items()},
        folder / "reference.safetensors",
    )


def main(out: Path) -> None:
    torch.manual_seed(0)
    full = config_of(DFlashSpeculatorConfig, "dflash", 3, draft_vocab_size=VOCABULARY)
    record(DFlashDraftModel(full), dflash, out / "dflash")
    drafted = config_of(DSparkSpeculatorConfig, "dspark", 4, draft_vocab_size=DRAFTED, markov_rank=6)
    record(DSparkDraftModel(drafted), dspark, out / "dspark")
    # The same networks with each other's slots.
    after = config_of(
        DSparkSpeculatorConfig, "dspark", 3, draft_vocab_size=VOCABULARY, markov_rank=6, sample_from_anchor=False
    )
    record(DSparkDraftModel(after), dspark, out / "dspark-masks")
    for name, non_causal in (("dflash-sliding", False), ("dflash-sliding-whole", True)):
        sliding = config_of(
            DFlashSpeculatorConfig,
            "dflash",
            3,
            SLIDING,
            draft_vocab_size=VOCABULARY,
            sliding_window_non_causal=non_causal,
        )
        record(DFlashDraftModel(sliding), dflash, out / name)
    gated = config_of(
        DSparkSpeculatorConfig, "dspark", 4, draft_vocab_size=DRAFTED, markov_rank=6, markov_head_type="gated"
    )
    record(DSparkDraftModel(gated), dspark, out / "dspark-gated")
    recurrent = config_of(
        DSparkSpeculatorConfig, "dspark", 4, draft_vocab_size=VOCABULARY, markov_rank=6, markov_head_type="rnn"
    )
    record(DSparkDraftModel(recurrent), dspark, out / "dspark-rnn")
    narrow = config_of(DFlashSpeculatorConfig, "dflash", 3, draft_vocab_size=VOCABULARY, target_hidden_size=24)
    record(DFlashDraftModel(narrow), dflash, out / "dflash-narrow")
    convolved = config_of(
        DFlash2SpeculatorConfig,
        "dflash2",
        3,
        draft_vocab_size=VOCABULARY,
        conv_kernel_size=2,
        conv_group_size=4,
        selector_rank=6,
        selector_top_k=5,
    )
    record(DFlash2DraftModel(convolved), dflash2, out / "dflash2")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
