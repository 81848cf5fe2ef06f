"""Errors a user can cause. Each message is one sentence: the input, what is wrong with it, what to do."""

import errno
import logging
import math
import signal
import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from io import TextIOWrapper
from pathlib import Path
from threading import current_thread, main_thread

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_SPACE_ON_WINDOWS = (39, 112)  # by the system's own numbers
_ON_WINDOWS = sys.platform == "win32"
_SYSTEMS_NO_SPACE = _NO_SPACE_ON_WINDOWS if _ON_WINDOWS else _NO_SPACE
# Where memory is exhausted, by what RuntimeErrors of torch say: of a CPU, also on Windows, and of Apple's GPUs.
_NO_MEMORY = {
    "can't allocate memory": "machine",
    "DefaultCPUAllocator: not enough memory": "machine",
    "MPS backend out of memory": "accelerator",
}
NOTHING_WRITTEN = "nothing was written"
GO_ON = "what was finished is kept: give the same command again to go on"
GO_ON_TRAINING = (
    "what was finished is kept: give the same command again, with --ckpt_path last where training had begun"
)
# What the collectives of gloo and of NCCL say where another process has gone.
_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout", "Timed out waiting")
# What only an extra brings, by the extra's name.
_EXTRAS = {
    "train": {"pytorch_lightning", "lightning_fabric", "datasets", "torchmetrics", "tensorboard", "fsspec"},
    "plots": {"matplotlib"},
    "eval": {"lm_eval"},
    "quant": {"torchao", "optimum", "bitsandbytes"},
    "openvino": {"openvino", "nncf"},
}


class ShapeError(ValueError):
    """Base of every error that a user's input can cause."""


class ConfigError(ShapeError):
    """Options that contradict each other or are out of range."""


class DataError(ShapeError):
    """Conversations or prompts that cannot be read or used."""


class TargetMismatch(ShapeError):
    """A predictor or feature store that was made for another target."""


class UnsupportedTarget(ShapeError):
    """A target that cannot be decoded losslessly, or cannot be loaded."""


class UnsupportedGeneration(ShapeError):
    """A generation option that has no meaning for speculative decoding here."""


class FeatureStoreError(ShapeError):
    """A feature folder that is half-written, damaged or made with other options."""


class CheckpointError(ShapeError):
    """A predictor or training checkpoint that cannot be read."""


class DiskSpaceError(ShapeError):
    """Less free space than the work is estimated to need, or than it turned out to need."""


class TrainingDiverged(ShapeError):
    """A training whose loss or weights are not numbers any more."""


class _Lines(logging.Handler):
    """Plain lines on what is standard error when they are logged."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def log_to_stderr() -> None:
    """Send the messages of the logger "shape" to standard error, unless it has a handler already."""
    logger = logging.getLogger("shape")
    if not logger.handlers:
        logger.addHandler(_Lines())
        logger.setLevel(logging.INFO)


def _speak_utf8() -> None:
    """In pipes and files too, for which Windows has cp1252: a letter of an answer outside of it would end a command."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper) and not stream.isatty():
            stream.reconfigure(encoding="utf-8", errors="replace")


@contextmanager
def exit_on_error(interrupted: str = "") -> Iterator[None]:
    """Run a command: a user's error becomes one line on stderr and exit status 2, never a traceback.

    A request to end (SIGTERM, from schedulers, containers and `timeout`) interrupts as Ctrl-C does: outside of training
    Lightning would note it and go on.

    Args:
        interrupted: what an interrupt leaves: `GO_ON`, `NOTHING_WRITTEN`, or nothing to say.
    """
    log_to_stderr()
    if _ON_WINDOWS:
        _speak_utf8()
    ours = current_thread() is main_thread()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if ours else None
    told, warnings.formatwarning = warnings.formatwarning, _warned  # type: ignore[assignment]  # of fewer names
    try:
        yield
    except ShapeError as error:
        sys.exit(_report(str(error)))
    except ModuleNotFoundError as error:
        extra = next((extra for extra, modules in _EXTRAS.items() if (error.name or "").split(".")[0] in modules), None)
        if extra is None:
            raise
        sys.exit(_report(f"this needs {error.name}, which is not installed; {how_to_install(extra)}"))
    except Exception as error:
        explained = _explained(error)
        if explained is None:
            raise
        sys.exit(_report(explained))
    except (KeyboardInterrupt, SystemExit) as ended:
        # Lightning leaves by SystemExit where it was interrupted
        if isinstance(ended, SystemExit) and not isinstance(ended.__context__, KeyboardInterrupt):
            raise
        print("; ".join(filter(None, ("interrupted", interrupted))), file=sys.stderr)
        sys.exit(130)
    finally:
        warnings.formatwarning = told
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def require(
    options: object,
    names: str,
    *,
    least: float = 0,
    above: float | None = None,
    most: float = math.inf,
    group: str = "",
) -> None:
    """Raises ConfigError for the first option that is given and is no finite number within these bounds.

    Args:
        names: of the options, with blanks between; a list of values is looked at one by one.
        above: a bound in place of `least` that is itself out of range.
        group: what stands before the names on the command line, for example "training.".
    """
    low = f"at least {least}" if above is None else f"above {above}"
    advice = {"above 0": "a positive number", "at least 0": "0 or more"}.get(low, low)
    if most < math.inf:
        advice = f"a number from {least} to {most}" if above is None else f"a number {low} and at most {most}"
    for name in names.split():
        value = getattr(options, name)
        for each in value if isinstance(value, list) else [value]:
            within = each is None or (math.isfinite(each) and each <= most)
            if not within or (each is not None and (each < least if above is None else each <= above)):
                raise ConfigError(f"{group}{name} is {each}; give {advice}")


