"""The package as a stranger meets it: its names, its README, and the wheel in an empty directory."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from helpers import ROOT

import shape

# The default run made short: it has to go all the way, not to learn.
TRAIN_A_LITTLE = [
    *("--limit", "24", "--training.steps", "4", "--training.batch_size", "64"),
    *("--validation.prompts", "2", "--validation.max_new_tokens", "8", "--validation.every", "2"),
    *("--measurement.limit", "2", "--measurement.max_new_tokens", "8"),
]
FENCE = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)


def test_public_names():
    assert {"ShapeConfig", "ShapePredictor", "ShapeDecoder"} <= set(shape.__all__)
    for name in shape.__all__:
        assert getattr(shape, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Shapes'"):
        _ = shape.Shapes


def test_ci_runs_the_commands_of_the_readme():
    """CI repeats README's two commands for a new virtual environment to the letter."""
    blocks = FENCE.findall((ROOT / "README.md").read_text())
    train, tests = (block.strip() for block in blocks[:2])
    assert "shape train" in train and "python -m pytest" in tests
    assert {train, tests} <= set((ROOT / ".ci" / "run").read_text().splitlines())


def test_every_folder_says_what_lives_there():
    for folder in ("data", "train", "eval", "configs", "checkpoints", "tests"):
        first = (ROOT / folder / "README.md").read_text().splitlines()[0]
        assert len(first.split()) > 4 and not first.startswith("#"), folder


def test_the_status_page_has_the_parts_of_every_source_system():
    """A part keeps its row until it works; neither a system nor a state is dropped silently."""
    _, *sections = (ROOT / "docs/status.md").read_text().split("\n## ")
    for system in ("SHAPE", "Torch-Velocity", "OpenVINO", "Recipe packs", "OTT-Decode", "Peers"):
        (section,) = (each for each in sections if system in each.splitlines()[0])
        rows = [line.strip("| ").rsplit(" | ", 1) for line in section.splitlines() if line.startswith("| ")]
        (_, heading), *parts = rows
        assert heading == "state" and len(parts) >= 3, system
        assert {state for _, state in parts} <= {"works", "not yet", "written, not yet run on a GPU"}, system


EXTRAS = {
    "train": ("pytorch_lightning", "lightning_fabric", "datasets", "torchmetrics", "tensorboard"),
    "plots": ("matplotlib",),
    "eval": ("lm_eval",),
    "quant": ("torchao", "optimum", "bitsandbytes"),
    "openvino": ("openvino", "nncf"),
    "test": ("ot", "hypothesis"),
}
# Makes the modules of all extras look as if they were not installed.
WITHOUT_EXTRAS = f"""
import sys
for name in {sorted(chain.from_iterable(EXTRAS.values()))}:
    sys.modules[name] = None
from shape.cli.main import main
main(sys.argv[1:])
"""


def without_extras(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_EXTRAS, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_extras_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"train", "plots", "eval", "quant", "openvino", "all", "test", "docs"}
    assert extras == project["optional-dependencies"].keys()
    assert project["version"] == "0.3.0.dev0" and project["scripts"] == {"shape": "shape.cli.main:main"}


@pytest.mark.slow  # three commands, each in a process that imports all
def test_what_decoding_needs_installs_alone(tiny_target_folder, tiny_predictor_folder, tmp_path):
    """Answers, measurements and checks without Lightning, datasets or matplotlib."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n{"prompt": "Hi there"}\n')
    short = ["--target", tiny_target_folder, "--max_new_tokens", "4"]
    trained = ["--predictor", tiny_predictor_folder]
    bench = ["--prompts", prompts, "--methods", "[autoregressive,shape]", "--warmup", "0", "--output", tmp_path / "b"]
    for arguments in (
        ["generate", *short, *trained, "--prompt", "Hello"],
        ["bench", *short, *trained, *bench],
        ["check", *short, "--prompts", prompts, "--limit", "1", "--drafter", "[ngram]"],
    ):
        done = without_extras(*arguments)
        assert done.returncode == 0, (arguments, done.stderr[-2000:])


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [("train", ["train", "--limit", "4"]), ("eval", ["harness"]), ("plots", ["report", "RESULTS"])],
)
def test_a_missing_extra_is_one_sentence(extra, arguments, tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    done = without_extras(*[results if each == "RESULTS" else each for each in arguments])
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr[-2000:]
    assert f'pip install -e ".[{extra}]" in the checkout of shape' in done.stderr


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_the_embedded_default(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    inside = {name.removeprefix("shape/_bundled/") for name in names if name.startswith("shape/_bundled/")}
    assert {
        "data/bench.jsonl",
        "configs/quickstart.yaml",
        "checkpoints/quickstart-target/config.json",
        "checkpoints/quickstart-shape/custom_generate/generate.py",
        "checkpoints/quickstart-paper/model.safetensors",
    } <= inside
    assert not any(name.startswith(("configs/ablations", "data/generator")) for name in inside)
    sources = (path for path in (ROOT / "shape").rglob("*") if path.suffix in (".py", ".html", ".typed"))
    modules = {str(path.relative_to(ROOT)) for path in sources}
    assert modules <= set(names)
    assert {name.split("/")[0] for name in names} == {
        "shape",
        next(n for n in names if "dist-info" in n).split("/")[0],
    }


def clean_environment(**extra: str) -> dict[str, str]:
    """Nothing that would make Python or git find the checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GIT_"))}
    return {**kept, "HF_HUB_OFFLINE": "1", **extra}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheel_trains_its_default_in_an_empty_directory(wheel, tmp_path):
    """Installed, not editable, away from the checkout. The libraries are borrowed from this environment."""
    home, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], check=True, timeout=300)
    (packages,) = home.glob("lib/python*/site-packages")
    # Appended to the path, so the installed wheel comes first; an editable checkout there runs its .pth only
    # from a site directory, which this one is not.
    (packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    probe = "import shape; from shape import bundled; print(shape.__file__, bundled.root(), sep='\\n')"
    found = subprocess.run(
        [python, "-c", probe], cwd=empty, env=clean_environment(), check=True, capture_output=True, text=True
    )
    assert all(place.startswith(str(packages)) for place in found.stdout.splitlines())

    command = [python, "-m", "shape.train", *TRAIN_A_LITTLE]
    finished = subprocess.run(command, cwd=empty, env=clean_environment(), capture_output=True, text=True, timeout=1000)
    assert finished.returncode == 0, finished.stderr[-3000:]
    exported = [path.parent for path in empty.rglob("model.safetensors")]
    assert any((folder / "config.json").exists() for folder in exported)
    assert "acceptance length" in finished.stdout.lower()
