"""A training run: from conversations to an exported predictor with its measured speed-up.

The commands are `shape.cli.train` and, for several predictors at once, `shape.cli.joint`.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from os.path import expanduser
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from transformers import PreTrainedModel

from shape.data.conversations import fingerprint
from shape.errors import FeatureStoreError
from shape.features.extraction import extract
from shape.features.storage import Storage
from shape.features.store import FeatureStore
from shape.files import sole_writer
from shape.networks.base import Predictor
from shape.networks.registry import PREDICTORS
from shape.networks.sizing import draft_vocabulary
from shape.training.callbacks import CountFlops
from shape.training.checkpoints import SetAside, checkpoint_to_resume, set_aside
from shape.training.datamodule import ShapeDataModule
from shape.training.defaults import network_config
from shape.training.distillation import DistillModule, draft_model
from shape.training.joint import JointModule, require_alike
from shape.training.module import DrafterModule, ShapeModule
from shape.training.options import TrainOptions
from shape.training.order import derive_seed
from shape.training.preparation import Material, prepare, validation_prompts, writable
from shape.training.result import export_and_measure, throughput
from shape.training.trainer import make_trainer
from shape.training.validation import DecodingValidation
from shape.training.warm_start import as_checkpoint, start_from

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's mallopt


def train(options: TrainOptions) -> Path:
    """The whole way; returns the folder of the exported predictor. Only the first process exports and measures."""
    options = as_checkpoint(replace(options, output=expanduser(options.output)))
    options.check()
    home = Storage(options.output if options.online else options.features or Path(options.output) / "features")
    with _alone([options.output]):
        _train([options], [""], Path(options.output), home, options.ckpt_path)
    return Path(options.output)


def train_jointly(runs: Sequence[TrainOptions], output: str | Path, ckpt_path: str | None = None) -> list[Path]:
    """Train several on one forward of the target a step; each is exported and measured as by itself.

    Args:
        output: folder of what they share.

    Returns:
        The folders of the exported predictors.

    Raises:
        ConfigError: runs that cannot share a forward, before anything is loaded.
    """
    output = expanduser(str(output))
    runs = [as_checkpoint(run) for run in runs]
    names = require_alike(runs)
    with _alone([output, *(run.output for run in runs)]):
        _train(runs, names, Path(output), Storage(output), ckpt_path)
    return [Path(run.output) for run in runs]


@contextmanager
def _alone(outputs: Sequence[str | Path]) -> Iterator[None]:
    """Within it no other command trains into these folders, whose checkpoints it would move away.

    Raises:
        ConfigError: one does, or they cannot be written.
    """
    # The first process of a training holds the lock for all. Lightning's launcher tells machines apart by NODE_RANK.
    first = getattr(rank_zero_only, "rank", 0) == 0 and int(os.environ.get("NODE_RANK", 0)) == 0
    with ExitStack() as held:
        for output in dict.fromkeys(Path(output).resolve() for output in outputs):
            writable(output)
            if first:
                held.enter_context(sole_writer(output / ".train.lock", f"a training into {output}"))
        yield


def _train(
    runs: Sequence[TrainOptions], names: Sequence[str], output: Path, home: Storage, ckpt_path: str | None
) -> None:
    checkpoint = checkpoint_to_resume(ckpt_path, output)
    material = prepare(runs, home)
    runs, first = material.runs, material.runs[0]
    validations = [_validation(run, material, name) for run, name in zip(runs, names, strict=True)]
    counted = CountFlops()
    folders = list(dict.fromkeys([output, *(Path(run.output) for run in runs)]))
    own = (output / "checkpoints").resolve()
    elsewhere = checkpoint is not None and own not in Path(checkpoint).resolve().parents
    aside = [SetAside(folders)] if elsewhere else []
    trainer = make_trainer(first, material.target, output, [counted, *aside, *validations])
    store = None if first.online else _features(first, material)
    made = [make_module(run, material, store) for run in runs]
    modules, data = [module for module, _ in made], made[0][1]
    for module in modules:
        size = sum(parameter.numel() for parameter in module.predictor.parameters())
        rank_zero_only(print)(
            f"training: {size / 1e6:.1f}M parameters on {data.size} for at most {first.training.steps} steps of "
            f"{first.training.batch_size} positions",
            flush=True,
        )
    if checkpoint is None:
        for folder in folders:
            set_aside(folder)
    trained = modules[0] if len(modules) == 1 else JointModule(dict(zip(names, modules, strict=True)))
    told = {name: {**asdict(run), "token": None} for name, run in zip(names, runs, strict=True)}  # no secret
    for logger in trainer.loggers:
        logger.log_hyperparams(told if len(runs) > 1 else told[""])
    trainer.fit(trained, data, ckpt_path=checkpoint, weights_only=True)
    if trainer.is_global_zero:
        validating = sum(validation.seconds for validation in validations)
        seconds = round(modules[0].seconds, 1)
        record: dict[str, Any] = {"answers": material.answers, "examples": data.size, "seconds": seconds}
        record |= throughput(first, modules[0], modules[0].seconds - validating, counted)
        if len(runs) > 1:  # of all, as it cannot be told apart
            record |= {"joint": list(names), "validation_seconds": round(validating, 1)}
        for run, module, validation in zip(runs, modules, validations, strict=True):
            export_and_measure(run, module, validation, material.prompts, record)


def _features(options: TrainOptions, material: Material) -> FeatureStore:
    """The feature store: extracted, completed, or an existing one after checking that it is the target's."""
    wanted = options.feature_options()
    states = _incomplete if options.shard_target else None
    store = extract(material.target, material.conversations, material.home, wanted, material.trainer, states)
    if not options.shard_target:  # which is in the host's memory yet, where it would compute for minutes
        store.verify(material.target, seed=options.seed)
    return store


