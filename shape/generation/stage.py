"""A step as one function of static tensors: captured as a CUDA graph on a GPU, run as it is elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from shape.generation.capture import Pool, captured, refuse_waiting
from shape.generation.clock import Moment
from shape.generation.static_drafters import StaticCache, StaticDrafter, StaticTree, slot_bytes
from shape.target.inference import on_device
from shape.target.loading import first_line
from shape.target.model import Target
from shape.target.support import Support
from shape.verification.cache import KVCache
from shape.verification.forward import attending, tree_logits
from shape.verification.noise import all_hashes
from shape.verification.sampling import Sampler
from shape.verification.tree import root_only, rows_of

AHEAD = 2  # steps enqueued before the first of them is read
_RECOMPILES = 256
_PREPARING = Lock()  # of all that is compiled and captured in a process, one at a time


@dataclass(frozen=True)
class BatchState:
    """Where the sequences of a call are between two steps."""

    cache: KVCache
    memory: KVCache | None
    root: Tensor
    state: Tensor
    sampler: Sampler


@dataclass(frozen=True)
class StepPlan:
    """What a stage computes. Equal keys mean that one can serve for the other.

    Attributes:
        sampler: whose options are taken; its sequences are not.
        state: a tensor like the drafter's state in shape and dtype, batch size apart.
        computed_by: `fingerprint` of the target: what is captured is replayed as it was.
    """

    target: Target
    support: Support
    drafter: StaticDrafter
    sampler: Sampler
    state: Tensor
    computed_by: int

    def key_at(self, batch: int) -> tuple[Any, ...]:
        sampler = self.sampler
        warpers = [(type(one).__name__, sorted(vars(one).items())) for one in sampler.warpers]
        minimum = (sampler.min_new_tokens, sampler.eos_token_ids) if sampler.min_new_tokens > 0 else ()
        options = (sampler.temperature, repr(warpers), minimum)
        network = (id(self.target.model), self.target.device, *self.drafter.key)
        computed = (self.state.shape[1:], self.state.dtype, self.support.positions, self.computed_by)
        return (batch, *network, *options, *computed)

    def slot_bytes(self) -> int:
        """Memory that one slot of one sequence takes, target and drafter together."""
        layers = slot_bytes(self.support.layers, self.target.dtype)
        memory = self.drafter.memory
        return layers if memory is None else layers + slot_bytes(memory.shapes, memory.dtype)


@dataclass(frozen=True)
class PendingStep:
    """A step under way."""

    nodes: int
    passes: int
    arrival: Tensor
    began: Moment
    ended: Moment

    def wait(self) -> tuple[list[list[int]], float]:
        """``Stage.out`` on the host, and seconds of the step on the device."""
        if self.ended.event is not None:
            self.ended.event.synchronize()
        return self.arrival.tolist(), self.began.until(self.ended)


class Stage:
    """Static tensors for some batch size and number of slots, and the steps over them, of which one is run at a time.

    A step is made for a *width*, the slots of each sequence that attention sees: a short text does not pay for all.

    Args:
        capacity: slots per sequence.
        compiled: steps go through torch.compile, where that succeeds.

    Attributes:
        key: equal keys mean that one can serve for the other, as far as slots reach.
        compiled: False too once compiling has failed.
        out: (B, 2 + depth + 1) int64: per sequence the number of emitted tokens, of proposed ones, and the emitted
            tokens.
    """

    def __init__(self, plan: StepPlan, batch: int, capacity: int, compiled: bool = False) -> None:
        target, sampler, device = plan.target, plan.sampler, plan.target.device
        self.key = plan.key_at(batch)
        self.target, self.support, self.drafter = target, plan.support, plan.drafter.alone()
        self.batch, self.capacity, self.compiled = batch, capacity, compiled
        self.cache = StaticCache(plan.support.layers, batch, capacity, target.dtype, device)
        self.memory = None
        if (memory := plan.drafter.memory) is not None:
            self.memory = StaticCache(memory.shapes, batch, capacity, memory.dtype, device)
        self._caches = [one for one in (self.cache, self.memory) if one is not None]
        self.root = torch.zeros(batch, dtype=torch.long, device=device)
        self.state = plan.state.new_zeros(batch, *plan.state.shape[1:])
        vocab_size = target.logits(torch.zeros(1, target.hidden_size, dtype=target.dtype, device=device)).shape[-1]
        self.sampler = replace(
            sampler,
            prompt_lengths=torch.zeros_like(self.root),
            keys=None if sampler.keys is None else torch.zeros_like(self.root),
            static_depth=plan.drafter.depth,
            static_hashes=all_hashes(vocab_size, device),
        )
        self.out = torch.zeros(batch, 3 + plan.drafter.depth, dtype=torch.long, device=device)
        pinned = device.type == "cuda"
        # Where results arrive, one after the other: no more steps are under way.
        self._arrivals = [torch.zeros(self.out.shape, dtype=torch.long, pin_memory=pinned) for _ in range(AHEAD)]
        self._next_arrival = 0
        # Functions of the stage, which does not hold itself: its cache is free as soon as nobody has it.
        self._steps: dict[tuple[bool, int], Callable[[Stage, bool], None]] = {}
        self._replays: dict[tuple[bool, int], Callable[[], None]] = {}
        # Of these graphs alone: other threads have other stages.
        self._pool = Pool(device) if device.type == "cuda" else None
        self._graph_bytes = 0

    @property
    def bytes(self) -> int:
        """Memory on the device that goes with the stage, that of its graphs included."""
        tensors = [self.root, self.state, self.out, self.sampler.prompt_lengths, self.sampler.keys]
        own = sum(cache.nbytes for cache in self._caches) + sum(one.nbytes for one in tensors if one is not None)
        return own + self._graph_bytes

    def prepared(self, drafts: bool, width: int) -> bool:
        return (drafts, width) in self._steps

    def prepare(self, drafts: bool, width: int) -> None:
        """Try, compile and capture a step, before there is any content: the runs that warm up leave nothing of meaning.

        Raises:
            UnsupportedTarget: it cannot be captured.
            torch.OutOfMemoryError: there is no memory for it.
        """
        if self.prepared(drafts, width):
            return
        at, run = (drafts, width), partial(self._run, drafts, width)
        with _PREPARING, torch.no_grad(), on_device(self.target.device):
            # What earlier runs have left may be longer than this width, which a device does not forgive.
            for cache in self._caches:
                cache.lengths.zero_()
            self._steps[at] = Stage.step
            try:
                if all(kind != drafts for kind, other in self._steps if other != at[1]):  # operations are the same
                    refuse_waiting(run, self.target)
                if self.compiled:
                    self._compile(drafts, width)
                if self._pool is not None:
                    self._replays[at] = captured(run, self.target, self._pool)
                    self._graph_bytes = self._pool.bytes
            except BaseException:
                del self._steps[at]
                raise

    def _compile(self, drafts: bool, width: int) -> None:
        """What goes wrong in a compiler costs speed alone, and each compiler fails in a way of its own."""
        at = drafts, width
        self._steps[at] = torch.compile(Stage.step, fullgraph=True, dynamic=False)
        try:
            # Each stage and width is another program to the compiler, which would give up on the ninth.
            with torch._dynamo.config.patch(recompile_limit=_RECOMPILES):
                self._run(drafts, width)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.compiled, self._steps[at] = False, Stage.step
            warn(
                f"steps of target {self.target.name} are not compiled, since that failed ({first_line(error)}); "
                "decoding goes on without, with the same tokens",
                stacklevel=2,
            )

    def _run(self, drafts: bool, width: int) -> None:
        for cache in self._caches:
            cache.width = width
        with attending(self.target, self.support):  # around it all: a compiled step cannot change configurations
            self._steps[drafts, width](self, drafts)

    def step(self, drafts: bool) -> None:
        """Draft, mask, forward, choose, match, commit: static tensors in, static tensors out."""
        cache, sampler, drafter = self.cache, self.sampler, self.drafter
        lengths = cache.lengths + 1
        sampler.commit(lengths)
        drafted = drafter.draft(self.state, self.memory, lengths, self.root, sampler) if drafts else None
        tree = StaticTree.of(root_only(self.root) if drafted is None else drafted)
        cache.expect(tree.size)
        states, logits = tree_logits(self.target, self.support, cache, tree, drafter.layers)
        accepted = sampler.match(logits, tree)
        deepest = drafter.depth + 1 if drafts else 1
        path, tokens, counts = accepted.path[:, :deepest], accepted.tokens[:, :deepest], accepted.counts
        proposed = (tree.parent >= 0).sum(1)
        hidden = rows_of(states, path)
        committed = torch.cat([self.root[:, None], tokens], dim=1)
        self.state.copy_(drafter.update(self.state, self.memory, committed, hidden, counts))
        if drafts and not drafter.contiguous:
            cache.move(path)
        # Sequences that have ended may go on for nothing, but not past the last slot that is seen.
        cache.lengths.copy_((cache.lengths + counts).clamp(max=cache.width - drafter.nodes))
        if self.memory is not None:  # it holds the positions that the target's cache holds
            self.memory.lengths.copy_(cache.lengths)
        self.root.copy_(tokens.gather(1, counts[:, None] - 1)[:, 0])
        self.out[:, : 2 + deepest] = torch.cat([counts[:, None], proposed[:, None], tokens], dim=1)

    def fill(self, content: "BatchState | Stage", rows: Tensor) -> None:
        """Take these sequences, (R,) int64, of a call; what those behind them compute is not read."""
        count = len(rows)
        self.cache.fill(content.cache, rows)
        self.cache.checked_by = None  # another call: its target may have changed
        if self.memory is not None and content.memory is not None:
            self.memory.fill(content.memory, rows)
        self.root.zero_()
        self.root[:count] = content.root[rows]
        self.state[:count] = content.state[rows]
        self.sampler.prompt_lengths[:count] = content.sampler.prompt_lengths[rows]
        if self.sampler.keys is not None and content.sampler.keys is not None:
            self.sampler.keys[:count] = content.sampler.keys[rows]

    def launch(self, drafts: bool, width: int) -> PendingStep:
        """Enqueue a step, and the copy of what it emits. No more than ``AHEAD`` may be under way.

        Args:
            width: at least as long as sequences can be behind the step, and no less than at the step before.
        """
        arrival = self._arrivals[self._next_arrival]
        self._next_arrival = (self._next_arrival + 1) % AHEAD
        with on_device(self.target.device):
            began = Moment.now(self.target.device)
            replay = self._replays.get((drafts, width))
            if replay is None:
                self._run(drafts, width)
            else:
                replay()
            arrival.copy_(self.out, non_blocking=True)
            ended = Moment.now(self.target.device)
        nodes, passes = (self.drafter.nodes, self.drafter.passes) if drafts else (1, 0)
        return PendingStep(nodes, passes, arrival, began, ended)
