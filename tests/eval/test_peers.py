"""The comparison with other engines: what its tables say of known numbers, and the command with our own rows."""

import json
from dataclasses import replace

import pytest
import torch

from eval.llamas import Widths
from eval.peers import __main__ as program
from eval.peers import sizes
from eval.peers.__main__ import PeersOptions, run, systems
from eval.peers.scripts import ours
from eval.peers.systems import CHARGED, LENGTHS, ORACLE, PEERS, PLAIN, PREDICTOR, System, draft_depth
from eval.peers.table import best, checks_table, drafted_table, goals, lines_of, plain_table, report, whole
from shape.errors import ConfigError

TINY = sizes.Size(Widths(64, 96, 4, 2, 2, 512, tie_word_embeddings=True), prompts=2, new_tokens=12, length=10)


def answer(rate: float, tokens: int = 11, forwards: int | None = None) -> dict:
    """At so many tokens per second behind the first, which takes half a second."""
    found = {"tokens": list(range(tokens)), "prefill_seconds": 0.5, "decode_seconds": (tokens - 1) / rate}
    return found if forwards is None else found | {"forwards": forwards}


def record(peer: str, precision: str, size: str, turn: int = 0, **rates: float | tuple[float, float]) -> dict:
    """Two prompts, at one rate or at one each."""
    both = {name.replace("_", " "): rate if isinstance(rate, tuple) else (rate, rate) for name, rate in rates.items()}
    answers = {method: [answer(one) for one in pair] for method, pair in both.items()}
    return {"size": size, "peer": peer, "precision": precision, "round": turn, "versions": {}, "answers": answers}


@pytest.fixture
def records() -> list[dict]:
    large = "1.2B"
    return [
        record("ours", "bfloat16", large, plain=19.0, oracle_3=50.0, charged_3=40.0),
        record("ours", "bfloat16", large, 1, plain=19.0, oracle_3=50.0, charged_3=40.0),
        record("openvino-genai", "bfloat16", large, plain=20.0),
        record("llama.cpp", "bfloat16", large, plain=10.0),
        record("llama.cpp", "int8", large, plain=25.0),
        record("ours", "float32", "shipped", plain=300.0, predictor=900.0),
        record("transformers", "float32", "shipped", plain=200.0),
    ]


def test_ratios_are_to_the_best_peer(records):
    lines = lines_of(records)
    assert best(lines["1.2B"], "bfloat16").system == System("openvino-genai", "bfloat16")
    assert best(lines["1.2B"]).system == System("llama.cpp", "int8")
    found = {(goal.size, goal.text.split(",")[0], goal.ours): goal for goal in goals(lines)}
    plain = found["1.2B", "plain", "ours, bfloat16"]
    assert plain.found.value == pytest.approx(0.95) and "met, 1.06" in plain.cells[-1]
    missing = found["1.2B", "plain", "–"]  # nothing of ours in int8
    assert missing.found.value is None and missing.cells[-1] == "not measured"
    drafted = [goal for goal in goals(lines) if goal.text.startswith("drafted") and goal.size == "1.2B"]
    assert [goal.found.value for goal in drafted] == [pytest.approx(2.0), pytest.approx(1.6)]
    assert ["not" in goal.cells[-1] for goal in drafted] == [False, True]
    (shipped,) = (goal for goal in goals(lines) if goal.size == "shipped")
    assert shipped.found.value == pytest.approx(4.5)


def test_cells_hold_rates_and_ratios(records):
    lines = lines_of(records)
    header, rows = plain_table(lines, whole)
    cells = {tuple(row[:2]): row[2:] for row in rows}
    assert header == ["precision", "system", "shipped", "1.2B"]
    assert cells["int8", "llama.cpp, Q8_0"] == ["–", "12.2"]  # 11 tokens in 0.5 + 10 / 25 seconds
    _, rows = drafted_table(lines)
    drafted = {tuple(row[:2]): row[2:] for row in rows}
    simulated = drafted["ours, bfloat16", "simulated, acceptance length 3, at no cost"]
    assert simulated[0] == "–" and simulated[1].startswith("50.0") and simulated[1].endswith(", 2.00x")
    real = drafted["ours, float32", "shipped predictor"]
    assert real[0].startswith("900") and real[0].endswith(", 4.50x, acceptance length 1.00") and real[1] == "–"
    _, rows = checks_table(lines)
    assert ["shipped", "ours, float32", "plain", "1.00", "2 / 2", "transformers, float32"] in rows
    page = "\n".join(report(lines, ["A note."]))
    without = report({"1.2B": [line for line in lines["1.2B"] if line.method == PLAIN]}, [])
    assert "## Drafted decoding" in page and "## Drafted decoding" not in without
    assert "## Goals" in page and "A note." in page and ", 0.95x" in page


def test_intervals_are_over_prompts_whose_rounds_stay_together():
    """However many rounds, two prompts are two independent observations."""
    few, many = (
        lines_of([record("ours", "bfloat16", "1.2B", turn, plain=(10.0, 20.0)) for turn in range(rounds)])["1.2B"][0]
        for rounds in (1, 20)
    )
    assert len(many.answers) == 40 and many.rate() == few.rate()
    assert (few.rate().low, few.rate().value, few.rate().high) == pytest.approx((10, 40 / 3, 20))
    assert many.ratio_to(few).value == pytest.approx(1) and len(many.by_prompt(many.answers)) == 2


