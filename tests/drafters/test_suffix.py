"""The suffix automaton against searches through the text, and the trees that are grown on it."""

import math

import pytest
import torch
from helpers import GREEDY, committed
from hypothesis import given
from hypothesis import strategies as st

from shape.drafters import SuffixDrafter
from shape.drafters import suffix as module
from shape.drafters.suffix import SuffixAutomaton

texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@pytest.fixture(autouse=True)
def _count_all(monkeypatch):
    monkeypatch.setattr(module, "_COUNTED", 1000)


def followers(text: list[int], suffix: list[int]) -> dict[int, int]:
    """How often each token followed a suffix in a text."""
    found: dict[int, int] = {}
    for end in range(len(suffix), len(text)):
        if text[end - len(suffix) : end] == suffix:
            found[text[end]] = found.get(text[end], 0) + 1
    return found


@given(texts)
def test_the_automaton_knows_what_followed_each_suffix(text):
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, 1):
        automaton.extend(token)
        known = text[:end]
        assert len(automaton) == end
        longest = max((n for n in range(end) if followers(known, known[end - n :])), default=0)
        contexts = dict(automaton.contexts(automaton.before, 1))
        assert max(contexts, default=0) == longest
        for size, counts in contexts.items():
            assert counts == followers(known, known[end - size :])
        # What lies between two of them has the followers of the longer one.
        for size in range(1, longest + 1):
            covering = min(other for other in contexts if other >= size)
            assert followers(known, known[end - size :]).keys() >= contexts[covering].keys()


@given(texts, texts)
def test_following_another_text_keeps_the_longest_match(text, other):
    automaton, place = SuffixAutomaton(), (0, 0)
    for token in text:
        automaton.extend(token)
    for end, token in enumerate(other, 1):
        place = automaton.follow(place, token)
        ends = [other[end - n : end] for n in range(end, 0, -1)]
        inside = (part for part in ends if any(text[i : i + len(part)] == part for i in range(len(text))))
        assert place[1] == len(next(inside, []))


def test_counts_are_bounded_work(monkeypatch):
    monkeypatch.setattr(module, "_COUNTED", 4)
    automaton = SuffixAutomaton()
    for _ in range(50):
        automaton.extend(7)
    contexts = list(automaton.contexts(automaton.before, 1))
    assert contexts[0] == (49, {7: 1}) and contexts[1] == (48, {7: 2})  # the longest are exact


def paths(tree) -> list[list[int]]:
    """Every root-to-node path of a one-row tree, without the root, in the order of the nodes."""
    found: dict[int, list[int]] = {0: []}
    for node in range(1, tree.size):
        if tree.parent[0, node] >= 0:
            found[node] = [*found[int(tree.parent[0, node])], int(tree.tokens[0, node])]
    return [path for node, path in found.items() if node]


def test_copies_the_longest_match_first():
    drafter = SuffixDrafter(depth=3, nodes=3)
    text = [1, 2, 3, 4, 5, 9, 2, 3, 8, 8, 1, 2, 3]
    drafter.start(committed(text), torch.empty(0))
    tree = drafter.draft(committed(text), GREEDY)
    assert paths(tree) == [[4], [4, 5], [4, 5, 9]]
    more = SuffixDrafter(depth=3, nodes=4)
    more.start(committed(text), torch.empty(0))
    assert [8] in paths(more.draft(committed(text), GREEDY))  # from the shorter match


def test_frequent_continuations_come_first():
    text = [1, 2, 5, 0, 1, 2, 6, 0, 1, 2, 6, 3, 1, 2]
    drafter = SuffixDrafter(depth=1, nodes=2)
    drafter.start(committed(text), torch.empty(0))
    assert paths(drafter.draft(committed(text), GREEDY)) == [[6], [5]]


@given(texts, texts, st.integers(1, 6), st.integers(1, 8))
def test_trees_are_ordered_and_their_estimates_are_probabilities(text, corpus, depth, nodes):
    drafter = SuffixDrafter(depth=depth, nodes=nodes, shortest=1, threshold=0.01, corpus=[corpus])
    drafter.start(committed(text), torch.empty(0))
    tree = drafter.draft(committed(text), GREEDY)
    assert tree.size <= nodes + 1 and (tree.depth[0] <= depth).all()
    joint, parent = tree.joint[0].tolist(), tree.parent[0].tolist()
    assert joint[1:] == sorted(joint[1:], reverse=True)
    assert all(math.log(0.01) - 1e-6 <= joint[node] <= joint[parent[node]] for node in range(1, tree.size))
    assert len(set(map(tuple, paths(tree)))) == tree.size - 1  # no path twice
    for node in range(tree.size):
        children = [joint[child] - joint[node] for child in range(1, tree.size) if parent[child] == node]
        assert sum(math.exp(each) for each in children) < 1 + 1e-6
    assert module._BREAK not in tree.tokens


def test_a_corpus_continues_what_the_row_has_not_seen():
    drafter = SuffixDrafter(depth=3, corpus=[[5, 6, 7, 8], [9, 9]])
    text = [1, 5, 6]
    drafter.start(committed(text), torch.empty(0))
    assert paths(drafter.draft(committed(text), GREEDY)) == [[7], [7, 8]]  # and not into the next text


def test_rows_keep_their_own_text():
    drafter = SuffixDrafter(depth=2)
    rows = [[1, 2, 3, 1, 2], [4, 5, 6, 7, 8], [7, 8, 9, 7, 8]]
    drafter.start(committed(*rows), torch.empty(0))
    tree = drafter.draft(committed(*rows), GREEDY)
    assert tree.tokens[0].tolist() == [2, 3, 1] and tree.parent[1].tolist() == [-1, -1, -1]
    drafter.select(torch.tensor([0, 2]))
    kept = [[*rows[0], 3], [*rows[2], 9]]
    assert drafter.draft(committed(*kept), GREEDY).tokens.tolist() == [[3, 1, 2], [9, 7, 8]]
