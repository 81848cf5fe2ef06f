from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from helpers import predictor, prompts, weaker_model
from hypothesis import given
from hypothesis import strategies as st

from shape.drafters import (
    AdversaryDrafter,
    Drafter,
    HybridDrafter,
    LookaheadDrafter,
    ModelDrafter,
    OracleDrafter,
    SuffixDrafter,
    TrainedDrafter,
    TreeShape,
    hybrid,
    model,
)
from shape.drafters.calibration import PathChances
from shape.drafters.cost import DraftValue
from shape.drafters.lengths import Adaptive, ByCost
from shape.generation import clock, control, eager, engine, loop
from shape.generation.control import SpeculationControl, StepCosts
from shape.generation.decoder import ShapeDecoder
from shape.generation.stats import Step
from shape.target.model import Target
from shape.verification.tree import TokenTree


def run(
    control: SpeculationControl,
    tokens,
    steps: int,
    drafted_seconds: float = 1.6,
    baseline: float = 1.0,
    context: int = 100,
) -> list[bool]:
    """Drafted or not, step by step; `tokens(i)` is what a drafted step i would commit."""
    record = []
    for i in range(steps):
        drafted = control.draft_next(context)
        seconds = drafted_seconds if drafted else baseline
        control.observe(step(13 if drafted else 1, context=context), tokens(i) if drafted else 1.0, seconds)
        record.append(drafted)
    return record


def step(nodes: int, verify: float = 0.0, context: int = 100) -> Step:
    return Step([0], [context], nodes, nodes > 1, 0.0, verify, 0.0)


def test_loops_that_some_steps_need_are_compiled_before_any(monkeypatch, tiny_target):
    """Whether nodes are left out depends on times, in which a compilation would be by far the longest."""
    seen = []
    monkeypatch.setattr(control, "keep_best", lambda tree, *_: seen.append(tree.tokens.numpy().flags.c_contiguous))
    control.compile_loops.__wrapped__()
    assert set(seen) == {True, False}
    begun = []
    monkeypatch.setattr(engine, "compile_loops", lambda: begun.append(True))
    ShapeDecoder(tiny_target, "suffix").generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)
    assert begun


def test_good_drafts_go_on_and_plain_steps_are_timed_once():
    times = StepCosts()
    first = run(SpeculationControl(times), lambda _: 3.0, 200)
    assert first.count(False) == 3 and all(first[:3]) and not any(first[3:6])
    assert times.break_even(100) == pytest.approx(1.6)
    assert all(run(SpeculationControl(times), lambda _: 3.0, 200))  # another call knows


def test_bad_drafts_are_looked_at_ever_less_often():
    control = SpeculationControl(StepCosts(), least=1.5)
    record = run(control, lambda _: 1.1, 2000)
    assert record[:7] == [True] * 7 and record[7:23] == [False] * 16 and record[23:30] == [True] * 7
    assert record.count(True) < 60 and control.pauses >= 6
    assert True in record[-800:]  # it never stops looking


@pytest.mark.parametrize(("tokens", "steps"), [([1, 1, 2, 1], 3), ([1, 7, 1, 1], 16), ([2, 3, 2, 3], 16)])
def test_what_is_clear_is_not_waited_for(tokens, steps):
    """A standard error below the break-even after few steps; a long draft among them, or little below, is not clear."""
    control = SpeculationControl(StepCosts(), least=2.7)
    record = run(control, lambda at: tokens[at % 4], 40)
    assert record.index(False) == steps


def test_short_answers_are_judged_too():
    """None of these has as many drafted steps as are judged together in a long one."""
    times = StepCosts()
    calls = [run(SpeculationControl(times), lambda _: 1.5, 12, drafted_seconds=3.0) for _ in range(10)]
    assert [call.count(True) for call in calls] == [3] * 6 + [0] * 4  # then a pause of 512 steps goes on


def test_a_few_short_drafts_end_no_probe():
    """A text may begin with four such drafts; that drafting did not pay in the one before says nothing of it."""
    past, tokens = StepCosts(), [9, 1, 4, 2, 8, 9, 9, 9]
    run(SpeculationControl(past, least=4.5), lambda _: 1.1, 20)
    assert past.pause is not None
    assert all(run(SpeculationControl(past, least=4.5), lambda at: tokens[at % 8], 100))
    assert past.pause is None


