"""A loss over many rows whose parts need much memory: computed, and differentiated, some rows at a time.

As Liger's and Apple's fused cross-entropies do (arXiv 2410.10989, 2411.09009): a chunk's gradient is made right behind
its loss, in the forward pass, so that the logits of one chunk alone are held and none is computed twice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 2**26  # of one float32 tensor of all of a chunk's logits, of which some six are held at a time

LossOf = Callable[..., Tensor]


def rows_in_chunk(row_bytes: int) -> int:
    """How many rows of so many bytes `CHUNK_BYTES` hold, at least one."""
    return max(1, CHUNK_BYTES // max(row_bytes, 1))


def chunked_sum(
    loss_of: LossOf, rows: Sequence[Tensor | None], shared: Sequence[Tensor], size: int, scale: int = 1
) -> Tensor:
    """The sum over chunks of loss_of(chunk, *rows of the chunk), a scalar that can be differentiated once.

    Args:
        loss_of: given the slice of a chunk and its part of `rows`, returns a scalar. It is called once for every chunk,
            with gradients enabled, and reads what `shared` names from where that lies.
        rows: (R, ...) each, or None.
        shared: what `loss_of` reads beside them and gradients flow to, such as weights of an output embedding.
        size: rows in a chunk.
        scale: number of which the losses are means, so that a chunk's gradients are not too small for float16.
    """
    count = next(len(each) for each in rows if each is not None)
    chunks = [slice(first, min(first + size, count)) for first in range(0, max(count, 1), size)]
    power = 2.0 ** max(scale, 1).bit_length()  # exact: nothing but the exponent changes
    return _ChunkedSum.apply(loss_of, chunks, power, len(rows), *rows, *shared)


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss_of: LossOf, chunks: list[slice], power: float, count: int, *tensors: Any) -> Tensor:
        asked = ctx.needs_input_grad[4:]
        rows, shared = tensors[:count], tensors[count:]
        of_rows = [torch.empty_like(each) if asks else None for each, asks in zip(rows, asked, strict=False)]
        of_shared: list[Tensor | None] = [None] * len(shared)
        losses = []
        for chunk in chunks:
            with torch.enable_grad():
                own = [
                    None if each is None else each[chunk].detach().requires_grad_(asks)
                    for each, asks in zip(rows, asked, strict=False)
                ]
                # As views: hooks of a FLOP counter cannot be on leaves here.
                loss = loss_of(chunk, *(each if each is None else each.view_as(each) for each in own))
            losses.append(loss.detach())
            wanted = [each for each, asks in zip((*own, *shared), asked, strict=True) if asks]
            if not wanted:
                continue
            with torch.autocast(loss.device.type, enabled=False):  # operations have chosen their dtypes
                found = iter(
                    torch.autograd.grad(loss, wanted, loss.new_tensor(power), allow_unused=True, materialize_grads=True)
                )
            for into in of_rows:
                if into is not None:
                    into[chunk] = next(found)
            for number, gradient in zip((n for n, asks in enumerate(asked[count:]) if asks), found, strict=True):
                before = of_shared[number]
                of_shared[number] = gradient if before is None else before.add_(gradient)
        ctx.gradients, ctx.power = [*of_rows, *of_shared], power
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None  # changed in place: they are too large to copy
        factor = gradient / ctx.power
        return None, None, None, None, *(each if each is None else each.mul_(factor.to(each)) for each in gradients)
