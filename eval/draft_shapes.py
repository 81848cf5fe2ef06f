"""Which shape of draft is fastest here: one predictor, many shapes, measured side by side on validation prompts.

    python eval/draft_shapes.py checkpoints/quickstart [--dtype bfloat16] [--output eval/results/draft-shapes.md]

A deep chain that stops when it becomes unlikely costs little where the target agrees seldom; a tree is accepted
further and costs more per step. Which wins depends on the machine: set what wins as `tree` of the predictor.
Tune on these prompts and not on those that are reported.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from shape import bundled
from shape.data.conversations import evenly
from shape.data.reading import load_prompts
from shape.drafters import TreeShape
from shape.evaluation.methods import Method
from shape.evaluation.speed import measure
from shape.generation.decoder import ShapeDecoder

CHAINS = [TreeShape(width=1, depth=depth, threshold=limit) for depth in (4, 6, 8, 12) for limit in (0.1, 0.2, 0.35)]
TREES = [
    TreeShape(width=2, depth=depth, nodes=nodes, threshold=limit)
    for depth, nodes in ((4, 6), (6, 8), (8, 12))
    for limit in (0.0, 0.1)
]
WIDE = [TreeShape(width=width, depth=4, nodes=nodes) for width, nodes in ((2, 6), (3, 8), (3, 12), (4, 16))]


def name(shape: TreeShape) -> str:
    form = f"chain {shape.depth}" if shape.width == 1 else f"tree {shape.width} x {shape.depth}, {shape.nodes} nodes"
    return form if shape.threshold == 0 else f"{form}, until {shape.threshold:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("predictor")
    parser.add_argument("--target", help="default: the one that the predictor was trained for")
    parser.add_argument("--prompts", type=Path, default=bundled.path("data", "validation.jsonl.gz"))
    parser.add_argument("--limit", type=int, default=24, help="prompts, evenly chosen")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--output", type=Path, help="a Markdown file to append the table to")
    args = parser.parse_args()
    decoder = ShapeDecoder.from_pretrained(args.predictor, target=args.target, dtype=args.dtype)
    target, config = decoder.target, decoder.drafter.predictor.config
    deepest = config.num_steps if config.step_mode == "parallel" else max(shape.depth for shape in CHAINS)
    shapes = [shape for shape in (*CHAINS, *TREES, *WIDE) if shape.depth <= deepest]
    methods: dict[str, Method] = {"transformers": "transformers", "autoregressive": None}
    for shape in shapes:
        methods[name(shape)] = ShapeDecoder.from_pretrained(args.predictor, target=target, tree=shape).drafter
    results = measure(
        target,
        methods,
        evenly(load_prompts(args.prompts), args.limit),
        max_new_tokens=96,
        temperature=args.temperature,
        label=f"Draft shapes of {Path(args.predictor).name}, {args.dtype}, temperature {args.temperature:g}",
        source=args.prompts.name,
    )
    text = results.to_markdown(detail=False)
    print(text)
    if args.output:
        with args.output.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")


if __name__ == "__main__":
    main()
