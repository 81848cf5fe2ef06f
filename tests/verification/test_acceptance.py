"""Acceptance rules against naive ones, and their output against the exact joint distribution."""

import enumeration
import pytest
import torch
import torch.nn.functional as F
from enumeration import assert_exact, distributions, draws, every_tree, joint_of_three
from hypothesis import given, settings
from hypothesis import strategies as st

from shape.verification.acceptance import (
    follow,
    match,
    reject_in_turn,
    stop_chances,
    traverse,
    trs_lossy,
    typical_lossy,
    unverified_lossy,
)
from shape.verification.on_host import follow_scores
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


@given(trees_with_choices(), st.sampled_from(["at all nodes", "node after node", "compiled"]))
@settings(max_examples=500)
def test_match_equals_a_walk(case, choosing):
    parent, tokens, choices = case
    tree = TokenTree(torch.tensor([tokens]), torch.tensor([parent]))
    asked: list[int] = []

    def choose(rows, nodes, paths):
        assert rows == [0] and paths[0] == naive_walk(parent, tokens, choices)[: len(asked)]
        asked.append(nodes[0])
        return [choices[nodes[0]]]

    if choosing == "at all nodes":
        accepted = match(tree, torch.tensor([choices]))
    elif choosing == "node after node":
        accepted = follow(tree, choose)
    else:
        accepted = follow_scores(tree, F.one_hot(torch.tensor([choices])).float())
    count = int(accepted.counts)
    assert accepted.tokens[0, :count].tolist() == naive_walk(parent, tokens, choices)
    assert choosing != "node after node" or len(asked) == count  # nowhere else
    assert int(accepted.drafted) == count - 1
    path = accepted.path[0, :count].tolist()
    assert path[0] == 0 and [parent[node] for node in path[1:]] == path[:-1]


@given(trees_with_choices(), st.integers(1, 4), st.integers(0, 3))
@settings(max_examples=300)
def test_no_choice_is_asked_for_behind_an_end(case, most, end):
    """Neither behind a token that ends the text, nor behind as many as are wanted: what comes before is the same."""
    parent, tokens, choices = case
    tree, asked = TokenTree(torch.tensor([tokens]), torch.tensor([parent])), []

    def choose(rows, nodes, paths):
        asked.append([*paths[0]])
        return [choices[nodes[0]]]

    accepted, walked = follow(tree, choose, [end], [most]), naive_walk(parent, tokens, choices)
    stop = min([most, *(at for at, token in enumerate(walked, 1) if token == end)])
    count = int(accepted.counts)
    assert accepted.tokens[0, :count].tolist() == walked[:stop] and len(asked) == count
    assert not any(end in path or len(path) >= most for path in asked)
    assert int(accepted.drafted) == min(stop, len(walked) - 1)  # the last one may have been drafted
    path = accepted.path[0, : int(accepted.drafted) + 1].tolist()
    assert path[0] == 0 and [parent[node] for node in path[1:]] == path[:-1]
    assert [tokens[node] for node in path[1:]] == walked[: len(path) - 1]


def test_padding_nodes_are_never_accepted():
    tree = TokenTree(torch.tensor([[5, 1, 1]]), torch.tensor([[-1, -1, -1]]))
    ones = torch.tensor([[1, 1, 1]])
    for accepted in (
        match(tree, ones),
        follow(tree, lambda rows, nodes, paths: [1]),
        follow_scores(tree, F.one_hot(ones).float()),
    ):
        assert accepted.counts.tolist() == [1] and accepted.tokens[0, 0] == 1


def binary_tree(log_probs: list[float]) -> tuple[TokenTree, torch.Tensor]:
    """Root with children 1, 2; each of them with two children. Tokens are node numbers."""
    parent = torch.tensor([[-1, 0, 0, 1, 1, 2, 2]])
    return TokenTree(torch.arange(7)[None], parent), torch.tensor([log_probs])


