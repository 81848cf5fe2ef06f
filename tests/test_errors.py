"""Commands end with one sentence and status 2 for a user's mistakes, and with a traceback for ours."""

import errno
import re
from operator import attrgetter

import pytest
import torch

from shape.errors import DataError, exit_on_error
from shape.training.options import TrainOptions


def test_a_users_mistake_is_one_line(capsys):
    with pytest.raises(SystemExit) as caught, exit_on_error():
        raise DataError("file x is empty; give one with rows")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: file x is empty; give one with rows\n"


def test_running_out_of_memory_names_the_knobs(capsys):
    with pytest.raises(SystemExit) as caught, exit_on_error():
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")
    said = capsys.readouterr().err
    training, elsewhere = said.split("elsewhere")
    knobs = ["trainer.accumulate_grad_batches", "regeneration.batch_size", "extraction.batch_size"]
    assert caught.value.code == 2 and re.findall(r"--([\w.]+)", training) == knobs
    assert re.findall(r"--([\w.]+)", elsewhere) == ["batch_size", "tree.nodes", "max_length", "dtype"]
    options = TrainOptions()
    assert all(attrgetter(knob)(options) for knob in knobs) and "training.batch_size" not in said


def test_a_path_that_cannot_be_used_is_one_line(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    for path, reason in ((file, "File exists"), (file / "below", "Not a directory")):
        with pytest.raises(SystemExit) as caught, exit_on_error():
            path.mkdir(exist_ok=True)
        error = capsys.readouterr().err
        assert caught.value.code == 2 and error.count("\n") == 1
        assert error.startswith(f"error: {path} cannot be read or written ({reason}); ")
    with pytest.raises(OSError, match="of the system's own"), exit_on_error():
        raise OSError("of the system's own")


def test_an_interrupt_has_the_shells_status():
    with pytest.raises(SystemExit) as caught, exit_on_error():
        raise KeyboardInterrupt
    assert caught.value.code == 130


def test_our_own_errors_are_not_hidden():
    with pytest.raises(ZeroDivisionError), exit_on_error():
        _ = 1 / 0


def test_a_full_disk_is_found_behind_what_libraries_say(capsys):
    """Of files that are written without `written_whole`, such as logs."""
    with pytest.raises(SystemExit) as caught, exit_on_error():
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598") from None
    assert caught.value.code == 2 and "no space left" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="os error 13"), exit_on_error():
        raise RuntimeError("I/O error: Permission denied (os error 13)")