def test_another_call_begins_with_what_was_found():
    past = StepCosts()
    run(SpeculationControl(past, least=1.5), lambda _: 1.1, 60)
    assert run(SpeculationControl(past, least=1.5), lambda _: 1.1, 90)[:8] == [True] * 7 + [False]
    assert past.pause is not None and all(run(SpeculationControl(past, least=1.5), lambda _: 3.0, 90))
    assert past.pause is None


def test_the_longest_pause_outlasts_its_text():
    """A drafter that never pays costs a probe in 512 steps, in however many texts; one that does is found again."""
    past = StepCosts()
    calls = [run(SpeculationControl(past, least=1.5), lambda _: 1.1, 24) for _ in range(100)]
    assert all(any(call) for call in calls[:4]) and 14 <= sum(map(sum, calls[10:])) <= 35
    calls = [run(SpeculationControl(past, least=1.5), lambda _: 3.0, 24) for _ in range(30)]
    assert calls[0].count(True) == 0 and all(map(all, calls[512 // 24 + 1 :])) and past.pause is None


def test_a_pause_holds_up_no_other_text():
    """Several texts may be decoded at a time, and know of each other's costs."""
    past = StepCosts()
    good, bad = SpeculationControl(past, least=1.5), SpeculationControl(past, least=1.5)
    for _ in range(60):
        assert run(good, lambda _: 3.0, 1) == [True]
        run(bad, lambda _: 1.0, 1)
    assert bad.pauses > 0 and good.pauses == 0


def test_it_returns_when_the_text_becomes_easy():
    record = run(SpeculationControl(StepCosts(), least=1.5), lambda i: 1.0 if i < 60 else 4.0, 300)
    assert not all(record[:60]) and all(record[200:])


def test_the_break_even_is_a_ratio_of_medians():
    times = StepCosts()
    assert times.unmeasured(100, drafted=True)
    for seconds in (2.0, 2.0, 90.0, 2.0):
        times.add(True, seconds, 100)
    assert not times.unmeasured(100, drafted=True) and times.unmeasured(100, drafted=False)
    for seconds in (1.0, 50.0, 1.0):
        times.add(False, seconds, 100)
    assert times.break_even(100) == 2.0
    del times._times[times._length_class(100), False]  # as another call does where it begins to measure anew
    assert times.break_even(100) == 1.0
    assert times.unmeasured(1000, drafted=False)


def test_what_steps_took_behind_a_long_context_says_nothing_of_short_ones():
    """Plain steps behind 8,000 tokens take ten times as long, and make drafting look cheap."""
    times = StepCosts()
    assert (
        run(
            SpeculationControl(times),
            lambda _: 1.5,
            100,
            drafted_seconds=12.0,
            baseline=10.0,
            context=8000,
        ).count(False)
        == 3
    )
    record = run(SpeculationControl(times), lambda _: 1.5, 300, drafted_seconds=2.0, baseline=1.0, context=200)
    assert record.count(True) < 60


def test_a_text_that_grows_is_measured_anew():
    times = StepCosts()
    control = SpeculationControl(times)
    assert run(control, lambda _: 1.5, 100, drafted_seconds=1.2, context=500).count(False) == 3
    assert run(control, lambda _: 1.5, 300, drafted_seconds=2.0, context=600).count(True) < 60


def test_a_machine_that_changes_is_noticed_while_drafts_go_on():
    """Three plain steps that a hiccup made slow must not speak for a whole day."""
    control = SpeculationControl(StepCosts())
    assert run(control, lambda _: 1.5, 100, drafted_seconds=2.0, baseline=50.0).count(False) == 3
    assert run(control, lambda _: 1.5, 3000, drafted_seconds=2.0, baseline=1.0).count(True) < 800


@pytest.mark.parametrize("sample", [False, True])
def test_falling_back_changes_no_token(tiny_model, sample):
    model, batch = tiny_model("llama"), prompts([5, 9])
    options = {
        "max_new_tokens": 90,
        "do_sample": sample,
        "seed": 0,
        "eos_token_id": [],
        "return_dict_in_generate": True,
    }
    plain = ShapeDecoder(model).generate(**batch, **options)
    for drafter in (AdversaryDrafter(), TrainedDrafter(predictor())):
        out = ShapeDecoder(model, drafter, fall_back=2.5).generate(**batch, **options)
        assert torch.equal(out.sequences, plain.sequences)
        assert out.stats.autoregressive_steps >= 16 and out.stats.pauses >= 1
        assert (
            ShapeDecoder(model, drafter, fall_back=False).generate(**batch, **options).stats.autoregressive_steps == 0
        )


def test_good_drafts_are_never_held_back_by_a_number(tiny_model):
    model, batch = tiny_model("llama"), prompts([5])
    options = {"max_new_tokens": 90, "eos_token_id": []}
    plain = ShapeDecoder(model).generate(**batch, **options)
    decoder = ShapeDecoder(model, OracleDrafter(plain.tolist()), fall_back=2.5)
    out = decoder.generate(**batch, **options, return_dict_in_generate=True)
    assert out.stats.autoregressive_steps == 0 == out.stats.pauses and out.stats.acceptance_length > 4.5


def test_a_drafter_with_nothing_to_say_is_not_judged_by_it():
    """Prompt lookup proposes seldom, and at no cost where it does not."""
    control = SpeculationControl(StepCosts(), least=1.5)
    for at in range(200):
        assert control.draft_next(100)
        proposed = at % 10 == 0
        control.observe(step(13 if proposed else 1), 4.0 if proposed else 1.0, 1.0)
    assert control.pauses == 0


# ------------------------------------------------------------------------------------ how much of a draft is verified

NODE = 0.1  # seconds, where a step of twelve takes 2 and commits 4 tokens: a chance of 0.2 is worth its time


class AsSaid(PathChances):
    """What drafters say, whatever comes of it."""

    def __call__(self, tree: TokenTree) -> np.ndarray:
        return tree.joint.numpy()

    def add(self, tree: TokenTree, accepted) -> None: ...


def knows_costs(least: float | None = None) -> SpeculationControl:
    """After steps of 1 and 13 nodes, and with drafters whose word is taken."""
    control = SpeculationControl(StepCosts(), least)
    control._costs.chances = AsSaid()
    for _ in range(200):
        for nodes in (1, 13):
            control.observe(step(nodes, 0.7 + NODE * nodes), 4.0 if nodes > 1 else 1.0, 2.0)
    return control


def drafted(chances: list[list[float]]) -> TokenTree:
    """Trees of nodes with these chances, each behind the last one that is at least as likely."""
    parents = [[-1, *(max([0, *(n + 1 for n in range(at) if row[n] >= row[at])]) for at in range(len(row)))]
               for row in chances]  # fmt: skip
    joint = torch.tensor([[1.0, *row] for row in chances]).log()
    joint[:, 0] = 1.0
    tokens = torch.arange(joint.shape[1]).expand_as(joint)
    return TokenTree(tokens, torch.tensor(parents), joint=joint)


KNOWN = knows_costs()


def test_nodes_are_verified_that_are_worth_their_time():
    control = knows_costs()
    kept = control.worthwhile(drafted([[0.9, 0.5, 0.21, 0.19, 0.7, 0.05]]), 100)
    assert kept.tokens.tolist() == [[0, 1, 2, 3, 4, 5]]  # four of them, and the fifth for free
    assert kept.parent.tolist() == [[-1, 0, 1, 2, 3, 1]]
    assert control.worthwhile(drafted([[0.1, 0.01, 0.001]]), 100).tokens.tolist() == [[0, 1]]  # one at least
    whole = drafted([[0.9, 0.8, 0.7, 0.6]])
    assert control.worthwhile(whole, 100) is whole
    assert control.worthwhile(drafted([[]]), 100).size == 1
    both = control.worthwhile(drafted([[0.9, 0.3, 0.1], [0.9, 0.08, 0.07]]), 100)
    assert both.tokens.tolist() == [[0, 1], [0, 1]]  # by the mean over sequences: 0.19 is too little
    assert control.worthwhile(drafted([[0.9, 0.3, 0.1], [0.9, 0.12, 0.07]]), 100).size == 4


def test_of_a_hybrid_it_stays_known_who_proposed_what_is_kept():
    source = [[None, "a", "b", "a+b", "b"], [None, "a", "b", None, None]]
    tree = replace(drafted([[0.9, 0.1, 0.6, 0.5], [0.3, 0.9, 0.1, 0.1]]), source=source)
    kept = knows_costs().worthwhile(tree, 100)
    assert kept.tokens.tolist() == [[0, 1, 3, 4], [0, 1, 2, 3]]
    assert kept.source == [[None, "a", "a+b", "b"], [None, "a", "b", None]]


@given(st.lists(st.lists(st.floats(1e-6, 1.0), min_size=9, max_size=9), min_size=1, max_size=3))
def test_what_is_kept_is_a_tree_of_the_likeliest_nodes(rows):
    tree, least = drafted(rows), KNOWN._costs.least_chance(100)
    kept = KNOWN.worthwhile(tree, 100)
    assert kept.size == tree.size or (kept.size >= 2 and kept.size % 2 == 0)
    for row, chances in enumerate(rows):
        numbers = kept.tokens[row].tolist()
        assert numbers[0] == 0 and numbers == sorted(numbers)
        assert [numbers[above] for above in kept.parent[row, 1:]] == [tree.parent[row, node] for node in numbers[1:]]
        left_out = [chance for node, chance in enumerate(chances, 1) if node not in numbers]
        assert max(left_out, default=0) <= min(chances[node - 1] for node in numbers[1:]) + 1e-6
        assert len(rows) > 1 or max(left_out, default=0) < least


@pytest.mark.parametrize("comes_true", [True, False])
def test_chances_are_taken_by_what_became_of_them(comes_true):
    """Of a node with a chance of 0.3 behind a sure one, and of what is sure behind it."""
    control, chances = knows_costs(), [[0.99, 0.3, 0.29, 0.28]]
    control._costs.chances = PathChances()
    for _ in range(100):
        control.worthwhile(drafted(chances), 100)
        control.observe(step(5, 0.7 + NODE * 5), 4.0, 2.0, [[1, 2, 3, 4] if comes_true else [1]])
    assert control.worthwhile(drafted(chances), 100).size == (5 if comes_true else 2)


def test_no_path_is_likelier_than_its_beginning_whatever_was_counted():
    """Threads count at the same time: more may seem accepted than drafted."""
    chances = PathChances()
    chances._drafted += 5
    chances._accepted += 9
    found = chances(drafted([[0.9, 0.5, 0.4, 0.3], [0.1, 0.9, 0.1, 0.1]]))
    tree = drafted([[0.9, 0.5, 0.4, 0.3], [0.1, 0.9, 0.1, 0.1]])
    above = np.take_along_axis(found, tree.parent.clamp(min=0).numpy(), axis=1)
    assert (found <= above).all()


@pytest.mark.parametrize(
    ("chance", "tokens", "steps"),
    [(0.05, 1, 2), (None, 1, 3), (0.9, 1, 40), (None, 2, 40), (0.05, 3, 40), (0.05, 2, 2)],
)
def test_what_was_to_be_expected_counts_as_much_as_what_came_of_it(chance, tokens, steps):
    """Of drafts of three nodes, each with this chance, where a step has to commit 2 tokens."""
    costs = knows_costs()._costs
    for _ in range(16):
        costs.add(False, 1.0, 100)
    control, count, tree = SpeculationControl(costs), 0, drafted([[chance or 0.1] * 3])
    while count < 40 and control.draft_next(100):
        kept = control.worthwhile(tree if chance else replace(tree, joint=None), 100)
        control.observe(step(13), tokens, 2.0, [list(range(1, min(tokens, kept.size)))])
        count += 1
    assert count == steps and costs.break_even(100) == 2.0


def test_the_time_of_the_first_steps_of_a_size_is_no_cost_of_its_nodes():
    """It may include the compilation of kernels."""
    control = knows_costs()
    for nodes in (3, 5, 7):
        control.observe(step(nodes, 100.0), 4.0, 2.0)
    assert control.worthwhile(drafted([[0.9, 0.5, 0.21, 0.19, 0.7, 0.05]]), 100).size == 6


def test_whole_trees_are_verified_where_chances_do_not_count():
    tree = drafted([[0.9, 0.1, 0.1, 0.1]])
    control = knows_costs()
    drawn = replace(tree, log_q=torch.zeros(1, 5, 7))
    for each in (drawn, replace(tree, joint=None)):
        assert control.worthwhile(each, 100) is each
    assert knows_costs(least=1.4).worthwhile(tree, 100) is tree  # a call that looks at no clock
    assert SpeculationControl(StepCosts()).worthwhile(tree, 100) is tree  # nothing is known yet
    assert control.worthwhile(tree, 5000) is tree  # nor of so long a text
    assert control.worthwhile(tree, 100).size == 2


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("least", [0.0, 0.08, 2.0])
def test_what_is_not_verified_changes_no_token(tiny_model, monkeypatch, sample, least):
    model, batch = tiny_model("llama"), prompts([5, 9])
    options = {"max_new_tokens": 40, "do_sample": sample, "seed": 0, "eos_token_id": [], "reproducible": False}
    plain = ShapeDecoder(model).generate(**batch, **options)
    monkeypatch.setattr(StepCosts, "least_chance", lambda self, context: least)
    monkeypatch.setattr(SpeculationControl, "draft_next", lambda self, context: True)
    tree = TreeShape(width=3, depth=4, nodes=11)
    for drafter in (AdversaryDrafter(), TrainedDrafter(predictor(), tree)):
        out = ShapeDecoder(model, drafter).generate(**batch, **options, return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain)
    sizes = {one.nodes for one in out.stats.steps}
    assert {0.0: sizes == {12}, 0.08: len(sizes) > 2 and not any(size % 2 for size in sizes), 2.0: sizes == {2}}[least]


@pytest.mark.parametrize("make", [LookaheadDrafter, lambda: HybridDrafter([SuffixDrafter(), LookaheadDrafter()])])
def test_lookaheads_window_is_verified_however_unlikely_it_is(tiny_model, monkeypatch, make):
    monkeypatch.setattr(StepCosts, "least_chance", lambda self, context: 0.1)
    monkeypatch.setattr(SpeculationControl, "draft_next", lambda self, context: True)
    monkeypatch.setattr(DraftValue, "pays", lambda *_: True)  # whatever it takes on a machine in use
    decoder = ShapeDecoder(tiny_model("llama"), make())
    out = decoder.generate(**prompts([9]), max_new_tokens=20, eos_token_id=[], return_dict_in_generate=True)
    assert min(step.nodes for step in out.stats.steps[2:]) > 6  # three columns of two levels


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "shape": lambda: TrainedDrafter(predictor()),
    "model by cost": lambda: ModelDrafter(Target(weaker_model()), ByCost()),
    "model, adaptive": lambda: ModelDrafter(Target(weaker_model()), Adaptive()),
    "hybrid": lambda: HybridDrafter([SuffixDrafter(shortest=1), TrainedDrafter(predictor())]),
}
CALLS: dict[str, dict] = {
    "greedy with a seed": {"seed": 3},
    "asked for": {"reproducible": True},
    "sampled": {"seed": 3, "do_sample": True, "temperature": 0.7},
    "rejection": {"seed": 3, "do_sample": True, "acceptance": "rejection", "reproducible": False},
    "fixed steps": {"seed": 3, "graphs": True},
}


def forwards(decoder: ShapeDecoder, monkeypatch, ticks: int, **options) -> list[tuple[int, list[int]]]:
    """Sizes of all forwards behind the prefill, with a clock that says what it likes."""
    times = Random(ticks)

    def now() -> float:
        now.seconds += times.choice([1e-4, 1.0])
        return now.seconds

    now.seconds = 0.0
    for module in (clock, loop, eager, hybrid, model):
        monkeypatch.setattr(module, "perf_counter", now)
    stats = decoder.generate(
        **prompts([5]), max_new_tokens=40, eos_token_id=[], return_dict_in_generate=True, **options
    ).stats
    return [(step.nodes, step.sequences) for step in stats.steps]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_seed_leaves_nothing_to_the_clock_or_to_earlier_calls(tiny_model, monkeypatch, name, call):
    options = dict(CALLS[call])
    if call == "fixed steps" and name != "shape":
        pytest.skip("other drafters have no fixed steps")
    decoder = ShapeDecoder(tiny_model("llama"), DRAFTERS[name](), graphs=options.pop("graphs", False))
    first = forwards(decoder, monkeypatch, 0, **options)
    assert max(nodes for nodes, _ in first) > 1
    forwards(decoder, monkeypatch, 1, reproducible=False)  # what it learns is its own
    assert forwards(decoder, monkeypatch, 2, **options) == first


@pytest.mark.parametrize("name", ["shape", "model by cost", "hybrid"])
def test_without_a_seed_the_clock_decides(tiny_model, monkeypatch, name):
    """The test above could not fail if times were not looked at."""
    found = [forwards(ShapeDecoder(tiny_model("llama"), DRAFTERS[name]()), monkeypatch, ticks) for ticks in range(4)]
    assert any(one != found[0] for one in found)