def is_full_disk(error: BaseException) -> bool:
    """Whether an error, or one behind it, is that there is no space left; libraries wrap what the system says."""
    behind = error.__cause__ or error.__context__
    said = isinstance(error, OSError) and error.errno in _NO_SPACE
    said = said or getattr(error, "winerror", None) in _NO_SPACE_ON_WINDOWS
    said = said or any(f"(os error {number})" in str(error) for number in _SYSTEMS_NO_SPACE)  # as Rust has it
    return said or (behind is not None and is_full_disk(behind))


def out_of_memory(error: BaseException) -> str | None:
    """Of what an error says that there is no memory left: "machine" or "accelerator"; None for other errors."""
    if isinstance(error, MemoryError):
        return "machine"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is slow to import
        return "accelerator"
    said = str(error) if type(error) is RuntimeError else ""
    return next((place for phrase, place in _NO_MEMORY.items() if phrase in said), None)


_of_python = warnings.formatwarning


def _warned(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Warnings of this package as a line of their own, without the place in the source."""
    ours = Path(filename).is_relative_to(Path(__file__).parent)
    return f"warning: {message}\n" if ours else _of_python(message, category, filename, lineno, line)


def _explained(error: Exception) -> str | None:
    """What happened, and what to do about it; None for an error that no input of the user caused."""
    if is_full_disk(error):
        return f"there is no space left to write ({error}); free some, and give the same command again"
    if isinstance(error, OSError) and error.filename is not None:
        return _unusable(Path(str(error.filename)), error)
    if place := out_of_memory(error):
        return _out_of_memory(place, error)
    if "torch" not in sys.modules:  # which nobody should wait for before it is needed
        return None
    import torch

    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if several and (isinstance(error, torch.distributed.DistError) or any(phrase in str(error) for phrase in _GONE)):
        return (
            f"rank {torch.distributed.get_rank()} has lost a process beside it, which was killed, failed, ran out of "
            "memory, or whose machine is lost; give the same command again, with --ckpt_path last where training had "
            "begun: what was finished is kept"
        )
    return None


def _unusable(path: Path, error: OSError) -> str:
    file = next((one for one in (path, *path.parents) if one.is_file()), None)
    if error.errno in (errno.EEXIST, errno.ENOTDIR) and file is not None:
        return f"{file} is a file; give a folder"
    if error.errno == errno.EISDIR:
        return f"{path} is a folder; give a file"
    if error.errno == errno.ENOENT:
        return f"{path} does not exist; give another path"
    return f"{path} cannot be read or written ({error.strerror}); give another path"


def _out_of_memory(place: str, error: Exception) -> str:
    return (
        f"the {place} ran out of memory; in training give a higher --trainer.accumulate_grad_batches, which "
        "changes no result, or, where it happened before the first step, a lower --regeneration.batch_size or "
        "--extraction.batch_size; elsewhere a lower --batch_size or --tree.nodes, where the command has them; or a "
        f"lower --max_length, or a smaller --dtype ({error})"
    )


def _report(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def how_to_install(extra: str) -> str:
    """Of what belongs to an extra of this package, which no index has."""
    return f'pip install -e ".[{extra}]" in the checkout of shape'


def did_you_mean(given: str, known: Collection[str]) -> str:
    """`; did you mean ...?` for a name that is like one of those known, or is the last part of one; or else nothing."""
    within = [each for each in known if each.endswith(f".{given.lstrip('-')}")]
    found = within or get_close_matches(given, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""
