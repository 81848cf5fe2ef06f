"""The measuring: what is counted, how figures follow from it, and that an interruption changes nothing."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from eval.ablation.measuring import pooled
from shape.data.conversations import Prompt
from shape.drafters import AdversaryDrafter, HybridDrafter, NgramDrafter, TrainedDrafter, TreeShape
from shape.errors import ConfigError, DataError
from shape.evaluation.environment import Environment
from shape.evaluation.methods import Configured, describe
from shape.evaluation.report.figures import speed
from shape.evaluation.report.sources import Source
from shape.evaluation.results import PromptRecord, SpeedResults, Tally
from shape.evaluation.runner import Run
from shape.evaluation.speed import Bench, Contexts, SpeedSetting, measure
from shape.generation import engine
from shape.generation.control import StepCosts
from shape.generation.stats import DecodeStats
from shape.networks.config import ShapeConfig
from shape.networks.shape import ShapePredictor
from shape.target.chat import Message


def prompt(name: str, *turns: str, category: str = "talk") -> Prompt:
    return Prompt(name, category, turns, (Message("user", turns[0]),))


PROMPTS = [
    prompt("a", "Hello"),
    prompt("b", "Hi", "And then?"),
    prompt("c", "One two one two", category="count"),
]
METHODS = {"transformers": "transformers", "autoregressive": None, "ngram": NgramDrafter(), "wild": AdversaryDrafter()}


def run(target, methods=METHODS, prompts=PROMPTS, journal=None, **options) -> SpeedResults:
    setting = SpeedSetting(**{"max_new_tokens": 10, "warmup": 0, **options})
    return measure(target, methods, prompts, setting, progress=False, journal=journal)


@pytest.fixture(scope="module")
def results(tiny_target) -> SpeedResults:
    return run(tiny_target, repeats=2)


def test_of_repeated_runs_the_one_of_median_decode_time_counts_as_a_whole(tiny_target):
    """So that shares of its time are shares of one run's, whatever the others took."""
    times = [(1.9, 0.3), (0.35, 0.1), (0.3, 0.2), (0.4, 0.4)]  # of decoding, of the prefill
    made = [
        Run([[5, 6]], 1, decode, prefill, [decode], DecodeStats(drafted=number))
        for number, (decode, prefill) in enumerate(times)
    ]
    for count, kept in ((1, 0), (2, 1), (3, 1), (4, 1)):
        runs = iter(made)
        bench = Bench(tiny_target, {"ngram": lambda *_, runs=runs: next(runs)}, {"ngram": NgramDrafter()}, None, count)
        assert bench._answers([], [0], 0) == {"ngram": made[kept]}


def test_counts_every_answer_and_token(results):
    for name in METHODS:
        total = results.total[name]
        assert total.answers == 4
        assert total.timed_tokens == total.tokens - 4  # one token of each answer is the prefill's
        assert total.decode_seconds > 0 and total.prefill_seconds > 0
    assert results.summary["autoregressive"].acceptance_length.value == 1.0
    assert results.total["transformers"].forwards == 0
    assert results.summary["transformers"].acceptance_length.value is None


def test_steps_are_kept_one_by_one(results, tiny_target):
    for name, detail in results.details.items():
        total = results.total[name]
        assert sum(detail.histogram.values()) == total.forwards
        assert sum(size * count for size, count in detail.histogram.items()) == (
            total.timed_tokens if detail.histogram else 0
        )
        assert len(detail.gaps) == (total.forwards or total.timed_tokens) and min(detail.gaps) > 0
    older = json.loads(results.to_json())
    for record in older["records"]:
        del record["details"]
    assert SpeedResults.from_json(json.dumps(older)).details == {}
    hybrid = HybridDrafter([NgramDrafter(), AdversaryDrafter()])
    sources = run(tiny_target, {"autoregressive": None, "both": hybrid}, PROMPTS[2:]).details["both"].sources
    assert sources and all(0 <= accepted <= proposed for proposed, accepted in sources.values())


def test_every_method_gives_the_same_greedy_tokens(results):
    for name in METHODS:
        line = results.summary[name]
        assert line.equal_transformers == line.answers == 4
    assert results.summary["wild"].equal_autoregressive == 4
    assert results.summary["transformers"].equal_autoregressive is None


