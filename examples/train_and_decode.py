"""Train a predictor with a few steps, load what was exported, and decode with it.

The defaults take well below a minute and show that everything works; `python -m shape.train` alone trains longer and
reaches several tokens per forward pass.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from shape import ShapeDecoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("my-predictor"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--conversations", type=int, default=100)
    options = parser.parse_args()

    # Training is a command. Its options may also stand in a YAML file: --config FILE.
    train = [sys.executable, "-m", "shape.train", "--output", str(options.output)]
    train += ["--limit", str(options.conversations), "--training.steps", str(options.steps)]
    train += ["--validation.prompts", "4", "--measurement.limit", "4", "--measurement.max_new_tokens", "32"]
    subprocess.run(train, check=True)

    with ShapeDecoder.from_pretrained(options.output) as decoder:  # it knows its target
        ids = decoder.target.encode([{"role": "user", "content": "Book a table for two."}])
        out = decoder.generate(ids, max_new_tokens=48, return_dict_in_generate=True)
        print(decoder.tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True))
        print(f"acceptance length {out.stats.acceptance_length:.2f}, lossless: {out.stats.lossless}")


if __name__ == "__main__":
    main()
