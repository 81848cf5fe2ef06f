"""Which results are older than the code that they measure, and which do not say what code that was.

    python -m eval.stale

A result carries the commit of the code that made it: of clean code, for "-dirty" behind a commit means that nobody can
look it up. `MEASURES` says what code each family of results measures; a result is *stale* once a later commit has
changed some of it. What is stale is listed, here and in the tests' warnings, and fails no test: most commits change
code that some table measured, and a table is worth measuring again when the change may move its figures, which a
person judges. What does fail a test is a result that no family covers, or that says no commit, a dirty one, or one that
is not in the history, unless `WAITING` names it with the reason, from where it goes once it is measured again.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from eval import commands
from shape.evaluation.markdown import DASH, markdown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "eval" / "results"

_DECODED = (
    *(f"shape/{name}" for name in ("drafters", "generation", "networks", "target", "verification")),
    "shape/loops.py",
)
_DECODING = (*_DECODED, "shape/evaluation/runner.py")  # with the stopwatch of all measurements
_MEASURED = (
    *_DECODING,
    *(f"shape/evaluation/{name}.py" for name in ("speed", "estimates", "methods", "prompts", "results")),
)
_FORWARDS = ("shape/target", "shape/verification", "shape/evaluation/efficiency.py", "eval/forwards.py")
_TRAINING = ("shape/training", "shape/features", "shape/networks", "configs/ablations")
# By the beginning of a result's path below eval/results, the longest counts: the files and folders that it measures.
MEASURES = {
    "ablations/": (*_MEASURED, *_TRAINING, "eval/ablation"),
    "analysis/": ("shape/networks", "shape/verification", "eval/analysis", "eval/analyze.py"),
    "architectures": ("shape/target", "shape/verification", "eval/architectures.py", "eval/families.py"),
    "batches/": (*_DECODING, "shape/evaluation/efficiency.py"),
    "amx/": (*_MEASURED, "checkpoints/quickstart-shape"),
    "amx/loops/": (*_DECODING, "eval/loops.py"),
    "amx/peers/": (*_DECODING, "eval/peers"),
    "amx/precisions/": (*_FORWARDS, "eval/precisions.py"),
    "amx/products/": ("shape/target", "eval/products.py"),
    "avx2/": (*_MEASURED, "checkpoints/quickstart-shape"),
    "avx2/peers/": (*_DECODING, "eval/peers"),
    "avx2/precisions/": (*_FORWARDS, "eval/precisions.py"),
    "chat-12m/": _MEASURED,
    "choices/": ("shape/verification", "eval/choices.py"),
    "compressed/": (*_MEASURED, "eval/drafters.py"),
    "draft-shapes": (*_MEASURED, "eval/draft_shapes.py"),
    "drafters/": _MEASURED,
    "efficiency/": (*_DECODING, "shape/evaluation/efficiency.py"),
    "features/": ("shape/features", "eval/feature_throughput.py"),
    "gpu/": (*_MEASURED, "eval/gpu.py", "eval/gpu_steps.py"),
    "products/": ("shape/target", "eval/products.py"),
    "forwards/": _FORWARDS,
    "geodesic/": (*_MEASURED, "eval/drafters.py"),
    "lookahead/": (*_MEASURED, "eval/drafters.py"),
    "loops/": (*_DECODING, "eval/loops.py"),
    "openvino/": (*_DECODED, "eval/openvino.py"),
    "parity/": (*_DECODING, "shape/serving", "eval/parity.py"),
    "peers/": (*_DECODING, "eval/peers"),
    "precisions/": (*_FORWARDS, "eval/precisions.py"),
    "quality/": (*_DECODING, "eval/quality.py", "eval/text_quality"),
    "recipes/": (*_MEASURED, "eval/drafters.py"),
    "recurrent/": (*_DECODING, "eval/recurrent.py", "eval/peers/oracle.py"),
    "reproducible/": (*_DECODING, "eval/reproducible.py"),
    "rules/": _MEASURED,
    "serving/": ("shape/serving", "shape/drafters", "shape/networks", "eval/serve_vllm.py"),
    "shipped/": (*_MEASURED, "checkpoints/quickstart-shape"),
    "sizes/": ("shape/networks", "shape/target", "shape/generation/timing.py", "eval/default_sizes.py"),
    "tables/": ("eval/tables.py", "eval/paper_tables.py"),
    "tables/runs/latency/": (*_DECODING, "eval/latency.py"),
    "tables/runs/lookahead/": _MEASURED,
    "tables/runs/strategies/": (*_DECODING, "eval/quality.py", "eval/text_quality"),
    "training-memory/": ("shape/training", "shape/networks", "eval/training_memory.py"),
    "training-plans/": ("shape/training", "shape/features", "train", "eval/training_plans.py"),
    "training-speed/": ("shape/training", "shape/networks", "eval/training_speed.py"),
    "transport-cost/": (*_DECODING, "shape/training", "eval/transport_cost.py"),
    "warm-start/": (*_MEASURED, *_TRAINING[:3], "eval/warm_start.py"),
    "worthwhile/": (*_MEASURED, "eval/worthwhile.py"),
}
_DIRTY = "of code that differed from its commit; measure again"
_UNSAID = "made before commits were written down; measure again"
WAITING = {
    "parity/parity.json": _DIRTY,
    "serving/vllm.json": _UNSAID,
}
_CLEAN = re.compile(r"[0-9a-f]{7,40}")
_NAMED = re.compile(r"\bcommit ([0-9a-f]{7,40}(?:-dirty)?|unknown)")


class Result(NamedTuple):
    """A file of results: its path below eval/results, the code that it measures, and the commits that it names."""

    name: str
    measures: tuple[str, ...]
    commits: set[str]

    @property
    def flaw(self) -> str | None:
        """Why it cannot be traced to its code."""
        if not self.measures:
            return "no family of MEASURES covers it"
        if not self.commits:
            return "it names no commit"
        bad = sorted(one for one in self.commits if not _CLEAN.fullmatch(one) or not in_history(one))
        return f"commit {bad[0]} is dirty or not in the history" if bad else None

    @property
    def later(self) -> int:
        """Commits since the oldest of its own that changed what it measures."""
        return max((commits_since(one, self.measures) for one in self.commits), default=0)


def results(folder: Path = RESULTS) -> Iterator[Result]:
    """Every result: a JSON file, or a page that has none of its name beside it."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".json":
            yield Result(name, _measures(name), set(_recorded(json.loads(path.read_text(encoding="utf-8")))))
        elif path.suffix == ".md" and not path.with_suffix(".json").exists() and path.name != "README.md":
            yield Result(name, _measures(name), set(_NAMED.findall(path.read_text(encoding="utf-8"))))


