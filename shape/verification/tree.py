"""Token trees: proposed tokens with parents, and what attention needs to know of them. Pure functions of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shape.verification.compiled import compiled, runs_on_host

Drafted = list[tuple[int, int, float]]
ALIGNED = 8  # numbers: what a GPU's kernels want rows of a mask to be a multiple of


@dataclass(frozen=True)
class TokenTree:
    """Proposed tokens of a batch; node 0 of every tree is the root, the last committed token.

    Attributes:
        tokens: (B, N) int64.
        parent: (B, N) int64, topological (``parent[b, i] < i``); -1 at the root and at padding nodes, which
            are never accepted.
        log_q: (B, N, V) log-probabilities from which each node's children were drawn one after the other, without
            replacement, in the order of their numbers and independently of other nodes; None where they were not
            drawn. Only the rules "rejection", "traversal" and "transport" look at it.
        drawn: (B, N) bool, nodes that were drawn, where there are others beside them; None: all, if there is ``log_q``.
        joint: (B, N) log of the drafter's estimate that the target will choose the whole path to a node; None where the
            drafter makes none. Verification does not look at it.
        source: per sequence and node who proposed it, where there are several; None for root and padding.
        deepest: no node is deeper, as far as the host knows; None where it does not.
    """

    tokens: Tensor
    parent: Tensor
    log_q: Tensor | None = None
    joint: Tensor | None = None
    source: list[list[str | None]] | None = None
    deepest: int | None = None
    drawn: Tensor | None = None

    @cached_property
    def ancestors(self) -> Tensor:
        """(B, N, N) bool: [b, i, j] says that j is i or an ancestor of i."""
        return self._relations[0]

    @cached_property
    def depth(self) -> Tensor:
        """(B, N) int64: number of proper ancestors."""
        return self._relations[1]

    @cached_property
    def _relations(self) -> tuple[Tensor, Tensor]:
        if not runs_on_host(self.parent):
            above = ancestors(self.parent)
            return above, above.sum(-1) - 1
        found, depths = _walk(self.parent.contiguous().numpy())
        return torch.from_numpy(found), torch.from_numpy(depths)

    @property
    def most_depth(self) -> int:
        """No node is deeper. A device is not asked: what it would answer is waited for."""
        if self.deepest is not None:
            return self.deepest
        return int(self.depth.max()) if runs_on_host(self.parent) else self.size - 1

    @property
    def were_drawn(self) -> Tensor:
        """(B, N) bool: nodes that were drawn from what ``log_q`` says at their parents."""
        if self.drawn is not None:
            return self.drawn
        return torch.full_like(self.parent, self.log_q is not None, dtype=torch.bool)

    @property
    def size(self) -> int:
        return self.tokens.shape[1]

    def to(self, device: torch.device) -> "TokenTree":
        if self.tokens.device == device:
            return self
        held = {name: getattr(self, name) for name in ("tokens", "parent", "log_q", "joint", "drawn")}
        return replace(self, **{name: part.to(device) for name, part in held.items() if part is not None})


def of_lists(numbers: Sequence[Any], device: torch.device, kind: type = np.int64) -> Tensor:
    """``torch.tensor``, by way of numpy, which reads lists in half of the time. Nobody waits for it to reach a GPU."""
    held = torch.from_numpy(np.array(numbers, dtype=kind))
    return held.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else held.to(device)


def to_lists(*parts: Tensor) -> list[list[Any]]:
    """``tolist`` of tensors with a row per sequence, (B,) or (B, N) int64: one copy, and one wait, for all of them."""
    if parts[0].device.type == "cpu":
        return [part.tolist() for part in parts]
    whole = torch.cat([part.reshape(len(part), -1) for part in parts], dim=1)
    if whole.is_cuda:
        whole, copied = whole.to("cpu", non_blocking=True), torch.cuda.Event()  # into pinned memory
        copied.record(torch.cuda.current_stream(parts[0].device))
        copied.synchronize()
    rows, end, found = whole.tolist(), 0, []
    for part in parts:
        start, end = end, end + part[:1].numel()
        found.append([row[start] if part.dim() == 1 else row[start:end] for row in rows])
    return found


def ancestors(parent: Tensor) -> Tensor:
    """Ancestor-or-self relation of trees given by parents, by operations of tensors alone.

    Squaring I + P doubles the covered path length, so log2(N) small matrix products replace a loop over nodes.

    Args:
        parent: (B, N) int64, -1 for nodes without a parent.

    Returns:
        (B, N, N) bool.
    """
    batch, nodes = parent.shape
    reach = torch.eye(nodes, device=parent.device).repeat(batch, 1, 1)
    reach.scatter_(2, parent.clamp(min=0)[..., None], 1.0)
    # A node without a parent wrote itself a link to node 0; only node 0 itself may keep it.
    reach[:, 1:, 0] *= (parent[:, 1:] >= 0).to(reach.dtype)
    covered = 1
    while covered < nodes - 1:
        reach = (reach @ reach).clamp(max=1.0)
        covered *= 2
    return reach > 0


@compiled
def _walk(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``ancestors``, (B, N, N), and numbers of proper ones, (B, N)."""
    rows, nodes = parents.shape
    found, depths = np.zeros((rows, nodes, nodes), np.bool_), np.zeros((rows, nodes), np.int64)
    for row in range(rows):
        for node in range(nodes):
            above = parents[row, node]
            if above >= 0:
                depths[row, node] = depths[row, above] + 1
                found[row, node, : above + 1] = found[row, above, : above + 1]
            found[row, node, node] = True
    return found, depths


