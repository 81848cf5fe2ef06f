"""`torch.compile` in training: of a chunk's losses, and of the unrolled steps of networks that do not attend.

What lies between stays as it is: which positions count, chunks, and gradients that are made in the forward pass.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from shape.errors import ConfigError
from shape.target.loading import first_line

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R], wanted: bool) -> Callable[P, R]:
    """The function, compiled for any sizes if that is wanted: the same up to rounding, dropout's draws apart.

    Raises:
        ConfigError: when it is called, torch cannot compile it here.
    """
    if not wanted:
        return function
    from torch._dynamo.exc import TorchDynamoException  # more than a second, for those who compile

    traced: Any = torch.compile(function, dynamic=True)

    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return traced(*arguments, **options)
        except TorchDynamoException as error:
            raise ConfigError(
                f"training.compile is on, and torch cannot compile this training here ({first_line(error)}); leave it "
                "out"
            ) from error

    return call
