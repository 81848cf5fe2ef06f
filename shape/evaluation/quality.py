"""How good what a decoder writes is, for lossy ways of decoding above all, beside the target's own text.

The command is `shape.cli.quality`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from shape import bundled
from shape.data.conversations import Prompt, evenly
from shape.data.reading import load_prompts
from shape.errors import ConfigError, DataError
from shape.evaluation import sandbox
from shape.evaluation.correctness import final_number, known_number, program
from shape.evaluation.environment import Environment
from shape.evaluation.journal import Journal
from shape.evaluation.quality_results import Ahead, QualityRecord, QualityResults, Written, added
from shape.evaluation.similarity import Encoder, Likeness
from shape.evaluation.speed import describe, prompts_hash, target_settings
from shape.features.store import Stored
from shape.generation.decoder import ShapeDecoder
from shape.generation.rules import RULES, Match, Rule, TrsLossy, TypicalLossy, make_rule
from shape.networks.teacher_forcing import Reader, forced_drafts
from shape.target.loading import PairOptions, of_pair, recorded
from shape.target.model import announce

PLAIN, SHAPE, ALONE, BEAM = "plain", "shape", "drafter-alone", "beam"
TOO_LONG = "a prompt and its answer exceed the target's positions"
MODES = (PLAIN, SHAPE, *(name for name in RULES if name != Match.name), ALONE, BEAM)


@dataclass
class QualityOptions(PairOptions):
    """What to measure.

    Args:
        output: folder for quality.json, quality.md and answers.jsonl.
        predictor: folder, hub id or bundled name of a trained predictor.
        target: path or hub id; default: the predictor's own.
        prompts: JSON lines of prompts, one file or several; default: the bundled bench split.
        chat_template_kwargs: given to the target's chat template, for example {"enable_thinking": false}.
        limit: prompts of each file, evenly chosen; default: all.
        max_new_tokens: longest answer.
        modes: ways of decoding, of plain, shape, typical-lossy, trs-lossy, rejection, traversal, drafter-alone, beam.
        temperatures: every mode writes at each; 0 is greedy, and the only one of beam.
        typical_lossy: parameters of the rule typical-lossy.
        trs_lossy: parameters of the rule trs-lossy.
        beams: of beam search.
        encoder: folder or hub id of a Hugging Face encoder (or decoder) that compares texts; without one nothing does.
        run_code: run the programs that answer prompts with tests, which is UNTRUSTED CODE, written by a model: with
            limits, and cut off as far as this machine allows (see shape/evaluation/sandbox.py).
        limits: of each program.
        timed: also report speed; only means something on a machine that does nothing else.
        seed: of the sampling, for the first prompt; the others count up.
        dtype: of the target.
        label: heading of the table.
    """

    output: str = "quality-results"
    predictor: str = "quickstart-shape"
    target: str | None = None
    prompts: list[str] | str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    limit: int | None = None
    max_new_tokens: int = 128
    modes: list[str] = field(default_factory=lambda: [PLAIN, SHAPE, TypicalLossy.name, TrsLossy.name, ALONE])
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    typical_lossy: TypicalLossy = field(default_factory=TypicalLossy)
    trs_lossy: TrsLossy = field(default_factory=TrsLossy)
    beams: int = 4
    encoder: str | None = None
    run_code: bool = False
    limits: sandbox.Limits = field(default_factory=sandbox.Limits)
    timed: bool = False
    seed: int = 0
    dtype: str | None = None
    label: str = ""


@dataclass(frozen=True)
class _Answer:
    """One mode's answer: the text's ids and seconds that it took."""

    tokens: list[int]
    seconds: float


class _Writer:
    """Target and predictor, ready to answer in every mode."""

    def __init__(self, options: QualityOptions, decoder: ShapeDecoder) -> None:
        self.options, self.target = options, decoder.target
        self.plain = ShapeDecoder(decoder.target)
        self.drafting = ShapeDecoder(decoder.target, decoder.drafter, fall_back=False)
        self.drafter = decoder.drafter
        if self.drafter is None or self.drafter.predictor is None:
            raise ConfigError(f"predictor {options.predictor} is no predictor of shape.train; give one that is")
        self.reader = Reader(self.drafter.predictor, self.target)
        self.labels = {
            label(mode, temperature): (mode, temperature)
            for temperature in options.temperatures
            for mode in options.modes
            if mode != BEAM or temperature == 0
        }
        self.rules = {mode: self._rule(mode) for mode in options.modes if mode not in (PLAIN, BEAM)}
        for rule in self.rules.values():
            rule.fit(self.drafter, self.target)  # what cannot be served is said before anything is measured

    def _rule(self, mode: str) -> Rule:
        if mode == ALONE:
            return TrsLossy(k=1, depth=self.reader.predictor.config.num_steps)
        return Match() if mode == SHAPE else make_rule(mode, self.options.typical_lossy, self.options.trs_lossy)

    def describe(self, mode: str) -> str:
        """What a mode is, for the record."""
        if mode == PLAIN:
            return "the target's own text"
        if mode == BEAM:
            return f"transformers' beam search, {self.options.beams} beams"
        drafter = describe(self.rules[mode].fit(self.drafter, self.target), self.target.device)
        judged = "every drafted token stands unjudged" if mode == ALONE else f"acceptance {self.rules[mode]}"
        return f"{drafter}, {judged}"

    def __call__(self, name: str, context: Tensor, seed: int) -> _Answer:
        """Answers (1, L) ids."""
        mode, temperature = self.labels[name]
        options: dict[str, Any] = {"max_new_tokens": self.options.max_new_tokens, "do_sample": temperature > 0}
        if temperature > 0:
            options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        mask = torch.ones_like(context)
        started = perf_counter()
        if mode == BEAM:
            text = self.target.model.generate(
                context, attention_mask=mask, num_beams=self.options.beams, **options, use_cache=True
            )
        elif mode == PLAIN:
            text = self.plain.generate(context, mask, seed=seed, **options)
        else:
            text = self.drafting.generate(context, mask, seed=seed, acceptance=self.rules[mode], **options)
        assert isinstance(text, Tensor)
        tokens = text[0, context.shape[1] :].tolist()
        seconds = perf_counter() - started
        ends = [at for at, token in enumerate(tokens) if token in self.target.eos_token_ids]
        return _Answer(tokens[: ends[0] + 1] if ends else tokens, seconds)

    @torch.no_grad()
    def nats(self, context: Tensor, answer: Sequence[int]) -> float:
        """-log p of an answer behind (1, L) ids, under the target."""
        ids = torch.cat([context, context.new_tensor([list(answer)])], dim=1)
        states = self.target.features(ids)[:, context.shape[1] - 1 : -1]
        log_p = self.target.logits(states).float().log_softmax(-1)
        return -float(log_p[0].gather(1, ids[0, context.shape[1] :, None]).double().sum())

    def ahead(self, context: Tensor, answer: Sequence[int], encoder: Encoder | None) -> list[Ahead]:
        """How the drafts stand by lookahead, on the target's own text."""
        predictor, tokenizer = self.reader.predictor, self.target.tokenizer
        ids = torch.cat([context, context.new_tensor([list(answer)])], dim=1)
        hidden = self.target.features(ids, predictor.config.feature_layers)[0].to(predictor.dtype)
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

    def fits(self, context: Tensor) -> bool:
        limit = self.target.max_positions
        return limit is None or context.shape[1] + self.options.max_new_tokens <= limit

    def record(self, prompt: Prompt, number: int) -> tuple[QualityRecord, list[dict[str, Any]], str | None]:
        """Sums and texts of one prompt, and why it was cut short."""
        written: dict[str, list[Written]] = {name: [] for name in self.writer.labels}
        ahead: list[list[Ahead]] = []
        texts, cut = [], None
        for temperature in self.options.temperatures:
            names = [name for name, (_, at) in self.writer.labels.items() if at == temperature]
            messages = prompt.opening
            for turn in range(len(prompt.turns)):
                if turn > 0:
                    messages = [*messages, {"role": "user", "content": prompt.turns[turn]}]
                context = self.target.encode(messages, prompt.template)
                if not self.fits(context):
                    cut = f"{TOO_LONG} at turn {turn + 1}"
                    break
                first = (number + turn) % len(names)  # no mode is always the first, which counts where time does
                answers = {
                    name: self.writer(name, context, self.options.seed + number)
                    for name in names[first:] + names[:first]
                }
                own = answers[label(PLAIN, temperature)]
                decoded = {name: self._decode(answers[name]) for name in names}
                for name in names:
                    score = self._score(prompt, turn, context, answers[name], own, decoded[name])
                    written[name].append(score)
                    texts.append({"id": prompt.id, "turn": turn, "mode": name, "text": decoded[name]})
                self._compare(written, decoded, names, decoded[label(PLAIN, temperature)])
                if temperature == 0:
                    ahead.append(self.writer.ahead(context, own.tokens, self.encoder))
                messages = [*messages, self.target.message(own.tokens, prompt.template)]
        sums = {name: added(parts) for name, parts in written.items()}
        by_lookahead = [added(parts) for parts in zip(*ahead, strict=True)]
        return QualityRecord(prompt.id, prompt.category, sums, by_lookahead), texts, cut

    def _decode(self, answer: _Answer) -> str:
        return self.target.tokenizer.decode(answer.tokens, skip_special_tokens=True)

    def _score(self, prompt: Prompt, turn: int, context: Tensor, answer: _Answer, own: _Answer, text: str) -> Written:
        bigrams = list(pairwise(answer.tokens))
        wanted = known_number(prompt.references[turn]) if turn < len(prompt.references) else None
        tested = prompt.checks if self.options.run_code and turn == len(prompt.turns) - 1 else None
        passed = tested is not None and sandbox.run(program(prompt, tested, text), self.options.limits) is None
        return Written(
            answers=1,
            tokens=len(answer.tokens),
            nats=self.writer.nats(context, answer.tokens),
            ended=int(answer.tokens[-1] in self.target.eos_token_ids),
            equal=int(answer.tokens == own.tokens),
            bigrams=len(bigrams),
            distinct_bigrams=len(set(bigrams)),
            sums=int(wanted is not None),
            sums_right=int(wanted is not None and final_number(text) == wanted),
            programs=int(tested is not None),
            programs_right=int(passed),
            seconds=answer.seconds if self.options.timed else 0.0,
        )

    def _compare(
        self, written: Mapping[str, list[Written]], decoded: Mapping[str, str], names: Sequence[str], own: str
    ) -> None:
        """All answers of a turn with the target's own, in one batch."""
        if self.encoder is not None:
            alike = self.encoder.compare([decoded[name] for name in names], [own] * len(names))
            for name, like in zip(names, alike, strict=True):
                written[name][-1] = replace(written[name][-1], **_pair(like))


