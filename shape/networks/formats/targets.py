"""What a conversion has to know of the target: a few numbers of its configuration, and its name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from shape import bundled
from shape.errors import CheckpointError
from shape.files import reading


class TargetUnknown(CheckpointError):
    """Something has to be known of a target that was not given."""


@dataclass(frozen=True)
class TargetFacts:
    """Of a target that may not be there: empty or None is unknown."""

    name: str = ""
    num_layers: int | None = None
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    architectures: tuple[str, ...] = ()

    @classmethod
    def of(cls, target: str | Path | PretrainedConfig, **hub: Any) -> "TargetFacts":
        """Of a folder, hub id or configuration.

        Raises:
            CheckpointError: it cannot be read.
        """
        if isinstance(target, PretrainedConfig):
            config, name = target, target.name_or_path or ""
        else:
            name = bundled.resolve(str(target))
            with reading(f"target {target}", CheckpointError, "give its folder or hub id"):
                config = AutoConfig.from_pretrained(name, **hub)
        text = config.get_text_config()
        positions = getattr(text, "max_position_embeddings", None)
        return cls(name, text.num_hidden_layers, text.vocab_size, positions, tuple(config.architectures or ()))

    def layers(self) -> int:
        """How many it has.

        Raises:
            TargetUnknown: unknown.
        """
        if self.num_layers is None:
            raise TargetUnknown(
                "the checkpoint does not say which layers of the target it reads, and their default depends on the "
                "target: give --target"
            )
        return self.num_layers
