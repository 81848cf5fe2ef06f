"""What trained variants write by lossy rules, and how far ahead their drafts are right (`eval.quality`)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from eval.ablation.options import AblationOptions, folder_name
from eval.ablation.plan import Run
from eval.ablation.results import Text
from eval.quality import QualityOptions, written
from eval.text_quality.results import Ahead, QualityRecord, QualityResults, Written
from eval.text_quality.similarity import Encoder
from shape.data.conversations import Prompt
from shape.evaluation.results import AUTOREGRESSIVE
from shape.generation.decoder import ShapeDecoder
from shape.target.model import Target

FOLDER = "texts"  # of the journals by which an interrupted measurement goes on


def texts_of(
    options: AblationOptions, runs: Sequence[Run], target: Target, prompts: Sequence[Prompt], source: str
) -> dict[str, Text]:
    """By variant, seeds pooled; empty where no lossy rule is asked for."""
    chosen = options.measure
    if not chosen.lossy:
        return {}
    encoder = None if chosen.encoder is None else Encoder.load(chosen.encoder, target.device)
    found: dict[str, dict[int, QualityResults]] = {}
    for run in runs:
        asked = QualityOptions(
            output=str(Path(options.output, FOLDER, folder_name(f"{run.variant}-{run.seed}"))),
            predictor=str(run.folder),
            max_new_tokens=chosen.max_new_tokens,
            methods=[AUTOREGRESSIVE, *chosen.lossy],
            temperature=chosen.temperatures,
            encoder=chosen.encoder,
            seed=chosen.seed,
        )
        decoder = ShapeDecoder.from_pretrained(run.folder, target=target)
        found.setdefault(run.variant, {})[run.seed], _ = written(asked, decoder, prompts, source, encoder)
    return {variant: _text(by_seed) for variant, by_seed in found.items()}


def _text(by_seed: Mapping[int, QualityResults]) -> Text:
    together = pooled(list(by_seed.values()))
    perplexities = {
        mode: {seed: one.summary[mode].perplexity.value for seed, one in by_seed.items()} for mode in together.modes
    }
    return Text(together.summary, perplexities, together.ahead)


def pooled(results: Sequence[QualityResults]) -> QualityResults:
    """The same prompts answered by the same modes of several predictors: sums are added up prompt by prompt."""
    records = tuple(
        QualityRecord(
            of[0].id,
            of[0].category,
            {mode: Written.total([one.written[mode] for one in of]) for mode in of[0].written},
            [Ahead.total(parts) for parts in zip(*(one.ahead for one in of), strict=True)],
        )
        for of in zip(*(one.records for one in results), strict=True)
    )
    return replace(results[0], records=records)