def _incomplete(*_: Any) -> NoReturn:
    """In the place of a target that fits into no device."""
    raise FeatureStoreError(
        "some of the features are missing or damaged, and with shard_target none are computed; complete them with "
        "shape extract, by --device_map auto or an --endpoint, or give --online true"
    )


def _validation(options: TrainOptions, material: Material, name: str) -> DecodingValidation:
    return DecodingValidation(
        validation_prompts(material.for_validation, material.target, options),
        cast(int, options.validation.every),
        options.validation.max_new_tokens,
        Path(options.output) / "checkpoints/best.safetensors",
        name,
        at_start=options.init is not None,
        patience=options.validation.patience,
        tree=options.tree,
        asked=fingerprint(material.for_validation),
    )


def make_module(
    options: TrainOptions, material: Material, store: FeatureStore | None
) -> tuple[DrafterModule, ShapeDataModule]:
    """A network to train, and its batches: of a feature store, or of the conversations in online mode."""
    target, chosen, config = material.target, options.predictor, network_config(options, material.target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(options.seed, "weights"))
        predictor: PreTrainedModel = (
            draft_model(target, chosen.intermediate_size, chosen.num_layers, chosen.num_heads)
            if config is None
            else PREDICTORS[config.kind](config)
        )
    data = ShapeDataModule(
        material.conversations if store is None else store,
        target,
        steps=cast(int, options.training.steps),
        batch_size=options.training.batch_size,
        workers=options.training.workers,
        window=chosen.known_states,
        ahead=1 if config is None else config.num_steps,
        exclude=material.excluded,
        max_length=cast(int, options.max_length),
        skip_bad_rows=options.skip_bad_rows,
        seed=options.seed,
    )
    if isinstance(predictor, Predictor) and options.init is not None:
        start_from(predictor, options, target)
    elif isinstance(predictor, Predictor):
        if (size := predictor.config.draft_vocab_size) is not None:
            predictor.draft_vocabulary = draft_vocabulary(data.texts(), size, target.vocab_size)
        predictor.adopt(target)
    kind: type[DrafterModule] = DistillModule if config is None else ShapeModule
    module = kind(
        predictor,
        target,
        options.losses,
        options.training,
        seed=options.seed,
        log_every=options.trainer.log_every_n_steps,
        recipe=_recipe(options, material, in_pools=options.online or chosen.known_states is None),
    )
    return module, data


def _recipe(options: TrainOptions, material: Material, in_pools: bool) -> dict[str, Any]:
    """What defines a run beside its losses and optimisation: a checkpoint of another recipe is refused.

    Args:
        in_pools: whether texts are batched by size (`shape.training.batches.WholeTextBatches`).
    """
    shuffled = "in pools by size" if in_pools else "as a whole" if material.home.folder else "by shards"
    # Of these alone, as other options of validation hold out others of the same data.
    learned = (each for number, each in enumerate(material.conversations) if number not in material.excluded)
    return {
        "predictor": asdict(options.predictor),
        "init": options.init,
        "target": material.target.identity.head_hash,
        "online": options.online,
        "shuffled": shuffled,
        "max_length": options.max_length,
        "conversations": fingerprint(learned)[:16],
        "precision": options.trainer.chosen_precision(),
        "gradient_clip_val": options.trainer.gradient_clip_val,
        "gradient_clip_algorithm": options.trainer.more.get("gradient_clip_algorithm"),
    }


def keep_freed_memory() -> None:
    """Keep what is freed for the next step: every step asks for the same hundreds of megabytes, and fetching them anew
    from Linux costs a CPU a third to a half of its time. For the process from now on; without glibc nothing happens.
    """
    with suppress(OSError, AttributeError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
