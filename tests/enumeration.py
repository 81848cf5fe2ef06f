"""Decoding of three tokens by enumeration: every tree that can be drawn, and every end that it can have; and whether
samples follow a distribution that is known.
"""

from itertools import permutations, product
from math import prod

import torch
from scipy.stats import chi2

from shape.verification.acceptance import stop_chances
from shape.verification.tree import TokenTree


def distributions(seed: int, vocabulary: int, zeros: bool) -> dict[tuple[int, ...], torch.Tensor]:
    """A distribution of the next token after every text of up to two tokens; with zeros, every other one has one."""
    generator = torch.Generator().manual_seed(seed)
    texts = [text for length in range(3) for text in product(range(vocabulary), repeat=length)]
    found = {}
    for number, text in enumerate(texts):
        weights = torch.rand(vocabulary, generator=generator, dtype=torch.float64) ** 2
        weights[number % vocabulary] *= 1 - (zeros and number % 2)
        found[text] = weights / weights.sum()
    return found


def draws(q: torch.Tensor, count: int) -> list[tuple[float, tuple[int, ...]]]:
    """Every order in which ``count`` tokens can be drawn without replacement, with its probability.

    Once q has run out, the places are filled with what is left, in order of the tokens.
    """
    found = []
    for order in permutations(range(len(q)), count):
        chance, left = 1.0, {token: float(q[token]) for token in range(len(q))}
        for token in order:
            mass = sum(left.values())
            chance *= left[token] / mass if mass > 0 else float(token == min(left))
            del left[token]
        found.append((chance, order))
    return [(chance, order) for chance, order in found if chance > 0]


def every_tree(q, branching: tuple[int, ...], width: int) -> list[tuple[float, list[int], list[tuple[int, ...]]]]:
    """All trees that can be drawn: probability, parents and texts of the nodes.

    As drafters do, ``width`` nodes of a depth are expanded, chosen by what was drawn: the likeliest tokens under q.
    """
    trees = [(1.0, [-1], [()], [0])]
    for count in branching:
        grown = []
        for chance, parents, texts, frontier in trees:
            for drawn in product(*(draws(q[texts[node]], count) for node in frontier)):
                children = [(node, token) for node, (_, order) in zip(frontier, drawn, strict=True) for token in order]
                likely = torch.tensor([float(q[texts[node]][token]) for node, token in children])
                grown.append(
                    (
                        chance * prod(one for one, _ in drawn),
                        [*parents, *(node for node, _ in children)],
                        [*texts, *((*texts[node], token) for node, token in children)],
                        (len(parents) + likely.topk(min(width, len(children))).indices).tolist(),
                    )
                )
        trees = grown
    return [(chance, parents, texts) for chance, parents, texts, _ in trees]


def post_order(parents: list[int], node: int = 0) -> list[int]:
    below = [child for child, parent in enumerate(parents) if parent == node]
    return [one for child in below for one in post_order(parents, child)] + [node]


def joint_of_three(p, trees, q=None, given=None) -> tuple[dict[tuple[int, ...], float], float]:
    """The exact distribution of three tokens decoded with ``traverse``, and the mean number of accepted ones.

    What the accepted tokens and the one behind them leave open is drawn from p, as the next step would.

    Args:
        given: trees that say themselves what was drawn, and from what, instead of q.
    """
    vocabulary = range(len(p[()]))
    output, accepted = dict.fromkeys(product(vocabulary, repeat=3), 0.0), 0.0
    for number, (chance, parents, texts) in enumerate(trees):
        target, told = (one and torch.stack([one[text] for text in texts])[None] for one in (p, q))
        tokens = torch.tensor([[text[-1] if text else 0 for text in texts]])
        tree = TokenTree(tokens, torch.tensor([parents]), drawn=None if given is None else given[number].drawn)
        if given is not None:
            told = given[number].log_q.exp()
        chances, left = stop_chances(tree, target, told)
        for node in post_order(parents):
            stops = chance * float(chances[0, node])
            chance -= stops
            accepted += stops * len(texts[node])
            for token, share in enumerate(left[0, node].tolist()):
                start = (*texts[node], token)
                for rest in product(vocabulary, repeat=3 - len(start)):
                    text = start + rest
                    output[text] += stops * share * prod(float(p[text[:i]][text[i]]) for i in range(len(start), 3))
        assert chance < 1e-12
    return output, accepted


def assert_exact(p, output) -> None:
    for text, chance in output.items():
        assert abs(chance - float(p[()][text[0]] * p[text[:1]][text[1]] * p[text[:2]][text[2]])) < 1e-12


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """The statistic of samples, as a share of its 1 - 1e-6 quantile: below 1 but for a false alarm in a million.

    What is impossible must not have come at all; what is expected fewer than five times is counted as one, which is
    left out where even that is expected less: the statistic would not follow its distribution.
    """
    assert counts.sum() > 0, "nothing was seen"
    assert not counts[expected == 0].any(), "tokens of probability 0"
    rare = (expected > 0) & (expected < 5)
    together = int(expected[rare].sum() >= 5)
    counts, expected = (torch.cat([one[expected >= 5], one[rare].sum()[None][:together]]) for one in (counts, expected))
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return statistic / chi2.ppf(1 - 1e-6, max(len(expected) - 1, 1))
