"""The step with fixed shapes, for accelerators: nothing in it waits for the host, so that it is captured as a whole.

``loop.decode`` asks the host at every step: how much was accepted, how long rows are, what moves in the cache. Between
the answers the device idles, and each of a step's thousand kernels is launched by Python. Here draft, mask, forward,
choice, acceptance and commit are one function of static tensors: lengths, roots, noise keys and the drafter's state
stay on the device, attention sees a whole bucket of slots under a mask made from the lengths, and commits always move.
On CUDA the function is captured once per bucket as a CUDA graph, if asked for after torch.compile; elsewhere it runs as
it is, which is how tests compare it.

The loop around it is pipelined: a step is enqueued before the tokens of the step before it are read, which come back by
one asynchronous copy. So the host learns of a stop one step late; what rows compute behind their end is dropped.

Serves rule "match", greedy or sampling, without processors that look at the text, on a target that verifies trees and
lies on one device, for plain decoding, TrainedDrafter (its threshold is not looked at: stopping early would be a wait)
and OracleDrafter. Everything else is ``loop.decode``'s. Tokens are the same.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from shape.drafters import Drafter, OracleDrafter, TrainedDrafter
from shape.drafters.base import Committed
from shape.errors import UnsupportedTarget
from shape.generation.control import SpeculationControl
from shape.generation.loop import Row, Stops, begin, settle_prompts
from shape.generation.rules import Match, Rule
from shape.generation.stats import DecodeStats, Step
from shape.target.model import Target
from shape.target.support import Support
from shape.verification.acceptance import match
from shape.verification.attention import grouped_queries
from shape.verification.cache import KVCache
from shape.verification.forward import tree_inputs
from shape.verification.noise import gumbel, token_words
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree, ancestors, chain, root_only

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
_ROWS = (1, 2, 4, 8, 16, 24, 32)  # numbers of rows that steps are made for; beyond, multiples of the last
_AHEAD = 2  # steps enqueued before the first of them is read
_TABLE = 256  # positions of an oracle's table come in multiples of this
_RECOMPILES = 256
_WARM_UPS = 3  # runs before a capture, as torch asks for: libraries allocate at their first


class FixedCache(KVCache):
    """An arena of which attention always sees every slot; its ``lengths`` change in place and the host does not ask."""

    def expect(self, nodes: int) -> None:
        """The next forward is over this many nodes per row."""
        self.slots.see_all(nodes)

    def move(self, path: Tensor) -> None:
        """Move the states of nodes ``path``, (B, D) int64, increasing, to the first slots behind the settled ones."""
        starts = torch.arange(len(path), device=path.device)[:, None] * self.capacity + self.lengths[:, None]
        old, new = (starts + path).flatten(), (starts + torch.arange(path.shape[1], device=path.device)).flatten()
        for storage in self._storage.values():
            tokens = storage.flatten(1, 2)
            tokens.index_copy_(1, new, tokens.index_select(1, old))

    def fill(self, other: KVCache, rows: Tensor) -> None:
        """Take the slots of another arena's ``rows``, (R,) int64; rows behind them are empty."""
        count, slots = len(rows), min(self.capacity, other.capacity)
        for group, storage in self._storage.items():
            storage[:, :count, :slots] = other._storage[group][:, :, :slots].index_select(1, rows)
        self.lengths.zero_()
        self.lengths[:count] = other.lengths[rows]


