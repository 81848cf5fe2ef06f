"""The paper's tables as functions of results: what each shows, where it comes from, and what is missing in it.

The paper is "Transporting Tokens: Optimal-Transport View of Parallel LLM Decoding". Its figures are its own claims, on
large targets and GPUs; they stand beside ours for comparison and are never ours. `eval.tables` is the
command.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval import latency
from eval.all_results import AllResults
from eval.text_quality.results import AHEAD_NOTE, QualityResults
from shape.drafters import LookaheadDrafter, NgramDrafter
from shape.evaluation import efficiency
from shape.evaluation.environment import Environment
from shape.evaluation.estimates import Estimate
from shape.evaluation.files import Results
from shape.evaluation.markdown import DASH, markdown, show
from shape.evaluation.results import SpeedResults, speed_and_length
from shape.networks.registry import PREDICTORS

LOOKAHEAD = "lookahead "  # what methods of Table 11 are called, before the number
_GRID = re.compile(r"k = (\d+), N = (\d+)")


@dataclass(frozen=True)
class Part:
    """One measured piece of a table, from one or several results."""

    header: list[str]
    rows: list[list[str]]
    notes: list[str]


@dataclass(frozen=True)
class Table:
    """What is shown under one heading.

    Attributes:
        numbers: of the paper's tables.
        paper: its figures, as far as they are known here.
        parts: what was measured.
        absent: what of the paper's tables is not measured, and why.
    """

    numbers: list[str]
    title: str
    paper: str
    parts: list[Part]
    absent: list[str]

    def to_markdown(self) -> str:
        several = "s" if len(self.numbers) > 1 else ""
        lines = [f"## Table{several} {', '.join(self.numbers)}: {self.title}", f"*The paper*: {self.paper}"]
        for part in self.parts:
            lines += [markdown(part.header, part.rows), *part.notes]
        lines += [f"*Not measured*: {reason}" for reason in self.absent]
        return "\n\n".join(lines)


def _from(path: str, found: Mapping[str, Any] | Results) -> str:
    """The line that says where figures come from."""
    environment = found.environment if isinstance(found, Results) else Environment(**found["environment"])
    return f"`{path}`: {environment.line()}"


# ------------------------------------------------------------------------------------------------- the tables


def similarity(found: AllResults) -> Table:
    parts = []
    for path, record in found.analysis.items():
        rows = [
            [
                "unrelated" if row["lag"] is None else str(row["lag"]),
                f"{row['pairs']:,}",
                f"{row['share']:.1%}",
                show(row["mean"]),
                show(row["percentiles"]["5"]),
                show(row["percentiles"]["95"]),
            ]
            for row in record["similarity"]
        ]
        header = ["lag n", "pairs", "cosine ≥ 0.5", "mean cosine", "5 %", "95 %"]
        note = f"Cosines of h_t and h_{{t+n}} on {record['texts']} texts with the target's own answers."
        parts.append(Part(header, rows, [note, _from(path, record)]))
    paper = "cosine of at least 0.5 at 95 % of positions for n = 1, 2, 3 (its own Table 9 has 0.38–0.55 for Vicuna)."
    return Table(["1", "9"], "similarity of hidden states by lag", paper, parts, [])


def speed_up(found: AllResults) -> Table:
    """One part for each target and set of prompts: trained drafters, and those of the paper that need no training."""
    groups: dict[tuple[str, str], dict[str, SpeedResults]] = {}
    for path, results in found.speed.items():
        names = [name for name in results.methods if name.startswith(LOOKAHEAD)]
        ruled = any(", acceptance " in what for what in results.methods.values())
        alone = results.settings.get("batch", 1) == 1 and not results.settings.get("context_length")
        if any(map(_is_trained, results.methods.values())) and alone and not ruled and not names:
            settings = results.settings
            groups.setdefault((settings["target"], settings["prompts"]), {})[path] = results
    parts = []
    for (target, prompts), members in groups.items():
        first = next(iter(members.values()))
        tasks = [task for task in first.categories if task]
        rows = []
        for results in sorted(members.values(), key=lambda one: (one.settings["temperature"], one.settings["dtype"])):
            for name, line in results.summary.items():
                if name in (NgramDrafter.name, LookaheadDrafter.name) or _is_trained(results.methods[name]):
                    own = [results.summarise(name, task).speed_up.value for task in tasks]
                    at = [f"{results.settings['temperature']:g}", results.settings["dtype"]]
                    cells = [line.speed_up.text("x"), *(show(value, unit="x") for value in own)]
                    rows.append([name, *at, *cells, show(line.acceptance_length.value)])
        note = (
            f"Target {target} ({first.settings['parameters'] / 1e6:.1f}M parameters), prompts {prompts}, batch 1; the "
            "divisor is the stronger of transformers' generate and autoregressive decoding, prefill left out."
        )
        header = ["method", "T", "dtype", "all (95 %)", *tasks, "acceptance length"]
        sources = [_from(path, results) for path, results in members.items()]
        parts.append(Part(header, rows, [note, *sources]))
    parts += [_rivals(path, record) for path, record in found.ablation.items() if _has_rivals(record)]
    paper = (
        "at T = 0 Lookahead 2.4–3.8x, Medusa-1 1.8–2.6x, Medusa-2 2.0–3.8x, EAGLE-3 3.9–5.8x, SHAPE 3.9–6.0x, over "
        "targets of 7B to 70B and tasks; about 10 % less at T = 1."
    )
    absent = ["Medusa-2, which trains the target with its heads: targets are frozen here."]
    return Table(["2"], "speed-up by method, task and temperature", paper, parts, absent)


def _is_trained(what: str) -> bool:
    """Whether a method's description is that of a trained predictor by itself."""
    return what.startswith(tuple(f"{kind}, " for kind in PREDICTORS))


