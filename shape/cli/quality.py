"""`shape quality`: how good the text of a decoder is, for lossy ways of decoding above all, beside the target's own.

    shape quality --output quality-results                     # the quickstart pair
    shape quality --target T --predictor P --prompts gsm8k.jsonl --encoder E --output DIR
    shape quality --predictor P --prompts humaneval.jsonl --run_code true --output DIR

Modes: `autoregressive`, the target's own text; `shape`, the predictor's drafts under the lossless rule "match"; the
name of another acceptance rule (`typical-lossy`, `trs-lossy`, `rejection`, ...); `drafter-alone`, where every drafted
token is accepted unjudged (the target only computes the states that the predictor reads next: `trs-lossy` of a single
path, which never refuses one); `beam`, transformers' beam search. All answer the same prompts with the same seeds, and
the autoregressive answer is the context of the next turn for all.

Measured: perplexity under the target, equality, likeness to the target's own text by an encoder that the user names,
exact match on prompts whose `reference` is a number (GSM8K), pass@1 on prompts with `test` and `entry_point`
(HumanEval), and how often the drafter is right by how far it looks ahead (the paper's Tables 4, 5, 10, 12, 13). Writes
`quality.json` (sums prompt by prompt, and all figures), `quality.md` and `answers.jsonl` (the texts) to the output
folder. Until then finished prompts are kept there in `records.jsonl`, by which the same command goes on.
"""

from collections.abc import Sequence

from shape.errors import exit_on_error
from shape.evaluation.options import QualityOptions
from shape.parsing import CommandParser, command_parser, options_of

COMMON = (
    "output",
    "predictor",
    "target",
    "prompts",
    "methods",
    "limit",
    "max_new_tokens",
    "temperature",
    "dtype",
    "seed",
    "run_code",
)


def parser() -> CommandParser:
    return command_parser("quality", __doc__, QualityOptions, COMMON)


def main(arguments: Sequence[str] | None = None) -> None:
    reader = parser()
    with exit_on_error():
        options = options_of(QualityOptions, reader.instantiate(reader.parse_args(arguments)))
        from rich.console import Console
        from rich.markdown import Markdown

        from shape.evaluation.quality import run

        Console().print(Markdown(run(options).to_markdown()))


if __name__ == "__main__":
    main()
