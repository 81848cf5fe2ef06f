"""The peers' environments, converted models and running programs, all below one working folder."""

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from eval.commands import REPOSITORY, child_variables
from eval.peers.sizes import saved
from eval.peers.systems import PEERS, System
from shape.errors import ConfigError

_ADVICE = "repair what its log names, or leave the peer out of --peers"


def _run(command: list[Any], log: Path, what: str, flags: str = "") -> None:
    """Raises ConfigError if the command fails; what it says is in the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = child_variables(PYTHONPATH=str(REPOSITORY), **({"CFLAGS": flags, "CXXFLAGS": flags} if flags else {}))
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(command, cwd=REPOSITORY, env=variables, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode:
        raise ConfigError(f"{what} failed with status {done.returncode}; see {log}: {_ADVICE}")


def python_of(peer: str, work: Path) -> Path:
    """The Python of the peer's environment; made at the first call, which takes minutes (llama.cpp is compiled)."""
    packages, x86 = list(PEERS[peer].packages), platform.machine() in ("x86_64", "AMD64")
    if not packages:
        return Path(sys.executable)
    flags = PEERS[peer].flags if x86 else ""
    made_of = [*packages, *([flags] if flags else [])]
    folder = work / "environments" / peer
    mark = folder / "packages.json"  # of a finished environment
    if not mark.is_file() or json.loads(mark.read_text(encoding="utf-8")) != made_of:
        shutil.rmtree(folder, ignore_errors=True)
        log = work / "logs" / f"{peer}-environment.log"
        _run([sys.executable, "-m", "venv", folder], log, f"making the environment of {peer}")
        pip = [folder / "bin" / "python", "-m", "pip"]
        anew = ["--no-cache-dir"] if flags else []  # and not as it was compiled without them
        _run([*pip, "install", *anew, *packages], log, f"installing {peer}", flags)
        if removed := PEERS[peer].removed:
            _run([*pip, "uninstall", "--yes", *removed], log, f"installing {peer}")
        mark.write_text(json.dumps(made_of), encoding="utf-8")
    return folder / "bin" / "python"


def model_of(system: System, size: str, work: Path) -> Path:
    """The folder that the system loads, converted at the first call."""
    source, peer = saved(size, work), PEERS[system.peer]
    if not peer.converts:
        return source
    folder = work / "converted" / system.peer / f"{size}-{system.precision}"
    if not folder.is_dir():
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.parent.mkdir(parents=True, exist_ok=True)
        command = [python_of(system.peer, work), "-m", f"eval.peers.scripts.{peer.script}", "convert", source, part]
        log = work / "logs" / f"{system.peer}-{size}-{system.precision}-conversion.log"
        _run([*command, system.precision], log, f"converting {size} for {system.title}")
        part.rename(folder)
    return folder


class Program:
    """A system with its model loaded, which answers until it is closed.

    Attributes:
        versions: of its packages.
    """

    def __init__(self, system: System, size: str, work: Path, threads: int) -> None:
        peer, self.system = PEERS[system.peer], system
        self._log = work / "logs" / f"{system.peer}-{size}-{system.precision}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command: list[Any] = [python_of(system.peer, work), "-m", f"eval.peers.scripts.{peer.script}", "serve"]
        command += [model_of(system, size, work), system.precision, str(threads)]
        command += [] if peer.backend is None else [peer.backend]
        # Its own packages, and not those of the caller's PYTHONPATH.
        variables = child_variables(PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS=str(threads))
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command, cwd=REPOSITORY, env=variables, encoding="utf-8", bufsize=1,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        self.versions: dict[str, str] = self._read()["versions"]

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise ConfigError(
                f"{self.system.title} ended with status {self._process.returncode}; see {self._log}: {_ADVICE}"
            )
        return json.loads(line)

    @property
    def memory(self) -> float:
        """GB that it holds now."""
        return psutil.Process(self._process.pid).memory_info().rss / 1e9

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
