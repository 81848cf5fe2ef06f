"""`python -m shape.preview`: colours, a summary, and its errors."""

import json

import pytest

from shape.cli.preview import main
from shape.data.conversations import Conversation
from shape.target.chat import Message


def chat(identity: str, question: str, answer: str) -> Conversation:
    return Conversation(identity, (Message("user", question), Message("assistant", answer)))


def test_samples_and_a_summary_are_printed(tmp_path, tiny_target_folder, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    rows = [chat("a", "hello", "world [bold]").to_row(), chat("b", "hello", "again").to_row()]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(["--data", str(tmp_path / "data.jsonl"), "--target", str(tiny_target_folder), "-n", "1"])
    out = capsys.readouterr().out
    assert "\x1b[1;32mworld [bold]<|im_end|>" in out and "again" not in out
    assert "2 rows, " in out and "% supervised" in out


def test_bad_input_exits_with_status_2(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--data", str(tmp_path / "none.jsonl"), "--target", str(tmp_path)])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "none.jsonl does not exist" in error and error.count("\n") == 1
