"""What a predictor learns from: the target's hidden states, stored in shards or computed on the fly.

The work is done shard by shard (`shape.features.store`), each as a whole, so an interrupted extraction continues where
it stopped, and its bytes are those of an undisturbed one.
"""

import logging
import math
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from filelock import FileLock
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.utils import logging as transformers_logging

from shape.data.conversations import Conversation, Encoded, encode, fingerprint, unfolded
from shape.errors import ConfigError, DataError, DiskSpaceError, FeatureStoreError
from shape.features.storage import Place
from shape.features.store import (
    MANIFEST,
    FeatureStore,
    Manifest,
    eligible,
    is_sound,
    kept,
    missing_shards,
    quantised,
    shard_name,
    write_shard,
)
from shape.files import written_whole
from shape.target.model import Target

_ESTIMATE_SAMPLE = 256
_LONGEST = 1024
_STORABLE = ("float32", "bfloat16", "float16", "int8")


@dataclass
class TrainerOptions:
    """Options of Lightning's Trainer, under its names and with its meaning, for extraction and training alike.

    Attributes:
        accelerator: cpu, cuda, mps, or auto.
        devices: how many, a list of indices, or auto.
        num_nodes: machines.
        strategy: ddp for several devices; fsdp where the predictor, its gradients and its optimiser are too large for
            one (GPUs only); auto chooses.
        precision: of training, for example 32-true; auto is bf16-mixed where the hardware multiplies in bfloat16.
            Extraction runs in the target's own dtype.
        accumulate_grad_batches: portions that a step's batch is computed in, to save memory.
        gradient_clip_val: largest norm of the gradients; null does not clip.
        log_every_n_steps: steps between logged metrics.
        enable_progress_bar: show one.
        deterministic: refuse operations that are not reproducible on an accelerator.
    """

    accelerator: str = "auto"
    devices: int | str | list[int] = "auto"
    num_nodes: int = 1
    strategy: str = "auto"
    precision: str = "auto"
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = 1.0
    log_every_n_steps: int = 20
    enable_progress_bar: bool = True
    deterministic: bool = False

    def chosen_precision(self) -> str:
        """What auto stands for on this machine."""
        if self.precision != "auto":
            return self.precision
        if self.accelerator in ("auto", "cuda", "gpu") and torch.cuda.is_available():
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
        else:  # Lightning would prefer mps where there is one, and that has no fast bfloat16 to rely on
            on_cpu = self.accelerator == "cpu" or not torch.backends.mps.is_available()
            fast = on_cpu and torch.cpu._is_avx512_bf16_supported()  # type: ignore[attr-defined]
        return "bf16-mixed" if fast else "32-true"

    def for_extraction(self) -> pl.Trainer:
        """A Trainer for `extract`. No inference mode: its tensors could not be used in training afterwards."""
        return pl.Trainer(
            accelerator=self.accelerator,
            devices=self.devices,
            num_nodes=self.num_nodes,
            strategy="ddp" if self.strategy.startswith("fsdp") else self.strategy,  # nothing is trained
            enable_progress_bar=self.enable_progress_bar,
            inference_mode=False,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )


@dataclass
class StorageOptions:
    """How features are written and read; no influence on what is learned but for the rounding of `dtype`.

    Attributes:
        dtype: of the stored states (float32, bfloat16, float16, or int8 with a scale for each state); null is the
            target's own.
        before: states stored before each answer, beside the answer's own: the predictor's window suffices where it does
            not attend to the whole text; null stores all.
        batch_size: conversations per forward of the target.
        shard_size: conversations per shard, the unit of work and of resuming.
        more_layers: layers stored beside those that are read, so that predictors of other layers can share the folder.
        cache: folder below which copies of shards from elsewhere (s3://...) are kept; null is ~/.cache/shape.
        cache_gigabytes: that the copies may take.
    """

    dtype: str | None = None
    before: int | None = None
    batch_size: int = 8
    shard_size: int = 128
    more_layers: list[int] = field(default_factory=list)
    cache: str | None = None
    cache_gigabytes: float = 50.0


