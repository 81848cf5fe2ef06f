"""What it costs when nothing may depend on the clock: reproducible calls beside those that measure as they go.

    python -m eval.reproducible --output eval/results/reproducible

Prompts on which drafting pays (`bench`) and on which it hardly does (`kinds`) are answered in turn in both ways, in
bfloat16, where the sizes of forwards can decide near-ties. Ratios of tokens per second come with intervals by bootstrap
over prompts; answers are compared with those of the round before.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tqdm.auto import tqdm

from eval import commands
from eval.commands import Spent
from shape.data.backends import sampling
from shape.data.conversations import Prompt
from shape.evaluation.estimates import Estimate, over_prompts, relative_rate
from shape.evaluation.markdown import DASH, markdown
from shape.evaluation.prompts import chosen_prompts
from shape.evaluation.runner import by_decoder
from shape.generation.decoder import ShapeDecoder

DRAFTERS = ("shape", "suffix", "suffix+shape")
SUITES = ("bench", "kinds")
WAYS = {"by the clock": False, "reproducible": True}


@dataclass
class ReproducibleOptions:
    """What to measure.

    Args:
        output: folder for reproducible.json and reproducible.md.
        predictor: folder, hub id or bundled name.
        prompts: of each suite.
        rounds: over all prompts.
    """

    output: str = "reproducible-results"
    predictor: str = "quickstart-shape"
    prompts: int = 24
    rounds: int = 3


@dataclass
class Case:
    """One drafter on one suite at one temperature, by way.

    Attributes:
        same: share of answers that equal those of the round before.
    """

    prompts: str
    drafter: str
    temperature: float
    rates: dict[str, float] = field(default_factory=dict)
    same: dict[str, float] = field(default_factory=dict)
    ratio: Estimate | None = None


def measure(case: Case, decoder: ShapeDecoder, prompts: Sequence[Prompt], rounds: int, bar: tqdm) -> Case:
    how = sampling(case.temperature)
    decoder.warm_up(**how)
    runners = {way: by_decoder(decoder, max_new_tokens=96, reproducible=WAYS[way], **how) for way in WAYS}
    spent = {way: [Spent()] * len(prompts) for way in WAYS}
    answers: dict[tuple[str, int], list[list[int]]] = {}
    same = dict.fromkeys(WAYS, 0)
    for turn in range(rounds):
        for number, prompt in enumerate(prompts):
            ids = decoder.target.encode(prompt.opening)
            for way in sorted(WAYS, reverse=(turn + number) % 2 == 1):
                run = runners[way]([ids], [number])
                assert run.stats is not None
                spent[way][number] += Spent(run.stats.decode_seconds, run.stats.emitted)
                same[way] += answers.get((way, number)) == run.sequences
                answers[way, number] = run.sequences
            bar.update()
    totals = {way: Spent.total(parts) for way, parts in spent.items()}
    case.rates = {way: total.tokens / total.seconds for way, total in totals.items()}
    case.same = {way: count / max(len(prompts) * (rounds - 1), 1) for way, count in same.items()}
    case.ratio = over_prompts(relative_rate, spent["reproducible"], spent["by the clock"])
    return case


def run(options: ReproducibleOptions) -> None:
    suites = {suite: chosen_prompts(suite, options.prompts)[0] for suite in SUITES}
    cases = [Case(suite, name, heat) for suite in SUITES for name in DRAFTERS for heat in (0.0, 1.0)]
    with tqdm(total=sum(len(suites[case.prompts]) for case in cases) * options.rounds) as bar:
        for case in cases:
            decoder = ShapeDecoder.from_pretrained(options.predictor, drafter=case.drafter, dtype="bfloat16")
            measure(case, decoder, suites[case.prompts], options.rounds, bar)
    head = ["prompts", "drafter", "temperature", *(f"tokens/s {way}" for way in WAYS), "reproducible / by the clock",
            *(f"same again {way}" for way in WAYS)]  # fmt: skip
    cells = [
        [one.prompts, one.drafter, f"{one.temperature:g}", *(f"{one.rates[way]:.0f}" for way in WAYS),
         one.ratio.text("x") if one.ratio else DASH, *(f"{one.same[way]:.0%}" for way in WAYS)]
        for one in cases
    ]  # fmt: skip
    note = (
        f"{Path(options.predictor).name} with its target in bfloat16, at most 96 new tokens, batch size 1, "
        f"{options.rounds} rounds in turn, without prefills. Same again: answers that equal those of the round before, "
        "token for token."
    )
    record = {"rows": [asdict(one) for one in cases]}
    parts = ["### Reproducible calls", markdown(head, cells), note]
    print(commands.write_results(Path(options.output), "reproducible", record, *parts))


main = commands.program(run, ReproducibleOptions)


if __name__ == "__main__":
    main()
