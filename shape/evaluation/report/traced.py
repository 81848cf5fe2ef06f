"""A trace read back from its file (see `shape.generation.trace`), and the figures that follow from it."""

import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from shape.errors import DataError
from shape.files import reading, typed
from shape.generation.trace import OWN

Record = dict[str, Any]
PARTS = ("draft", "verify", "commit")
# What figures are made of, by type of record.
_READ: dict[str, dict[str, Any]] = {
    "step": {"step": int, "rows": list[int], "lengths": list[int], **dict.fromkeys(PARTS, float)},
    "token": {
        "row": int, "step": int, "depth": int | None, "event": str, "emitted": bool, "source": str | None,
        "parent": int | None,
    },
    "choice": {"row": int, "step": int, "tokens": list[int]},
}  # fmt: skip


@dataclass(frozen=True)
class Traced:
    """The first row of a call.

    Attributes:
        call: what the file says about it; empty in older files, which say nothing.
        steps: behind the prefill, in order.
        tokens: all of them, in the order in which things happened; choices: at rejected drafts.
    """

    call: Record
    steps: list[Record]
    tokens: list[Record]
    choices: list[Record]

    @cached_property
    def emitted(self) -> list[Record]:
        """The tokens of the answer."""
        return [token for token in self.tokens if token["emitted"]]

    @cached_property
    def judged(self) -> list[Record]:
        """The drafted tokens of which the target, asked at their parents, had to say whether to accept them."""
        return [token for token in self.tokens if token["event"] in ("accepted", "rejected")]

    @property
    def acceptance_length(self) -> float:
        """Tokens per target forward after the prefill."""
        return sum(token["step"] > 0 for token in self.emitted) / max(len(self.steps), 1)

    @cached_property
    def lengths(self) -> list[tuple[int, int]]:
        """Per step: how deep the draft went, and how many of its tokens were accepted."""
        depths = dict.fromkeys((step["step"] for step in self.steps), 0)
        for token in self.tokens:
            depths[token["step"]] = max(depths.get(token["step"], 0), token["depth"] or 0)
        accepted = Counter(token["step"] for token in self.tokens if token["event"] == "accepted")
        return [(depths[step["step"]], accepted[step["step"]]) for step in self.steps]

    @property
    def milliseconds(self) -> dict[str, list[float]]:
        """Of each part of every step."""
        return {part: [1e3 * step[part] for step in self.steps] for part in PARTS}

    @cached_property
    def questions(self) -> list[tuple[Record, bool]]:
        """Per node at which the target was asked about drafts: one of these, and whether any of them was accepted."""
        at = sorted(self.judged, key=lambda token: (token["step"], token["parent"]))
        nodes = [list(group) for _, group in groupby(at, key=lambda token: (token["step"], token["parent"]))]
        return [(group[0], any(token["event"] == "accepted" for token in group)) for group in nodes]

    @property
    def by_depth(self) -> list[tuple[int, int]]:
        """[depth - 1]: how often a token was drafted there below accepted ones, and how often one was accepted too."""
        asked, accepted = Counter[int](), Counter[int]()
        for token, is_accepted in self.questions:
            asked[token["depth"]] += 1
            accepted[token["depth"]] += is_accepted
        return [(asked[depth], accepted[depth]) for depth in sorted(asked)]

    @property
    def events(self) -> Counter[str]:
        """How many tokens of the answer came by which event."""
        return Counter(token["event"] for token in self.emitted)

    @property
    def sources(self) -> dict[str, tuple[int, int]]:
        """By drafter of a hybrid: tokens proposed, and of these accepted; what two proposed counts for both."""
        proposed, accepted = Counter[str](), Counter[str]()
        for token in self.tokens:
            for name in token["source"].split("+") if token["source"] else ():
                proposed[name] += 1
                accepted[name] += token["event"] == "accepted"
        return {name: (proposed[name], accepted[name]) for name in proposed}

    def slots(self, step: Record) -> tuple[list[tuple[int, int]], list[int]]:
        """Of a step, the cache slots that were kept, each with the one it moved to, and those that were rolled back.

        The root's is the first: it was committed before, and now goes through the target.
        """
        mine = [token for token in self.tokens if token["step"] == step["step"] and token["event"] not in OWN]
        length = step["lengths"][0]
        kept = [(token["slot"], token["kept_slot"]) for token in mine if token["kept_slot"] is not None]
        return [(length, length), *kept], [token["slot"] for token in mine if token["kept_slot"] is None]


def read(path: Path) -> Traced | None:
    """The trace in a file of JSON lines; None where it holds something else.

    Raises:
        DataError: it is a trace, but a line of it cannot be read.
    """
    with path.open(encoding="utf-8") as file:
        try:
            first = json.loads(file.readline())
        except (ValueError, RecursionError):
            return None
        if not isinstance(first, dict) or first.get("type") not in ("call", "step"):
            return None
        with reading(f"trace {path}", DataError, "write it again"):
            records = [first]
            for number, line in enumerate(file, start=2):
                with reading(f"line {number} of trace {path}", DataError, "it is cut or damaged: write it again"):
                    record = typed(dict[str, Any], json.loads(line))
                    kinds = {} if record.get("step") == 0 else _READ.get(record["type"], {})
                    record |= {field: typed(kind, record[field]) for field, kind in kinds.items()}
                    if record.get("event") == "plain":  # as version 0.1 wrote
                        record["event"] = "autoregressive"
                    records.append(record)
            return _traced(path, records)


def _traced(path: Path, records: list[Record]) -> Traced:
    first = records[0]
    rows = [record["row"] for record in records if record["type"] == "token"]
    if not rows:
        raise DataError(f"trace {path} holds no token; write the trace again")
    row = rows[0]
    return Traced(
        call=first if first["type"] == "call" else {},
        steps=[_of_row(r, row) for r in records if r["type"] == "step" and r["step"] > 0 and row in r["rows"]],
        tokens=[r for r in records if r["type"] == "token" and r["row"] == row],
        choices=[r for r in records if r["type"] == "choice" and r["row"] == row],
    )


def _of_row(step: Record, row: int) -> Record:
    return {**step, "rows": [row], "lengths": [step["lengths"][step["rows"].index(row)]]}
