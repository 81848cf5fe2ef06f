"""The documentation says what is so: its Python runs, its commands parse, its options are described, its links lead to
files. That pages link to pages is for `mkdocs build --strict` to see, which CI runs.
"""

import ast
import inspect
import pkgutil
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints
from unittest.mock import patch

import pytest
from helpers import ROOT, location, program
from jsonargparse import ArgumentParser
from mtp_targets import MTP_TARGET, write_small
from transformers import dynamic_module_utils

from shape import bundled
from shape.networks.config import ShapeConfig
from shape.networks.formats.table import save
from shape.networks.formats.targets import TargetFacts
from shape.networks.registry import PREDICTORS
from shape.training.options import TrainOptions

commands = program("docs", "commands")

PAGES = sorted((ROOT / "docs").rglob("*.md"))
READMES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("*/README.md"))]
BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>[^>]+) -->\n)?```python\n(?P<code>.*?)```", re.DOTALL)
SNIPPET = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
SPAN = re.compile(r"(?<!`)`[^`]+`(?!`)")  # code within a sentence, which may be broken into lines
MODULE, SCRIPT = r" -m ((?:shape|eval)\.[\w.]*[a-z])", r"(?:^|&& )[ $]*(?:[.\w]+/)*(shape [a-z]+)\b"
COMMAND = re.compile(rf"(?:{MODULE}|{SCRIPT})([^\n`|>&#]*)", re.MULTILINE)
HUB_TARGET = "Qwen/Qwen3-0.6B"
RECORDED = re.compile(r"<!-- ([\w-]+):begin[^>]*-->.*?<!-- \1:end -->", re.DOTALL)  # what was run, not what to run
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


# Old names work for one version and warn; the documentation has none of them.
no_old_names = pytest.mark.filterwarnings(r"error:.* is now (called|--):FutureWarning")


def blocks(page: Path) -> Iterator[tuple[str, bool]]:
    """The Python of a page, block by block, and whether it can run here."""
    for found in BLOCK.finditer(page.read_text()):
        code = SNIPPET.sub(lambda name: (ROOT / name[1]).read_text(), found["code"])
        yield code, found["reason"] is None


def eagle3(folder: Path) -> Path:
    """A checkpoint for the target that ships, as SafeAILab and SpecForge have it; it has learned nothing."""
    target = TargetFacts.of(str(bundled.resolve("quickstart-target")))
    config = ShapeConfig(
        kind="eagle", hidden_size=384, vocab_size=target.vocab_size, feature_layers=[1, 3, 5], own_heads=True
    )
    save(PREDICTORS["eagle"](config), folder / "eagle3", "eagle3", target)
    return folder / "eagle3"


@no_old_names
@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page))], ids=location)
def test_python_runs(page, monkeypatch, tiny_tokenizer, tmp_path):
    """Block after block in one namespace, as a reader would; what cannot run here has to be Python at least."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    namespace: dict[str, Any] = {"__name__": page.stem}
    for number, (code, runs) in enumerate(blocks(page), 1):
        if "path/of/an/eagle3" in code:
            code = code.replace("path/of/an/eagle3", str(eagle3(tmp_path))).replace(HUB_TARGET, "quickstart-target")
        if MTP_TARGET in code:
            write_small(tmp_path / "qwen", tiny_tokenizer)
            code = code.replace(MTP_TARGET, str(tmp_path / "qwen"))
        compiled = compile(code, f"{page.name}, block {number}", "exec")
        if runs:
            exec(compiled, namespace)


@no_old_names
def test_python_of_the_readme_runs(capsys):
    """With the target that ships in place of one from the hub."""
    found = list(blocks(ROOT / "README.md"))
    assert found
    namespace: dict[str, Any] = {"__name__": "readme"}
    for code, _ in found:
        assert HUB_TARGET in code
        exec(compile(code.replace(HUB_TARGET, "quickstart-target"), "README.md", "exec"), namespace)
    assert "tokens per forward pass" in capsys.readouterr().out


def written_commands() -> Iterator[tuple[str, str, str]]:
    """(where it stands, module, arguments) of every command that someone may copy."""
    recipes = [*sorted((ROOT / "configs").rglob("*.yaml")), *sorted((ROOT / "train").glob("*.yaml"))]
    texts = {location(path): path.read_text() for path in [*PAGES, *READMES, *recipes]}
    for path in [*(ROOT / "eval").glob("*.py"), *(ROOT / "eval").glob("*/__main__.py")]:
        texts[location(path)] = ast.get_docstring(ast.parse(path.read_text())) or ""
    for module in commands.modules():
        path = ROOT / "shape" / "cli" / f"{module.removeprefix('shape.')}.py"
        texts[location(path)] = ast.get_docstring(ast.parse(path.read_text())) or ""
    for place, text in texts.items():
        text = SPAN.sub(lambda code: code[0].replace("\n", " "), RECORDED.sub("", text))
        for module, command, arguments in COMMAND.findall(text.replace("\\\n", " ")):
            yield place, module or command.replace(" ", "."), arguments.strip()


class Parsed(BaseException):
    """Ends a command that has parsed its arguments."""


def check(module: str, arguments: str) -> None:
    """Raises AssertionError where a command would refuse its arguments; files of the reader's own are left out."""
    given = shlex.split(arguments)
    if given[:1] == ["..."]:  # and whatever else there was
        del given[0]
    if module == "eval.ablate" and given and given[0].isupper():
        given[0] = "default"
    for at, (option, value) in enumerate(pairwise(given)):
        if option == "--config" and not (ROOT / value).exists():
            del given[at : at + 2]
            break
    assert commands.can_be_run(module), f"{module} is no command"
    if not commands.has_options(module) or not any(each.startswith("-") for each in given):
        return  # another package's options, argparse's, or none
    parse, within = ArgumentParser.parse_args, False

    def parse_and_stop(parser: ArgumentParser, *options: Any, **named: Any) -> Any:
        nonlocal within
        parser.allow_abbrev = False
        if within:  # the parser of a subcommand parses within that of the command
            return parse(parser, *options, **named)
        within = True
        parse(parser, *options, **named)
        raise Parsed

    with patch.object(ArgumentParser, "parse_args", parse_and_stop):
        try:
            commands.run(module, given)
        except Parsed:
            pass
        except SystemExit as end:
            assert not end.code, f"python -m {module} {arguments} is refused"  # --help and --print_config end well


