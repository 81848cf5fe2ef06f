"""Engine efficiency: what is counted, and that the command writes it down. Speed itself is no test's business."""

import json
import shutil
from dataclasses import astuple, replace
from time import sleep

import pytest
import torch
from helpers import predictor, write_rows

from shape.drafters import NgramDrafter, TrainedDrafter
from shape.errors import ConfigError, DataError, ShapeError
from shape.evaluation.efficiency import Case, bare_seconds, figures, measure, run, screens
from shape.evaluation.markdown import markdown
from shape.evaluation.options import EfficiencyOptions
from shape.evaluation.report.sources import find
from shape.evaluation.runner import by_decoder
from shape.generation.decoder import ShapeDecoder

CONTEXTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16], [17, 18, 19]]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_method_answers_the_same_prompts(tiny_target, batch, temperature):
    groups = []
    cases = measure(
        tiny_target,
        {"ngram": NgramDrafter()},
        CONTEXTS,
        batch=batch,
        temperature=temperature,
        max_new_tokens=12,
        progress=lambda: groups.append(1),
    )
    found = {case.method: case for case in cases}
    assert list(found) == ["transformers", "autoregressive", "oracle", "ngram"] and len(groups) == 4 // batch
    ours = [found[name] for name in ("autoregressive", "oracle", "ngram")]
    assert len({case.tokens for case in ours}) == 1  # the same texts
    if temperature == 0:
        assert found["transformers"].tokens == ours[0].tokens
    assert (
        found["autoregressive"].tokens == found["autoregressive"].forwards
        and found["oracle"].tokens > found["oracle"].forwards
    )
    for case in ours:
        assert case.efficiency > 0 and len(case.gaps) == case.steps
        assert case.gap(0.5) <= case.gap(0.95)
    assert found["transformers"].efficiency is None
    (screen,) = screens(cases)
    assert len(screen.columns) == 1 + len(cases)
    text = markdown(*figures(cases))
    assert text.count("\n") == 1 + len(cases) and "| 1.00x |" in text


@pytest.mark.parametrize("batch", [1, 2])
def test_reading_the_prompt_is_decoding_for_a_drafter(tiny_target, batch):
    """The first tokens are out, and the next ones wait: on the same side of a speed-up at every batch size."""

    class SlowStart(NgramDrafter):
        def start(self, committed, hidden):
            sleep(0.3)
            super().start(committed, hidden)

    options = {"max_new_tokens": 4, "eos_token_id": []}
    run = by_decoder(ShapeDecoder(tiny_target, SlowStart(), fall_back=False), **options)(CONTEXTS[:batch], [0, 1])
    stats = run.stats
    assert min(run.decode_seconds, stats.decode_seconds, stats.start_seconds) >= 0.3
    assert stats.start_seconds <= stats.decode_seconds <= run.decode_seconds + 0.01
    assert run.prefill_seconds < 0.3 and stats.prefill_seconds < 0.2
    cases = measure(
        tiny_target, {"ngram": SlowStart()}, CONTEXTS[:batch], batch=batch, temperature=0.0, max_new_tokens=4
    )
    assert cases[-1].seconds >= 0.3


def test_bare_forwards_are_those_of_the_steps(tiny_model):
    """As many forwards as steps, over as many tokens, and as many passes of the drafter's network."""
    decoder = ShapeDecoder(tiny_model("llama"), TrainedDrafter(predictor()), fall_back=False)
    ids = torch.tensor([[5, 6, 7, 8]])
    out = decoder.generate(ids, max_new_tokens=12, eos_token_id=[], return_dict_in_generate=True)
    seen, passes = [], []
    hidden, run_forwards = decoder.target.hidden, decoder.drafter.run_forwards
    decoder.target.hidden = lambda tokens, **options: seen.append(tokens.shape[1]) or hidden(tokens, **options)
    decoder.drafter.run_forwards = lambda rows, count: passes.append(count) or run_forwards(rows, count)
    forward, draft = bare_seconds(decoder, out.stats.steps)
    assert seen == [step.nodes for step in out.stats.steps] and passes == [step.passes for step in out.stats.steps]
    assert forward > 0 and draft > 0


