"""`python -m shape.extract`: the target's hidden states on conversations, stored for training.

    python -m shape.extract --target T --data D --output DIR
    python -m shape.train --target T --data D --features DIR --output checkpoints/mine
    python -m shape.extract --dry-run --target T       # what it would take, by T's configuration alone
    python -m shape.extract --dry-run --parameters 70e9 --hidden_size 8192 --conversations 100000

Interrupt it at any time: the same command continues where it stopped.
"""

import sys
from collections.abc import Sequence

from jsonargparse import ArgumentParser
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from shape.errors import exit_on_error
from shape.features.costs import CostOptions, dry_run
from shape.features.extraction import ExtractOptions, extract_from
from shape.features.trainer import quiet

_DRY_RUN = "--dry-run"


def parser(options: type = ExtractOptions) -> ArgumentParser:
    name = "python -m shape.extract" + (f" {_DRY_RUN}" if options is CostOptions else "")
    parser = ArgumentParser(prog=name, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", action="config", help="a YAML file with these options")
    parser.add_class_arguments(options, as_group=False)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else list(arguments)
    kind = CostOptions if _DRY_RUN in given else ExtractOptions
    reader = parser(kind)
    values = reader.instantiate(reader.parse_args([each for each in given if each != _DRY_RUN])).as_dict()
    values.pop("config")
    options = kind(**values)
    with exit_on_error(), quiet():
        if isinstance(options, CostOptions):
            print(dry_run(options))
            return
        store = extract_from(options)
        rank_zero_only(print)(
            f"{options.output} holds {len(store):,} conversations, {store.tokens:,} tokens, {len(store.roots()):,} to "
            "learn from"
        )


if __name__ == "__main__":
    main()
