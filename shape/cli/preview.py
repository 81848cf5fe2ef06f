"""`shape preview`: what a target would be trained on, in its chat template, with the supervised tokens coloured.

shape preview --data D --target T
"""

from collections.abc import Sequence

from shape.data.options import PreviewOptions
from shape.errors import exit_on_error
from shape.parsing import CommandParser, command_parser


def parser() -> CommandParser:
    parser = command_parser("preview", __doc__, PreviewOptions, skip={"n"})
    parser.add_argument("-n", "--n", type=int, default=PreviewOptions.n, help="conversations to print")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    with exit_on_error():
        options = parser().options(PreviewOptions, arguments)
        from shape.data.preview import preview

        preview(options)


if __name__ == "__main__":
    main()