def _has_rivals(record: Mapping[str, Any]) -> bool:
    """Whether an ablation is of predictors of several kinds."""
    return not {"medusa", "eagle"}.isdisjoint(line["label"] for line in record["lines"])


def _rivals(path: str, record: Mapping[str, Any]) -> Part:
    """Drafters of one size, trained alike. The record has no tasks."""
    temperatures = list(record["others"])
    lines = {line["label"]: [line["at"][at]["summary"] for at in temperatures] for line in record["lines"]}
    lines |= {name: [record["others"][at][name] for at in temperatures] for name in record["others"][temperatures[0]]}
    header = ["method", *(f"speed-up, T = {float(at):g} (95 %)" for at in temperatures)]
    rows = [[name, *(_estimate(one["speed_up"], "x") for one in summaries)] for name, summaries in lines.items()]
    return Part(header, rows, [f"{record['title']}.", *_measured_on(record), _from(path, record)])


def _measured_on(record: Mapping[str, Any]) -> list[str]:
    """Of an ablation."""
    settings = next(iter(record["settings"].values()))
    seeds = record["seeds"]
    return [
        f"Target {settings['target']} ({settings['parameters'] / 1e6:.1f}M parameters, {settings['dtype']}), "
        f"{settings['count']} prompts of {settings['prompts']}, batch 1, {len(seeds)} training(s) of each; intervals "
        "are over prompts."
    ]


def _estimate(values: Mapping[str, float | None], unit: str = "") -> str:
    return Estimate(**values).text(unit)


def batches(found: AllResults) -> Table:
    parts = []
    for path, record in found.efficiency.items():
        repeats = record["options"].get("repeats", 1)
        cases = [efficiency.Case(**{"repeats": repeats, **case}) for case in record["cases"]]
        sizes = sorted({case.batch for case in cases})
        if len(sizes) < 2:
            continue
        rates = {(case.dtype, case.temperature, case.method, case.batch): case.rate for case in cases}
        rows = []
        for dtype, temperature, method in dict.fromkeys(key[:3] for key in rates):
            if method not in ("autoregressive", "transformers", "oracle"):
                own = [rates[dtype, temperature, method, size] for size in sizes]
                base = [
                    max(rates[dtype, temperature, base, size] for base in ("autoregressive", "transformers"))
                    for size in sizes
                ]
                ratios = [show(one / other, unit="x") for one, other in zip(own, base, strict=True)]
                rows.append([method, f"{temperature:g}", dtype, *ratios])
        note = (
            "Speed-up by batch size, over the stronger of autoregressive decoding and transformers' generate at the "
            f"same batch; {record['options']['limit']} prompts."
        )
        header = ["method", "T", "dtype", *(f"batch {size}" for size in sizes)]
        parts.append(Part(header, rows, [note, _from(path, record)]))
    paper = "1.92 / 1.75 / 1.61 / 1.52 / 1.41x at batch 2 / 4 / 8 / 16 / 24."
    return Table(["3"], "speed-up by batch size", paper, parts, [])


