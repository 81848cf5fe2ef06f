"""Likeness of texts, by a random BERT made on the fly."""

import pytest
import torch
from helpers import tiny_bert

from eval.text_quality.similarity import Encoder, f1, likeness
from shape.errors import ConfigError


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Encoder:
    return Encoder.load(str(tiny_bert(tmp_path_factory.mktemp("bert"))), torch.device("cpu"))


def test_bert_score_is_greedy_matching():
    """By hand: the tokens' best cosines, each way."""
    text = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    other = torch.tensor([[3.0, 0.0], [1.0, 1.0], [-1.0, 0.0]])
    found = likeness(text, other)
    assert found.precision == pytest.approx((1 + 0.5**0.5) / 2)
    assert found.recall == pytest.approx((1 + 0.5**0.5 + 0) / 3)
    means = torch.tensor([0.5, 1.0]), torch.tensor([1.0, 1 / 3])
    assert found.sentence == pytest.approx(float(torch.cosine_similarity(*means, dim=0)))
    assert f1(0.5, 1.0) == pytest.approx(2 / 3) and f1(0.0, 0.0) == 0.0


def test_equal_texts_are_as_like_as_can_be(encoder):
    same, other = encoder.compare(["a good day", "a good day"], ["a good day", "other words"])
    assert same.precision == pytest.approx(1) and same.recall == pytest.approx(1)
    assert same.sentence == pytest.approx(1)
    assert other.precision < 0.999 and other.recall < 0.999


def test_states_do_not_depend_on_the_batch_and_leave_special_tokens_out(encoder):
    texts = ["one", "a much longer text than the first", ""]
    together = encoder.states(texts)
    for text, states in zip(texts, together, strict=True):
        assert len(states) == len(encoder.tokenizer(text, add_special_tokens=False).input_ids)
        torch.testing.assert_close(states, encoder.states([text])[0])
    empty = likeness(together[2], together[2])
    assert (empty.precision, likeness(together[0], together[2]).precision) == (1, 0)
    assert len(encoder.states(["word " * 500])[0]) == encoder.longest - 2


def test_decoders_serve_too(tiny_target_folder):
    decoder = Encoder.load(str(tiny_target_folder), torch.device("cpu"))
    assert decoder.compare(["abc"], ["abc"])[0].sentence == pytest.approx(1)


def test_what_is_no_encoder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be loaded; give the folder"):
        Encoder.load(str(tmp_path), torch.device("cpu"))
