"""What a reader waits for without drafts: time to the first token and between tokens (the paper's Table 8).

    python -m eval.latency --targets '[T1,T2]' --contexts '[128,512,2048]' --output latency-results

Plain decoding of one row, greedy, by our loop and by transformers' `generate`, which take turns. Prompts are random
ids, on which latency does not depend. Writes `latency.json` and `latency.md`; targets that are measured stay so when
the same command goes on.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from jsonargparse import CLI
from rich.console import Console
from rich.markdown import Markdown
from tqdm import tqdm

from shape.errors import ConfigError, exit_on_error
from shape.evaluation.environment import Environment
from shape.evaluation.journal import Journal
from shape.evaluation.markdown import markdown, show
from shape.generation.decoder import ShapeDecoder
from shape.generation.stats import quantile
from shape.generation.streams import Arrivals
from shape.target.loading import default_device, of_target, recorded
from shape.target.model import Target, announce
from shape.target.options import PlacedOptions


@dataclass
class LatencyOptions(PlacedOptions):
    """What to measure.

    Args:
        output: folder for latency.json and latency.md.
        targets: paths, hub ids or bundled names, of any size.
        contexts: tokens of the prompt; what a target has no positions for is left out.
        new_tokens: of each answer, which no end token stops.
        repeats: answers per context and method.
        dtype: of the targets; default: each checkpoint's own.
        seed: of the prompts.
        label: heading of the table.
    """

    output: str = "latency-results"
    targets: list[str] = field(default_factory=lambda: ["quickstart-target"])
    contexts: list[int] = field(default_factory=lambda: [64, 128, 256, 384])
    new_tokens: int = 64
    repeats: int = 5
    dtype: str | None = None
    seed: int = 0
    label: str = ""


@dataclass(frozen=True)
class Latency:
    """One method at one context; milliseconds.

    Attributes:
        first: median time to the first token, tokenisation excluded.
        between: median time between tokens. late: its 95 % quantile.
    """

    target: str
    parameters: int
    dtype: str
    context: int
    method: str
    first: float
    between: float
    late: float


def measure(target: Target, contexts: Sequence[int], new_tokens: int, repeats: int, seed: int) -> list[Latency]:
    """Of one target, at those of the contexts that it has positions for."""
    decoder = ShapeDecoder(target)
    methods: dict[str, Callable[..., Any]] = {"transformers": target.model.generate, "autoregressive": decoder.generate}
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    generator = torch.Generator().manual_seed(seed)
    room = (target.max_positions or max(contexts) + new_tokens) - new_tokens
    found = []
    for context in (length for length in contexts if length <= room):
        first: dict[str, list[float]] = {name: [] for name in methods}
        gaps: dict[str, list[float]] = {name: [] for name in methods}
        for repeat in range(repeats + 1):
            ids = torch.randint(target.vocab_size, (1, context), generator=generator).to(target.device)
            for name in list(methods) if repeat % 2 else reversed(methods):
                arrivals, started = Arrivals(), perf_counter()
                methods[name](ids, attention_mask=torch.ones_like(ids), streamer=arrivals, **options)
                if repeat > 0:  # the first one warms up
                    first[name].append(arrivals.times[1] - started)
                    gaps[name] += arrivals.gaps
        found += [
            Latency(
                Path(target.name).name,
                target.model.num_parameters(),
                target.precision,
                context,
                name,
                1e3 * quantile(first[name], 0.5),
                1e3 * quantile(gaps[name], 0.5),
                1e3 * quantile(gaps[name], 0.95),
            )
            for name in methods
        ]
    return found


def rows(found: Sequence[Latency]) -> tuple[list[str], list[list[str]]]:
    """Header and cells, smaller targets first."""
    header = ["target", "parameters", "dtype", "context", "method", "TTFT ms", "ITL ms", "ITL ms, p95"]
    return header, [
        [
            one.target,
            f"{one.parameters / 1e6:,.1f}M",
            one.dtype,
            str(one.context),
            one.method,
            *(show(value) for value in (one.first, one.between, one.late)),
        ]
        for one in sorted(found, key=lambda one: one.parameters)
    ]


def note(options: dict[str, Any]) -> str:
    """What was measured."""
    return (
        f"Plain decoding, one row, greedy: time to the first token (TTFT, median of {options['repeats']} answers) and "
        f"between tokens (ITL, median and 95 % quantile over {options['new_tokens']} tokens each); plain is our loop "
        "without a drafter."
    )


def run(options: LatencyOptions) -> list[Latency]:
    """Measures, and writes latency.json and latency.md."""
    if min(options.new_tokens, options.repeats) < 1 or min(options.contexts, default=0) < 1 or not options.targets:
        raise ConfigError("targets and contexts need one entry at least, new_tokens, repeats and contexts at least 1")
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    place = str(of_target(options).get("device_map", default_device()))
    on_gpu = not place.startswith("cpu") and torch.cuda.is_available()
    environment = Environment.capture(torch.device("cuda" if on_gpu else "cpu"))
    journal = Journal(folder / "records.jsonl", {**recorded(options), **environment.machine()})
    finished: dict[str, list[Latency]] = {
        record["target"]: [Latency(**one) for one in record["found"]] for record in journal.records
    }
    for name in tqdm(options.targets, desc="latency", unit="target"):
        if name not in finished:
            target = Target.load(name, dtype=options.dtype, **of_target(options))
            announce(target)
            finished[name] = measure(target, options.contexts, options.new_tokens, options.repeats, options.seed)
            journal.append({"target": name, "found": [asdict(one) for one in finished[name]]})
    found = [one for name in options.targets for one in finished[name]]
    if not found:
        raise ConfigError(f"no target has positions for contexts {options.contexts}; give shorter ones")
    record = {
        "options": recorded(options),
        "environment": asdict(environment),
        "latencies": [asdict(one) for one in found],
    }
    (folder / "latency.json").write_text(json.dumps(record, indent=1) + "\n")
    title = options.label or "Latency of plain decoding"
    text = [f"### {title}", markdown(*rows(found)), note(record["options"]), environment.line()]  # type: ignore[arg-type]
    (folder / "latency.md").write_text("\n\n".join(text) + "\n")
    assert journal.path is not None
    journal.path.unlink()
    return found


def main(options: LatencyOptions) -> None:
    with exit_on_error():
        Console().print(Markdown(markdown(*rows(run(options)))))


if __name__ == "__main__":
    main(CLI(LatencyOptions, as_positional=False))
