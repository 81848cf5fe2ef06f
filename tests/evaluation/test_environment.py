import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from shape.evaluation import environment
from shape.evaluation.environment import Environment, peak_memory


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process starts with a count of its own, or with none")
def test_peak_memory_is_of_this_process_alone():
    """Linux hands a parent's peak on to the process that it starts (getrusage's ru_maxrss)."""
    measure = """
import torch
from shape.evaluation.environment import peak_memory

before = peak_memory(torch.device("cpu"))
block = torch.ones(2**28)
print(before, peak_memory(torch.device("cpu")) - before)
"""
    start = (
        "import subprocess, sys; large = b'1' * 2**31; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    )
    ran = subprocess.run([sys.executable, "-c", start, measure], check=True, capture_output=True, text=True)
    before, grown = map(float, ran.stdout.split())
    assert before < 2
    assert grown == pytest.approx(2**30 / 1e9, abs=0.1)


def test_peak_memory_on_windows(monkeypatch, tmp_path):
    """There is neither /proc nor the module `resource`."""
    monkeypatch.setattr(environment, "Path", lambda path: tmp_path / "none")
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr(psutil.Process, "memory_info", lambda self: SimpleNamespace(peak_wset=3 * 10**9))
    assert peak_memory(torch.device("cpu")) == 3.0


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """A folder that the package is imported from."""
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "shape/evaluation/environment.py"))
    monkeypatch.delenv("SHAPE_COMMIT", raising=False)
    environment.code_commit.cache_clear()
    yield tmp_path
    environment.code_commit.cache_clear()


def test_a_copy_without_its_history_says_its_commit(elsewhere, monkeypatch):
    assert Environment.capture(torch.device("cpu")).commit is None
    monkeypatch.setenv("SHAPE_COMMIT", "0123456789ab")
    environment.code_commit.cache_clear()
    assert Environment.capture(torch.device("cpu")).commit == "0123456789ab"


def test_the_commit_is_that_of_the_code_that_a_process_began_with(elsewhere):
    """Neither what is committed while it measures, nor the results that it writes, which are tracked."""

    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(elsewhere), *who, *arguments], check=True, capture_output=True)

    results = elsewhere / "results.md"
    results.write_text("old")
    git("init")
    git("add", "results.md")
    git("commit", "-m", "one")
    begun = Environment.capture(torch.device("cpu")).commit
    results.write_text("new")
    assert Environment.capture(torch.device("cpu")).commit == begun
    environment.code_commit.cache_clear()
    assert Environment.capture(torch.device("cpu")).commit == f"{begun}-dirty"
