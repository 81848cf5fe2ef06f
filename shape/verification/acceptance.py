"""Which proposed tokens are accepted. Pure functions of tensors; ``shape.generation.rules`` gives them their names.

The rule "match" has three forms, of which ``Sampler.match`` takes one. ``match`` looks at every node by operations of
tensors alone, as accelerators and CUDA graphs need it. ``follow`` asks for choices where they lead alone, since
processors see each text and can cost more than a forward. ``on_host`` does so in one compiled loop, for a CPU.

``match`` is lossless for any tree and any pruning; ``reject_in_turn`` and ``traverse`` for trees that say which
children were drawn (``TokenTree.were_drawn``) and from what, and of which none was left out by what it is.
``typical_lossy``, ``trs_lossy`` and ``unverified_lossy`` change the output and say so in their names.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shape.verification.tree import TokenTree, of_lists, rows_of

Choose = Callable[[list[int], list[int], list[list[int]]], list[int]]


@dataclass(frozen=True)
class Accepted:
    """What one verification accepted.

    Attributes:
        path: (B, D) int64, nodes whose states are kept, root first; beyond ``counts`` undefined
            but valid indices.
        counts: (B,) int64, number of kept nodes, which is also the number of tokens emitted.
        tokens: (B, D) int64, emitted tokens, of which the first ``counts`` count.
        drafted: (B,) int64, how many of these were proposed; what follows them is the target's own choice.
    """

    path: Tensor
    counts: Tensor
    tokens: Tensor
    drafted: Tensor


def match(tree: TokenTree, choices: Tensor) -> Accepted:
    """Walk down the tree while the target's choice at a node is one of its children; the last choice is emitted too.

    The output is a function of the target's choices alone, so it equals autoregressive decoding with the same choices,
    whatever was proposed: choices are argmax(log p) when greedy and argmax(log p + g) with Gumbel noise g shared
    by position when sampling (arXiv 2408.07978, 2506.05632). Of equal siblings any may be on the path.

    Args:
        choices: (B, N) int64, the target's choice of next token at every node.
    """
    agrees = choices.gather(1, tree.parent.clamp(min=0)) == tree.tokens
    last = tree.depth.masked_fill(~_reached(tree, agrees), -1).argmax(1)
    return _accept_path(tree, last, choices.gather(1, last[:, None]))


def follow(tree: TokenTree, choose: Choose, ends: Collection[int] = (), most: Sequence[int] | None = None) -> Accepted:
    """``match`` that asks for choices where they lead alone: what a choice costs is then paid once per emitted token.

    Args:
        choose: gives the choices at one node of each of some rows, all of one depth, from the rows, the nodes and the
            tokens of the paths to them.
        ends: tokens behind which no choice is asked for.
        most: of each row, how many choices are asked for at most, 1 or more; None for all that lead on.
    """
    proposed, parents = tree.tokens.tolist(), tree.parent.tolist()
    tokens: list[list[int]] = [[] for _ in parents]
    nodes = [[0] for _ in parents]  # where the choices lead: to several nodes, if there are equal siblings
    going = list(range(len(parents)))
    while going:
        chosen = choose(going, [nodes[row][0] for row in going], [tokens[row] for row in going])
        led = []
        for row, token in zip(going, chosen, strict=True):
            tokens[row].append(token)
            pairs = enumerate(zip(parents[row], proposed[row], strict=True))
            children = [node for node, (above, draft) in pairs if draft == token and above in nodes[row]]
            if children:
                nodes[row] = children
                if token not in ends and (most is None or len(tokens[row]) < most[row]):
                    led.append(row)
        going = led
    paths = [_down_to(last, above) for (last, *_), above in zip(nodes, parents, strict=True)]
    return _accepted(paths, tokens, tree.tokens.device)


def _down_to(node: int, parents: list[int]) -> list[int]:
    """The nodes from the root down to one."""
    path = [node]
    while path[-1] > 0:
        path.append(parents[path[-1]])
    return path[::-1]


def _accepted(paths: list[list[int]], tokens: list[list[int]], device: torch.device) -> Accepted:
    """Of each sequence the accepted nodes and as many emitted tokens, or one fewer, which end with a drafted one."""
    longest = max(map(len, paths))
    # With the counts behind them, as one tensor.
    kept = [[*path, *[0] * (longest - len(path)), len(row)] for path, row in zip(paths, tokens, strict=True)]
    emitted = [[*row, *[0] * (longest - len(row)), len(path) - 1] for path, row in zip(paths, tokens, strict=True)]
    both = of_lists([kept, emitted], device)
    return Accepted(both[0, :, :-1], both[0, :, -1], both[1, :, :-1], both[1, :, -1])


def reject_in_turn(p: Tensor, q: Tensor, candidates: Tensor, uniforms: Tensor, noise: Tensor) -> Tensor:
    """The target's token at one node by rejection sampling in several rounds, lossless for drawn candidates.

    Candidate k is taken with probability min(1, p(x) / q(x)); if it is not, p becomes the residual (p - q)+ (SpecInfer,
    arXiv 2305.09781; one candidate: arXiv 2211.17192) and q is renormalised without x, from which the next candidate
    was drawn (Recursive Speculative Decoding, arXiv 2402.14160). After the last one the token is drawn from the
    residual. A rejected candidate has p < q, so no residual contains it.

    Children that were not drawn are no candidates. Their distribution need not be known: the token is followed if it is
    one of them. Beside one drawn candidate that is the optimum of the transport problem, in closed form: min(p, q) is
    served by the candidate, and all that is left of p falls on other children where it can (Hu et al., arXiv
    2502.18779, greedy drafts; with one child that was not drawn: SpecHub, arXiv 2411.05289).

    Args:
        p: (R, V) the target's distribution.
        q: (R, V) the distribution of the first candidate; nothing is drawn where it has no mass.
        candidates: (R, K) int64 in the order of drawing, -1 where there is none.
        uniforms: (R, K) in (0, 1). noise: (R, V) Gumbel noise for the draw from the residual.

    Returns:
        (R,) int64.
    """
    chances, left = odds_in_turn(p, q, candidates)
    takes = uniforms < chances
    first = takes.int().argmax(1, keepdim=True)
    drawn = (left.log() + noise).argmax(-1)
    return torch.where(takes.any(1), candidates.gather(1, first)[:, 0], drawn)


def odds_in_turn(p: Tensor, q: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """The chance of each candidate of ``reject_in_turn`` when it is asked, (R, K), and what of p is left, (R, V)."""
    chances = []
    for candidate in candidates.T:
        index = candidate.clamp(min=0)[:, None]
        offered = q.gather(1, index)
        asked = (candidate[:, None] >= 0) & (offered > 0)  # nothing is drawn where q has no mass left
        chances.append(torch.where(asked, (p.gather(1, index) / offered).clamp(max=1), 0.0))
        residual = (p - q).clamp(min=0)
        mass = residual.sum(1, keepdim=True)
        # Without any mass p equals q up to rounding, and the rejection was rounding too.
        p = torch.where(asked & (mass > 0), residual / mass, p)
        rest = q.scatter(1, index, 0.0)
        q = torch.where(asked, rest / rest.sum(1, keepdim=True).clamp(min=1e-30), q)
    return torch.cat(chances, dim=1), p


def traverse(tree: TokenTree, p: Tensor, q: Tensor | None, uniforms: Tensor, noise: Tensor) -> Accepted:
    """Traversal verification: from the leaves to the root, lossless for drawn candidates.

    Nodes are asked in post-order whether the text ends with them; the first that says yes ends the accepted path, and
    the token after it is drawn from what is left of the target's distribution there. ``stop_chances`` has the chances.
    (Traversal Verification, arXiv 2505.12398; on a chain it is Block Verification, arXiv 2403.10444, algorithm 2,
    of which no chain verification accepts more.)

    Args:
        p: (B, N, V) the target's distribution at every node.
        q: (B, N, V) the distribution of each node's first child, the others being drawn from it one after the other
            without replacement; draws at different nodes are independent. Nothing is read of it where none was drawn.
        uniforms: (B, N) in (0, 1). noise: (B, V) Gumbel noise for the draw of the last token.
    """
    chances, left = stop_chances(tree, p, q)
    holds = ((uniforms < chances)[:, :, None] & tree.ancestors).any(1)  # the node or one below it stops
    reached = _reached(tree, holds & ~(_earlier_siblings(tree) & holds[:, None, :]).any(-1))
    last = tree.depth.masked_fill(~reached, -1).argmax(1, keepdim=True)
    left = rows_of(left, last)[:, 0]
    return _accept_path(tree, last[:, 0], (left.log() + noise).argmax(-1, keepdim=True))


def stop_chances(tree: TokenTree, p: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor]:
    """The chance that ``traverse`` stops at a node when it asks, (B, N), and what is left of p there, (B, N, V).

    A subtree is given a share w of the probability: it must accept something with chance w, and then continue as the
    target would; the root's is 1. A child x drawn from q gets min(1, w p(x) / q(x)), so that over all draws it serves
    min(w p, q) at each token; one that was not drawn is a draw from a q of its own, x alone. What it leaves, if it
    refuses, is R = (w p - q)+ out of the 1 - sum min(w p, q) = |R| + 1 - w in which it refuses: thus p becomes R / |R|,
    w becomes |R| / (|R| + 1 - w), q is renormalised without x, and the next child follows. Neither depends on x, so the
    next child is a draw from that q whatever was refused. After the last child the node itself stops with chance w.

    Arguments as in ``traverse``.
    """
    rows = torch.arange(tree.tokens.shape[0], device=p.device)
    tiny = torch.finfo(p.dtype).tiny
    p, q = p.clone(), None if q is None else q.to(p.dtype, copy=True)
    drawn = torch.full_like(tree.parent, q is not None, dtype=torch.bool) if tree.drawn is None else tree.drawn
    share = torch.zeros_like(p[:, :, 0])
    share[:, 0] = 1.0
    for node in range(1, tree.size):
        above, token = tree.parent[:, node].clamp(min=0), tree.tokens[:, node, None]
        target, given = p[rows, above], share[rows, above, None]
        offered = torch.zeros_like(target).scatter_(1, token, 1.0)
        if q is not None:
            offered = torch.where(drawn[:, node, None], q[rows, above], offered)
        chance = offered.gather(1, token)
        # Nothing is drawn where q has no mass left, and nodes without a parent are padding.
        asked = (chance > 0) & (tree.parent[:, node, None] >= 0)
        served = given * target
        left = (served - offered).clamp(min=0)
        mass = left.sum(1, keepdim=True)
        share[:, node, None] = torch.where(asked, (served.gather(1, token) / chance).clamp(max=1), 0.0)
        share[rows, above, None] = torch.where(asked, mass / (mass + (1 - given)).clamp(min=tiny), given)
        # Without any mass nothing is refused but by rounding.
        p[rows, above] = torch.where(asked & (mass > 0), left / mass, target)
        if q is not None:
            rest = offered.scatter(1, token, 0.0)
            asked = asked & drawn[:, node, None]
            q[rows, above] = torch.where(asked, rest / rest.sum(1, keepdim=True).clamp(min=tiny), q[rows, above])
    share[:, 0] = 1.0
    return share, p


def typical_lossy(tree: TokenTree, p: Tensor, choices: Tensor, epsilon: float, delta: float) -> Accepted:
    """Typical acceptance (Medusa, arXiv 2401.10774). Lossy: the output is not the target's.

    A token is accepted where p(x) > min(epsilon, delta exp(-H(p))): it need not be a draw from the target, only not be
    unlikely for what the target is unsure of. The longest path of such tokens is accepted, of equally long ones the
    likeliest; the target's own choice follows it, so that every step makes progress.

    Args:
        p: (B, N, V) the target's distribution at every node. choices: (B, N) int64, its choice there.
    """
    chance = at_nodes(tree, p)
    limit = (delta * torch.exp(-torch.special.entr(p).sum(-1))).clamp(max=epsilon)
    reached = _reached(tree, chance > limit.gather(1, tree.parent.clamp(min=0)))
    longest = reached & (tree.depth == tree.depth.masked_fill(~reached, -1).amax(1, keepdim=True))
    last = _joint(tree, chance.log()).masked_fill(~longest, float("-inf")).argmax(1)
    return _accept_path(tree, last, choices.gather(1, last[:, None]))


def trs_lossy(tree: TokenTree, log_probs: Tensor, roots: Tensor, threshold: float) -> Accepted:
    """The paper's tree rejection sampling (section 3.3, appendix H). Lossy: the output is not the target's.

    Full root-to-leaf paths whose joint probability under the target is at least ``threshold`` times the best
    path's are kept, and the longest prefix common to all of them is emitted. That prefix can be empty, and is so where
    no path is possible; then the target's own choice at the root is emitted, so that every step makes progress.

    Args:
        log_probs: (B, N) float, log-probability of each node's token at its parent under the target; the root's is
            not looked at.
        roots: (B,) int64, the target's choice at every root.
    """
    depth = tree.depth
    joint = _joint(tree, log_probs).masked_fill(depth < depth.amax(1, keepdim=True), float("-inf"))
    # Where no path is possible, the root is kept like everything else, and nothing but it is common.
    kept = joint >= joint.amax(1, keepdim=True) + math.log(threshold)
    # A node is on the common prefix when every kept leaf descends from it.
    common = (tree.ancestors | ~kept[:, :, None]).all(1)
    # Distinct nodes with equal tokens do not exist in a k^N tree, so a node says its token.
    last = depth.masked_fill(~common, -1).argmax(1)
    return _ending_with_draft(_accept_path(tree, last, roots[:, None]))


def unverified_lossy(tree: TokenTree, possible: Tensor, roots: Tensor) -> Accepted:
    """The drafter alone: the path of every node's first child is emitted, whatever the target thinks of it. Lossy.

    Where nothing is drafted the target's own choice at the root is emitted, so that every step makes progress.

    Args:
        possible: (B, N) bool, whether the request allows a node's token (it may have banned some); the root's is not
            looked at. What follows the first that is not allowed is not emitted.
        roots: (B,) int64, the target's choice at every root.
    """
    last = tree.depth.masked_fill(~_reached(tree, possible & ~_earlier_siblings(tree).any(-1)), -1).argmax(1)
    return _ending_with_draft(_accept_path(tree, last, roots[:, None]))


def at_nodes(tree: TokenTree, scores: Tensor) -> Tensor:
    """(B, N): of (B, N, V) what every node's parent has for its token."""
    rows = torch.arange(scores.shape[0], device=scores.device)[:, None]
    return scores[rows, tree.parent.clamp(min=0), tree.tokens]


