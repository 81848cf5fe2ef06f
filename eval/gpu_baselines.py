"""SHAPE and its baselines on a GPU, for a target of 60M parameters that is trained first, in calls of eight minutes.

    python -m eval.gpu_baselines WORK --data sgd_train.jsonl.gz tm4.jsonl.gz gsm8k_train.jsonl.gz

Call it again until it says that it is finished: each call goes on where the last one was stopped. It trains the target
on the given dialogues and on those of our own generator (on the latter alone without `--data`), lets it answer 16,000
prompts, trains all variants of `configs/ablations/baselines.yaml` on its answers, a minute each, measures them on
prompts that neither has seen, and leaves the table, with its environment, in `eval/results/ablations/baselines-gpu`.
Each step is a command of the repository; options of `eval.ablate` may follow, `--seeds '[0]'` for one training of each.
(Written, and tried with tiny sizes on a CPU; not yet run on a GPU.)
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
TARGET: dict[str, Any] = {
    "hidden_size": 768, "layers": 8, "heads": 12, "kv_heads": 4, "head_dim": 64, "intermediate_size": 2048,
    "vocabulary": 8192, "batch": 64, "portion": 64, "steps": 1500,
}  # fmt: skip
CONVERSATIONS = 16_000
VARIANTS: dict[str, Any] = {
    "training.max_minutes": 1,
    "training.batch_size": 4096,
    "trainer.accumulate_grad_batches": 1,
    "predictor.intermediate_size": 1024,
    "predictor.draft_vocab_size": 4096,
    "regeneration.batch_size": 256,
}


class Out(Exception):
    """The call's time is over."""


def run(deadline: float, work: Path, *command: str | Path) -> None:
    """A command in the work folder, interrupted when the time is over; each of them goes on where it stopped."""
    print("$ python", *command, flush=True)
    place = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([sys.executable, *map(str, command)], cwd=work, env=place, start_new_session=True)
    try:
        status = process.wait(max(deadline - monotonic(), 0))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        raise Out from None
    if status:
        raise SystemExit(f"that command ended with status {status}; see what it said above")


def conversations(count: int) -> list[dict[str, Any]]:
    """What our generator taught the target, of which the drafters learn the target's own answers."""
    spec = importlib.util.spec_from_file_location("quickstart_target", REPOSITORY / "train/quickstart_target.py")
    assert spec and spec.loader
    recipe = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = recipe  # dataclasses look their module up by name
    spec.loader.exec_module(recipe)
    train, _ = recipe.generated_rows(count)
    return train


def finish(arguments: argparse.Namespace, more: list[str], deadline: float) -> None:
    work: Path = arguments.work
    if not (work / "target-is-done").exists():
        sizes = [f"--{name}={value}" for name, value in TARGET.items()]
        data = ["--data", *(path.resolve() for path in arguments.data)]
        run(deadline, work, REPOSITORY / "train/quickstart_target.py", "--output=target", "--resume", *sizes, *data)
        (work / "target-is-done").touch()
    if not (work / "train.jsonl").exists():
        part = work / "train.part"
        part.write_text("".join(json.dumps(row) + "\n" for row in conversations(CONVERSATIONS)), encoding="utf-8")
        part.replace(work / "train.jsonl")
    changes = ",".join(f"{name}={value}" for name, value in VARIANTS.items())
    run(
        deadline, work, "-m", "eval.ablate", "baselines", "--target=target", "--data=train.jsonl",
        f"--measure.prompts={REPOSITORY / 'data/bench.jsonl'}", "--output=baselines", f"--override=[{changes}]",
        "--title=SHAPE and its baselines for a larger target, on a GPU", *more,
    )  # fmt: skip
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in ("ablation.json", "ablation.md"):
        shutil.copy(work / "baselines" / name, arguments.output)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path, help="folder for everything that is made on the way")
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="ShareGPT files to train the target on")
    parser.add_argument("--minutes", type=float, default=8, help="stop after so many; call again to go on")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "eval/results/ablations/baselines-gpu")
    arguments, more = parser.parse_known_args(given)
    deadline = monotonic() + 60 * arguments.minutes
    arguments.work.mkdir(parents=True, exist_ok=True)
    try:
        finish(arguments, more, deadline)
    except Out:
        print("the time is over, and it is not finished: call it again", flush=True)
    else:
        print(f"finished: {arguments.output}", flush=True)


if __name__ == "__main__":
    main()
