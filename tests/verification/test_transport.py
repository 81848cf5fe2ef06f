"""One drawn child beside the likeliest ones: the optimum of its transport problem, and the exact joint distribution."""

from itertools import product
from math import inf, log, prod

import numpy as np
import ot
import pytest
import torch
from enumeration import assert_exact, distributions, joint_of_three
from hypothesis import given, settings
from hypothesis import strategies as st

from shape.verification.acceptance import odds_in_turn
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree, keep_best


def one_drawn(q: torch.Tensor, children: int) -> list[tuple[float, float, list[int]]]:
    """What ``Sampler.candidates`` may propose: the chance of each proposal, the joint chances' first, the tokens."""
    sampler = Sampler(torch.tensor([3]), temperature=1.0, keys=torch.tensor([1]), coupled=False, one_drawn=True)
    chances = sampler.draft_log_probs(q.log(), len(q), None, q.topk(children).indices.roll(1)).exp()
    found = []
    for token in chances.nonzero()[:, 0].tolist():
        noise = torch.full_like(q, 0.0).index_fill(0, torch.tensor(token), 1e3)
        estimates, tokens = sampler.candidates(q.log()[None, None], noise[None, None], children)
        assert tokens[0, 0, 0] == token
        found.append((float(chances[token]), float(estimates[0, 0, 0]), tokens[0, 0].tolist()))
    return found or [(1.0, -inf, [min(set(range(len(q))) - set(q.topk(children - 1).indices.tolist())),
                                  *q.topk(children - 1).indices.tolist()])]  # fmt: skip


def law(p: torch.Tensor, q: torch.Tensor, drawn: list[int]) -> torch.Tensor:
    """Of the emitted token, where these children were drawn from q in turn."""
    candidates = torch.tensor([drawn or [-1]])
    chances, left = odds_in_turn(p[None], q[None], candidates)
    emitted, refused = torch.zeros_like(p), 1.0
    for token, chance in zip(candidates[0].tolist(), chances[0].tolist(), strict=True):
        emitted[token] += refused * chance
        refused *= 1 - chance
    return emitted + refused * left[0]


seeds = st.integers(0, 2**31)
# Equal tokens, or tokens that differ in float32 as well, which drafts are ranked in: ties are broken by number in both.
sharpnesses = st.just(0.0) | st.floats(1e-3, 6)


@given(seeds, st.integers(2, 6), st.integers(1, 4), sharpnesses, st.booleans())
@settings(max_examples=150)
def test_the_rule_is_the_optimal_plan_and_keeps_the_distribution(seed, size, children, sharpness, zeros):
    """Against the linear programme between all proposals and all tokens, by POT; the marginal to rounding."""
    generator = torch.Generator().manual_seed(seed)
    p, q = (sharpness * torch.randn(2, size, generator=generator, dtype=torch.float64)).softmax(-1)
    if zeros:
        p[seed % size] = q[(seed + 1) % size] = 0.0
        p, q = p / p.sum(), q / q.sum()
    children = min(children, int((q > 0).sum()))
    likeliest = q.topk(children - 1).indices
    rest = q.scatter(0, likeliest, 0.0)
    rest = rest / rest.sum()
    proposals = one_drawn(q, children)
    assert abs(sum(chance for chance, _, _ in proposals) - 1) < 1e-12
    emitted, accepted = torch.zeros_like(p), 0.0
    for chance, estimate, tokens in proposals:
        assert sorted(tokens[1:]) == sorted(likeliest.tolist())
        assert (
            abs(chance - float(rest[tokens[0]])) < 1e-12 and abs(estimate - log(1 - float(q[likeliest].sum()))) < 1e-6
        )
        one = law(p, rest, tokens[:1])
        emitted += chance * one
        accepted += chance * float(one[tokens].sum())
    torch.testing.assert_close(emitted, p, atol=1e-12, rtol=0)
    mass = np.array([chance for chance, _, _ in proposals])
    cost = np.array([[float(token not in tokens) for token in range(size)] for _, _, tokens in proposals])
    assert abs(accepted - (1 - ot.emd2(mass / mass.sum(), p.numpy(), cost))) < 1e-9


