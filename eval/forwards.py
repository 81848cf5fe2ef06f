"""What forwards over a few tokens cost on this CPU: as transformers runs them, and as decoding does.

    python -m eval.forwards --output eval/results/forwards

Beside the bundled target, random Llamas with the widths of Qwen2.5-0.5B and Llama-3.2-1B, of few layers each. A forward
is bare: behind cached tokens, masks at hand, with logits. One thing after the other is added: prepacked weights
(``shape.target.prepack``), inference mode (``shape.target.inference``), grouped queries
(``shape.verification.attention``), and few calls a layer (``shape.verification.fused``). All ways and sizes are run in
turn, round after round; what counts is the median over rounds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm.auto import tqdm

from eval import commands
from eval.llamas import Widths, random_llama
from shape.evaluation.efficiency import bare_seconds
from shape.evaluation.markdown import markdown, show
from shape.generation.decoder import ShapeDecoder
from shape.generation.stats import Step
from shape.target.model import Target

# Seconds, below which so many forwards are timed in a row: as in decoding, their weights are in the caches then.
_SHORT, _IN_A_ROW = 0.02, 8
# (tokens, tokens before them)
POINTS = (*((size, 128) for size in (1, 4, 8, 13, 16, 32, 64)), (1, 512), (1, 1536), (13, 1536))
WAYS = ("stock", "+ prepacked", "+ inference mode", "+ grouped queries", "+ fused")
SHAPES = {"0.5B, 4 layers": Widths(896, 4864, 14, 2, 4), "1B, 2 layers": Widths(2048, 8192, 32, 8, 2)}


@dataclass
class ForwardsOptions:
    """How often to measure.

    Args:
        output: folder for forwards.json and forwards.md.
        rounds: of all sizes, of which the median counts.
    """

    output: str = "forwards-results"
    rounds: int = 20


@dataclass(frozen=True)
class Line:
    """One way on one target: milliseconds by "SIZE behind CONTEXT"."""

    target: str
    dtype: str
    way: str
    ms: dict[str, float]


def load(name: str, dtype: str, prepacked: bool) -> Target:
    if name in SHAPES:
        return random_llama(SHAPES[name], getattr(torch, dtype), prepacked=prepacked)
    return Target.load(name, dtype=dtype, device_map="cpu", prepacked=prepacked)


def decoders(name: str, dtype: str) -> dict[str, ShapeDecoder]:
    """One for each of the ways."""
    stock, prepacked = (load(name, dtype, prepacked) for prepacked in (False, True))
    found = {way: ShapeDecoder(stock if way == "stock" else prepacked) for way in WAYS}
    for way, decoder in found.items():
        if way in WAYS[:2]:
            decoder.gradientless = torch.no_grad
        if way in WAYS[:3]:
            decoder.support = replace(decoder.support, grouped_queries=False)
        if way != WAYS[-1]:
            decoder.support = replace(decoder.support, fused=None)
    return found


def forward_ms(
    decoders: Mapping[str, ShapeDecoder],
    points: Sequence[tuple[int, int]],
    rounds: int,
    progress: Callable[[], Any] = lambda: None,
) -> dict[str, list[float]]:
    """Milliseconds of bare forwards by decoder and point, (tokens, tokens before them): medians over rounds, in each of
    which all are run in turn.
    """
    times: dict[tuple[str, tuple[int, int]], list[float]] = {(name, at): [] for name in decoders for at in points}
    for turn in range(rounds + 1):  # the first warms up
        for name, (size, context) in times:
            one = Step([0], [context], size, 0, 0.0, 0.0, 0.0)
            seconds, _ = bare_seconds(decoders[name], [one])
            if turn and seconds < _SHORT:
                seconds = bare_seconds(decoders[name], [one] * _IN_A_ROW)[0] / _IN_A_ROW
            if turn:
                times[name, (size, context)].append(1e3 * seconds)
        progress()
    return {name: [median(times[name, at]) for at in points] for name in decoders}


def measure(name: str, dtype: str, rounds: int, bar: tqdm) -> list[Line]:
    names = [f"{size} behind {context}" for size, context in POINTS]
    found = forward_ms(decoders(name, dtype), POINTS, rounds, bar.update)
    return [Line(name, dtype, way, dict(zip(names, ms, strict=True))) for way, ms in found.items()]


def run(options: ForwardsOptions) -> None:
    names, dtypes = ["quickstart-target", *SHAPES], ("float32", "bfloat16")
    found: list[Line] = []
    with tqdm(total=len(names) * len(dtypes) * (options.rounds + 1)) as bar:
        for name in names:
            for dtype in dtypes:
                found += measure(name, dtype, options.rounds, bar)
    cells = [
        [one.target, one.dtype, one.way, *map(show, one.ms.values()),
         show(one.ms["13 behind 128"] / one.ms["1 behind 128"], unit="x")]
        for one in found
    ]  # fmt: skip
    note = (
        f"Milliseconds of bare forwards over so many tokens behind so many in the cache, median of {options.rounds}; "
        "each way has what the ones above it have; all targets but the first are random Llamas."
    )
    record = {"rounds": options.rounds, "rows": [asdict(one) for one in found]}
    table = markdown(["target", "dtype", "way", *found[0].ms, "13 against 1"], cells)
    parts = ["### Forwards over a few tokens", table, note]
    print(commands.write_results(Path(options.output), "forwards", record, *parts))


main = commands.program(run, ForwardsOptions)


if __name__ == "__main__":
    main()
