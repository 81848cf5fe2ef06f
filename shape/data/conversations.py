"""Conversations: reading them, rendering them with the target's chat template, and the one loss mask.

The command is `shape.cli.preview`.
"""

import gzip
import hashlib
import io
import json
import re
import warnings
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from shape.errors import DataError

Role = Literal["system", "user", "assistant", "tool"]
Kind = Literal["chat", "completion", "text", "tokens"]
Source = str | Path
Span = tuple[int, int]
Item = TypeVar("Item")

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
    "ipython": "tool",
}
SUFFIXES = (".jsonl", ".json", ".txt")
FORMATS = (
    "conversations, messages, turns, instruction + output, prompt + completion, prompt, text, or input_ids + loss_mask"
)
# What a message may have beside role and text, as chat templates and OpenAI's protocol call it.
_REASONING = ("reasoning_content", "reasoning", "thinking")
_MORE = {"assistant": ("tool_calls",), "tool": ("tool_call_id", "name")}
_THOUGHT, _THOUGHT_END = "<think>", "</think>"
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[^:]+){0,2}")


@dataclass(frozen=True)
class Message:
    """One turn.

    Attributes:
        finished: False for an answer that was cut before its end-of-turn token.
        more: what else chat templates read: `reasoning_content` (str), `tool_calls` (as in OpenAI's protocol, with
            their arguments as objects), `tool_call_id` and `name`.
        learned: False for an assistant turn that is only there to be followed by others (`"weight": 0`).
    """

    role: Role
    content: str
    finished: bool = True
    more: Mapping[str, Any] = field(default_factory=dict, repr=False)
    learned: bool = field(default=True, repr=False)

    @property
    def reasoning(self) -> str:
        return self.more.get("reasoning_content", "")

    @property
    def chat(self) -> dict[str, Any]:
        """The message as chat templates take it; reasoning under both names that they have for it."""
        thinking = {"thinking": self.reasoning} if self.reasoning else {}
        return {"role": self.role, "content": self.content, **self.more, **thinking}


@dataclass(frozen=True)
class Tokens:
    """A text as the target read and wrote it.

    Attributes:
        input_ids: (T,) int32. loss_mask: (T,), 1 for each token that is learned from, else 0.
    """

    input_ids: array
    loss_mask: bytes


@dataclass(frozen=True)
class Conversation:
    """One row of data.

    kind "chat": messages go through the target's chat template. "completion": a user and an assistant
    message that are joined as they are (prompt + completion). "text": one assistant message, plain text.
    "tokens": no messages, token ids alone.

    Attributes:
        template: what the chat template is given beside the messages: `tools`, `enable_thinking`, ...
        texts: what is learned from, token by token, where that is known; otherwise it is made of the messages.
    """

    id: str
    messages: tuple[Message, ...]
    kind: Kind = "chat"
    template: Mapping[str, Any] = field(default_factory=dict, repr=False)
    texts: tuple[Tokens, ...] = field(default=(), repr=False)

    @property
    def asks(self) -> bool:
        """Whether there is a prompt that can be answered anew."""
        return self.kind in ("chat", "completion")

    def to_row(self) -> dict[str, Any]:
        """The row (ShareGPT form for chats) that `load_conversations` reads back as this conversation."""
        row: dict[str, Any] = {"id": self.id}
        cut = {} if not self.messages or self.messages[-1].finished else {"finished": False}
        if self.kind == "text":
            row |= {"text": self.messages[0].content, **cut}
        elif self.kind == "completion":
            prompt, completion = self.messages
            row |= {"prompt": prompt.content, "completion": completion.content, **cut}
        elif self.kind == "chat":
            row |= {"conversations": [_sharegpt_turn(message) for message in self.messages]}
        if self.template:
            row |= {"chat_template_kwargs": dict(self.template)}
        if self.texts:
            ids, masks = [list(text.input_ids) for text in self.texts], [list(text.loss_mask) for text in self.texts]
            several = len(self.texts) > 1
            row |= {"input_ids": ids if several else ids[0], "loss_mask": masks if several else masks[0]}
        return row


@dataclass(frozen=True)
class Checks:
    """Tests of code as in HumanEval (arXiv 2107.03374): `test` defines check(candidate) for a function's name."""

    test: str
    entry_point: str


@dataclass(frozen=True)
class Prompt:
    """A benchmark prompt.

    messages: what the first answer follows; it ends with a user message. turns: the user's strings, of
    which turns[0] is the last of `messages`; turns[1:] are asked one after the other, each after an answer.
    template: what the chat template is given beside the messages. references: known answers to the turns, in their
    order, as far as there are any. checks: for code, what tests it.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    messages: tuple[Message, ...]
    template: Mapping[str, Any] = field(default_factory=dict, repr=False)
    # Nothing that is asked, so that prompts with and without them are the same ones to a measurement of speed.
    references: tuple[str, ...] = field(default=(), repr=False)
    checks: Checks | None = field(default=None, repr=False)

    @property
    def opening(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them."""
        return [message.chat for message in self.messages]


@dataclass(frozen=True)
class Encoded:
    """A conversation as tokens: input_ids (T,) int64 and loss_mask (T,) bool, True on supervised tokens."""

    id: str
    input_ids: Tensor
    loss_mask: Tensor
    truncated: bool = False


