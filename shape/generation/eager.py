"""The step that asks the host in between: trees of any size, every drafter, rule, option and target."""

from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from shape.generation.clock import Moment
from shape.generation.loop import Batch, Outcome, Steps, Verified
from shape.generation.prefill import Memory, commit_prompts
from shape.generation.sequence import SequenceState
from shape.generation.stats import Step
from shape.verification.acceptance import Accepted
from shape.verification.forward import recompute, tree_logits
from shape.verification.tree import TokenTree, first_path, of_lists, root_only, rows_of, shallow, to_lists

# Autoregressive steps whose updates the drafter gets together: a pause, or most of one, without its forwards.
_MOST_PENDING = 128
# Tokens at most that go through once more before a draft (``RecurrentCache``). Behind more a step does not draft, which
# leaves none.
_MOST_AGAIN = 16


class EagerSteps(Steps):
    """To be used where nothing is kept for gradients (see ``shape.target.inference``).

    Args:
        memory: what the session's last call left: the common beginning of its text and this prompt is not computed
            again; this call's cache and states are stored in it.
    """

    def __init__(self, batch: Batch, memory: Memory | None = None) -> None:
        self.batch, self._memory = batch, memory
        self._live, self._sampler = batch.sequences, batch.sampler
        self._layers = (-1,) if batch.drafter is None else batch.drafter.layers
        self._switched = batch.target.switched(len(self._live[0].prompt))
        self._needs_updates = batch.drafter is not None and batch.drafter.needs_updates
        self._last: tuple[list[list[int]], Tensor] | None = None  # tokens and counts of the last step
        self._hidden: Tensor | None = None  # of the prompts, until the drafter has them
        self._pending: list[tuple[list[list[int]], Tensor, Tensor]] = []  # what autoregressive steps made known
        self._states: list[Tensor] = []  # of all committed tokens, where a memory will keep them

    def prefill(self) -> list[int]:
        room = self._live[0].max_new_tokens
        self._cache, self._committed, self._hidden = commit_prompts(self.batch, room, self._layers, self._memory)
        self._remember(self._hidden)
        return [text[-1] for text in self._committed.texts]

    def start(self) -> None:
        hidden, self._hidden = self._hidden, None  # of long prompts a large part of the memory
        if self.batch.drafter is not None and hidden is not None:
            self.batch.drafter.start(self._committed, hidden)

    def step(self, live: list[SequenceState]) -> Outcome:
        self._advance()
        self._drop_finished(live)
        self._recompute_behind_switch()
        batch, cache, committed, sampler = self.batch, self._cache, self._committed, self._sampler
        drafting = Moment.now(batch.target.device)
        sampler.commit(committed.lengths, committed.texts)
        drafts = batch.control is None or batch.control.draft_next(cache.longest)
        drafter = batch.drafter if drafts and cache.again <= _MOST_AGAIN else None
        if drafter is not None:
            self._update_drafter()
        tree = self._fit(root_only(committed.root) if drafter is None else drafter.draft(committed, sampler))
        if batch.control is not None and (drafter is None or not drafter.verified_whole):
            tree = batch.control.worthwhile(tree, cache.longest)
        verifying = Moment.now(batch.target.device)
        cache.reserve(tree.size)
        states, logits = tree_logits(batch.target, batch.support, cache, tree, self._layers)
        accepted = batch.rule(tree, logits, sampler)
        # The step's one wait for the device.
        counts, drafted, *rest = to_lists(
            accepted.counts, accepted.drafted, accepted.tokens, accepted.path, tree.parent
        )
        tokens, paths = ([row[:count] for row, count in zip(part, counts, strict=True)] for part in rest[:2])
        committing = perf_counter()
        proposed = [sum(above >= 0 for above in parents) for parents in rest[2]]
        lengths = cache.host_lengths
        cache.commit(paths)
        if drafter is not None:
            drafter.inspect(tree, logits)
        self._keep_states(tokens, states, accepted, max(counts))
        if drafter is not None or len(self._pending) == _MOST_PENDING:
            self._update_drafter()
        draft = drafting.until(verifying)
        times = draft, committing - drafting.host - draft, perf_counter() - committing
        numbers, passes = [sequence.index for sequence in live], 0 if drafter is None else drafter.passes
        self._last = tokens, accepted.counts
        nodes = [path[1 : 1 + count] for path, count in zip(rest[1], drafted, strict=True)]
        verified = Verified(tree, logits, sampler, paths, nodes)
        return Outcome(Step(numbers, lengths, tree.size, passes, *times), tokens, proposed, drafted, drafts, verified)

    def __exit__(self, *raised: Any) -> None:
        if self._memory is not None and raised[0] in (None, GeneratorExit):  # a reader may leave before the end
            self._advance()
            text, states = self._committed.texts[0][: self._cache.longest], torch.cat(self._states, dim=1)
            self._memory.keep(text, states, self._cache, self._switched)

    def _advance(self) -> None:
        """Add the last step's tokens to the text: not before, since a trace looks at the step as it was."""
        if self._last is not None:
            self._committed.advance(*self._last)
            self._last = None

    def _drop_finished(self, live: list[SequenceState]) -> None:
        if len(live) == len(self._live):
            return
        self._update_drafter()
        kept = [self._live.index(sequence) for sequence in live]
        index = of_lists(kept, self._committed.root.device)
        self._live, self._committed = live, self._committed.select(kept)
        self._sampler = self._sampler.select(index)
        self._cache.select(index)
        if self.batch.drafter is not None:
            self.batch.drafter.select(index)

    def _recompute_behind_switch(self) -> None:
        """Where the target's rotary table changes, do as its own ``generate`` (see ``shape.target.rotary``)."""
        switch = self.batch.target.switch
        if switch is not None and switch.recomputes and self._cache.longest == switch.positions:
            self._switched, self._states = True, []
            self._remember(recompute(self.batch.target, self._cache, self._committed.texts, self._layers))

    def _fit(self, tree: TokenTree) -> TokenTree:
        """What of a tree the target can verify in one forward."""
        if self.batch.support.mode == "chain":
            tree = first_path(tree)
        switch, longest = self.batch.target.switch, self._cache.longest
        if switch is not None and longest < switch.positions < longest + tree.size:
            tree = shallow(tree, switch.positions - 1 - longest)  # no forward has two tables
        return tree

    def _keep_states(self, tokens: list[list[int]], states: Tensor, accepted: Accepted, most: int) -> None:
        """Keep the states of the accepted nodes for the drafter and the memory."""
        if not self._needs_updates and self._memory is None:
            return
        if states.shape[1] > 1:
            path = accepted.path[:, :most]
            one = len(path) == 1  # in half of the time
            states = states.index_select(1, path.view(-1)) if one else rows_of(states, path)
        if self._needs_updates:
            before = zip(self._committed.texts, tokens, strict=True)
            self._pending.append(([[text[-1], *own] for text, own in before], states, accepted.counts))
        self._remember(states)

    def _update_drafter(self) -> None:
        """Give the drafter the pending updates as one: several are all of autoregressive steps, which committed one
        token each.
        """
        if self.batch.drafter is None or not self._pending:
            return
        committed, hidden, counts = zip(*self._pending, strict=True)
        self._pending = []
        if len(committed) == 1:
            return self.batch.drafter.update(committed[0], hidden[0], counts[0])
        tokens = [[each[0][0], *(token for own in each for token in own[1:])] for each in zip(*committed, strict=True)]
        self.batch.drafter.update(tokens, torch.cat(hidden, dim=1), torch.stack(counts).sum(0))

    def _remember(self, states: Tensor) -> None:
        if self._memory is not None:
            self._states.append(states)
