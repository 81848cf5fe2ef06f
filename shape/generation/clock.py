"""How long a device takes for what a step gives it to do."""

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch


def synchronise(device: torch.device) -> None:
    """Return once the device has done what it was given; launches return before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@dataclass(frozen=True)
class Moment:
    """A point in the work of a device.

    Attributes:
        host: seconds of ``perf_counter``, when the work was handed over.
        event: on CUDA, to be recorded when the device comes to it: launches return at once.
    """

    host: float
    event: Any = None

    @classmethod
    def now(cls, device: torch.device) -> "Moment":
        if device.type != "cuda":
            return cls(perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return cls(perf_counter(), event)

    def until(self, later: "Moment") -> float:
        """Seconds, of the device on CUDA, which must have come to both; on Apple's GPUs those of launches alone."""
        return later.host - self.host if self.event is None else self.event.elapsed_time(later.event) / 1e3
