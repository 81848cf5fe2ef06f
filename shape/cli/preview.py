"""Conversations: reading them, rendering them with the target's chat template, and the one loss mask.

`python -m shape.preview preview --data D --target T` shows what a model would be trained on.
"""

from typing import Any

from shape.data.conversations import preview
from shape.errors import exit_on_error


def main(args: list[str] | None = None) -> None:
    """`python -m shape.preview preview --data D --target T [-n 3] [--max_length 2048]`."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="shape.data.conversations", description="Conversations as a target sees them.")
    command = ArgumentParser(description="Print samples with the supervised tokens coloured.")
    command.add_argument("--data", type=str, required=True, help="file, folder or hub dataset (name[:split])")
    command.add_argument("--target", type=str, required=True, help="model whose tokenizer and template are used")
    command.add_argument("-n", "--n", type=int, default=3, help="how many conversations to print")
    command.add_argument("--max_length", type=int, default=2048, help="tokens kept of each conversation")
    command.add_argument("--limit", type=int, default=1000, help="rows that are read for the summary")
    command.add_argument("--skip_bad_rows", type=bool, default=False, help="count malformed rows and go on")
    command.add_argument(
        "--chat_template_kwargs", type=dict[str, Any] | None, default=None, help="given to the target's chat template"
    )
    parser.add_subcommands().add_subcommand("preview", command)
    with exit_on_error():
        preview(**parser.parse_args(args).preview.as_dict())


if __name__ == "__main__":
    main()