def chain(root: Tensor, drafts: Tensor) -> TokenTree:
    """The tree without branches: root (B,) followed by drafts (B, N - 1)."""
    tokens = torch.cat([root[:, None], drafts], dim=1)
    parent = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand_as(tokens)
    return TokenTree(tokens, parent, deepest=drafts.shape[1])


def ragged_chain(root: Tensor, drafts: list[list[int]]) -> TokenTree:
    """Chains of unequal length, (B,) roots and each sequence's draft tokens."""
    most = max(map(len, drafts), default=0)
    tokens = [[0, *row, *[0] * (most - len(row))] for row in drafts]
    parent = [[*range(-1, len(row)), *[-1] * (most - len(row))] for row in drafts]
    both = of_lists([tokens, parent], root.device)
    both[0, :, 0] = root
    return TokenTree(both[0], both[1], deepest=most)


def ragged_tree(root: Tensor, drafts: Sequence[Drafted]) -> TokenTree:
    """Trees of unequal size, made on the host: smaller ones are padded with nodes that nothing can accept.

    Args:
        root: (B,) int64.
        drafts: per sequence its nodes, parents first: token, number of the parent, where 0 is the root and 1 the
            first of these, and joint log-probability.
    """
    most = max(map(len, drafts), default=0)
    padded = [[(0, -1, 0.0), *row, *[(0, -1, -inf)] * (most - len(row))] for row in drafts]
    tokens, parent, joint = ([[node[part] for node in row] for row in padded] for part in range(3))
    both = of_lists([tokens, parent], root.device)
    both[0, :, 0] = root
    deepest = None if runs_on_host(root) else max(map(_deepest, drafts), default=0)
    return TokenTree(both[0], both[1], joint=of_lists(joint, root.device, np.float32), deepest=deepest)


def _deepest(drafted: Drafted) -> int:
    depths = [0]
    for _, above, _ in drafted:
        depths.append(depths[above] + 1)
    return max(depths)


def of_arrays(
    tokens: np.ndarray, parents: np.ndarray, joint: np.ndarray, source: list[list[str | None]] | None = None
) -> TokenTree:
    """Trees that the host's loops made."""
    return TokenTree(torch.from_numpy(tokens), torch.from_numpy(parents), None, torch.from_numpy(joint), source)


def root_only(root: Tensor) -> TokenTree:
    """No proposal: verification of it is one step of autoregressive decoding."""
    return TokenTree(root[:, None], torch.full_like(root[:, None], -1), deepest=0)


