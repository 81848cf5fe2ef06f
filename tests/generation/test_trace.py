"""The trace tells what happened: it is checked against the tokens, and its odds against the target itself."""

import json
import math

import pytest
import torch
from helpers import chain_only_model, predictor, prompts
from rich.console import Console

from shape.drafters import (
    AdversaryDrafter,
    HybridDrafter,
    NgramDrafter,
    OracleDrafter,
    SuffixDrafter,
    TrainedDrafter,
    TreeShape,
)
from shape.generation.decoder import ShapeDecoder
from shape.generation.trace import Trace, view

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
@pytest.mark.parametrize("rule", ["greedy", "match", "rejection", "traversal", "transport"])
def test_the_trace_agrees_with_the_output_and_the_target(tiny_model, name, rule):
    model, batch = tiny_model("llama"), prompts([5, 9, 2])
    options = {"max_new_tokens": 14, "seed": 3, "return_dict_in_generate": True, "repetition_penalty": 1.2}
    if rule != "greedy":
        options |= {"do_sample": True, "temperature": 0.8, "top_k": 0, "acceptance": rule}

    def decoder() -> ShapeDecoder:
        drafter = DRAFTERS[name]()
        if rule in ("rejection", "traversal") and name in ("tree", "hybrid"):  # which must not drop what was drawn
            whole = TrainedDrafter(predictor(), TreeShape(depth=3, width=2))
            drafter = whole if name == "tree" else HybridDrafter([SuffixDrafter(shortest=1), whole])
        return ShapeDecoder(model, drafter, fall_back=False)

    out = decoder().generate(**batch, **options, trace=True)
    assert torch.equal(out.sequences, decoder().generate(**batch, **options).sequences)
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
                assert record["margin"] is None if rule not in ("greedy", "match") else record["margin"] >= 0
    events = [record["event"] for record in tokens_of(out.trace)]
    went_out = [record["event"] for record in tokens_of(out.trace) if record["emitted"]]
    assert events.count("prefill") == 3 and went_out.count("accepted") == out.stats.accepted
    assert len(went_out) == 3 + out.stats.emitted
    assert sum(events.count(event) for event in ("accepted", "rejected", "unreached")) == out.stats.drafted
    assert out.stats.accepted > 0 or name in ("plain", "ngram")  # so that accepted drafts were compared too


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


@pytest.mark.parametrize("rule", ["match", "unverified-lossy"])
def test_of_several_drafters_all_that_was_accepted_is_somebodys(tiny_model, rule):
    decoder = ShapeDecoder(tiny_model("llama"), DRAFTERS["hybrid"]())
    asked = {"acceptance": rule, "eos_token_id": [], "return_dict_in_generate": True}
    stats = decoder.generate(**prompts([9]), max_new_tokens=30, **asked).stats
    shares = [accepted for _, accepted in stats.sources.values()]
    assert max(shares) <= stats.accepted <= sum(shares) and stats.accepted > 0


def test_batches_of_one_call_have_steps_of_their_own():
    """Those of targets that are decoded sequence by sequence, whose numbers go on."""
    decoder = ShapeDecoder(chain_only_model())
    out = decoder.generate(
        **prompts([4, 6]), max_new_tokens=5, eos_token_id=[], trace=True, return_dict_in_generate=True
    )
    steps = [record["step"] for record in out.trace.records if record["type"] == "step"]
    assert steps == list(range(10))
    assert {record["step"] for record in tokens_of(out.trace) if record["event"] == "prefill"} == {0, 5}


def test_processors_that_write_to_the_scores_change_no_odds(tiny_model):
    model, batch = tiny_model("llama", torch.float32), prompts([9])

    def odds(halve) -> list[float]:
        out = ShapeDecoder(model).generate(
            **batch, max_new_tokens=9, logits_processor=[halve], trace=True, return_dict_in_generate=True
        )
        return [record["p"] for record in tokens_of(out.trace) if record["p"] is not None]

    assert odds(lambda ids, scores: scores.mul_(0.5)) == odds(lambda ids, scores: scores * 0.5)


