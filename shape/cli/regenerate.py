"""Regeneration: the target writes every answer of a data set itself, so that a drafter learns its words.

    python -m shape.regenerate --target T --data D --output FILE.jsonl
    python -m shape.regenerate --endpoint http://host:8000/v1 --model NAME --data D --output FILE.jsonl

An interrupted run continues where it was when the same command is given again, and ends with the same bytes. Several
devices share the work (`--trainer.devices`, torchrun, SLURM, as in shape.extract); an endpoint is asked by many
dialogues at a time (`--concurrency`), none of which waits for another.
"""

from collections.abc import Sequence
from dataclasses import fields

from jsonargparse import ArgumentParser

from shape.data.regeneration import RegenerationOptions, run
from shape.errors import exit_on_error
from shape.features.extraction import quiet


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