@dataclass(frozen=True)
class EncodedSet:
    """What `encode_all` kept, how many of these were cut at `max_length`, and how many were dropped."""

    examples: list[Encoded]
    truncated: int
    dropped: int


# Reading ---------------------------------------------------------------------------------------------


def load_conversations(
    source: Source | Sequence[Source],
    *,
    skip_bad_rows: bool = False,
    limit: int | None = None,
    exclude_ids: tuple[str, ...] = (),
    require_answers: bool = True,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Conversation]:
    """Read conversations, in the order of the source.

    The format is recognised row by row: ShareGPT (`conversations`), OpenAI (`messages`), Alpaca (`instruction`,
    `input`, `output`), `prompt` + `completion`, `text`, and user-only `turns` or `prompt`. Any of them may hold
    `input_ids` and `loss_mask` (lists, or lists of lists for several texts), which are then what is learned from, and
    which suffice by themselves; chats may hold `tools` and `chat_template_kwargs`.

    Args:
        source: a .jsonl, .json (list) or .txt file (one text per block of lines; blank lines separate), any of
            them gzipped, a folder of these, a dataset on the hub (`name`, `name:split` or `name:config:split`), or
            a list of sources.
        skip_bad_rows: count malformed rows, warn once and go on, instead of raising at the first.
        limit: at most this many conversations.
        exclude_ids: leave out ids that begin with one of these.
        require_answers: raise if no row has an assistant turn (regeneration does not need any).
        chat_template_kwargs: given to the chat template with every row, whose own go before them.

    Raises:
        DataError: naming file and line, for anything that cannot be read.
    """
    sources = [source] if isinstance(source, str | Path) else list(source)
    label = ", ".join(str(one) for one in sources)
    found: list[Conversation] = []
    bad: list[str] = []
    rows = 0
    for place, default_id, row in (item for one in sources for item in _rows(one)):
        if limit is not None and len(found) >= limit:
            break
        rows += 1
        try:
            conversation = parse_row(row, default_id)
        except DataError as error:
            if not skip_bad_rows:
                raise DataError(f"{place}: {error}") from None
            bad.append(f"{place}: {error}")
            continue
        if not conversation.id.startswith(exclude_ids):
            found.append(_with_template(conversation, chat_template_kwargs))
    if bad:
        warnings.warn(f"{label}: skipped {len(bad)} malformed of {rows} rows (the first: {bad[0]})", stacklevel=2)
    if not found:
        raise DataError(_nothing_left(label, rows, bad))
    if require_answers and not any(c.texts or any(m.role == "assistant" for m in c.messages) for c in found):
        raise DataError(
            f"{label} has no assistant turn in any of its {len(found)} rows, so there is nothing to learn "
            "from; give conversations with answers, or write them with `python -m shape.regenerate`"
        )
    return found


def load_prompts(path: Source, chat_template_kwargs: Mapping[str, Any] | None = None) -> list[Prompt]:
    """Read a prompts file: JSON lines (or a .json list, gzipped or not) with `turns`, `messages`, `prompt` or
    `question`; or a dataset of such rows on the hub, as `load_conversations` names them. A `prompt` may be a list of
    turns, as in MT-Bench; beside a `question` an `answer` is the reference, as in GSM8K.

    `id` and `category` are optional, as are `reference` (a text, or one for each turn) and, as in HumanEval, `test`
    with `entry_point`. Of `messages`, what follows the last user message is left out. `chat_template_kwargs` are given
    to the chat template with every prompt, whose own go before them.
    Raises DataError with file and line.
    """
    prompts = []
    for place, default_id, row in _rows(path):
        try:
            row = _as_asked(row)
            conversation = _with_template(parse_row(row, default_id), chat_template_kwargs)
            prompts.append(_prompt(conversation, row))
        except DataError as error:
            raise DataError(f"{place}: {error}") from None
    if not prompts:
        raise DataError(_nothing_left(str(path), 0, []))
    return prompts


def _as_asked(row: object) -> object:
    """A row of the known collections of prompts under the names that ours have."""
    if not isinstance(row, dict) or "turns" in row or "messages" in row:
        return row
    asked = row.get("prompt")
    if isinstance(asked, list) and all(isinstance(turn, str) for turn in asked):
        return {**{name: value for name, value in row.items() if name != "prompt"}, "turns": asked}
    if asked is None and "question" in row:
        return {"prompt": row["question"], "reference": row.get("answer"), **row}
    return row


