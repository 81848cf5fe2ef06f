"""Extraction: the target's hidden states on conversations, stored in shards or computed on the fly.

The work is done shard by shard, each written as a whole, so that an interrupted extraction continues where it stopped
and ends in the bytes of an undisturbed one.
"""

import math
import os
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, compress
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader

from shape.data.conversations import Conversation, evenly, fingerprint
from shape.data.encoding import Encoded, encode_row, split_by_template
from shape.data.endpoint import Endpoint
from shape.data.reading import conversations_of
from shape.errors import ConfigError, DataError, DiskSpaceError, FeatureStoreError
from shape.features.engine import EngineStates
from shape.features.manifest import MANIFEST, Manifest, refuse_others, state_bytes
from shape.features.options import ExtractOptions, FeatureOptions, longest
from shape.features.positions import eligible, stored_positions
from shape.features.shards import load_checked, missing_shards, quantise, shard_name, write_shard
from shape.features.storage import Storage
from shape.features.store import FeatureStore
from shape.files import appears, human_bytes, locked, written_whole
from shape.target.identity import weights_hash
from shape.target.loading import dtype_name, of_target, read_config
from shape.target.model import Target, announce

_ESTIMATE_SAMPLE = 256
_READ_SAMPLE = 32  # conversations whose token ids are read as text
_FORWARD_TOKENS = 2**14  # of one forward: every layer's states of them may be held at a time

States = Callable[[Sequence[Encoded], Sequence[int]], Iterable[Tensor]]
"""Of texts and layers: for each text at least (T, layers * H)."""


def extract_from(options: ExtractOptions) -> FeatureStore:
    """Load target and data, and extract, or complete what an earlier run left."""
    endpoint = Endpoint.asked_for(options.endpoint, options.model)
    if endpoint is not None:  # one process asks, and leaves the accelerators to the engine
        options = replace(options, trainer=replace(options.trainer, accelerator="cpu", devices=1, num_nodes=1))
    elif options.device_map is not None:  # a target that was put on given devices is one process's
        options = replace(options, trainer=replace(options.trainer, devices=1, num_nodes=1))
    trainer = options.trainer.for_extraction()
    conversations = conversations_of(options)
    depth = read_config(options.target, **of_target(options)).get_text_config().num_hidden_layers
    options.check_for(options.target, None, depth)  # all but the length, which the target knows once it is loaded
    device = options.device_map or trainer.strategy.root_device
    target = Target.load(options.target, dtype=options.dtype, device_map=device, **of_target(options))
    options.check(target)
    storage = Storage(options.output)
    refuse_others(storage, target)
    rank_zero_only(announce)(target)
    length = longest(options.max_length, target.max_positions)
    texts = single_texts(target, conversations, length, options.skip_bad_rows)
    states = None if endpoint is None else EngineStates(endpoint, target)
    return extract(target, texts, storage, options, trainer, states)


def extract(
    target: Target,
    conversations: Sequence[Conversation],
    address: str | Path | Storage,
    options: FeatureOptions,
    trainer: pl.Trainer,
    states: States | None = None,
) -> FeatureStore:
    """Compute the features of conversations into a store, or what is missing of them.

    Each process of the Trainer takes every world-size-th shard. Interrupt it and call it again: complete shards are
    kept, once the checksums of those in a folder are found right. Where another command of one process writes to the
    same folder, this one waits and takes what that one made.

    Args:
        conversations: each of one text, as `single_texts` makes them.
        address: a folder, or what fsspec reaches.
        states: what computes them instead of the target.

    Raises:
        ConfigError, DataError: options or conversations that cannot be used.
        FeatureStoreError: the store holds features made from something else, the target's states are not finite, or
            what another process wrote is not seen here.
        DiskSpaceError: less free space than the estimate, or none left.
    """
    options.check(target)
    _require_tokens(target, conversations)
    if not conversations:
        raise DataError("there are no conversations to compute features of; give data with at least one")
    storage = Storage(address)
    manifest = _claim(
        storage,
        Manifest(
            target=target.identity,
            layers=options.stored,
            dtype=options.feature_dtype or dtype_name(target.dtype),
            hidden_size=target.hidden_size,
            max_length=longest(options.max_length, target.max_positions),
            shard_size=options.shard_size,
            conversations=len(conversations),
            fingerprint=fingerprint(conversations),
            before=options.before,
            weights=weights_hash(target.model),
        ),
    )
    work = _Extraction(target, conversations, storage, manifest, options, states)
    # Processes of one command share the shards; another command would compute all of them again. Where none is missing
    # nothing is locked: the folder may be one that can only be read.
    alone = trainer.world_size == 1 and storage.folder is not None and missing_shards(storage, manifest)
    with locked(Path(storage.address) / ".lock") if alone else nullcontext():
        if missing := missing_shards(storage, manifest):
            work.check_space(missing)
        # Also where none is missing: each process looks whether its shards still hold what was written, and no process
        # decides by a look of its own at the store whether to take part.
        trainer.predict(work, return_predictions=False)
    trainer.strategy.barrier("features are complete")
    if trainer.world_size > 1 and storage.folder is not None:
        appears(lambda: not missing_shards(storage, manifest), storage.folder, FeatureStoreError)
    cache = None if options.cache is None else Path(options.cache)
    return FeatureStore(storage, target.identity, options.layers, cache, int(options.cache_gigabytes * 1e9))


