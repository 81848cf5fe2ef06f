"""What one traced answer shows: its text token by token, and drawings of drafts, cache, odds and entropy."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shape.evaluation.markdown import show
from shape.evaluation.report import plots
from shape.evaluation.report.figures import Plot, by_depth, proposals
from shape.evaluation.report.sources import Source
from shape.evaluation.report.traced import Traced

_SHOWN_STEPS = 60  # in the drawing of the cache
_SHOWN_TOKENS = 10  # of a choice, the drafted and the chosen ones among them


@dataclass(frozen=True)
class Token:
    """A token of an answer. `told` is what the page says of it on demand."""

    text: str
    event: str
    source: str | None
    told: str


def tokens(trace: Traced) -> list[Token]:
    """The answer, with what became of each of its tokens."""
    return [
        Token(_text(one), one["event"], one["source"] if one["event"] == "accepted" else None, _told(one))
        for one in trace.emitted
    ]


def summary(trace: Traced) -> str:
    counts = ", ".join(f"{count} {event}" for event, count in trace.events.most_common())
    lossy = "" if trace.call.get("lossless", True) else " Lossy: not the target's own distribution."
    return f"Acceptance length {trace.acceptance_length:.2f}: {counts}.{lossy}"


def plots_of(source: Source[Traced]) -> Iterator[Plot]:
    trace = source.data
    if any(drafted for drafted, _ in trace.lengths):
        lines = [[str(at), str(drafted), str(accepted)] for at, (drafted, accepted) in enumerate(trace.lengths, 1)]
        table = (["step", "drafted, tokens deep", "accepted"], lines)
        yield Plot("Draft length by step", table, partial(plots.lengths, trace.lengths))
    if trace.by_depth:
        note = f"The target was asked {sum(asked for asked, _ in trace.by_depth)} times."
        yield by_depth("Accepted drafts by depth", {trace.call.get("drafter", "draft"): trace.by_depth}, note)
    if trace.steps:
        parts = trace.milliseconds
        each = enumerate(zip(*parts.values(), strict=True), start=1)
        lines = [[str(number), *map(show, step)] for number, step in each]
        yield Plot("Where the time goes", (["step", *parts], lines), partial(plots.timeline, parts, "ms"))
    yield from _cache(trace)
    if trace.choices:
        yield _choice(trace, max(trace.choices, key=_tells))
    yield from _odds(trace)
    yield from _entropy(trace)
    if trace.sources:
        yield proposals("Tokens proposed, by drafter", trace.sources)


def _text(token: Mapping[str, Any]) -> str:
    """A token's text, or its id where the trace has none."""
    return token.get("text", f"⟨{token['token']}⟩")


def _visible(text: str) -> str:
    """A token in quotation marks of its own, its control characters escaped."""
    return "‘" + repr(text)[1:-1] + "’"


def _told(token: Mapping[str, Any]) -> str:
    figures = {"p": ".3f", "q": ".3f", "noise": ".2f", "margin": ".2f", "draw": ".3f", "entropy": ".2f"}
    parts = [f"{name} {token[name]:{spec}}" for name, spec in figures.items() if token.get(name) is not None]
    by = f" (by {token['source'].replace('+', ' and ')})" if token["source"] else ""
    depth = f", depth {token['depth']}" if token["depth"] else ""
    return " · ".join([f"{_visible(_text(token))} {token['event']}{by}, step {token['step']}{depth}", *parts])


def _cache(trace: Traced) -> Iterator[Plot]:
    """Keys and values of a whole draft are written behind the text; those of rejected tokens are rolled back by setting
    the length, and accepted ones of a tree's later branches move up.
    """
    steps = trace.steps[:_SHOWN_STEPS]
    if not any(step["nodes"] > 1 for step in steps):
        return
    slots = [(step["lengths"][0], *trace.slots(step)) for step in steps]
    lines = [
        [str(at), *map(str, (length, len(kept) + len(rolled), len(kept), len(rolled), sum(a != b for a, b in kept)))]
        for at, (length, kept, rolled) in enumerate(slots, start=1)
    ]
    table = (["step", "slots filled before", "written", "kept", "rolled back", "moved"], lines)
    cut = f"The first {_SHOWN_STEPS} steps." if len(trace.steps) > _SHOWN_STEPS else ""
    yield Plot("Slots of the cache", table, partial(plots.waterfall, slots), cut)


