"""What forwards over a few tokens cost on this CPU: as transformers runs them, and as decoding does.

    python eval/forwards.py --output eval/results/forwards

Beside the bundled target, random Llamas with the widths of Qwen2.5-0.5B and Llama-3.2-1B, of few layers each. A forward
is bare: behind cached tokens, masks at hand, with logits. One thing after the other is added: prepacked weights
(``shape.target.prepack``), inference mode (``shape.target.inference``), and grouped queries
(``shape.verification.attention``). All ways and sizes are run in turn, round after round; what counts is the median
over rounds.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig

from shape.evaluation.efficiency import bare_seconds
from shape.evaluation.environment import Environment
from shape.evaluation.markdown import markdown, show
from shape.generation.decoder import ShapeDecoder
from shape.generation.stats import Step
from shape.target.model import Target

# (tokens, tokens before them)
POINTS = (*((size, 128) for size in (1, 4, 8, 13, 16, 32, 64)), (1, 512), (1, 1536), (13, 1536))
WAYS = ("stock", "+ prepacked", "+ inference mode", "+ grouped queries")
WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
SHAPES = {"0.5B, 4 layers": (896, 4864, 14, 2, 4), "1B, 2 layers": (2048, 8192, 32, 8, 2)}


def load(name: str, dtype: str, prepacked: bool) -> Target:
    if name not in SHAPES:
        return Target.load(name, dtype=dtype, device_map="cpu", prepacked=prepacked)
    torch.manual_seed(0)
    widths = dict(zip(WIDTHS, SHAPES[name], strict=True))
    config = LlamaConfig(**widths, vocab_size=32_000, max_position_embeddings=2048)
    return Target.load(AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)), prepacked=prepacked)


def decoders(name: str, dtype: str) -> dict[str, ShapeDecoder]:
    """One for each of the ways."""
    stock, prepacked = (load(name, dtype, prepacked) for prepacked in (False, True))
    found = {way: ShapeDecoder(stock if way == "stock" else prepacked) for way in WAYS}
    for way, decoder in found.items():
        if way in WAYS[:2]:
            decoder.gradientless = torch.no_grad
        if way in WAYS[:3]:
            decoder.support = replace(decoder.support, grouped_queries=False)
    return found


def measure(name: str, dtype: str, rounds: int, bar: tqdm) -> list[dict[str, object]]:
    """A row for each way, of milliseconds by size and context."""
    ways = decoders(name, dtype)
    times: dict[tuple[str, tuple[int, int]], list[float]] = {(way, point): [] for way in ways for point in POINTS}
    for turn in range(rounds + 1):  # the first warms up
        for way, (size, context) in times:
            seconds, _ = bare_seconds(ways[way], [Step([0], [context], size, 0, 0.0, 0.0, 0.0)])
            if turn:
                times[way, (size, context)].append(1e3 * seconds)
        bar.update()
    return [
        {
            "target": name,
            "dtype": dtype,
            "way": way,
            "ms": {f"{size} behind {context}": median(times[way, (size, context)]) for size, context in POINTS},
        }
        for way in ways
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("forwards-results"))
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    names, dtypes, found = ["quickstart-target", *SHAPES], ("float32", "bfloat16"), []
    with tqdm(total=len(names) * len(dtypes) * (args.rounds + 1)) as bar:
        for name in names:
            for dtype in dtypes:
                found += measure(name, dtype, args.rounds, bar)
    environment = Environment.capture(torch.device("cpu"))
    head = ["target", "dtype", "way", *found[0]["ms"], "13 against 1"]
    rows = [
        [one["target"], one["dtype"], one["way"], *(show(ms) for ms in one["ms"].values()),
         show(one["ms"]["13 behind 128"] / one["ms"]["1 behind 128"], unit="x")]
        for one in found
    ]  # fmt: skip
    note = (
        f"Milliseconds of bare forwards over so many tokens behind so many in the cache, median of {args.rounds}; each "
        "way has what the ones above it have; all targets but the first are random Llamas."
    )
    args.output.mkdir(parents=True, exist_ok=True)
    record = {"rounds": args.rounds, "environment": asdict(environment), "rows": found}
    (args.output / "forwards.json").write_text(json.dumps(record, indent=1))
    text = "\n\n".join(["### Forwards over a few tokens", markdown(head, rows), note, environment.line()])
    (args.output / "forwards.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
