"""Layers that several predictors share: attention to known positions, biases by the token before."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shape.networks.config import ShapeConfig

SCORES_BYTES = 2**27  # of one float32 tensor of attention scores in training, of which some four are held at a time
_ROTARY_BASE = 10000.0

Memory = tuple[Tensor, Tensor]


class MarkovBias(nn.Module):
    """A bias on logits by the token before, of low rank: B = W_2 W_1 e.

    `MarkovTable` learns an embedding of its own for W_1 e; here it is a projection of the target's frozen one, which
    costs no vocabulary-sized table and knows tokens that training has not shown.
    """

    def __init__(self, size: int, rank: int, vocabulary: int) -> None:
        super().__init__()
        self.reduce = nn.Linear(size, rank, bias=False)
        self.expand = nn.Linear(rank, vocabulary, bias=False)

    @property
    def expansion(self) -> nn.Linear:
        return self.expand

    def forward(self, reduced: Tensor) -> Tensor:
        return self.expand(reduced)

    def reduced(self, tokens: Tensor, embeddings: Tensor | None) -> Tensor:
        """W_1 e, (..., H) -> (..., rank)."""
        assert embeddings is not None
        return self.reduce(normalise(embeddings.to(self.reduce.weight.dtype)))

    def couple(self, logits: Tensor, reduced: Tensor, candidates: int, iterations: int = 4) -> Tensor:
        """Marginals, corrected so that with the bias they are the marginals still: (..., S, K) -> (..., S, K).

        Between neighbouring steps the conditional q(j | i) = softmax_j(l_j + B_ij + g_j) is the row-normalised entropic
        plan with cost -B between the steps' marginals, where g is the logarithm of the plan's column scaling, found by
        Sinkhorn iterations over the likeliest candidates of both; without it a bias shifts what the steps have learned.

        Args:
            reduced: (K, rank), of the tokens that can be drafted (`reduced`).
        """
        best, chosen = logits.float().topk(min(candidates, logits.shape[-1]), dim=-1)
        log_p = best.log_softmax(-1)
        before, wanted = log_p[..., :-1, :], log_p[..., 1:, :]
        rows, columns = reduced[chosen[..., :-1, :]], self.expand.weight[chosen[..., 1:, :]]
        bias = (rows @ columns.transpose(-1, -2)).float()
        scaling = torch.zeros_like(wanted)
        for _ in range(iterations):
            conditional = (wanted.unsqueeze(-2) + bias + scaling.unsqueeze(-2)).log_softmax(-1)
            scaling = scaling + wanted - (before.unsqueeze(-1) + conditional).logsumexp(-2)
        corrected = logits[..., 1:, :].scatter_add(-1, chosen[..., 1:, :], scaling.to(logits.dtype))
        return torch.cat([logits[..., :1, :], corrected], dim=-2)


class MarkovTable(nn.Module):
    """DSpark's Markov head, of the type "vanilla": the bias W_2 W_1[x] by the token x before, W_1 a learned table.

    Args:
        vocabulary: of the target, any of whose tokens may come before.
        rank: width of the table.
        drafted: number of tokens that can be drafted.
    """

    def __init__(self, vocabulary: int, rank: int, drafted: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)

    @property
    def expansion(self) -> nn.Linear:
        return self.markov_w2

    def forward(self, reduced: Tensor) -> Tensor:
        return self.markov_w2(reduced)

    def reduced(self, tokens: Tensor, embeddings: Tensor | None) -> Tensor:
        """W_1[x], (...) int64 -> (..., rank)."""
        return self.markov_w1(tokens)


class StateMarkov(nn.Module):
    """A Markov bias that depends on the network's states as well: W_2 of what is made of W_1 e and them (DSpark)."""

    def step(self, reduced: Tensor, state: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What W_2 reads at a step, (..., rank), of W_1 e, the state (..., H) and what the step before carried on."""
        raise NotImplementedError

    def along(self, reduced: Tensor, states: Tensor) -> Tensor:
        """The same of all steps from the first: (..., S, rank), (..., S, H) -> (..., S, rank)."""
        found, carried = [], None
        for each, state in zip(reduced.unbind(-2), states.unbind(-2), strict=True):
            read, carried = self.step(each, state, carried)
            found.append(read)
        return torch.stack(found, dim=-2)


class GatedMarkov(StateMarkov, MarkovTable):
    """DSpark's Markov head of the type "gated": the state, of width `size`, and W_1[x] weight each part of W_1[x]."""

    def __init__(self, vocabulary: int, rank: int, drafted: int, size: int) -> None:
        super().__init__(vocabulary, rank, drafted)
        self.gate_proj = nn.Linear(size + rank, rank)

    def step(self, reduced: Tensor, state: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        seen = torch.cat([state.to(reduced).expand(*reduced.shape[:-1], -1), reduced], dim=-1)
        return self.gate_proj(seen).sigmoid() * reduced, None


class SelectorMarkov(StateMarkov, MarkovTable):
    """DFlash2's candidate selector: W_2 of W_1[x] times the projected state, among a step's likeliest tokens alone.

    Args:
        size: width of states.
        candidates: how many of a step's likeliest tokens it chooses among.
    """

    def __init__(self, vocabulary: int, rank: int, drafted: int, size: int, candidates: int) -> None:
        super().__init__(vocabulary, rank, drafted)
        self.hidden_projection = nn.Linear(size, rank, bias=False)
        self.candidates = min(candidates, drafted)

    def step(self, reduced: Tensor, state: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return reduced * self.hidden_projection(state.to(reduced)), None

    def among(self, read: Tensor, chosen: Tensor) -> Tensor:
        """The bias of some tokens alone: of what W_2 reads, (..., rank), for their numbers (..., C) -> (..., C)."""
        return (read.unsqueeze(-2) * self.expansion.weight[chosen]).sum(-1)

    def likeliest(self, logits: Tensor) -> Tensor:
        """Logits (..., K) of the candidates; of all other tokens -inf."""
        best = logits.topk(self.candidates, dim=-1)
        return torch.full_like(logits, -torch.inf).scatter(-1, best.indices, best.values)


class RecurrentMarkov(StateMarkov, MarkovTable):
    """DSpark's Markov head of the type "rnn": a state of its own, which starts as zeros, is carried along the path.

    Attributes:
        joint_proj: makes gate, candidate and what W_2 reads of what is carried, W_1[x] and the network's state, of
            width `size`.
    """

    def __init__(self, vocabulary: int, rank: int, drafted: int, size: int) -> None:
        super().__init__(vocabulary, rank, drafted)
        self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    def step(self, reduced: Tensor, state: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        carried = torch.zeros_like(reduced) if carried is None else carried
        seen = torch.cat([carried, reduced, state.to(reduced).expand(*reduced.shape[:-1], -1)], dim=-1)
        gate, candidate, read = self.joint_proj(seen).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return read.tanh(), gate * carried + (1 - gate) * candidate.tanh()


class ConfidenceHead(nn.Module):
    """DSpark's: the logit of the probability that a draft is accepted, of the state beside W_1 of the token before."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)

    def forward(self, seen: Tensor) -> Tensor:
        return self.proj(seen.to(self.proj.weight.dtype)).squeeze(-1)


class ContextAttention(nn.Module):
    """Attention from nodes to what known positions left, and to keys of their own path.

    Keys and values are made from inputs of their own, once per known position. Rotary positions (arXiv 2104.09864).

    Args:
        in_size: width of what queries, keys and values are made from.
        out_size: width of the result.
        config: has the heads.
    """

    def __init__(self, in_size: int, out_size: int, config: ShapeConfig) -> None:
        super().__init__()
        assert config.num_heads is not None  # the configuration fills it in
        width = config.hidden_size
        self.heads, self.head_size = config.num_heads, width // config.num_heads
        self.query = nn.Linear(in_size, width, bias=False)
        self.key = nn.Linear(in_size, width, bias=False)
        self.value = nn.Linear(in_size, width, bias=False)
        self.out = nn.Linear(width, out_size, bias=False)

    def remember(self, keys: Tensor, values: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, in_size) twice, rotary (B, T, 2, D / 2) -> keys and values (B, G, T, D)."""
        return rotate(self._split(self.key(keys)), rotary), self._split(self.value(values))

    def forward(
        self, query: Tensor, rotary: Tensor, memory: Memory, visible: Tensor | None, own: Memory | None = None
    ) -> Tensor:
        """(B, M, in_size) -> (B, M, out_size); `rotary` is of the queries' positions, (B, M or 1, 2, D / 2), and the
        other arguments are those of `attend`.
        """
        turned = rotate(self._split(self.query(query)), rotary)
        return self.out(attend(turned, memory, visible, own).transpose(1, 2).flatten(-2))

    def _split(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (self.heads, self.head_size)).transpose(1, 2)


def attend(
    query: Tensor, memory: Memory, visible: Tensor | None, own: Memory | None = None, among: Tensor | None = None
) -> Tensor:
    """Attention of queries (B, G R, M, D) to the memory and to what is their own -> (B, G R, M, D).

    In training, where scores of long texts would take more than all else, queries are gone through in parts, each to
    as much of the memory as any of its queries sees; the backward pass computes a part's scores again.

    Args:
        memory: keys and values (B, G, T, D); R query heads share one of them.
        visible: (B, M, T), (B, 1, T) or, for blocks of queries that see alike, (B, P, T) bool; None where all of the
            memory is.
        own: keys and values (B, G, P, N, D) that only a node itself sees, or the M / P nodes of a block.
        among: (M / P, N) bool, which of its own each node of a block sees; None where all do.
    """
    if not torch.is_grad_enabled():
        return _attend(query, memory, visible, own, among)
    blocks = query.shape[2] if own is None else own[0].shape[2]
    # Without keys of their own a kernel is used that keeps no scores, only their mask.
    held = query.shape[0] * (1 if own is None else query.shape[1]) * query.shape[2] * memory[0].shape[2] * 4
    size = -(-blocks // -(-held // SCORES_BYTES)) if held else blocks
    if size >= blocks:
        return _attend(query, memory, visible, own, among)
    each = query.shape[2] // blocks
    found = []
    for first in range(0, blocks, size):
        rows = slice(first, first + size)
        seen = visible
        if visible is not None and visible.shape[1] > 1:
            alike = max(visible.shape[1] // blocks, 1)  # masks of each block
            seen = visible[:, first * alike : (first + size) * alike]
        known = memory if seen is None else tuple(kept[:, :, : _reach(seen)] for kept in memory)
        seen = None if seen is None else seen[..., : known[0].shape[2]]
        mine = None if own is None else tuple(kept[:, :, rows] for kept in own)
        some = query[:, :, first * each : (first + size) * each]
        found.append(checkpoint(_attend, some, known, seen, mine, among, use_reentrant=False))
    return torch.cat(found, dim=2)


def _reach(visible: Tensor) -> int:
    """How many of the first known positions hold all that are visible to any, at least one."""
    seen = visible.flatten(0, 1).any(0).nonzero()
    return int(seen[-1]) + 1 if len(seen) else 1


def _attend(query: Tensor, memory: Memory, visible: Tensor | None, own: Memory | None, among: Tensor | None) -> Tensor:
    keys, values = memory
    if visible is not None and visible.shape[1] not in (1, query.shape[2]):
        visible = visible.repeat_interleave(query.shape[2] // visible.shape[1], dim=1)
    # Finite, so that a root without anything to see (padding) gives numbers and no NaN; also where autocast casts a
    # rotated query, which is float32 still, to what the values are.
    lowest = max(torch.finfo(part.dtype).min for part in (query, values))
    hidden = None if visible is None else torch.zeros_like(visible, dtype=query.dtype).masked_fill_(~visible, lowest)
    if own is None:
        mask = None if hidden is None else hidden[:, None]
        shared = query.shape[1] // keys.shape[1]
        if mask is not None and query.is_cuda and shared > 1:  # where kernels take masks or groups, and not both
            keys, values, shared = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1), 1
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=shared > 1)
    groups, blocks = keys.shape[1], own[0].shape[2]
    query = query.unflatten(1, (groups, -1))
    shared = query.shape[2]

    def by_block(rows: Tensor) -> Tensor:
        """(B, G, R, M, ...) -> (B, G, P, R M / P, ...): the rows that see a block's own."""
        return rows.unflatten(3, (blocks, -1)).transpose(2, 3).flatten(3, 4)

    def in_order(rows: Tensor) -> Tensor:
        return rows.unflatten(3, (shared, -1)).transpose(2, 3).flatten(3, 4)

    scores = (query.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, (shared, -1))
    if hidden is not None:
        scores = scores + hidden[:, None, None]
    beside = in_order(by_block(query) @ own[0].transpose(-1, -2))
    if among is not None:
        beside = beside.masked_fill(~among.repeat(blocks, 1), torch.finfo(beside.dtype).min)
    scores = torch.cat([scores, beside], dim=-1)
    weights = (scores.float() * query.shape[-1] ** -0.5).softmax(-1).to(values.dtype)
    count = keys.shape[-2]
    found = (weights[..., :count].flatten(2, 3) @ values).unflatten(2, (shared, -1))
    return (found + in_order(by_block(weights[..., count:]) @ own[1])).flatten(1, 2)


def attend_in_order(
    query: Tensor, new: Memory, past: Memory | None, lengths: Tensor, window: int | None = None
) -> Tensor:
    """Attention of new positions to past ones and, each to itself and those before it, to the new -> (B, G R, N, D).

    Args:
        query: (B, G R, N, D). new: keys and values (B, G, N, D) of the same positions.
        past: keys and values (B, G, T, D), of which each row sees the first `lengths`, (B,) int64; None is none.
        window: how many positions each sees at most, the last ones, its own among them.
    """
    if past is None and window is not None:
        past = new[0][:, :, :0], new[1][:, :, :0]
    if past is None or (window is None and not past[0].shape[2]):
        grouped = query.shape[1] != new[0].shape[1]
        return F.scaled_dot_product_attention(query, *new, is_causal=True, enable_gqa=grouped)
    rows, count = query.shape[0], query.shape[2]
    order = torch.ones(count, count, dtype=torch.bool, device=query.device).tril().expand(rows, -1, -1)
    slots = torch.arange(past[0].shape[2], device=query.device)
    before = slots < lengths[:, None, None]
    if window is not None:
        numbers = torch.arange(count, device=query.device)
        order = order & (numbers > numbers[:, None] - window)
        before = before & (slots > lengths[:, None, None] + numbers[:, None] - window)
    keys, values = (torch.cat(pair, dim=2) for pair in zip(past, new, strict=True))
    return attend(query, (keys, values), torch.cat([before.expand(-1, count, -1), order], dim=-1))


def recent(visible: Tensor | None, memory: Memory, window: int | None, places: int = 1) -> Tensor | None:
    """The last `window` of the visible positions, which are the first ones: as `visible`, (B, P, T), or None.

    Args:
        places: of a block, each of which sees one less than that before it: (B, P places, T).
    """
    if window is None:
        return visible
    rows, count = len(memory[0]), memory[0].shape[2]
    if visible is None and count + places - 1 <= window:
        return None
    slots, place = torch.arange(count, device=memory[0].device), torch.arange(places, device=memory[0].device)
    if visible is None:
        visible = torch.ones_like(slots, dtype=torch.bool).expand(rows, 1, -1)
    first = visible.sum(-1, keepdim=True) - window + place
    return (visible.unsqueeze(2) & (slots >= first.unsqueeze(-1))).flatten(1, 2)


def rotary_table(positions: Tensor, head_size: int, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of rotary embedding: (...) -> (..., 2, head_size / 2)."""
    half = head_size // 2
    frequencies = _ROTARY_BASE ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    angles = positions.unsqueeze(-1) * frequencies
    return torch.stack([angles.cos(), angles.sin()], dim=-2).to(dtype)


def rotate(states: Tensor, rotary: Tensor) -> Tensor:
    """Rotary position embedding: (B, G, N, D), (B, N or 1, 2, R / 2) -> (B, G, N, D), of which the first R turn."""
    cos, sin = rotary.to(states.dtype).unsqueeze(1).unbind(-2)
    size = cos.shape[-1]
    first, second, still = states[..., :size], states[..., size : 2 * size], states[..., 2 * size :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, still], dim=-1)


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """``torch.linalg.eigh``, on the CPU for devices that may have none, as Apple's."""
    values, vectors = torch.linalg.eigh(matrix if matrix.is_cuda else matrix.cpu())
    return values.to(matrix.device), vectors.to(matrix.device)


def normalise(x: Tensor) -> Tensor:
    """Layer normalisation over the last dimension, without weights, epsilon 1e-5."""
    return F.layer_norm(x, x.shape[-1:])


def scale(state: Tensor) -> Tensor:
    """Root mean square over the last dimension, kept; its gradient at an all-zero state is zero, not NaN."""
    return torch.linalg.vector_norm(state, dim=-1, keepdim=True) * state.shape[-1] ** -0.5
