"""What became of every token of a call, as data: drafted, accepted, rejected, corrected, and at what odds.

A record is a dict of plain values. `type` "step" is a `stats.Step` (of the prefill: rows, lengths and seconds), "token"
is one token:

    step, row     which step of the call (a batch's first is its prefill) and which of its sequences
    event         "prefill": the first token
                  "accepted": drafted, and the target's choice
                  "rejected": drafted, and the target, asked at its parent, chose otherwise
                  "unreached": drafted below a token that was not accepted, where the target's choice means nothing,
                      or, with logits processors, behind a stop, where they are not asked
                  "corrected": the target's choice where none of the drafted tokens was it
                  "bonus": the target's choice behind the last drafted token of a path
                  "autoregressive": the target's choice in a step without a draft
    token         its id; `position` its place in the sequence's text, without padding
    emitted       whether it went out; accepted tokens behind a stop do not
    node, parent, depth   in the step's token tree; None for the target's own choices
    source        who proposed it, where several drafters did: names joined by "+"; otherwise None
    slot          where its keys and values were written in the cache; `kept_slot` where they stayed, if they did
    p             probability under the target, after all options, given that its parents are accepted
    q             probability with which it would be drawn first, or the drafter's estimate that the target would choose
                  it; a later sibling was drawn from what q leaves without those before it
    noise, margin with rule "match": Gumbel noise g, and by how much log p + g beat the best other token (negative:
                  lost); greedy decoding has no noise, and its margin is of log p
    draw          of drawn drafts: the uniform number that "rejection" or "transport" compared with p / q (of later
                  siblings with what refusals left of both, which is not recorded), "traversal" with the chance that
                  the text ends there
    entropy       of the target's distribution that decided, in nats; `draft_entropy` of the drafter's, where all of it
                  is known
    text          in a file that a tokenizer spelt: what it adds to the answer, or by itself where it did not go out

"choice" is how the target chose at a node whose drafts it rejected, over the tokens that matter there:

    step, row, node, position   as above; `token` is what it chose and `drafted` what was proposed
    tokens        ids, the likeliest under target or drafter, the drafted and the chosen ones, by falling p
    p, q, noise   of each; q is None where it is not known, noise all None where there was none
    overlap       sum of min(p, q) over the whole vocabulary, the chance that "rejection" accepts one draft; None where
                  the drafter's distribution is not known
    texts         of `tokens`, in a file that a tokenizer spelt

"call" opens a file: whose trace it is, as far as who wrote it said so.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

if TYPE_CHECKING:
    from shape.generation.loop import Outcome, Verified

STYLES = {
    "prefill": "dim",
    "accepted": "green",
    "rejected": "red strike",
    "unreached": "dim strike",
    "corrected": "yellow",
    "bonus": "cyan",
    "autoregressive": "default",
}
_OPTIONAL = (
    *("node", "parent", "depth", "source", "slot", "kept_slot"),
    *("p", "q", "noise", "margin", "draw", "entropy", "draft_entropy"),
)
OWN = ("prefill", "corrected", "bonus", "autoregressive")
_LIKELIEST = 8  # tokens of each distribution that a choice keeps


@dataclass
class Trace:
    """Records of one call, in the order in which things happened."""

    records: list[dict[str, Any]] = field(default_factory=list)
    _steps: int = 0

    def prefill(self, rows: Sequence[int], lengths: Sequence[int], tokens: Sequence[int], seconds: float) -> None:
        """The first token of every sequence."""
        prefill = {"rows": list(rows), "lengths": list(lengths), "prefill": seconds}
        self.records.append({"type": "step", "step": self._steps, **prefill})
        for row, length, token in zip(rows, lengths, tokens, strict=True):
            self._token(row=row, event="prefill", token=token, position=length, emitted=True)
        self._steps += 1

    def step(self, outcome: "Outcome", emitted: Sequence[int]) -> None:
        """One step of a batch, verified on the host.

        Args:
            emitted: per sequence how many of its tokens went out.
        """
        step = outcome.step
        times = {name: value for name, value in asdict(step).items() if name != "sequences"}
        self.records.append({"type": "step", "step": self._steps, "rows": step.sequences, **times})
        for at, (row, length) in enumerate(zip(step.sequences, step.lengths, strict=True)):
            self._sequence(row, length, at, outcome, emitted[at])
        self._steps += 1

    def _sequence(self, row: int, length: int, at: int, outcome: "Outcome", emitted: int) -> None:
        """One sequence's part of a step: tree ``at`` of the batch."""
        seen = outcome.verified
        assert seen is not None
        tree, path, tokens, drafted = seen.tree, seen.paths[at], outcome.tokens[at], outcome.accepted[at]
        if seen.sampler.processors is not None:  # which are not asked about what lies behind a stop
            path, tokens, drafted = path[:emitted], tokens[:emitted], min(drafted, emitted)
        parents, proposed, depths = tree.parent[at].tolist(), tree.tokens[at].tolist(), tree.depth[at].tolist()
        sources = [None] * tree.size if tree.source is None else tree.source[at]

        def draft(node: int, event: str, out: bool = False) -> dict[str, Any]:
            position, slot = length + depths[node], length + node
            kept = position if event == "accepted" and node in path else None
            where = {"node": node, "parent": parents[node], "depth": depths[node], "source": sources[node]}
            where |= {"slot": slot, "kept_slot": kept}
            return self._token(row=row, event=event, token=proposed[node], position=position, emitted=out, **where)

        for depth, (node, token) in enumerate(zip(path, tokens, strict=True)):
            odds = _Odds.at(seen, at, node, depth, tokens[:depth])
            children = [child for child, parent in enumerate(parents) if parent == node]
            accepted = path[depth + 1] if depth + 1 < len(path) else None
            if accepted is None and depth < drafted:  # a lossy rule ends with a drafted token
                accepted = next(child for child in children if proposed[child] == token)
            out = depth < emitted
            for child in children:
                record = draft(child, "accepted", out) if child == accepted else draft(child, "rejected")
                record |= odds.of(proposed[child], child)
            if depth >= drafted:
                event = "autoregressive" if tree.size == 1 else "corrected" if children else "bonus"
                record = self._token(row=row, event=event, token=token, position=length + depth + 1, emitted=out)
                record |= odds.of(token, None)
                if event == "corrected":
                    where = {"row": row, "node": node, "position": length + depth + 1}
                    choice = odds.all(token, {proposed[child]: child for child in children})
                    self.records.append({"type": "choice", "step": self._steps, **where, **choice})
        for node in range(1, tree.size):
            if parents[node] >= 0 and parents[node] not in path:
                draft(node, "unreached")

    def emitted(self, row: int = 0) -> list[tuple[int, str]]:
        """The tokens of a sequence that went out, each with its event."""
        return [
            (record["token"], record["event"])
            for record in self.records
            if record["type"] == "token" and record["row"] == row and record["emitted"]
        ]

    def write(self, path: str | Path, about: Mapping[str, Any] | None = None, tokenizer: Any = None) -> None:
        """JSON lines, one record each.

        Args:
            about: of the call, for the first line.
            tokenizer: spells the tokens; without one there are ids alone.
        """
        records = self.records if tokenizer is None else self._spelt(tokenizer)
        opening = [] if about is None else [{"type": "call", **about}]
        Path(path).write_text("".join(json.dumps(record) + "\n" for record in [*opening, *records]), encoding="utf-8")

    def _spelt(self, tokenizer: Any) -> Iterator[dict[str, Any]]:
        """The records with the text of each token."""
        rows = {record["row"] for record in self.records if record["type"] == "token"}
        answers = {row: pieces(tokenizer, [token for token, _ in self.emitted(row)]) for row in rows}
        special = set(tokenizer.all_special_ids)
        for record in self.records:
            if record["type"] == "token":
                text = next(answers[record["row"]]) if record["emitted"] else tokenizer.decode([record["token"]])
                if record["token"] in special:
                    text = tokenizer.decode([record["token"]])
                yield {**record, "text": text}
            elif record["type"] == "choice":
                yield {**record, "texts": [tokenizer.decode([token]) for token in record["tokens"]]}
            else:
                yield record

    def _token(self, **values: Any) -> dict[str, Any]:
        """Records a token, of which more may be filled in."""
        self.records.append({"type": "token", "step": self._steps, **dict.fromkeys(_OPTIONAL), **values})
        return self.records[-1]


