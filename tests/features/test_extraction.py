"""The feature store: what it holds, what it refuses, and that it survives interruption."""

import itertools
import json
import re
import shutil
import threading
from array import array
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from helpers import with_chat_template
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from training_runs import extraction_trainer

from shape import files
from shape.data.conversations import Conversation, Tokens
from shape.data.encoding import encode
from shape.errors import ConfigError, DataError, DiskSpaceError, FeatureStoreError, TargetMismatch
from shape.features import extraction
from shape.features.extraction import compute_features, extract, split_conversations
from shape.features.options import FeatureOptions
from shape.features.positions import eligible
from shape.features.store import FeatureStore
from shape.target.chat import Message
from shape.target.model import Target
from shape.training.run import _incomplete

OPTIONS = FeatureOptions(max_length=128, batch_size=3, shard_size=4)


def talk(number: int) -> Conversation:
    question = "what is " + "more " * (number % 5) + f"{number}?"
    answer = f"it is {number * 7}" + "!" * (number % 3)
    return Conversation(f"c{number}", (Message("user", question), Message("assistant", answer)))


CONVERSATIONS = [talk(number) for number in range(10)]


def run(target, directory, options=OPTIONS, conversations=CONVERSATIONS) -> FeatureStore:
    trainer = extraction_trainer()
    return extract(target, conversations, directory, options, trainer)


@pytest.fixture(scope="module")
def folder(tiny_target, tmp_path_factory) -> Path:
    """A complete store; copy it before changing it."""
    directory = tmp_path_factory.mktemp("store")
    run(tiny_target, directory)
    return directory


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.name != ".lock"}


def test_a_complete_folder_is_only_read(copy, tiny_target):
    (copy / ".lock").unlink(missing_ok=True)
    before = {path.name: path.stat().st_mtime_ns for path in [copy, *copy.iterdir()]}
    run(tiny_target, copy)
    assert {path.name: path.stat().st_mtime_ns for path in [copy, *copy.iterdir()]} == before


def test_for_a_complete_folder_the_target_stays_where_it_is(copy, tiny_target, monkeypatch):
    """The device may be too small for it."""
    monkeypatch.setattr(extraction, "place", lambda *_: pytest.fail("the target is moved"))
    run(tiny_target, copy)


def test_a_target_that_is_to_be_shared_out_computes_no_missing_shard(copy, tiny_target):
    (copy / "shard-00001.safetensors").unlink()
    with pytest.raises(FeatureStoreError, match="with shard_target none are computed; complete them"):
        extract(tiny_target, CONVERSATIONS, copy, OPTIONS, extraction_trainer(), _incomplete)


