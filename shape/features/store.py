"""A store of features: shards of a target's states on conversations, in a folder or anywhere that fsspec reaches.

It holds `manifest.json` and `shard-00000.safetensors`, `shard-00001.safetensors`, ... Each shard covers a fixed range
of conversations, laid end to end:

    input_ids  (rows,) int32          loss_mask  (rows,) bool
    hidden     (kept, layers * H)     offsets    (conversations + 1,) int64, first row of each conversation
    scale      (kept, layers) bfloat16, where hidden is int8

`kept` are the rows whose states are stored (`shape.features.store.kept`): all, or those of answers and what stands
shortly before. A shard is written as a whole, with a checksum, so a store holds complete shards alone.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from shape.errors import ConfigError, FeatureStoreError, TargetMismatch
from shape.features.storage import Fetched, Place
from shape.files import reading, typed, written_whole
from shape.target.model import Target, TargetIdentity

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
# Numbers that a shard holds, as safetensors names them.
_KINDS = {
    torch.bool: "BOOL", torch.int8: "I8", torch.int32: "I32", torch.int64: "I64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
}  # fmt: skip
_HEADER = 4096  # bytes that hold a shard's header with certainty
_ROOM = 50 * 10**9
# Relative error of a state recomputed in another batch shape, or rounded; a wrong target or a shifted position gives
# about 1.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2, torch.int8: 0.15}


@dataclass(frozen=True)
class Manifest:
    """What a store was made from; two stores with equal manifests hold the same features.

    Attributes:
        dtype: of the stored states; int8 has a scale for each state.
        before: rows stored before each answer, beside the answer's own; None stores all.
    """

    target: TargetIdentity
    layers: tuple[int, ...]
    dtype: str
    hidden_size: int
    max_length: int
    shard_size: int
    conversations: int
    fingerprint: str
    before: int | None = None
    format_version: int = FORMAT_VERSION

    @classmethod
    def read(cls, address: str | Path | Place) -> "Manifest":
        place = Place(address)
        try:
            content = place.read(MANIFEST)
        except FileNotFoundError:
            raise FeatureStoreError(
                f"{place} is not a feature folder: it has no {MANIFEST}; make one with python -m shape.extract"
            ) from None
        with reading(f"{MANIFEST} of {place}", FeatureStoreError, "it is damaged: extract again into an empty folder"):
            values = json.loads(content)
            if values["format_version"] != FORMAT_VERSION:
                raise FeatureStoreError(
                    f"feature folder {place} has format {values['format_version']}, this version reads "
                    f"{FORMAT_VERSION}; extract it again"
                )
            found = typed(cls, values)
            sizes = found.hidden_size, found.max_length, found.shard_size, found.conversations, len(found.layers)
            if min(sizes) < 1 or (found.before or 0) < 0 or found.stored_dtype not in _TOLERANCE:
                raise ValueError("a size or the dtype is impossible")
            return found

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
    def stored_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def read_dtype(self) -> torch.dtype:
        """Of the states as they are read: those of int8 are as exact in bfloat16."""
        return torch.bfloat16 if self.dtype == "int8" else self.stored_dtype

    @property
    def bytes_per_state(self) -> int:
        """Of all layers of one position."""
        return state_bytes(self.dtype, self.hidden_size, len(self.layers))

    def conversations_of(self, shard: int) -> range:
        start = shard * self.shard_size
        return range(start, min(start + self.shard_size, self.conversations))

    def differences(self, other: "Manifest") -> list[str]:
        """Phrases naming what differs from what is wanted. The target's name and the shard size do not count, nor do
        layers and rows beyond those wanted.
        """
        found = [f"target's {phrase}" for phrase in self.target.differences(other.target)]
        if self.fingerprint != other.fingerprint:
            found.append("the conversations")
        if not set(other.layers) <= set(self.layers):
            found.append(f"layers ({self.layers} there, {other.layers} wanted)")
        if self.before is not None and (other.before is None or other.before > self.before):
            wanted = "all" if other.before is None else other.before
            found.append(f"rows before each answer ({self.before} there, {wanted} wanted)")
        for name in ("dtype", "max_length"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                found.append(f"{name} ({mine} there, {theirs} wanted)")
        return found


def state_bytes(dtype: str, hidden_size: int, layers: int) -> int:
    """Bytes of one position's stored states."""
    scale = torch.bfloat16.itemsize if dtype == "int8" else 0
    return layers * (hidden_size * getattr(torch, dtype).itemsize + scale)