@dataclass(frozen=True)
class _Odds:
    """What decided at one node: log p of all tokens, their scores with noise, and what the drafter thought."""

    log_p: Tensor
    noise: Tensor | None
    log_q: Tensor | None
    drawn: Tensor
    joint: Tensor | None
    parent_joint: float
    draws: Tensor | None

    @classmethod
    def at(cls, seen: "Verified", at: int, node: int, depth: int, before: list[int]) -> "_Odds":
        tree, logits, sampler = seen.tree, seen.logits, seen.sampler
        scores = sampler.scores(logits[at, node][None], [at], depth, [before])[0]
        noise = draws = None
        if not sampler.greedy and sampler.coupled:
            noise = sampler.noise(depth, logits.shape[-1])[at]
        elif not sampler.greedy:
            draws = sampler.uniforms(tree.size)[at]
        joint = None if tree.joint is None else tree.joint[at]
        return cls(
            scores.log_softmax(-1),
            noise,
            None if tree.log_q is None else tree.log_q[at, node],
            tree.were_drawn[at],
            joint,
            0.0 if joint is None or node == 0 else float(joint[node]),
            draws,
        )

    def of(self, token: int, node: int | None) -> dict[str, float | None]:
        total = self.log_p if self.noise is None else self.log_p + self.noise
        others = total.clone()
        others[token] = -torch.inf
        return {
            "p": float(self.log_p[token].exp()),
            "q": None if node is None else self._q(token, node),
            "noise": None if self.noise is None else float(self.noise[token]),
            # Under rejection sampling nothing is compared with the other tokens.
            "margin": _finite(total[token] - others.max()) if self.draws is None else None,
            "draw": None if self.draws is None or node is None else float(self.draws[node]),
            "entropy": _entropy(self.log_p),
            "draft_entropy": None if self.log_q is None else _entropy(self.log_q),
        }

    def all(self, chosen: int, drafts: Mapping[int, int]) -> dict[str, Any]:
        """The distributions side by side where they matter, and what was `chosen`.

        Args:
            drafts: token -> node of the drafted ones.
        """
        total = self.log_p if self.noise is None else self.log_p + self.noise
        ranked = [self.log_p, total, *([] if self.log_q is None else [self.log_q])]
        likeliest = {token for one in ranked for token in one.topk(min(_LIKELIEST, len(one))).indices.tolist()}
        tokens = sorted(likeliest | {chosen, *drafts}, key=lambda token: (-float(self.log_p[token]), token))
        return {
            "token": chosen,
            "drafted": list(drafts),
            "tokens": tokens,
            "p": [float(self.log_p[token].exp()) for token in tokens],
            "q": [self._q(token, drafts.get(token)) for token in tokens],
            "noise": [None if self.noise is None else float(self.noise[token]) for token in tokens],
            "overlap": None if self.log_q is None else float(torch.minimum(self.log_p, self.log_q).exp().sum()),
        }

    def _q(self, token: int, node: int | None) -> float | None:
        """What the drafter thought of a token: all of it where its distribution is known, else of its drafts."""
        if self.log_q is not None and (node is None or self.drawn[node]):
            return float(self.log_q[token].exp())
        if node is not None and self.joint is not None:
            return float((self.joint[node] - self.parent_joint).exp())
        return None


