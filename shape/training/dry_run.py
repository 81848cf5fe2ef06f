"""`python -m shape.train --dry-run`: what a training would take, said before anything is done.

Where the target's weights are at hand and fit into memory, some conversations are answered, their features computed and
a few steps trained on them, in a folder that is deleted again, and a draft is timed beside a step of the target.
Elsewhere config.json is enough, and hours are those of an accelerator that is assumed.
"""

import logging
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, cast

import psutil
import pytorch_lightning as pl
import torch
from huggingface_hub import try_to_load_from_cache

from shape import bundled
from shape.data.backends import sampling
from shape.data.conversations import Conversation, evenly
from shape.data.encoding import Encoded, encode_row
from shape.data.reading import load_conversations
from shape.data.regeneration import regenerate
from shape.data.statistics import DataStatistics
from shape.drafters import TrainedDrafter
from shape.features.extraction import compute_features, extract, place, single_texts
from shape.features.storage import Storage
from shape.files import human_bytes
from shape.generation.answers import LocalBackend
from shape.generation.decoder import ShapeDecoder
from shape.generation.timing import draft_cost
from shape.networks.base import Predictor
from shape.target.loading import dtype_of, tokenizer_of
from shape.target.model import Target
from shape.target.size import Size
from shape.training import preparation
from shape.training.defaults import resolve
from shape.training.forecast import Draft, Forecast, Hours, target_bytes
from shape.training.options import TrainOptions
from shape.training.run import make_module

_STEPS = 4  # trained, of which all but the first are timed
_ANSWER = 64  # tokens of the answers that are timed
_LETTERS = 4  # of a token, where there is no tokenizer


def dry_run(options: TrainOptions) -> str:
    """The forecast, and what it rests on, for people.

    Raises:
        ConfigError, DataError, UnsupportedTarget: what cannot be trained on.
    """
    options.check()
    first, size, config = preparation.sized_before_loading(options)
    dtype = dtype_of(options.dtype, config)
    conversations = preparation.load_data(options)
    for_validation = preparation.validation_data(options)
    held_out = set() if for_validation else preparation.held_out_numbers(options, conversations)
    tokenizer, notes = tokenizer_of(options.target, options), []
    if tokenizer is None:
        text = _by_letters(conversations)
        notes.append(f"tokens: taken to be {_LETTERS} letters each, for want of the target's tokenizer")
    else:
        excluded = preparation.excluded_numbers(first, conversations, held_out, for_validation)
        text = preparation.text_to_learn(first, conversations, excluded, tokenizer)
    if options.writes_answers:
        if text.answers == 0:
            each = first.longest_answer // 2
            text = _answered(text, conversations, each)
            notes.append(f"answers: taken to be half as long as they may be, {each} tokens")
        else:
            notes.append("answers: the target's own are taken to be as long as those in the data")
    resolved = resolve(options, size, text)
    draft = hours = None
    if reason := "there is no tokenizer" if tokenizer is None else _obstacle(resolved, size, dtype):
        notes.append(f"measured: nothing, as {reason}")
    else:
        logging.getLogger(__name__).info("measuring answers, features, steps and drafts; this takes a while")
        try:
            draft, hours = _measured(resolved, conversations, text)
        except torch.OutOfMemoryError:
            notes.append(
                "measured: nothing, as memory ran out; so may the training: see --regeneration.batch_size, "
                "--extraction.batch_size and --trainer.accumulate_grad_batches"
            )
    return "\n".join([*Forecast(resolved, size, text, dtype, draft, hours).lines, *notes])


def _by_letters(conversations: Sequence[Conversation]) -> DataStatistics:
    """What the conversations hold, without a tokenizer."""
    messages = [message for conversation in conversations for message in conversation.messages]
    letters = sum(len(message.content) for message in messages)
    answers = [len(message.content) for message in messages if message.role == "assistant"]
    count = len(conversations)
    return DataStatistics(count, letters / _LETTERS / count, sum(answers) / max(letters, 1), len(answers) / count)


def _answered(text: DataStatistics, conversations: Sequence[Conversation], each: int) -> DataStatistics:
    """The same with an answer of so many tokens to every question."""
    asked = _questions(conversations)
    tokens = text.tokens + asked * each
    return DataStatistics(text.conversations, tokens, asked * each / tokens, asked)


def _questions(conversations: Sequence[Conversation]) -> float:
    """Questions in one conversation, in the mean."""
    return sum(message.role == "user" for one in conversations for message in one.messages) / len(conversations)


def _read_again(text: DataStatistics, conversations: Sequence[Conversation]) -> float:
    """Of each token of a text, how often it is read for a later answer: every turn reads the conversation before it."""
    turns = _questions(conversations)
    whole = text.turns > 1 or turns <= 1  # and not every turn a text of its own (`DataStatistics.turn_by_turn`)
    return max(turns - 1, 0.0) / (2 if whole else turns + 1)


def _obstacle(options: TrainOptions, size: Size, dtype: torch.dtype) -> str | None:
    """Why nothing can be measured here."""
    if options.shard_target:
        return "the target is to be cut among processes"
    gpus = {"cuda": [torch.cuda], "gpu": [torch.cuda, torch.backends.mps]}  # as Lightning calls them
    if (named := gpus.get(options.trainer.accelerator)) and not any(kind.is_available() for kind in named):
        return f"there is no GPU here for --trainer.accelerator {options.trainer.accelerator}"
    where = bundled.resolve(options.target)
    cached = None if Path(where).is_dir() else try_to_load_from_cache(where, "config.json")
    folder = Path(cached).parent if isinstance(cached, str) else Path(where)
    if not any(path for ending in ("safetensors", "bin") for path in folder.glob(f"*.{ending}")):
        return f"the weights of {options.target} are not here"
    free = psutil.virtual_memory().available
    if torch.cuda.is_available():
        free = torch.cuda.mem_get_info()[0]
    needed = 1.2 * target_bytes(options, size, dtype)  # and what is computed with them
    return f"{human_bytes(needed)} for the target are more than is free" if needed > free else None


