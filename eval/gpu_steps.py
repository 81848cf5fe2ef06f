"""What `eval.gpu` measures of decoding: bandwidth, bare forwards, steps of fixed shapes, equality of tokens."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from shape.drafters import Drafter, OracleDrafter, TrainedDrafter
from shape.evaluation.results import AUTOREGRESSIVE
from shape.evaluation.runner import by_transformers, side_by_side
from shape.generation.decoder import ShapeDecoder
from shape.generation.engine import ShapeOutput
from shape.generation.fixed import FixedSteps
from shape.generation.stage import captured
from shape.generation.static_drafters import StaticCache, StaticTree
from shape.target.model import Target
from shape.verification.forward import attending, tree_inputs
from shape.verification.tree import chain

ERROR_RATE, DEPTH = 0.2, 6  # of the oracle
REPEATS = 30  # of bare forwards, whose median counts


@dataclass
class Case:
    """One method at one batch; milliseconds per step, of bare forwards per call.

    Attributes:
        device_ms: on the device, between the events around a step; off CUDA the time of the call.
    """

    target: str
    batch: int
    method: str
    compiled: bool
    nodes: int
    acceptance_length: float
    tokens_per_second: float
    step_ms: float
    device_ms: float
    forward_ms: float
    draft_ms: float
    plain_tokens_per_second: float

    def to_dict(self) -> dict[str, Any]:
        """All fields, and what follows from them."""
        return asdict(self) | {"efficiency": self.efficiency, "speed_up": self.speed_up}

    @property
    def efficiency(self) -> float:
        return (self.forward_ms + self.draft_ms) / self.step_ms

    @property
    def speed_up(self) -> float:
        return self.tokens_per_second / self.plain_tokens_per_second


def seconds(run: Callable[[], Any], device: torch.device, repeats: int = REPEATS) -> float:
    """Median time of a call: between events on CUDA, by the clock elsewhere."""
    times = []
    for repeat in range(repeats + 3):
        if device.type == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            run()
            after.record()
            after.synchronize()
            taken = before.elapsed_time(after) / 1e3
        else:
            start = perf_counter()
            run()
            taken = perf_counter() - start
        if repeat >= 3:
            times.append(taken)
    return median(times)


def read_bandwidth(device: torch.device, size: int) -> float:
    """Bytes per second that the device reads, of the better of a sum and a copy."""
    numbers = torch.ones(size // 4, dtype=torch.float32, device=device)
    other = torch.empty_like(numbers)
    copied = 2 * size / seconds(lambda: other.copy_(numbers), device, 10)
    return max(copied, size / seconds(numbers.sum, device, 10))


def weight_bytes(target: Target) -> int:
    """What a forward over one token reads: all parameters, but of the input embedding only where it is the head too."""
    embedding = target.model.get_input_embeddings().weight
    skipped = None if embedding is target.head.weight else embedding
    return sum(one.numel() * one.itemsize for one in target.model.parameters() if one is not skipped)


@torch.no_grad()
def bare(decoder: ShapeDecoder, rows: int, nodes: int, context: int, slots: int, compiled: bool) -> float:
    """t(n): a forward over so many tokens per row behind `context` cached ones, masks and positions being at hand."""
    target, support = decoder.target, decoder.support
    cache = StaticCache(support.layers, rows, slots, target.dtype, target.device)
    cache.lengths.fill_(context)
    tokens = torch.zeros(rows, nodes, dtype=torch.long, device=target.device)
    tree = StaticTree.of(chain(tokens[:, 0], tokens[:, 1:]))
    cache.expect(nodes)
    positions, masks = tree_inputs(target, support, cache, tree)

    def forward() -> Tensor:
        cache.expect(nodes)
        hidden = target.hidden(tokens, attention_mask=masks, position_ids=positions, cache=cache)
        return target.logits(hidden)

    function = torch.compile(forward, fullgraph=True) if compiled else forward

    def run() -> None:
        with attending(target, support):
            function()

    return seconds(captured(run, target), target.device)


@torch.no_grad()
def bare_draft(drafter: Drafter | None, target: Target, rows: int, passes: int) -> float:
    """The drafter's network alone."""
    if drafter is None or passes == 0:
        return 0.0
    return seconds(captured(lambda: drafter.run_forwards(rows, passes), target), target.device)


