"""The program that measures draft lengths, packs and the compressed target, with tiny sizes."""

import json
from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval import drafters as program
from shape.drafters.cost import throughput


@pytest.fixture
def setting(tiny_target_folder, tmp_path):
    return program.Setting(str(tmp_path / "out"), str(tiny_target_folder), "float32", max_new_tokens=6)


def summary(folder: Path) -> dict:
    found = json.loads((folder / "results.json").read_text())["summary"]
    assert all(
        line["equal_autoregressive"] == line["answers"] for name, line in found.items() if name != "transformers"
    )
    return found


def test_draft_lengths(setting, tiny_target_folder, tmp_path):
    program.lookahead(setting, model=str(tiny_target_folder), prompts=6, temperature=[0.0, 1.0])
    for temperature in ("t0", "t1"):
        found = summary(tmp_path / "out" / temperature)
        assert found.keys() == {
            "transformers",
            "autoregressive",
            *(f"{n} tokens" for n in (1, 2, 4, 6, 8)),
            "adaptive",
            "cost",
        }
        assert found["4 tokens"]["acceptance_length"]["value"] > found["1 tokens"]["acceptance_length"]["value"] > 1.5


def test_packs(setting, tiny_target_folder, tmp_path):
    program.recipes(setting, model=str(tiny_target_folder), compiled_from=2, measured=3)
    table = (tmp_path / "out" / "recipes.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in table[2:6]] == ["| json", "| code", "| sums", "| free prose"]
    assert summary(tmp_path / "out" / "json")["draft model"]["acceptance_length"]["value"] > 1.5


def test_compressed(setting, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "_texts", lambda target: [list(range(at, at + 120)) for at in (3, 60, 120)])
    program.compressed(setting, prompts=2, tokens=2)
    rows = [line.strip("| ").split(" | ") for line in (tmp_path / "out" / "compressed.md").read_text().splitlines()]
    found = {row[0]: row for row in rows if len(row) == 6}
    assert found.keys() - {"left of the target", "---"} == summary(tmp_path / "out").keys() - {
        "transformers",
        "autoregressive",
    }
    energy = [float(found[f"attention at {share:g} d, SVD"][1].rstrip("%")) for share in (0.5, 0.25, 0.08)]
    assert energy == sorted(energy, reverse=True)
    assert float(found["8 bits"][2].rstrip("%")) > 90
    lines = (tmp_path / "out" / "factors.md").read_text().splitlines()
    factors = {row[0]: row for row in (line.strip("| ").split(" | ") for line in lines) if len(row) == 8}
    assert factors["8 bits"][2:7] == ["1.000"] * 5
    assert factors.keys() - {"left of the target", "---"} == found.keys() - {
        "left of the target",
        "---",
        "suffix + 8 bits",
    }


RATES, SECONDS = st.floats(0.05, 0.95), st.floats(0.01, 1.0)


@given(RATES, RATES, st.integers(1, 12), SECONDS, SECONDS, SECONDS)
def test_the_three_factors_are_the_ratio_of_throughputs(whole, compressed, depth, draft, cheaper, verify):
    chains = (program.Chain(whole, draft, verify, 0.0), program.Chain(compressed, cheaper, verify, 0.0))
    ratio = throughput(compressed, depth, cheaper, verify) / throughput(whole, depth, draft, verify)
    assert prod(program.compression_gain(*chains, depth)) == pytest.approx(ratio)


def test_paths_and_tables(setting, tmp_path):
    program.geodesic(setting, prompts=2)
    found = summary(tmp_path / "out")
    assert {"geodesic: line", "onedecode, from texts", "onedecode+geodesic"} < found.keys()
