"""What samples agree on, and misses."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shape.drafters.recipes.compile import agreed, recipes_of

texts = st.lists(st.integers(0, 3), min_size=1, max_size=14)


def inside(part: tuple[int, ...], text: list[int]) -> bool:
    return any(tuple(text[at : at + len(part)]) == part for at in range(len(text) - len(part) + 1))


@given(texts, st.lists(texts, max_size=3), st.integers(1, 4))
def test_stretches_are_the_longest_that_all_samples_have(first, others, shortest):
    found = list(agreed([first, *others], shortest))
    for stretch in found:
        assert len(stretch) >= shortest and all(inside(stretch, text) for text in [first, *others])
    # Whatever all have in common lies in one of them.
    for start in range(len(first)):
        for end in range(start + shortest, len(first) + 1):
            part = tuple(first[start:end])
            if all(inside(part, other) for other in others):
                assert any(inside(part, list(stretch)) for stretch in found)


def test_recipes_of_a_stretch():
    found = recipes_of([(1, 2, 3, 4), (2, 3, 4)], prefix=2, depth=2)
    assert found == Counter({((1, 2), (3, 4)): 1, ((2, 3), (4,)): 2})
