"""The claims of the paper "Transporting Tokens", in its order, with ours beside them."""

from typing import Any

from eval.claims.committed import (
    BASELINES,
    OTHER,
    SHIPPED,
    SMALL,
    Claim,
    Committed,
    Ours,
    above,
    numbers,
    shares,
    times,
)

PREDICTORS = ("paper", "paper"), ("shape", "default")  # by their names in both


def analyses(read: Committed, part: str) -> list[list[dict[str, Any]]]:
    """Lines of the shipped target and of chat-12m."""
    return [read.json(f"analysis/{name}/analysis.json")[part] for name in ("shipped", "chat-12m")]


def cosines(read: Committed, of: str) -> list[list[float]]:
    """By target and lag."""
    return [[row[of] for row in rows if row["lag"] is not None] for rows in analyses(read, "similarity")]


def frequent_cosines(read: Committed) -> Ours:
    one, other = cosines(read, "share")
    return f"at {shares(*one)}; {shares(*other)} of positions", min(*one, *other) >= 0.95


def mean_cosines(read: Committed) -> Ours:
    one, other = cosines(read, "mean")
    return f"mean {numbers(*one)}; {numbers(*other)}", None


def bound(read: Committed) -> Ours:
    found = analyses(read, "bound")
    empty = [next(row["empty"] for row in rows if row["lag"] is None and "squared" in row["ground"]) for rows in found]
    return f"with the least L that holds, it says nothing at {shares(empty[0])}; {shares(empty[1])} of pairs", None


def plan(read: Committed) -> Ours:
    found = analyses(read, "refinement")
    changed = [next(row["drafts"] for row in rows if row["name"].startswith("column")) for rows in found]
    return f"{100 * changed[0]:.1f} %; {100 * changed[1]:.1f} % of best drafts change without it", max(changed) > 0.01


def speed(read: Committed) -> Ours:
    paper, ours = ([read.speed_up(SHIPPED, one), read.speed_up(OTHER, other)] for one, other in PREDICTORS)
    return f"its predictor {paper[0]:.2f}x; {paper[1]:.2f}x, our default {ours[0]:.2f}x; {ours[1]:.2f}x", None


def ranking(read: Committed) -> Ours:
    told, holds = [], True
    kinds = "paper", "shape", "eagle", "medusa"
    for name in BASELINES:
        paper, default, eagle, medusa = (read.variant(name, kind)[0] for kind in kinds)
        told.append(f"paper's {paper:.2f}x, default {default:.2f}x, EAGLE {eagle:.2f}x, Medusa {medusa:.2f}x")
        holds &= paper > max(eagle, medusa)
    return "; ".join(told), holds


def warm(read: Committed) -> Ours:
    cold, hot = (read.speed_up(f"shipped/float32-t{at}", "paper") for at in (0, 1))
    return f"{1 - hot / cold:.0%} less ({times(cold, hot)}, float32)", 0.05 <= 1 - hot / cold <= 0.15


def accuracy(read: Committed) -> Ours:
    found = read.json("quality/gsm8k/quality.json")["summary"]
    own, lossy = (found[f"{mode}, T = 0"] for mode in ("autoregressive", "trs-lossy"))
    right = [one["sums_right"]["value"] for one in (own, lossy)]
    return f"GSM8K {right[0]:.1%} without, {right[1]:.1%} with ({own['answers']} problems)", None


def strategies(read: Committed) -> Ours:
    found = read.json("tables/runs/strategies/quality.json")["summary"]
    own, lossy = (found[f"{mode}, T = 0"] for mode in ("autoregressive", "trs-lossy"))
    plain, drafted = (one["perplexity"]["value"] for one in (own, lossy))
    told = f"{lossy['speed_up']['value']:.2f}x with {drafted:.2f} against {plain:.2f}; {lossy['equal']} of "
    return f"{told}{lossy['answers']} answers unchanged", drafted / plain <= 12.2 / 11.9


def transport_predicts(read: Committed) -> Ours:
    texts = read.json("ablations/refinement-paper-steps/ablation.json")["texts"]
    modes = [texts[name]["modes"]["trs-lossy, T = 0"] for name in ("row 128", "column 128", "affine 128", "none")]
    found = [one["perplexity"] for one in modes]
    row, column, affine, none = (one["value"] for one in found)
    told = f"{row:.2f} (row update last), {column:.2f} (column), affine {affine:.2f}, without refinement {none:.2f}"
    return told, above(found[2], found[0])


