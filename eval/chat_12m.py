"""Measures SHAPE and its baselines on chat-12m, an internal target that does not ship.

    SHAPE_SHARED=/path/to/shared python -m eval.chat_12m --work WORK_FOLDER

Every eighth training dialogue of Schema-Guided Dialogue is answered by the target; all predictors learn from the same
stored features for the same minutes (`configs/ablations/baselines.yaml`) and are measured on dialogues of the
development part, which were left out. Then the default predictor and the paper's, of the first seed, are measured
beside transformers on these dialogues, in two precisions, and on public prompts that the target is weak at. Each step
is a command of the package, and what is finished is not done again. The tables go to `eval/results/`, into
`ablations/rivals-chat-12m` and `chat-12m`.
"""

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval import commands

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "eval/results"
EVERY = 8  # of 12,200 dialogues
SUITES = ("mt_bench", "alpaca", "gsm8k", "humaneval", "qa", "summarization")
PREDICTORS = {"default": "baselines/runs/shape-0", "paper": "baselines/runs/shape-paper-0"}
ANSWERS = {"max_new_tokens": 128, "batch_size": 32}
TABLES = {
    "sgd-bfloat16-t0": ("sgd-dev", "bfloat16", 0),
    "sgd-bfloat16-t1": ("sgd-dev", "bfloat16", 1),
    "sgd-float32-t0": ("sgd-dev", "float32", 0),
    "mixed-bfloat16-t0": ("mixed", "bfloat16", 0),
}
NAMES = {"sgd-dev": "dialogues left out of training", "mixed": "public prompts"}


def read(path: Path) -> list[dict[str, Any]]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def prepare(shared: Path, work: Path) -> None:
    """Training dialogues, files of prompts, and the names by which the commands find target and predictors."""
    rows = read(shared / "data/sgd_train.jsonl.gz")
    write(work / "train.jsonl", [row for row in rows if not row["id"].startswith("sgd-dev-")][::EVERY])
    held_out = [row for row in rows if row["id"].startswith("sgd-dev-")]
    chosen = [held_out[index * len(held_out) // 48] for index in range(48)]
    write(work / "sgd-dev.jsonl", (up_to_a_question(row, index) for index, row in enumerate(chosen)))
    mixed = [
        {"id": f"{suite}-{row['id']}", "category": suite, "turns": row["turns"][:1]}
        for suite in SUITES
        for row in read(shared / f"prompts/{suite}.jsonl")[::10]
    ]
    write(work / "mixed.jsonl", mixed)
    for name, place in {"chat-12m": str(shared / "targets/chat-12m"), **PREDICTORS}.items():
        (work / name).unlink(missing_ok=True)
        (work / name).symlink_to(place)


def up_to_a_question(row: dict[str, Any], index: int) -> dict[str, Any]:
    """The dialogue up to one of its questions, in rotation: the last ones would all be good-byes."""
    turns = row["conversations"]
    questions = [place for place, turn in enumerate(turns) if turn["from"] == "human"]
    return {"id": row["id"], "conversations": turns[: questions[index % len(questions)] + 1]}


def carry_out(module: str, *arguments: str | int, work: Path) -> None:
    parts = [sys.executable, "-m", module, *map(str, arguments)]
    print("$ python", *parts[1:], flush=True)
    subprocess.run(parts, cwd=work, check=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})


@dataclass
class Chat12mOptions:
    """Where to work.

    Args:
        work: folder for everything that is made on the way.
    """

    work: str


def run(options: Chat12mOptions) -> None:
    shared, work = Path(os.environ["SHAPE_SHARED"]).resolve(), Path(options.work)
    work.mkdir(parents=True, exist_ok=True)
    prepare(shared, work)
    baselines(work)
    for folder, (prompts, dtype, temperature) in TABLES.items():
        output = RESULTS / "chat-12m" / folder
        if output.exists():
            continue
        carry_out(
            "shape.bench", "--target", "chat-12m", *(f"--predictor={name}={name}" for name in PREDICTORS),
            "--prompts", f"{prompts}.jsonl", "--dtype", dtype, "--temperature", temperature,
            "--max_new_tokens", 96, "--output", folder,
            "--label", f"Internal target chat-12m, {NAMES[prompts]}, {dtype}, temperature {temperature}",
            work=work,
        )  # fmt: skip
        shutil.move(work / folder, output)


def baselines(work: Path) -> None:
    output = RESULTS / "ablations/rivals-chat-12m"
    if output.exists():
        return
    answers = ",".join(f"regeneration.{name}={value}" for name, value in ANSWERS.items())
    carry_out(
        "eval.ablate", "baselines", "--target", "chat-12m", "--data", "train.jsonl",
        "--measure.prompts", "sgd-dev.jsonl", "--override", f"[{answers}]", "--output", "baselines", "--jobs", 2,
        "--title", "SHAPE and its baselines on chat-12m, which does not ship: the same time, the same features",
        work=work,
    )  # fmt: skip
    output.mkdir(parents=True)
    for name in ("ablation.json", "ablation.md"):
        shutil.copy(work / "baselines" / name, output)


def main(arguments: Sequence[str] | None = None) -> None:
    commands.run(run, Chat12mOptions, arguments)


if __name__ == "__main__":
    main()
