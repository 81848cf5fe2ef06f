"""The two sides of the parity with vLLM are counted alike."""

import json
from dataclasses import replace

import pytest
import torch

from eval import parity
from eval.parity import Answer, Parity, ParityOptions, ours
from shape.drafters import TreeShape
from shape.errors import ConfigError
from shape.generation.decoder import ShapeDecoder

DEPTH = 4


@pytest.fixture(scope="module")
def decoder() -> ShapeDecoder:
    tree = TreeShape(width=1, depth=DEPTH)
    return ShapeDecoder.from_pretrained("quickstart-shape", dtype="float32", tree=tree, fall_back=False)


@pytest.mark.parametrize("longest", [1, 7, 48])
def test_our_answers_are_the_targets_and_every_step_counts_in_full(decoder, longest):
    ids = decoder.target.encode([{"role": "user", "content": "Book a table for two, please."}])
    whole = decoder.generate(ids, torch.ones_like(ids), do_sample=False, max_new_tokens=longest)[0, ids.shape[1] :]
    found = ours(decoder, ids[0].tolist(), DEPTH, longest)
    assert found.tokens == whole.tolist()
    assert len(found.accepted) == DEPTH and found.accepted == sorted(found.accepted, reverse=True)
    behind = 1 + found.drafts + sum(found.accepted) - len(found.tokens)  # accepted behind the answer's end
    assert 0 <= behind <= DEPTH and max(found.accepted) <= found.drafts


def answers(spread: int) -> list[Answer]:
    return [Answer([1, number], 10, [8 + number % spread, 4], seconds=2.0) for number in range(6)]


def test_rates_are_ratios_of_sums_over_prompts():
    first, second = parity.rates(answers(2))
    assert first.value == pytest.approx(51 / 60) and second.value == pytest.approx(0.4)
    assert first.low < first.value < first.high
    plain = [replace(answer, seconds=3.0) for answer in answers(1)]
    assert parity.speed_up(answers(1), plain).value == pytest.approx(1.5)


def test_the_table_says_where_sides_differ(decoder, tmp_path, monkeypatch):
    """vLLM stands in for itself: it answers as we do, but for one prompt, and accepts one draft less."""
    options = ParityOptions("python", str(tmp_path / "out"), str(tmp_path / "work"), ["shape", "shape"], limit=3)
    options.max_new_tokens = 8

    def served(self, name, engine):
        found = [replace(ours(decoder, ids, DEPTH, 8), seconds=4.0 if name == "plain" else 2.0) for ids in self.prompts]
        if name == "plain":
            return found
        less = [found[0].accepted[0] - 1, *found[0].accepted[1:]]
        return [replace(found[0], tokens=[0], accepted=less), *found[1:]]

    monkeypatch.setattr(Parity, "vllm", served)
    found = parity.run(options)["shape"]
    assert (found["prompts"], found["equal_to_vllm"], found["equal_to_ours"]) == (3, 2, 2)
    assert found["drafts"][0] == found["drafts"][1]
    mine, theirs = (found[side][0]["value"] for side in ("ours", "vllm"))
    assert mine - theirs == pytest.approx(1 / found["drafts"][0])
    assert found["speed_up"]["value"] == pytest.approx(2.0)
    text = (tmp_path / "out" / "parity.md").read_text()
    assert "| shape | 2 / 3 | 2 / 3 |" in text and "shape.serving.vllm.ShapeProposer" in text
    assert json.loads((tmp_path / "out" / "parity.json").read_text())["methods"]["shape"] == found
    with pytest.raises(ConfigError, match=r"parity.json holds a measurement with other settings \(max_new_tokens\)"):
        parity.run(replace(options, max_new_tokens=4))
    assert parity.run(replace(options, methods=[])) == {"shape": found}  # goes on with what is there
    with pytest.raises(ConfigError, match="hydra is no method here; choose from shape, eagle, medusa, dflash"):
        parity.run(replace(options, methods=["hydra"]))
