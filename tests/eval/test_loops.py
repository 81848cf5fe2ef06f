"""The program that measures what compiled loops save, with few prompts."""

import json

import torch

from eval import loops
from shape.generation.decoder import ShapeDecoder


def test_steps_of_both_ways_are_measured(tmp_path, capsys):
    loops.main(["--limit", "1", "--max_new_tokens", "8", "--dtype", "[float32]", "--output", str(tmp_path)])
    lines = json.loads((tmp_path / "loops.json").read_text())["lines"]
    assert [(one["drafter"], one["way"]) for one in lines] == [
        (drafter, way) for drafter in ("none", "shape") for way in loops.WAYS
    ]
    plain, drafted = lines[:2], lines[2:]
    assert all(one["length"] == 1 for one in plain)
    assert drafted[0]["length"] == drafted[1]["length"] > 1 and all(one["draft"] > 0 for one in drafted)
    assert (tmp_path / "loops.md").read_text().strip() in capsys.readouterr().out


def test_without_loops_nothing_goes_through_them():
    decoder = ShapeDecoder.from_pretrained("quickstart-shape", dtype="bfloat16")
    decoder.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    assert decoder.drafter.single is not None
    loops.without_loops(decoder)
    assert decoder.drafter.single is None
