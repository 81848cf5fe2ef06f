"""The store beyond one disk: elsewhere, in copies with little room, in int8, and without what training leaves out."""

import errno
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

import fsspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from training_runs import CONVERSATIONS, OPTIONS, data_of, extraction_trainer, fit, weights

from shape.data.conversations import Conversation
from shape.errors import ConfigError, FeatureStoreError
from shape.features.extraction import extract
from shape.features.manifest import state_bytes
from shape.features.options import FeatureOptions
from shape.features.positions import eligible, stored_positions
from shape.features.shards import dequantise, quantise
from shape.features.storage import LocalCopies, Storage
from shape.features.store import FeatureStore
from shape.target.chat import Message
from shape.training.batches import FetchedBatches, Partition
from shape.training.order import ShardedOrder, StepOrder


def run(target, address, conversations=CONVERSATIONS, **changes) -> FeatureStore:
    trainer = extraction_trainer()
    options = FeatureOptions(max_length=128, shard_size=2, **changes)
    return extract(target, conversations, address, options, trainer)


@pytest.fixture(scope="module")
def whole(tiny_target, tmp_path_factory) -> FeatureStore:
    """In a folder, all states as the target has them."""
    return run(tiny_target, tmp_path_factory.mktemp("whole"))


@pytest.fixture(params=["memory", "file"])
def elsewhere(request, whole, tmp_path) -> FeatureStore:
    """The same store, reached by an address."""
    address = f"memory://{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path}/there"
    files, root = fsspec.core.url_to_fs(address)
    files.makedirs(root, exist_ok=True)
    for path in whole.storage.folder.glob("[!.]*"):
        files.put_file(str(path), f"{root}/{path.name}")
    return FeatureStore(address, cache=tmp_path / "cache")


# ------------------------------------------------------------------------------------------------- elsewhere


