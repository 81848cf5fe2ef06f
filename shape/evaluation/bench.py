"""`python -m shape.bench`: how fast a predictor decodes, beside plain decoding and the other drafters.

The command is `shape.cli.bench`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from shape import bundled
from shape.data.reading import load_prompts
from shape.drafters import DRAFTERS, Drafter, TreeShape
from shape.errors import ConfigError, DataError
from shape.evaluation.speed import JOURNAL, Assisted, Method, Outside, Ruled, SpeedResults, measure_in
from shape.generation.decoder import ShapeDecoder, is_language_model
from shape.generation.rules import Match, TrsLossy, TypicalLossy, make_rule
from shape.target.loading import SOURCE, PairOptions, of_pair, of_predictor, of_target, only
from shape.target.model import Target, announce

_ASSISTED = "transformers-assisted"
SUITES = ("bench", "kinds")
Value = TypeVar("Value")
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


@dataclass
class BenchOptions(PairOptions):
    """What to measure.

    Args:
        output: folder for results.json and results.md.
        predictor: trained predictors, each DIR or NAME=DIR; the name stands in the table; default: quickstart-shape, or
            none beside a target.
        target: path or hub id of the target; default: the one the first predictor was trained for.
        prompts: JSON lines with turns, messages, prompt or question; a bundled suite, bench (the default) or kinds; or
            a dataset of the hub, NAME, NAME:SPLIT or NAME:CONFIG:SPLIT (HuggingFaceH4/mt_bench_prompts,
            openai/gsm8k:main:test); or several, as a list.
        methods: what to measure: transformers, transformers-lookup (its own prompt lookup), transformers-assisted (its
            assisted generation, with every predictor that is a smaller model), plain, shape (every predictor), names of
            other drafters, and several joined by + for a hybrid; default: transformers, plain, ngram and shape, or
            suffix where there is no predictor; behind a name @rejection, @traversal, @typical-lossy
            or @trs-lossy is the acceptance rule, which else is match.
        typical_lossy: parameters of the rule typical-lossy.
        trs_lossy: parameters of the rule trs-lossy.
        chat_template_kwargs: given to the target's chat template, for example {"enable_thinking": false}.
        limit: measure the first so many prompts of each file only.
        max_new_tokens: longest answer.
        temperature: 0 decodes greedily; above, every method samples with the same seed per prompt. One, or several.
        batch_size: prompts answered at once. One number, or several.
        context_length: tokens that every context is filled up to with other prompts' text; default: as they are. One
            number, or several.
        repeats: timed runs per answer, of which the median counts.
        warmup: prompts answered once by every method before the measurement.
        seed: of the sampling.
        dtype: of the target, for example float32 or bfloat16; default: its checkpoint's.
        prepacked: weights in the layout of the CPU's matrix kernels, for all methods (see `shape.target.prepack`);
            default: where there is room.
        draft_device: where the predictors draft, for example cuda:1 or cpu; default: beside the target.
        tree: shape of the predictors' token trees; default: each predictor's own.
        lookahead: of smaller models that draft: adaptive, cost, or a number of tokens.
        pack: recipes that the method recipes looks up.
        label: heading of the table.
        fall_back: whether to decode plainly for a while where drafting does not pay; false always drafts, a number is
            the acceptance length below which drafting pauses.
    """

    output: str = "bench-results"
    predictor: list[str] | None = None
    target: str | None = None
    prompts: list[str] | str | None = None
    methods: list[str] | None = None
    typical_lossy: TypicalLossy = field(default_factory=TypicalLossy)
    trs_lossy: TrsLossy = field(default_factory=TrsLossy)
    chat_template_kwargs: dict[str, Any] | None = None
    limit: int | None = None
    max_new_tokens: int = 128
    temperature: float | list[float] = 0.0
    batch_size: int | list[int] = 1
    context_length: int | list[int] | None = None
    repeats: int = 1
    warmup: int = 2
    seed: int = 0
    dtype: str | None = None
    prepacked: bool | None = None
    draft_device: str | None = None
    tree: TreeShape | None = None
    lookahead: str = "adaptive"
    pack: str | None = None
    label: str = ""
    fall_back: bool | float = True


def bench(options: BenchOptions) -> list[SpeedResults]:
    """Measures every setting, and writes results.json and results.md of each into `options.output` or below it."""
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"limit {options.limit} leaves no prompt; give at least 1")
    given = options.context_length
    lengths: Sequence[int | None] = given if isinstance(given, list) else [given]
    settings = list(product(_several(options.temperature), _several(options.batch_size), lengths))
    if len(set(settings)) < len(settings) or not settings:
        raise ConfigError("temperature, batch_size or context_length holds no value, or one twice; give each once")
    named = [options.prompts] if isinstance(options.prompts, str) else options.prompts or ["bench"]
    suites = [_suite(name) for name in named]
    every = [load_prompts(suite, options.chat_template_kwargs)[: options.limit] for suite in suites]
    prompts = [prompt for some in every for prompt in some]
    names = [Path(suite).name for suite in suites]
    target, methods = load_methods(options)
    where = "+".join(name.split(".")[0] for name in names)
    found, journals = [], []
    for temperature, batch, context in settings:
        what = f"temperature {temperature:g}"
        folder = Path(options.output)
        if len(settings) > 1:
            what += f", batch {batch}" + ("" if context is None else f", contexts of {context}")
            folder /= f"t{temperature:g}-b{batch}" + ("" if context is None else f"-c{context}")
        label = options.label or f"{Path(target.name).name}, {where}"
        found.append(
            measure_in(
                folder,
                target,
                methods,
                prompts,
                keep=len(settings) > 1,
                max_new_tokens=options.max_new_tokens,
                temperature=temperature,
                repeats=options.repeats,
                warmup=options.warmup,
                seed=options.seed,
                label=label if options.label and len(settings) == 1 else f"{label}, {what}",
                source="+".join(names),
                fall_back=options.fall_back,
                batch=batch,
                context_length=context,
            )
        )
        journals.append(folder / JOURNAL)
    for journal in journals:  # by which the same command, interrupted, takes over what was finished
        journal.unlink(missing_ok=True)
    return found


def _several(given: Value | list[Value]) -> list[Value]:
    return given if isinstance(given, list) else [given]


def _suite(name: str) -> Path | str:
    """Prompts that ship, by name, or what `load_prompts` takes."""
    if name in SUITES and not Path(name).exists():
        return bundled.path("data", f"{name}.jsonl")
    return name


def load_methods(options: BenchOptions) -> tuple[Target, dict[str, Method]]:
    """The target, and the methods of the table in the order asked for.

    Raises:
        ConfigError: a name given twice, or an unknown drafter.
    """
    given = ["quickstart-shape"] if options.predictor is None and options.target is None else options.predictor or []
    predictors = named_predictors(given)
    names = options.methods or ["transformers", "plain", "ngram", "shape" if predictors else "suffix"]
    place: dict[str, Any] = {"dtype": options.dtype, "prepacked": options.prepacked}
    if options.target is not None:
        target = Target.load(options.target, **place, **of_target(options))
    else:
        first = next(iter(predictors.values()))
        both = of_pair(options)
        target = ShapeDecoder.from_pretrained(predictor=first, drafter="none", **place, **both).target
    announce(target)
    methods: dict[str, Method] = {}
    for entry in names:
        name, _, acceptance = entry.partition("@")
        rule = make_rule(acceptance or Match.name, options.typical_lossy, options.trs_lossy)
        for label, method in _drafters(name, predictors, target, options).items():
            if isinstance(method, Drafter) and not isinstance(rule, Match):
                methods[f"{label}@{rule.name}"] = Ruled(method, rule)
            else:
                methods[label] = method
    return target, methods


def _drafters(
    name: str, predictors: Mapping[str, str], target: Target, options: BenchOptions
) -> dict[str, Drafter | Assisted | Outside | None]:
    """What a method's name stands for: every predictor, one drafter, a hybrid with every predictor, or a baseline."""
    if name in get_args(Outside):
        return {name: cast(Outside, name)}
    if name == _ASSISTED:
        hub = of_predictor(options)
        smaller = {label: folder for label, folder in predictors.items() if is_language_model(folder, **hub)}
        if not smaller:
            raise ConfigError(f"method {name} needs a smaller language model; give one with --predictor NAME=DIR")
        place: dict[str, Any] = {"dtype": options.dtype, "prepacked": options.prepacked}
        place |= {"device_map": options.draft_device or target.device, **hub}
        place |= only({"trust_remote_code"}, of_target(options))
        return {f"{name} by {label}": Assisted(Target.load(folder, **place)) for label, folder in smaller.items()}
    if name == "plain":
        return {name: None}
    parts = name.split("+")
    found: dict[str, Drafter | Assisted | Outside | None] = {}
    if "shape" in parts and not predictors:
        raise ConfigError(f"method {name} needs a predictor; give one with --predictor DIR")
    for label, folder in predictors.items() if "shape" in parts else [(name, None)]:
        own = "model" if folder is not None and is_language_model(folder, **of_predictor(options)) else "shape"
        decoder = ShapeDecoder.from_pretrained(
            predictor=folder,
            target=target,
            tree=options.tree,
            draft_device=options.draft_device,
            drafter=[own if part == "shape" else part for part in parts],
            lookahead=options.lookahead,
            pack=options.pack,
            prepacked=options.prepacked,
            predictor_revision=options.predictor_revision,
            **only(SOURCE | {"trust_remote_code"}, of_target(options)),
        )
        found["+".join(label if part == "shape" else part for part in parts)] = decoder.drafter
    return found


