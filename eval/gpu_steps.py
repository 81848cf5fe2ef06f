"""What `eval.gpu` measures of decoding: bandwidth, bare forwards, steps of every kind, equality of tokens."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from shape.drafters import Drafter, OracleDrafter, TrainedDrafter
from shape.errors import ConfigError
from shape.evaluation.efficiency import ORACLE_DEPTH, ORACLE_ERROR_RATE
from shape.evaluation.results import AUTOREGRESSIVE
from shape.evaluation.runner import by_transformers
from shape.generation.capture import captured
from shape.generation.decoder import ShapeDecoder
from shape.generation.engine import ShapeOutput
from shape.generation.fixed import FixedSteps
from shape.generation.prompts import side_by_side
from shape.generation.static_drafters import StaticCache, StaticTree
from shape.target.loading import first_line
from shape.target.model import Target
from shape.target.support import Support
from shape.verification.forward import attending, tree_inputs, tree_logits
from shape.verification.probe import support_of
from shape.verification.tree import chain

# How steps run: by the loop that asks the host, captured, or compiled and captured.
EAGER, GRAPHS, COMPILED = MODES = ("eager", "graphs", "compiled")
REPEATS = 30  # of bare forwards, whose median counts


@dataclass
class Case:
    """One method at one batch; milliseconds per step, of bare forwards per call.

    Attributes:
        steps: one of MODES.
        device_ms: on the device, between the events around a step; of eager steps, and off CUDA, by the clock.
    """

    target: str
    batch: int
    method: str
    steps: str
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


def compiler(device: torch.device) -> dict[str, Any]:
    """What compiles a function of tensors here, tried on a small one.

    Raises:
        ConfigError: it does not; on a GPU Triton needs a C compiler too, to launch what it has made.
    """
    found = next((name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and shutil.which(name)), None)
    numbers = torch.arange(4096, dtype=torch.float32, device=device)
    try:
        doubled = torch.compile(lambda given: given.sin() * 2, fullgraph=True, dynamic=False)(numbers)
    except Exception as error:  # each compiler fails in a way of its own
        raise ConfigError(f"torch.compile fails here, with C compiler {found} ({first_line(error)})") from error
    assert torch.allclose(doubled, numbers.sin() * 2, atol=1e-5)
    return {"c_compiler": found}


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
def bare(
    target: Target, support: Support, rows: int, nodes: int, context: int, slots: int, compiled: bool = False
) -> float:
    """t(n): a forward over so many tokens per row behind `context` cached ones, masks and positions being at hand."""
    cache = StaticCache(support.layers, rows, slots, target.dtype, target.device)
    cache.lengths.fill_(context)
    tokens = torch.zeros(rows, nodes, dtype=torch.long, device=target.device)
    tree = StaticTree.of(chain(tokens[:, 0], tokens[:, 1:]))
    cache.expect(nodes)
    inputs = tree_inputs(target, support, cache, tree)

    def forward() -> Tensor:
        cache.expect(nodes)
        return tree_logits(target, support, cache, tree, inputs=inputs)[1]

    function = torch.compile(forward, fullgraph=True, dynamic=False) if compiled else forward

    def run() -> None:
        with attending(target, support):
            function()

    return seconds(captured(run, target), target.device)


def forwards(target: Target, shapes: Sequence[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """t(n) by kernels of ours, where the target is served, beside its own layers; both captured, milliseconds.

    Args:
        shapes: sequences, tokens of each, and the slots that a step could see, of which three quarters are in use.
    """
    support = support_of(target)
    if support.fused is None:
        return []
    found = []
    for rows, nodes, slots in shapes:
        at = rows, nodes, slots * 3 // 4, slots
        ours, own = (1e3 * bare(target, one, *at) for one in (support, replace(support, fused=None)))
        found.append({"batch": rows, "nodes": nodes, "slots": slots, "ours_ms": ours, "own_ms": own})
    return found


@torch.no_grad()
def bare_draft(drafter: Drafter | None, target: Target, rows: int, passes: int) -> float:
    """The drafter's network alone."""
    if drafter is None or passes == 0:
        return 0.0
    return seconds(captured(lambda: drafter.run_forwards(rows, passes), target), target.device)


