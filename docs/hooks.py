"""What the documentation includes and does not copy: options of the commands, measured tables, READMEs of folders."""

import re
from itertools import groupby
from pathlib import Path
from posixpath import dirname, relpath
from typing import Any

from commands import ROOT, page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from shape.cli.main import COMMANDS, GROUPS, line

_RESULTS = ROOT / "eval" / "results"
_SHOWN = (".md", ".png", ".svg")
# Pages that lie beside what they describe, by their place in the site.
_ELSEWHERE = {
    "reference/configurations.md": ROOT / "configs/README.md",
    "results/protocols.md": ROOT / "eval/README.md",
    "guides/recipes.md": ROOT / "train/README.md",
    "guides/examples.md": ROOT / "examples/README.md",
    "contributing.md": ROOT / "CONTRIBUTING.md",
    "changelog.md": ROOT / "CHANGELOG.md",
}
# Sources that links lead to in the repository, and what the site has in their place, beside the pages of commands.
_DESCRIBED = {
    "shape/cli/main.py": "reference/commands/index.md",
    "shape/generation/stats.py": "reference/decoding.md#shape.generation.stats.DecodeStats",
    "shape/drafters/base.py": "reference/drafters.md#shape.drafters.base.Drafter",
}
_LINK = re.compile(r"\]\(([^)#:\s]+\.\w+)")
_COMMANDS = """# Commands

`shape NAME` and `python -m shape.NAME` are the same. `--help` shows the options that people use, `--help-all` all of
them. `--config FILE` takes options from a YAML file, `--print_config` prints one. Precedence: command line > config
file > defaults. A mistake in the input ends with one sentence and exit status 2.
"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the two places of the navigation whose pages are found, not named."""
    sections = {title: entries for section in config.nav or () for title, entries in section.items()}
    commands = [{name: _place(name)} for name in COMMANDS]
    sections["Reference"].insert(0, {"Commands": ["reference/commands/index.md", *commands]})
    sections["Results"] += _tables()
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here or lie elsewhere."""
    listed = [
        f"**{group}**\n\n" + "\n".join(f"- [`shape {name}`]({name}.md): {line(name)}" for name in names)
        for group, names in GROUPS.items()
    ]
    made = {
        "reference/commands/index.md": "\n\n".join([_COMMANDS, *listed, ""]),
        **{_place(name): page(f"shape.{name}") for name in COMMANDS},
    }
    for place, content in made.items():
        files.append(File.generated(config, place, content=content))
    tables = {f"results/{path.relative_to(_RESULTS)}": path for path in _RESULTS.rglob("*") if path.suffix in _SHOWN}
    for place, source in {**_ELSEWHERE, **tables}.items():
        files.append(File.generated(config, place, abs_src_path=str(source)))
    return files


def _place(command: str) -> str:
    return f"reference/commands/{command}.md"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    if page.file.abs_src_path is None:  # made here, with links of the site
        return markdown
    folder = Path(page.file.abs_src_path).parent
    pages = {Path(file.abs_src_path).resolve(): file.src_uri for file in files if file.abs_src_path}
    pages |= {ROOT / "shape" / "cli" / f"{name}.py": _place(name) for name in COMMANDS}
    pages |= {ROOT / path: place for path, place in _DESCRIBED.items()}

    def moved(link: re.Match[str]) -> str:
        found = pages.get((folder / link[1]).resolve())
        return f"]({relpath(found, dirname(page.file.src_uri) or '.')}" if found else link[0]

    return _LINK.sub(moved, markdown)


def _tables() -> list[Any]:
    """Navigation of the measured tables, by the folder or file that they lie in."""
    found = sorted(path.relative_to(_RESULTS) for path in _RESULTS.rglob("*.md") if path.name != "README.md")
    entries: list[Any] = []
    for name, group in groupby(found, key=lambda path: path.parts[0]):
        pages = [{_label(path, name): f"results/{path}"} for path in group]
        entries.append({name: pages} if len(pages) > 1 else {Path(name).stem: next(iter(pages[0].values()))})
    return entries


def _label(path: Path, folder: str) -> str:
    """A table's name below its folder: that of its own folder where it has one."""
    return path.parent.name if path.parent.name != folder else path.stem
