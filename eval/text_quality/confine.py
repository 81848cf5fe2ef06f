"""What runs untrusted code, in a process of its own: see `eval.text_quality.sandbox`, which hands this text over.

Standard library alone, since nothing else is there. It reads a JSON object from standard input (`program`, `seconds`,
`memory`, `readable`, `proof`), gives up what it can, runs the program, and prints the proof where that came to its end.
"""

import ctypes
import json
import os
import resource
import sys

# Landlock: by system call, since the C library has no functions for it. Numbers are the same on every architecture.
# Rights as in linux/landlock.h: 1 executes, 4 and 8 read files and folders, and the third version (Linux 6.2), the
# first that keeps files from being cut short, has 15 in all.
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_READ, _ALL, _VERSION = 1 | 4 | 8, (1 << 15) - 1, 3
_NO_NEW_PRIVILEGES = 38
_FILE_BYTES, _FILES = 1 << 20, 64
# Python's own audit events: the one way that also holds for root, whom no number of processes stops.
_FORBIDDEN = (
    "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "os.killpg", "os.chmod",
    "os.chown", "os.truncate",
    "subprocess.Popen", "pty.spawn", "resource.setrlimit", "resource.prlimit", "socket.connect", "socket.bind",
    "socket.sendto", "socket.getaddrinfo",
)  # fmt: skip


class _Ruleset(ctypes.Structure):
    _fields_ = [("handled", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def limit(seconds: int, memory: int) -> None:
    """Processor seconds, bytes of address space, no core file, few and small files, no process or thread besides."""
    bounds = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: _FILE_BYTES,
        resource.RLIMIT_NOFILE: _FILES,
        resource.RLIMIT_NPROC: 0,
    }
    for what, most in bounds.items():
        resource.setrlimit(what, (most, most))


def confine_files(writable: str, readable: list[str]) -> None:
    """Let this process write below one folder alone, and read there and below others.

    Raises OSError where the system has no Landlock, or an old one.
    """
    system = ctypes.CDLL(None, use_errno=True)

    def call(*arguments: object) -> int:
        found = system.syscall(*arguments)
        if found < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return found

    if call(_CREATE, None, 0, 1) < _VERSION:
        raise OSError("Landlock is too old")
    rules = call(_CREATE, ctypes.byref(_Ruleset(_ALL)), ctypes.sizeof(_Ruleset), 0)
    for folder, allowed in [(writable, _ALL), *((folder, _READ) for folder in readable)]:
        place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        call(_ADD, rules, 1, ctypes.byref(_Beneath(allowed, place)), 0)
        os.close(place)
    if system.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError("prctl")
    call(_RESTRICT, rules, 0)
    os.close(rules)


def refuse(event: str, _: object) -> None:
    """An audit hook, which nothing can take away again."""
    if event in _FORBIDDEN:
        raise PermissionError(f"{event} is not for a program that is tried out")


def main() -> None:
    given = json.load(sys.stdin)
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    if given["files"]:
        confine_files(os.getcwd(), given["readable"])
    limit(given["seconds"], given["memory"])
    sys.addaudithook(refuse)
    try:
        exec(compile(given["program"], "program", "exec"), {"__name__": "__main__"})
        verdict = given["proof"]
    except BaseException as error:  # SystemExit too: a program that leaves early has not passed
        verdict = type(error).__name__
    report.write(verdict)
    report.flush()
    os._exit(0)  # no handlers of the program's own


if __name__ == "__main__":
    main()
