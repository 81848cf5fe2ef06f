"""Acceptance rules against a naive walk."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shape.verification.acceptance import match, reject_in_turn, trs_lossy
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


def drawn(q: torch.Tensor, count: int, rows: int, generator: torch.Generator) -> torch.Tensor:
    """(rows, count) candidates drawn one after the other without replacement."""
    return torch.multinomial(q.expand(rows, -1), count, generator=generator)


def rejected(p, q, candidates, told, generator) -> torch.Tensor:
    """Share of each token over the rows."""
    rows, vocabulary = len(candidates), len(p)
    uniforms = torch.rand(candidates.shape, generator=generator, dtype=torch.float64)
    noise = -torch.empty(rows, vocabulary, dtype=torch.float64).exponential_(generator=generator).log()
    tokens = reject_in_turn(p.expand(rows, -1), q.expand(rows, -1) if told else None, candidates, uniforms, noise)
    return tokens.bincount(minlength=vocabulary).double()


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    expected = p * counts.sum()
    assert (counts[expected == 0] == 0).all()
    return float(((counts - expected) ** 2 / expected)[expected > 0].sum())


P = torch.tensor([0.30, 0.0, 0.25, 0.05, 0.10, 0.30], dtype=torch.float64)
Q = torch.tensor([0.05, 0.3, 0.40, 0.05, 0.20, 0.00], dtype=torch.float64)
LIMIT = 33.4  # the 1 - 1e-6 quantile at 4 degrees of freedom is 33.4


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_rejection_keeps_the_distribution(count):
    """Chi-square of 40,000 tokens; p is zero where q is not and the other way round. False-alarm rate 1e-6."""
    generator = torch.Generator().manual_seed(count)
    candidates = drawn(Q, count, 40_000, generator)
    assert chi_square(rejected(P, Q, candidates, True, generator), P) < LIMIT
    # Candidates that were not drawn, duplicates and gaps among them, are taken with p(x).
    chosen = torch.tensor([0, 0, -1, 1, 2]).expand(40_000, -1)[:, :count]
    assert chi_square(rejected(P, Q, chosen, False, generator), P) < LIMIT
    # The last draws may have nothing left to be drawn from.
    padded = torch.cat([drawn(Q, 5, 40_000, generator), torch.full((40_000, 1), 5)], dim=1)
    assert chi_square(rejected(P, Q, padded, True, generator), P) < LIMIT


def test_rejection_of_what_was_not_drawn_is_biased():
    """Negative controls: the same test fails for the p/q rule on a top-k tree, and after pruning by value."""
    generator = torch.Generator().manual_seed(0)
    top = Q.topk(2).indices.expand(40_000, -1)
    assert chi_square(rejected(P, Q, top, True, generator), P) > 10 * LIMIT
    candidates = drawn(Q, 3, 40_000, generator)
    best = Q[candidates].topk(2, dim=1).indices.sort(dim=1).values
    assert chi_square(rejected(P, Q, candidates.gather(1, best), True, generator), P) > 10 * LIMIT


def test_rejection_accepts_as_often_as_possible():
    """One draft stands with probability 1 - TV(p, q), and equal distributions never reject."""
    generator = torch.Generator().manual_seed(1)
    candidates = drawn(Q, 1, 40_000, generator)
    uniforms = torch.rand(40_000, 1, generator=generator, dtype=torch.float64)
    noise = torch.zeros(40_000, 6, dtype=torch.float64)
    tokens = reject_in_turn(P.expand(40_000, -1), Q.expand(40_000, -1), candidates, uniforms, noise)
    share = float((tokens == candidates[:, 0]).double().mean())
    best = 1 - 0.5 * float((P - Q).abs().sum())
    assert abs(share - best) < 4.9 * (best * (1 - best) / 40_000) ** 0.5
    same = reject_in_turn(Q.expand(40_000, -1), Q.expand(40_000, -1), candidates, uniforms, noise)
    assert torch.equal(same, candidates[:, 0])