def _measured(
    options: TrainOptions, conversations: Sequence[Conversation], text: DataStatistics
) -> tuple[Draft | None, Hours]:
    """On one device: a batch of answers, their features, some steps, and drafts beside steps of the target.

    A portion is as large as one of a process of the run; hours are divided by the number of processes.
    """
    processes = options.trainer.processes
    one = replace(
        options.trainer,
        devices=1,
        num_nodes=1,
        strategy="auto",
        enable_progress_bar=False,
        accumulate_grad_batches=options.trainer.accumulate_grad_batches * processes,
    )
    target = preparation.load_target(options, one.for_extraction())
    tokens, hours = text.conversations * text.tokens, {}
    steps, layers = cast(int, options.training.steps), options.feature_options().layers
    sample = evenly(conversations, options.regeneration.batch_size)
    # Windows does not delete files that are mapped, as the store's still are.
    with TemporaryDirectory(ignore_cleanup_errors=True) as name, redirect_stdout(StringIO()):
        trial = _trial(replace(options, trainer=one), name)
        trainer = trial.trainer.for_extraction()
        place(target, trainer.strategy.root_device)
        asked = [each for each in sample if each.asks]
        if asked and options.writes_answers:
            seconds, answered = _answers(trial, target, asked, Path(name))
            written = sum(int(each.loss_mask.sum()) for each in _encoded(options, target, answered)[1])
            hours["answers"] = tokens * text.answers * seconds / max(written, 1) / 3600
            # A step that computes states takes longer for longer texts; the answers above were cut short.
            complete = [each for each in asked if each.messages[-1].role == "assistant"]
            sample = (options.online and complete) or answered
        texts, encoded = _encoded(options, target, sample)
        store, again = None, _read_again(text, conversations) if "answers" in hours else 0.0
        if not options.online:
            store = extract(target, texts, name, trial.feature_options(), trainer)
        if again or not options.online:
            start, size = monotonic(), options.extraction.batch_size
            for first in range(0, len(encoded), size):
                compute_features(target, encoded[first : first + size], layers).cpu()
            each = (monotonic() - start) / max(sum(len(one.input_ids) for one in encoded), 1)
            if not options.online:
                hours["features"] = tokens * each / 3600
            if again:
                hours["answers"] += tokens * again * each / 3600
        material = preparation.Material([trial], target, texts, set(), texts, [], Storage(name), trainer)
        module, data = make_module(trial, material, store)
        part = "features and training" if options.online else "training"
        hours[part] = steps * _seconds_of_a_step(trial, module, data) / 3600
    shared = f", and shared without loss among {processes} processes" if processes > 1 else ""
    found = Hours(
        {name: each / processes for name, each in hours.items()},
        f"measured here on {target.device} by {len(sample)} conversations and {_STEPS} steps{shared}",
    )
    predictor = module.predictor
    if not isinstance(predictor, Predictor):
        return None, found
    network = predictor.eval().to(target.device, target.dtype)  # type: ignore[arg-type]
    draft, step = draft_cost(ShapeDecoder(target, TrainedDrafter(network, options.tree)))
    return Draft(draft / step, f"{1e3 * draft:.3g} and {1e3 * step:.3g} ms, measured on {target.device}"), found


def _encoded(
    options: TrainOptions, target: Target, sample: Sequence[Conversation]
) -> tuple[list[Conversation], list[Encoded]]:
    """What is learned from conversations, as texts and as tokens."""
    length = cast(int, options.max_length)
    texts = single_texts(target, sample, length, options.skip_bad_rows)
    return texts, [encode_row(each, target.tokenizer, length, options.skip_bad_rows) for each in texts]


def _trial(options: TrainOptions, folder: str) -> TrainOptions:
    """A few steps of the same."""
    return replace(
        options,
        output=folder,
        features=None,
        training=replace(options.training, steps=_STEPS, conversations=None, max_minutes=None),
    )


def _answers(
    options: TrainOptions, target: Target, asked: Sequence[Conversation], folder: Path
) -> tuple[float, list[Conversation]]:
    """Seconds that the target took to answer, and its answers."""
    # All by the more frequent of greedy and sampled: divided, each half would take as long as a whole batch of a run.
    chosen = replace(options.regeneration, sampled_share=round(options.regeneration.sampled_share))
    longest = min(_ANSWER, options.longest_answer)
    with ShapeDecoder(target) as decoder:
        as_asked = sampling(chosen.temperature if chosen.sampled_share else 0.0)
        decoder.warm_up(batch_size=len(asked), max_new_tokens=longest, **as_asked)
        backend = LocalBackend(decoder, longest, chosen.temperature)
        start, output = monotonic(), folder / "own.jsonl"
        regenerate(asked, backend, output, chosen, progress=False)
        return monotonic() - start, load_conversations(output)


class _Watch(pl.Callback):
    """When each step was done."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_before_zero_grad(self, *_: Any) -> None:  # once per step, whatever its portions
        self.times.append(monotonic())


def _seconds_of_a_step(options: TrainOptions, module: pl.LightningModule, data: pl.LightningDataModule) -> float:
    """Of those behind the first."""
    watch = _Watch()
    trainer = options.trainer.for_training(_STEPS, logger=False, enable_checkpointing=False, callbacks=[watch])
    trainer.fit(module, data)
    return (watch.times[-1] - watch.times[0]) / (len(watch.times) - 1)
