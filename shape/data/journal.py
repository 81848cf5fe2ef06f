"""What of a regeneration is finished, so that it continues after an interruption, with any number of processes."""

import glob
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from shape.errors import ConfigError, DataError
from shape.files import reading, typed

Entry = tuple[int, dict[str, Any] | None, int, str | None]
"""(index of the conversation, its row or None, user messages, what ended it early or None)."""


# What a run is begun with, beside its data and what is the target's own.
_OPTIONS = ("dtype", "max_length", "max_new_tokens", "model", "sampled_share", "samples", "seed", "temperature")


class AnswerJournal:
    """Finished conversations, a batch in each line, behind a line with all that the run depends on; a file for each
    process that writes, of which all read all.

    A line counts once its newline is written: a half-written one is cut off on resuming. Entries stay in the files, as
    token ids of all answers take many gigabytes.

    Attributes:
        places: of each entry, by index of the conversation: the file, the first byte, and the number of bytes.

    Raises:
        ConfigError: it was begun with other settings.
        DataError: it cannot be read.
    """

    def __init__(self, path: Path, settings: dict[str, Any], rank: int = 0) -> None:
        self.path, self.settings = path, settings
        self.places: dict[int, tuple[Path, int, int]] = {}
        self._read: dict[Path, int] = {}  # bytes of each file
        self._writing = threading.Lock()
        self._own = path.with_name(f"{path.name}.{rank}") if rank else path
        self.read()
        with open(self._own, "ab") as file:
            file.truncate(self._read.get(self._own, 0))
        if not self._read.get(self._own):
            self._write(_line(settings))

    @property
    def files(self) -> list[Path]:
        """The files that exist."""
        others = self.path.parent.glob(f"{glob.escape(self.path.name)}.*")
        numbered = sorted(path for path in others if path.suffix[1:].isdigit())
        return [path for path in (self.path, *numbered) if path.exists()]

    def read(self) -> None:
        """Read what was written to any of the files since."""
        for path in self.files:
            at = self._read.get(path, 0)
            with open(path, "rb") as file:
                file.seek(at)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    with _readable(path):
                        if at:
                            batch = typed(list[Entry], json.loads(line))
                            if line != _line(batch):
                                raise ValueError("a line is not as it was written")
                            self._note(path, at, batch)
                        else:
                            begun = typed(dict[str, Any], json.loads(line))
                    if not at and (other := self._other(begun)):
                        if path.stat().st_size == len(line):  # of which nothing was answered: begun anew
                            break
                        raise ConfigError(f"{path} was begun with {other}; give the same again, or delete it")
                    at += len(line)
            self._read[path] = at

    def entries(self) -> Iterator[Entry]:
        """All that are known, in the order of their indices, one at a time."""
        with ExitStack() as opened:
            files = {path: opened.enter_context(open(path, "rb")) for path in self._read}
            for index in sorted(self.places):
                path, start, size = self.places[index]
                files[path].seek(start)
                with _readable(path):
                    (entry,) = typed(list[Entry], [json.loads(files[path].read(size))])
                yield entry

    def delete(self) -> None:
        """All of the files, once what they hold is written elsewhere."""
        for path in self.files:
            path.unlink()

    def append(self, batch: Sequence[Entry]) -> None:
        self._write(_line(batch), batch)

    def _write(self, line: bytes, batch: Sequence[Entry] = ()) -> None:
        with self._writing, open(self._own, "ab", buffering=0) as file:
            start, left = file.tell(), memoryview(line)
            try:
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except BaseException:  # half a line, behind which another would be unreadable
                os.truncate(self._own, start)
                raise
            self._note(self._own, start, batch)
            self._read[self._own] = file.tell()

    def _note(self, path: Path, start: int, batch: Sequence[Entry]) -> None:
        """Where the entries of a line lie that starts there."""
        start += len("[")
        for entry in batch:
            size = len(json.dumps(entry))
            self.places[entry[0]] = path, start, size
            start += size + len(", ")

    def _other(self, begun: dict[str, Any]) -> str:
        """How it was begun where that is not as now."""
        names = begun.keys() | self.settings.keys()
        other = sorted(name for name in names if begun.get(name) != self.settings.get(name))
        values = {name: (begun.get(name), self.settings.get(name)) for name in _OPTIONS if name in other}
        said = [f"{name} {was} (now {now})" for name, (was, now) in values.items() if None not in (was, now)]
        said += ["other conversations"] if "data" in other else []
        said += ["another target"] if set(other) - {"data", *_OPTIONS} else []
        return ", ".join(said or other)


def _line(values: Any) -> bytes:
    return json.dumps(values).encode() + b"\n"


def _readable(path: Path) -> AbstractContextManager[None]:
    return reading(str(path), DataError, "delete it, and give the same command again: its answers are written anew")