def evenly(items: Sequence[Item], count: int) -> list[Item]:
    """At most `count` items, spread over all of them, in order."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def parse_row(row: object, default_id: str) -> Conversation:
    """One row of any known format; a row without `id` gets `default_id`. Raises DataError without a place."""
    if isinstance(row, DataError):
        raise row
    if not isinstance(row, dict):
        raise DataError(f"expected an object with {FORMATS}, found {_shown(row)}")
    identity = str(row.get("id", default_id))
    found = _conversation(row, identity)
    texts = _texts(row) if row.get("loss_mask") is not None or (found is None and "input_ids" in row) else ()
    if found is None and texts:
        found = Conversation(identity, (), "tokens")
    if found is None:
        keys = ", ".join(map(str, row)) or "no keys"
        raise DataError(f"unknown format (it has {keys}); expected {FORMATS}")
    return replace(found, template=_template(row) if found.asks else {}, texts=texts)


def _conversation(row: dict[str, Any], identity: str) -> Conversation | None:
    """What a row holds in words; None for no known format."""
    for key in ("conversations", "conversation", "messages"):
        if row.get(key) is not None:
            return Conversation(identity, _messages(row[key], key))
    if row.get("turns") is not None:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise DataError(f"'turns' is {_shown(turns)}; expected a list of user strings")
        return Conversation(identity, tuple(Message("user", _text(turn, "turns")) for turn in turns))
    if "instruction" in row and "output" in row:
        parts = [_text(row["instruction"], "instruction"), _text(row.get("input") or "", "input")]
        question = Message("user", "\n\n".join(part for part in parts if part))
        return Conversation(identity, (*_system(row), question, Message("assistant", _text(row["output"], "output"))))
    finished = row.get("finished", True) is not False
    if "prompt" in row and "completion" in row:
        if isinstance(row["prompt"], list) and isinstance(row["completion"], list):
            both = _messages(row["prompt"], "prompt") + _messages(row["completion"], "completion")
            return Conversation(identity, both)
        prompt = Message("user", _text(row["prompt"], "prompt"))
        completion = Message("assistant", _text(row["completion"], "completion"), finished)
        return Conversation(identity, (prompt, completion), "completion")
    if "prompt" in row:
        return Conversation(identity, (*_system(row), Message("user", _text(row["prompt"], "prompt"))))
    if "text" in row:
        return Conversation(identity, (Message("assistant", _text(row["text"], "text"), finished),), "text")
    return None


def _texts(row: dict[str, Any]) -> tuple[Tokens, ...]:
    """`input_ids` and `loss_mask` of a row, of one text or of several."""
    ids, mask = row.get("input_ids"), row.get("loss_mask")
    if not isinstance(ids, list) or not isinstance(mask, list) or not ids or len(ids) != len(mask):
        raise DataError("'input_ids' and 'loss_mask' belong together; give two lists of the same length")
    if not isinstance(ids[0], list):
        ids, mask = [ids], [mask]
    return tuple(_tokens(*both) for both in zip(ids, mask, strict=True))


def _tokens(ids: Any, mask: Any) -> Tokens:
    if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
        raise DataError("'loss_mask' is not as long as 'input_ids'; give one mark for each token")
    if wrong := [token for token in ids if type(token) is not int or not 0 <= token < 2**31]:
        raise DataError(f"'input_ids' holds {_shown(wrong[0])}; expected token ids, integers of at least 0")
    if wrong := [mark for mark in mask if mark not in (0, 1)]:
        raise DataError(f"'loss_mask' holds {_shown(wrong[0])}; expected 1 for tokens to learn from and 0 for others")
    return Tokens(array("i", ids), bytes(map(int, mask)))


def _template(row: dict[str, Any]) -> dict[str, Any]:
    """What a row has for its chat template."""
    given, tools = row.get("chat_template_kwargs") or {}, row.get("tools") or []
    if isinstance(tools, str):
        tools = _json(tools, "tools")
    if not isinstance(given, dict):
        raise DataError(f"'chat_template_kwargs' is {_shown(given)}; expected an object")
    if not isinstance(tools, list):
        raise DataError(f"'tools' is {_shown(tools)}; expected a list of descriptions")
    return {**given, **({"tools": tools} if tools else {})}


def _with_template(conversation: Conversation, given: Mapping[str, Any] | None) -> Conversation:
    if not given or not conversation.asks:
        return conversation
    return replace(conversation, template={**given, **conversation.template})


def fingerprint(conversations: Iterable[Conversation]) -> str:
    """SHA-256 (hex) over all of the conversations, in order; what is empty leaves no trace in it."""
    digest = hashlib.sha256()
    for conversation in conversations:
        turns = [
            [m.role, m.content, m.finished, *([m.more] if m.more else []), *([] if m.learned else [0])]
            for m in conversation.messages
        ]
        more = [conversation.template] if conversation.template else []
        digest.update(json.dumps([conversation.id, conversation.kind, turns, *more]).encode() + b"\n")
        for text in conversation.texts:
            digest.update(text.input_ids.tobytes() + b"\n" + text.loss_mask + b"\n")
    return digest.hexdigest()


def _rows(source: Source) -> Iterator[tuple[str, str, object]]:
    """(place for messages, default id, row) of every row; a row that is no JSON arrives as a DataError."""
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if _suffix(file) in SUFFIXES)
        if not files:
            raise DataError(f"{path} is a folder without any {', '.join(SUFFIXES)} file (or .gz of these)")
        for file in files:
            yield from _file_rows(file)
    elif path.exists():
        yield from _file_rows(path)
    elif isinstance(source, Path) or _suffix(path) in SUFFIXES or not _HUB_NAME.fullmatch(source):
        raise DataError(f"{source} does not exist; give a file, a folder or the name of a dataset on the hub")
    else:
        yield from _hub_rows(source)


def _file_rows(path: Path) -> Iterator[tuple[str, str, object]]:
    suffix = _suffix(path)
    if suffix not in SUFFIXES:
        raise DataError(f"{path} is of an unknown type; expected {', '.join(SUFFIXES)} or one of these with .gz")
    stem = path.name.split(".")[0]
    count = 0
    try:
        with _open(path) as file:
            for count, (place, row) in enumerate(_READERS[suffix](path, file), 1):
                yield place, f"{stem}-{count - 1}", row
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    if not count:
        raise DataError(f"{path} is empty; it has no row to read")


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig")
    return open(path, encoding="utf-8-sig")


def _json_lines(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, object]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                yield f"{path}:{number}", DataError(_no_json(error))


def _json_list(path: Path, file: TextIO) -> Iterator[tuple[str, object]]:
    text = file.read()
    if not text.strip():
        return
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        if getattr(error, "msg", None) == "Extra data":  # several documents: JSON lines under the wrong name
            yield from _json_lines(path, io.StringIO(text))
            return
        raise DataError(f"{path}:{getattr(error, 'lineno', 1)}: {_no_json(error)}") from None
    rows = data if isinstance(data, list) else [data]
    yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, 1))


def _no_json(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON ({error.msg.removesuffix(' at')} at column {error.colno})"
    return f"not valid JSON ({error})"  # nested too deep, or a number of too many digits


def _text_blocks(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, object]]:
    block: list[str] = []
    start = 1
    for number, line in enumerate([*lines, ""], 1):
        if line.strip():
            start = start if block else number
            block.append(line)
        elif block:
            yield f"{path}:{start}", {"text": "".join(block).rstrip("\n")}
            block = []


_READERS = {".jsonl": _json_lines, ".json": _json_list, ".txt": _text_blocks}


def _hub_rows(source: str) -> Iterator[tuple[str, str, object]]:
    name, *rest = source.split(":")
    config, split = (rest[0] if len(rest) == 2 else None), (rest[-1] if rest else "train")
    try:
        from datasets import load_dataset

        rows = load_dataset(name, config, split=split)
    except Exception as error:  # datasets raises whatever its storage, network and parsers raise
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataError(
            f"{source} is neither a file nor a folder here, and as a dataset of the hub it cannot be loaded "
            f"({reason}); check the name, the split (`name:split` or `name:config:split`) and the connection"
        ) from None
    stem = name.split("/")[-1]
    for number, row in enumerate(rows):
        yield f"{source}: row {number + 1}", f"{stem}-{number}", row


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _messages(turns: object, key: str) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not turns:
        raise DataError(f"'{key}' is {_shown(turns)}; expected a list of messages")
    return tuple(_message(turn, f"message {number} of '{key}'") for number, turn in enumerate(turns, 1))


def _message(turn: object, name: str) -> Message:
    if not isinstance(turn, dict):
        raise DataError(f"{name} is {_shown(turn)}; expected an object with role and content")
    role, content = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    spoken = str(role).lower()
    more = _more(turn, ROLES.get(spoken), name)
    if content is None and more:
        content = ""  # a call of tools says nothing
    if role is None or content is None:
        raise DataError(f"{name} lacks its {'role' if role is None else 'text'} (from + value, or role + content)")
    if spoken not in ROLES:
        raise DataError(f"{name} has the unknown role {_shown(role)}; expected one of {', '.join(ROLES)}")
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        content = "".join(_text(part["text"], name) for part in content)
    if ROLES[spoken] == "tool" and not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False)  # some collections keep a tool's result as an object
    if spoken == "function_call":
        more, content = {**more, "tool_calls": _calls(_json(content, name), name)}, ""
    finished, learned = turn.get("finished", True) is not False, turn.get("weight") != 0
    return Message(ROLES[spoken], _text(content, name), finished, more, learned)


def _more(turn: dict[str, Any], role: Role | None, name: str) -> dict[str, Any]:
    """What a message has beside role and text; empty values, which tables of the hub are full of, are nothing."""
    more = {key: turn[key] for key in _MORE.get(role or "", ()) if turn.get(key)}
    if "tool_calls" in more:
        more["tool_calls"] = _calls(more["tool_calls"], name)
    reasoning = next((turn[key] for key in _REASONING if turn.get(key)), None)
    if reasoning is not None and role == "assistant":
        more["reasoning_content"] = _text(reasoning, f"the reasoning of {name}")
    return more


def _calls(given: Any, name: str) -> list[dict[str, Any]]:
    """Calls of tools in OpenAI's form, their arguments as objects, which is what chat templates expect."""
    calls = []
    for call in given if isinstance(given, list) else [given]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{name} has a call of a tool without a name, {_shown(call)}; expected name and arguments")
        arguments = function.get("arguments", function.get("parameters"))
        if isinstance(arguments, str):  # which a model may have written wrongly
            with suppress(json.JSONDecodeError):
                arguments = json.loads(arguments or "{}")
        own = {"name": function["name"], "arguments": {} if arguments is None else arguments}
        identity = {"id": call["id"]} if call.get("id") else {}
        calls.append({**identity, "type": "function", "function": own})
    return calls


