"""The target's choice of a token, and the noise that makes sampling reproducible.

Noise depends only on (request seed, row or sample number, position in the text, token id), through a
counter-based hash: it survives compaction of the batch, padding and any tree, and no generator state exists
that could be left in another place by another drafter. Sampling is the Gumbel-max trick,
argmax(log p + g) ~ p, so the sampled text is a function of prompt and noise alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper

from shape.verification.acceptance import reject_in_turn
from shape.verification.tree import TokenTree

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB
# What noise beside the target's own is for; any different words will do.
_DRAFTS, _COINS, _RESIDUALS = 0x6472616674, 0x636F696E73, 0x7265736964


def mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele et al. 2014) on int64; multiplication wraps as it does on uint64."""
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def row_keys(seed: int | Sequence[int], rows: int, samples: int = 1, device: torch.device | str = "cpu") -> Tensor:
    """One key per row of the batch, (rows * samples,) int64.

    Args:
        seed: one seed, numbered through all rows; or one seed per prompt, so that a prompt's samples do not
            depend on which batch it is in.
        rows: number of prompts.
        samples: samples per prompt, adjacent in the batch.
    """
    count = rows * samples
    if isinstance(seed, int):
        seeds, numbers = [seed] * count, list(range(count))
    else:
        seeds, numbers = [s for s in seed for _ in range(samples)], [i % samples for i in range(count)]
    words = torch.tensor([_wrap(s) for s in seeds], dtype=torch.long, device=device)
    counters = torch.tensor(numbers, dtype=torch.long, device=device)
    return mix(mix(words + _GOLDEN) + (counters + 1) * _GOLDEN)


def _wrap(seed: int) -> int:
    """Any Python int as a signed 64-bit word."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def gumbel(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise for every token at given positions.

    -log of an exponential variate built from 52 hashed bits: the upper tail, which decides over rare tokens of
    large vocabularies, is exact down to probabilities of 2^-53 (24-bit uniforms are not).

    Args:
        keys: (B,) int64 from row_keys.
        positions: (B,) int64, position in the text, without padding, of the token being chosen.

    Returns:
        (B, V) float32.
    """
    counter = mix(keys + mix(positions * _GOLDEN))[:, None]
    tokens = torch.arange(1, vocab_size + 1, device=keys.device) * _GOLDEN
    bits = _shift(mix(counter + tokens), 12)
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-52
    return torch.log1p(uniform.neg_()).neg_().log_().neg_().float()


