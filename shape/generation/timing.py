"""Costs on this machine: seconds of the target's forwards over several sizes, and of a drafter's passes."""

import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter

import llvmlite.binding as llvm
import torch

from shape.drafters import Drafter, TreeShape
from shape.drafters.base import Committed
from shape.drafters.cost import Costs
from shape.errors import ShapeError
from shape.files import cache_folder, typed, written_whole
from shape.generation.clock import synchronise
from shape.generation.decoder import ShapeDecoder
from shape.generation.rules import Match
from shape.verification.forward import new_cache, prefill, tree_logits
from shape.verification.sampling import Sampler
from shape.verification.tree import chain, root_only

_SIZES = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65)
_WIDTHS = (1, 2, 3, 4)
_DEPTHS = (2, 8)
_CONTEXT = 128  # tokens before a draft that is timed by itself
_CACHED = 0.02  # seconds; what takes longer reads more than caches hold, so that its first run alone is not counted


def measure_costs(
    decoder: ShapeDecoder, batch_size: int = 1, context: int = 256, repeats: int = 9, cache: Path | None = None
) -> Costs:
    """Time forwards over trees of several sizes, and shallow and deep drafts where the drafter has a network.

    Args:
        context: tokens in the cache; rounded up to a power of two, and down to what the target's positions allow.
        cache: a JSON file of earlier measurements; default: costs.json in ``cache_folder``. Machine, threads, versions,
            target and drafter are part of the key.
    """
    target = decoder.target
    if decoder.support.mode == "chain":  # which is decoded one sequence after the other
        batch_size = 1
    limit = target.max_positions or sys.maxsize
    sizes = [size for size in _SIZES if decoder.support.mode == "tree" or size <= 17]
    context = max(1, min(1 << (context - 1).bit_length(), limit - max(sizes)))
    key = json.dumps([*_machine(decoder), batch_size, context, repeats, _CACHED])
    known = _kept(cache)
    costs = known.get(key)
    if costs is None:
        costs = known[key] = _measure(decoder, batch_size, context, sizes, repeats)
        with suppress(OSError, RuntimeError, ShapeError), written_whole(_place(cache), f".{os.getpid()}") as part:
            part.write_text(json.dumps({name: asdict(each) for name, each in known.items()}), encoding="utf-8")
    return costs


def _place(cache: Path | None) -> Path:
    """Raises RuntimeError where there is no home."""
    return cache or cache_folder() / "costs.json"


def _kept(cache: Path | None) -> dict[str, Costs]:
    """Earlier measurements; none where the file is damaged or absent, for they can be made again."""
    try:
        return typed(dict[str, Costs], json.loads(_place(cache).read_bytes()))
    except (OSError, ValueError, TypeError, RuntimeError):
        return {}


def _machine(decoder: ShapeDecoder) -> list[object]:
    """What costs depend on."""
    target, drafter = decoder.target, decoder.drafter
    network = None if drafter is None else drafter.predictor
    return [
        *(platform.node(), llvm.get_host_cpu_name(), target.places),
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


class _Setup:
    """A target and its drafter behind a random text, ready to be timed."""

    def __init__(self, decoder: ShapeDecoder, batch_size: int, context: int, room: int) -> None:
        self.target, self.support = decoder.target, decoder.support
        self.layers = (-1,) if decoder.drafter is None else decoder.drafter.layers
        self.cache = new_cache(self.target, self.support, batch_size, context + room)
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(self.target.vocab_size, (batch_size, context), generator=generator).to(self.target.device)
        self.hidden = prefill(self.target, self.cache, text, [context] * batch_size, layers=self.layers)
        self.root = text[:, -1]
        self.committed = Committed([[*ids, ids[-1]] for ids in text.tolist()], self.cache.lengths + 1, self.root)
        self.sampler = Sampler(self.cache.lengths)
        self.sampler.commit(self.committed.lengths, self.committed.texts)

    def verify(self, size: int) -> None:
        """A forward over so many tokens, the choice and the acceptance."""
        root = self.root
        tree = root_only(root) if size == 1 else chain(root, root[:, None].expand(-1, size - 1))
        self.cache.reserve(size)
        _, logits = tree_logits(self.target, self.support, self.cache, tree, self.layers)
        Match()(tree, logits, self.sampler)

    def drafts(self, drafter: Drafter) -> partial:
        """What drafts once, of a drafter that is bound."""
        drafter.start(self.committed, self.hidden)
        return partial(drafter.draft, self.committed, self.sampler)


def _measure(decoder: ShapeDecoder, batch_size: int, context: int, sizes: Sequence[int], repeats: int) -> Costs:
    device, own = decoder.target.device, decoder.drafter
    shapes = [TreeShape(depth=depth, width=width) for width in _WIDTHS for depth in _DEPTHS]
    made = {(shape.width, shape.depth): own.with_tree(shape) for shape in shapes} if own is not None else {}
    drafters = {size: drafter for size, drafter in made.items() if drafter is not None}
    with decoder.gradientless():
        bench = _Setup(decoder, batch_size, context, max(sizes))
        verify = _seconds([partial(bench.verify, size) for size in sizes], repeats, device)
        seconds = _seconds([bench.drafts(drafter) for drafter in drafters.values()], repeats, device)
    found = {size: (drafter.passes, taken) for (size, drafter), taken in zip(drafters.items(), seconds, strict=True)}
    shallow, deep = _DEPTHS
    draft = {width: _line(found[width, shallow], found[width, deep]) for width in _WIDTHS if (width, deep) in found}
    return Costs(batch_size, context, dict(zip(sizes, verify, strict=True)), draft)


def _line(shallow: tuple[int, float], deep: tuple[int, float]) -> tuple[float, float]:
    """Seconds before the passes and of each, through two drafts, (passes, seconds); neither is below zero."""
    (few, less), (many, more) = shallow, deep
    each = max(more - less, 0.0) / (many - few) if many > few else 0.0
    each = min(each, less / few)
    return less - few * each, each


def draft_cost(
    decoder: ShapeDecoder, repeats: int = 9, clock: Callable[[], float] = perf_counter
) -> tuple[float, float]:
    """Seconds of one draft of the decoder's own shape, for one sequence, and of a step of one token."""
    assert decoder.drafter is not None
    with decoder.gradientless():
        bench = _Setup(decoder, 1, _CONTEXT, 1)
        calls = [bench.drafts(decoder.drafter), partial(bench.verify, 1)]
        draft, verify = _seconds(calls, repeats, decoder.target.device, clock)
    return draft, verify


def _seconds(
    calls: Sequence[partial], repeats: int, device: torch.device, clock: Callable[[], float] = perf_counter
) -> list[float]:
    """The time of each call when it is run repeatedly, as in decoding: of short ones with warm caches. They are
    measured in turn, so that a slow moment falls on all of them.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, taken in zip(calls, times, strict=True):
            if not taken or taken[-1] < _CACHED:
                call()
                synchronise(device)
            start = clock()
            call()
            synchronise(device)
            taken.append(clock() - start)
    # The lower quartile: other work on the machine only ever adds.
    return [sorted(taken)[len(taken) // 4] for taken in times]