def decoded(decoder: ShapeDecoder, ids: Tensor, mask: Tensor, tokens: int, eos: bool = False) -> ShapeOutput:
    """The second of two calls: the first captures.

    Args:
        eos: whether the target's end tokens end answers.

    Raises:
        ConfigError: it was not decoded as the decoder was asked to.
    """
    options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False} | ({} if eos else {"eos_token_id": []})
    compiled = decoder.graphs is not None and decoder.graphs.compiled
    for _ in range(2):
        out = decoder.generate(ids, mask, return_dict_in_generate=True, **options)
    if out.stats.graphs != (decoder.graphs is not None):
        raise ConfigError("steps could not be captured, as a warning above says")
    if decoder.graphs is not None and compiled != decoder.graphs.compiled:
        raise ConfigError("steps could not be compiled, as a warning above says")
    return out


def measure(
    target: Target, predictor: TrainedDrafter | None, prompts: list[list[int]], tokens: int, mode: str
) -> Iterator[Case]:
    """Autoregressive decoding, the oracle, and the predictor where there is one, for one batch of prompts.

    Args:
        mode: of MODES. Bare forwards are compiled where steps are, and always captured.
    """
    ids, mask = side_by_side(prompts, target.device)
    slots = 1 << (ids.shape[1] + tokens + 64).bit_length()  # one width from beginning to end
    rows, context, compiled = len(prompts), ids.shape[1] + tokens // 2, mode == COMPILED
    steps = FixedSteps(compiled, slots)
    baseline_rate = 0.0

    def case(method: str, drafter: Drafter | None) -> tuple[Case, Tensor]:
        decoder = ShapeDecoder(target, drafter, fall_back=False, graphs=False if mode == EAGER else steps)
        out = decoded(decoder, ids, mask, tokens)
        stats, first = out.stats, out.stats.steps[0]
        rate = stats.emitted / stats.decode_seconds
        found = Case(
            target=target.name,
            batch=rows,
            method=method,
            steps=mode,
            nodes=first.nodes,
            acceptance_length=stats.acceptance_length,
            tokens_per_second=rate,
            step_ms=1e3 * (stats.decode_seconds - stats.start_seconds) / len(stats.steps),
            device_ms=1e3 * median(step.seconds for step in stats.steps),
            forward_ms=1e3 * bare(target, decoder.support, rows, first.nodes, context, slots, compiled),
            draft_ms=1e3 * bare_draft(drafter, target, rows, first.passes),
            plain_tokens_per_second=baseline_rate or rate,
        )
        return found, out.sequences

    try:
        baseline, answers = case(AUTOREGRESSIVE, None)
        yield baseline
        baseline_rate = baseline.tokens_per_second
        new = answers[:, ids.shape[1] :].tolist()
        texts = [prompt + more for prompt, more in zip(prompts, new, strict=True)]
        yield case("oracle (simulated)", OracleDrafter(texts, ORACLE_ERROR_RATE, ORACLE_DEPTH))[0]
        if predictor is not None:
            yield case("predictor", predictor)[0]
    finally:
        steps.close()


def transformers_ms(target: Target, prompt: list[int], tokens: int, **options: Any) -> float:
    """Milliseconds per token of `generate` behind its first one."""
    asked = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": tokens, "min_new_tokens": tokens}
    generate = by_transformers(target, **asked, **options)
    generate([prompt], [0])  # warms up
    return 1e3 * mean(generate([prompt], [0]).gaps)


def equality(
    target: Target, predictor: TrainedDrafter | None, prompts: list[list[int]], tokens: int, mode: str
) -> list[dict[str, Any]]:
    """How many answers of captured, or of compiled and captured, steps are those of the loop that asks the host."""
    found = []
    for method, drafter in ((AUTOREGRESSIVE, None), *([("predictor", predictor)] if predictor is not None else [])):
        eager = ShapeDecoder(target, drafter, fall_back=False, graphs=False)
        fixed = ShapeDecoder(target, drafter, fall_back=False, graphs=FixedSteps(mode == COMPILED))
        equal = 0
        for prompt in prompts:
            ids = torch.tensor([prompt], device=target.device)
            expected = eager.generate(ids, torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
            out = decoded(fixed, ids, torch.ones_like(ids), tokens, eos=True)
            equal += torch.equal(out.sequences, expected)
        found.append({"method": f"{method}, {mode}", "equal": equal, "answers": len(prompts)})
    return found
