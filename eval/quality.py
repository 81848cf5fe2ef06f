"""How good the text of a decoder is, for lossy ways of decoding above all, beside the target's own.

    python -m eval.quality --output quality-results                     # the quickstart pair
    python -m eval.quality --target T --predictor P --prompts gsm8k.jsonl --encoder E --output DIR
    python -m eval.quality --predictor P --prompts humaneval.jsonl --run_code true --output DIR

Modes: `autoregressive`, the target's own text; `shape`, the predictor's drafts under the lossless rule "match"; the
name of another acceptance rule (`typical-lossy`, `trs-lossy`, `rejection`, ...), of which `unverified-lossy` is the
drafter alone; `beam`, transformers' beam search. All answer the same prompts with the same seeds, and the
autoregressive answer is the context of the next turn for all.

Measured: perplexity under the target, equality, likeness to the target's own text by an encoder that the user names,
exact match on prompts whose `reference` is a number (GSM8K), pass@1 on prompts with `test` and `entry_point`
(HumanEval), and how often the drafter is right by how far it looks ahead (the paper's Tables 4, 5, 10, 12, 13). Writes
`quality.json` (sums prompt by prompt, and all figures), `quality.md` and `answers.jsonl` (the texts) to the output
folder. Until then finished prompts are kept there in `records.jsonl`, by which the same command goes on.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from eval import commands
from eval.text_quality import sandbox
from eval.text_quality.correctness import final_number, known_number, program
from eval.text_quality.results import Ahead, QualityRecord, QualityResults, Written
from eval.text_quality.sandbox import Limits
from eval.text_quality.similarity import Encoder, Likeness
from shape.data.backends import sampling
from shape.data.conversations import Prompt
from shape.errors import ConfigError, DataError, require
from shape.evaluation.environment import Environment
from shape.evaluation.journal import JOURNAL, Journal
from shape.evaluation.methods import describe, prompts_hash, target_settings
from shape.evaluation.options import several
from shape.evaluation.prompts import chosen_prompts, refuse_shared_ids
from shape.evaluation.results import AUTOREGRESSIVE
from shape.evaluation.runner import Run, Runner, by_decoder, by_transformers, rotated
from shape.features.store import Stored
from shape.generation.decoder import ShapeDecoder
from shape.generation.options import RuleOptions
from shape.generation.rules import RULES, Match, Rule, make_rule
from shape.networks.teacher_forcing import Reader, forced_drafts
from shape.target.loading import of_pair, recorded
from shape.target.model import announce

SHAPE, BEAM = "shape", "beam"
TOO_LONG = "a prompt and its answer exceed the target's positions"
MODES = (AUTOREGRESSIVE, SHAPE, *(name for name in RULES if name != Match.name), BEAM)


@dataclass
class QualityOptions(commands.OfPredictor, RuleOptions):
    """What to measure.

    Args:
        output: folder for quality.json, quality.md and answers.jsonl.
        prompts: JSON lines of prompts, one file or several; default: the bundled bench split.
        limit: prompts of each file, evenly chosen; default: all.
        max_new_tokens: longest answer.
        methods: ways of decoding, of autoregressive, shape, typical-lossy, trs-lossy, rejection, traversal,
            unverified-lossy, beam.
        temperature: every method writes at each; 0 is greedy, and the only one of beam. One, or several.
        beams: of beam search.
        encoder: folder or hub id of a Hugging Face encoder (or decoder) that compares texts; without one nothing does.
        run_code: run the programs that answer prompts with tests, which is UNTRUSTED CODE, written by a model: with
            limits, and cut off as far as this machine allows (see eval/text_quality/sandbox.py).
        limits: of each program.
        timed: also report speed; only means something on a machine that does nothing else.
        seed: of the sampling, for the first prompt; the others count up.
        label: heading of the table.
    """

    output: str = "quality-results"
    prompts: list[str] | str | None = None
    limit: int | None = None
    max_new_tokens: int = 128
    methods: list[str] = field(
        default_factory=lambda: ["autoregressive", "shape", "typical-lossy", "trs-lossy", "unverified-lossy"]
    )
    temperature: list[float] | float = field(default_factory=lambda: [0.0, 1.0])
    beams: int = 4
    encoder: str | None = None
    run_code: bool = False
    limits: Limits = field(default_factory=Limits)
    timed: bool = False
    seed: int = 0
    label: str = ""


class _Writer:
    """Target and predictor, ready to answer in every mode."""

    def __init__(self, options: QualityOptions, decoder: ShapeDecoder) -> None:
        self.options, self.target = options, decoder.target
        self.drafter, predictor = commands.trained(decoder, options.predictor)
        self.reader = Reader(predictor, self.target)
        self.labels = {
            label(mode, temperature): (mode, temperature)
            for temperature in several(options.temperature)
            for mode in options.methods
            if mode != BEAM or temperature == 0
        }
        self.runners = {name: self._runner(mode, temperature) for name, (mode, temperature) in self.labels.items()}

    def _runner(self, mode: str, temperature: float) -> Runner:
        options = {"max_new_tokens": self.options.max_new_tokens, **sampling(temperature)}
        if mode == BEAM:
            return by_transformers(self.target, num_beams=self.options.beams, use_cache=True, **options)
        if mode == AUTOREGRESSIVE:
            return by_decoder(ShapeDecoder(self.target), **options)
        return by_decoder(ShapeDecoder(self.target, self.drafter, fall_back=False), self._rule(mode), **options)

    def _rule(self, mode: str) -> Rule:
        return Match() if mode == SHAPE else make_rule(mode, self.options.typical_lossy, self.options.trs_lossy)

    def describe(self, mode: str) -> str:
        """What a mode is, for the record."""
        if mode == AUTOREGRESSIVE:
            return "the target's own text"
        if mode == BEAM:
            return f"transformers' beam search, {self.options.beams} beams"
        rule = self._rule(mode)
        drafter = describe(rule.fit(self.drafter, self.target), self.target.device)
        return f"{drafter}, acceptance {rule}"

    @torch.no_grad()
    def nats(self, context: Tensor, answer: Sequence[int]) -> float:
        """-log p of an answer behind (1, L) ids, under the target."""
        ids = torch.cat([context, context.new_tensor([list(answer)])], dim=1)
        states = self.target.features(ids)[:, context.shape[1] - 1 : -1]
        log_p = self.target.logits(states).float().log_softmax(-1)
        return -float(log_p[0].gather(1, ids[0, context.shape[1] :, None]).double().sum())

    def ahead(self, context: Tensor, answer: Sequence[int], encoder: Encoder | None) -> list[Ahead]:
        """How often the draft n tokens ahead is right, on the target's own text."""
        predictor, tokenizer = self.reader.predictor, self.target.tokenizer
        ids = torch.cat([context, context.new_tensor([list(answer)])], dim=1)
        hidden = self.target.features(ids, predictor.config.target_layers)[0].to(predictor.dtype)
        loss_mask = torch.arange(ids.shape[1]) >= context.shape[1]
        found = forced_drafts(self.reader, Stored(ids[0].cpu(), loss_mask, hidden.cpu()))
        columns = [
            (drafts[kept], true[kept])
            for drafts, true, kept in zip(found.drafts.T, found.true.T, found.mask.T, strict=True)
        ]
        counts = [Ahead(positions=len(true), right=int((drafts == true).sum())) for drafts, true in columns]
        if encoder is None:
            return counts
        texts = [[tokenizer.decode(part, skip_special_tokens=True) for part in column] for column in columns]
        alike = encoder.compare(*map(list, zip(*texts, strict=True)))
        return [replace(one, **_pair(like)) if one.positions else one for one, like in zip(counts, alike, strict=True)]


