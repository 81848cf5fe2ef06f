"""Targets in OpenVINO beside torch: tokens per second by precision, plain and drafted, on the same prompts.

    python -m eval.openvino                                  # the quickstart pair, into eval/results/openvino/
    python -m eval.openvino --target T --predictor DIR --name NAME

Every prompt is answered by every backend, precision and method in turn, in rotating order, after a discarded warm-up.
Times are of decoding, without the prefill. It also counts the answers whose tokens are those of the same backend's
plain decoding in the same precision: all of them in float32, others but for near-ties.
"""

from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eval import commands
from eval.commands import Spent
from eval.peers.table import rate_text
from shape import ShapeDecoder
from shape.evaluation.environment import Environment
from shape.evaluation.estimates import over_prompts, ratio, relative_rate
from shape.evaluation.markdown import markdown
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


@dataclass
class OpenVinoOptions:
    """What to measure.

    Args:
        target, predictor: folder, hub id or bundled name.
        name: of the results: NAME.md and NAME.json.
        limit: prompts, evenly chosen from the bench split.
        max_new_tokens: of each answer, at most.
        repeats: timed runs per answer, of which the fastest counts.
        output: folder of the results.
    """

    target: str = "quickstart-target"
    predictor: str = "quickstart-shape"
    name: str = "shipped"
    limit: int = 12
    max_new_tokens: int = 96
    repeats: int = 3
    output: Path = RESULTS


def decoders(target: str, predictor: str) -> dict[Case, ShapeDecoder]:
    """Plain and drafted in every precision; both of one loaded target."""
    found: dict[Case, ShapeDecoder] = {}
    for backend, dtype, weights in PRECISIONS:
        given: dict[str, Any] = (
            {"device_map": "cpu"} if backend == "torch" else {"backend": backend, "quantize": weights}
        )
        drafted = ShapeDecoder.from_pretrained(target, predictor=predictor, dtype=dtype, **given)
        found[backend, dtype, weights, "plain"] = ShapeDecoder(drafted.target)
        found[backend, dtype, weights, "drafted"] = drafted
    return found


def measure(
    cases: dict[Case, ShapeDecoder], prompts: list[torch.Tensor], max_new_tokens: int, repeats: int
) -> dict[Case, list[Spent]]:
    """Of every case an entry per prompt: the fastest of some repeats, and the share of them that answer as plain."""
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
    for decoder in tqdm(cases.values(), "warm-up"):
        decoder.warm_up()
        decoder.generate(prompts[0], **how)
    found: dict[Case, list[Spent]] = defaultdict(list)
    for turn, ids in enumerate(tqdm(prompts, "prompts")):
        runs: dict[Case, list[ShapeOutput]] = defaultdict(list)
        for repeat in range(repeats):
            for case in rotated(list(cases), turn + repeat):
                done = cases[case].generate(ids, **how, return_dict_in_generate=True)
                runs[case].append(done)
        for case, outputs in runs.items():
            plain = runs[(*case[:3], "plain")][0].sequences
            best = min(outputs, key=lambda output: output.stats.decode_seconds)
            equal = sum(torch.equal(output.sequences, plain) for output in outputs) / len(outputs)
            stats = best.stats
            found[case].append(Spent(stats.decode_seconds, stats.emitted, len(stats.steps), equal))
    return found


def table(found: dict[Case, list[Spent]]) -> str:
    """Markdown, a line for every case."""
    head = [
        "backend", "computed in", "weights", "", "tokens/s (95 %)", "tokens per forward", "of torch drafted", "equal"
    ]  # fmt: skip
    lines = []
    for case, answers in found.items():
        backend, dtype, weights, method = case
        rate = over_prompts(lambda total: ratio(total.tokens, total.seconds), answers)
        base = found.get(("torch", dtype, None, "drafted"), answers)
        gain = over_prompts(relative_rate, answers, base)
        whole = Spent.total(answers)
        length, equal = ratio(whole.tokens, whole.forwards), f"{100 * whole.equal / len(answers):.0f} %"
        lines.append(
            [backend, dtype, weights or "as computed", method, rate_text(rate), f"{length:.2f}", gain.text("x"), equal]
        )
    return markdown(head, lines)


def run(options: OpenVinoOptions) -> None:
    cases = decoders(options.target, options.predictor)
    target = next(iter(cases.values())).target
    chosen, _ = chosen_prompts(None, options.limit)
    prompts = [target.encode(prompt.opening, prompt.template) for prompt in chosen]
    found = measure(cases, prompts, options.max_new_tokens, options.repeats)
    record = {
        "settings": {name: value for name, value in asdict(options).items() if name != "output"},
        "answers": {" ".join(map(str, case)): [asdict(answer) for answer in some] for case, some in found.items()},
    }
    asked = f"{len(prompts)} prompts, at most {options.max_new_tokens} new tokens, batch 1, greedy"
    told = f"{Path(options.target).name}, {asked}"
    page, environment = [f"# OpenVINO beside torch: {told}", table(found)], Environment.capture(target.device)
    print(commands.write_results(options.output, options.name, record, *page, environment=environment))


main = commands.program(run, OpenVinoOptions)


if __name__ == "__main__":
    main()
