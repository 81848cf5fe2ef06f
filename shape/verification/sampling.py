"""The target's choice of a token: processors, temperature and noise of one request."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper

from shape.verification.acceptance import Accepted, follow, match, reject_in_turn, traverse
from shape.verification.compiled import runs_on_host
from shape.verification.noise import DRAFTS, RESIDUALS, UNIFORMS, all_hashes, gumbel, noisiest, numbered_bits, step_hash
from shape.verification.on_host import follow_scores, reject_scores, traverse_scores
from shape.verification.tree import TokenTree, root_only
from shape.verification.warping import Warps, warp


def perturbed(logits: Tensor, noise: Tensor | None) -> Tensor:
    """Scores whose largest are a drafter's candidates: log q + g, log q alone when greedy.

    With the target's own noise a drafter that ranks by these proposes what the target will choose wherever q is near p;
    with other noise the largest are draws without replacement.

    Args:
        logits: (B, M, K) of ``Sampler.draft_logits``. noise: (B, 1 or at least M, K), of ``Sampler.draft_noise``.
    """
    return logits if noise is None else logits + noise[:, : logits.shape[1]]


def best(scores: Tensor) -> Tensor:
    """(..., V) -> (...) int64: where the largest is, the first of equal ones. Takes no gradient.

    On a CPU by numpy, whose search takes a tenth of the time of torch's.
    """
    if not runs_on_host(scores):
        return scores.argmax(-1)
    return torch.as_tensor(scores.detach().numpy().argmax(-1))


@dataclass
class Sampler:
    """How the target's logits become its choice of token: processors, temperature and noise of one request.

    ``commit`` is called once per step; positions are then counted from the committed text: offset 0 is the first
    token after the root, chosen at the root.

    ``match`` accepts by its choices; ``choose`` makes them at all nodes at once, ``choose_at`` at one after the other.

    Attributes:
        prompt_lengths: (B,) int64.
        node_by_node: whether to choose at one node after the other, since all at once would cost more or is impossible.
        on_host: whether compiled loops serve: scores are the host's, and warped in ways that these know.
        temperature: 0 means greedy: no noise.
        keys: (B,) int64 from sequence_keys, or None when greedy.
        warpers: transformers' processors that look at the scores alone, temperature among them.
        processors: per sequence all processors in order, where some look at the text before the token; None otherwise.
        eos_token_ids: forbidden while fewer than ``min_new_tokens`` tokens have been emitted.
        max_new_tokens: tokens that are emitted at most; None where that is not known. Behind these, and behind an end
            token, processors are not asked: they may know of nothing to come there.
        coupled: drafts see the target's own noise, and the choice is argmax(log p + g) (rule "match"). Otherwise drafts
            have noise of their own, and ``match`` is rejection sampling.
        one_drawn: of a node's children one is drawn where drafts have noise of their own, and the others are the
            likeliest (see ``candidates``); if not, all are drawn.
        static_depth: of the deepest tree, for steps that must not ask the host: all operations are on the device, with
            shapes known beforehand. None looks at each tree.
        static_hashes: (V,), ``noise.all_hashes`` beside ``static_depth``: made within a compiled step, torch's code for
            them ends the process.
    """

    prompt_lengths: Tensor
    temperature: float = 0.0
    keys: Tensor | None = None
    warpers: tuple[LogitsProcessor, ...] = ()
    processors: tuple[LogitsProcessorList, ...] | None = None
    min_new_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    coupled: bool = True
    one_drawn: bool = False
    static_depth: int | None = None
    static_hashes: Tensor | None = None
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        self.commit(self.prompt_lengths)
        device = self.prompt_lengths.device
        self._ends = torch.tensor(self.eos_token_ids, dtype=torch.long, device=device)
        on_cpu = device.type == "cpu" and self.static_depth is None
        self._warps = Warps.of(self.warpers)
        # A CPU need not wait for itself, as other devices would at every depth.
        self.on_host = on_cpu and self.processors is None and self._warps is not None
        sorts = not all(isinstance(one, TemperatureLogitsWarper) for one in self.warpers)
        self.node_by_node = self.processors is not None or (on_cpu and sorts)
        self._chains = [Warps.at_end_of(one) if on_cpu else (one, None) for one in self.processors or ()]
        self._drafted_with: tuple[Tensor, Tensor] | None = None  # hashes, and noise for them from offset 0 on

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def draws(self) -> bool:
        """Whether children are to be drawn one after the other, each node's with noise of its own, and the tree to say
        from what (``TokenTree.log_q``).
        """
        return not (self.coupled or self.greedy)

    def commit(self, lengths: Tensor, texts: Sequence[Sequence[int]] = ()) -> None:
        """Say what is committed: its length, (B,) int64, and the tokens, which only processors look at. The token
        chosen at the root will be number ``lengths``.
        """
        self._lengths, self._texts, self._drafted_with = lengths, texts, None

    def select(self, rows: Tensor) -> "Sampler":
        """The sampler of the remaining sequences."""
        kept = rows.tolist()
        chosen = replace(
            self,
            prompt_lengths=self.prompt_lengths[rows],
            keys=None if self.keys is None else self.keys[rows],
            processors=self.processors and tuple(self.processors[row] for row in kept),
        )
        chosen.commit(self._lengths[rows], [self._texts[row] for row in kept] if self._texts else ())
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
        moved.commit(self._lengths.to(device), self._texts)
        return moved

    @property
    def draft_keys(self) -> Tensor:
        """(B,) int64, keys of the noise of drafts where they have their own; its positions are counted from 0."""
        return self._step_hashes(DRAFTS)

    @property
    def counters(self) -> tuple[Tensor, Tensor]:
        """Keys and positions, (B,) int64, of the target's own noise at offset 0, when sampling."""
        assert self.keys is not None
        return self.keys, self._lengths

    def noise(self, offset: int, vocab_size: int) -> Tensor:
        """(B, V) Gumbel noise of the token at ``offset``, the target's own."""
        return self._noise_at(range(offset, offset + 1), all_hashes(vocab_size, self._lengths.device))[:, 0]

    def _noise_at(self, offsets: range, hashes: Tensor) -> Tensor:
        """(B, len(offsets), K). At once: many small tensors cost more than a large one."""
        assert self.keys is not None
        positions = self._lengths[:, None] + torch.arange(offsets.start, offsets.stop, device=hashes.device)
        return gumbel(self.keys[:, None].expand_as(positions), positions, hashes)

    def _verified_with(self, offsets: range, hashes: Tensor) -> Tensor:
        """``_noise_at`` offsets from 0 on, of which drafting has made the first where it drafts from all tokens."""
        (drafted, made), self._drafted_with = self._drafted_with or (None, None), None
        if made is None or drafted is not hashes:
            return self._noise_at(offsets, hashes)
        rest = offsets[made.shape[1] :]
        return torch.cat([made, self._noise_at(rest, hashes)], dim=1) if rest else made[:, : len(offsets)]

    def draft_noise(self, depth: int, hashes: Tensor, nodes: int = 1) -> Sequence[Tensor | None]:
        """What ``perturbed`` adds at offsets 0 to ``depth`` - 1: noise for some tokens each.

        It is the target's own, (B, 1, K), where drafts are coupled to its choices, and None when greedy. If not
        coupled, each of ``nodes`` nodes of a depth has its own, (B, nodes, K): draws must not depend on one another.

        Args:
            hashes: (K,), ``noise.token_hashes`` of the tokens that it is for.
        """
        if self.greedy:
            return [None] * depth
        if self.coupled:
            noise = self._noise_at(range(depth), hashes)
            # A compiler makes it anew where it is used, and writes none of it.
            self._drafted_with = None if torch.compiler.is_compiling() else (hashes, noise)
            return noise.split(1, dim=1)
        counters = torch.arange(depth * nodes, device=hashes.device)
        return gumbel(self.draft_keys[:, None], counters, hashes).split(nodes, dim=1)

    def draft_scores(
        self, logits: Tensor, offset: Tensor | int, noise: Tensor | None, vocabulary: Tensor | None = None
    ) -> Tensor:
        """``perturbed`` of ``draft_logits``: what a drafter at ``offset`` ranks its candidates by."""
        return perturbed(self.draft_logits(logits, offset, vocabulary), noise)

    def draft_logits(self, logits: Tensor, offset: Tensor | int | None, vocabulary: Tensor | None = None) -> Tensor:
        """(B, M, K) float32, whose softmax is q: a drafter's logits under the request's temperature and minimum length.

        Other processors are left to the target's choice.

        Args:
            logits: (B, M, K), the drafter's for M nodes.
            offset: of all nodes, or (M,) of each; None stands for 0 and on.
            vocabulary: (K,) int64, the tokens that the logits are for; None stands for all of them in order.
        """
        if offset is None:
            offset = torch.arange(logits.shape[1], device=logits.device) if self.min_new_tokens > 0 else 0
        return self.temper(self._forbid_early_eos(logits.float(), offset, vocabulary))

    def candidates(self, logits: Tensor, noise: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
        """The best children of some nodes, and the log of the chances that a drafter gives them, (B, M, count) each.

        They are the best of ``perturbed``. With ``one_drawn`` all but the first are the likeliest, and the first is
        drawn from the rest: its chance is that of the rest, whichever it is, so that dropping it by that is no choice
        among draws.

        Args:
            logits: (B, M, K) of ``draft_logits``. noise: of ``draft_noise``.
        """
        if noise is None or not self.one_drawn:
            # When sampling, scores contain the noise, and their softmax is the estimate given the noise.
            ranked = perturbed(logits, noise).log_softmax(-1).topk(count, dim=-1)
            return ranked.values, ranked.indices
        log_q = logits.log_softmax(-1)
        likely, likeliest = log_q.topk(count - 1, dim=-1)
        rest = log_q.scatter(-1, likeliest, float("-inf"))
        first = perturbed(rest, noise).argmax(-1, keepdim=True)
        return torch.cat([rest.logsumexp(-1, keepdim=True), likely], -1), torch.cat([first, likeliest], -1)

    def temper(self, logits: Tensor) -> Tensor:
        """Logits, or what is added to them, over the temperature, where there is one."""
        return logits if self.temperature in (0.0, 1.0) else logits / self.temperature

    def draft_log_probs(
        self, logits: Tensor, vocab_size: int, vocabulary: Tensor | None = None, candidates: Tensor | None = None
    ) -> Tensor:
        """(B, M, V) log q, the distribution that the best of ``perturbed`` are draws from if not coupled.

        Args:
            logits: (B, M, K) of ``draft_logits``.
            candidates: those of ``candidates``, of whom one may be drawn alone.
        """
        if self.one_drawn and candidates is not None:
            logits = logits.scatter(-1, candidates[..., 1:], float("-inf"))
        log_q = logits.log_softmax(-1).nan_to_num(nan=float("-inf"), neginf=float("-inf"))  # nothing may be left
        if vocabulary is None:
            return log_q
        full = log_q.new_full((*log_q.shape[:-1], vocab_size), float("-inf"))
        full[..., vocabulary] = log_q
        return full

    def choose(self, logits: Tensor, tree: TokenTree) -> Tensor:
        """The target's choice at every node: argmax(log p + g), with p after all warpers.

        Args:
            logits: (B, N, V), the target's logits. The choice at a node of depth d is for the token at offset d.

        Returns:
            (B, N) int64.
        """
        return self.pick(self.tree_scores(logits, tree), tree)

    def pick(self, scores: Tensor, tree: TokenTree) -> Tensor:
        """(B, N) int64: argmax(log p + g) at every node, of its ``tree_scores``."""
        if self.greedy:
            return best(scores)
        deepest = self.static_depth if self.static_depth is not None else tree.most_depth
        hashes = all_hashes(scores.shape[-1], scores.device) if self.static_hashes is None else self.static_hashes
        noise = self._verified_with(range(deepest + 1 if tree.size > 1 else 1), hashes)
        depths = torch.arange(tree.tokens.shape[0], device=scores.device)[:, None] * noise.shape[1] + tree.depth
        return best(scores + F.embedding(depths, noise.flatten(0, 1)))

    def match(self, logits: Tensor, tree: TokenTree) -> Accepted:
        """What rule "match" accepts, or rejection sampling, by whichever form costs least here; arguments as of
        ``choose``.
        """
        if self._decides_on_host(logits):
            if self.draws:
                return reject_scores(tree, *self._decided_by(logits, tree))
            given = (self._allowed(logits, tree),) if self.greedy else self._decided_by(logits, tree)
            return follow_scores(tree, *given)
        if self.draws or self.node_by_node:
            ends = () if self.processors is None else self.eos_token_ids
            return follow(tree, partial(self.choose_at, logits, tree), ends, self._wanted())
        return match(tree, self.choose(logits, tree))

    def traverse(self, logits: Tensor, tree: TokenTree) -> Accepted:
        """What rule "traversal" accepts; arguments as of ``choose``."""
        if self._decides_on_host(logits):
            return traverse_scores(tree, *self._decided_by(logits, tree))
        p = self.tree_scores(logits, tree).softmax(-1)
        q = None if tree.log_q is None else tree.log_q.exp()
        return traverse(tree, p, q, self.uniforms(tree.size), self.residual_noise(p.shape[-1]))

    def _wanted(self) -> list[int] | None:
        """Of each sequence how many tokens are still to be emitted, where processors must not be asked behind them."""
        if self.processors is None or self.max_new_tokens is None:
            return None
        return (self.prompt_lengths + self.max_new_tokens - self._lengths).tolist()

    def _decides_on_host(self, logits: Tensor) -> bool:
        return self.on_host and logits.dtype != torch.float64  # which need not be fast

    def _decided_by(self, logits: Tensor, tree: TokenTree) -> tuple[Tensor, Warps, Tensor, Tensor, Tensor]:
        """What compiled loops decide by when sampling: scores, warpers, keys, positions and hashes."""
        assert self._warps is not None
        hashes = all_hashes(logits.shape[-1], logits.device)
        return self._allowed(logits, tree), self._warps, *self.counters, hashes

    def _allowed(self, logits: Tensor, tree: TokenTree) -> Tensor:
        return self._forbid_early_eos(logits, tree.depth) if self.min_new_tokens > 0 else logits

    def choose_roots(self, logits: Tensor, tree: TokenTree) -> Tensor:
        """(B,) int64, the choice at every root; arguments as of ``choose``."""
        return self.match(logits[:, :1], root_only(tree.tokens[:, 0])).tokens[:, 0]

    def choose_at(
        self, logits: Tensor, tree: TokenTree, rows: list[int], nodes: list[int], paths: list[list[int]]
    ) -> list[int]:
        """The target's choice at one node of each of some sequences, all of one depth (see ``acceptance.follow``).

        Processors see each sequence's own text and run once per emitted token, as in autoregressive decoding.

        Args:
            logits: (B, N, V), the target's.
            paths: of each node the drafted tokens down to it.
        """
        offset = len(paths[0])
        # A view where there is one sequence alone: indices from lists cost as much as the choice.
        here = logits[:, nodes[0]] if len(logits) == 1 else logits[rows, nodes]
        scores = self.scores(here, rows, offset, paths)
        if self.draws:
            return self._reject(scores, tree, rows, nodes, offset).tolist()
        if not self.greedy:
            assert self.keys is not None
            keys, positions = self.keys[rows], self._lengths[rows] + offset
            hashes = all_hashes(scores.shape[-1], scores.device)
            if runs_on_host(scores) and scores.dtype == torch.float32:
                each = zip(scores.contiguous().numpy(), keys.tolist(), positions.tolist(), strict=True)
                return [noisiest(*one, hashes.numpy()) for one in each]
            scores = scores + gumbel(keys, positions, hashes)
        return best(scores).tolist()

    def tree_scores(self, logits: Tensor, tree: TokenTree) -> Tensor:
        """Scores (B, N, V) at every node after all processors; their softmax is p.

        Processors that look at the text are not asked about texts that they rule out, nor about those that are at
        their end: scores below a token of probability 0 have no meaning, and what is chosen behind an end is dropped.

        Args:
            logits: (B, N, V), the target's logits.
        """
        if self.processors is None:
            return self.warp(self._forbid_early_eos(logits, tree.depth))
        found = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        wanted = self._wanted()
        for row, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parent.tolist(), strict=True)):
            here, paths = torch.tensor([row], device=logits.device), {0: list[int]()}
            for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
                if node > 0:
                    if parent not in paths or found[row, parent, token].isneginf() or token in self.eos_token_ids:
                        continue
                    if wanted is not None and len(paths[parent]) + 1 >= wanted[row]:
                        continue
                    paths[node] = [*paths[parent], token]
                found[row, node] = self.scores(logits[here, node], [row], len(paths[node]), [paths[node]])[0]
        return found

    def scores(self, logits: Tensor, rows: list[int], offset: int, paths: Sequence[Sequence[int]]) -> Tensor:
        """Logits (R, V) at ``offset`` after all processors, for ``rows`` and their tokens since the committed text."""
        scores = self._forbid_early_eos(logits, offset, rows=rows)
        if self.processors is None:
            return self.warp(scores)
        texts = ([[*self._texts[row], *path]] for row, path in zip(rows, paths, strict=True))
        each = zip(rows, texts, scores.to(torch.float32, copy=True), strict=True)  # processors may write to them
        found = []
        for row, text, one in each:
            chain, warps = self._chains[row]
            one = chain(torch.tensor(text, device=scores.device), one[None])  # type: ignore[arg-type]
            if warps is not None:
                one = one.float().contiguous()
                warp(one[0].numpy(), warps)
            found.append(one)
        return torch.cat(found)

    def uniforms(self, nodes: int) -> Tensor:
        """(B, nodes) in (0, 1), one to decide over each node of a tree where drafts are drawn: float64, or on Apple's
        GPUs, which have none, float32.
        """
        numbers = torch.arange(1, nodes + 1, device=self._lengths.device)
        bits = numbered_bits(self._step_hashes(UNIFORMS)[:, None], numbers)
        if bits.device.type == "mps":  # as many bits as leave every number below 1
            return ((bits >> 29).to(torch.float32) + 0.5) * 2.0**-23
        return (bits.to(torch.float64) + 0.5) * 2.0**-52

    def residual_noise(self, vocab_size: int, offset: int = 0) -> Tensor:
        """(B, V) Gumbel noise of the token behind the accepted ones where drafts are drawn."""
        positions = torch.full_like(self._lengths, offset)
        return gumbel(self._step_hashes(RESIDUALS), positions, all_hashes(vocab_size, positions.device))

    def _step_hashes(self, purpose: int) -> Tensor:
        """(B,) int64, ``noise.step_hash`` of each row."""
        return step_hash(*self.counters, purpose)

    def _reject(self, scores: Tensor, tree: TokenTree, rows: list[int], nodes: list[int], offset: int) -> Tensor:
        """Rejection sampling at one node of each of some sequences, with the scores (R, V) there."""
        children = tree.parent[rows] == torch.tensor(nodes, device=scores.device)[:, None]
        children &= tree.were_drawn[rows]
        most = max(1, int(children.sum(1).max()))
        order = children.int().sort(dim=1, descending=True, stable=True).indices[:, :most]
        candidates = tree.tokens[rows].gather(1, order).masked_fill(~children.gather(1, order), -1)
        p = scores.softmax(-1)
        q = torch.zeros_like(p) if tree.log_q is None else tree.log_q[rows, nodes].exp()
        uniforms = self.uniforms(tree.size)[rows].gather(1, order)
        return reject_in_turn(p, q, candidates, uniforms, self.residual_noise(scores.shape[-1], offset)[rows])

    def warp(self, logits: Tensor) -> Tensor:
        """The warpers in order; what they cut off is -inf. (..., V) -> (..., V)."""
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if not self.warpers:
            return scores
        scores = scores.flatten(0, -2)
        for warper in self.warpers:
            scores = warper(None, scores)  # type: ignore[arg-type]  # they do not look at the text
        return scores.view(logits.shape)

    def _forbid_early_eos(
        self, logits: Tensor, offset: Tensor | int, vocabulary: Tensor | None = None, rows: Sequence[int] | None = None
    ) -> Tensor:
        """(B, ..., V) logits with EOS out of reach at offsets (B, ...) where too few tokens were written before."""
        if self.min_new_tokens == 0 or not self.eos_token_ids:
            return logits
        emitted = self._lengths - self.prompt_lengths
        if rows is not None:
            emitted = emitted[list(rows)]
        early = emitted.view(-1, *[1] * (logits.dim() - 2)) + offset < self.min_new_tokens
        if vocabulary is None:
            vocabulary = torch.arange(logits.shape[-1], device=logits.device)
        ends = (vocabulary[:, None] == self._ends).any(1)
        return logits.masked_fill(early[..., None] & ends, float("-inf"))
