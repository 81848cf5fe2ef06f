"""Drawings of measurements: pure functions of data, for the page of `shape report` and for papers.

Every drawing is as narrow as a phone, so that its letters are legible there. A colour never stands alone: series differ
in marker and line as well, areas in hatching, and most figures are written beside their mark. Colours follow Okabe and
Ito, darkened or lightened until each has a contrast of 3:1 with the paper, light and dark; in the page they are CSS
variables, so that one drawing serves both.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import cycle
from pathlib import Path
from textwrap import wrap
from typing import Any, ParamSpec

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

_NAMED = {
    "paper": ("#fffffe", "#171a1f"),
    "ink": ("#1b1e23", "#e8eaed"),
    "muted": ("#5a626d", "#a7afba"),
    "grid": ("#dcdfe4", "#363c45"),
    "blue": ("#0072b2", "#5cb8ee"),
    "vermillion": ("#d04f00", "#ff8f4d"),
    "green": ("#00805c", "#35c79b"),
    "purple": ("#aa4f8c", "#e39cca"),
    "amber": ("#946700", "#f0b840"),
    "grey": ("#6b7480", "#9aa4b1"),
    "olive": ("#6f6b00", "#e6dd52"),
}
_PALENESS = 0.65  # of areas


def _blend(colour: str, paper: str) -> str:
    """A colour on its way to the paper's."""
    pairs = ((int(one[at : at + 2], 16) for one in (colour, paper)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(own + _PALENESS * (other - own)):02x}" for own, other in pairs)


# CSS variable -> (on light paper, on dark paper). Drawn with the first, which no two share.
COLOURS = _NAMED | {
    f"pale-{name}": (_blend(light, _NAMED["paper"][0]), _blend(dark, _NAMED["paper"][1]))
    for name, (light, dark) in list(_NAMED.items())[4:]
}
_PALE = {_NAMED[name][0]: COLOURS[f"pale-{name}"][0] for name in list(_NAMED)[4:]}
_INK, _MUTED, _GRID = (COLOURS[name][0] for name in ("ink", "muted", "grid"))
_SERIES = [COLOURS[name][0] for name in ("blue", "vermillion", "green", "purple", "amber", "grey", "olive")]
MOST_SERIES = len(_SERIES)
_MARKERS, _DASHES = "osD^vPX", ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)))
_HATCHES = ("", "////", "----", "\\\\\\\\", "xxxx", "||||", "++++")
EVENTS = {
    "accepted": COLOURS["green"][0],
    "rejected": COLOURS["vermillion"][0],
    "corrected": COLOURS["amber"][0],
    "bonus": COLOURS["blue"][0],
    "autoregressive": COLOURS["grey"][0],
    "prefill": COLOURS["muted"][0],
}
_WIDTH, _LINE = 4.0, 0.19  # inches: of a drawing, and of a line of text in it
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 10,
    "text.parse_math": False,  # a token may hold dollars
    "text.color": _INK,
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": _GRID,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.hashsalt": "shape",  # the same drawing is the same file
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}
P = ParamSpec("P")
Estimate = tuple[float, float | None, float | None]  # a figure and its interval, where there is one


@contextmanager
def _styled(**more: Any) -> Iterator[None]:
    with rc_context(_STYLE | more), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # of a token; the page has the browser's fonts
        yield