class Stored(NamedTuple):
    """One conversation of a store: input_ids (T,) int64, loss_mask (T,) bool, hidden (T, layers * H)."""

    input_ids: Tensor
    loss_mask: Tensor
    hidden: Tensor


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


def followers(loss_mask: Tensor, offsets: Tensor) -> Tensor:
    """How many supervised rows stand directly behind each, without a gap: (rows,) int64. Arguments as `eligible`'s."""
    rows = torch.arange(len(loss_mask) + 1)
    stops = torch.where(F.pad(loss_mask, (0, 1)), len(loss_mask), rows)
    stops[offsets] = offsets
    return stops.flip(0).cummin(0).values.flip(0)[1:] - rows[1:]


def kept(loss_mask: Tensor, offsets: Tensor, before: int | None) -> Tensor:
    """Rows whose states are stored: those of answers and `before` rows ahead of each, which is all that predictors with
    a window of so many states read; None keeps all.

    Args:
        loss_mask: (rows,) bool, conversations end to end.
        offsets: (conversations + 1,) int64, first row of each conversation and the end.

    Returns:
        (rows,) bool.
    """
    if before is None:
        return torch.ones_like(loss_mask)
    rows = torch.arange(len(loss_mask))
    following = torch.where(loss_mask, rows, 1 << 62).flip(0).cummin(0).values.flip(0)  # the next one of an answer
    end = offsets[torch.searchsorted(offsets, rows, right=True).clamp(max=len(offsets) - 1)]
    return (following - rows <= before) & (following < end)


def quantised(states: Tensor, hidden_size: int) -> tuple[Tensor, Tensor]:
    """States in whole steps of their own: int8 (N, L * H), and the size of a step for each state, bfloat16 (N, L)."""
    apart = states.float().unflatten(-1, (-1, hidden_size))
    scale = (apart.abs().amax(-1) / 127).clamp(min=1e-30).bfloat16()
    steps = (apart / scale.float()[..., None]).round().clamp(-127, 127)
    return steps.to(torch.int8).flatten(-2), scale


def restored(steps: Tensor, scale: Tensor) -> Tensor:
    """States in bfloat16, (..., L * H) int8 and (..., L) -> (..., L * H)."""
    return (steps.unflatten(-1, (scale.shape[-1], -1)).bfloat16() * scale[..., None]).flatten(-2)


