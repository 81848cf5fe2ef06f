"""Conversations: reading them, rendering them with the target's chat template, and the one loss mask.

`python -m shape.conversations preview --data D --target T` shows what a model would be trained on.
"""

import gzip
import hashlib
import io
import json
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from shape.errors import DataError, exit_on_error

Role = Literal["system", "user", "assistant"]
Kind = Literal["chat", "completion", "text"]
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
}
SUFFIXES = (".jsonl", ".json", ".txt")
FORMATS = "conversations, messages, turns, instruction + output, prompt + completion, prompt, or text"
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[^:]+){0,2}")


@dataclass(frozen=True)
class Message:
    """One turn. `finished` is False for an answer that was cut before its end-of-turn token."""

    role: Role
    content: str
    finished: bool = True


@dataclass(frozen=True)
class Conversation:
    """One row of data.

    kind "chat": messages go through the target's chat template. "completion": a user and an assistant
    message that are joined as they are (prompt + completion). "text": one assistant message, plain text.
    """

    id: str
    messages: tuple[Message, ...]
    kind: Kind = "chat"

    def to_row(self) -> dict[str, Any]:
        """The row (ShareGPT form for chats) that `load_conversations` reads back as this conversation."""
        cut = {} if self.messages[-1].finished else {"finished": False}
        if self.kind == "text":
            return {"id": self.id, "text": self.messages[0].content, **cut}
        if self.kind == "completion":
            prompt, completion = self.messages
            return {"id": self.id, "prompt": prompt.content, "completion": completion.content, **cut}
        return {"id": self.id, "conversations": [_sharegpt_turn(message) for message in self.messages]}


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
    references: known answers to the turns, in their order, as far as there are any. checks: for code, what tests it.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    messages: tuple[Message, ...]
    # Nothing that is asked, so that prompts with and without them are the same ones to a measurement of speed.
    references: tuple[str, ...] = field(default=(), repr=False)
    checks: Checks | None = field(default=None, repr=False)

    @property
    def opening(self) -> list[dict[str, str]]:
        """The messages as chat templates take them."""
        return [{"role": message.role, "content": message.content} for message in self.messages]


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
) -> list[Conversation]:
    """Read conversations, in the order of the source.

    The format is recognised row by row: ShareGPT (`conversations`), OpenAI (`messages`), Alpaca (`instruction`,
    `input`, `output`), `prompt` + `completion`, `text`, and user-only `turns` or `prompt`.

    Args:
        source: a .jsonl, .json (list) or .txt file (one text per block of lines; blank lines separate), any of
            them gzipped, a folder of these, a dataset on the hub (`name`, `name:split` or `name:config:split`), or
            a list of sources.
        skip_bad_rows: count malformed rows, warn once and go on, instead of raising at the first.
        limit: at most this many conversations.
        exclude_ids: leave out ids that begin with one of these.
        require_answers: raise if no row has an assistant turn (regeneration does not need any).

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
            found.append(conversation)
    if bad:
        warnings.warn(f"{label}: skipped {len(bad)} malformed of {rows} rows (the first: {bad[0]})", stacklevel=2)
    if not found:
        raise DataError(_nothing_left(label, rows, bad))
    if require_answers and not any(m.role == "assistant" for c in found for m in c.messages):
        raise DataError(
            f"{label} has no assistant turn in any of its {len(found)} rows, so there is nothing to learn "
            "from; give conversations with answers, or write them with `python -m shape.regeneration`"
        )
    return found


def load_prompts(path: Source) -> list[Prompt]:
    """Read a prompts file: JSON lines (or a .json list, gzipped or not) with `turns`, `messages`, `prompt` or
    `question`; or a dataset of such rows on the hub, as `load_conversations` names them. A `prompt` may be a list of
    turns, as in MT-Bench; beside a `question` an `answer` is the reference, as in GSM8K.

    `id` and `category` are optional, as are `reference` (a text, or one for each turn) and, as in HumanEval, `test`
    with `entry_point`. Of `messages`, what follows the last user message is left out.
    Raises DataError with file and line.
    """
    prompts = []
    for place, default_id, row in _rows(path):
        try:
            row = _as_asked(row)
            conversation = parse_row(row, default_id)
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
    keys = ", ".join(map(str, row)) or "no keys"
    raise DataError(f"unknown format (it has {keys}); expected {FORMATS}")


def fingerprint(conversations: Iterable[Conversation]) -> str:
    """SHA-256 (hex) over ids, kinds, roles, contents and finished flags, in order; of nothing else."""
    digest = hashlib.sha256()
    for conversation in conversations:
        turns = [[message.role, message.content, message.finished] for message in conversation.messages]
        digest.update(json.dumps([conversation.id, conversation.kind, turns]).encode() + b"\n")
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
    if role is None or content is None:
        raise DataError(f"{name} lacks its {'role' if role is None else 'text'} (from + value, or role + content)")
    if str(role).lower() not in ROLES:
        raise DataError(f"{name} has the unknown role {_shown(role)}; expected one of {', '.join(ROLES)}")
    if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
        content = "".join(_text(part["text"], name) for part in content)
    return Message(ROLES[str(role).lower()], _text(content, name), turn.get("finished", True) is not False)


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
        # Whatever stands there: one turn may have a number for a reference, another none.
        references=tuple("" if one is None else str(one) for one in known),
        checks=Checks(test, entry_point) if isinstance(test, str) and isinstance(entry_point, str) else None,
    )


def _sharegpt_turn(message: Message) -> dict[str, Any]:
    speaker = {"system": "system", "user": "human", "assistant": "gpt"}[message.role]
    turn: dict[str, Any] = {"from": speaker, "value": message.content}
    return turn if message.finished else {**turn, "finished": False}


def _nothing_left(label: str, rows: int, bad: list[str]) -> str:
    if bad and len(bad) == rows:
        return f"{label}: none of its {rows} rows can be read (the first: {bad[0]})"
    return f"{label}: no conversation is left of {rows} rows after limit and exclude_ids"


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."


# Encoding --------------------------------------------------------------------------------------------


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
    """The messages in the target's chat template. Raises DataError if there is none or if it refuses them."""
    _chat_template(tokenizer)
    chat = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return cast(
            str,
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt),
        )
    except Exception as error:  # a template is a program: it raises what it likes
        roles = ", ".join(message.role for message in messages) or "no message"
        raise DataError(f"the chat template of {_name(tokenizer)} refuses the turns {roles}: {error}") from None