def named_predictors(predictors: Sequence[str]) -> dict[str, str]:
    """`NAME=DIR` or `DIR` (named "shape") -> {name: folder}. Raises `ConfigError` where two share a name."""
    named: dict[str, str] = {}
    for entry in predictors:
        name, separator, folder = entry.partition("=")
        name, folder = (name, folder) if separator else ("shape", entry)
        if name in {*named, *DRAFTERS, "plain", "recipes", _ASSISTED, *get_args(Outside)}:
            raise ConfigError(f"predictor name {name} is taken; give each its own with --predictor NAME=DIR")
        named[name] = folder
    return named


def render(results: Path) -> str:
    """The tables of every `results.json` under a folder, in the order of their paths, as Markdown.

    Raises:
        DataError: there is none, or one of another schema.
    """
    found = sorted(results.rglob("results.json"))
    if not found:
        raise DataError(f"no results.json lies under {results}; measure with python -m shape.bench --output first")
    return "\n".join(SpeedResults.from_json(path.read_text()).to_markdown(detail=False) for path in found)


def replace_region(document: str, content: str) -> str:
    """The document with the lines between its two result markers replaced.

    Raises:
        DataError: the markers are missing.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise DataError(f"the document has no lines {BEGIN} and {END} to write between; add them")
    return f"{before}{BEGIN}\n\n{content.strip()}\n\n{END}{after}"
