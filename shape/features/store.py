"""A store of features: a target's states on conversations, in a folder or anywhere that fsspec reaches.

It holds `manifest.json` (`shape.features.manifest`) and the shards (`shape.features.shards`), each of a fixed range of
conversations.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shape.errors import ConfigError, FeatureStoreError, TargetMismatch
from shape.features.manifest import Manifest
from shape.features.positions import eligible, followers, stored_positions
from shape.features.shards import dequantise, headers, load_checked, load_shard, read_texts, shard_name
from shape.features.storage import LocalCopies, Storage
from shape.files import cache_folder
from shape.loops import take_rows
from shape.target.identity import TargetIdentity
from shape.target.inference import relative_error
from shape.target.model import Target

_ROOM = 50 * 10**9
# Relative error of a state recomputed in another batch shape, or rounded; a wrong target or a shifted position gives
# about 1.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2, torch.int8: 0.15}


class Stored(NamedTuple):
    """One conversation of a store: input_ids (T,) int64, loss_mask (T,) bool, hidden (T, layers * H)."""

    input_ids: Tensor
    loss_mask: Tensor
    hidden: Tensor


class FeatureStore(Sequence[Stored]):
    """A complete store: conversations by index, examples by position, counted over all conversations end to end.

    Texts are in memory or mapped into it; states are mapped from the folder, or from local copies of the shards in use
    where the store is elsewhere.

    Args:
        identity: of the target that must have made it; None takes any.
        layers: to read, of those stored; None reads all.
        cache: copies go below this folder, to one named by the manifest's digest; None is `features` in
            `shape.files.cache_folder`.
        room: bytes that the copies may take.

    Attributes:
        manifest: what it was made from.
        layers: those that are read.
        offsets: (conversations + 1,) int64, first position of each conversation, and the end.

    Raises:
        TargetMismatch: made by another target than `identity`.
        FeatureStoreError: absent, half-written or damaged.
    """

    def __init__(
        self,
        address: str | Path | Storage,
        identity: TargetIdentity | None = None,
        layers: Sequence[int] | None = None,
        cache: Path | None = None,
        room: int = _ROOM,
    ) -> None:
        self.storage = storage = Storage(address)
        self.manifest = manifest = Manifest.read(storage)
        self.layers = manifest.layers if layers is None else tuple(layers)
        if identity is not None and (differences := manifest.target.differences(identity)):
            raise TargetMismatch(
                f"features in {storage} were made by {manifest.target.name}, which differs from target "
                f"{identity.name} in {', '.join(differences)}; give another folder or extract again"
            )
        found = headers(storage, manifest)
        present = [header for header in found if header is not None]
        if missing := [shard for shard, header in enumerate(found) if header is None]:
            raise FeatureStoreError(
                f"feature folder {storage} is half-written: {len(missing)} of {manifest.shards} shards "
                f"are missing or damaged ({_names(missing)}); run the same command again to complete it"
            )
        if absent := set(self.layers) - set(manifest.layers):
            raise FeatureStoreError(
                f"features in {storage} are of layers {list(manifest.layers)}, without {sorted(absent)}; "
                "extract again with all of them"
            )
        self._bytes = sum(header.size for header in present)
        self._cache = cache or cache_folder() / "features"
        self._room = room
        self._shards: list[dict[str, Tensor]] = []  # those of a folder, mapped
        if storage.folder is not None:
            self._shards = [load_shard(storage.folder / shard_name(shard)) for shard in range(manifest.shards)]
            self._texts = self._shards
        else:
            self._texts = read_texts(storage, present)
            self._copies = LocalCopies(storage, self._cache / manifest.digest, room, self._checked)
        self._first = torch.tensor([0, *(len(text["input_ids"]) for text in self._texts)]).cumsum(0)  # of each shard
        # Where only some states are stored: which positions have one, and its number.
        some = self._texts if manifest.before is not None else []
        self._kept = [stored_positions(text["loss_mask"], text["offsets"], manifest.before) for text in some]
        self._state_of = [positions.cumsum(0) - 1 for positions in self._kept]
        for shard, (text, header) in enumerate(zip(self._texts, present, strict=True)):
            ends, states = text["offsets"], int(self._kept[shard].sum()) if self._kept else header.states
            sound = int(ends[0]) == 0 and int(ends[-1]) == len(text["input_ids"]) and bool((ends.diff() >= 0).all())
            if not sound or states != header.states:
                raise FeatureStoreError(
                    f"{header.name} of {storage} is damaged; delete it there and extract again, which makes it anew"
                )
        parts = [text["offsets"][:-1] + start for text, start in zip(self._texts, self._first, strict=False)]
        self.offsets = torch.cat([*parts, self._first[-1:]])

    def __reduce__(self) -> tuple[Any, ...]:
        # Data workers map the files again instead of copying them.
        return FeatureStore, (self.storage.address, None, self.layers, self._cache, self._room)

    def __len__(self) -> int:
        return self.manifest.conversations

    @property
    def tokens(self) -> int:
        """All of its positions."""
        return int(self._first[-1])

    def text(self, index: int) -> tuple[Tensor, Tensor]:
        """input_ids (T,) int64 and loss_mask (T,) bool of a conversation, without its states."""
        shard, span = self._span(index)
        return self._texts[shard]["input_ids"][span].long(), self._texts[shard]["loss_mask"][span]

    def __getitem__(self, index: int) -> Stored:  # type: ignore[override]  # no slices
        """States that are not stored are zeros."""
        ids, mask = self.text(index)
        positions = torch.arange(int(self.offsets[index]), int(self.offsets[index + 1]))
        return Stored(ids, mask, self._states(positions, torch.ones_like(positions, dtype=torch.bool)))

    def _span(self, index: int) -> tuple[int, slice]:
        """The shard of a conversation, and its positions there."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = index // self.manifest.shard_size
        start = int(self._first[shard])
        return shard, slice(int(self.offsets[index]) - start, int(self.offsets[index + 1]) - start)

    def _states(self, positions: Tensor, known: Tensor) -> Tensor:
        """The layers asked for, (..., len(layers) * H), at positions of the store, (...) int64; zeros where none is
        stored, and where `known`, (...) bool, is False.
        """
        flat, manifest = positions.flatten(), self.manifest
        shards = self.shard_of(flat).where(known.flatten(), -1)
        hidden = torch.zeros(len(flat), manifest.width, dtype=manifest.stored_dtype)
        scale = torch.zeros(len(flat), len(manifest.layers), dtype=torch.bfloat16)
        for shard in shards[shards >= 0].unique().tolist():
            stored = self._shards[shard] if self._shards else self._copies[shard_name(shard)]
            mine = shards == shard
            rows = flat - self._first[shard]
            if self._kept:
                at = rows.where(mine, 0)
                mine, rows = mine & self._kept[shard][at], self._state_of[shard][at]
            rows = rows.where(mine, -1)
            _take(stored["hidden"], rows, hidden)
            if "scale" in stored:
                _take(stored["scale"], rows, scale)
        if self.layers != manifest.layers:
            columns = [manifest.layers.index(layer) for layer in self.layers]
            hidden = hidden.unflatten(-1, (-1, manifest.hidden_size))[:, columns].flatten(-2)
            scale = scale[:, columns]
        states = dequantise(hidden, scale) if manifest.dtype == "int8" else hidden
        return states.unflatten(0, positions.shape)

    def _checked(self, path: Path) -> dict[str, Tensor]:
        """A copy of a shard, mapped, once its checksum is found right."""
        tensors = load_checked(path, self.manifest)
        if tensors is None:
            path.unlink()
            raise FeatureStoreError(
                f"{path.name} of {self.storage} is damaged, or was on its way here; give the same command again, and "
                "if that does not help, delete it there and extract again, which makes it anew"
            )
        return tensors

    def prefetch(self, positions: Tensor) -> None:
        """Begin to fetch what positions of the store will be read from, (N,) int64, where it is elsewhere."""
        if not self._shards:
            self._copies.prefetch(shard_name(shard) for shard in self.shard_of(positions).unique().tolist())

    def require_room(self, shards: int) -> None:
        """Raises ConfigError if copies of so many shards, or of all, have no room."""
        needed = self._bytes * min(1.0, shards / self.manifest.shards)
        if needed > self._room:
            raise ConfigError(
                f"copies of features from {self.storage} may take {self._room / 1e9:g} GB, and {needed / 1e9:.3g} GB "
                "are in use at a time; raise cache_gigabytes, or extract with a smaller shard_size"
            )

    def shard_of(self, positions: Tensor) -> Tensor:
        """Number of the shard of each position."""
        return torch.searchsorted(self._first, positions, right=True) - 1

    def owner(self, positions: Tensor) -> Tensor:
        """Number of the conversation of each position."""
        return torch.searchsorted(self.offsets, positions, right=True) - 1

    def roots(self, exclude: Collection[int] = ()) -> Tensor:
        """Positions that can be roots, (R,) int64, ascending; not of the conversations in `exclude`."""
        parts = [
            eligible(text["loss_mask"], text["offsets"]).nonzero().squeeze(-1) + start
            for text, start in zip(self._texts, self._first, strict=False)
        ]
        found = torch.cat(parts)
        if not exclude:
            return found
        return found[~torch.isin(self.owner(found), torch.tensor(sorted(exclude)))]

    def followers(self, positions: Tensor) -> Tensor:
        """How many supervised positions follow each directly, (N,) -> (N,) int32."""
        return torch.cat([followers(text["loss_mask"], text["offsets"]).int() for text in self._texts])[positions]

    def gather(self, positions: Tensor, before: int, after: int) -> Stored:
        """The surroundings of many positions at once: `before` ahead of each, itself, `after` behind it.

        Args:
            positions: (N,) int64.

        Returns:
            input_ids and loss_mask (N, before + 1 + after), hidden (N, before + after, len(layers) * H): the last
            position's state is never asked for. Outside the position's own conversation: zeros and False.
        """
        index = positions[:, None] + torch.arange(-before, after + 1)
        conversation = self.owner(positions)
        inside = (index >= self.offsets[conversation, None]) & (index < self.offsets[conversation + 1, None])
        ids = torch.zeros(index.shape, dtype=torch.int64)
        mask = torch.zeros(index.shape, dtype=torch.bool)
        shards = self.shard_of(positions)
        for number in shards.unique().tolist():
            text, mine = self._texts[number], shards == number
            local = (index[mine] - self._first[number]).clamp(0, len(text["input_ids"]) - 1)
            ids[mine] = text["input_ids"][local].long()
            mask[mine] = text["loss_mask"][local]
        return Stored(ids * inside, mask & inside, self._states(index[:, :-1], inside[:, :-1]))

    def verify(self, target: Target, samples: int = 3, seed: int = 0) -> None:
        """Recompute a few stored conversations with the target.

        Raises:
            FeatureStoreError: they differ by more than batch shapes and rounding explain.
        """
        candidates = self.offsets.diff().nonzero().squeeze(-1)
        generator = torch.Generator().manual_seed(seed)
        chosen = candidates[torch.randperm(len(candidates), generator=generator)[:samples]]
        tolerance = max(TOLERANCE[target.dtype], TOLERANCE[self.manifest.stored_dtype])
        for index in chosen.tolist():
            stored, (shard, span) = self[index], self._span(index)
            there = self._kept[shard][span] if self._kept else slice(None)
            ids = stored.input_ids[None].to(target.device)
            fresh = target.features(ids, layers=self.layers)[0].cpu()[there]
            error = relative_error(stored.hidden[there], fresh)
            if not error <= tolerance:
                raise FeatureStoreError(
                    f"features in {self.storage} are not what target {target.name} computes now (conversation "
                    f"{index} differs by {error:.1%}, at most {tolerance:.1%} is rounding); extract again"
                )


def _take(source: Tensor, rows: Tensor, into: Tensor) -> None:
    """Rows of any dtype, byte by byte: `into` (R, W) keeps its own where `rows`, (R,) int64, is below 0."""
    take_rows(source.view(torch.uint8).numpy(), rows.numpy(), into.view(torch.uint8).numpy())


def _names(shards: list[int]) -> str:
    names = [Path(shard_name(shard)).stem for shard in shards]
    return ", ".join(names if len(names) <= 4 else [*names[:3], f"... {names[-1]}"])