def test_the_command_runs_with_our_own_rows(tmp_path, monkeypatch):
    monkeypatch.setitem(sizes.SIZES, "tiny", TINY)
    monkeypatch.setitem(PEERS, "ours", replace(PEERS["ours"], precisions=("bfloat16",)))
    asked = {"output": tmp_path / "out", "work": tmp_path / "work", "sizes": ["tiny"], "peers": ["ours"], "limit": 1}
    run(PeersOptions(rounds=1, **asked))
    page = (tmp_path / "out" / "peers.md").read_text()
    assert "brackets over fewer than six prompts are about the range of these, and no 95 % intervals" in page
    assert "| bfloat16 | ours, bfloat16 |" in page and "simulated, acceptance length 3" in page
    (turn,) = json.loads((tmp_path / "out" / "peers.json").read_text())["turns"]
    assert [one["tokens"] for answers in turn["answers"].values() for one in answers] == [TINY.new_tokens] * 9
    monkeypatch.setattr(program, "Program", lambda *_: pytest.fail("measured again"))
    run(PeersOptions(rounds=1, **asked))
    again = (tmp_path / "out" / "peers.md").read_text()
    assert again.splitlines()[:-1] == page.splitlines()[:-1]  # the last one has the time


@pytest.mark.parametrize("memory", [10.0, 2.5])
def test_systems_answer_a_prompt_before_the_next(tmp_path, monkeypatch, memory):
    """All that fit into memory; the one with which there are too many is loaded again."""
    asked, loads = [], []

    class Loaded:
        versions, memory = {}, 1.0

        def __init__(self, system, *_):
            self.name = system.name
            loads.append(self.name)

        def ask(self, request):
            if request["new_tokens"] == 8:  # does not warm up
                asked.append((self.name, tuple(request["prompt"])))
            return {"tokens": [1], "prefill_seconds": 1.0, "decode_seconds": 1.0}

        def close(self):
            pass

    monkeypatch.setitem(sizes.SIZES, "tiny", TINY)
    monkeypatch.setattr(program, "Program", Loaded)
    options = PeersOptions(work=tmp_path, rounds=2, new_tokens=8, memory=memory)
    found = list(program.turns("tiny", replace(options, peers=["llama.cpp"]), 1, set()))
    names, texts = [one.name for one in systems("tiny", ["llama.cpp"])], [tuple(one) for one in sizes.prompts("tiny")]
    assert len(names) == 3 and len(texts) > 1
    assert sorted((one["round"], one["precision"]) for one in found) == [
        (turn, name) for turn in range(2) for name in ("bfloat16", "int4", "int8")
    ]
    first = asked[: len(names) * len(texts)]
    assert sorted(first) == sorted((name, text) for name in names for text in texts)
    if memory == 10:
        assert [text for _, text in first] == [text for text in texts for _ in names] and loads == names
    else:
        assert len(loads) > len(names)


def test_simulated_acceptance_is_what_it_says(tmp_path, monkeypatch):
    monkeypatch.setitem(sizes.SIZES, "tiny", TINY)
    folder, threads = sizes.saved("tiny", tmp_path), torch.get_num_threads()
    reply, versions = ours.serve(str(folder), "float32", threads)
    (prompt, other), new = sizes.prompts("tiny"), 1 + 60  # the prefill's own, and a multiple of every length
    plain = reply({"prompt": prompt, "method": PLAIN, "new_tokens": new})
    assert plain["tokens"] == [prompt[-1]] * new and plain["forwards"] == new - 1 and "torch" in versions
    for kind in (ORACLE, CHARGED):
        for length in LENGTHS:
            found = reply({"prompt": prompt, "method": f"{kind} {length}", "new_tokens": new})
            assert found["tokens"] == plain["tokens"]
            assert found["forwards"] == 60 // length and draft_depth(length) > length - 1
    unknown = reply({"prompt": other, "method": f"{ORACLE} 3", "new_tokens": new})  # answered plainly first
    assert unknown["forwards"] == 20


def test_systems_and_options_are_checked(tmp_path):
    assert System("llama.cpp", "float32") in systems("shipped", ["llama.cpp"])
    assert System("llama.cpp", "float32") not in systems("135M", ["llama.cpp"])
    assert System("ours", "bfloat16").methods(True) == [PLAIN, PREDICTOR]
    assert all(System(peer, "bfloat16").methods(False) == [PLAIN] for peer in PEERS if not PEERS[peer].is_ours)
    for wrong in ({"sizes": ["8B"]}, {"peers": []}, {"rounds": 0}, {"new_tokens": 1}, {"limit": 0}):
        with pytest.raises(ConfigError, match=r"give some of|at least"):
            run(PeersOptions(output=tmp_path, work=tmp_path, **wrong))
    assert sizes.end_tokens(sizes.saved("shipped", tmp_path)) == [2]