def test_space_is_estimated_by_every_kind_of_kinds_that_take_turns(tiny_target, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(extraction, "_ESTIMATE_SAMPLE", 4)
    short, long = (
        Conversation(text, (Message("user", "?"), Message("assistant", text))) for text in ("yes", "oh, yes")
    )
    least, most = (10 * len(encode(each, tiny_target.tokenizer, None).input_ids) for each in (short, long))
    run(tiny_target, tmp_path, conversations=[short, long] * 5)
    said = re.search(r"about (\d+) tokens", capsys.readouterr().out)
    assert said and least < int(said[1]) < most


class OtherMachines:
    """A Trainer of two processes, the other of which has written a shard that is seen here after a while, or never."""

    world_size = 2

    def __init__(self, shard: Path, seconds: float | None) -> None:
        self.strategy, self.shard, self.seconds = SimpleNamespace(barrier=lambda name: None), shard, seconds

    def predict(self, work, return_predictions):
        hidden = self.shard.rename(self.shard.with_name("not-yet"))
        if self.seconds is not None:
            threading.Timer(self.seconds, hidden.rename, [self.shard]).start()


def test_shards_of_another_machine_are_waited_for_with_an_end(copy, tiny_target, monkeypatch):
    shard = sorted(copy.glob("shard-*"))[-1]
    store = extract(tiny_target, CONVERSATIONS, copy, OPTIONS, OtherMachines(shard, 0.5))
    assert len(store) == len(CONVERSATIONS)
    monkeypatch.setattr(files, "_SECONDS_TO_APPEAR", 0.2)
    with pytest.raises(FeatureStoreError, match=r"written for .*copy is not to be seen by this one; give an output on"):
        extract(tiny_target, CONVERSATIONS, copy, OPTIONS, OtherMachines(shard, None))


def test_store_holds_what_the_target_computes(folder, tiny_target):
    store = FeatureStore(folder, tiny_target.identity)
    assert len(store) == len(CONVERSATIONS)
    assert len(contents(folder)) == 1 + 3  # manifest and ceil(10 / 4) shards, no leftovers
    for conversation, stored in zip(CONVERSATIONS, store, strict=True):
        encoded = encode(conversation, tiny_target.tokenizer, OPTIONS.max_length)
        assert torch.equal(stored.input_ids, encoded.input_ids)
        assert torch.equal(stored.loss_mask, encoded.loss_mask)
        fresh = compute_features(tiny_target, [encoded])[0]
        torch.testing.assert_close(stored.hidden, fresh, rtol=1e-4, atol=1e-4)


def test_a_forward_takes_so_many_tokens_at_most(tiny_target, monkeypatch):
    """With their padding, whatever the batch; a conversation that has more goes by itself."""
    texts = [encode(talk(number), tiny_target.tokenizer, 128) for number in range(9)]
    longest, sizes = max(len(text.input_ids) for text in texts), []
    whole = compute_features(tiny_target, texts, [1, -1])
    forward = Target.hidden
    monkeypatch.setattr(
        Target, "hidden", lambda self, ids, **more: sizes.append(ids.shape) or forward(self, ids, **more)
    )
    for bound, rows in ((2 * longest + 1, [2, 2, 2, 2, 1]), (1, [1] * 9), (9 * longest, [9])):
        monkeypatch.setattr(extraction, "_FORWARD_TOKENS", bound)
        sizes.clear()
        torch.testing.assert_close(compute_features(tiny_target, texts, [1, -1]), whole, rtol=1e-4, atol=1e-4)
        assert [size[0] for size in sizes] == rows and all(size[1] == longest for size in sizes)


def test_gather_equals_slicing_one_conversation(folder, tiny_target):
    store = FeatureStore(folder)
    rows = torch.arange(store.tokens)
    around = store.gather(rows, before=3, after=2)
    assert around.hidden.shape == (store.tokens, 5, tiny_target.hidden_size)
    for index, stored in enumerate(store):
        start, length = int(store.offsets[index]), len(stored.input_ids)
        for position in (0, 1, length // 2, length - 1):
            row = start + position
            for column, other in enumerate(range(position - 3, position + 3)):
                inside = 0 <= other < length
                assert around.input_ids[row, column] == (stored.input_ids[other] if inside else 0)
                assert around.loss_mask[row, column] == bool(inside and stored.loss_mask[other])
                if column < 5:
                    expected = stored.hidden[other] if inside else torch.zeros(tiny_target.hidden_size)
                    assert torch.equal(around.hidden[row, column], expected)


@given(hnp.arrays(bool, st.integers(1, 40)), st.data())
def test_eligible_equals_its_definition(mask, data):
    cuts = data.draw(st.lists(st.integers(0, len(mask)), max_size=4).map(sorted))
    offsets = [0, *cuts, len(mask)]
    found = eligible(torch.from_numpy(mask), torch.tensor(offsets)).tolist()
    expected = [False] * len(mask)
    for start, stop in itertools.pairwise(offsets):
        for row in range(start + 1, stop - 1):
            expected[row] = bool(mask[row] and mask[row + 1])
    assert found == expected


def test_roots_leave_out_excluded_conversations(folder):
    store = FeatureStore(folder)
    everything, without = store.roots(), store.roots(exclude={0, 5})
    inside = [(everything >= store.offsets[i]) & (everything < store.offsets[i + 1]) for i in (0, 5)]
    assert torch.equal(without, everything[~(inside[0] | inside[1])])
    assert len(without) < len(everything)


def test_conversations_with_nothing_to_learn_are_stored_empty(tiny_target, tmp_path):
    long = Conversation("long", (Message("user", "x" * 300), Message("assistant", "yes")))
    store = run(tiny_target, tmp_path, conversations=[talk(0), long, talk(1)])
    assert [len(stored.input_ids) > 0 for stored in store] == [True, False, True]
    assert torch.equal(store.gather(store.roots(), 1, 1).input_ids[:, 1], torch.cat(
        [stored.input_ids for stored in store])[store.roots()])  # fmt: skip
    store.verify(tiny_target)


def test_several_layers_and_another_dtype(tiny_target, tmp_path):
    options = FeatureOptions(max_length=128, layers=[1, -1], feature_dtype="bfloat16")
    store = run(tiny_target, tmp_path, options)
    states = store[0].hidden
    assert states.dtype == torch.bfloat16 and states.shape[1] == 2 * tiny_target.hidden_size
    only_last = run(tiny_target, tmp_path / "last")[0].hidden
    torch.testing.assert_close(states[:, tiny_target.hidden_size :].float(), only_last, rtol=1e-2, atol=1e-2)
    store.verify(tiny_target)


def test_one_folder_serves_predictors_of_several_layers(tiny_target, tmp_path):
    """Layers stored beside those read: each reader sees what a folder of its own would hold."""
    wide = FeatureOptions(**{**vars(OPTIONS), "more_layers": [1, 2]})
    narrow = run(tiny_target, tmp_path / "wide", wide)
    assert narrow.layers == (-1,) and narrow.manifest.layers == (1, 2, -1)
    narrow.verify(tiny_target)
    several = FeatureOptions(**{**vars(wide), "layers": [2, -1]})
    chosen = run(tiny_target, tmp_path / "wide", several)
    for store, layers in ((narrow, [-1]), (chosen, [2, -1])):
        own = run(tiny_target, tmp_path / str(layers), FeatureOptions(**{**vars(OPTIONS), "layers": layers}))
        assert torch.equal(store[3].hidden, own[3].hidden)
        rows = store.roots()[:7]
        assert torch.equal(store.gather(rows, 2, 3).hidden, own.gather(rows, 2, 3).hidden)
    with pytest.raises(FeatureStoreError, match=r"without \[0\]"):
        FeatureStore(tmp_path / "wide", layers=[0, -1])
    with pytest.raises(FeatureStoreError, match="layers"):
        run(tiny_target, tmp_path / "wide", FeatureOptions(**{**vars(OPTIONS), "layers": [0, -1]}))
    with pytest.raises(ConfigError, match="name one twice"):
        run(tiny_target, tmp_path / "twice", FeatureOptions(**{**vars(OPTIONS), "layers": [1, 1, -1]}))


@pytest.mark.parametrize("damage", ["missing", "truncated", "foreign"])
def test_interrupted_extraction_ends_in_the_same_bytes(copy, folder, tiny_target, damage):
    shard = copy / "shard-00001.safetensors"
    if damage == "missing":
        shard.rename(copy / ".shard-00001.safetensors.tmp")  # what SIGKILL leaves before the rename
    elif damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-10])
    else:
        shutil.copy(copy / "shard-00002.safetensors", shard)
    with pytest.raises(FeatureStoreError, match=r"1 of 3 shards .*shard-00001.*same command"):
        FeatureStore(copy)
    run(tiny_target, copy)
    assert contents(copy) == contents(folder)


