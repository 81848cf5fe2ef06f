"""The target's choice of a token, and the noise that makes sampling reproducible.

Noise depends only on (request seed, row or sample number, position in the text, token id), through a
counter-based hash: it survives compaction of the batch, padding and any tree, and no generator state exists
that could be left in another place by another drafter. Sampling is the Gumbel-max trick,
argmax(log p + g) ~ p, so the sampled text is a function of prompt and noise alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper

from shape.verification.acceptance import reject_in_turn
from shape.verification.tree import TokenTree

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB
_AHEAD = 3  # depths of a tree for which noise is made at once
# What noise beside the target's own is for; any different words will do.
_DRAFTS, _COINS, _RESIDUALS = 0x6472616674, 0x636F696E73, 0x7265736964


def mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele et al. 2014) on int64; multiplication wraps as it does on uint64."""
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift (torch's is arithmetic)."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


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


def gumbel(keys: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise for some tokens at given positions.

    -log of an exponential variate made from 63 hashed bits. Small uniform numbers keep their relative precision as
    floats, so that the upper tail, which decides over rare tokens of large vocabularies, is exact far below the
    probability of any token (24-bit uniforms are not).

    Args:
        keys: (...,) int64 from row_keys; they and the positions may be broadcast.
        positions: (...,) int64, position in the text, without padding, of the token being chosen.
        tokens: (K,) int64, ``token_words`` of these tokens.

    Returns:
        (..., K) float32.
    """
    # Counter and tokens are hashed each by itself; joining them takes one round more, in place: this is the bulk of the
    # work, and a high bit depends on all bits of both.
    x = (mix(keys + positions * _GOLDEN)[..., None] ^ tokens).mul_(_MIX1)
    return to_gumbel(x.bitwise_xor_(_shift(x, 32)).mul_(_MIX2))


def to_gumbel(words: Tensor) -> Tensor:
    """-log(-log(1 - u)) with u = |word| / 2^63, (...) int64 -> (...) float32, always finite. Overwrites the words."""
    # Between the smallest u above 0 and the largest float below 1.
    negative = words.abs_().float().mul_(-(2.0**-63)).clamp_(2.0**-24 - 1, -(2.0**-64))
    return negative.log1p_().neg_().log_().neg_()


def token_words(tokens: Tensor) -> Tensor:
    """A word for each token id, int64, as ``gumbel`` takes it."""
    return mix((tokens + 1) * _GOLDEN)


@cache
def _all_words(vocab_size: int, device: torch.device) -> Tensor:
    return token_words(torch.arange(vocab_size, device=device))


def perturbed(logits: Tensor, noise: Tensor | None) -> Tensor:
    """Scores whose largest are a drafter's candidates: log q + g, log q alone when greedy.

    With the target's own noise a drafter that ranks by these proposes what the target will choose wherever q is near p;
    with other noise the largest are draws without replacement.

    Args:
        logits: (B, M, K) of ``Sampler.draft_logits``. noise: (B, 1 or at least M, K), of ``Sampler.foresee``.
    """
    return logits if noise is None else logits + noise[:, : logits.shape[1]]


def best(scores: Tensor) -> Tensor:
    """(..., V) -> (...) int64: where the largest is, the first of equal ones. Takes no gradient.

    On a CPU by numpy, whose search takes a tenth of the time of torch's.
    """
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    return torch.as_tensor(scores.detach().numpy().argmax(-1))


def _at_least_single(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


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
            have noise of their own, and ``choose`` is rejection sampling.
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
        # Noise that was made in an earlier step, and the lengths of the texts it begins behind.
        self._held: tuple[list[int], Tensor] | None = None
        sorts = any(not isinstance(warper, TemperatureLogitsWarper) for warper in self.warpers)
        # A sort of all nodes' scores can cost more than a small target's forward. Following the path instead waits
        # for the device at every depth, which is free on a CPU alone.
        on_cpu = self.prompt_lengths.device.type == "cpu"
        self._visits = self.processors is not None or self.draws or (sorts and on_cpu)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def draws(self) -> bool:
        """Whether children are to be drawn one after the other, each node's with noise of its own, and the tree to say
        from what (``TokenTree.log_q``).
        """
        return not (self.coupled or self.greedy)

    def settle(self, lengths: Tensor, texts: Sequence[Sequence[int]] = ()) -> None:
        """Say what is settled: its length, (B,) int64, and the tokens, which only processors look at. The token
        chosen at the root will be number ``lengths``.
        """
        self._lengths, self._texts = lengths, texts

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

    def to(self, device: torch.device) -> "Sampler":
        """The sampler for drafts made on another device, where the same noise is made again.

        Hashing is exact everywhere; the logarithms may differ in their last bit between kinds of device, which can
        change a draft and never the choice of the target, made with the noise of its own device.
        """
        if self.prompt_lengths.device == device:
            return self
        keys = None if self.keys is None else self.keys.to(device)
        moved = replace(self, prompt_lengths=self.prompt_lengths.to(device), keys=keys)
        moved.settle(self._lengths.to(device), self._texts)
        return moved

    def noise(self, offset: int, vocab_size: int) -> Tensor:
        """(B, V) Gumbel noise of the token at ``offset``, the target's own."""
        return self._noise_at([offset], _all_words(vocab_size, self._lengths.device))[:, 0]

    def noise_ahead(self, depths: int, vocab_size: int) -> Tensor:
        """(B, depths, V) of the target's own noise, at offsets 0 and on.

        What was made for positions behind the accepted ones is kept for the next step, where all rows have gone on by
        as much: it is about half of it.
        """
        starts = [len(text) for text in self._texts]
        kept = self._kept(starts, vocab_size)
        known = 0 if kept is None else kept.shape[1]
        if kept is None or known < depths:
            fresh = self._noise_at(range(known, depths), _all_words(vocab_size, self._lengths.device))
            kept = fresh if kept is None else torch.cat([kept, fresh], dim=1)
        self._held = (starts, kept) if starts else None
        return kept[:, :depths]

    def _kept(self, starts: list[int], vocab_size: int) -> Tensor | None:
        """(B, any, V), noise at offsets 0 and on behind texts of these lengths."""
        if self._held is None:
            return None
        before, noise = self._held
        if len(before) != len(starts) or noise.shape[-1] != vocab_size:
            return None
        gone = {now - then for now, then in zip(starts, before, strict=True)}
        on = gone.pop()
        return noise[:, on:] if not gone and 0 <= on < noise.shape[1] else None

    def _noise_at(self, offsets: Sequence[int], words: Tensor) -> Tensor:
        """(B, len(offsets), K). At once, because many small tensors cost more than a large one."""
        assert self.keys is not None
        positions = self._lengths[:, None] + torch.tensor(offsets, device=words.device)
        return gumbel(self.keys[:, None].expand_as(positions), positions, words)

    def foresee(self, depth: int, words: Tensor, nodes: int = 1) -> list[Tensor | None]:
        """What ``perturbed`` adds at offsets 0 to ``depth`` - 1: noise for tokens of given words each.

        It is the target's own, (B, 1, K), where drafts are coupled to its choices, and None when greedy. If not
        coupled, each of ``nodes`` nodes of a depth has its own, (B, nodes, K): draws must not depend on one another.
        """
        if self.greedy:
            return [None] * depth
        if self.coupled:
            return list(self._noise_at(range(depth), words).split(1, dim=1))
        counters = torch.arange(depth * nodes, device=words.device)
        return list(gumbel(self._step_words(_DRAFTS)[:, None], counters, words).split(nodes, dim=1))

    def draft_scores(
        self, logits: Tensor, offset: Tensor | int, noise: Tensor | None, vocabulary: Tensor | None = None
    ) -> Tensor:
        """``perturbed`` of ``draft_logits``: what a drafter at ``offset`` ranks its candidates by."""
        return perturbed(self.draft_logits(logits, offset, vocabulary), noise)

    def draft_logits(self, logits: Tensor, offset: Tensor | int, vocabulary: Tensor | None = None) -> Tensor:
        """(B, M, K) float32, whose softmax is q: a drafter's logits under the request's temperature and minimum length.

        Other processors are left to the target's choice.

        Args:
            logits: (B, M, K), the drafter's for M nodes.
            offset: of all nodes, or (M,) of each.
            vocabulary: (K,) int64, the tokens that the logits are for; None stands for all of them in order.
        """
        return self.temper(self._forbid_early_eos(logits.float(), offset, vocabulary))

    def temper(self, logits: Tensor) -> Tensor:
        """Logits, or what is added to them, over the temperature, where there is one."""
        return logits if self.temperature in (0.0, 1.0) else logits / self.temperature

    def draft_log_probs(self, logits: Tensor, vocab_size: int, vocabulary: Tensor | None = None) -> Tensor:
        """(B, M, V) log q, the distribution that the best of ``perturbed`` are draws from if not coupled.

        Args:
            logits: (B, M, K) of ``draft_logits``.
        """
        log_q = logits.log_softmax(-1)
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
        if self.greedy and not self.warpers:
            return best(_at_least_single(self._forbid_early_eos(logits, tree.depth)))
        return self.pick(self.tree_scores(logits, tree), tree)

    def pick(self, scores: Tensor, tree: TokenTree) -> Tensor:
        """(B, N) int64: argmax(log p + g) at every node, of its ``tree_scores``."""
        if self.greedy:
            return best(scores)
        if tree.size == 1:
            return best(scores + self.noise_ahead(1, scores.shape[-1]))
        noise = self.noise_ahead(int(tree.depth.max()) + 1, scores.shape[-1])
        depths = torch.arange(tree.tokens.shape[0], device=scores.device)[:, None] * noise.shape[1] + tree.depth
        return best(scores + F.embedding(depths, noise.flatten(0, 1)))

    def tree_scores(self, logits: Tensor, tree: TokenTree) -> Tensor:
        """Scores (B, N, V) at every node after all processors; their softmax is p.

        Processors that look at the text are not asked about texts that they rule out: scores below a token of
        probability 0 have no meaning.

        Args:
            logits: (B, N, V), the target's logits.
        """
        if self.processors is None:
            return self.warp(self._forbid_early_eos(logits, tree.depth))
        found = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        for row, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parent.tolist(), strict=True)):
            here, paths = torch.tensor([row], device=logits.device), {0: list[int]()}
            for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
                if node > 0:
                    if parent not in paths or found[row, parent, token].isneginf():
                        continue
                    paths[node] = [*paths[parent], token]
                found[row, node] = self.scores(logits[here, node], here, len(paths[node]), [paths[node]])[0]
        return found

    def _choose_on_the_way(self, logits: Tensor, tree: TokenTree) -> Tensor:
        """Only where the choices lead; processors see each row's own text and run once per emitted token, as in plain
        decoding.
        """
        choices = torch.full_like(tree.tokens, -1)
        proposed, parents = tree.tokens.tolist(), tree.parent.tolist()
        rows, nodes = list(range(len(proposed))), [0] * len(proposed)
        paths: list[list[int]] = [[] for _ in rows]
        noise: Tensor | None = None
        for offset in range(tree.size):
            here = torch.tensor([rows, nodes], device=logits.device)
            scores = self.scores(logits[here[0], here[1]], here[0], offset, [paths[row] for row in rows])
            if self.greedy:
                chosen = best(scores)
            elif self.coupled:
                if noise is None or offset == noise.shape[1]:  # several at once, but not all: most paths end before
                    noise = self.noise_ahead(min(offset + _AHEAD, tree.size), logits.shape[-1])
                chosen = best(scores + noise[here[0], offset])
            else:
                chosen = self._reject(scores, tree, here[0], here[1], offset)
            choices[here[0], here[1]] = chosen
            going = []
            for row, node, token in zip(rows, nodes, chosen.tolist(), strict=True):
                paths[row].append(token)
                children = range(node + 1, tree.size)
                child = next((at for at in children if parents[row][at] == node and proposed[row][at] == token), None)
                if child is not None:
                    going.append((row, child))
            if not going:
                break
            rows, nodes = [row for row, _ in going], [node for _, node in going]
        return choices

    def scores(self, logits: Tensor, rows: Tensor, offset: int, paths: Sequence[Sequence[int]]) -> Tensor:
        """Logits (R, V) at ``offset`` after all processors, given the tokens since the settled text of each row."""
        scores = self._forbid_early_eos(logits, offset, rows=rows)
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

    def coins(self, nodes: int) -> Tensor:
        """(B, nodes) float64 in (0, 1), one to decide over each node of a tree where drafts are drawn."""
        counters = torch.arange(1, nodes + 1, device=self._lengths.device) * _GOLDEN
        bits = _shift(mix(self._step_words(_COINS)[:, None] + counters), 12)
        return (bits.to(torch.float64) + 0.5) * 2.0**-52

    def residual_noise(self, vocab_size: int, offset: int = 0) -> Tensor:
        """(B, V) Gumbel noise of the token behind the accepted ones where drafts are drawn."""
        positions = torch.full_like(self._lengths, offset)
        return gumbel(self._step_words(_RESIDUALS), positions, _all_words(vocab_size, positions.device))

    def _step_words(self, purpose: int) -> Tensor:
        """(B,) int64, a word for each row, step and purpose, unrelated to those of the target's own noise.

        For the step, not the position: what was drawn behind the accepted tokens and then refused must not come again
        at the same position in the next step.
        """
        assert self.keys is not None
        return mix(mix(self.keys ^ purpose) + mix(self._lengths * _GOLDEN))

    def _reject(self, scores: Tensor, tree: TokenTree, rows: Tensor, nodes: Tensor, offset: int) -> Tensor:
        """Rejection sampling at one node per row, with the scores (R, V) there."""
        children = tree.parent[rows] == nodes[:, None]
        order = (
            children.int().sort(dim=1, descending=True, stable=True).indices[:, : max(1, int(children.sum(1).max()))]
        )
        candidates = tree.tokens[rows].gather(1, order).masked_fill(~children.gather(1, order), -1)
        q = None if tree.log_q is None else tree.log_q[rows, nodes].exp()
        coins = self.coins(tree.size)[rows].gather(1, order)
        return reject_in_turn(
            scores.softmax(-1), q, candidates, coins, self.residual_noise(scores.shape[-1], offset)[rows]
        )

    def warp(self, logits: Tensor) -> Tensor:
        """The warpers in order; what they cut off is -inf. (..., V) -> (..., V)."""
        scores = _at_least_single(logits).flatten(0, -2)
        for warper in self.warpers:
            scores = warper(None, scores)  # type: ignore[arg-type]  # they do not look at the text
        return scores.view(logits.shape)

    def _forbid_early_eos(
        self, logits: Tensor, offset: Tensor | int, vocabulary: Tensor | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """(B, ..., V) logits with EOS out of reach at offsets (B, ...) where too few tokens were written before."""
        if self.min_new_tokens == 0 or not self.eos_token_ids:
            return logits
        emitted = self._lengths - self.prompt_lengths
        if rows is not None:
            emitted = emitted[rows]
        early = emitted.view(-1, *[1] * (logits.dim() - 2)) + offset < self.min_new_tokens
        if vocabulary is None:
            vocabulary = torch.arange(logits.shape[-1], device=logits.device)
        ends = torch.isin(vocabulary, torch.tensor(self.eos_token_ids, device=logits.device))
        return logits.masked_fill(early[..., None] & ends, float("-inf"))
