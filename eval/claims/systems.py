"""The claims of each system, in its own order, with ours beside them.

Sources: "Torch-Velocity"; the chapter on speculative decoding of an OpenVINO NPU guide; Kolm's "Recipe speculative
decoding"; HyperTensor's paper C, OTT-Decode; and what publications of the peers say. The paper's are in `paper`.
"""

import re
from collections.abc import Sequence
from itertools import starmap

from eval.claims.committed import (
    BASELINES,
    OTHER,
    SHIPPED,
    SMALL,
    UNDECIDED,
    Claim,
    Committed,
    Ours,
    above,
    numbers,
    shares,
    times,
)
from eval.claims.paper import SHAPE
from shape.drafters.cost import break_even
from shape.evaluation.results import speed_and_length

LENGTHS, KINDS = "lookahead/t{}", ("factual", "creative", "code", "repetitive", "dialogue", "technical")
OTHERS = "another target, drafter and text"

# ------------------------------------------------------------------------------------------------- Torch-Velocity


def draft_model(read: Committed) -> Ours:
    kinds = [read.speed_up(LENGTHS.format(0), "adaptive", kind) for kind in KINDS]
    trained = read.speed_up("drafters/shipped-t0", "small")
    told = f"{min(kinds):.2f}–{max(kinds):.2f}x by kind, {trained:.2f}x on kinds trained on"
    cost = seconds(read)
    return f"{told}; a drafted token takes {cost[0] / cost[1]:.0%} of a verification", None


def seconds(read: Committed) -> tuple[float, float, float]:
    """Of a drafted token, a verification and an autoregressive step, with drafts of four tokens."""
    drafted, plain = (read.total(LENGTHS.format(0), name) for name in ("4 tokens", "autoregressive"))
    return (
        drafted["draft_seconds"] / drafted["draft_steps"] / 4,
        drafted["verify_seconds"] / drafted["forwards"],
        plain["decode_seconds"] / plain["forwards"],
    )


def adaptive(read: Committed, temperature: int) -> Ours:
    folder = LENGTHS.format(temperature)
    fixed = {n: read.speed_up(folder, f"{n} tokens") for n in (1, 2, 4, 6, 8)}
    best, own = max(fixed, key=fixed.__getitem__), read.speed_up(folder, "adaptive")
    told = f"{own:.2f}x; fixed at 4 {fixed[4]:.2f}x, at its best ({best}) {fixed[best]:.2f}x"
    return f"{told}, by cost {read.speed_up(folder, 'cost'):.2f}x", above(
        read.line(folder, "adaptive")["speed_up"], read.line(folder, f"{best} tokens")["speed_up"]
    )


def rollback(read: Committed) -> Ours:
    lines = read.variants("lookahead")
    spent = [lines[f"k = 1, N = {n}"]["step_ms"]["commit"] for n in (1, 2, 3, 4)]
    return f"{numbers(*spent)} ms for chains of 1 to 4", max(spent) < 1.2 * min(spent)


VELOCITY = [
    Claim("speed-up with a draft model", "1.5–2.5x", draft_model, SMALL),
    Claim("adapting the length against fixed, T = 0", "adaptive is better", lambda read: adaptive(read, 0),
          "better than the length it starts from; one token is best for this pair, and it tries more"),
    Claim("the same, T = 1", "adaptive is better", lambda read: adaptive(read, 1), "as at T = 0"),
    Claim("rollback moves a pointer", "O(1)", rollback, "a chain's cache is contiguous"),
]  # fmt: skip

# ------------------------------------------------------------------------------------------------- OpenVINO


def identical(read: Committed) -> Ours:
    lines = [read.line(f"shipped/{dtype}-t0", "shape") for dtype in ("float32", "bfloat16")]
    same = [f"{line['equal_autoregressive']} of {line['answers']} answers" for line in lines]
    return f"{same[0]} in float32, {same[1]} in bfloat16", lines[0]["equal_autoregressive"] == lines[0]["answers"]


def acceptances(read: Committed) -> Ours:
    told = []
    for run, kinds in (("drafters/shipped-t0", "trained kinds"), ("drafters/kinds-t0", "others")):
        suffix, model = (read.proposed(run, "suffix+small", source) for source in ("suffix", "model"))
        told.append(f"{kinds}: suffix automaton {suffix:.0%}, draft model {model:.0%}")
    return "; ".join(told), None


def size_of_draft(read: Committed) -> Ours:
    lines = [read.line(f"drafters/{run}-t0", "small") for run in ("shipped", "kinds")]
    lengths = [line["tokens_per_draft_step"] for line in lines]
    told = f"{lengths[0]:.2f} tokens a drafted step on trained kinds, {lengths[1]:.2f} on others"
    return f"distilled, 11 % of the target: {told}", None