def label(mode: str, temperature: float) -> str:
    """Of a mode in tables."""
    return f"{mode}, T = {temperature:g}"


def _pair(like: Likeness) -> dict[str, Any]:
    return {"pairs": 1, **asdict(like)}


class _Measurement:
    """Asks, and scores what was answered."""

    def __init__(self, options: QualityOptions, writer: _Writer, encoder: Encoder | None) -> None:
        self.options, self.writer, self.target, self.encoder = options, writer, writer.target, encoder
        self.temperatures = several(options.temperature)

    def fits(self, context: Tensor) -> bool:
        limit = self.target.max_positions
        return limit is None or context.shape[1] + self.options.max_new_tokens <= limit

    def record(self, prompt: Prompt, number: int) -> tuple[QualityRecord, list[dict[str, Any]], str | None]:
        """Sums and texts of one prompt, and why it was cut short."""
        written: dict[str, list[Written]] = {name: [] for name in self.writer.labels}
        ahead: list[list[Ahead]] = []
        texts, cut = [], None
        for temperature in self.temperatures:
            names = [name for name, (_, at) in self.writer.labels.items() if at == temperature]
            messages = prompt.opening
            for turn in range(len(prompt.turns)):
                if turn > 0:
                    messages = [*messages, {"role": "user", "content": prompt.turns[turn]}]
                context = self.target.encode(messages, prompt.template)
                if not self.fits(context):
                    cut = f"{TOO_LONG} at turn {turn + 1}"
                    break
                seeds = [self.options.seed + number]
                answers = {name: self.writer.runners[name]([context], seeds) for name in rotated(names, number + turn)}
                own = answers[label(AUTOREGRESSIVE, temperature)]
                decoded = {name: self._decode(answers[name]) for name in names}
                for name in names:
                    score = self._score(prompt, turn, context, answers[name], own, decoded[name])
                    written[name].append(score)
                    texts.append({"id": prompt.id, "turn": turn, "mode": name, "text": decoded[name]})
                self._compare(written, decoded, names, decoded[label(AUTOREGRESSIVE, temperature)])
                if temperature == 0:
                    ahead.append(self.writer.ahead(context, own.sequences[0], self.encoder))
                messages = [*messages, self.target.message(own.sequences[0], prompt.template)]
        sums = {name: Written.total(parts) for name, parts in written.items()}
        by_distance = [Ahead.total(parts) for parts in zip(*ahead, strict=True)]
        return QualityRecord(prompt.id, prompt.category, sums, by_distance), texts, cut

    def _decode(self, answer: Run) -> str:
        return self.target.tokenizer.decode(answer.sequences[0], skip_special_tokens=True)

    def _score(self, prompt: Prompt, turn: int, context: Tensor, answer: Run, own: Run, text: str) -> Written:
        (tokens,) = answer.sequences
        bigrams = list(pairwise(tokens))
        wanted = known_number(prompt.references[turn]) if turn < len(prompt.references) else None
        tested = prompt.checks if self.options.run_code and turn == len(prompt.turns) - 1 else None
        passed = tested is not None and sandbox.run(program(prompt, tested, text), self.options.limits) is None
        return Written(
            answers=1,
            tokens=len(tokens),
            nats=self.writer.nats(context, tokens),
            ended=int(tokens[-1] in self.target.eos_token_ids),
            equal=int([tokens] == own.sequences),
            bigrams=len(bigrams),
            distinct_bigrams=len(set(bigrams)),
            sums=int(wanted is not None),
            sums_right=int(wanted is not None and final_number(text) == wanted),
            programs=int(tested is not None),
            programs_right=int(passed),
            seconds=answer.prefill_seconds + answer.decode_seconds if self.options.timed else 0.0,
        )

    def _compare(
        self, written: Mapping[str, list[Written]], decoded: Mapping[str, str], names: Sequence[str], own: str
    ) -> None:
        """All answers of a turn with the target's own, in one batch."""
        if self.encoder is not None:
            alike = self.encoder.compare([decoded[name] for name in names], [own] * len(names))
            for name, like in zip(names, alike, strict=True):
                written[name][-1] = replace(written[name][-1], **_pair(like))