WRITTEN = {(module, " ".join(arguments.split())): place for place, module, arguments in written_commands()}


@no_old_names
@pytest.mark.parametrize(("module", "arguments", "place"), [(*command, place) for command, place in WRITTEN.items()])
def test_commands_parse(module, arguments, place, monkeypatch):
    monkeypatch.chdir(ROOT)
    check(module, arguments)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("shape.train", "--steps 5"),
        ("shape.train", "--training.steps many"),
        ("shape.bench", "--tree.breadth 2"),
        ("shape.extract", "--output features"),
        ("shape.recipes", "compile --target T"),
        ("eval.ablate", "baselines --variant eagle"),
        ("eval.quality", "--temperatures 0"),
        ("eval.claims", "--result eval/results"),
        ("shape.learn", "--steps 5"),
    ],
)
def test_wrong_commands_are_noticed(module, arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(AssertionError, match=r"refused|no command"):
        check(module, arguments)


@pytest.mark.parametrize("module", [*filter(commands.has_options, commands.modules())])
def test_every_option_is_described(module):
    """Docstrings that explain two options in one line explain neither to `--help`."""
    parser = commands.parser_of(module)
    for each in [parser, *commands.subcommands(parser).values()]:
        nameless = [action.dest for _, found in commands.options(each) for action in found if not action.help]
        assert not nameless, f"options without a text: {nameless}"


def option_names(options: type, stem: str = "--") -> Iterator[str]:
    hints = get_type_hints(options)
    for field in fields(options):
        if is_dataclass(hint := hints[field.name]):
            yield from option_names(hint, f"{stem}{field.name}.")
        else:
            yield f"{stem}{field.name}"


def test_pages_of_commands():
    page = commands.page("shape.train")
    for name in option_names(TrainOptions):
        assert f"\n`{name}` " in page, name
    assert "`--predictor.step_mode` `parallel` or `recursive`, default `parallel`\n:   all steps from" in page
    assert "## The network: `--predictor.*`" in page
    assert "`--extraction.more_layers` list of int, default `[]`" in page and "print_config`\n:" not in page
    assert "`--target` str, required" in commands.page("shape.extract")
    recipes = commands.page("shape.recipes")
    assert all(f"\n## {name}\n" in recipes for name in ("compile", "inspect", "merge"))
    assert "`--tree.nodes`" in commands.page("shape.generate")


REFERENCE = re.compile(r"^::: ([\w.]+)\n((?:    .*\n?)*)", re.MULTILINE)
DOCUMENTED = [
    (path, members)
    for page in sorted((ROOT / "docs/reference").glob("*.md"))
    for path, options in REFERENCE.findall(page.read_text())
    for members in [re.findall(r"\w+", "".join(re.findall(r"members: \[(.*)\]", options)))]
]


@pytest.mark.parametrize(("path", "members"), DOCUMENTED, ids=[path for path, _ in DOCUMENTED])
def test_what_the_reference_names_exists(path, members):
    """mkdocstrings leaves members that do not exist out, without a word."""
    found = pkgutil.resolve_name(path)
    home = getattr(found, "__name__", path)
    for name in members:
        member = getattr(found, name)
        assert not inspect.ismodule(found) or member.__module__ == home, f"{name} is not defined in {path}"


def test_troubleshooting_quotes_messages_that_exist():
    source = "".join(path.read_text() for path in (ROOT / "shape").rglob("*.py"))
    source = re.sub(r'"\n\s*f?"', "", source)  # strings that are continued on the next line
    rows = [line for line in (ROOT / "docs/troubleshooting.md").read_text().splitlines() if line.startswith("| ")]
    quotes = [quote for row in rows for quote in re.findall(r"\*([^*]+)\*", row.split(" | ")[0])]
    assert len(quotes) > 15
    missing = [part for quote in quotes for part in map(str.strip, quote.split("...")) if part not in source]
    assert not missing


@pytest.mark.parametrize("document", [*READMES, *PAGES], ids=location)
def test_links_lead_to_files(document):
    """Pages link to sources in whose place the site has a page (`docs/hooks.py`), so that one link serves both."""
    for target in LINK.findall(document.read_text()):
        assert (document.parent / target).exists(), target
