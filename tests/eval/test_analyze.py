"""What the analysis measures, on a tiny target whose predictors are not trained: figures, not findings."""

import json
from copy import copy
from pathlib import Path

import pytest
import torch
from helpers import write_rows

from eval.analysis.limits import acceptances, simulate
from eval.analysis.losses import loss_family
from eval.analysis.optimal_acceptance import optimal_acceptance
from eval.analysis.plans import ITERATIONS, read_outs, transitions
from eval.analysis.report import report
from eval.analysis.states import distances, similarity
from eval.analysis.texts import (
    answer_positions,
    common_support,
    drawn_positions,
    predictions,
    successive_states,
    texts_of,
)
from eval.analyze import AnalyzeOptions, _texts, run
from shape.data.encoding import Encoded
from shape.errors import ConfigError, DataError
from shape.features.store import Stored
from shape.generation.decoder import ShapeDecoder
from shape.networks.config import ShapeConfig
from shape.networks.shape import ShapePredictor
from shape.target.model import Target


def mixed(target, **options) -> ShapePredictor:
    """An untrained predictor whose weights are all different from 0, so that every part has an effect."""
    config = ShapeConfig(
        hidden_size=32, intermediate_size=48, num_steps=3, refinement_dim=8, target_identity=target.identity.to_dict(),
        **{"refinement": "sinkhorn", "refinement_iterations": 2, **options},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        predictor = ShapePredictor(config).eval()
        for parameter in predictor.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return predictor


@pytest.fixture(scope="module")
def texts(tiny_target) -> list[Stored]:
    generator = torch.Generator().manual_seed(0)
    encoded = []
    for number, length in enumerate((30, 12, 25)):
        ids = torch.randint(3, 200, (length,), generator=generator)
        encoded.append(Encoded(str(number), ids, torch.arange(length) >= 5))
    return texts_of(tiny_target, encoded)


@pytest.fixture(scope="module")
def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    logits = 2 * torch.randn(2, 20, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return logits[0].softmax(-1), (logits[0] + logits[1]).softmax(-1)


def test_states_of_an_answer_are_those_that_predict_it():
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1]).bool()
    text = Stored(torch.arange(9), mask, torch.zeros(9, 2))
    assert answer_positions(text, 1).tolist() == [1, 2, 3, 6, 7]
    assert answer_positions(text, 3).tolist() == [1]
    assert answer_positions(text, 20).tolist() == []


def test_positions_are_drawn_from_all_texts():
    parts = drawn_positions([3, 0, 50], 10, seed=0)
    assert [len(part) for part in parts][1] == 0 and sum(len(part) for part in parts) == 10
    assert all((part < count).all() for part, count in zip(parts, (3, 0, 50), strict=True))
    assert [part.tolist() for part in drawn_positions([2, 3], 100, seed=1)] == [[0, 1], [0, 1, 2]]


def test_cosines():
    """States that turn by 60 degrees at each step: 0.5, -0.5, -1."""
    angle = torch.arange(9) * torch.pi / 3
    hidden = torch.stack([angle.cos(), angle.sin()], -1)
    text = Stored(torch.arange(9), torch.ones(9).bool(), hidden)
    rows, cosines = similarity([text, text], [1, 2, 3], seed=0)
    assert [row.mean for row in rows[:3]] == pytest.approx([0.5, -0.5, -1.0], abs=1e-6)
    assert [row.lag for row in rows] == [1, 2, 3, None] and [row.pairs for row in rows[:3]] == [14, 12, 10]
    assert rows[1].share == 0 and list(rows[0].percentiles) == ["5", "25", "50", "75", "95"]
    assert set(cosines) == {"lag 1", "lag 2", "lag 3", "unrelated"}
    with pytest.raises(DataError, match="too few or too short"):
        similarity([text], [1], seed=0)  # nothing is unrelated


