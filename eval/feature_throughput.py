"""Whether stored features are read faster than training consumes them: positions per second, side by side.

    python -m eval.feature_throughput --output eval/results/features

The quickstart's predictor is trained for some steps on the shipped target's features, which tells how many positions a
second training takes by itself; then the same batches are read alone, from features in bfloat16 and in int8, of all
positions and of those that training needs, in a folder and by an address with copies. *From disk* is the first pass
after the files have been dropped from the system's memory (Linux), *again* the next one. Leave the machine alone
meanwhile.
"""

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import pytorch_lightning as pl
import torch
from tqdm import tqdm

from eval import commands
from shape import bundled
from shape.data.reading import load_conversations
from shape.evaluation.markdown import markdown
from shape.features.extraction import extract
from shape.features.storage import Storage
from shape.features.store import FeatureStore
from shape.features.trainer import quiet
from shape.files import human_bytes
from shape.target.model import Target
from shape.training.batches import Partition
from shape.training.datamodule import ShapeDataModule
from shape.training.options import TrainOptions
from shape.training.parsing import parse
from shape.training.preparation import Material
from shape.training.run import keep_freed_memory, make_module

STORES: dict[str, dict[str, Any]] = {
    "bfloat16": {"feature_dtype": "bfloat16"},
    "int8": {"feature_dtype": "int8"},
    "bfloat16, answers and their windows": {"feature_dtype": "bfloat16", "before": 8},
    "int8, answers and their windows": {"feature_dtype": "int8", "before": 8},
}
_WARM_UP = 5  # steps not counted


class Stopwatch(pl.Callback):
    """Seconds of each portion of a training step, from the batch at hand on, to the weights changed with the last."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_train_batch_start(self, *arguments: Any) -> None:
        self._started = perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        self.seconds.append(perf_counter() - self._started)


def consumed(store: FeatureStore, material: Material, options: TrainOptions) -> float:
    """Positions per second that training takes, reading left out: the median step's."""
    module, data = make_module(options, material, store)
    watch, parts = Stopwatch(), options.trainer.accumulate_grad_batches
    trainer = options.trainer.for_training(data.steps, logger=False, enable_checkpointing=False, callbacks=[watch])
    trainer.fit(module, data)
    steps = torch.tensor(watch.seconds).view(-1, parts).sum(1)[_WARM_UP:]
    return options.training.batch_size / float(steps.median())


def read(store: FeatureStore, target: Target, options: TrainOptions) -> float:
    """Positions per second of reading the batches of as many steps, and nothing else."""
    training, predictor = options.training, options.predictor
    assert training.steps is not None
    # Without `make_module`: the texts that it counts for a vocabulary would not come from the disk any more.
    data = ShapeDataModule(
        store, target, steps=training.steps, batch_size=training.batch_size, window=predictor.window,
        ahead=predictor.num_steps, seed=options.seed,
    )  # fmt: skip
    batches = data.batches(Partition())
    started = perf_counter()
    for index in tqdm(range(len(batches)), "read", leave=False, disable=not options.trainer.enable_progress_bar):
        batches[index]
    return len(batches) * training.batch_size / (perf_counter() - started)


def forget(folder: Path) -> None:
    """Drop the files of a folder from the system's memory."""
    for path in folder.glob("shard-*"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(work: Path, options: TrainOptions, limit: int | None) -> dict[str, Any]:
    """Figures of every store, and what training consumes."""
    target, trainer = Target.load(options.target), options.trainer.for_extraction()
    conversations = load_conversations(bundled.path("data", "answers.jsonl.gz"), limit=limit)
    wanted = options.feature_options()
    for name, how in STORES.items():
        chosen = replace(wanted, **how)
        extract(target, conversations, work / name, chosen, trainer).verify(target)
    material = Material([options], target, conversations, set(), [], [], Storage(work), trainer)
    rate = consumed(FeatureStore(work / "bfloat16"), material, options)
    lines = []
    for name in STORES:
        folder = work / name
        copies = Path(tempfile.mkdtemp(dir=work))
        size = sum(path.stat().st_size for path in folder.glob("shard-*"))
        for place in (str(folder), f"file://{folder.resolve()}"):
            forget(folder)
            store = FeatureStore(place, cache=copies)
            lines.append(
                {
                    "store": name,
                    "reached": "folder" if store.storage.folder else "address",
                    "bytes": size,
                    "bytes_per_position": size / store.tokens,
                    "from_disk": read(store, target, options),
                    "again": read(store, target, options),
                }
            )
    return {"consumed": rate, "lines": lines}


def table(found: dict[str, Any]) -> str:
    consumed = found["consumed"]
    rows = [
        [
            f"{line['store']}, {line['reached']}",
            human_bytes(line["bytes"]),
            f"{line['bytes_per_position']:.0f}",
            *(f"{line[name]:,.0f} ({line[name] / consumed:.1f}x)" for name in ("from_disk", "again")),
        ]
        for line in found["lines"]
    ]
    header = ["features", "size", "bytes per token", "positions/s from disk", "positions/s again"]
    return f"Training takes {consumed:,.0f} positions/s; in brackets how often reading covers that.\n\n" + markdown(
        header, rows
    )


@dataclass
class ThroughputOptions:
    """What to measure.

    Args:
        output: folder of throughput.json and throughput.md.
        work: folder of the features, kept; default: a temporary one.
        steps: training steps, and batches read.
        batch_size: positions per step.
        limit: conversations; default: all that ship.
        progress: whether bars are shown.
    """

    output: str = "throughput-results"
    work: str | None = None
    steps: int = 40
    batch_size: int = 1024
    limit: int | None = None
    progress: bool = True


def run(given: ThroughputOptions) -> None:
    sizes = [f"--training.steps={given.steps}", f"--training.batch_size={given.batch_size}"]
    options = parse([*sizes, f"--trainer.enable_progress_bar={given.progress}"])
    keep_freed_memory()
    with quiet(), tempfile.TemporaryDirectory() as temporary:
        found = measure(Path(given.work or temporary), options, given.limit)
    print(commands.write_results(Path(given.output), "throughput", found, "# Reading features", table(found)))


main = commands.program(run, ThroughputOptions)


if __name__ == "__main__":
    main()
