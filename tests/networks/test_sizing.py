"""How large networks are, and the default sizes that follow from target and data."""

import pytest
import torch

from shape.data.statistics import DataStatistics
from shape.errors import ConfigError
from shape.networks import sizing
from shape.networks.config import ShapeConfig
from shape.networks.registry import PREDICTORS
from shape.networks.sizing import draft_vocabulary, parameters
from shape.target.size import Size


def test_draft_vocabulary_holds_the_most_frequent_supervised_tokens():
    texts = [
        (torch.tensor([5, 5, 5, 1, 2, 2, 7]), torch.tensor([False, False, False, True, True, True, True])),
        (torch.tensor([7, 3, 2]), torch.tensor([True, True, True])),
    ]
    assert draft_vocabulary(texts, 2, vocab_size=9).tolist() == [2, 7]
    assert draft_vocabulary(texts, 6, vocab_size=9).tolist() == [0, 1, 2, 3, 4, 7]  # unseen ones by number
    with pytest.raises(ConfigError, match="draft_vocab_size is 10, and the target has 9"):
        draft_vocabulary(texts, 10, vocab_size=9)


@pytest.mark.parametrize(
    ("count", "layers"), [(32, [2, 16, 29]), (7, [2, 3, 4]), (6, [1, 3, 5]), (2, [1]), (1, [-1]), (0, [-1])]
)
def test_eagle_reads_the_published_layers(count, layers):
    assert sizing.feature_layers(count) == layers


@pytest.mark.parametrize(
    ("vocabulary", "covering", "drafted"),
    [(259, 100, None), (8192, None, 2048), (8192, 9000, 2048), (49_152, None, 12_288), (128_256, None, 32_064),
     (256_000, 99_000, 32_768), (128_256, 500, 2048), (128_256, 9_000, 9_216)],
)  # fmt: skip
def test_drafted_tokens_cover_the_answers(vocabulary, covering, drafted):
    size, text = Size(1e9, 1e9, 2048, vocab_size=vocabulary), DataStatistics(10, 100.0, 0.5, 1.0, covering)
    assert sizing.draft_vocab_size(size.vocab_size, text) == drafted
    if covering is None:
        assert sizing.draft_vocab_size(size.vocab_size, None) == drafted


@pytest.mark.parametrize(("hidden", "width"), [(32, 64), (384, 512), (8192, 8192)])
def test_width_is_bounded(hidden, width):
    """By twice the states of tiny targets, by 512 of small ones, and by the states of large ones."""
    assert sizing.width(Size(1e12, 1e12 if hidden > 4096 else 1e6, hidden), lambda width: 10 * width**2) == width


def test_parameters_are_what_the_network_learns():
    config = ShapeConfig(hidden_size=64, vocab_size=2048, num_steps=4)
    assert parameters(config) == sum(weight.numel() for weight in PREDICTORS["shape"](config).parameters())