@dataclass
class FixedSampler(Sampler):
    """A sampler whose every operation is on the device, with shapes known beforehand.

    Attributes:
        vocab_size: V, of the logits. depth: of the deepest tree.
    """

    vocab_size: int = 0
    depth: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.visits = self.on_host = False
        tokens = torch.arange(self.vocab_size, device=self.prompt_lengths.device)
        self._words = token_words(tokens)
        ends = torch.tensor(self.eos_token_ids, dtype=torch.long, device=tokens.device)
        self._ends = (tokens[:, None] == ends).any(1)

    def _noise_at(self, offsets: Sequence[int], words: Tensor) -> Tensor:
        assert self.keys is not None
        ahead = torch.arange(offsets[0], offsets[-1] + 1, device=words.device)
        positions = self._lengths[:, None] + ahead
        return gumbel(self.keys[:, None].expand_as(positions), positions, words)

    def pick(self, scores: Tensor, tree: TokenTree) -> Tensor:
        if self.greedy:
            return scores.argmax(-1)
        noise = self._noise_at(range(self.depth + 1 if tree.size > 1 else 1), self._words)
        rows = torch.arange(len(scores), device=scores.device)[:, None]
        return (scores + noise[rows, tree.depth]).argmax(-1)

    def _forbid_early_eos(
        self, logits: Tensor, offset: Tensor | int, vocabulary: Tensor | None = None, rows: Sequence[int] | None = None
    ) -> Tensor:
        if self.min_new_tokens == 0 or not self.eos_token_ids:
            return logits
        early = (self._lengths - self.prompt_lengths)[:, None] + offset < self.min_new_tokens
        ends = self._ends if vocabulary is None else self._ends[vocabulary]
        return logits.masked_fill(early[..., None] & ends, float("-inf"))


@dataclass(frozen=True)
class LaidOut(TokenTree):
    """A tree that knows its ancestors and depths from the start: torch.compile does not look into cached properties."""

    ancestors: Tensor = None  # type: ignore[assignment]
    depth: Tensor = None  # type: ignore[assignment]

    @classmethod
    def of(cls, tree: TokenTree) -> "LaidOut":
        above = ancestors(tree.parent)
        return cls(tree.tokens, tree.parent, ancestors=above, depth=above.sum(-1) - 1)


class Proposer(ABC):
    """What drafts, in static tensors.

    Attributes:
        depth: drafted tokens on the longest path. nodes: of a tree, its root included. passes: see ``Drafter``.
        contiguous: whether every tree is a chain, whose commits move nothing.
    """

    depth: int = 0
    nodes: int = 1
    passes: int = 0
    contiguous: bool = True
    memory: KVCache | None = None  # keys and values of its own for settled positions, behind ``start``

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal keys propose alike from equal states."""
        return (type(self).__name__,)

    @abstractmethod
    def start(self, settled: Committed, hidden: Tensor) -> Tensor:
        """What changes from step to step beside text and cache, (B, ...), behind a prefill (see ``Drafter.start``)."""

    @abstractmethod
    def draft(
        self, state: Tensor, memory: FixedCache | None, lengths: Tensor, root: Tensor, sampler: Sampler
    ) -> TokenTree:
        """Trees of one size behind the roots (B,), texts being ``lengths`` (B,) long with them."""

    def update(
        self, state: Tensor, memory: FixedCache | None, tokens: Tensor, hidden: Tensor, counts: Tensor
    ) -> Tensor:
        """The state behind a step, see ``Drafter.update``; what it remembers is written behind the memory's lengths."""
        return state


class Nothing(Proposer):
    """Plain decoding."""

    def start(self, settled: Committed, hidden: Tensor) -> Tensor:
        return hidden.new_zeros(len(hidden), 0)

    def draft(
        self, state: Tensor, memory: FixedCache | None, lengths: Tensor, root: Tensor, sampler: Sampler
    ) -> TokenTree:
        return root_only(root)