def test_sampled_tokens_equal_those_of_the_plain_loop(tiny_target):
    results = run(tiny_target, temperature=1.0, prompts=PROMPTS[:2])
    assert results.summary["ngram"].equal_autoregressive == results.summary["wild"].equal_autoregressive == 3
    assert results.summary["autoregressive"].equal_transformers is None
    again = run(tiny_target, {"transformers": "transformers"}, temperature=1.0, prompts=PROMPTS[:1])
    once_more = run(tiny_target, {"transformers": "transformers"}, temperature=1.0, prompts=PROMPTS[:1])
    assert again.total["transformers"].distinct_bigrams == once_more.total["transformers"].distinct_bigrams


@pytest.mark.parametrize("fall_back", [True, False])
def test_the_clock_decides_when_to_fall_back(tiny_target, monkeypatch, fall_back):
    """As in a call without a seed, though every answer has one: reproducible calls go by a fixed number."""
    monkeypatch.setattr(engine, "FIXED_BREAK_EVEN", 0.0)
    monkeypatch.setattr(StepCosts, "break_even", lambda *_: 1000.0)
    wild = run(tiny_target, max_new_tokens=16, fall_back=fall_back).total["wild"]
    assert (wild.draft_steps < wild.forwards) == fall_back


def test_one_method_may_be_verified_whole_beside_others(tiny_target, monkeypatch):
    monkeypatch.setattr(StepCosts, "break_even", lambda *_: 1000.0)
    drafter = AdversaryDrafter(nodes=6, seed=2)
    methods = {"autoregressive": None, "wild": drafter, "whole": Configured(drafter, whole=True)}
    results = run(tiny_target, methods, max_new_tokens=16)
    wild, whole = results.total["wild"], results.total["whole"]
    assert wild.draft_steps < wild.forwards and whole.draft_steps == whole.forwards
    assert results.settings["methods"]["whole"] == f"{results.settings['methods']['wild']}, drafts verified whole"


def test_measuring_leaves_the_global_generator_alone(tiny_target):
    state = torch.random.get_rng_state()
    run(tiny_target, {"transformers": "transformers", "autoregressive": None}, PROMPTS[:1], temperature=1.0)
    assert torch.equal(state, torch.random.get_rng_state())


def test_transformers_own_prompt_lookup_stands_beside_its_plain_generate(tiny_target):
    methods = {"transformers": "transformers", "transformers-lookup": "transformers-lookup", "autoregressive": None}
    repeating = [prompt("again", "one two three one two three one two three"), *PROMPTS[:1]]
    results = run(tiny_target, methods, repeating, max_new_tokens=30)
    line, total = results.summary["transformers-lookup"], results.total["transformers-lookup"]
    assert line.equal_transformers == line.answers == 2
    # Its prefill may yield several tokens at once, none of which the decoding paid for.
    assert total.tokens == results.total["autoregressive"].tokens and total.timed_tokens <= total.tokens - 2
    assert line.acceptance_length.value is None and line.draft_share is None
    assert results.baseline != "transformers-lookup" and "| transformers-lookup |" in results.to_markdown()
    with pytest.raises(ConfigError, match="no baseline"):
        run(tiny_target, {"transformers-lookup": "transformers-lookup"})
    sampled = run(tiny_target, methods, repeating, temperature=1.0)
    assert sampled.total["transformers-lookup"].tokens > 2


def test_the_baseline_is_the_stronger_one(results):
    slower = max(("transformers", "autoregressive"), key=lambda name: results.total[name].seconds_per_token)
    assert results.baseline in ("transformers", "autoregressive") and results.baseline != slower
    assert results.summary[results.baseline].speed_up.value == 1.0
    assert results.summary[slower].speed_up.value < 1.0


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_results_say_what_was_switched_off(tiny_target, results, temperature, monkeypatch):
    """A penalty or a cut that the target's generation config has, and its users' answers with it."""
    own = GenerationConfig(eos_token_id=2, pad_token_id=0, repetition_penalty=1.05, top_p=0.8, top_k=0, do_sample=True)
    monkeypatch.setattr(tiny_target.model, "generation_config", own)
    found = run(tiny_target, {"autoregressive": None}, PROMPTS[:1], temperature=temperature)
    assert found.settings["switched_off"] == {"repetition_penalty": 1.05} | ({"top_p": 0.8} if temperature else {})
    assert "switched off of the target's generation_config: repetition_penalty=1.05" in found.to_markdown()
    assert "switched_off" not in results.settings and "switched off" not in results.to_markdown()


