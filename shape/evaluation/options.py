"""What the commands that measure can be asked for: bench, check and efficiency. Nothing heavy is imported."""

from dataclasses import dataclass, field
from typing import Any

from shape.generation.options import DraftOptions
from shape.target.options import AnsweringOptions, PairOptions


def several(given: Any) -> list[Any]:
    """What an option that takes one or several was given."""
    return given if isinstance(given, list) else [given]


@dataclass
class BenchOptions(DraftOptions):
    """What to measure.

    Args:
        output: folder for results.json and results.md.
        predictor: trained predictors, each DIR or NAME=DIR with the name for the table; default: quickstart-shape, or
            none beside a target.
        target: path or hub id of the target; default: the one the first predictor was trained for.
        prompts: JSON lines with turns, messages, prompt or question; a bundled suite, bench (the default) or kinds; or
            a dataset of the hub, NAME, NAME:SPLIT or NAME:CONFIG:SPLIT (HuggingFaceH4/mt_bench_prompts,
            openai/gsm8k:main:test); or several, as a list.
        max_turns: answer so many turns of each prompt at most; default: all.
        training_data: what target and predictor learned from, a file or several as a list; prompts and answers are
            compared with it. Default: what ships, for the target that ships.
        methods: what to measure: transformers, transformers-lookup (its own prompt lookup), transformers-assisted (its
            assisted generation, with every predictor that is a smaller model), autoregressive (our loop without a
            drafter), shape (every predictor), names of other drafters, and several joined by + for a hybrid; default:
            transformers, autoregressive, ngram and shape, or suffix where there is no predictor; behind a name
            @rejection, @traversal, @transport, @typical-lossy, @trs-lossy or @unverified-lossy is the acceptance rule,
            otherwise match.
        limit: so many prompts of each file at most, evenly chosen from every category.
        max_new_tokens: longest answer.
        temperature: 0 decodes greedily; above, every method samples with the same seed per prompt. One, or several.
        batch_size: prompts answered at once. One number, or several.
        context_length: tokens that every context is filled up to with other prompts' text; default: as they are. One
            number, or several.
        repeats: timed runs per answer, of which the one of median decode time counts.
        warmup: prompts answered once by every method before the measurement.
        seed: of the sampling.
        prepacked: weights in the layout of the CPU's matrix kernels, for all methods; default: where there is room.
        pack: recipes that the method recipes looks up.
        label: heading of the table.
        fall_back: decode without drafts for a while where drafting does not pay, and on a CPU verify no more of a draft
            than is worth it; false always drafts, and shows the drafter's own acceptance length; a number is the
            acceptance length below which drafting pauses.
    """

    output: str = "bench-results"
    predictor: list[str] | None = None
    target: str | None = None
    prompts: list[str] | str | None = None
    max_turns: int | None = None
    training_data: list[str] | str | None = None
    methods: list[str] | None = None
    limit: int | None = None
    max_new_tokens: int = 128
    temperature: float | list[float] = 0.0
    batch_size: int | list[int] = 1
    context_length: int | list[int] | None = None
    repeats: int = 1
    warmup: int = 2
    seed: int = 0
    prepacked: bool | None = None
    pack: str | None = None
    label: str = ""
    fall_back: bool | float = True


@dataclass
class CheckOptions(AnsweringOptions):
    """What to look at.

    Args:
        target: path, hub id or bundled name; default: the predictor's own, or the bundled target.
        predictor: folder, hub id or bundled name of a trained predictor, or of a smaller model with the target's
            tokens; default: an untrained predictor of the default size that runs once per depth, which costs at least
            as much per draft as a trained one of the default kind.
        pack: a file of `shape recipes compile`.
        drafter: measured on the prompts, interleaved: names as in `shape bench`; default: those without training, the
            target's own MTP layer, the predictor, the recipes, and hybrids of these; [] measures none.
        prompts: of the task in question: JSON lines, a bundled suite (bench, kinds) or a data set of the hub, as in
            `shape bench`; default: the bundled validation prompts.
        limit: prompts, evenly chosen from every category, on which acceptance is estimated and drafters are measured.
        max_new_tokens: of each answer.
        batch_size: prompts decoded together.
        temperature: 0 decodes greedily.
        seed: of the sampling.
        output: a JSON file for the report.
    """

    target: str | None = None
    predictor: str | None = None
    pack: str | None = None
    drafter: list[str] | None = None
    prompts: str | None = None
    limit: int = 12
    max_new_tokens: int = 64
    batch_size: int = 1
    temperature: float = 0.0
    seed: int = 0
    output: str | None = None


@dataclass
class EfficiencyOptions(PairOptions):
    """What to measure.

    Args:
        output: folder for efficiency.json and efficiency.md.
        predictor: folder, hub id or bundled name of a trained predictor; "none" measures without one.
        target: path or hub id; default: the predictor's own.
        prompts: JSON lines, a bundled suite (bench, kinds) or a data set of the hub; default: bench.
        chat_template_kwargs: given to the target's chat template, for example {"enable_thinking": false}.
        limit: prompts, evenly chosen from every category; at larger batches their answers are measured together.
        repeats: how often each is answered, by every method in turn, for narrower intervals.
        max_new_tokens: longest answer.
        dtype: of the target, one or several.
        temperature: 0 is greedy. One, or several.
        batch_size: prompts decoded together. One number, or several.
        drafter: measured beside the predictor.
        prepacked: weights in the layout of the CPU's matrix kernels; default: if there is room.
        label: heading of the table.
    """

    output: str = "efficiency-results"
    predictor: str = "quickstart-shape"
    target: str | None = None
    prompts: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    limit: int = 24
    repeats: int = 1
    max_new_tokens: int = 64
    dtype: list[str] | str = field(default_factory=lambda: ["float32", "bfloat16"])
    temperature: list[float] | float = field(default_factory=lambda: [0.0, 1.0])
    batch_size: list[int] | int = 1
    drafter: list[str] = field(default_factory=lambda: ["ngram"])
    prepacked: bool | None = None
    label: str = ""
