"""`python -m shape.regenerate`: its output and its errors."""

import gzip
import os
import signal

import pytest
from helpers import write_rows

from shape.cli.regenerate import main
from shape.files import sole_writer
from shape.generation.answers import LocalBackend


def test_command(tmp_path, tiny_target_folder, capsys, refused):
    prompts = write_rows(tmp_path / "prompts.jsonl", *({"id": f"p{i}", "turns": [f"ask {i}"]} for i in range(5)))
    output = tmp_path / "new" / "out.jsonl.gz"
    command = ["--target", str(tiny_target_folder), "--data", str(prompts), "--output", str(output)]
    main([*command, "--max_new_tokens", "4", "--batch_size", "2"])
    assert "5 conversations (0 left out), 5 answers to 5 questions" in capsys.readouterr().out
    assert len(gzip.decompress(output.read_bytes()).splitlines()) == 5
    for extra in ([], ["--endpoint", "http://localhost:1/v1"]):
        refused(main, *command, *extra, alone=True)


def test_one_regeneration_writes_to_a_file(tmp_path, tiny_target_folder, refused):
    prompts, output = write_rows(tmp_path / "prompts.jsonl", {"id": "a", "turns": ["ask"]}), tmp_path / "out.jsonl"
    command = [f"--target={tiny_target_folder}", f"--data={prompts}", f"--output={output}", "--max_new_tokens=2"]
    with sole_writer(tmp_path / ".out.jsonl.lock", "it"):
        assert "another process does a regeneration into" in refused(main, *command)
    assert not output.exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "give either target, to answer here, or endpoint"),
        (["--endpoint", "http://localhost:1/v1"], "name one with model"),
        (["--endpoint", "localhost", "--model", "m"], "endpoint localhost is no URL"),
        (["--target", "t", "--model", "m"], "model is the name of the target at an endpoint; give --endpoint"),
        (["--target", "t", "--temperature", "0"], "for greedy answers give sampled_share 0"),
    ],
)
def test_contradictory_options(tmp_path, refused, options, sentence):
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n')
    given = ["--data", str(tmp_path / "p.jsonl"), "--output", str(tmp_path / "o.jsonl")]
    assert sentence in refused(main, *given, *options)
    given[1] = str(tmp_path / "missing.jsonl")  # which is looked at later
    assert sentence in refused(main, *given, *options)


def test_texts_are_refused_before_a_target_is_loaded(tmp_path, refused):
    (tmp_path / "p.jsonl").write_text('{"text": "x"}\n')
    given = ["--data", str(tmp_path / "p.jsonl"), "--output", str(tmp_path / "o.jsonl"), "--target", "/nowhere"]
    assert "is plain text, which has no prompt to answer" in refused(main, *given)


def test_a_request_to_end_interrupts(tmp_path, tiny_target_folder, monkeypatch, capsys):
    """Lightning, in which the work is done, would note SIGTERM and go on."""
    prompts, generate = tmp_path / "prompts.jsonl", LocalBackend.generate
    write_rows(prompts, *({"id": f"p{i}", "turns": [f"ask {i}"]} for i in range(9)))
    called, handlers = [], [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    def asked_to_end(self, requests):
        called.append(requests)
        if len(called) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return generate(self, requests)

    monkeypatch.setattr(LocalBackend, "generate", asked_to_end)
    command = ["--target", str(tiny_target_folder), "--data", str(prompts), "--output", str(tmp_path / "out.jsonl")]
    command += ["--max_new_tokens", "4", "--batch_size", "2"]
    try:
        with pytest.raises(SystemExit) as caught:
            main(command)
        assert caught.value.code == 130 and "give the same command again" in capsys.readouterr().err
        assert signal.getsignal(signal.SIGTERM) is handlers[1] and len(called) == 2
    finally:
        signal.signal(signal.SIGINT, handlers[0])  # Lightning lets the rest of the process ignore it
    assert not (tmp_path / "out.jsonl").exists()
    main(command)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 9 and len(called) < 2 + 5 + 1


def test_an_output_that_cannot_be_is_said_before_the_target_is_loaded(tmp_path, refused):
    (tmp_path / "file").touch()
    given = ["--target", "/nowhere", "--data", "none.jsonl", "--output", str(tmp_path / "file" / "out.jsonl")]
    assert refused(main, *given, alone=True) == f"error: {tmp_path / 'file'} is a file; give a folder"
