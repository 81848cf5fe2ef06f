"""Steps of fixed shapes, for accelerators: nothing in them waits for the host, so that they are captured as a whole.

``eager`` asks the host at every step: how much was accepted, how long sequences are, what moves in the cache. Between
the answers the device idles, and each of a step's thousand kernels is launched by Python. Here draft, mask, forward,
choice, acceptance and commit are one function of static tensors (``Stage.step``): lengths, roots, noise keys and the
drafter's state stay on the device, attention sees a whole bucket of slots under a mask made from the lengths, and
commits always move. On CUDA the function is captured once per bucket as a CUDA graph, if asked for after torch.compile;
elsewhere it runs as it is, which is how tests compare it.

Steps are pipelined: one is enqueued before the tokens of the step before it are read, which come back by one
asynchronous copy. So the host learns of a stop one step late; what sequences compute behind their end is dropped.

Serves rule "match", greedy or sampling, without processors that look at the text, on a target that verifies trees and
lies on one device, for autoregressive decoding, TrainedDrafter (its threshold is not looked at: stopping early would be
a wait) and OracleDrafter. Everything else is for ``eager``. Tokens are the same.
"""

from collections import OrderedDict, deque
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    EpsilonLogitsWarper,
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from shape.generation.loop import Batch, Outcome, Steps
from shape.generation.prefill import commit_prompts
from shape.generation.rules import Match
from shape.generation.sequence import SequenceState
from shape.generation.stage import AHEAD, Content, Flight, Plan, Stage
from shape.generation.static_drafters import static_drafter
from shape.generation.stats import Step
from shape.target.openvino import OpenVinoTarget

# These compute on the scores' device alone; others may ask the host.
_WARPERS = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    LogitNormalization,
)
_BATCHES = (1, 2, 4, 8, 16, 24, 32)  # batch sizes that steps are made for; beyond, multiples of the last


class FixedSteps:
    """The stages of one decoder, kept from call to call, so that captures and compilation are not repeated.

    A captured step reads weights where they lay: after moving target or predictor make a new decoder.

    Args:
        compiled: torch.compile before capturing: fewer kernels, for up to a minute of compilation.
        slots: least slots per sequence; more come by doubling.
        kept: stages kept between calls, each with a cache of its own.
    """

    def __init__(self, compiled: bool = False, slots: int = 512, kept: int = 8) -> None:
        self.compiled, self.slots, self.kept = compiled, slots, kept
        self._stages: OrderedDict[tuple[Any, ...], Stage] = OrderedDict()
        self._pool: Any = None

    def take(self, plan: Plan, batch: int, needed: int) -> Stage:
        """A stage of at least this batch size and these slots, for the caller alone until it is given back."""
        batch, capacity = bucket(batch), self.slots
        while capacity < needed:
            capacity *= 2
        stage = self._stages.pop((*plan.key, batch, capacity), None)
        if stage is None:
            if plan.target.device.type == "cuda" and self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            stage = Stage(plan, batch, capacity, self.compiled, self._pool)
        return stage

    def give_back(self, plan: Plan, stage: Stage) -> None:
        self._stages[(*plan.key, stage.batch, stage.capacity)] = stage
        while len(self._stages) > self.kept:
            self._stages.popitem(last=False)


