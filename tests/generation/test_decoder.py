"""ShapeDecoder end to end: equal to transformers when greedy, to the plain loop at the same seed when sampling."""

import inspect
from copy import copy, deepcopy
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from enumeration import chi_square
from helpers import BASELINES, FAMILIES, LENGTHS, WIDTHS, Recorder, chain_only_model, predictor, prompts, weaker_model
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    WatermarkingConfig,
)
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)

from shape.drafters import (
    DRAFTERS,
    AdversaryDrafter,
    CompressedDrafter,
    Compression,
    Drafter,
    GeodesicDrafter,
    HybridDrafter,
    LookaheadDrafter,
    ModelDrafter,
    OneDecodeDrafter,
    OracleDrafter,
    SuffixDrafter,
    TrainedDrafter,
    TreeShape,
)
from shape.drafters.base import Wrapped
from shape.drafters.lengths import Adaptive
from shape.errors import CheckpointError, ConfigError, TargetMismatch, UnsupportedGeneration
from shape.generation.decoder import ShapeDecoder
from shape.generation.rules import RULES, TrsLossy, TypicalLossy
from shape.generation.served import NEUTRAL, SERVED
from shape.networks.base import Predictor
from shape.target.model import Target
from shape.target.support import CACHE_NAMES
from shape.verification.noise import token_hashes
from shape.verification.tree import TokenTree


def of_few_tokens() -> TrainedDrafter:
    network = predictor(step_mode="parallel", token_conditioning="none", draft_vocab_size=4)
    network.draft_vocabulary = torch.tensor([1, 2, 4, 5])
    return TrainedDrafter(network, TreeShape(depth=3, width=2, branching=3, nodes=5))


def drafters() -> dict:
    return {
        **DRAFTERS,
        "shape tree": lambda: TrainedDrafter(predictor(), TreeShape(depth=4, width=3, nodes=7)),
        "shape chain": lambda: TrainedDrafter(predictor(), TreeShape(depth=5, width=1)),
        "shape stopping chain": lambda: TrainedDrafter(predictor(), TreeShape(depth=6, width=1, threshold=0.03)),
        "shape wide tree": lambda: TrainedDrafter(predictor(), TreeShape(depth=3, width=2, branching=3)),
        "shape parallel": lambda: TrainedDrafter(
            predictor(step_mode="parallel", token_conditioning="none", refinement="sinkhorn", refinement_dim=8),
            TreeShape(depth=3, width=2),
        ),
        "shape of few tokens": of_few_tokens,
        "shape drawn parallel": lambda: TrainedDrafter(
            predictor(step_mode="parallel", token_conditioning="none"), TreeShape(depth=3, width=2)
        ),
        "eagle tree": lambda: TrainedDrafter(predictor(**BASELINES["eagle"], loud=True), TreeShape(depth=4, width=3)),
        "deep eagle tree": lambda: TrainedDrafter(
            predictor(**BASELINES["eagle of three layers"], loud=True), TreeShape(depth=3, width=2)
        ),
        "peagle tree": lambda: TrainedDrafter(predictor(**BASELINES["peagle"], loud=True), TreeShape(depth=3, width=2)),
        "block chain": lambda: TrainedDrafter(
            predictor(**BASELINES["block with Markov bias and confidence"], loud=True), TreeShape(depth=4, width=1)
        ),
        "gated block tree": lambda: TrainedDrafter(
            predictor(**BASELINES["block with gated Markov bias"], loud=True), TreeShape(depth=3, width=2)
        ),
        "recurrent block tree": lambda: TrainedDrafter(
            predictor(**BASELINES["block with recurrent Markov bias"], loud=True), TreeShape(depth=3, width=2)
        ),
        "narrow eagle tree": lambda: TrainedDrafter(
            predictor(**WIDTHS["eagle narrower than its target"], loud=True), TreeShape(depth=3, width=2)
        ),
        "attending tree": lambda: TrainedDrafter(
            predictor(**BASELINES["shape of three layers"], loud=True), TreeShape(depth=3, width=2, nodes=5)
        ),
        "model": lambda: ModelDrafter(Target(weaker_model()), Adaptive(length=3)),
        "suffix": lambda: SuffixDrafter(shortest=1, threshold=0.0),
        "hybrid": lambda: HybridDrafter(
            [
                SuffixDrafter(shortest=1, threshold=0.0),
                AdversaryDrafter(seed=1),
                TrainedDrafter(predictor(**BASELINES["shape of three layers"], loud=True), TreeShape(depth=3, width=2)),
                TrainedDrafter(predictor(), TreeShape(depth=4, width=3, nodes=7)),
            ],
            nodes=9,
        ),
        "hybrid of whole trees": lambda: HybridDrafter(
            [SuffixDrafter(shortest=1, threshold=0.0), TrainedDrafter(predictor(), TreeShape(depth=3, width=2))]
        ),
        "onedecode of many": lambda: OneDecodeDrafter(threshold=0.0, candidates=8, nodes=10),
        "geodesic of its own": lambda: GeodesicDrafter("geodesic", TreeShape(depth=2)),
        "compressed in every way": lambda: CompressedDrafter(
            Compression(attention=0.3, mlp=0.5, int8=True, cache=0.5, residuals=0.35),
            num_draft_tokens=Adaptive(2),
        ),
        "lookahead hybrid": lambda: HybridDrafter([LookaheadDrafter(window=2), GeodesicDrafter()], nodes=9),
        "adversary": lambda: AdversaryDrafter(seed=1),
        "adversary chain": lambda: AdversaryDrafter(seed=1, chains_only=True, nodes=5),
    }


def new_tokens(sequences: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return sequences[:, batch["input_ids"].shape[1] :]


@pytest.mark.parametrize(
    ("arch", "first", "every"),
    [
        ("llama", 0, 1),
        *((arch, number % 3, 3) for number, arch in enumerate(FAMILIES) if arch != "llama"),
        *(pytest.param(arch, 0, 1, marks=pytest.mark.slow) for arch in FAMILIES if arch != "llama"),
    ],
)
def test_greedy_equals_transformers_in_float64(tiny_model, arch, first, every):
    """With all drafters, or some of them."""
    model = tiny_model(arch)
    batch = prompts()
    expected = model.generate(**batch, max_new_tokens=40, do_sample=False)
    for name, make in [("plain", lambda: None), *drafters().items()][first::every]:
        decoder = ShapeDecoder(model, make(), fall_back=False)
        out = decoder.generate(**batch, max_new_tokens=40, return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected), name
        assert out.stats.lossless and out.stats.acceptance_length >= 1.0
        alone = decoder.generate(batch["input_ids"][2:3, -9:], max_new_tokens=40)
        end = alone.shape[1] - 9
        assert torch.equal(alone[0, 9:], new_tokens(expected, batch)[2, :end]), name


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"temperature": 0.7, "top_k": 0}, marks=pytest.mark.slow),
        {"temperature": 1.3, "top_k": 9, "top_p": 0.8},
    ],
)
def test_the_same_seed_gives_the_same_tokens_with_every_drafter(tiny_model, options):
    model = tiny_model("llama")
    batch = prompts()
    seeds = [11, 12, 13, 14, 15]
    arguments = {"max_new_tokens": 30, "do_sample": True, "seed": seeds, **options}
    expected = ShapeDecoder(model).generate(**batch, **arguments)
    for name, make in drafters().items():
        decoder = ShapeDecoder(model, make(), fall_back=False)
        assert torch.equal(decoder.generate(**batch, **arguments), expected), name
        # The same row alone, in a batch of one: independent of who shares the batch.
        alone = decoder.generate(batch["input_ids"][2:3, -9:], **(arguments | {"seed": seeds[2:3]}))
        assert torch.equal(alone[0, 9:], new_tokens(expected, batch)[2, : alone.shape[1] - 9]), name


def test_padding_side_changes_nothing(tiny_model):
    decoder = ShapeDecoder(tiny_model("llama"), AdversaryDrafter())
    left, right = (decoder.generate(**prompts(side=side), max_new_tokens=12) for side in ("left", "right"))
    assert torch.equal(left[:, max(LENGTHS) :], right[:, max(LENGTHS) :])


def test_padding_is_inferred_from_the_pad_token(tiny_model):
    decoder = ShapeDecoder(tiny_model("llama"))
    batch = prompts()
    assert torch.equal(
        decoder.generate(**batch, max_new_tokens=8), decoder.generate(batch["input_ids"], max_new_tokens=8)
    )


