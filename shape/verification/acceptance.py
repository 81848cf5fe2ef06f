"""Acceptance rules: which proposed tokens stand. Pure functions of tensors.

``match`` is lossless for any tree and any pruning; ``reject_in_turn`` for trees whose children were drawn from the
distribution that it is told, or from none that it is told, and not selected afterwards. ``trs_lossy`` is the paper's
tree rejection sampling, which changes the output and says so in its name.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shape.verification.tree import TokenTree


@dataclass(frozen=True)
class Accepted:
    """What one verification settled.

    Attributes:
        path: (B, D) int64, nodes whose cache rows and states are kept, root first; beyond ``counts`` undefined
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

    The output is a function of the target's choices alone, so it equals plain decoding with the same choices,
    whatever was proposed: choices are argmax(log p) when greedy and argmax(log p + g) with Gumbel noise g shared
    by position when sampling (arXiv 2408.07978, 2506.05632).

    Args:
        choices: (B, N) int64, the target's choice of next token at every node.
    """
    if tree.size == 1:  # plain decoding should not pay for trees
        none = torch.zeros_like(choices)
        return Accepted(none, none[:, 0] + 1, choices, none[:, 0])
    parent = tree.parent
    agrees = choices.gather(1, parent.clamp(min=0)) == tree.tokens
    agrees &= parent >= 0
    agrees[:, 0] = True
    reached = (agrees[:, None, :] | ~tree.ancestors).all(-1)
    reached[:, 1:] &= parent[:, 1:] >= 0
    last = tree.depth.masked_fill(~reached, -1).argmax(1)
    return _accept_path(tree, last, choices)


def reject_in_turn(p: Tensor, q: Tensor | None, candidates: Tensor, uniforms: Tensor, noise: Tensor) -> Tensor:
    """The target's token at one node by rejection sampling in several rounds, lossless for drawn candidates.

    Candidate k is taken with probability min(1, p(x) / q(x)); if it is not, p becomes the residual (p - q)+ and q is
    renormalised without x, from which the next candidate was drawn (SpecInfer, arXiv 2305.09781, section 4; one
    candidate: arXiv 2211.17192). After the last one the token is drawn from the residual. A rejected candidate has
    p < q, so no residual contains it.

    Args:
        p: (R, V) the target's distribution.
        q: (R, V) the distribution of the first candidate; None for candidates that were not drawn: each is then taken
            with probability p(x), whatever chose it.
        candidates: (R, K) int64 in the order of drawing, -1 where there is none.
        uniforms: (R, K) in (0, 1). noise: (R, V) Gumbel noise for the draw from the residual.

    Returns:
        (R,) int64.
    """
    taken = torch.full_like(candidates[:, 0], -1)
    for candidate, uniform in zip(candidates.T, uniforms.T, strict=True):
        index = candidate.clamp(min=0)[:, None]
        offered = torch.zeros_like(p).scatter_(1, index, 1.0) if q is None else q
        chance = offered.gather(1, index)[:, 0]
        asked = (candidate >= 0) & (taken < 0) & (chance > 0)  # nothing is drawn where q has no mass left
        take = asked & (uniform * chance < p.gather(1, index)[:, 0])
        taken = torch.where(take, candidate, taken)
        residual = (p - offered).clamp(min=0)
        mass = residual.sum(1, keepdim=True)
        # Without any mass p equals q up to rounding, and the rejection was rounding too.
        p = torch.where((asked & ~take)[:, None] & (mass > 0), residual / mass, p)
        if q is not None:
            rest = q.scatter(1, index, 0.0)
            q = torch.where(asked[:, None], rest / rest.sum(1, keepdim=True).clamp(min=1e-30), q)
    return torch.where(taken >= 0, taken, (p.log() + noise).argmax(-1))


def trs_lossy(tree: TokenTree, log_probs: Tensor, choices: Tensor, threshold: float = 0.8) -> Accepted:
    """The paper's tree rejection sampling (section 3.3, appendix H). Lossy: the output is not the target's.

    Full root-to-leaf paths whose joint probability under the target is at least ``threshold`` times the best
    path's are kept, and the longest prefix common to all of them is emitted. That prefix can be empty; then the
    target's own choice at the root is emitted, so that every step makes progress.

    Args:
        log_probs: (B, N) float, log-probability of each node's token at its parent under the target; 0 at the root.
        choices: (B, N) int64, the target's choice at every node (only the root's is used).
    """
    ancestors, depth = tree.ancestors, tree.depth
    joint = (ancestors * log_probs[:, None, :]).sum(-1)
    is_leaf = depth == depth.amax(1, keepdim=True)
    joint = joint.masked_fill(~is_leaf, float("-inf"))
    kept = joint >= joint.amax(1, keepdim=True) + torch.log(torch.tensor(threshold, dtype=joint.dtype))
    # A node is on the common prefix when every kept leaf descends from it.
    common = (ancestors | ~kept[:, :, None]).all(1)
    # Distinct nodes with equal tokens do not exist in a k^N tree, so nodes stand for tokens.
    last = depth.masked_fill(~common, -1).argmax(1)
    full = _accept_path(tree, last, choices)
    # Emitted tokens are the nodes below the root; the last node has not been through the target as a settled
    # root yet, so one kept cache row fewer than nodes on the path.
    path_tokens = tree.tokens.gather(1, full.path)
    shifted = torch.cat([path_tokens[:, 1:], path_tokens[:, :1]], dim=1)
    empty = full.drafted == 0
    tokens = torch.where(empty[:, None], choices[:, :1], shifted)
    return Accepted(full.path, full.drafted.clamp(min=1), tokens, full.drafted)


def _accept_path(tree: TokenTree, last: Tensor, choices: Tensor) -> Accepted:
    """The path from the root to node ``last`` (B,), in order, and the choices along it."""
    batch, nodes = tree.tokens.shape
    rows = torch.arange(batch, device=last.device)
    on_path = tree.ancestors[rows, last]
    index = torch.arange(nodes, device=last.device).expand(batch, nodes)
    # Nodes off the path are sent to one slot past the end, which is then cut away.
    slot = torch.where(on_path, tree.depth, nodes)
    path = torch.zeros(batch, nodes + 1, dtype=torch.long, device=last.device).scatter_(1, slot, index)[:, :nodes]
    accepted = tree.depth[rows, last]
    return Accepted(path, accepted + 1, choices.gather(1, path), accepted)