class FeatureStore(Sequence[Stored]):
    """A complete store: conversations by index, examples by row. What it holds of texts is in memory or mapped into it;
    states are mapped from the folder, or from copies of the shards in use where the store lies elsewhere.

    Args:
        identity: of the target that must have made it; None takes any.
        layers: to read, of those stored; None reads all.
        cache: copies go below this folder, to one named by the manifest's digest; None is ~/.cache/shape.
        room: bytes that the copies may take.

    Attributes:
        manifest: what it was made from.
        layers: those that are read.
        offsets: (conversations + 1,) int64, first row of each conversation in the store.

    Raises:
        TargetMismatch: made by another target than `identity`.
        FeatureStoreError: absent, half-written or damaged.
    """

    def __init__(
        self,
        address: str | Path | Place,
        identity: TargetIdentity | None = None,
        layers: Sequence[int] | None = None,
        cache: Path | None = None,
        room: int = _ROOM,
    ) -> None:
        self.place = place = Place(address)
        self.manifest = manifest = Manifest.read(place)
        self.layers = manifest.layers if layers is None else tuple(layers)
        if identity is not None and (differences := manifest.target.differences(identity)):
            raise TargetMismatch(
                f"features in {place} were made by {manifest.target.name}, which differs from target "
                f"{identity.name} in {', '.join(differences)}; give another folder or extract again"
            )
        headers = _headers(place, manifest)
        self._bytes = sum(header.size for header in headers if header is not None)
        if missing := [shard for shard, header in enumerate(headers) if header is None]:
            raise FeatureStoreError(
                f"feature folder {place} is half-written: {len(missing)} of {manifest.shards} shards "
                f"are missing or damaged ({_names(missing)}); run the same command again to complete it"
            )
        if absent := set(self.layers) - set(manifest.layers):
            raise FeatureStoreError(
                f"features in {place} are of layers {list(manifest.layers)}, without {sorted(absent)}; "
                "extract again with all of them"
            )
        self._cache = cache or Path.home() / ".cache/shape"
        self._room = room
        self._shards: list[dict[str, Tensor]] = []  # those of a folder, mapped
        if place.folder is not None:
            self._shards = [_load(place.folder / shard_name(shard)) for shard in range(manifest.shards)]
            self._texts = self._shards
        else:
            self._texts = _texts(place, [header for header in headers if header is not None])
            self._copies = Fetched(place, self._cache / manifest.digest, room, self._checked)
        self._first_row = torch.tensor([0, *(len(text["input_ids"]) for text in self._texts)]).cumsum(0)
        for shard, text in enumerate(self._texts):
            ends = text["offsets"]
            if int(ends[0]) or int(ends[-1]) != len(text["input_ids"]) or bool((ends.diff() < 0).any()):
                raise _damaged(place, shard)
        parts = [text["offsets"][:-1] + start for text, start in zip(self._texts, self._first_row, strict=False)]
        self.offsets = torch.cat([*parts, self._first_row[-1:]])
        # Where only some states are stored: which rows have one, and its number.
        some = self._texts if manifest.before is not None else []
        self._kept = [kept(text["loss_mask"], text["offsets"], manifest.before) for text in some]
        for shard, (rows, header) in enumerate(zip(self._kept, headers, strict=False)):
            if header is not None and int(rows.sum()) != header.tensors["hidden"][1][0]:
                raise _damaged(place, shard)
        self._state_of = [rows.cumsum(0) - 1 for rows in self._kept]

    def __reduce__(self) -> tuple[Any, ...]:
        # Data workers map the files again instead of copying them.
        return FeatureStore, (self.place.address, None, self.layers, self._cache, self._room)

    def __len__(self) -> int:
        return self.manifest.conversations

    @property
    def rows(self) -> int:
        """Stored positions (tokens)."""
        return int(self._first_row[-1])

    def _span(self, index: int) -> tuple[int, slice]:
        """The shard of a conversation, and its rows there."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = index // self.manifest.shard_size
        start = int(self._first_row[shard])
        return shard, slice(int(self.offsets[index]) - start, int(self.offsets[index + 1]) - start)

    def text(self, index: int) -> tuple[Tensor, Tensor]:
        """input_ids (T,) int64 and loss_mask (T,) bool of a conversation, without its states."""
        shard, span = self._span(index)
        return self._texts[shard]["input_ids"][span].long(), self._texts[shard]["loss_mask"][span]

    def __getitem__(self, index: int) -> Stored:  # type: ignore[override]  # no slices
        """States that are not stored are zeros."""
        shard, span = self._span(index)
        return Stored(*self.text(index), self._states(shard, torch.arange(span.start, span.stop)))

    def _states(self, shard: int, rows: Tensor) -> Tensor:
        """The layers asked for, (..., len(layers) * H), of rows of a shard, (...) int64; zeros where none is stored."""
        stored = self._shards[shard] if self._shards else self._copies[shard_name(shard)]
        index = self._state_of[shard][rows].clamp(min=0) if self._kept else rows
        hidden, scale = stored["hidden"][index], stored["scale"][index] if "scale" in stored else None
        if self.layers != self.manifest.layers:
            columns = [self.manifest.layers.index(layer) for layer in self.layers]
            hidden = hidden.unflatten(-1, (-1, self.manifest.hidden_size))[..., columns, :].flatten(-2)
            scale = None if scale is None else scale[..., columns]
        states = hidden if scale is None else restored(hidden, scale)
        return states * self._kept[shard][rows][..., None] if self._kept else states

    def _checked(self, path: Path) -> dict[str, Tensor]:
        """A copy of a shard, mapped, once its checksum is found right."""
        try:
            said, tensors = _said(path), _load(path)
            sound = said == _label(self.manifest, tensors)
        except FeatureStoreError:
            sound = False
        if not sound:
            path.unlink()
            raise FeatureStoreError(
                f"{path.name} of {self.place} is damaged, or was on its way here; give the same command again, and if "
                "that does not help, delete it there and extract again, which makes it anew"
            )
        return tensors

    def ahead(self, rows: Tensor) -> None:
        """Begin to fetch what rows of the store will be read from, (P,) int64, where it lies elsewhere."""
        if not self._shards:
            self._copies.ahead(shard_name(shard) for shard in self.shard_of(rows).unique().tolist())

    def require_room(self, shards: int) -> None:
        """Raises ConfigError if copies of so many shards, or of all, have no room."""
        needed = self._bytes * min(1.0, shards / self.manifest.shards)
        if needed > self._room:
            raise ConfigError(
                f"copies of features from {self.place} may take {self._room / 1e9:g} GB, and {needed / 1e9:.3g} GB are "
                "read in turns; raise cache_gigabytes, or extract with a smaller shard_size"
            )

    def shard_of(self, rows: Tensor) -> Tensor:
        """Number of the shard that each row of the store is in."""
        return torch.searchsorted(self._first_row, rows, right=True) - 1

    def __iter__(self) -> Iterator[Stored]:
        return (self[index] for index in range(len(self)))

    def roots(self, exclude: Collection[int] = ()) -> Tensor:
        """Rows of the store that can be roots, (R,) int64, ascending; not of the conversations in `exclude`."""
        parts = [
            eligible(text["loss_mask"], text["offsets"]).nonzero().squeeze(-1) + start
            for text, start in zip(self._texts, self._first_row, strict=False)
        ]
        found = torch.cat(parts)
        if not exclude:
            return found
        return found[~torch.isin(self.owner(found), torch.tensor(sorted(exclude)))]

    def followers(self, rows: Tensor) -> Tensor:
        """How many supervised positions stand directly behind each of some rows of the store, (P,) -> (P,) int32."""
        return torch.cat([followers(text["loss_mask"], text["offsets"]).int() for text in self._texts])[rows]

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
        hidden = torch.zeros(len(rows), before + after, width, dtype=self.manifest.read_dtype)
        shards = self.shard_of(rows)
        for number in shards.unique().tolist():
            text, mine = self._texts[number], shards == number
            local = (index[mine] - self._first_row[number]).clamp(0, len(text["input_ids"]) - 1)
            ids[mine] = text["input_ids"][local].long()
            mask[mine] = text["loss_mask"][local]
            hidden[mine] = self._states(number, local[:, :-1])
        hidden.masked_fill_(~inside[:, :-1, None], 0)
        return Stored(ids * inside, mask & inside, hidden)

    def verify(self, target: Target, samples: int = 3, seed: int = 0) -> None:
        """Recompute a few stored conversations with the target.

        Raises:
            FeatureStoreError: they differ by more than batch shapes and rounding explain.
        """
        lengths = self.offsets[1:] - self.offsets[:-1]
        candidates = lengths.nonzero().squeeze(-1)
        generator = torch.Generator().manual_seed(seed)
        chosen = candidates[torch.randperm(len(candidates), generator=generator)[:samples]]
        tolerance = max(_TOLERANCE[target.dtype], _TOLERANCE[self.manifest.stored_dtype])
        for index in chosen.tolist():
            stored, (shard, span) = self[index], self._span(index)
            ids, there = (
                stored.input_ids[None].to(target.device),
                self._kept[shard][span] if self._kept else slice(None),
            )
            fresh = target.features(ids, layers=self.layers)[0].float().cpu()[there]
            error = float((fresh - stored.hidden[there].float()).norm() / fresh.norm())
            if not error <= tolerance:
                raise FeatureStoreError(
                    f"features in {self.place} are not what target {target.name} computes now (conversation "
                    f"{index} differs by {error:.1%}, at most {tolerance:.1%} is rounding); extract again"
                )


def refuse_others(place: Place, target: Target) -> None:
    """Raises FeatureStoreError if the folder holds features of another target; cheap, so ask before long work."""
    if place.exists(MANIFEST):
        differences = Manifest.read(place).target.differences(target.identity)
        if differences:
            raise FeatureStoreError(
                f"features in {place} were made by another target: it differs in {', '.join(differences)}; give "
                "another folder, or delete this one"
            )


def missing_shards(place: Place, manifest: Manifest) -> list[int]:
    """Shards that are absent, cut off, or belong to another manifest."""
    return [shard for shard, header in enumerate(_headers(place, manifest)) if header is None]


def is_sound(place: Place, manifest: Manifest, shard: int) -> bool:
    """Whether a complete shard of a folder holds the bytes that were written. Reads all of it; elsewhere that is done
    when a shard is fetched.
    """
    if place.folder is None:
        return True
    path = place.folder / shard_name(shard)
    try:
        said, tensors = _said(path), _load(path)
    except FeatureStoreError:
        return False
    return said == _label(manifest, tensors)


def write_shard(place: Place, manifest: Manifest, shard: int, tensors: dict[str, Tensor]) -> None:
    """Write a shard so that it is there completely or not at all, also after a crash of the machine.

    Raises:
        DiskSpaceError: there is no space left.
    """
    metadata = {"of": _label(manifest, tensors)}
    if place.folder is not None:
        with written_whole(place.folder / shard_name(shard)) as temporary:
            save_file(tensors, temporary, metadata=metadata)
    else:
        place.write(shard_name(shard), save(tensors, metadata=metadata))


def shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.safetensors"


def _names(shards: list[int]) -> str:
    names = [Path(shard_name(shard)).stem for shard in shards]
    return ", ".join(names if len(names) <= 4 else [*names[:3], f"... {names[-1]}"])


class _Header(NamedTuple):
    """Where a shard's tensors lie: (dtype, shape, first byte in the file, end) of each."""

    name: str
    size: int
    tensors: dict[str, tuple[str, list[int], int, int]]


