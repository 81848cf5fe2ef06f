"""Tiny random models of whatever causal LM transformers has: its own default configuration with small numbers."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_MOST_PARAMETERS = 10_000_000
WINDOW = 20  # wider than the text of a probe

# What architectures call their sizes. Each takes those that it has.
_SIZES: dict[Any, str] = {
    64: "vocab_size type_vocab_size vocab_size_per_layer_input shape_vocab_size pronunciation_vocab_size",
    32: "hidden_size n_embd d_model dim emb_dim embedding_size word_embed_proj_dim lru_width input_embedding_size "
    "output_embedding_size",
    48: "intermediate_size n_inner ffn_dim encoder_ffn_dim decoder_ffn_dim feed_forward_size dim_ff dff "
    "ffn_hidden_size shared_intermediate_size intermediate_size_mlp",
    24: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size",
    4: "num_hidden_layers n_layer num_layers decoder_layers encoder_layers n_layers num_decoder_layers "
    "num_encoder_layers num_attention_heads n_head num_heads n_heads decoder_attention_heads encoder_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts num_routed_experts n_experts index_n_heads",
    2: "num_key_value_heads linear_num_key_heads linear_num_value_heads num_experts_per_tok moe_topk moe_k "
    "num_experts_per_token top_k_experts moe_top_k experts_per_token num_selected_experts num_kv_shared_layers "
    "eos_token_id",
    8: "head_dim d_head d_kv dim_head linear_key_head_dim linear_value_head_dim qk_nope_head_dim qk_rope_head_dim "
    "v_head_dim index_head_dim state_size mamba_d_state ssm_state_size attention_head_dim swa_head_dim "
    "global_head_dim mamba_d_head mamba_head_dim time_step_rank hidden_size_per_layer_input mamba_n_heads",
    256: "max_position_embeddings n_positions max_seq_len max_sequence_length max_target_positions",
    16: "q_lora_rank kv_lora_rank o_lora_rank",
    1: "n_group topk_group n_shared_experts num_shared_experts first_k_dense_replace num_dense_layers n_groups "
    "bos_token_id",
    0: "pad_token_id",
    0.3: "initializer_range init_std",
    WINDOW: "sliding_window window_size attention_chunk_size local_attention attention_window_size",
}
_VALUES = {name: value for value, names in _SIZES.items() for name in names.split()} | {"is_decoder": True}
# Where the parts have to agree in a way of their own.
_OWN: dict[str, dict[str, Any]] = {
    "zaya": {"num_experts_per_tok": 1},
    "mamba2": {"num_heads": 8},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    # Whose last two layers read the keys of the first two, one of each kind.
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4_unified_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
}


def kinds() -> list[str]:
    """Model types of all causal LMs that transformers has."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(kind: str) -> PreTrainedModel:
    """A family's tiny random model.

    Raises:
        ValueError: it has other inputs than text, or parts that no size here makes small.
    """
    config = shrunken(kind)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} million parameters remain")
    model = random_model(config)
    model.generation_config.decoder_start_token_id = None  # of what it is a part of
    return model


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """The same at every call, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # The fast kernels for mixtures of experts know no float64.
        return AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()


def shrunken(kind: str) -> PretrainedConfig:
    """The family's default configuration with small numbers."""
    default = CONFIG_MAPPING[kind]()
    text = default.get_text_config()
    if text is not default:
        raise ValueError(f"text is one of several inputs; its text model is {text.model_type}")
    there = (default.to_dict().keys() | vars(default).keys()) - type(default).attribute_map.keys()
    values = {name: value for name, value in _VALUES.items() if name in there}
    if "kv_lora_rank" in there:  # latent attention has as many key heads
        values["num_key_value_heads"] = values["num_attention_heads"]
    return CONFIG_MAPPING[kind](**values | _OWN.get(kind, {}))