def test_trs_emits_the_common_prefix_of_good_paths():
    # Paths 1-3 and 1-4 are both within 0.8 of the best, so only their common token 1 is emitted.
    tree, log_probs = binary_tree([0, -0.1, -2.0, -0.70, -0.69, -0.7, -0.7])
    accepted = trs_lossy(tree, log_probs, torch.tensor([9]), threshold=0.8)
    assert accepted.tokens[0, : int(accepted.counts)].tolist() == [1]
    assert accepted.drafted.tolist() == [1] and accepted.path[0, 0] == 0


def test_trs_emits_a_whole_path_that_stands_alone():
    tree, log_probs = binary_tree([0, -0.1, -2.0, -0.1, -2.5, -0.7, -0.7])
    accepted = trs_lossy(tree, log_probs, torch.tensor([9]), threshold=0.8)
    # Two tokens, of which the last is the next root: its own states are not settled.
    assert accepted.tokens[0, : int(accepted.counts)].tolist() == [1, 3]
    assert accepted.path[0, : int(accepted.counts)].tolist() == [0, 1]


def test_trs_makes_progress_when_good_paths_share_nothing():
    tree, log_probs = binary_tree([0, -0.7, -0.7, -0.1, -2.5, -0.1, -2.5])
    accepted = trs_lossy(tree, log_probs, torch.tensor([9]), threshold=0.8)
    assert accepted.tokens[0, : int(accepted.counts)].tolist() == [9]
    assert accepted.drafted.tolist() == [0]


def test_trs_never_emits_the_impossible():
    """Paths with a token of probability 0 are not kept, and do not hide those that are possible."""
    never = float("-inf")
    tree, log_probs = binary_tree([0, never, -0.1, -0.1, -0.2, never, -0.3])
    accepted = trs_lossy(tree, log_probs, torch.tensor([9]), threshold=0.8)
    assert accepted.tokens[0, : int(accepted.counts)].tolist() == [2, 6]
    accepted = trs_lossy(tree, torch.full((1, 7), never), torch.tensor([9]), threshold=0.8)
    assert accepted.tokens[0, : int(accepted.counts)].tolist() == [9] and accepted.drafted.tolist() == [0]


def test_trs_on_a_chain_emits_all_of_it_if_it_is_possible():
    tree = TokenTree(torch.tensor([[5, 1, 2]]), torch.tensor([[-1, 0, 1]]))
    for last, expected, drafted in ((-4.0, [1, 2], 2), (float("-inf"), [9], 0)):
        accepted = trs_lossy(tree, torch.tensor([[0.0, -3.0, last]]), torch.tensor([9]), threshold=0.8)
        assert accepted.tokens[0, : int(accepted.counts)].tolist() == expected
        assert accepted.drafted.tolist() == [drafted]


def typical(parent, tokens, p, choices=None, epsilon=0.1, delta=0.5) -> tuple[list[int], list[int]]:
    """Emitted tokens and accepted nodes of one tree."""
    tree = TokenTree(torch.tensor([tokens]), torch.tensor([parent]))
    choices = torch.full_like(tree.tokens, 9) if choices is None else torch.tensor([choices])
    accepted = typical_lossy(tree, torch.tensor([p]), choices, epsilon, delta)
    count = int(accepted.counts)
    assert int(accepted.drafted) == count - 1
    return accepted.tokens[0, :count].tolist(), accepted.path[0, :count].tolist()


UNSURE, SURE = [0.25, 0.25, 0.25, 0.25], [0.96, 0.04, 0.0, 0.0]


def test_typical_asks_less_where_the_target_is_unsure():
    """The limits: delta exp(-H) = 0.5 / 4 = 0.125, of which min(0.1, 0.125) is left; and min(0.1, 0.42) = 0.1."""
    assert typical([-1, 0], [3, 2], [UNSURE, SURE]) == ([2, 9], [0, 1])
    assert typical([-1, 0], [3, 1], [SURE, UNSURE]) == ([9], [0])
    assert typical([-1, 0], [3, 1], [SURE, UNSURE], epsilon=0.03) == ([1, 9], [0, 1])
    assert typical([-1, 0], [3, 2], [UNSURE, SURE], epsilon=0.3, delta=1.0) == ([9], [0])  # above, not at the limit


