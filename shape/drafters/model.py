"""A smaller causal language model as drafter."""

from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import replace
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shape.drafters.base import MEASURED_LENGTH, Committed, Drafter, common_length
from shape.drafters.lengths import DraftLength, Fixed, make_length
from shape.errors import TargetMismatch, UnsupportedGeneration
from shape.target.model import Target
from shape.verification.cache import KVCache
from shape.verification.forward import new_cache, prefill, tree_forward
from shape.verification.noise import token_hashes
from shape.verification.probe import support_of
from shape.verification.sampling import Sampler, perturbed
from shape.verification.tree import TokenTree, chain, ragged_chain, root_only

_SLOTS = 256  # of the model's cache, at first, behind the prompt


class ModelDrafter(Drafter):
    """Drafts a chain with a smaller model of the target's tokens (Leviathan et al., arXiv 2211.17192; Chen et al.,
    arXiv 2302.01318).

    Rolling back its KV cache is setting a length: no token is fed twice. Recurrent layers cannot be rolled back so; of
    a model with them, which drafts for one sequence, each forward is over the whole draft so far.

    It ranks by the noise of the target's own choice, as every drafter, so that samples are those of autoregressive
    decoding.

    Args:
        model: the smaller model.
        num_draft_tokens: "adaptive", "cost", a number, or a ``DraftLength``, which the calls of a decoder share.
    """

    name = "model"
    _by_clock = True

    def __init__(self, model: Target, num_draft_tokens: str | int | DraftLength = "adaptive") -> None:
        self.model = model
        self.length = make_length(num_draft_tokens)
        self._as_given = deepcopy(self.length)  # it adapts

    def __str__(self) -> str:
        return f"{self.model!r}, {self._as_given}"

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
        self._share = self.model.model.get_memory_footprint() / target.model.get_memory_footprint()
        support = support_of(self.model)
        self._recurrent, self.one_at_a_time = support.recurrent, support.mode == "chain"
        # Tables of tokens are padded to other sizes in models of one family.
        self._size = min(self.model.vocab_size, target.vocab_size)
        self._words = token_hashes(torch.arange(self._size, device=self.model.device))

    def limit_draft(self, num_draft_tokens: int) -> None:
        self.length = self._as_given = Fixed(num_draft_tokens)

    def reproducible(self) -> "ModelDrafter":
        other = copy(self)
        other.length, other._by_clock = deepcopy(self._as_given), False
        return other

    def start(self, committed: Committed, hidden: Tensor) -> None:
        known = [text[:-1] for text in committed.texts]
        if self.one_at_a_time and len(known) > 1:  # of engines that make their own batches
            support = support_of(self.model)
            raise UnsupportedGeneration(
                f"draft model {self.model.name} runs one sequence at a time ({support.reason}), and {len(known)} were "
                "asked for; decode them one by one"
            )
        longest = max(map(len, known))
        self.cache = self._new_cache(len(known), longest + _SLOTS)
        padded = torch.tensor([text + [0] * (longest - len(text)) for text in known], device=self.model.device)
        if self.model.max_positions is None or longest < self.model.max_positions:  # it drafts nothing behind more
            prefill(self.model, self.cache, self._known(padded), [len(text) for text in known])
        # The last draft, of which all but the last token lie in the slots behind the cache's lengths.
        self._drafted: list[list[int]] = [[] for _ in known]
        self._entropy, self._seconds = 0.0, 0.0
        self._ended: float | None = None
        self._verified: float | None = None

    def _new_cache(self, rows: int, capacity: int) -> KVCache:
        return new_cache(self.model, support_of(self.model), rows, capacity)

    def update(self, tokens: list[list[int]], hidden: Tensor, counts: Tensor) -> None:
        if self._ended is not None:
            self._verified = perf_counter() - self._ended
            self._ended = None

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows.to(self.model.device))
        self._drafted = [self._drafted[row] for row in rows.tolist()]

    def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        device = self.model.device
        tree = self._draft(committed.to(device), sampler.to(device)).to(committed.root.device)
        self._ended = perf_counter()
        return tree

    @torch.no_grad()
    def _draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        started = perf_counter()
        self._roll_back(committed.texts)
        length = self.length.length
        if self.model.max_positions is not None:
            length = min(length, self.model.max_positions - max(map(len, committed.texts)))
        self.passes = max(length, 0)
        if length <= 0:
            return root_only(committed.root)
        noise = sampler.draft_noise(length, self._words)
        state = self._read(committed.texts)
        tokens, drawn, entropy = [], [], state.new_zeros((), dtype=torch.float32)
        joint = [torch.zeros(state.shape[0], 1, device=state.device)]
        for n in range(length):
            own = self.model.logits(state)[..., : self._size]
            logits = sampler.draft_logits(own, n)
            best, token = perturbed(logits, noise[n]).log_softmax(-1).max(-1)
            joint.append(joint[-1] + best)
            tokens.append(token)
            if self.length.reads_entropy:
                entropy = entropy + torch.special.entr(own.float().softmax(-1)).sum(-1).mean()
            if sampler.draws:
                log_p = sampler.draft_log_probs(logits, self._size)
                drawn.append(F.pad(log_p, (0, self._target_size - self._size), value=float("-inf")))
            if n + 1 < length:
                state = self._behind(tokens)
        drafted = torch.cat(tokens, dim=1)
        self._drafted = drafted.tolist()
        self.cache.set_lengths([len(text) for text in committed.texts])
        self._entropy, self._seconds = float(entropy) / length, (perf_counter() - started) / length
        tree = chain(committed.root, drafted)
        log_q = torch.cat([*drawn, drawn[-1]], dim=1) if drawn else None  # nothing is drawn below the last node
        return replace(tree, log_q=log_q, joint=torch.cat(joint, dim=1))

    def _behind(self, drafted: list[Tensor]) -> Tensor:
        """States (B, 1, H) of the last of some drafted tokens, (B, 1) each."""
        if self._recurrent:
            return self._forward(chain(drafted[0][:, 0], torch.cat(drafted, dim=1)[:, 1:]))[:, -1:]
        state = self._forward(root_only(drafted[-1][:, 0]))
        self.cache.set_lengths([one + 1 for one in self.cache.host_lengths])
        return state

    def _roll_back(self, texts: Sequence[Sequence[int]]) -> None:
        """Keep in the cache what it has of the text, accepted drafts included, and learn how many these were."""
        lengths, count = self.cache.host_lengths, len(self._drafted[0])
        accepted = [
            common_length(drafted, text[at:]) for drafted, text, at in zip(self._drafted, texts, lengths, strict=True)
        ]
        if count:
            cost = None if self._verified is None else self._seconds / max(self._verified, 1e-9)
            if not self._by_clock:
                cost = self._share  # a forward takes as long as its weights take to be read
            tested = [min(same + 1, count) for same in accepted]
            means = sum(accepted) / len(accepted), sum(tested) / len(tested)
            self.length.observe(*means, count, self._entropy, cost)
        # The last drafted token has not been fed, nor has the text's last one.
        fed = 0 if self._recurrent else max(count - 1, 0)
        kept = [at + min(same, fed) for at, same in zip(lengths, accepted, strict=True)]
        self.cache.set_lengths([min(length, len(text) - 1) for length, text in zip(kept, texts, strict=True)])
        self._drafted = [[] for _ in texts]

    def _read(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """States (B, 1, H) of each text's last token, after a forward over what is new."""
        lengths = self.cache.host_lengths
        missing = [list(text[length:]) for text, length in zip(texts, lengths, strict=True)]
        first = torch.tensor([row[0] for row in missing], device=self.model.device)
        states = self._forward(ragged_chain(first, [row[1:] for row in missing]))
        last = torch.tensor([len(row) - 1 for row in missing], device=states.device)
        self.cache.set_lengths([len(text) for text in texts])
        return states[torch.arange(len(missing), device=states.device), last][:, None]

    def _forward(self, tree: TokenTree) -> Tensor:
        self.cache.reserve(tree.size)
        tree = replace(tree, tokens=self._known(tree.tokens))
        return tree_forward(self.model, support_of(self.model), self.cache, tree)

    def _known(self, tokens: Tensor) -> Tensor:
        """Tokens as the smaller model has them: of a table with fewer rows the last is read for all others."""
        return tokens if self._size == self._target_size else tokens.clamp(max=self.model.vocab_size - 1)

    @torch.no_grad()
    def run_forwards(self, rows: int, passes: int) -> None:
        self.cache = self._new_cache(rows, MEASURED_LENGTH + passes)
        if not self._recurrent:  # whose states cost the same behind any text
            self.cache.set_lengths([MEASURED_LENGTH] * rows)
        tree = root_only(torch.zeros(rows, dtype=torch.long, device=self.model.device))
        for _ in range(passes):
            self.model.logits(self._forward(tree))
