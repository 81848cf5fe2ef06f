"""A sequence as it grows: its prompt, the tokens that were emitted, and what ends it."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import StoppingCriteriaList


class StopCriteria:
    """A sequence's reasons to stop beside length and end tokens, asked after every token.

    They are shown all tokens so far, as a view of one tensor that grows in place: what was shown before never changes.

    Args:
        criteria: transformers', each of which can stop the sequence.
        text: (1, L) int64, the prompt as they see it, on the device on which they are to compute.
    """

    def __init__(self, criteria: StoppingCriteriaList, text: Tensor) -> None:
        self._criteria, self._text, self._length = criteria, text, text.shape[1]

    def until_met(self, tokens: list[int]) -> tuple[int, bool]:
        """How many of some new tokens there are up to a stop, and whether there is one."""
        start, end = self._length, self._length + len(tokens)
        if end > self._text.shape[1]:
            grown = self._text.new_empty(1, 2 * end)
            grown[:, :start] = self._text[:, :start]
            self._text = grown
        self._text[0, start:end] = torch.tensor(tokens, device=self._text.device)
        self._length = end
        for count in range(1, len(tokens) + 1):
            if self._criteria(self._text[:, : start + count], None).all():  # type: ignore[arg-type]  # no scores are kept
                return count, True
        return len(tokens), False


@dataclass(eq=False)
class SequenceState:
    """One sequence of a batch.

    Attributes:
        index: its number in the batch that ``generate`` was given.
        prompt: its tokens, without padding.
        max_new_tokens: at least 1.
        new: emitted tokens, an end token included.
        finished: stopped by an end token, by length or by a criterion.
    """

    index: int
    prompt: list[int]
    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    criteria: StopCriteria | None = None
    new: list[int] = field(default_factory=list)
    finished: bool = False

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.new)

    def extend(self, tokens: list[int]) -> int:
        """Emit tokens up to a stop; the number that was emitted."""
        count = min(len(tokens), self.max_new_tokens - len(self.new))
        count = next((at for at, token in enumerate(tokens[:count], 1) if token in self.eos_token_ids), count)
        met = False
        if self.criteria is not None:
            count, met = self.criteria.until_met(tokens[:count])
        self.new += tokens[:count]
        self.finished = met or len(self.new) == self.max_new_tokens or self.new[-1] in self.eos_token_ids
        return count
