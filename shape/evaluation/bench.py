"""How fast a predictor decodes, beside autoregressive decoding and other drafters (`shape bench`)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast, get_args

from shape import bundled
from shape.data.backends import announce_sampling
from shape.data.conversations import Conversation
from shape.data.reading import load_conversations
from shape.drafters import DRAFTERS, Drafter
from shape.errors import ConfigError, DataError, require
from shape.evaluation.journal import JOURNAL
from shape.evaluation.methods import ASSISTED, Assisted, Configured, Method, TransformersMethod
from shape.evaluation.options import BenchOptions, several
from shape.evaluation.prompts import chosen_prompts
from shape.evaluation.results import AUTOREGRESSIVE, SHIPPED_TEXT, SpeedResults
from shape.evaluation.speed import RESULTS, SpeedSetting, measure_in, refuse_results, settings_of
from shape.generation.decoder import ShapeDecoder
from shape.generation.loading import is_language_model, needs_predictor, refuse_unknown
from shape.generation.rules import Match, make_rule
from shape.target.loading import SOURCE, of_pair, of_predictor, of_target, only
from shape.target.model import Target
from shape.target.openvino import OpenVinoTarget


def bench(options: BenchOptions) -> list[SpeedResults]:
    """Measures every setting, and writes results.json and results.md of each into `options.output` or below it."""
    require(options, "max_turns batch_size", least=1)  # of the others every setting looks itself
    lengths: Sequence[int | None] = several(options.context_length)
    asked = list(product(several(options.temperature), several(options.batch_size), lengths))
    for name in ("temperature", "batch_size", "context_length"):
        values = several(getattr(options, name))
        if not values or len(set(values)) < len(values):
            raise ConfigError(f"{name} {values} holds no value, or one twice; give each once")
    chosen, source = chosen_prompts(options.prompts or None, options.limit, options.chat_template_kwargs)
    prompts = [replace(each, turns=each.turns[: options.max_turns]) for each in chosen]
    shared = SpeedSetting(
        options.max_new_tokens,
        repeats=options.repeats,
        warmup=options.warmup,
        seed=options.seed,
        fall_back=options.fall_back,
    )
    settings = [
        replace(shared, temperature=temperature, batch=batch, context_length=context)
        for temperature, batch, context in asked
    ]
    bare = [name.partition("@")[0] for name in options.methods or [AUTOREGRESSIVE]]  # a default has a baseline
    for setting in settings:
        setting.check({name: None if name == AUTOREGRESSIVE else name for name in bare}, prompts, source)
    given = training_text(options.training_data) if options.training_data else {}
    Path(options.output).mkdir(parents=True, exist_ok=True)  # where it cannot be made, nothing is loaded in vain
    target, methods = load_methods(options)
    longest = max((length for length in lengths if length is not None), default=None)
    room = target.max_positions
    if longest is not None and room is not None and longest + options.max_new_tokens > room:
        raise ConfigError(  # now, and not when it is this length's turn
            f"contexts of {longest} tokens and {options.max_new_tokens} new ones exceed the {room} positions of target "
            f"{target.name}; give fewer"
        )
    if target.name == bundled.TARGET and not given:
        given = training_text([bundled.path("data", name) for name in SHIPPED_TEXT])
    suite_names = "+".join(name.split(".")[0] for name in source.split("+"))
    label = options.label or f"{Path(target.name).name}, {suite_names}"
    runs: list[tuple[Path, str, SpeedSetting]] = []
    for setting in settings:
        folder, told = Path(options.output), f", temperature {setting.temperature:g}"
        if len(settings) > 1:
            context = setting.context_length
            told += f", batch {setting.batch}" + ("" if context is None else f", contexts of {context}")
            folder /= f"t{setting.temperature:g}-b{setting.batch}" + ("" if context is None else f"-c{context}")
        refuse_results(folder / RESULTS, settings_of(target, methods, prompts, source, setting))
        runs.append((folder, label if options.label and len(settings) == 1 else label + told, setting))
    found = []
    for folder, title, setting in runs:
        found.append(
            measure_in(
                folder,
                target,
                methods,
                prompts,
                setting,
                keep_journal=len(settings) > 1,
                training=given,
                label=title,
                source=source,
            )
        )
    for folder, *_ in runs:  # whose journal the same command, interrupted, takes over
        (folder / JOURNAL).unlink(missing_ok=True)
    return found


def training_text(sources: str | Sequence[str | Path]) -> dict[str, list[Conversation]]:
    """The conversations of files, by the files' names; by their paths where they share a name.

    Raises:
        DataError: one cannot be read, or holds token ids alone.
    """
    found = {}
    names = [Path(source).name for source in several(sources)]
    for name, source in zip(names, several(sources), strict=True):
        conversations = load_conversations(source, require_answers=False)
        if not any(conversation.messages for conversation in conversations):
            raise DataError(f"{source} holds token ids and no text to compare with; give the conversations themselves")
        found[name if names.count(name) == 1 else str(source)] = conversations
    return found


def load_methods(options: BenchOptions) -> tuple[Target, dict[str, Method]]:
    """The target, and the methods of the table in the order asked for.

    Raises:
        ConfigError: a predictor's name that is taken, an unknown drafter, or a rule for a method that takes none.
    """
    predictors = named_predictors(
        several(options.predictor or ([] if options.target is not None else [bundled.PREDICTOR]))
    )
    names = options.methods or ["transformers", AUTOREGRESSIVE, "ngram", "shape" if predictors else "suffix"]
    baselines = {AUTOREGRESSIVE, ASSISTED, *get_args(TransformersMethod)}
    for name, at, _ in (entry.partition("@") for entry in names):
        if at and name in baselines:
            raise ConfigError(f"method {name} takes no acceptance rule; leave out what stands behind it")
    told = [entry.partition("@")[2] or Match.name for entry in names]
    rules = {name: make_rule(name, options.typical_lossy, options.trs_lossy) for name in told}
    drafters = {entry.partition("@")[0] for entry in names} - baselines
    if kinds := sorted(
        {part for name in drafters for part in name.split("+") if needs_predictor(part)} - {"shape", "mtp"}
    ):
        raise ConfigError(
            f"method {kinds[0]} is a kind of predictor; the method shape measures each --predictor, whatever its kind"
        )
    refuse_unknown(drafters, predictors, options.pack)
    if options.pack is not None and not any("recipes" in name.split("+") for name in drafters):
        raise ConfigError(
            f"pack {options.pack} is given, and no method looks anything up in it; add recipes to methods"
        )
    how: dict[str, Any] = {"dtype": options.dtype, "prepacked": options.prepacked}
    if options.target is not None:
        target = Target.load(options.target, **how, **of_target(options))
    else:
        first = next(iter(predictors.values()))
        pair = of_pair(options)
        target = ShapeDecoder.from_pretrained(predictor=first, drafter="none", **how, **pair).target
    hottest = max(several(options.temperature))  # where the most is switched off
    announce_sampling(target, hottest)
    if isinstance(target, OpenVinoTarget):
        if asked := sorted({*get_args(TransformersMethod), ASSISTED}.intersection(options.methods or ())):
            raise ConfigError(f"method {asked[0]} decodes in torch, and the backend is openvino; leave one of them out")
        names = [name for name in names if name != "transformers"]
    methods: dict[str, Method] = {}
    for entry in names:
        name, _, acceptance = entry.partition("@")
        rule = rules[acceptance or Match.name]
        for label, method in _methods(name, predictors, target, options).items():
            if isinstance(rule, Match) or not isinstance(method, Drafter):
                methods[label] = method
            else:
                methods[f"{label}@{rule.name}"] = Configured(method, rule)
    return target, methods


def _methods(name: str, predictors: Mapping[str, str], target: Target, options: BenchOptions) -> dict[str, Method]:
    """What a method's name means: every predictor, one drafter, a hybrid with every predictor, or a baseline."""
    if name in get_args(TransformersMethod):
        return {name: cast(TransformersMethod, name)}
    if name == AUTOREGRESSIVE:
        return {name: None}
    if name == ASSISTED:
        hub = of_predictor(options)
        smaller = {label: folder for label, folder in predictors.items() if is_language_model(folder, **hub)}
        if not smaller:
            raise ConfigError(f"method {name} needs a smaller language model; give one with --predictor NAME=DIR")
        how: dict[str, Any] = {"dtype": options.dtype, "prepacked": options.prepacked}
        how |= {"device_map": options.draft_device or target.device, **hub}
        how |= only({"trust_remote_code"}, of_target(options))
        return {f"{name} by {label}": Assisted(Target.load(folder, **how)) for label, folder in smaller.items()}
    parts = name.split("+")
    found: dict[str, Method] = {}
    for label, folder in predictors.items() if "shape" in parts else [(name, None)]:
        own = "model" if folder is not None and is_language_model(folder, **of_predictor(options)) else "shape"
        decoder = ShapeDecoder.from_pretrained(
            predictor=folder,
            target=target,
            tree=options.tree,
            draft_device=options.draft_device,
            drafter=[own if part == "shape" else part for part in parts],
            pack=options.pack if "recipes" in parts else None,
            prepacked=options.prepacked,
            predictor_revision=options.predictor_revision,
            num_draft_tokens=options.num_draft_tokens,
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
        if name in {*named, *DRAFTERS, AUTOREGRESSIVE, "recipes", ASSISTED, *get_args(TransformersMethod)}:
            raise ConfigError(f"predictor name {name} is taken; give each its own with --predictor NAME=DIR")
        named[name] = folder
    return named
