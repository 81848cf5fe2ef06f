"""What a predictor learns from: the target's hidden states, stored in shards or computed on the fly.

A feature folder holds `manifest.json` and `shard-00000.safetensors`, `shard-00001.safetensors`, ... Each
shard covers a fixed range of conversations, laid end to end:

    input_ids  (rows,) int32          loss_mask  (rows,) bool
    hidden     (rows, layers * H)     offsets    (conversations + 1,) int64, first row of each conversation

A shard is computed and written as a whole, under a temporary name first, so a folder holds only complete
shards, an interrupted extraction continues where it stopped, and its bytes are those of an undisturbed one.
"""

import hashlib
import json
import logging
import math
import os
import shutil
import warnings
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from filelock import FileLock
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.utils import logging as transformers_logging

from shape.conversations import Conversation, Encoded, encode, fingerprint
from shape.errors import ConfigError, DataError, DiskSpaceError, FeatureStoreError, TargetMismatch
from shape.files import written_whole
from shape.target import Target, TargetIdentity, resolve_dtype

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
_ESTIMATE_SAMPLE = 256
# Relative error of a state recomputed in another batch shape; a wrong target or a shifted position gives
# about 1.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}


@dataclass
class TrainerOptions:
    """Options of Lightning's Trainer, under its names and with its meaning, for extraction and training alike.

    Attributes:
        accelerator: cpu, cuda, mps, or auto.
        devices: how many, a list of indices, or auto.
        num_nodes: machines.
        strategy: ddp for several devices; auto chooses.
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
            strategy=self.strategy,
            enable_progress_bar=self.enable_progress_bar,
            inference_mode=False,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )


@dataclass
class StorageOptions:
    """How features are written; no influence on what is learned but for the rounding of `dtype`.

    Attributes:
        dtype: of the stored states (float32, bfloat16, float16); null is the target's own.
        batch_size: conversations per forward of the target.
        shard_size: conversations per shard, the unit of work and of resuming.
        more_layers: layers stored beside those that are read, so that predictors of other layers can share the folder.
    """

    dtype: str | None = None
    batch_size: int = 8
    shard_size: int = 128
    more_layers: list[int] = field(default_factory=list)


@dataclass
class FeatureOptions(StorageOptions):
    """Which features are computed, and how they are stored.

    Attributes:
        max_length: tokens kept of each conversation.
        skip_bad_rows: count malformed rows and go on; chats that the template refuses are stored empty.
        layers: -1 is h, the vector that enters the output embedding; k >= 0 is the output of block k. h comes
            last: it is what predictors predict.
    """

    max_length: int = 1024
    layers: list[int] = field(default_factory=lambda: [-1])
    skip_bad_rows: bool = False

    @property
    def stored(self) -> tuple[int, ...]:
        """All layers of the folder: those that are read, behind others."""
        return (*sorted(set(self.more_layers) - set(self.layers)), *self.layers)

    def check(self, target: Target) -> None:
        """Raises ConfigError for values that cannot be meant, before any work is done."""
        for name in ("max_length", "batch_size", "shard_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a positive number")
        if target.max_positions is not None and self.max_length > target.max_positions:
            raise ConfigError(
                f"max_length is {self.max_length}, but target {target.name} has {target.max_positions} positions; "
                f"give max_length {target.max_positions} or less"
            )
        if not self.layers or self.layers[-1] != -1:
            raise ConfigError(f"layers are {self.layers}; end them in -1, the state that predictors predict")
        if len(set(self.layers)) < len(self.layers):
            raise ConfigError(f"layers {self.layers} name one twice; give each once")
        depth = target.config.num_hidden_layers
        if wrong := [layer for layer in self.stored if not -1 <= layer <= depth]:
            raise ConfigError(f"layers {wrong} do not exist in target {target.name}; its blocks are 0 to {depth}")


@dataclass(frozen=True)
class Manifest:
    """What a feature folder was made from; two folders with equal manifests hold the same features."""

    target: TargetIdentity
    layers: tuple[int, ...]
    dtype: str
    hidden_size: int
    max_length: int
    shard_size: int
    conversations: int
    fingerprint: str
    format_version: int = FORMAT_VERSION

    @classmethod
    def plan(cls, target: Target, conversations: Sequence[Conversation], options: FeatureOptions) -> "Manifest":
        """The manifest that extraction with these arguments would write."""
        return cls(
            target=target.identity,
            layers=options.stored,
            dtype=str(resolve_dtype(options.dtype) or target.dtype).removeprefix("torch."),
            hidden_size=target.hidden_size,
            max_length=options.max_length,
            shard_size=options.shard_size,
            conversations=len(conversations),
            fingerprint=fingerprint(conversations),
        )

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        try:
            values = json.loads((directory / MANIFEST).read_text())
            if values["format_version"] != FORMAT_VERSION:
                raise FeatureStoreError(
                    f"feature folder {directory} has format {values['format_version']}, this version reads "
                    f"{FORMAT_VERSION}; extract it again"
                )
            values["target"] = TargetIdentity.from_dict(values["target"])
            values["layers"] = tuple(values["layers"])
            return cls(**values)
        except FileNotFoundError:
            raise FeatureStoreError(
                f"{directory} is not a feature folder: it has no {MANIFEST}; make one with python -m shape.extract"
            ) from None
        except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise FeatureStoreError(
                f"{directory / MANIFEST} is damaged ({error!r}); extract again into an empty folder"
            ) from error

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"

    @property
    def digest(self) -> str:
        """Written into every shard, so that a stray shard of another extraction is never read."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @property
    def shards(self) -> int:
        return math.ceil(self.conversations / self.shard_size)

    @property
    def width(self) -> int:
        return len(self.layers) * self.hidden_size

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def conversations_of(self, shard: int) -> range:
        start = shard * self.shard_size
        return range(start, min(start + self.shard_size, self.conversations))

    def differences(self, other: "Manifest") -> list[str]:
        """Phrases naming what differs from what is wanted. The target's name and the shard size do not count, nor do
        layers beyond those wanted.
        """
        found = [f"target's {phrase}" for phrase in self.target.differences(other.target)]
        if self.fingerprint != other.fingerprint:
            found.append("the conversations")
        if not set(other.layers) <= set(self.layers):
            found.append(f"layers ({self.layers} there, {other.layers} wanted)")
        for name in ("dtype", "max_length"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                found.append(f"{name} ({mine} there, {theirs} wanted)")
        return found


class Stored(NamedTuple):
    """One conversation of a store: input_ids (T,) int64, loss_mask (T,) bool, hidden (T, layers * H)."""

    input_ids: Tensor
    loss_mask: Tensor
    hidden: Tensor


def compute_features(target: Target, batch: Sequence[Encoded], layers: Sequence[int] = (-1,)) -> Tensor:
    """States of a batch of conversations, (B, T, layers * H) in the target's dtype, on its device.

    T is the longest conversation; rows past a conversation's end hold states of padding, to be ignored. The
    store and the online mode both call this.
    """
    length = max(1, *(len(encoded.input_ids) for encoded in batch))
    ids = torch.zeros(len(batch), length, dtype=torch.int64)
    for row, encoded in enumerate(batch):
        ids[row, : len(encoded.input_ids)] = encoded.input_ids
    return target.features(ids.to(target.device), layers=layers)


def encode_row(conversation: Conversation, tokenizer: Any, max_length: int, skip_bad_rows: bool) -> Encoded:
    """`encode`, where with `skip_bad_rows` a chat that the template refuses becomes an empty text."""
    try:
        return encode(conversation, tokenizer, max_length)
    except DataError:
        if not skip_bad_rows:
            raise
        return Encoded(conversation.id, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool))