def _json(text: Any, name: str) -> Any:
    try:
        return json.loads(_text(text, name))
    except json.JSONDecodeError:
        raise DataError(f"{name} has {_shown(text)} where JSON is expected") from None


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{name} is {_shown(value)}; expected a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(f"{name} has half a surrogate pair, which is no valid text") from None
    return value


def _system(row: dict[str, Any]) -> tuple[Message, ...]:
    return (Message("system", _text(row["system"], "system")),) if row.get("system") else ()


def _prompt(conversation: Conversation, row: object) -> Prompt:
    messages = conversation.messages
    users = [index for index, message in enumerate(messages) if message.role == "user"]
    if not users:
        raise DataError("no user message to answer; expected turns, messages or prompt")
    answered = any(message.role == "assistant" for message in messages)
    first = users[-1] if answered or not (isinstance(row, dict) and "turns" in row) else users[0]
    turns = tuple(messages[index].content for index in users if index >= first)
    more = row if isinstance(row, dict) else {}
    known, test, entry_point = (more.get(name) for name in ("reference", "test", "entry_point"))
    known = known if isinstance(known, list) else [] if known is None else [known]
    return Prompt(
        conversation.id,
        str(more.get("category", "")),
        turns,
        messages[: first + 1],
        conversation.template,
        # Whatever stands there: one turn may have a number for a reference, another none.
        references=tuple("" if one is None else str(one) for one in known),
        checks=Checks(test, entry_point) if isinstance(test, str) and isinstance(entry_point, str) else None,
    )


