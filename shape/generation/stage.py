"""A step as one function of static tensors: captured as a CUDA graph on a GPU, run as it is elsewhere."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from shape.errors import UnsupportedTarget
from shape.generation.static_drafters import StaticCache, StaticDrafter, StaticTree
from shape.target.model import Target
from shape.target.support import Support
from shape.verification.cache import KVCache
from shape.verification.forward import attending, tree_inputs
from shape.verification.noise import all_hashes
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree, root_only

AHEAD = 2  # steps enqueued before the first of them is read
_RECOMPILES = 256
_WARM_UPS = 3  # runs before a capture, as torch asks for: libraries allocate at their first


@dataclass(frozen=True)
class Content:
    """Where the sequences of a call are between two steps."""

    cache: KVCache
    memory: KVCache | None
    root: Tensor
    state: Tensor
    keys: Tensor | None
    prompt_lengths: Tensor


@dataclass(frozen=True)
class Plan:
    """What a stage computes. Equal keys mean that one can serve for the other.

    Attributes:
        sampler: whose options are taken; its sequences are not.
        state: a tensor like the drafter's state in shape and dtype, batch size apart.
    """

    target: Target
    support: Support
    drafter: StaticDrafter
    sampler: Sampler
    state: Tensor

    @property
    def key(self) -> tuple[Any, ...]:
        sampler = self.sampler
        warpers = [(type(one).__name__, sorted(vars(one).items())) for one in sampler.warpers]
        options = (sampler.temperature, repr(warpers), sampler.min_new_tokens, sampler.eos_token_ids)
        return (*self.drafter.key, self.state.shape[1:], self.state.dtype, self.support.positions, *options)


@dataclass(frozen=True)
class Flight:
    """A step under way.

    Attributes:
        launched: seconds that launching took, which off CUDA is all of the step.
    """

    nodes: int
    passes: int
    drafts: bool
    arrival: Tensor
    events: list[Any]
    launched: float

    def wait(self) -> tuple[list[list[int]], float]:
        """``Stage.out`` on the host, and seconds of the step on the device."""
        if not self.events:
            return self.arrival.tolist(), self.launched
        self.events[1].synchronize()
        return self.arrival.tolist(), self.events[0].elapsed_time(self.events[1]) / 1e3


class Stage:
    """Static tensors for some batch size and number of slots, and the steps over them.

    Args:
        capacity: slots per sequence.
        compiled: steps go through torch.compile.
        pool: of the memory that CUDA graphs share, which never run side by side.

    Attributes:
        out: (B, 2 + depth + 1) int64: per sequence the number of emitted tokens, of proposed ones, and the emitted
            tokens.
    """

    def __init__(self, plan: Plan, batch: int, capacity: int, compiled: bool = False, pool: Any = None) -> None:
        target, sampler, device = plan.target, plan.sampler, plan.target.device
        self.target, self.support, self.drafter = target, plan.support, copy(plan.drafter)
        self.drafter.memory = None  # that of one call's prefill
        self.batch, self.capacity, self.compiled, self._pool = batch, capacity, compiled, pool
        self.cache = StaticCache(plan.support.layers, batch, capacity, target.dtype, device)
        self.memory = None
        if (memory := plan.drafter.memory) is not None:
            self.memory = StaticCache(memory.shapes, batch, capacity, memory.dtype, device)
        self.root = torch.zeros(batch, dtype=torch.long, device=device)
        self.state = plan.state.new_zeros(batch, *plan.state.shape[1:])
        vocab_size = target.logits(torch.zeros(1, target.hidden_size, dtype=target.dtype, device=device)).shape[-1]
        self.sampler = Sampler(
            prompt_lengths=torch.zeros_like(self.root),
            temperature=sampler.temperature,
            keys=None if sampler.keys is None else torch.zeros_like(self.root),
            warpers=sampler.warpers,
            min_new_tokens=sampler.min_new_tokens,
            eos_token_ids=sampler.eos_token_ids,
            static_depth=plan.drafter.depth,
            static_hashes=all_hashes(vocab_size, device),
        )
        self.out = torch.zeros(batch, 3 + plan.drafter.depth, dtype=torch.long, device=device)
        pinned = device.type == "cuda"
        # Where results arrive, one after the other: no more steps are under way.
        self._arrivals = [torch.zeros(self.out.shape, dtype=torch.long, pin_memory=pinned) for _ in range(AHEAD)]
        self._next_arrival = 0
        self._steps: dict[bool, Callable[[Stage, bool], None]] = {}
        self._replays: dict[bool, Callable[[], None]] = {}

    def prepare(self, drafts: bool) -> None:
        """Compile and capture the step, before there is any content: the runs that warm up leave nothing of meaning.

        Raises:
            UnsupportedTarget: it cannot be captured.
        """
        if drafts in self._steps:
            return
        # Functions of the stage, which does not hold itself: its cache is free as soon as nobody has it.
        self._steps[drafts] = torch.compile(Stage.step, fullgraph=True) if self.compiled else Stage.step
        if self.target.device.type == "cuda":
            self._replays[drafts] = captured(partial(self._run, drafts), self.target, self._pool)

    def _run(self, drafts: bool) -> None:
        # Each stage is an object of its own to the compiler, which would give up on the ninth.
        many = torch._dynamo.config.patch(recompile_limit=_RECOMPILES) if self.compiled else nullcontext()
        with attending(self.target, self.support), many:  # around it all: a compiled step cannot change configurations
            self._steps[drafts](self, drafts)

    def step(self, drafts: bool) -> None:
        """Draft, mask, forward, choose, match, commit: static tensors in, static tensors out."""
        cache, sampler, drafter = self.cache, self.sampler, self.drafter
        lengths = cache.lengths + 1
        sampler.commit(lengths)
        drafted = drafter.draft(self.state, self.memory, lengths, self.root, sampler) if drafts else None
        tree = StaticTree.of(root_only(self.root) if drafted is None else drafted)
        states = self.forward(tree)
        accepted = sampler.match(self.target.logits(states), tree)
        deepest = drafter.depth + 1 if drafts else 1
        path, tokens, counts = accepted.path[:, :deepest], accepted.tokens[:, :deepest], accepted.counts
        proposed = (tree.parent >= 0).sum(1)
        hidden = states.gather(1, path[:, :, None].expand(-1, -1, states.shape[-1]))
        committed = torch.cat([self.root[:, None], tokens], dim=1)
        self.state.copy_(drafter.update(self.state, self.memory, committed, hidden, counts))
        if drafts and not drafter.contiguous:
            cache.move(path)
        # Sequences that have ended may go on for nothing, but not past the last slot.
        cache.lengths.copy_((cache.lengths + counts).clamp(max=self.capacity - drafter.nodes))
        if self.memory is not None:  # it holds the positions that the target's cache holds
            self.memory.lengths.copy_(cache.lengths)
        self.root.copy_(tokens.gather(1, counts[:, None] - 1)[:, 0])
        self.out[:, : 2 + deepest] = torch.cat([counts[:, None], proposed[:, None], tokens], dim=1)

    def forward(self, tree: TokenTree) -> Tensor:
        """``tree_forward`` over the whole bucket, under an explicit mask."""
        self.cache.expect(tree.size)
        positions, masks = tree_inputs(self.target, self.support, self.cache, tree)
        return self.target.hidden(tree.tokens, attention_mask=masks, position_ids=positions, cache=self.cache)

    def fill(self, content: Content, rows: Tensor) -> None:
        """Take these sequences, (R,) int64, of a call; what those behind them compute is not read."""
        count = len(rows)
        self.cache.fill(content.cache, rows)
        if self.memory is not None and content.memory is not None:
            self.memory.fill(content.memory, rows)
        self.root.zero_()
        self.root[:count] = content.root[rows]
        self.state[:count] = content.state[rows]
        self.sampler.prompt_lengths[:count] = content.prompt_lengths[rows]
        if self.sampler.keys is not None and content.keys is not None:
            self.sampler.keys[:count] = content.keys[rows]

    @property
    def content(self) -> Content:
        return Content(self.cache, self.memory, self.root, self.state, self.sampler.keys, self.sampler.prompt_lengths)

    def launch(self, drafts: bool) -> Flight:
        """Enqueue a step, and the copy of what it emits. No more than ``AHEAD`` may be under way."""
        arrival = self._arrivals[self._next_arrival]
        self._next_arrival = (self._next_arrival + 1) % AHEAD
        on_cuda = self.target.device.type == "cuda"
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_cuda else []
        started = perf_counter()
        if events:
            events[0].record()
        if drafts in self._replays:
            self._replays[drafts]()
        else:
            self._run(drafts)
        arrival.copy_(self.out, non_blocking=True)
        if events:
            events[1].record()
        nodes, passes = (self.drafter.nodes, self.drafter.passes) if drafts else (1, 0)
        return Flight(nodes, passes, drafts, arrival, events, perf_counter() - started)


@torch.no_grad()
def captured(run: Callable[[], None], target: Target, pool: Any = None) -> Callable[[], None]:
    """A CUDA graph of the kernels that `run` launches, as a function; off CUDA `run` itself.

    Raises:
        UnsupportedTarget: something in it waits for the host.
    """
    if target.device.type != "cuda":
        return run
    with torch.cuda.device(target.device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool):
                run()
        except RuntimeError as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UnsupportedTarget(
                f"target {target.name} cannot be captured as a CUDA graph ({reason}); leave graphs off"
            ) from error
    return graph.replay
