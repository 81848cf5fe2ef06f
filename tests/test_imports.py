"""The structure of the package: imports point one way, files are short, nothing imports a command, text is UTF-8."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT, location

# Each may import from itself and from what stands before it.
ORDER = (
    "base",  # errors, files, bundled, parsing: the modules that lie beside the folders
    "target",
    "data",
    "features",
    "verification networks",
    "drafters",
    "generation",
    "evaluation",
    "training serving",
    "cli",
)
LEVEL = {folder: level for level, folders in enumerate(ORDER) for folder in folders.split()}
# They open the package, and name what it is made of.
ENTRANCES = {"shape/__init__.py", "shape/__main__.py", "shape/custom_generate.py"}
SOURCES = sorted(path for path in (ROOT / "shape").rglob("*.py") if "_bundled" not in path.parts)
MOST_LINES = 500


def module_of(path: Path) -> str:
    return location(path).removesuffix(".py").replace("/", ".")


def folder_of(module: str) -> str:
    """The folder of a module of ours, or "base"."""
    _, *rest = module.split(".")
    return rest[0] if rest and rest[0] in LEVEL else "base"


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of all imports of ours in a file: at its top, within functions, and for type checkers alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            named = [node.module or ""]
            if node.module == "shape":
                named = [f"shape.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in named if name.partition(".")[0] in ("shape", "eval"))


def test_imports_point_one_way():
    wrong = [
        f"{location(path)}:{line} imports {module}"
        for path in SOURCES
        if location(path) not in ENTRANCES
        for line, module in imports(path)
        if module.startswith("eval") or LEVEL[folder_of(module)] > LEVEL[folder_of(module_of(path))]
    ]
    assert not wrong


def test_folders_of_one_level_do_not_import_each_other():
    seen = {(folder_of(module_of(path)), folder_of(name)) for path in SOURCES for _, name in imports(path)}
    assert not {(one, other) for one, other in seen if one != other and LEVEL[one] == LEVEL[other]}


def test_nothing_imports_a_command():
    others = [path for path in [*SOURCES, *(ROOT / "eval").rglob("*.py")] if "cli" not in path.parts]
    wrong = [
        f"{location(path)}:{line}"
        for path in others
        for line, module in imports(path)
        if folder_of(module) == "cli" and location(path) not in ENTRANCES
    ]
    assert not wrong


@pytest.mark.parametrize("folder", ["shape", "eval"])
def test_no_file_is_long(folder):
    lengths = {
        location(path): len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py")
    }
    assert not {name: lines for name, lines in lengths.items() if lines > MOST_LINES}


@pytest.mark.parametrize("folder", ["shape", "eval"])
def test_text_is_utf8_on_every_system(folder):
    """Windows would take cp1252. ruff's PLW1514 sees this too, but only where it can tell that something is a path."""
    wrong = [
        f"{location(path)}:{node.lineno}"
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and takes_the_systems_encoding(node)
    ]
    assert not wrong


def takes_the_systems_encoding(call: ast.Call) -> bool:
    """Whether a call opens a file, or the output of a process, as text without an encoding."""
    name, named = ast.unparse(call.func), {keyword.arg for keyword in call.keywords}
    modes = [ast.unparse(given).strip("'") for given in (*call.args, *(keyword.value for keyword in call.keywords))]
    opens = name != "os.open" and name.split(".")[-1] in ("open", "fdopen", "read_text", "write_text")
    opens &= not any("b" in mode and set(mode) <= set("rwxab+") for mode in modes)
    return "encoding" not in named and (opens or (name.startswith("subprocess.") and "text" in named))
