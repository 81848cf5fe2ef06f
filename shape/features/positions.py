"""Which positions of stored texts are learned from, and whose states that needs.

All functions take the masks of conversations laid end to end:

    loss_mask  (P,) bool
    offsets    (conversations + 1,) int64, first position of each conversation, and the end
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def eligible(loss_mask: Tensor, offsets: Tensor) -> Tensor:
    """Positions that can be the root of an example, (P,) bool: x_t and x_{t+1} are supervised, and t >= 1."""
    first = torch.zeros(len(loss_mask) + 1, dtype=torch.bool)
    first[offsets] = True
    following = torch.cat([loss_mask[1:], loss_mask.new_zeros(1)])
    return loss_mask & following & ~first[:-1] & ~first[1:]


def followers(loss_mask: Tensor, offsets: Tensor) -> Tensor:
    """How many supervised positions follow each directly, without a gap: (P,) int64."""
    positions = torch.arange(len(loss_mask) + 1)
    stops = torch.where(F.pad(loss_mask, (0, 1)), len(loss_mask), positions)
    stops[offsets] = offsets
    return stops.flip(0).cummin(0).values.flip(0)[1:] - positions[1:]


def stored_positions(loss_mask: Tensor, offsets: Tensor, before: int | None) -> Tensor:
    """Positions whose states are stored, (P,) bool: those of answers and `before` ahead of each, which is all that a
    predictor with a window of so many states reads; None keeps all.
    """
    if before is None:
        return torch.ones_like(loss_mask)
    positions = torch.arange(len(loss_mask))
    following = torch.where(loss_mask, positions, 1 << 62).flip(0).cummin(0).values.flip(0)  # the next of an answer
    end = offsets[torch.searchsorted(offsets, positions, right=True).clamp(max=len(offsets) - 1)]
    return (following - positions <= before) & (following < end)