@dataclass
class FeatureOptions(StorageOptions):
    """Which features are computed, and how they are stored.

    Attributes:
        max_length: tokens kept of each conversation; null is 1,024, or as many as the target has positions.
        skip_bad_rows: count malformed rows and go on; chats that the template refuses are stored empty.
        layers: -1 is h, the vector that enters the output embedding; k >= 0 is the output of block k. h comes
            last: it is what predictors predict.
    """

    max_length: int | None = None
    layers: list[int] = field(default_factory=lambda: [-1])
    skip_bad_rows: bool = False

    @property
    def stored(self) -> tuple[int, ...]:
        """All layers of the folder: those that are read, behind others."""
        return (*sorted(set(self.more_layers) - set(self.layers)), *self.layers)

    def check(self, target: Target) -> None:
        """Raises ConfigError for values that cannot be meant, before any work is done."""
        self.check_for(target.name, target.max_positions, target.config.num_hidden_layers)

    def check_for(self, target: str, positions: int | None, depth: int) -> None:
        """The same where the target is known by name, positions and number of blocks alone."""
        for name in ("max_length", "batch_size", "shard_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; give a positive number")
        if self.dtype is not None and self.dtype not in _STORABLE:
            raise ConfigError(f"dtype is {self.dtype}; features are stored in {', '.join(_STORABLE)}")
        if self.before is not None and self.before < 1:
            raise ConfigError(f"before is {self.before}; give a positive number of states, or null for all")
        if longest(self.max_length, positions) > (positions or math.inf):
            raise ConfigError(
                f"max_length is {self.max_length}, but target {target} has {positions} positions; "
                f"give max_length {positions} or less"
            )
        if not self.layers or self.layers[-1] != -1:
            raise ConfigError(f"layers are {self.layers}; end them in -1, the state that predictors predict")
        if len(set(self.layers)) < len(self.layers):
            raise ConfigError(f"layers {self.layers} name one twice; give each once")
        if wrong := [layer for layer in self.stored if not -1 <= layer <= depth]:
            raise ConfigError(f"layers {wrong} do not exist in target {target}; its blocks are 0 to {depth}")


def longest(max_length: int | None, positions: int | None) -> int:
    """Tokens kept of each conversation: as given, or 1,024 as far as the target's positions reach."""
    return max_length if max_length is not None else min(_LONGEST, positions or _LONGEST)


def planned(target: Target, conversations: Sequence[Conversation], options: FeatureOptions) -> Manifest:
    """The manifest that extraction with these arguments would write."""
    return Manifest(
        target=target.identity,
        layers=options.stored,
        dtype=options.dtype or str(target.dtype).removeprefix("torch."),
        hidden_size=target.hidden_size,
        max_length=longest(options.max_length, target.max_positions),
        shard_size=options.shard_size,
        conversations=len(conversations),
        fingerprint=fingerprint(conversations),
        before=options.before,
    )


def compute_features(target: Target, batch: Sequence[Encoded], layers: Sequence[int] = (-1,)) -> Tensor:
    """States of a batch of conversations, (B, T, layers * H) in the target's dtype, on its device.

    T is the longest conversation; rows past a conversation's end hold states of padding, to be ignored. The
    store and the online mode both call this, the latter within a step whose autocast has no say here.
    """
    lengths = [max(1, len(encoded.input_ids)) for encoded in batch]
    ids = torch.zeros(len(batch), max(lengths), dtype=torch.int64)
    for row, encoded in enumerate(batch):
        ids[row, : len(encoded.input_ids)] = encoded.input_ids
    with torch.autocast(target.device.type, enabled=False):
        return target.features(ids.to(target.device), layers, lengths)


def rows_of(target: Target, conversations: Sequence[Conversation]) -> list[list[Conversation]]:
    """What features are computed of, for each conversation: see `shape.data.conversations.unfolded`.

    Raises:
        DataError: token ids that the target does not have.
    """
    for conversation in conversations:
        largest = max((max(text.input_ids, default=0) for text in conversation.texts), default=0)
        if largest >= target.vocab_size:
            raise DataError(
                f"conversation {conversation.id} holds token {largest}, and target {target.name} has "
                f"{target.vocab_size} tokens; give token ids that were made for it"
            )
    return unfolded(conversations, target.tokenizer)


def encode_row(conversation: Conversation, tokenizer: Any, max_length: int, skip_bad_rows: bool) -> Encoded:
    """`encode`, where with `skip_bad_rows` a chat that the template refuses becomes an empty text."""
    try:
        return encode(conversation, tokenizer, max_length)
    except DataError:
        if not skip_bad_rows:
            raise
        return Encoded(conversation.id, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool))