def _sharegpt_turn(message: Message) -> dict[str, Any]:
    speaker = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}[message.role]
    cut = {} if message.finished else {"finished": False}
    return {
        "from": speaker,
        "value": message.content,
        **message.more,
        **cut,
        **({} if message.learned else {"weight": 0}),
    }


def _nothing_left(label: str, rows: int, bad: list[str]) -> str:
    if bad and len(bad) == rows:
        return f"{label}: none of its {rows} rows can be read (the first: {bad[0]})"
    return f"{label}: no conversation is left of {rows} rows after limit and exclude_ids"


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."


# Encoding --------------------------------------------------------------------------------------------


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message | Mapping[str, Any]],
    add_generation_prompt: bool = False,
    template: Mapping[str, Any] | None = None,
) -> str:
    """The messages in the target's chat template. Raises DataError if there is none or if it refuses them.

    template: what it is given beside the messages: `tools`, `enable_thinking`, ...
    """
    given = template or {}
    _chat_template(tokenizer, given)
    chat = [dict(message.chat if isinstance(message, Message) else message) for message in messages]
    try:
        return cast(
            str,
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt, **given),
        )
    except Exception as error:  # a template is a program: it raises what it likes
        roles = ", ".join(str(message.get("role")) for message in chat) or "no message"
        raise DataError(f"the chat template of {_name(tokenizer)} refuses the turns {roles}: {error}") from None


