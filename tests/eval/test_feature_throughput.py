"""The program that measures how fast features are read, with few of them."""

import json

from eval import feature_throughput


def test_everything_is_measured(tmp_path, capsys):
    command = ["--limit=12", "--steps=7", "--batch_size=32", "--progress=false", f"--work={tmp_path / 'work'}"]
    feature_throughput.main([*command, "--output", str(tmp_path / "out")])
    found = json.loads((tmp_path / "out/throughput.json").read_text())
    assert found["consumed"] > 0 and len(found["lines"]) == 8
    assert all(line["from_disk"] > 0 and line["again"] > 0 for line in found["lines"])
    by_name = {(line["store"], line["reached"]): line["bytes_per_position"] for line in found["lines"]}
    assert 380 < by_name["int8", "folder"] - 5 < 0.51 * by_name["bfloat16", "address"]
    assert by_name["int8, answers and their windows", "folder"] < by_name["int8", "folder"]
    assert "commit" in (tmp_path / "out/throughput.md").read_text() and "Training takes" in capsys.readouterr().out
