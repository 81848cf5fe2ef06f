"""Regeneration: the target writes every answer of a data set itself, so that a drafter learns its words.

The command is `shape.cli.regenerate`.
"""

import glob
import gzip
import hashlib
import json
import os
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pytorch_lightning as pl
import torch
from filelock import FileLock
from torch.utils.data import DataLoader
from tqdm import tqdm

from shape.data.conversations import (
    Conversation,
    Message,
    answer_message,
    fingerprint,
    joined,
    load_conversations,
    parse_row,
    prompt_ids,
)
from shape.errors import ConfigError, DataError, ShapeError
from shape.features.extraction import TrainerOptions
from shape.files import reading, typed, written_whole
from shape.generation.decoder import ShapeDecoder
from shape.target.loading import PlacedOptions, of_target
from shape.target.model import announce

BATCHES_PER_CHUNK = 32
_TOKEN_IDS = "return_token_ids"  # asks vLLM for the ids of prompt and answer; most servers pass over it


class EndpointError(ShapeError):
    """An endpoint that cannot be reached, refuses, or answers with something else than a completion."""


@dataclass(frozen=True)
class Request:
    """One answer to write: after messages (chat), or as the continuation of a string.

    template: what the chat template is given beside the messages.
    """

    prompt: tuple[Message, ...] | str
    sampled: bool
    seed: int
    template: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What was written.

    Attributes:
        finished: False if the answer was cut before its end token.
        more: reasoning and calls of tools, as in `Message.more`.
        tokens: ids of the prompt and of the answer, its end token included, where they are known.
    """

    text: str
    finished: bool
    more: Mapping[str, Any] = field(default_factory=dict)
    tokens: tuple[list[int], list[int]] | None = None


Ask = Callable[[Sequence[Request]], list[Answer | DataError]]


class Backend(Protocol):
    """What writes the answers.

    Attributes:
        concurrency: conversations that it is asked about at a time, each at its own pace; 1 for one batch at a time.
    """

    @property
    def concurrency(self) -> int: ...

    def describe(self) -> dict[str, Any]:
        """What the answers depend on, as JSON; a resumed run must agree with it."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[Answer | DataError]:
        """An answer to each request, in order, or why this one cannot be answered."""
        ...