def prompt_ids(
    prompt: Sequence[Message | Mapping[str, Any]] | str,
    tokenizer: PreTrainedTokenizerBase,
    template: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids that an answer follows: messages in the chat template, or raw text as it is.

    The same ids in decoding, in regeneration and before the answer in `encode`. Raises DataError as `render` does.
    """
    if isinstance(prompt, str):
        return [*_first_tokens(tokenizer), *tokenizer(prompt, add_special_tokens=False).input_ids]
    text = render(tokenizer, prompt, add_generation_prompt=True, template=template)
    return tokenizer(text, add_special_tokens=False).input_ids


def answer_message(ids: list[int], tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any] | None) -> Message:
    """What a target has written, (T,) up to its end token, as a message that a chat can go on from.

    Reasoning becomes `reasoning_content` where the template has a place for it, so that what it does with earlier
    reasoning is done; otherwise it stays in the content, as templates that cut it out themselves expect.
    """
    if tokenizer.chat_template and (form := _answer_form(tokenizer, *_template_key(tokenizer, template))):
        whole = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if found := form.fullmatch(cast(str, whole)):
            return Message("assistant", found[2], more={"reasoning_content": found[1]} if found[1] else {})
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Message("assistant", cast(str, text))


def joined(turns: Iterable[tuple[Sequence[int], Sequence[int]]]) -> tuple[Tokens, ...]:
    """Texts to learn from, of a dialogue's (prompt, answer), ids both: one where each prompt goes on where the answer
    before it ended, and another one wherever the template rewrites what was said.
    """
    texts: list[Tokens] = []
    for prompt, answer in turns:
        mask = bytes(len(prompt))
        if texts and list(prompt[: len(texts[-1].input_ids)]) == texts[-1].input_ids.tolist():
            known = texts.pop().loss_mask
            mask = known + mask[len(known) :]
        texts.append(Tokens(array("i", [*prompt, *answer]), mask + bytes([1] * len(answer))))
    return tuple(texts)


def unfolded(conversations: Iterable[Conversation], tokenizer: PreTrainedTokenizerBase) -> list[list[Conversation]]:
    """What `encode` takes, of each conversation: one of one text, or several where the chat template writes earlier
    turns otherwise than they were (it drops their reasoning, say), each with the turns that are learned from in it.

    A conversation that the template refuses stays as it is, for `encode` to say so.
    """
    return [_unfolded(conversation, tokenizer) for conversation in conversations]


def _unfolded(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> list[Conversation]:
    if conversation.texts:
        return [replace(conversation, texts=(text,)) for text in conversation.texts]
    messages, found = conversation.messages, []
    left = [number for number, m in enumerate(messages) if m.role == "assistant" and m.learned]
    if conversation.kind != "chat" or len(left) < 2:
        return [conversation]
    try:
        turns = {number: _written(conversation, number, tokenizer) for number in left}
    except DataError:
        return [conversation]
    while left:
        last = turns[left[-1]].text
        inside = [number for number in left if last.startswith(turns[number].learned)]
        found.append((left[-1], inside))
        left = [number for number in left if number not in inside]
    if len(found) == 1:
        return [conversation]
    return [
        replace(
            conversation,
            messages=tuple(replace(m, learned=number in inside) for number, m in enumerate(messages[: last + 1])),
        )
        for last, inside in reversed(found)
    ]


def encode(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Encoded:
    """Tokens and loss mask of a conversation; the one place where either is derived.

    Supervised are, of each assistant turn, the tokens from the first one after the generation prompt to the
    end-of-turn token inclusive (not the newline that templates put after it); of prompt + completion rows the
    completion and the end-of-text token; of plain text everything but the first token. An answer with
    finished=False is supervised without its end token, which the target never wrote. What follows the last answer is
    left out. Where the tokens are known (`Conversation.texts`, of which there is one) they are taken as they are.

    The text is tokenised as a whole and turns are found by character offsets, so the tokens are those of the
    full text; only where a token would join the generation prompt and the answer is the text cut there,
    because decoding never sees such a token. Cut at `max_length` tokens; the mask may come out all False.
    Raises DataError if a chat meets a tokenizer without chat template, or a template that cannot be followed.
    """
    messages = conversation.messages
    ids: Sequence[int]
    mask: Sequence[int]
    if conversation.texts:
        (text,) = conversation.texts
        ids, mask = text.input_ids, list(text.loss_mask)
    elif conversation.kind == "chat":
        ids, mask = _tokenise(tokenizer, *_chat_spans(conversation, tokenizer))
    else:
        whole = "".join(message.content for message in messages)
        ids, mask = _tokenise(tokenizer, whole, [(len(whole) - len(messages[-1].content), len(whole))])
        first = _first_tokens(tokenizer)
        ids, mask = [*first, *ids], [False for _ in first] + mask
        if conversation.kind == "completion" and messages[-1].finished and tokenizer.eos_token_id is not None:
            ids, mask = [*ids, tokenizer.eos_token_id], [*mask, True]
    input_ids, loss_mask = torch.tensor(ids, dtype=torch.int64), torch.tensor(mask, dtype=torch.bool)
    loss_mask[:1] = False  # nothing predicts the first token
    return Encoded(
        conversation.id,
        input_ids[:max_length],
        loss_mask[:max_length],
        max_length is not None and len(ids) > max_length,
    )


def encode_all(
    conversations: Iterable[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    *,
    skip_bad_rows: bool = False,
) -> EncodedSet:
    """`encode` each conversation; those without any supervised token are dropped and counted.

    skip_bad_rows: also drop and count those that the chat template refuses, instead of raising.
    Raises DataError if nothing is left.
    """
    examples: list[Encoded] = []
    dropped = 0
    for conversation in chain.from_iterable(unfolded(conversations, tokenizer)):
        try:
            encoded = encode(conversation, tokenizer, max_length)
        except DataError:
            if not skip_bad_rows:
                raise
            dropped += 1
            continue
        if encoded.loss_mask.any():
            examples.append(encoded)
        else:
            dropped += 1
    if not examples:
        raise DataError(
            f"none of the {dropped} conversations has a supervised token within {max_length} tokens; "
            "raise max_length or give conversations with shorter prompts"
        )
    return EncodedSet(examples, sum(encoded.truncated for encoded in examples), dropped)


class _Written(NamedTuple):
    """A turn as the target wrote it behind its prompt: text[start:end], the end token included."""

    text: str
    start: int
    end: int

    @property
    def learned(self) -> str:
        return self.text[: self.end]


def _chat_spans(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Span]]:
    """The text that ends with the last answer, and the character spans of the answers in it that are learned from."""
    messages = conversation.messages
    answers = [number for number, m in enumerate(messages) if m.role == "assistant" and m.learned]
    if not answers:
        return render(tokenizer, messages, template=conversation.template), []
    turns = [_written(conversation, number, tokenizer) for number in answers]
    text = turns[-1].text
    return text, [(turn.start, turn.end) for turn in turns if text.startswith(turn.learned)]


def _written(conversation: Conversation, number: int, tokenizer: PreTrainedTokenizerBase) -> _Written:
    """The assistant turn of that number, where the text ends: only there is it sure to be as the target wrote it."""
    messages, template = conversation.messages[: number + 1], conversation.template
    answer, ends = messages[-1], _end_tokens(tokenizer)
    tagged = _THOUGHT_END in _chat_template(tokenizer, template)
    text = render(tokenizer, messages, template=template)
    try:
        prompt = render(tokenizer, messages[:-1], add_generation_prompt=True, template=template)
    except DataError:  # nothing was asked: the conversation begins with an answer
        prompt = None
    start = None if prompt is None else len(prompt)
    if prompt is not None and start is not None:
        shown = text[start:] if text.startswith(prompt) else None
        if not answer.finished and shown is not None and (length := _said(answer, shown)) is not None:
            return _Written(text[: start + length], start, start + length)
        if not answer.finished or (tagged and _loses_thought(answer, text)):
            token = next((token for token in ends if text.rstrip().endswith(token)), tokenizer.eos_token or "")
            text = prompt + _behind(prompt, answer, tagged) + (token if answer.finished else "")
            return _Written(text, start, len(text))
        if shown is None:
            start = None
    span = _marked_span(tokenizer, messages, text, template)
    if span is None and start is not None:
        span = start, len(text)
    if span is None:
        span = _slot_span(tokenizer, messages, text, template)
    if span is None:
        raise DataError(
            f"the assistant turns of conversation {conversation.id} cannot be found in its rendering, because the chat "
            f"template of {_name(tokenizer)} rewrites them; mark them in the template with "
            "{% generation %} ... {% endgeneration %}"
        )
    return _Written(text, span[0], _with_end(text, *span, answer.finished, ends))


def _said(answer: Message, shown: str) -> int | None:
    """Where an answer that was cut ends in `shown`, its rendering; None if the template has put words before it."""
    end = 0
    for part in (answer.reasoning, answer.content):
        at = next((at for part in (part, part.strip()) if (at := shown.find(part, end)) >= 0), None)
        if at is None or (part is answer.content and not answer.reasoning and shown[:at].strip()):
            return None
        end = at + (len(part) if shown.startswith(part, at) else len(part.strip()))
    return end


def _loses_thought(answer: Message, text: str) -> bool:
    """Whether the template leaves out the reasoning with which the target wrote its answer."""
    inline, end, _ = answer.content.partition(_THOUGHT_END)
    thought = answer.reasoning or (inline.strip().removeprefix(_THOUGHT) if end else "")
    return thought.strip() not in text


def _behind(prompt: str, answer: Message, tagged: bool) -> str:
    """What the target wrote: its content, behind its reasoning if it puts that between tags (which the prompt may have
    opened).
    """
    text = answer.content
    if answer.reasoning and tagged:
        text = f"{_THOUGHT}\n{answer.reasoning.strip()}" + (f"\n{_THOUGHT_END}\n\n{text}" if text else "")
    if prompt.rstrip().endswith(_THOUGHT):
        text = text.lstrip().removeprefix(_THOUGHT).lstrip("\n")
    return text


def _marked_span(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], text: str, template: Mapping[str, Any]
) -> Span | None:
    """The last turn as the template itself marks it with `{% generation %}`."""
    source = _chat_template(tokenizer, template)
    if not _GENERATION_MARK.search(source):
        return None
    rendered: Any = render_jinja_template(
        conversations=[[message.chat for message in messages]],
        chat_template=source,
        return_assistant_tokens_mask=True,
        **cast(dict[str, Any], {**tokenizer.special_tokens_map, **template}),
    )
    texts, marks = rendered
    return tuple(marks[0][-1]) if texts[0] == text and marks[0] else None


def _slot_span(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], text: str, template: Mapping[str, Any]
) -> Span | None:
    """From the last turn's content on, found by rendering an unmistakable word in its place. What lies around it is the
    template's own text, so the true text must be that around the true content (as it is, or stripped).
    """
    word = "slot"
    while word in text:
        word += "q"
    *others, answer = messages
    before, found, after = render(tokenizer, [*others, replace(answer, content=word)], template=template).partition(
        word
    )
    fits = found and any(text == before + content + after for content in (answer.content, answer.content.strip()))
    return (len(before), len(text)) if fits else None


def _template_key(tokenizer: PreTrainedTokenizerBase, template: Mapping[str, Any] | None) -> tuple[str, str]:
    """What a rendering depends on beside the messages."""
    return _chat_template(tokenizer, template or {}), json.dumps(dict(template or {}), sort_keys=True, default=str)


@lru_cache(maxsize=8)
def _answer_form(tokenizer: PreTrainedTokenizerBase, source: str, template: str) -> re.Pattern[str] | None:
    """Matches answers with reasoning, (1), before the content, (2), as the template itself writes them; None where it
    writes no reasoning.
    """
    del source  # only a part of the key: tokenizers are told apart by identity, and a template can be replaced
    answer = Message("assistant", "slotcontent", more={"reasoning_content": "slotreasoning"})
    messages, given = [Message("user", "question"), answer], json.loads(template)
    try:
        prompt = render(tokenizer, messages[:1], add_generation_prompt=True, template=given)
        whole = render(tokenizer, messages, template=given)
    except DataError:
        return None
    shown = whole[len(prompt) :] if whole.startswith(prompt) else ""
    found = re.fullmatch(r"(.*)slotreasoning(.*)slotcontent.*", shown, re.DOTALL)
    before, between = (part.strip() for part in found.groups()) if found else ("", "")
    if not between:
        return None
    return re.compile(rf"\s*{re.escape(before)}\s*(.*?)\s*{re.escape(between)}\s*(.*)", re.DOTALL)


def _end_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Texts of tokens that can end a turn: special ones, longest first."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True))


def _with_end(text: str, start: int, end: int, finished: bool, ends: tuple[str, ...]) -> int:
    """The supervised end of a turn that is known to reach, with or without its end token, to `end`."""
    body = text[start:end].rstrip()
    token = next((token for token in ends if body.endswith(token)), "")
    content_end = start + len(body) - len(token)
    if not finished:
        return content_end
    after = content_end + len(text[content_end:]) - len(text[content_end:].lstrip())
    return next((after + len(token) for token in ends if text.startswith(token, after)), content_end)


def _tokenise(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[Span]) -> tuple[list[int], list[bool]]:
    """Token ids of `text` and which of them lie in `spans`."""
    if not tokenizer.is_fast:  # no offsets: cut at every boundary
        edges = sorted({0, len(text), *(edge for span in spans for edge in span)})
        ids: list[int] = []
        mask: list[bool] = []
        for start, end in pairwise(edges):
            piece = tokenizer(text[start:end], add_special_tokens=False).input_ids
            ids += piece
            mask += [any(first <= start < last for first, last in spans)] * len(piece)
        return ids, mask
    found, starts, stops = _offsets(tokenizer, text, 0)
    cuts = [start for start, _ in spans if np.any((starts < start) & (start < stops))]
    if cuts:
        edges = [0, *cuts, len(text)]
        parts = [_offsets(tokenizer, text[a:b], a) for a, b in pairwise(edges)]
        found, starts, stops = (np.concatenate(column) for column in zip(*parts, strict=True))
    added = list(tokenizer.added_tokens_decoder)
    anew = starts[np.isin(found, added)]  # where reading begins anew
    for start, _ in spans:
        blank = len(text[:start].rstrip())
        # Some tokenizers read a run of blanks otherwise where words follow, and in decoding none do.
        if start - blank > 1:
            first = anew[anew <= blank].max(initial=0)
            prompt = _offsets(tokenizer, text[first:start], first)
            low, high, after = np.searchsorted(starts, [first, blank + 1, start])
            same = np.intersect1d(starts[low:high], prompt[1]).max(initial=first)
            before, tail = low + np.searchsorted(starts[low:high], same), np.searchsorted(prompt[1], same)
            found, starts, stops = (
                np.concatenate([now[:before], own[tail:], now[after:]])
                for now, own in zip((found, starts, stops), prompt, strict=True)
            )
    special = np.isin(found, added)  # may swallow the whitespace behind it
    inside = np.zeros(len(found), dtype=bool)
    for start, end in spans:
        inside |= (starts >= start) & (starts < end) & ((stops <= end) | special)
    return found.tolist(), inside.tolist()


def _offsets(tokenizer: PreTrainedTokenizerBase, text: str, shift: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, first character, end character), each (T,), of the tokens of `text`.

    Byte-level tokenizers report words without their leading space; here a gap belongs to the token after it,
    so that tokens tile the text (those of one character share its span).
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    reached = np.concatenate([[0], np.maximum.accumulate(offsets[:, 1])[:-1]])[: len(offsets)]
    ids = np.array(encoded["input_ids"], dtype=np.int64)
    return ids, np.minimum(offsets[:, 0], reached) + shift, offsets[:, 1] + shift


def _first_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before raw text: the beginning-of-text token, or several; not what it puts behind."""
    bare, whole = (tokenizer("a", add_special_tokens=special).input_ids for special in (False, True))
    return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(bare)] == bare), [])


