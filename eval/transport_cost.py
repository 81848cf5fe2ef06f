"""What refinement costs, in drafting and in training, over the same predictor without it.

    python -m eval.transport_cost --output eval/results/transport-cost

Time does not depend on what is learned: every variant is the bundled predictor with a refinement of untrained weights
put into it. It drafts the same tree for the same prompts, variants in rotating order; shares are of the step without
refinement. Training is that predictor's own step, in as many portions as the quickstart's, on random states with every
position supervised, variants in rotating order too.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from eval import commands
from shape.drafters import TrainedDrafter
from shape.errors import ConfigError
from shape.evaluation.markdown import DASH, markdown, show
from shape.evaluation.prompts import chosen_prompts
from shape.evaluation.runner import rotated
from shape.features.trainer import TrainerOptions
from shape.generation.decoder import ShapeDecoder
from shape.generation.stats import Step
from shape.networks.config import ShapeConfig
from shape.networks.shape import ShapePredictor
from shape.networks.teacher_forcing import Texts
from shape.target.loading import recorded
from shape.target.model import Target
from shape.training.batches import Batch
from shape.training.module import ShapeModule
from shape.training.options import Losses, TrainingOptions

Variant = tuple[str, int | None]  # a refinement, and d of its reduced space
NONE = "none"
KINDS: dict[str, dict[str, Any]] = {
    "affine": {"refinement": "affine"},
    "column last": {"refinement": "sinkhorn", "refinement_last_update": "column"},
    "row last": {"refinement": "sinkhorn", "refinement_last_update": "row"},
    "barycentric": {"refinement": "sinkhorn", "refinement_readout": "barycentric"},
    "learned share": {"refinement": "sinkhorn", "refinement_alpha_learned": True},
}


@dataclass
class CostOptions(commands.OfPredictor):
    """What to measure, of a predictor with parallel steps.

    Args:
        output: folder for cost.json and cost.md.
        kinds: of refinement, by name.
        widths: d of the reduced space.
        iterations: of Sinkhorn.
        dtype: of the target while drafting.
        limit: prompts of the bundled bench split, evenly chosen.
        max_new_tokens: longest answer.
        rounds: training steps of every variant.
        batch_size: positions in one.
        portions: that it is computed in.
        label: heading of the table.
    """

    output: str = "transport-cost"
    kinds: list[str] = field(default_factory=lambda: list(KINDS))
    widths: list[int] = field(default_factory=lambda: [32, 64, 128, 256])
    iterations: int = 10
    dtype: str = "bfloat16"
    limit: int = 4
    max_new_tokens: int = 48
    rounds: int = 6
    batch_size: int = 1024
    portions: int = 2
    label: str = "What refinement costs"


@dataclass(frozen=True)
class Line:
    """One variant; times are medians, in milliseconds.

    Attributes:
        draft: of a step's draft. step: that step as a whole.
        training: a step of the optimiser.
    """

    kind: str
    width: int | None
    draft: float
    step: float
    training: float


def variants(options: CostOptions) -> dict[Variant, dict[str, Any]]:
    if unknown := [kind for kind in options.kinds if kind not in KINDS]:
        raise ConfigError(f"there is no refinement {unknown[0]!r} here; choose from {', '.join(KINDS)}")
    found: dict[Variant, dict[str, Any]] = {(NONE, None): {"refinement": "none"}}
    for kind in options.kinds:
        for width in options.widths:
            sizes = {"refinement_dim": width, "refinement_iterations": options.iterations}
            found[kind, width] = {**KINDS[kind], **sizes}
    return found


def refined(predictor: ShapePredictor, changes: dict[str, Any]) -> ShapePredictor:
    """The same with another refinement, of untrained weights."""
    config = ShapeConfig.from_dict({**predictor.config.to_dict(), **changes})
    torch.manual_seed(0)
    other = ShapePredictor(config).to(predictor.dtype)  # type: ignore[arg-type]
    known = {name: weight for name, weight in predictor.state_dict().items() if not name.startswith("refinement.")}
    other.load_state_dict(known, strict=False)
    other.draft_vocabulary = predictor.draft_vocabulary
    return other


def drafting(options: CostOptions) -> tuple[dict[Variant, tuple[float, float]], Target, ShapePredictor]:
    """Milliseconds of a draft and of a step, the target and the predictor without refinement."""
    first = ShapeDecoder.from_pretrained(
        options.predictor, target=options.target, dtype=options.dtype, device_map="cpu", fall_back=False
    )
    drafter, target = first.drafter, first.target
    if not isinstance(drafter, TrainedDrafter) or not isinstance(drafter.predictor, ShapePredictor):
        raise ConfigError(f"{options.predictor} is no SHAPE predictor; give the folder of one")
    decoders = {}
    for key, changes in variants(options).items():
        network = refined(drafter.predictor, changes).eval().requires_grad_(False)
        decoders[key] = ShapeDecoder(target, TrainedDrafter(network, drafter.tree), fall_back=False)
    prompts, _ = chosen_prompts("bench", options.limit)
    contexts = [target.encode(prompt.opening, prompt.template) for prompt in prompts]
    steps: dict[Variant, list[Step]] = {key: [] for key in decoders}
    for turn, context in enumerate(tqdm([contexts[0], *contexts], desc="drafting")):
        for key in rotated(list(decoders), turn):
            out = decoders[key].generate(
                context, do_sample=False, max_new_tokens=options.max_new_tokens, return_dict_in_generate=True
            )
            if turn:  # the first warms up
                steps[key] += out.stats.steps
    found = {
        key: (1e3 * median(one.draft for one in own), 1e3 * median(one.seconds for one in own))
        for key, own in steps.items()
    }
    return found, target, drafter.predictor


def training(options: CostOptions, target: Target, predictor: ShapePredictor) -> dict[Variant, float]:
    """Milliseconds of a step of the optimiser."""
    config, rows = predictor.config, options.batch_size // options.portions
    length = config.window + config.num_steps
    texts = Texts(
        torch.randn(rows, length, config.feature_size, dtype=target.dtype),
        torch.randint(target.vocab_size, (rows, length + 1)),
        torch.ones(rows, length + 1, dtype=torch.bool),
        torch.full((rows, 1), config.window),
    )
    followers = torch.full((rows,), config.num_steps)  # every step is supervised
    batch = Batch(0, 0, 1, torch.zeros(rows, dtype=torch.int64), followers, texts)
    mixed = TrainerOptions(accelerator="cpu").chosen_precision() == "bf16-mixed"

    def made(changes: dict[str, Any]) -> tuple[ShapeModule, torch.optim.Optimizer]:
        losses = Losses(soft_cross_entropy=1.0, smooth_l1=0.5, step_decay=0.8)
        network = refined(predictor, changes).float().train()
        module = ShapeModule(network, target, losses, TrainingOptions(steps=1), log_every=10**9)
        module.log = lambda *_, **__: None  # type: ignore[method-assign,assignment]
        return module, torch.optim.AdamW(module.parameter_groups(), fused=True)

    def seconds(module: ShapeModule, optimizer: torch.optim.Optimizer) -> float:
        start = perf_counter()
        for _ in range(options.portions):
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                loss = module.training_step(batch, 0)
            loss.backward()
        nn.utils.clip_grad_norm_(module.predictor.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return perf_counter() - start

    modules = {key: made(changes) for key, changes in variants(options).items()}
    times: dict[Variant, list[float]] = {key: [] for key in modules}
    for turn in tqdm(range(options.rounds + 1), desc="training"):
        for key in rotated(list(modules), turn):
            took = seconds(*modules[key])
            if turn:
                times[key].append(took)
    return {key: 1e3 * median(own) for key, own in times.items()}


def run(options: CostOptions) -> None:
    wanted = variants(options)  # refused before anything is loaded
    drafts, target, predictor = drafting(options)
    steps = training(options, target, predictor)
    lines = [Line(*key, *drafts[key], steps[key]) for key in wanted]
    plain, cells = lines[0], []
    for one in lines:
        more = one is not plain
        cells.append(
            [
                one.kind,
                show(one.width, "d"),
                *map(show, (one.draft, one.step)),
                f"{(one.draft - plain.draft) / plain.step:.1%}" if more else DASH,
                show(1e3 * options.batch_size / one.training, ",.0f"),
                f"{one.training / plain.training - 1:.1%}" if more else DASH,
            ]
        )
    header = ["refinement", "d", "draft ms", "step ms", "of a step", "positions/s in training", "of training time"]
    note = (
        f"{options.iterations} iterations. {options.limit} prompts, at most {options.max_new_tokens} new tokens, "
        "greedy, batch 1; medians over steps. Of a step: how much longer the draft is than without refinement, over "
        f"the step without it. Training: medians of {options.rounds} steps of {options.batch_size:,} positions in "
        f"{options.portions} portions."
    )
    record = {"options": recorded(options), "lines": [asdict(one) for one in lines]}
    parts = [f"### {options.label}", markdown(header, cells), note]
    print(commands.write_results(Path(options.output), "cost", record, *parts))


main = commands.program(run, CostOptions)


if __name__ == "__main__":
    main()