def bucket(batch: int) -> int:
    """The batch size that steps are made for."""
    return next((size for size in _BATCHES if size >= batch), -(-batch // _BATCHES[-1]) * _BATCHES[-1])


def why_not(batch: Batch) -> str | None:
    """Why a batch cannot be decoded here; None where it can."""
    target, sampler, support = batch.target, batch.sampler, batch.support
    longest, new_tokens = max(len(one.prompt) for one in batch.sequences), batch.sequences[0].max_new_tokens
    if target.switch is not None and target.switch.crosses(longest, new_tokens):
        return f"the call crosses {target.switch.positions} tokens, where the rotary table changes"
    devices = set((getattr(target.model, "hf_device_map", None) or {}).values())
    if isinstance(target, OpenVinoTarget):
        return f"target {target.name} is computed by OpenVINO, whose cache is its own"
    if support.mode != "tree" or any(layer.device is not None for layer in support.layers) or len(devices) > 1:
        return f"target {target.name} verifies chains only, or is spread over devices"
    if not isinstance(batch.rule, Match):
        return f"acceptance {batch.rule} waits for the host"
    if sampler.processors is not None or not all(isinstance(one, _WARPERS) for one in sampler.warpers):
        return "logits processors wait for the host"
    return None if batch.drafter is None else batch.drafter.why_not_fixed(target)


class StagedSteps(Steps):
    """A batch decoded by the stages of a decoder, ``AHEAD`` steps at a time.

    A step's time in the stats is that on the device, all of it under ``verify``. Whether to draft is decided a step
    earlier than in ``eager``.
    """

    def __init__(self, batch: Batch, stages: FixedSteps) -> None:
        self.batch, self._stages = batch, stages
        self._drafter = static_drafter(batch.drafter)
        self._used: list[Stage] = []  # to the end: what one has under way has not been read
        self._flights: deque[tuple[Flight, list[SequenceState]]] = deque()
        self._staged: list[SequenceState] = batch.sequences  # whose steps the present stage computes

    def prefill(self) -> list[int]:
        self._prompts = commit_prompts(self.batch, room=0)
        return self._prompts[1].root.tolist()

    def start(self) -> None:
        target, support, sampler = self.batch.target, self.batch.support, self.batch.sampler
        cache, committed, hidden = self._prompts
        del self._prompts
        if target.switch is not None and not target.switched(max(len(one.prompt) for one in self._staged)):
            # Sequences that have ended go on, but not across it.
            support = replace(support, positions=target.switch.positions)
        state = self._drafter.start(committed, hidden)
        self._plan = Plan(target, support, self._drafter, sampler, state)
        self._content = Content(
            cache, self._drafter.memory, committed.root, state, sampler.keys, sampler.prompt_lengths
        )

    def step(self, live: list[SequenceState]) -> Outcome:
        # Steps that nobody needs are not enqueued: each commits a token at least. Other stops cannot be foreseen.
        while len(self._flights) < AHEAD and any(
            len(one.new) + len(self._flights) < one.max_new_tokens for one in live
        ):
            self._launch(live)
        flight, sequences = self._flights.popleft()
        results, seconds = flight.wait()
        own = [result for one, result in zip(sequences, results, strict=False) if not one.finished]
        # Without the root, which this step has put into the cache.
        lengths = [one.length - 1 for one in live]
        step = Step([one.index for one in live], lengths, flight.nodes, flight.passes, 0.0, seconds, 0.0)
        tokens = [new[:count] for count, _, *new in own]
        return Outcome(step, tokens, [one[1] for one in own], [one[0] - 1 for one in own], flight.drafts)

    def _launch(self, live: list[SequenceState]) -> None:
        control, drafter = self.batch.control, self._drafter
        # What may be committed behind this step, and room for one more: see the end of ``Stage.step``.
        longest = max(one.length for one in live) - 1
        needed = longest + (len(self._flights) + 1) * (drafter.depth + 1) + drafter.nodes
        stage = self._used[-1] if self._used else None
        if stage is None or needed > stage.capacity or 2 * bucket(len(live)) <= stage.batch:
            index = torch.tensor([self._staged.index(one) for one in live], device=self.batch.target.device)
            stage = self._stages.take(self._plan, len(live), needed)
            self._used.append(stage)
            stage.prepare(drafts=drafter.depth > 0)
            if control is not None:
                stage.prepare(drafts=False)
            stage.fill(self._content, index)
            self._content, self._staged = stage.content, live
        drafts = drafter.depth > 0 and (control is None or control.draft_next(longest))
        self._flights.append((stage.launch(drafts), self._staged))

    def __exit__(self, *raised: Any) -> None:
        for stage in self._used:
            self._stages.give_back(self._plan, stage)