def eligible(loss_mask: Tensor, offsets: Tensor) -> Tensor:
    """Rows that can be the root of an example: x_t and x_{t+1} are supervised, and t >= 1.

    Args:
        loss_mask: (rows,) bool, conversations end to end.
        offsets: (conversations + 1,) int64, first row of each conversation and the end.

    Returns:
        (rows,) bool.
    """
    first = torch.zeros(len(loss_mask) + 1, dtype=torch.bool)
    first[offsets] = True
    following = torch.cat([loss_mask[1:], loss_mask.new_zeros(1)])
    return loss_mask & following & ~first[:-1] & ~first[1:]


def place(target: Target, device: torch.device) -> None:
    """Move the target beside what is trained, unless its own `device_map` spreads it over several devices."""
    # Asked only where there is something to move: some quantised models refuse to be.
    if target.device != device and getattr(target.model, "hf_device_map", None) is None:
        target.model.to(device)


class FeatureStore(Sequence[Stored]):
    """A complete feature folder, memory-mapped: conversations by index, examples by row.

    Args:
        identity: of the target that must have made it; None takes any.
        layers: to read, of those stored; None reads all.

    Attributes:
        manifest: what it was made from.
        layers: those that are read.
        offsets: (conversations + 1,) int64, first row of each conversation in the store.

    Raises:
        TargetMismatch: made by another target than `identity`.
        FeatureStoreError: absent, half-written or damaged.
    """

    def __init__(
        self, directory: str | Path, identity: TargetIdentity | None = None, layers: Sequence[int] | None = None
    ) -> None:
        self.directory = Path(directory)
        self.manifest = Manifest.read(self.directory)
        self.layers = self.manifest.layers if layers is None else tuple(layers)
        if identity is not None and (differences := self.manifest.target.differences(identity)):
            raise TargetMismatch(
                f"features in {self.directory} were made by {self.manifest.target.name}, which differs from target "
                f"{identity.name} in {', '.join(differences)}; give another folder or extract again"
            )
        if missing := missing_shards(self.directory, self.manifest):
            raise FeatureStoreError(
                f"feature folder {self.directory} is half-written: {len(missing)} of {self.manifest.shards} shards "
                f"are missing or damaged ({_names(missing)}); run the same command again to complete it"
            )
        self._shards = [_load(_shard_path(self.directory, shard)) for shard in range(self.manifest.shards)]
        if absent := set(self.layers) - set(self.manifest.layers):
            raise FeatureStoreError(
                f"features in {directory} are of layers {list(self.manifest.layers)}, without {sorted(absent)}; "
                "extract again with all of them"
            )
        rows = torch.tensor([0, *(len(shard["input_ids"]) for shard in self._shards)])
        self._first_row = rows.cumsum(0)
        parts = [shard["offsets"][:-1] + start for shard, start in zip(self._shards, self._first_row, strict=False)]
        self.offsets = torch.cat([*parts, self._first_row[-1:]])

    def __reduce__(self) -> tuple[Any, ...]:
        return FeatureStore, (
            self.directory,
            None,
            self.layers,
        )  # data workers map the files again instead of copying them

    def __len__(self) -> int:
        return self.manifest.conversations

    @property
    def rows(self) -> int:
        """Stored positions (tokens)."""
        return int(self._first_row[-1])

    def __getitem__(self, index: int) -> Stored:  # type: ignore[override]  # no slices
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = self._shards[index // self.manifest.shard_size]
        start = int(self._first_row[index // self.manifest.shard_size])
        span = slice(int(self.offsets[index]) - start, int(self.offsets[index + 1]) - start)
        return Stored(shard["input_ids"][span].long(), shard["loss_mask"][span], self._read(shard["hidden"][span]))

    def _read(self, hidden: Tensor) -> Tensor:
        """The layers asked for, (..., len(layers) * H), of those stored."""
        if self.layers == self.manifest.layers:
            return hidden
        size, stored = self.manifest.hidden_size, self.manifest.layers
        starts = [stored.index(layer) * size for layer in self.layers]
        return torch.cat([hidden[..., start : start + size] for start in starts], dim=-1)

    def __iter__(self) -> Iterator[Stored]:
        return (self[index] for index in range(len(self)))

    def roots(self, exclude: Collection[int] = ()) -> Tensor:
        """Rows of the store that can be roots, (R,) int64, ascending; not of the conversations in `exclude`."""
        parts = [
            eligible(shard["loss_mask"], shard["offsets"]).nonzero().squeeze(-1) + start
            for shard, start in zip(self._shards, self._first_row, strict=False)
        ]
        found = torch.cat(parts)
        if not exclude:
            return found
        return found[~torch.isin(self.owner(found), torch.tensor(sorted(exclude)))]

    def owner(self, rows: Tensor) -> Tensor:
        """Number of the conversation that each row belongs to."""
        return torch.searchsorted(self.offsets, rows, right=True) - 1

    def gather(self, rows: Tensor, before: int, after: int) -> Stored:
        """The surroundings of many rows at once: `before` positions ahead of each, itself, `after` behind it.

        Args:
            rows: (P,) int64.

        Returns:
            input_ids and loss_mask (P, before + 1 + after), hidden (P, before + after, len(layers) * H): the last
            position's state is never asked for. Outside the row's own conversation: zeros and False.
        """
        index = rows[:, None] + torch.arange(-before, after + 1)
        conversation = self.owner(rows)
        inside = (index >= self.offsets[conversation, None]) & (index < self.offsets[conversation + 1, None])
        ids = torch.zeros(index.shape, dtype=torch.int64)
        mask = torch.zeros(index.shape, dtype=torch.bool)
        width = len(self.layers) * self.manifest.hidden_size
        hidden = torch.zeros(len(rows), before + after, width, dtype=self.manifest.torch_dtype)
        owner = torch.searchsorted(self._first_row, rows, right=True) - 1
        for number in owner.unique().tolist():
            shard, mine = self._shards[number], owner == number
            local = (index[mine] - self._first_row[number]).clamp(0, len(shard["input_ids"]) - 1)
            ids[mine] = shard["input_ids"][local].long()
            mask[mine] = shard["loss_mask"][local]
            hidden[mine] = self._read(shard["hidden"][local[:, :-1]])
        hidden.masked_fill_(~inside[:, :-1, None], 0)
        return Stored(ids * inside, mask & inside, hidden)

    def verify(self, target: Target, samples: int = 3, seed: int = 0) -> None:
        """Recompute a few stored conversations with the target.

        Raises:
            FeatureStoreError: they differ by more than batch shapes explain.
        """
        lengths = self.offsets[1:] - self.offsets[:-1]
        candidates = lengths.nonzero().squeeze(-1)
        generator = torch.Generator().manual_seed(seed)
        chosen = candidates[torch.randperm(len(candidates), generator=generator)[:samples]]
        tolerance = max(_TOLERANCE[target.dtype], _TOLERANCE[self.manifest.torch_dtype])
        for index in chosen.tolist():
            stored = self[index]
            ids = stored.input_ids[None].to(target.device)
            fresh = target.features(ids, layers=self.layers)[0].float().cpu()
            error = float((fresh - stored.hidden.float()).norm() / fresh.norm())
            if not error <= tolerance:
                raise FeatureStoreError(
                    f"features in {self.directory} are not what target {target.name} computes now (conversation "
                    f"{index} differs by {error:.1%}, at most {tolerance:.1%} is rounding); extract again"
                )


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


def refuse_others(directory: Path, target: Target) -> None:
    """Raises FeatureStoreError if the folder holds features of another target; cheap, so ask before long work."""
    if (directory / MANIFEST).exists():
        differences = Manifest.read(directory).target.differences(target.identity)
        if differences:
            raise FeatureStoreError(
                f"features in {directory} were made by another target: it differs in {', '.join(differences)}; give "
                "another folder, or delete this one"
            )


def missing_shards(directory: Path, manifest: Manifest) -> list[int]:
    """Shards that are absent, cut off, or belong to another manifest."""
    return [shard for shard in range(manifest.shards) if not _is_complete(directory, manifest, shard)]


def extract(
    target: Target,
    conversations: Sequence[Conversation],
    directory: str | Path,
    options: FeatureOptions,
    trainer: pl.Trainer,
) -> FeatureStore:
    """Compute the features of conversations into a folder, or what is missing of them.

    The Trainer decides about devices, processes and nodes; each process takes every world-size-th shard.
    Interrupt it and call it again: complete shards are kept, once their checksums are found right. Where another
    command of one process is at it, this one waits and takes what that one made.

    Raises:
        ConfigError, DataError: options or conversations that cannot be used.
        FeatureStoreError: the folder holds features made from something else, or the target's states are not finite.
        DiskSpaceError: less free space than the estimate, or none left.
    """
    directory = Path(directory)
    options.check(target)
    if not conversations:
        raise DataError("there are no conversations to compute features of; give data with at least one")
    manifest = _claim(directory, Manifest.plan(target, conversations, options))
    # Processes of one command share the shards; another command would compute all of them again.
    with FileLock(directory / ".lock") if trainer.world_size == 1 else nullcontext():
        if missing := missing_shards(directory, manifest):
            _check_space(directory, manifest, missing, *_estimate(target, conversations, options, manifest, missing))
        # Also where none is missing: each process looks whether its shards still hold what was written, and no process
        # decides by a look of its own at the folder whether to take part.
        work = _Extraction(target, conversations, directory, manifest, options)
        trainer.predict(work, return_predictions=False)
    trainer.strategy.barrier("features are complete")
    return FeatureStore(directory, target.identity, options.layers)


class _Extraction(pl.LightningModule):
    """One batch is one shard; nothing is trained."""

    def __init__(
        self,
        target: Target,
        conversations: Sequence[Conversation],
        directory: Path,
        manifest: Manifest,
        options: FeatureOptions,
    ) -> None:
        super().__init__()
        self.target = target
        self.conversations = conversations
        self.directory = directory
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

    def predict_step(self, shard: int) -> int:
        if shard < self.manifest.shards and not _is_sound(self.directory, self.manifest, shard):
            path = _shard_path(self.directory, shard)
            if path.exists():
                print(f"{path} is damaged and is computed again", flush=True)
            _write(path, self._compute(shard), self.manifest)
        return shard

    def _compute(self, shard: int) -> dict[str, Tensor]:
        manifest = self.manifest
        samples = [self._encode(index) for index in manifest.conversations_of(shard)]
        lengths = torch.tensor([0, *(len(sample.input_ids) if sample else 0 for sample in samples)])
        offsets = lengths.cumsum(0)
        hidden = torch.empty(int(offsets[-1]), manifest.width, dtype=manifest.torch_dtype)
        # Batches of similar length, formed inside the shard: the same on every run.
        order = sorted((index for index, sample in enumerate(samples) if sample), key=lambda i: int(lengths[i + 1]))
        for start in range(0, len(order), self.options.batch_size):
            chosen = order[start : start + self.options.batch_size]
            batch = [sample for index in chosen if (sample := samples[index]) is not None]
            states = compute_features(self.target, batch, manifest.layers).to("cpu", manifest.torch_dtype)
            for index, rows in zip(chosen, states, strict=True):
                own = rows[: lengths[index + 1]]
                if not own.isfinite().all():
                    number = manifest.conversations_of(shard)[index]
                    raise FeatureStoreError(
                        f"target {self.target.name} computes states of conversation {self.conversations[number].id} "
                        f"that are not finite in {manifest.dtype} (run in {self.target.dtype}); give another dtype, "
                        "such as --target_dtype bfloat16, or leave the conversation out"
                    )
                hidden[offsets[index] : offsets[index + 1]] = own
        kept = [sample for sample in samples if sample]
        return {
            "input_ids": torch.cat([torch.empty(0, dtype=torch.int32), *(s.input_ids.int() for s in kept)]),
            "loss_mask": torch.cat([torch.empty(0, dtype=torch.bool), *(s.loss_mask for s in kept)]),
            "hidden": hidden,
            "offsets": offsets,
        }

    def _encode(self, index: int) -> Encoded | None:
        """The conversation's tokens, or None (stored as empty) where they hold nothing to learn from."""
        options, tokenizer = self.options, self.target.tokenizer
        encoded = encode_row(self.conversations[index], tokenizer, options.max_length, options.skip_bad_rows)
        whole = torch.tensor([0, len(encoded.input_ids)])
        return encoded if bool(eligible(encoded.loss_mask, whole).any()) else None


def _claim(directory: Path, manifest: Manifest) -> Manifest:
    """Write the manifest, or return the one there after making sure that it means the same."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / MANIFEST).exists():
            present = Manifest.read(directory)
            if differences := present.differences(manifest):
                raise FeatureStoreError(
                    f"features in {directory} were made from something else: they differ in {', '.join(differences)}; "
                    "give another folder, or delete this one"
                )
            return present
        with written_whole(directory / MANIFEST, writer=f".{os.getpid()}") as temporary:
            temporary.write_text(manifest.to_json())
        return manifest
    except OSError as error:
        raise ConfigError(f"feature folder {directory} cannot be written ({error}); give another folder") from error


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
        encode_row(conversations[index], target.tokenizer, options.max_length, options.skip_bad_rows)
        for index in sample
    )
    lengths = [len(row.input_ids) for row in rows]
    tokens = math.ceil(sum(lengths) / len(lengths) * len(todo))
    per_token = manifest.width * manifest.torch_dtype.itemsize + 5  # states, int32 id, mask
    return tokens, tokens * per_token + 8 * len(todo) + 512 * len(missing)


def _check_space(directory: Path, manifest: Manifest, missing: list[int], tokens: int, size: int) -> None:
    free = shutil.disk_usage(directory).free
    summary = (
        f"features: about {tokens:,} tokens x {len(manifest.layers)} layer(s) x {manifest.hidden_size} in "
        f"{manifest.dtype}, about {_human(size)}, in {len(missing)} shard(s) to {directory} ({_human(free)} free)"
    )
    if size > free:
        raise DiskSpaceError(
            f"{summary}: the disk is too small; lower max_length, limit or the number of layers, use the online mode, "
            "or give another folder"
        )
    rank_zero_only(print)(summary, flush=True)


def _human(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def _shard_path(directory: Path, shard: int) -> Path:
    return directory / f"shard-{shard:05d}.safetensors"


def _names(shards: list[int]) -> str:
    names = [_shard_path(Path(), shard).stem for shard in shards]
    return ", ".join(names if len(names) <= 4 else [*names[:3], f"... {names[-1]}"])


def _is_complete(directory: Path, manifest: Manifest, shard: int) -> bool:
    """Whether a shard is there in full length and of this manifest. Reads its header only."""
    try:
        with safe_open(_shard_path(directory, shard), framework="pt") as file:  # refuses cut-off files
            metadata = file.metadata() or {}
            offsets = file.get_slice("offsets").get_shape()
            hidden, ids = file.get_slice("hidden").get_shape(), file.get_slice("input_ids").get_shape()
    except (FileNotFoundError, SafetensorError):
        return False
    conversations = len(manifest.conversations_of(shard))
    shapes_fit = offsets == [conversations + 1] and hidden == [*ids, manifest.width]
    return metadata.get("of", "").startswith(manifest.digest) and shapes_fit


def _is_sound(directory: Path, manifest: Manifest, shard: int) -> bool:
    """Whether a complete shard holds the bytes that were written. Reads all of it."""
    if not _is_complete(directory, manifest, shard):
        return False
    path = _shard_path(directory, shard)
    with safe_open(path, framework="pt") as file:
        said = file.metadata()["of"]
    return said == _label(manifest, _load(path))


def _load(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:  # tensors are views of the mapped file
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def _write(path: Path, tensors: dict[str, Tensor], manifest: Manifest) -> None:
    with written_whole(path) as temporary:
        save_file(tensors, temporary, metadata={"of": _label(manifest, tensors)})


def _label(manifest: Manifest, tensors: dict[str, Tensor]) -> str:
    """What a shard says of itself, in one piece of metadata, for several are written in any order: the digest of its
    manifest, and CRC-32 of all bytes, which finds what a disk or a copy has changed, at gigabytes a second.
    """
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data, value)
    return f"{manifest.digest} {value:08x}"
