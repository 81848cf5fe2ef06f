"""Writes the conversations that ship with the repository: ``python data/make_conversations.py``.

The files are a pure function of the seed and can be made again byte for byte; a recipe that wants more text asks for
other seeds. The six kinds are those that a small target can learn well and that decode differently: open dialogue,
arithmetic, structured output, code, lists, and copying.
"""

import argparse
import gzip
import io
import json
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from random import Random
from typing import Any

from generator.code import code
from generator.dialogue import dialogue
from generator.facts import json_extraction
from generator.lists import lists
from generator.rewrite import rewrite
from generator.sums import sums
from generator.words import Exchange

Row = dict[str, Any]

SEED = 20
TRAIN_ROWS, VALIDATION_ROWS, BENCH_ROWS = 4_000, 200, 96
KINDS: dict[str, Callable[[Random], list[Exchange]]] = {
    "dialogue": dialogue,
    "sums": sums,
    "json": json_extraction,
    "code": code,
    "lists": lists,
    "rewrite": rewrite,
}


def first_prompt(row: Row) -> str:
    return row["conversations"][0]["value"] if "conversations" in row else row["turns"][0]


def make_rows(count: int, seed: int, name: str, taken: Collection[str] = ()) -> list[Row]:
    """``count`` ShareGPT rows, the kinds in turn; no first user turn occurs twice or is among ``taken``."""
    seen, rows, kinds = set(taken), [], list(KINDS)
    for index in range(count):
        kind = kinds[index % len(kinds)]
        rng = Random(f"{name}-{seed}-{index}")  # a string seed is hashed, the same on every platform
        exchanges = KINDS[kind](rng)
        while exchanges[0][0] in seen:
            exchanges = KINDS[kind](rng)
        seen.add(exchanges[0][0])
        turns = [
            {"from": who, "value": text} for pair in exchanges for who, text in zip(("human", "gpt"), pair, strict=True)
        ]
        rows.append({"id": f"{name}-{seed}-{index:05d}", "category": kind, "conversations": turns})
    return rows


def to_prompt(row: Row) -> Row:
    turns = [turn["value"] for turn in row["conversations"] if turn["from"] == "human"]
    return {"id": row["id"], "category": row["category"], "turns": turns}


def make_splits(seed: int = SEED, train_rows: int = TRAIN_ROWS) -> dict[str, list[Row]]:
    """The splits; the small ones choose their prompts first, so that a longer train split moves nothing."""
    bench = [to_prompt(row) for row in make_rows(BENCH_ROWS, seed, "bench")]
    taken = {first_prompt(row) for row in bench}
    validation = make_rows(VALIDATION_ROWS, seed, "validation", taken)
    taken |= {first_prompt(row) for row in validation}
    return {"train": make_rows(train_rows, seed, "train", taken), "validation": validation, "bench": bench}


def json_lines(rows: Iterable[Row]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def packed(content: bytes) -> bytes:
    """gzip without the clock, the file name and the platform in its header."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as file:
        file.write(content)
    return buffer.getvalue()


def write_splits(folder: Path, seed: int = SEED, train_rows: int = TRAIN_ROWS) -> None:
    splits = make_splits(seed, train_rows)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "validation"):
        (folder / f"{name}.jsonl.gz").write_bytes(packed(json_lines(splits[name])))
    (folder / "bench.jsonl").write_bytes(json_lines(splits["bench"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder to write to")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument(
        "--rows", type=int, default=TRAIN_ROWS, help="to train on; fewer of a seed are the first of more"
    )
    args = parser.parse_args()
    write_splits(args.output, args.seed, args.rows)


if __name__ == "__main__":
    main()
