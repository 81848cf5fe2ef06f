"""`shape train`: from conversations to an exported predictor with its measured speed-up.

    shape train                                        # the embedded default
    shape train --target T --data D --output DIR       # your own target and data
    shape train --target T --data D --dry-run          # what that would take
    shape train --config configs/paper.yaml            # another predictor
    shape train --target T --data D --init CHECKPOINT  # go on from a predictor, of ours or of another package
    shape train ... --ckpt_path last                   # go on where a run was stopped

Every option can be set in a YAML file (`--config`), and `--print_config` writes one. Other defaults
come from configs/quickstart.yaml for the target that ships, and for any other from the defaults of the options: the
same predictor, its sizes and its number of steps chosen for target and data. `--dry-run`
says what that would be, and what it would take, before anything is done.
"""

import sys
from collections.abc import Sequence

from shape.errors import GO_ON_TRAINING, exit_on_error
from shape.features.trainer import quiet
from shape.parsing import DRY_RUN
from shape.training.parsing import parse

COMMON = (
    *("target", "data", "output", "regenerate", "init", "limit", "dtype", "seed", "ckpt_path", "dry_run"),
    *("training.steps", "training.batch_size", "training.max_minutes", "predictor.kind"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(given, __doc__, COMMON)
    with exit_on_error(GO_ON_TRAINING):
        from shape.training.run import keep_freed_memory, train

        keep_freed_memory()
        with quiet():
            if set(DRY_RUN) & set(given):
                from shape.training.dry_run import dry_run  # which trains a little, by what is here

                print(dry_run(options), flush=True)
            else:
                train(options)


if __name__ == "__main__":
    main()
