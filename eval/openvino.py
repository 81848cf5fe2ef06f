"""Targets in OpenVINO beside torch: tokens per second by precision, plain and drafted, on the same prompts.

    python -m eval.openvino                                  # the quickstart pair, into eval/results/openvino/
    python -m eval.openvino --target T --predictor DIR --name NAME

Every prompt is answered by every backend, precision and method in turn, in rotating order, after a discarded warm-up.
Times are of decoding, without the prefill. It also counts the answers whose tokens are those of the same backend's
plain decoding in the same precision: all of them in float32, others but for near-ties.
"""

import argparse
import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from shape import ShapeDecoder
from shape.evaluation.environment import Environment
from shape.evaluation.estimates import Estimate, Sums, over_prompts, ratio
from shape.evaluation.prompts import chosen_prompts
from shape.evaluation.runner import rotated
from shape.generation.engine import ShapeOutput

RESULTS = Path(__file__).parent / "results" / "openvino"
# Backend, dtype, weights.
PRECISIONS = [
    ("torch", "float32", None),
    ("torch", "bfloat16", None),
    ("openvino", "float32", None),
    ("openvino", "bfloat16", None),
    ("openvino", "bfloat16", "int8"),
    ("openvino", "bfloat16", "int4"),
]
Case = tuple[str, str, str | None, str]


@dataclass(frozen=True)
class Answer(Sums):
    """What one answer took; ``equal`` says whether it is that of plain decoding."""

    tokens: float = 0.0
    seconds: float = 0.0
    forwards: float = 0.0
    answers: float = 0.0
    equal: float = 0.0


def decoders(target: str, predictor: str) -> dict[Case, ShapeDecoder]:
    """Plain and drafted in every precision; both of one loaded target."""
    found: dict[Case, ShapeDecoder] = {}
    for backend, dtype, weights in PRECISIONS:
        given: dict[str, Any] = {} if backend == "torch" else {"backend": backend, "quantize": weights}
        drafted = ShapeDecoder.from_pretrained(target, predictor=predictor, dtype=dtype, **given)
        found[backend, dtype, weights, "plain"] = ShapeDecoder(drafted.target)
        found[backend, dtype, weights, "drafted"] = drafted
    return found


def measure(
    cases: dict[Case, ShapeDecoder], prompts: list[torch.Tensor], max_new_tokens: int, repeats: int
) -> dict[Case, list[Answer]]:
    """Of every case an entry per prompt; the fastest of some repeats counts."""
    for decoder in tqdm(cases.values(), "warm-up"):
        decoder.warm_up()
        decoder.generate(prompts[0], max_new_tokens=max_new_tokens)
    found: dict[Case, list[Answer]] = defaultdict(list)
    for turn, ids in enumerate(tqdm(prompts, "prompts")):
        runs: dict[Case, list[ShapeOutput]] = defaultdict(list)
        for repeat in range(repeats):
            for case in rotated(list(cases), turn + repeat):
                done = cases[case].generate(ids, max_new_tokens=max_new_tokens, return_dict_in_generate=True)
                runs[case].append(done)
        for case, outputs in runs.items():
            plain = runs[(*case[:3], "plain")][0].sequences
            best = min(outputs, key=lambda output: output.stats.decode_seconds)
            equal = sum(torch.equal(output.sequences, plain) for output in outputs) / len(outputs)
            stats = best.stats
            found[case].append(Answer(stats.emitted, stats.decode_seconds, len(stats.steps), 1, equal))
    return found


def table(found: dict[Case, list[Answer]]) -> str:
    """Markdown, a line for every case."""
    head = [
        "backend",
        "computed in",
        "weights",
        "",
        "tokens/s (95 %)",
        "tokens per forward",
        "of torch drafted",
        "equal",
    ]
    lines = [head, ["---"] * len(head)]
    for case, answers in found.items():
        backend, dtype, weights, method = case
        rate = over_prompts(lambda total: ratio(total.tokens, total.seconds), answers)
        base = found.get(("torch", dtype, None, "drafted"), answers)
        gain = over_prompts(
            lambda mine, theirs: ratio(mine.tokens * theirs.seconds, mine.seconds * theirs.tokens), answers, base
        )
        whole = Answer.total(answers)
        length, equal = ratio(whole.tokens, whole.forwards), f"{100 * whole.equal / whole.answers:.0f} %"
        lines.append(
            [backend, dtype, weights or "as computed", method, _rate(rate), f"{length:.2f}", gain.text("x"), equal]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rate(rate: Estimate) -> str:
    if rate.value is None or rate.low is None or rate.high is None:
        return "–" if rate.value is None else f"{rate.value:.0f}"
    return f"{rate.value:.0f} ({rate.low:.0f}–{rate.high:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="quickstart-target")
    parser.add_argument("--predictor", default="quickstart-shape")
    parser.add_argument("--name", default="shipped", help="of the results: NAME.md and NAME.json")
    parser.add_argument("--limit", type=int, default=12, help="prompts, evenly chosen from the bench split")
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs per answer, of which the fastest counts")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    cases = decoders(given.target, given.predictor)
    target = next(iter(cases.values())).target
    chosen, _ = chosen_prompts(None, given.limit)
    prompts = [target.encode(prompt.opening, prompt.template) for prompt in chosen]
    found = measure(cases, prompts, given.max_new_tokens, given.repeats)
    environment = asdict(Environment.capture(target.device))
    told = f"{Path(given.target).name}, {len(prompts)} prompts, {given.max_new_tokens} new tokens, batch 1, greedy"
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / f"{given.name}.md").write_text(f"# OpenVINO beside torch: {told}\n\n{table(found)}\n")
    kept = {" ".join(str(part) for part in case): [asdict(answer) for answer in all_] for case, all_ in found.items()}
    settings = {name: getattr(given, name) for name in ("name", "limit", "max_new_tokens", "repeats")}
    record = {"environment": environment, "settings": settings, "answers": kept}
    (given.output / f"{given.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
