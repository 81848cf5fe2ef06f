"""Reproducible calls beside those that measure as they go, on a tiny random target: figures, not findings."""

import pytest
from tqdm.auto import tqdm

from eval.reproducible import WAYS, Case, measure
from shape.data.conversations import Prompt
from shape.drafters import SuffixDrafter
from shape.generation.decoder import ShapeDecoder
from shape.target.chat import Message


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_both_ways_answer_every_prompt_in_every_round(tiny_target, temperature):
    prompts = [Prompt(str(n), "", (f"say {n}",), (Message("user", f"say {n}"),)) for n in range(2)]
    decoder, asked = ShapeDecoder(tiny_target, SuffixDrafter()), tqdm(disable=True)
    case = measure(Case("some", "suffix", temperature), decoder, prompts, 2, asked)
    assert case.rates.keys() == WAYS.keys() and all(rate > 0 for rate in case.rates.values())
    assert case.same["reproducible"] == 1
    assert temperature or case.same["by the clock"] == 1
    assert case.ratio is not None and case.ratio.low is not None