def _tells(choice: Mapping[str, Any]) -> tuple[bool, bool, float]:
    """How much a rejection tells: both distributions are known, of a single draft, and that was likely."""
    known = zip(choice["tokens"], choice["q"], strict=True)
    q = max((q for token, q in known if token in choice["drafted"] and q is not None), default=0.0)
    return choice["overlap"] is not None, len(choice["drafted"]) == 1, q


def _choice(trace: Traced, choice: Mapping[str, Any]) -> Plot:
    """The two distributions where a draft was rejected, at the tokens that matter there."""
    ids, p, q, noise, drafted = (choice[name] for name in ("tokens", "p", "q", "noise", "drafted"))
    texts = choice.get("texts") or [f"⟨{token}⟩" for token in ids]
    fates = [" drafted" if token in drafted else " chosen" if token == choice["token"] else "" for token in ids]
    labels = [_visible(text) + fate for text, fate in zip(texts, fates, strict=True)]
    scores: Sequence[float | None] = [None] * len(ids)
    if noise[0] is not None:
        scores = [math.log(max(chance, 1e-30)) + each for chance, each in zip(p, noise, strict=True)]
    lines = [
        [label, show(a, ".4f"), show(b, ".4f"), show(c), show(d)]
        for label, a, b, c, d in zip(labels, p, q, noise, scores, strict=True)
    ]
    matters = sorted(range(len(ids)), key=lambda at: (not fates[at], -max(p[at], q[at] or 0.0)))
    shown = sorted(matters[:_SHOWN_TOKENS])
    columns: list[list[Any]] = [[column[at] for at in shown] for column in (labels, p, q, scores)]
    drawing = partial(plots.choice, columns[0], columns[1], columns[2], None if noise[0] is None else columns[3])
    header = ["token", "p, target", "q, drafter", "noise", "log p + noise"]
    return Plot(f"A rejected draft, step {choice['step']}", (header, lines), drawing, _why(trace, choice))


def _why(trace: Traced, choice: Mapping[str, Any]) -> str:
    asked = [
        one
        for one in trace.judged
        if one["step"] == choice["step"] and one["parent"] == choice["node"] and None not in (one["draw"], one["q"])
    ]
    parts = []
    if asked and trace.call.get("acceptance") == "rejection":
        one = asked[0]
        less = "less than" if one["event"] == "accepted" else "not less than"
        parts.append(
            f"{_visible(_text(one))}: the draw {one['draw']:.3f} times q {one['q']:.3f} is "
            f"{one['draw'] * one['q']:.3f}, {less} p {one['p']:.3f}, so it is {one['event']}."
        )
    if choice["overlap"] is None:
        parts.append("Of the drafter only the estimates of its own drafts are known here.")
    else:
        parts.append(
            f"Over all tokens min(p, q) sums to {choice['overlap']:.3f}, the chance to accept one draft; the residual "
            f"is the other {1 - choice['overlap']:.3f}."
        )
    return " ".join(parts)


def _odds(trace: Traced) -> Iterator[Plot]:
    """Rejection sampling accepts everything above the line; match and greedy decoding what the target chooses."""
    judged = [token for token in trace.judged if token["q"] and token["p"] is not None]
    if judged:
        pairs = {
            event: [(token["p"], token["q"]) for token in judged if token["event"] == event]
            for event in ("accepted", "rejected")
        }
        lines = [
            [_visible(_text(one)), show(one["p"] / one["q"], ".3g"), show(one["p"], ".4f"), show(one["q"], ".4f"),
             one["event"], show(one["draw"], ".3f")]
            for one in judged
        ]  # fmt: skip
        drawing = partial(plots.odds, {event: found for event, found in pairs.items() if found})
        yield Plot("p against q", (["token", "p / q", "p", "q", "became", "draw"], lines), drawing)


def _entropy(trace: Traced) -> Iterator[Plot]:
    whose = {"the target's": "entropy", "the drafter's": "draft_entropy"}
    cases = {
        name: [(token[key], accepted) for token, accepted in trace.questions if token.get(key) is not None]
        for name, key in whose.items()
    }
    if known := {name: found for name, found in cases.items() if found}:
        lines = [
            [str(token["position"]), *(show(token.get(key)) for key in whose.values()), "yes" if accepted else "no"]
            for token, accepted in trace.questions
        ]
        table = (["position", "entropy of the target, nats", "of the drafter", "a draft was accepted"], lines)
        yield Plot("Acceptance by entropy", table, partial(plots.by_entropy, known))