def _entropy(log_p: Tensor) -> float:
    """In nats."""
    return float(torch.special.entr(log_p.exp()).sum())


def _finite(value: Tensor) -> float | None:
    """JSON knows no infinity: a token that was out of reach, or had no other beside it, has no margin."""
    return float(value) if torch.isfinite(value) else None


def pieces(tokenizer: Any, tokens: Sequence[int]) -> Iterator[str]:
    """The text that each token adds; a character spread over several tokens comes with its last one."""
    shown = ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end], skip_special_tokens=True)
        unfinished = text.endswith("\ufffd") and end < len(tokens)
        yield "" if unfinished else text[len(shown) :]
        shown = shown if unfinished else text


def view(records: Sequence[dict[str, Any]], text_of: Callable[[int], str], row: int = 0) -> Table:
    """A sequence's steps on the console: what was drafted and what became of it, and what the target wrote instead.

    Args:
        text_of: a token's text.
    """
    table = Table("step", "drafted, by depth", "own token", "emitted", "ms", box=None, pad_edge=False)
    steps = {record["step"]: record for record in records if record["type"] == "step" and row in record["rows"]}
    for number, step in steps.items():
        tokens = [record for record in records if record["type"] == "token" and record["step"] == number]
        tokens = [record for record in tokens if record["row"] == row]
        drafts = Text(" ").join(
            _shown(record, text_of)
            for record in sorted(tokens, key=lambda record: (record["depth"] or 0, record["node"] or 0))
            if record["event"] not in OWN
        )
        own = Text(" ").join(_shown(record, text_of) for record in tokens if record["event"] in OWN)
        emitted = sum(record["emitted"] for record in tokens)
        milliseconds = 1e3 * sum(step.get(part, 0.0) for part in ("prefill", "draft", "verify", "commit"))
        table.add_row(str(number), drafts, own, str(emitted), f"{milliseconds:.1f}")
    return table


def _shown(record: dict[str, Any], text_of: Callable[[int], str]) -> Text:
    """A token in the colour of its event, with the target's probability of it."""
    shown = Text(repr(text_of(record["token"]))[1:-1] or "∅", style=STYLES[record["event"]])
    if record["p"] is not None:
        shown.append(f" {record['p']:.2f}", style="dim")
    return shown
