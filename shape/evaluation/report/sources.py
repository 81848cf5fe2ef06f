"""Files of results, found below a folder and read."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from shape.errors import DataError
from shape.evaluation.environment import Environment
from shape.evaluation.files import loads
from shape.evaluation.report import traced
from shape.evaluation.results import SpeedResults
from shape.files import reading

T = TypeVar("T")
Content = TypeVar("Content")
_PARTS_OF_CHECK = {"target", "costs", "chains", "break_even", "measured"}


@dataclass(frozen=True)
class Source(Generic[T]):
    """One file of results.

    Attributes:
        kind: speed, efficiency, ablation, analysis, check or trace.
        name: its path below the folder of results.
        title: heading of what it holds; about: target, prompts, temperature and the like in a sentence.
        environment: None where it was not recorded.
    """

    kind: str
    name: str
    title: str
    about: str
    environment: Environment | None
    data: T

    @property
    def date(self) -> str:
        return self.environment.date if self.environment else ""


def find(folder: Path) -> list[Source[Any]]:
    """Everything below a folder that the report knows, in the order of the paths.

    Raises:
        DataError: the folder is missing or holds nothing known, or a known file cannot be read.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; give the one that measurements were written to")
    found: list[Source[Any]] = []
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not path.is_file():
            continue
        if path.suffix == ".json":
            text = path.read_text(encoding="utf-8", errors="replace")
            read = _READERS.get(path.name) or (_check if _is_check(text) else None)
            if read is not None:
                found.append(_load(read, name, text))
        elif path.suffix == ".jsonl" and (trace := traced.read(path)) is not None:
            found.append(_load(_trace, name, trace))
    if not found:
        raise DataError(
            f"{folder} holds no results that the report knows (results.json, efficiency.json, ablation.json, "
            "analysis.json, a report of shape check, traces); measure with shape bench --output "
            f"{folder}/bench"
        )
    return found


def _load(read: Callable[[str, Content], Source[Any]], name: str, content: Content) -> Source[Any]:
    try:
        with reading("it", DataError, "it is damaged or of another version: measure again, or move it away"):
            return read(name, content)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None


def _is_check(text: str) -> bool:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(values, dict) and values.keys() >= _PARTS_OF_CHECK


def _speed(name: str, text: str) -> Source[SpeedResults]:
    results = SpeedResults.from_json(text)
    return Source("speed", name, results.label, results.about, results.environment, results)


def _efficiency(name: str, text: str) -> Source[Any]:
    record = loads(text)
    options = record["options"]
    asked = f"{options['limit']} prompts of {options['prompts'] or 'bench.jsonl'}"  # of records from before it was kept
    about = (
        f"Predictor {options['predictor']}, {record.get('measured', asked)}, at most {options['max_new_tokens']} new "
        "tokens."
    )
    return _recorded("efficiency", name, options["label"] or "Engine efficiency", about, record)


def _ablation(name: str, text: str) -> Source[Any]:
    record = loads(text)
    first = next(iter(record["settings"].values()))
    about = (
        f"Target {first['target']} ({first['parameters'] / 1e6:.1f}M parameters, {first['dtype']}), {first['count']} "
        f"prompts of {first['prompts']}, at most {record['max_new_tokens']} new tokens, seeds "
        f"{', '.join(map(str, record['seeds']))}; speed-ups are over {first['baseline']}. Variants were trained alike "
        "and measured side by side, always drafting."
    )
    return _recorded("ablation", name, record["title"], about, record)


def _analysis(name: str, text: str) -> Source[Any]:
    record = loads(text)
    options = record["options"]
    about = (
        f"Target {options['target'] or 'of the predictor'}, predictor {options['predictor']}, {record['texts']} texts "
        f"of {options['prompts'] or options['data'] or 'answers.jsonl.gz'}, {record['positions']['drafts']} positions "
        "for drafts, temperature 1."
    )
    return _recorded("analysis", name, options["label"] or "Does transport pay?", about, record)


def _check(name: str, text: str) -> Source[Any]:
    record = loads(text)
    target, settings = record["target"], record.get("settings")
    about = (
        f"Target {target['name']} ({target['parameters'] / 1e6:.1f}M parameters, {target['dtype']}, {target['device']})"
    )
    if settings:
        about += (
            f", {settings['limit']} prompts of {settings['prompts']}, at most {settings['max_new_tokens']} new tokens, "
            f"temperature {settings['temperature']:g}, batch {settings.get('batch_size', settings.get('rows'))}"
        )
    return _recorded("check", name, f"shape check, {Path(target['name']).name}", f"{about}.", record)


def _recorded(kind: str, name: str, title: str, about: str, record: dict[str, Any]) -> Source[Any]:
    environment = record.get("environment")
    return Source(kind, name, title, about, Environment(**environment) if environment else None, record)


_TOLD = {"target", "dtype", "drafter", "acceptance", "temperature", "seed", "environment"}


def _trace(name: str, trace: traced.Traced) -> Source[traced.Traced]:
    call = trace.call
    if not call.keys() >= _TOLD:  # its writer says what it likes
        about = "Not all of target, drafter and sampling was recorded."
        return Source("trace", name, Path(name).stem, about, None, trace)
    greedy = call["temperature"] == 0
    how = "greedy" if greedy else f"{call['acceptance']}, temperature {call['temperature']:g}"
    about = (
        f"One answer of target {call['target']} ({call['dtype']}), drafter {call['drafter']}, acceptance "
        f"{call['acceptance']}, temperature {call['temperature']:g}, seed {call['seed']}."
    )
    return Source("trace", name, f"{call['drafter']}, {how}", about, Environment(**call["environment"]), trace)


_READERS: dict[str, Callable[[str, str], Source[Any]]] = {
    "results.json": _speed,
    "efficiency.json": _efficiency,
    "ablation.json": _ablation,
    "analysis.json": _analysis,
    "check.json": _check,  # or of any other name: the user chooses it
}
