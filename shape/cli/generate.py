"""`shape generate`: answer a prompt, or chat, several tokens per target forward.

shape generate --prompt "Book a table for two."     # the quickstart pair
shape generate --target T --prompt "..."             # a target alone
shape generate --predictor DIR --target T --prompt "..." --show-draft
shape generate                                      # a chat, in a terminal
"""

from collections.abc import Sequence

from shape.errors import exit_on_error
from shape.generation.options import GenerateOptions
from shape.parsing import CommandParser, command_parser

COMMON = (
    *("prompt", "predictor", "target", "drafter", "system", "max_new_tokens", "temperature", "seed", "acceptance"),
    *("dtype", "backend", "device", "show_draft"),
)


def parser() -> CommandParser:
    parser = command_parser("generate", __doc__, GenerateOptions, COMMON, skip={"show_draft", "show_trace"})
    parser.add_argument("--show_draft", action="store_true", help="colour the answer by what became of each token")
    parser.add_argument(
        "--show_trace", action="store_true", help="print every step: what was drafted and what was accepted"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    with exit_on_error():
        options = parser().options(GenerateOptions, arguments)
        options.check()
        from shape.cli.terminal import generate  # behind the parser, which answers --help without it

        generate(options)


if __name__ == "__main__":
    main()
