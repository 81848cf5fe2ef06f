"""Prompt lookup against a search through the whole text."""

import torch
from helpers import GREEDY, committed
from hypothesis import given
from hypothesis import strategies as st

from shape.drafters import NgramDrafter


def search(text: list[int], depth: int, longest: int, shortest: int) -> list[int]:
    for size in range(longest, shortest - 1, -1):
        suffix = text[-size:]
        for end in range(len(text) - 1, size - 1, -1):
            if len(suffix) == size and text[end - size : end] == suffix:
                return text[end : end + depth]
    return []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.lists(st.integers(0, 2), max_size=20), st.data())
def test_continues_the_latest_occurrence_of_the_longest_suffix(prompt, output, data):
    drafter = NgramDrafter(depth=4, longest=3, shortest=2)
    text = list(prompt)
    drafter.start(committed(text), torch.empty(0))
    while True:
        tree = drafter.draft(committed(text), GREEDY)
        assert tree.tokens[0].tolist() == [text[-1], *search(text, 4, 3, 2)]
        if not output:
            break
        step = data.draw(st.integers(1, len(output)))
        text += output[:step]
        output = output[step:]


def test_rows_keep_their_own_text():
    drafter = NgramDrafter(depth=2, longest=2, shortest=2)
    texts = [[1, 2, 3, 1, 2], [4, 5, 6, 4, 5], [7, 8, 9, 7, 8]]
    drafter.start(committed(*texts), torch.empty(0))
    drafter.draft(committed(*texts), GREEDY)
    drafter.select(torch.tensor([0, 2]))
    kept = [texts[0], texts[2]]
    assert drafter.draft(committed(*kept), GREEDY).tokens.tolist() == [[2, 3, 1], [8, 9, 7]]
