"""Reading conversations and prompts from files, folders and the hub.

The hub and parquet files are read by `datasets`. JSON and text are read here: its readers report no line numbers, give
every row the columns of all, and know neither JSON lines under the name .json nor texts between blank lines.
"""

import gzip
import json
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from shape.data.conversations import Conversation, Prompt
from shape.data.rows import parse_prompt, parse_row
from shape.errors import DataError
from shape.target.loading import first_line

Source = str | Path
SUFFIXES = (".jsonl", ".json", ".txt", ".parquet")
_ELSEWHERE = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"  # SPEED-Bench's own words
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[^:]+){0,2}")


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
    which suffice alone; chats may hold `tools` and `chat_template_kwargs`.

    Args:
        source: a .jsonl, .json (list) or .txt file (blank lines separate texts), any of them gzipped, a .parquet file,
            a folder of these, a dataset on the hub (`name`, `name:split` or `name:config:split`), or a list of sources.
        skip_bad_rows: count malformed rows, warn once and continue, instead of raising at the first.
        limit: at most this many conversations.
        exclude_ids: leave out ids that begin with one of these.
        require_answers: raise if no row has an assistant turn (regeneration does not need any).
        chat_template_kwargs: given to the chat template with every row; a row's own override them.

    Raises:
        DataError: naming file and line, for anything that cannot be read.
    """
    if limit is not None and limit < 1:
        raise DataError(f"limit is {limit}; give at least 1")
    sources = [source] if isinstance(source, str | Path) else list(source)
    label = ", ".join(str(one) for one in sources)
    found: list[Conversation] = []
    bad: list[str] = []
    rows = 0
    for where, default_id, row in (item for one in sources for item in _rows(one)):
        if limit is not None and len(found) >= limit:
            break
        rows += 1
        try:
            conversation = parse_row(row, default_id)
        except DataError as error:
            if not skip_bad_rows:
                raise DataError(f"{where}: {error} (skip_bad_rows leaves such rows out)") from None
            bad.append(f"{where}: {error}")
            continue
        if not conversation.id.startswith(exclude_ids):
            given = chat_template_kwargs if conversation.asks and chat_template_kwargs else {}
            found.append(replace(conversation, template={**given, **conversation.template}) if given else conversation)
    if bad:
        warnings.warn(f"{label}: skipped {len(bad)} malformed of {rows} rows (the first: {bad[0]})", stacklevel=2)
    if bad and len(bad) == rows:
        raise DataError(f"{label}: none of its {rows} rows can be read (the first: {bad[0]})")
    if not found:
        left = " after exclude_ids" if exclude_ids else ""
        raise DataError(f"{label}: no conversation is left of {rows} rows{left}; give another source")
    if require_answers and not any(c.texts or any(m.role == "assistant" for m in c.messages) for c in found):
        raise DataError(
            f"{label} has no assistant turn in any of its {len(found)} rows, so there is nothing to learn "
            "from; give conversations with answers, or write them with `shape regenerate`"
        )
    return found


def conversations_of(options: Any, **more: Any) -> list[Conversation]:
    """`load_conversations` of a command's options: `data`, `limit`, `skip_bad_rows` and `chat_template_kwargs`."""
    return load_conversations(
        options.data,
        limit=options.limit,
        skip_bad_rows=options.skip_bad_rows,
        chat_template_kwargs=options.chat_template_kwargs,
        **more,
    )


def load_prompts(path: Source, chat_template_kwargs: Mapping[str, Any] | None = None) -> list[Prompt]:
    """Read a prompts file: JSON lines (or a .json list, gzipped or not) with `turns`, `messages`, `prompt`, `question`
    or `problem`; or a dataset of such rows on the hub, as `load_conversations` names them. A `prompt` may be a list
    of turns, as in MT-Bench; beside a `question` an `answer` is the reference, as in GSM8K.

    Rows of SPEED-Bench that say nothing but where their text lies are left out, with a warning.

    `id` and `category` are optional, as are `reference` (a text, or one for each turn) and, as in HumanEval, `test`
    with `entry_point`.

    Args:
        chat_template_kwargs: given to the chat template with every prompt; a prompt's own override them.

    Raises:
        DataError: with file and line.
    """
    prompts: list[Prompt] = []
    elsewhere = 0
    for where, default_id, row in _rows(path):
        try:
            prompt = parse_prompt(row, default_id)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        if _ELSEWHERE in prompt.turns:
            elsewhere += 1
        else:
            prompts.append(replace(prompt, template={**(chat_template_kwargs or {}), **prompt.template}))
    if elsewhere:
        message = (
            f"{path}: {elsewhere} of {elsewhere + len(prompts)} rows name a source in place of their text and are left "
            "out, so figures are not SPEED-Bench's; its program prepare_data.py fetches them: give the file it writes"
        )
        if not prompts:
            raise DataError(message)
        warnings.warn(message, stacklevel=2)
    if not prompts:
        raise DataError(f"{path} is empty; it has no row to read")
    return prompts