def decoded(decoder: ShapeDecoder, ids: Tensor, mask: Tensor, tokens: int) -> ShapeOutput:
    """The second of two calls: the first captures."""
    options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": []}
    for _ in range(2):
        out = decoder.generate(ids, mask, return_dict_in_generate=True, **options)
    assert out.stats.graphs
    return out


def measure(
    target: Target, predictor: TrainedDrafter | None, prompts: list[list[int]], tokens: int, compiled: bool
) -> Iterator[Case]:
    """Autoregressive decoding, the oracle, and the predictor where there is one, for one batch of prompts."""
    ids, mask = side_by_side(prompts, target.device)
    slots = 1 << (ids.shape[1] + tokens + 64).bit_length()  # one bucket from beginning to end
    rows, steps, context = len(prompts), FixedSteps(compiled, slots), ids.shape[1] + tokens // 2
    baseline_rate = 0.0

    def case(method: str, drafter: Drafter | None) -> tuple[Case, Tensor]:
        decoder = ShapeDecoder(target, drafter, fall_back=False, graphs=steps)
        out = decoded(decoder, ids, mask, tokens)
        stats, first = out.stats, out.stats.steps[0]
        rate = stats.emitted / stats.decode_seconds
        found = Case(
            target=target.name,
            batch=rows,
            method=method,
            compiled=compiled,
            nodes=first.nodes,
            acceptance_length=stats.acceptance_length,
            tokens_per_second=rate,
            step_ms=1e3 * stats.decode_seconds / len(stats.steps),
            device_ms=1e3 * median(step.seconds for step in stats.steps),
            forward_ms=1e3 * bare(decoder, rows, first.nodes, context, slots, compiled),
            draft_ms=1e3 * bare_draft(drafter, target, rows, first.passes),
            plain_tokens_per_second=baseline_rate or rate,
        )
        return found, out.sequences

    baseline, answers = case(AUTOREGRESSIVE, None)
    yield baseline
    baseline_rate = baseline.tokens_per_second
    new = answers[:, ids.shape[1] :].tolist()
    texts = [prompt + more for prompt, more in zip(prompts, new, strict=True)]
    yield case("oracle (simulated)", OracleDrafter(texts, ERROR_RATE, DEPTH))[0]
    if predictor is not None:
        yield case("predictor", predictor)[0]


def transformers_ms(target: Target, prompt: list[int], tokens: int, **options: Any) -> float:
    """Milliseconds per token of `generate` behind its first one."""
    asked = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": tokens, "min_new_tokens": tokens}
    generate = by_transformers(target, **asked, **options)
    generate([prompt], [0])  # warms up
    return 1e3 * mean(generate([prompt], [0]).gaps)


def equality(
    target: Target, predictor: TrainedDrafter | None, prompts: list[list[int]], tokens: int, compiled: bool
) -> list[dict[str, Any]]:
    """How many answers of captured, and of compiled, steps are those of the loop that asks the host."""
    found = []
    for drafter, name in ((None, AUTOREGRESSIVE), (predictor, "predictor")):
        if drafter is None and name != AUTOREGRESSIVE:
            continue
        eager = ShapeDecoder(target, drafter, fall_back=False)
        for kind in (False, True) if compiled else (False,):
            fixed = ShapeDecoder(target, drafter, fall_back=False, graphs=FixedSteps(kind))
            pairs = []
            for prompt in prompts:
                ids = torch.tensor([prompt], device=target.device)
                mask = torch.ones_like(ids)
                pairs.append(
                    [one.generate(ids, mask, max_new_tokens=tokens, do_sample=False) for one in (eager, fixed)]
                )
            equal = sum(torch.equal(*pair) for pair in pairs)
            method = f"{name}, {'compiled and captured' if kind else 'captured'}"
            found.append({"method": method, "equal": equal, "answers": len(pairs)})
    return found
