"""Options of commands that decode. Nothing heavy is imported, so that help is quick."""

from dataclasses import dataclass, field
from typing import Any, Literal

from shape.data.options import AnswerOptions
from shape.errors import DataError, require
from shape.features.trainer import TrainerOptions
from shape.target.options import AnsweringOptions, PlacedOptions
from shape.verification.tree_shape import TreeShape


@dataclass(frozen=True)
class TypicalParameters:
    """Of the rule typical-lossy.

    Attributes:
        epsilon: a token this likely is always accepted; at most 1.
        delta: a token is accepted too where it has delta times exp(-entropy) of the target's probability.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        require(self, "epsilon", above=0, most=1, group="typical_lossy.")
        require(self, "delta", above=0, group="typical_lossy.")


@dataclass(frozen=True)
class TrsParameters:
    """Of the rule trs-lossy.

    Attributes:
        k: candidates per position.
        depth: N, positions per step; k^N paths are scored.
        threshold: share of the best path's joint probability that a path needs to be kept.
    """

    k: int = 3
    depth: int = 3
    threshold: float = 0.8

    def __post_init__(self) -> None:
        require(self, "k depth", least=1, group="trs_lossy.")
        require(self, "threshold", above=0, most=1, group="trs_lossy.")


@dataclass(kw_only=True)
class RuleOptions(AnsweringOptions):
    """Parameters of the acceptance rules that have some.

    Attributes:
        typical_lossy: parameters of the rule typical-lossy.
        trs_lossy: parameters of the rule trs-lossy.
    """

    typical_lossy: TypicalParameters = field(default_factory=TypicalParameters)
    trs_lossy: TrsParameters = field(default_factory=TrsParameters)


@dataclass(kw_only=True)
class DraftOptions(RuleOptions):
    """What is drafted, and where.

    Attributes:
        draft_device: where predictors draft, for example cuda:1 or cpu; default: beside the target.
        tree: shape of the predictors' token trees; default: each predictor's own.
        num_draft_tokens: drafted tokens in a row at most; of smaller models that draft adaptive (the default) or cost
            too.
    """

    draft_device: str | None = None
    tree: TreeShape | None = None
    num_draft_tokens: int | Literal["adaptive", "cost"] | None = None


@dataclass
class GenerateOptions(DraftOptions):
    """What to answer, and how.

    Args:
        prompt: the user's message; without one, a chat in a terminal, or the message from standard input.
        predictor: folder, hub id or bundled name of a trained predictor, or of a smaller model of the target's tokens;
            default: quickstart-shape, and beside a target none, so that suffix drafts.
        target: path or hub id; default: the target that the predictor was trained for.
        drafter: another drafter (for example suffix), several in one (suffix+shape), or none for autoregressive
            decoding.
        system: a system message before the first one.
        max_new_tokens: longest answer.
        temperature: 0 decodes greedily.
        top_k: sample from the k likeliest tokens; 0 means all.
        top_p: sample from the likeliest tokens that hold this probability.
        seed: of the sampling; the same seed gives the same answer with every drafter.
        acceptance: match; rejection, traversal or transport, lossless too; Medusa's typical-lossy, the paper's
            trs-lossy, or unverified-lossy, the drafter alone without the target's verification.
        eos_aware: let no answer end within its first four tokens.
        pack: recipes to look up, by themselves (--drafter recipes) or before the predictor.
        misses: add what the pack did not know to this log, for `shape recipes merge`.
        trace: write what became of every drafted and emitted token to this file, as JSON lines (of a chat one
            for each answer, FILE, FILE-2, ...).
        show_draft: colour the answer by what became of each token (shown when the answer is finished).
        show_trace: print every step: what was drafted and what was accepted.
    """

    prompt: str | None = None
    predictor: str | None = None
    target: str | None = None
    drafter: str | None = None
    system: str | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    acceptance: str = "match"
    eos_aware: bool = False
    pack: str | None = None
    misses: str | None = None
    trace: str | None = None
    show_draft: bool = False
    show_trace: bool = False

    def check(self) -> None:
        """Raises ConfigError for the first value that no target is needed to refuse, DataError for an empty prompt."""
        require(self, "max_new_tokens", least=1)
        require(self, "temperature top_k", least=0)
        require(self, "top_p", above=0, most=1)
        if self.prompt == "":
            raise DataError("the prompt is empty; give --prompt TEXT, or text on standard input")


@dataclass(kw_only=True)
class RegenerationOptions(AnswerOptions, PlacedOptions):
    """Which prompts to answer, by whom, and how.

    Attributes:
        data: conversations or prompts: a file, a folder, or a dataset on the hub (name[:split]).
        output: the .jsonl or .jsonl.gz file to write.
        target: path, hub id or bundled name of the target that answers on this machine.
        endpoint: base URL of an OpenAI-compatible server that answers instead, for example
            http://localhost:8000/v1, or of several, with commas between them, which share the requests; the key, where
            they want one, is read from OPENAI_API_KEY.
        model: the name under which the endpoint serves the target.
        chat_template_kwargs: given to the target's chat template, for example {"enable_thinking": false}.
        limit: answer at most this many conversations.
        exclude_ids: leave out ids that begin with one of these.
        skip_bad_rows: count malformed rows and continue.
        dtype: of the target, for example float32 or bfloat16; default: its checkpoint's.
        concurrency: requests at a time to all servers together.
        trainer: devices, processes and nodes, as Lightning's Trainer has them; each process answers its share.
    """

    data: str
    output: str
    target: str | None = None
    endpoint: list[str] | str | None = None
    model: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    limit: int | None = None
    exclude_ids: tuple[str, ...] = ()
    skip_bad_rows: bool = False
    dtype: str | None = None
    concurrency: int = 64
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