def compute_features(target: Target, batch: Sequence[Encoded], layers: Sequence[int] = (-1,)) -> Tensor:
    """States of a batch of conversations, (B, T, layers * H) in the target's dtype, on its device.

    T is the longest conversation; beyond a conversation's end are states of padding, to be ignored. The store and the
    online mode both call this, the latter within a step whose autocast must not apply here. One forward takes as many
    conversations as have `_FORWARD_TOKENS` with their padding, at least one.
    """
    lengths = [max(1, len(encoded.input_ids)) for encoded in batch]
    ids = torch.zeros(len(batch), max(lengths), dtype=torch.int64)
    for own, encoded in zip(ids, batch, strict=True):
        own[: len(encoded.input_ids)] = encoded.input_ids
    # Processes that share a target's weights have to run as many forwards as each other, whatever their batches.
    rows = len(batch) if target.sharded else max(1, _FORWARD_TOKENS // max(lengths))
    with torch.autocast(target.device.type, enabled=False):
        parts = [
            target.features(some, layers, lengths[number * rows : (number + 1) * rows])
            for number, some in enumerate(ids.to(target.device).split(rows))
        ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def split_conversations(
    target: Target, conversations: Sequence[Conversation], max_length: int | None = None, skip_bad_rows: bool = False
) -> list[list[Conversation]]:
    """What features are computed of, for each conversation: see `shape.data.encoding.split_by_template`.

    Raises:
        DataError: token ids that the target does not have or reads as something else than the answers beside them, or
            text where it has no tokenizer; without `skip_bad_rows`, an order of roles that the chat template refuses.
    """
    _require_tokens(target, conversations)
    if not skip_bad_rows:
        _require_accepted(target, conversations, max_length)
    for conversation in conversations:
        largest = max((max(text.input_ids, default=0) for text in conversation.texts), default=0)
        if largest >= target.vocab_size:
            raise DataError(
                f"conversation {conversation.id} holds token {largest}, and target {target.name} has "
                f"{target.vocab_size} tokens; give token ids that were made for it"
            )
    _require_own_tokens(target, conversations)
    return [split_by_template(conversation, target.tokenizer, max_length) for conversation in conversations]


def single_texts(
    target: Target, conversations: Sequence[Conversation], max_length: int | None = None, skip_bad_rows: bool = False
) -> list[Conversation]:
    """All texts of `split_conversations` in one list."""
    return list(chain.from_iterable(split_conversations(target, conversations, max_length, skip_bad_rows)))


def _require_accepted(target: Target, conversations: Sequence[Conversation], max_length: int | None) -> None:
    """Raises DataError where the chat template refuses a conversation, of which one of each order of roles is tried,
    with as many calls of tools in each message, and with reasoning or text or neither.
    """
    orders: dict[tuple[tuple[str, int, bool, bool], ...], list[Conversation]] = {}
    for conversation in conversations:
        if conversation.kind == "chat" and not conversation.texts:
            form = tuple(
                (one.role, len(one.more.get("tool_calls", ())), bool(one.reasoning), bool(one.content))
                for one in conversation.messages
            )
            orders.setdefault(form, []).append(conversation)
    for alike in orders.values():
        for part in split_by_template(alike[0], target.tokenizer, max_length):
            try:
                encode_row(part, target.tokenizer, None, skip_bad_rows=False)
            except DataError as error:
                raise DataError(
                    f"{error} ({len(alike)} of {len(conversations)} conversations have these roles in this order; "
                    "leave out those that are refused, or give skip_bad_rows)"
                ) from None


def _require_own_tokens(target: Target, conversations: Sequence[Conversation]) -> None:
    """Raises DataError where token ids and the answers' text differ in most of a sample of the conversations that hold
    both. In a few they may: templates trim answers, and a character may be cut.
    """
    if target.tokenizer is None:
        return
    both = [(each, answers) for each in conversations if each.texts and (answers := _answers(each))]
    sample = evenly(both, _READ_SAMPLE)
    others = [each for each, answers in sample if not any(text in _read(target, each) for text in answers)]
    if 2 * len(others) > len(sample):
        raise DataError(
            f"conversation {others[0].id} holds token ids that target {target.name} reads as other text than its "
            f"answers ({len(others)} of {len(sample)} looked at do); give answers that were written for this target"
        )


def _answers(conversation: Conversation) -> list[str]:
    said = (_letters(m.content) for m in conversation.messages if m.role == "assistant" and m.learned)
    return [text for text in said if text]


def _read(target: Target, conversation: Conversation) -> str:
    """The supervised tokens as text."""
    assert target.tokenizer is not None
    ids = chain.from_iterable(compress(text.input_ids, text.loss_mask) for text in conversation.texts)
    return _letters(str(target.tokenizer.decode(list(ids), skip_special_tokens=True)))


def _letters(text: str) -> str:
    """Without blanks, and in the forms to which some tokenizers change characters."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def _require_tokens(target: Target, conversations: Sequence[Conversation]) -> None:
    """Raises DataError for text that no tokenizer makes token ids of."""
    text = next((each for each in conversations if not each.texts), None)
    if target.tokenizer is None and text is not None:
        raise DataError(
            f"target {target.name} has no tokenizer, and conversation {text.id} is text; put one into its folder, or "
            "give token ids (input_ids and loss_mask)"
        )


def place(target: Target, device: torch.device) -> None:
    """Move the target beside what is trained, unless its own `device_map` spreads it over several devices."""
    # Asked only where there is something to move: some quantised models refuse to be.
    if target.device != device and getattr(target.model, "hf_device_map", None) is None:
        target.model.to(device)


class _Extraction(pl.LightningModule):
    """One batch is one shard; nothing is trained."""

    def __init__(
        self,
        target: Target,
        conversations: Sequence[Conversation],
        storage: Storage,
        manifest: Manifest,
        options: FeatureOptions,
        states: States | None,
    ) -> None:
        super().__init__()
        self.target, self.conversations, self.states = target, conversations, states or self._of_target
        self.storage, self.manifest, self.options = storage, manifest, options

    def check_space(self, missing: list[int]) -> None:
        """Say what the missing shards will take, by a sample of conversations. Raises DiskSpaceError."""
        manifest, folder = self.manifest, self.storage.folder
        todo = [index for shard in missing for index in manifest.conversations_of(shard)]
        counts = []
        for index in evenly(todo, _ESTIMATE_SAMPLE):
            text = self._learnable(index)
            states = stored_positions(text.loss_mask, torch.tensor([0, len(text.input_ids)]), manifest.before)
            counts.append((len(text.input_ids), int(states.sum())))
        tokens, states = (math.ceil(sum(each) / len(each) * len(todo)) for each in zip(*counts, strict=True))
        text_bytes = 5 * tokens + 8 * len(todo)  # int32 ids and mask, offsets
        each = state_bytes(manifest.dtype, manifest.hidden_size, len(manifest.layers))
        size = states * each + text_bytes + 512 * len(missing)
        free = math.inf if folder is None else shutil.disk_usage(folder).free
        summary = (
            f"features: about {tokens:,} tokens x {len(manifest.layers)} layer(s) x {manifest.hidden_size} in "
            f"{manifest.dtype}, about {human_bytes(size)}, in {len(missing)} shard(s) to {self.storage}"
            + ("" if folder is None else f" ({human_bytes(free)} free)")
        )
        if size > free:
            raise DiskSpaceError(
                f"{summary}: the disk is too small; lower max_length, limit or the number of layers, use the online "
                "mode, or give another folder"
            )
        rank_zero_only(print)(summary, flush=True)

    def predict_dataloader(self) -> DataLoader:
        # Every process runs the same number of steps, also with nothing left to do, and decides by itself
        # what is missing: no process waits for another.
        rank, world = self.trainer.global_rank, self.trainer.world_size
        steps = math.ceil(self.manifest.shards / world)
        return DataLoader(range(rank, steps * world, world), batch_size=None)  # type: ignore[arg-type]

    def _of_target(self, batch: Sequence[Encoded], layers: Sequence[int]) -> Tensor:
        place(self.target, self.trainer.strategy.root_device)  # not before: with nothing missing it may not fit there
        return compute_features(self.target, batch, layers)

    def on_predict_start(self) -> None:
        self.missing = set(missing_shards(self.storage, self.manifest))

    def predict_step(self, shard: int) -> int:
        if shard >= self.manifest.shards:
            return shard
        damaged = shard not in self.missing and not self._is_sound(shard)
        if damaged:
            print(f"{shard_name(shard)} of {self.storage} is damaged and is computed again", flush=True)
        if damaged or shard in self.missing:
            write_shard(self.storage, self.manifest, shard, self._compute(shard))
        return shard

    def _is_sound(self, shard: int) -> bool:
        """Whether a complete shard of a folder holds what was written; elsewhere, copies are checked when fetched."""
        folder = self.storage.folder
        return folder is None or load_checked(folder / shard_name(shard), self.manifest) is not None

    def _compute(self, shard: int) -> dict[str, Tensor]:
        manifest, numbers = self.manifest, self.manifest.conversations_of(shard)
        texts = [self._learnable(index) for index in numbers]
        lengths = [len(text.input_ids) for text in texts]
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        ids = torch.cat([text.input_ids.int() for text in texts])
        mask = torch.cat([text.loss_mask for text in texts])
        stored = stored_positions(mask, offsets, manifest.before)
        number = stored.cumsum(0) - stored.long()  # of states before each position's own
        hidden = torch.empty(int(stored.sum()), manifest.width, dtype=manifest.stored_dtype)
        scale = torch.empty(len(hidden), len(manifest.layers), dtype=torch.bfloat16)
        # Batches of similar length, formed inside the shard: the same on every run.
        order = sorted((index for index, length in enumerate(lengths) if length), key=lengths.__getitem__)
        for start in range(0, len(order), self.options.batch_size):
            chosen = order[start : start + self.options.batch_size]
            batch = self.states([texts[index] for index in chosen], manifest.layers)
            for index, states in zip(chosen, batch, strict=True):
                span = slice(int(offsets[index]), int(offsets[index + 1]))
                own = states[: lengths[index]].cpu()[stored[span]].to(manifest.read_dtype)
                self._require_finite(own, numbers[index])
                at = slice(int(number[span.start]), int(number[span.start]) + len(own))
                if manifest.dtype == "int8":
                    hidden[at], scale[at] = quantise(own, manifest.hidden_size)
                else:
                    hidden[at] = own
        tensors = {"input_ids": ids, "loss_mask": mask, "hidden": hidden, "offsets": offsets}
        return {**tensors, "scale": scale} if manifest.dtype == "int8" else tensors

    def _require_finite(self, states: Tensor, number: int) -> None:
        if not states.isfinite().all():
            raise FeatureStoreError(
                f"target {self.target.name} computes states of conversation {self.conversations[number].id} that are "
                f"not finite in {self.manifest.dtype} (run in {self.target.dtype}); give another dtype, such as "
                "--dtype bfloat16, or leave the conversation out"
            )

    def _learnable(self, index: int) -> Encoded:
        """The conversation's tokens; none where they hold nothing to learn from."""
        conversation, tokenizer = self.conversations[index], self.target.tokenizer
        text = encode_row(conversation, tokenizer, self.manifest.max_length, self.options.skip_bad_rows)
        if eligible(text.loss_mask, torch.tensor([0, len(text.input_ids)])).any():
            return text
        return Encoded(text.id, text.input_ids[:0], text.loss_mask[:0])


def _claim(storage: Storage, manifest: Manifest) -> Manifest:
    """Write the manifest, or return the one there after making sure that it means the same."""
    try:
        if storage.exists(MANIFEST):
            present = Manifest.read(storage)
            if differences := present.differences(manifest):
                raise FeatureStoreError(
                    f"features in {storage} were made from something else: they differ in {', '.join(differences)}; "
                    "give another folder, or delete this one"
                )
            return present
        if storage.folder is None:
            storage.write(MANIFEST, manifest.to_json().encode())
        else:
            with written_whole(storage.folder / MANIFEST, writer=f".{os.getpid()}") as temporary:
                temporary.write_text(manifest.to_json(), encoding="utf-8")
        return manifest
    except OSError as error:
        raise ConfigError(f"feature folder {storage} cannot be written ({error}); give another folder") from error
