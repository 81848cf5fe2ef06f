"""Recipe packs: what the target writes again and again on a task, compiled from its own samples, looked up without a
model.

    python -m shape.recipes compile --target T --prompts P --output task.pack
    python -m shape.recipes inspect task.pack
    python -m shape.recipes merge one.pack other.pack --output both.pack

A recipe says which tokens follow some others (Kolm's "recipe speculative decoding"). Kept are the sub-sequences on
which all samples of a prompt agree, so that what varies from one answer to the next is in no recipe.
"""

from collections.abc import Sequence
from dataclasses import fields

from jsonargparse import ArgumentParser

from shape.drafters.recipes.compile import CompileOptions, compile_pack
from shape.drafters.recipes.pack import Pack, inspect, merged
from shape.errors import exit_on_error
from shape.generation.decoder import ShapeDecoder
from shape.target.loading import of_target
from shape.target.model import Target, announce
from shape.target.options import PlacedOptions


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m shape.recipes", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subcommands()
    reader = ArgumentParser(description="Compile a pack from the target's own answers.")
    reader.add_class_arguments(CompileOptions)
    commands.add_subcommand("compile", reader)
    reader = ArgumentParser(description="Say what a pack holds.")
    reader.add_argument("pack", type=str, help="a file that compile has written")
    reader.add_argument("--show", type=int, default=10, help="so many recipes, the most frequent")
    reader.add_argument(
        "--target", type=str | None, default=None, help="shows text for tokens; default: that of the pack"
    )
    reader.add_class_arguments(PlacedOptions)
    commands.add_subcommand("inspect", reader)
    reader = ArgumentParser(description="Make one pack of several.")
    reader.add_argument("packs", type=str, nargs="+", help="files that compile has written")
    reader.add_argument("--output", type=str, required=True, help="the file to write")
    reader.add_argument("--most", type=int, default=15_000, help="recipes kept, the most frequent")
    commands.add_subcommand("merge", reader)
    with exit_on_error():
        values = parser.parse_args(arguments)
        if values.subcommand == "compile":
            options = CompileOptions(**values.compile.as_dict())
            options.check()
            decoder = ShapeDecoder.from_pretrained(
                target=options.target, dtype=options.dtype, drafter="suffix", **of_target(options)
            )
            announce(decoder.target)
            compile_pack(options, decoder.target, decoder.generate)
            print(inspect(options.output, 0, None))
        elif values.subcommand == "inspect":
            pack = Pack.load(values.inspect.pack)
            loading = PlacedOptions(**{entry.name: values.inspect[entry.name] for entry in fields(PlacedOptions)})
            target = Target.load(values.inspect.target or pack.target.name, **of_target(loading))
            pack.require(target, f"pack {values.inspect.pack}")
            print(inspect(values.inspect.pack, values.inspect.show, target))
        else:
            packs = [Pack.load(path) for path in values.merge.packs]
            merged(packs, values.merge.most).save(values.merge.output)
            print(inspect(values.merge.output, 0, None))


if __name__ == "__main__":
    main()
