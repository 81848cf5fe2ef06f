"""Trees against naive walks over parents."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shape.verification.tree import (
    TokenTree,
    ancestors,
    chain,
    first_path,
    keep_best,
    keep_best_on_device,
    positions_and_mask,
    ragged_chain,
    root_only,
)


@st.composite
def parents(draw, nodes: int = 12) -> list[int]:
    """Topological parents with some nodes that hang on nothing."""
    size = draw(st.integers(1, nodes))
    return [-1, *(draw(st.integers(-1, i - 1)) for i in range(1, size))]


def walk(parent: list[int], node: int) -> set[int]:
    found = {node}
    while parent[node] >= 0:
        node = parent[node]
        found.add(node)
    return found


@given(parents())
def test_ancestors_and_depth_equal_a_walk(parent):
    tree = TokenTree(torch.zeros(1, len(parent), dtype=torch.long), torch.tensor([parent]))
    for node in range(len(parent)):
        expected = walk(parent, node)
        assert set(tree.ancestors[0, node].nonzero()[:, 0].tolist()) == expected
        assert tree.depth[0, node] == len(expected) - 1
    assert torch.equal(ancestors(tree.parent), tree.ancestors)


def test_ancestors_of_a_long_chain():
    parent = torch.arange(-1, 40)[None]
    tree = TokenTree(torch.zeros_like(parent), parent)
    for found in (ancestors(parent), tree.ancestors):
        assert torch.equal(found[0], torch.ones(41, 41, dtype=torch.bool).tril())


def test_ragged_chain_pads_with_unreachable_nodes():
    tree = ragged_chain(torch.tensor([7, 8, 9]), [[1, 2], [], [3]])
    assert tree.tokens.tolist() == [[7, 1, 2], [8, 0, 0], [9, 3, 0]]
    assert tree.parent.tolist() == [[-1, 0, 1], [-1, -1, -1], [-1, 0, -1]]


def test_ragged_chain_of_nothing_is_the_root():
    root = torch.tensor([4, 5])
    assert torch.equal(ragged_chain(root, [[], []]).tokens, root_only(root).tokens)


@given(parents())
def test_first_path_follows_first_children(parent):
    tokens = torch.arange(len(parent))[None]
    drawn = first_path(TokenTree(tokens, torch.tensor([parent]), log_q=tokens[..., None].float()))
    path = drawn.tokens[0].tolist()
    assert drawn.log_q is not None and drawn.log_q.flatten().tolist() == path
    for node, child in pairwise(path):
        assert parent.index(node, 1) == child
    assert path[-1] not in parent[1:]


def test_the_path_of_a_target_for_chains_is_the_likeliest():
    """A hybrid's trees have the nodes of its first source first."""
    odds = torch.tensor([[1.0, 0.2, 0.7, 0.1, 0.6, 0.3]]).log()
    tree = TokenTree(torch.arange(6)[None], torch.tensor([[-1, 0, 0, 1, 2, 2]]), joint=odds)
    path = first_path(tree)
    assert path.tokens.tolist() == [[0, 2, 4]] and torch.equal(path.joint, odds[:, [0, 2, 4]])
    drawn = replace(tree, log_q=torch.zeros(1, 6, 7))
    for other in (drawn, replace(tree, joint=None)):
        assert first_path(other).tokens.tolist() == [[0, 1, 3]]


@given(st.data())
def test_keep_best_stays_a_tree_and_keeps_the_best(data):
    parent = [-1, *(data.draw(st.integers(0, i - 1)) for i in range(1, 10))]
    drop = [data.draw(st.sampled_from([0.0, 0.5, 1.0])) for _ in parent]
    score: list[float] = []
    for node, above in enumerate(parent):
        score.append(1.0 if above < 0 else score[above] - drop[node] if above else -drop[node])
    nodes = data.draw(st.integers(1, 10))
    tokens = torch.arange(10)[None]
    tree = TokenTree(tokens, torch.tensor([parent]), joint=torch.tensor([score]))
    kept, there = keep_best(tree, nodes), keep_best_on_device(tree, nodes)
    assert torch.equal(kept.tokens, there.tokens) and torch.equal(kept.parent, there.parent)
    assert torch.equal(kept.joint, there.joint)
    numbers = kept.tokens[0].tolist()
    assert numbers == sorted(numbers) and numbers[0] == 0 and len(numbers) == nodes
    for position, number in enumerate(numbers[1:], start=1):
        assert numbers[kept.parent[0, position]] == parent[number]  # its parent was kept, and is still its parent
    worst = min(score[number] for number in numbers)
    assert all(score[node] <= worst for node in set(range(10)) - set(numbers))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 3])
def test_the_hosts_positions_and_mask_are_those_of_a_device(monkeypatch, window, dtype):
    """Rows of unequal length, with padding nodes, and more slots than are in use."""
    tree = TokenTree(torch.zeros(2, 6, dtype=torch.long), torch.tensor([[-1, 0, 0, 1, 3, 4], [-1, 0, 1, 2, -1, -1]]))
    given = torch.tensor([2, 7]), 15, dtype, window
    positions, mask = positions_and_mask(tree, *given)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    others, other = positions_and_mask(replace(tree), *given)
    assert torch.equal(positions, others) and torch.equal(mask, other) and mask.dtype == other.dtype == dtype
    assert other.stride()[:3] == (6 * 16, 6 * 16, 16)  # of 15 slots: no kernel needs a copy


@given(parents(), st.integers(0, 5), st.integers(0, 4), st.one_of(st.none(), st.integers(1, 6)))
def test_mask_shows_settled_tokens_and_ancestors_within_the_window(parent, length, slack, window):
    tree = TokenTree(torch.zeros(1, len(parent), dtype=torch.long), torch.tensor([parent]))
    keys = length + len(parent) + slack
    positions, mask = positions_and_mask(tree, torch.tensor([length]), keys, torch.float32, window)
    assert mask.shape == (1, 1, len(parent), keys)
    for node in range(len(parent)):
        position = length + len(walk(parent, node)) - 1
        assert positions[0, node] == position
        visible = {(slot, slot) for slot in range(length)}
        visible |= {(length + a, length + len(walk(parent, a)) - 1) for a in walk(parent, node)}
        expected = {slot for slot, at in visible if window is None or position - at < window}
        assert set((mask[0, 0, node] == 0).nonzero()[:, 0].tolist()) == expected


def test_chain_is_its_own_first_path():
    tree = chain(torch.tensor([3]), torch.tensor([[4, 5, 6]]))
    assert first_path(tree).tokens.tolist() == [[3, 4, 5, 6]]