def pays_from(read: Committed) -> Ours:
    rate = break_even(4, *seconds(read))
    told = "never" if rate is None else f"from {rate:.0%}"
    return f"this pair pays {told}, by the closed form with its times, 4 tokens a draft", None


def prefill(read: Committed) -> Ours:
    own, plain = (read.line(SHIPPED, name)["prefill_ms"] for name in ("shape", "autoregressive"))
    return f"{own:.1f} ms with drafts, {plain:.1f} without", own > 0.95 * plain


def tail(read: Committed) -> Ours:
    cases = read.json("efficiency/shipped/efficiency.json")["cases"]
    measured = [case for case in cases if (case["dtype"], case["temperature"]) == ("bfloat16", 0)]
    late = {case["method"]: case["gaps"][1] for case in measured}
    own, plain = late["shape"], late["autoregressive"]
    return f"95 % of gaps below {own:.1f} ms with drafts, {plain:.1f} without", own > plain


def quantised(read: Committed) -> Ours:
    answers = read.json("openvino/shipped.json")["answers"]
    rates = [
        sum(one["tokens"] for one in answers[f"openvino bfloat16 {bits} {how}"])
        / sum(one["seconds"] for one in answers[f"openvino bfloat16 {bits} {how}"])
        for bits in ("int8", "int4")
        for how in ("plain", "drafted")
    ]
    gains = rates[1] / rates[0], rates[3] / rates[2]
    return f"{times(*gains)} over plain int8, int4 in OpenVINO", min(gains) > 1


OPENVINO = [
    Claim("greedy output", "bit-identical", identical,
          "in bfloat16 too: a token is the same bit for bit in a tree"),
    Claim("acceptance", "n-grams 30–50 %, draft models 60–80 %", acceptances,
          "of tokens proposed in trees, which hold alternatives"),
    Claim("pairs of one family", "drafts of 5–15 % of the target; distilled ones are best", size_of_draft,
          "no published family is at hand"),
    Claim("fall back to plain decoding", "below about 40 % acceptance", pays_from,
          "depends on what a draft costs; ours falls back by measured times"),
    Claim("prefill", "drafting does not help", prefill, "it begins behind it"),
    Claim("tail of inter-token latency", "drafting can worsen it", tail, "several tokens arrive together, later"),
    Claim("combines with quantised targets", "yes", quantised, "with activations in 8 bits, as much as bfloat16"),
]  # fmt: skip

# ------------------------------------------------------------------------------------------------- Kolm

TASKS = ("json", "code", "sums")


def pack_table(read: Committed, column: str, tasks: Sequence[str] = TASKS) -> list[float]:
    lines = read.table("recipes/recipes.md")
    return [float(lines[task][column].rstrip("%x").replace(",", "")) for task in tasks]


def covered(read: Committed) -> Ours:
    found = pack_table(read, "tokens covered")
    return f"JSON {found[0]:.0f} %, code {found[1]:.0f} %, sums {found[2]:.0f} %", min(found) >= 50


def gained(read: Committed) -> Ours:
    found = pack_table(read, "recipes")
    return f"JSON {found[0]:.2f}x, code {found[1]:.2f}x, sums {found[2]:.2f}x", found[0] >= 4


def prose(read: Committed) -> Ours:
    (found,) = pack_table(read, "tokens covered", ["free prose"])
    return f"{found:.0f} %", found >= 15


def hits(read: Committed) -> Ours:
    found = pack_table(read, "first token right")
    return f"{found[0]:.0f} %, {found[1]:.0f} %, {found[2]:.0f} % of first tokens", min(found) >= 99


def pack_or_model(read: Committed) -> Ours:
    packs, models = (pack_table(read, column, [*TASKS, "free prose"]) for column in ("recipes", "draft model"))
    told = f"pack {times(*packs)}, draft model {times(*models)} on JSON, code, sums, prose"
    return told, models[-1] > packs[-1] and all(p > m for p, m in zip(packs[:-1], models[:-1], strict=True))


def pack_size(read: Committed) -> Ours:
    prompts, entries, sizes = (pack_table(read, column) for column in ("prompts", "entries", "KB"))
    told = f"{min(entries):.0f}–{max(entries):.0f} entries, {min(sizes):.0f}–{max(sizes):.0f} KB"
    return f"{told} from {prompts[0]:.0f} prompts", None


