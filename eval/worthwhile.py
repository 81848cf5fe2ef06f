"""What it brings to verify of a draft only what is worth its time, beside whole drafts, with pauses in both cases.

    python -m eval.worthwhile --output eval/results/worthwhile

Decoding as it is (`shape.generation.control`) and the same with every draft verified whole, in turns on the same
prompts: by suite, temperature and batch size. For CPUs, since elsewhere drafts are always verified whole. Writes
`worthwhile.json` and `worthwhile.md`; on two idle cores it takes two minutes.
"""

from copy import copy
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from eval import commands
from shape.errors import ConfigError
from shape.evaluation.environment import Environment
from shape.evaluation.markdown import DASH, markdown
from shape.evaluation.prompts import SUITES, chosen_prompts
from shape.evaluation.results import AUTOREGRESSIVE, SHORT
from shape.evaluation.speed import SpeedSetting, measure
from shape.generation.decoder import ShapeDecoder

WHOLE, WORTHWHILE = "whole drafts", "what is worth its time"


@dataclass
class WorthwhileOptions(commands.OfPredictor):
    """What to measure.

    Args:
        output: folder for worthwhile.json and worthwhile.md.
        dtype: of the target.
        prompts: suites or files; each by itself.
        temperatures: each by itself.
        batch_sizes: of the first prompts, greedily.
        limit: of prompts, whose first turns are asked.
        max_new_tokens: longest answer.
    """

    output: Path = Path("worthwhile-results")
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
    whole = copy(drafter)
    whole.verified_whole = True
    settings = [(suite, temperature, 1) for suite, temperature in product(options.prompts, options.temperatures)]
    settings += [(options.prompts[0], 0.0, batch) for batch in options.batch_sizes]
    lines: list[list[str]] = []
    record: dict[str, Any] = {}
    environment = Environment.capture(target.device)
    for suite, temperature, batch in settings:
        prompts, source = chosen_prompts(suite, options.limit)
        prompts = [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]
        methods = {AUTOREGRESSIVE: None, WHOLE: whole, WORTHWHILE: drafter}
        setting = SpeedSetting(options.max_new_tokens, temperature, batch=batch)
        found = measure(target, methods, prompts, setting, source=source)
        label = f"{Path(source).stem}, T = {temperature:g}" + (f", batches of {batch}" if batch > 1 else "")
        paired = found.speed_up(WORTHWHILE, WHOLE)
        beside = {WORTHWHILE: paired.text("x")}
        cells = zip(found.methods, found.lines(SHORT), strict=True)
        lines += [[label, *line, beside.get(name, DASH)] for name, line in cells]
        record[label] = {name: asdict(summary) for name, summary in found.summary.items()}
        record[label][WORTHWHILE]["over_whole"] = asdict(paired)
    print(
        commands.write_results(
            options.output,
            "worthwhile",
            {"summaries": record},
            "# Verifying what is worth it",
            f"Target {found.settings['target']} ({found.settings['dtype']}), first turns of {options.limit} prompts, "
            f"at most {options.max_new_tokens} new tokens, taking turns; intervals are over prompts. Both ways pause "
            "where drafting does not pay.",
            markdown(["prompts", "method", *SHORT, "over whole drafts (95 %)"], lines),
            environment=environment,
        )
    )


main = commands.program(run, WorthwhileOptions)


if __name__ == "__main__":
    main()