def test_the_least_bound_holds_and_touches(tiny_target, texts):
    states = successive_states(texts, 2, 12, seed=0)
    rows, points = distances(tiny_target, states, [1, 2], 16, lambda: None)
    assert [(row.ground, row.lag) for row in rows[:3]] == [("distance", None), ("distance", 1), ("distance", 2)]
    for row in rows:
        assert 0 < row.tightness <= 1 and 0 <= row.empty <= 1 and 0 < row.kept <= 1 and abs(row.correlation) <= 1
    for row in (rows[0], rows[3]):
        gap = row.least * points["root"] - points[row.ground]
        assert gap.min().item() == pytest.approx(0, abs=1e-6)
        assert row.pairs == len(gap) == 24
    # Jensen: the squared cost is no less than the square of the distance.
    assert (points["squared distance"] >= points["distance"].square() - 1e-9).all()
    with pytest.raises(DataError, match="60 tokens in a row"):
        successive_states(texts, 59, 12, seed=0)


def test_the_plan_drops_out_when_the_column_update_is_last(tiny_target, texts):
    own_row = mixed(tiny_target)
    found = predictions(own_row, tiny_target, texts, 20, seed=0)
    own, many, column, none = read_outs(own_row, tiny_target, found)
    assert own.changed == 0 and own.agreement_gain[0] == 0 and own.acceptance_gain[0] == 0
    # Two iterations leave a residue; a converged plan has none, and then its read-out is the softmax bottleneck.
    assert column.changed > 1e-4 and many.changed == pytest.approx(column.changed, rel=1e-3)
    assert none.changed > column.changed
    own_column = mixed(tiny_target, refinement_last_update="column")
    again = read_outs(own_column, tiny_target, predictions(own_column, tiny_target, texts, 20, seed=0))
    assert again[2].changed == 0 and again[1].changed < 1e-4


def test_the_transition_converges(tiny_target, texts):
    states = successive_states(texts, 1, 12, seed=0)
    rows, unmoved, kept = transitions(tiny_target, states, 1, 16, epsilon=0.3)
    assert 0 < kept <= 1 and unmoved > 0.05 and len(rows) == 2 * len(ITERATIONS)
    for order in ("row", "column"):
        errors = [row.mean for row in rows if row.last_update == order]
        assert errors[-1] < 1e-3 < errors[0] < 1


def test_rules_stay_below_their_optimum(pairs):
    p, q = pairs
    rows = acceptances(p, q, 400, seed=0, progress=lambda: None)
    assert [row.drafts for row in rows] == [1, 2, 4]
    one = rows[0]
    assert one.independent == one.without_replacement == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()))
    for row in rows:
        # Eight standard errors at most: a false alarm is out of the question.
        assert max(row.match, row.rejection) <= row.without_replacement + 8 * row.error
        assert row.independent <= row.without_replacement + 1e-9  # a repeated draft is a lost one
    assert one.rejection == pytest.approx(one.without_replacement, abs=8 * one.error)  # of one draft it is the optimum