def test_seeds_rows_and_samples_differ(tiny_model):
    decoder = ShapeDecoder(tiny_model("llama"))
    ids = prompts([4])["input_ids"].repeat(2, 1)
    arguments = {"max_new_tokens": 24, "do_sample": True, "temperature": 2.0, "top_k": 0, "eos_token_id": []}
    seed0, seed1 = (decoder.generate(ids, seed=seed, **arguments) for seed in (0, 1))
    rows = [seed0[0], seed0[1], seed1[0], seed1[1]]
    assert all(not torch.equal(a, b) for i, a in enumerate(rows) for b in rows[i + 1 :])
    samples = decoder.generate(ids[:1], seed=0, num_return_sequences=3, **arguments)
    assert samples.shape[0] == 3 and len({tuple(row.tolist()) for row in samples}) == 3
    assert torch.equal(samples[:2], seed0)


def test_an_unset_seed_follows_torchs_global_generator(tiny_model):
    decoder = ShapeDecoder(tiny_model("llama"))
    ids = prompts([4])["input_ids"]
    results = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        results.append(decoder.generate(ids, max_new_tokens=24, do_sample=True, temperature=2.0, top_k=0))
    assert torch.equal(results[0], results[1])
    assert results[0].shape != results[2].shape or not torch.equal(results[0], results[2])


def test_three_tokens_follow_the_exact_joint_distribution(tiny_model):
    """Chi-square of the joint; false-alarm rate 1e-6, here and below. Drafters change none of it, as above."""
    assert joint_chi_square(tiny_model("llama", vocab_size=6), None, "match") < 1


DRAWN = ["shape chain", "shape stopping chain", "shape wide tree", "shape drawn parallel"]
DRAWN += ["geodesic", "compressed in every way"]


@pytest.mark.parametrize("name", ["plain", *DRAWN, "ngram", "adversary", "hybrid of whole trees"])
def test_rejection_samples_from_the_joint_distribution(tiny_model, name):
    model = tiny_model("llama", vocab_size=6)
    assert joint_chi_square(model, drafters().get(name, lambda: None)(), "rejection") < 1


TRANSPORTED = ["shape chain", "shape tree", "shape wide tree", "shape drawn parallel", "shape of few tokens"]


@pytest.mark.parametrize("name", [*TRANSPORTED, "hybrid", "geodesic", "adversary"])
def test_transport_samples_from_the_joint_distribution(tiny_model, name):
    """On trees that leave nodes out, too: "shape tree"."""
    model = tiny_model("llama", vocab_size=6)
    assert joint_chi_square(model, drafters()[name](), "transport") < 1


@pytest.mark.parametrize("name", ["shape chain", "shape wide tree", "shape drawn parallel", "adversary"])
def test_traversal_samples_from_the_joint_distribution(tiny_model, name):
    model = tiny_model("llama", vocab_size=6)
    assert joint_chi_square(model, drafters()[name](), "traversal") < 1


class Draws(Drafter):
    """Full binary trees of depth two, said to be drawn from one fixed distribution, and made in one of these ways:

    "honestly"; "top-k", its two likeliest tokens; "pruned", the two likeliest of three draws; "one", the likeliest
    beside one drawn from the rest; "wrong", which says that this one was drawn from all.
    """

    name = "draws"

    def __init__(self, way: str) -> None:
        self.way, self.logits = way, torch.linspace(-1.5, 1.5, 6).roll(1)

    def draft(self, settled, sampler) -> TokenTree:
        batch, tokens = len(settled.texts), [settled.root[:, None]]
        for depth in range(2):
            logits = self.logits.expand(batch, 2**depth, -1)
            noise = sampler.draft_noise(2, token_hashes(torch.arange(6)), nodes=2)[depth]
            scores = sampler.draft_scores(logits, depth, noise)
            if self.way == "top-k":
                scores = logits
            elif self.way == "pruned":
                scores = logits.masked_fill(scores < scores.topk(3).values[..., 2:], -100.0)
            candidates = scores.topk(2).indices
            if self.way in ("one", "wrong"):
                candidates = sampler.candidates(sampler.draft_logits(logits, depth), noise, 2)[1]
            tokens.append(candidates.flatten(1))
        told = candidates[:, :1] if self.way == "one" else None
        log_q = sampler.draft_log_probs(sampler.draft_logits(self.logits.expand(batch, 1, -1), 0), 6, None, told)
        parents, first = torch.tensor([-1, 0, 0, 1, 1, 2, 2]).expand(batch, -1), None
        if told is not None or self.way == "wrong":
            first = torch.tensor([False, True, False, True, False, True, False]).expand(batch, -1)
        return TokenTree(torch.cat(tokens, dim=1), parents, log_q.expand(-1, 7, -1), drawn=first)


@pytest.mark.parametrize(
    ("way", "rule", "passes"),
    [
        *product(["honestly"], ["rejection", "traversal"], [True]),
        *product(["top-k", "pruned"], ["rejection", "traversal"], [False]),
        *product(["one"], ["transport"], [True]),
        *product(["wrong", "top-k"], ["transport"], [False]),
    ],
)
def test_the_joint_test_catches_trees_that_are_not_what_they_say(tiny_model, way, passes, rule):
    """Negative controls: the p/q rules on a top-k tree, after pruning a drawn tree by value, and with a wrong q."""
    found = joint_chi_square(tiny_model("llama", vocab_size=6), Draws(way), rule)
    assert found < 1 if passes else found > 10


@pytest.mark.parametrize(
    "rule", [TypicalLossy(), TypicalLossy(epsilon=0.3, delta=0.9), TrsLossy(k=2, depth=2)], ids=str
)
def test_the_joint_test_catches_lossy_rules(tiny_model, rule):
    found = joint_chi_square(tiny_model("llama", vocab_size=6), drafters()["shape tree"](), rule)
    assert found > 2


@pytest.mark.parametrize("rule", ["rejection", "traversal", "transport"])
@pytest.mark.parametrize("name", ["processors", "ends", "both"])
def test_rules_sample_what_processors_and_ends_leave(tiny_model, name, rule):
    """The same test where no token may come twice in a row, and where texts end early, but not at once."""
    banning, ending = LogitsProcessorList([Banning()]), {"eos_token_id": [5], "pad_token_id": 0, "min_new_tokens": 1}
    if name == "processors":
        options = {"logits_processor": banning, "eos_token_id": []}

        def banned(text: list[int], emitted: int) -> list[int]:
            return text[-1:]
    else:
        options = ending if name == "ends" else {**ending, "logits_processor": banning}

        def banned(text: list[int], emitted: int) -> list[int]:
            twice = text[-1:] if name == "both" else []
            return [5, *twice] if emitted == 0 else [1, 2, 3, 4, 5] if 5 in text[-emitted:] else twice

    drafter = drafters()["shape wide tree"]()
    model = tiny_model("llama", vocab_size=6)
    assert joint_chi_square(model, drafter, rule, samples=4000, banned=banned, **options) < 1


@pytest.mark.parametrize("rule", ["rejection", "traversal", "transport"])
def test_draws_depend_on_nothing_but_seed_and_drafter(tiny_model, rule):
    """The same call gives the same tokens, and rows do not see each other."""
    decoder = ShapeDecoder(tiny_model("llama"), drafters()["shape wide tree"]())
    options = {"max_new_tokens": 20, "acceptance": rule, "return_dict_in_generate": True}
    options |= {"do_sample": True, "seed": [1, 2, 3, 4, 5], "top_p": 0.9}
    batch = prompts()
    out = decoder.generate(**batch, **options)
    assert out.stats.lossless and out.stats.acceptance == rule and out.stats.acceptance_length > 1.0
    assert torch.equal(decoder.generate(**batch, **options).sequences, out.sequences)
    alone = decoder.generate(batch["input_ids"][2:3, -9:], **(options | {"seed": [3]})).sequences[0, 9:]
    assert torch.equal(new_tokens(out.sequences, batch)[2, : len(alone)], alone)


def ruled(*names: str) -> list[tuple[str, str]]:
    """Drafters with every rule that they serve."""
    drops = {("hybrid", "rejection"), ("hybrid", "traversal")}
    pairs = [(name, rule) for name in names for rule in RULES if rule != "trs-lossy" or name.startswith("shape")]
    return [pair for pair in pairs if pair not in drops]