def first_path(tree: TokenTree) -> TokenTree:
    """The chain that follows each node's likeliest child, for targets that cannot attend to trees. One sequence only.

    Its first child where no chances are known, or where nodes were drawn: a choice among these would bias them.
    """
    parents, path = tree.parent[0].tolist(), [0]
    joint = [0.0] * tree.size if tree.joint is None or tree.log_q is not None else tree.joint[0].tolist()
    while children := [node for node in range(1, tree.size) if parents[node] == path[-1]]:
        path.append(max(children, key=joint.__getitem__))  # the first of equals
    known = {name: getattr(tree, name) for name in ("joint", "log_q", "drawn")}
    kept = {name: part[:, path] for name, part in known.items() if part is not None}
    source = None if tree.source is None else [[tree.source[0][node] for node in path]]
    return replace(chain(tree.tokens[:, 0], tree.tokens[:, path[1:]]), **kept, source=source)


def shallow(tree: TokenTree, depth: int) -> TokenTree:
    """The tree with padding for all nodes that lie deeper."""
    return replace(tree, parent=tree.parent.masked_fill(tree.depth > depth, -1))


def keep_best(tree: TokenTree, nodes: int, by: np.ndarray | None = None) -> TokenTree:
    """The ``nodes`` likeliest nodes of a tree, still in topological order, by ``joint`` or other such numbers, (B, N).

    They must not rise from parent to child (joint log-probabilities do not); the sort is stable, so at equal values
    the parent, which comes first, is kept first and the result stays a tree.
    """
    assert tree.joint is not None
    if tree.log_q is not None or not runs_on_host(tree.parent):
        return keep_best_on_device(tree, nodes)
    joint = tree.joint.numpy()
    given = tree.tokens.numpy(), tree.parent.numpy(), joint, joint if by is None else by
    tokens, parents, joint, kept = best_nodes(*given, tree.size, nodes)
    source = tree.source and [[row[at] for at in own] for row, own in zip(tree.source, kept.tolist(), strict=True)]
    return of_arrays(tokens, parents, joint, source)


def keep_best_on_device(tree: TokenTree, nodes: int) -> TokenTree:
    """``keep_best`` by operations of tensors alone."""
    assert tree.joint is not None
    kept = tree.joint.sort(dim=1, descending=True, stable=True).indices[:, :nodes].sort(dim=1).values
    new_index = torch.full_like(tree.parent, -1).scatter_(
        1, kept, torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
    )
    old_parent = tree.parent.gather(1, kept)
    new_parent = new_index.gather(1, old_parent.clamp(min=0)).masked_fill(old_parent < 0, -1)
    log_q = None if tree.log_q is None else rows_of(tree.log_q, kept)
    drawn = None if tree.drawn is None else tree.drawn.gather(1, kept)
    joint = tree.joint.gather(1, kept)
    return TokenTree(tree.tokens.gather(1, kept), new_parent, log_q, joint, deepest=tree.deepest, drawn=drawn)


def rows_of(numbers: Tensor, nodes: Tensor) -> Tensor:
    """(B, N, V), of nodes (B, M) int64 -> (B, M, V)."""
    return numbers.gather(1, nodes[:, :, None].expand(-1, -1, numbers.shape[2]))