def test_a_store_elsewhere_holds_the_same(elsewhere, whole):
    assert len(elsewhere) == len(whole) and torch.equal(elsewhere.roots(), whole.roots())
    for mine, theirs in zip(elsewhere, whole, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    for mine, theirs in zip(elsewhere.gather(whole.roots(), 3, 3), whole.gather(whole.roots(), 3, 3), strict=True):
        assert torch.equal(mine, theirs)


def test_extraction_writes_the_same_bytes_anywhere_and_completes_them(whole, tiny_target, tmp_path):
    store = run(tiny_target, f"memory://{tmp_path.name}", cache=str(tmp_path / "cache"))
    assert len(store) == len(whole)
    files, root = fsspec.core.url_to_fs(f"memory://{tmp_path.name}")

    def contents() -> dict[str, bytes]:
        return {Path(name).name: files.cat_file(name) for name in files.ls(root, detail=False)}

    expected = {path.name: path.read_bytes() for path in whole.storage.folder.glob("[!.]*")}
    assert contents() == expected
    files.pipe_file(f"{root}/shard-00001.safetensors", expected["shard-00001.safetensors"][:-5])
    files.rm_file(f"{root}/shard-00003.safetensors")
    with pytest.raises(FeatureStoreError, match=r"2 of 5 shards .*shard-00001, shard-00003"):
        FeatureStore(f"memory://{tmp_path.name}")
    run(tiny_target, f"memory://{tmp_path.name}", cache=str(tmp_path / "cache"))
    assert contents() == expected


def test_a_shard_without_positions_is_read_from_elsewhere(tiny_target, tmp_path):
    nothing = [Conversation(str(number), (Message("user", "?"), Message("assistant", ""))) for number in range(2)]
    store = run(tiny_target, f"memory://{tmp_path.name}", [*nothing, *CONVERSATIONS], cache=str(tmp_path))
    assert [len(stored.input_ids) for stored in store][:2] == [0, 0] and len(store.roots())


def test_a_copy_with_a_wrong_checksum_is_refused(elsewhere):
    files, root = elsewhere.storage._files, elsewhere.storage._root
    name = f"{root}/shard-00002.safetensors"
    content = bytearray(files.cat_file(name))
    content[-100] ^= 1
    files.pipe_file(name, bytes(content))
    elsewhere[0]
    with pytest.raises(FeatureStoreError, match=r"shard-00002.* is damaged, or was on its way"):
        elsewhere[4]


def test_copies_keep_within_their_room(whole, tmp_path):
    size = max(path.stat().st_size for path in whole.storage.folder.glob("shard-*"))
    store = FeatureStore(f"file://{whole.storage.folder}", cache=tmp_path, room=2 * size + 100)
    store.prefetch(whole.offsets[:-1])
    for fetched_ahead in (True, False):
        for index in range(len(store)):
            assert torch.equal(store[index].hidden, whole[index].hidden)
            copies, held = list(tmp_path.rglob("shard-*")), 0
            for copy in copies:
                with suppress(FileNotFoundError):  # dropped meanwhile, for one that is fetched ahead
                    held += copy.stat().st_size
            assert held <= 2 * size + 100
            # One that is fetched ahead may have taken its place already.
            assert fetched_ahead or f"shard-{index // 2:05d}.safetensors" in {copy.name for copy in copies}
    with pytest.raises(ConfigError, match="raise cache_gigabytes"):
        store.require_room(5)


def test_copies_go_where_what_can_be_made_again_is_kept(whole, tmp_path, monkeypatch):
    monkeypatch.setenv("SHAPE_CACHE", str(tmp_path))
    store = FeatureStore(f"file://{whole.storage.folder}")
    assert len(store[0].input_ids)
    assert list((tmp_path / "features" / store.manifest.digest).glob("shard-*"))


def test_a_copy_that_another_process_drops_is_fetched_again(whole, tmp_path):
    storage = Storage(f"file://{whole.storage.folder}")
    copies = LocalCopies(storage, tmp_path, 10**9, Path.read_bytes)
    first = copies["manifest.json"]
    copies.prefetch(["manifest.json", "shard-00000.safetensors"])
    assert len(copies["shard-00000.safetensors"]) == storage.sizes()["shard-00000.safetensors"]
    (tmp_path / "manifest.json").unlink()
    assert copies["manifest.json"] == first
    with pytest.raises(FeatureStoreError, match=r"absent cannot be fetched from file://.*same command again"):
        copies["absent"]


def test_a_data_worker_connects_anew(whole, tmp_path, monkeypatch):
    """fsspec's asynchronous file systems (s3, gcs, http) refuse to serve a process that was forked."""
    storage = Storage(f"file://{whole.storage.folder}")
    copies = LocalCopies(storage, tmp_path, 10**9, Path.read_bytes)
    first = copies["manifest.json"]
    assert copies.storage is storage
    monkeypatch.setattr(os, "getpid", lambda: -2)
    assert copies["manifest.json"] == first and copies.storage is not storage


def test_copies_that_cannot_be_deleted_make_no_room(whole, tmp_path, monkeypatch):
    """Windows keeps what somebody has mapped; another copy goes in its place."""
    copies = LocalCopies(Storage(f"file://{whole.storage.folder}"), tmp_path, 10, Path.read_bytes)
    for age, name in enumerate(("old", "new")):
        (tmp_path / name).write_bytes(bytes(8))
        os.utime(tmp_path / name, (age, age))
    unlink = Path.unlink

    def kept(path, missing_ok=False):
        if path.name == "old":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", kept)
    copies._make_room(2)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_addresses_that_lead_nowhere_are_named():
    with pytest.raises(ConfigError, match=r"nowhere://x cannot be reached .*Protocol not known"):
        Storage("nowhere://x")
    with pytest.raises(FeatureStoreError, match="not a feature folder"):
        FeatureStore("memory://there-is-nothing")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 4), st.integers(0, 3))
@settings(max_examples=40)
def test_an_order_by_shards_visits_everything_once_and_few_shards_at_a_time(counts, together, seed):
    counts = torch.tensor(counts)
    order = ShardedOrder(seed, counts, 3, together)
    total = int(counts.sum())
    seen = torch.cat([order.step(step) for step in range(total)])
    shard_of = torch.arange(len(counts)).repeat_interleave(counts)
    group = int(counts.sort(descending=True).values[:together].sum())  # the largest that there can be
    for epoch in seen.split(total):
        assert epoch.sort().values.tolist() == list(range(total))
        for shard in range(len(counts)):
            places = (shard_of[epoch] == shard).nonzero()[:, 0]
            assert places[-1] - places[0] < group
    if together >= len(counts):
        assert torch.equal(order.step(1), StepOrder(seed, total, 3).step(1))


def test_training_from_elsewhere_is_training_from_a_folder(elsewhere, whole, tiny_target):
    mine, theirs = (fit(tiny_target, store) for store in (elsewhere, whole))
    # The same samples in each step; they are sorted, so sums round otherwise.
    torch.testing.assert_close(weights(mine), weights(theirs), rtol=1e-3, atol=1e-4)


