"""The examples run as their readers would run them, with the models that ship."""

import ast
import asyncio
import inspect
import json
import subprocess
import sys
from typing import Any

import pytest
from helpers import ROOT

EXAMPLES = ROOT / "examples"
# What has to be in the output, and options that make an example short where it is long.
PROGRAMS = {
    "decode_without_training": ("autoregressive", ["--max_new_tokens", "32"]),
    "batch_and_chat": ("prompt tokens from the cache", ["--max_new_tokens", "24"]),
    "train_and_decode": ("acceptance length", ["--steps", "4", "--conversations", "24", "--output", "trained"]),
}


def test_every_example_is_run_and_listed():
    found = {path.stem for path in EXAMPLES.glob("*.py")}
    assert found == set(PROGRAMS)
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"`{path.name}`" in listed for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name.startswith("train") else name for name in PROGRAMS]
)
def test_program_runs(name, tmp_path):
    said, options = PROGRAMS[name]
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *options]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert said in finished.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs(path, capsys):
    """Cell after cell in one namespace, under a running event loop, as Jupyter does."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells and not any(cell["outputs"] for cell in cells), "a notebook is stored without its outputs"

    async def run_all() -> None:
        namespace: dict[str, Any] = {"__name__": "__main__"}
        for number, cell in enumerate(cells, 1):
            code = compile("".join(cell["source"]), f"cell {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if inspect.iscoroutine(result := eval(code, namespace)):
                await result

    asyncio.run(run_all())
    assert "acceptance length" in capsys.readouterr().out