def _ending_with_draft(accepted: Accepted) -> Accepted:
    """Without the target's choice behind a draft: its last token has not been through the target as a committed root
    yet, so one state fewer is kept than nodes.
    """
    return replace(accepted, counts=accepted.drafted.clamp(min=1))


def _earlier_siblings(tree: TokenTree) -> Tensor:
    """(B, N, N) bool: [b, i, j] says that j is before i and has the same parent."""
    return (tree.parent[:, :, None] == tree.parent[:, None, :]).tril(-1)


def _reached(tree: TokenTree, accepted: Tensor) -> Tensor:
    """(B, N) bool: nodes that are accepted, (B, N) bool, with all above them. The root is; padding never is."""
    accepted = accepted & (tree.parent >= 0)
    accepted[:, 0] = True
    return (accepted[:, None, :] | ~tree.ancestors).all(-1)


def _joint(tree: TokenTree, log_probs: Tensor) -> Tensor:
    """(B, N) sums of (B, N) log-probabilities from below the root down to each node."""
    counted = tree.ancestors & (torch.arange(tree.size, device=log_probs.device) > 0)
    return torch.where(counted, log_probs[:, None, :], 0.0).sum(-1)


def _accept_path(tree: TokenTree, last: Tensor, following: Tensor) -> Accepted:
    """The path from the root to node ``last`` (B,), in order: its drafted tokens, and ``following`` (B, 1)."""
    batch, nodes = tree.tokens.shape
    rows = torch.arange(batch, device=last.device)
    on_path = tree.ancestors[rows, last]
    index = torch.arange(nodes, device=last.device).expand(batch, nodes)
    # Nodes off the path are sent to one slot past the end, which is then cut away.
    slot = torch.where(on_path, tree.depth, nodes)
    path = torch.zeros(batch, nodes + 1, dtype=torch.long, device=last.device).scatter_(1, slot, index)[:, :nodes]
    accepted = tree.depth[rows, last]
    tokens = tree.tokens.gather(1, path).roll(-1, dims=1).scatter(1, accepted[:, None], following)
    return Accepted(path, accepted + 1, tokens, accepted)
