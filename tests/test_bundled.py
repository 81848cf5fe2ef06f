"""What ships is found in a checkout and in a wheel alike."""

from pathlib import Path

import pytest

from shape import bundled
from shape.errors import ConfigError


def lay_out(root: Path) -> None:
    for name in ("configs", "data", "checkpoints/quickstart-target"):
        (root / name).mkdir(parents=True)
    (root / "data" / "bench.jsonl").write_text("{}\n")


@pytest.mark.parametrize("installed", [False, True], ids=["checkout", "wheel"])
def test_finds_what_ships(tmp_path, monkeypatch, installed):
    package = tmp_path / "shape"
    package.mkdir()
    lay_out(package / "_bundled" if installed else tmp_path)
    monkeypatch.setattr(bundled, "_PACKAGE", package)
    assert bundled.path("data", "bench.jsonl").read_text() == "{}\n"
    assert bundled.resolve("quickstart-target") == str(bundled.root() / "checkpoints" / "quickstart-target")


def test_the_repository_has_it():
    for parts in (("configs",), ("data", "bench.jsonl"), ("checkpoints", "quickstart-target", "config.json")):
        assert bundled.path(*parts).exists()


def test_an_absent_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(bundled, "_PACKAGE", tmp_path / "shape")
    with pytest.raises(ConfigError, match=r"checkpoints/quickstart-shape does not ship .* name a file"):
        bundled.resolve("quickstart-shape")


@pytest.mark.parametrize("name", ["./quickstart-target", "meta-llama/Llama-3.1-8B-Instruct", "some/folder"])
def test_other_names_pass_through(name):
    assert bundled.resolve(name) == name
