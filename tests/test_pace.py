import pytest
import torch
from helpers import predictor, prompts

from shape.decoder import ShapeDecoder
from shape.drafters import AdversaryDrafter, OracleDrafter, TrainedDrafter
from shape.pace import Experience, Pace


def run(pace: Pace, tokens, steps: int, drafted_seconds: float = 1.6, plain_seconds: float = 1.0) -> list[bool]:
    """Drafted or not, step by step; `tokens(i)` is what a drafted step i would settle."""
    record = []
    for i in range(steps):
        drafted = pace.draft_next()
        pace.observe(drafted, tokens(i) if drafted else 1.0, drafted_seconds if drafted else plain_seconds)
        record.append(drafted)
    return record


def test_good_drafts_go_on_and_plain_steps_are_timed_once():
    times = Experience()
    first = run(Pace(times), lambda _: 3.0, 200)
    assert first.count(False) == 3 and all(first[:16]) and not any(first[16:19])
    assert times.break_even == pytest.approx(1.6)
    assert all(run(Pace(times), lambda _: 3.0, 200))  # another call knows


def test_bad_drafts_are_looked_at_ever_less_often():
    pace = Pace(Experience(), least=1.5)
    record = run(pace, lambda _: 1.1, 2000)
    assert record[:16] == [True] * 16 and record[16:32] == [False] * 16 and record[32:36] == [True] * 4
    assert record.count(True) < 50 and pace.pauses >= 6
    assert True in record[-800:]  # it never stops looking


def test_another_call_begins_with_what_was_found():
    past = Experience()
    run(Pace(past, least=1.5), lambda _: 1.1, 60)
    assert run(Pace(past, least=1.5), lambda _: 1.1, 90)[:5] == [True] * 4 + [False]
    assert all(run(Pace(past, least=1.5), lambda _: 3.0, 90))
    assert run(Pace(past, least=1.5), lambda _: 1.1, 90)[:17] == [True] * 16 + [False]


def test_it_returns_when_the_text_becomes_easy():
    record = run(Pace(Experience(), least=1.5), lambda i: 1.0 if i < 60 else 4.0, 300)
    assert not all(record[:60]) and all(record[200:])


def test_the_break_even_is_a_ratio_of_medians():
    times = Experience()
    assert times.break_even is None
    for seconds in (2.0, 2.0, 90.0, 2.0):
        times.add(True, seconds)
    assert times.break_even is None
    for seconds in (1.0, 50.0, 1.0):
        times.add(False, seconds)
    assert times.break_even == 2.0


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
        assert out.stats.plain_steps >= 16 and out.stats.pauses >= 1
        assert ShapeDecoder(model, drafter, fall_back=False).generate(**batch, **options).stats.plain_steps == 0


def test_good_drafts_are_never_held_back_by_a_number(tiny_model):
    model, batch = tiny_model("llama"), prompts([5])
    options = {"max_new_tokens": 90, "eos_token_id": []}
    plain = ShapeDecoder(model).generate(**batch, **options)
    decoder = ShapeDecoder(model, OracleDrafter(plain.tolist()), fall_back=2.5)
    out = decoder.generate(**batch, **options, return_dict_in_generate=True)
    assert out.stats.plain_steps == 0 == out.stats.pauses and out.stats.acceptance_length > 4.5


def test_a_drafter_with_nothing_to_say_is_not_judged_by_it():
    """Prompt lookup proposes seldom, and at no cost where it does not."""
    pace = Pace(Experience(), least=1.5)
    for step in range(200):
        assert pace.draft_next()
        proposed = step % 10 == 0
        pace.observe(proposed, 4.0 if proposed else 1.0, 1.0)
    assert pace.pauses == 0


def test_rejection_does_not_depend_on_the_machines_times(tiny_model):
    out = ShapeDecoder(tiny_model("llama"), AdversaryDrafter()).generate(
        **prompts([5]), max_new_tokens=60, do_sample=True, acceptance="rejection", return_dict_in_generate=True
    )
    assert out.stats.plain_steps == 0