def _drawing(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """In our style, whatever the caller's is."""

    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with _styled():
            return draw(*args, **kwargs)

    return styled


# ------------------------------------------------------------------------------------------- for any measurement


@_drawing
def intervals(rows: Mapping[str, Estimate], x: str, at: float | None = None, unit: str = "") -> Figure:
    """A point with its interval and its figure per row, first on top.

    Args:
        at: a figure to compare with, drawn as a line.
    """
    figure, axes, places = _listed(rows)
    for place, (value, low, high) in zip(places, rows.values(), strict=True):
        if low is not None and high is not None:
            axes.plot([low, high], [place, place], color=_SERIES[0], linewidth=2, solid_capstyle="butt")
        axes.plot(value, place, "o", color=_SERIES[0])
        axes.annotate(f"{value:.2f}{unit}", (high or value, place), (6, 0), textcoords="offset points", va="center")
    axes.margins(x=0.2)
    _reference(axes, at)
    axes.set(xlabel=x)
    return figure


@_drawing
def grouped(groups: Mapping[str, Mapping[str, Estimate]], x: str, at: float | None = None) -> Figure:
    """A point with its interval per row of every group, with as many kinds of row as there are series.

    Args:
        groups: name of the group -> name of the row -> figure.
    """
    names = list(dict.fromkeys(name for rows in groups.values() for name in rows))
    figure, axes, places = _listed(groups, lines=max(2, 0.75 * len(names) + 0.8))
    for name, number in zip(names, range(len(names)), strict=True):
        colour, marker = _SERIES[number], _MARKERS[number]
        offset = _LINE * 0.75 * (number - (len(names) - 1) / 2)
        for place, rows in zip(places, groups.values(), strict=True):
            if name in rows:
                value, low, high = rows[name]
                if low is not None and high is not None:
                    axes.plot([low, high], [place + offset] * 2, color=colour, linewidth=1.4)
                axes.plot(value, place + offset, marker, color=colour, markersize=4.5)
        axes.plot([], [], marker, color=colour, markersize=4.5, label=_short(name))
    _reference(axes, at)
    axes.set(xlabel=x)
    _legend(figure)
    return figure


@_drawing
def curves(
    series: Mapping[str, Sequence[tuple[float, float]]],
    x: str,
    y: str,
    *,
    log: bool = False,
    share: bool = False,
    whole: bool = False,
    zero: bool = True,
    at: float | None = None,
) -> Figure:
    """Lines through points.

    Args:
        log: the points are powers of two, say.
        share: y is a share, shown in per cent; whole: x counts something; zero: y begins there.
    """
    figure = Figure((_WIDTH, 2.9 + _LINE * len(series) / 2), layout="constrained")
    axes = figure.add_subplot()
    styles = zip(cycle(_SERIES), cycle(_MARKERS), cycle(_DASHES), strict=False)
    for (name, points), (colour, marker, dash) in zip(series.items(), styles, strict=False):
        across, up = zip(*points, strict=True)
        axes.plot(across, up, color=colour, marker=marker, linestyle=dash, markersize=4.5, label=_short(name))
    if log:
        ticks: list[float] = []
        for place in sorted({place for points in series.values() for place, _ in points}):
            if not ticks or place >= 1.4 * ticks[-1]:  # labels need room
                ticks.append(place)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    if whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if share:
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    if zero:
        axes.set_ylim(bottom=0)
    if at is not None:
        axes.axhline(at, color=_MUTED, linewidth=1)
    axes.set(xlabel=x, ylabel=y)
    _legend(figure)
    return figure


@_drawing
def stacks(rows: Mapping[str, Mapping[str, float]], x: str, spec: str = ".2g") -> Figure:
    """Bars made of parts, with the figure written in each part that has room for it."""
    figure, axes, places = _listed(rows)
    parts = list(dict.fromkeys(part for values in rows.values() for part in values))
    widest = max((sum(values.values()) for values in rows.values()), default=0.0) or 1.0
    left = np.zeros(len(rows))
    for number, part in enumerate(parts):
        sizes = np.array([values.get(part, 0.0) for values in rows.values()])
        axes.barh(
            places, sizes, 0.62 * 2 * _LINE, left, label=part, color=_PALE[_SERIES[number]], edgecolor=_SERIES[number],
            hatch=_HATCHES[number], linewidth=0.8,
        )  # fmt: skip
        for place, start, size in zip(places, left, sizes, strict=True):
            if size > 0.11 * widest:
                _boxed(axes, start + size / 2, place, f"{size:{spec}}")
        left += sizes
    axes.set(xlabel=x)
    axes.grid(axis="y", visible=False)
    _legend(figure)
    return figure


# ------------------------------------------------------------------------------------------- for one trace


@_drawing
def lengths(steps: Sequence[tuple[int, int]]) -> Figure:
    """Per step how deep the draft went (the outline), and how many of its tokens were accepted (filled)."""
    figure = Figure((_WIDTH, 2.7), layout="constrained")
    axes = figure.add_subplot()
    across = np.arange(1, len(steps) + 1)
    drafted, accepted = (np.array([step[at] for step in steps]) for at in (0, 1))
    axes.bar(across, accepted, 0.8, color=_PALE[EVENTS["accepted"]], edgecolor=EVENTS["accepted"], hatch="////",
             linewidth=0, label="accepted")  # fmt: skip
    axes.step(np.append(across, len(steps) + 1) - 0.5, np.append(drafted, drafted[-1:]), where="post", color=_INK,
              linewidth=1.2, label="drafted")  # fmt: skip
    _counted(axes, "step", "tokens deep")
    _legend(figure)
    return figure


@_drawing
def timeline(parts: Mapping[str, Sequence[float]], y: str) -> Figure:
    """Parts of every step, one on the other."""
    figure = Figure((_WIDTH, 2.9), layout="constrained")
    axes = figure.add_subplot()
    bottom = np.zeros(len(next(iter(parts.values()))))
    for number, (name, values) in enumerate(parts.items()):
        axes.bar(
            np.arange(1, len(values) + 1), values, 0.8, bottom, label=name, color=_PALE[_SERIES[number]],
            edgecolor=_SERIES[number], hatch=_HATCHES[number], linewidth=0,
        )  # fmt: skip
        bottom += np.array(values)
    _counted(axes, "step", y)
    _legend(figure)
    return figure


@_drawing
def waterfall(steps: Sequence[tuple[int, Sequence[tuple[int, int]], Sequence[int]]]) -> Figure:
    """The cache step by step, downwards: what was there, what was written and kept, and what was rolled back.

    Args:
        steps: of each the slots filled before, (slot, slot that it moved to) of the kept ones, slots rolled back.
    """
    figure = Figure((_WIDTH, min(1.3 + 0.11 * len(steps), 7.0)), layout="constrained")
    axes = figure.add_subplot()
    start = steps[0][0]
    styles: tuple[dict[str, Any], ...] = (
        {"facecolor": _GRID, "label": "there before"},
        {"facecolor": EVENTS["accepted"], "label": "written and kept"},
        {"facecolor": _PALE[EVENTS["rejected"]], "edgecolor": EVENTS["rejected"], "hatch": "xxxx",
         "label": "rolled back"},
    )  # fmt: skip
    there, kept_there, rolled_back = styles
    for number, (length, kept, rolled) in enumerate(steps, start=1):
        gone = sorted({*rolled, *(slot for slot, _ in kept)} - {slot for _, slot in kept})
        axes.barh(number, length - start, 0.8, start, linewidth=0, **there)
        axes.barh([number] * len(kept), 1, 0.8, [slot for _, slot in kept], linewidth=0, **kept_there)
        axes.barh([number] * len(gone), 1, 0.8, gone, linewidth=0, **rolled_back)
    axes.set_xlim(left=start)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel=f"slot of the cache (the prompt fills {start} before)", ylabel="step")
    figure.legend(handles=[Patch(linewidth=0, **style) for style in styles], loc="outside upper left", ncols=2)
    return figure