@dataclass
class Sampler:
    """How the target's logits become its choice of token: processors, temperature and noise of one request.

    ``settle`` is called once per step; positions are then counted from the settled text: offset 0 is the first
    token after the root, chosen at the root.

    Attributes:
        prompt_lengths: (B,) int64.
        temperature: 0 means greedy: no noise.
        keys: (B,) int64 from row_keys, or None when greedy.
        warpers: transformers' processors that look at the scores alone, temperature among them.
        processors: per row all processors in order, where some look at the text before the token; None otherwise.
        eos_token_ids: forbidden while fewer than ``min_new_tokens`` tokens have been emitted.
        coupled: drafts see the target's own noise, and the choice is argmax(log p + g) (rule "match"). Otherwise drafts
            have noise of their own, and the choice is that of rejection sampling.
    """

    prompt_lengths: Tensor
    temperature: float = 0.0
    keys: Tensor | None = None
    warpers: tuple[LogitsProcessor, ...] = ()
    processors: tuple[LogitsProcessorList, ...] | None = None
    min_new_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    coupled: bool = True

    def __post_init__(self) -> None:
        self.settle(self.prompt_lengths)
        sorts = any(not isinstance(warper, TemperatureLogitsWarper) for warper in self.warpers)
        # A sort of all nodes' scores can cost more than a small target's forward. Following the path instead waits
        # for the device at every depth, which is free on a CPU alone.
        on_cpu = self.prompt_lengths.device.type == "cpu"
        self._visits = self.processors is not None or not self.coupled or (sorts and on_cpu)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def settle(self, lengths: Tensor, texts: Sequence[Sequence[int]] = ()) -> None:
        """Say what is settled: its length, (B,) int64, and the tokens, which only processors look at. The token
        chosen at the root will be number ``lengths``.
        """
        self._lengths, self._texts = lengths, texts
        self._noise: dict[int, Tensor] = {}

    def select(self, rows: Tensor) -> "Sampler":
        """The sampler of the remaining rows."""
        kept = rows.tolist()
        chosen = replace(
            self,
            prompt_lengths=self.prompt_lengths[rows],
            keys=None if self.keys is None else self.keys[rows],
            processors=self.processors and tuple(self.processors[row] for row in kept),
        )
        chosen.settle(self._lengths[rows], [self._texts[row] for row in kept] if self._texts else ())
        return chosen

    @property
    def _emitted(self) -> Tensor:
        """(B,) tokens written so far."""
        return self._lengths - self.prompt_lengths

    def noise(self, offset: int, vocab_size: int) -> Tensor:
        """(B, V) Gumbel noise of the token at ``offset``: once per step, shared by draft and verification."""
        if offset not in self._noise:
            self.foresee([offset], vocab_size)
        return self._noise[offset]

    def foresee(self, offsets: Sequence[int], vocab_size: int) -> None:
        """Make the noise of several offsets at once, which is cheaper where a drafter is going to ask for them."""
        if self.keys is None:
            return
        ahead = torch.tensor(offsets, device=self.keys.device)
        keys, positions = torch.broadcast_tensors(self.keys[:, None], self._lengths[:, None] + ahead)
        noise = gumbel(keys.flatten(), positions.flatten(), vocab_size).view(*positions.shape, vocab_size)
        self._noise.update(zip(offsets, noise.unbind(1), strict=True))

    def draft_scores(self, logits: Tensor, offset: int, vocab_size: int, vocabulary: Tensor | None = None) -> Tensor:
        """Scores whose largest are a drafter's candidates at ``offset``: log q + g, with the target's own noise.

        A drafter that ranks by these proposes what the target will choose wherever q is near p. Processors other
        than temperature and the minimum length are left to the target's choice.

        Args:
            logits: (B, M, K), the drafter's logits for M nodes at one depth.
            vocab_size: V, number of tokens of the target.
            vocabulary: (K,) int64, the tokens that the logits are for; None stands for all of them in order.
        """
        logits = logits.float()
        logits = self._forbid_early_eos(logits, self._emitted[:, None] + offset, vocabulary)
        if self.greedy:
            return logits
        noise = self.noise(offset, vocab_size) if self.coupled else self._other_noise(_DRAFTS, offset, vocab_size)
        if vocabulary is not None:
            noise = noise[:, vocabulary]
        return logits / self.temperature + noise[:, None]

    def draft_log_probs(self, logits: Tensor, offset: int, vocab_size: int, vocabulary: Tensor | None = None) -> Tensor:
        """(B, M, V) log q, the distribution that the best of ``draft_scores`` are draws from if not coupled."""
        emitted = self._emitted[:, None] + offset
        log_q = (self._forbid_early_eos(logits.float(), emitted, vocabulary) / self.temperature).log_softmax(-1)
        if vocabulary is None:
            return log_q
        full = log_q.new_full((*log_q.shape[:-1], vocab_size), float("-inf"))
        full[..., vocabulary] = log_q
        return full

    def choose(self, logits: Tensor, tree: TokenTree) -> Tensor:
        """The target's choice at every node that matters: argmax(log p + g), with p after all processors.

        Args:
            logits: (B, N, V), the target's logits. The choice at a node of depth d is for the token at offset d.

        Returns:
            (B, N) int64; -1 at nodes that the target's own choices do not lead to, where they were not looked at.
        """
        if self._visits:
            return self._choose_on_the_way(logits, tree)
        logits = self._forbid_early_eos(logits, self._emitted[:, None] + tree.depth)
        if self.greedy:
            return logits.argmax(-1)
        offsets = int(tree.depth.max()) + 1
        noise = torch.stack([self.noise(offset, logits.shape[-1]) for offset in range(offsets)], dim=1)
        rows = torch.arange(tree.tokens.shape[0], device=logits.device)[:, None]
        return (self.warp(logits) + noise[rows, tree.depth]).argmax(-1)

    def _choose_on_the_way(self, logits: Tensor, tree: TokenTree) -> Tensor:
        """Processors see each row's own text and run once per emitted token, as in plain decoding."""
        choices = torch.full_like(tree.tokens, -1)
        rows = torch.arange(tree.tokens.shape[0], device=logits.device)
        nodes = torch.zeros_like(rows)
        paths: list[list[int]] = [[] for _ in range(len(rows))]
        for offset in range(tree.size):
            scores = self.scores(logits[rows, nodes], rows, offset, [paths[row] for row in rows.tolist()])
            if self.greedy:
                chosen = scores.argmax(-1)
            elif self.coupled:
                chosen = (scores + self.noise(offset, logits.shape[-1])[rows]).argmax(-1)
            else:
                chosen = self._reject(scores, tree, rows, nodes, offset)
            choices[rows, nodes] = chosen
            for row, token in zip(rows.tolist(), chosen.tolist(), strict=True):
                paths[row].append(token)
            children = (tree.parent[rows] == nodes[:, None]) & (tree.tokens[rows] == chosen[:, None])
            going = children.any(1)
            rows, nodes = rows[going], children[going].int().argmax(1)
            if not len(rows):
                break
        return choices

    def scores(self, logits: Tensor, rows: Tensor, offset: int, paths: Sequence[Sequence[int]]) -> Tensor:
        """Logits (R, V) at ``offset`` after all processors, given the tokens since the settled text of each row."""
        scores = self._forbid_early_eos(logits, self._emitted[rows] + offset)
        if self.processors is None:
            return self.warp(scores)
        return torch.cat(
            [
                self.processors[row](
                    torch.tensor([[*self._texts[row], *path]], device=scores.device), one.float()[None]
                )
                for row, path, one in zip(rows.tolist(), paths, scores, strict=True)
            ]
        )

    def coins(self, rows: Tensor, offset: int, count: int) -> Tensor:
        """(R, count) uniform numbers in (0, 1), for the candidates of one node per row in turn."""
        draws = torch.arange(count, device=rows.device) * _GOLDEN
        bits = _shift(mix(self._stream(_COINS, offset)[rows, None] + draws), 12)
        return (bits.to(torch.float64) + 0.5) * 2.0**-52

    def _reject(self, scores: Tensor, tree: TokenTree, rows: Tensor, nodes: Tensor, offset: int) -> Tensor:
        """Rejection sampling at one node per row, with the scores (R, V) there."""
        children = tree.parent[rows] == nodes[:, None]
        order = (
            children.int().sort(dim=1, descending=True, stable=True).indices[:, : max(1, int(children.sum(1).max()))]
        )
        candidates = tree.tokens[rows].gather(1, order).masked_fill(~children.gather(1, order), -1)
        q = None if tree.log_q is None else tree.log_q[rows, nodes].exp()
        uniforms = self.coins(rows, offset, order.shape[1]).to(scores.dtype)
        noise = self._other_noise(_RESIDUALS, offset, scores.shape[-1])[rows]
        return reject_in_turn(scores.softmax(-1), q, candidates, uniforms, noise)

    def _stream(self, purpose: int, offset: int) -> Tensor:
        """(B,) int64, a word for each row, position and purpose, unrelated to the noise of ``gumbel``."""
        assert self.keys is not None
        return mix(mix(self.keys ^ purpose) + mix((self._lengths + offset) * _GOLDEN))

    def _other_noise(self, purpose: int, offset: int, vocab_size: int) -> Tensor:
        assert self.keys is not None
        return gumbel(mix(self.keys ^ purpose), self._lengths + offset, vocab_size)

    def warp(self, logits: Tensor) -> Tensor:
        """The warpers in order; what they cut off is -inf. (..., V) -> (..., V)."""
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
        for warper in self.warpers:
            scores = warper(None, scores)  # type: ignore[arg-type]  # they do not look at the text
        return scores.view(logits.shape)

    def _forbid_early_eos(self, logits: Tensor, emitted: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        """(..., V) logits with EOS out of reach where ``emitted`` (...), the tokens written before, are too few."""
        if self.min_new_tokens == 0 or not self.eos_token_ids:
            return logits
        early = emitted < self.min_new_tokens
        if vocabulary is None:
            vocabulary = torch.arange(logits.shape[-1], device=logits.device)
        ends = torch.isin(vocabulary, torch.tensor(self.eos_token_ids, device=logits.device))
        return logits.masked_fill(early[..., None] & ends, float("-inf"))
