"""All commands from outside: how they are found, what their help shows, and what they make of typing mistakes."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO, TextIOWrapper
from types import SimpleNamespace

import pytest
from helpers import ROOT

from shape import errors
from shape.cli import main as shape
from shape.parsing import CommandParser, command_parser, options_of
from shape.training.parsing import parser as train_parser

FOREIGN = ("harness",)  # lm-evaluation-harness has its own parser
OURS = [name for name in shape.COMMANDS if name not in FOREIGN]


def parser_of(name: str) -> CommandParser:
    module = import_module(f"shape.cli.{name}")
    return train_parser(None, module.__doc__, module.COMMON) if name == "train" else module.parser()


@dataclass
class Example:
    """Options of a command.

    Attributes:
        batch_size: at once.
        rare: seldom used.
        methods: of several.
        sizes: one or several.
        files: one or several, whose names may have commas.
    """

    batch_size: int = 1
    rare: float = 0.5
    methods: list[str] | None = None
    sizes: int | list[int] = 1
    files: list[str] | str | None = None


@pytest.fixture
def example() -> CommandParser:
    return command_parser("example", "`shape example`: shows this. And more.", Example, ("batch_size",))


@pytest.fixture
def output(capsys) -> Callable[..., str]:
    """What a command prints that ends by itself."""

    def run(*arguments: str, status: int = 0) -> str:
        try:
            shape.main(arguments)
        except SystemExit as end:
            assert (end.code or 0) == status
        else:
            assert status == 0
        captured = capsys.readouterr()
        return captured.err if status else captured.out

    return run


def test_what_is_piped_is_utf8_on_windows(monkeypatch):
    """A prompt that comes in, and an answer that goes to a file; of all that commands do within `exit_on_error`, so of
    `python -m shape.generate` too.
    """
    given, written = (TextIOWrapper(BytesIO(text.encode()), encoding="cp1252") for text in ("é → 你", ""))
    monkeypatch.setattr(sys, "stdin", given)
    monkeypatch.setattr(sys, "stdout", written)
    monkeypatch.setattr(errors, "_ON_WINDOWS", True)

    def echo(_: list[str]) -> None:
        with errors.exit_on_error():
            print(sys.stdin.read(), end="", flush=True)

    monkeypatch.setattr(shape, "import_module", lambda name: SimpleNamespace(main=echo))
    shape.main(["generate"])
    assert written.buffer.getvalue().decode() == "é → 你"


def test_every_file_is_a_command_of_the_overview(output):
    files = {path.stem for path in (ROOT / "shape" / "cli").glob("[a-z]*.py")} - {"main", "terminal"}
    assert set(shape.COMMANDS) == files and len(shape.COMMANDS) == len(files)
    text = output("--help")
    assert text == output()
    for name in shape.COMMANDS:
        (line,) = (line for line in text.splitlines() if line.split()[:1] == [name])
        assert len(line) <= 120 and line.endswith("."), line


def test_no_command_is_imported_for_the_overview():
    heavy = "assert not {'torch', 'transformers', 'shape.cli.generate'} & set(sys.modules)"
    code = f"import sys; from shape.cli.main import main; main(['--help']); {heavy}"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("name", OURS)
def test_help_imports_nothing_heavy(name):
    """Which is what makes it quick; `--help` and every mistake on the command line end before torch is needed."""
    modules = "{'torch', 'transformers', 'numba', 'pytorch_lightning', 'datasets', 'matplotlib'}"
    code = (
        f"import sys\nfrom shape.cli.main import main\ntry: main(['{name}', '--help'])\n"
        f"except SystemExit as end: assert not end.code\nassert not {modules} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.startswith(f"usage: shape {name}")


@pytest.mark.parametrize("name", OURS)
def test_short_help_is_a_part_of_all_help(name):
    parser = parser_of(name)
    few, every = parser.format_short_help(), parser.format_help()
    known = {action.dest for action in parser._actions}
    assert parser.common <= known and len(parser.common) <= 15
    for option in parser.common:
        assert f"--{option}" in few
    if parser.common:
        assert "--help-all" in few and len(few) < len(every)
    else:
        assert few == every


def test_help_shows_the_defaults_that_apply(output):
    shipped, own = output("train", "--help"), output("train", "--target", "T", "--help")
    assert "default: 400" in shipped and "default: checkpoints/quickstart)" in " ".join(shipped.split())
    assert "--target T --help for your" in shipped
    assert "default: 400" not in own and "default: checkpoints/shape)" in " ".join(own.split())
    assert "--losses.mse" in output("train", "--help-all") and "--losses.mse" not in shipped


def test_mistakes_get_a_suggestion(output):
    assert "unknown command generat; did you mean generate?" in output("generat", status=2)
    assert "did you mean" not in output("xyz", status=2)
    assert output("quality", "--limit", "4", status=2).startswith("error: shape quality has moved; use shape harness")
    said = output("generate", "--promt", "x", status=2)
    assert said.startswith("error: unknown option --promt; did you mean --prompt?") and said.count("\n") == 1
    assert "did you mean --training.steps?" in output("train", "--steps", "5", status=2)
    said = output("generate", "--max_new_tokens", "many", status=2)
    assert said.startswith("error: --max_new_tokens is many; give an integer (") and said.count("\n") == 1
    assert "did you mean" not in output("generate", "--qqqqqq", "1", status=2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "--quantize=int3"], "--quantize is int3; give int8, int4 or null ("),
        (["generate", "--num_draft_tokens=x"], "--num_draft_tokens is x; give an integer, adaptive, cost or null ("),
        (["bench", "--batch_size=1,x"], "--batch_size is [1, 'x']; give an integer or a list of integers ("),
        (["generate", "--prompt=x", "--tree.depth=0"], "tree.depth is 0; give at least 1\n"),
        (
            ["generate", "--tree.dept=3"],
            "unknown option --tree.dept; did you mean --tree.depth? (",
        ),
        (["generate", "--chat_template_kwargs=[1]"], "--chat_template_kwargs is [1]; give a mapping such as '{name: "),
        (["recipes", "inspect", "p", "--foo", "1"], "unknown option --foo (shape recipes inspect --help lists the opt"),
        (["train", "--lr=1"], "unknown option --lr; did you mean --training.learning_rate? ("),
        (["train", "--epochs=1"], "unknown option --epochs; did you mean --training.steps? ("),
        (["generate", "--num_beams=4"], "unknown option --num_beams; beam search is not supported"),
        (["bench", "--tree.depth=0"], "tree.depth is 0; give at least 1\n"),
    ],
)
def test_values_that_cannot_be_are_told_in_a_sentence(output, arguments, said):
    found = output(*arguments, status=2)
    assert found.startswith(f"error: {said}") and found.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("training:\n  steps: 5\n   x: 3\n", "is not YAML (mapping values are not allowed in this context, line 3"),
        ("", "holds no options; write them as NAME: VALUE"),
        ("- a\n", "holds no options"),
        ("training:\n  stepps: 5\n", "has the unknown option training.stepps; did you mean --training.steps? ("),
        ("traning:\n  steps: 5\n", "has the unknown option traning.steps; did you mean --training.steps? ("),
    ],
)
def test_mistakes_in_a_file_name_it(output, tmp_path, text, said):
    (tmp_path / "mine.yaml").write_text(text)
    for given in (["--config", str(tmp_path / "mine.yaml")], [f"--config={tmp_path / 'mine.yaml'}"]):
        found = output("train", *given, status=2)
        assert found.startswith(f"error: {tmp_path / 'mine.yaml'} {said}") and found.count("\n") == 1


def test_hyphens_are_underscores(example):
    for given in (["--batch-size", "3"], ["--batch_size", "3"], ["--batch-size=3"]):
        assert options_of(Example, example.parse_args(given)) == Example(batch_size=3)


def test_the_command_line_goes_before_files_in_any_order(example, tmp_path):
    for name, size in (("one", 4), ("two", 5)):
        (tmp_path / name).write_text(f"batch_size: {size}\n")
    one, two = (["--config", str(tmp_path / "one")], [f"--config={tmp_path / 'two'}"])
    for given in (["--batch_size=3", *one], [*one, "--batch_size", "3"], [*one, "--batch_size=3", *two]):
        assert example.parse_args(given).batch_size == 3
    assert example.parse_args([*one, *two]).batch_size == 5


def test_one_name_for_one_thing():
    """What several commands take is called the same, whatever they do with it."""
    unwanted = {"rows", "batch", "batches", "dtypes", "temperatures", "drafters", "model_dtype", "max_tokens", "out"}
    unwanted |= {"lookahead", "modes", "target_dtype"}
    for name in OURS:
        names = {action.dest for action in parser_of(name)._actions}
        assert not names & unwanted, name


def test_python_m_is_the_same():
    for command in (
        [sys.executable, "-m", "shape", "check", "--help"],
        [sys.executable, "-m", "shape.check", "--help"],
    ):
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert text.startswith("usage: shape check")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--methods", "suffix"], ["suffix"]),
        (["--methods=suffix,ngram"], ["suffix", "ngram"]),
        (["--methods", "[suffix, ngram]"], ["suffix", "ngram"]),
        (["--methods", "null"], None),
        (["--sizes", "4"], 4),
        (["--sizes", "1,4"], [1, 4]),
        (["--files", "a,b"], "a,b"),
        (["--files", "[a,b]"], ["a", "b"]),
    ],
)
def test_lists_may_be_written_with_commas_alone(example, given, expected):
    options = options_of(Example, example.parse_args(given))
    assert getattr(options, given[0].partition("=")[0][2:]) == expected


def test_what_follows_a_list_is_no_part_of_it():
    merge = parser_of("recipes").parse_args(["merge", "--misses", "a,b", "one.pack", "two.pack", "--output=o"]).merge
    assert (merge.misses, merge.packs) == (["a", "b"], ["one.pack", "two.pack"])
