"""Which architectures can be verified, and how: tiny random models of many families, decoded and compared.

    python -m eval.architectures                                  # the table, on screen
    python -m eval.architectures --output eval/results/architectures.md

A model is decoded in float64 with a drafter made to provoke errors, and every token is compared with transformers'
own greedy generation. Weights are random and wide, so that attention matters and errors show.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig
from transformers import __version__ as transformers_version
from transformers.utils import logging

from eval import commands, families
from eval.families import WINDOW
from shape.drafters import AdversaryDrafter, OracleDrafter
from shape.errors import UnsupportedTarget
from shape.evaluation.environment import Environment
from shape.evaluation.markdown import DASH, markdown, share
from shape.generation.decoder import ShapeDecoder
from shape.generation.engine import ShapeOutput

_HEADING = """\
# Which architectures can be verified, and how

Tiny random models of each family in float64, transformers {version}, decoded greedily in a batch of unequal prompts,
with random trees and with mostly right chains; the last column counts answers that are token for token those of
`model.generate`. A "chain" is decoded row by row without branches. Windows and chunks are of {window} tokens and rotary
tables change behind {boundary}, which is more than the probe's text and less than the answers'. The first families are
configured by hand; those without a remark are all others that transformers has, in their default configuration with
small numbers. Of {families} families {equal} are shown equal, {refused} are refused and {missing} are not built, for
the reason given. Made by
`python -m eval.architectures --output eval/results/architectures.md`; a test checks it.
"""

_BASE = {"vocab_size": 64, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3}
_WIDE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = _BASE | _WIDE | {"num_key_value_heads": 2, "max_position_embeddings": 256}
_FALCON = _BASE | _WIDE | {"new_decoder_architecture": False}
_OLD = _BASE | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip

_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
_STATE_SPACE = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
_DELTA = {
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, **_MIXED,
}  # fmt: skip

_BOUNDARY = 24
_LONG = {
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": _BOUNDARY,
        "short_factor": [1.0] * 4, "long_factor": [4.0, 5.0, 6.0, 7.0],
    }
}  # fmt: skip

# Family: (what is special about it, model type, configuration).
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("rotary, grouped queries", "llama", _LLAMA),
    "llama, tied head": ("one matrix for embedding and head", "llama", _LLAMA | {"tie_word_embeddings": True}),
    "qwen2": ("biases in attention", "qwen2", _LLAMA),
    "qwen3": ("normed queries and keys", "qwen3", _LLAMA | {"head_dim": 8}),
    "qwen3_moe": (
        "mixture of experts", "qwen3_moe",
        _LLAMA | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "mistral": ("full attention", "mistral", _LLAMA | {"sliding_window": None}),
    "mistral, sliding": ("sliding window in every layer", "mistral", _LLAMA | {"sliding_window": WINDOW}),
    "mixtral": ("mixture of experts", "mixtral", _LLAMA | _EXPERTS),
    "llama4": (
        "three of four layers see their own chunk of the text", "llama4_text",
        _LLAMA | _EXPERTS | {"head_dim": 8, "intermediate_size_mlp": 48, "num_hidden_layers": 4,
            "attention_chunk_size": WINDOW,
        },
    ),
    "gemma": ("scaled embedding", "gemma", _LLAMA | {"head_dim": 8}),
    "gemma2": (
        "sliding and full layers, soft-capped logits", "gemma2",
        _LLAMA | {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0},
    ),
    "gemma3": ("sliding and full layers", "gemma3_text", _LLAMA | {"head_dim": 8, "sliding_window": WINDOW}),
    "phi": ("partial rotary, parallel blocks", "phi", _LLAMA),
    "phi3": ("packed projections", "phi3", _LLAMA),
    "phi3, LongRoPE": (
        "another rotary table from 25 tokens on, for which the cache is computed anew", "phi3",
        _LLAMA | _LONG | {"original_max_position_embeddings": _BOUNDARY},
    ),
    "phimoe, LongRoPE": (
        "another rotary scale from 25 tokens on, for which the cache is computed anew; mixture of experts", "phimoe",
        _LLAMA | _EXPERTS | {
            "rope_parameters": _LONG["rope_parameters"] | {"short_mscale": 1.0, "long_mscale": 1.3},
            "original_max_position_embeddings": _BOUNDARY,
        },
    ),
    "llama, LongRoPE": ("another rotary table from 25 tokens on", "llama", _LLAMA | _LONG),
    "minicpm3, LongRoPE": (
        "latent attention, another rotary table from 25 tokens on", "minicpm3",
        _LLAMA | _LATENT | _LONG,
    ),
    "olmo2": ("norms behind the blocks", "olmo2", _LLAMA),
    "olmoe": ("mixture of experts", "olmoe", _LLAMA | {"num_experts": 4, "num_experts_per_tok": 2}),
    "smollm3": ("layers without positions", "smollm3", _LLAMA),
    "granite": ("scaled logits and residuals", "granite", _LLAMA | {"logits_scaling": 4.0, "residual_multiplier": 0.7}),
    "cohere": ("scaled logits, parallel blocks", "cohere", _LLAMA | {"logit_scale": 0.25}),
    "cohere2": ("sliding and full layers, scaled logits", "cohere2", _LLAMA | {"sliding_window": WINDOW}),
    "starcoder2": ("sliding window, biases", "starcoder2", _LLAMA | {"sliding_window": WINDOW}),
    "stablelm": ("partial rotary, layer norm", "stablelm", _LLAMA),
    "glm": ("partial interleaved rotary", "glm", _LLAMA | {"head_dim": 8}),
    "nemotron": ("squared ReLU", "nemotron", _LLAMA),
    "deepseek_v3": (
        "latent attention, mixture of experts", "deepseek_v3",
        _LLAMA | _LATENT | {
            "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
            "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
        },
    ),
    "gpt_oss": (
        "attention sinks, sliding and full layers, mixture of experts", "gpt_oss",
        _LLAMA | _EXPERTS | {"head_dim": 8, "sliding_window": WINDOW},
    ),
    "gpt2": ("learned positions", "gpt2", _OLD),
    "gptj": ("interleaved rotary, parallel blocks", "gptj", _OLD | {"rotary_dim": 4}),
    "codegen": ("interleaved rotary, parallel blocks", "codegen", _OLD | {"rotary_dim": 4}),
    "gpt_bigcode": ("learned positions, one key-value head", "gpt_bigcode", _OLD),
    "gpt_neox": ("partial rotary, parallel blocks", "gpt_neox", _BASE | _WIDE | {"max_position_embeddings": 256}),
    "gpt_neo": (
        "local attention", "gpt_neo",
        _BASE | {
            "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": WINDOW, "max_position_embeddings": 256,
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    "opt": (
        "learned positions, offset by two", "opt",
        _BASE | {
            "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "init_std": 0.3,
            "max_position_embeddings": 256, "word_embed_proj_dim": 32,
        },
    ),
    "falcon": ("rotary, parallel blocks", "falcon", _FALCON | {"alibi": False}),
    "falcon, ALiBi": ("linear biases", "falcon", _FALCON | {"alibi": True}),
    "bloom": ("linear biases", "bloom", _BASE | {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "mpt": ("linear biases", "mpt", _BASE | {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256}),
    "qwen3_next": (
        "linear attention, mixture of experts", "qwen3_next",
        _LLAMA | _DELTA | {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "qwen3_5": ("linear attention", "qwen3_5_text", _LLAMA | _DELTA),
    "kimi_linear": (
        "linear and latent attention, mixture of experts", "kimi_linear",
        _LLAMA | _LATENT | _MIXED | {
            "q_lora_rank": None, "linear_head_dim": 8, "linear_num_heads": 2, "num_experts": 4,
            "num_experts_per_token": 2, "moe_intermediate_size": 24, "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "lfm2": ("short convolutions", "lfm2", _LLAMA | {"layer_types": ["conv", "full_attention"]}),
    "granitemoehybrid": (
        "state space, mixture of experts", "granitemoehybrid",
        _LLAMA | _EXPERTS | _STATE_SPACE | _MIXED | {"shared_intermediate_size": 24},
    ),
    "bamba": ("state space", "bamba", _LLAMA | _STATE_SPACE | {"attn_layer_indices": [1]}),
    "falcon_h1": ("state space beside attention", "falcon_h1", _LLAMA | _STATE_SPACE | {"mamba_d_ssm": 64}),
    "jamba": (
        "state space, mixture of experts", "jamba",
        _LLAMA | {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    ),
    "mamba": ("state space", "mamba", _BASE | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "recurrent_gemma": (
        "recurrent blocks", "recurrent_gemma",
        _LLAMA | {"lru_width": 32, "attention_window_size": WINDOW, "block_types": ["recurrent", "attention"]},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """How a family can be verified.

    Attributes:
        mode: "tree", "chain", "refused" or "not built".
        reason: why not "tree".
        answers: greedy answers compared with transformers' own.
        equal: of these, token for token the same.
        drafts: draft tokens accepted on the way, without which equality would mean little.
    """

    family: str
    special: str
    mode: str
    reason: str
    answers: int = 0
    equal: int = 0
    drafts: int = 0


def others() -> list[str]:
    """Model types that are no family above, by name or by type."""
    known = {*FAMILIES, *(kind for _, kind, _ in FAMILIES.values())}
    return [kind for kind in families.kinds() if kind not in known]


def build(family: str) -> Any:
    """A tiny random causal LM, the same at every call, in float64; of ``others`` see ``families.build``."""
    if family not in FAMILIES:
        return families.build(family)
    _, kind, values = FAMILIES[family]
    return families.random_model(AutoConfig.for_model(kind, **values))


def examine(family: str, lengths: Sequence[int] = (5, 28, 17), new_tokens: int = 24) -> Verdict:
    """Probe a family, decode prompts of these lengths in one batch with random trees and with mostly right chains,
    and compare every token with transformers' own answers, prompt by prompt.
    """
    special, *_ = FAMILIES.get(family, (DASH,))
    try:
        model = build(family)
    except Exception as error:  # configurations have reasons of their own
        return Verdict(family, special, "not built", _one_line(f"{type(error).__name__}: {error}"))
    try:
        decoder = ShapeDecoder(model)
    except UnsupportedTarget as error:
        reason = str(error).partition(type(model).__name__)[2].strip() or str(error)
        return Verdict(family, special, "refused", _one_line(reason))
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 64, (length,), generator=generator) for length in lengths]
    expected = [
        model.generate(prompt[None], max_new_tokens=new_tokens, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    longest = max(lengths)
    ids = torch.stack([torch.nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    mask = torch.stack([(torch.arange(longest) >= longest - len(prompt)).long() for prompt in prompts])
    texts = [prompt.tolist() + text for prompt, text in zip(prompts, expected, strict=True)]
    equal = drafts = 0
    for drafter in (AdversaryDrafter(nodes=7, seed=1), OracleDrafter(texts, error_rate=0.3, depth=5)):
        out = ShapeDecoder(decoder.target, drafter, fall_back=False).generate(
            ids, mask, max_new_tokens=new_tokens, return_dict_in_generate=True
        )
        assert isinstance(out, ShapeOutput)
        found = [row[longest:].tolist()[: len(text)] for row, text in zip(out.sequences, expected, strict=True)]
        equal += sum(one == other for one, other in zip(found, expected, strict=True))
        drafts += out.stats.accepted
    support = decoder.support
    return Verdict(family, special, support.mode, support.reason, 2 * len(expected), equal, drafts)


def _one_line(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def table(verdicts: Iterable[Verdict]) -> str:
    """The verdicts as Markdown."""
    rows = [
        [v.family, v.special, v.mode, v.reason or DASH, share(v.equal if v.answers else None, v.answers)]
        for v in verdicts
    ]
    head = ["family", "special", "verified as", "why not as a tree", "answers equal to transformers"]
    return markdown(head, rows)


@dataclass
class ArchitecturesOptions:
    """Where to write.

    Args:
        output: Markdown file to write the table to.
    """

    output: str | None = None


def run(options: ArchitecturesOptions) -> None:
    """Examine every family that transformers can build small."""
    logging.set_verbosity_error()
    verdicts = [examine(family) for family in tqdm([*FAMILIES, *others()], "architectures")]
    found, modes = table(verdicts), Counter(verdict.mode for verdict in verdicts)
    heading = _HEADING.format(
        version=transformers_version,
        window=WINDOW,
        boundary=_BOUNDARY,
        families=len(verdicts),
        equal=sum(verdict.answers > 0 and verdict.equal == verdict.answers for verdict in verdicts),
        refused=modes["refused"],
        missing=modes["not built"],
    )
    print(found)
    if options.output:
        place = Environment.capture(torch.device("cpu")).line()
        Path(options.output).write_text(f"{heading}\n{found}\n\n{place}\n", encoding="utf-8")


main = commands.program(run, ArchitecturesOptions)


if __name__ == "__main__":
    main()