def test_complete_store_is_not_computed_again(copy, tiny_target, monkeypatch):
    monkeypatch.setattr(Target, "features", lambda *args, **kwargs: pytest.fail("recomputed"))
    run(tiny_target, copy)


def test_a_second_command_waits_for_the_first(folder, tiny_target, tmp_path, monkeypatch):
    """What another command is writing is not computed again."""
    computed = []
    monkeypatch.setattr(Target, "features", lambda *args, **kwargs: computed.append(args))
    mine = tmp_path / "shared"
    mine.mkdir()
    shutil.copy(folder / "manifest.json", mine)
    with FileLock(mine / ".lock"):
        waiting = threading.Thread(target=run, args=(tiny_target, mine))
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
        for shard in folder.glob("shard-*"):
            shutil.copy(shard, mine)
    waiting.join(60)
    assert not waiting.is_alive() and not computed and len(FeatureStore(mine)) == len(CONVERSATIONS)


def test_other_target_is_refused(folder, tiny_model, tiny_tokenizer):
    other = Target(tiny_model("llama", torch.float32, 7, len(tiny_tokenizer)), tiny_tokenizer, name="other")
    with pytest.raises(TargetMismatch, match="output embedding"):
        FeatureStore(folder, other.identity)


def test_moved_target_is_accepted(copy, tiny_target):
    moved = Target(tiny_target.model, tiny_target.tokenizer, name="elsewhere")
    assert len(run(moved, copy)) == len(CONVERSATIONS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conversations": CONVERSATIONS[:9]}, "the conversations"),
        ({"options": FeatureOptions(max_length=64)}, "max_length"),
        ({"options": FeatureOptions(max_length=128, feature_dtype="bfloat16")}, "dtype"),
        ({"options": FeatureOptions(max_length=128, layers=[0, -1])}, "layers"),
    ],
)
def test_folder_made_from_something_else_is_refused(copy, tiny_target, change, message):
    with pytest.raises(FeatureStoreError, match=message):
        run(tiny_target, copy, **change)


def test_damaged_manifest_and_other_formats_are_refused(copy, tmp_path):
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "format_version": 99}))
    with pytest.raises(FeatureStoreError, match="format 99"):
        FeatureStore(copy)
    (copy / "manifest.json").write_text("{")
    with pytest.raises(FeatureStoreError, match="damaged"):
        FeatureStore(copy)
    with pytest.raises(FeatureStoreError, match="not a feature folder"):
        FeatureStore(tmp_path / "nothing")


