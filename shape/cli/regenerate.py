"""Regeneration: the target writes every answer of a data set itself, so that a drafter learns its words.

    python -m shape.regenerate --target T --data D --output FILE.jsonl
    python -m shape.regenerate --endpoint http://host:8000/v1 --model NAME --data D --output FILE.jsonl

An interrupted run continues where it stopped when the same command is given again, and ends with the same bytes.
Several devices share the work (`--trainer.devices`, torchrun, SLURM, as in shape.extract); an endpoint is asked by many
dialogues at a time (`--concurrency`), none of which waits for another.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from shape.data.backends import Backend
from shape.data.endpoint import EndpointBackend
from shape.data.reading import load_conversations
from shape.data.regeneration import AnswerOptions, Share, Summary, check_output, in_every_process, regenerate
from shape.errors import ConfigError, exit_on_error
from shape.features.trainer import TrainerOptions, quiet
from shape.generation.answers import LocalBackend
from shape.generation.decoder import ShapeDecoder
from shape.target.loading import of_target
from shape.target.model import announce
from shape.target.options import PlacedOptions


@dataclass(kw_only=True)
class RegenerationOptions(AnswerOptions, PlacedOptions):
    """Which prompts to answer, by whom, and how.

    Attributes:
        data: conversations or prompts: a file, a folder, or a dataset on the hub (name[:split]).
        output: the .jsonl or .jsonl.gz file to write.
        target: path, hub id or bundled name of the target that answers on this machine.
        endpoint: base URL of an OpenAI-compatible server that answers instead, for example
            http://localhost:8000/v1; the key, where it wants one, is read from OPENAI_API_KEY.
        model: the name under which the endpoint serves the target.
        chat_template_kwargs: given to the target's chat template, for example {"enable_thinking": false}.
        limit: answer at most this many conversations.
        exclude_ids: leave out ids that begin with one of these.
        skip_bad_rows: count malformed rows and continue.
        dtype: of the target, for example float32 or bfloat16; default: its checkpoint's.
        concurrency: requests to the endpoint at a time.
        trainer: devices, processes and nodes, as Lightning's Trainer has them; each process answers its share.
    """

    data: str
    output: str
    target: str | None = None
    endpoint: str | None = None
    model: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    limit: int | None = None
    exclude_ids: tuple[str, ...] = ()
    skip_bad_rows: bool = False
    dtype: str | None = None
    concurrency: int = 64
    trainer: TrainerOptions = field(default_factory=TrainerOptions)


def make_backend(options: RegenerationOptions) -> Backend:
    """The backend that the options ask for. Raises ConfigError if they contradict each other."""
    options.check()
    if (options.target is None) == (options.endpoint is None):
        raise ConfigError("give either target, to answer here, or endpoint and model, to ask a server")
    if options.endpoint is None:
        decoder = ShapeDecoder.from_pretrained(
            target=options.target, dtype=options.dtype, drafter="none", **of_target(options)
        )
        announce(decoder.target)
        return LocalBackend(decoder, options.max_new_tokens, options.temperature)
    if options.model is None:
        raise ConfigError(f"endpoint {options.endpoint} may serve several models; name one with model")
    if options.concurrency < 1:
        raise ConfigError(f"concurrency is {options.concurrency}; give the requests that the endpoint takes at a time")
    if not options.endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"endpoint {options.endpoint} is no URL; it looks like http://localhost:8000/v1")
    return EndpointBackend(
        options.endpoint,
        options.model,
        options.max_new_tokens,
        options.temperature,
        os.environ.get("OPENAI_API_KEY"),
        concurrency=options.concurrency,
    )


def run(options: RegenerationOptions) -> Summary | None:
    """Carry out the command, cheap checks first; None in processes other than the first."""
    check_output(Path(options.output))
    conversations = load_conversations(
        options.data,
        skip_bad_rows=options.skip_bad_rows,
        limit=options.limit,
        exclude_ids=options.exclude_ids,
        require_answers=False,
        chat_template_kwargs=options.chat_template_kwargs,
    )
    # A target that was put on given devices is one process's.
    placed = options.device is not None or options.device_map is not None
    chosen = replace(options.trainer, devices=1, num_nodes=1) if placed else options.trainer
    trainer = replace(chosen, enable_progress_bar=False).for_extraction()
    if options.endpoint is None and not placed:
        options = replace(options, device_map=str(trainer.strategy.root_device))
    backend = make_backend(options)
    found: list[Summary | None] = []

    def work(share: Share) -> None:
        done = regenerate(
            conversations,
            backend,
            options.output,
            sampled_share=options.sampled_share,
            seed=options.seed,
            batch_size=options.batch_size,
            share=share,
        )
        found.append(done)

    if isinstance(backend, LocalBackend):
        in_every_process(work, trainer)
    elif trainer.is_global_zero:
        work(Share())
    return found[0] if found else None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m shape.regenerate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", action="config", help="a YAML file with these options")
    parser.add_class_arguments(RegenerationOptions)
    values = parser.instantiate(parser.parse_args(arguments))
    options = RegenerationOptions(**{entry.name: values[entry.name] for entry in fields(RegenerationOptions)})
    with exit_on_error(), quiet():
        done = run(options)
        if done is None:
            return
        print(
            f"{options.output}: {done.rows} conversations ({done.left_out} left out), {done.answers} answers "
            f"to {done.questions} questions, {done.unfinished} of them cut at {options.max_new_tokens} tokens"
        )


if __name__ == "__main__":
    main()
