"""Regeneration: the target writes every answer of a data set itself, so that a drafter learns its words."""

import gzip
import hashlib
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch import distributed
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from shape.data.backends import Answer, Backend, Request
from shape.data.conversations import Conversation, fingerprint
from shape.data.encoding import texts_of_turns
from shape.data.endpoint import patiently
from shape.data.journal import AnswerJournal
from shape.data.options import AnswerOptions
from shape.data.reading import load_conversations
from shape.errors import ConfigError, DataError
from shape.files import appears, locked, written_whole
from shape.target.chat import Message

BATCHES_PER_CHUNK = 32
_LONGEST_WAIT = timedelta(days=30)  # for processes whose share takes longer

Ask = Callable[[Sequence[Request]], Sequence[Answer | DataError | None]]


@dataclass(frozen=True)
class Share:
    """Which part of the work a process does.

    Attributes:
        rank, world_size: its number, and how many there are.
        barrier: waits until all are there, and raises where one is gone.
    """

    rank: int = 0
    world_size: int = 1
    barrier: Callable[[], object] = field(default=lambda: None)


@dataclass(frozen=True)
class Summary:
    """Counts of a finished run: rows written and left out, user messages, answers, and cut answers."""

    rows: int
    left_out: int
    questions: int
    answers: int
    unfinished: int


# The run ---------------------------------------------------------------------------------------------


def require_prompts(conversations: Iterable[Conversation]) -> None:
    """Raises DataError for the first conversation that nothing can be answered in."""
    for conversation in conversations:
        if not conversation.asks:
            what = "plain text" if conversation.kind == "text" else "token ids alone"
            raise DataError(f"conversation {conversation.id} is {what}, which has no prompt to answer; leave it out")


def regenerate(
    conversations: Sequence[Conversation],
    backend: Backend,
    output: str | Path,
    options: AnswerOptions | None = None,
    *,
    progress: bool = True,
    share: Share = Share(),
) -> Summary | None:
    """Let the backend answer every user message and prompt, and write the rows to `output`.

    In a conversation the answers are written in order, each based on those before it. An answer that is cut before its
    end is kept, marked `"finished": false`, and ends its conversation, for what followed would be based on something
    that the target did not say; so does a prompt that cannot be answered (too long, say), and, without a warning, one
    whose answer nobody would read. Conversations without any answer are left out. Existing assistant turns are ignored,
    but for calls of tools whose results follow: the target is asked there too, and the dialogue continues with the
    recorded call and its results.

    Where the backend knows token ids, rows hold them (`input_ids`, `loss_mask`), as they were read and written at every
    turn: one text, or several where the chat template rewrites earlier turns. These are what is learned from.

    Which conversations are sampled, and their noise, is a function of (seed, conversation id) alone. Batches are fixed
    too, so that a resumed run of the same batch size repeats them. An endpoint has no batches: `concurrency`
    conversations are answered at a time, independently of each other.

    Args:
        output: .jsonl or .jsonl.gz in the order of `conversations`; it appears only when complete. What is finished is
            kept in `output` + ".partial" (".partial.1" and so on of other processes), so that a killed run loses what
            is at hand only, and another number of processes may continue.
        options: all but temperature and longest answer, which are the backend's own.
        progress: show a bar.
        share: which part of the work is this process's.

    Returns:
        The counts; None in processes other than the first, which writes `output` once all have done their share.

    Raises:
        DataError: plain text among the conversations, or no answer at all.
        ConfigError: `output` exists, or was begun with other data or options.
    """
    output, options = Path(output), options or AnswerOptions()
    check_output(output)
    options.check()
    require_prompts(conversations)
    draws = [_draw(options.seed, conversation.id) for conversation in conversations]
    kinds = [(uniform < options.sampled_share, noise) for uniform, noise in draws]
    size = 1 if backend.concurrency > 1 else options.batch_size
    batches = _batches(conversations, [sampled for sampled, _ in kinds], size)
    output.parent.mkdir(parents=True, exist_ok=True)
    settings = _settings(conversations, backend, options)
    journal = AnswerJournal(output.with_name(output.name + ".partial"), settings, share.rank)
    share.barrier()  # all have seen what is done, and nobody has cleared it away
    mine = batches[share.rank :: share.world_size]
    # Of a batch of another size, a part may be answered.
    left = [rest for batch in mine if (rest := [each for each in batch if each not in journal.places])]

    def answer(batch: list[int], ask: Ask) -> None:
        results = _answer_batch([conversations[i] for i in batch], [kinds[i] for i in batch], ask)
        journal.append([(index, *result) for index, result in zip(batch, results, strict=True)])

    disable = not progress or share.rank > 0
    with tqdm(desc="regenerate", total=len(mine), initial=len(mine) - len(left), disable=disable) as bar:
        _answer_all(answer, left, backend, bar.update)
    share.barrier()  # all have answered their share
    if share.rank > 0:
        return None

    def complete() -> bool:
        if len(journal.places) < len(conversations):
            journal.read()
        return len(journal.places) == len(conversations)

    appears(complete, output, DataError)
    return _finish(journal, output)