def test_rejection_shows_p_q_and_the_draw(tiny_model):
    decoder = ShapeDecoder(
        tiny_model("llama"), TrainedDrafter(predictor(), TreeShape(depth=4, width=1)), fall_back=False
    )
    out = decoder.generate(
        **prompts([6]), max_new_tokens=30, do_sample=True, top_k=0, acceptance="rejection", eos_token_id=[], seed=0,
        return_dict_in_generate=True, trace=True,
    )  # fmt: skip
    judged = [record for record in tokens_of(out.trace) if record["event"] in ("accepted", "rejected")]
    assert {record["event"] for record in judged} == {"accepted", "rejected"}
    for record in judged:
        assert (record["draw"] * record["q"] < record["p"]) == (record["event"] == "accepted")


@pytest.mark.parametrize("rule", ["greedy", "match", "rejection"])
def test_a_choice_shows_both_distributions(tiny_model, rule):
    """What the target chose where a draft was rejected: its own odds there, and what decided between them."""
    model = tiny_model("llama")
    decoder = ShapeDecoder(model, TrainedDrafter(predictor(), TreeShape(depth=4, width=1)), fall_back=False)
    options = {"do_sample": True, "top_k": 0, "acceptance": rule} if rule != "greedy" else {}
    batch = prompts([6])
    out = decoder.generate(
        **batch, max_new_tokens=20, eos_token_id=[], seed=0, return_dict_in_generate=True, trace=True, **options
    )
    corrected = [record for record in tokens_of(out.trace) if record["event"] == "corrected"]
    choices = [record for record in out.trace.records if record["type"] == "choice"]
    assert choices and [one["token"] for one in choices] == [record["token"] for record in corrected]
    for choice, record in zip(choices, corrected, strict=True):
        p = model(out.sequences[:, : choice["position"]]).logits[0, -1].softmax(-1)
        assert choice["p"] == pytest.approx(p[choice["tokens"]].tolist(), rel=1e-4)
        assert choice["p"] == sorted(choice["p"], reverse=True)
        assert {choice["token"], *choice["drafted"], int(p.argmax())} <= set(choice["tokens"])
        assert record["entropy"] == pytest.approx(float(torch.special.entr(p).sum()), rel=1e-4)
        known = {token: q for token, q in zip(choice["tokens"], choice["q"], strict=True) if q is not None}
        if rule == "rejection":
            assert len(known) == len(choice["tokens"]) and record["draft_entropy"] > 0
            shown = sum(min(pair) for pair in zip(choice["p"], choice["q"], strict=True))
            assert shown <= choice["overlap"] * (1 + 1e-6) <= shown + 1 - sum(choice["p"]) + 1e-6
        else:
            assert set(known) == set(choice["drafted"]) and choice["overlap"] is record["draft_entropy"] is None
        if rule == "match":
            scores = [math.log(p) + g for p, g in zip(choice["p"], choice["noise"], strict=True)]
            assert choice["tokens"][scores.index(max(scores))] == choice["token"]
        else:
            assert choice["noise"] == [None] * len(choice["tokens"])


def test_a_file_names_its_call_and_spells_its_tokens(tiny_target, tmp_path):
    decoder = ShapeDecoder(tiny_target, AdversaryDrafter(), fall_back=False)
    inputs = tiny_target.tokenizer("naïve", return_tensors="pt")
    out = decoder.generate(**inputs, max_new_tokens=12, return_dict_in_generate=True, trace=True)
    out.trace.write(tmp_path / "trace.jsonl", {"prompt": "naïve"}, tiny_target.tokenizer)
    call, *records = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert call == {"type": "call", "prompt": "naïve"} and len(records) == len(out.trace.records)
    new = out.sequences[0, inputs.input_ids.shape[1] :]
    spelt = "".join(record["text"] for record in records if record["type"] == "token" and record["emitted"])
    assert spelt == tiny_target.tokenizer.decode(new)
    for record in records:
        if record["type"] == "choice":
            assert record["texts"] == [tiny_target.tokenizer.decode([token]) for token in record["tokens"]]
    assert "text" not in out.trace.records[1]


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