def test_typical_accepts_the_longest_path_and_of_those_the_likeliest():
    p = [[0.5, 0.3, 0.2, 0.0], [1.0, 0, 0, 0], [0.4, 0.6, 0, 0], [0.7, 0.3, 0, 0], UNSURE, UNSURE, UNSURE]
    assert typical([-1, 0, 0, 0, 2, 2, 3], [0, 0, 1, 2, 0, 1, 0], p, [7, 7, 7, 7, 7, 8, 7]) == ([1, 1, 8], [0, 2, 5])
    assert typical([-1, 0, 0, 0], [0, 2, 1, 0], p[:4]) == ([0, 9], [0, 3])


def test_typical_refuses_padding_and_what_has_no_probability():
    """Nodes that hang on nothing, their children, and tokens of probability 0 however small the limit; duplicates."""
    assert typical([-1, -1, 1, 0], [0, 0, 0, 3], [SURE] * 4, epsilon=1e-9) == ([9], [0])
    assert typical([-1, 0, 0, 2], [0, 0, 0, 1], [SURE, SURE, UNSURE, UNSURE]) == ([0, 1, 9], [0, 2, 3])
    assert typical([-1], [0], [SURE]) == ([9], [0])


def drawn(q: torch.Tensor, count: int, rows: int, generator: torch.Generator) -> torch.Tensor:
    """(rows, count) candidates drawn one after the other without replacement."""
    return torch.multinomial(q.expand(rows, -1), count, generator=generator)


def rejected(p, q, candidates, generator) -> torch.Tensor:
    """Share of each token over the rows."""
    rows, vocabulary = len(candidates), len(p)
    uniforms = torch.rand(candidates.shape, generator=generator, dtype=torch.float64)
    noise = -torch.empty(rows, vocabulary, dtype=torch.float64).exponential_(generator=generator).log()
    tokens = reject_in_turn(p.expand(rows, -1), q.expand(rows, -1), candidates, uniforms, noise)
    return tokens.bincount(minlength=vocabulary).double()


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    return enumeration.chi_square(counts, p * counts.sum())


P = torch.tensor([0.30, 0.0, 0.25, 0.05, 0.10, 0.30], dtype=torch.float64)
Q = torch.tensor([0.05, 0.3, 0.40, 0.05, 0.20, 0.00], dtype=torch.float64)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_rejection_keeps_the_distribution(count):
    """Chi-square of 40,000 tokens; p is zero where q is not and the other way round. False-alarm rate 1e-6."""
    generator = torch.Generator().manual_seed(count)
    candidates = drawn(Q, count, 40_000, generator)
    assert chi_square(rejected(P, Q, candidates, generator), P) < 1
    # Places without a candidate, and with none that anybody drew.
    gaps = torch.cat([candidates[:, :1], torch.full((40_000, 1), -1), candidates[:, 1:]], dim=1)
    assert chi_square(rejected(P, Q, gaps, generator), P) < 1
    assert chi_square(rejected(P, torch.zeros_like(Q), candidates, generator), P) < 1
    # The last draws may have nothing left to be drawn from.
    padded = torch.cat([drawn(Q, 5, 40_000, generator), torch.full((40_000, 1), 5)], dim=1)
    assert chi_square(rejected(P, Q, padded, generator), P) < 1


def test_rejection_of_what_was_not_drawn_is_biased():
    """Negative controls: the same test fails for the p/q rule on a top-k tree, and after pruning by value."""
    generator = torch.Generator().manual_seed(0)
    top = Q.topk(2).indices.expand(40_000, -1)
    assert chi_square(rejected(P, Q, top, generator), P) > 10
    candidates = drawn(Q, 3, 40_000, generator)
    best = Q[candidates].topk(2, dim=1).indices.sort(dim=1).values
    assert chi_square(rejected(P, Q, candidates.gather(1, best), generator), P) > 10


