"""The program that measures products, with one small weight and one round."""

import json

import pytest
import torch
from helpers import numbers

from eval import products
from shape.target import floats
from shape.target.prepack import onednn_multiplies

pytestmark = pytest.mark.skipif(
    not (floats.supports(torch.float32) and onednn_multiplies(torch.float32)), reason="nothing to compare here"
)


def test_every_way_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(products, "SHAPES", ((48, 64),))
    monkeypatch.setattr(products, "TOKENS", (1, 13))
    monkeypatch.setattr(products, "BYTES", 1e4)
    products.main(["--rounds", "1", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "products.json").read_text())["rows"]
    assert {one["dtype"] for one in rows} >= {"float32"}
    assert [one["way"] for one in rows][:3] == ["rows", "oneDNN's blocks", "ours"]
    assert all(value > 0 for one in rows for value in one["microseconds"].values())
    assert (tmp_path / "products.md").read_text().strip() in capsys.readouterr().out


def test_all_ways_compute_the_same():
    weights, x = [numbers(torch.float32, 48, 64, seed=seed) for seed in range(3)], numbers(torch.float32, 5, 64, seed=3)
    found = products.ways(weights)
    for number, weight in enumerate(weights):
        for functions in found.values():
            torch.testing.assert_close(functions[number](x), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_quantised_ways_compute_about_the_same():
    weights, x = (
        [numbers(torch.bfloat16, 48, 64, seed=seed) for seed in range(2)],
        numbers(torch.bfloat16, 5, 64, seed=2),
    )
    found = products.ways(weights)
    for way, most in {"ours, 8 bits": 0.02, "ours, 4 bits": 0.2}.items():
        for number, weight in enumerate(weights):
            expected = x.float() @ weight.float().T
            error = (found[way][number](x).float() - expected).norm() / expected.norm()
            assert 0 < error < most