def test_json_and_markdown(results):
    copy = SpeedResults.from_json(results.to_json())
    assert copy == results and copy.to_markdown() == results.to_markdown()
    assert "| count |" in results.to_markdown() and "| count |" not in results.to_markdown(detail=False)
    strict = json.loads(results.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert strict["settings"]["target"] == "tiny"
    older = results.to_json().replace('"autoregressive', '"plain').replace("equal_autoregressive", "equal_plain")
    assert SpeedResults.from_json(older.replace('"schema_version": 3', '"schema_version": 1')) == results
    second = json.loads(results.to_json()) | {"schema_version": 2, "projected_cost": dict.fromkeys(results.methods)}
    for line in second["summary"].values():
        line["projected_speed_up_8b"] = 1.5
    assert SpeedResults.from_json(json.dumps(second)) == results
    unkept = re.sub(r', "wait_seconds": [^}]+', "", results.to_json())  # at batch 1 it is the prefill's time
    assert "wait_seconds" not in unkept and SpeedResults.from_json(unkept) == results
    assert "lower median of 2 run(s)" in results.about  # of two the faster run counts
    odd = replace(results, settings={**results.settings, "repeats": 3})
    assert "lower" not in odd.about and "median of 3 run(s)" in odd.about
    with pytest.raises(DataError, match="schema version 0"):
        SpeedResults.from_json('{"schema_version": 0}')


def test_prompts_without_room_are_left_out_and_named(tiny_target):
    long = prompt("long", "x" * 300)
    grows = prompt("grows", "short", "y" * 250)
    results = run(tiny_target, {"autoregressive": None}, [PROMPTS[0], long, grows])
    assert [record.id for record in results.records] == ["a", "grows"]
    assert "256 positions" in results.skipped["long"] and "turn 2" in results.skipped["grows"]
    assert results.total["autoregressive"].answers == 2
    assert any("2 prompts left out or cut" in warning for warning in results.warnings)


def test_batches_are_answered_as_their_prompts_alone(results, tiny_target):
    """By every method, greedy and sampled, and with turns that only some rows have."""
    for temperature, alone in ((0.0, results), (1.0, run(tiny_target, temperature=1.0))):
        together = run(tiny_target, batch=3, temperature=temperature)
        assert [record.id for record in together.records] == ["a+b+c"] and together.records[0].category == "several"
        for name in METHODS:
            total, apart = together.total[name], alone.total[name]
            if temperature == 0 or name != "transformers":  # whose generator goes through a batch in another order
                assert (total.answers, total.tokens, total.bigrams, total.distinct_bigrams, total.ended) == (
                    apart.answers, apart.tokens, apart.bigrams, apart.distinct_bigrams, apart.ended
                )  # fmt: skip
                assert (
                    total.timed_tokens == total.tokens - 4 and total.equal_autoregressive == apart.equal_autoregressive
                )
                assert name != "autoregressive" or total.forwards == apart.forwards
            assert total.decode_seconds > 0 and total.prefill_seconds > 0
            # Three wait for the first turn's prefill, one for the second's.
            assert total.prefill_seconds < total.wait_seconds < 3 * total.prefill_seconds
            assert together.summary[name].prefill_ms == pytest.approx(250 * total.wait_seconds)
            assert together.in_vllm_names(name)["mean_ttft_ms"] == pytest.approx(250 * total.wait_seconds)
        assert "batch 3" in together.to_markdown() and "3 prompts" in together.to_markdown()
    pairs = run(tiny_target, {"autoregressive": None}, batch=2)
    assert [record.id for record in pairs.records] == ["a+b"] and pairs.skipped == {"c": "it fills no batch of 2"}


def test_contexts_are_filled_up_with_other_prompts(tiny_target):
    contexts = Contexts(tiny_target, PROMPTS, 100, 10)
    for one in PROMPTS:
        ids = tiny_target.encode(one.opening)
        filled = contexts.of(one, one.opening)
        assert filled.shape == (1, 100) and torch.equal(filled[:, -ids.shape[1] :], ids)
        others = [tiny_target.encode(other.opening) for other in PROMPTS if other is not one]
        before = filled[0, : 100 - ids.shape[1]].tolist()
        last = max(others, key=lambda other: before[-other.shape[1] :] == other[0].tolist())
        assert before[-last.shape[1] :] == last[0].tolist()
    longest = max(tiny_target.encode(one.opening).shape[1] for one in PROMPTS)
    results = run(tiny_target, {"autoregressive": None, "ngram": NgramDrafter()}, context_length=longest)
    assert results.skipped == {"b": f"the prompt is longer than the contexts of {longest} tokens at turn 2"}
    assert f"filled up to {longest} tokens" in results.to_markdown()
    assert results.total["ngram"].equal_autoregressive == results.total["ngram"].answers == 3


def test_a_journal_continues_where_it_was_cut(tiny_target, tmp_path):
    journal = tmp_path / "records.jsonl"
    whole = run(tiny_target, {"autoregressive": None}, journal=journal)
    lines = journal.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + len(PROMPTS)
    journal.write_text("".join(lines[:3]) + lines[3][:20])  # a crash in the middle of the last line
    continued = run(tiny_target, {"autoregressive": None}, journal=journal)
    assert continued.records[:2] == whole.records[:2]
    assert [record.id for record in continued.records] == ["a", "b", "c"]
    assert len(journal.read_text().splitlines()) == 1 + len(PROMPTS)
    with pytest.raises(ConfigError, match=r"other settings \(max_new_tokens\)"):
        run(tiny_target, {"autoregressive": None}, journal=journal, max_new_tokens=11)


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({"methods": {"ngram": NgramDrafter()}}, ConfigError, "no baseline"),
        ({"repeats": 0}, ConfigError, "at least 1"),
        ({"batch": 0}, ConfigError, "batch is 0; give at least 1"),
        ({"batch": 4}, DataError, "batch_size 4 cannot be filled with the 3 prompts of"),
        (
            {"batch": 2, "methods": {"autoregressive": None, "x": "transformers-lookup"}},
            ConfigError,
            "one prompt at a time for x",
        ),
        ({"context_length": 8}, DataError, "longer than the contexts of 8"),
        ({"temperature": -0.5}, ConfigError, "temperature is -0.5; give 0 or more"),
        ({"prompts": []}, DataError, "none was given"),
        ({"prompts": [PROMPTS[0], PROMPTS[0]]}, DataError, "the given prompts: two prompts share the id a;"),
        ({"max_new_tokens": 256}, DataError, "exceed the target's 256 positions"),
    ],
)
def test_what_cannot_be_measured_is_refused(tiny_target, options, kind, sentence):
    with pytest.raises(kind, match=sentence):
        run(tiny_target, **options)


