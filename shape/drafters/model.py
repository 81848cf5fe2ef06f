"""A smaller causal language model as drafter, with a lookahead that adapts."""

from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from time import perf_counter
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shape.drafters.base import Drafter, Settled, common_length
from shape.errors import ConfigError, TargetMismatch, UnsupportedGeneration
from shape.target.model import Target
from shape.verification.cache import KVCache
from shape.verification.forward import new_cache, prefill, tree_forward
from shape.verification.noise import token_words
from shape.verification.probe import support_of
from shape.verification.sampling import Sampler, perturbed
from shape.verification.tree import TokenTree, chain, ragged_chain, root_only

_SLOTS = 256  # of the model's cache, at first, behind the prompt
_MEMORY = 0.97  # of acceptance, per draft
_REHEARSED = 256  # known positions that a rehearsal attends to


class Lookahead(Protocol):
    """How many tokens the next draft has.

    Attributes:
        reads_entropy: whether it looks at the drafter's entropy, which costs a pass over its logits.
    """

    reads_entropy: ClassVar[bool]

    @property
    def length(self) -> int: ...

    def observe(self, accepted: float, drafted: int, entropy: float, cost: float | None) -> None:
        """What became of a draft, as means over the rows.

        Args:
            accepted: drafted tokens that stood.
            drafted: how many there were.
            entropy: of the drafter's distributions, nats; 0 where it is not read.
            cost: seconds of one draft token over seconds of a verification; None where that is not known yet.
        """


@dataclass
class Fixed:
    """Always the same."""

    reads_entropy: ClassVar[bool] = False
    length: int = 4

    def observe(self, accepted: float, drafted: int, entropy: float, cost: float | None) -> None:
        pass


@dataclass
class Adaptive:
    """One token more where acceptance is high, or fair and the drafter sure; one less where it is low.

    As in "Torch-Velocity", whose thresholds are the defaults.

    Args:
        length: at first.
        least: its lower bound.
        most: its upper bound.
        up: share of drafted tokens accepted, in the mean over some drafts, above which it grows.
        down: share below which it shrinks.
        sure: nats of entropy below which it grows too,
        fair: where this share is accepted.
    """

    reads_entropy: ClassVar[bool] = True
    length: int = 4
    least: int = 1
    most: int = 8
    up: float = 0.8
    down: float = 0.3
    sure: float = 2.0
    fair: float = 0.5
    _rate: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.length <= self.most:
            raise ConfigError(f"lookahead {self.length} is not within {self.least} to {self.most}; correct them")

    def observe(self, accepted: float, drafted: int, entropy: float, cost: float | None) -> None:
        rate = accepted / drafted
        self._rate = rate if self._rate is None else 0.5 * (self._rate + rate)
        if self._rate > self.up or (self._rate >= self.fair and entropy < self.sure):
            self.length = min(self.length + 1, self.most)
        elif self._rate < self.down:
            self.length = max(self.length - 1, self.least)


@dataclass
class ByCost:
    """The length with the most tokens per second: (1 - a^(n+1)) / (1 - a) tokens for n c + 1 verifications' time, with
    the acceptance a of a token and the cost c of drafting one, both as measured on the way (Leviathan et al., arXiv
    2211.17192, theorem 3.8).

    Args:
        length: until both are known.
        most: its bound.
    """

    reads_entropy: ClassVar[bool] = False
    length: int = 4
    most: int = 12
    _reached: float = field(default=2.0, repr=False)  # a mild prior: one of two stands
    _stood: float = field(default=1.0, repr=False)
    _cost: float | None = field(default=None, repr=False)

    def observe(self, accepted: float, drafted: int, entropy: float, cost: float | None) -> None:
        self._reached = _MEMORY * self._reached + min(accepted + 1, drafted)
        self._stood = _MEMORY * self._stood + accepted
        if cost is not None:
            self._cost = cost if self._cost is None else 0.8 * self._cost + 0.2 * cost
        if (relative := self._cost) is None:
            return
        share = min(self._stood / self._reached, 0.99)

        def rate(length: int) -> float:
            return (1 - share ** (length + 1)) / (1 - share) / (length * relative + 1)

        self.length = max(range(1, self.most + 1), key=rate)


