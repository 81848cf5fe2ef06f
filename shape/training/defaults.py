"""What training takes where the user says nothing: it follows from the target and from the data.

Each rule is a function here; what it was measured by is in `eval/results/sizes` (`docs/guides/train.md` tells it at length).

- **Length** of a conversation: 1,024 tokens, or as many as the target has positions.
- **Draft vocabulary**: the tokens that make up 99.5 % of the answers, from 2,048 to a quarter of the target's, and at
  most 32,768. Reading the output embedding is most of what a small drafter costs, in decoding and in training.
- **Width**: so that the network has a twenty-fifth of the weights that a step of the target reads. Acceptance length
  grows with about the 0.04th power of the width, so that a wider network has to cost next to nothing: the gain is eaten
  up where it costs some 4 % of a step. Never below 512 (or twice the hidden size, if that is less): small targets are
  bound by calls and not by bytes, for which the network's width is nearly free. Never above the hidden size otherwise:
  wider ones were not measured, and take much memory to train.
- **Depth**: one block, as none, one and two are accepted alike (`PredictorOptions.num_layers`).
- **Steps**: four passes over the positions of the data, but at least 600 steps of 1,024 positions as long as these are
  no more than forty passes, never fewer than 200 steps, and never more than 40,000.
"""

from bisect import bisect_right
from collections.abc import Callable

from shape.features.costs import Size, Text

_FEWEST_DRAFTED, _MOST_DRAFTED = 2048, 32_768
_DRAFTED_SHARE = 4  # of the vocabulary, at most its quarter
_VOCABULARY_UNIT = 256
_READ_SHARE = 25  # of what the target's step reads, a twenty-fifth
_NARROWEST, _WIDTH_UNIT = 512, 64
_PASSES, _MOST_PASSES = 4, 40
_SETTLING = 600 * 1024  # positions after which acceptance rises slowly, however few are distinct
_FEWEST_STEPS, _MOST_STEPS = 200, 40_000
_VALIDATIONS = 5


def draft_vocab_size(size: Size, text: Text | None) -> int | None:
    """Tokens to draft from; None, which is all, where the target has few.

    Args:
        text: of the data; without, as many as there can be.
    """
    if size.vocab_size <= _FEWEST_DRAFTED:
        return None
    most = max(_FEWEST_DRAFTED, min(size.vocab_size // _DRAFTED_SHARE, _MOST_DRAFTED))
    wanted = most if text is None or text.covering is None else text.covering
    return min(max(-(-wanted // _VOCABULARY_UNIT) * _VOCABULARY_UNIT, _FEWEST_DRAFTED), most)


def width(size: Size, parameters: Callable[[int], int]) -> int:
    """The predictor's inner width.

    Args:
        parameters: of the network at a width.
    """
    narrowest = min(_NARROWEST, 2 * size.hidden_size)
    choices = range(narrowest, max(narrowest, size.hidden_size) + 1, _WIDTH_UNIT)
    return choices[max(bisect_right(choices, size.read / _READ_SHARE, key=parameters) - 1, 0)]


def steps(positions: float, batch_size: int) -> int:
    """Optimiser steps for so many positions to learn from."""
    settling = min(_SETTLING / batch_size, max(_MOST_PASSES * positions / batch_size, _FEWEST_STEPS))
    return round(max(min(_PASSES * positions / batch_size, _MOST_STEPS), settling))


def validation_interval(steps: int) -> int:
    """Steps between validations, each of which takes about as long as some steps."""
    return max(1, steps // _VALIDATIONS)
