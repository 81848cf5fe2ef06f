"""The program that measures forwards over a few tokens, with few sizes and one round."""

import json

import torch

from eval import forwards
from eval.llamas import Widths


def test_every_way_is_measured_on_every_target(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(forwards, "SHAPES", {"tiny": Widths(64, 96, 4, 2, 1)})
    monkeypatch.setattr(forwards, "POINTS", ((1, 128), (13, 128), (1, 256)))
    forwards.main(["--rounds", "1", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "forwards.json").read_text())["rows"]
    assert [(one["target"], one["dtype"], one["way"]) for one in rows] == [
        (target, dtype, way)
        for target in ("quickstart-target", "tiny")
        for dtype in ("float32", "bfloat16")
        for way in forwards.WAYS
    ]
    assert all(one["ms"][point] > 0 for one in rows for point in ("1 behind 128", "13 behind 128", "1 behind 256"))
    text = (tmp_path / "forwards.md").read_text()
    assert text.strip() in capsys.readouterr().out and "| tiny | bfloat16 | + grouped queries |" in text


def test_ways_differ_as_they_say(monkeypatch):
    monkeypatch.setattr(forwards, "SHAPES", {"tiny": Widths(64, 96, 4, 2, 1)})
    found = forwards.decoders("tiny", "float32")
    assert [decoder.target.prepacked for decoder in found.values()] == [False, True, True, True, True]
    modes = [type(decoder.gradientless()) for decoder in found.values()]
    assert modes == [torch.no_grad] * 2 + [torch.inference_mode] * 3
    assert [decoder.support.grouped_queries for decoder in found.values()] == [False, False, False, True, True]
    assert [decoder.support.fused is not None for decoder in found.values()] == [False] * 4 + [True]
