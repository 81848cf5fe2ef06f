"""What a claim is, and how our figures are read from committed results."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shape.errors import DataError
from shape.evaluation.files import loads
from shape.evaluation.markdown import DASH
from shape.files import reading

SHIPPED, OTHER = "shipped/bfloat16-t0", "chat-12m/sgd-bfloat16-t0"
# Ablations of drafters of several kinds, trained in equal time, on both targets.
BASELINES = "equal-terms/shipped/time/bench", "equal-terms/chat-12m/time/bench"
SMALL = "beside so short a step as that of 12.6M parameters drafts cost much"


@dataclass
class Committed:
    """Results below a folder, and which of them have been read.

    Attributes:
        used: what was read, relative to the folder.
    """

    folder: Path
    used: list[str] = field(default_factory=list)
    _known: dict[str, Any] = field(default_factory=dict, repr=False)

    def json(self, name: str) -> dict[str, Any]:
        """A result; raises DataError where it is missing."""
        if name not in self._known:
            self._known[name] = loads(self._text(name))
        self.used.append(name)
        found: dict[str, Any] = self._known[name]
        return found

    def line(self, folder: str, method: str, category: str | None = None) -> dict[str, Any]:
        """A method's figures in a measurement of speed, of all prompts or of one kind."""
        found = self.json(f"{folder}/results.json")
        summary: dict[str, Any] = (found["summary"] if category is None else found["categories"][category])[method]
        return summary

    def speed_up(self, folder: str, method: str, category: str | None = None) -> float:
        value: float = self.line(folder, method, category)["speed_up"]["value"]
        return value

    def length(self, folder: str, method: str) -> float:
        """Acceptance length."""
        value: float = self.line(folder, method)["acceptance_length"]["value"]
        return value

    def total(self, folder: str, method: str) -> Counter[str]:
        """Sums over the prompts."""
        total: Counter[str] = Counter()
        for record in self.json(f"{folder}/results.json")["records"]:
            total.update(record["tallies"][method])
        return total

    def proposed(self, folder: str, method: str, source: str) -> float:
        """The share of the tokens that a hybrid's source proposed which was accepted."""
        records = self.json(f"{folder}/results.json")["records"]
        counts = [record["details"][method]["sources"].get(source, (0, 0)) for record in records]
        return sum(accepted for _, accepted in counts) / sum(proposed for proposed, _ in counts)

    def variants(self, name: str) -> dict[str, dict[str, Any]]:
        """What was measured of an ablation's variants, greedily."""
        return {line["label"]: line["at"]["0.0"] for line in self.json(f"ablations/{name}/ablation.json")["lines"]}

    def variant(self, name: str, label: str) -> tuple[float, float]:
        """Speed-up and acceptance length of an ablation's variant."""
        summary = self.variants(name)[label]["summary"]
        return summary["speed_up"]["value"], summary["acceptance_length"]["value"]

    def table(self, name: str) -> dict[str, dict[str, str]]:
        """The first table of a Markdown file: cells by the line's first cell and the column's heading."""
        self.used.append(name)
        lines = [line for line in self._text(name).splitlines() if line.startswith("| ")]
        header, _, *rows = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines)
        return {row[0]: dict(zip(header, row, strict=True)) for row in rows if len(row) == len(header)}

    def _text(self, name: str) -> str:
        with reading(str(self.folder / name), DataError, "measure it, or correct eval/claims/systems.py"):
            return (self.folder / name).read_text(encoding="utf-8")


UNDECIDED = "undecided"
# Figures, and whether they bear the claim out; None: they cannot; UNDECIDED: others of such prompts might or might not.
Ours = tuple[str, bool | str | None]


def above(first: Mapping[str, float], second: Mapping[str, float]) -> bool | str:
    """Whether the first of two figures is larger, by their 95 % intervals."""
    if first["low"] > second["high"] or first["high"] < second["low"]:
        return first["value"] > second["value"]
    return UNDECIDED


@dataclass(frozen=True)
class Claim:
    """A figure of others and ours.

    Attributes:
        ours: from committed results; None where nothing is measured.
        why: the verdict, in a few words.
    """

    what: str
    theirs: str
    ours: Callable[[Committed], Ours] | None
    why: str

    def row(self, results: Committed) -> list[str]:
        """Cells of the page: what is claimed, theirs, ours, the verdict, and why."""
        if self.ours is None:
            return [self.what, self.theirs, DASH, "not measured yet", self.why]
        with reading(f"what is measured of {self.what!r}", DataError, "correct eval/claims/systems.py"):
            text, holds = self.ours(results)
        verdicts = {True: "reproduced", False: "contradicted", None: "not comparable", UNDECIDED: UNDECIDED}
        verdict = verdicts[holds]
        return [self.what, self.theirs, text, verdict, self.why]


def times(*values: float) -> str:
    return ", ".join(f"{value:.2f}x" for value in values)


def shares(*values: float) -> str:
    return ", ".join(f"{100 * value:.0f}" for value in values) + " %"


def numbers(*values: float) -> str:
    return ", ".join(f"{value:.2f}" for value in values)
