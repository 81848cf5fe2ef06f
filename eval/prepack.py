"""What prepacked weights do for forwards over a few tokens on this CPU: t(n) with them and without.

    python eval/prepack.py --output eval/results/prepack

Beside the bundled target, random Llamas with the widths of Qwen2.5-0.5B and Llama-3.2-1B, of few layers each. A forward
is bare: behind 128 cached tokens, masks at hand, with logits. All sizes are run in turn, with prepacked weights and
without, one round after the other; what counts is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig

from shape.evaluation.cells import markdown, show
from shape.evaluation.efficiency import bare_seconds
from shape.evaluation.environment import Environment
from shape.stats import Step
from shape.target import Target
from shape.verification.forward import probe

SIZES = (1, 4, 8, 13, 16, 32, 64)
CONTEXT = 128
WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
SHAPES = {"0.5B, 4 layers": (896, 4864, 14, 2, 4), "1B, 2 layers": (2048, 8192, 32, 8, 2)}


def load(name: str, dtype: str, prepacked: bool) -> Target:
    if name not in SHAPES:
        return Target.load(name, dtype=dtype, prepacked=prepacked)
    torch.manual_seed(0)
    widths = dict(zip(WIDTHS, SHAPES[name], strict=True))
    config = LlamaConfig(**widths, vocab_size=32_000, max_position_embeddings=2048)
    return Target.load(AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)), prepacked=prepacked)


def measure(name: str, dtype: str, rounds: int, bar: tqdm) -> list[dict[str, object]]:
    """A row for prepacked weights and one without, of milliseconds by size."""
    targets = {prepacked: load(name, dtype, prepacked) for prepacked in (False, True)}
    supports = {prepacked: probe(target) for prepacked, target in targets.items()}
    times: dict[tuple[bool, int], list[float]] = {(prepacked, size): [] for prepacked in targets for size in SIZES}
    for turn in range(rounds + 1):  # the first warms up
        for prepacked, size in times:
            step = Step([0], [CONTEXT], size, 0, 0.0, 0.0, 0.0)
            seconds, _ = bare_seconds(targets[prepacked], supports[prepacked], None, [step])
            if turn:
                times[prepacked, size].append(1e3 * seconds)
        bar.update()
    return [
        {
            "target": name,
            "dtype": dtype,
            "prepacked": prepacked,
            "ms": {size: median(times[prepacked, size]) for size in SIZES},
        }
        for prepacked in targets
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("prepack-results"))
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    names, dtypes, found = ["quickstart-target", *SHAPES], ("float32", "bfloat16"), []
    with tqdm(total=len(names) * len(dtypes) * (args.rounds + 1)) as bar:
        for name in names:
            for dtype in dtypes:
                found += measure(name, dtype, args.rounds, bar)
    environment = Environment.capture(torch.device("cpu"))
    head = ["target", "dtype", "prepacked", *(f"t({size}) ms" for size in SIZES), "t(13) / t(1)"]
    rows = [
        [one["target"], one["dtype"], "yes" if one["prepacked"] else "no", *(show(ms) for ms in one["ms"].values()),
         show(one["ms"][13] / one["ms"][1], unit="x")]
        for one in found
    ]  # fmt: skip
    note = (
        f"Bare forwards over n tokens behind {CONTEXT}, median of {args.rounds}; all but the first are random Llamas."
    )
    args.output.mkdir(parents=True, exist_ok=True)
    record = {"rounds": args.rounds, "environment": asdict(environment), "rows": found}
    (args.output / "prepack.json").write_text(json.dumps(record, indent=1))
    text = "\n\n".join(["### Forwards with prepacked weights", markdown(head, rows), note, environment.line()])
    (args.output / "prepack.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