def written(found: AllResults) -> Table:
    parts = []
    for path, results in _quiet(found).items():
        header, rows = results.table()
        parts.append(Part(header, rows, [*results.notes()[:-1], _from(path, results)]))
    parts += [_harness(path, record) for path, record in found.harness.items()]
    absent = [
        "MT-Bench scores, which need a judge; `answers.jsonl` beside `quality.json` has the answers to be judged."
    ]
    if not found.harness:
        absent.append(
            "MMLU, MATH500, AIME24, LiveCodeBench and other suites: `python -m shape.harness --model "
            "shape --model_args predictor=DIR --tasks mmlu,... --output_path RESULTS` (lm-evaluation-harness, which "
            "downloads its data). Tasks of multiple choice, such as MMLU, ask for probabilities of given texts, which "
            "no way of decoding touches: they are the target's own by construction."
        )
    needed = {
        "sums": "accuracy of reasoning: no prompts with numbers for references (GSM8K) were given",
        "programs": "accuracy of code: no prompts with tests (HumanEval) were given",
    }
    absent += [
        f"{what} (`python -m eval.quality --prompts`)."
        for name, what in needed.items()
        if not any(results.asked(name) for results in found.quality.values())
    ]
    paper = (
        "perplexity, MMLU, MT-Bench score and accuracy on MATH500, AIME24 and LiveCodeBench, vanilla against "
        "accelerated: at most 1.2 % of accuracy lost, it says; one row of its Table 5 loses 1.8 points."
    )
    return Table(["4", "5", "10"], "quality of what is written, without and with drafts", paper, parts, absent)


def _quiet(found: AllResults) -> dict[str, QualityResults]:
    """Those that are not for speed, unless there are no others."""
    return {path: one for path, one in found.quality.items() if not one.timed} or found.quality


def _harness(path: str, record: Mapping[str, Any]) -> Part:
    """What lm-evaluation-harness found: every metric of every task."""
    rows = []
    for task, figures in record["results"].items():
        for metric, value in figures.items():
            error = figures.get(metric.replace(",", "_stderr,", 1))
            if isinstance(value, float) and "_stderr" not in metric:
                spread = f" ± {error:.3f}" if isinstance(error, float) else ""
                rows.append([task, metric.replace(",none", ""), f"{value:.3f}{spread}"])
    given = record.get("config", {})
    note = (
        f"`{path}`: lm-evaluation-harness {record.get('lm_eval_version', '')}, model {given.get('model', 'unknown')} "
        f"({given.get('model_args') or record['model_name']}), limit {given.get('limit') or 'none'}."
    )
    return Part(["task", "metric", "value"], rows, [note])


def refinement(found: AllResults) -> Table:
    parts = []
    for path, record in found.ablation.items():
        given = record["options"]["variants"]
        refined = [name for name, what in given.items() if "refinement" in ((what or {}).get("predictor") or {})]
        lines = [line for line in record["lines"] if line["variant"] in refined]
        if len(lines) < 2:
            continue
        header, rows = _lines(record, lines)
        parts.append(Part(header, rows, [f"{record['title']}.", *_measured_on(record), _from(path, record)]))
    paper = (
        "at d = 128 OT has perplexity 12.2 at 3.21x, affine 18.4 at 3.87x; OT with d = 32 / 64 / 128 / full has "
        "17.3 / 16.1 / 12.2 / 12.1 at 3.87 / 3.66 / 3.21 / 2.67x."
    )
    absent = ["perplexity: these decode losslessly, so that the text is the target's own whatever the refinement."]
    return Table(["6"], "transport against affine refinement, by width d", paper, parts, absent if parts else [])