@compiled
def best_nodes(
    tokens: np.ndarray, parents: np.ndarray, joint: np.ndarray, by: np.ndarray, size: int, nodes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """``keep_best`` of the trees in the first ``size`` columns of (B, at least N) arrays, or all of them; and which of
    the columns they are.
    """
    kept = np.empty((tokens.shape[0], min(nodes, size)), np.int64)
    if nodes >= size:
        kept[:] = np.arange(size)
        return tokens[:, :size].copy(), parents[:, :size].copy(), joint[:, :size].copy(), kept
    shape = (tokens.shape[0], nodes)
    kept_tokens, kept_parents = np.empty(shape, np.int64), np.empty(shape, np.int64)
    kept_joint = joint[:, :nodes].copy()
    for row in range(shape[0]):
        number = np.full(size, -1)  # of the nodes that are kept; -2 as long as it is not known
        for _ in range(nodes):
            best = -1
            for node in range(size):
                if number[node] == -1 and (best < 0 or by[row, node] > by[row, best]):
                    best = node
            number[best] = -2
        count = 0
        for node in range(size):
            if number[node] == -2:
                above = parents[row, node]
                number[node] = count
                kept[row, count] = node
                kept_tokens[row, count], kept_joint[row, count] = tokens[row, node], joint[row, node]
                kept_parents[row, count] = number[above] if above >= 0 else -1
                count += 1
    return kept_tokens, kept_parents, kept_joint, kept


def positions_and_mask(
    tree: TokenTree, lengths: Tensor, key_length: int, dtype: torch.dtype, sliding_window: int | None
) -> tuple[Tensor, Tensor]:
    """What a forward over a tree behind ``lengths`` cached tokens is told: positions, and an additive mask.

    Floats because eager attention with a boolean 4D mask is silently wrong in transformers.

    Args:
        lengths: (B,) int64, cached tokens per sequence; node i of sequence b is written at ``lengths[b] + i``.
        key_length: K, number of cache slots attended to, at least ``max(lengths) + N``.
        sliding_window: keys at a distance of this or more are hidden; None for full attention.

    Returns:
        (B, N) int64, ``lengths`` and the depth; (B, 1, N, K) in ``dtype``: 0 where a node may look, the most negative
        number elsewhere. Its rows begin at multiples of 8 numbers, but for the host's: a GPU's kernels would copy it at
        every layer.
    """
    if runs_on_host(lengths):
        window = -1 if sliding_window is None else sliding_window
        given = tree.parent.contiguous().numpy(), lengths.contiguous().numpy()
        found, bits = _positions_and_mask(*given, key_length, window, _bits_of_least(dtype))
        return torch.from_numpy(found), torch.from_numpy(bits).view(dtype)
    visible, (batch, nodes) = tree.ancestors, tree.parent.shape
    slots = torch.arange(key_length, device=lengths.device)
    allowed = (slots < lengths[:, None])[:, None, :].repeat(1, nodes, 1)
    written = lengths[:, None] + torch.arange(nodes, device=lengths.device)
    allowed.scatter_(2, written[:, None, :].expand(batch, nodes, nodes), visible)
    positions = lengths[:, None] + tree.depth
    if sliding_window is not None:
        key_positions = slots.repeat(batch, 1).scatter_(1, written, positions)
        allowed &= positions[:, :, None] - key_positions[:, None, :] < sliding_window
    mask = torch.zeros(batch, 1, nodes, -(-key_length // ALIGNED) * ALIGNED, dtype=dtype, device=lengths.device)
    return positions, mask[..., :key_length].masked_fill_(~allowed[:, None], torch.finfo(dtype).min)


@cache
def _bits_of_least(dtype: torch.dtype) -> Any:
    """The most negative number as an integer of the same size: numpy does not know all kinds of floats."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return torch.tensor(torch.finfo(dtype).min, dtype=dtype).view(kind).numpy()[()]


@compiled
def _positions_and_mask(
    parents: np.ndarray, lengths: np.ndarray, keys: int, window: int, hidden: Any
) -> tuple[np.ndarray, np.ndarray]:
    """``positions_and_mask``, with bits for floats, those of ``hidden`` and of 0; no window is below 0."""
    rows, nodes = parents.shape
    positions, mask = np.empty((rows, nodes), np.int64), np.full((rows, 1, nodes, keys), hidden)
    for row in range(rows):
        length = lengths[row]
        for node in range(nodes):
            above = parents[row, node]
            position = positions[row, above] + 1 if above >= 0 else length
            positions[row, node] = position
            first = 0 if window < 0 else max(0, position - window + 1)
            mask[row, 0, node, first:length] = 0
            other = node
            while other >= 0 and positions[row, other] >= first:
                mask[row, 0, node, length + other] = 0
                other = parents[row, other]
    return positions, mask