def encode(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Encoded:
    """Tokens and loss mask of a conversation; the one place where either is derived.

    Supervised are, of each assistant turn, the tokens from the first one after the generation prompt to the
    end-of-turn token inclusive (not the newline that templates put after it); of prompt + completion rows the
    completion and the end-of-text token; of plain text everything but the first token. An answer with
    finished=False is supervised without its end token, which the target never wrote.

    The text is tokenised as a whole and turns are found by character offsets, so the tokens are those of the
    full text; only where a token would join the generation prompt and the answer is the text cut there,
    because decoding never sees such a token. Cut at `max_length` tokens; the mask may come out all False.
    Raises DataError if a chat meets a tokenizer without chat template, or a template that cannot be followed.
    """
    messages = conversation.messages
    if conversation.kind == "chat":
        text = render(tokenizer, messages)
        ids, mask = _tokenise(tokenizer, text, _turn_spans(tokenizer, messages, text, conversation.id))
    else:
        text = "".join(message.content for message in messages)
        ids, mask = _tokenise(tokenizer, text, [(len(text) - len(messages[-1].content), len(text))])
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


def prompt_ids(prompt: Sequence[Message] | str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that an answer follows: messages in the chat template, or raw text as it is.

    The same ids as those before the answer in `encode`. Raises DataError as `render` does.
    """
    if isinstance(prompt, str):
        return [*_first_tokens(tokenizer), *tokenizer(prompt, add_special_tokens=False).input_ids]
    return tokenizer(render(tokenizer, prompt, add_generation_prompt=True), add_special_tokens=False).input_ids


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
    for conversation in conversations:
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


def _turn_spans(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], text: str, identity: str
) -> list[Span]:
    """Character spans of the supervised parts of `text`, the rendering of `messages`."""
    if all(message.role != "assistant" for message in messages):
        return []
    for find in (_marked_spans, _slot_spans, _prefix_spans):
        spans = find(tokenizer, messages, text)
        if spans is not None:
            return spans
    raise DataError(
        f"the assistant turns of conversation {identity} cannot be found in its rendering, because the chat "
        f"template of {_name(tokenizer)} rewrites them; mark them in the template with "
        "{% generation %} ... {% endgeneration %}"
    )


def _marked_spans(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], text: str) -> list[Span] | None:
    """Turns as the template itself marks them with `{% generation %}`."""
    template = _chat_template(tokenizer)
    if not _GENERATION_MARK.search(template):
        return None
    chat = [{"role": message.role, "content": message.content} for message in messages]
    rendered: Any = render_jinja_template(
        conversations=[chat],
        chat_template=template,
        return_assistant_tokens_mask=True,
        **cast(dict[str, Any], tokenizer.special_tokens_map),
    )
    texts, marks = rendered
    answers = [message for message in messages if message.role == "assistant"]
    if texts[0] != text or len(marks[0]) != len(answers):
        return None
    ends = _end_tokens(tokenizer)
    return [
        (start, _without_end(text, start, end, answer.finished, ends))
        for (start, end), answer in zip(marks[0], answers, strict=True)
    ]


def _slot_spans(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], text: str) -> list[Span] | None:
    """Turns found by rendering the same roles with unmistakable words for contents.

    What lies between those words is the template's own text, so the true text must be these literals with the
    true contents (as they are, or stripped) between them: checked to the last character, or None. Works for
    templates that treat earlier turns differently from the last one.
    """
    word = "slot"
    while word in text:
        word += "q"
    skeleton = render(tokenizer, [replace(m, content=f"{word}{i}z") for i, m in enumerate(messages)])
    first, *pieces = re.split(f"{word}([0-9]+)z", skeleton)
    if not text.startswith(first):
        return None
    position = len(first)
    contents: dict[int, Span] = {}
    for index, literal in zip(map(int, pieces[::2]), pieces[1::2], strict=True):
        content = messages[index].content
        shown = next((c for c in (content, content.strip()) if text.startswith(c + literal, position)), None)
        if shown is None or index in contents:
            return None
        contents[index] = (position, position + len(shown))
        position += len(shown) + len(literal)
    answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if position != len(text) or not contents.keys() >= set(answers):
        return None
    lead, ends = _answer_lead(tokenizer, _chat_template(tokenizer)), _end_tokens(tokenizer)
    spans = []
    for index in answers:
        start, end = contents[index]
        start -= len(lead) if text[:start].endswith(lead) else 0
        spans.append((start, _with_end(text, end, ends) if messages[index].finished else end))
    return spans


def _prefix_spans(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], text: str) -> list[Span] | None:
    """Turns found as the difference of two renderings: up to the generation prompt, and with the answer.

    For templates that transform contents. A turn that the template writes differently once it is followed by
    others is left unsupervised: that text is not what the target produced.
    """
    ends = _end_tokens(tokenizer)
    spans = []
    for index, message in enumerate(messages):
        if message.role == "assistant" and index:
            before = render(tokenizer, messages[:index], add_generation_prompt=True)
            through = render(tokenizer, messages[: index + 1])
            if through.startswith(before) and text.startswith(through):
                end = _without_end(text, len(before), len(through), message.finished, ends)
                spans.append((len(before), end))
    return spans or None


@lru_cache(maxsize=8)
def _answer_lead(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    """What the template puts between the generation prompt and an answer, and the target therefore writes."""
    question, answer = Message("user", "question"), Message("assistant", "slotanswer")
    try:
        before = render(tokenizer, [question], add_generation_prompt=True)
        whole = render(tokenizer, [question, answer])
    except DataError:
        return ""
    return whole[len(before) :].split("slotanswer")[0] if whole.startswith(before) else ""


def _end_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Texts of tokens that can end a turn: special ones, longest first."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True))


def _with_end(text: str, end: int, ends: tuple[str, ...]) -> int:
    """The end of the end token that follows position `end`, or `end` if the template has none."""
    after = end + len(text[end:]) - len(text[end:].lstrip())
    return next((after + len(token) for token in ends if text.startswith(token, after)), end)


def _without_end(text: str, start: int, end: int, finished: bool, ends: tuple[str, ...]) -> int:
    """The supervised end of a turn that is known to reach, with or without its end token, to `end`."""
    body = text[start:end].rstrip()
    token = next((token for token in ends if body.endswith(token)), "")
    content_end = start + len(body) - len(token)
    return _with_end(text, content_end, ends) if finished else content_end


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
    special = np.isin(found, tokenizer.all_special_ids)  # may swallow the whitespace behind it
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
    """The beginning-of-text token, where the tokenizer puts one before raw text."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("").input_ids[:1] == [bos] else []


def _chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        template = tokenizer.get_chat_template()
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
    data: str, target: str, n: int = 3, max_length: int = 2048, limit: int = 1000, skip_bad_rows: bool = False
) -> None:
    """Print `n` conversations, supervised tokens coloured, and a summary of the first `limit` rows."""
    from rich.console import Console
    from rich.text import Text

    from shape import bundled

    conversations = load_conversations(data, limit=limit, skip_bad_rows=skip_bad_rows)
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


def main(args: list[str] | None = None) -> None:
    """`python -m shape.conversations preview --data D --target T [-n 3] [--max_length 2048]`."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="shape.conversations", description="Conversations as a target sees them.")
    command = ArgumentParser(description="Print samples with the supervised tokens coloured.")
    command.add_argument("--data", type=str, required=True, help="file, folder or hub dataset (name[:split])")
    command.add_argument("--target", type=str, required=True, help="model whose tokenizer and template are used")
    command.add_argument("-n", "--n", type=int, default=3, help="how many conversations to print")
    command.add_argument("--max_length", type=int, default=2048, help="tokens kept of each conversation")
    command.add_argument("--limit", type=int, default=1000, help="rows that are read for the summary")
    command.add_argument("--skip_bad_rows", type=bool, default=False, help="count malformed rows and go on")
    parser.add_subcommands().add_subcommand("preview", command)
    with exit_on_error():
        preview(**parser.parse_args(args).preview.as_dict())


if __name__ == "__main__":
    main()
