"""What a reader waits for without drafts: time to the first token and between tokens (the paper's Table 8).

    python -m eval.latency --targets '[T1,T2]' --contexts '[128,512,2048]' --output latency-results

Autoregressive decoding of one prompt, greedy, by our loop and by transformers' `generate`, which take turns. Prompts
are random ids, on which latency does not depend. Writes `latency.json` and `latency.md`; targets that are measured stay
so when the same command goes on.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eval import commands
from shape.errors import ConfigError
from shape.evaluation.environment import Environment
from shape.evaluation.estimates import quantile
from shape.evaluation.journal import JOURNAL, Journal
from shape.evaluation.markdown import Table, markdown, show
from shape.evaluation.results import AUTOREGRESSIVE
from shape.evaluation.runner import Run, by_decoder, by_transformers, rotated
from shape.generation.decoder import ShapeDecoder
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
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    runners = {
        "transformers": by_transformers(target, **options),
        AUTOREGRESSIVE: by_decoder(ShapeDecoder(target), **options),
    }
    generator = torch.Generator().manual_seed(seed)
    room = (target.max_positions or max(contexts) + new_tokens) - new_tokens
    found = []
    for context in (length for length in contexts if length <= room):
        runs: dict[str, list[Run]] = {name: [] for name in runners}
        for turn in range(repeats + 1):
            ids = torch.randint(target.vocab_size, (1, context), generator=generator)
            for name in rotated(list(runners), turn):
                runs[name].append(runners[name]([ids], [seed]))
        for name, (_, *timed) in runs.items():  # the first one warms up
            gaps = [gap for one in timed for gap in one.gaps]
            found.append(
                Latency(
                    Path(target.name).name,
                    target.model.num_parameters(),
                    target.precision,
                    context,
                    name,
                    1e3 * quantile([one.prefill_seconds for one in timed], 0.5),
                    1e3 * quantile(gaps, 0.5),
                    1e3 * quantile(gaps, 0.95),
                )
            )
    return found


def table(found: Sequence[Latency]) -> Table:
    """Smaller targets first."""
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
        f"Autoregressive decoding, batch size 1, greedy: time to the first token (TTFT, median of {options['repeats']} "
        f"answers) and between tokens (ITL, median and 95 % quantile over {options['new_tokens']} tokens each)."
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
    journal = Journal(folder / JOURNAL, {**recorded(options), **environment.machine()})
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
    record: dict[str, Any] = {
        "options": recorded(options),
        "latencies": [asdict(one) for one in found],
    }
    title = options.label or "Latency of autoregressive decoding"
    parts = [f"### {title}", markdown(*table(found)), note(record["options"])]
    commands.write_results(folder, "latency", record, *parts, environment=environment)
    (folder / JOURNAL).unlink()
    return found


main = commands.program(lambda options: print(markdown(*table(run(options)))), LatencyOptions)


if __name__ == "__main__":
    main()
