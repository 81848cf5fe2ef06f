"""The decode loop: draft, verify, accept, commit, until every row has stopped. Plain decoding is the same loop."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from shape.drafters.base import Drafter, Settled
from shape.stats import DecodeStats
from shape.target import Target
from shape.verification.acceptance import Accepted
from shape.verification.cache import KVArena
from shape.verification.forward import Support, new_arena, prefill, tree_forward
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree, first_path, root_only

Source = Literal["prefill", "draft", "target"]
AcceptanceRule = Callable[[TokenTree, Tensor, Sampler], Accepted]
# Cache slots allocated behind the longest possible text for the tree under verification; grows on demand.
_TREE_SLOTS = 64


@dataclass
class Row:
    """One row of the batch as it grows.

    Attributes:
        index: its number in the batch that ``generate`` was given.
        prompt: its tokens, without padding.
        criteria: further reasons to stop, asked after every token.
        new: emitted tokens, an EOS included.
        sources: where each emitted token came from.
        finished: stopped by EOS, by length or by a criterion.
    """

    index: int
    prompt: list[int]
    criteria: StoppingCriteriaList | None = None
    new: list[int] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    finished: bool = False

    def extend(self, tokens: list[int], drafted: int, source: Source, limit: int, eos: tuple[int, ...]) -> int:
        """Emit tokens, of which the first ``drafted`` were proposed, up to a stop; the number that was emitted."""
        emitted = 0
        for token in tokens:
            self.new.append(token)
            self.sources.append("draft" if emitted < drafted else source)
            emitted += 1
            if token in eos or len(self.new) == limit or self._criteria_met():
                self.finished = True
                break
        return emitted

    def _criteria_met(self) -> bool:
        if not self.criteria:
            return False
        text = torch.tensor([[*self.prompt, *self.new]])
        return bool(self.criteria(text, None).all())  # type: ignore[arg-type]  # scores are not kept


@torch.no_grad()
def decode(
    target: Target,
    support: Support,
    drafter: Drafter | None,
    prompts: list[list[int]],
    sampler: Sampler,
    *,
    max_new_tokens: int,
    eos_token_ids: tuple[int, ...],
    criteria: list[StoppingCriteriaList] | None,
    acceptance: AcceptanceRule,
    emit: Callable[[int, list[int]], None],
    stats: DecodeStats,
    rows: list[int],
) -> list[Row]:
    """Decode a batch.

    Args:
        prompts: token ids per row, without padding, each at least one token.
        sampler: the target's choice, for these rows.
        max_new_tokens: at least 1.
        criteria: per row, further reasons to stop.
        acceptance: the rule; gets the tree, the target's logits (B, N, V) and the sampler.
        emit: called with (row number, its newly emitted tokens).
        stats: counted into.
        rows: the rows' numbers.

    Returns:
        The finished rows in the order of ``prompts``.
    """
    started = perf_counter()
    finished = live = [
        Row(index, prompt, criteria[at] if criteria else None)
        for at, (index, prompt) in enumerate(zip(rows, prompts, strict=True))
    ]
    arena = new_arena(target, support, len(live), max(map(len, prompts)) + max_new_tokens + _TREE_SLOTS)
    settled, hidden = _settle_prompts(target, arena, prompts, sampler)
    for row, token in zip(live, settled.root.tolist(), strict=True):
        row.extend([token], 0, "prefill", max_new_tokens, eos_token_ids)
        emit(row.index, [token])
    if drafter is not None:
        drafter.start(settled, hidden)
    prefilled = perf_counter()
    stats.prefill_seconds += prefilled - started

    while True:
        going = [i for i, row in enumerate(live) if not row.finished]
        if not going:
            break
        if len(going) < len(live):
            live = [live[i] for i in going]
            index = settled.root.new_tensor(going)
            settled, sampler = settled.select(going), sampler.select(index)
            arena.select(index)
            if drafter is not None:
                drafter.select(index)

        drafting = perf_counter()
        sampler.settle(settled.lengths, settled.texts)
        tree = root_only(settled.root) if drafter is None else drafter.draft(settled, sampler)
        if support.mode == "chain":
            tree = first_path(tree)
        verifying = perf_counter()
        arena.reserve(tree.size)
        states = tree_forward(target, support, arena, tree)
        accepted = acceptance(tree, target.logits(states), sampler)
        # The step's one wait for the device.
        counts, drafted, tokens = (
            accepted.counts.tolist(),
            accepted.drafted.tolist(),
            accepted.tokens.tolist(),
        )
        committing = perf_counter()
        arena.commit(accepted.path, counts)
        if drafter is not None:
            path = accepted.path[:, : max(counts), None].expand(-1, -1, states.shape[-1])
            drafter.update(states.gather(1, path), accepted.counts)

        proposed = (tree.parent[:, 1:] >= 0).sum(1).tolist()
        for i, row in enumerate(live):
            new = tokens[i][: counts[i]]
            settled.texts[i].extend(new)
            emitted = row.extend(new, drafted[i], "target", max_new_tokens, eos_token_ids)
            stats.count(row.index, proposed[i], min(drafted[i], emitted), emitted)
            emit(row.index, new[:emitted])
        settled.lengths = settled.lengths + accepted.counts
        settled.root = settled.root.new_tensor([text[-1] for text in settled.texts])
        stats.steps += 1
        stats.draft_seconds += verifying - drafting
        stats.verify_seconds += committing - verifying
        stats.commit_seconds += perf_counter() - committing
    stats.decode_seconds += perf_counter() - prefilled
    return finished


def _settle_prompts(
    target: Target, arena: KVArena, prompts: list[list[int]], sampler: Sampler
) -> tuple[Settled, Tensor]:
    """Prefill, and the first token of every row. Also the prompts' states, (B, T, H)."""
    lengths = [len(prompt) for prompt in prompts]
    padded = [prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts]
    hidden = prefill(target, arena, torch.tensor(padded, device=target.device), lengths)
    last = hidden[torch.arange(len(prompts), device=hidden.device), arena.lengths - 1]
    sampler.settle(arena.lengths, prompts)
    root = sampler.choose(target.logits(last[:, None]), root_only(arena.lengths))[:, 0]
    texts = [[*prompt, token] for prompt, token in zip(prompts, root.tolist(), strict=True)]
    return Settled(texts, arena.lengths + 1, root), hidden