@pytest.mark.parametrize(
    ("name", "rule"),
    ruled(
        *("shape chain", "shape wide tree", "shape drawn parallel", "ngram", "model", "hybrid", "adversary"),
        "hybrid of whole trees",
    ),
)
def test_every_rule_gives_the_greedy_text_where_nothing_else_is_possible(tiny_model, name, rule):
    """Sampling from the likeliest token alone: every other draft has probability 0, and no residual has any mass.

    Ends lie in mid-path. Greedy decoding is the same, but with the rules that are lossy then too.
    """
    model, batch = tiny_model("llama"), prompts()
    free = new_tokens(ShapeDecoder(model).generate(**batch, max_new_tokens=25, eos_token_id=[]), batch)
    ends = {"max_new_tokens": 25, "eos_token_id": [int(free[1, 7]), int(free[2, 4])], "min_new_tokens": 3}
    expected = model.generate(**batch, do_sample=False, **ends)
    decoder = ShapeDecoder(model, drafters()[name](), fall_back=False)
    sampled = decoder.generate(**batch, do_sample=True, top_k=1, seed=3, acceptance=rule, **ends)
    assert torch.equal(sampled, expected)
    if rule not in ("trs-lossy", "unverified-lossy"):
        assert torch.equal(decoder.generate(**batch, acceptance=rule, **ends), expected)


@pytest.mark.parametrize(("name", "rule"), ruled("shape wide tree", "adversary"))
def test_every_rule_keeps_to_stops_and_processors(tiny_model, name, rule):
    """Sampled from the bulk of the probability, with tokens and pairs that must not come, and ends in mid-path."""
    decoder = ShapeDecoder(tiny_model("llama"), drafters()[name](), fall_back=False)
    batch, ends = prompts(), {9, 20, 33, 51, 60}
    pairs = [[a, b] for a in range(30, 40) for b in range(30, 64)]
    out = decoder.generate(
        **batch, do_sample=True, temperature=1.5, top_p=0.95, max_new_tokens=25, min_new_tokens=4, seed=5,
        bad_words_ids=[[5], [6], *pairs], eos_token_id=sorted(ends), acceptance=rule, return_dict_in_generate=True,
    )  # fmt: skip
    assert out.stats.lossless == ("lossy" not in rule) and out.stats.acceptance == rule
    assert sum(out.stats.sequence_emitted) == out.stats.emitted
    texts = new_tokens(out.sequences, batch).tolist()
    lengths = [next((i + 1 for i, token in enumerate(text) if token in ends), 25) for text in texts]
    assert min(lengths) > 4 and any(length < 25 for length in lengths) and len(texts[0]) <= 25
    for text, length in zip(texts, lengths, strict=True):
        assert not {5, 6} & set(text[:length]) and set(text[length:]) <= {0}
        assert not any([a, b] in pairs for a, b in pairwise(text[:length]))


ALONE = [rule for rule in RULES if rule != "trs-lossy"]  # those that need no predictor


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("rule", ALONE)
@pytest.mark.parametrize("stop", ["end", "length"])
def test_processors_are_not_asked_behind_a_stop(tiny_model, stop, rule, trace):
    """A constraint that is at its end allows nothing, and transformers raises an error where it is asked. Drafts go on
    behind the stop, and would be right.
    """
    model, batch = tiny_model("llama"), prompts([7, 4])
    free = new_tokens(ShapeDecoder(model).generate(**batch, max_new_tokens=30, eos_token_id=[]), batch).tolist()
    later = next(token for token in free[0] if token not in free[0][:5])
    ends, most = ([later], 20) if stop == "end" else ([], 9)
    starts = [batch["input_ids"][0].tolist(), batch["input_ids"][1, -4:].tolist()]
    whole = [text[: next((at for at, token in enumerate(text, 1) if token in ends), most)][:most] for text in free]
    asked: list[list[int]] = [[], []]

    def allowed(row: int, text: torch.Tensor) -> list[int]:
        new = text.tolist()[len(starts[row]) :]
        asked[row].append(len(new))
        return [] if new == whole[row] else list(range(64))

    options: dict = {"max_new_tokens": most, "eos_token_id": ends, "acceptance": rule, "return_dict_in_generate": True}
    if rule not in ("match", "unverified-lossy"):
        options |= {"do_sample": True, "top_k": 1, "seed": 3}  # the same text
    drafter = OracleDrafter([start + text for start, text in zip(starts, free, strict=True)], depth=6)
    decoder = ShapeDecoder(model, drafter, fall_back=False)
    out = decoder.generate(**batch, **options, prefix_allowed_tokens_fn=allowed, trace=trace)
    found = new_tokens(out.sequences, batch).tolist()
    assert [own[: len(text)] for own, text in zip(found, whole, strict=True)] == whole
    for own, text in zip(asked, whole, strict=True):
        assert sorted({*own}) == list(range(len(text)))
        assert trace or rule not in ("match", "rejection", "transport") or own == list(range(len(text)))
    free_of_it = decoder.generate(**batch, **options).stats
    counts = ("accepted", "drafted", "emitted", "forwards")
    assert [getattr(out.stats, name) for name in counts] == [getattr(free_of_it, name) for name in counts]
    if trace:
        events = [record for record in out.trace.records if record["type"] == "token"]
        assert sum(record["event"] == "accepted" and record["emitted"] for record in events) == out.stats.accepted
        assert sum(record["node"] is not None for record in events) == out.stats.drafted
    plain = {"max_new_tokens": most, "eos_token_id": ends or None, "do_sample": False, "pad_token_id": 0}
    alone = model.generate(batch["input_ids"][:1], **plain, prefix_allowed_tokens_fn=allowed)
    assert alone[0, 7:].tolist() == whole[0]


def joint_chi_square(model, drafter, acceptance, samples: int = 12_000, banned=None, **options) -> float:
    """Chi-square, as a share of its limit, of sampled texts against the exact joint distribution of all texts of three
    tokens. Of hybrids a third as many, as each of their rows has an index of its own text.

    Args:
        banned: (text, number of its tokens that were emitted) -> tokens that the options leave no probability.
    """
    temperature, root = 1.5, [3, 4, 1]
    samples //= 3 if isinstance(drafter, HybridDrafter) else 1
    texts = torch.tensor(list(product(range(6), repeat=3)))
    with torch.no_grad():
        logits = model(torch.cat([torch.tensor([root]).expand(216, -1), texts], dim=1)).logits[:, 2:5] / temperature
    for (row, text), at in product(enumerate(texts.tolist() if banned else []), range(3)):
        logits[row, at, banned(root + text[:at], at)] = float("-inf")
    log_probs = logits.log_softmax(-1).gather(-1, texts[..., None])[..., 0].sum(-1)
    out = ShapeDecoder(model, drafter, fall_back=False).generate(
        torch.tensor([root]), max_new_tokens=3, do_sample=True, temperature=temperature, top_k=0,
        num_return_sequences=samples, seed=7, acceptance=acceptance, **({"eos_token_id": []} | options),
    )  # fmt: skip
    cells = (out[:, 3:] * torch.tensor([36, 6, 1])).sum(-1)
    return chi_square(cells.bincount(minlength=216).double(), samples * log_probs.exp())


def test_stop_at_eos_and_length(tiny_model):
    model = tiny_model("llama")
    batch = prompts()
    free = new_tokens(ShapeDecoder(model).generate(**batch, max_new_tokens=30, eos_token_id=[]), batch)
    eos = [int(free[1, 7]), int(free[2, 3])]
    expected = model.generate(**batch, max_new_tokens=30, do_sample=False, eos_token_id=eos)
    oracle_texts = [
        ids[mask.bool()].tolist() + row.tolist()
        for ids, mask, row in zip(batch["input_ids"], batch["attention_mask"], free, strict=True)
    ]
    for drafter in (None, OracleDrafter(oracle_texts, depth=6), AdversaryDrafter()):
        out = ShapeDecoder(model, drafter, fall_back=False).generate(**batch, max_new_tokens=30, eos_token_id=eos)
        assert torch.equal(out, expected)
    one = ShapeDecoder(model, OracleDrafter(oracle_texts, depth=6)).generate(**batch, max_new_tokens=1)
    assert one.shape[1] == max(LENGTHS) + 1


