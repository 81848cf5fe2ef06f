"""The size of a network: how many parameters it has, and the default sizes that follow from a target and its data.

What each rule was measured by is in `eval/results/sizes`; docs/guides/train.md explains it.

- **Draft vocabulary**: the tokens that make up 99.5 % of the answers, from 2,048 to a quarter of the target's, and at
  most 32,768. Reading the output embedding is most of what a small drafter costs, in decoding and in training.
- **Layers that are read**, of eagle: those of the published checkpoints, [2, L / 2, L - 3].
- **Width**: so that the network has a twenty-fifth of the weights that a step of the target reads. Acceptance length
  grows with about the 0.04th power of the width, which is lost again where the network costs some 4 % of a step. Never
  below 512 (or twice the hidden size, if that is less): beside small targets calls cost as much as bytes. Never above
  the hidden size otherwise: wider ones were not measured, and take much memory to train.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from shape.data.statistics import DataStatistics
from shape.errors import ConfigError
from shape.networks.config import ShapeConfig
from shape.networks.registry import PREDICTORS
from shape.target.size import Size

_SMALLEST_VOCABULARY, _LARGEST_VOCABULARY = 2048, 32_768
_VOCABULARY_SHARE = 4  # of the vocabulary, at most its quarter
_VOCABULARY_UNIT = 256
_READ_SHARE = 25  # of what the target's step reads, a twenty-fifth
_NARROWEST, _WIDTH_UNIT = 512, 64
_HEAD_SIZE = 32  # of a draft model


def parameters(config: ShapeConfig) -> int:
    """Trainable parameters of a network of this configuration."""
    with torch.device("meta"):
        network = PREDICTORS[config.kind](config)
    return network.num_parameters()


def draft_vocab_size(vocab_size: int, text: DataStatistics | None) -> int | None:
    """Tokens to draft from; None, which is all, where the target has few.

    Args:
        vocab_size: of the target.
        text: of the data; without, as many as there can be.
    """
    if vocab_size <= _SMALLEST_VOCABULARY:
        return None
    most = max(_SMALLEST_VOCABULARY, min(vocab_size // _VOCABULARY_SHARE, _LARGEST_VOCABULARY))
    wanted = most if text is None or text.covering is None else text.covering
    return min(max(-(-wanted // _VOCABULARY_UNIT) * _VOCABULARY_UNIT, _SMALLEST_VOCABULARY), most)


def feature_layers(num_layers: int) -> list[int]:
    """A low, a middle and a high layer, as SafeAILab's, SpecForge's and vLLM's EAGLE-3 read; of a target too small for
    these, the first, the middle and the one before the last.
    """
    published = [2, num_layers // 2, num_layers - 3]
    if num_layers > 6:
        return published
    return sorted({layer for layer in (1, num_layers // 2, num_layers - 1) if 0 < layer < num_layers}) or [-1]


def draft_vocabulary(texts: Iterable[tuple[Tensor, Tensor]], size: int, vocab_size: int) -> Tensor:
    """The tokens worth drafting, (size,) int64 in rising order: the most frequent among supervised ones.

    Args:
        texts: (input_ids, loss_mask) of each conversation, (T,) both.
        size: how many to keep; of equally frequent ones, those of lower number.

    Raises:
        ConfigError: none, or more than the target has.
    """
    if not 0 < size <= vocab_size:
        raise ConfigError(f"draft_vocab_size is {size}, and the target has {vocab_size} tokens; give 1 to {vocab_size}")
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for input_ids, loss_mask in texts:
        counts += input_ids[loss_mask].long().bincount(minlength=vocab_size)
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def draft_model_width_and_heads(hidden_size: int, width: int | None, layers: int, heads: int | None) -> tuple[int, int]:
    """Width and attention heads of a draft model for a target of this hidden size.

    Args:
        width: None is a third of the target's, in whole heads.
        heads: None makes them 32 wide.

    Raises:
        ConfigError: heads that do not divide the width into even parts, or no layer.
    """
    width = width or max(hidden_size // 3 // _HEAD_SIZE, 1) * _HEAD_SIZE
    heads = heads or max(width // _HEAD_SIZE, 1)
    if width % heads or width // heads % 2 or layers < 1:
        raise ConfigError(
            f"a draft model of width {width} with {heads} heads and {layers} layers cannot be made; give a width that "
            "the heads divide into even parts, and at least one layer"
        )
    return width, heads


def width(size: Size, parameters: Callable[[int], int]) -> int:
    """The predictor's inner width.

    Args:
        parameters: of the network at a width.
    """
    narrowest = min(_NARROWEST, 2 * size.hidden_size)
    choices = range(narrowest, max(narrowest, size.hidden_size) + 1, _WIDTH_UNIT)
    return choices[max(bisect_right(choices, size.read / _READ_SHARE, key=parameters) - 1, 0)]
