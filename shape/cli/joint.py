"""`shape joint`: several predictors trained at once, on one forward of the target a step.

    shape joint first.yaml second.yaml --output checkpoints/joint
    shape joint first.yaml second.yaml --output checkpoints/joint --ckpt_path last

Each file has the options of one `shape train`, `online: true` and an output of its own among them. Runs may
differ in predictor, losses, draft shape and optimisation; all else they share. What the target computes of a step's
conversations is computed once for all, and each predictor is trained as it would be alone: the sum of their losses has
the gradients of each, norms are clipped one by one, and noise and dropout begin anew for each. With a large target that
makes an ablation of N variants cost little more than one of them.
"""

from collections.abc import Sequence

from shape.errors import GO_ON_TRAINING, exit_on_error
from shape.features.trainer import quiet
from shape.parsing import CommandParser, command_parser


def parser() -> CommandParser:
    parser = command_parser("joint", __doc__, usage="FILE FILE... [options]", config=False)
    parser.add_argument(
        "runs", nargs="+", help="YAML files with options of shape train, one for each predictor, named after its output"
    )
    parser.add_argument(
        "--output", default="checkpoints/joint", help="folder of what they share: checkpoints to resume from, logs"
    )
    parser.add_argument(
        "--ckpt_path", type=str | None, help='resume from this checkpoint; "last" is the one in the output folder'
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    with exit_on_error(GO_ON_TRAINING):
        from shape.training.parsing import read_options
        from shape.training.run import keep_freed_memory, train_jointly

        keep_freed_memory()
        with quiet():
            train_jointly([read_options(file) for file in options.runs], options.output, options.ckpt_path)


if __name__ == "__main__":
    main()