class Grown(Proposer):
    """Trees of a trained predictor; the state is its window, (B, W, F)."""

    def __init__(self, drafter: TrainedDrafter) -> None:
        self._drafter = copy(drafter)
        self._drafter.tree = tree = replace(drafter.tree, threshold=0.0)
        self._drafter.on_host = False
        config = drafter.predictor.config
        self.depth = tree.depth if config.step_mode == "recursive" else min(tree.depth, config.num_steps)
        self.passes = self.depth
        branching, expanded = tree.branching or tree.width, 1
        for _ in range(self.depth):
            self.nodes += expanded * branching
            expanded = min(tree.width, expanded * branching)
        self.contiguous = self.nodes == self.depth + 1
        if tree.nodes is not None:
            self.nodes = min(self.nodes, tree.nodes + 1)

    @property
    def key(self) -> tuple[Any, ...]:
        return ("shape", id(self._drafter.predictor), self._drafter.tree)

    def start(self, settled: Committed, hidden: Tensor) -> Tensor:
        self._drafter.start(settled, hidden)
        self.memory = self._drafter.arena
        return self._drafter.window

    def draft(
        self, state: Tensor, memory: FixedCache | None, lengths: Tensor, root: Tensor, sampler: Sampler
    ) -> TokenTree:
        self._drafter.window, self._drafter.arena = state, memory
        if memory is not None:
            memory.expect(0)
        return self._drafter.draft(Committed([], lengths, root), sampler)

    def update(
        self, state: Tensor, memory: FixedCache | None, tokens: Tensor, hidden: Tensor, counts: Tensor
    ) -> Tensor:
        self._drafter.window, self._drafter.arena = state, memory
        if memory is not None:
            memory.expect(hidden.shape[1])
        self._drafter.append_states(tokens, hidden, counts)
        return self._drafter.window


