"""What the choice of a token costs on this CPU, in compiled loops and by transformers.

    python -m eval.choices --output eval/results/choices

Both are given the same logits of one position and choose one token: ours as the rule "match" does at a node, with noise
of its own for every token; transformers as its ``generate`` does, by warpers, softmax and a draw.
"""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from tqdm.auto import tqdm
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eval import commands
from shape.evaluation.markdown import markdown, show
from shape.target.loading import recorded
from shape.verification.noise import sequence_keys
from shape.verification.sampling import Sampler
from shape.verification.tree import root_only
from shape.verification.warping import Warps

SETTINGS: dict[str, list[LogitsProcessor]] = {
    "temperature 0.7": [TemperatureLogitsWarper(0.7)],
    "top-k 50": [TopKLogitsWarper(50)],
    "Llama 3's: temperature 0.6, top-p 0.9": [TemperatureLogitsWarper(0.6), TopPLogitsWarper(0.9)],
    "Qwen3's: temperature 0.7, top-k 20, top-p 0.8": [
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(20),
        TopPLogitsWarper(0.8),
    ],
    "Qwen2.5's: the same behind a repetition penalty of 1.05": [
        RepetitionPenaltyLogitsProcessor(1.05),
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(20),
        TopPLogitsWarper(0.8),
    ],
    "min-p 0.05": [MinPLogitsWarper(0.05)],
}
_TEXT = 200  # tokens that the penalty looks at


@dataclass
class ChoicesOptions:
    """What to measure.

    Args:
        output: folder for choices.json and choices.md.
        vocabularies: numbers of tokens.
        deviation: of the logits, which are normal and random.
        rounds: choices of each kind.
        label: heading of the table.
    """

    output: str = "choices-results"
    vocabularies: list[int] = field(default_factory=lambda: [8192, 32000, 128256, 151936])
    deviation: float = 3.0
    rounds: int = 100
    label: str = "What the choice of a token costs"


@dataclass(frozen=True)
class Line:
    """Medians, in milliseconds."""

    vocabulary: int
    setting: str
    ours: float
    transformers: float


@torch.inference_mode()
def measure(options: ChoicesOptions, vocabulary: int, setting: str) -> Line:
    chain, root = LogitsProcessorList(SETTINGS[setting]), root_only(torch.tensor([0]))
    sampler = Sampler(torch.tensor([1]), 1.0, sequence_keys(0, 1), tuple(chain))
    if Warps.of(chain) is None:  # the text is looked at
        sampler = replace(sampler, warpers=(), processors=(chain,))
    text = torch.randint(vocabulary, (1, _TEXT))
    seconds: tuple[list[float], list[float]] = [], []
    for turn in range(options.rounds + 3):
        logits = (options.deviation * torch.randn(1, 1, vocabulary)).bfloat16()
        sampler.commit(torch.tensor([_TEXT + turn]), text.tolist())
        for which in (0, 1) if turn % 2 else (1, 0):
            began = perf_counter()
            if which:
                scores = chain(text, logits[:, 0].float())  # type: ignore[arg-type]
                torch.multinomial(scores.softmax(-1), 1)
            else:
                sampler.match(logits, root)
            if turn >= 3:  # the first ones warm up
                seconds[which].append(perf_counter() - began)
    return Line(vocabulary, setting, *(1e3 * median(own) for own in seconds))


def run(options: ChoicesOptions) -> None:
    torch.manual_seed(0)
    each = [(vocabulary, setting) for vocabulary in options.vocabularies for setting in SETTINGS]
    found = [measure(options, *one) for one in tqdm(each, desc="choices")]
    cells = []
    for setting in SETTINGS:
        own = [one for one in found if one.setting == setting]
        cells.append([setting, *(f"{show(one.ours)} / {show(one.transformers)}" for one in own)])
    table = markdown(["", *(f"{vocabulary:,} tokens" for vocabulary in options.vocabularies)], cells)
    note = (
        f"Milliseconds of one choice, ours / transformers', medians over {options.rounds} in alternation. Logits are "
        f"random, normal with a deviation of {options.deviation:g}, bfloat16; batch 1."
    )
    record = {"options": recorded(options), "lines": [asdict(one) for one in found]}
    print(commands.write_results(Path(options.output), "choices", record, f"### {options.label}", table, note))


main = commands.program(run, ChoicesOptions)


if __name__ == "__main__":
    main()
