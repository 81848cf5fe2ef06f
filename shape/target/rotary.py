"""Where a target changes its rotary table: LongRoPE has one for short texts and one for long ones.

transformers chooses by the last position of a forward and applies the choice to all of the forward's tokens, so that
states depend on how a text is cut into forwards. What ``model.generate`` does is then the only truth: the whole prompt
in one forward, and every later token in its own.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from shape.errors import UnsupportedGeneration
from shape.target.inference import relative_error
from shape.target.support import cache_name

if TYPE_CHECKING:
    from shape.target.model import Target

_TABLE = 1024  # positions of a table, at first
_SEEN = 8  # tokens whose states tell the tables apart
_LEAST = 1e-6  # relative change of states that counts, or the dtype's rounding where that is more


@dataclass(frozen=True)
class Switch:
    """A change of the rotary table.

    Attributes:
        positions: forwards that reach this many positions use the first table, forwards that go further the second.
        recomputes: whether the model lets ``generate`` compute its cache anew behind the switch, as Phi-3 does; else
            tokens keep the table of their own forward.
        unserved: why calls that cross the switch are refused; empty where they are served.
        steady: whether the second table is the same for all forwards; else every call that needs it is refused.
    """

    positions: int
    recomputes: bool = False
    unserved: str = ""
    steady: bool = True

    def crosses(self, length: int, new_tokens: int) -> bool:
        """Whether a prompt's answer needs both tables. The last token does not go through the target."""
        return length <= self.positions < length + new_tokens - 1

    def groups(self, lengths: Sequence[int], new_tokens: int) -> list[list[int]]:
        """Rows that are decoded together, since a forward has one table for all: short ones, long ones, and each that
        crosses by itself.
        """
        rows = range(len(lengths))
        crossing = [row for row in rows if self.crosses(lengths[row], new_tokens)]
        short, long = (
            [row for row in rows if row not in crossing and (lengths[row] > self.positions) == beyond]
            for beyond in (False, True)
        )
        return [group for group in (short, long, *([row] for row in crossing)) if group]

    def check(self, target: "Target", lengths: Sequence[int], new_tokens: int) -> None:
        """Raises UnsupportedGeneration where a call needs a table that is not served."""
        most = max(lengths)
        crosses = any(self.crosses(length, new_tokens) for length in lengths)
        if self.unserved and (crosses or (not self.steady and most > self.positions)):
            raise UnsupportedGeneration(
                f"a prompt of {most} tokens and max_new_tokens {new_tokens} go past {self.positions} tokens, "
                f"where target {target.name} changes its rotary table and {self.unserved}; "
                + ("keep to one side of it" if self.steady else "give less")
            )


@torch.no_grad()
def find_switch(target: "Target") -> Switch | None:
    """Found out by experiment, not by names: do the states of a text's first tokens change with the position of a
    later token, which they cannot see?
    """
    last = target.max_positions
    if last is None or last <= _SEEN + 1:
        return None
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (1, _SEEN + 1), generator=generator)
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % target.vocab_size

    def seen(reach: int, ids: Tensor = ids) -> Tensor:
        positions = torch.arange(_SEEN + 1)[None]
        positions[0, -1] = reach - 1
        states = target.hidden(ids.to(target.device), position_ids=positions.to(target.device))
        return states[:, :_SEEN]

    near = seen(_SEEN + 1)
    # What the last token is may show too, by rounding: experts share their products with it.
    least = max(_LEAST, torch.finfo(target.dtype).eps, 2 * relative_error(seen(_SEEN + 1, other), near))
    far = seen(last)
    if relative_error(far, near) <= least:
        return None
    first, second = _SEEN + 1, last
    while second - first > 1:
        middle = (first + second) // 2
        if relative_error(seen(middle), near) <= least:
            first = middle
        else:
            second = middle
    if relative_error(seen(second), far) > least:
        return Switch(first, unserved="goes on changing it with every token", steady=False)
    return _switch_at(target, first)


def _switch_at(target: "Target", positions: int) -> Switch:
    """What the model's own preparation of a step makes of a cache as long as the first table reaches."""
    model, size = target.model, positions + 1
    cache = DynamicCache(config=model.config)
    for layer in range(len(cache.layers)):
        held = torch.zeros(1, 1, positions, 1, device=target.device)
        cache.update(held, held, layer)
    ids = torch.zeros(1, size, dtype=torch.long, device=target.device)
    name = cache_name(model.__class__.prepare_inputs_for_generation)  # which may be a proxy
    given = model.prepare_inputs_for_generation(
        ids, next_sequence_length=1, attention_mask=torch.ones_like(ids), use_cache=True, **{name: cache}
    )
    if given.get(name) is not None:
        return Switch(positions)
    if given["input_ids"].shape[1] == size:
        return Switch(positions, recomputes=True)
    return Switch(positions, unserved="this version of transformers forgets the text there")


class RotaryTable:
    """Cosines and sines of positions from 0 on, made once: transformers' own module takes as long as a small target's
    layer.

    Args:
        make: (P,) int64 positions -> (P, D) cosines and (P, D) sines, whatever the length of the text.
    """

    def __init__(self, make: Callable[[Tensor], Iterable[Tensor]]) -> None:
        self._make = make
        self._held: tuple[Tensor, Tensor] = torch.empty(0, 0), torch.empty(0, 0)

    def until(self, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines (P, D) of at least so many positions."""
        held = self._held  # another thread may put a shorter table in its place
        if len(held[0]) < end:
            with torch.inference_mode(False), torch.no_grad():  # they outlive the mode in which they are made
                cosines, sines = self._make(torch.arange(max(end + end // 4, _TABLE)))
                held = self._held = cosines.contiguous(), sines.contiguous()
        return held