def test_rejection_accepts_as_often_as_possible():
    """One draft stands with probability 1 - TV(p, q), and equal distributions never reject.

    Within 4.9 standard errors: a false alarm in a million.
    """
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


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("branching", "width"), [((1, 1), 1), ((2, 2), 1), ((2, 1), 2), ((3, 2), 1), ((2, 2), 2), ((3,), 1)]
)
def test_traversal_has_exactly_the_targets_distribution(branching, width, zeros):
    """No statistics: every tree that can be drawn, every node at which it can stop, and all three-token texts.

    Three candidates of three tokens, and zeros of q among them, exhaust what can be drawn; zeros of p are never met.
    """
    for seed in range(3):
        p, q = distributions(seed, 3, zeros), distributions(100 + seed, 3, zeros)
        output, _ = joint_of_three(p, every_tree(q, branching, width), q)
        assert_exact(p, output)


def test_traversal_is_exact_for_trees_that_nobody_drew():
    """Chosen trees with duplicates among siblings, dead ends and padding, whose candidates stand with p(x)."""
    for seed in range(5):
        p = distributions(seed, 3, zeros=True)
        parents = [-1, 0, 0, 1, -1, 2, 2, 0, 4]
        texts = [(), (1,), (1,), (1, 0), (0,), (1, 2), (1, 2), (2,), (0, 1)]
        output, accepted = joint_of_three(p, [(1.0, parents, texts)])
        assert_exact(p, output)
        assert accepted > 0


def test_the_exact_test_fails_on_biased_trees():
    """Negative controls: a top-k tree told as drawn, drawn nodes pruned by value, siblings that draw alike."""
    p, q = distributions(0, 3, zeros=False), distributions(100, 3, zeros=False)
    best = {text: q[text].topk(2).indices.tolist() for text in q}
    texts = [(), *((a,) for a in best[()]), *((a, b) for a in best[()] for b in best[(a,)])]
    top_k = [(1.0, [-1, 0, 0, 1, 1, 2, 2], texts)]
    pruned = [
        (chance, [-1, 0, 0], [(), *sorted(texts[1:], key=lambda text: -float(q[()][text[0]]))[:2]])
        for chance, _, texts in every_tree(q, (3,), 1)
    ]
    same = {text: q[(0,) if text else ()] for text in q}  # one distribution for both siblings
    output, _ = joint_of_three(p, every_tree(same, (2, 1), 2), same)
    assert_exact(p, output)
    alike = [
        (chance * weight, [-1, 0, 0, 1, 2], [*texts, (*texts[1], token), (*texts[2], token)])
        for chance, _, texts in every_tree(q, (2,), 1)
        for weight, (token,) in draws(same[(0,)], 1)
    ]
    for trees, told in ((top_k, q), (pruned, q), (alike, same)):
        output, _ = joint_of_three(p, trees, told)
        with pytest.raises(AssertionError):
            assert_exact(p, output)


@given(st.integers(0, 10_000))
@settings(max_examples=25)
def test_no_chain_is_cut_shorter_by_traversal(seed):
    """On chains the mean number of accepted tokens is at least that of rejection, token by token."""
    p, q = distributions(seed, 3, zeros=True), distributions(seed + 1, 3, zeros=True)
    chains = every_tree(q, (1, 1), 1)
    in_turn = 0.0
    for chance, _, (_, one, two) in chains:
        ratios = [min(1.0, float(p[text[:-1]][text[-1]] / q[text[:-1]][text[-1]])) for text in (one, two)]
        in_turn += chance * (ratios[0] + ratios[0] * ratios[1])
    assert joint_of_three(p, chains, q)[1] >= in_turn - 1e-12