def _chosen(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    return prompts if limit is None else evenly(prompts, limit)


def run(options: QualityOptions) -> QualityResults:
    """Measures, and writes quality.json, quality.md and answers.jsonl."""
    _check(options)
    named = [options.prompts] if isinstance(options.prompts, str) else options.prompts
    sources = [Path(name) for name in named] if named else [bundled.path("data", "bench.jsonl")]
    prompts = [
        prompt
        for source in sources
        for prompt in _chosen(load_prompts(source, options.chat_template_kwargs), options.limit)
    ]
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise DataError("two prompts share an id; give every prompt its own")
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
    target = decoder.target
    announce(target)
    writer = _Writer(options, decoder)
    encoder = None if options.encoder is None else Encoder.load(options.encoder, target.device)
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
        "prompts": "+".join(source.name for source in sources),
        "prompts_hash": prompts_hash(prompts),
        "modes": {name: writer.describe(mode) for name, (mode, _) in writer.labels.items()},
        "isolation": isolation,
    }
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder / "records.jsonl", settings | environment.machine())
    finished = {line["record"]["id"]: line for line in journal.records}
    if options.timed and len(finished) < len(measured):
        for name in writer.labels:  # warms up
            writer(name, target.encode(measured[0].opening, measured[0].template), options.seed)
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
        own={name: label(PLAIN, temperature) for name, (_, temperature) in writer.labels.items()},
        environment=environment,
        records=tuple(QualityRecord.from_dict(line["record"]) for line in lines),
        skipped={**left_out, **{line["record"]["id"]: line["cut"] for line in lines if line["cut"]}},
    )
    (folder / "quality.json").write_text(results.to_json())
    (folder / "quality.md").write_text(results.to_markdown())
    texts_of = (json.dumps(text) + "\n" for line in lines for text in line["texts"])
    (folder / "answers.jsonl").write_text("".join(texts_of))
    assert journal.path is not None
    journal.path.unlink()
    return results


def _check(options: QualityOptions) -> None:
    """Raises ConfigError for the first value that cannot be meant."""
    for name, least in (("limit", 1), ("max_new_tokens", 1), ("beams", 2)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}; give at least {least}")
    if unknown := [mode for mode in options.modes if mode not in MODES]:
        raise ConfigError(f"mode {unknown[0]!r} is unknown; use some of {', '.join(MODES)}")
    if PLAIN not in options.modes:
        raise ConfigError(f"the modes hold nothing to compare with; add {PLAIN}")
    if not options.temperatures or min(options.temperatures) < 0:
        raise ConfigError(f"temperatures are {options.temperatures}; give one or more, none below 0")
    if BEAM in options.modes and 0 not in options.temperatures:
        raise ConfigError(f"{BEAM} search is greedy; add temperature 0, or leave the mode out")
