"""Small trainings, which the tests of examples, batches, training and export share."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytorch_lightning as pl
import torch
from helpers import write_rows
from pytorch_lightning.callbacks import Checkpoint

from shape.data.conversations import Conversation
from shape.features.extraction import extract
from shape.features.options import FeatureOptions
from shape.features.store import FeatureStore
from shape.features.trainer import TrainerOptions
from shape.networks.base import Predictor
from shape.networks.config import ShapeConfig
from shape.networks.registry import PREDICTORS
from shape.networks.sizing import draft_vocabulary
from shape.target.chat import Message
from shape.training.batches import Batch, Partition
from shape.training.checkpoints import AtomicCheckpointIO
from shape.training.datamodule import ShapeDataModule
from shape.training.module import ShapeModule
from shape.training.options import Losses, TrainingOptions

WINDOW, STEPS = 3, 3
OPTIONS = TrainingOptions(steps=8, batch_size=16, learning_rate=3e-3, warmup_steps=2)


def talk(number: int) -> Conversation:
    messages = []
    for turn in range(1 + number % 2):
        messages += [
            Message("user", f"{turn}? " + "hm " * (number % 4)),
            Message("assistant", f"yes, {number}!"),
        ]
    return Conversation(f"c{number}", tuple(messages))


CONVERSATIONS = [talk(number) for number in range(9)]


# Answers of 1 to 112 tokens; those of 1 have no root.
UNEQUAL = [
    Conversation(f"u{size}", (Message("user", "?"), Message("assistant", "yes" * size)))
    for size in (1, 5, 0, 37, 1, 11, 1, 2, 21)
]


def extraction_trainer() -> pl.Trainer:
    """On one CPU, without a bar."""
    return TrainerOptions(accelerator="cpu", devices=1, enable_progress_bar=False).for_extraction()


def extracted(target, folder: Path, conversations: Sequence[Conversation] = CONVERSATIONS) -> FeatureStore:
    """The last layer of a store that holds several."""
    options = FeatureOptions(max_length=160, shard_size=4, layers=[0, 1, 2, -1])
    extract(target, conversations, folder, options, extraction_trainer())
    return FeatureStore(folder, layers=[-1])


def data_of(source, target, options=OPTIONS, window: int | None = WINDOW, **others) -> ShapeDataModule:
    sizes = {"steps": options.steps, "batch_size": options.batch_size}
    return ShapeDataModule(source, target, **sizes, window=window, ahead=STEPS, **others)


def portions(data: ShapeDataModule, step: int, world: int, accumulate: int) -> list[Batch]:
    """All of a step, in the order of their numbers."""
    pairs = product(range(accumulate), range(world))
    found = [data.batches(Partition(rank, world, accumulate))[step * accumulate + each] for each, rank in pairs]
    assert [(batch.step, batch.part, batch.parts) for batch in found] == [
        (step, part, len(found)) for part in range(len(found))
    ]
    return found


def network(target, seed: int = 0, **changes) -> Predictor:
    values = {"step_mode": "recursive", "token_conditioning": "path", **changes}
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    config = ShapeConfig(window=WINDOW, num_steps=STEPS, **{**sizes, **values})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return PREDICTORS[config.kind](config)


def trainable(target, **changes) -> Predictor:
    """The same with every weight away from its special initial value, and whatever it draws from at hand."""
    predictor = network(target, **changes)
    for weight in predictor.parameters():
        torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(0))
    if predictor.draft_vocabulary is not None:
        predictor.draft_vocabulary = torch.arange(len(predictor.draft_vocabulary))
    predictor.complete(target)
    return predictor


def fit(
    target,
    source,
    *,
    options=OPTIONS,
    seed=0,
    losses=None,
    accumulate=1,
    callbacks=(),
    ckpt_path=None,
    precision="32-true",
    **changes,
) -> ShapeModule:
    predictor = network(target, **changes)
    if isinstance(source, FeatureStore):
        source = FeatureStore(source.storage, layers=predictor.config.target_layers)
    window = None if predictor.memory_shapes else predictor.config.window
    module = ShapeModule(predictor, target, losses or Losses(), options, seed=seed, log_every=2)
    data = data_of(source, target, options, window=window, max_length=160, seed=seed)
    if predictor.draft_vocabulary is not None:
        predictor.draft_vocabulary = draft_vocabulary(data.texts(), len(predictor.draft_vocabulary), target.vocab_size)
    predictor.adopt(target)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=options.steps,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        precision=precision,
        logger=False,
        enable_checkpointing=any(isinstance(each, Checkpoint) for each in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        log_every_n_steps=2,
        callbacks=list(callbacks),
        plugins=[AtomicCheckpointIO()],
    )
    trainer.fit(module, data, ckpt_path=ckpt_path, weights_only=True)
    return module


def weights(module: ShapeModule) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.predictor.parameters()])


class SaveAt(pl.Callback):
    """Writes a checkpoint at a step, once."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *args) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


# ------------------------------------------------------------------------------------------------- by the command


def write_conversations(path: Path, count: int = 60) -> Path:
    """A file of conversations."""
    rows = (
        {"id": f"c{i}", "conversations": [
            {"from": "human", "value": "say " + "a b c " * (i % 6)}, {"from": "gpt", "value": f"there: {i}, done"},
        ]}
        for i in range(count)
    )  # fmt: skip
    return write_rows(path, *rows)


def arguments(target: Path, data: Path, output: Path, *more: str) -> list[str]:
    """Of a short run of `shape.train` on a CPU."""
    options = {
        "target": target,
        "data": data,
        "output": output,
        "regenerate": "false",
        "max_length": 128,
        "training.steps": 60,
        "training.batch_size": 16,
        "training.noise": 0.1,
        "training.checkpoint_every": 7,
        "validation.every": 25,
        "validation.prompts": 3,
        "validation.max_new_tokens": 8,
        "measurement.limit": 0,
        "extraction.shard_size": 8,
        "trainer.accelerator": "cpu",
        "trainer.devices": 1,
        "trainer.log_every_n_steps": 5,
        "trainer.enable_progress_bar": "false",
    }
    if not any(one.startswith("--predictor.kind=") for one in more):
        options["predictor.dropout"] = 0.1
    return [*(f"--{name}={value}" for name, value in options.items()), *more]


def ended(output: Path) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Of the last checkpoint: its weights, and the steps after which was validated."""
    saved = torch.load(output / "checkpoints/last.ckpt", weights_only=True)
    (history,) = (state["history"] for key, state in saved["callbacks"].items() if "DecodingValidation" in key)
    return saved["state_dict"], [entry["step"] for entry in history]


def require_the_same_end(mine: Path, theirs: Path) -> None:
    """Of two runs, bit for bit: what training ended in, and what it exports, which may be of a much earlier step."""
    (weights, validated), (expected, wanted) = ended(mine), ended(theirs)
    assert validated == wanted and weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
    assert (mine / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()


def command(*parts: str) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.Popen(
        [sys.executable, "-m", "shape.train", *parts],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill_when(process: subprocess.Popen, path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
