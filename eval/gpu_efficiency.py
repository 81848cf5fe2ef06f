"""How near decoding comes to what a GPU can do, in at most eight minutes: steps of fixed shapes as CUDA graphs.

    python -m eval.gpu_efficiency --output eval/results/gpu [--target chat-12m-folder] [--compile false]
    python -m eval.gpu_efficiency --tiny true --output /some/folder        # seconds, on a CPU, to see that it runs

Run it in the repository (or with it on PYTHONPATH) beside torch, transformers, accelerate and safetensors; nothing is
downloaded. Measured are

- *read bandwidth*: a sum over, and a copy of, far more bytes than any cache holds; the better of the two;
- autoregressive decoding against its bound, weight bytes read per token / read bandwidth, for a randomly initialised
  bfloat16 model in the shape of Llama-3.1-8B and for a small target that exists (default: the bundled one);
- t(n), a bare captured forward over n tokens per row with its logits, and what a step adds to it, for several batches;
- *efficiency*: (t(n) + the drafter's bare forwards) / time of a step by the wall clock; without drafts t(1) / step;
- speed-up over our own autoregressive decoding of the same batch, for an oracle that drafts the truth with every fifth
  token corrupted at no cost (*simulated*: a randomly initialised target has no drafter), and for the trained predictor;
- transformers' generate at batch 1, with its dynamic cache, and with a static one and compilation if time is left;
- whether compiled steps, captured steps and the loop that asks the host give the same tokens (float32, small target).

At batch 1 steps and bare target forwards go through torch.compile before they are captured; elsewhere not, since each
shape would cost most of a minute. The drafter's bare forwards are captured only, so that the efficiency of a compiled
step with the predictor is an upper estimate. Parts that do not fit into the time are left out and named. Results are
written after every part.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from eval import commands
from eval.llamas import Widths, random_llama
from shape import bundled
from shape.data.conversations import evenly
from shape.data.reading import load_prompts
from shape.drafters import Drafter, OracleDrafter, TrainedDrafter
from shape.errors import ConfigError
from shape.evaluation.environment import Environment
from shape.evaluation.markdown import markdown, show
from shape.evaluation.results import AUTOREGRESSIVE
from shape.evaluation.runner import by_transformers, side_by_side
from shape.generation.decoder import ShapeDecoder
from shape.generation.engine import ShapeOutput
from shape.generation.fixed import FixedSteps
from shape.generation.stage import captured
from shape.generation.static_drafters import StaticCache, StaticTree
from shape.target.chat import prompt_ids
from shape.target.model import Target
from shape.verification.forward import attending, tree_inputs
from shape.verification.tree import chain

BATCHES = (1, 2, 4, 8, 16, 24)
ERROR_RATE, DEPTH = 0.2, 6  # of the oracle
REPEATS = 30  # of bare forwards, whose median counts
LLAMA_8B = Widths(4096, 14336, 32, 8, 32, vocab_size=128256, max_position_embeddings=8192)
TINY = Widths(32, 48, 4, 2, 2, vocab_size=97, max_position_embeddings=8192)


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

    @property
    def efficiency(self) -> float:
        return (self.forward_ms + self.draft_ms) / self.step_ms

    @property
    def speed_up(self) -> float:
        return self.tokens_per_second / self.plain_tokens_per_second


@dataclass
class Record:
    """What is known so far, written after every part."""

    folder: Path
    environment: Environment
    minutes: float
    bandwidth: float = 0.0
    bounds: list[dict[str, Any]] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    baselines: list[dict[str, Any]] = field(default_factory=list)
    equal: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    started: float = field(default_factory=perf_counter)

    @property
    def seconds_left(self) -> float:
        return 60 * self.minutes - (perf_counter() - self.started)

    @contextmanager
    def part(self, name: str, seconds: float) -> Iterator[bool]:
        """Says whether there is time for a part that takes about so long; what it raises is recorded, not passed on."""
        print(f"[{perf_counter() - self.started:4.0f} s] {name}", flush=True)
        if self.seconds_left < seconds:
            self.left_out.append(f"{name}: no time left")
            yield False
            return
        try:
            yield True
        except Exception as error:  # one part that fails must not cost the others
            self.left_out.append(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            print(f"       {self.left_out[-1]}", flush=True)
        self.write()

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        values = {name: value for name, value in vars(self).items() if name not in ("folder", "started")}
        values["environment"] = asdict(self.environment)
        figures = ("efficiency", "speed_up")
        values["cases"] = [asdict(one) | {name: getattr(one, name) for name in figures} for one in self.cases]
        (self.folder / "gpu-efficiency.json").write_text(json.dumps(values, indent=1))
        (self.folder / "gpu-efficiency.md").write_text(self.markdown())

    def markdown(self) -> str:
        bounds = [
            [one["target"], show(one["weight_gb"]), show(one["bound_ms"], ".3f"), show(one["plain_ms"], ".3f"),
             show(one["plain_ms"] / one["bound_ms"], unit="x")]
            for one in self.bounds
        ]  # fmt: skip
        cases = [
            [one.target, str(one.batch), one.method, "yes" if one.compiled else "no", str(one.nodes),
             show(one.forward_ms, ".3f"), show(one.draft_ms, ".3f"), show(one.step_ms, ".3f"),
             show(one.step_ms - one.forward_ms - one.draft_ms, ".3f"), show(one.device_ms, ".3f"),
             show(one.efficiency), show(one.acceptance_length), show(one.tokens_per_second, ".0f"),
             show(one.speed_up, unit="x")]
            for one in self.cases
        ]  # fmt: skip
        others = [[one["target"], one["method"], show(one["token_ms"], ".3f")] for one in self.baselines]
        same = [[one["method"], f"{one['equal']} / {one['answers']}"] for one in self.equal]
        parts = [
            "### Decoding on a GPU: steps of fixed shapes",
            f"Read bandwidth, measured: {self.bandwidth / 1e9:.0f} GB/s.",
            "Autoregressive decoding, batch 1, against the bound of reading all weights once:",
            markdown(["target", "weights, GB", "bound, ms", "ms per token", "over the bound"], bounds),
            "Steps; `oracle (simulated)` drafts the truth with every fifth token corrupted, at no cost:",
            markdown(
                ["target", "batch", "method", "compiled", "n", "t(n) ms", "drafter ms", "step ms", "overhead ms",
                 "step on device ms", "efficiency", "acceptance length", "tokens/s", "speed-up"],
                cases,
            ),
            "transformers' generate, batch 1:",
            markdown(["target", "method", "ms per token"], others),
            "Answers token for token equal to the eager loop's (small target, float32, greedy):",
            markdown(["steps", "equal"], same),
            "Left out: " + ("; ".join(self.left_out) or "nothing") + ".",
            self.environment.line(),
        ]  # fmt: skip
        return "\n\n".join(parts) + "\n"


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


@dataclass
class GpuOptions:
    """What to measure.

    Args:
        output: folder for gpu-efficiency.json and gpu-efficiency.md.
        target: the small target: folder, hub id or bundled name; default: the bundled one.
        predictor: its trained predictor; default: the shipped one of the bundled target.
        minutes: after which what is left is left out.
        tokens: new ones per answer.
        compile: whether steps go through torch.compile at batch 1.
        tiny: a tiny random model, two batches, few tokens, on any device.
    """

    output: str = "gpu-efficiency"
    target: str | None = None
    predictor: str | None = None
    minutes: float = 8.0
    tokens: int = 128
    compile: bool = True
    tiny: bool = False


def loaded(options: GpuOptions, dtype: str, device: torch.device) -> tuple[Target, TrainedDrafter | None]:
    """The small target and its predictor, which is left out for a target that it was not trained for."""
    name = options.target or "quickstart-target"
    predictor = options.predictor or (None if options.target else "quickstart-shape")
    if predictor is None:
        return Target.load(name, dtype=dtype, device_map=device), None
    decoder = ShapeDecoder.from_pretrained(predictor, target=name, dtype=dtype, device_map=device)
    assert isinstance(decoder.drafter, TrainedDrafter)
    return decoder.target, decoder.drafter


def run(options: GpuOptions) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        raise ConfigError("no CUDA device is there; --tiny true shows on a CPU that the program runs")
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    batches, tokens = ((1, 2), 12) if options.tiny else (BATCHES, options.tokens)
    compiles = options.compile and not options.tiny

    record = Record(Path(options.output), Environment.capture(device), options.minutes)
    with record.part("read bandwidth", 0) as go:
        if go:
            record.bandwidth = read_bandwidth(device, 2**24 if options.tiny else 2**32)

    generator = torch.Generator().manual_seed(0)

    def random_prompts(vocab_size: int) -> list[list[int]]:
        return torch.randint(3, vocab_size, (max(batches), 64), generator=generator).tolist()

    def all_of(
        target: Target, predictor: TrainedDrafter | None, prompts: list[list[int]], label: str, weight: float
    ) -> None:
        for batch in batches:
            compiled = compiles and batch == 1
            with record.part(f"{label}, batch {batch}", weight * (180 if compiled else 20)) as go:
                if not go:
                    continue
                for case in measure(target, predictor, prompts[:batch], tokens, compiled):
                    record.cases.append(case)
                    if batch == 1 and case.method == AUTOREGRESSIVE:
                        size = weight_bytes(target)
                        bound = 1e3 * size / record.bandwidth
                        figures = {"weight_gb": size / 1e9, "bound_ms": bound, "plain_ms": case.step_ms}
                        record.bounds.append({"target": label, **figures})
        with record.part(f"{label}, transformers", weight * 20) as go:
            if go:
                token_ms = transformers_ms(target, prompts[0], tokens)
                record.baselines.append({"target": label, "method": "dynamic cache", "token_ms": token_ms})

    # The large one first: it is what the bound is about.
    large = random_llama(TINY if options.tiny else LLAMA_8B, torch.bfloat16, device)
    large.name = label = "random, tiny" if options.tiny else "random, Llama-3.1-8B-shaped"
    large_prompts = random_prompts(large.vocab_size)
    all_of(large, None, large_prompts, label, 0.1 if options.tiny else 1.0)

    if not options.tiny:
        small, predictor = loaded(options, "bfloat16", device)
        source = bundled.path("data", "bench.jsonl")
        chosen = evenly(load_prompts(source), max(batches))
        prompts = [prompt_ids(prompt.messages, small.tokenizer, prompt.template) for prompt in chosen]
        all_of(small, predictor, prompts, Path(small.name).name, 0.4)
        with record.part("equality of compiled, captured and eager steps", 60) as go:
            if go:
                exact, exact_predictor = loaded(options, "float32", device)
                record.equal = equality(exact, exact_predictor, prompts[:8], 64, compiles)
    else:
        with record.part("equality of captured and eager steps", 0):
            exact = random_llama(TINY, torch.float32, device)
            record.equal = equality(exact, None, large_prompts[:2], tokens, False)

    with record.part(f"{label}, transformers, static cache", 1.0 if options.tiny else 90) as go:
        if go and compiles:
            token_ms = transformers_ms(large, large_prompts[0], tokens, cache_implementation="static")
            record.baselines.append({"target": label, "method": "static cache, compiled", "token_ms": token_ms})
    record.write()
    print(record.markdown())


def main(arguments: Sequence[str] | None = None) -> None:
    commands.run(run, GpuOptions, arguments)


if __name__ == "__main__":
    main()