@pytest.mark.parametrize("drafter", ["plain", "shape tree", "adversary"])
def test_min_new_tokens_equals_transformers(tiny_model, drafter):
    model = tiny_model("llama")
    batch = prompts()
    free = new_tokens(ShapeDecoder(model).generate(**batch, max_new_tokens=20, eos_token_id=[]), batch)
    eos = sorted(set(free[:, 0].tolist()))[:3]
    arguments = {"max_new_tokens": 20, "min_new_tokens": 4, "eos_token_id": eos}
    expected = model.generate(**batch, do_sample=False, **arguments)
    decoder = ShapeDecoder(model, drafters().get(drafter, lambda: None)())
    assert torch.equal(decoder.generate(**batch, **arguments), expected)


def test_max_length_counts_the_prompt(tiny_model):
    model = tiny_model("llama")
    batch = prompts([5])
    expected = model.generate(**batch, max_length=15, do_sample=False)
    assert torch.equal(ShapeDecoder(model).generate(**batch, max_length=15), expected)
    assert ShapeDecoder(model).generate(**batch, eos_token_id=[]).shape[1] == 5 + 20  # as transformers


def test_no_end_token_and_none_to_pad_with(tiny_model):
    model, batch = tiny_model("llama"), prompts([5, 9])
    free = ShapeDecoder(model).generate(**batch, max_new_tokens=20, eos_token_id=[])
    model.generation_config.pad_token_id = model.config.pad_token_id = None
    assert torch.equal(ShapeDecoder(model).generate(**batch, max_new_tokens=20, eos_token_id=[]), free)


def test_generation_config_of_the_target_and_of_the_call(tiny_model):
    model = tiny_model("llama")
    model.generation_config.max_new_tokens = 7
    batch = prompts([5])
    assert ShapeDecoder(model).generate(**batch, eos_token_id=[]).shape[1] == 12
    config = GenerationConfig(max_new_tokens=9, eos_token_id=None, num_assistant_tokens=20)  # as older files have it
    assert ShapeDecoder(model).generate(**batch, generation_config=config).shape[1] <= 14
    assert ShapeDecoder(model).generate(**batch, generation_config=config, max_new_tokens=3).shape[1] <= 8


@pytest.mark.parametrize("rate,depth", [(0.0, 4), (0.3, 4), (0.6, 2)])
def test_the_oracle_reaches_the_acceptance_length_of_its_error_rate(tiny_model, rate, depth):
    """Mean within 4.9 standard errors of (1 - a^(D+1)) / (1 - a): a false-alarm rate of 1e-6, fixed seed."""
    model = tiny_model("llama")
    batch = prompts([4] * 16)
    plain = ShapeDecoder(model).generate(**batch, max_new_tokens=150, eos_token_id=[])
    decoder = ShapeDecoder(model, OracleDrafter(plain.tolist(), rate, depth), fall_back=False)
    out = decoder.generate(**batch, max_new_tokens=150, eos_token_id=[], return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain)
    accept = 1 - rate
    expected = depth + 1 if rate == 0 else (1 - accept ** (depth + 1)) / (1 - accept)
    # The last step of each row is cut short, hence the extra slack of depth tokens per row.
    slack = 4.9 * depth / 2 / out.stats.forwards**0.5 + 16 * depth / out.stats.forwards
    assert abs(out.stats.acceptance_length - expected) < slack
    assert out.stats.emitted == 16 * 149 == sum(n * times for n, times in out.stats.histogram.items())
    assert (
        sum(out.stats.sequence_emitted) == out.stats.emitted and sum(out.stats.sequence_forwards) == out.stats.forwards
    )


def test_plain_decoding_has_acceptance_length_one(tiny_model):
    out = ShapeDecoder(tiny_model("llama")).generate(
        **prompts(), max_new_tokens=10, return_dict_in_generate=True, eos_token_id=[]
    )
    assert out.stats.acceptance_length == 1.0 == out.stats.tokens_per_draft_step
    assert out.stats.to_dict()["forwards"] == 5 * 9 and out.stats.to_dict()["drafter"] == "none"
    assert out.trace is None


class Banning(LogitsProcessor):
    """A user's own processor: no token twice in a row."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -1:], float("-inf"))


def one_of_three(_, text) -> list[int]:
    return [token for token in range(3, 64) if token % 3 == int(text[-1]) % 3] + [2]


OPTIONS = {
    "penalty": {"repetition_penalty": 1.5},
    "prompt penalty": {"encoder_repetition_penalty": 1.5},
    "n-grams": {"no_repeat_ngram_size": 2},
    "prompt n-grams": {"encoder_no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[5], [7, 8], [9, 10, 11]]},
    "bias": {"sequence_bias": [[[5], 3.0], [[6, 7], -4.0]]},
    "suppressed": {"suppress_tokens": [3, 4, 5, 6, 7, 8]},
    "suppressed at first": {"begin_suppress_tokens": list(range(3, 40))},
    "forced first": {"forced_bos_token_id": 5},
    "forced last": {"forced_eos_token_id": 2},
    "shorter": {"exponential_decay_length_penalty": (4, 1.6)},
    "minimum": {"min_new_tokens": 9},
    "minimum length": {"min_length": 20},
    "maximum length": {"max_length": 30, "max_new_tokens": None},
    "several ends": {"eos_token_id": [2, 11, 12, 13]},
    "own processor": {"logits_processor": LogitsProcessorList([Banning()])},
    "own rule": {"prefix_allowed_tokens_fn": one_of_three},
    "own stop": {"stopping_criteria": StoppingCriteriaList([lambda ids, _: (ids[:, -1] % 5 == 0) & (ids[:, -2] > 9)])},
    "all together": {
        "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[6], [3, 4]], "min_new_tokens": 5,
        "logits_processor": LogitsProcessorList([Banning()]), "forced_eos_token_id": 2,
    },
}  # fmt: skip
WARPERS = {
    "top_k": {"top_k": 5},
    "top_p": {"top_k": 0, "top_p": 0.7},
    "min_p": {"top_k": 0, "min_p": 0.1},
    "typical_p": {"top_k": 0, "typical_p": 0.6},
    "cutoffs": {"top_k": 0, "epsilon_cutoff": 0.02, "eta_cutoff": 0.02},
    "renormalised": {"temperature": 1.5, "top_k": 20, "renormalize_logits": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_means_what_it_means_to_transformers(tiny_model, name):
    """Greedy, row by row against transformers; a batch gives each row what it gets alone."""
    model = tiny_model("llama")
    options = {"max_new_tokens": 25, **OPTIONS[name]}
    batch = prompts()
    for drafter in (None, AdversaryDrafter(seed=3), drafters()["shape tree"]()):
        decoder = ShapeDecoder(model, drafter, fall_back=False)
        # A maximum length counts padding too, so that a row alone gets more.
        padded = "max_length" in options
        together = None if padded else new_tokens(decoder.generate(**batch, **options), batch)
        for row, length in enumerate(LENGTHS):
            ids = batch["input_ids"][row : row + 1, -length:]
            expected = model.generate(ids, do_sample=False, **options)
            assert torch.equal(decoder.generate(ids, **options), expected)
            if together is not None:
                assert torch.equal(together[row, : expected.shape[1] - length], expected[0, length:])
    plain = ShapeDecoder(model).generate(**batch, max_new_tokens=25)
    assert together is None or together.shape != new_tokens(plain, batch).shape or not torch.equal(
        together, new_tokens(plain, batch)
    )  # fmt: skip


@pytest.mark.parametrize("warper", WARPERS)
@pytest.mark.parametrize("name", ["none", "penalty", "all together", "own stop"])
def test_every_warper_keeps_seeded_sampling_equal_to_plain(tiny_model, warper, name):
    model = tiny_model("qwen2")
    options = {"max_new_tokens": 25, "do_sample": True, "seed": 4, **OPTIONS.get(name, {}), **WARPERS[warper]}
    expected = ShapeDecoder(model).generate(**prompts(), **options)
    for make in (drafters()["adversary"], drafters()["shape tree"]):
        assert torch.equal(ShapeDecoder(model, make(), fall_back=False).generate(**prompts(), **options), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": False, "repetition_penalty": 1.3, "min_new_tokens": 6},
        {"do_sample": True, "temperature": 1.3, "top_k": 9, "seed": 3},
    ],
)
def test_as_custom_generate(tiny_model, options):
    """The target's own generate, decoding with drafts."""
    model = tiny_model("llama")
    for drafter in (None, AdversaryDrafter(seed=1)):
        decoder = ShapeDecoder(model, drafter, fall_back=False)
        for batch in [prompts([7])] if "repetition_penalty" in options else [prompts([7]), prompts()]:
            found = model.generate(**batch, **options, max_new_tokens=20, custom_generate=decoder.as_custom_generate())
            assert torch.equal(found, decoder.generate(**batch, **options, max_new_tokens=20))
    assert model.generate(
        **prompts([7]), return_dict_in_generate=True, custom_generate=decoder.as_custom_generate()
    ).stats.lossless
    with pytest.raises(UnsupportedGeneration, match="one prompt at a time"):
        model.generate(**prompts(), repetition_penalty=1.3, custom_generate=decoder.as_custom_generate())
    with pytest.raises(UnsupportedGeneration, match="belongs to another model"):
        tiny_model("llama", seed=5).generate(**prompts(), custom_generate=decoder.as_custom_generate())