def _measures(name: str) -> tuple[str, ...]:
    return MEASURES.get(max((one for one in MEASURES if name.startswith(one)), key=len, default=""), ())


def _recorded(value: Any) -> Iterator[str]:
    """What stands under the name "commit", at any depth."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        if key == "commit" and (inner is None or isinstance(inner, str)):
            yield inner or "unknown"
        else:
            yield from _recorded(inner)


def git(*arguments: str) -> str | None:
    """What git says of this checkout; None where it fails."""
    found = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, encoding="utf-8", check=False)
    return found.stdout.strip() if found.returncode == 0 else None


@cache
def in_history(commit: str) -> bool:
    return git("merge-base", "--is-ancestor", commit, "HEAD") is not None


@cache
def commits_since(commit: str, paths: tuple[str, ...]) -> int:
    return int(git("rev-list", "--count", f"{commit}..HEAD", "--", *paths) or 0)


def table() -> str:
    """What is stale or cannot be traced, as Markdown."""
    rows = []
    for one in results():
        flaw = WAITING.get(one.name) or one.flaw
        if flaw or one.later:
            rows.append(
                [one.name, ", ".join(sorted(one.commits)) or DASH, DASH if flaw else str(one.later), flaw or ""]
            )
    return markdown(["result", "measured at", "later commits to what it measures", "cannot be traced"], rows)


def stale() -> None:
    """Print what is older than the code that it measures."""
    print(table())


main = commands.one_of(stale)


if __name__ == "__main__":
    main()
