"""The record of `eval.analyze` as Markdown and as one figure.

Each section ends in a line "What it means", made from its numbers and from nothing else.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from shape.evaluation.markdown import DASH, markdown, show

Record = Mapping[str, Any]


def report(record: Record) -> str:
    """All sections as Markdown."""
    options, counts = record["options"], record["positions"]
    opening = (
        f"{record['texts']} texts with the target's own answers; {counts['states']} positions drawn for states and "
        f"{counts['drafts']} for drafts (seed {options['seed']}), temperature 1. The predictor may have been trained "
        "on these texts: acceptance on others can be lower."
    )
    if options["prompts"]:
        opening = opening.partition(" The predictor may")[0] + " The answers were written for this analysis."
    sections = [
        _similarity(record),
        _bound(record),
        _refinement(record),
        _transition(record),
        _acceptance(record),
        _losses(record),
    ]
    return "\n\n".join([opening, *sections])


def _section(title: str, note: str, table: str, meaning: str) -> str:
    return "\n\n".join([f"## {title}", note, table, f"**What it means.** {meaning}"])


def _percent(value: float, spec: str = ".1f") -> str:
    return f"{100 * value:{spec}} %"


def _roughly(value: float) -> str:
    """A percentage to two digits, however small."""
    return f"{float(f'{100 * value:.2g}'):g} %"


def _lag(lag: int | None, none: str) -> str:
    return none if lag is None else str(lag)


# ------------------------------------------------------------------------------------------------- sections


def _similarity(record: Record) -> str:
    rows = record["similarity"]
    table = markdown(
        ["lag n", "pairs", "cosine ≥ 0.5", "mean", *(f"{at} %" for at in rows[0]["percentiles"])],
        [
            [
                _lag(row["lag"], "unrelated"),
                f"{row['pairs']:,}",
                _percent(row["share"]),
                show(row["mean"]),
                *(show(value) for value in row["percentiles"].values()),
            ]
            for row in rows
        ],
    )
    lagged, unrelated = rows[:-1], rows[-1]
    first = lagged[0]
    similar = [row["lag"] for row in lagged if row["share"] >= 0.95]
    claim = (
        f"The paper's claim (cosine at least 0.5 at 95 % of positions) holds here for lags {_listed(similar)}."
        if similar
        else f"The paper's claim (cosine at least 0.5 at 95 % of positions) does not hold here at any lag: at lag "
        f"{first['lag']} it is {_percent(first['share'])}."
    )
    meaning = (
        f"{claim} States of different texts have a mean cosine of {unrelated['mean']:.2f}, so what is owed to "
        f"standing beside each other is {first['mean'] - unrelated['mean']:+.2f} at lag {first['lag']} and "
        f"{lagged[-1]['mean'] - unrelated['mean']:+.2f} at lag {lagged[-1]['lag']}."
    )
    note = "Cosines of h_t and h_{t+n}; percentiles over all positions of answers. Unrelated: of different texts."
    return _section("1. Are successive states similar?", note, table, meaning)


def _listed(items: Sequence[Any]) -> str:
    *others, last = map(str, items)
    return f"{', '.join(others)} and {last}" if others else last


def _bound(record: Record) -> str:
    rows = record["bound"]
    table = markdown(
        ["ground cost", "lag n", "pairs", "mass kept", "mean W", "least L", "W / bound", "bound empty", "correlation"],
        [
            [
                row["ground"],
                _lag(row["lag"], "all"),
                str(row["pairs"]),
                _percent(row["kept"]),
                show(row["distance"], ".3g"),
                show(row["least"], ".3g"),
                show(row["tightness"]),
                _percent(row["empty"], ".0f"),
                show(row["correlation"]),
            ]
            for row in rows
        ],
    )
    whole = {row["ground"]: row for row in rows if row["lag"] is None}
    sentences = []
    for ground, row in whole.items():
        explained = row["correlation"] ** 2
        sentences.append(
            f"With {ground} as ground cost, the least L that holds is {row['least']:.3g}; the transport cost is then "
            f"{_percent(row['tightness'], '.0f')} of the bound on average, at {_percent(row['empty'], '.0f')} of "
            "pairs the bound says no more than that tokens are only so far apart, and the cosine accounts for "
            f"{_percent(explained, '.0f')} of the variance of W (correlation {row['correlation']:.2f})."
        )
    note = (
        f"W: exact transport between p_t and p_{{t+n}} (POT), both truncated to their {record['options']['support']} "
        "likeliest tokens and renormalised, ground cost between output embeddings. The bound is L sqrt(1 - cos(h_t, "
        "h_{t+n})), with L fitted to these very pairs. It is empty where it is no less than the largest ground "
        "cost between the tokens at hand, which W cannot exceed."
    )
    return _section("2. Does the cosine bound the transport cost?", note, table, " ".join(sentences))


def _refinement(record: Record) -> str:
    rows, title = record["refinement"], "3. What does the plan add to the refinement?"
    if rows is None:
        return f'## {title}\n\nNot measured: no predictor with refinement "sinkhorn" was given (`--refined`).'
    table = markdown(
        [
            "read-out", "state changed by", "other best draft", "agrees with target", "against its own", "1 − TV",
            "against its own",
        ],
        [
            [
                row["name"],
                _roughly(row["changed"]),
                _percent(row["drafts"]),
                _percent(row["agreement"]),
                f"{100 * row['agreement_gain'][0]:+.2f} ± {100 * row['agreement_gain'][1]:.2f}" if number else DASH,
                show(row["acceptance"], ".3f"),
                f"{row['acceptance_gain'][0]:+.4f} ± {row['acceptance_gain'][1]:.4f}" if number else DASH,
            ]
            for number, row in enumerate(rows)
        ],
    )  # fmt: skip
    _own, many, column, none = rows
    meaning = (
        f"Taking the plan out (column last) changes the state by {_roughly(column['changed'])} on average and the "
        f"best draft at {_percent(column['drafts'])} of positions; {_gains(column)}. With "
        f"{many['name'].partition(', ')[2]} the state changes by {_roughly(many['changed'])}; {_gains(many)}. "
        f"Without any refinement it changes by {_roughly(none['changed'])}; {_gains(none)}. The weights were trained "
        "for its own read-out: what a predictor trained without would do is another question."
    )
    note = (
        f"{rows[0]['positions']:,} predicted states, all steps together, same weights throughout. Agreement: the "
        "best draft is the target's best token; differences in percentage points and in 1 − TV, ± one standard "
        "error, positions taken as independent. With the column update last the read-out is P2 softmax(P1 h), a "
        "softmax bottleneck in which the plan has no part."
    )
    return _section(title, note, table, meaning)


def _gains(row: Record) -> str:
    (points, points_error), (accepted, error) = row["agreement_gain"], row["acceptance_gain"]
    agreement = _gain("agreement with the target", 100 * points, 100 * points_error, "points")
    return f"{agreement}, {_gain('the acceptance 1 − TV', accepted, error, '')}"


def _gain(what: str, value: float, error: float, unit: str) -> str:
    figure = f"{abs(value):.2g} ± {error:.1g} {unit}".strip()
    if abs(value) <= 2 * error or value == 0:
        return f"{what} does not change beyond two standard errors ({'−' if value < 0 else '+'}{figure})"
    return f"{what} {'rises' if value > 0 else 'falls'} by {figure}"


def _transition(record: Record) -> str:
    found = record["transition"]
    steps = found["steps"]
    counts = sorted({row["iterations"] for row in steps})
    at = {(row["last_update"], row["iterations"]): row for row in steps}
    table = markdown(
        ["last update", *(str(count) for count in counts)],
        [
            [
                order,
                *(f"{at[order, count]['mean']:.2g} ({at[order, count]['high']:.2g})" for count in counts),
            ]
            for order in ("row", "column")
        ],
    )
    most, unmoved = counts[-1], found["unmoved"]
    parts = []
    for order in ("row", "column"):
        close = [count for count in counts if at[order, count]["mean"] <= 0.01]
        reach = f"below 0.01 from {close[0]} iterations on" if close else f"still above 0.01 after {most} iterations"
        parts.append(f"with the {order} update last it is {at[order, 10]['mean']:.2g} after 10 and {reach}")
    meaning = (
        f"p_t and p_{{t+n}} are {unmoved:.2f} apart; of K_t^T p_t and p_{{t+n}}, {'; '.join(parts)}. K_t is made "
        "from p_{t+n} itself, so this is how far an identity is from holding, not a prediction."
    )
    note = (
        "Mean (and 95 % quantile) total variation of K_t^T p_t and p_{t+n} by iterations, lag "
        f"{record['options']['lags'][0]}, on the {record['options']['support']} tokens with most of p_t + p_{{t+n}} "
        f"({_percent(found['kept'])} of the mass, renormalised), epsilon {record['options']['epsilon']:g} in units "
        "of the mean ground cost |E_i - E_j|^2."
    )
    return _section("4. Is K_t^T p_t the next distribution?", note, table, meaning)


def _acceptance(record: Record) -> str:
    rows = record["acceptance"]["rows"]
    kinds = ["independent", "k_sequential", "without_replacement", "match", "rejection", "one_drawn", "likeliest"]
    table = markdown(
        [
            "drafts", "optimum, independent draws", "k-sequential", "optimum, without replacement", "match",
            "rejection", "optimum, one drawn: transport", "optimum, likeliest (not drawn)",
        ],
        [[str(row["drafts"]), *(show(row[kind], ".3f") for kind in kinds)] for row in rows],
    )  # fmt: skip
    parts = []
    for row in rows:
        best = row["without_replacement"]
        parts.append(
            f"with {row['drafts']} draft{'s' * (row['drafts'] > 1)} match reaches {_percent(row['match'] / best)} of "
            f"it and rejection {_percent(row['rejection'] / best)}"
        )
    last = rows[-1]
    gap = last["without_replacement"] - max(last["match"], last["rejection"])
    versus = last["likeliest"] - last["without_replacement"]
    meaning = (
        f"For drafts as our drafters draw them, {'; '.join(parts)}. The most that a better rule could add with "
        f"{last['drafts']} drafts is {gap:+.3f}. At {last['drafts']} drafts, proposing the likeliest tokens instead "
        f"of drawing them would {'raise' if versus > 0 else 'lower'} the optimum by {abs(versus):.3f}."
    )
    note = (
        "Chance that one of K drafts of depth 1 is emitted at temperature 1, p the target's and q the predictor's, "
        f"on the {record['options']['support']} tokens with most of p + q ({_percent(record['acceptance']['kept'])} "
        "of the mass, renormalised). Optima over all lossless rules, 1 + min over H of p(H) − Q(all drafts in H): "
        "for K independent draws from q (SpecTr), beside what its k-sequential selection reaches of it; for draws "
        "without replacement (ours); for the K - 1 likeliest tokens of q and one drawn from the rest, which rule "
        f"`transport` reaches; and for the K likeliest tokens of q. `match` and `rejection` were run "
        f"{record['options']['draws']} times per position on draws without replacement, match's coupled to the "
        f"target's noise; standard error below {rows[0]['error']:.1g}."
    )
    return _section("5. How near are the rules to the optimum of transport?", note, table, meaning)


def _losses(record: Record) -> str:
    rows, apart = record["losses"]["rows"], record["losses"]["apart"]
    table = markdown(
        ["loss", "mean", "correlation with 1 − TV", "gradient along KL", "gradient along TV"],
        [
            [
                row["name"],
                show(row["mean"], ".3f"),
                show(row["correlation"]),
                show(row["alignment"]["KL"]),
                show(row["alignment"]["total variation"]),
            ]
            for row in rows
        ],
    )
    transport = [row for row in rows if row["name"].startswith("transport")]
    kl = next(row for row in rows if row["name"] == "KL")
    narrow = transport[0]
    far = [row for row, scale in zip(transport, record["losses"]["scales"], strict=True) if scale >= apart.get("50", 0)]
    aware = (far or transport[-1:])[0]
    along = {row["name"]: row["alignment"]["total variation"] for row in (kl, narrow, aware)}
    gain = along[aware["name"]] - along["KL"]
    meaning = (
        f"A small step along KL's gradient gains {_percent(along['KL'], '.0f')} of the acceptance that the steepest "
        f"step of its length gains, one along {narrow['name']} {_percent(along[narrow['name']], '.0f')}, and one "
        f"along {aware['name']} {_percent(along[aware['name']], '.0f')}. Likely tokens at a position lie "
        f"{apart.get('50', 0):.2f} apart (median; 5 % of pairs below {apart.get('5', 0):.2f}), so that the first "
        f"scale at which half of all mistakes among them cost less than 1 is that of {aware['name']}: by this "
        "first-order measure forgiving mistakes between near tokens is "
        f"{'nearer to acceptance than KL' if gain > 0 else 'no nearer to acceptance than KL'}. Which loss trains the "
        "better predictor it does not say."
    )
    note = (
        "Real pairs of depth 1, over what the predictor can draft. Transport: Sinkhorn divergence on the target's "
        f"{record['options']['loss_support']} likeliest tokens and a bucket for the rest, cost min(1, |E_i − E_j|² / "
        "s), s in units of the mean squared distance of all tokens. Gradients are with respect to the logits, "
        "alignment is their mean cosine."
    )
    return _section("6. What does a transport loss pull towards?", note, table, meaning)


# ------------------------------------------------------------------------------------------------- figure


def draw(record: Record, cosines: Mapping[str, Tensor], pairs: Mapping[str, Tensor], path: Path) -> None:
    """One figure with a panel per section, as PNG."""
    figure = Figure((14, 7.6), layout="constrained")
    panels = list(figure.subplots(2, 3).flat)
    for name, values in cosines.items():
        style = "--" if name == "unrelated" else "-"
        panels[0].plot(values.sort().values.numpy(), np.linspace(0, 1, len(values)), style, label=name)
    panels[0].axvline(0.5, color="grey", linewidth=0.8)
    _label(panels[0], "1. cosine of states", "cosine", "share of positions below")

    panels[1].scatter(pairs["root"], pairs["squared distance"], s=6, alpha=0.4)
    least = next(r["least"] for r in record["bound"] if r["lag"] is None and r["ground"] == "squared distance")
    ends = np.array([0.0, float(pairs["root"].max())])
    panels[1].plot(ends, least * ends, color="C3", label=f"bound, L = {least:.3g}")
    _label(panels[1], "2. transport cost, squared distances", "sqrt(1 − cos)", "W")

    _draw_refinement(panels[2], record["refinement"])

    for order in ("row", "column"):
        steps = [row for row in record["transition"]["steps"] if row["last_update"] == order]
        means = [max(row["mean"], 1e-16) for row in steps]
        panels[3].plot([row["iterations"] for row in steps], means, "o-", label=f"{order} last")
    panels[3].axhline(record["transition"]["unmoved"], color="grey", linestyle="--", label="p_t itself")
    panels[3].set(xscale="log", yscale="log")
    _label(panels[3], "4. K_t^T p_t against p_{t+n}", "Sinkhorn iterations", "total variation")

    rows = record["acceptance"]["rows"]
    kinds = ["independent", "without_replacement", "match", "rejection", "one_drawn", "likeliest"]
    for number, kind in enumerate(kinds):
        places = np.arange(len(rows)) + 0.14 * (number - 2.5)
        name = kind.replace("_", " ") if kind in ("match", "rejection") else "optimum, " + kind.replace("_", " ")
        panels[4].bar(places, [row[kind] for row in rows], 0.13, label=name)
    low = max(0.0, min(row[kind] for row in rows for kind in kinds) - 0.1)
    panels[4].set_ylim(low, 1 + 0.6 * (1 - low))  # with room for the legend
    panels[4].set_xticks(range(len(rows)), [str(row["drafts"]) for row in rows])
    _label(panels[4], "5. acceptance at depth 1, temperature 1", "drafts", "chance that one is emitted")

    names = [row["name"] for row in record["losses"]["rows"]]
    grid = np.array([[row["alignment"][name] for name in names] for row in record["losses"]["rows"]])
    panels[5].imshow(grid, vmin=-1, vmax=1, cmap="RdBu")
    for (i, j), value in np.ndenumerate(grid):
        panels[5].text(
            j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color="w" if abs(value) > 0.7 else "k"
        )
    short = [name.replace("transport, ", "") for name in names]
    panels[5].set_xticks(range(len(names)), short, rotation=35, ha="right", fontsize=8)
    panels[5].set_yticks(range(len(names)), short, fontsize=8)
    panels[5].set_title("6. cosine of losses' gradients", fontsize=10)

    figure.savefig(path, dpi=90, metadata={"Software": None})


def _draw_refinement(panel: Any, rows: Sequence[Record] | None) -> None:
    if rows is None:
        panel.text(0.5, 0.5, "no predictor with\nrefinement sinkhorn", ha="center", va="center")
        panel.set_axis_off()
        return
    places = np.arange(len(rows))
    errors = [2 * row["agreement_gain"][1] for row in rows]
    panel.barh(places, [row["agreement"] for row in rows], xerr=errors, color="C0", alpha=0.5)
    for place, row in enumerate(rows):
        panel.text(0.01, place, f"{row['name']}: state {_roughly(row['changed'])} off", va="center", fontsize=8)
    panel.set(yticks=[], xlim=(0, 1))
    panel.invert_yaxis()
    panel.set_title("3. best draft agrees with the target, ± 2 s.e.", fontsize=10)


def _label(panel: Any, title: str, x: str, y: str) -> None:
    panel.set_title(title, fontsize=10)
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.legend(fontsize=8)