def made_up(*rows: tuple[Tally, Tally], methods=("autoregressive", "shape")) -> SpeedResults:
    """Results from given tallies of the plain loop and one drafter."""
    records = tuple(PromptRecord(str(i), "all", dict(zip(methods, row, strict=True))) for i, row in enumerate(rows))
    environment = Environment("now", "here", None, "CPU", "some", 2, 2, {})
    settings = {"methods": {"autoregressive": "autoregressive", "shape": "shape, a tree"}, "temperature": 0.0}
    settings |= {"target": "t", "parameters": 1, "dtype": "float32", "prompts": "p", "max_new_tokens": 9}
    settings |= {"repeats": 1}
    return SpeedResults("made up", settings, environment, records, {})


def tally(seconds: float, tokens: int, forwards: int = 10) -> Tally:
    return Tally(answers=1, tokens=tokens + 1, timed_tokens=tokens, decode_seconds=seconds, forwards=forwards)


def test_figures_are_ratios_of_sums():
    results = made_up((tally(2.0, 20, 20), tally(1.0, 20, 10)), (tally(8.0, 80, 80), tally(2.0, 80, 20)))
    line = results.summary["shape"]
    assert line.speed_up.value == pytest.approx((10 / 100) / (3 / 100))
    assert line.acceptance_length.value == pytest.approx(100 / 30)
    assert line.tokens_per_second == pytest.approx(100 / 3)
    assert line.speed_up.low == pytest.approx(2.0) and line.speed_up.high == pytest.approx(4.0)
    assert results.summarise("shape", "all") == line


def test_steps_that_were_not_timed_by_parts_have_no_draft_share():
    """Those of fixed shapes have one time, which counts as verification."""
    eager = {"draft_seconds": 0.2, "verify_seconds": 0.5, "commit_seconds": 0.1}
    plain, drafted = tally(2.0, 20, 20), replace(tally(1.0, 20, 10), draft_steps=9)
    fixed = {"verify_seconds": 0.9}
    for parts, share, told in (
        (eager, 0.2, ["10.00", "25.00", "5.00", "10.00", "–"]),
        (fixed, None, [*["–"] * 4, "50.00"]),
    ):
        results = made_up((plain, replace(drafted, **parts)))
        assert results.summary["shape"].draft_share == share
        source = Source("speed", "", "", "", None, results)
        (times,) = [plot for plot in speed(source) if plot.title == "Where the time goes"]
        assert times.table[1][1] == ["shape", "50.00", *told]