def grown(
    q, branching: tuple[int, ...], width: int, nodes: int
) -> list[tuple[float, TokenTree, list[tuple[int, ...]]]]:
    """All trees that ``TrainedDrafter`` can grow of one drawn child each: probability, the tree, texts of its nodes.

    As it does, it expands the best ``width`` nodes of a depth by joint chance, and keeps the best ``nodes`` of all.
    """
    trees = [(1.0, [-1], [()], [2.0], [False], [0])]
    for count in branching:
        deeper = []
        for chance, parents, texts, joint, drawn, frontier in trees:
            for proposals in product(*(one_drawn(q[texts[node]], count) for node in frontier)):
                new_parents, new_texts, new_joint, new_drawn = list(parents), list(texts), list(joint), list(drawn)
                for node, (_, estimate, tokens) in zip(frontier, proposals, strict=True):
                    above = joint[node] if node else 0.0
                    estimates = [estimate, *(log(float(q[texts[node]][token])) for token in tokens[1:])]
                    for place, (token, one) in enumerate(zip(tokens, estimates, strict=True)):
                        new_parents.append(node)
                        new_texts.append((*texts[node], token))
                        new_joint.append(above + one)
                        new_drawn.append(place == 0)
                best = torch.tensor(new_joint[len(parents) :]).topk(min(width, len(new_joint) - len(parents))).indices
                odds = chance * prod(one for one, _, _ in proposals)
                deeper.append((odds, new_parents, new_texts, new_joint, new_drawn, (len(parents) + best).tolist()))
        trees = deeper
    found = []
    for chance, parents, texts, joint, drawn, _ in trees:
        rows = []
        for text in texts:  # what would be written where nodes were expanded
            likely = q[text].topk(max(branching[min(len(text), len(branching) - 1)] - 1, 0)).indices
            rest = q[text].scatter(0, likely, 0.0)
            rows.append((rest / rest.sum()).log())
        numbers = torch.arange(len(texts))  # of nodes, as their tokens, to find the texts again
        tree = TokenTree(
            numbers[None], torch.tensor([parents]), torch.stack(rows)[None], torch.tensor([joint]),
            drawn=torch.tensor([drawn]),
        )  # fmt: skip
        if nodes + 1 < tree.size:
            tree = keep_best(tree, nodes + 1)
        kept = [texts[number] for number in tree.tokens[0].tolist()]
        found.append((chance, tree, kept))
    return found


def joint_in_turn(p, trees) -> dict[tuple[int, ...], float]:
    """The exact distribution of three tokens where ``odds_in_turn`` decides at the root and where its token leads."""
    vocabulary = range(len(p[()]))
    output = dict.fromkeys(product(vocabulary, repeat=3), 0.0)
    for chance, tree, texts in trees:
        flags, parents, log_q = tree.were_drawn[0].tolist(), tree.parent[0].tolist(), tree.log_q
        reached = [(chance, 0)]
        while reached:
            odds, node = reached.pop()
            below = [child for child, parent in enumerate(parents) if parent == node]
            drawn = [texts[child][-1] for child in below if flags[child]]
            for token, share in enumerate(law(p[texts[node]], log_q[0, node].exp(), drawn).tolist()):
                text = (*texts[node], token)
                child = next((child for child in below if texts[child] == text), None)
                if child is not None and len(text) < 3:
                    reached.append((odds * share, child))
                    continue
                for rest in product(vocabulary, repeat=3 - len(text)):
                    whole = text + rest
                    output[whole] += odds * share * prod(float(p[whole[:i]][whole[i]]) for i in range(len(text), 3))
    return output


SHAPES = [
    ((1, 1), 1, 9),
    ((2, 2), 1, 9),
    ((2, 2), 2, 9),
    ((3, 2), 2, 9),
    ((2, 2), 2, 3),
    ((2, 2), 2, 1),
    ((3, 2), 3, 4),
]


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("branching", "width", "nodes"), SHAPES)
def test_three_tokens_have_exactly_the_targets_distribution(branching, width, nodes, zeros):
    """No statistics: all trees that can be grown, nodes left out or not, and all texts of three tokens; root to leaf,
    and from the leaves to the root.
    """
    for seed in range(3):
        p, q = distributions(seed, 4, zeros), distributions(100 + seed, 4, zeros=False)
        trees = grown(q, branching, width, nodes)
        assert_exact(p, joint_in_turn(p, trees))
        assert_exact(p, from_leaves(p, trees))


def from_leaves(p, trees) -> dict[tuple[int, ...], float]:
    """The same by ``stop_chances``."""
    told = [(chance, tree.parent[0].tolist(), texts, tree) for chance, tree, texts in trees]
    return joint_of_three(p, [(chance, parents, texts) for chance, parents, texts, _ in told],
                          given=[tree for *_, tree in told])[0]  # fmt: skip


def test_the_exact_test_fails_on_biased_trees():
    """Negative controls: a wrong q, the likeliest told as drawn, and a drawn child left out by what it is."""
    p, q = distributions(0, 4, zeros=False), distributions(100, 4, zeros=False)
    honest = grown(q, (2, 2), 2, 9)
    whole, all_drawn, pruned = [], [], []
    for chance, tree, texts in honest:
        log_q = torch.stack([q[text] if len(text) < 3 else q[()] for text in texts]).log()[None]
        parts = tree.tokens, tree.parent
        whole.append((chance, TokenTree(*parts, log_q, drawn=tree.drawn), texts))
        all_drawn.append((chance, TokenTree(*parts, log_q), texts))
        likelier = float(q[()][texts[1][0]]) > 0.15  # the root's first child is the drawn one
        parents = tree.parent if likelier else tree.parent.index_fill(1, torch.tensor(1), -1)
        pruned.append((chance, TokenTree(tree.tokens, parents, tree.log_q, drawn=tree.drawn), texts))
    assert 0 < sum(int(tree.parent[0, 1]) < 0 for _, tree, _ in pruned) < len(pruned)
    for trees in (whole, all_drawn, pruned):
        for output in (joint_in_turn(p, trees), from_leaves(p, trees)):
            with pytest.raises(AssertionError):
                assert_exact(p, output)
