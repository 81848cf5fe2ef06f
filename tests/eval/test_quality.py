"""Quality of what is written, with a tiny random target and untrained predictors: figures, not findings."""

import json
from math import exp

import pytest
import torch
from helpers import tiny_bert, write_rows

from eval.quality import QualityOptions, main, run
from eval.text_quality.results import Ahead, QualityResults
from shape.data.reading import load_prompts
from shape.drafters import TrainedDrafter
from shape.errors import ConfigError, DataError
from shape.evaluation.journal import Journal
from shape.features.store import Stored
from shape.generation.decoder import ShapeDecoder
from shape.networks.teacher_forcing import Reader, forced_drafts


@pytest.fixture
def options(tiny_predictor_folder, tiny_target_folder, tmp_path):
    """Two prompts, one of them of two turns and with a number for an answer."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        {"id": "one", "category": "talk", "turns": ["Hello", "And then?"], "reference": ["#### 7", None]},
        {"id": "two", "category": "talk", "prompt": "Good day"},
    ]
    write_rows(prompts, *rows)

    def make(**more) -> QualityOptions:
        values = {"output": str(tmp_path / "out"), "prompts": str(prompts), "max_new_tokens": 10, "dtype": "float32"}
        return QualityOptions(
            predictor=str(tiny_predictor_folder), target=str(tiny_target_folder), **{**values, **more}
        )

    return make


def test_every_mode_is_scored(options, tmp_path):
    bert = tiny_bert(tmp_path / "bert")
    modes = ["autoregressive", "shape", "trs-lossy", "unverified-lossy", "beam"]
    results = run(options(methods=modes, beams=2, encoder=str(bert), timed=True))
    assert list(results.summary) == [f"{mode}, T = 0" for mode in modes] + [f"{mode}, T = 1" for mode in modes[:-1]]
    for temperature in (0, 1):
        own, same = (results.summary[f"{mode}, T = {temperature}"] for mode in ("autoregressive", "shape"))
        assert own.answers == own.equal == same.equal == 3  # lossless
        assert same.perplexity == own.perplexity and same.bert_score == pytest.approx(1, abs=1e-5)
        assert own.speed_up.value == 1 and same.speed_up.value > 0
    alone, beam = (results.summary[f"{mode}, T = 0"] for mode in ("unverified-lossy", "beam"))
    own = results.summary["autoregressive, T = 0"]
    assert alone.equal < 3 and alone.bert_score < 0.999 and alone.sentence < 1
    assert alone.perplexity.value > own.perplexity.value  # untrained drafts are unlikely text
    assert beam.perplexity.value != own.perplexity.value
    assert own.sums == 1 and own.sums_right.value in (0.0, 1.0) and own.programs == 0
    folder = tmp_path / "out"
    assert QualityResults.from_json((folder / "quality.json").read_text()).to_markdown() == results.to_markdown()
    texts = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert len(texts) == 3 * 9 and {text["id"] for text in texts} == {"one", "two"}
    assert not (folder / "records.jsonl").exists()


def test_perplexity_is_the_models_own(options, tiny_target, tmp_path):
    results = run(options(methods=["autoregressive"], temperature=[0.0]))
    prompts = load_prompts(tmp_path / "prompts.jsonl")
    ids = tiny_target.encode(prompts[1].opening)
    text = ShapeDecoder(tiny_target).generate(ids, max_new_tokens=10)
    labels = text.clone()
    labels[:, : ids.shape[1]] = -100
    loss = float(tiny_target.model(text, labels=labels).loss)
    found = results.records[1].written["autoregressive, T = 0"]
    assert exp(found.nats / found.tokens) == pytest.approx(exp(loss), rel=1e-4)
    assert "absent, because no encoder was named" in results.to_markdown()
    assert "BERTScore P" not in results.to_markdown() and "tokens/s" not in results.to_markdown()


def test_accuracy_by_lookahead_is_that_of_real_drafts(options, tiny_target, tiny_predictor_folder):
    """What teacher forcing says of a parallel predictor that reads no token is what chains draft from each position."""
    results = run(options(methods=["autoregressive"], temperature=[0.0]))
    decoder = ShapeDecoder.from_pretrained(tiny_predictor_folder, target=tiny_target)
    assert isinstance(decoder.drafter, TrainedDrafter)
    reader = Reader(decoder.drafter.predictor, tiny_target)
    ids = tiny_target.encode("Good day")
    text = ShapeDecoder(tiny_target).generate(ids, max_new_tokens=10)
    states = tiny_target.features(text)[0].to(reader.predictor.dtype)
    forced = forced_drafts(reader, Stored(text[0], torch.arange(text.shape[1]) >= ids.shape[1], states))
    for root, drafts in zip(forced.roots.tolist(), forced.drafts, strict=True):
        window = states[max(root - reader.predictor.config.window, 0) : root]
        window = torch.cat([window.new_zeros(reader.predictor.config.window - len(window), 32), window])
        own = reader.predictor(window[None, None])[0, 0, :2]
        assert tiny_target.logits(own.float()).argmax(-1).tolist() == drafts.tolist()
    assert [line.positions > 0 for line in results.ahead] == [True, True]
    total = Ahead.total([record.ahead[0] for record in results.records])
    assert isinstance(total, Ahead) and results.ahead[0].accuracy.value == total.right / total.positions


def test_programs_are_run_only_where_that_is_allowed(options, tmp_path):
    prompts = tmp_path / "code.jsonl"
    row = {"id": "c", "prompt": "def one():\n", "test": "def check(f):\n    assert f() == 1\n", "entry_point": "one"}
    write_rows(prompts, row)
    with pytest.raises(ConfigError, match="untrusted code: allow that with --run_code true"):
        run(options(prompts=str(prompts)))
    results = run(options(prompts=str(prompts), run_code=True, methods=["autoregressive"], temperature=[0.0]))
    assert results.summary["autoregressive, T = 0"].programs == 1
    assert results.summary["autoregressive, T = 0"].programs_right.value == 0  # random bytes are no program
    assert "pass@1" in results.to_markdown() and "Programs ran with 5 s" in results.to_markdown()


def test_an_interrupted_measurement_goes_on(options, monkeypatch):
    only = {"methods": ["autoregressive", "unverified-lossy"], "temperature": [0.0]}
    whole = run(options(**only)).records
    append, calls = Journal.append, []

    def interrupted(self, record):
        append(self, record)
        calls.append(record)
        raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(options(**only))
    monkeypatch.setattr(Journal, "append", lambda self, record: (calls.append(record), append(self, record)))
    assert run(options(**only)).records == whole and len(calls) == 2


@pytest.mark.parametrize(
    "given, message",
    [
        ({"methods": ["autoregressive", "best"]}, "method 'best' is unknown"),
        ({"methods": ["shape"]}, "nothing to compare with; add autoregressive"),
        ({"methods": ["autoregressive", "beam"], "temperature": [1.0]}, "beam search is greedy"),
        ({"temperature": []}, "give one or more"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 256}, "no prompt leaves room"),
        ({"encoder": "nowhere"}, "encoder nowhere cannot be loaded"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, given, message):
    with pytest.raises((ConfigError, DataError), match=message):
        run(options(**given))


def test_the_command_says_it_in_one_sentence(refused):
    assert refused(main, "--limit", "0", alone=True) == "error: limit is 0; give at least 1"
