"""Acceptance rules against a naive walk."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shape.verification.acceptance import match, trs_lossy
from shape.verification.tree import TokenTree


@st.composite
def trees_with_choices(draw):
    """A small vocabulary, so that duplicates among siblings and matches are frequent."""
    nodes = draw(st.integers(1, 10))
    parent = [-1, *(draw(st.integers(-1, i - 1)) for i in range(1, nodes))]
    tokens = [draw(st.integers(0, 2)) for _ in range(nodes)]
    choices = [draw(st.integers(0, 2)) for _ in range(nodes)]
    # A choice is a function of the text, so nodes with equal text choose equally.
    texts: dict[tuple[int, ...], int] = {}
    for node in range(nodes):
        text, at = [], node
        while at >= 0:
            text.append(tokens[at] if at else -1)
            at = parent[at]
        choices[node] = texts.setdefault(tuple(text), choices[node])
    return parent, tokens, choices


def naive_walk(parent, tokens, choices) -> list[int]:
    """All emitted tokens: follow children that carry the choice, trying every duplicate."""
    frontier, emitted = [0], []
    while True:
        choice = choices[frontier[0]]
        emitted.append(choice)
        frontier = [n for n, above in enumerate(parent) if above in frontier and n and tokens[n] == choice]
        if not frontier:
            return emitted


@given(trees_with_choices())
@settings(max_examples=300)
def test_match_equals_a_walk(case):
    parent, tokens, choices = case
    tree = TokenTree(torch.tensor([tokens]), torch.tensor([parent]))
    accepted = match(tree, torch.tensor([choices]))
    count = int(accepted.counts)
    assert accepted.tokens[0, :count].tolist() == naive_walk(parent, tokens, choices)
    assert int(accepted.drafted) == count - 1
    path = accepted.path[0, :count].tolist()
    assert path[0] == 0 and [parent[node] for node in path[1:]] == path[:-1]


def test_padding_nodes_are_never_accepted():
    tree = TokenTree(torch.tensor([[5, 1, 1]]), torch.tensor([[-1, -1, -1]]))
    accepted = match(tree, torch.tensor([[1, 1, 1]]))
    assert accepted.counts.tolist() == [1] and accepted.tokens[0, 0] == 1


def binary_tree(log_probs: list[float]) -> tuple[TokenTree, torch.Tensor]:
    """Root with children 1, 2; each of them with two children. Tokens are node numbers."""
    parent = torch.tensor([[-1, 0, 0, 1, 1, 2, 2]])
    return TokenTree(torch.arange(7)[None], parent), torch.tensor([log_probs])


def test_trs_emits_the_common_prefix_of_good_paths():
    # Paths 1-3 and 1-4 are both within 0.8 of the best, so only their common token 1 is emitted.
    tree, log_probs = binary_tree([0, -0.1, -2.0, -0.70, -0.69, -0.7, -0.7])
    accepted = trs_lossy(tree, log_probs, torch.full((1, 7), 9), threshold=0.8)
    assert accepted.tokens[0, : int(accepted.counts)].tolist() == [1]
    assert accepted.drafted.tolist() == [1] and accepted.path[0, 0] == 0


def test_trs_emits_a_whole_path_that_stands_alone():
    tree, log_probs = binary_tree([0, -0.1, -2.0, -0.1, -2.5, -0.7, -0.7])
    accepted = trs_lossy(tree, log_probs, torch.full((1, 7), 9), threshold=0.8)
    # Two tokens, of which the last is the next root: its own states are not settled.
    assert accepted.tokens[0, : int(accepted.counts)].tolist() == [1, 3]
    assert accepted.path[0, : int(accepted.counts)].tolist() == [0, 1]


def test_trs_makes_progress_when_good_paths_share_nothing():
    tree, log_probs = binary_tree([0, -0.7, -0.7, -0.1, -2.5, -0.1, -2.5])
    accepted = trs_lossy(tree, log_probs, torch.full((1, 7), 9), threshold=0.8)
    assert accepted.tokens[0, : int(accepted.counts)].tolist() == [9]
    assert accepted.drafted.tolist() == [0]
