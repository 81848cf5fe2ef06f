"""Which draft pays on this machine: costs measured, acceptance estimated, and the shape with most tokens per second.

Speculation trades what a drafter gets right for what the hardware charges, and each can be known without the other:
`calibrate` times forwards, `sketch` lets a drafter propose at every position of the target's own answers, and `plan`
puts the two together for any shape of draft, "none" included, without decoding with each.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import log
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from shape.drafters import Drafter, TreeShape
from shape.drafters.base import Committed, Wrapped
from shape.drafters.cost import Costs
from shape.files import typed
from shape.generation.decoder import ShapeDecoder
from shape.generation.rules import Match
from shape.verification.forward import new_cache, prefill, tree_forward
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree, chain, root_only

_SIZES = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65)
_WIDTHS = (1, 2, 3, 4)
# A draft from which narrower ones can be cut.
WIDE = TreeShape(depth=8, width=4)
CANDIDATES = (
    *(TreeShape(depth=depth, width=1, threshold=limit) for depth in (2, 3, 4, 6, 8) for limit in (0.0, 0.1, 0.2, 0.35)),
    *(
        TreeShape(depth=depth, width=width, nodes=nodes, threshold=limit)
        for depth in (3, 4, 6, 8)
        for width in (2, 3, 4)
        for nodes in (6, 8, 12, 16, 24)
        for limit in (0.0, 0.1)
        if depth < nodes
    ),
    *(TreeShape.full(branching, depth) for branching, depth in ((2, 2), (3, 2), (4, 2), (2, 3))),  # the paper's k^N
)


def calibrate(
    decoder: ShapeDecoder, rows: int = 1, context: int = 256, repeats: int = 9, cache: Path | None = None
) -> Costs:
    """Time forwards over trees of several sizes, and passes of the drafter where it has a network.

    Args:
        context: tokens in the cache; rounded up to a power of two, and down to what the target's positions allow.
        cache: a JSON file of earlier calibrations; default: costs.json in the folder that SHAPE_CACHE names, or in
            ~/.cache/shape-decoding. Machine, threads, versions, target and drafter are part of the key.
    """
    target = decoder.target
    limit = target.max_positions or context
    sizes = [size for size in _SIZES if decoder.support.mode == "tree" or size <= 17]
    context = max(1, min(1 << (context - 1).bit_length(), limit - max(sizes)))
    key = json.dumps([*_machine(decoder), rows, context, repeats])
    cache = cache or Path(os.environ.get("SHAPE_CACHE") or Path.home() / ".cache" / "shape-decoding") / "costs.json"
    known = _kept(cache)
    costs = known.get(key)
    if costs is None:
        costs = known[key] = _measure(decoder, rows, context, sizes, repeats)
        cache.parent.mkdir(parents=True, exist_ok=True)
        part = cache.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({name: asdict(each) for name, each in known.items()}))
        part.replace(cache)
    return costs


def _kept(cache: Path) -> dict[str, Costs]:
    """Earlier calibrations; none where the file is damaged or absent, for they can be made again."""
    try:
        return typed(dict[str, Costs], json.loads(cache.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def _machine(decoder: ShapeDecoder) -> list[object]:
    """What costs depend on."""
    target, drafter = decoder.target, decoder.drafter
    network = None if drafter is None else drafter.predictor
    return [
        torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else str(target.device),
        torch.get_num_threads(),
        torch.__version__,
        target.identity.head_hash,
        target.model.num_parameters(),
        target.precision,
        drafter.name if drafter else "none",
        [network.num_parameters(), str(network.dtype), str(network.device), network.config.draft_vocab_size]
        if network
        else None,
    ]


class _Bench:
    """A target and its drafter behind a random text, ready to be timed."""

    def __init__(self, decoder: ShapeDecoder, rows: int, context: int, room: int) -> None:
        self.target, self.support = decoder.target, decoder.support
        self.arena = new_cache(self.target, self.support, rows, context + room)
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(self.target.vocab_size, (rows, context), generator=generator).to(self.target.device)
        self.hidden = prefill(self.target, self.arena, text, [context] * rows)
        self.root = text[:, -1]
        self.settled = Committed([[*row, row[-1]] for row in text.tolist()], self.arena.lengths + 1, self.root)
        self.sampler = Sampler(self.arena.lengths)
        self.sampler.settle(self.settled.lengths, self.settled.texts)

    def verify(self, size: int) -> None:
        """A forward over so many tokens, the choice and the acceptance."""
        root = self.root
        tree = root_only(root) if size == 1 else chain(root, root[:, None].expand(-1, size - 1))
        states = tree_forward(self.target, self.support, self.arena, tree)
        Match()(tree, self.target.logits(states), self.sampler)

    def drafts(self, drafter: Drafter) -> partial:
        """What drafts once, of a drafter that is bound."""
        drafter.start(self.settled, self.hidden)
        return partial(drafter.draft, self.settled, self.sampler)


def _measure(decoder: ShapeDecoder, rows: int, context: int, sizes: Sequence[int], repeats: int) -> Costs:
    device, own = decoder.target.device, decoder.drafter
    shapes = {} if own is None else {width: own.with_tree(TreeShape(depth=4, width=width)) for width in _WIDTHS}
    drafters = {width: drafter for width, drafter in shapes.items() if drafter is not None}
    with decoder.gradientless():
        bench = _Bench(decoder, rows, context, max(sizes))
        verify = _seconds([partial(bench.verify, size) for size in sizes], repeats, device)
        draft = _seconds([bench.drafts(drafter) for drafter in drafters.values()], repeats, device)
    per_pass = {width: taken / drafters[width].passes for width, taken in zip(drafters, draft, strict=True)}
    return Costs(rows, context, dict(zip(sizes, verify, strict=True)), per_pass)


def draft_cost(
    decoder: ShapeDecoder, context: int = 128, repeats: int = 9, clock: Callable[[], float] = perf_counter
) -> tuple[float, float]:
    """Seconds of one draft of the decoder's own shape, for one sequence, and of a step of one token."""
    assert decoder.drafter is not None
    with decoder.gradientless():
        bench = _Bench(decoder, 1, context, 1)
        calls = [bench.drafts(decoder.drafter), partial(bench.verify, 1)]
        draft, verify = _seconds(calls, repeats, decoder.target.device, clock)
    return draft, verify