def packs_exact(read: Committed) -> Ours:
    lines = [read.line(f"recipes/{task}", "recipes") for task in TASKS]
    same, of = (sum(line[name] for line in lines) for name in ("equal_autoregressive", "answers"))
    return f"token for token by test; {same} of {of} answers in bfloat16", True


KOLM = [
    Claim("tokens covered on structured tasks", "50–80 %, JSON 83 %", covered,
          "packs of 64 prompts, agreed on by all samples"),
    Claim("speed-up on JSON extraction", "4.2x (1.7–4.2x on structure)", gained, "half of the tokens are covered"),
    Claim("free prose covered", "22 %", prose, "samples of prose agree on nothing"),
    Claim("accuracy of a hit", "99.9 %", hits, "what follows a prefix varies with the prompt"),
    Claim("the draft model wins on prose, the pack on structure", "1.5x; 1.7–4.2x", pack_or_model,
          "so on structure; on prose our draft model does not pay, either"),
    Claim("size of a pack", "1,200–15,000 entries, 12–150 KB", pack_size, "it grows with the prompts"),
    Claim("lossless", "yes", packs_exact, "in bfloat16 near-ties fall otherwise when forwards are wider"),
]  # fmt: skip

# ------------------------------------------------------------------------------------------------- OTT-Decode


def gain_apart(read: Committed) -> Ours:
    rows = read.table("compressed/factors.md").values()
    apart = max(abs(float(row["apart"].rstrip("%"))) for row in rows)
    return f"within {apart:.1f} % of measured decoding for {len(rows) - 1} compressions", apart < 10


def lost_twice(read: Committed) -> Ours:
    rows = read.table("compressed/factors.md").values()
    first = [float(row["runs"]) for row in rows]
    return f"the first factor is {min(first):.2f} to {max(first):.2f}", max(first) <= 1


def collapse(read: Committed) -> Ours:
    rows = read.table("compressed/factors.md")
    shares_of_d = (0.35, 0.25, 0.15, 0.08)
    found = [float(rows[f"attention at {share:g} d, SVD"]["first token accepted"]) for share in shares_of_d]
    return f"{shares(*found)} accepted at k/d = 0.35, 0.25, 0.15, 0.08", found[-1] < 0.1 < 0.5 < found[0]


def early_ends(read: Committed) -> Ours:
    line = read.line("shipped/float32-t0", "shape")
    return f"{line['equal_autoregressive']} of {line['answers']} answers are the target's own, ends included", None


def geodesic(read: Committed) -> Ours:
    found = [read.length("geodesic", f"geodesic: {path}") for path in ("line", "geodesic", "analogue")]
    return f"{numbers(*found)} tokens a forward: straight, by connection, by analogue", None


def onedecode(read: Committed) -> Ours:
    one = [read.length("geodesic", "onedecode, 1 candidate"), read.speed_up("geodesic", "onedecode, 1 candidate")]
    return f"{one[0]:.2f} tokens a forward, {one[1]:.2f}x, at the same threshold", None


def swarm(read: Committed) -> Ours:
    found = [read.length("geodesic", f"onedecode, {count}") for count in ("1 candidate", "4 candidates")]
    return f"1, 2, 8 and 64 candidates fit, by test; 4 make {found[1]:.2f} of {found[0]:.2f} tokens a forward", True


def alpha(read: Committed) -> Ours:
    total = read.total("geodesic", "onedecode+geodesic")
    gained = total["accepted"] / total["draft_steps"]
    ratio = read.speed_up("geodesic", "onedecode+geodesic")
    return f"{gained:.2f} drafted tokens accepted a draft, {ratio:.2f}x (table and geodesic)", None


def composition(read: Committed) -> Ours:
    rows = read.table("compressed/compressed.md")
    names = ("block residuals 0.35", "cache at 0.65 of a head", "cache at 0.25 of a head", "8 bits, attention at 0.5 d")
    return "accepted: " + ", ".join(f"{name} {rows[name]['accepted']}" for name in names), None


def alone(read: Committed) -> Ours:
    found = read.json("quality/shipped/quality.json")["summary"]
    own, lossy = (found[f"{mode}, T = 0"] for mode in ("autoregressive", "unverified-lossy"))
    perplexity = [one["perplexity"]["value"] for one in (lossy, own)]
    told = f"perplexity {perplexity[0]:.2f} against {perplexity[1]:.2f}, {lossy['equal']} of {lossy['answers']}"
    return f"{told} answers unchanged (`unverified-lossy`)", None


