"""How many positions per second training takes at the quickstart's size, in this state of the code and in another.

    git worktree add ../before COMMIT
    python -m eval.training_speed --output eval/results/training-speed --before ../before --work speed-work

Beside it: how much of a batch is padding, for networks that attend to whole texts and for training online, where texts
are drawn by chance and as training batches them (`shape.training.batches.WholeTextBatches`).

Every training is a `shape train` of its own on the shipped target's stored features, states of the code taking turns:
first one, then the other, then the other way round. All see the same texts. They end before anything is validated.
`--work` keeps the features, so that one network can be measured at a time, each time on an
otherwise idle machine; what is in the output folder is kept.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NETWORKS = {"default": "quickstart", "EAGLE-3": "eagle", "DFlash": "dflash"}


@dataclass
class SpeedOptions:
    """What to measure.

    Args:
        output: folder of speed.json and speed.md.
        work: folder of features and trainings, kept.
        before: a checkout of another commit; null measures this state alone.
        networks: by name; default: all.
        steps: of each training; 16, over which texts are sorted, or a multiple.
        batch_size: positions of a step; the quickstart has 1,024.
        rounds: trainings of each state.
        limit: conversations.
        more: options of `shape train` for all, in this state of the code and the other.
        now: options for this state alone.
        texts: files of conversations whose padding is counted, those that ship among them as "shipped".
    """

    output: str = "speed-results"
    work: str = "speed-work"
    before: str | None = None
    networks: list[str] = field(default_factory=lambda: list(NETWORKS))
    steps: int = 16
    batch_size: int = 1024
    rounds: int = 2
    limit: int = 600
    more: list[str] = field(default_factory=list)
    now: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


def timed(arguments: Sequence[str]) -> None:
    """Train as `shape train` does and print when the first step began and each portion ended; by whatever state of the
    code is imported.
    """
    from shape.training import run
    from shape.training.parsing import parse

    times: list[float] = []

    class Clock(run.CountFlops):
        """In its place, as counting operations takes time."""

        def on_train_batch_start(self, *_: Any) -> None:
            times[:] = times or [monotonic()]

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            times.append(monotonic())
            if trainer.global_step == trainer.max_steps:  # neither validated nor exported
                print(json.dumps(times), flush=True)
                os._exit(0)

    run.CountFlops = Clock  # type: ignore[misc]
    run.keep_freed_memory()
    run.train(parse(list(arguments)))


def seconds_of(folder: Path, arguments: Sequence[str]) -> float:
    """Of the steps of a training by the code in a folder."""
    command = [sys.executable, "-P", __file__, "--timed", *arguments]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, encoding="utf-8")
    if ran.returncode:
        raise RuntimeError(ran.stderr[-2000:])
    times = json.loads(ran.stdout.splitlines()[-1])
    return times[-1] - times[0]


def measured(name: str, options: SpeedOptions) -> dict[str, Any]:
    """One network's seconds by state, for each round."""
    work = Path(options.work).resolve()
    chosen = {
        "config": ROOT / "configs" / f"{NETWORKS[name]}.yaml", "features": work / name, "limit": options.limit,
        "training.steps": options.steps, "training.batch_size": options.batch_size, "validation.every": 100000,
        "logger": "none", "trainer.accelerator": "cpu", "trainer.enable_progress_bar": "false",
    }  # fmt: skip
    given = [*(f"--{option}={value}" for option, value in chosen.items()), *options.more]
    states = {"now": (ROOT, options.now)}
    if options.before is not None:
        states = {"before": (Path(options.before).resolve(), []), **states}
    seconds: dict[str, list[float]] = {state: [] for state in states}
    for turn in range(options.rounds):
        for state in sorted(states, reverse=turn % 2 == 1):
            folder, own = states[state]
            seconds[state].append(seconds_of(folder, [*given, f"--output={work / 'run'}", *own]))
    return {
        "network": name,
        "positions": options.batch_size * options.steps,
        "seconds": seconds,
        "more": options.more,
        "now": options.now,
    }


