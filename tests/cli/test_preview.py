"""`python -m shape.preview`: colours, a summary, and its errors."""

from helpers import write_rows
from transformers import AutoTokenizer

from shape.cli.preview import main
from shape.data.conversations import Conversation
from shape.target.chat import Message


def chat(identity: str, question: str, answer: str) -> Conversation:
    return Conversation(identity, (Message("user", question), Message("assistant", answer)))


def test_samples_and_a_summary_are_printed(tmp_path, tiny_target_folder, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    rows = [chat("a", "hello", "world [bold]").to_row(), chat("b", "hello", "again").to_row()]
    write_rows(tmp_path / "data.jsonl", *rows)
    main(["--data", str(tmp_path / "data.jsonl"), "--target", str(tiny_target_folder), "-n", "1"])
    out = capsys.readouterr().out
    assert "\x1b[1;32mworld [bold]<|im_end|>" in out and "again" not in out
    assert "2 rows, " in out and "% supervised" in out


def test_a_tokenizer_that_fails_without_a_word(tmp_path, monkeypatch, refused):
    def fail(*_: object, **__: object) -> None:
        raise ValueError

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    write_rows(tmp_path / "data.jsonl", chat("a", "hello", "world").to_row())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    error = refused(main, "--data", str(tmp_path / "data.jsonl"), "--target", str(tmp_path), alone=True)
    assert "there is no tokenizer in" in error
    (tmp_path / "tokenizer.json").write_text("{}")
    error = refused(main, "--data", str(tmp_path / "data.jsonl"), "--target", str(tmp_path), alone=True)
    assert "cannot be read (ValueError)" in error


def test_bad_input_exits_with_status_2(tmp_path, refused):
    error = refused(main, "--data", str(tmp_path / "none.jsonl"), "--target", str(tmp_path), alone=True)
    assert "none.jsonl does not exist" in error
    data = write_rows(
        tmp_path / "rows.jsonl", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    )
    error = refused(main, "--data", str(data), "--target", "./typo", alone=True)
    assert "target ./typo cannot be loaded" in error and error.endswith("hub model: no such folder is here")
    for name, advice in (("n", "0 or more"), ("max_length", "a positive number")):
        error = refused(main, "--data", "none.jsonl", "--target", "T", f"--{name}=-1", alone=True)
        assert f"{name} is -1; give {advice}" in error
