"""What one call per draft saves of a step on this CPU: the predictor's forward as one program of kernels
(`shape.networks.single`), and layer by layer.

    python -m eval.loops --output eval/results/loops/shipped
    python -m eval.loops --target T --predictor DIR --prompts FILE --output eval/results/loops/NAME

Every prompt is answered both ways, autoregressively and with drafts, in rotating order; steps of one kind are compared
by their medians.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from tqdm.auto import tqdm

from eval import commands
from shape.drafters import TrainedDrafter
from shape.errors import ConfigError
from shape.evaluation.markdown import markdown, show
from shape.evaluation.prompts import chosen_prompts
from shape.evaluation.runner import rotated
from shape.evaluation.speed import uncollected
from shape.generation.decoder import ShapeDecoder
from shape.generation.stats import Step
from shape.target.loading import recorded

WAYS = ("kernels", "loops")


@dataclass
class LoopsOptions(commands.OfPredictor):
    """What to measure.

    Args:
        output: folder for loops.json and loops.md.
        prompts: JSON-lines file of prompts; default: the bundled bench split.
        limit: prompts, evenly chosen.
        max_new_tokens: longest answer.
        dtype: of the target.
        label: heading of the table.
    """

    output: str = "loops-results"
    prompts: str | None = None
    limit: int = 16
    max_new_tokens: int = 64
    dtype: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])
    label: str = "Steps with compiled loops and without"


@dataclass(frozen=True)
class Line:
    """One way of decoding: milliseconds of the parts of its steps, medians.

    Attributes:
        drafter: "none" is autoregressive decoding.
        share: of all steps' time that went into drafts.
        length: acceptance length.
    """

    dtype: str
    drafter: str
    way: str
    step: float
    draft: float
    verify: float
    share: float
    length: float


def without_loops(decoder: ShapeDecoder) -> None:
    """Leave a decoder that has decoded once to matrix kernels."""
    if isinstance(decoder.drafter, TrainedDrafter):
        decoder.drafter.single = None


def measure(options: LoopsOptions, dtype: str) -> list[Line]:
    decoders: dict[tuple[str, str], ShapeDecoder] = {}
    for way in WAYS:
        made = ShapeDecoder.from_pretrained(
            options.predictor, target=options.target, dtype=dtype, device_map="cpu", fall_back=False
        )
        if not isinstance(made.drafter, TrainedDrafter):
            raise ConfigError(f"{options.predictor} is no trained predictor; give the folder of one")
        decoders[made.drafter.name, way] = made
        decoders["none", way] = ShapeDecoder(made.target, None, fall_back=False)
    target = made.target
    prompts, _ = chosen_prompts(options.prompts, options.limit)
    contexts = [target.encode(prompt.opening, prompt.template) for prompt in prompts]
    for (_, way), decoder in decoders.items():
        decoder.generate(contexts[0], do_sample=False, max_new_tokens=options.max_new_tokens)
        if way == "kernels":
            without_loops(decoder)
    steps: dict[tuple[str, str], list[Step]] = {key: [] for key in decoders}
    emitted = dict.fromkeys(decoders, 0)
    with uncollected():
        for turn, context in enumerate(tqdm(contexts, desc=dtype)):
            for key in rotated(list(decoders), turn):
                out = decoders[key].generate(
                    context, do_sample=False, max_new_tokens=options.max_new_tokens, return_dict_in_generate=True
                )
                steps[key] += out.stats.steps
                emitted[key] += out.stats.emitted

    def line(drafter: str, way: str) -> Line:
        own = steps[drafter, way]
        step, draft, verify = (
            1e3 * median(getattr(one, part) for one in own) for part in ("seconds", "draft", "verify")
        )
        share = sum(one.draft for one in own) / sum(one.seconds for one in own)
        return Line(dtype, drafter, way, step, draft, verify, share, emitted[drafter, way] / len(own))

    return sorted((line(*key) for key in decoders), key=lambda one: one.drafter != "none")


def run(options: LoopsOptions) -> None:
    found = [line for dtype in options.dtype for line in measure(options, dtype)]
    cells = [
        [
            one.dtype,
            one.drafter,
            one.way,
            *map(show, (one.step, one.draft, one.verify)),
            f"{one.share:.0%}",
            show(one.length),
        ]
        for one in found
    ]
    note = (
        f"{options.limit} prompts, at most {options.max_new_tokens} new tokens, greedy, batch 1. Milliseconds of "
        "steps, drafts and verification are medians over steps; draft share is of all steps' time."
    )
    table = markdown(
        ["dtype", "drafter", "way", "step ms", "draft ms", "verify ms", "draft share", "acceptance length"], cells
    )
    record = {"options": recorded(options), "lines": [asdict(one) for one in found]}
    parts = [f"### {options.label}", table, note]
    print(commands.write_results(Path(options.output), "loops", record, *parts))


main = commands.program(run, LoopsOptions)


if __name__ == "__main__":
    main()
