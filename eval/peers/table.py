"""The tables: tokens per second of every system and size, ratios to the best peer, and the goals."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eval.peers.sizes import SIZES
from eval.peers.systems import CHARGED, LENGTHS, ORACLE, PEERS, PLAIN, PRECISIONS, PREDICTOR, System, draft_depth
from shape.evaluation.estimates import Estimate, number, over_prompts, ratio
from shape.evaluation.markdown import DASH, Table, markdown, share, show
from shape.evaluation.results import Tally

Answer = tuple[int, int]  # round and prompt
_SAME, _PLAIN_GOAL, _DRAFTED_GOAL, _SHIPPED_GOAL = "of the same precision", 0.9, 1.8, 1.5
_LARGEST = "1.2B"
_SHIPPED = "shipped"


def whole(tally: Tally) -> Any:
    """Tokens per second, the prompt's time included."""
    return ratio(tally.tokens, tally.prefill_seconds + tally.decode_seconds)


def decoding(tally: Tally) -> Any:
    """Tokens per second from the second token on."""
    return ratio(tally.timed_tokens, tally.decode_seconds)


@dataclass
class Line:
    """A method of a system at one size.

    Attributes:
        answers: by round and prompt.
        tokens: of the first round's answers, by prompt.
    """

    system: System
    method: str
    answers: dict[Answer, Tally] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def by_prompt(self, answers: Iterable[Answer]) -> list[Tally]:
        """Sums over the rounds of each prompt, the units of the bootstrap."""
        sums: dict[int, Tally] = {}
        for turn, prompt in answers:
            sums[prompt] = sums.get(prompt, Tally()) + self.answers[turn, prompt]
        return list(sums.values())

    def rate(self, figure: Callable[[Tally], Any] = decoding) -> Estimate:
        return over_prompts(figure, self.by_prompt(self.answers))

    def ratio_to(self, other: "Line") -> Estimate:
        """Of decoding rates, over the answers that both have given."""
        common = [answer for answer in self.answers if answer in other.answers]
        return over_prompts(
            lambda mine, theirs: decoding(mine) / decoding(theirs),
            self.by_prompt(common),
            other.by_prompt(common),
        )

    @property
    def acceptance_length(self) -> float | None:
        return number(Tally.total(list(self.answers.values())).acceptance_length)

    def equal(self, other: "Line | None") -> str:
        """Answers that are token for token another's."""
        if other is None:
            return DASH
        return share(sum(own == other.tokens.get(prompt) for prompt, own in self.tokens.items()), len(self.tokens))


Lines = Mapping[str, Sequence[Line]]  # by size


def lines_of(records: Iterable[Mapping[str, Any]]) -> dict[str, list[Line]]:
    """From the journal's records, each of a system's turn: in the order of sizes, peers and precisions."""
    found: dict[tuple[str, System, str], Line] = {}
    for record in records:
        system = System(record["peer"], record["precision"])
        for method, answers in record["answers"].items():
            line = found.setdefault((record["size"], system, method), Line(system, method))
            for prompt, answer in enumerate(answers):
                line.answers[record["round"], prompt] = tally(answer)
                line.tokens.setdefault(prompt, answer["tokens"])
    sizes: dict[str, list[Line]] = {}
    for size, system, method in sorted(found, key=lambda key: (list(SIZES).index(key[0]), *_order(key[1]))):
        sizes.setdefault(size, []).append(found[size, system, method])
    return sizes


def _order(system: System) -> tuple[int, int]:
    return list(PEERS).index(system.peer), PRECISIONS.index(system.precision)


def tally(answer: Mapping[str, Any]) -> Tally:
    count = len(answer["tokens"])
    return Tally(
        answers=1,
        tokens=count,
        timed_tokens=count - 1,
        decode_seconds=answer["decode_seconds"],
        prefill_seconds=answer["prefill_seconds"],
        forwards=answer.get("forwards", count - 1),
    )


def best(lines: Iterable[Line], precision: str | None = None, ours: bool = False, method: str = PLAIN) -> Line | None:
    """The fastest of the peers, or of ours: in this precision, or in any."""
    able = [
        line
        for line in lines
        if PEERS[line.system.peer].is_ours == ours
        and line.method == method
        and precision in (None, line.system.precision)
    ]
    return max(able, key=lambda line: line.rate().value or 0.0, default=None)


def plain_table(lines: Lines, figure: Callable[[Tally], Any]) -> Table:
    """Every system's plain decoding; of decoding alone also in ratio to the best peer of the same precision."""
    systems = sorted({line.system for some in lines.values() for line in some}, key=_order)
    rows = []
    for precision in PRECISIONS:
        for system in (each for each in systems if each.precision == precision):
            cells = [_plain_cell(some, system, figure) for some in lines.values()]
            rows.append([precision, system.title, *cells])
    return ["precision", "system", *lines], rows


def _plain_cell(lines: Sequence[Line], system: System, figure: Callable[[Tally], Any]) -> str:
    own = next((line for line in lines if line.system == system and line.method == PLAIN), None)
    if own is None:
        return DASH
    peer = best(lines, system.precision)
    beside = "" if peer is None or figure is not decoding else f", {show(own.ratio_to(peer).value, unit='x')}"
    return rate_text(own.rate(figure)) + beside


