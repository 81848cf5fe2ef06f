"""Which shape of draft is fastest here: one predictor, many shapes, measured side by side on validation prompts.

    python -m eval.draft_shapes --predictor checkpoints/quickstart --output eval/results/draft-shapes.md

A deep chain that stops when it becomes unlikely costs little where the target agrees seldom; a tree is accepted
further and costs more per step. Which wins depends on the machine: set what wins as `tree` of the predictor.
Tune on these prompts and not on those that are reported.
"""

from copy import copy
from dataclasses import dataclass
from pathlib import Path

from eval import commands
from shape import bundled
from shape.drafters import Drafter, TreeShape
from shape.evaluation.methods import Method
from shape.evaluation.prompts import chosen_prompts
from shape.evaluation.results import AUTOREGRESSIVE
from shape.evaluation.speed import SpeedSetting, measure
from shape.generation.decoder import ShapeDecoder

CHAINS = [TreeShape(width=1, depth=depth, threshold=limit) for depth in (4, 6, 8, 12) for limit in (0.0, 0.1, 0.2)]
TREES = [
    TreeShape(width=2, depth=depth, nodes=nodes, threshold=limit)
    for depth, nodes in ((4, 6), (6, 8), (8, 12), (12, 16))
    for limit in (0.0, 0.1)
]
WIDE = [TreeShape(width=width, depth=4, nodes=nodes) for width, nodes in ((2, 6), (3, 8), (3, 12), (4, 16))]


def shape_name(shape: TreeShape) -> str:
    form = f"chain {shape.depth}" if shape.width == 1 else f"tree {shape.width} x {shape.depth}, {shape.nodes} nodes"
    return form if shape.threshold == 0 else f"{form}, until {shape.threshold:g}"


def shaped(drafter: Drafter, shape: TreeShape) -> Drafter | None:
    """The drafter with another shape of its drafts; None where it cannot have it, or does not reach as deep."""
    network = drafter.predictor
    if network is not None and network.config.step_mode == "parallel" and shape.depth > network.config.num_steps:
        return None
    if (other := drafter.with_tree(shape)) is None and shape == TreeShape(width=1, depth=shape.depth):
        other = copy(drafter)
        other.limit_draft(shape.depth)
    return other


@dataclass
class DraftShapesOptions(commands.OfPredictor):
    """What to measure.

    Args:
        prompts: JSON lines of prompts; default: the bundled validation prompts.
        limit: prompts, evenly chosen.
        dtype: of the target.
        temperature: 0 is greedy.
        output: a Markdown file to append the table to.
    """

    prompts: str | None = None
    limit: int = 24
    dtype: str = "bfloat16"
    temperature: float = 0.0
    output: str | None = None


def run(options: DraftShapesOptions) -> None:
    decoder = ShapeDecoder.from_pretrained(options.predictor, target=options.target, dtype=options.dtype)
    trained, _ = commands.trained(decoder, options.predictor)
    methods: dict[str, Method] = {"transformers": "transformers", AUTOREGRESSIVE: None}
    for shape in (*CHAINS, *TREES, *WIDE):
        if (drafter := shaped(trained, shape)) is not None:
            methods[shape_name(shape)] = drafter
    prompts, source = chosen_prompts(options.prompts or bundled.path("data", "validation.jsonl.gz"), options.limit)
    results = measure(
        decoder.target,
        methods,
        prompts,
        SpeedSetting(max_new_tokens=96, temperature=options.temperature, fall_back=False),
        label=f"Draft shapes of {Path(options.predictor).name}, {options.dtype}, temperature {options.temperature:g}",
        source=source,
    )
    text = results.to_markdown(detail=False)
    print(text)
    if options.output:
        with Path(options.output).open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")


main = commands.program(run, DraftShapesOptions)


if __name__ == "__main__":
    main()