def check_output(output: Path) -> None:
    """Raises ConfigError if `output` is there already or has another form than JSON lines."""
    if not output.name.endswith((".jsonl", ".jsonl.gz")):
        raise ConfigError(f"output {output} is JSON lines; let its name end in .jsonl or .jsonl.gz")
    if output.exists():
        raise ConfigError(f"output {output} exists already; delete it or name another file")


def _settings(conversations: Sequence[Conversation], backend: Backend, options: AnswerOptions) -> dict[str, Any]:
    """All that answers depend on, but for the batch size, by which near-ties may fall: a run that is short of memory
    goes on with a smaller one.
    """
    chosen = {"sampled_share": options.sampled_share, "seed": options.seed}
    return {"data": fingerprint(conversations), **chosen, **backend.describe()}


def _draw(seed: int, identity: str) -> tuple[float, int]:
    """(uniform number in [0, 1), noise seed of 48 bits), a function of its arguments alone."""
    digest = hashlib.sha256(f"{seed}:{identity}".encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48, int.from_bytes(digest[6:12])


def _batches(conversations: Sequence[Conversation], sampled: Sequence[bool], size: int) -> list[list[int]]:
    """Indices of conversations answered together: of one kind; within a chunk alike in turns and length."""

    def key(index: int) -> tuple[bool, int, int, int]:
        messages = conversations[index].messages
        asked = sum(message.role != "assistant" for message in messages)
        # With the answers that the data has: a batch lasts as long as its longest one, and to a question with a long
        # answer the target's own is long, too.
        return sampled[index], asked, sum(len(message.content) for message in messages), index

    batches: list[list[int]] = []
    for start in range(0, len(conversations), size * BATCHES_PER_CHUNK):
        chunk = sorted(range(len(conversations))[start : start + size * BATCHES_PER_CHUNK], key=key)
        for kind in (False, True):
            alike = [index for index in chunk if sampled[index] == kind]
            batches += [alike[first : first + size] for first in range(0, len(alike), size)]
    return batches


def _answer_all(
    answer: Callable[[list[int], Ask], None],
    batches: Sequence[list[int]],
    backend: Backend,
    done: Callable[[], object],
) -> None:
    """Answer every batch, as many at a time as the backend takes, and report each.

    One that fails ends all: answers that are on their way are waited for, and no further ones are asked for.
    """
    stopped = getattr(backend, "stopped", threading.Event())  # an endpoint looks at it between attempts
    stopped.clear()

    def ask(requests: Sequence[Request]) -> Sequence[Answer | DataError | None]:
        return patiently(partial(backend.generate, requests), stopped)

    if backend.concurrency == 1:
        for batch in batches:
            answer(batch, ask)
            done()
        return
    with ThreadPoolExecutor(backend.concurrency) as threads:
        try:
            for each in as_completed([threads.submit(answer, batch, ask) for batch in batches]):
                each.result()
                done()
        except KeyboardInterrupt:
            # Threads would be waited for, whatever is raised; so this comes before somebody is told to do it.
            before = {each: signal.signal(each, lambda *_: os._exit(130)) for each in (signal.SIGINT, signal.SIGTERM)}
            told = "interrupted: answers on their way are waited for and kept; interrupt once more to end at once"
            tqdm.write(told, sys.stderr)
            stopped.set()
            threads.shutdown(cancel_futures=True)
            for number, handler in before.items():
                signal.signal(number, handler)
            raise
        finally:
            stopped.set()
            threads.shutdown(cancel_futures=True)


def _finish(journal: AnswerJournal, output: Path) -> Summary:
    """Write the rows in order, one by one, as a whole file, and delete the journal."""
    rows = left_out = questions = answers = unfinished = unknown = 0
    problems: list[str] = []
    with written_whole(output) as temporary:
        with _rows_file(temporary, output.suffix == ".gz") as file:
            for _, row, asked, problem in journal.entries():
                questions += asked
                if problem is not None:
                    problems.append(problem)
                if row is None:
                    left_out += 1
                    continue
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                turns = row.get("conversations", [{"from": "gpt", **row}])
                own = [turn for turn in turns if turn["from"] == "gpt" and turn.get("weight") != 0]
                rows, answers = rows + 1, answers + len(own)
                unfinished += sum("finished" in turn for turn in own)
                unknown += "input_ids" not in row
        if problems:
            warnings.warn(
                f"{len(problems)} conversations end early or are left out (the first: {problems[0]})",
                stacklevel=3,
            )
        if not rows:
            raise DataError(
                f"none of the {left_out} conversations has a user message that could be answered; give data with "
                "messages that the target's chat template takes, and that fit its positions and, in training, "
                f"max_length{f' ({problems[0]})' if problems else ''}"
            )
        if unknown:
            warnings.warn(
                f"{unknown} of {rows} conversations hold text alone, for the endpoint gives no token ids: where "
                "tokenising the text gives others than the target wrote, a drafter learns these; vLLM gives its ids",
                stacklevel=3,
            )
    journal.delete()
    return Summary(rows, left_out, questions, answers, unfinished)


@contextmanager
def _rows_file(path: Path, compressed: bool) -> Iterator[BufferedIOBase]:
    """To write to; compressed ones are the same bytes at any time and under any name."""
    with open(path, "wb") as file:
        if not compressed:
            yield file
            return
        with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
            yield packed


# One batch -------------------------------------------------------------------------------------------


def _answer_batch(
    conversations: Sequence[Conversation], kinds: Sequence[tuple[bool, int]], ask: Ask
) -> list[tuple[dict[str, Any] | None, int, str | None]]:
    """(row or None, user messages, what ended it early or None) of each; kinds: (sampled, noise seed)."""
    histories: list[list[Message]] = [[] for _ in conversations]
    written: list[list[Answer]] = [[] for _ in conversations]
    problems: list[str | None] = [None] * len(conversations)
    waiting = [_recorded(conversation.messages) for conversation in conversations]
    questions = [sum(m.role == "user" for m in messages) for messages in waiting]
    active = [index for index, count in enumerate(questions) if count]
    while active:
        asked = []
        for index in active:
            upto = _question(waiting[index])
            history = (*histories[index], *waiting[index][:upto])
            prompt = history[-1].content if conversations[index].kind == "completion" else history
            asked.append((history, Request(prompt, *kinds[index], conversations[index].template)))
            waiting[index] = waiting[index][upto:]
        answers = ask([request for _, request in asked])
        still = []
        for index, (history, _), answer in zip(active, asked, answers, strict=True):
            if isinstance(answer, DataError):
                problems[index] = f"{conversations[index].id}: {answer}"
                continue
            if answer is None:
                continue
            written[index].append(answer)
            histories[index] = list(history)
            recorded = bool(waiting[index]) and waiting[index][0].role == "assistant"
            if not recorded:
                histories[index].append(Message("assistant", answer.text, answer.finished, answer.more))
            if (answer.finished or recorded) and _question(waiting[index]):
                still.append(index)
        active = still
    rows = [
        _row(conversation, history, answers)
        for conversation, history, answers in zip(conversations, histories, written, strict=True)
    ]
    return list(zip(rows, questions, problems, strict=True))


def _recorded(messages: Sequence[Message]) -> list[Message]:
    """What stays of a conversation: all but the answers, and of these the calls of tools whose results follow."""
    return [
        replace(message, learned=False) if message.role == "assistant" else message
        for message, after in _followed(messages)
        if message.role != "assistant" or after == "tool"
    ]


def _question(waiting: Sequence[Message]) -> int:
    """How many messages make up the next prompt: up to a user's, or the last of a tool's; 0 if there is none."""
    for number, (message, after) in enumerate(_followed(waiting), 1):
        if message.role == "user" or (message.role == "tool" and after != "tool"):
            return number
    return 0


def _followed(messages: Sequence[Message]) -> list[tuple[Message, str | None]]:
    """Each message with the role of the next."""
    return list(zip(messages, [*(message.role for message in messages[1:]), None], strict=False))


def _row(conversation: Conversation, history: Sequence[Message], answers: Sequence[Answer]) -> dict[str, Any] | None:
    """The row to write; None where there is nothing to learn from."""
    tokens = [answer.tokens for answer in answers if answer.tokens is not None]
    texts = texts_of_turns(tokens) if len(tokens) == len(answers) else ()
    if not texts and not any(m.role == "assistant" and m.learned for m in history):
        return None
    return replace(conversation, messages=tuple(history), texts=texts).to_row()


# For training, and by several processes --------------------------------------------------------------


def own_answers(
    conversations: Sequence[Conversation],
    backend: Backend,
    output: Path,
    options: AnswerOptions,
    trainer: pl.Trainer,
    *,
    progress: bool = True,
) -> list[Conversation]:
    """The conversations with the target's own answers; plain text and token ids alone, without a prompt, stay.

    They are written once, by all processes of the Trainer together.

    Args:
        output: of `answers_file`, whose name says what answers depend on.
    """
    chats = [conversation for conversation in conversations if conversation.asks]
    texts = [conversation for conversation in conversations if not conversation.asks]
    if not chats:
        return texts
    output.parent.mkdir(parents=True, exist_ok=True)

    def work(share: Share) -> None:
        # Another command may be writing them; several processes wait for each other, and not for a lock as well, and
        # a folder that has them may be one that can only be read.
        alone = share.world_size == 1 and not output.exists()
        with locked(output.with_suffix(".lock")) if alone else nullcontext():
            if not trainer.strategy.broadcast(output.exists()):
                regenerate(chats, backend, output, options, progress=progress, share=share)
                share.barrier()  # the first has written them
        appears(output.exists, output, DataError)

    in_every_process(work, trainer)
    return load_conversations(output) + texts


def answers_file(conversations: Sequence[Conversation], backend: Backend, folder: Path, options: AnswerOptions) -> Path:
    """Where `own_answers` keeps the answers: another file for other questions, backends or options."""
    chats = [conversation for conversation in conversations if conversation.asks]
    settings = _settings(chats, backend, options)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return folder / f"answers-{digest[:12]}.jsonl"


def in_every_process(work: Callable[[Share], None], trainer: pl.Trainer) -> None:
    """Call `work` with its share in every process of the Trainer."""
    trainer.predict(_Work(work), return_predictions=False)


class _Work(pl.LightningModule):
    """One batch in each process, which is all that it does; nothing is trained."""

    def __init__(self, work: Callable[[Share], None]) -> None:
        super().__init__()
        self.work = work

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(range(1), batch_size=None)  # type: ignore[arg-type]

    def predict_step(self, number: int) -> int:
        trainer = self.trainer
        self.work(Share(trainer.global_rank, trainer.world_size, _barrier(trainer)))
        return number


def _barrier(trainer: pl.Trainer) -> Callable[[], object]:
    """Waits for all processes for as long as they are there. The strategy's own barrier gives up after minutes, and the
    shares of an answering may end hours apart.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return trainer.strategy.barrier
    return partial(distributed.barrier, distributed.new_group(backend="gloo", timeout=_LONGEST_WAIT))
