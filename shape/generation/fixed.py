"""Steps of fixed shapes, for accelerators: nothing in them waits for the host, so that they are captured as a whole.

``eager`` asks the host at every step: how much was accepted, how long sequences are, what moves in the cache. Between
the answers the device idles, and each of a step's thousand kernels is launched by Python. Here draft, mask, forward,
choice, acceptance and commit are one function of static tensors (``Stage.step``): lengths, roots, noise keys and the
drafter's state stay on the device, attention sees a fixed number of slots under a mask made from the lengths, and
commits always move. On CUDA the function is captured as a CUDA graph once per batch size and width, compiled by
torch.compile first if that is asked for; elsewhere it runs as it is, which is how tests compare it.

All that a call will need is captured before its prefill, so that no answer waits in the middle and what cannot be
captured is decoded by ``eager``, with one warning. A batch that shrinks moves to steps of a smaller one where these are
at hand already, from ``warm_up`` or an earlier call, unless it has to be reproducible.

Steps are pipelined: one is enqueued before the tokens of the step before it are read, which come back by one
asynchronous copy. So the host learns of a stop one step late; what sequences compute behind their end is dropped.
Drafts that are made on the host, of the text so far, have to know these tokens: with them there is one step at a time.

Serves rule "match", greedy or sampling, without processors that look at the text, on a target that verifies trees and
lies on one device, for autoregressive decoding, TrainedDrafter (its threshold is not looked at: stopping early would be
a wait), drafters that look at the text alone ("ngram", "suffix", "onedecode", "recipes") and OracleDrafter. Everything
else is for ``eager``. Tokens are the same.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from queue import SimpleQueue
from threading import Lock
from typing import Any
from warnings import warn
from weakref import WeakSet

import psutil
import torch

from shape.drafters.base import Committed
from shape.errors import UnsupportedTarget
from shape.generation.loop import Batch, Outcome, Steps
from shape.generation.prefill import commit_prompts
from shape.generation.request import ON_DEVICE
from shape.generation.rules import Match
from shape.generation.sequence import SequenceState
from shape.generation.stage import AHEAD, BatchState, PendingStep, Stage, StepPlan
from shape.generation.static_drafters import StaticDrafter, StaticText, static_drafter, text_state
from shape.generation.stats import Step
from shape.target.inference import fingerprint
from shape.target.loading import first_line
from shape.target.openvino import OpenVinoTarget

_BATCHES = (1, 2, 4, 8, 16, 24, 32)  # batch sizes that steps are made for; beyond, multiples of the last


class NoRoom(UnsupportedTarget):
    """What a call needs is more than steps of fixed shapes may hold."""


class FixedSteps:
    """The stages of one decoder, kept from call to call, so that captures and compilation are not repeated.

    If the target changes (adapters, hooks, weights), steps are captured again. A predictor is read at the addresses
    that it had at capture: after moving it, make a new decoder. Calls may come from several threads, each on a stage of
    its own.

    Args:
        compiled: torch.compile before capturing: fewer kernels, for up to a minute of compilation per width.
        slots: of each sequence that attention sees at least; longer texts double them.
        memory: bytes that stages may hold, in use and kept; up to 1, a share of what is free at the first call. Those
            not used for longest go first.
    """

    def __init__(self, compiled: bool = False, slots: int = 512, memory: float = 0.5) -> None:
        self.compiled, self.slots, self.memory = compiled, slots, memory
        self._limit: float | None = None if memory <= 1 else memory
        self._kept: list[Stage] = []  # that used last comes last
        self._taken: WeakSet[Stage] = WeakSet()
        self._returned: SimpleQueue[Stage] = SimpleQueue()  # given back, and not yet among the kept ones
        self._failed: dict[tuple[Any, ...], str] = {}  # plans that cannot be captured, and why
        self._warned: set[str] = set()
        self._lock = Lock()

    def begin(self, batch: Batch) -> "StagedSteps | None":
        """Steps for a batch, with all that it will need captured; None, with a warning, where that fails."""
        try:
            return StagedSteps(batch, self)
        except UnsupportedTarget as error:
            kind, reason = (NoRoom.__name__ if isinstance(error, NoRoom) else str(error)), str(error)
        except torch.OutOfMemoryError as error:
            kind = reason = f"there is no memory for them ({first_line(error).partition('.')[0]})"
        if batch.target.device.type == "cuda":
            torch.cuda.empty_cache()  # what was made in vain
        with self._lock:
            new, self._warned = kind not in self._warned, {*self._warned, kind}
        if new:
            warn(f"decoding goes on without steps of fixed shapes, with the same tokens: {reason}", stacklevel=2)
        return None

    def take(self, plan: StepPlan, batch: int, widths: list[int], drafts: Iterable[bool]) -> Stage:
        """A stage of this batch size with steps of these widths, for the caller alone until it is given back.

        Raises:
            UnsupportedTarget: its steps cannot be captured, or there is no memory for it.
            torch.OutOfMemoryError: as much as was allowed was not there.
        """
        key = plan.key_at(bucket(batch))
        with self._lock:
            self._collect()
            if key in self._failed:
                raise UnsupportedTarget(self._failed[key])
            stage = self._pick(key, widths[-1])
            if stage is None:
                self._make_room(plan, bucket(batch) * widths[-1] * plan.slot_bytes())
                with torch.inference_mode(False):  # later calls write to its tensors, and may be out of that mode
                    stage = Stage(plan, bucket(batch), widths[-1], self.compiled)
            self._taken.add(stage)
        try:
            for drafting, width in product(drafts, widths):
                stage.prepare(drafting, width)
        except UnsupportedTarget as error:
            self._failed[key] = str(error)
            raise
        self.compiled &= stage.compiled
        return stage

    def at_hand(self, plan: StepPlan, batch: int, widths: list[int], drafts: Iterable[bool]) -> Stage | None:
        """``take`` where nothing is left to make and to capture."""
        with self._lock:
            self._collect()
            stage = self._pick(plan.key_at(bucket(batch)), widths[-1], list(product(drafts, widths)))
            if stage is not None:
                self._taken.add(stage)
            return stage

    def give_back(self, stages: Iterable[Stage]) -> None:
        """Without waiting: Python's collector may end an abandoned answer within any call, one of these among them."""
        for stage in stages:
            self._returned.put(stage)
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        """Keep what was given back; with the lock."""
        while not self._returned.empty():
            stage = self._returned.get()
            self._taken.discard(stage)
            self._kept.append(stage)
        while self._kept and self._limit is not None and self.bytes > self._limit:
            del self._kept[0]

    @property
    def bytes(self) -> int:
        """Memory of all stages, in use and kept."""
        return sum(stage.bytes for stage in (*self._kept, *self._taken))

    def close(self) -> None:
        """Free what is kept; what is in use is freed with its call."""
        with self._lock:
            self._collect()
            on_cuda = any(stage.target.device.type == "cuda" for stage in self._kept)
            self._kept.clear()
        if on_cuda:
            torch.cuda.empty_cache()

    def _pick(self, key: tuple[Any, ...], width: int, steps: Iterable[tuple[bool, int]] = ()) -> Stage | None:
        """The smallest that is kept and serves, for the caller alone."""
        served = [stage for stage in self._kept if stage.key == key and stage.capacity >= width]
        served = [stage for stage in served if all(stage.prepared(*step) for step in steps)]
        chosen = min(served, key=lambda stage: stage.capacity, default=None)
        if chosen is not None:
            self._kept.remove(chosen)
        return chosen

    def _make_room(self, plan: StepPlan, needed: int) -> None:
        if self._limit is None:
            self._limit = self.memory * free_bytes(plan.target.device)
        if sum(stage.bytes for stage in self._taken) + needed > self._limit:
            # The call takes as much without stages, too.
            while self._kept and free_bytes(plan.target.device) < 2 * needed:
                del self._kept[0]
            raise NoRoom(
                f"steps of fixed shapes for target {plan.target.name} need {needed / 1e6:.0f} MB for the cache of this "
                f"call, and may hold {self._limit / 1e6:.0f} MB; lower max_new_tokens or the batch, or give "
                "FixedSteps more memory"
            )
        while self.bytes + needed > self._limit:
            del self._kept[0]