PADDED = {"own stop at twelve": {"stopping_criteria": StoppingCriteriaList([lambda ids, _: ids.shape[1] == 12])}}


@pytest.mark.parametrize("name", [*OPTIONS, *PADDED])
def test_one_padded_prompt_is_seen_with_its_padding(tiny_model, name):
    """As by transformers, where a penalty falls on the padding too and a forced token has its place behind it."""
    model, batch = tiny_model("llama"), prompts([7, 1])
    batch = {key: value[1:] for key, value in batch.items()}
    batch["input_ids"][0, :3] = torch.tensor([2, 11, 5])  # padding that is text, or an end, where it is not masked
    options = {"max_new_tokens": 20, "do_sample": False, **(OPTIONS | PADDED)[name]}
    expected = model.generate(**batch, **options)
    decoder = ShapeDecoder(model, AdversaryDrafter(seed=3), fall_back=False)
    assert torch.equal(model.generate(**batch, **options, custom_generate=decoder.as_custom_generate()), expected)
    assert torch.equal(decoder.generate(**batch, **options), expected)


# What makes an option or an input other than its default; what is refused is refused wherever it is given.
UNLIKE = {
    "num_beams": 4, "num_beam_groups": 2, "length_penalty": 2.0, "diversity_penalty": 1.0, "early_stopping": True,
    "penalty_alpha": 0.6, "dola_layers": "high", "constraints": [1], "force_words_ids": [[5]], "guidance_scale": 1.5,
    "token_healing": True, "watermarking_config": WatermarkingConfig(), "is_assistant": True,
    "prompt_lookup_num_tokens": 3, "assistant_early_exit": 1, "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash", "output_scores": True, "output_logits": True, "output_attentions": True,
    "output_hidden_states": True,
}  # fmt: skip


def forward_inputs() -> dict:
    """Inputs of the model that would change what it says, or be changed by it, were they not ignored."""
    ids = prompts([7])["input_ids"]
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 8).double(), torch.zeros(1, 2, 3, 8).double(), 0)
    return {
        "inputs_embeds": torch.zeros(1, 7, 32).double(), "position_ids": ids * 0 + 3,
        **dict.fromkeys(CACHE_NAMES, cache),
        "token_type_ids": torch.ones_like(ids), "labels": ids, "encoder_hidden_states": torch.zeros(1, 2, 32).double(),
        "encoder_attention_mask": torch.ones(1, 2).long(),
    }  # fmt: skip


def test_every_option_of_generate_is_served_or_refused(tiny_model):
    """By name: what transformers comes to know beside these fails here until somebody has thought about it."""
    known = {name for name in GenerationConfig().to_dict() if not name.startswith("_")}
    assert known <= SERVED | NEUTRAL | UNLIKE.keys(), "an option that nobody has thought about"
    model = tiny_model("gpt2")
    decoder, batch = ShapeDecoder(model), prompts([7])
    run = {"custom_generate": decoder.as_custom_generate(), "max_new_tokens": 4}
    for name, value in UNLIKE.items():
        config = GenerationConfig(max_new_tokens=4)
        setattr(config, name, value)
        for options in ({name: value}, {"generation_config": config}):
            with pytest.raises(UnsupportedGeneration):
                decoder.generate(**batch, max_new_tokens=4, **options)
            # Some are wrong for transformers too, which says so itself.
            by = UnsupportedGeneration if name not in ("token_healing", "guidance_scale") else (ValueError, TypeError)
            with pytest.raises(by):
                model.generate(**batch, **run, **options)
    accepted = inspect.signature(model.forward).parameters
    for name, value in forward_inputs().items():
        with pytest.raises(UnsupportedGeneration, match=name):
            decoder.generate(**batch, **{name: value})
        if name in accepted:
            with pytest.raises(UnsupportedGeneration, match=name):
                model.generate(**batch, **{name: value}, **run)
    with pytest.raises(UnsupportedGeneration, match="typo is not one of generate's"):
        decoder.generate(**batch, typo=1)


def test_what_transformers_adds_is_not_the_callers(tiny_model):
    """Positions, masks and caches that say nothing of their own are no inputs; given by hand they are served."""
    model = tiny_model("llama")
    decode = ShapeDecoder(model, AdversaryDrafter(seed=3)).as_custom_generate()
    for batch in (prompts([7]), prompts()):
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        plain = {"max_new_tokens": 9, "use_cache": True, "logits_to_keep": 1, "return_dict_in_generate": False}
        for more in (plain, {**plain, "position_ids": positions}):
            expected = model.generate(**batch, **more)
            assert torch.equal(model.generate(**batch, **more, custom_generate=decode), expected)
    seeded = {"do_sample": True, "max_new_tokens": 9, "num_return_sequences": 2, "seed": [3, 4, 5, 6, 7]}
    expected = ShapeDecoder(model).generate(**prompts(), **seeded)
    assert torch.equal(model.generate(**prompts(), **seeded, custom_generate=decode), expected)


def test_stop_strings_in_a_custom_generate(tiny_target):
    """As the criterion that they become: transformers keeps the tokenizer to itself."""
    model, tokenizer = tiny_target.model, tiny_target.tokenizer
    ids = torch.tensor([[40, 50, 60]])
    stop = tokenizer.decode(model.generate(ids, max_new_tokens=30)[0, -12:-10])
    expected = model.generate(ids, max_new_tokens=30, stop_strings=[stop], tokenizer=tokenizer)
    run = {"max_new_tokens": 30, "custom_generate": ShapeDecoder(tiny_target).as_custom_generate()}
    found = model.generate(ids, stopping_criteria=StoppingCriteriaList([StopStringCriteria(tokenizer, [stop])]), **run)
    assert torch.equal(found, expected) and expected.shape[1] < 33
    with pytest.raises(ValueError, match="stop strings"):
        model.generate(ids, stop_strings=[stop], tokenizer=tokenizer, **run)


class Follows(StoppingCriteria):
    """Remembers what it was shown."""

    def __init__(self, last: int) -> None:
        self.last, self.shown = last, []

    def __call__(self, input_ids, scores, **more):
        self.shown.append(input_ids)
        return torch.full((len(input_ids),), input_ids.shape[1] == self.last, device=input_ids.device)


@pytest.mark.parametrize("fixed", [False, True])
def test_criteria_are_shown_a_text_that_grows_in_place(tiny_model, fixed):
    """Every token in turn, int64 and on the target's device, and at no copy of the text for each."""
    model, batch = tiny_model("llama"), prompts([9])
    plain = ShapeDecoder(model).generate(**batch, max_new_tokens=200, eos_token_id=[])
    drafter = OracleDrafter(plain.tolist(), 0.2, 4)
    decoder = ShapeDecoder(model, drafter, fall_back=False, graphs=fixed)
    for last, more in ((150, {}), (50, {"eos_token_id": [int(plain[0, 49])]}), (209, {})):
        follows = Follows(last)
        options = {"max_new_tokens": 200, "eos_token_id": [], **more}
        out = decoder.generate(**batch, stopping_criteria=StoppingCriteriaList([follows]), **options)
        end = min(last, int((plain[0, 9:] == more["eos_token_id"][0]).nonzero()[0]) + 10 if more else 209)
        assert torch.equal(out, plain[:, :end])
        assert [ids.shape for ids in follows.shown] == [(1, length) for length in range(10, end + 1)]
        for ids in follows.shown:
            assert torch.equal(ids, plain[:, : ids.shape[1]]) and ids.dtype == torch.int64
        assert len({ids.untyped_storage().data_ptr() for ids in follows.shown}) < 8