@_drawing
def choice(
    labels: Sequence[str], p: Sequence[float], q: Sequence[float | None], scores: Sequence[float] | None = None
) -> Figure:
    """Target and drafter side by side at a rejected draft.

    Where the drafter's whole distribution is known, the part that both share is hatched: there a draft is accepted;
    what the target has beyond it is the residual, from which the correction is drawn.

    Args:
        labels: of the tokens, with what became of them.
        q: the drafter's; None where it is not known.
        scores: log p + noise, of which the greatest is chosen; drawn beside.
    """
    height = 1.2 + 0.42 * len(labels)
    figure = Figure((_WIDTH, height), layout="constrained")
    both = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2)) if scores is not None else [figure.add_subplot()]
    axes, places = both[0], np.arange(len(labels))
    known = np.array([0.0 if value is None else value for value in q])
    whole = all(value is not None for value in q)
    blue, red, green = EVENTS["bonus"], EVENTS["rejected"], EVENTS["accepted"]
    axes.barh(places - 0.2, p, 0.38, color=_PALE[blue], edgecolor=blue, linewidth=0.8, label="target, p")
    axes.barh(
        places + 0.2, known, 0.38, color=_PALE[red], edgecolor=red, linewidth=0.8, label="drafter, q", hatch="----"
    )
    if whole:
        shared = np.minimum(p, known)
        axes.barh(places - 0.2, shared, 0.38, color="none", edgecolor=green, hatch="////", linewidth=0.8,
                  label="accept zone, min(p, q)")  # fmt: skip
        axes.barh(places - 0.2, np.array(p) - shared, 0.38, shared, color="none", edgecolor=_INK, linewidth=1.6,
                  label="residual, p − q")  # fmt: skip
    axes.set_yticks(places, ["\n".join(wrap(label, 17)) for label in labels])
    axes.invert_yaxis()
    axes.set(xlabel="probability")
    axes.grid(axis="y", visible=False)
    if scores is not None:
        beside = both[1]
        best = int(np.argmax(scores))
        marks = [(_SERIES[0], _MARKERS[1]) if place == best else (_MUTED, _MARKERS[0]) for place in places]
        for place, score, (colour, marker) in zip(places, scores, marks, strict=True):
            beside.plot(score, place, marker, color=colour)
        beside.set(xlabel="log p + noise")
        beside.tick_params(left=False)
    _legend(figure)
    return figure


