"""The trace tells what happened: it is checked against the tokens, and its odds against the target itself."""

import json

import pytest
import torch
from helpers import predictor, prompts
from rich.console import Console

from shape.decoder import ShapeDecoder
from shape.drafters import (
    AdversaryDrafter,
    HybridDrafter,
    NgramDrafter,
    OracleDrafter,
    SuffixDrafter,
    TrainedDrafter,
    TreeShape,
)
from shape.trace import Trace, view

DRAFTERS = {
    "plain": lambda: None,
    "tree": lambda: TrainedDrafter(predictor(), TreeShape(depth=4, width=3, nodes=7)),
    "ngram": NgramDrafter,
    "hybrid": lambda: HybridDrafter([SuffixDrafter(shortest=1), DRAFTERS["tree"]()]),
    "adversary": lambda: AdversaryDrafter(seed=1),
}


def tokens_of(trace: Trace) -> list[dict]:
    return [record for record in trace.records if record["type"] == "token"]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("rule", ["greedy", "match", "rejection", "traversal"])
def test_the_trace_agrees_with_the_output_and_the_target(tiny_model, name, rule):
    model, batch = tiny_model("llama"), prompts([5, 9, 2])
    options = {"max_new_tokens": 14, "seed": 3, "return_dict_in_generate": True, "repetition_penalty": 1.2}
    if rule != "greedy":
        options |= {"do_sample": True, "temperature": 0.8, "top_k": 0, "acceptance": rule}
    if rule in ("rejection", "traversal") and name == "tree":
        drafter = TrainedDrafter(predictor(), TreeShape(depth=3, width=2))
    else:
        drafter = DRAFTERS[name]()
    decoder = ShapeDecoder(model, drafter, fall_back=False)
    out = decoder.generate(**batch, **options, trace=True)
    assert torch.equal(out.sequences, decoder.generate(**batch, **options).sequences) or name == "adversary"
    for row, length in enumerate((5, 9, 2)):
        text = out.sequences[row, 9 - length :].tolist()
        went_out = out.trace.emitted(row)
        assert [token for token, _ in went_out] == text[length : length + len(went_out)]
        for record in tokens_of(out.trace):
            if record["row"] == row and record["emitted"] and record["event"] != "prefill":
                at = record["position"]
                assert text[at] == record["token"]
                logits = model(torch.tensor([text[:at]])).logits[0, -1]
                penalised = logits.clone()
                seen = torch.tensor(text[:at]).unique()
                penalised[seen] = torch.where(logits[seen] < 0, logits[seen] * 1.2, logits[seen] / 1.2)
                p = (penalised / (1.0 if rule == "greedy" else 0.8)).softmax(-1)[record["token"]]
                assert record["p"] == pytest.approx(float(p), rel=1e-4)
                assert record["margin"] is None if rule in ("rejection", "traversal") else record["margin"] >= 0
    counts = {event: sum(r["event"] == event for r in tokens_of(out.trace)) for event in ("accepted", "prefill")}
    assert counts["prefill"] == 3 and counts["accepted"] >= out.stats.accepted


def test_events_of_known_drafts(tiny_model):
    """The oracle's drafts are right but for known errors, so that every event is known."""
    model, batch = tiny_model("llama"), prompts([6])
    plain = ShapeDecoder(model).generate(**batch, max_new_tokens=11, eos_token_id=[])
    options = {"max_new_tokens": 11, "eos_token_id": [], "return_dict_in_generate": True, "trace": True}
    right = ShapeDecoder(model, OracleDrafter(plain.tolist(), depth=4)).generate(**batch, **options).trace
    assert [event for _, event in right.emitted()] == [
        "prefill",
        *["accepted"] * 4,
        "bonus",
        *["accepted"] * 4,
        "bonus",
    ]
    wrong = ShapeDecoder(model, OracleDrafter(plain.tolist(), error_rate=1.0, depth=2)).generate(**batch, **options)
    step = [record for record in tokens_of(wrong.trace) if record["step"] == 1]
    assert [record["event"] for record in step] == ["rejected", "corrected", "unreached"]
    rejected, corrected, unreached = step
    assert rejected["margin"] < 0 < corrected["margin"] and rejected["p"] < corrected["p"]
    assert (
        rejected["slot"] == 7 and rejected["kept_slot"] is None and rejected["position"] == 7 == corrected["position"]
    )
    assert unreached["p"] is None and unreached["depth"] == 2
    accepted = [record for record in tokens_of(right) if record["event"] == "accepted"]
    assert [record["kept_slot"] for record in accepted[:4]] == [7, 8, 9, 10]
    steps = [record for record in right.records if record["type"] == "step"]
    assert steps[1]["lengths"] == [6] and steps[1]["nodes"] == 5 and steps[1]["verify"] > 0


def test_tokens_behind_a_stop_do_not_go_out(tiny_model):
    model, batch = tiny_model("llama"), prompts([6])
    plain = ShapeDecoder(model).generate(**batch, max_new_tokens=11, eos_token_id=[])
    out = ShapeDecoder(model, OracleDrafter(plain.tolist(), depth=6)).generate(
        **batch, max_new_tokens=4, eos_token_id=[], return_dict_in_generate=True, trace=True
    )
    events = [(record["event"], record["emitted"]) for record in tokens_of(out.trace)]
    assert events == [("prefill", True)] + [("accepted", True)] * 3 + [("accepted", False)] * 3 + [("bonus", False)]


def test_rejection_shows_p_q_and_the_draw(tiny_model):
    decoder = ShapeDecoder(tiny_model("llama"), TrainedDrafter(predictor(), TreeShape(depth=4, width=1)))
    out = decoder.generate(
        **prompts([6]), max_new_tokens=30, do_sample=True, top_k=0, acceptance="rejection", eos_token_id=[], seed=0,
        return_dict_in_generate=True, trace=True,
    )  # fmt: skip
    judged = [record for record in tokens_of(out.trace) if record["event"] in ("accepted", "rejected")]
    assert {record["event"] for record in judged} == {"accepted", "rejected"}
    for record in judged:
        assert (record["draw"] * record["q"] < record["p"]) == (record["event"] == "accepted")


def test_files_and_view(tiny_model, tmp_path):
    decoder = ShapeDecoder(tiny_model("llama"), AdversaryDrafter())
    out = decoder.generate(**prompts(), max_new_tokens=9, return_dict_in_generate=True, trace=True)
    out.trace.write(tmp_path / "trace.jsonl")
    assert [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()] == out.trace.records
    console = Console(record=True, width=200)
    console.print(view(out.trace.records, str, row=1))
    lines = console.export_text().splitlines()
    assert len(lines) == 1 + sum(r["type"] == "step" and 1 in r["rows"] for r in out.trace.records)
    assert decoder.generate(**prompts(), max_new_tokens=9, return_dict_in_generate=True).trace is None