def place(target: Target, device: torch.device) -> None:
    """Move the target beside what is trained, unless its own `device_map` spreads it over several devices."""
    # Asked only where there is something to move: some quantised models refuse to be.
    if target.device != device and getattr(target.model, "hf_device_map", None) is None:
        target.model.to(device)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep libraries to the progress bars of the work itself: no tips, and no hints that do not apply here."""
    transformers_logging.disable_progress_bar()
    log = logging.getLogger("pytorch_lightning.utilities.rank_zero")
    level = log.level
    log.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*overridden `transfer_batch_to_device`.*")
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        try:
            yield
        finally:
            log.setLevel(level)
            transformers_logging.enable_progress_bar()


def extract(
    target: Target,
    conversations: Sequence[Conversation],
    address: str | Path | Place,
    options: FeatureOptions,
    trainer: pl.Trainer,
) -> FeatureStore:
    """Compute the features of conversations into a store, or what is missing of them.

    The Trainer decides about devices, processes and nodes; each process takes every world-size-th shard.
    Interrupt it and call it again: complete shards are kept, once the checksums of those in a folder are found right.
    Where another command of one process is at the same folder, this one waits and takes what that one made.

    Args:
        conversations: each of one text, as `rows_of` makes them.
        address: a folder, or what fsspec reaches.

    Raises:
        ConfigError, DataError: options or conversations that cannot be used.
        FeatureStoreError: the store holds features made from something else, or the target's states are not finite.
        DiskSpaceError: less free space than the estimate, or none left.
    """
    options.check(target)
    if not conversations:
        raise DataError("there are no conversations to compute features of; give data with at least one")
    place = Place(address)
    manifest = _claim(place, planned(target, conversations, options))
    # Processes of one command share the shards; another command would compute all of them again.
    alone = trainer.world_size == 1 and place.folder is not None
    with FileLock(Path(place.address) / ".lock") if alone else nullcontext():
        if missing := missing_shards(place, manifest):
            _check_space(place, manifest, missing, *_estimate(target, conversations, options, manifest, missing))
        # Also where none is missing: each process looks whether its shards still hold what was written, and no process
        # decides by a look of its own at the store whether to take part.
        work = _Extraction(target, conversations, place, manifest, options)
        trainer.predict(work, return_predictions=False)
    trainer.strategy.barrier("features are complete")
    cache = None if options.cache is None else Path(options.cache)
    return FeatureStore(place, target.identity, options.layers, cache, int(options.cache_gigabytes * 1e9))


class _Extraction(pl.LightningModule):
    """One batch is one shard; nothing is trained."""

    def __init__(
        self,
        target: Target,
        conversations: Sequence[Conversation],
        place: Place,
        manifest: Manifest,
        options: FeatureOptions,
    ) -> None:
        super().__init__()
        self.target = target
        self.conversations = conversations
        self.place = place
        self.manifest = manifest
        self.options = options

    def predict_dataloader(self) -> DataLoader:
        # Every process runs the same number of steps, also with nothing left to do, and decides by itself
        # what is missing: no process waits for another.
        rank, world = self.trainer.global_rank, self.trainer.world_size
        steps = math.ceil(self.manifest.shards / world)
        return DataLoader(range(rank, steps * world, world), batch_size=None)  # type: ignore[arg-type]

    def on_predict_start(self) -> None:
        place(self.target, self.trainer.strategy.root_device)
        self.missing = set(missing_shards(self.place, self.manifest))

    def predict_step(self, shard: int) -> int:
        if shard >= self.manifest.shards:
            return shard
        damaged = shard not in self.missing and not is_sound(self.place, self.manifest, shard)
        if damaged:
            print(f"{shard_name(shard)} of {self.place} is damaged and is computed again", flush=True)
        if damaged or shard in self.missing:
            write_shard(self.place, self.manifest, shard, self._compute(shard))
        return shard

    def _compute(self, shard: int) -> dict[str, Tensor]:
        manifest = self.manifest
        samples = [self._encode(index) for index in manifest.conversations_of(shard)]
        lengths = torch.tensor([0, *(len(sample.input_ids) if sample else 0 for sample in samples)])
        offsets = lengths.cumsum(0)
        texts = [sample for sample in samples if sample]
        ids = torch.cat([torch.empty(0, dtype=torch.int32), *(text.input_ids.int() for text in texts)])
        mask = torch.cat([torch.empty(0, dtype=torch.bool), *(text.loss_mask for text in texts)])
        stored = kept(mask, offsets, manifest.before)
        number = stored.cumsum(0) - stored.long()  # of states before each row's own
        hidden = torch.empty(int(stored.sum()), manifest.width, dtype=manifest.stored_dtype)
        scale = torch.empty(len(hidden), len(manifest.layers), dtype=torch.bfloat16)
        # Batches of similar length, formed inside the shard: the same on every run.
        order = sorted((index for index, sample in enumerate(samples) if sample), key=lambda i: int(lengths[i + 1]))
        for start in range(0, len(order), self.options.batch_size):
            chosen = order[start : start + self.options.batch_size]
            batch = [sample for index in chosen if (sample := samples[index]) is not None]
            states = compute_features(self.target, batch, manifest.layers).cpu()
            for index, rows in zip(chosen, states, strict=True):
                span = slice(int(offsets[index]), int(offsets[index + 1]))
                own = rows[: lengths[index + 1]][stored[span]].to(manifest.read_dtype)
                self._require_finite(own, manifest.conversations_of(shard)[index])
                at = slice(int(number[span.start]), int(number[span.start]) + len(own))
                if manifest.dtype == "int8":
                    hidden[at], scale[at] = quantised(own, manifest.hidden_size)
                else:
                    hidden[at] = own
        tensors = {"input_ids": ids, "loss_mask": mask, "hidden": hidden, "offsets": offsets}
        return {**tensors, "scale": scale} if manifest.dtype == "int8" else tensors

    def _require_finite(self, states: Tensor, number: int) -> None:
        if not states.isfinite().all():
            raise FeatureStoreError(
                f"target {self.target.name} computes states of conversation {self.conversations[number].id} that are "
                f"not finite in {self.manifest.dtype} (run in {self.target.dtype}); give another dtype, such as "
                "--target_dtype bfloat16, or leave the conversation out"
            )

    def _encode(self, index: int) -> Encoded | None:
        """The conversation's tokens, or None (stored as empty) where they hold nothing to learn from."""
        limit, tokenizer = self.manifest.max_length, self.target.tokenizer
        encoded = encode_row(self.conversations[index], tokenizer, limit, self.options.skip_bad_rows)
        whole = torch.tensor([0, len(encoded.input_ids)])
        return encoded if bool(eligible(encoded.loss_mask, whole).any()) else None


