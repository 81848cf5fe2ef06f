"""Random Llamas, and others, with the widths of models that people have: costs do not depend on what was learned."""

from dataclasses import asdict, dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

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


# SmolLM-135M; Qwen2.5-0.5B with Llama's layers; Llama-3.2-1B
SIZES = {
    "135M": Widths(576, 1536, 9, 3, 30, 49_152, tie_word_embeddings=True),
    "0.5B": Widths(896, 4864, 14, 2, 24, 151_936, tie_word_embeddings=True),
    "1.2B": Widths(2048, 8192, 32, 8, 16, 128_256, tie_word_embeddings=True),
}


def random_llama(widths: Widths, dtype: torch.dtype, device: torch.device | str = "cpu", **options: bool) -> Target:
    """See ``random_target``, which has these options."""
    config = LlamaConfig(**asdict(widths), eos_token_id=None, pad_token_id=0)
    return random_target(config, dtype, device, **options)


def random_target(
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    prepacked: bool = False,
    repeating: bool = False,
) -> Target:
    """Of any family, made where it will run, the same at every call.

    Args:
        repeating: its likeliest next token is its last one, by a margin that no kernel's rounding reaches. Of other
            random models the choices are near-ties, and an oracle's drafts wrong as soon as two kernels differ.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if repeating:  # the residual stream is little more than the embedding, and so is the head
        embedding, head = (one.weight.data for one in (model.get_input_embeddings(), model.get_output_embeddings()))
        head.copy_(embedding.normal_(std=10))
    return Target.load(model, prepacked=prepacked)
