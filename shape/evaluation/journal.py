"""What of a long measurement is finished, a JSON line each, so that the same command goes on after an interruption."""

import json
from pathlib import Path
from typing import Any

from shape.errors import ConfigError
from shape.files import reading, typed, written_whole

JOURNAL = "records.jsonl"  # its usual name


class Journal:
    """A file whose first line says what the measurement depends on; a last line cut short by a crash is dropped.

    Args:
        path: None keeps nothing.
        header: settings, machine and code, of plain types.

    Attributes:
        records: of an earlier run with the same header.

    Raises:
        ConfigError: the file is another measurement's.
    """

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        if path is None:
            return
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        header = json.loads(json.dumps(header))  # as it will be read
        with reading(str(path), ConfigError, "give another output folder, or delete it to measure anew"):
            theirs, *self.records = [typed(dict[str, Any], json.loads(line)) for line in whole] or [header]
        refuse_other(path, theirs, header)
        whole = whole or [json.dumps(header) + "\n"]
        with written_whole(path) as temporary:
            temporary.write_text("".join(whole), encoding="utf-8")

    def append(self, record: dict[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def refuse_other(path: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raises ConfigError where a file's measurement was asked for otherwise than ours."""
    if names := ", ".join(key for key in ours if theirs.get(key) != ours[key]):
        raise ConfigError(
            f"{path} holds a measurement with other settings ({names}); give another output folder, or delete it"
        )