def test_match_with_one_draft_is_the_chance_of_equal_choices(pairs):
    """argmax(log p + g) = argmax(log q + g) = i: of exponential clocks, 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    p, q = pairs
    exact = 1 / torch.maximum(p[:, None] / p[:, :, None], q[:, None] / q[:, :, None]).sum(-1)
    matched, _ = simulate(p, q, 2000, seed=1)
    assert float(matched[:, 0].mean()) == pytest.approx(float(exact.sum(-1).mean()), abs=8 * 0.5 / 40000**0.5)


def test_common_support_keeps_what_weighs_most():
    p, q = torch.tensor([[0.7, 0.2, 0.1, 0.0]]), torch.tensor([[0.0, 0.2, 0.1, 0.7]])
    found = common_support(p, q, 3)
    assert found[2].sort().values.tolist() == [[0, 1, 3]] and found[3] == pytest.approx(0.9)
    torch.testing.assert_close(found[0].sum(-1), torch.ones(1))
    assert (optimal_acceptance(found[0], found[1], 1) > 0.2).all()


def test_gradients_of_the_loss_family():
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(30, 12, generator=generator)
    predicted = target + 0.5 * torch.randn(30, 12, generator=generator)
    embeddings = torch.randn(12, 6, generator=generator)
    rows, apart = loss_family(predicted, target, embeddings, 12)
    found = {row.name: row for row in rows}
    for row in rows:
        assert row.alignment[row.name] == pytest.approx(1, abs=1e-4)
        assert all(abs(value) <= 1 + 1e-6 for value in row.alignment.values())
    assert found["total variation"].correlation == pytest.approx(-1)
    narrow, wide = found["transport, s = 0.1"], found["transport, s = 4"]
    assert narrow.alignment["total variation"] > wide.alignment["total variation"]
    assert narrow.mean > wide.mean and apart["5"] < apart["50"] == pytest.approx(1, abs=0.3)


OPTIONS = {"limit": 2, "positions": 8, "draws": 16, "support": 12, "loss_support": 6, "max_new_tokens": 10}


def folder(predictor: ShapePredictor, path: Path) -> str:
    predictor.save_pretrained(path)
    return str(path)


def test_the_command_writes_what_it_measured(tiny_target, tiny_target_folder, tmp_path):
    answers = tmp_path / "answers.jsonl"
    rows = [{"prompt": f"Hello {number}", "completion": "Good day to you."} for number in range(3)]
    write_rows(answers, *rows)
    options = AnalyzeOptions(
        output=str(tmp_path / "out"), target=str(tiny_target_folder), data=str(answers), label="Tiny",
        predictor=folder(mixed(tiny_target, refinement="none"), tmp_path / "autoregressive"),
        refined=folder(mixed(tiny_target), tmp_path / "refined"), **OPTIONS,
    )  # fmt: skip
    record = run(options)
    assert json.loads((tmp_path / "out" / "analysis.json").read_text()) == json.loads(json.dumps(record))
    text = (tmp_path / "out" / "analysis.md").read_text()
    assert text.startswith("# Tiny\n") and text.count("**What it means.**") == 6 and "nan" not in text
    assert (tmp_path / "out" / "analysis.png").stat().st_size > 10_000
    assert record["environment"]["versions"]["POT"] and record["texts"] == 2
    record["losses"]["apart"]["50"] = 1e9  # where tokens lie further apart than any scale, the widest one is told of
    widest = [row["name"] for row in record["losses"]["rows"] if row["name"].startswith("transport")][-1]
    assert f"and one along {widest} " in report(record)


def test_prompts_are_answered_first(tiny_target, tiny_target_folder, tmp_path):
    prompts = write_rows(tmp_path / "prompts.jsonl", *({"prompt": text} for text in ("Hello", "Good day")))
    options = AnalyzeOptions(
        output=str(tmp_path / "out"), target=str(tiny_target_folder), prompts=str(prompts),
        predictor=folder(mixed(tiny_target, refinement="none"), tmp_path / "autoregressive"), **OPTIONS,
    )  # fmt: skip
    assert run(options)["refinement"] is None
    assert "Not measured" in (tmp_path / "out" / "analysis.md").read_text()
    with pytest.raises(ConfigError, match="not those of target"):
        run(AnalyzeOptions(predictor=options.predictor, target=options.target))
    with pytest.raises(ConfigError, match='has no refinement "sinkhorn"'):
        run(AnalyzeOptions(**{**vars(options), "refined": options.predictor}))


def test_a_target_without_a_chat_template_answers_bare_text(tiny_target, tmp_path):
    base = Target(tiny_target.model, copy(tiny_target.tokenizer), name="base")
    base.tokenizer.chat_template = None
    prompts = write_rows(tmp_path / "prompts.jsonl", {"prompt": "Hello"})
    (text,) = _texts(AnalyzeOptions(prompts=str(prompts), max_new_tokens=4), ShapeDecoder(base))
    assert text.input_ids[:5].tolist() == base.encode("Hello")[0].tolist() and text.loss_mask.sum() <= 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lags": [0]}, "lags are"),
        ({"support": 2}, "give at least 4"),
        ({"positions": 0}, "positions is 0"),
        ({"epsilon": 0.0}, "epsilon is 0"),
        ({"data": "a", "prompts": "b"}, "both data and prompts"),
    ],
)
def test_wrong_options_get_one_sentence(changes, words):
    with pytest.raises(ConfigError, match=words):
        run(AnalyzeOptions(**changes))