def test_repetitions_are_no_further_prompts(tiny_target):
    """Answers of the same prompts again make no interval narrower, and every group is answered so often."""
    once, often = (Case("float32", 0.0, 1, "autoregressive", repeats=repeats) for repeats in (1, 10))
    for case in (once, often):
        case.shares = [0.8, 0.9, 1.0, 0.7, 0.95] * case.repeats
        for second in (1, 2, 3, 4, 5) * case.repeats:
            case.add(10, 0.1 * second)
    other = [Case("float32", 0.0, 1, "other", answers=[(10, 0.3)] * 5 * repeats) for repeats in (1, 10)]
    few, many = once.speed_up(other[0]), often.speed_up(other[1])
    assert astuple(many) == pytest.approx(astuple(few)) and few.low < 0.9
    assert once.efficiency_interval == often.efficiency_interval
    options = {"batch": 2, "temperature": 0.0, "max_new_tokens": 6}
    cases = measure(tiny_target, {}, CONTEXTS[:3], repeats=2, **options)
    assert [len(case.answers) for case in cases] == [2, 2, 2] and {case.repeats for case in cases} == {2}


def test_intervals_are_over_prompts():
    shares = [0.8, 0.9, 1.0, 0.7, 0.95] * 8
    plain = Case("float32", 0.0, 1, "autoregressive", shares=shares)
    other = Case("float32", 0.0, 1, "other", tokens=30, seconds=2.0)
    for second in (1, 2, 3, 4):
        plain.add(10, 0.1 * second)
    assert plain.tokens == 40 and plain.seconds == pytest.approx(1.0)
    found = plain.efficiency_interval
    assert found.value == plain.efficiency == 0.9 and 0.8 <= found.low < 0.9 < found.high <= 0.95
    assert plain.speed_up(plain).value == pytest.approx(1) and plain.speed_up(plain).low is None
    assert plain.speed_up(other).value == pytest.approx(40 / 15) and plain.speed_up(other).low is None
    other = Case("float32", 0.0, 1, "other")
    for second in (4, 3, 2, 2):
        other.add(10, 0.1 * second)
    faster = plain.speed_up(other)
    assert faster.value == pytest.approx(1.1) and faster.low < faster.value < faster.high
    assert Case("float32", 0.0, 1, "transformers").efficiency_interval.value is None


def test_figures():
    case = Case(
        "float32",
        0.0,
        1,
        "autoregressive",
        steps=4,
        forwards=4,
        tokens=8,
        seconds=0.04,
        shares=[0.9, 0.75, 0.2],
        gaps=[0.01, 0.03],
    )
    assert case.efficiency == 0.75 and case.rate == pytest.approx(200)
    assert case.gap(0.5) == pytest.approx(20) and case.milliseconds(case.seconds) == pytest.approx(10)


def test_the_command_writes_what_it_measured(tiny_target_folder, tmp_path):
    prompts = write_rows(tmp_path / "prompts.jsonl", *({"prompt": text} for text in ("Hello", "Good day")))
    options = EfficiencyOptions(
        output=str(tmp_path / "out"), predictor="none", target=str(tiny_target_folder), prompts=str(prompts), limit=2,
        repeats=2, max_new_tokens=6, dtype=["float32"], temperature=[0.0], label="Tiny",
    )  # fmt: skip
    run(options)
    record = json.loads((tmp_path / "out" / "efficiency.json").read_text())
    assert [case["method"] for case in record["cases"]] == ["transformers", "autoregressive", "oracle", "ngram"]
    assert record["environment"]["versions"]["torch"] == torch.__version__
    assert all(len(case["answers"]) == 4 for case in record["cases"])
    written = (tmp_path / "out" / "efficiency.md").read_text()
    assert "### Tiny" in written and "each answered 2 times" in written
    again = replace(options, output=f"{tmp_path / 'out'}/", label="Small")
    assert len(run(again)) == 4  # of the same settings
    with pytest.raises(ConfigError, match=r"measurement with other settings \(temperature\)"):
        run(replace(options, temperature=[1.0]))
    with pytest.raises(ConfigError, match="cannot be filled with limit 2 prompts"):
        run(EfficiencyOptions(limit=2, batch_size=[4]))


