"""`shape convert`: a trained drafter from one package's format to another's.

    shape convert checkpoints/mine --to speculators --output mine-vllm    # then: vllm serve mine-vllm
    shape convert yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --to shape --target T --output eagle
    shape convert Qwen/Qwen3.5-4B --from mtp --to shape --data D --output mtp    # drafts frequent tokens alone

Read are ours, EAGLE-3 (SafeAILab, SpecForge), speculators (eagle3, peagle, dflash, dflash2, dspark), DFlash, DFlash2
and DSpark (z-lab, DeepSeek, SpecForge), Medusa (FasterDecoding, vLLM), and with --from mtp the MTP layer in the files
of Qwen3-Next and Qwen3.5. No weight is left out, and none is made up.
"""

from collections.abc import Sequence

from shape.errors import NOTHING_WRITTEN, exit_on_error
from shape.parsing import CommandParser, command_parser


def parser() -> CommandParser:
    reader = command_parser("convert", __doc__, usage="SOURCE --to FORMAT --output DIR [options]", config=False)
    formats = "shape, speculators, eagle3, medusa or dspark (DFlash and DFlash2 too)"
    reader.add_argument("source", type=str, help="folder or hub id of a predictor")
    reader.add_argument("--from", type=str, default="auto", help=f"its format: auto, {formats}, or mtp")
    reader.add_argument("--to", type=str, required=True, help=f"format to write: {formats}")
    reader.add_argument("--output", type=str, required=True, help="folder to write, without a checkpoint yet")
    reader.add_argument("--target", type=str | None, help="folder or hub id of the target; default: as the source says")
    reader.add_argument(
        "--data", type=str | None, help="conversations: draft from the most frequent tokens of their answers alone"
    )
    reader.add_argument("--draft_vocab_size", type=int | None, help="how many of these tokens; default: as in training")
    reader.add_argument("--revision", type=str | None, help="branch, tag or commit of the source's hub repository")
    reader.add_argument("--token", type=str | None, help="for hub repositories that are not public")
    return reader


def main(arguments: Sequence[str] | None = None) -> None:
    with exit_on_error(NOTHING_WRITTEN):
        values = parser().parse_args(arguments)
        from shape.generation.conversion import convert
        from shape.networks.export import describe

        hub = {name: values[name] for name in ("revision", "token") if values[name] is not None}
        tokens = {"data": values.data, "draft_vocab_size": values.draft_vocab_size}
        made = convert(values.source, values.to, values.output, values["from"], values.target, **tokens, **hub)
        print(f"{values.output}: {values.to}, {describe(made.config)}")


if __name__ == "__main__":
    main()