def make_lookahead(chosen: "str | int | Lookahead") -> Lookahead:
    """A lookahead by name, or of so many tokens always.

    Raises:
        ConfigError: no lookahead of that name, or a number below 1.
    """
    if isinstance(chosen, int):
        chosen = str(chosen)
    if not isinstance(chosen, str):
        return chosen
    if chosen.isdecimal() and int(chosen) > 0:
        return Fixed(int(chosen))
    if chosen not in ("adaptive", "cost"):
        raise ConfigError(f"lookahead {chosen!r} is unknown; use adaptive, cost, or a number of tokens")
    return Adaptive() if chosen == "adaptive" else ByCost()


class ModelDrafter(Drafter):
    """Drafts a chain with a smaller model of the target's tokens (Leviathan et al., arXiv 2211.17192; Chen et al.,
    arXiv 2302.01318).

    Its cache is an arena of its own, in which a rejected draft costs nothing: the length goes back, and no token is fed
    twice. It ranks by the noise of the target's own choice, as every drafter, so that samples are those of plain
    decoding.

    Args:
        model: the smaller model.
        lookahead: how many tokens a draft has; shared by the calls of a decoder.
    """

    name = "model"

    def __init__(self, model: Target, lookahead: Lookahead | None = None) -> None:
        self.model = model
        self.lookahead: Lookahead = Adaptive() if lookahead is None else lookahead
        self._as_given = deepcopy(self.lookahead)
        self._by_clock = True

    def __str__(self) -> str:
        return f"{self.model!r}, {self.lookahead}"

    @property
    def networks(self) -> Sequence[nn.Module]:
        return (self.model.model,)

    def bind(self, target: Target) -> None:
        mine, theirs = self.model.identity, target.identity
        if mine.tokenizer_hash and theirs.tokenizer_hash:
            if mine.tokenizer_hash != theirs.tokenizer_hash:
                raise TargetMismatch(
                    f"draft model {self.model.name} has another tokenizer than target {target.name}; give one of the "
                    "same vocabulary, or distil one for this target"
                )
        elif self.model.vocab_size != target.vocab_size:
            raise TargetMismatch(
                f"draft model {self.model.name} has {self.model.vocab_size} tokens and target {target.name} has "
                f"{target.vocab_size}, and no tokenizer says that they are the same; give one of the same vocabulary"
            )
        self._target_size = target.vocab_size
        self._share = _size(self.model) / _size(target)
        support_of(self.model)
        # Tables of tokens are padded to other sizes in models of one family.
        self._size = min(self.model.vocab_size, target.vocab_size)
        self._words = token_words(torch.arange(self._size, device=self.model.device))

    def reproducible(self) -> "ModelDrafter":
        other = copy(self)
        other.lookahead, other._by_clock = deepcopy(self._as_given), False
        return other

    def start(self, settled: Settled, hidden: Tensor) -> None:
        known = [text[:-1] for text in settled.texts]
        support = support_of(self.model)
        if support.mode == "chain" and len(known) > 1:
            raise UnsupportedGeneration(
                f"draft model {self.model.name} runs one row at a time ({support.reason}), and {len(known)} were asked "
                "for; decode them one by one"
            )
        longest = max(map(len, known))
        self.arena = self._new_arena(len(known), longest + _SLOTS)
        padded = torch.tensor([text + [0] * (longest - len(text)) for text in known], device=self.model.device)
        prefill(self.model, self.arena, padded, [len(text) for text in known])
        # The last draft, of which all but the last token lie in the slots behind the arena's lengths.
        self._drafted: list[list[int]] = [[] for _ in known]
        self._entropy, self._seconds = 0.0, 0.0
        self._ended: float | None = None
        self._verified: float | None = None

    def _new_arena(self, rows: int, capacity: int) -> KVCache:
        return new_cache(self.model, support_of(self.model), rows, capacity)

    def update(self, tokens: list[list[int]], hidden: Tensor, counts: Tensor) -> None:
        if self._ended is not None:
            self._verified = perf_counter() - self._ended
            self._ended = None

    def select(self, rows: Tensor) -> None:
        self.arena.select(rows.to(self.model.device))
        self._drafted = [self._drafted[row] for row in rows.tolist()]

    def draft(self, settled: Settled, sampler: Sampler) -> TokenTree:
        device = self.model.device
        tree = self._draft(settled.to(device), sampler.to(device)).to(settled.root.device)
        self._ended = perf_counter()
        return tree

    @torch.no_grad()
    def _draft(self, settled: Settled, sampler: Sampler) -> TokenTree:
        started = perf_counter()
        self._roll_back(settled.texts)
        length = self.lookahead.length
        if self.model.max_positions is not None:
            length = min(length, self.model.max_positions - max(map(len, settled.texts)))
        self.passes = max(length, 0)
        if length <= 0:
            return root_only(settled.root)
        noise = sampler.foresee(length, self._words)
        state = self._read(settled.texts)
        tokens, drawn, entropy = [], [], state.new_zeros((), dtype=torch.float32)
        joint = [torch.zeros(state.shape[0], 1, device=state.device)]
        for n in range(length):
            own = self.model.logits(state)[..., : self._size]
            logits = sampler.draft_logits(own, n)
            best, token = perturbed(logits, noise[n]).log_softmax(-1).max(-1)
            joint.append(joint[-1] + best)
            tokens.append(token)
            if self.lookahead.reads_entropy:
                entropy = entropy + torch.special.entr(own.float().softmax(-1)).sum(-1).mean()
            if sampler.draws:
                log_p = sampler.draft_log_probs(logits, self._size)
                drawn.append(F.pad(log_p, (0, self._target_size - self._size), value=float("-inf")))
            if n + 1 < length:
                state = self._forward(root_only(token[:, 0]))
                self.arena.set_lengths([one + 1 for one in self.arena.host_lengths])
        drafted = torch.cat(tokens, dim=1)
        self._drafted = drafted.tolist()
        self.arena.set_lengths([len(text) for text in settled.texts])
        self._entropy, self._seconds = float(entropy) / length, (perf_counter() - started) / length
        tree = chain(settled.root, drafted)
        log_q = torch.cat([*drawn, drawn[-1]], dim=1) if drawn else None  # nothing is drawn below the last node
        return TokenTree(tree.tokens, tree.parent, log_q, torch.cat(joint, dim=1))

    def _roll_back(self, texts: Sequence[Sequence[int]]) -> None:
        """Settle what the cache has of the text, drafted tokens that stood included, and learn how many these were."""
        lengths, count = self.arena.host_lengths, len(self._drafted[0])
        stood = [
            common_length(drafted, text[at:]) for drafted, text, at in zip(self._drafted, texts, lengths, strict=True)
        ]
        if count:
            cost = None if self._verified is None else self._seconds / max(self._verified, 1e-9)
            if not self._by_clock:
                cost = self._share  # a forward takes as long as its weights take to be read
            self.lookahead.observe(sum(stood) / len(stood), count, self._entropy, cost)
        # The last drafted token has not been fed, nor has the text's last one.
        kept = [at + min(same, max(count - 1, 0)) for at, same in zip(lengths, stood, strict=True)]
        self.arena.set_lengths([min(length, len(text) - 1) for length, text in zip(kept, texts, strict=True)])
        self._drafted = [[] for _ in texts]

    def _read(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """States (B, 1, H) of each row's last token, whatever of the text is new having been read."""
        lengths = self.arena.host_lengths
        missing = [list(text[length:]) for text, length in zip(texts, lengths, strict=True)]
        first = torch.tensor([row[0] for row in missing], device=self.model.device)
        states = self._forward(ragged_chain(first, [row[1:] for row in missing]))
        last = torch.tensor([len(row) - 1 for row in missing], device=states.device)
        self.arena.set_lengths([len(text) for text in texts])
        return states[torch.arange(len(missing), device=states.device), last][:, None]

    def _forward(self, tree: TokenTree) -> Tensor:
        self.arena.reserve(tree.size)
        return tree_forward(self.model, support_of(self.model), self.arena, tree)

    @torch.no_grad()
    def rehearse(self, rows: int, passes: int) -> None:
        self.arena = self._new_arena(rows, _REHEARSED + passes)
        self.arena.set_lengths([_REHEARSED] * rows)
        tree = root_only(torch.zeros(rows, dtype=torch.long, device=self.model.device))
        for _ in range(passes):
            self.model.logits(self._forward(tree))


def _size(model: Target) -> int:
    """Bytes of the weights."""
    return max(sum(weight.nbytes for weight in model.model.parameters()), 1)