def _headers(place: Place, manifest: Manifest) -> list[_Header | None]:
    """Headers of all shards; None of one that is absent, cut off, or of another manifest."""
    sizes = place.sizes()
    present = [shard for shard in range(manifest.shards) if sizes.get(shard_name(shard), 0) > 8]
    found: list[_Header | None] = [None] * manifest.shards
    if present:
        starts = place.read_parts([(shard_name(shard), 0, min(_HEADER, sizes[shard_name(shard)])) for shard in present])
        for shard, start in zip(present, starts, strict=True):
            found[shard] = _header(manifest, shard, start, sizes[shard_name(shard)])
    return found


def _header(manifest: Manifest, shard: int, start: bytes, size: int) -> _Header | None:
    """The header that a file of `size` bytes starts with, as safetensors has it: a length, JSON, the tensors' bytes."""
    try:
        length = 8 + int.from_bytes(start[:8], "little")
        values = json.loads(start[8:length])
        of = values.pop("__metadata__")["of"]
        tensors = {
            name: (each["dtype"], each["shape"], length + each["data_offsets"][0], length + each["data_offsets"][1])
            for name, each in values.items()
        }
        whole = size == max(end for *_, end in tensors.values())
        rows, states = tensors["input_ids"][1][0], tensors["hidden"][1][0]
        wanted = {
            "input_ids": (torch.int32, [rows]),
            "loss_mask": (torch.bool, [rows]),
            "offsets": (torch.int64, [len(manifest.conversations_of(shard)) + 1]),
            "hidden": (manifest.stored_dtype, [states, manifest.width]),
        }
        if manifest.stored_dtype == torch.int8:
            wanted["scale"] = (torch.bfloat16, [states, len(manifest.layers)])
        fits = tensors.keys() == wanted.keys() and (states == rows if manifest.before is None else states <= rows)
        for name, (dtype, shape) in wanted.items():
            kind, found, start_at, end = tensors[name]
            fits = (
                fits
                and kind == _KINDS[dtype]
                and found == shape
                and end - start_at == math.prod(shape) * dtype.itemsize
            )
        return _Header(shard_name(shard), size, tensors) if whole and fits and of.startswith(manifest.digest) else None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _texts(place: Place, headers: Sequence[_Header]) -> list[dict[str, Tensor]]:
    """What shards that lie elsewhere hold beside states, a thousandth of their bytes."""
    kinds = {"input_ids": torch.int32, "loss_mask": torch.bool, "offsets": torch.int64}
    parts = [(header.name, *header.tensors[name][2:]) for header in headers for name in kinds]
    read = iter(place.read_parts(parts))
    return [
        {name: torch.frombuffer(bytearray(next(read)) or bytearray(0), dtype=kind) for name, kind in kinds.items()}
        for _ in headers
    ]


def _load(path: Path) -> dict[str, Tensor]:
    with _opened(path) as file:  # tensors are views of the mapped file
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def _said(path: Path) -> str:
    """The label that a shard carries."""
    with _opened(path) as file:
        return file.metadata()["of"]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.exists():  # a copy that another process has dropped
        raise FileNotFoundError(path)
    with (
        reading(f"shard {path}", FeatureStoreError, "delete it and extract again, which makes it anew"),
        safe_open(path, framework="pt") as file,
    ):
        yield file


def _damaged(place: Place, shard: int) -> FeatureStoreError:
    return FeatureStoreError(
        f"{shard_name(shard)} of {place} is damaged; delete it there and extract again, which makes it anew"
    )


def _label(manifest: Manifest, tensors: dict[str, Tensor]) -> str:
    """What a shard says of itself, in one piece of metadata, for several are written in any order: the digest of its
    manifest, and CRC-32 of all bytes, which finds what a disk or a copy has changed, at gigabytes a second.
    """
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data, value)
    return f"{manifest.digest} {value:08x}"
