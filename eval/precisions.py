"""What weights in fewer bits cost and give on this CPU (``shape.target.quantize``).

    python -m eval.precisions --output eval/results/precisions

First, bare forwards over 1 to 32 tokens behind 128, with logits, in float32, bfloat16 (both prepacked), int8 and int4
(with states in bfloat16): the bundled target and random Llamas of 135M, 0.5B and 1.2B parameters. All precisions of a
size are run in turn, round after round; what counts is the median over rounds. The largest size takes 18 GB of memory
in all precisions; --sizes and --precisions choose some.

Second, what the bundled target then answers, greedily: how many answers are those of the same dtype without
quantisation, and what the predictor of the unquantised target still does for it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean

import torch
from tqdm.auto import tqdm

from eval import commands
from eval.forwards import forward_ms
from eval.llamas import SIZES, Widths, random_llama
from shape.errors import ConfigError
from shape.evaluation.markdown import markdown, share, show
from shape.evaluation.prompts import chosen_prompts
from shape.evaluation.runner import rotated
from shape.generation.decoder import ShapeDecoder
from shape.generation.engine import ShapeOutput
from shape.target.model import Target
from shape.target.quantize import Quantization, quantize_model

BUNDLED = "12.6M"
SHAPES: dict[str, Widths | None] = {
    BUNDLED: None,  # the bundled target
    **SIZES,
}
PRECISIONS: dict[str, tuple[str, Quantization | None]] = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8": ("bfloat16", "int8"),
    "int4": ("bfloat16", "int4"),
}
TOKENS, BEHIND = (1, 4, 8, 13, 32), 128
# (dtype, weights) of the answers that are compared; the first of a dtype is what the others are compared with.
ANSWERED: tuple[tuple[str, Quantization | None], ...] = (
    ("float32", None), ("float32", "int8"), ("float32", "int4"),
    ("bfloat16", None), ("bfloat16", "int8"), ("bfloat16", "int4"),
)  # fmt: skip


@dataclass
class PrecisionsOptions:
    """What to measure.

    Args:
        output: folder for precisions.json and precisions.md.
        sizes: some of 12.6M, 135M, 0.5B and 1.2B.
        precisions: some of float32, bfloat16, int8 and int4.
        rounds: of all precisions and numbers of tokens, of which the median counts.
        answers: to prompts of the bundled bench split, for the second table; 0 leaves it out.
        max_new_tokens: of an answer.
    """

    output: str = "precisions-results"
    sizes: list[str] = field(default_factory=lambda: list(SHAPES))
    precisions: list[str] = field(default_factory=lambda: list(PRECISIONS))
    rounds: int = 9
    answers: int = 24
    max_new_tokens: int = 96


@dataclass(frozen=True)
class Forwards:
    """Of one size in one precision: milliseconds by number of tokens."""

    size: str
    precision: str
    ms: dict[int, float]


@dataclass(frozen=True)
class Answers:
    """Of the bundled target in one precision.

    Attributes:
        dtype: of states.
        weights: int8, int4 or the same.
        equal: answers that are those of the unquantised target of this dtype, of `count`.
        common: share of an answer's tokens before the first that differs, in the mean.
        drafted_equal: drafted answers that are those of plain decoding with the same weights.
        acceptance_length: with the shipped predictor.
        ms_per_token: of plain decoding, prefill excluded.
        speedup: of the shipped predictor over plain decoding with the same weights.
    """

    dtype: str
    weights: str
    count: int
    equal: int
    common: float
    drafted_equal: int
    acceptance_length: float
    ms_per_token: float
    speedup: float


def load(size: str, precision: str) -> ShapeDecoder:
    dtype, weights = PRECISIONS[precision]
    widths = SHAPES[size]
    if widths is None:
        return ShapeDecoder(
            Target.load("quickstart-target", dtype=dtype, device_map="cpu", prepacked=weights is None, quantize=weights)
        )
    target = random_llama(widths, getattr(torch, dtype), prepacked=weights is None)
    if weights is not None:
        quantize_model(target.model, weights)
        target = Target(target.model)
    return ShapeDecoder(target)


def measure(size: str, precisions: Sequence[str], rounds: int) -> list[Forwards]:
    decoders = {name: load(size, name) for name in precisions}
    found = forward_ms(decoders, [(tokens, BEHIND) for tokens in TOKENS], rounds)
    return [Forwards(size, name, dict(zip(TOKENS, ms, strict=True))) for name, ms in found.items()]


def answer(options: PrecisionsOptions) -> list[Answers]:
    prompts, _ = chosen_prompts(None, options.answers)
    found: list[Answers] = []
    unquantised: dict[str, list[list[int]]] = {}
    for dtype, weights in tqdm(ANSWERED, desc="answers"):
        drafted = ShapeDecoder.from_pretrained("quickstart-shape", dtype=dtype, device_map="cpu", quantize=weights)
        plain = ShapeDecoder(drafted.target)
        outputs: list[list[ShapeOutput]] = [[], []]
        lengths: list[int] = []
        for number, prompt in enumerate([prompts[0], *prompts]):  # the first one warms up
            ids = drafted.target.encode(prompt.opening)
            for decoder, kept in rotated([(plain, outputs[0]), (drafted, outputs[1])], number):
                out = decoder.generate(
                    ids, max_new_tokens=options.max_new_tokens, do_sample=False, return_dict_in_generate=True
                )
                assert isinstance(out, ShapeOutput)
                if number:
                    kept.append(out)
            lengths += [ids.shape[1]] if number else []
        answers = [out.sequences[0].tolist() for out in outputs[0]]
        theirs = unquantised.setdefault(dtype, answers)
        slow, fast = (sum(out.stats.decode_seconds for out in kept) / emitted(kept) for kept in outputs)
        found.append(
            Answers(
                dtype,
                weights or "the same",
                len(answers),
                equal=sum(mine == other for mine, other in zip(answers, theirs, strict=True)),
                common=mean(map(in_common, answers, theirs, lengths)),
                drafted_equal=sum(torch.equal(a.sequences, b.sequences) for a, b in zip(*outputs, strict=True)),
                acceptance_length=emitted(outputs[1]) / sum(out.stats.forwards for out in outputs[1]),
                ms_per_token=1e3 * slow,
                speedup=slow / fast,
            )
        )
    return found


def emitted(outputs: Sequence[ShapeOutput]) -> int:
    return sum(out.stats.emitted for out in outputs)


def in_common(mine: list[int], other: list[int], begin: int) -> float:
    """Share of the tokens from `begin` on, of the longer of both, that come before the first that differs."""
    same = next((at for at, pair in enumerate(zip(mine, other, strict=False)) if pair[0] != pair[1]), None)
    longest, shortest = max(len(mine), len(other)), min(len(mine), len(other))
    return ((shortest if same is None else same) - begin) / (longest - begin)


def run(options: PrecisionsOptions) -> None:
    for given, known in ((options.sizes, SHAPES), (options.precisions, PRECISIONS)):
        if unknown := sorted(set(given) - known.keys()):
            raise ConfigError(f"{unknown[0]} is not measured; give some of {', '.join(known)}")
    forwards = [one for size in tqdm(options.sizes) for one in measure(size, options.precisions, options.rounds)]
    answers = answer(options) if options.answers else []
    lines = [
        [one.size, one.precision, *(show(one.ms[tokens]) for tokens in TOKENS),
         show(one.ms[13] / one.ms[1], unit="x")]
        for one in forwards
    ]  # fmt: skip
    parts = [
        "### Forwards by precision",
        markdown(["parameters", "precision", *(f"{tokens} tokens" for tokens in TOKENS), "13 against 1"], lines),
        f"Milliseconds of bare forwards over so many tokens behind {BEHIND}, median of {options.rounds}; int8 and int4 "
        "have states in bfloat16; all targets but the first are random Llamas.",
    ]
    if answers:
        header = ["states", "weights", "equal answers", "tokens in common", "drafted = plain", "acceptance length",
                  "ms per plain token", "speed-up"]  # fmt: skip
        lines = [
            [one.dtype, one.weights, share(one.equal, one.count), show(one.common, ".0%"),
             share(one.drafted_equal, one.count), show(one.acceptance_length), show(one.ms_per_token),
             show(one.speedup, unit="x")]
            for one in answers
        ]  # fmt: skip
        parts += [
            "### Answers by precision",
            markdown(header, lines),
            f"Greedy answers of the bundled target to {options.answers} prompts, at most {options.max_new_tokens} "
            "tokens; equal to those of the same states with weights as they are; tokens in common: before the first "
            "one that differs. Drafted is by the shipped predictor; its speed-up is over plain decoding of the same "
            "weights.",
        ]
    record = {
        "options": asdict(options),
        "forwards": [asdict(one) for one in forwards],
        "answers": [asdict(one) for one in answers],
    }
    print(commands.write_results(Path(options.output), "precisions", record, *parts))


main = commands.program(run, PrecisionsOptions)


if __name__ == "__main__":
    main()