def _rows(source: Source) -> Iterator[tuple[str, str, object]]:
    """(where, for messages, default id, row) of every row; one that is no JSON arrives as a DataError."""
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
    if suffix not in SUFFIXES or path.name.endswith(".parquet.gz"):
        raise DataError(f"{path} is of an unknown type; expected {', '.join(SUFFIXES)} or one of these with .gz")
    stem = path.name.split(".")[0]
    count = 0
    try:
        for count, (where, row) in enumerate(_READERS[suffix](path), 1):
            yield where, f"{stem}-{count - 1}", row
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not count:
        raise DataError(f"{path} is empty; it has no row to read")


def _lines(path: Path) -> Iterator[str | DataError]:
    """Each line, or why it is no text."""
    with (
        gzip.open(path, "rt", encoding="utf-8-sig", errors="surrogateescape")
        if path.suffix == ".gz"
        else open(path, encoding="utf-8-sig", errors="surrogateescape") as file
    ):
        for line in file:
            try:
                line.encode()
            except UnicodeEncodeError as error:
                byte = len(line[: error.start].encode()) + 1
                yield DataError(f"not UTF-8 text (byte {byte} of the line)")
            else:
                yield line


def _text(path: Path) -> Iterator[str]:
    """Each line of a file of which no part can be left out."""
    for number, line in enumerate(_lines(path), 1):
        if isinstance(line, DataError):
            raise DataError(f"{path}:{number}: {line}")
        yield line


def _json_lines(path: Path) -> Iterator[tuple[str, object]]:
    for number, line in enumerate(_lines(path), 1):
        if isinstance(line, DataError):
            yield f"{path}:{number}", line
        elif line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                yield f"{path}:{number}", DataError(_no_json(error))


def _json_list(path: Path) -> Iterator[tuple[str, object]]:
    text = "".join(_text(path))
    if not text.strip():
        return
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        if getattr(error, "msg", None) == "Extra data":  # several documents: JSON lines under the wrong name
            yield from _json_lines(path)
            return
        raise DataError(f"{path}:{getattr(error, 'lineno', 1)}: {_no_json(error)}") from None
    rows = data if isinstance(data, list) else [data]
    yield from ((f"{path}: row {number}", row) for number, row in enumerate(rows, 1))


def _no_json(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON ({error.msg.removesuffix(' at')} at column {error.colno})"
    return f"not valid JSON ({error})"  # nested too deep, or a number of too many digits


def _text_blocks(path: Path) -> Iterator[tuple[str, object]]:
    block: list[str] = []
    start = 1
    for number, line in enumerate(chain(_text(path), [""]), 1):
        if line.strip():
            start = start if block else number
            block.append(line)
        elif block:
            yield f"{path}:{start}", {"text": "".join(block).rstrip("\n")}
            block = []


def _parquet(path: Path) -> Iterator[tuple[str, object]]:
    from datasets import load_dataset

    try:
        rows = iter(load_dataset("parquet", data_files=str(path), split="train", streaming=True))
        for number, row in enumerate(rows, 1):
            yield f"{path}: row {number}", _without_nulls(row)
    except ValueError as error:  # pyarrow's errors
        raise DataError(f"{path} cannot be read: {first_line(error)}") from None


def _without_nulls(value: Any) -> Any:
    """Without what a table fills up: every object in it has the columns of all others in its place."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, object]]]] = {
    ".jsonl": _json_lines, ".json": _json_list, ".txt": _text_blocks, ".parquet": _parquet
}  # fmt: skip


def _hub_rows(source: str) -> Iterator[tuple[str, str, object]]:
    name, *rest = source.split(":")
    config, split = (rest[0] if len(rest) == 2 else None), (rest[-1] if rest else "train")
    try:
        from datasets import load_dataset

        rows = load_dataset(name, config, split=split)
    except Exception as error:  # datasets raises whatever its storage, network and parsers raise
        raise DataError(
            f"{source} is neither a file nor a folder here, and as a dataset of the hub it cannot be loaded "
            f"({first_line(error)}); check the name, the split (`name:split` or `name:config:split`) and the connection"
        ) from None
    stem = name.split("/")[-1]
    for number, row in enumerate(rows):
        yield f"{source}: row {number + 1}", f"{stem}-{number}", _without_nulls(row)


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