def transport_costs(read: Committed) -> Ours:
    affine, row = (read.variant("refinement", f"{name} 128")[0] for name in ("affine", "transport, row"))
    return f"{row:.2f}x against {affine:.2f}x", row < affine


def wider_predicts(read: Committed) -> Ours:
    lengths = [read.variant("refinement", f"transport, row {d}")[1] for d in (32, 64, 128, 384)]
    steps = read.variants("refinement-steps")
    narrow, wide = (steps[f"row {d}"]["summary"]["acceptance_length"] for d in (32, 128))
    told = f"acceptance length {numbers(narrow['value'], wide['value'])} at d = 32, 128 after equal steps"
    return f"{told}; {numbers(*lengths)} at d = 32, 64, 128, 384 in equal time", above(wide, narrow)


def wider_costs(read: Committed) -> Ours:
    ratios = [read.variant("refinement", f"transport, row {d}")[0] for d in (32, 64, 128, 384)]
    return times(*ratios), ratios == sorted(ratios, reverse=True)


def batches(read: Committed) -> Ours:
    cases = read.json("batches/shipped/efficiency.json")["cases"]
    rates = {(case["method"], case["batch"]): case["tokens"] / case["seconds"] for case in cases}
    assert len(rates) == len(cases), "of one precision and temperature"
    sizes = (2, 4, 8, 16, 24)
    ratios = [
        rates["shape", size] / max(rates[base, size] for base in ("transformers", "autoregressive")) for size in sizes
    ]
    return times(*ratios), ratios == sorted(ratios, reverse=True)


def grid(read: Committed, k: int, n: int) -> float:
    return read.variant("lookahead", f"k = {k}, N = {n}")[0]


def deeper(read: Committed) -> Ours:
    first, last = ([grid(read, k, n) for k in (1, 2)] for n in (1, 4))
    return f"{times(*first)} at N = 1, {times(*last)} at N = 4 (k = 1, 2)", min(last) > max(first)


def wider(read: Committed) -> Ours:
    ratios = [grid(read, k, 3) for k in (1, 2, 3)]
    return f"{times(*ratios)} at N = 3 (k = 1, 2, 3)", ratios[-1] < ratios[0]


def best_cell(read: Committed) -> Ours:
    ratios = {label: one["summary"]["speed_up"]["value"] for label, one in read.variants("lookahead").items()}
    best, theirs = max(ratios, key=ratios.__getitem__), "k = 3, N = 3"
    return f"{best}: {ratios[best]:.2f}x ({theirs}: {ratios[theirs]:.2f}x), lossless", best == theirs


def latency(read: Committed) -> Ours:
    found = read.json("tables/runs/latency/latency.json")["latencies"]
    own = [one for one in found if one["method"] == "autoregressive"]
    first, between = ([one[part] for one in own] for part in ("first", "between"))
    lengths = [one["context"] for one in own]
    told = f"contexts {min(lengths)} to {max(lengths)}: TTFT {min(first):.0f} to {max(first):.0f} ms, "
    return f"{told}ITL {min(between):.1f} to {max(between):.1f} ms", None


def by_lookahead(read: Committed) -> Ours:
    run, names = "tables/runs/lookahead", [f"lookahead {n}" for n in (1, 2, 3)]
    ratios, lengths = ([figure(run, name) for name in names] for figure in (read.speed_up, read.length))
    return f"{times(*ratios)}; tokens a forward {numbers(*lengths)}", None


def token_accuracy(read: Committed) -> Ours:
    found = [read.json(f"quality/{name}/quality.json")["ahead"][:3] for name in ("shipped", "gsm8k")]
    own, public = ([line["accuracy"]["value"] for line in lines] for lines in found)
    apart = max(abs(ours - theirs) for ours, theirs in zip(own, (0.91, 0.89, 0.86), strict=True))
    return f"{numbers(*own)}; on GSM8K {numbers(*public)}", apart <= 0.03


