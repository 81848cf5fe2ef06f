"""What a feature store was made from: written beside its shards, compared before they are used."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass

import torch

from shape.errors import FeatureStoreError
from shape.features.storage import Storage
from shape.files import reading, typed
from shape.target.identity import TargetIdentity
from shape.target.model import Target

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
DTYPES = ("float32", "bfloat16", "float16", "int8", "float64")
"""Of stored states; int8 with a scale for each state."""


@dataclass(frozen=True)
class Manifest:
    """Two stores with equal manifests hold the same features.

    Attributes:
        layers: whose states are stored: -1 is the vector that enters the output embedding, others index transformers'
            `hidden_states` (0: the embedding).
        dtype: of the stored states.
        before: states stored before each answer, beside the answer's own; None stores all.
        weights: `weights_hash` of the target; empty is unknown.
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
    weights: str = ""
    format_version: int = FORMAT_VERSION

    @classmethod
    def read(cls, storage: Storage) -> "Manifest":
        """Raises FeatureStoreError if there is none, or it is damaged or of another version."""
        try:
            content = storage.read(MANIFEST)
        except FileNotFoundError:
            raise FeatureStoreError(
                f"{storage} is not a feature folder: it has no {MANIFEST}; make one with shape extract"
            ) from None
        with reading(
            f"{MANIFEST} of {storage}", FeatureStoreError, "it is damaged: extract again into an empty folder"
        ):
            values = json.loads(content)
            if values["format_version"] != FORMAT_VERSION:
                raise FeatureStoreError(
                    f"feature folder {storage} has format {values['format_version']}, this version reads "
                    f"{FORMAT_VERSION}; extract it again"
                )
            found = typed(cls, values)
            sizes = found.hidden_size, found.max_length, found.shard_size, found.conversations, len(found.layers)
            if min(sizes) < 1 or (found.before or 0) < 0 or found.dtype not in DTYPES:
                raise ValueError("a size or the dtype is impossible")
            return found

    def to_json(self) -> str:
        values = {name: value for name, value in asdict(self).items() if name != "weights" or value}
        return json.dumps(values, indent=2, sort_keys=True) + "\n"

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

    def conversations_of(self, shard: int) -> range:
        start = shard * self.shard_size
        return range(start, min(start + self.shard_size, self.conversations))

    def differences(self, other: "Manifest") -> list[str]:
        """Phrases naming what differs from what is wanted. The target's name and the shard size do not count, nor do
        layers and states beyond those wanted.
        """
        found = [f"target's {phrase}" for phrase in self.target.differences(other.target)]
        if self.weights and other.weights and self.weights != other.weights:
            found.append("the target's weights")
        if self.fingerprint != other.fingerprint:
            found.append("the conversations")
        if not set(other.layers) <= set(self.layers):
            found.append(f"layers ({self.layers} there, {other.layers} wanted)")
        if self.before is not None and (other.before is None or other.before > self.before):
            wanted = "all" if other.before is None else other.before
            found.append(f"states before each answer ({self.before} there, {wanted} wanted)")
        for name in ("dtype", "max_length"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                found.append(f"{name} ({mine} there, {theirs} wanted)")
        return found


def state_bytes(dtype: str, hidden_size: int, layers: int) -> int:
    """Bytes of one position's stored states."""
    scale = torch.bfloat16.itemsize if dtype == "int8" else 0
    return layers * (hidden_size * getattr(torch, dtype).itemsize + scale)


def refuse_others(storage: Storage, target: Target) -> None:
    """Raises FeatureStoreError if the folder holds features of another target; cheap, so ask before long work."""
    if storage.exists(MANIFEST):
        differences = Manifest.read(storage).target.differences(target.identity)
        if differences:
            raise FeatureStoreError(
                f"features in {storage} were made by another target: it differs in {', '.join(differences)}; give "
                "another folder, or delete this one"
            )
