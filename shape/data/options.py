"""What to read, show, answer and compile. Nothing heavy is imported, so that help is quick."""

from dataclasses import dataclass, field
from typing import Any

from shape.errors import ConfigError, require
from shape.target.options import PlacedOptions


@dataclass(kw_only=True)
class AnswerOptions:
    """How answers are written.

    Attributes:
        sampled_share: share of conversations answered by sampling; the others are greedy.
        temperature: of the sampled ones.
        max_new_tokens: longest answer.
        batch_size: conversations answered together; may be another when a run is continued. In bfloat16 and float16
            near-ties may fall otherwise in another size.
        seed: of the choice and the noise.
    """

    sampled_share: float = 0.5
    temperature: float = 1.0
    max_new_tokens: int = 512
    batch_size: int = 16
    seed: int = 0

    def check(self, group: str = "") -> None:
        """Raises ConfigError for the first value out of range, under its name behind that of its group."""
        require(self, "max_new_tokens batch_size", above=0, group=group)
        require(self, "sampled_share", least=0, most=1, group=group)
        if self.temperature == 0:
            raise ConfigError(f"{group}temperature is 0; for greedy answers give {group}sampled_share 0")
        require(self, "temperature", above=0, group=group)


@dataclass(kw_only=True)
class PreviewOptions:
    """What to show.

    Attributes:
        data: conversations: a file, a folder, or a dataset on the hub (name[:split]).
        target: model whose tokenizer and chat template are used.
        n: conversations to print.
        max_length: tokens kept of each conversation; training keeps as many where the target has room.
        limit: rows that are read for the summary.
        skip_bad_rows: count malformed rows and continue.
        chat_template_kwargs: given to the target's chat template, for example {"enable_thinking": false}.
    """

    data: str
    target: str
    n: int = 3
    max_length: int = 1024
    limit: int = 1000
    skip_bad_rows: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(kw_only=True)
class CompileOptions(PlacedOptions):
    """What to compile a pack from.

    Attributes:
        target: path, hub id or bundled name of the target.
        prompts: JSON lines with turns, messages or prompt: of the task that the pack is for.
        output: the file to write.
        samples: answers per prompt that have to agree.
        temperature: of these samples.
        max_new_tokens: longest answer.
        prefix: tokens that are looked up.
        depth: longest continuation.
        most: recipes kept, the most frequent.
        chat_template_kwargs: given to the target's chat template, for example {"enable_thinking": false}.
        limit: at most so many prompts.
        misses: logs of decoding with an earlier pack; what was missed at least twice becomes a recipe.
        verify: what every answer to a prompt has to pass for the prompt to count: json, or a function of prompt and
            answer as MODULE:FUNCTION; default: nothing.
        seed: of the sampling.
        dtype: of the target.
    """

    target: str
    prompts: str
    output: str
    samples: int = 3
    temperature: float = 0.7
    max_new_tokens: int = 128
    prefix: int = 4
    depth: int = 12
    most: int = 15_000
    chat_template_kwargs: dict[str, Any] | None = None
    limit: int | None = None
    misses: list[str] = field(default_factory=list)
    verify: str | None = None
    seed: int = 0
    dtype: str | None = None

    def check(self) -> None:
        """Raises ConfigError for the first value out of range."""
        require(self, "samples max_new_tokens prefix depth most limit", above=0)
        require(self, "temperature", least=0)