class Foretold(Proposer):
    """Chains that an oracle foretells; the state is its drafts by position, (B, P) int64, -1 behind the last."""

    def __init__(self, drafter: OracleDrafter) -> None:
        self._drafter, self.depth, self.nodes = copy(drafter), drafter.depth, drafter.depth + 1

    @property
    def key(self) -> tuple[Any, ...]:
        return ("oracle", self.depth)

    def start(self, settled: Committed, hidden: Tensor) -> Tensor:
        self._drafter.start(settled, hidden)
        drafts = self._drafter.drafts
        width = -(-(max(map(len, drafts)) + 1) // _TABLE) * _TABLE  # the last is always -1
        return torch.tensor([[*row, *[-1] * (width - len(row))] for row in drafts], device=hidden.device)

    def draft(
        self, state: Tensor, memory: FixedCache | None, lengths: Tensor, root: Tensor, sampler: Sampler
    ) -> TokenTree:
        positions = lengths[:, None] + torch.arange(self.depth, device=root.device)
        drafts = state.gather(1, positions.clamp(max=state.shape[1] - 1))
        tree = chain(root, drafts.clamp(min=0))
        known = torch.cat([root[:, None] >= 0, drafts >= 0], dim=1)
        return TokenTree(tree.tokens, tree.parent.masked_fill(~known, -1))


@dataclass(frozen=True)
class Content:
    """Where the rows of a call are between two steps; each tensor has a row for each."""

    arena: KVCache
    memory: KVCache | None
    root: Tensor
    state: Tensor
    keys: Tensor | None
    prompt_lengths: Tensor


@dataclass(frozen=True)
class Plan:
    """What a stage computes. Equal keys mean that one can serve for the other.

    Attributes:
        sampler: whose options are taken; its rows are not.
        state: a tensor like the proposer's state in shape and dtype, rows apart.
    """

    target: Target
    support: Support
    proposer: Proposer
    sampler: Sampler
    state: Tensor

    @property
    def key(self) -> tuple[Any, ...]:
        sampler = self.sampler
        warpers = [(type(one).__name__, sorted(vars(one).items())) for one in sampler.warpers]
        options = (sampler.temperature, repr(warpers), sampler.min_new_tokens, sampler.eos_token_ids)
        return (*self.proposer.key, self.state.shape[1:], self.state.dtype, self.support.positions, *options)


class Stage:
    """Static tensors for some number of rows and slots, and the steps over them.

    Args:
        capacity: slots per row.
        compiled: steps go through torch.compile.
        pool: of the memory that CUDA graphs share, which never run side by side.

    Attributes:
        out: (B, 2 + depth + 1) int64: per row the number of emitted tokens, of proposed ones, and the emitted tokens.
    """

    def __init__(self, plan: Plan, rows: int, capacity: int, compiled: bool = False, pool: Any = None) -> None:
        target, sampler, device = plan.target, plan.sampler, plan.target.device
        self.target, self.support, self.proposer = target, plan.support, copy(plan.proposer)
        self.proposer.memory = None  # that of one call's prefill
        self.rows, self.capacity, self.compiled, self._pool = rows, capacity, compiled, pool
        self.arena = FixedCache(plan.support.layers, rows, capacity, target.dtype, device)
        self.memory = None
        if plan.proposer.memory is not None:
            self.memory = FixedCache(plan.proposer.memory.shapes, rows, capacity, plan.proposer.memory.dtype, device)
        self.root = torch.zeros(rows, dtype=torch.long, device=device)
        self.state = plan.state.new_zeros(rows, *plan.state.shape[1:])
        self.sampler = FixedSampler(
            prompt_lengths=torch.zeros_like(self.root),
            temperature=sampler.temperature,
            keys=None if sampler.keys is None else torch.zeros_like(self.root),
            warpers=sampler.warpers,
            min_new_tokens=sampler.min_new_tokens,
            eos_token_ids=sampler.eos_token_ids,
            vocab_size=target.logits(torch.zeros(1, target.hidden_size, dtype=target.dtype, device=device)).shape[-1],
            depth=plan.proposer.depth,
        )
        self.out = torch.zeros(rows, 3 + plan.proposer.depth, dtype=torch.long, device=device)
        pinned = device.type == "cuda"
        # Where results arrive, in turns: no more steps are under way.
        self._arrivals = [torch.zeros(self.out.shape, dtype=torch.long, pin_memory=pinned) for _ in range(_AHEAD)]
        self._turn = 0
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
        # Around it all: a compiled step cannot change the configuration.
        with grouped_queries(self.target.config) if self.support.grouped_queries else nullcontext(), many:
            self._steps[drafts](self, drafts)

    def step(self, drafts: bool) -> None:
        """Draft, mask, forward, choose, match, commit: static tensors in, static tensors out."""
        arena, sampler, proposer = self.arena, self.sampler, self.proposer
        lengths = arena.lengths + 1
        sampler.settle(lengths)
        drafted = proposer.draft(self.state, self.memory, lengths, self.root, sampler) if drafts else None
        tree = LaidOut.of(root_only(self.root) if drafted is None else drafted)
        states = self.forward(tree)
        accepted = match(tree, sampler.choose(self.target.logits(states), tree))
        deepest = proposer.depth + 1 if drafts else 1
        path, tokens, counts = accepted.path[:, :deepest], accepted.tokens[:, :deepest], accepted.counts
        proposed = (tree.parent >= 0).sum(1)
        hidden = states.gather(1, path[:, :, None].expand(-1, -1, states.shape[-1]))
        settled = torch.cat([self.root[:, None], tokens], dim=1)
        self.state.copy_(proposer.update(self.state, self.memory, settled, hidden, counts))
        if drafts and not proposer.contiguous:
            arena.move(path)
        # Rows that have ended may go on for nothing, but not past the last slot.
        arena.lengths.copy_((arena.lengths + counts).clamp(max=self.capacity - proposer.nodes))
        if self.memory is not None:  # it holds the positions that the target's cache holds
            self.memory.lengths.copy_(arena.lengths)
        self.root.copy_(tokens.gather(1, counts[:, None] - 1)[:, 0])
        self.out[:, : 2 + deepest] = torch.cat([counts[:, None], proposed[:, None], tokens], dim=1)

    def forward(self, tree: TokenTree) -> Tensor:
        """``tree_forward`` over the whole bucket, under an explicit mask."""
        self.arena.expect(tree.size)
        positions, masks = tree_inputs(self.target, self.support, self.arena, tree)
        return self.target.hidden(tree.tokens, attention_mask=masks, position_ids=positions, cache=self.arena)

    def fill(self, content: Content, rows: Tensor) -> None:
        """Take these rows, (R,) int64, of a call; what the rows behind them compute is not read."""
        count = len(rows)
        self.arena.fill(content.arena, rows)
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
        return Content(self.arena, self.memory, self.root, self.state, self.sampler.keys, self.sampler.prompt_lengths)

    def launch(self, drafts: bool, rows: list[Row]) -> "Flight":
        """Enqueue a step, and the copy of what it emits. No more than ``_AHEAD`` may be under way."""
        arrival = self._arrivals[self._turn]
        self._turn = (self._turn + 1) % _AHEAD
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
        nodes, passes = (self.proposer.nodes, self.proposer.passes) if drafts else (1, 0)
        return Flight(rows, nodes, passes, drafts, arrival, events, perf_counter() - started)


@dataclass(frozen=True)
class Flight:
    """A step under way.

    Attributes:
        rows: whose results will be read; they are the first of the stage's.
        launched: seconds that launching took, which off CUDA is all of the step.
    """

    rows: list[Row]
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


class FixedSteps:
    """The stages of one decoder, kept from call to call, so that captures and compilation are not repeated.

    A captured step reads weights where they lay: after moving target or predictor make a new decoder.

    Args:
        compiled: torch.compile before capturing: fewer kernels, for up to a minute of compilation.
        slots: least slots per row; more come by doubling.
        kept: stages kept between calls, each with a cache of its own.
    """

    def __init__(self, compiled: bool = False, slots: int = 512, kept: int = 8) -> None:
        self.compiled, self.slots, self.kept = compiled, slots, kept
        self._stages: OrderedDict[tuple[Any, ...], Stage] = OrderedDict()
        self._pool: Any = None

    def take(self, plan: Plan, rows: int, needed: int) -> Stage:
        """A stage of at least so many rows and slots, for the caller alone until it is given back."""
        rows, capacity = bucket(rows), self.slots
        while capacity < needed:
            capacity *= 2
        stage = self._stages.pop((*plan.key, rows, capacity), None)
        if stage is None:
            if plan.target.device.type == "cuda" and self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            stage = Stage(plan, rows, capacity, self.compiled, self._pool)
        return stage

    def give_back(self, plan: Plan, stage: Stage) -> None:
        self._stages[(*plan.key, stage.rows, stage.capacity)] = stage
        while len(self._stages) > self.kept:
            self._stages.popitem(last=False)


def bucket(rows: int) -> int:
    """The number of rows that steps are made for."""
    return next((size for size in _ROWS if size >= rows), -(-rows // _ROWS[-1]) * _ROWS[-1])


def why_not(
    target: Target,
    support: Support,
    drafter: Drafter | None,
    sampler: Sampler,
    rule: Rule,
    length: int,
    new_tokens: int,
) -> str | None:
    """Why a call cannot be served here; None where it can. ``length`` is the longest prompt's."""
    if target.switch is not None and target.switch.crosses(length, new_tokens):
        return f"the call crosses {target.switch.positions} tokens, where the rotary table changes"
    places = set((getattr(target.model, "hf_device_map", None) or {}).values())
    if support.mode != "tree" or any(layer.device is not None for layer in support.layers) or len(places) > 1:
        return f"target {target.name} verifies chains only, or is spread over devices"
    if not isinstance(rule, Match):
        return f"acceptance {rule} waits for the host"
    if sampler.processors is not None or not all(isinstance(one, _WARPERS) for one in sampler.warpers):
        return "logits processors wait for the host"
    return None if drafter is None else drafter.why_not_fixed(target)


def proposer_of(drafter: Drafter | None) -> Proposer:
    if isinstance(drafter, TrainedDrafter):
        return Grown(drafter)
    return Foretold(drafter) if isinstance(drafter, OracleDrafter) else Nothing()


@torch.no_grad()
def decode(
    steps: FixedSteps,
    target: Target,
    support: Support,
    drafter: Drafter | None,
    prompts: list[list[int]],
    sampler: Sampler,
    *,
    max_new_tokens: int,
    eos_token_ids: tuple[int, ...],
    criteria: list[Stops] | None,
    stats: DecodeStats,
    rows: list[int],
    control: SpeculationControl | None = None,
) -> Generator[tuple[int, list[int]], None, list[Row]]:
    """``loop.decode`` with fixed shapes and one step ahead of what is read. Arguments, yields and returns are its.

    A step's time in the stats is that on the device, all of it under ``verify``. Whether to draft is decided a step
    earlier than in ``loop.decode``.
    """
    started = perf_counter()
    finished = live = begin(rows, prompts, criteria)
    arena, settled, hidden = settle_prompts(target, support, prompts, sampler, 0, None, stats)
    for row, token in zip(live, settled.root.tolist(), strict=True):
        row.extend([token], max_new_tokens, eos_token_ids)
        yield row.index, [token]
    if target.switch is not None and not target.switched(max(map(len, prompts))):
        support = replace(support, positions=target.switch.positions)  # rows that have ended go on, but not across it
    proposer = proposer_of(drafter)
    state = proposer.start(settled, hidden)
    plan = Plan(target, support, proposer, sampler, state)
    content = Content(arena, proposer.memory, settled.root, state, sampler.keys, sampler.prompt_lengths)
    del arena, hidden, settled
    prefilled = perf_counter()
    stats.prefill_seconds += prefilled - started

    used: list[Stage] = []
    flights: deque[Flight] = deque()
    try:
        while going := [row for row in live if not row.finished]:
            # Steps that nobody needs are not enqueued: each settles a token at least. Other stops cannot be foreseen.
            while len(flights) < _AHEAD and any(len(row.new) + len(flights) < max_new_tokens for row in going):
                # What may be settled behind this step, and room for one more: see the end of ``Stage.step``.
                longest = max(len(row.prompt) + len(row.new) for row in going) - 1
                needed = longest + (len(flights) + 1) * (proposer.depth + 1) + proposer.nodes
                stage = used[-1] if used else None
                if stage is None or needed > stage.capacity or 2 * bucket(len(going)) <= stage.rows:
                    index = torch.tensor([live.index(row) for row in going], device=target.device)
                    stage = steps.take(plan, len(going), needed)
                    used.append(stage)  # kept to the end: what it has under way has not been read
                    stage.prepare(drafts=proposer.depth > 0)
                    if control is not None:
                        stage.prepare(drafts=False)
                    stage.fill(content, index)
                    content, live = stage.content, going
                flights.append(
                    stage.launch(proposer.depth > 0 and (control is None or control.draft_next(longest)), live)
                )
            flight = flights.popleft()
            results, seconds = flight.wait()
            own = [(row, result) for row, result in zip(flight.rows, results, strict=False) if not row.finished]
            # Without the root, which this step has put into the cache.
            lengths = [len(row.prompt) + len(row.new) - 1 for row, _ in own]
            stats.steps.append(
                Step([row.index for row, _ in own], lengths, flight.nodes, flight.passes, 0.0, seconds, 0.0)
            )
            if control is not None:
                control.observe(flight.drafts, sum(count for _, (count, *_) in own) / len(own), seconds, max(lengths))
                stats.plain_steps += not flight.drafts
            for row, (count, proposed, *tokens) in own:
                emitted = row.extend(tokens[:count], max_new_tokens, eos_token_ids)
                stats.count(row.index, proposed, min(count - 1, emitted), emitted)
                yield row.index, tokens[:emitted]
    finally:
        for stage in used:
            steps.give_back(plan, stage)
    stats.decode_seconds += perf_counter() - prefilled
    if control is not None:
        stats.pauses += control.pauses
    return finished
