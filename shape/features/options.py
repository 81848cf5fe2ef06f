"""Which features are computed, and how they are stored."""

import math
from dataclasses import dataclass, field

from shape.errors import ConfigError
from shape.target.model import Target

_MAX_LENGTH = 1024
_STORABLE = ("float32", "bfloat16", "float16", "int8")


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
        skip_bad_rows: count malformed rows and continue; chats that the template refuses are stored empty.
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
        """Raises ConfigError for values out of range, before any work is done."""
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
    return max_length if max_length is not None else min(_MAX_LENGTH, positions or _MAX_LENGTH)
