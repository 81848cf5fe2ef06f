"""All results below a folder, of every kind that the paper's tables are made of."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.text_quality.results import QualityResults
from shape.errors import DataError
from shape.evaluation.files import loads
from shape.evaluation.results import SpeedResults
from shape.files import reading


@dataclass
class AllResults:
    """Results by path, relative to the folder that they were found in."""

    speed: dict[str, SpeedResults] = field(default_factory=dict)
    quality: dict[str, QualityResults] = field(default_factory=dict)
    efficiency: dict[str, dict[str, Any]] = field(default_factory=dict)
    ablation: dict[str, dict[str, Any]] = field(default_factory=dict)
    analysis: dict[str, dict[str, Any]] = field(default_factory=dict)
    latency: dict[str, dict[str, Any]] = field(default_factory=dict)
    harness: dict[str, dict[str, Any]] = field(default_factory=dict)
    trained: dict[str, dict[str, Any]] = field(default_factory=dict)  # config.json of exported predictors

    def add(self, folder: Path, below: str = "") -> None:
        """All results below a folder, if there is one.

        Raises:
            DataError: of another schema.
        """
        for path in sorted(folder.rglob("*.json")):
            name = f"{below}{path.relative_to(folder).as_posix()}"
            with reading(str(path), DataError, "measure again, or move it away"):
                self._add(name, path)

    def _add(self, name: str, path: Path) -> None:
        if path.name == "results.json":
            self.speed[name] = SpeedResults.from_json(path.read_text(encoding="utf-8"))
        elif path.name == "quality.json":
            self.quality[name] = QualityResults.from_json(path.read_text(encoding="utf-8"))
        elif path.stem in ("efficiency", "ablation", "analysis", "latency"):
            getattr(self, path.stem)[name] = loads(path.read_text(encoding="utf-8"))
        elif path.name.startswith("results_"):
            record = loads(path.read_text(encoding="utf-8"))
            if record.get("model_name") is not None and "results" in record:
                self.harness[name] = record
