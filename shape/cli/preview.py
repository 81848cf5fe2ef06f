"""What a target would be trained on: conversations in its chat template, with the supervised tokens coloured.

python -m shape.preview --data D --target T
"""

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from shape.data.preview import PreviewOptions, preview
from shape.errors import exit_on_error


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m shape.preview", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", action="config", help="a YAML file with these options")
    parser.add_argument("-n", "--n", type=int, default=PreviewOptions.n, help="conversations to print")
    parser.add_class_arguments(PreviewOptions, as_group=False, skip={"n"})
    values = parser.instantiate(parser.parse_args(arguments)).as_dict()
    values.pop("config")
    with exit_on_error():
        preview(PreviewOptions(**values))


if __name__ == "__main__":
    main()
