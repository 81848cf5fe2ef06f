"""`shape harness`: the suites of lm-evaluation-harness, MMLU and all others, with a `ShapeDecoder` as the model.

    pip install -e ".[eval]"
    shape harness --model shape --model_args predictor=DIR --tasks gsm8k,mmlu --output_path RESULTS

Everything behind the command's name is lm-evaluation-harness's own command line, where releases after 0.4.13 know the
model "shape" by themselves (`lm_eval --model shape ...`). It takes what `ShapeDecoder.from_pretrained` does (predictor,
target, drafter, dtype, device_map, num_draft_tokens, revision, trust_remote_code, ...) and `acceptance`.

What a task generates is decoded with drafts. What it asks the probability of, as tasks of multiple choice do, is one
forward of the target, in which nothing is generated and speculation has no part: those results are the target's own,
computed by lm-evaluation-harness's class for Hugging Face models, from which this one differs in generation alone.
"""

import sys
from collections.abc import Sequence

from shape.errors import ConfigError, ShapeError, exit_on_error


def main(arguments: Sequence[str] | None = None) -> None:
    if arguments is not None:
        sys.argv[1:] = arguments  # lm-evaluation-harness has a parser of its own, which reads them there
    with exit_on_error():
        from shape.evaluation.harness import cli_evaluate

        try:
            cli_evaluate()
        except (KeyError, ValueError) as error:
            if isinstance(error, ShapeError):
                raise
            raise ConfigError(
                f"lm-evaluation-harness refuses this ({error}); shape harness ls tasks lists its tasks"
            ) from error


if __name__ == "__main__":
    main()