def _seconds(
    calls: Sequence[partial], repeats: int, device: torch.device, clock: Callable[[], float] = perf_counter
) -> list[float]:
    """The time of each, measured in turn so that a slow moment falls on all of them."""
    times: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + 1):
        for call, taken in zip(calls, times, strict=True):
            start = clock()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if repeat > 0:  # the first warms up
                taken.append(clock() - start)
    # The lower quartile: other work on the machine only ever adds.
    return [sorted(taken)[len(taken) // 4] for taken in times]


@dataclass(frozen=True)
class Sketch:
    """What a drafter proposed at one position, on the host, node 0 being the root.

    Attributes:
        depth: of every node; -1 where it hangs on nothing.
        children: of every node, the likeliest first.
        joint: log of the drafter's estimate that the path to the node is accepted.
        accepted: whether that path is how the text goes on.
    """

    depth: list[int]
    children: list[list[int]]
    joint: list[float]
    accepted: list[bool]

    @classmethod
    def of(cls, tokens: list[int], parent: list[int], joint: list[float], rest: list[int]) -> "Sketch":
        """`rest`: the tokens that follow the root in the text."""
        depth, accepted, children = [0], [True], [[] for _ in tokens]  # type: ignore[var-annotated]
        for node, (token, above) in enumerate(zip(tokens[1:], parent[1:], strict=True), 1):
            hangs = above >= 0 and depth[above] >= 0
            depth.append(depth[above] + 1 if hangs else -1)
            accepted.append(hangs and accepted[above] and depth[node] <= len(rest) and rest[depth[node] - 1] == token)
            if hangs:
                children[above].append(node)
        return cls(depth, children, joint, accepted)


class _Shadow(Wrapped):
    """Lets another drafter propose at every position, and offers none of it."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.seen = []  # type: ignore[var-annotated]

    def start(self, settled: Committed, hidden: Tensor) -> None:
        super().start(settled, hidden)
        self._rows = list(range(len(settled.texts)))

    def draft(self, settled: Committed, sampler: Sampler) -> TokenTree:
        tree = self.inner.draft(settled, sampler)
        joint = tree.depth.neg() if tree.joint is None else tree.joint
        for at, row in enumerate(self._rows):
            lists = (tree.tokens[at].tolist(), tree.parent[at].tolist(), joint[at].tolist())
            self.seen.append((row, len(settled.texts[at]), *lists))
        return root_only(settled.root)

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self._rows = [self._rows[row] for row in rows.tolist()]


def sketch(
    decoder: ShapeDecoder,
    contexts: Iterable[list[int]],
    max_new_tokens: int = 64,
    wide: TreeShape = WIDE,
    **options,
) -> list[list[Sketch]]:
    """Drafts at every position of the target's answers to some prompts: per answer, position after position.

    Args:
        contexts: token ids of prompts.
        wide: what a predictor drafts, whatever its own tree; other shapes are cut from it.
        options: of ``generate``, for instance do_sample and seed.
    """
    drafter = decoder.drafter
    if drafter is None:
        return []
    drafter = drafter.with_tree(wide) or drafter
    answers = []
    for context in contexts:
        shadow = _Shadow(drafter)
        ids = torch.tensor([context], device=decoder.target.device)
        watching = ShapeDecoder(decoder.target, shadow, fall_back=False)
        text = watching.generate(ids, torch.ones_like(ids), max_new_tokens=max_new_tokens, **options)[0].tolist()  # type: ignore[index]
        answers.append(
            [
                Sketch.of(tokens, parent, joint, text[length:])
                for _, length, tokens, parent, joint in watching.drafter.seen  # type: ignore[union-attr]
            ]
        )
    return answers


def acceptance(answers: Sequence[Sequence[Sketch]]) -> list[list[float]]:
    """[depth][rank]: how often the text goes on with a node's child of that rank, where it came as far as the node."""
    counts: list[list[int]] = []
    asked: list[int] = []
    for one in (one for answer in answers for one in answer):
        node, depth = 0, 0
        while children := one.children[node]:
            if depth == len(asked):
                asked.append(0)
                counts.append([])
            asked[depth] += 1
            counts[depth] += [0] * (len(children) - len(counts[depth]))
            rank = next((rank for rank, child in enumerate(children) if one.accepted[child]), None)
            if rank is None:
                break
            counts[depth][rank] += 1
            node, depth = children[rank], depth + 1
    return [[count / total for count in ranks] for ranks, total in zip(counts, asked, strict=True)]


def cut(one: Sketch, shape: TreeShape) -> tuple[int, int, int]:
    """(accepted tokens, nodes, passes) if a predictor's drafter had grown this shape.

    A narrow tree can expand a node that the wide one did not, where it then counts as ending; that is rare.
    """
    branching = shape.branching or shape.width
    frontier, grown, passes = [0], [], 0
    for depth in range(shape.depth):
        found = [child for node in frontier for child in one.children[node][:branching]]
        if not found:
            break
        passes += 1
        grown += found
        # Of equals, those that were expanded.
        frontier = sorted(found, key=lambda node: (-one.joint[node], not one.children[node]))[: shape.width]
        if shape.threshold > 0 and depth + 1 < shape.depth and one.joint[frontier[0]] < log(shape.threshold):
            break
    kept = sorted(grown, key=lambda node: (-one.joint[node], node))[: shape.nodes]
    return max((one.depth[node] for node in kept if one.accepted[node]), default=0), len(kept), passes


@dataclass(frozen=True)
class Plan:
    """What a shape of draft is expected to bring.

    Attributes:
        shape: None is autoregressive decoding.
        acceptance_length: tokens per step; nodes, passes: means per step.
        seconds: per step; rate: tokens per second and sequence; speed_up: over autoregressive decoding.
    """

    shape: TreeShape | None
    acceptance_length: float
    nodes: float
    passes: float
    seconds: float
    rate: float
    speed_up: float


def plan(costs: Costs, answers: Sequence[Sequence[Sketch]], shapes: Sequence[TreeShape] = CANDIDATES) -> list[Plan]:
    """All shapes, and none, by the tokens per second that they would have had on these answers; the fastest first.

    Each answer is walked through as decoding would: from a position to behind the last token that was accepted there.
    """
    plans = [Plan(None, 1.0, 0.0, 0.0, costs.autoregressive, 1.0 / costs.autoregressive, 1.0)]
    for shape in shapes:
        steps = tokens = nodes = passes = 0
        seconds = 0.0
        for answer in answers:
            at = 0
            while at < len(answer):
                accepted, grown, ran = cut(answer[at], shape)
                steps, nodes, passes = steps + 1, nodes + grown, passes + ran
                tokens += min(accepted + 1, len(answer) - at)
                seconds += costs.of(grown + 1, ran, shape.width)
                at += accepted + 1
        if steps:
            rate = tokens / seconds
            means = (tokens / steps, nodes / steps, passes / steps, seconds / steps)
            plans.append(Plan(shape, *means, rate, rate * costs.autoregressive))
    return sorted(plans, key=lambda one: -one.rate)


def tune(decoder: ShapeDecoder, contexts: Sequence[list[int]], **options) -> Plan:
    """Give a decoder the shape of draft that is expected to be fastest on these prompts; the plan.

    Where none pays, the drafter is left as it is: the decoder falls back by itself.
    """
    costs = calibrate(decoder, context=max(map(len, contexts)) + 64)
    best = plan(costs, sketch(decoder, contexts, **options))[0]
    if best.shape is not None and decoder.drafter is not None:
        decoder.drafter = decoder.drafter.with_tree(best.shape) or decoder.drafter
    return best
