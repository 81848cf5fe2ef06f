"""What a data set holds in a target's tokens, counted on a sample: the basis of every estimate."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from random import Random
from typing import Any

import torch

from shape.data.conversations import Conversation
from shape.data.encoding import encode_row, split_by_template, supervised_runs

_SAMPLE = 1000  # conversations whose tokens are counted
_COVERED = 0.995  # share of the answers' tokens


@dataclass(frozen=True)
class DataStatistics:
    """What a data set holds, in tokens of a target; means are per conversation.

    Attributes:
        conversations: how many.
        tokens: of one, in the mean.
        answers: share of the tokens that are the assistant's.
        turns: answers in one conversation, in the mean.
        covering: tokens of the vocabulary that make up 99.5 % of the answers, where that was counted.
    """

    conversations: int
    tokens: float
    answers: float
    turns: float
    covering: int | None = None

    @property
    def positions(self) -> int:
        """To learn from (`shape.features.positions.eligible`): all of an answer but its last token."""
        return round(self.conversations * max(self.tokens * self.answers - self.turns, 0.0))

    def turn_by_turn(self) -> "DataStatistics":
        """The same where every turn is a text of its own, after all before it: of a template by which a later prompt
        does not continue an answer (``shape.data.encoding.split_by_template``).
        """
        longer = (self.turns + 1) / 2  # in the mean over turns, in units of one turn
        return replace(
            self,
            conversations=round(self.conversations * self.turns),
            tokens=self.tokens * longer / self.turns,
            answers=self.answers / longer,
            turns=1.0,
        )

    def stored_bytes(self, before: int | None, each: int) -> float:
        """Of features: states of `each` bytes, of all positions or of answers and so many before each, and an id and a
        mask of every token.
        """
        kept = self.tokens if before is None else min(self.tokens, self.tokens * self.answers + before * self.turns)
        return self.conversations * (kept * each + 5 * self.tokens)


def count_tokens(
    conversations: Sequence[Conversation], tokenizer: Any, max_length: int, skip_bad_rows: bool = False
) -> DataStatistics:
    """Estimated on a random sample, as many data sets are ordered."""
    drawn = Random(0).sample(range(len(conversations)), min(_SAMPLE, len(conversations)))
    parts = chain.from_iterable(split_by_template(conversations[number], tokenizer, max_length) for number in drawn)
    encoded = [encode_row(part, tokenizer, max_length, skip_bad_rows) for part in parts]
    sample = [each for each in encoded if each.loss_mask.any()] or encoded  # of others nothing is learned or stored
    tokens = sum(len(each.loss_mask) for each in sample)
    answers = torch.cat([each.input_ids[each.loss_mask] for each in sample])
    often = answers.bincount().sort(descending=True).values.cumsum(0)
    return DataStatistics(
        round(len(conversations) * len(sample) / len(drawn)),
        tokens / len(sample),
        len(answers) / max(tokens, 1),
        sum(len(supervised_runs(each.loss_mask)) for each in sample) / len(sample),
        int((often < _COVERED * len(answers)).sum()) + 1,
    )