@_drawing
def odds(drafts: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """The target's odds against the drafter's, of drafts by what became of them.

    Args:
        drafts: event -> (p, q) of each.
    """
    figure = Figure((_WIDTH, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for marker, (event, pairs) in zip("ox^", drafts.items(), strict=False):
        p, q = (np.clip([pair[at] for pair in pairs], 1e-6, 1) for at in (0, 1))
        axes.plot(q, p, marker, color=EVENTS[event], markersize=5, alpha=0.8, label=event)
    axes.plot([1e-6, 1], [1e-6, 1], color=_MUTED, linewidth=1)
    axes.annotate("p = q", (0.012, 0.012), (-4, 4), textcoords="offset points", ha="right", color=_MUTED)
    axes.set(xscale="log", yscale="log", xlim=(8e-4, 1.4), ylim=(8e-7, 1.8))
    axes.minorticks_off()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set(xlabel="q, the drafter's", ylabel="p, the target's")
    _legend(figure)
    return figure


@_drawing
def by_entropy(questions: Mapping[str, Sequence[tuple[float, bool]]]) -> Figure:
    """How often a draft was accepted by the entropy of a distribution: cases as ticks, and shares of equal numbers.

    Args:
        questions: whose entropy -> (nats, whether one was accepted).
    """
    figure = Figure((_WIDTH, 3.3), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, cases) in enumerate(questions.items()):
        entropy, accepted = (np.array([case[at] for case in cases], dtype=float) for at in (0, 1))
        colour, marker = _SERIES[number], _MARKERS[number]
        ticks = np.where(accepted, 1.04 + 0.035 * number, -0.04 - 0.035 * number)
        axes.plot(entropy, ticks, "|", color=colour, markersize=6)
        bins = np.array_split(np.argsort(entropy, kind="stable"), max(1, min(6, len(entropy) // 8)))
        axes.plot([entropy[one].mean() for one in bins], [accepted[one].mean() for one in bins], marker=marker,
                  color=colour, linestyle=_DASHES[number], label=name)  # fmt: skip
    axes.set_ylim(-0.12, 1.12)
    axes.set_yticks(np.linspace(0, 1, 5))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set(xlabel="entropy, nats", ylabel="a draft was accepted")
    _legend(figure)
    return figure


# ------------------------------------------------------------------------------------------- parts of drawings


def _listed(rows: Mapping[str, Any], lines: float = 2) -> tuple[Figure, Axes, np.ndarray]:
    """A drawing with a label per row, as high as labels and rows need; places are in inches, downwards."""
    labels = [wrap(label, 17) or [""] for label in rows]
    heights = [_LINE * max(lines, len(label) + 0.5) for label in labels]
    ends = np.cumsum(heights)
    figure = Figure((_WIDTH, 1.0 + float(sum(heights))), layout="constrained")
    axes = figure.add_subplot()
    places = ends - np.array(heights) / 2
    axes.set_yticks(places, ["\n".join(label) for label in labels])
    axes.set_ylim(float(ends[-1]) if len(ends) else 1, 0)
    axes.tick_params(axis="y", left=False)
    return figure, axes, places


def _counted(axes: Axes, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="x", visible=False)


def _reference(axes: Axes, at: float | None) -> None:
    if at is not None:
        axes.axvline(at, color=_MUTED, linewidth=1, linestyle=":")


def _legend(figure: Figure) -> None:
    """Above the drawing, where there is more than one thing to tell apart; long names have a line each."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if len(labels) > 1:
        columns = 2 if max(map(len, labels)) <= 18 else 1
        figure.legend(handles, labels, loc="outside upper left", ncols=columns, handlelength=2.4, columnspacing=1.0)


def _boxed(axes: Axes, x: float, y: float, text: str) -> None:
    paper = COLOURS["paper"][0]
    box = {"boxstyle": "round,pad=0.15", "facecolor": paper, "edgecolor": "none", "alpha": 0.85}
    axes.text(x, y, text, ha="center", va="center", fontsize=9, bbox=box)


def _short(name: str, length: int = 40) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


# ------------------------------------------------------------------------------------------- written out


def inline(figure: Figure, prefix: str, label: str, classes: dict[str, str]) -> str:
    """The drawing as an <svg> element for an HTML page: text stays text, colours are the variables of `COLOURS`.

    Args:
        prefix: goes before every id, since ids are the page's.
        label: said by screen readers in place of the drawing. Must be escaped.
        classes: style -> class; styles become classes, for which new ones are added.
    """
    file = io.StringIO()
    with _styled(**{"svg.fonttype": "none"}):
        figure.draw_without_rendering()  # which makes the ticks, whose lines end at the axes unclipped
        for axes in figure.axes:
            for line in (*axes.get_xgridlines(), *axes.get_ygridlines()):
                line.set_clip_on(False)
        figure.savefig(file, format="svg", metadata={"Date": None})
    drawn = file.getvalue()
    left_out = r"<metadata>.*?</metadata>|<!--.*?-->|<defs>\s*<style.*?</style>\s*</defs>"  # the page has the style
    drawn = re.sub(left_out, "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    used = dict.fromkeys(re.findall(r'(?:href="#|url\(#)([^")]+)', drawn))
    short = {name: f"{prefix}-{number}" for number, name in enumerate(used)}

    def tidy(found: re.Match[str]) -> str:
        """A tag, never what a token says: ids that are used, short ones and numbers, the page's font and colours."""
        tag = re.sub(r' id="([^"]*)"', lambda own: f' id="{short[own[1]]}"' if own[1] in short else "", found[0])
        tag = re.sub(r'(?:xlink:)?(href="#|url\(#)([^")]+)', lambda own: own[1] + short[own[2]], tag)
        tag = re.sub(r"(?<![\w#.-])(-?\d+)(?:\.0|(\.\d))\d*", lambda own: own[1] + (own[2] or ""), tag)
        tag = re.sub(r"\s+", " ", re.sub(r' transform="rotate\(-0[^"]*"|font-family: [^;]*; ', "", tag))
        tag = re.sub(r' d="[^"]*"', lambda path: re.sub(r' ?([A-Zz"]) ?', r"\1", path[0]), tag)
        for name, (light, _) in COLOURS.items():
            tag = tag.replace(light, f"var(--{name})")
        tag = re.sub(r'fill="(var[^"]*)"', r'style="fill: \1"', tag)  # variables have no meaning in attributes
        return re.sub(
            r' style="([^"]*)"', lambda own: f' class="{classes.setdefault(own[1], f"s{len(classes)}")}"', tag
        )

    drawn = re.sub(r">\s+<", "><", re.sub(r"<[^>]*>", tidy, drawn))
    while (flatter := re.sub(r"<g>([^<]*(?:<(?!/?g\b)[^<]*)*)</g>", r"\1", drawn)) != drawn:  # groups of nothing
        drawn = flatter
    size = re.search(r'viewBox="[^"]*"', drawn)
    assert size is not None
    opening = f'<svg {size[0]} role="img" aria-label="{label}">'
    return opening + drawn[drawn.index(">") + 1 :]


def write_images(figure: Figure, folder: Path, name: str) -> None:
    """The same as PNG and SVG, on white, with its letters as paths, for papers."""
    with _styled(**{"svg.fonttype": "path"}):
        for kind in ("png", "svg"):
            metadata: dict[str, Any] = {"Software": None} if kind == "png" else {"Date": None}
            figure.savefig(folder / f"{name}.{kind}", dpi=200, facecolor="white", metadata=metadata)