def _lines(record: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Acceptance length and speed-up of an ablation's lines, by temperature."""
    temperatures = list(record["others"])
    header = ["variant"]
    for at in temperatures:
        header += [f"{what}, T = {float(at):g} (95 %)" for what in ("acceptance length", "speed-up")]
    rows = []
    for line in lines:
        found = [line["at"][at]["summary"] for at in temperatures]
        cells = [[_estimate(one["acceptance_length"]), _estimate(one["speed_up"], "x")] for one in found]
        rows.append([line["label"], *(cell for pair in cells for cell in pair)])
    return header, rows


def grid(found: AllResults) -> Table:
    """Speed-up and acceptance length by k and N, and where a step's time goes."""
    parts = []
    for path, record in found.ablation.items():
        at = next(iter(record["others"]))
        cells = {
            (int(match[1]), int(match[2])): line["at"][at]
            for line in record["lines"]
            if (match := _GRID.search(line["label"]))
        }
        if not cells:
            continue
        widths, depths = (sorted({key[axis] for key in cells}) for axis in (0, 1))
        rows = [
            [f"k = {k}", *(_both(cells[k, n]["summary"]) if (k, n) in cells else DASH for n in depths)] for k in widths
        ]
        source = [*_measured_on(record), _from(path, record)]
        note = f"Speed-up (acceptance length) at T = {float(at):g}, all k^N paths verified losslessly."
        parts.append(Part(["", *(f"N = {n}" for n in depths)], rows, [note]))
        steps = [
            [f"k = {k}, N = {n}", *(show(cells[k, n]["step_ms"][part]) for part in ("draft", "verify", "commit"))]
            for k, n in sorted(cells, key=lambda key: key[::-1])
        ]
        header = ["tree", "draft ms", "verify ms", "commit ms"]
        parts.append(Part(header, steps, ["Milliseconds of a step, by lookahead N.", *source]))
    paper = (
        "speed-up grows with N (1.75–1.91x at N = 1, 3.35–4.10x at N = 5) and falls slightly with k, perplexity falls "
        "with k."
    )
    absent = ["perplexity by k: verification is lossless here (the lossy rule is in Table 13)."] if parts else []
    return Table(["7"], "latency by lookahead N, and the k × N grid", paper, parts, absent)


def _both(summary: Mapping[str, Any]) -> str:
    return speed_and_length(summary["speed_up"]["value"], summary["acceptance_length"]["value"])


def plain_latency(found: AllResults) -> Table:
    parts = []
    for path, record in found.latency.items():
        header, rows = latency.table([latency.Latency(**one) for one in record["latencies"]])
        parts.append(Part(header, rows, [latency.note(record["options"]), _from(path, record)]))
    paper = "time to the first token and between tokens by model size and context; its figures are not at hand here."
    return Table(["8"], "latency of autoregressive decoding by size of the target and context", paper, parts, [])


def by_lookahead(found: AllResults) -> Table:
    parts = []
    for path, results in found.speed.items():
        names = [name for name in results.methods if name.startswith(LOOKAHEAD)]
        if not names:
            continue
        tasks = [task for task in results.categories if task]
        rows = [
            [name.removeprefix(LOOKAHEAD), *(results.summarise(name, task).both for task in (None, *tasks))]
            for name in names
        ]
        header = ["lookahead", "all", *tasks]
        note = f"Speed-up (acceptance length). {results.about}"
        parts.append(Part(header, rows, [note, _from(path, results)]))
    paper = "1.9x at a lookahead of 1, 2.6x at 2, 3.2–4.1x at 3."
    return Table(["11"], "speed-up by lookahead and task", paper, parts, [])


def accuracy_ahead(found: AllResults) -> Table:
    parts, absent = [], []
    for path, results in _quiet(found).items():
        if results.ahead:
            notes = [f"Predictor {results.settings['predictor']}. {AHEAD_NOTE}", _from(path, results)]
            if not results.compared:
                absent.append(f"likeness of texts in `{path}`, since no encoder was named (`--encoder`).")
            else:
                notes.insert(1, f"Texts are compared by {results.encoder}.")
            parts.append(Part(*results.ahead_table(), notes))
    paper = "token accuracy 0.91 / 0.89 / 0.86 at a lookahead of 1 / 2 / 3."
    title = "token accuracy, BERTScore and sentence similarity by lookahead"
    return Table(["12"], title, paper, parts, absent)


def strategies(found: AllResults) -> Table:
    """Modes of decoding: quality from any measurement that has the lossy rule, speed only from a timed one."""
    having = {path: one for path, one in found.quality.items() if any("trs-lossy" in mode for mode in one.modes)}
    timed = {path: results for path, results in having.items() if results.timed}
    parts = []
    for path, results in (timed or having).items():
        rows = [
            [
                _strategy(label),
                line.perplexity.text(),
                *([show(line.tokens_per_second, ".0f"), line.speed_up.text("x")] if results.timed else []),
                f"{line.equal} / {line.answers}",
            ]
            for label, line in results.summary.items()
        ]
        speed = ["tokens/s", "speed-up (95 %)"] if results.timed else []
        header = ["strategy", "perplexity (95 %)", *speed, "equal to autoregressive at this T"]
        note = (
            "Speed is of whole answers, prefill included, over autoregressive decoding at the same temperature; drafts "
            "are always made, and verified whole."
        )
        notes = [*results.notes()[:2], *([note] if results.timed else [])]
        parts.append(Part(header, rows, [*notes, _from(path, results)]))
    paper = "tree rejection sampling (k = N = 3) 3.21x with perplexity 12.2, autoregressive decoding 11.9."
    absent = ["speed, which needs a run on a machine that does nothing else."] if parts and not timed else []
    title = "tree rejection sampling against autoregressive sampling, greedy and beam search"
    return Table(["13"], title, paper, parts, absent)


def _strategy(label: str) -> str:
    """A mode's label, with the paper's word for it where it has one."""
    words = {
        "autoregressive, T = 0": "greedy",
        "autoregressive, T = 1": "autoregressive sampling",
        "beam, T = 0": "beam search",
    }
    return f"{words[label]} ({label})" if label in words else label.replace("trs-lossy", "tree rejection (trs-lossy)")


def training_cost(found: AllResults) -> Table:
    parts = []
    header = ["predictor", "parameters", "training minutes", "steps", "positions/s", "peak memory GB"]
    exported = []
    for name, config in found.trained.items():
        record = config["training"]
        exported.append([name, f"{config['parameters'] / 1e6:.2f}M", *_cost(record, record["seconds"])])
    if exported:
        note = "Exported predictors, by what their own configuration says: seconds include validation."
        commands = [
            f"{name}: {config['training'].get('measured_on', 'machine unknown')}; `{config['training']['command']}`."
            for name, config in found.trained.items()
        ]
        parts.append(Part(header, exported, [note, *commands]))
    for path, record in found.ablation.items():
        if not _has_rivals(record):
            continue
        rows = []
        for variant, by_seed in record["trained"].items():
            one = next(iter(by_seed.values()))
            rows.append([variant, f"{one['parameters'] / 1e6:.2f}M", *_cost(one["record"], one["seconds"])])
        note = f"{record['title']}: the first training of each, on {one['environment']['threads']} thread(s)."
        parts.append(Part(header, rows, [note, _from(path, record)]))
    paper = "451M parameters for a 7B target, 5 hours on one A100, peak 41.9 GB."
    unknown = any(row[-1] == DASH for part in parts for row in part.rows)
    absent = ["peak memory of trainings before `shape.train` recorded it."] if unknown else []
    return Table(["G.3"], "parameters, training time and memory", paper, parts, absent)


def _cost(record: Mapping[str, Any], seconds: float) -> list[str]:
    return [
        show(seconds / 60, ".1f"),
        str(record["steps"]),
        show(record.get("positions_per_second"), ",.0f"),
        show(record.get("peak_memory_gb")),
    ]


# In the paper's order, by the numbers that one of them is for.
MAKERS: dict[tuple[str, ...], Callable[[AllResults], Table]] = {
    ("1", "9"): similarity,
    ("2",): speed_up,
    ("3",): batches,
    ("4", "5", "10"): written,
    ("6",): refinement,
    ("7",): grid,
    ("8",): plain_latency,
    ("11",): by_lookahead,
    ("12",): accuracy_ahead,
    ("13",): strategies,
    ("G.3",): training_cost,
}
NUMBERS = tuple(number for numbers in MAKERS for number in numbers)


def is_missing(found: AllResults, number: str) -> bool:
    """Whether a table has nothing to show, or nothing of what it is for."""
    if number == "13":
        return not any(one.timed and "trs-lossy, T = 0" in one.modes for one in found.quality.values())
    return not tables_for(found, [number])[0].parts


def tables_for(found: AllResults, numbers: Sequence[str]) -> list[Table]:
    """The tables of these numbers, in the paper's order, each once."""
    return [maker(found) for own, maker in MAKERS.items() if set(own) & set(numbers)]


def render(record: Mapping[str, Any]) -> str:
    """`tables.json` as Markdown."""
    tables = [Table(**{**table, "parts": [Part(**part) for part in table["parts"]]}) for table in record["tables"]]
    opening = (
        "# The paper's tables, as measured here\n\nThe paper's figures are its own claims, on targets of 7B to 70B "
        "parameters and GPUs; ours are of the targets and machines that stand under each table, and are no attempt to "
        "reproduce its numbers where the target is another. A dash is a figure that is not defined or not known.\n\n"
        f"Put together from results below: {Environment(**record['environment']).line()}"
    )
    return "\n\n".join([opening, *(table.to_markdown() for table in tables)]) + "\n"
