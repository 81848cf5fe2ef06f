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

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


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
        temperature: 0 means greedy (no noise, and top_k / top_p have no influence).
        top_k, top_p: as in transformers' warpers, applied in its order; 0 and 1.0 switch them off.
        eos_token_ids: forbidden while fewer than ``min_new_tokens`` tokens have been emitted.
        prompt_lengths: (B,) int64.
        keys: (B,) int64 from row_keys, or None when greedy.
    """

    prompt_lengths: Tensor
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_new_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    keys: Tensor | None = None

    def __post_init__(self) -> None:
        self.settle(self.prompt_lengths)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def settle(self, lengths: Tensor) -> None:
        """Say how many tokens, (B,) int64, are settled; the token chosen at the root will be number ``lengths``."""
        self._lengths = lengths
        self._noise: dict[int, Tensor] = {}

    def select(self, rows: Tensor) -> "Sampler":
        """The sampler of the remaining rows."""
        chosen = replace(
            self,
            prompt_lengths=self.prompt_lengths[rows],
            keys=None if self.keys is None else self.keys[rows],
        )
        chosen.settle(self._lengths[rows])
        return chosen

    def noise(self, offset: int, vocab_size: int) -> Tensor:
        """(B, V) Gumbel noise of the token at ``offset``: once per step, shared by draft and verification."""
        if offset not in self._noise:
            assert self.keys is not None
            self._noise[offset] = gumbel(self.keys, self._lengths + offset, vocab_size)
        return self._noise[offset]

    def draft_scores(self, logits: Tensor, offset: int, vocab_size: int, vocabulary: Tensor | None = None) -> Tensor:
        """Scores whose largest are a drafter's candidates at ``offset``: log q + g, with the target's own noise.

        A drafter that ranks by these proposes what the target will choose wherever q is near p.

        Args:
            logits: (B, M, K), the drafter's logits for M nodes at one depth.
            vocab_size: V, number of tokens of the target.
            vocabulary: (K,) int64, the tokens that the logits are for; None stands for all of them in order.
        """
        logits = logits.float()
        logits = self._forbid_early_eos(logits, self._lengths[:, None] + offset, vocabulary)
        if self.greedy:
            return logits
        noise = self.noise(offset, vocab_size)
        if vocabulary is not None:
            noise = noise[:, vocabulary]
        return logits / self.temperature + noise[:, None]

    def choose(self, logits: Tensor, depth: Tensor) -> Tensor:
        """The target's choice at every node: argmax(log p + g), with p after all processors.

        Args:
            logits: (B, N, V), the target's logits.
            depth: (B, N) int64; the choice at a node of depth d is for the token at offset d.

        Returns:
            (B, N) int64.
        """
        logits = self._forbid_early_eos(logits, self._lengths[:, None] + depth)
        if self.greedy:
            return logits.argmax(-1)
        warped = self.warp(logits)
        offsets = int(depth.max()) + 1
        noise = torch.stack([self.noise(offset, logits.shape[-1]) for offset in range(offsets)], dim=1)
        rows = torch.arange(depth.shape[0], device=depth.device)[:, None]
        return (warped + noise[rows, depth]).argmax(-1)

    def warp(self, logits: Tensor) -> Tensor:
        """Temperature, top-k and top-p in transformers' order; what is cut off is -inf. (..., V) -> (..., V)."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        if self.top_p < 1.0:
            ordered, index = logits.sort(dim=-1)  # ascending, as TopPLogitsWarper does, so that ties fall alike
            cut = ordered.softmax(-1).cumsum(-1) <= 1 - self.top_p
            cut[..., -1] = False
            logits = logits.masked_fill(cut.scatter(-1, index, cut), float("-inf"))
        return logits

    def _forbid_early_eos(self, logits: Tensor, positions: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        """EOS is out of reach for tokens at ``positions`` (B, N or 1) that come too early."""
        if self.min_new_tokens == 0 or not self.eos_token_ids:
            return logits
        early = positions < (self.prompt_lengths + self.min_new_tokens)[:, None]
        if vocabulary is None:
            vocabulary = torch.arange(logits.shape[-1], device=logits.device)
        ends = torch.isin(vocabulary, torch.tensor(self.eos_token_ids, device=logits.device))
        return logits.masked_fill(early[..., None] & ends, float("-inf"))
