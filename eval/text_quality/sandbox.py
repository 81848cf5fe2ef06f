"""Runs code that a model wrote, with little to break: what pass@1 needs.

A program gets a process of its own (`python -I`) in a session of its own, in an empty temporary folder, with a minimal
environment; it may start no process and use no socket, and processor time, wall-clock time, memory, and the number and
size of files are limited. Where the system allows it (Linux: `unshare`, Landlock) it has no network to begin with and
sees no other process, and can write below its folder alone. When its time is over, it and everything that it may have
started is killed.

This keeps accidents in. It is no prison for code that means to break out: run that in a virtual machine.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from shape.errors import ConfigError

_UNSHARE = (
    "--user", "--map-root-user", "--net", "--pid", "--ipc", "--mount", "--fork", "--kill-child",
)  # fmt: skip
_READABLE = (sys.base_prefix, sys.prefix, "/usr", "/lib", "/lib64", "/etc", "/dev")
_STARTING_SECONDS = 5.0  # of Python itself, on a busy machine


@dataclass(frozen=True)
class Limits:
    """Of one program.

    Attributes:
        seconds: of processor time, and of the wall clock.
        megabytes: of address space.
    """

    seconds: int = 5
    megabytes: int = 512


@dataclass(frozen=True)
class Isolation:
    """What this machine lets us take from a program, beyond limits."""

    network: bool
    files: bool

    def __str__(self) -> str:
        """For reports."""
        kept = [name for name, cut in (("network", self.network), ("files outside its folder", self.files)) if not cut]
        return f"not cut off from: {', '.join(kept)}" if kept else "cut off from network and from files outside"


def run(program: str, limits: Limits = Limits(), isolation: Isolation | None = None) -> str | None:
    """Run a program to its end.

    Args:
        isolation: None is all that this machine can do.

    Returns:
        None where it ended without an error; else why it did not: the name of its exception, "timeout", or "killed".
    """
    isolation = isolation or available()
    proof = secrets.token_hex(16)
    given = {
        "program": program,
        "seconds": limits.seconds,
        "memory": limits.megabytes << 20,
        "files": isolation.files,
        "readable": [folder for folder in _READABLE if Path(folder).is_dir()],
        "proof": proof,
    }
    with TemporaryDirectory(prefix="shape-run-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [*_outer(isolation.network), sys.executable, "-I", "-B", "-c", _confiner()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            verdict, _ = process.communicate(json.dumps(given).encode(), timeout=limits.seconds + _STARTING_SECONDS)
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            _kill(process)
    said = verdict.decode(errors="replace")
    return None if said == proof else said or "killed"


def require() -> Isolation:
    """What `run` will do here.

    Raises:
        ConfigError: this machine cannot run programs in this way at all.
    """
    if os.name != "posix" or (reason := run("pass", isolation=Isolation(False, False))) is not None:
        why = "it needs a POSIX system" if os.name != "posix" else f"a program that does nothing ended with {reason!r}"
        raise ConfigError(f"code cannot be run with limits on this machine ({why}); leave run_code out")
    return available()


@cache
def available() -> Isolation:
    """Found out by trying."""
    network = shutil.which("unshare") is not None and run("pass", isolation=Isolation(True, False)) is None
    files = sys.platform == "linux" and run("pass", isolation=Isolation(False, True)) is None
    return Isolation(network, files)


def _outer(network: bool) -> Sequence[str]:
    return ["unshare", *_UNSHARE, "--"] if network else []


@cache
def _confiner() -> str:
    """The text of `eval.text_quality.confine`: a program may not be able to read where that lies."""
    return Path(__file__).with_name("confine.py").read_text(encoding="utf-8")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The whole session; `unshare` takes its namespace's processes with it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
