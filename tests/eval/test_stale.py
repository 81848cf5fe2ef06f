"""Results can be traced to clean code; which are older than the code that they measure is listed, and fails nothing."""

import json
import subprocess
import warnings

import pytest

from eval import stale
from eval.stale import MEASURES, ROOT, WAITING, Result, results


@pytest.fixture
def history():
    if not (ROOT / ".git").exists() or stale.git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("this is no checkout with its history")


def test_every_result_is_covered_and_of_clean_code(history):
    flaws = {one.name: one.flaw for one in results()}
    new = {name: flaw for name, flaw in flaws.items() if flaw and name not in WAITING}
    assert not new, "commit the code first, and measure again; families are in eval/stale.py"
    mended = [name for name in WAITING if not flaws.get(name)]
    assert not mended, "take what was measured again out of WAITING in eval/stale.py"


def test_what_results_measure_exists():
    found = [one.name for one in results()]
    for family, paths in MEASURES.items():
        assert all((ROOT / path).exists() for path in paths), family
    assert len(found) > 30 and set(WAITING) <= set(found)


def test_stale_results_are_listed(history):
    old = [f"{one.name}: {one.later} later commits" for one in results() if one.name not in WAITING and one.later]
    if old:
        warnings.warn(f"{len(old)} results are older than the code that they measure: {'; '.join(old)}", stacklevel=1)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with code, a result of its first commit, and a commit that changes other code."""

    def run(*arguments: str) -> str:
        who = ["-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], capture_output=True, text=True).stdout

    def commit(name: str) -> str:
        (tmp_path / name).write_text(str(len(list(tmp_path.iterdir()))) + name)
        run("add", "-A")
        run("commit", "-q", "-m", name)
        return run("rev-parse", "--short=12", "HEAD").strip()

    run("init", "-q")
    monkeypatch.setattr(stale, "ROOT", tmp_path)
    monkeypatch.setattr(stale, "MEASURES", {"speed/": ("engine.py",), "speed/other/": ("other.py",)})
    stale.in_history.cache_clear()
    stale.commits_since.cache_clear()
    yield commit
    stale.in_history.cache_clear()
    stale.commits_since.cache_clear()


def test_a_result_is_stale_once_its_code_changes(checkout, tmp_path):
    folder = tmp_path / "results" / "speed" / "one"
    folder.mkdir(parents=True)
    first = checkout("engine.py")
    (folder / "results.json").write_text(json.dumps({"environment": {"commit": first}, "runs": [{"commit": first}]}))
    (folder / "results.md").write_text("of the same name: not looked at")
    (folder / "more.md").write_text(f"measured at commit {first[:9]}; some command")
    checkout("other.py")
    both = list(results(tmp_path / "results"))
    assert [one.name for one in both] == ["speed/one/more.md", "speed/one/results.json"]
    assert [one.flaw for one in both] == [None, None] and [one.later for one in both] == [0, 0]
    stale.commits_since.cache_clear()
    (tmp_path / "engine.py").write_text("changed")
    checkout("other.py")
    assert [one.later for one in results(tmp_path / "results")] == [1, 1]


@pytest.mark.parametrize(
    ("name", "commits", "flaw"),
    [
        ("speed/x.json", {"{}-dirty"}, "is dirty or not in the history"),
        ("speed/x.json", {"{}", "unknown"}, "commit unknown is dirty"),
        ("speed/x.json", {"0123456789ab"}, "commit 0123456789ab is dirty or not in the history"),
        ("speed/x.json", set(), "names no commit"),
        ("elsewhere/x.json", {"{}"}, "no family"),
    ],
)
def test_what_cannot_be_traced_says_why(checkout, name, commits, flaw):
    first = checkout("engine.py")
    assert flaw in Result(name, stale._measures(name), {one.format(first) for one in commits}).flaw


def test_the_nearest_family_counts(checkout):
    assert stale._measures("speed/other/results.json") == ("other.py",)
    assert stale._measures("speed/results.json") == ("engine.py",)