@dataclass(frozen=True)
class LocalBackend:
    """Answers by a target on this machine.

    Attributes:
        decoder: plain or with a drafter, which changes the time and not the answers.
        max_new_tokens: longest answer, in tokens.
        temperature: of the sampled answers.
    """

    decoder: ShapeDecoder
    max_new_tokens: int = 512
    temperature: float = 1.0
    concurrency: ClassVar[int] = 1

    def describe(self) -> dict[str, Any]:
        target = self.decoder.target
        identity = {k: v for k, v in target.identity.to_dict().items() if k not in ("name", "revision")}
        sampling = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}
        return {"dtype": str(target.dtype), **sampling, **identity}

    def generate(self, requests: Sequence[Request]) -> list[Answer | DataError]:
        answers: dict[int, Answer | DataError] = {}
        for sampled in (False, True):
            prompts: dict[int, list[int]] = {}
            for index, request in enumerate(requests):
                if request.sampled == sampled:
                    try:
                        prompts[index] = self._prompt(request)
                    except DataError as error:
                        answers[index] = error
            if prompts:
                seeds = [requests[index].seed for index in prompts]
                written = self._decode(list(prompts.values()), sampled, seeds)
                for (index, prompt), ids in zip(prompts.items(), written, strict=True):
                    answers[index] = self._answer(requests[index], prompt, ids)
        return [answers[index] for index in range(len(requests))]

    def _prompt(self, request: Request) -> list[int]:
        target = self.decoder.target
        if target.tokenizer is None:
            raise ConfigError(f"target {target.name} has no tokenizer; give a folder that has one")
        ids = prompt_ids(request.prompt, target.tokenizer, request.template)
        room = None if target.max_positions is None else target.max_positions - self.max_new_tokens
        if not ids or (room is not None and len(ids) > room):
            raise DataError(
                f"a prompt of {len(ids)} tokens does not fit the {target.max_positions} positions of target "
                f"{target.name} with max_new_tokens {self.max_new_tokens}"
            )
        return ids

    def _decode(self, prompts: list[list[int]], sampled: bool, seeds: list[int]) -> list[list[int]]:
        target = self.decoder.target
        longest = max(map(len, prompts))
        padding = [longest - len(ids) for ids in prompts]
        input_ids = torch.tensor([[0] * pad + ids for pad, ids in zip(padding, prompts, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
        # top_k 0 and a penalty of 1: the target's own distribution, whatever its generation config prefers.
        sampling = {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        sequences = self.decoder.generate(
            input_ids.to(target.device),
            attention_mask=mask.to(target.device),
            seed=seeds,
            max_new_tokens=self.max_new_tokens,
            repetition_penalty=1.0,
            **(sampling if sampled else {"do_sample": False}),
        )
        assert isinstance(sequences, torch.Tensor)
        return sequences[:, longest:].tolist()

    def _answer(self, request: Request, prompt: list[int], ids: list[int]) -> Answer:
        ends = self.decoder.target.eos_token_ids
        end = next((index for index, token in enumerate(ids) if token in ends), None)
        tokenizer, said = self.decoder.tokenizer, ids[:end]
        if isinstance(request.prompt, str):  # raw text, of which nothing is taken apart
            text = tokenizer.decode(said, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            message = Message("assistant", text)
        else:
            message = answer_message(said, tokenizer, request.template)
        tokens = prompt, ids if end is None else ids[: end + 1]
        # A cut may fall inside a character, whose first bytes alone are no text.
        text = message.content if end is not None else message.content.rstrip("\ufffd")
        return Answer(text, end is not None, message.more, tokens)


@dataclass(frozen=True)
class EndpointBackend:
    """Answers by a server that speaks OpenAI's protocol (vLLM, SGLang, llama.cpp, ...).

    Attributes:
        url: its base, for example http://localhost:8000/v1.
        model: the name under which it serves the target.
        max_new_tokens: longest answer, in tokens.
        temperature: of the sampled answers; greedy ones ask for 0.
        api_key: sent as a bearer token.
        timeout: seconds to wait for one answer.
        retries: further attempts after a lost connection or a status of 429 or 5xx.
        pause: seconds before the first of them; doubled before each next one.
        concurrency: requests at a time: batching is the server's work.
    """

    url: str
    model: str
    max_new_tokens: int = 512
    temperature: float = 1.0
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 600.0
    retries: int = 4
    pause: float = 1.0
    concurrency: int = 64

    def describe(self) -> dict[str, Any]:
        return {"model": self.model, "max_new_tokens": self.max_new_tokens, "temperature": self.temperature}

    def generate(self, requests: Sequence[Request]) -> list[Answer | DataError]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Answer | DataError:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature if request.sampled else 0.0,
            "top_p": 1.0,
            "seed": request.seed,
        }
        if isinstance(request.prompt, str):
            path, body["prompt"] = "completions", request.prompt
        else:
            path = "chat/completions"
            body["messages"] = [_spoken(message) for message in request.prompt]
            given = dict(request.template)
            if tools := given.pop("tools", None):
                body["tools"] = tools
            if given:
                body["chat_template_kwargs"] = given
        try:
            reply = self._reply(path, body)
        except DataError as error:
            return error
        try:
            said = json.loads(reply)
            choice = said["choices"][0]
            finished, tokens = choice["finish_reason"] in ("stop", "tool_calls"), _ids(said, choice)
            if isinstance(request.prompt, str):
                return Answer(choice["text"], finished, tokens=tokens)
            message = parse_row({"messages": [{"content": "", **_present(choice["message"])}]}, "").messages[0]
            return Answer(message.content, finished, message.more, tokens)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise EndpointError(
                f"endpoint {self.url} did not answer with a completion ({type(error).__name__}: {error}); "
                "check that it speaks OpenAI's protocol"
            ) from None

    def _reply(self, path: str, body: dict[str, Any]) -> bytes:
        url = f"{self.url.rstrip('/')}/{path}"
        try:
            return self._post(url, {**body, _TOKEN_IDS: True})
        except EndpointError as error:
            if _TOKEN_IDS not in str(error):
                raise
            return self._post(url, body)  # from a server that refuses what it does not know

    def _post(self, url: str, body: dict[str, Any]) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.pause * 2 ** (attempt - 1))
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    return reply.read()
            except urllib.error.HTTPError as error:
                said = " ".join(error.read(500).decode(errors="replace").split())
                if error.code in (400, 413, 422) and "context" in said.lower():
                    raise DataError(f"the endpoint finds the prompt too long ({said})") from None
                reason = f"status {error.code}: {said}"
                if error.code != 429 and error.code < 500:
                    break
            except (OSError, HTTPException) as error:  # URLError and timeouts are OSErrors
                reason = str(error) or type(error).__name__
        raise EndpointError(
            f"endpoint {self.url} does not serve model {self.model} ({reason}); check the address, the name, "
            "the key, and that the server runs, then give the same command again to continue"
        )


def _spoken(message: Message) -> dict[str, Any]:
    """A message in OpenAI's protocol, where arguments of tools are text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.more.get("tool_calls", [])
    ]
    spoken = {"role": message.role, "content": message.content, **message.more}
    return {**spoken, "tool_calls": calls} if calls else spoken


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _ids(reply: Mapping[str, Any], choice: Mapping[str, Any]) -> tuple[list[int], list[int]] | None:
    """Token ids of prompt and answer, where a server gives both."""
    prompt = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
    answer = choice.get("token_ids")
    return (prompt, answer) if prompt and answer else None


@dataclass(kw_only=True)
class AnswerOptions:
    """How answers are written.

    Attributes:
        sampled_share: share of conversations answered by sampling; the others are greedy.
        temperature: of the sampled ones.
        max_new_tokens: longest answer.
        batch_size: conversations answered together.
        seed: of the choice and the noise.
    """

    sampled_share: float = 0.5
    temperature: float = 1.0
    max_new_tokens: int = 512
    batch_size: int = 16
    seed: int = 0

    def check(self) -> None:
        """Raises ConfigError for values that cannot be meant."""
        if self.max_new_tokens < 1 or self.temperature <= 0:
            raise ConfigError(
                f"max_new_tokens {self.max_new_tokens} and temperature {self.temperature:g} must be above 0; for "
                "greedy answers set sampled_share to 0"
            )
        if not 0.0 <= self.sampled_share <= 1.0 or self.batch_size < 1:
            raise ConfigError(
                f"sampled_share {self.sampled_share} must be within 0 and 1, and batch_size {self.batch_size} above 0"
            )


@dataclass(frozen=True)
class Share:
    """Which part of the work a process does.

    Attributes:
        rank, world: its number, and how many there are.
        meet: waits until all are there.
    """

    rank: int = 0
    world: int = 1
    meet: Callable[[], object] = field(default=lambda: None)


@dataclass(frozen=True)
class Summary:
    """Counts of a finished run: rows written and left out, user messages, answers, and cut answers."""

    rows: int
    left_out: int
    questions: int
    answers: int
    unfinished: int


def regenerate(
    conversations: Sequence[Conversation],
    backend: Backend,
    output: str | Path,
    *,
    sampled_share: float = 0.5,
    seed: int = 0,
    batch_size: int = 16,
    progress: bool = True,
    share: Share = Share(),
) -> Summary | None:
    """Let the backend answer every user message and prompt, and write the rows to `output`.

    In a conversation the answers are written in order, each resting on those before it. An answer that is
    cut before its end is kept, marked `"finished": false`, and ends its conversation, for what followed would
    rest on something the target did not say; so does a prompt that cannot be answered (too long, say).
    Conversations without any answer are left out. Existing assistant turns are ignored, but for calls of tools whose
    results follow: the target is asked there too, and the dialogue goes on with the recorded call and its results.

    Where the backend knows token ids, rows hold them (`input_ids`, `loss_mask`), as they were read and written at every
    turn: one text, or several where the chat template rewrites earlier turns. These are what is learned from.

    About `sampled_share` of the conversations are sampled, the others greedy. Which, and their noise, is a
    function of (seed, conversation id) alone. Batches are fixed too, so that a resumed run repeats them, and processes
    take turns at them. An endpoint has no batches: every conversation goes at its own pace, `concurrency` at a time.

    Args:
        output: .jsonl or .jsonl.gz in the order of `conversations`; it appears only when complete. What is
            finished waits in `output` + ".partial" (".partial.1" and so on of other processes), so that a killed run
            loses what is at hand only, and another number of processes may go on.
        batch_size: conversations answered together.
        progress: show a bar.
        share: which part of the work is this process's.

    Returns:
        The counts; None in processes other than the first, which waits for them and writes `output`.

    Raises:
        DataError: plain text among the conversations, or no answer at all.
        ConfigError: `output` exists, or was begun with other data or options.
    """
    output = Path(output)
    check_output(output)
    AnswerOptions(sampled_share=sampled_share, batch_size=batch_size).check()
    for conversation in conversations:
        if not conversation.asks:
            what = "plain text" if conversation.kind == "text" else "token ids alone"
            raise DataError(f"conversation {conversation.id} is {what}, which has no prompt to answer; leave it out")
    draws = [_draw(seed, conversation.id) for conversation in conversations]
    kinds = [(uniform < sampled_share, noise) for uniform, noise in draws]
    alone = backend.concurrency > 1
    batches = _batches(conversations, [sampled for sampled, _ in kinds], 1 if alone else batch_size)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(output.name + ".partial")
    journal = _Journal(partial, _settings(conversations, backend, sampled_share, seed, batch_size), share.rank)
    share.meet()  # all have seen what is done, and nobody has cleared it away
    mine = batches[share.rank :: share.world]
    left = [batch for batch in mine if not journal.entries.keys() >= set(batch)]

    def answer(batch: list[int], ask: Ask) -> None:
        results = _answer_batch([conversations[i] for i in batch], [kinds[i] for i in batch], ask)
        journal.append([(index, *result) for index, result in zip(batch, results, strict=True)])

    disable = not progress or share.rank > 0
    with tqdm(desc="regenerate", total=len(mine), initial=len(mine) - len(left), disable=disable) as bar:
        _at_a_time(answer, left, backend, bar.update)
    if share.rank > 0:
        return None
    while len(journal.entries) < len(conversations):
        time.sleep(1.0)  # others are at work
        journal.read()
    return _finish(journal, output)


def _at_a_time(
    work: Callable[[list[int], Ask], None],
    batches: Sequence[list[int]],
    backend: Backend,
    done: Callable[[], object],
) -> None:
    """Do the work of every batch, as many at a time as the backend takes, and say so after each.

    One that fails ends all: answers that are on their way are waited for, and no further ones are asked for.
    """
    if backend.concurrency == 1:
        for batch in batches:
            work(batch, backend.generate)
            done()
        return
    stopped = threading.Event()

    def ask(requests: Sequence[Request]) -> list[Answer | DataError]:
        if stopped.is_set():
            raise CancelledError
        return backend.generate(requests)

    with ThreadPoolExecutor(backend.concurrency) as threads:
        try:
            for each in as_completed([threads.submit(work, batch, ask) for batch in batches]):
                each.result()
                done()
        finally:
            stopped.set()
            threads.shutdown(cancel_futures=True)


def own_answers(
    conversations: Sequence[Conversation],
    backend: LocalBackend,
    folder: Path,
    options: AnswerOptions,
    trainer: pl.Trainer,
    *,
    progress: bool = True,
) -> list[Conversation]:
    """The conversations with the target's own answers; plain text and token ids alone, without a prompt, stay.

    Answers are kept in `folder` under a name that says what they depend on, so that they are written once, by all
    processes of the Trainer together.
    """
    chats = [conversation for conversation in conversations if conversation.asks]
    texts = [conversation for conversation in conversations if not conversation.asks]
    if not chats:
        return texts
    output = answers_file(chats, backend, folder, options)
    folder.mkdir(parents=True, exist_ok=True)

    def work(share: Share) -> None:
        # Another command may be writing them; several processes wait for each other, and not for a lock as well.
        with FileLock(output.with_suffix(".lock")) if share.world == 1 else nullcontext():
            if not trainer.strategy.broadcast(output.exists()):
                regenerate(
                    chats,
                    backend,
                    output,
                    sampled_share=options.sampled_share,
                    seed=options.seed,
                    batch_size=options.batch_size,
                    progress=progress,
                    share=share,
                )
        while not output.exists():
            time.sleep(1.0)

    _shared_out(work, trainer)
    return load_conversations(output) + texts


def _shared_out(work: Callable[[Share], None], trainer: pl.Trainer) -> None:
    """Call `work` with its share in every process of the Trainer."""
    trainer.predict(_SharedOut(work), return_predictions=False)


class _SharedOut(pl.LightningModule):
    """One batch in each process, which is all that it does; nothing is trained."""

    def __init__(self, work: Callable[[Share], None]) -> None:
        super().__init__()
        self.work = work

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(range(1), batch_size=None)  # type: ignore[arg-type]

    def predict_step(self, number: int) -> int:
        trainer = self.trainer
        self.work(Share(trainer.global_rank, trainer.world_size, trainer.strategy.barrier))
        return number


def answers_file(conversations: Sequence[Conversation], backend: Backend, folder: Path, options: AnswerOptions) -> Path:
    """Where `own_answers` keeps the answers: another file for other questions, backends or options."""
    chats = [conversation for conversation in conversations if conversation.asks]
    settings = _settings(chats, backend, options.sampled_share, options.seed, options.batch_size)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return folder / f"answers-{digest[:12]}.jsonl"


def _settings(
    conversations: Sequence[Conversation], backend: Backend, sampled_share: float, seed: int, batch_size: int
) -> dict[str, Any]:
    """All that answers depend on."""
    chosen = {"sampled_share": sampled_share, "seed": seed, "batch_size": batch_size}
    return {"data": fingerprint(conversations), **chosen, **backend.describe()}


def check_output(output: Path) -> None:
    """Raises ConfigError if `output` is there already or has another form than JSON lines."""
    if not output.name.endswith((".jsonl", ".jsonl.gz")):
        raise ConfigError(f"output {output} is JSON lines; let its name end in .jsonl or .jsonl.gz")
    if output.exists():
        raise ConfigError(f"output {output} exists already; delete it or name another file")


def _draw(seed: int, identity: str) -> tuple[float, int]:
    """(uniform number in [0, 1), noise seed of 48 bits), a function of its arguments alone."""
    digest = hashlib.sha256(f"{seed}:{identity}".encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48, int.from_bytes(digest[6:12])


def _batches(conversations: Sequence[Conversation], sampled: Sequence[bool], size: int) -> list[list[int]]:
    """Indices of conversations answered together: of one kind; within a chunk alike in turns and length."""

    def key(index: int) -> tuple[bool, int, int, int]:
        asked = [m.content for m in conversations[index].messages if m.role != "assistant"]
        return sampled[index], len(asked), sum(map(len, asked)), index

    batches: list[list[int]] = []
    for start in range(0, len(conversations), size * BATCHES_PER_CHUNK):
        chunk = sorted(range(len(conversations))[start : start + size * BATCHES_PER_CHUNK], key=key)
        for kind in (False, True):
            alike = [index for index in chunk if sampled[index] == kind]
            batches += [alike[first : first + size] for first in range(0, len(alike), size)]
    return batches


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
    """What is written down; None where there is nothing to learn from."""
    tokens = [answer.tokens for answer in answers if answer.tokens is not None]
    texts = joined(tokens) if len(tokens) == len(answers) else ()
    if not texts and not any(m.role == "assistant" and m.learned for m in history):
        return None
    return replace(conversation, messages=tuple(history), texts=texts).to_row()


Entry = tuple[int, dict[str, Any] | None, int, str | None]


class _Journal:
    """Finished conversations, a batch in each line, behind a line that says what the run depends on; a file for each
    process that writes, of which all read all.

    A line is written at once and only counts with its newline: a half-written one is cut off on resuming.

    Attributes:
        entries: by index of the conversation, [index, row or None, questions, problem or None].
    """

    def __init__(self, path: Path, settings: dict[str, Any], rank: int = 0) -> None:
        self.path, self.settings = path, settings
        self.entries: dict[int, Entry] = {}
        self._read: dict[Path, int] = {}  # bytes of each file
        self._writing = threading.Lock()
        self._own = path.with_name(f"{path.name}.{rank}") if rank else path
        self.read()
        with open(self._own, "ab") as file:
            file.truncate(self._read.get(self._own, 0))
        if not self._read.get(self._own):
            self._write(settings)

    def read(self) -> None:
        """Take up what the files hold by now."""
        for path in self.files:
            start = self._read.get(path, 0)
            with open(path, "rb") as file:
                file.seek(start)
                text = file.read()
            lines = text[: text.rfind(b"\n") + 1].splitlines(keepends=True)
            self._read[path] = start + sum(map(len, lines))
            if lines and not start:
                with _of_journal(path):
                    begun = typed(dict[str, Any], json.loads(lines.pop(0)))
                _compare(path, begun, self.settings)
            with _of_journal(path):
                for line in lines:
                    self.entries.update((entry[0], entry) for entry in typed(list[Entry], json.loads(line)))

    @property
    def files(self) -> list[Path]:
        numbers = (
            path for path in self.path.parent.glob(f"{glob.escape(self.path.name)}.*") if path.suffix[1:].isdigit()
        )
        return [path for path in (self.path, *sorted(numbers)) if path.exists()]

    def append(self, batch: list[Entry]) -> None:
        self._write(batch)
        with self._writing:
            self.entries.update((entry[0], entry) for entry in batch)

    def _write(self, values: Any) -> None:
        with self._writing, open(self._own, "ab") as file:
            file.write(json.dumps(values).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _of_journal(path: Path) -> AbstractContextManager[None]:
    return reading(str(path), DataError, "delete it, and give the same command again: its answers are written anew")


def _compare(path: Path, begun: dict[str, Any], settings: dict[str, Any]) -> None:
    names = begun.keys() | settings.keys()
    other = sorted(name for name in names if begun.get(name) != settings.get(name))
    if other:
        said = ", ".join(f"{name} {begun.get(name)} against {settings.get(name)}" for name in other)
        raise ConfigError(f"{path} was begun with other options ({said}); give the same again, or delete it")


def _finish(journal: _Journal, output: Path) -> Summary:
    """Write the rows in order, atomically, and forget the journal."""
    entries = [journal.entries[index] for index in sorted(journal.entries)]
    rows = [row for _, row, _, _ in entries if row is not None]
    problems = [problem for *_, problem in entries if problem is not None]
    if problems:
        warnings.warn(
            f"{len(problems)} conversations end early or are left out (the first: {problems[0]})",
            stacklevel=3,
        )
    if not rows:
        raise DataError(f"none of the {len(entries)} conversations has a user message that could be answered")
    _write_lines(output, (json.dumps(row, ensure_ascii=False) for row in rows))
    for path in journal.files:
        path.unlink()
    turns = [turn for row in rows for turn in row.get("conversations", [{"from": "gpt", **row}])]
    answers = [turn for turn in turns if turn["from"] == "gpt" and turn.get("weight") != 0]
    return Summary(
        rows=len(rows),
        left_out=len(entries) - len(rows),
        questions=sum(questions for _, _, questions, _ in entries),
        answers=len(answers),
        unfinished=sum("finished" in turn for turn in answers),
    )


def _write_lines(output: Path, lines: Iterable[str]) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    with written_whole(output) as unfinished:
        unfinished.write_bytes(gzip.compress(data, mtime=0) if output.suffix == ".gz" else data)


# Command ---------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class RegenerationOptions(AnswerOptions, PlacedOptions):
    """Which prompts to answer, by whom, and how.

    Attributes:
        data: conversations or prompts: a file, a folder, or a dataset on the hub (name[:split]).
        output: the .jsonl or .jsonl.gz file to write.
        target: path, hub id or bundled name of the target that answers on this machine.
        endpoint: base URL of an OpenAI-compatible server that answers instead, for example
            http://localhost:8000/v1; the key, where it wants one, is read from OPENAI_API_KEY.
        model: the name under which the endpoint serves the target.
        chat_template_kwargs: given to the target's chat template, for example {"enable_thinking": false}.
        limit: answer at most this many conversations.
        exclude_ids: leave out ids that begin with one of these.
        skip_bad_rows: count malformed rows and go on.
        dtype: of the target, for example float32 or bfloat16; default: its checkpoint's.
        concurrency: requests to the endpoint at a time.
        trainer: devices, processes and nodes, as Lightning's Trainer has them; each process answers its share.
    """

    data: str
    output: str
    target: str | None = None
    endpoint: str | None = None
    model: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    limit: int | None = None
    exclude_ids: tuple[str, ...] = ()
    skip_bad_rows: bool = False
    dtype: str | None = None
    concurrency: int = 64
    trainer: TrainerOptions = field(default_factory=TrainerOptions)


def make_backend(options: RegenerationOptions) -> Backend:
    """The backend that the options ask for. Raises ConfigError if they contradict each other."""
    options.check()
    if (options.target is None) == (options.endpoint is None):
        raise ConfigError("give either target, to answer here, or endpoint and model, to ask a server")
    if options.endpoint is None:
        decoder = ShapeDecoder.from_pretrained(
            target=options.target, dtype=options.dtype, drafter="none", **of_target(options)
        )
        announce(decoder.target)
        return LocalBackend(decoder, options.max_new_tokens, options.temperature)
    if options.model is None:
        raise ConfigError(f"endpoint {options.endpoint} may serve several models; name one with model")
    if options.concurrency < 1:
        raise ConfigError(f"concurrency is {options.concurrency}; give the requests that the endpoint takes at a time")
    if not options.endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"endpoint {options.endpoint} is no URL; it looks like http://localhost:8000/v1")
    key = os.environ.get("OPENAI_API_KEY")
    return EndpointBackend(
        options.endpoint,
        options.model,
        options.max_new_tokens,
        options.temperature,
        key,
        concurrency=options.concurrency,
    )


def run(options: RegenerationOptions) -> Summary | None:
    """Carry out the command, cheap checks first; None in processes other than the first."""
    check_output(Path(options.output))
    conversations = load_conversations(
        options.data,
        skip_bad_rows=options.skip_bad_rows,
        limit=options.limit,
        exclude_ids=options.exclude_ids,
        require_answers=False,
        chat_template_kwargs=options.chat_template_kwargs,
    )
    # A target whose place was given is one process's.
    placed = options.device is not None or options.device_map is not None
    lent = replace(options.trainer, devices=1, num_nodes=1) if placed else options.trainer
    trainer = replace(lent, enable_progress_bar=False).for_extraction()
    device = trainer.strategy.root_device
    if options.endpoint is None and not placed:
        options = replace(options, device_map=str(device))
    backend = make_backend(options)
    found: list[Summary | None] = []

    def work(share: Share) -> None:
        done = regenerate(
            conversations,
            backend,
            options.output,
            sampled_share=options.sampled_share,
            seed=options.seed,
            batch_size=options.batch_size,
            share=share,
        )
        found.append(done)

    if isinstance(backend, LocalBackend):
        _shared_out(work, trainer)
    elif trainer.is_global_zero:
        work(Share())
    return found[0] if found else None