def training_cost(read: Committed) -> Ours:
    trained = next(iter(read.json(f"ablations/{BASELINES[0]}/ablation.json")["trained"]["paper"].values()))
    size = trained["parameters"] / 1e6
    return f"{size:.1f}M for a target of 12.6M, {trained['seconds'] / 60:.0f} minutes on one core", None


SHAPE = [
    Claim("states of neighbouring positions are similar", "cosine of 0.5 or more at 95 % of positions, n = 1, 2, 3",
          frequent_cosines, "on neither target, at no lag"),
    Claim("the same, its Table 9", "0.38–0.55 (Vicuna)", mean_cosines, "another model; as there, below Table 1's"),
    Claim("transport is bounded by similarity", "W ≤ L sqrt(1 − cos)", bound, "no L is given"),
    Claim("the transport plan refines a state", "Sec. 3.2, T^T 1 read out", plan,
          "T^T 1 is the softmax that went in, whenever Sinkhorn ends on the columns"),
    Claim("speed-up", "up to 5.23x (Qwen-14B), 5.95x (Llama-70B), 3.9–6.0x by task, T = 0", speed, SMALL),
    Claim("ahead of other drafters", "3.9–6.0x; EAGLE-3 3.9–5.8x, Medusa-1 1.8–2.6x", ranking,
          "by time, where EAGLE's tokens cost most; in drafts of one shape Medusa accepts more, our default most"),
    Claim("Lookahead decoding", "2.4–3.8x",
          lambda read: (times(read.speed_up("drafters/shipped-t0", "lookahead")), None),
          "wide forwards are not free on a CPU"),
    Claim("Medusa-2", "2.0–3.8x", None, "it trains the target, which is frozen here"),
    Claim("sampling costs little", "about 10 % less at T = 1", warm, "its predictor, in float32"),
    Claim("accuracy lost", "at most 1.2 %; Table 5: 1.8 points", accuracy, "the target solves hardly any"),
    Claim("tree rejection sampling", "3.21x with perplexity 12.2 against 11.9", strategies,
          "it rewrites most answers of this target"),
    Claim("MT-Bench, MMLU, MATH500, AIME24, LiveCodeBench", "as without drafts", None,
          "lossless decoding writes the same text; the lossy rule needs a larger target and a judge"),
    Claim("transport predicts better than affine", "perplexity 12.2 against 18.4, d = 128", transport_predicts,
          "equal steps, three seeds; no difference exceeds noise"),
    Claim("and costs speed", "3.21x against 3.87x", transport_costs, "Sinkhorn's iterations are steps of their own"),
    Claim("a wider space predicts better", "perplexity 17.3, 16.1, 12.2, 12.1 at d = 32, 64, 128, full",
          wider_predicts, "in equal time fewer steps fit, and none are regained"),
    Claim("and costs speed", "3.87, 3.66, 3.21, 2.67x", wider_costs, "as the paper has it"),
    Claim("speed-up by batch size", "1.92, 1.75, 1.61, 1.52, 1.41x at 2, 4, 8, 16, 24", batches,
          "falls with the batch; on two cores a forward over many tokens is soon bound by arithmetic"),
    Claim("grows with the lookahead N", "1.75–1.91x at N = 1, 3.35–4.10x at N = 5", deeper,
          "a chain's grows up to N = 3; all 2^N paths cost a CPU more than they bring"),
    Claim("falls slightly with k", "at all N", wider, "more nodes to verify"),
    Claim("perplexity falls with k", "at all N", None, "the grid is verified losslessly here"),
    Claim("k = N = 3 is best", "3.21x, perplexity 12.2", best_cell, "a chain is: width costs more than it accepts"),
    Claim("latency without drafts", "ITL and TTFT by size and context", latency, "its figures are not at hand"),
    Claim("speed-up by lookahead", "1.9, 2.6, 3.2–4.1x at 1, 2, 3", by_lookahead,
          "our tokens a forward are its speed-ups"),
    Claim("token accuracy by lookahead", "0.91, 0.89, 0.86", token_accuracy,
          "on prompts like those trained on, and only there"),
    Claim("training cost", "451M parameters for 7B, 5 h on one A100, 41.9 GB", training_cost, "another size"),
]  # fmt: skip
