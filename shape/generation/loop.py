"""The decoding loop: steps until every sequence has stopped. Without a drafter it decodes autoregressively.

How a step is computed is for ``Steps`` to say: ``eager`` asks the host in between and serves everything, ``fixed`` has
static shapes for CUDA graphs and serves what allows them.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torch import Tensor

from shape.drafters.base import Drafter
from shape.generation.control import SpeculationControl
from shape.generation.rules import Rule
from shape.generation.sequence import SequenceState
from shape.generation.stats import DecodeStats, Step
from shape.generation.trace import Trace
from shape.target.model import Target
from shape.target.support import Support
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree


@dataclass
class Batch:
    """What is decoded, and how.

    Attributes:
        drafter: None decodes autoregressively.
        sampler: the target's choice, for these sequences.
        stats: counted into.
        control: decides whether a step drafts; None always drafts.
        reproducible: whether sizes of forwards must depend on nothing but the call.
    """

    target: Target
    support: Support
    drafter: Drafter | None
    sequences: list[SequenceState]
    sampler: Sampler
    rule: Rule
    stats: DecodeStats
    control: SpeculationControl | None = None
    reproducible: bool = False


@dataclass(frozen=True)
class Verified:
    """What a step verified, for those that look into it: all of one batch of unfinished sequences.

    Attributes:
        tree: what was proposed. logits: (B, N, V), the target's at its nodes.
        sampler: as it was before the step.
        paths: per sequence the nodes that were gone through, root first: one for each of its tokens.
        accepted: per sequence the drafted nodes whose tokens are among them.
    """

    tree: TokenTree
    logits: Tensor
    sampler: Sampler
    paths: list[list[int]]
    accepted: list[list[int]]


@dataclass(frozen=True)
class Outcome:
    """What one step came to, with an entry per unfinished sequence, in the order in which they were given.

    Attributes:
        step: its sizes and times.
        tokens: newly committed ones, at least one each.
        proposed: numbers of drafted tokens. accepted: how many of ``tokens`` were among them.
        drafts: whether speculation control let the step draft.
        verified: None where it stays on the device.
    """

    step: Step
    tokens: list[list[int]]
    proposed: list[int]
    accepted: list[int]
    drafts: bool
    verified: Verified | None = None


class Steps(AbstractContextManager["Steps"], ABC):
    """Computes the steps of one batch. Entered once, for as long as the batch is decoded."""

    batch: Batch

    @abstractmethod
    def prefill(self) -> list[int]:
        """Commit the prompts; the first token of every sequence."""

    @abstractmethod
    def start(self) -> None:
        """Tell the drafter about the prompts; behind the prefill, whose tokens need not wait for it."""

    @abstractmethod
    def step(self, live: list[SequenceState]) -> Outcome:
        """Draft, verify, accept and commit for the sequences that have not stopped (``unfinished``)."""

    def __exit__(self, *raised: Any) -> None: ...


def decode(steps: Steps, trace: Trace | None = None) -> Generator[tuple[int, list[int]], None, None]:
    """Decode a batch, as far as the caller asks: closing the generator stops the decoding.

    Args:
        trace: gets a record of everything that is verified on the host.

    Yields:
        (number of the sequence, its newly emitted tokens), as soon as they are committed.
    """
    sequences, stats, control = steps.batch.sequences, steps.batch.stats, steps.batch.control
    started = perf_counter()
    with steps:
        first = steps.prefill()
        prefill = perf_counter() - started
        stats.prefill_seconds += prefill
        for sequence, token in zip(sequences, first, strict=True):
            sequence.extend([token])
            yield sequence.index, [token]
        began = perf_counter()  # the caller's time is not among ours, who may be slow
        if live := unfinished(sequences):
            steps.start()
        start = perf_counter() - began
        stats.start_seconds += start
        stats.decode_seconds += start  # the first tokens are out, and it is the next ones that wait for it
        if trace is not None:
            numbers, lengths = [one.index for one in sequences], [len(one.prompt) for one in sequences]
            trace.prefill(numbers, lengths, first, prefill)
        while live:
            began = perf_counter()
            done = steps.step(live)
            emitted = [sequence.extend(tokens) for sequence, tokens in zip(live, done.tokens, strict=True)]
            _count(stats, live, done, emitted)
            # A device with steps under way goes on while the caller has what it was given.
            seconds = max(perf_counter() - began, done.step.seconds)
            if trace is not None and done.verified is not None:
                trace.step(done, emitted)
            if control is not None:
                each = sum(map(len, done.tokens)) / len(live)
                stats.autoregressive_steps += not done.drafts
                control.observe(done.step, each, seconds, () if done.verified is None else done.verified.accepted)
            stats.decode_seconds += max(perf_counter() - began, seconds)
            for sequence, tokens, count in zip(live, done.tokens, emitted, strict=True):
                yield sequence.index, tokens[:count]
            live = unfinished(live)
        if control is not None:
            stats.pauses += control.pauses


def unfinished(sequences: list[SequenceState]) -> list[SequenceState]:
    """Those that have not stopped, in their order, but that the last ones take the places of those that have: whatever
    else moves would be copied, caches too.
    """
    count = sum(not one.finished for one in sequences)
    behind = [one for one in sequences[count:] if not one.finished]
    return [behind.pop() if one.finished else one for one in sequences[:count]]


def _count(stats: DecodeStats, live: list[SequenceState], done: Outcome, emitted: list[int]) -> None:
    stats.steps.append(done.step)
    for at, (sequence, count) in enumerate(zip(live, emitted, strict=True)):
        accepted = min(done.accepted[at], count)
        stats.count(sequence.index, done.proposed[at], accepted, count)
        if done.verified is not None and (source := done.verified.tree.source) is not None:
            stats.count_sources(source[at], done.verified.accepted[at][:accepted])
