"""Latency of plain decoding: what is counted, and that it is written down and continued."""

import json

import pytest

from eval import latency
from eval.latency import LatencyOptions, measure, run, table
from shape.errors import ConfigError


def test_both_loops_are_measured_at_every_context_with_room(tiny_target):
    found = measure(tiny_target, [8, 32, 251], new_tokens=6, repeats=2, seed=0)
    assert [(one.context, one.method) for one in found] == [
        (8, "transformers"), (8, "autoregressive"), (32, "transformers"), (32, "autoregressive"),
    ]  # fmt: skip
    assert all(0 < one.between <= one.late and one.first > 0 for one in found)
    header, cells = table(found)
    assert len(cells) == 4 and len(header) == len(cells[0])


def test_the_command_goes_on_where_it_was_interrupted(tiny_target_folder, tmp_path, monkeypatch):
    asked = {"output": str(tmp_path), "contexts": [4], "new_tokens": 3, "repeats": 1}
    measured, inner = [], latency.measure

    def once(*arguments):
        if measured:
            raise KeyboardInterrupt
        measured.append(arguments)
        return inner(*arguments)

    other = tmp_path / "other"
    other.symlink_to(tiny_target_folder)
    monkeypatch.setattr(latency, "measure", once)
    options = LatencyOptions(targets=[str(tiny_target_folder), str(other)], **asked)
    with pytest.raises(KeyboardInterrupt):
        run(options)
    monkeypatch.setattr(latency, "measure", lambda *arguments: measured.append(arguments) or inner(*arguments))
    found = run(options)
    assert len(measured) == 2 and {one.target for one in found} == {tiny_target_folder.name, "other"}
    record = json.loads((tmp_path / "latency.json").read_text())
    assert [latency.Latency(**one) for one in record["latencies"]] == found
    assert "TTFT ms" in (tmp_path / "latency.md").read_text()


def test_what_cannot_be_measured_is_refused(tiny_target_folder, tmp_path):
    with pytest.raises(ConfigError, match="at least 1"):
        run(LatencyOptions(contexts=[], output=str(tmp_path)))
    with pytest.raises(ConfigError, match="no target has positions"):
        run(LatencyOptions(targets=[str(tiny_target_folder)], contexts=[300], output=str(tmp_path)))
