"""Every file that is read, cut anywhere, with bits flipped, or of the right syntax and the wrong content.

It is read, or refused by one sentence of ours, and never by what a library has to say.
"""

import gzip
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import ROOT, write_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from eval.all_results import AllResults
from shape.data.journal import AnswerJournal
from shape.data.reading import load_conversations, load_prompts
from shape.drafters.recipes.compile import read_misses
from shape.drafters.recipes.pack import Pack, Recipe
from shape.errors import CheckpointError, ConfigError, DataError, FeatureStoreError, ShapeError, UnsupportedTarget
from shape.evaluation.journal import Journal
from shape.evaluation.report import traced
from shape.evaluation.report.sources import find
from shape.features.store import FeatureStore
from shape.generation.decoder import ShapeDecoder
from shape.generation.loading import load_predictor
from shape.generation.timing import _kept
from shape.target.model import Target
from shape.training.checkpoints import sound_checkpoint
from shape.training.parsing import read_options

# As json reads them; numbers stay small, since a size that is merely too large is a size.
leaves = st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text("a/0.é", max_size=4)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=2)
)


@st.composite
def damages(draw) -> Callable[[bytes], bytes]:
    """What happens to the bytes of a file: where, as a share of them."""
    kind, at, bit = (
        draw(st.sampled_from(["cut", "flip", "flips", "other", "none"])),
        draw(st.floats(0, 1)),
        draw(st.integers(0, 7)),
    )
    several = draw(st.lists(st.floats(0, 1), min_size=1, max_size=4))
    other = draw(st.binary(max_size=20) | st.just(b"[]") | st.just(b"null") | st.just(b'"a"') | st.just(b"[" * 100_000))

    def damage(content: bytes) -> bytes:
        if kind in ("cut", "none") or not content:
            return content[: int(at * len(content))] if kind == "cut" else b""
        if kind == "other":
            return other
        changed = bytearray(content)
        for share in several if kind == "flips" else [at]:
            # Most of a file of tensors is numbers; what they are called comes first.
            changed[min(int(share**3 * len(content)), len(content) - 1)] ^= 1 << bit
        return bytes(changed)

    return damage


@st.composite
def replacements(draw) -> Callable[[Any], Any]:
    """Another value at some place of a JSON document, or none."""
    path, other, gone = draw(st.lists(st.floats(0, 0.999), min_size=1, max_size=5)), draw(values), draw(st.booleans())

    def replaced(document: Any, depth: int = 0) -> Any:
        if depth == len(path) or not isinstance(document, dict | list) or not document:
            return other
        keys = list(document) if isinstance(document, dict) else list(range(len(document)))
        key, changed = keys[int(path[depth] * len(keys))], document.copy()
        if gone and depth + 1 == len(path):
            del changed[key]
        else:
            changed[key] = replaced(document[key], depth + 1)
        return changed

    return replaced


