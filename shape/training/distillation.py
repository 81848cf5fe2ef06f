"""A small causal LM of the target's tokens, distilled from the target's own distributions, to draft for it."""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from shape.drafters import Drafter, ModelDrafter
from shape.networks import sizing
from shape.networks.teacher_forcing import examples
from shape.target.model import Target
from shape.training.batches import Batch
from shape.training.chunks import chunked_sum, rows_in_chunk
from shape.training.losses import step_sum, supervised
from shape.training.module import DrafterModule


def draft_model(target: Target, width: int | None, layers: int, heads: int | None) -> LlamaForCausalLM:
    """An untrained Llama with the target's vocabulary and positions, its embedding tied: most of its parameters.

    Sizes are those of `shape.networks.sizing.draft_model_width_and_heads`, which raises for what cannot be made.
    """
    width, heads = sizing.draft_model_width_and_heads(target.hidden_size, width, layers, heads)
    eos = target.eos_token_ids
    config = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=target.max_positions or 2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos or None,
        pad_token_id=getattr(target.tokenizer, "pad_token_id", None),
    )
    return LlamaForCausalLM(config)


class DistillModule(DrafterModule):
    """The small model learns the target's distribution of the next token on the target's own answers.

    As DistillSpec (arXiv 2310.08461) with text of the target alone. The target's head makes the distribution of the
    states that features hold.
    """

    def __init__(self, predictor: PreTrainedModel, *arguments: Any, **options: Any) -> None:
        super().__init__(predictor, *arguments, **options)
        if self.options.gradient_checkpointing:
            predictor.gradient_checkpointing_enable()

    def drafter(self, network: PreTrainedModel) -> Drafter:
        return ModelDrafter(Target(network, self.target.tokenizer))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        texts = self._texts(batch)
        cut = examples(texts, 1, 1, self.target.hidden_size)
        kept = supervised(cut.mask)
        states = self.predictor.base_model(input_ids=texts.input_ids).last_hidden_state
        batch_numbers = torch.arange(len(states), device=states.device)[:, None]
        own = states[batch_numbers, texts.roots].unsqueeze(-2)[kept]
        head, target = self.predictor.get_output_embeddings(), self.target
        true, steps, counts = cut.states[kept], kept[-1], batch.counts(1)
        whole = step_sum(self.losses, counts)
        output = target.output_rows() if self.losses.sinkhorn > 0 else None
        sums: dict[str, Tensor] = {}

        def loss_of(chunk: slice, own: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = target.logits(true[chunk].to(target.dtype))
            logits = head(own)
            loss, parts = self._weighted(self.losses, own, own, logits, wanted, steps[chunk], output, whole)
            agreement = (logits.argmax(-1) == wanted.argmax(-1)).sum() / max(int(counts), 1)
            for name, part in {**parts, "agreement": agreement}.items():
                sums[name] = sums.get(name, 0.0) + part.detach()
            return loss

        loss = chunked_sum(loss_of, [own], [head.weight], rows_in_chunk(4 * target.vocab_size), int(counts))
        return self._log_and_scale(batch, loss, sums)