def test_a_target_without_a_chat_template_answers_bare_text(tiny_target_folder, tmp_path):
    base = shutil.copytree(tiny_target_folder, tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    prompts = write_rows(tmp_path / "prompts.jsonl", {"prompt": "Hello"})
    options = EfficiencyOptions(
        output=str(tmp_path / "out"), predictor="none", target=str(base), prompts=str(prompts), max_new_tokens=4,
        dtype="float32", temperature=0.0, drafter=[],
    )  # fmt: skip
    assert [case.groups for case in run(options)] == [1, 1, 1]


def test_prompts_that_do_not_fit_are_left_out_and_those_measured_are_counted(tiny_target_folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    texts = ("Hello", "x" * 400, "Good day", "What is the time?")
    write_rows(prompts, *({"prompt": text} for text in texts))
    options = EfficiencyOptions(
        output=str(tmp_path / "out"), predictor="none", target=str(tiny_target_folder), prompts=str(prompts),
        max_new_tokens=4, dtype="float32", temperature=0.0, batch_size=3,
    )  # fmt: skip
    run(options)
    assert "3 prompts of prompts.jsonl, at most" in (tmp_path / "out" / "efficiency.md").read_text()
    (found,) = find(tmp_path / "out")
    assert "3 prompts of prompts.jsonl, at most 4 new tokens" in found.about
    assert "| 3 (one group) |" in (tmp_path / "out" / "efficiency.md").read_text()
    other = replace(options, output=str(tmp_path / "other"))
    run(replace(other, batch_size=[1, 2]))
    told = (tmp_path / "other" / "efficiency.md").read_text()
    assert "3 prompts (2 at batch 2) of prompts.jsonl, at most" in told
    assert "| 1 |" in told and "| 2 (one group) |" in told
    assert "brackets over fewer than six prompts or groups are about the range of these, and no 95 % intervals" in told
    with pytest.raises(DataError, match=r"with the 3 prompts of prompts\.jsonl that leave room for 4 new tokens"):
        run(replace(other, output=str(tmp_path / "third"), batch_size=4))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_new_tokens": 1}, "give at least 2"),
        ({"repeats": 0}, "repeats is 0; give at least 1"),
        ({"temperature": [0.0, -1.0]}, "temperature is -1.0; give 0 or more"),
        ({"dtype": []}, "dtype holds no value; give at least one"),
        ({"dtype": ["float32", "flaot16"]}, "dtype flaot16 is not a floating-point dtype"),
        ({"limit": 200, "batch_size": 200}, "cannot be filled with the 96 prompts of bench"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(options, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ShapeError, match=sentence):
        run(EfficiencyOptions(predictor="/nowhere", **options))


def test_an_output_that_is_no_folder_is_found_before_anything_is_loaded(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        run(EfficiencyOptions(predictor="/nowhere", output=str(tmp_path / "file")))


def test_answers_that_end_with_the_prefill_have_no_rate(tiny_target, monkeypatch):
    monkeypatch.setattr(tiny_target.model.generation_config, "eos_token_id", list(range(tiny_target.vocab_size)))
    monkeypatch.setattr(type(tiny_target), "eos_token_ids", tuple(range(tiny_target.vocab_size)))
    cases = measure(tiny_target, {"ngram": NgramDrafter()}, CONTEXTS, batch=1, temperature=0.0, max_new_tokens=6)
    assert [case.tokens for case in cases] == [0] * 4 and "nan" not in markdown(*figures(cases))
