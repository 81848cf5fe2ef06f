"""Commands end with one sentence and status 2 for a user's mistakes, and with a traceback for ours."""

import errno
import re
import warnings
from operator import attrgetter

import numpy as np
import pytest
import torch

import shape.errors
from shape.errors import GO_ON, DataError, exit_on_error
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


def test_running_out_of_a_cpus_memory_is_one_line(capsys):
    for work in (lambda: torch.empty(2**48, dtype=torch.uint8), lambda: np.empty(2**56, dtype=np.uint8)):
        with pytest.raises(SystemExit) as caught, exit_on_error():
            work()
        said = capsys.readouterr().err
        assert caught.value.code == 2 and said.startswith("error: the machine ran out of memory; ")


@pytest.mark.parametrize(
    ("said", "place"),
    [
        ("[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: not enough memory: you tried to", "machine"),
        ("MPS backend out of memory (MPS allocated: 8.01 GB, max allowed: 9.07 GB)", "accelerator"),
    ],
)
def test_other_systems_run_out_of_memory_in_words_of_their_own(said, place, capsys):
    with pytest.raises(SystemExit), exit_on_error():
        raise RuntimeError(said)
    assert capsys.readouterr().err.startswith(f"error: the {place} ran out of memory; ")


def test_a_path_that_cannot_be_used_is_one_line(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    for work, said in (
        (lambda: file.mkdir(exist_ok=True), f"{file} is a file; give a folder"),
        (lambda: (file / "below").mkdir(), f"{file} is a file; give a folder"),
        (lambda: tmp_path.read_text(), f"{tmp_path} is a folder; give a file"),
        (lambda: (tmp_path / "none").read_text(), f"{tmp_path / 'none'} does not exist; give another path"),
    ):
        with pytest.raises(SystemExit) as caught, exit_on_error():
            work()
        assert caught.value.code == 2 and capsys.readouterr().err == f"error: {said}\n"
    with pytest.raises(OSError, match="of the system's own"), exit_on_error():
        raise OSError("of the system's own")


@pytest.mark.parametrize("left", ["", GO_ON])
def test_an_interrupt_has_the_shells_status(capsys, left):
    with pytest.raises(SystemExit) as caught, exit_on_error(left):
        raise KeyboardInterrupt
    assert caught.value.code == 130
    assert capsys.readouterr().err == (f"interrupted; {GO_ON}\n" if left else "interrupted\n")


def test_our_warnings_are_a_line_without_a_place():
    with exit_on_error():
        assert warnings.formatwarning("of ours", UserWarning, shape.errors.__file__, 7) == "warning: of ours\n"
        told = warnings.formatwarning("of others", UserWarning, "other.py", 7, "")
        assert told == "other.py:7: UserWarning: of others\n"
        with exit_on_error():
            pass
        assert warnings.formatwarning("of ours", UserWarning, shape.errors.__file__, 7) == "warning: of ours\n"
    assert warnings.formatwarning("of ours", UserWarning, shape.errors.__file__, 7) != "warning: of ours\n"


def test_our_own_errors_are_not_hidden():
    with pytest.raises(ZeroDivisionError), exit_on_error():
        _ = 1 / 0


def test_a_full_disk_is_found_behind_what_libraries_say(capsys, monkeypatch):
    """Of files that are written without `written_whole`, such as logs."""
    with pytest.raises(SystemExit) as caught, exit_on_error():
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598") from None
    assert caught.value.code == 2 and "no space left" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught, exit_on_error():
        raise Exception("Error while serializing: I/O error: File too large (os error 27)")
    assert caught.value.code == 2 and "no space left" in capsys.readouterr().err
    monkeypatch.setattr(shape.errors, "_SYSTEMS_NO_SPACE", shape.errors._NO_SPACE_ON_WINDOWS)
    with pytest.raises(SystemExit) as caught, exit_on_error():
        raise Exception("I/O error: There is not enough space on the disk. (os error 112)")
    assert caught.value.code == 2 and "no space left" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="os error 13"), exit_on_error():
        raise RuntimeError("I/O error: Permission denied (os error 13)")
