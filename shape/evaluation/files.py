"""Results as JSON files, those of earlier versions included."""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Self

from shape.errors import DataError
from shape.evaluation.environment import Environment
from shape.files import reading, typed

SCHEMA_VERSION = 3
# Version 1 says "plain" where later ones say "autoregressive"; 1 and 2 project speed-ups to a target of 8B.
_READABLE = (1, 2, SCHEMA_VERSION)
_OLD = re.compile(r"^(equal_)?(plain|drafter-alone)(?=$|, T = )")
_NEW = {"plain": "autoregressive", "drafter-alone": "unverified-lossy"}


def loads(text: str) -> Any:
    """Parsed JSON in which names of version 1 are today's."""
    return json.loads(text, object_hook=_renamed)


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    return {_today(name): _today(value) if isinstance(value, str) else value for name, value in values.items()}


def _today(name: str) -> str:
    return _OLD.sub(lambda old: f"{old[1] or ''}{_NEW[old[2]]}", name)


def json_by_line(head: dict[str, Any], name: str, records: Iterable[dict[str, Any]]) -> str:
    """A JSON object, indented, whose last entry is a list of records, each on a line: they hold many numbers."""
    lines = ",\n".join(map(json.dumps, records))
    return f'{json.dumps(head, indent=1)[:-2]},\n "{name}": [\n{lines}\n]}}\n'


@dataclass(frozen=True)
class Results:
    """Base of dataclasses that hold records, one for each prompt, and what was asked for.

    Attributes:
        what: how errors call it.
        record: the class of its records, with a method `from_dict`.
        named: the setting that describes every method by its name.
    """

    what: ClassVar[str]
    record: ClassVar[Any]
    named: ClassVar[str]
    label: str
    settings: dict[str, Any]
    environment: Environment
    records: tuple[Any, ...]
    skipped: dict[str, str]

    def write(self, figures: dict[str, Any]) -> str:
        """All fields as JSON, and figures for readers, which are not read back."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "records"}
        own["environment"] = asdict(self.environment)
        head = {"schema_version": SCHEMA_VERSION, **own, **figures}
        return json_by_line(head, "records", (asdict(record) for record in self.records))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises `DataError` on another schema, or where it is damaged."""
        with reading(cls.what, DataError, "measure again"):
            values = loads(text)
            if (version := values.get("schema_version")) not in _READABLE:
                raise DataError(
                    f"{cls.what} has schema version {version}, this program reads {SCHEMA_VERSION}; measure again"
                )
            records = tuple(map(cls.record.from_dict, values["records"]))
            found: Any = typed(cls, {each.name: values[each.name] for each in fields(cls)} | {"records": []})
            typed(dict[str, str], found.settings[cls.named])
            return replace(found, records=records)