def test_a_row_stops_by_time_alone(tiny_model):
    model, batch = tiny_model("llama"), prompts([9])
    out = ShapeDecoder(model, AdversaryDrafter(seed=3)).generate(**batch, max_time=1e-6, eos_token_id=[])
    assert torch.equal(out, model.generate(**batch, max_time=1e-6, eos_token_id=None)) and out.shape[1] == 10


@pytest.mark.parametrize("token", [-1, 64, 2**40])
def test_tokens_that_the_target_has_not_are_refused(tiny_model, token):
    model, batch = tiny_model("llama"), prompts([7, 3])
    decoder = ShapeDecoder(model)
    run = {"custom_generate": decoder.as_custom_generate()}
    batch["input_ids"][1, 0] = token  # padding, which nobody looks at
    found, expected = (decoder.generate(**each, max_new_tokens=5) for each in (batch, prompts([7, 3])))
    assert torch.equal(found[:, 7:], expected[:, 7:])
    alone = {name: rows[1:] for name, rows in batch.items()}
    with pytest.raises(UnsupportedGeneration, match=f"padding of prompt 0, .*{token}"):
        decoder.generate(**alone, repetition_penalty=1.2)
    batch["input_ids"][1, -1] = token
    for more in ({}, {"repetition_penalty": 1.2}):
        with pytest.raises(UnsupportedGeneration, match=f"prompt 1 has token {token}.* tokens 0 to 63"):
            decoder.generate(**batch, max_new_tokens=4, **more)
    with pytest.raises(UnsupportedGeneration, match=f"prompt 1 has token {token}.* tokens 0 to 63"):
        model.generate(**batch, max_new_tokens=4, **run)
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        with pytest.raises(UnsupportedGeneration, match=f"{name} is token {token}"):
            decoder.generate(**prompts([7]), max_new_tokens=4, **{name: token})
        with pytest.raises(ValueError, match=f"{name} is token {token}|positive integers"):
            model.generate(**prompts([7]), max_new_tokens=4, **{name: token}, **run)
    with pytest.raises(UnsupportedGeneration, match="transformers refuses these options"):
        decoder.generate(**prompts([7]), eos_token_id=2**70)
    if token < 2**40:  # an end that cannot be written ends nothing, as in transformers
        options = {"max_new_tokens": 9, "eos_token_id": token, "pad_token_id": 0}
        assert torch.equal(decoder.generate(**prompts([7]), **options), model.generate(**prompts([7]), **options))


def test_seeds_of_every_kind_of_integer(tiny_model):
    decoder = ShapeDecoder(tiny_model("llama"))
    options = {**prompts([5, 5]), "do_sample": True, "max_new_tokens": 6}
    one, each = decoder.generate(**options, seed=3), decoder.generate(**options, seed=[3, 2**63])
    for seed in (np.int64(3), np.uint8(3), torch.tensor(3), np.array(3)):
        assert torch.equal(decoder.generate(**options, seed=seed), one)
    big = np.array([3, 2**63], dtype=np.uint64)
    for seeds in ((3, 2**63), big, list(big), [torch.tensor(3), 2**63]):
        assert torch.equal(decoder.generate(**options, seed=seeds), each)
    wrong = [True, 3.0, "3", np.float32(3), np.True_, torch.tensor(3.0), [3, 4.0], [[3], [4]], {3: 4}, b"34"]
    for seed in wrong:
        for sample in (True, False):
            with pytest.raises(UnsupportedGeneration, match="is not an integer; give one, or one per prompt"):
                decoder.generate(**options | {"do_sample": sample}, seed=seed)


def test_eos_aware_is_a_minimum_of_four_tokens(tiny_model):
    model = tiny_model("llama")
    options = {"max_new_tokens": 20, "eos_token_id": list(range(2, 60))}
    for sampling in ({}, {"do_sample": True, "seed": 1, "top_k": 0}):
        expected = ShapeDecoder(model).generate(**prompts(), **options, **sampling, min_new_tokens=4)
        for name in ("shape tree", "model", "ngram", "hybrid", "adversary"):
            decoder = ShapeDecoder(model, drafters()[name](), fall_back=False)
            early = decoder.generate(**prompts(), **options, **sampling)
            assert early.shape[1] < max(LENGTHS) + 4
            assert torch.equal(decoder.generate(**prompts(), **options, **sampling, eos_aware=True), expected)
    longest = max(LENGTHS)
    for more in (
        {"min_new_tokens": 7},
        {"min_length": longest + 7},
        {"generation_config": GenerationConfig(min_new_tokens=7)},
    ):
        longer = decoder.generate(**prompts(), **options, eos_aware=True, **more)
        assert longer.shape[1] >= longest + 7, more


def test_stop_strings(tiny_target):
    """An answer ends at the first of the strings, as in transformers, wherever in a draft it appears."""
    text = "say something"
    ids = tiny_target.tokenizer(text, return_tensors="pt").input_ids
    whole = ShapeDecoder(tiny_target).generate(ids, max_new_tokens=30)[0, ids.shape[1] :]
    stops = [tiny_target.tokenizer.decode(whole[12:14]), "never to be seen"]
    for config in ({"stop_strings": stops}, {"generation_config": GenerationConfig(stop_strings=stops)}):
        expected = tiny_target.model.generate(ids, max_new_tokens=30, tokenizer=tiny_target.tokenizer, **config)
        assert ids.shape[1] < expected.shape[1] < ids.shape[1] + 30
        for drafter in (None, AdversaryDrafter(seed=2)):
            assert torch.equal(ShapeDecoder(tiny_target, drafter).generate(ids, max_new_tokens=30, **config), expected)
    model = copy(tiny_target.model)
    model.generation_config = GenerationConfig(stop_strings=stops)
    for config in ({}, {"generation_config": GenerationConfig()}, {"stopping_criteria": None}):
        found = ShapeDecoder(model, tokenizer=tiny_target.tokenizer).generate(ids, max_new_tokens=30, **config)
        assert torch.equal(found, expected), config
    assert model.generation_config.stop_strings == stops
    assert torch.equal(ShapeDecoder(tiny_target).generate(ids, max_new_tokens=30, stop_strings=[])[0, -30:], whole)


def test_streaming_gives_every_token_once(tiny_model):
    decoder = ShapeDecoder(tiny_model("llama"), AdversaryDrafter())
    batch = prompts([6])
    recorder = Recorder()
    out = decoder.generate(**batch, max_new_tokens=12, streamer=recorder)
    assert recorder.ended == 1 and recorder.tokens == out[0].tolist()
    with pytest.raises(UnsupportedGeneration, match="streaming follows one sequence"):
        decoder.generate(**prompts(), streamer=recorder)


def test_chain_only_targets_decode_row_by_row():
    model = chain_only_model()
    rows = [prompts([length])["input_ids"] for length in (5, 9)]
    answers = [model.generate(ids, max_new_tokens=25, do_sample=False) for ids in rows]
    for name, make in drafters().items():
        decoder = ShapeDecoder(model, make(), fall_back=False)
        assert decoder.support.mode == "chain"
        for ids, expected in zip(rows, answers, strict=True):
            assert torch.equal(decoder.generate(ids, max_new_tokens=25), expected), name
        batch = prompts([5, 9])
        together = new_tokens(decoder.generate(**batch, max_new_tokens=25), batch)
        alone = decoder.generate(batch["input_ids"][:1, -5:], max_new_tokens=25)[0, 5:]
        assert torch.equal(together[0, : len(alone)], alone), name


def test_trs_is_lossy_and_says_so(tiny_model):
    decoder = ShapeDecoder(tiny_model("llama"), drafters()["shape tree"]())
    out = decoder.generate(
        **prompts(), max_new_tokens=20, acceptance=TrsLossy(k=2, depth=3), return_dict_in_generate=True
    )
    assert not out.stats.lossless and "lossy" in out.stats.acceptance
    assert out.stats.acceptance_length >= 1.0
    assert out.stats.drafted / out.stats.forwards == 2 + 4 + 8


def test_the_drafter_alone_writes_what_it_drafts(tiny_model):
    """A smaller model unverified writes its own greedy text, behind the target's first token."""
    batch, small = prompts([6]), weaker_model()
    decoder = ShapeDecoder(tiny_model("llama"), ModelDrafter(Target(small), 3), fall_back=False)
    asked = {"acceptance": "unverified-lossy", "eos_token_id": [], "return_dict_in_generate": True}
    out = decoder.generate(**batch, max_new_tokens=13, **asked)
    assert not out.stats.lossless and out.stats.acceptance == "unverified-lossy"
    assert out.stats.acceptance_length == 3
    own = ShapeDecoder(small).generate(out.sequences[:, :7], max_new_tokens=12, eos_token_id=[])
    assert torch.equal(out.sequences, own)