def free_bytes(device: torch.device) -> int:
    """Memory that tensors could still take."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def plan_of(batch: Batch, drafter: StaticDrafter) -> StepPlan:
    """What is to be computed for a batch, before anything is known of its prompts."""
    target, support = batch.target, batch.support
    if target.switch is not None and not target.switched(max(len(one.prompt) for one in batch.sequences)):
        # Sequences that have ended go on, but not across it.
        support = replace(support, positions=target.switch.positions)
    root = torch.zeros(1, dtype=torch.long, device=target.device)
    hidden = torch.zeros(1, 1, len(drafter.layers) * target.hidden_size, dtype=target.dtype, device=target.device)
    state = drafter.start(Committed([[0, 0]], root + 2, root), hidden)
    return StepPlan(target, support, drafter, batch.sampler, state, fingerprint(target.model))


def bucket(batch: int) -> int:
    """The batch size that steps are made for."""
    return next((size for size in _BATCHES if size >= batch), -(-batch // _BATCHES[-1]) * _BATCHES[-1])


def buckets(batch: int) -> list[int]:
    """Those of every batch up to this one: what a batch goes through as its sequences end."""
    return sorted({bucket(rows) for rows in range(1, batch + 1)})


def why_not(batch: Batch) -> str | None:
    """Why a batch cannot be decoded here; None where it can."""
    target, sampler, support = batch.target, batch.sampler, batch.support
    longest, new_tokens = max(len(one.prompt) for one in batch.sequences), batch.sequences[0].max_new_tokens
    if target.switch is not None and target.switch.crosses(longest, new_tokens):
        return f"the call crosses {target.switch.positions} tokens, where the rotary table changes"
    devices = set((getattr(target.model, "hf_device_map", None) or {}).values())
    if isinstance(target, OpenVinoTarget):
        return f"target {target.name} is computed by OpenVINO, whose cache is its own"
    if target.sharded:
        return f"target {target.name} is shared out among processes, each of which would decide by itself"
    if support.mode != "tree" or any(layer.device is not None for layer in support.layers) or len(devices) > 1:
        return f"target {target.name} verifies chains only, or is spread over devices"
    if not isinstance(batch.rule, Match):
        return f"acceptance {batch.rule} waits for the host"
    if sampler.processors is not None or not all(isinstance(one, ON_DEVICE) for one in sampler.warpers):
        return "logits processors wait for the host"
    return None if batch.drafter is None else batch.drafter.why_not_fixed(target)


class StagedSteps(Steps):
    """A batch decoded by the stages of a decoder, ``AHEAD`` steps at a time.

    A step's time in the stats is that on the device, all of it under ``verify``. Whether to draft is decided a step
    earlier than in ``eager``.

    Raises:
        UnsupportedTarget, torch.OutOfMemoryError: see ``FixedSteps.take``.
    """

    @torch.no_grad()
    def __init__(self, batch: Batch, stages: FixedSteps) -> None:
        self.batch, self._stages = batch, stages
        self._drafter = static_drafter(batch.drafter)
        self._plan = plan_of(batch, self._drafter)
        # What drafts on the host may propose nothing.
        self._host = batch.drafter if isinstance(self._drafter, StaticText) else None
        always = batch.control is None and self._host is None
        self._kinds = [False] if self._drafter.depth == 0 else [True] if always else [True, False]
        longest = max(len(one.prompt) for one in batch.sequences)
        self._widths = [stages.slots]
        while self._widths[-1] < self._needed(longest, 0):
            self._widths[-1] *= 2
        while self._widths[-1] < self._needed(longest + batch.sequences[0].max_new_tokens - 2, AHEAD - 1):
            self._widths.append(2 * self._widths[-1])
        self._stage = stages.take(self._plan, len(batch.sequences), self._widths, self._kinds)
        self._used = [self._stage]  # all to the end: what one has under way has not been read
        self._pending: deque[tuple[PendingStep, bool, list[SequenceState]]] = deque()
        self._staged: list[SequenceState] = batch.sequences  # whose steps the present stage computes

    def prefill(self) -> list[int]:
        self._prompts = commit_prompts(self.batch, room=0, layers=self._drafter.layers)
        return self._prompts[1].root.tolist()

    def start(self) -> None:
        sampler, (cache, committed, hidden) = self.batch.sampler, self._prompts
        del self._prompts
        state, root = self._drafter.start(committed, hidden), committed.root
        content = BatchState(cache, self._drafter.memory, root, state, sampler)
        self._stage.fill(content, torch.arange(len(self._staged), device=self.batch.target.device))
        if self._host is not None:
            self._committed = committed.to(torch.device("cpu"))
            self._host.start(self._committed, hidden)

    def step(self, live: list[SequenceState]) -> Outcome:
        # Steps that nobody needs are not enqueued: each commits a token at least. Other stops cannot be foreseen.
        while len(self._pending) < (AHEAD if self._host is None else 1) and any(
            len(one.new) + len(self._pending) < one.max_new_tokens for one in live
        ):
            self._launch(live)
        pending, drafts, sequences = self._pending.popleft()
        results, seconds = pending.wait()
        by_sequence = {one.index: result for one, result in zip(sequences, results, strict=False)}
        own = [by_sequence[one.index] for one in live]
        # Without the root, which this step has put into the cache.
        lengths = [one.length - 1 for one in live]
        step = Step([one.index for one in live], lengths, pending.nodes, pending.passes, 0.0, seconds, 0.0)
        tokens = [new[:count] for count, _, *new in own]
        return Outcome(step, tokens, [one[1] for one in own], [one[0] - 1 for one in own], drafts)

    def _needed(self, longest: int, under_way: int) -> int:
        """Slots for what may be committed behind a step, and room for one more: see the end of ``Stage.step``."""
        return longest + (under_way + 1) * (self._drafter.depth + 1) + self._drafter.nodes

    def _launch(self, live: list[SequenceState]) -> None:
        control, longest = self.batch.control, max(one.length for one in live) - 1
        needed = self._needed(longest, len(self._pending))
        # None is gone back to: sequences that have ended may be longer than those that go on.
        self._widths = [width for width in self._widths if width >= needed]
        if 2 * bucket(len(live)) <= self._stage.batch and not self.batch.reproducible:
            self._shrink(live)
        drafts = self._drafter.depth > 0 and (control is None or control.draft_next(longest))
        pending = self._stage.launch(drafts and self._propose(), self._widths[0])
        self._pending.append((pending, drafts, self._staged))

    def _propose(self) -> bool:
        """Hand over what is drafted on the host; whether there is anything to verify."""
        if self._host is None:
            return True
        pairs = zip(self._committed.texts, self._staged, strict=True)
        new = [one.new[len(text) - len(one.prompt) :] for text, one in pairs]
        self._committed.advance(new, torch.tensor([len(tokens) for tokens in new]))
        tree = self._host.draft(self._committed, self.batch.sampler)
        if tree.size == 1:
            return False
        state = text_state(tree, self._drafter.nodes)
        on_cuda = self.batch.target.device.type == "cuda"
        self._stage.state[: len(state)].copy_(state.pin_memory() if on_cuda else state, non_blocking=True)
        return True

    def _shrink(self, live: list[SequenceState]) -> None:
        """Go on in steps of a smaller batch, where these are at hand."""
        stage = self._stages.at_hand(self._plan, len(live), self._widths, self._kinds)
        if stage is not None:
            rows = [self._staged.index(one) for one in live]
            stage.fill(self._stage, torch.tensor(rows, device=self.batch.target.device))
            if self._host is not None:
                self._committed = self._committed.select(rows)
                self._host.select(torch.tensor(rows))
            self._used.append(stage)
            self._stage, self._staged = stage, live

    def __exit__(self, *raised: Any) -> None:
        if raised[0] not in (None, GeneratorExit):
            return  # nobody knows what stages are worth that an error has left
        for pending, *_ in self._pending:  # others, whose streams may be others, write to the same memory
            pending.wait()
        self._stages.give_back(self._used)
