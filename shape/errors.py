"""Errors a user can cause. Each message is one sentence: the input, what is wrong with it, what to do."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
    """Less free space than the work is estimated to need."""


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Run a command: a user's error becomes one line on stderr and exit status 2, never a traceback."""
    try:
        yield
    except ShapeError as error:
        sys.exit(_report(str(error)))
    except torch.OutOfMemoryError as error:
        sys.exit(
            _report(
                "the accelerator ran out of memory; lower the batch size, the sequence length or the tree "
                f"(--training.batch_size, --max_length, --tree.nodes) or use a smaller dtype ({error})"
            )
        )
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue where resuming is offered", file=sys.stderr)
        sys.exit(130)


def _report(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2
