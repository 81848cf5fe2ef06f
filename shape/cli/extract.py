"""`shape extract`: the target's hidden states on conversations, stored for training.

    shape extract --target T --data D --output DIR
    shape train --target T --data D --features DIR --output checkpoints/mine
    shape extract --endpoint http://host:8000/v1 --model NAME --target T --data D --output DIR   # by vLLM
    shape extract --dry-run --target T       # what it would take, by T's configuration alone
    shape extract --dry-run --parameters 70e9 --hidden_size 8192 --conversations 100000

Interrupt it at any time: the same command continues where it stopped.
"""

import sys
from collections.abc import Sequence

from shape.errors import GO_ON, exit_on_error
from shape.features.options import CostOptions, ExtractOptions
from shape.features.trainer import quiet
from shape.parsing import DRY_RUN, CommandParser, command_parser, options_of, refuse_dry_run_of_file

COMMON = (
    *("target", "data", "output", "endpoint", "model", "limit", "max_length", "layers", "batch_size", "dtype"),
    *("feature_dtype", "dry_run"),
)


def parser(kind: type = ExtractOptions) -> CommandParser:
    parser = command_parser("extract", __doc__, kind, COMMON if kind is ExtractOptions else ())
    parser.add_argument(*DRY_RUN, action="store_true", help="say what it would take, and do nothing")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    with exit_on_error(GO_ON):
        if set(DRY_RUN) & set(given):
            costs = parser(CostOptions).options(CostOptions, given)
            from shape.features.costs import dry_run

            print(dry_run(costs))
            return
        reader = parser()
        values = reader.instantiate(reader.parse_args(given))
        refuse_dry_run_of_file(values, given, "extractions")
        options = options_of(ExtractOptions, values)
        from shape.features.extraction import extract_from, rank_zero_only

        with quiet():
            store = extract_from(options)
        rank_zero_only(print)(
            f"{options.output} holds {len(store):,} conversations, {store.tokens:,} tokens, {len(store.roots()):,} to "
            "learn from"
        )


if __name__ == "__main__":
    main()
