"""What a ``generate`` call did, counted so that acceptance and speed can be checked."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shape.generation.rules import Rule


@dataclass(frozen=True)
class Step:
    """One step of a batch.

    Attributes:
        sequences: numbers of those that took part.
        lengths: tokens of each that were in the cache before.
        nodes: size of the verified tree, its root included.
        passes: forwards of the drafter's network, one after the other.
        draft: seconds of drafting.
        verify: seconds of verification: the target's forward, its choice, acceptance.
        commit: seconds of keeping what was accepted.
    """

    sequences: list[int]
    lengths: list[int]
    nodes: int
    passes: int
    draft: float
    verify: float
    commit: float

    @property
    def seconds(self) -> float:
        return self.draft + self.verify + self.commit


@dataclass
class DecodeStats:
    """Counts and times of one call. Times are seconds of host wall-clock.

    The token that comes from the prefill counts on neither side of the acceptance length.

    Attributes:
        drafter: its name, or "none".
        acceptance: the rule's name.
        graphs: whether steps had fixed shapes (see ``shape.generation.fixed``).
        lossless: False only for rules with "lossy" in their name.
        emitted: tokens emitted after the prefill, of all sequences.
        forwards: target forwards after the prefill times the sequences they served.
        histogram: how often a sequence emitted n tokens in a step.
        drafted: draft tokens proposed.
        accepted: of these, the ones emitted.
        accepted_lengths: of how many drafts so many tokens were accepted.
        sources: by the names of those who proposed them, where several drafters do, how many tokens were proposed and
            how many of them accepted; what two proposed counts for both.
        draft_steps: how often, over sequences and steps, at least one token was proposed.
        sequence_emitted: tokens emitted after the prefill, per sequence.
        sequence_forwards: target forwards after the prefill, per sequence.
        autoregressive_steps: steps that did not draft because drafting had not paid.
        pauses: how often that was found.
        steps: what each step did, in order.
        prompt_tokens: of prompts; samples that are decoded in one batch have theirs once.
        reused_tokens: of these, the ones that a session had in its cache.
        prefill_seconds: of the target's forward over the prompts, to the first tokens.
        decode_seconds: of all behind it, the drafter's reading of the prompts and the steps; the time of who takes the
            tokens is in neither. A step takes no less than the device needed for it.
        start_seconds: of decode_seconds, the drafter's reading of the prompts, for which only later tokens wait.
    """

    drafter: str = "none"
    acceptance: str = "match"
    lossless: bool = True
    graphs: bool = False
    emitted: int = 0
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_steps: int = 0
    autoregressive_steps: int = 0
    pauses: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    sources: dict[str, list[int]] = field(default_factory=dict)
    histogram: Counter[int] = field(default_factory=Counter)
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    sequence_emitted: list[int] = field(default_factory=list)
    sequence_forwards: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    start_seconds: float = 0.0

    @classmethod
    def of(cls, sequences: int, drafter: str, rule: Rule) -> "DecodeStats":
        """Those of a call that has not begun."""
        emitted, forwards = [0] * sequences, [0] * sequences
        return cls(drafter, rule.name, rule.lossless, sequence_emitted=emitted, sequence_forwards=forwards)

    def count(self, sequence: int, proposed: int, accepted: int, emitted: int) -> None:
        """One sequence's share of one step."""
        self.emitted += emitted
        self.forwards += 1
        self.drafted += proposed
        self.accepted += accepted
        if proposed:
            self.draft_steps += 1
            self.accepted_lengths[accepted] += 1
        self.histogram[emitted] += 1
        self.sequence_emitted[sequence] += emitted
        self.sequence_forwards[sequence] += 1

    def count_sources(self, names: Sequence[str | None], accepted: Sequence[int]) -> None:
        """One sequence's share of one step: who proposed each node, and the nodes that were accepted."""
        for node, joined in enumerate(names):
            for name in joined.split("+") if joined else ():
                counts = self.sources.setdefault(name, [0, 0])
                counts[0] += 1
                counts[1] += node in accepted

    @property
    def draft_seconds(self) -> float:
        return sum(step.draft for step in self.steps)

    @property
    def verify_seconds(self) -> float:
        return sum(step.verify for step in self.steps)

    @property
    def commit_seconds(self) -> float:
        return sum(step.commit for step in self.steps)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per target forward after the prefill, bonus included; autoregressive decoding is 1.0."""
        return self.emitted / self.forwards if self.forwards else 1.0

    @property
    def tokens_per_draft_step(self) -> float:
        """1 + accepted / draft steps, which vLLM calls mean acceptance length."""
        return 1.0 + self.accepted / self.draft_steps if self.draft_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of proposed tokens that were emitted. Branches of a tree compete, so it falls with width."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything above as plain values, the steps as their number and the sums of their times."""
        values = dict(vars(self))
        for name in ("histogram", "accepted_lengths"):
            values[name] = dict(sorted(values[name].items()))
        values["steps"] = len(self.steps)
        derived = (name for name, own in vars(DecodeStats).items() if isinstance(own, property))
        return values | {name: getattr(self, name) for name in derived}
