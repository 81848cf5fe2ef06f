"""Where and how numbers came to be: without it they mean nothing."""

import os
import platform
import re
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

import shape


@dataclass(frozen=True)
class Environment:
    """Recorded beside every measured table.

    Attributes:
        date: UTC, to the minute.
        command: as it was typed.
        commit: of the checkout, "-dirty" appended where files differ from it; None outside a checkout. SHAPE_COMMIT
            says it of a copy of the files on another machine, whose git would say something else, or nothing. It is
            read once in a process, so that a long measurement has that of the code it began with.
        device: name of the accelerator, or "CPU".
        cores: logical cores of the machine; `threads` is how many torch computed with.
    """

    date: str
    command: str
    commit: str | None
    device: str
    cpu: str
    cores: int
    threads: int
    versions: dict[str, str]

    @classmethod
    def capture(cls, device: torch.device) -> "Environment":
        return cls(
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            command=_command(),
            commit=code_commit(),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper(),
            cpu=_cpu_model(),
            cores=os.cpu_count() or 1,
            threads=torch.get_num_threads(),
            versions={
                "shape": shape.__version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": version("transformers"),
            },
        )

    def machine(self) -> dict[str, Any]:
        """What two parts of one measurement must share."""
        return {name: value for name, value in asdict(self).items() if name not in ("date", "command")}

    def line(self) -> str:
        """One sentence for the foot of a table."""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"{self.device}, {self.cpu}, {self.threads} threads of {self.cores} cores, {versions}; "
            f"{self.date}, commit {self.commit or 'unknown'}; `{self.command}`."
        )


def peak_memory(device: torch.device) -> float:
    """GB that this process has used at most so far: of the accelerator's memory, or on a CPU of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    status = Path("/proc/self/status")  # Linux, where ru_maxrss begins with the memory of the process's parent
    if status.exists() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="utf-8"))):
        return int(found[1]) * 1024 / 1e9
    if (peak := getattr(psutil.Process().memory_info(), "peak_wset", None)) is not None:  # Windows
        return peak / 1e9
    import resource  # absent on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def matrix_product_peak(device: torch.device, dtype: torch.dtype, size: int = 1024, seconds: float = 0.5) -> float:
    """Operations per second of a large square matrix product, two per multiply-add: the best of some runs."""
    size = size if device.type == "cpu" else 8 * size
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    best, until = 0.0, time.perf_counter() + seconds
    while best == 0.0 or time.perf_counter() < until:
        started = time.perf_counter()
        product = left @ right
        float(product[0, 0])  # waits for the device
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best


def _command() -> str:
    module = getattr(sys.modules["__main__"], "__spec__", None)
    name = module.name.removesuffix(".__main__") if module else ""
    program = ["python", "-m", name] if module else [Path(sys.argv[0]).name or "python"]
    command = shlex.join(program + sys.argv[1:])
    return re.sub(r"(--token[= ])\S+", r"\1...", command)  # a secret


@cache
def code_commit() -> str | None:
    """The commit of the checkout that this package is imported from, as it is at the first call."""
    if "SHAPE_COMMIT" in os.environ:
        return os.environ["SHAPE_COMMIT"]
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            encoding="utf-8",
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
