"""What the drafters beside the predictor are worth: draft lengths, recipe packs, and the target compressed.

    python -m eval.drafters lookahead --setting.output lookahead  # fixed and adaptive draft lengths, by kind of prompt
    python -m eval.drafters recipes --setting.output recipes      # packs of four tasks beside a draft model
    python -m eval.drafters compressed --setting.output compressed  # acceptance against rank, 8 bits, cache, residuals
    python -m eval.drafters factors --results compressed          # and its gain beside the closed form's three factors
    python -m eval.drafters geodesic --setting.output geodesic    # paths of hidden states, tables of single tokens

Each is one interleaved run of `shape.bench`'s measurement (`results.json`, `results.md`), always drafting; recipes and
compressed write what belongs beside it into a table of their own. `--model` is a draft model, for instance of
`python -m shape.train --config configs/draft-model.yaml`.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from eval import commands
from shape import bundled
from shape.data.conversations import Prompt, evenly
from shape.data.options import CompileOptions
from shape.data.reading import load_conversations, load_prompts
from shape.drafters import (
    CompressedDrafter,
    Compression,
    GeodesicDrafter,
    HybridDrafter,
    ModelDrafter,
    OneDecodeDrafter,
    SuffixDrafter,
)
from shape.drafters.compressed import compress, own_texts
from shape.drafters.geodesic import PATHS
from shape.drafters.recipes.compile import compile_pack
from shape.drafters.recipes.drafter import RecipeDrafter
from shape.drafters.recipes.pack import Pack
from shape.evaluation.markdown import markdown, show
from shape.evaluation.methods import Method
from shape.evaluation.options import several
from shape.evaluation.prompts import chosen_prompts
from shape.evaluation.results import Detail, SpeedResults, Tally
from shape.evaluation.speed import SpeedSetting, measure_in
from shape.generation.decoder import ShapeDecoder
from shape.generation.engine import ShapeOutput
from shape.target.model import Target

METHODS = ("recipes", "recipes+suffix", "draft model")


@dataclass
class Setting:
    """Where and on what to measure.

    Args:
        output: folder for the results.
        target: path, hub id or bundled name.
        dtype: of the target.
        max_new_tokens: longest answer.
    """

    output: str
    target: str = "quickstart-target"
    dtype: str = "bfloat16"
    max_new_tokens: int = 96

    def load(self) -> Target:
        return Target.load(self.target, dtype=self.dtype)

    def measure(
        self,
        target: Target,
        methods: Mapping[str, Method],
        prompts: Sequence[Prompt],
        folder: str = "",
        *,
        source: str,
        label: str,
        temperature: float = 0.0,
    ) -> SpeedResults:
        return measure_in(
            Path(self.output) / folder,
            target,
            {"transformers": "transformers", "autoregressive": None, **methods},
            prompts,
            SpeedSetting(self.max_new_tokens, temperature, fall_back=False),
            source=source,
            label=label,
        )


def lookahead(
    setting: Setting, model: str = "checkpoints/draft-model", prompts: int = 56, temperature: list[float] | float = 0.0
) -> None:
    """Fixed draft lengths against the two that adapt, on the six kinds of prompt that the source names.

    Args:
        temperature: one, or several, each of which gets a folder of its own (t0, t1).
    """
    target = setting.load()
    small = Target.load(model, dtype=setting.dtype)
    chosen, source = chosen_prompts("kinds", prompts)
    methods = {f"{length} tokens": ModelDrafter(small, length) for length in (1, 2, 4, 6, 8)}
    methods |= {name: ModelDrafter(small, name) for name in ("adaptive", "cost")}
    for one in several(temperature):
        label, folder = f"Fixed and adaptive draft lengths, temperature {one:g}", f"t{one:g}"
        setting.measure(target, methods, chosen, folder, source=source, temperature=one, label=label)


def recipes(
    setting: Setting, model: str = "checkpoints/draft-model", compiled_from: int = 64, measured: int = 16
) -> None:
    """A pack per task, compiled from other prompts of the task."""
    target = setting.load()
    small = ModelDrafter(Target.load(model, dtype=setting.dtype), "cost")
    rows = []
    for task, (training, held_out) in _tasks(compiled_from, measured).items():
        folder = Path(setting.output) / task
        folder.mkdir(parents=True, exist_ok=True)
        asked, file = folder / "prompts.jsonl", folder / "task.pack"
        asked.write_text(
            "".join(json.dumps({"messages": prompt.opening}) + "\n" for prompt in training), encoding="utf-8"
        )
        if not file.exists():
            options = CompileOptions(
                target=setting.target,
                prompts=str(asked),
                output=str(file),
                max_new_tokens=setting.max_new_tokens,
                verify="json" if task == "json" else None,
            )
            compile_pack(options, lambda: (target, ShapeDecoder(target, "suffix").generate))
        pack = Pack.load(file)
        methods: dict[str, Method] = {"recipes": RecipeDrafter(pack), "draft model": small}
        methods["recipes+suffix"] = HybridDrafter([RecipeDrafter(pack), SuffixDrafter()])
        label = f"Recipe packs: {task}"
        results = setting.measure(target, methods, held_out, task, source=f"{task} prompts", label=label)
        summary, total = results.summary, results.total["recipes"]
        hit, right = _first_tokens(target, RecipeDrafter(pack), held_out, setting.max_new_tokens)
        rows.append(
            [
                task,
                f"{len(training)}",
                f"{len(pack.recipes):,}",
                f"{file.stat().st_size / 1024:.0f}",
                show(total.accepted / total.timed_tokens, ".0%"),
                show(hit, ".0%"),
                show(right, ".1%"),
                *(show(summary[name].speed_up.value, unit="x") for name in METHODS),
            ]
        )
    header = ["task", "prompts", "entries", "KB", "tokens covered", "lookups that hit", "first token right"]
    table = markdown([*header, *METHODS], rows)
    _write(setting.output, "recipes.md", table, results)


def _tasks(compiled_from: int, measured: int) -> dict[str, tuple[list[Prompt], list[Prompt]]]:
    """Prompts to compile from and others to measure on."""
    bench, _ = chosen_prompts(None)
    known = load_prompts(bundled.path("data", "train.jsonl.gz"))
    tasks = {
        kind: (
            evenly([prompt for prompt in known if prompt.category == kind], compiled_from),
            evenly([prompt for prompt in bench if prompt.category == kind], measured),
        )
        for kind in ("json", "code", "sums")
    }
    prose = [prompt for prompt in chosen_prompts("kinds")[0] if prompt.category == "creative"]
    return {**tasks, "free prose": (prose[: len(prose) // 2], prose[len(prose) // 2 :])}


def _first_tokens(target: Target, drafter: RecipeDrafter, prompts: Sequence[Prompt], most: int) -> tuple[float, float]:
    """Share of steps with a draft, and of these the share of which a first token was accepted."""
    decoder = ShapeDecoder(target, drafter, fall_back=False)
    steps = hits = right = 0
    for prompt in prompts:
        ids = target.encode(prompt.opening, prompt.template)
        out = decoder.generate(ids, max_new_tokens=most, do_sample=False, return_dict_in_generate=True, trace=True)
        assert isinstance(out, ShapeOutput) and out.trace is not None
        steps += out.stats.forwards
        hits += out.stats.draft_steps
        right += sum(one.get("event") == "accepted" and one["depth"] == 1 for one in out.trace.records)
    return hits / max(steps, 1), right / max(hits, 1)


def compressed(setting: Setting, prompts: int = 24, tokens: int = 3) -> None:
    """The target as its own drafter, `tokens` at a time, and what it says by itself (lossy)."""
    target = setting.load()
    texts = _texts(target)
    chosen, source = chosen_prompts(None, prompts)
    kinds = {
        "8 bits": Compression(int8=True),
        **{
            f"attention at {share:g} d, {'calibrated' if calibrated else 'SVD'}": Compression(
                attention=share, calibrated=calibrated
            )
            for calibrated in (True, False)
            for share in (0.65, 0.5, 0.35, 0.25, 0.15, 0.08)
        },
        "attention and MLP at 0.5 d": Compression(attention=0.5, mlp=0.5),
        "attention and MLP at 0.25 d": Compression(attention=0.25, mlp=0.25),
        **{f"cache at {share:g} of a head": Compression(cache=share) for share in (0.65, 0.5, 0.35, 0.25)},
        "block residuals 0.35": Compression(residuals=0.35),
        "block residuals 0.1": Compression(residuals=0.1),
        **{
            f"attention at {share:g} d, block residuals 0.35": Compression(attention=share, residuals=0.35)
            for share in (0.65, 0.5, 0.35, 0.25)
        },
        "8 bits, attention at 0.5 d": Compression(int8=True, attention=0.5),
        "8 bits, cache at 0.65": Compression(int8=True, cache=0.65),
        "8 bits, attention at 0.5 d, cache at 0.65, residuals 0.1": Compression(
            int8=True, attention=0.5, cache=0.65, residuals=0.1
        ),
    }
    drafters = {name: CompressedDrafter(kind, texts, tokens) for name, kind in kinds.items()}
    hybrid = HybridDrafter([SuffixDrafter(), CompressedDrafter(kinds["8 bits"], texts, tokens)])
    label = f"The target compressed, drafting {tokens} tokens, temperature 0"
    methods: dict[str, Method] = {**drafters, "suffix + 8 bits": hybrid}
    results = setting.measure(target, methods, chosen, source=source, label=label)
    rows = []
    for name, line in results.summary.items():
        if name in ("transformers", "autoregressive"):
            continue
        tally = results.total[name]
        drafter = drafters.get(name)
        energy = None if drafter is None else drafter.energy
        alone = None if name not in kinds or kinds[name].cache is not None else _alone(target, kinds[name], texts)
        rows.append(
            [
                name,
                show(energy, ".1%"),
                show(alone, ".1%"),
                show(tally.accepted / (tokens * tally.draft_steps), ".1%") if drafter else "–",
                show(line.acceptance_length.value),
                show(line.speed_up.value, unit="x"),
            ]
        )
    header = ["left of the target", "energy kept", "agrees alone (lossy)", "accepted", "acceptance length", "speed-up"]
    _write(setting.output, "compressed.md", markdown(header, rows), results)
    factors(setting.output)


def factors(results: str, whole: str = "8 bits") -> None:
    """OTT's closed form against decoding: what drafting with less of the target gains or loses, beside `whole`.

    Predicted from three measurements: how often the first drafted token is accepted, and seconds of a drafted token and
    of the rest of a step.

    Args:
        results: folder of `compressed`; factors.md is written to it.
    """
    found = SpeedResults.from_json((Path(results) / "results.json").read_text(encoding="utf-8"))
    names = [name for name, what in found.methods.items() if what.startswith(Compression.__name__)]
    depth = max(size for name in names for size in found.details[name].histogram) - 1
    measured = {name: Chain.of(found.total[name], found.details[name], depth) for name in names}
    rows = []
    for name, chain in measured.items():
        parts = compression_gain(measured[whole], chain, depth)
        gain = chain.tokens_per_second / measured[whole].tokens_per_second
        cells = [show(value, ".3f") for value in (chain.acceptance, *parts, prod(parts), gain)]
        rows.append([name, *cells, show(prod(parts) / gain - 1, "+.1%")])
    header = ["left of the target", "first token accepted", "runs", "tokens", "costs", "predicted", "measured", "apart"]
    note = (
        f"Tokens per second over those of {whole!r}, predicted as the product of three factors, (1 - a'^{depth + 1}) / "
        f"(1 - a^{depth + 1}), (1 - a) / (1 - a') and ({depth} T_D + T_V) / ({depth} T_D' + T_V), and measured. T_D is "
        "of a drafted token, T_V what else decoding takes per step. The first factor grows where acceptance falls: the "
        "two of acceptance mean something as a product only."
    )
    _write(results, "factors.md", f"{markdown(header, rows)}\n\n{note}", found)


@dataclass(frozen=True)
class Chain:
    """What the closed form asks of a drafter of chains: acceptance of a token, and seconds.

    Attributes:
        acceptance: of the first drafted token, which the form takes for that of all; estimated with half an acceptance
            and half a refusal more, so that it is below 1.
        draft: seconds of a drafted token.
        verify: seconds per step of all else: verification, the rule, the drafter's own prefill.
    """

    acceptance: float
    draft: float
    verify: float
    tokens_per_second: float

    @classmethod
    def of(cls, total: Tally, detail: Detail, depth: int) -> "Chain":
        accepted = sum(steps for tokens, steps in detail.histogram.items() if tokens > 1)
        return cls(
            (accepted + 0.5) / (total.draft_steps + 1),
            total.draft_seconds / total.draft_steps / depth,
            (total.decode_seconds - total.draft_seconds) / total.forwards,
            1 / total.seconds_per_token,
        )


def compression_gain(whole: Chain, compressed: Chain, depth: int) -> tuple[float, float, float]:
    """Throughput with a compressed drafter over that with the whole one, as three factors whose product it is.

    (1 - a'^(g+1)) / (1 - a^(g+1)), (1 - a) / (1 - a'), and (g T_D + T_V) / (g T_D' + T_V), with acceptances below 1 and
    the verification of the whole one (OTT-Decode, HyperTensor's paper C).
    """
    a, less = whole.acceptance, compressed.acceptance
    return (
        (1 - less ** (depth + 1)) / (1 - a ** (depth + 1)),
        (1 - a) / (1 - less),
        (depth * whole.draft + whole.verify) / (depth * compressed.draft + whole.verify),
    )


def geodesic(setting: Setting, prompts: int = 24) -> None:
    """Paths along which hidden states are extrapolated, and the table of single tokens, with and without texts."""
    target = setting.load()
    texts = _texts(target)
    methods: dict[str, Method] = {f"geodesic: {path}": GeodesicDrafter(path) for path in PATHS}
    methods |= {
        "onedecode, 1 candidate": OneDecodeDrafter(),
        "onedecode, 4 candidates": OneDecodeDrafter(candidates=4),
        "onedecode, from texts": OneDecodeDrafter(texts=texts),
        "onedecode, from texts, 4 candidates": OneDecodeDrafter(texts=texts, candidates=4),
        "onedecode+geodesic": HybridDrafter([OneDecodeDrafter(), GeodesicDrafter()]),
    }
    chosen, source = chosen_prompts(None, prompts)
    setting.measure(target, methods, chosen, source=source, label="Geodesic drafts and OneDecode tables, temperature 0")


def _texts(target: Target, count: int = 32) -> list[list[int]]:
    """Texts of the validation split to calibrate with, or the target's own where they are not its language."""
    if target.tokenizer is None or not target.tokenizer.chat_template:
        return own_texts(target)
    conversations = evenly(load_conversations(bundled.path("data", "validation.jsonl.gz")), count)
    rendered = [target.render([{"role": m.role, "content": m.content} for m in one.messages]) for one in conversations]
    return [target.tokenizer(text, add_special_tokens=False).input_ids[:256] for text in rendered]


@torch.no_grad()
def _alone(target: Target, compression: Compression, texts: Sequence[Sequence[int]]) -> float:
    """Share of positions in texts at which the compressed target's likeliest token is the target's."""
    small, _ = compress(target, compression, texts)
    same = count = 0
    for text in random.Random(0).sample(list(texts), min(16, len(texts))):
        ids = torch.tensor([text], device=target.device)
        best, other = (each.logits(each.features(ids)).argmax(-1) for each in (target, small))
        same, count = same + int((best == other).sum()), count + len(text)
    return same / count


def _write(folder: str, name: str, table: str, results: SpeedResults) -> None:
    output = Path(folder) / name
    output.write_text(f"{table}\n\n{results.environment.line()}\n", encoding="utf-8")
    print(output.read_text(encoding="utf-8"))


main = commands.one_of(lookahead, recipes, compressed, factors, geodesic)


if __name__ == "__main__":
    main()