def _claim(place: Place, manifest: Manifest) -> Manifest:
    """Write the manifest, or return the one there after making sure that it means the same."""
    try:
        if place.exists(MANIFEST):
            present = Manifest.read(place)
            if differences := present.differences(manifest):
                raise FeatureStoreError(
                    f"features in {place} were made from something else: they differ in {', '.join(differences)}; "
                    "give another folder, or delete this one"
                )
            return present
        if place.folder is None:
            place.write(MANIFEST, manifest.to_json().encode())
        else:
            with written_whole(place.folder / MANIFEST, writer=f".{os.getpid()}") as temporary:
                temporary.write_text(manifest.to_json())
        return manifest
    except OSError as error:
        raise ConfigError(f"feature folder {place} cannot be written ({error}); give another folder") from error


def _estimate(
    target: Target,
    conversations: Sequence[Conversation],
    options: FeatureOptions,
    manifest: Manifest,
    missing: list[int],
) -> tuple[int, int]:
    """Tokens and bytes of the missing shards, from the lengths of a sample of conversations."""
    todo = [index for shard in missing for index in manifest.conversations_of(shard)]
    sample = todo[:: max(1, len(todo) // _ESTIMATE_SAMPLE)]
    rows = (
        encode_row(conversations[index], target.tokenizer, manifest.max_length, options.skip_bad_rows)
        for index in sample
    )
    counts = []
    for row in rows:
        whole = torch.tensor([0, len(row.input_ids)])
        counts.append((len(row.input_ids), int(kept(row.loss_mask, whole, manifest.before).sum())))
    tokens, states = (math.ceil(sum(each) / len(each) * len(todo)) for each in zip(*counts, strict=True))
    text = 5 * tokens + 8 * len(todo)  # int32 ids and mask, offsets
    return tokens, states * manifest.bytes_per_state + text + 512 * len(missing)


def _check_space(place: Place, manifest: Manifest, missing: list[int], tokens: int, size: int) -> None:
    free = math.inf if place.folder is None else shutil.disk_usage(place.folder).free
    room = "" if place.folder is None else f" ({human_bytes(free)} free)"
    summary = (
        f"features: about {tokens:,} tokens x {len(manifest.layers)} layer(s) x {manifest.hidden_size} in "
        f"{manifest.dtype}, about {human_bytes(size)}, in {len(missing)} shard(s) to {place}{room}"
    )
    if size > free:
        raise DiskSpaceError(
            f"{summary}: the disk is too small; lower max_length, limit or the number of layers, use the online mode, "
            "or give another folder"
        )
    rank_zero_only(print)(summary, flush=True)


def human_bytes(size: float) -> str:
    """For people: 3 digits and a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"
