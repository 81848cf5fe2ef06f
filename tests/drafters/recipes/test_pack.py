"""Packs: files that can be trusted, what they hold, and merging."""

import gzip
import json
from collections import Counter

import pytest
from helpers import pack

from shape.drafters.recipes.drafter import RecipeDrafter
from shape.drafters.recipes.pack import Pack, Recipe, merged, pack_of
from shape.errors import CheckpointError, ConfigError, TargetMismatch
from shape.target.model import Target


def test_packs_keep_the_frequent_and_say_nothing_twice(tiny_target):
    counts = Counter({((1,), (2, 3)): 2, ((1,), (2,)): 3, ((1,), (4,)): 1, ((5,), (6,)): 9})
    made = pack_of(tiny_target.identity, counts, 3, 2, most=2)
    assert made.recipes == (Recipe((5,), (6,), 9), Recipe((1,), (2, 3), 5))


def test_files_say_what_they_hold(tiny_target, tmp_path):
    path, made = tmp_path / "a.pack", pack(tiny_target, ((1, 2), (3,), 4))
    made.save(path)
    assert Pack.load(path) == made
    first = path.read_bytes()
    made.save(path)
    assert path.read_bytes() == first  # the same bytes for the same content
    values = json.loads(gzip.decompress(first))
    values["recipes"][0][2] = 5
    path.write_bytes(gzip.compress(json.dumps(values).encode()))
    with pytest.raises(CheckpointError, match="is damaged: its content is not that of its hash"):
        Pack.load(path)
    values["version"] = 0
    path.write_bytes(gzip.compress(json.dumps(values).encode()))
    with pytest.raises(CheckpointError, match="is of version 0, and this is 1"):
        Pack.load(path)
    for broken in (b"", first[: len(first) // 2], b"no pack", gzip.compress(b"{}")):
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match="cannot be read; give a file of `shape recipes compile`"):
            Pack.load(path)


def test_packs_of_other_tokens_are_refused(tiny_target, tiny_model):
    other = Target(tiny_model(), None, name="other")
    with pytest.raises(TargetMismatch, match="was compiled for target tiny, and other has other tokens"):
        RecipeDrafter(pack(tiny_target)).bind(other)
    with pytest.raises(TargetMismatch, match="packs of tiny and other have other tokens"):
        merged([pack(tiny_target), Pack(other.identity, (), 3, 2)])


def test_packs_that_look_up_other_numbers_of_tokens_are_not_merged(tiny_target):
    """The shorter ones of their recipes would never be found."""
    four, three = pack(tiny_target, ((1, 2, 3, 4), (5,), 9)), pack(tiny_target, ((1, 2, 3), (5,), 9))
    with pytest.raises(ConfigError, match="recipes for 3 and for 4 tokens cannot be in one pack"):
        merged([four, three])
    with pytest.raises(ConfigError, match="merge packs that were compiled with the same prefix"):
        merged([four], more=Counter({((1, 2), (3,)): 2}))
    assert merged([four, pack(tiny_target)]).recipes == four.recipes  # one that is empty looks up nothing


def test_merging_adds_up(tiny_target):
    one = pack(tiny_target, ((1,), (2,), 4), ((3,), (4,), 1))
    both = merged([one, pack(tiny_target, ((3,), (4,), 5))])
    assert both.recipes == (Recipe((3,), (4,), 6), Recipe((1,), (2,), 4)) and both.prompts == 4
    assert merged([one]) == one