def run(options: QualityOptions) -> QualityResults:
    """Measures, and writes quality.json, quality.md and answers.jsonl."""
    _check(options)
    prompts, source = chosen_prompts(options.prompts or None, options.limit, options.chat_template_kwargs)
    refuse_shared_ids(prompts, source)
    coded = any(prompt.checks for prompt in prompts)
    if coded and not options.run_code:
        raise ConfigError(
            "some prompts have tests, and pass@1 needs to run the programs that the model writes, which is untrusted "
            "code: allow that with --run_code true, or give prompts without tests"
        )
    isolation = str(sandbox.require()) if coded else None
    decoder = ShapeDecoder.from_pretrained(
        predictor=options.predictor, target=options.target, dtype=options.dtype, **of_pair(options)
    )
    announce(decoder.target)
    encoder = None if options.encoder is None else Encoder.load(options.encoder, decoder.target.device)
    results, texts = written(options, decoder, prompts, source, encoder, isolation)
    folder = Path(options.output)
    (folder / "quality.json").write_text(results.to_json(), encoding="utf-8")
    (folder / "quality.md").write_text(results.to_markdown(), encoding="utf-8")
    (folder / "answers.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
    (folder / JOURNAL).unlink()
    return results


def written(
    options: QualityOptions,
    decoder: ShapeDecoder,
    prompts: Sequence[Prompt],
    source: str,
    encoder: Encoder | None = None,
    isolation: str | None = None,
) -> tuple[QualityResults, list[dict[str, Any]]]:
    """What a decoder writes in every mode, and the texts; kept prompt by prompt in a journal of the output folder.

    Args:
        source: what the prompts are, for the record.
        isolation: how programs are confined that are run.

    Raises:
        DataError: no prompt leaves room for an answer.
    """
    target, writer = decoder.target, _Writer(options, decoder)
    measurement = _Measurement(options, writer, encoder)
    rooms = [measurement.fits(target.encode(prompt.opening, prompt.template)) for prompt in prompts]
    measured = [prompt for prompt, room in zip(prompts, rooms, strict=True) if room]
    if not measured:
        raise DataError(f"no prompt leaves room for {options.max_new_tokens} new tokens; give shorter ones, or fewer")
    environment = Environment.capture(target.device)
    settings = {
        **recorded(options),
        "output": None,
        **target_settings(target),
        "predictor": Path(options.predictor).name,
        "encoder": None if options.encoder is None else Path(options.encoder).name,
        "prompts": source,
        "prompts_hash": prompts_hash(prompts),
        "modes": {name: writer.describe(mode) for name, (mode, _) in writer.labels.items()},
        "isolation": isolation,
    }
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / JOURNAL, settings | environment.machine())
    finished = {line["record"]["id"]: line for line in journal.records}
    if options.timed and len(finished) < len(measured):
        for runner in writer.runners.values():  # warms up
            runner([target.encode(measured[0].opening, measured[0].template)], [options.seed])
    for number, prompt in enumerate(tqdm(measured, desc="quality", unit="prompt")):
        if prompt.id not in finished:
            record, texts, cut = measurement.record(prompt, number)
            finished[prompt.id] = {"record": asdict(record), "texts": texts, "cut": cut}
            journal.append(finished[prompt.id])
    lines = [finished[prompt.id] for prompt in measured]
    left_out = {prompt.id: TOO_LONG for prompt, room in zip(prompts, rooms, strict=True) if not room}
    results = QualityResults(
        label=options.label or f"Quality of what is written, {settings['target']}",
        settings=settings,
        own={name: label(AUTOREGRESSIVE, temperature) for name, (_, temperature) in writer.labels.items()},
        environment=environment,
        records=tuple(QualityRecord.from_dict(line["record"]) for line in lines),
        skipped={**left_out, **{line["record"]["id"]: line["cut"] for line in lines if line["cut"]}},
    )
    return results, [text for line in lines for text in line["texts"]]


def _check(options: QualityOptions) -> None:
    """Raises ConfigError for the first value that makes no sense."""
    require(options, "limit max_new_tokens", least=1)
    require(options, "beams", least=2)
    if unknown := [mode for mode in options.methods if mode not in MODES]:
        raise ConfigError(f"method {unknown[0]!r} is unknown; use some of {', '.join(MODES)}")
    if AUTOREGRESSIVE not in options.methods:
        raise ConfigError(f"the methods hold nothing to compare with; add {AUTOREGRESSIVE}")
    temperatures = several(options.temperature)
    if min(temperatures, default=-1) < 0:
        raise ConfigError(f"temperature is {options.temperature}; give one or more, none below 0")
    if BEAM in options.methods and 0 not in temperatures:
        raise ConfigError(f"{BEAM} search is greedy; add temperature 0, or leave the mode out")


main = commands.program(lambda options: print(run(options).to_markdown()), QualityOptions)


if __name__ == "__main__":
    main()