def test_the_drafter_alone_keeps_bans_where_invalid_scores_are_made_finite(tiny_model):
    batch, decoder = prompts([6]), ShapeDecoder(tiny_model("llama"), ModelDrafter(Target(weaker_model()), 3))
    asked = {"acceptance": "unverified-lossy", "eos_token_id": [], "max_new_tokens": 40}
    banned = sorted(set(decoder.generate(**batch, **asked)[0, 6:].tolist()))[:3]
    asked |= {"bad_words_ids": [[token] for token in banned]}
    for heat in ({}, {"do_sample": True, "temperature": 4.0, "seed": 1}):
        for removed in (False, True):
            free = decoder.generate(**batch, **asked, **heat, remove_invalid_values=removed)[0, 6:].tolist()
            assert not set(banned) & set(free)


def own_stops() -> dict[str, tuple[dict, str]]:
    """What says of lengths and ends otherwise than the options, which transformers then follows."""
    return {
        "longest": ({"stopping_criteria": [MaxLengthCriteria(9)]}, "by the option max_length"),
        "ends": ({"stopping_criteria": [EosTokenCriteria(7)]}, "by the option eos_token_id"),
        "shortest": ({"logits_processor": [MinLengthLogitsProcessor(9, 2)]}, "by the option min_length"),
        "fewest": (
            {"logits_processor": [MinNewTokensLengthLogitsProcessor(4, 9, 2)]},
            "by the option min_new_tokens",
        ),
        "others' ends": (
            {"logits_processor": [MinNewTokensLengthLogitsProcessor(4, 9, 7)], "min_new_tokens": 9},
            "by the option min_new_tokens",
        ),
    }


def bad_requests() -> dict[str, tuple[dict, str]]:
    ids = prompts([4])["input_ids"]
    return {
        **own_stops(),
        "beams": ({"num_beams": 4}, "option num_beams=4 is not supported"),
        "contrastive": ({"penalty_alpha": 0.6}, "option penalty_alpha=0.6 is not supported"),
        "assistant": ({"assistant_model": object()}, "option assistant_model is not supported"),
        "embeddings": ({"inputs_embeds": torch.ones(1, 4, 32)}, "option inputs_embeds is not supported"),
        "guidance": ({"guidance_scale": 2.0}, "option guidance_scale=2.0 is not supported"),
        "warper": ({"do_sample": True, "min_p": 2.0}, "transformers refuses these options: `min_p`"),
        "stop strings": ({"stop_strings": ["end"]}, "stop_strings need a tokenizer"),
        "stop string": ({"stop_strings": ["end", None]}, "stop_strings is \\['end', None\\]; give a string"),
        "empty stop": ({"stop_strings": ""}, "stop_strings is ''; give a string that is not empty"),
        "unknown": ({"max_tokens": 5}, "option max_tokens is not one of generate's"),
        "too long": ({"max_new_tokens": 300}, "exceed the 256 positions"),
        "no new": ({"max_new_tokens": 0}, "must be at least 1"),
        "max_length": ({"max_length": 3}, "`max_length` is set to 3"),
        "rule": ({"acceptance": "typical"}, "acceptance rule 'typical' is unknown"),
        "trs": ({"acceptance": "trs-lossy"}, "needs the k\\^N trees"),
        "cold": ({"do_sample": True, "temperature": 0.0}, "leave do_sample off"),
        "frozen": ({"do_sample": True, "temperature": 1e-38}, "give a number of at least 1e-30"),
        "hot": ({"do_sample": True, "temperature": "hot"}, "temperature hot cannot be sampled at; give a number"),
        "cache": ({"cache_implementation": "quantized"}, "rounds keys and values"),
        "copies": ({"num_return_sequences": 2}, "`num_return_sequences` different than 1"),
        "seeds": ({"do_sample": True, "seed": [1, 2]}, "2 seeds are given for 1 prompts"),
        "shape": ({"input_ids": ids[0]}, "give int64 ids of shape"),
        "mask shape": ({"attention_mask": torch.ones(1, 9)}, "give one of equal shape"),
        "empty": ({"attention_mask": torch.zeros(1, 4)}, "prompt 0 is empty"),
        "hole": ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "hides tokens in the middle"),
        "nothing": ({"input_ids": ids[:0]}, "input_ids holds no prompt"),
        "twice": ({"inputs": ids}, "given twice, as inputs and as input_ids"),
        "drafts": ({"num_draft_tokens": -1}, "num_draft_tokens is -1; a call takes a number from 0 on"),
    }


