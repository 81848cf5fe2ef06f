"""Which features are computed, of what, and how they are stored. Nothing heavy is imported, so that help is quick."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shape.errors import ConfigError, require
from shape.features.trainer import TrainerOptions
from shape.target.options import TargetOptions

if TYPE_CHECKING:
    from shape.target.model import Target

_MAX_LENGTH = 1024
_STORABLE = ("float32", "bfloat16", "float16", "int8")


@dataclass
class StorageOptions:
    """How features are written and read; no influence on what is learned but for the rounding of `feature_dtype`.

    Attributes:
        feature_dtype: of the stored states: float32, bfloat16, float16, or int8 with a scale for each state; null is
            the target's own.
        before: states stored before each answer, beside the answer's own: the predictor's window suffices where it does
            not attend to the whole text; null stores all.
        batch_size: conversations per forward of the target; fewer where they have more than 16,384 tokens together.
        shard_size: conversations per shard, the unit of work and of resuming.
        more_layers: layers stored beside those that are read, so that predictors of other layers can share the folder.
        cache: folder below which copies of shards from elsewhere (s3://...) are kept; null is `features` below the
            folder that SHAPE_CACHE names, or below ~/.cache/shape-decoding.
        cache_gigabytes: that the copies may take.
    """

    feature_dtype: str | None = None
    before: int | None = None
    batch_size: int = 8
    shard_size: int = 128
    more_layers: list[int] = field(default_factory=list)
    cache: str | None = None
    cache_gigabytes: float = 50.0

    def check_storage(self, group: str = "") -> None:
        """Raises ConfigError for the first value out of range, under its name behind that of its group."""
        require(self, "batch_size shard_size", above=0, group=group)
        require(self, "cache_gigabytes", least=0, group=group)
        if self.feature_dtype is not None and self.feature_dtype not in _STORABLE:
            raise ConfigError(f"{group}feature_dtype is {self.feature_dtype}; give one of {', '.join(_STORABLE)}")
        if self.before is not None and self.before < 1:
            raise ConfigError(f"{group}before is {self.before}; give a positive number of states, or null for all")


@dataclass
class FeatureOptions(StorageOptions):
    """Which features are computed, and how they are stored.

    Attributes:
        max_length: tokens kept of each conversation; null is 1,024, or as many as the target has positions.
        skip_bad_rows: count malformed rows and continue; chats that the template refuses are stored empty.
        layers: -1 is h, the vector that enters the output embedding; 0 is the output of the input embedding, k >= 1
            that of the k-th block. h comes last: it is what predictors predict.
    """

    max_length: int | None = None
    layers: list[int] = field(default_factory=lambda: [-1])
    skip_bad_rows: bool = False

    @property
    def stored(self) -> tuple[int, ...]:
        """All layers of the folder: those that are read, behind others."""
        return (*sorted(set(self.more_layers) - set(self.layers)), *self.layers)

    def check(self, target: "Target") -> None:
        """Raises ConfigError for values out of range, before any work is done."""
        self.check_for(target.name, target.max_positions, target.config.num_hidden_layers)

    def check_for(self, target: str, positions: int | None, depth: int | None) -> None:
        """The same where the target is known by name, positions and number of blocks alone."""
        self.check_storage()
        require(self, "max_length", above=0)
        if longest(self.max_length, positions) > (positions or math.inf):
            raise ConfigError(
                f"max_length is {self.max_length}, but target {target} has {positions} positions; "
                f"give max_length {positions} or less"
            )
        if not self.layers or self.layers[-1] != -1:
            raise ConfigError(f"layers are {self.layers}; end them in -1, the state that predictors predict")
        if len(set(self.layers)) < len(self.layers):
            raise ConfigError(f"layers {self.layers} name one twice; give each once")
        if wrong := [layer for layer in self.stored if not -1 <= layer <= (layer if depth is None else depth)]:
            raise ConfigError(
                f"layers {wrong} do not exist in target {target}; give -1, or 0 (the embedding) to the number of its "
                f"blocks{'' if depth is None else f', {depth}'}"
            )


@dataclass(kw_only=True)
class _RunOptions(FeatureOptions, TargetOptions):
    """Of the command, whether it extracts or says what that would take.

    Attributes:
        endpoint: base URL of a vLLM that computes the states instead, started with `extract_hidden_states`, for example
            http://localhost:8000/v1, or of several, with commas between them, which share the requests; batch_size
            conversations are requested at a time.
        model: the name under which the endpoint serves the target.
        chat_template_kwargs: given to the target's chat template, for example {"enable_thinking": false}.
        limit: at most so many conversations of `data`.
        dtype: dtype to run the target in; null is its checkpoint's own.
        device_map: spreads the target over devices, for example auto; null puts it where the trainer computes.
        trainer: devices, processes and nodes, as Lightning's Trainer has them.
    """

    endpoint: list[str] | str | None = None
    model: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    limit: int | None = None
    dtype: str | None = None
    device_map: str | dict[str, str | int] | None = None
    trainer: TrainerOptions = field(default_factory=TrainerOptions)


@dataclass(kw_only=True)
class ExtractOptions(_RunOptions):
    """What to extract, from what, to where.

    Attributes:
        target: folder or hub id of the target, or quickstart-target.
        data: file, folder or hub dataset with conversations.
        output: folder of the features, or an address that fsspec knows (s3://...).
    """

    target: str
    data: str
    output: str


@dataclass(kw_only=True)
class CostOptions(_RunOptions):
    """What would be extracted, and on what. How the target runs (endpoint, model, dtype, device_map, trainer) has no
    influence; it is taken so that --dry-run can be added to a command as it is.

    Attributes:
        target: folder or hub id, of which config.json is read; or give parameters and hidden_size.
        parameters: of the target.
        hidden_size: of the target.
        data: conversations, a sample of which is measured with the target's tokenizer; null takes the numbers below.
        conversations: how many.
        tokens: of a conversation, in the mean.
        answers: share of the tokens that are the assistant's.
        turns: answers in a conversation, in the mean.
        output: where features would be stored; its free space decides, unless disk_gigabytes says so.
        disk_gigabytes: free for features.
        epochs: over the data in training, which makes four of much data; each costs online mode a forward of all of it.
        flops: of one accelerator, dense, in bfloat16, per second (989e12: an H100 SXM).
        utilisation: share of them that a forward over whole texts reaches.
        bandwidth: bytes per second of its memory.
        memory: bytes of it.
        answered_together: conversations, when the target writes its answers.
        occupancy: share of these whose answers are still being written, in the mean: here all wait for the longest,
            while a server fills their places.
    """

    target: str | None = None
    parameters: float | None = None
    hidden_size: int | None = None
    data: str | None = None
    conversations: int = 100_000
    tokens: float = 1000.0
    answers: float = 0.6
    turns: float = 2.0
    output: str | None = None
    disk_gigabytes: float | None = None
    epochs: float = 4.0
    flops: float = 989e12
    utilisation: float = 0.4
    bandwidth: float = 3.35e12
    memory: float = 80e9
    answered_together: int = 64
    occupancy: float = 0.4

    def validate(self) -> None:
        """Raises ConfigError for values out of range."""
        sizes = (self.parameters, self.hidden_size)
        if (self.target is None) == (None in sizes) or (self.target is not None and sizes != (None, None)):
            raise ConfigError("give either a target, or its parameters and hidden_size")
        require(self, "parameters hidden_size conversations tokens answers turns disk_gigabytes epochs flops", above=0)
        require(self, "utilisation bandwidth memory answered_together occupancy limit", above=0)
        for name in ("answers", "utilisation", "occupancy"):
            if getattr(self, name) > 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, and it is a share; give at most 1")


def longest(max_length: int | None, positions: int | None) -> int:
    """Tokens kept of each conversation: as given, or 1,024 as far as the target's positions reach."""
    return max_length if max_length is not None else min(_MAX_LENGTH, positions or _MAX_LENGTH)


def with_state(layers: Sequence[int]) -> list[int]:
    """Layers that are read and, last, -1: the state h, of which the target's distributions are made."""
    return [*layers] if layers[-1:] == [-1] else [*layers, -1]
