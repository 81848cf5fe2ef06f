"""Shards, the files of a feature store: written as a whole, with a checksum, and checked before they are used.

`shard-00000.safetensors` holds the first `shard_size` conversations laid end to end, P positions of which S have a
stored state, and so on:

    input_ids  (P,) int32              loss_mask  (P,) bool
    hidden     (S, layers * H)         offsets    (conversations + 1,) int64, first position of each conversation
    scale      (S, layers) bfloat16, where hidden is int8
"""

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from shape.errors import FeatureStoreError
from shape.features.manifest import Manifest
from shape.features.storage import Storage
from shape.files import reading, written_whole

_NAMES = {
    torch.bool: "BOOL", torch.int8: "I8", torch.int32: "I32", torch.int64: "I64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
}  # fmt: skip
"""Dtypes as safetensors names them."""
_TEXTS = {"input_ids": torch.int32, "loss_mask": torch.bool, "offsets": torch.int64}
_HEADER = 4096  # bytes that hold a shard's header with certainty


class Header(NamedTuple):
    """Where a shard's tensors are: (dtype, shape, first byte in the file, end) of each."""

    name: str
    size: int
    tensors: dict[str, tuple[str, list[int], int, int]]

    @property
    def states(self) -> int:
        return self.tensors["hidden"][1][0]


def shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.safetensors"


def write_shard(storage: Storage, manifest: Manifest, shard: int, tensors: dict[str, Tensor]) -> None:
    """Write a shard so that it is there completely or not at all, also after a crash of the machine.

    Raises:
        DiskSpaceError: there is no space left.
    """
    metadata = {"of": _label(manifest, tensors)}
    if storage.folder is not None:
        with written_whole(storage.folder / shard_name(shard)) as temporary:
            save_file(tensors, temporary, metadata=metadata)
    else:
        storage.write(shard_name(shard), save(tensors, metadata=metadata))


def load_shard(path: Path) -> dict[str, Tensor]:
    """Its tensors, as views of the mapped file. Raises FeatureStoreError, and FileNotFoundError if it is gone."""
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def load_checked(path: Path, manifest: Manifest) -> dict[str, Tensor] | None:
    """The same, or None if it does not hold the bytes that were written; reads all of them."""
    try:
        with _opened(path) as file:
            label = file.metadata()["of"]
        tensors = load_shard(path)
    except FeatureStoreError:
        return None
    return tensors if label == _label(manifest, tensors) else None


def missing_shards(storage: Storage, manifest: Manifest) -> list[int]:
    """Shards that are absent, cut off, or belong to another manifest."""
    return [shard for shard, header in enumerate(headers(storage, manifest)) if header is None]


def headers(storage: Storage, manifest: Manifest) -> list[Header | None]:
    """Headers of all shards; None of one that is absent, cut off, or of another manifest."""
    sizes = storage.sizes()
    present = [shard for shard in range(manifest.shards) if sizes.get(shard_name(shard), 0) > 8]
    found: list[Header | None] = [None] * manifest.shards
    parts = [(shard_name(shard), 0, min(_HEADER, sizes[shard_name(shard)])) for shard in present]
    for shard, start in zip(present, storage.read_parts(parts), strict=True):
        found[shard] = _header(manifest, shard, start, sizes[shard_name(shard)])
    return found


def _header(manifest: Manifest, shard: int, start: bytes, size: int) -> Header | None:
    """The header of a file of `size` bytes, as safetensors has it: a length, JSON, the tensors' bytes."""
    try:
        length = 8 + int.from_bytes(start[:8], "little")
        values = json.loads(start[8:length])
        of = values.pop("__metadata__")["of"]
        tensors = {
            name: (each["dtype"], each["shape"], length + each["data_offsets"][0], length + each["data_offsets"][1])
            for name, each in values.items()
        }
        positions, states = tensors["input_ids"][1][0], tensors["hidden"][1][0]
        wanted = {
            "input_ids": (torch.int32, [positions]),
            "loss_mask": (torch.bool, [positions]),
            "offsets": (torch.int64, [len(manifest.conversations_of(shard)) + 1]),
            "hidden": (manifest.stored_dtype, [states, manifest.width]),
        }
        if manifest.stored_dtype == torch.int8:
            wanted["scale"] = (torch.bfloat16, [states, len(manifest.layers)])
        fits = (
            of.startswith(manifest.digest)
            and size == max(end for *_, end in tensors.values())
            and tensors.keys() == wanted.keys()
            and (states == positions if manifest.before is None else states <= positions)
            and all(
                tensors[name][:2] == (_NAMES[dtype], shape)
                and tensors[name][3] - tensors[name][2] == math.prod(shape) * dtype.itemsize
                for name, (dtype, shape) in wanted.items()
            )
        )
        return Header(shard_name(shard), size, tensors) if fits else None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def read_texts(storage: Storage, found: Sequence[Header]) -> list[dict[str, Tensor]]:
    """What shards hold beside states, a thousandth of their bytes, without reading these."""
    parts = [(header.name, *header.tensors[name][2:]) for header in found for name in _TEXTS]
    read = iter(storage.read_parts(parts))
    return [{name: _tensor(next(read), dtype) for name, dtype in _TEXTS.items()} for _ in found]


def _tensor(content: bytes, dtype: torch.dtype) -> Tensor:
    """From its bytes; torch reads no buffer that is empty."""
    return torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)


def quantise(states: Tensor, hidden_size: int) -> tuple[Tensor, Tensor]:
    """States in whole steps of their own: int8 (S, L * H), and the size of a step for each state, bfloat16 (S, L)."""
    apart = states.float().unflatten(-1, (-1, hidden_size))
    scale = (apart.abs().amax(-1) / 127).clamp(min=1e-30).bfloat16()
    steps = (apart / scale.float()[..., None]).round().clamp(-127, 127)
    return steps.to(torch.int8).flatten(-2), scale


def dequantise(steps: Tensor, scale: Tensor) -> Tensor:
    """States in bfloat16, (..., L * H) int8 and (..., L) -> (..., L * H)."""
    return (steps.unflatten(-1, (scale.shape[-1], -1)).bfloat16() * scale[..., None]).flatten(-2)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.exists():  # a copy that another process has dropped
        raise FileNotFoundError(path)
    with (
        reading(f"shard {path}", FeatureStoreError, "delete it and extract again, which makes it anew"),
        safe_open(path, framework="pt") as file,
    ):
        yield file


def _label(manifest: Manifest, tensors: dict[str, Tensor]) -> str:
    """The digest of a shard's manifest, and CRC-32 of all bytes, which finds what a disk or a copy has changed, at
    gigabytes a second. One piece of metadata: several would be written in any order.
    """
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data, value)
    return f"{manifest.digest} {value:08x}"
