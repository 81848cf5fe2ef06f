"""What it brings to verify of a draft only what is worth its time, beside whole drafts, with pauses in both cases.

    python -m eval.worthwhile --output eval/results/worthwhile

Decoding as it is (`shape.generation.control`) and the same without knowing its drafts' chances, so that they are
verified whole, in turns on the same prompts: by suite, temperature and batch size. For CPUs, since elsewhere drafts are
always verified whole. Writes `worthwhile.json` and `worthwhile.md`; on two idle cores it takes two minutes.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from eval import commands
from shape.drafters.base import Committed, Drafter, Wrapped
from shape.errors import ConfigError
from shape.evaluation.environment import Environment
from shape.evaluation.markdown import markdown
from shape.evaluation.prompts import SUITES, chosen_prompts
from shape.evaluation.results import AUTOREGRESSIVE, SHORT
from shape.evaluation.speed import measure
from shape.generation.decoder import ShapeDecoder
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree

WHOLE, WORTHWHILE = "whole drafts", "what is worth its time"


class Whole(Wrapped):
    """Another drafter, which does not say how likely its nodes are."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.name = f"{inner.name}, whole drafts"

    def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        return replace(self.inner.draft(committed, sampler), joint=None)


@dataclass
class WorthwhileOptions:
    """What to measure.

    Args:
        output: folder for worthwhile.json and worthwhile.md.
        predictor: folder, hub id or bundled name.
        target: path or hub id; default: the predictor's own.
        dtype: of the target.
        prompts: suites or files; each by itself.
        temperatures: each by itself.
        batch_sizes: of the first prompts, greedily.
        limit: of prompts, whose first turns are asked.
        max_new_tokens: longest answer.
    """

    output: Path = Path("worthwhile-results")
    predictor: str = "quickstart-shape"
    target: str | None = None
    dtype: str = "bfloat16"
    prompts: list[str] = field(default_factory=lambda: list(SUITES))
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    batch_sizes: list[int] = field(default_factory=lambda: [2, 4])
    limit: int = 48
    max_new_tokens: int = 96


def run(options: WorthwhileOptions) -> None:
    if not options.prompts or not options.temperatures:
        raise ConfigError("prompts or temperatures are empty; give at least one of each")
    decoder = ShapeDecoder.from_pretrained(
        options.predictor, target=options.target, dtype=options.dtype, device_map="cpu"
    )
    target, drafter = decoder.target, decoder.drafter
    assert drafter is not None
    settings = [(suite, temperature, 1) for suite, temperature in product(options.prompts, options.temperatures)]
    settings += [(options.prompts[0], 0.0, batch) for batch in options.batch_sizes]
    lines: list[list[str]] = []
    record: dict[str, Any] = {}
    environment = Environment.capture(target.device)
    for suite, temperature, batch in settings:
        prompts, source = chosen_prompts(suite, options.limit)
        prompts = [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]
        methods = {AUTOREGRESSIVE: None, WHOLE: Whole(drafter), WORTHWHILE: drafter}
        found = measure(
            target, methods, prompts, max_new_tokens=options.max_new_tokens, temperature=temperature, batch=batch,
            source=source,
        )  # fmt: skip
        label = f"{Path(source).stem}, T = {temperature:g}" + (f", batches of {batch}" if batch > 1 else "")
        lines += [[label, *line] for line in found.lines(SHORT)]
        record[label] = {name: asdict(summary) for name, summary in found.summary.items()}
    print(
        commands.write_results(
            options.output,
            "worthwhile",
            {"environment": asdict(environment), "summaries": record},
            "# Verifying what is worth it",
            f"Target {found.settings['target']} ({found.settings['dtype']}), first turns of {options.limit} prompts, "
            f"at most {options.max_new_tokens} new tokens, taking turns; intervals are over prompts. Both ways pause "
            "where drafting does not pay.",
            markdown(["prompts", "method", *SHORT], lines),
            environment.line(),
        )
    )


def main(arguments: Sequence[str] | None = None) -> None:
    commands.run(run, WorthwhileOptions, arguments)


if __name__ == "__main__":
    main()