def test_pooled_methods_are_summed_prompt_by_prompt():
    rows = [(tally(2.0, 20, 20), tally(1.0, 20, 10), tally(1.0, 20, 5)) for _ in range(2)]
    methods = ("autoregressive", "one", "two")
    records = tuple(PromptRecord(str(i), "all", dict(zip(methods, row, strict=True))) for i, row in enumerate(rows))
    base = made_up((tally(1.0, 1), tally(1.0, 1)))
    settings = {**base.settings, "methods": {"autoregressive": "autoregressive", "one": "shape 1", "two": "shape 2"}}
    results = replace(base, settings=settings, records=records)
    both = pooled(results, {"autoregressive": ["autoregressive"], "both": ["one", "two"]})
    line = both.summary["both"]
    assert line.acceptance_length.value == pytest.approx(40 / 15) and line.speed_up.value == pytest.approx(2.0)
    assert line.answers == 4
    assert both.methods["both"] == "shape 1; shape 2" and both.baseline == "autoregressive"


def test_a_speed_up_above_the_acceptance_length_is_flagged():
    ok = made_up((tally(1.0, 20, 20), tally(0.6, 20, 10)))
    odd = made_up((tally(1.0, 20, 20), tally(0.4, 20, 10)))
    assert not ok.warnings
    assert "exceeds the acceptance length (2.00)" in odd.warnings[0]


def test_brackets_over_few_prompts_are_called_no_95_percent_intervals():
    row = (tally(1.0, 20, 20), tally(0.6, 20, 10))
    said = "brackets over fewer than six prompts are about the range of these, and no 95 % intervals"
    assert [said in made_up(*[row] * count).to_markdown() for count in (1, 2, 5, 6)] == [False, True, True, False]


def test_answers_of_one_token_are_undefined_not_infinite():
    results = made_up((tally(1.0, 20, 20), tally(0.0, 0, 0)))
    line = results.summary["shape"]
    assert line.tokens_per_second is None and line.speed_up.value is None and line.acceptance_length.value is None
    assert "NaN" not in results.to_json() and "nan" not in results.to_markdown()


def test_the_mean_over_categories_is_of_those_where_a_speed_up_is_defined():
    several = made_up(*[(tally(1.0, 20), tally(0.5, 20))] * 2, (tally(0.0, 0, 0), tally(0.0, 0, 0)))
    records = tuple(
        replace(record, category=name) for record, name in zip(several.records, ("x", "y", "z"), strict=True)
    )
    _, lines = replace(several, records=records).by_category()
    assert lines[-1] == ["mean of these", "1.00x", "2.00x"]
    _, lines = replace(several, records=records[2:]).by_category()
    assert lines[-1] == ["mean of these", "–", "–"]


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=2, max_size=8))
def test_intervals_hold_the_figure_and_stay_within_the_extremes(rows):
    results = made_up(*((tally(1.0, t, t), tally(0.5, t, f)) for t, f in rows))
    length = results.summary["shape"].acceptance_length
    ratios = [t / f for t, f in rows]
    low = length.value if length.low is None else length.low
    high = length.value if length.high is None else length.high
    assert min(ratios) - 1e-9 <= low <= high <= max(ratios) + 1e-9


@given(st.lists(st.integers(0, 9), min_size=2, max_size=2))
def test_tallies_add_up(counts):
    total = Tally(tokens=counts[0]) + Tally(tokens=counts[1], accepted=1)
    assert total.tokens == sum(counts) and total.accepted == 1
    assert math.isnan(total.acceptance_length)


def test_descriptions_change_with_the_settings(tiny_target):
    config = ShapeConfig(hidden_size=tiny_target.hidden_size, num_steps=2)
    predictor = ShapePredictor(config)
    one, two = (describe(TrainedDrafter(predictor, TreeShape(depth=depth))) for depth in (1, 2))
    other = ShapePredictor(config)
    assert describe(TrainedDrafter(other, TreeShape(depth=1))) != one
    assert describe(TrainedDrafter(predictor, TreeShape(depth=1)), torch.device("cpu")) == one
    assert describe(TrainedDrafter(predictor, TreeShape(depth=1)), torch.device("meta")) == f"{one}, on cpu"
    assert one != two and describe(None) == "autoregressive" and describe("transformers") == "transformers"
