"""`shape regenerate`: the target answers a whole data set itself, so that a drafter learns its own text.

    shape regenerate --target T --data D --output FILE.jsonl
    shape regenerate --endpoint http://host:8000/v1 --model NAME --data D --output FILE.jsonl

An interrupted run continues where it stopped when the same command is given again, and ends with the same bytes.
Several devices share the work (`--trainer.devices`, torchrun, SLURM, as in shape extract); an endpoint is asked by many
dialogues at a time (`--concurrency`), none of which waits for another.
"""

from collections.abc import Sequence

from shape.errors import GO_ON, exit_on_error
from shape.features.trainer import quiet
from shape.generation.options import RegenerationOptions
from shape.parsing import CommandParser, command_parser

COMMON = (
    *("data", "output", "target", "endpoint", "model", "limit", "sampled_share", "temperature", "max_new_tokens"),
    *("batch_size", "dtype", "seed"),
)


def parser() -> CommandParser:
    return command_parser("regenerate", __doc__, RegenerationOptions, COMMON)


def main(arguments: Sequence[str] | None = None) -> None:
    with exit_on_error(GO_ON):
        options = parser().options(RegenerationOptions, arguments)
        from shape.generation.answers import regenerate_from

        with quiet():
            done = regenerate_from(options)
        if done is not None:
            print(
                f"{options.output}: {done.rows} conversations ({done.left_out} left out), {done.answers} answers "
                f"to {done.questions} questions, {done.unfinished} of them cut at {options.max_new_tokens} tokens"
            )


if __name__ == "__main__":
    main()
