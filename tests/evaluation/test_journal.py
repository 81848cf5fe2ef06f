"""What of a measurement is finished."""

from pathlib import Path

import pytest

from shape.evaluation.journal import Journal


def test_what_is_finished_outlives_an_interruption_of_its_reading(tmp_path, monkeypatch):
    path = tmp_path / "new" / "records.jsonl"
    Journal(path, {"a": 1}).append({"id": "x"})
    before, write = path.read_text(), Path.write_text

    def killed(self: Path, text: str, encoding: str) -> None:
        write(self, text[:5], encoding=encoding)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        Journal(path, {"a": 1})
    assert path.read_text() == before and list(path.parent.iterdir()) == [path]
