"""What a draft of the default predictor costs beside a step of the target, by its width and what it drafts from.

    python -m eval.default_sizes --output eval/results/sizes

On random Llamas with the sizes of models that people have, and on the bundled target: costs do not depend on what was
learned. Each line is a whole draft (8 deep, 12 nodes) and an autoregressive step in turn, the lower quartile of many,
in time of one thread's own, so that other work on the machine counts little; beside it is the share by weights read,
which is what `shape.training.forecast` says where nothing is measured, and which of the lines the rule
(`shape.networks.sizing`) chooses.
"""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import thread_time

import torch

from eval import commands
from eval.llamas import SIZES, random_llama
from eval.peers.oracle import untrained
from shape.evaluation.markdown import markdown
from shape.generation.decoder import ShapeDecoder
from shape.generation.timing import draft_cost
from shape.target.model import Target
from shape.target.size import Size, size_of
from shape.training.defaults import resolve
from shape.training.forecast import network_size, weights_read
from shape.training.options import TrainOptions

SHAPES = {name: SIZES[name] for name in ("135M", "0.5B")}


@dataclass
class SizesOptions:
    """What to measure.

    Args:
        output: folder for sizes.json and sizes.md.
        repeats: of each draft and step.
        targets: bundled targets, or names of random ones.
    """

    output: str = "sizes-results"
    repeats: int = 15
    targets: list[str] = field(default_factory=lambda: ["quickstart-target", *SHAPES])


@dataclass(frozen=True)
class Line:
    """One network beside a target.

    Attributes:
        width, drafted, parameters: of the network; drafted tokens.
        by_rule: whether the rule chooses it.
        measured, by_weights: a draft over a step of the target, in time and in weights read.
    """

    target: str
    width: int | None
    drafted: int
    parameters: float
    by_rule: bool
    draft_ms: float
    step_ms: float
    measured: float
    by_weights: float

    def cells(self) -> list[str]:
        return [
            self.target,
            f"{self.width:,}",
            f"{self.drafted:,}",
            f"{self.parameters / 1e6:.1f}M",
            *(f"{figure:.2f}" for figure in (self.draft_ms, self.step_ms, self.measured, self.by_weights)),
            "chosen" if self.by_rule else "",
        ]


def candidates(size: Size) -> list[TrainOptions]:
    """Around what the rule chooses, which comes first: narrower and wider, and other draft vocabularies."""
    chosen = resolve(TrainOptions(), size, None)
    found = [chosen]
    for width in (size.hidden_size // 2, size.hidden_size, 2 * size.hidden_size):
        found.append(replace(chosen, predictor=replace(chosen.predictor, intermediate_size=width)))
    for drafted in (2048, None):
        found.append(replace(chosen, predictor=replace(chosen.predictor, draft_vocab_size=drafted)))
    return [each for number, each in enumerate(found) if each not in found[:number]]


def measure(name: str, repeats: int) -> list[Line]:
    if name in SHAPES:
        target = random_llama(SHAPES[name], torch.bfloat16, prepacked=True)
    else:
        target = Target.load(name, dtype="bfloat16")
    size, found = size_of(target.model), list[Line]()
    for options in candidates(size):
        drafter = untrained(target, options, options.tree)
        config = drafter.predictor.config
        draft, step = draft_cost(ShapeDecoder(target, drafter), repeats=repeats, clock=thread_time)
        learned = network_size(options, size)
        found.append(
            Line(
                name,
                config.intermediate_size,
                config.draft_size,
                learned,
                by_rule=not found,
                draft_ms=1e3 * draft,
                step_ms=1e3 * step,
                measured=draft / step,
                by_weights=weights_read(options, size, learned) / size.read,
            )
        )
        print(found[-1], flush=True)
    return found


def run(options: SizesOptions) -> None:
    torch.set_num_threads(1)
    found = [line for name in options.targets for line in measure(name, options.repeats)]
    head = ["target", "width", "drafted from", "parameters", "draft ms", "step ms", "measured", "by weights", "rule"]
    note = (
        "A draft 8 deep of 12 nodes over a step of one token, behind 128 tokens, bfloat16, batch size 1, one thread's "
        f"own time, lower quartile of {options.repeats}; all but the first target are random Llamas. By weights: what "
        "a draft reads over what a step reads."
    )
    record = {"repeats": options.repeats, "rows": [asdict(one) for one in found]}
    table = markdown(head, [one.cells() for one in found])
    parts = ["### What a draft of the default predictor costs", table, note]
    print(commands.write_results(Path(options.output), "sizes", record, *parts))


main = commands.program(run, SizesOptions)


if __name__ == "__main__":
    main()