def test_processes_share_shards_and_steps_do_not_depend_on_their_number(elsewhere, whole, tiny_target):
    data = data_of(elsewhere, tiny_target, replace(OPTIONS, batch_size=48))
    asked: list[int] = []

    def step_of(step: int, world: int) -> list[list[int]]:
        batches = [data.batches(Partition(rank, world)) for rank in range(world)]
        assert all(isinstance(each, FetchedBatches) for each in batches)
        return [each[step].samples.tolist() for each in batches]

    for step in (0, 5):
        one, two, three = (step_of(step, world) for world in (1, 2, 3))
        assert one[0] == [*chain(*two)] == [*chain(*three)]
        shards = [set(whole.shard_of(data.roots[torch.tensor(each)]).tolist()) for each in two]
        assert len(shards[0] & shards[1]) <= 1, "each process has shards of its own but for one"
        asked += [len(each) for each in shards]
    assert max(asked) < whole.manifest.shards


# ------------------------------------------------------------------------------------------------- smaller


@given(st.integers(1, 3), st.integers(1, 6), st.floats(1e-3, 1e3))
@settings(max_examples=25)
def test_int8_is_within_half_a_step_of_each_state(layers, rows, size):
    states = torch.randn(rows, layers * 16) * size
    states[0, :16] = 0
    steps, scale = quantise(states, 16)
    back = dequantise(steps, scale).float()
    assert steps.dtype == torch.int8 and scale.shape == (rows, layers)
    largest = states.unflatten(-1, (layers, 16)).abs().amax(-1, keepdim=True)
    error = (back - states).unflatten(-1, (layers, 16)).abs()
    # Half a step, the scale's own rounding, and that of bfloat16.
    assert (error <= largest * (0.5 / 127 + 2**-8 + 2**-9) + 1e-9).all()
    assert (back[0, :16] == 0).all()


def test_int8_halves_the_bytes_and_is_read_like_the_rest(whole, tiny_target, tmp_path):
    half, small = (
        run(tiny_target, tmp_path / dtype, feature_dtype=dtype, more_layers=[1]) for dtype in ("bfloat16", "int8")
    )
    assert [state_bytes(store.manifest.dtype, 32, 2) for store in (small, half)] == [2 * (32 + 2), 2 * 64]
    small.verify(tiny_target)
    around, expected = (store.gather(whole.roots(), 3, 3) for store in (small, whole))
    assert around.hidden.dtype == torch.bfloat16 and torch.equal(around.input_ids, expected.input_ids)
    error = (around.hidden.float() - expected.hidden).norm() / expected.hidden.norm()
    assert 1e-3 < error < 0.02
    broken = FeatureStore(shutil.copytree(tmp_path / "int8", tmp_path / "broken"))
    for shard in broken._shards:
        shard["scale"] = shard["scale"] * 1.5
    with pytest.raises(FeatureStoreError, match="differs by"):
        broken.verify(tiny_target)


@given(hnp.arrays(bool, st.integers(1, 40)), st.integers(1, 5), st.data())
def test_kept_states_are_those_that_windows_and_steps_read(mask, before, data):
    cuts = data.draw(st.lists(st.integers(0, len(mask)), max_size=4).map(sorted))
    offsets = [0, *cuts, len(mask)]
    stored = stored_positions(torch.from_numpy(mask), torch.tensor(offsets), before)
    owner = torch.searchsorted(torch.tensor(offsets), torch.arange(len(mask)), right=True)
    expected = [
        any(mask[other] and owner[other] == owner[row] for other in range(row, min(row + before + 1, len(mask))))
        for row in range(len(mask))
    ]
    assert stored.tolist() == expected
    for root in eligible(torch.from_numpy(mask), torch.tensor(offsets)).nonzero()[:, 0].tolist():
        window = [row for row in range(max(root - before, 0), root + 1) if owner[row] == owner[root]]
        assert stored[window].all()
    assert stored_positions(torch.from_numpy(mask), torch.tensor(offsets), None).all()


def test_training_reads_no_more_than_is_kept(whole, tiny_target, tmp_path):
    store = run(tiny_target, tmp_path, before=3)
    sizes = [sum(path.stat().st_size for path in each.storage.folder.glob("shard-*")) for each in (store, whole)]
    assert sizes[0] < 0.8 * sizes[1]
    store.verify(tiny_target)
    mine, theirs = (fit(tiny_target, each, options=replace(OPTIONS, noise=0.1)) for each in (store, whole))
    assert torch.equal(weights(mine), weights(theirs))
    with pytest.raises(FeatureStoreError, match=r"states before each answer \(3 there, all wanted\)"):
        run(tiny_target, tmp_path)
    assert len(run(tiny_target, tmp_path, before=2)) == len(store)
    with pytest.raises(ConfigError, match="before is 0"):
        run(tiny_target, tmp_path, before=0)
    with pytest.raises(ConfigError, match="feature_dtype is int4; give one of float32"):
        run(tiny_target, tmp_path, feature_dtype="int4")