def fuzz(examples: int = 60):
    """The same examples at every run."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=examples, derandomize=True, database=None, suppress_health_check=checks)


def attempt(load: Callable[[], Any], *errors: type[ShapeError]) -> str:
    """What is said, if anything."""
    try:
        load()
    except errors as error:
        said = str(error)
        assert "\n" not in said and len(said) < 1000, said
        return said
    return ""


# ------------------------------------------------------------------------------------------------- a predictor


@pytest.fixture(scope="module")
def drafting(tiny_target, tiny_predictor_folder):
    """Decodes with a predictor of the tiny target, however it is."""
    ids = torch.tensor([[40, 50, 60]])
    plain = ShapeDecoder(tiny_target).generate(ids, max_new_tokens=5)

    def load(folder: Path) -> None:
        decoder = ShapeDecoder.from_pretrained(folder, target=tiny_target, fall_back=False)
        assert torch.equal(decoder.generate(ids, max_new_tokens=5), plain)

    load(tiny_predictor_folder)
    return load


def test_what_is_no_predictor_is_called_what_it_is(tiny_target_folder, tiny_predictor_folder, tmp_path, caplog):
    with pytest.raises(CheckpointError, match="is a language model and no predictor; give it as target"):
        load_predictor(tiny_target_folder)
    with pytest.raises(CheckpointError, match=r"config\.json is a file; give the folder of a predictor"):
        load_predictor(tiny_target_folder / "config.json")
    folder = shutil.copytree(tiny_predictor_folder, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with pytest.raises(CheckpointError, match=r"not those of its configuration \(.*missing, too many or of another"):
        load_predictor(folder)
    assert not caplog.records


def test_a_target_whose_weights_are_cut_or_gone_says_so(tiny_target_folder, tmp_path):
    folder = shutil.copytree(tiny_target_folder, tmp_path / "copy")
    weights = folder / "model.safetensors"
    for damage in (lambda: weights.write_bytes(weights.read_bytes()[:20]), weights.unlink):
        damage()
        with pytest.raises(UnsupportedTarget, match="missing or damaged: copy or download them again"):
            Target.load(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_damaged_target(tiny_target_folder, tmp_path, name):
    folder = shutil.copytree(tiny_target_folder, tmp_path / "copy")
    whole = (folder / name).read_bytes()
    for cut in (0, 1, 8, 100, len(whole) // 2, len(whole) - 3):
        (folder / name).write_bytes(whole[:cut])
        said = attempt(lambda: ShapeDecoder.from_pretrained(folder), ShapeError)
        assert str(folder) in said, (cut, said)
    (folder / name).write_text("[]")
    assert str(folder) in attempt(lambda: ShapeDecoder.from_pretrained(folder), ShapeError)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_predictor(drafting, tiny_predictor_folder, tmp_path, name):
    folder = shutil.copytree(tiny_predictor_folder, tmp_path / "copy")
    whole, refused = (folder / name).read_bytes(), []

    @fuzz(50)
    @given(damages())
    def check(damage):
        (folder / name).write_bytes(damage(whole))
        refused.append(attempt(lambda: drafting(folder), CheckpointError, ConfigError))

    check()
    assert sum(map(bool, refused)) > 20
    for cut in (0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 3):
        (folder / name).write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"^predictor .*copy cannot be read; give a folder .*\)$"):
            load_predictor(folder)


def test_a_predictors_configuration_of_wrong_types(drafting, tiny_predictor_folder, tmp_path):
    folder = shutil.copytree(tiny_predictor_folder, tmp_path / "copy")
    whole = json.loads((folder / "config.json").read_text())

    @fuzz(60)
    @given(replacements())
    def check(replaced):
        (folder / "config.json").write_text(json.dumps(replaced(whole)))
        attempt(lambda: drafting(folder), ShapeError)

    check()
    for wrong in ({"draft": [1]}, {"draft": {"depth": "a"}}, {"draft": {"width": 0}}, {"target_identity": {"name": 3}}):
        (folder / "config.json").write_text(json.dumps(whole | wrong))
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_predictor(folder)


def test_a_predictors_weights_of_another_kind(tiny_predictor_folder, tmp_path):
    folder = shutil.copytree(tiny_predictor_folder, tmp_path / "copy")
    weights = load_file(folder / "model.safetensors")
    name = next(iter(weights))
    not_finite = weights[name].clone()
    not_finite.view(-1)[3] = float("nan")
    for changed in ({name: not_finite}, {name: weights[name][:-1].clone()}, {"stranger": torch.zeros(1)}):
        save_file(weights | changed, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=r"^(predictor|the weights of predictor) "):
            load_predictor(folder)


# ------------------------------------------------------------------------------------------------- features


def test_a_damaged_feature_store(store, tmp_path):
    folder = Path(shutil.copytree(store.storage.folder, tmp_path / "copy"))
    files = [folder / "manifest.json", next(folder.glob("shard-*"))]
    whole = [file.read_bytes() for file in files]

    def read() -> None:
        found = FeatureStore(folder)
        assert [len(each.input_ids) for each in found] == [len(each.input_ids) for each in store]

    read()

    @fuzz(150)
    @given(st.sampled_from([0, 1]), damages())
    def check(which, damage):
        files[which].write_bytes(damage(whole[which]))
        attempt(read, FeatureStoreError)
        files[which].write_bytes(whole[which])

    @fuzz(100)
    @given(replacements())
    def check_types(replaced):
        files[0].write_text(json.dumps(replaced(json.loads(whole[0]))))
        attempt(lambda: FeatureStore(folder), FeatureStoreError)
        files[0].write_bytes(whole[0])

    check()
    check_types()
    content = bytearray(whole[1])
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    at = start + header["offsets"]["data_offsets"][0] + 8  # where the second conversation starts
    content[at : at + 8] = (10**9).to_bytes(8, "little")
    files[1].write_bytes(content)
    with pytest.raises(FeatureStoreError, match="is damaged; delete it there and extract again"):
        FeatureStore(folder)


# ------------------------------------------------------------------------------------------------- the others


def kinds(folder: Path, tiny_target) -> dict[str, tuple[bytes, Callable[[Path], Any], type[ShapeError]]]:
    """By name of a file: what a sound one holds, who reads it, and what they raise."""
    pack = folder / "pack.gz"
    Pack(tiny_target.identity, (Recipe((1, 2), (3, 4), 5), Recipe((2, 3), (4,), 2)), 2, 3).save(pack)
    turns = [{"from": "human", "value": "Hé"}, {"from": "gpt", "value": "Ho", "finished": False}]
    rows = [{"id": "a", "conversations": turns}, {"messages": [{"role": "user", "content": "x"}]}, {"text": "abc"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    call = {"type": "call", "rows": 1}
    step = {"type": "step", "step": 1, "rows": [0], "lengths": [3], "draft": 0.1, "verify": 0.1, "commit": 0.1}
    token = {"type": "token", "row": 0, "step": 1, "depth": None, "event": "bonus", "emitted": True}
    token |= {"source": None, "parent": None}
    records = "".join(json.dumps(one) + "\n" for one in (call, step, token)).encode()
    costs = {"key": {"batch_size": 1, "context": 8, "verify": {"1": 0.1, "2": 0.2}, "draft": {}}}
    torch.save({"step": torch.ones(9)}, folder / "last.ckpt")
    answered = b'{"a": 1}\n[[0, {"id": "x"}, 1, null], [1, null, 0, "y"]]\n'

    def options(path: Path) -> None:
        with suppress(Exception):
            if isinstance(yaml.safe_load(path.read_bytes()), dict):
                return  # what the names of options are is for their parser to say, which takes its time
        read_options(str(path))

    def conversations(path: Path) -> None:
        attempt(lambda: load_conversations(path, skip_bad_rows=True, require_answers=False), DataError)
        load_conversations(path)

    def prompts(path: Path) -> None:
        load_prompts(path)

    def answers(path: Path) -> None:
        journal = AnswerJournal(path, {"a": 1})
        assert all(len(entry) == 4 for entry in journal.entries())

    def summary(path: Path) -> None:
        found = traced.read(path)
        _ = found and (found.acceptance_length, found.lengths, found.milliseconds, found.by_depth, found.sources)

    def costs_kept(path: Path) -> None:
        if not _kept(path):  # which is measured again
            raise ConfigError("nothing is kept")

    return {
        "pack.gz": (pack.read_bytes(), Pack.load, CheckpointError),
        "misses.jsonl": (b'{"prefix": [1, 2], "tokens": [3]}\n' * 2, read_misses, CheckpointError),
        "rows.jsonl": (lines, conversations, DataError),
        "rows.jsonl.gz": (gzip.compress(lines, mtime=0), conversations, DataError),
        "rows.json": (json.dumps(rows).encode(), conversations, DataError),
        "rows.txt": (b"one\ntext\n\nanother\xc3\xa9\n", conversations, DataError),
        "prompts.jsonl": (b'{"turns": ["a", "b"], "reference": ["c", "d"]}\n{"prompt": "a"}\n', prompts, DataError),
        "costs.json": (json.dumps(costs).encode(), costs_kept, ConfigError),
        "records.jsonl": (b'{"a": 1}\n{"id": "x"}\n', lambda path: Journal(path, {"a": 1}), ConfigError),
        "answers.partial": (answered, answers, (DataError, ConfigError)),
        "some.jsonl": (records, summary, DataError),
        "run.yaml": (b"target: x\n", options, ConfigError),
        "last.ckpt": ((folder / "last.ckpt").read_bytes(), sound_checkpoint, CheckpointError),
    }  # fmt: skip


NAMES = [
    "pack.gz", "misses.jsonl", "rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.txt", "prompts.jsonl", "costs.json",
    "records.jsonl", "answers.partial", "some.jsonl", "run.yaml", "last.ckpt",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_other_files(tiny_target, tmp_path, name):
    whole, load, errors = kinds(tmp_path, tiny_target)[name]
    errors = errors if isinstance(errors, tuple) else (errors,)
    path = tmp_path / name
    path.write_bytes(whole)
    load(path)
    damaged, mistyped = [], []  # what is said

    @fuzz(45 if name == "run.yaml" else 120)  # which takes longest to read
    @given(damages())
    def check(damage):
        path.write_bytes(damage(whole))
        damaged.append(attempt(lambda: load(path), *errors))

    @fuzz(100)
    @given(replacements(), st.integers(0, 9))
    def check_types(replaced, at):
        lines = [json.loads(line) for line in whole.decode().splitlines()]
        lines[at % len(lines)] = replaced(lines[at % len(lines)])
        write_rows(path, *lines)
        mistyped.append(attempt(lambda: load(path), *errors))

    check()
    if name.split(".")[-1] in ("jsonl", "json", "partial"):
        check_types()
        assert sum(map(bool, mistyped)) > 20
    assert sum(map(bool, damaged)) > 10


RESULTS = {
    "results.json": "recipes/free-prose", "quality.json": "quality/gsm8k", "efficiency.json": "batches/shipped",
    "ablation.json": "ablations/features", "analysis.json": "analysis/shipped",
}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_results(tmp_path, name):
    """As the report and the tables of the paper find them."""
    whole = (ROOT / "eval/results" / RESULTS[name] / name).read_bytes()
    record = json.loads(whole)

    def read() -> None:
        attempt(lambda: AllResults().add(tmp_path), DataError)
        attempt(lambda: find(tmp_path), DataError)

    @fuzz(30)
    @given(damages(), replacements(), st.booleans())
    def check(damage, replaced, valid):
        (tmp_path / name).write_bytes(json.dumps(replaced(record)).encode() if valid else damage(whole))
        read()

    (tmp_path / name).write_bytes(whole)
    AllResults().add(tmp_path)
    if name != "quality.json":  # which is not in the report
        assert find(tmp_path)
    check()
