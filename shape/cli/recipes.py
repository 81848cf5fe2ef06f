"""`shape recipes`: packs of what the target writes again and again on a task, to be drafted from without a model.

    shape recipes compile --target T --prompts P --output task.pack
    shape recipes inspect task.pack
    shape recipes merge one.pack other.pack --output both.pack
    shape recipes merge task.pack --misses misses.jsonl --output task.pack

A recipe says which tokens follow some others (Kolm's "recipe speculative decoding"). Kept are the sub-sequences on
which all samples of a prompt agree, so that what varies from one answer to the next is in no recipe; with `--verify`
only of prompts all of whose samples pass it. `shape generate --pack PACK --misses LOG` logs what a pack did not know.
"""

from collections.abc import Callable, Sequence
from typing import Any

from shape.data.options import CompileOptions
from shape.errors import NOTHING_WRITTEN, ConfigError, exit_on_error
from shape.files import prepare_file
from shape.parsing import CommandParser, command_parser, options_of
from shape.target.options import TargetOptions

COMMON = (
    *("target", "prompts", "output", "samples", "verify", "misses", "temperature", "max_new_tokens", "limit", "seed"),
    *("dtype", "device"),
)


def parser() -> CommandParser:
    parser = command_parser("recipes", __doc__, usage="compile|inspect|merge [options]", config=False)
    commands = parser.add_subcommands()
    told = "Compile a pack from the target's own answers."
    commands.add_subcommand("compile", command_parser("recipes compile", told, CompileOptions, COMMON))
    reader = command_parser("recipes inspect", "Say what a pack holds.", usage="PACK [options]", config=False)
    reader.add_argument("pack", type=str, help="a file that compile has written")
    reader.add_argument("--show", type=int, default=10, help="so many recipes, the most frequent")
    reader.add_argument(
        "--target",
        type=str | None,
        help="its tokenizer shows text for tokens; default: that of the pack, where it is at hand",
    )
    reader.add_class_arguments(TargetOptions, as_group=False)
    commands.add_subcommand("inspect", reader)
    reader = command_parser("recipes merge", "Make one pack of several.", usage="PACK PACK... --output", config=False)
    reader.add_argument("packs", type=str, nargs="+", help="files that compile has written")
    reader.add_argument("--output", type=str, required=True, help="the file to write")
    reader.add_argument("--most", type=int, default=15_000, help="recipes kept, the most frequent")
    told = "logs of decoding with them; what was missed at least twice becomes a recipe"
    reader.add_argument("--misses", type=list[str], default=[], help=told)
    commands.add_subcommand("merge", reader)
    for name, reader in commands.choices.items():
        reader.prog = f"shape recipes {name}"
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    with exit_on_error(NOTHING_WRITTEN):
        values = parser().parse_args(arguments)
        {"compile": _compile, "inspect": _inspect, "merge": _merge}[values.subcommand](values[values.subcommand])


def _compile(values: Any) -> None:
    from shape.drafters.recipes.compile import compile_pack
    from shape.drafters.recipes.pack import inspect
    from shape.generation.answers import answering
    from shape.target.model import Target

    def load() -> tuple[Target, Callable[..., Any]]:
        decoder = answering(options, "suffix")
        return decoder.target, decoder.generate

    options = options_of(CompileOptions, values)
    options.check()
    prepare_file(options.output)
    compile_pack(options, load)
    print(inspect(options.output))


def _inspect(values: Any) -> None:
    from shape.drafters.recipes.pack import Pack, inspect
    from shape.target.loading import of_target, tokenizer_named, tokenizer_of

    options = options_of(TargetOptions, values)
    if values.target is not None:
        tokenizer = tokenizer_named(values.target, of_target(options))
    else:  # the target may be out of reach: token ids are shown, then
        tokenizer = tokenizer_of(Pack.load(values.pack).target.name, options)
    print(inspect(values.pack, values.show, tokenizer))


def _merge(values: Any) -> None:
    from shape.drafters.recipes.misses import read_misses, recipes_of_misses
    from shape.drafters.recipes.pack import Pack, inspect, merged

    if values.most < 1:
        raise ConfigError(f"most is {values.most}; give a positive number")
    packs = [Pack.load(path) for path in values.packs]
    misses = [miss for path in values.misses for miss in read_misses(path)]
    first = next((pack for pack in packs if pack.recipes), packs[0])  # an empty one does not say how it was compiled
    merged(packs, values.most, recipes_of_misses(misses, first.prefix, first.depth)).save(values.output)
    print(inspect(values.output))


if __name__ == "__main__":
    main()
