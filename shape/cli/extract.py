"""`python -m shape.extract`: the target's hidden states on conversations, stored for training.

    python -m shape.extract --target T --data D --output DIR
    python -m shape.train --target T --data D --features DIR --output checkpoints/mine
    python -m shape.extract --dry-run --target T       # what it would take, by T's configuration alone
    (shape.features.costs)

Stop it whenever you like: the same command continues where it stopped.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from jsonargparse import ArgumentParser
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from shape.data.conversations import load_conversations
from shape.errors import exit_on_error
from shape.features import costs
from shape.features.extraction import FeatureOptions, TrainerOptions, extract, quiet, rows_of
from shape.features.store import FeatureStore
from shape.target.loading import TargetOptions, of_target
from shape.target.model import Target, announce


@dataclass(kw_only=True)
class ExtractOptions(FeatureOptions, TargetOptions):
    """What to extract, from what, to where.

    Attributes:
        target: folder or hub id of the target, or quickstart-target.
        data: file, folder or hub dataset with conversations.
        output: folder of the features, or an address that fsspec knows (s3://...).
        chat_template_kwargs: given to the target's chat template, for example {"enable_thinking": false}.
        limit: at most so many conversations.
        target_dtype: dtype to run the target in; null is its checkpoint's own.
        device_map: spreads the target over devices, for example auto; null puts it where the trainer computes.
        trainer: devices, processes and nodes, as Lightning's Trainer has them.
    """

    target: str
    data: str
    output: str
    chat_template_kwargs: dict[str, Any] | None = None
    limit: int | None = None
    target_dtype: str | None = None
    device_map: str | dict[str, str | int] | None = None
    trainer: TrainerOptions = field(default_factory=TrainerOptions)


def run(options: ExtractOptions) -> FeatureStore:
    """Extract, or complete what an earlier run left; returns the store."""
    trainer = options.trainer.for_extraction()
    place = options.device_map or trainer.strategy.root_device
    target = Target.load(options.target, dtype=options.target_dtype, device_map=place, **of_target(options))
    options.check(target)
    conversations = load_conversations(
        options.data,
        skip_bad_rows=options.skip_bad_rows,
        limit=options.limit,
        chat_template_kwargs=options.chat_template_kwargs,
    )
    rank_zero_only(announce)(target)
    rows = list(chain.from_iterable(rows_of(target, conversations)))
    return extract(target, rows, options.output, options, trainer)


def parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m shape.extract", description=__doc__.splitlines()[0])
    parser.add_argument("--config", action="config", help="a YAML file with these options")
    parser.add_class_arguments(ExtractOptions, as_group=False)
    return parser


@rank_zero_only
def report(store: FeatureStore, output: str) -> None:
    print(f"{output} holds {len(store):,} conversations, {store.rows:,} tokens, {len(store.roots()):,} to learn from")


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if "--dry-run" in arguments:
        with exit_on_error():
            costs.main([argument for argument in arguments if argument != "--dry-run"])
        return
    reader = parser()
    values = reader.instantiate(reader.parse_args(arguments)).as_dict()
    values.pop("config")
    with exit_on_error(), quiet():
        options = ExtractOptions(**values)
        report(run(options), options.output)


if __name__ == "__main__":
    main()
