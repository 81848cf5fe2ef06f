"""What it costs when nothing may depend on the clock: reproducible calls beside those that measure as they go.

    python eval/reproducible.py --output eval/results/reproducible

Prompts on which drafting pays (`bench`) and on which it hardly does (`kinds`) are answered in turn in both ways, in
bfloat16, where the sizes of forwards can decide near-ties. Ratios of tokens per second come with intervals by bootstrap
over prompts; answers are compared with those of the round before.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from shape.bundled import path
from shape.data.conversations import evenly
from shape.data.reading import load_prompts
from shape.evaluation.environment import Environment
from shape.evaluation.estimates import estimate, ratio
from shape.evaluation.markdown import markdown
from shape.generation.decoder import ShapeDecoder

DRAFTERS = ("shape", "suffix", "suffix+shape")
SUITES = ("bench", "kinds")
WAYS = {"by the clock": False, "reproducible": True}


def measure(decoder: ShapeDecoder, prompts: list, rounds: int, temperature: float, bar: tqdm) -> dict[str, object]:
    """Seconds per token of each way, prompt by prompt, and how many answers were the same as in the round before."""
    sampled = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    options = {"max_new_tokens": 96, "return_dict_in_generate": True, **sampled}
    decoder.warm_up(**sampled)
    seconds = {way: np.zeros(len(prompts)) for way in WAYS}
    tokens = {way: np.zeros(len(prompts)) for way in WAYS}
    answers: dict[tuple[str, int], torch.Tensor] = {}
    same = dict.fromkeys(WAYS, 0)
    for turn in range(rounds):
        for number, prompt in enumerate(prompts):
            ids = decoder.target.encode(prompt.opening)
            for way in sorted(WAYS, reverse=(turn + number) % 2 == 1):
                out = decoder.generate(ids, seed=number, reproducible=WAYS[way], **options)
                seconds[way][number] += out.stats.decode_seconds
                tokens[way][number] += out.stats.emitted
                before = answers.get((way, number))
                same[way] += before is not None and torch.equal(before, out.sequences)
                answers[way, number] = out.sequences
            bar.update()

    def gain(weights: np.ndarray) -> np.ndarray:
        rates = {way: ratio(weights @ tokens[way], weights @ seconds[way]) for way in WAYS}
        return ratio(rates["reproducible"], rates["by the clock"])

    again = len(prompts) * (rounds - 1)
    return {
        "tokens/s": {way: float(tokens[way].sum() / seconds[way].sum()) for way in WAYS},
        "ratio": asdict(estimate(gain, len(prompts))),
        "interval": estimate(gain, len(prompts)).text("x"),
        "same": {way: same[way] / again for way in WAYS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--predictor", default="quickstart-shape")
    parser.add_argument("--output", type=Path, default=Path("reproducible-results"))
    parser.add_argument("--prompts", type=int, default=24, help="of each suite")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    suites = {suite: evenly(load_prompts(path("data", f"{suite}.jsonl")), args.prompts) for suite in SUITES}
    cases = [(suite, name, heat) for suite in SUITES for name in DRAFTERS for heat in (0.0, 1.0)]
    found = []
    with tqdm(total=sum(len(suites[suite]) for suite, _, _ in cases) * args.rounds) as bar:
        for suite, name, heat in cases:
            decoder = ShapeDecoder.from_pretrained(args.predictor, drafter=name, dtype="bfloat16")
            measured = measure(decoder, suites[suite], args.rounds, heat, bar)
            found.append({"prompts": suite, "drafter": name, "temperature": heat, **measured})
    environment = Environment.capture(torch.device("cpu"))
    head = ["prompts", "drafter", "temperature", *(f"tokens/s {way}" for way in WAYS), "reproducible / by the clock",
            *(f"same again {way}" for way in WAYS)]  # fmt: skip
    rows = [
        [one["prompts"], one["drafter"], f"{one['temperature']:g}", *(f"{one['tokens/s'][way]:.0f}" for way in WAYS),
         one["interval"], *(f"{one['same'][way]:.0%}" for way in WAYS)]
        for one in found
    ]  # fmt: skip
    note = (
        f"The shipped target in bfloat16, at most 96 new tokens, batch size 1, {args.rounds} rounds in turn, without "
        "prefills. Same again: answers that equal those of the round before, token for token."
    )
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "reproducible.json").write_text(
        json.dumps({"environment": asdict(environment), "rows": found}, indent=1)
    )
    text = "\n\n".join(["### Reproducible calls", markdown(head, rows), note, environment.line()])
    (args.output / "reproducible.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
