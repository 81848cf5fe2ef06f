"""Measures the default predictor, the paper's and the rivals on chat-12m, an internal target that does not ship.

    SHAPE_SHARED=/path/to/shared python eval/chat_12m.py WORK_FOLDER

Every 24th training dialogue of Schema-Guided Dialogue is answered by the target; both predictors learn from the same
stored features for the same minutes; then they are measured on dialogues of the development part, which were left
out, and on public prompts that the target is weak at. Then SHAPE and its rivals are trained alike
(`configs/ablations/rivals.yaml`) and measured on the dialogues. Each step is a command of the package, and what is
finished is not done again. The tables go to `eval/results/chat-12m` and `eval/results/ablations/rivals-chat-12m`.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
MINUTES = 3
# The tree of "default-tree": the default predictor with a wider draft, comparable to the beams of 3 x 4 that earlier
# prototypes had on this target. Not tuned; to tune it on other dialogues:
#   python eval/draft_shapes.py WORK/default --target chat-12m --prompts WORK/tuning.jsonl
TREE = {"width": 3, "depth": 4, "nodes": 10}
SUITES = ("mt_bench", "alpaca", "gsm8k", "humaneval", "qa", "summarization")
PREDICTORS = {
    "default": ["--config", "quickstart.yaml"],
    "paper": ["--config", "quickstart.yaml", "--config", "paper.yaml"],
}
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
    """Training dialogues, two files of prompts, and the names by which the commands find target and configurations."""
    rows = read(shared / "data/sgd_train.jsonl.gz")
    write(work / "train.jsonl", [row for row in rows if not row["id"].startswith("sgd-dev-")][::24])
    held_out = [row for row in rows if row["id"].startswith("sgd-dev-")]
    for name, count, offset in (("sgd-dev", 48, 0), ("tuning", 24, 7)):  # draft shapes are tuned on other dialogues
        chosen = [held_out[offset + index * (len(held_out) - offset) // count] for index in range(count)]
        write(work / f"{name}.jsonl", (up_to_a_question(row, index) for index, row in enumerate(chosen)))
    mixed = [
        {"id": f"{suite}-{row['id']}", "category": suite, "turns": row["turns"][:1]}
        for suite in SUITES
        for row in read(shared / f"prompts/{suite}.jsonl")[::10]
    ]
    write(work / "mixed.jsonl", mixed)
    for name, place in {
        "chat-12m": shared / "targets/chat-12m",
        "quickstart.yaml": REPOSITORY / "configs/quickstart.yaml",
        "paper.yaml": REPOSITORY / "configs/paper.yaml",
    }.items():
        (work / name).unlink(missing_ok=True)
        (work / name).symlink_to(place.resolve())


def up_to_a_question(row: dict[str, Any], index: int) -> dict[str, Any]:
    """The dialogue up to one of its questions, in rotation: the last ones would all be good-byes."""
    turns = row["conversations"]
    questions = [place for place, turn in enumerate(turns) if turn["from"] == "human"]
    return {"id": row["id"], "conversations": turns[: questions[index % len(questions)] + 1]}


def with_tree(predictor: Path, output: Path) -> None:
    """The same weights, drafting trees."""
    shutil.copytree(predictor, output, dirs_exist_ok=True, ignore=shutil.ignore_patterns("checkpoints", "logs"))
    config = json.loads((output / "config.json").read_text())
    (output / "config.json").write_text(json.dumps({**config, "draft": TREE}, indent=2))


def shape(command: str, *arguments: str | int, work: Path) -> None:
    parts = [sys.executable, "-m", f"shape.{command}", *map(str, arguments)]
    print("$ python", *parts[1:], flush=True)
    subprocess.run(parts, cwd=work, check=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})


def main() -> None:
    shared, work = Path(os.environ["SHAPE_SHARED"]), Path(sys.argv[1])
    work.mkdir(parents=True, exist_ok=True)
    prepare(shared, work)
    data = ["--target", "chat-12m", "--data", "train.jsonl", "--features", "features", "--seed", 0]
    answers: list[str | int] = ["--regeneration.max_new_tokens", 128, "--regeneration.batch_size", 32]
    # More steps than the minutes hold: these end it, and the learning rate's schedule with them.
    time = ["--training.steps", 5000, "--training.max_minutes", MINUTES, "--validation.every", 100]
    for name, config in PREDICTORS.items():
        if not (work / name / "model.safetensors").exists():
            shape("train", *config, *data, *answers, *time, "--output", name, "--measurement.limit", 0, work=work)
    with_tree(work / "default", work / "default-tree")
    for folder, (prompts, dtype, temperature) in TABLES.items():
        output = REPOSITORY / "eval/results" / f"chat-12m/{folder}"
        if output.exists():
            continue
        shape(
            "bench", "--target", "chat-12m",
            *(f"--predictor={name}={name}" for name in ("default", "default-tree", "paper")),
            "--prompts", f"{prompts}.jsonl", "--dtype", dtype, "--temperature", temperature,
            "--max_new_tokens", 96, "--output", folder,
            "--label", f"Internal target chat-12m, {NAMES[prompts]}, {dtype}, temperature {temperature}",
            work=work,
        )  # fmt: skip
        shutil.move(work / folder, output)
    rivals(work, answers)


def rivals(work: Path, answers: list[str | int]) -> None:
    """SHAPE against its rivals; one seed after the other, so that it can be stopped and continued."""
    output = REPOSITORY / "eval/results/ablations/rivals-chat-12m"
    if output.exists():
        return
    common = ",".join(
        f"{name.removeprefix('--')}={value}" for name, value in zip(answers[::2], answers[1::2], strict=True)
    )
    shape(
        "evaluation.ablate", "rivals", "--target", "chat-12m", "--data", "train.jsonl",
        "--measure.prompts", "sgd-dev.jsonl", "--override", f"[{common}]", "--output", "rivals",
        "--title", "SHAPE and its rivals on chat-12m, which does not ship: the same time, the same features",
        work=work,
    )  # fmt: skip
    output.mkdir(parents=True)
    for name in ("ablation.json", "ablation.md"):
        shutil.copy(work / "rivals" / name, output)


if __name__ == "__main__":
    main()