@pytest.mark.parametrize("case", bad_requests())
def test_bad_requests_get_one_sentence(tiny_model, case):
    options, message = bad_requests()[case]
    arguments = {"input_ids": prompts([4])["input_ids"], **options}
    with pytest.raises(UnsupportedGeneration, match=message) as caught:
        ShapeDecoder(tiny_model("llama"), AdversaryDrafter()).generate(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", own_stops())
def test_a_custom_generate_refuses_stops_of_the_callers_own(tiny_model, case):
    options, message = own_stops()[case]
    model = tiny_model("llama")
    options = {name: type_of(value) for name, value in options.items()} | {"max_new_tokens": 20}
    with pytest.raises(UnsupportedGeneration, match=message):
        model.generate(**prompts([4]), **options, custom_generate=ShapeDecoder(model).as_custom_generate())


def type_of(given: object) -> object:
    if not isinstance(given, list):
        return given
    return (LogitsProcessorList if isinstance(given[0], LogitsProcessor) else StoppingCriteriaList)(given)


def test_stops_that_say_what_the_options_say_are_carried_out(tiny_model):
    model, batch = tiny_model("llama"), prompts([4])
    same = {"max_new_tokens": 20, "min_new_tokens": 9, "eos_token_id": 2}
    given = {
        "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(24), EosTokenCriteria(2)]),
        "logits_processor": LogitsProcessorList([MinNewTokensLengthLogitsProcessor(4, 9, 2)]),
    }
    expected = model.generate(**batch, **same)
    assert torch.equal(ShapeDecoder(model).generate(**batch, **same, **given), expected)


class Backwards(TopKLogitsWarper):
    """Looks at the text, which the class that it comes from does not."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] % 2:
            scores.scatter_(1, scores.argmax(-1, keepdim=True), -float("inf"))  # in place, as some do
        return super().__call__(input_ids, scores)


class Few(TemperatureLogitsWarper):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(torch.arange(scores.shape[-1]) < 20, -float("inf"))


@pytest.mark.parametrize("own", [Backwards(5), Few(0.7)], ids=["looks back", "with a rule of its own"])
def test_processors_that_inherit_from_transformers_are_called(tiny_model, own):
    model, batch = tiny_model("llama"), prompts([7])
    options = {"max_new_tokens": 20, "logits_processor": LogitsProcessorList([own])}
    expected = model.generate(**batch, **options)
    assert not torch.equal(expected, model.generate(**batch, max_new_tokens=20))
    for drafter in (None, AdversaryDrafter(seed=3)):
        assert torch.equal(ShapeDecoder(model, drafter).generate(**batch, **options), expected)


def test_the_last_position_is_used(tiny_model):
    """The last token is chosen and does not go through the target, so that there may be one more than positions."""
    model, batch = tiny_model("gpt2"), prompts([250])
    limit = model.config.max_position_embeddings
    options = {"max_new_tokens": limit - 250 + 1, "eos_token_id": []}
    expected = model.generate(**batch, **options, pad_token_id=0)
    assert expected.shape[1] == limit + 1
    for drafter in (None, AdversaryDrafter(seed=3)):
        assert torch.equal(ShapeDecoder(model, drafter).generate(**batch, **options), expected)


def test_a_prompt_and_what_to_return_may_be_said_as_to_transformers(tiny_model):
    decoder, ids = ShapeDecoder(tiny_model("llama")), prompts([4])["input_ids"]
    config = GenerationConfig(max_new_tokens=5, return_dict_in_generate=True)
    out = decoder.generate(inputs=ids, generation_config=config)
    assert torch.equal(out.sequences, decoder.generate(ids, generation_config=config, return_dict_in_generate=False))


def test_from_pretrained(tiny_target, tiny_target_folder, tmp_path):
    network = predictor(
        torch.float32, target_identity={**tiny_target.identity.to_dict(), "name": str(tiny_target_folder)}
    )
    network.save_pretrained(tmp_path / "predictor")
    ids = prompts(vocab_size=200)
    expected = ShapeDecoder(tiny_target).generate(**ids, max_new_tokens=10)
    for arguments in (
        {"predictor": tmp_path / "predictor"},
        {
            "predictor": tmp_path / "predictor",
            "target": tiny_target.model,
            "tokenizer": tiny_target.tokenizer,
        },
        {"predictor": None, "target": tiny_target_folder, "drafter": "ngram"},
        {"predictor": tmp_path / "predictor", "drafter": "none", "tree": TreeShape(depth=2)},
    ):
        decoder = ShapeDecoder.from_pretrained(**arguments)
        assert torch.equal(decoder.generate(**ids, max_new_tokens=10), expected)
        assert decoder.tokenizer is not None
    half = ShapeDecoder.from_pretrained(tmp_path / "predictor", dtype="bfloat16")
    assert half.target.dtype == torch.bfloat16 == half.drafter.predictor.dtype


def test_a_target_alone_and_what_comes_first(tiny_target, tiny_target_folder, tiny_predictor_folder):
    """A target alone drafts with suffix; which of two is the predictor is read from their configurations."""
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    expected = tiny_target.model.generate(ids, max_new_tokens=10, do_sample=False)
    whole, drafts = str(tiny_target_folder), str(tiny_predictor_folder)
    calls: list[tuple[str, tuple, dict]] = [
        ("suffix", (whole,), {}),
        ("suffix", (None,), {"target": whole}),
        ("suffix", (tiny_target,), {}),
        ("suffix", (tiny_target.model,), {}),
        ("ngram", (whole,), {"drafter": "ngram"}),
        ("none", (whole,), {"drafter": "none"}),
        ("shape", (whole,), {"predictor": drafts}),
        ("shape", (tiny_target.model, drafts), {}),
        ("shape", (whole, drafts), {}),
        ("shape", (drafts, whole), {}),
        ("shape", (drafts,), {"target": tiny_target}),
        ("shape", (), {"predictor": drafts, "target": whole}),
        ("suffix+shape", (whole,), {"predictor": drafts, "drafter": "suffix+shape"}),
        ("model", (whole,), {"target": whole}),
        ("model", (whole,), {"predictor": whole}),
    ]
    for name, arguments, options in calls:
        decoder = ShapeDecoder.from_pretrained(*arguments, **options)
        assert getattr(decoder.drafter, "name", "none") == name, (arguments, options)
        assert torch.equal(decoder.generate(ids, max_new_tokens=10), expected)
    with pytest.raises(ConfigError, match="needs a predictor"):
        ShapeDecoder.from_pretrained(whole, drafter="shape")


def test_from_pretrained_mistakes(tiny_target, tiny_model, tmp_path):
    with pytest.raises(ConfigError, match="neither a predictor nor a target"):
        ShapeDecoder.from_pretrained(None)
    with pytest.raises(ConfigError, match="needs a predictor"):
        ShapeDecoder.from_pretrained(None, target=tiny_target, drafter="shape")
    with pytest.raises(ConfigError, match="option drafer is unknown, or says how a target is loaded"):
        ShapeDecoder.from_pretrained(None, target=tiny_target, drafer="ngram")
    for said in ({"dtype": "float32"}, {"device_map": "cpu"}):
        with pytest.raises(ConfigError, match="says how a target is loaded, while tiny is at hand"):
            ShapeDecoder.from_pretrained(None, target=tiny_target, **said)
    with pytest.raises(ConfigError, match="target tiny has a tokenizer of its own already"):
        ShapeDecoder(tiny_target, tokenizer=object())
    with pytest.raises(ConfigError, match=r"there is no tokenizer in .*; give a folder or a hub id that has one"):
        ShapeDecoder(tiny_target.model, tokenizer=tmp_path)
    with pytest.raises(ConfigError, match="drafter 'sufix' is unknown"):
        ShapeDecoder.from_pretrained(None, target=tiny_target, drafter="sufix")
    with pytest.raises(CheckpointError, match="cannot be read"):
        ShapeDecoder.from_pretrained(tmp_path, target=tiny_target)
    broken = predictor(torch.float32)
    del broken.delta.bias
    broken.save_pretrained(tmp_path / "broken")
    with pytest.raises(CheckpointError, match=r"not those of its configuration \(delta\.bias"):
        ShapeDecoder.from_pretrained(tmp_path / "broken", target=tiny_target)
    predictor(torch.float32).save_pretrained(tmp_path / "anonymous")
    with pytest.raises(TargetMismatch, match="does not say which target"):
        ShapeDecoder.from_pretrained(tmp_path / "anonymous")
    identity = tiny_target.identity.to_dict()
    predictor(torch.float32, target_identity=identity).save_pretrained(tmp_path / "known")
    with pytest.raises(TargetMismatch, match="was trained for target tiny"):
        ShapeDecoder.from_pretrained(tmp_path / "known", target=Target(tiny_model("llama", torch.float32, seed=9)))


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.7, "eos_aware": True}])
def test_warming_up_leaves_nothing_behind(tiny_model, options):
    model, batch = tiny_model("llama"), prompts()
    drafter = TrainedDrafter(predictor(), TreeShape(depth=3, width=2))
    torch.manual_seed(5)
    expected = ShapeDecoder(model).generate(**batch, max_new_tokens=8, **options)
    decoder = ShapeDecoder(model, drafter)
    torch.manual_seed(5)
    decoder.warm_up(**options)
    assert not decoder._step_costs
    assert torch.equal(decoder.generate(**batch, max_new_tokens=8, **options), expected)


def test_warming_up_makes_steps_whatever_the_target_says_first(tiny_model):
    """All of its tokens may end a text."""
    drafted: list[int] = []

    class Counting(Wrapped):
        def draft(self, *given: Any) -> TokenTree:
            drafted.append(1)
            return super().draft(*given)

    model = deepcopy(tiny_model("llama"))
    model.generation_config.eos_token_id = list(range(64))
    drafter = Counting(TrainedDrafter(predictor(), TreeShape(depth=1)))
    ShapeDecoder(model, drafter, fall_back=False).warm_up(eos_aware=False)
    assert len(drafted) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_torch_makes_by_default_is_nothing_to_us(tiny_model, dtype):
    """Neither on which device nor in which dtype; kernels are given addresses, and would not notice."""
    ids, model = prompts([9])["input_ids"], tiny_model("llama", dtype)
    network = predictor(dtype, step_mode="parallel", token_conditioning="root", num_steps=3, loud=True)

    def decoded(model: PreTrainedModel, network: Predictor) -> list[list[int]]:
        decoder = ShapeDecoder(model, TrainedDrafter(network, TreeShape(depth=3, width=1)), fall_back=False)
        ways = ({"do_sample": False}, {"do_sample": True, "seed": 3, "acceptance": "rejection"})
        return [decoder.generate(ids, max_new_tokens=20, eos_token_id=[], **way)[0].tolist() for way in ways]

    first, *others = [(deepcopy(model), deepcopy(network)) for _ in range(3)]  # nothing was made of their weights yet
    expected, chosen = decoded(*first), torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        assert decoded(*others[0]) == expected
    finally:
        torch.set_default_dtype(chosen)
    torch.set_default_device("meta")
    try:
        assert decoded(*others[1]) == expected
    finally:
        torch.set_default_device(None)


def test_nothing_global_is_touched(tiny_model):
    """Decoding between two draws of the global generator changes neither; no state stays behind in the drafter."""
    decoder = ShapeDecoder(tiny_model("llama"), drafters()["shape tree"]())
    torch.manual_seed(3)
    first, second = torch.rand(2), torch.rand(2)
    torch.manual_seed(3)
    again = torch.rand(2)
    decoder.generate(**prompts(), max_new_tokens=5, do_sample=True, seed=1)
    assert torch.equal(first, again) and torch.equal(second, torch.rand(2))
    assert torch.is_grad_enabled() and not hasattr(decoder.drafter, "window")


def test_an_output_embedding_that_was_replaced_is_told(tiny_model):
    model = tiny_model("llama")
    decoder, batch = ShapeDecoder(model), prompts([4])
    decoder.generate(**batch, max_new_tokens=2)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    with pytest.raises(UnsupportedGeneration, match=r"the output embedding of target .* make a new decoder"):
        decoder.generate(**batch, max_new_tokens=2)
