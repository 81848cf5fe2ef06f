"""Random Llamas with the widths of models that people have: costs do not depend on what was learned."""

from dataclasses import asdict, dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from shape.target.model import Target


@dataclass(frozen=True)
class Widths:
    """In the words of transformers' LlamaConfig."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    vocab_size: int = 32_000
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False


def random_llama(
    widths: Widths, dtype: torch.dtype, device: torch.device | str = "cpu", prepacked: bool = False
) -> Target:
    """Made where it will run, the same at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(**asdict(widths), eos_token_id=None, pad_token_id=0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return Target.load(model, prepacked=prepacked)
