"""What the programs here share: options from dataclasses and functions, errors, what is counted, and results."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli

from shape import bundled
from shape.drafters import Drafter
from shape.errors import ConfigError, exit_on_error
from shape.evaluation.environment import Environment, code_commit
from shape.evaluation.estimates import Sums
from shape.generation.decoder import ShapeDecoder
from shape.networks.base import Predictor

REPOSITORY = Path(__file__).resolve().parents[1]  # whose commands are run, from whatever folder


@dataclass(frozen=True)
class Spent(Sums):
    """On one prompt, over all rounds; `equal` are answers that are those of autoregressive decoding, or their share."""

    seconds: float = 0.0
    tokens: int = 0
    forwards: int = 0
    equal: float = 0


def child_variables(**more: str) -> dict[str, str]:
    """The variables of a child process that finds the packages of this checkout."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **more}


@dataclass
class OfPredictor:
    """What is measured.

    Args:
        predictor: folder, hub id or bundled name of a trained predictor.
        target: path or hub id; default: the predictor's own.
    """

    predictor: str = bundled.PREDICTOR
    target: str | None = None


def trained(decoder: ShapeDecoder, name: str) -> tuple[Drafter, Predictor]:
    """The drafter of a decoder and its network. Raises ConfigError, naming the predictor, where that was not trained
    here.
    """
    drafter = decoder.drafter
    if drafter is None or drafter.predictor is None:
        raise ConfigError(f"predictor {name} is no predictor of shape.train; give one that is")
    return drafter, drafter.predictor


def program(command: Callable[[Any], Any], options: Any) -> Callable[..., None]:
    """A `main` that calls a command with its options, of the arguments that it is given or else of the command line."""

    def main(arguments: Sequence[str] | None = None) -> None:
        with exit_on_error():
            code_commit()  # as it is now: others may follow while it measures
            command(auto_cli(options, as_positional=False, args=None if arguments is None else list(arguments)))

    return main


def one_of(*commands: Callable[..., Any]) -> Callable[..., None]:
    """A `main` that calls the command that is named first, or the only one, with what follows."""
    return program(lambda result: result, list(commands))


def write_results(
    folder: Path, name: str, record: dict[str, Any], *parts: str, environment: Environment | None = None
) -> str:
    """Write `NAME.json` and, of some paragraphs, `NAME.md`, whose text is returned; both say where that was measured.

    Args:
        environment: default: this machine's CPU, now.
    """
    environment = environment or Environment.capture(torch.device("cpu"))
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join([*parts, environment.line()]) + "\n"
    whole = {"environment": asdict(environment), **record}
    (folder / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    return text