OTT = [
    Claim("closed-form throughput", "17.3 tok/s at a = 0.9, printed; its formula gives 20.2",
          lambda read: ("the formula agrees with 20,000 simulated steps (`tests/drafters/test_cost.py`)", False),
          "the printed table does not follow from the formula"),
    Claim("gain of a compressed drafter in three factors", "product of three", gain_apart,
          "from the first token's acceptance and two times"),
    Claim("acceptance is lost twice", "two factors below 1", lost_twice,
          "the factor of longer runs grows where acceptance falls; only their product is a loss"),
    Claim("acceptance collapses at low rank", "at k = 128, mostly at 256 of 4,096", collapse,
          "calibrated projections keep more"),
    Claim("drafts end answers at token 0", "on instruct models, without `eos_aware`", early_ends,
          "no such target is at hand; what is verified ends where the target ends, `eos_aware` is `min_new_tokens`"),
    Claim("geodesic drafter", "no figure", geodesic, "nor a formula"),
    Claim("OneDecode table", "threshold 0.45, no figure", onedecode, "single tokens of context"),
    Claim("OTT-SWARM", "K = 8 crashed", swarm, "and works here"),
    Claim("acceptance and speed-up", "38.5 %, 1.53x (SmolLM2-135M); 46.9 % (Llama-3.1-8B)", alpha, OTHERS),
    Claim("what composes", "residuals at 0.35, low-rank cache, k/d 0.25–0.65", composition,
          "no figures; residuals of this strength cost most"),
    Claim("drafter without a verifier", "an ablation", alone, "lossy, and reads so"),
]  # fmt: skip

# ------------------------------------------------------------------------------------------------- peers


def eagle(read: Committed) -> Ours:
    found = [read.variant(name, "eagle") for name in BASELINES]
    return "; ".join(starmap(speed_and_length, found)), None


def few_dialogues(read: Committed) -> Ours:
    found = [read.length(folder, name) for folder, name in ((SHIPPED, "shape"), (OTHER, "default"))]
    return f"{found[0]:.2f}; {found[1]:.2f}", None


def chains(read: Committed) -> Ours:
    found = {name: line["speed-up (95 %)"] for name, line in read.table("draft-shapes.md").items()}
    pairs = {6: ("chain 6", "tree 2 x 4, 6 nodes"), 8: ("chain 8", "tree 2 x 6, 8 nodes")}
    told = [f"{nodes} nodes: {found[chain]}, {found[tree]}" for nodes, (chain, tree) in pairs.items()]
    verdicts = {above(*(_interval(found[name]) for name in pair)) for pair in pairs.values()}
    return "; ".join(told), verdicts.pop() if len(verdicts) == 1 else UNDECIDED


def _interval(cell: str) -> dict[str, float]:
    value, low, high = map(float, re.findall(r"[0-9.]+", cell))
    return {"value": value, "low": low, "high": high}


def hybrids(read: Committed) -> Ours:
    told, holds = [], []
    runs = {"trained kinds": ("shipped-t0", "shape"), "others": ("kinds-t0", "shape")}
    for text, (run, name) in {**runs, "public prompts": ("chat-12m-public", "default")}.items():
        both, suffix, network = (read.speed_up(f"drafters/{run}", one) for one in (f"suffix+{name}", "suffix", name))
        told.append(f"{text} {both:.2f}x (suffix {suffix:.2f}x, network {network:.2f}x)")
        holds.append(both > max(suffix, network))
    return ", ".join(told), all(holds)


PEERS = [
    Claim("EAGLE-3 on Llama-3.1-8B", "MT-Bench 2.4x (3.9 tokens), HumanEval 3.0x (4.9), MATH500 3.3x (5.4), "
          "GSM8K 1.75x (3.0)", eagle,
          "another target and text; each drafted token costs a third of this target's step"),
    Claim("acceptance length from 5,000 dialogues", "about 1.5", few_dialogues,
          "20,062 here, of a few kinds, and a target that is easy to foresee"),
    Claim("chains beat trees at small budgets", "in most runs", chains,
          "chain, and the fastest tree of as many nodes, in one run: choose by measurement"),
    Claim("a hybrid is best (Spec-Bench)", "suffix automaton and neural drafter", hybrids,
          "on no set better than both of its parts"),
]  # fmt: skip

SYSTEMS: dict[str, Sequence[Claim]] = {
    "SHAPE (Transporting Tokens)": SHAPE,
    "Torch-Velocity": VELOCITY,
    "OpenVINO NPU chapter": OPENVINO,
    "Recipe packs (Kolm)": KOLM,
    "OTT-Decode (HyperTensor)": OTT,
    "Peers, as published": PEERS,
}