def test_verify_notices_other_states(copy, tiny_target):
    FeatureStore(copy).verify(tiny_target)
    store = FeatureStore(copy)
    for shard in store._shards:
        shard["hidden"] = shard["hidden"].roll(1, dims=0)
    with pytest.raises(FeatureStoreError, match="differs by"):
        store.verify(tiny_target)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (FeatureOptions(max_length=10_000), "256 positions"),
        (FeatureOptions(max_length=128, layers=[-1, 0]), "end them in -1"),
        (FeatureOptions(max_length=128, layers=[9, -1]), "do not exist"),
        (FeatureOptions(max_length=128, shard_size=0), "shard_size is 0"),
    ],
)
def test_bad_options_are_refused_before_work(tiny_target, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        run(tiny_target, tmp_path / "new", options)
    assert not (tmp_path / "new").exists()


def test_text_for_a_target_without_a_tokenizer_is_refused(tiny_target, tmp_path):
    bare = Target(tiny_target.model, None, name="bare")
    ids = Conversation("ids", (), "tokens", texts=(Tokens(array("i", range(3, 9)), bytes([0, 1, 1, 1, 1, 1])),))
    assert split_conversations(bare, [ids]) == [[ids]] and run(bare, tmp_path / "ids", conversations=[ids]).tokens == 6
    for work in (
        lambda each: split_conversations(bare, each),
        lambda each: run(bare, tmp_path / "text", conversations=each),
    ):
        with pytest.raises(DataError, match="target bare has no tokenizer, and conversation c0 is text; put one"):
            work([ids, talk(0)])


def with_ids(target, conversation: Conversation, shift: int = 0) -> Conversation:
    """As `shape regenerate` writes it for a target, or for one whose bytes are other tokens."""
    text = encode(conversation, target.tokenizer, None)
    ids = [each if each < 3 else 3 + (each - 3 + shift) % 256 for each in text.input_ids.tolist()]
    return replace(conversation, texts=(Tokens(array("i", ids), bytes(text.loss_mask.tolist())),))


def test_token_ids_of_another_tokenizer_are_refused(tiny_target):
    """A few that do not read as their answers are not: characters may be cut, and templates may trim."""
    odd = [Conversation("spaced", (Message("user", "?"), Message("assistant", " \n so ")))]
    for shifted in (0, 5):
        rows = [with_ids(tiny_target, talk(number), number < shifted) for number in range(10)]
        rows += [with_ids(tiny_target, each) for each in odd] + [talk(10)]
        assert len(split_conversations(tiny_target, rows)) == 12
    rows = [talk(0), *(with_ids(tiny_target, talk(number), 1) for number in range(1, 100))]
    with pytest.raises(
        DataError, match=r"conversation c\d+ holds .* reads as other text .*\(32 of 32 looked at do\); give"
    ):
        split_conversations(tiny_target, rows)


def test_no_conversations_and_unwritable_folders_are_refused(tiny_target, tmp_path):
    with pytest.raises(DataError, match="no conversations"):
        run(tiny_target, tmp_path, conversations=[])
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        run(tiny_target, tmp_path / "file" / "below")


def test_too_small_a_disk_is_noticed_before_work(tiny_target, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 1000))
    figures = r"about 67\.7 kB, in 3 shard\(s\) to .* \(1 kB free\): the disk is too small"
    with pytest.raises(DiskSpaceError, match=figures):
        run(tiny_target, tmp_path)
    assert not list(tmp_path.glob("shard*"))


def test_estimate_is_close(tiny_target, tmp_path, capsys):
    run(tiny_target, tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.glob("shard*"))
    said = float(capsys.readouterr().out.split("about ")[2].split(" kB")[0]) * 1000
    assert 0.9 * size < said < 1.1 * size


def test_an_order_of_roles_that_the_template_refuses_is_told_before_anything_is_computed(tiny_target, tiny_tokenizer):
    strict = Target(tiny_target.model, with_chat_template(tiny_tokenizer, "mistral"))
    good, bad = Message("user", "Q"), Message("assistant", "A")
    chats = [Conversation(f"c{n}", (*([good] * (n % 3 == 1)), good, bad)) for n in range(9)]
    said = r"conversation c1: .* roles must alternate \(3 of 9 .* these roles .*, or give skip_bad_rows"
    with pytest.raises(DataError, match=said):
        split_conversations(strict, chats)
    assert len(split_conversations(strict, chats, skip_bad_rows=True)) == 9
