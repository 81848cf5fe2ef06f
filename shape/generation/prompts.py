"""Prompts as ``generate`` gets them: tensors with padding, made, checked and taken apart."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from shape.errors import UnsupportedGeneration
from shape.target.model import Target

Context = Tensor | Sequence[int]  # token ids, (L,) or (1, L)


def side_by_side(contexts: Sequence[Context], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids (B, L), padded on the left, and their mask."""
    ids = [torch.as_tensor(context, device=device).view(-1) for context in contexts]
    masks = [torch.ones_like(each) for each in ids]
    return tuple(pad_sequence(each, batch_first=True, padding_side="left") for each in (ids, masks))  # type: ignore[return-value]


def width_of(input_ids: Tensor | None) -> int:
    if input_ids is None:
        raise UnsupportedGeneration("no prompt is given; give input_ids of at least one token")
    if not isinstance(input_ids, Tensor):
        raise UnsupportedGeneration(
            f"input_ids is of type {type(input_ids).__name__}; give a tensor of int64 ids of shape (B, L)"
        )
    if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        raise UnsupportedGeneration(
            f"input_ids has shape {tuple(input_ids.shape)} and dtype {input_ids.dtype}; give int64 ids of shape (B, L)"
        )
    if len(input_ids) == 0:
        raise UnsupportedGeneration("input_ids holds no prompt; give at least one")
    return input_ids.shape[1]


def mask_of(input_ids: Tensor, attention_mask: Tensor | None, pad: int | None, eos: tuple[int, ...]) -> Tensor:
    """(B, L) bool, where a prompt is."""
    if attention_mask is None:
        # As transformers: padding is inferred only where the pad token cannot also be an end token.
        if pad is None or pad in eos:
            return torch.ones_like(input_ids, dtype=torch.bool)
        return input_ids.ne(pad)
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != input_ids.shape:
        shape = tuple(getattr(attention_mask, "shape", ()))
        raise UnsupportedGeneration(
            f"attention_mask has shape {shape}, and input_ids {tuple(input_ids.shape)}; give one of equal shape"
        )
    return attention_mask.bool()


def prompts_of(target: Target, input_ids: Tensor, mask: Tensor, positions: Tensor | None) -> list[list[int]]:
    """Token ids per prompt without padding."""
    prompts = []
    for row, (ids, here) in enumerate(zip(input_ids.tolist(), mask.tolist(), strict=True)):
        kept = [i for i, one in enumerate(here) if one]
        if not kept:
            raise UnsupportedGeneration(f"prompt {row} is empty; give at least one token per prompt")
        if kept[-1] - kept[0] + 1 != len(kept):
            raise UnsupportedGeneration(
                f"attention_mask of prompt {row} hides tokens in the middle of the prompt; only padding on either side "
                "can be masked (and is taken to be where pad tokens are, if no mask is given)"
            )
        prompts.append([ids[i] for i in kept])
        require_tokens(target, prompts[-1], f"prompt {row} has")
    if positions is not None:
        counted, shape = mask.long().cumsum(-1) - 1, getattr(positions, "shape", (0,))
        fits = shape[-1] == mask.shape[1] and shape[-2:-1] in ((), (1,), mask.shape[:1])
        if not fits or not ((positions.to(mask.device) == counted) | ~mask).all():
            raise UnsupportedGeneration(
                "position_ids do not number each prompt's tokens from 0 on, and others are not supported by "
                "speculative decoding here; leave them out, or use the target's own generate"
            )
    return prompts


def seen_prompts(target: Target, input_ids: Tensor, prompts: list[list[int]]) -> list[list[int]]:
    """The prompts as processors and criteria see them: see ``Request``."""
    if len(prompts) > 1:
        return prompts
    seen: list[list[int]] = input_ids.tolist()
    require_tokens(target, seen[0], "the padding of prompt 0, which processors look at, has")
    return seen


def require_tokens(target: Target, tokens: Sequence[Any], label: str) -> None:
    size = target.vocab_size
    if strangers := [token for token in tokens if type(token) is not int or not 0 <= token < size]:
        raise UnsupportedGeneration(
            f"{label} token {strangers[0]!r}, and target {target.name} has tokens 0 to {size - 1}; give ids of its own "
            "tokenizer"
        )