def rate_text(rate: Estimate) -> str:
    """Three digits are enough for tokens per second."""
    spec = ",.0f" if (rate.value or 0) >= 100 else ".1f"
    if rate.low is None or rate.high is None:
        return show(rate.value, spec)
    return f"{show(rate.value, spec)} ({rate.low:{spec}}–{rate.high:{spec}})"


def drafted_table(lines: Lines) -> Table:
    """Our drafted decoding, in ratio to the best peer's plain decoding in any precision."""
    keys = {(line.system, line.method): None for some in lines.values() for line in some if line.method != PLAIN}
    rows = []
    for system, method in keys:
        cells = []
        for some in lines.values():
            own = next((line for line in some if (line.system, line.method) == (system, method)), None)
            peer = best(some)
            if own is None:
                cells.append(DASH)
                continue
            beside = "" if peer is None else f", {show(own.ratio_to(peer).value, unit='x')}"
            if method == PREDICTOR:
                beside += f", acceptance length {show(own.acceptance_length)}"
            cells.append(rate_text(own.rate()) + beside)
        rows.append([system.title, method_text(method), *cells])
    return ["system", "drafts", *lines], rows


def method_text(method: str) -> str:
    if method == PREDICTOR:
        return "shipped predictor"
    kind, length = method.split()
    cost = {ORACLE: "at no cost", CHARGED: "with a predictor's cost"}[kind]
    return f"simulated, acceptance length {length}, {cost}"


@dataclass(frozen=True)
class Goal:
    """What was asked for, and what was found; `found` is undefined where something is missing."""

    text: str
    size: str
    ours: str
    peer: str
    least: float
    found: Estimate

    @property
    def cells(self) -> list[str]:
        value = self.found.value
        if value is None:
            verdict = "not measured"
        elif value >= self.least:
            verdict = f"met, {value / self.least:.2f} of what was asked"
        else:
            verdict = f"not met, {value / self.least:.2f} of what was asked"
        return [self.text, self.size, self.ours, self.peer, f"{self.least:.1f}x", self.found.text("x"), verdict]


def goals(lines: Lines) -> list[Goal]:
    """Every goal that these sizes can show."""
    found = []
    for size, some in lines.items():
        for precision in PRECISIONS if size != _SHIPPED else ():
            peer = best(some, precision)
            if peer is not None:
                text = f"plain, the best peer {_SAME}"
                found.append(_goal(text, size, best(some, precision, ours=True), peer, _PLAIN_GOAL))
        peer = best(some)
        if peer is None:
            continue
        if size == _LARGEST:
            for kind in (ORACLE, CHARGED):
                method = f"{kind} 3"
                text = f"drafted ({method_text(method)}), the best peer's plain"
                found.append(_goal(text, size, best(some, ours=True, method=method), peer, _DRAFTED_GOAL))
        if size == _SHIPPED:
            text = "drafted (shipped predictor), the best peer's plain"
            found.append(_goal(text, size, best(some, ours=True, method=PREDICTOR), peer, _SHIPPED_GOAL))
    return found


def _goal(text: str, size: str, ours: Line | None, peer: Line, least: float) -> Goal:
    if ours is None:
        return Goal(text, size, DASH, peer.system.title, least, Estimate(None))
    return Goal(text, size, ours.system.title, peer.system.title, least, ours.ratio_to(peer))


def checks_table(lines: Lines) -> Table:
    """Plain answers equal to those of transformers: in float32 where it was measured, else in bfloat16."""
    rows = []
    for size, some in lines.items():
        plain = {line.system: line for line in some if line.method == PLAIN}
        precision = "float32" if System("transformers", "float32") in plain else "bfloat16"
        reference = plain.get(System("transformers", precision))
        for line in some:
            if reference is not None and line is not reference:
                what = "plain" if line.method == PLAIN else method_text(line.method)
                cells = [show(line.acceptance_length), line.equal(reference)]
                rows.append([size, line.system.title, what, *cells, f"transformers, {precision}"])
    return ["size", "system", "decoding", "acceptance length", "equal answers", "to"], rows


def report(lines: Lines, notes: Sequence[str]) -> list[str]:
    """The page, by paragraphs."""
    depths = ", ".join(f"{draft_depth(length)} for {length}" for length in LENGTHS)
    header, rows = drafted_table(lines)
    drafted = [
        "## Drafted decoding",
        "Tokens per second from the second token on, and the ratio to the best peer's plain decoding in any precision. "
        "Simulated acceptance: an oracle drafts a chain in which exactly so many tokens are right that each step emits "
        f"the acceptance length; the chain is longer than that ({depths}). *At no cost* the oracle knows; *with a "
        "predictor's cost* a predictor of the default size for this target, untrained, drafts a chain as long in every "
        "step, and the oracle's is verified.",
        markdown(header, rows),
    ]
    return [
        "# Beside other engines",
        *notes,
        "## Goals",
        markdown(["goal", "size", "ours", "peer", "at least", "found", "verdict"], [one.cells for one in goals(lines)]),
        "## Plain decoding",
        "Tokens per second from the second token on, and the ratio to the best peer of the same precision.",
        markdown(*plain_table(lines, decoding)),
        *(drafted if rows else []),
        "## The prompt included",
        "Tokens per second of whole answers, plain.",
        markdown(*plain_table(lines, whole)),
        "## Checks",
        markdown(*checks_table(lines)),
    ]