def padding(file: str, batch_size: int) -> dict[str, Any]:
    """Shares of the tokens that the target would read, and of the roots that the network runs for, by way of batching;
    of the first 1,500 conversations of a file, in the shipped target's tokens, one portion a step.
    """
    import torch
    from torch import Tensor
    from transformers import AutoTokenizer

    from shape import bundled
    from shape.data.encoding import encode_row
    from shape.data.reading import load_conversations
    from shape.training.batches import STEPS_POOLED, Partition, WholeTextBatches, followers_of_roots
    from shape.training.order import StepOrder

    tokenizer = AutoTokenizer.from_pretrained(bundled.resolve("quickstart-target"))
    path = bundled.path("data", "answers.jsonl.gz") if file == "shipped" else Path(file)
    rows = load_conversations(path, limit=1500, skip_bad_rows=True)
    texts = [encode_row(row, tokenizer=tokenizer, max_length=1024, skip_bad_rows=True) for row in rows]
    sizes = torch.tensor([[len(text.input_ids), len(followers_of_roots(text))] for text in texts])
    sizes = sizes[sizes[:, 1] > 0]
    order = StepOrder(0, len(sizes), max(1, round(batch_size / float(sizes[:, 1].float().mean()))))

    class Sorted(WholeTextBatches):
        column = 0

        def _sizes(self, samples: Tensor) -> Tensor:
            return sizes[samples, self.column]

        def _roots(self, samples: Tensor) -> Tensor:
            return sizes[samples, 1]

    def padded(step: Any) -> list[float]:
        batches = [sizes[step(number)] for number in range(4 * STEPS_POOLED)]
        batches = [batch for batch in batches if len(batch)]
        held = torch.stack([batch.max(0).values * len(batch) for batch in batches]).sum(0)
        return (1 - torch.stack([batch.sum(0) for batch in batches]).sum(0) / held).tolist()

    online, stored = Sorted(order, Partition(), 1), Sorted(order, Partition(), 1)
    stored.column = 1
    ways = {"by chance": order.step, "online": online._step, "stored": stored._step}
    means = dict(zip(("tokens", "roots"), sizes.float().mean(0).tolist(), strict=True))
    return {
        "file": Path(file).name,
        "batch_size": batch_size,
        **means,
        "padded": {k: padded(v) for k, v in ways.items()},
    }


def run(options: SpeedOptions) -> None:
    from shape.evaluation.journal import refuse_other

    path = Path(options.output, "speed.json")
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if known:
        refuse_other(path, known.get("settings", {}), _settings(options))
    rows, counted = known.get("rows", []), known.get("padding", [])
    padded = {(each["file"], each["batch_size"]) for each in counted}
    asked = [(file, size) for file in options.texts for size in (1024, 8192) if (Path(file).name, size) not in padded]
    counted += [padding(*each) for each in asked]
    text = write(options, rows, counted)
    for name in options.networks:
        rows.append(measured(name, options))
        text = write(options, rows, counted)
    print(text)


def _settings(options: SpeedOptions) -> dict[str, Any]:
    """What all rows share."""
    return {name: getattr(options, name) for name in ("steps", "batch_size", "rounds", "limit", "more")}


def write(options: SpeedOptions, rows: Sequence[dict[str, Any]], counted: Sequence[dict[str, Any]]) -> str:
    from eval import commands
    from shape.evaluation.markdown import DASH, markdown

    lines = []
    for row in rows:
        rates = {state: [row["positions"] / each for each in taken] for state, taken in row["seconds"].items()}
        cells = [f"{statistics.mean(each):,.0f} ({min(each):,.0f} to {max(each):,.0f})" for each in rates.values()]
        cells = cells if "before" in rates else [DASH, *cells]
        ratio = statistics.mean(rates["now"]) / statistics.mean(rates["before"]) if "before" in rates else None
        with_what = " ".join([*row["more"], *row["now"]])
        lines.append([f"{row['network']} {with_what}".strip(), *cells, DASH if ratio is None else f"{ratio:.2f}"])
    speed = [
        f"At the quickstart's size: shipped target, stored features, {options.limit} conversations, steps of "
        f"{options.batch_size:,} positions; mean (least to most) of {options.rounds} trainings of 16 steps or more.",
        markdown(["network", "before", "now", "now / before"], lines),
    ]
    parts = [
        "# Speed and padding of training",
        *(speed if lines else []),
        "## Padding\n\nOf batches of whole texts, one portion a step: of the tokens that a target reads online, and of "
        "the roots that a network runs for. By chance, and as training sorts: by tokens online, by roots where states "
        "are stored.",
        markdown(
            ["texts", "tokens, roots of one", "batch", "", "by chance", "online", "stored"],
            [
                [each["file"], f"{each['tokens']:.0f}, {each['roots']:.0f}", f"{each['batch_size']:,}", what,
                 *(f"{shares[column]:.0%}" for shares in each["padded"].values())]
                for each in counted for column, what in enumerate(("tokens", "roots"))
            ],
        ),
    ]  # fmt: skip
    record = {"settings": _settings(options), "rows": rows, "padding": counted}
    return commands.write_results(Path(options.output), "speed", record, *parts)


def main(arguments: Sequence[str] | None = None) -> None:
    from eval import commands

    commands.program(run, SpeedOptions)(arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--timed"]:
        timed(sys.argv[2:])
    else:
        main()