def _chat_template(tokenizer: PreTrainedTokenizerBase, given: Mapping[str, Any]) -> str:
    try:
        template = tokenizer.get_chat_template(tools=given.get("tools"))
    except ValueError:
        template = None
    if not template:
        raise DataError(
            f"the tokenizer of {_name(tokenizer)} has no chat template; use an instruction-tuned target, put "
            "a chat_template.jinja into its folder, or give plain text or prompt + completion rows"
        )
    return template


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return tokenizer.name_or_path or type(tokenizer).__name__


# Command ---------------------------------------------------------------------------------------------


def preview(
    data: str,
    target: str,
    n: int = 3,
    max_length: int = 2048,
    limit: int = 1000,
    skip_bad_rows: bool = False,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> None:
    """Print `n` conversations, supervised tokens coloured, and a summary of the first `limit` rows."""
    from rich.console import Console
    from rich.text import Text

    from shape import bundled

    conversations = load_conversations(
        data, limit=limit, skip_bad_rows=skip_bad_rows, chat_template_kwargs=chat_template_kwargs
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(bundled.resolve(target))
    except (OSError, ValueError) as error:
        raise DataError(f"the tokenizer of {target} cannot be loaded: {str(error).splitlines()[0]}") from None
    encoded = encode_all(conversations, tokenizer, max_length, skip_bad_rows=skip_bad_rows)
    console = Console()
    for example in encoded.examples[:n]:
        supervised = int(example.loss_mask.sum())
        console.rule(Text(f"{example.id}: {len(example.input_ids)} tokens, {supervised} supervised"))
        text = Text()
        for run, mark in _runs(example):
            text.append(cast(str, tokenizer.decode(run)), style="bold green" if mark else "dim")
        console.print(text, soft_wrap=True)
    tokens = sum(len(example.input_ids) for example in encoded.examples)
    share = sum(int(example.loss_mask.sum()) for example in encoded.examples) / tokens
    console.rule()
    console.print(
        f"{len(encoded.examples)} rows, {tokens} tokens, {share:.1%} supervised (coloured); "
        f"{encoded.truncated} cut at {max_length} tokens, {encoded.dropped} left out (nothing to supervise)",
        soft_wrap=True,
        highlight=False,
    )


def _runs(example: Encoded) -> Iterator[tuple[list[int], bool]]:
    """Stretches of tokens with the same mask: decoded together, so that multi-byte characters stay whole."""
    edges = torch.nonzero(example.loss_mask[1:] != example.loss_mask[:-1]).flatten() + 1
    for ids, mask in zip(
        torch.tensor_split(example.input_ids, edges),
        torch.tensor_split(example.loss_mask, edges),
        strict=True,
    ):
        yield ids.tolist(), bool(mask[0])