def test_traversal_of_a_chain_is_block_verification():
    """Against algorithm 2 of arXiv 2403.10444, equation by equation."""
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(1, 5, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    tree = TokenTree(torch.tensor([[0, 1, 3, 2, 0]]), torch.tensor([[-1, 0, 1, 2, 3]]))
    chances, left = stop_chances(tree, p, q)
    path = 1.0
    for i in range(1, 5):
        token = int(tree.tokens[0, i])
        path = min(path * float(p[0, i - 1, token] / q[0, i - 1, token]), 1.0)
        residual = (path * p[0, i] - q[0, i]).clamp(min=0)
        expected = path if i == 4 else float(residual.sum() / (residual.sum() + 1 - path))
        assert abs(float(chances[0, i]) - expected) < 1e-12
        if i < 4 and residual.sum() > 0:
            assert torch.allclose(left[0, i], residual / residual.sum())


def test_traversal_stops_where_its_chances_say():
    """200,000 decisions over one tree: nodes in post-order, last tokens by chi-square. False-alarm rate 1e-6 each."""
    generator = torch.Generator().manual_seed(3)
    rows, parents, texts = 200_000, [-1, 0, 0, 1, 1], [(), (1,), (3,), (1, 0), (1, 2)]
    p, q = distributions(22, 4, zeros=False), distributions(55, 4, zeros=False)
    tree = TokenTree(torch.tensor([[0, 1, 3, 0, 2]]), torch.tensor([parents]))
    p, q = (torch.stack([one[text] for text in texts])[None] for one in (p, q))
    chances, left = stop_chances(tree, p, q)
    many = TokenTree(tree.tokens.expand(rows, -1), tree.parent.expand(rows, -1))
    uniforms = torch.rand(rows, 5, generator=generator, dtype=torch.float64)
    noise = -torch.empty(rows, 4, dtype=torch.float64).exponential_(generator=generator).log()
    accepted = traverse(many, p.expand(rows, -1, -1), q.expand(rows, -1, -1), uniforms, noise)
    assert torch.equal(accepted.counts, accepted.drafted + 1)
    last = accepted.path.gather(1, accepted.drafted[:, None])[:, 0]
    following = accepted.tokens.gather(1, accepted.drafted[:, None])[:, 0]
    asked, expected = 1.0, torch.zeros(5, dtype=torch.float64)
    for node in (3, 4, 1, 2, 0):
        expected[node] = asked * chances[0, node]
        asked -= expected[node]
    assert expected.min() > 0.05, "all of them are to be seen"
    assert chi_square(last.bincount(minlength=5).double(), expected) < 1
    for node in range(5):
        assert chi_square(following[last == node].bincount(minlength=4).double(), left[0, node]) < 1
    rows = (last == 4).nonzero()[:5, 0]
    assert accepted.tokens[rows, :2].tolist() == [[1, 2]] * 5 and accepted.path[rows, :3].tolist() == [[0, 1, 4]] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_traversal_accepts_all_that_was_drawn_from_the_target_itself(dtype):
    """p = q leaves no residual, up to rounding: the first path is accepted down to its leaf, and nothing is NaN."""
    p = torch.rand(64, 6, 50, generator=torch.Generator().manual_seed(5), dtype=dtype).softmax(-1)
    tree = TokenTree(
        torch.tensor([[0, 1, 2, 3, 4, 5]]).expand(64, -1), torch.tensor([[-1, 0, 0, 1, 1, 2]]).expand(64, -1)
    )
    accepted = traverse(tree, p, p.clone(), torch.full((64, 6), 0.999), torch.zeros(64, 50, dtype=dtype))
    assert accepted.path[:, :3].tolist() == [[0, 1, 3]] * 64 and accepted.counts.tolist() == [3] * 64
    chances, left = stop_chances(tree, p, p.clone())
    assert chances.isfinite().all() and left.isfinite().all() and (chances[:, 0] == 1).all()


def test_unverified_emits_first_children_as_far_as_they_are_allowed():
    tree, _ = binary_tree([0.0] * 7)
    padded = TokenTree(torch.tensor([[5, 6, 0]]), torch.tensor([[-1, 0, -1]]))
    for one, banned, expected, drafted in (
        (tree, [], [1, 3], 2),
        (tree, [3], [1], 1),  # its sibling is another path
        (tree, [1], [9], 0),
        (padded, [], [6], 1),
        (TokenTree(tree.tokens[:, :1], tree.parent[:, :1]), [], [9], 0),
    ):
        possible = ~torch.isin(one.tokens, torch.tensor(banned))
        accepted = unverified_lossy(one, possible, torch.tensor([9]))
        assert accepted.tokens[0, : int(accepted.counts)].tolist() == expected
        assert accepted.drafted.tolist() == [drafted] and accepted.path[0, 0] == 0
