"""What of a regeneration is finished, so that it continues after an interruption, with any number of processes."""

import glob
import json
import os
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from shape.errors import ConfigError, DataError
from shape.files import reading, typed

Entry = tuple[int, dict[str, Any] | None, int, str | None]
"""(index of the conversation, its row or None, user messages, what ended it early or None)."""


class AnswerJournal:
    """Finished conversations, a batch in each line, behind a line with all that the run depends on; a file for each
    process that writes, of which all read all.

    A line counts once its newline is written: a half-written one is cut off on resuming.

    Attributes:
        entries: by index of the conversation.

    Raises:
        ConfigError: it was begun with other settings.
        DataError: it cannot be read.
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

    @property
    def files(self) -> list[Path]:
        """The files that exist."""
        others = self.path.parent.glob(f"{glob.escape(self.path.name)}.*")
        numbered = sorted(path for path in others if path.suffix[1:].isdigit())
        return [path for path in (self.path, *numbered) if path.exists()]

    def read(self) -> None:
        """Read what was written to any of the files since."""
        for path in self.files:
            start = self._read.get(path, 0)
            with open(path, "rb") as file:
                file.seek(start)
                text = file.read()
            lines = text[: text.rfind(b"\n") + 1].splitlines(keepends=True)
            self._read[path] = start + sum(map(len, lines))
            if lines and not start:
                with _readable(path):
                    begun = typed(dict[str, Any], json.loads(lines.pop(0)))
                self._compare(path, begun)
            with _readable(path):
                for line in lines:
                    self.entries.update((entry[0], entry) for entry in typed(list[Entry], json.loads(line)))

    def append(self, batch: list[Entry]) -> None:
        self._write(batch)
        with self._writing:
            self.entries.update((entry[0], entry) for entry in batch)

    def _write(self, values: Any) -> None:
        with self._writing, open(self._own, "ab") as file:
            file.write(json.dumps(values).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _compare(self, path: Path, begun: dict[str, Any]) -> None:
        names = begun.keys() | self.settings.keys()
        other = sorted(name for name in names if begun.get(name) != self.settings.get(name))
        if other:
            said = ", ".join(f"{name} {begun.get(name)} against {self.settings.get(name)}" for name in other)
            raise ConfigError(f"{path} was begun with other options ({said}); give the same again, or delete it")


def _readable(path: Path) -> AbstractContextManager[None]:
    return reading(str(path), DataError, "delete it, and give the same command again: its answers are written anew")
