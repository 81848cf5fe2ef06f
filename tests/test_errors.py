"""Commands end with one sentence and status 2 for a user's mistakes, and with a traceback for ours."""

import pytest
import torch

from shape.errors import DataError, exit_on_error


def test_a_users_mistake_is_one_line(capsys):
    with pytest.raises(SystemExit) as caught, exit_on_error():
        raise DataError("file x is empty; give one with rows")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: file x is empty; give one with rows\n"


def test_running_out_of_memory_names_the_knobs(capsys):
    with pytest.raises(SystemExit) as caught, exit_on_error():
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")
    assert caught.value.code == 2 and "--training.batch_size" in capsys.readouterr().err


def test_an_interrupt_has_the_shells_status():
    with pytest.raises(SystemExit) as caught, exit_on_error():
        raise KeyboardInterrupt
    assert caught.value.code == 130


def test_our_own_errors_are_not_hidden():
    with pytest.raises(ZeroDivisionError), exit_on_error():
        _ = 1 / 0
