"""Look-ups by prefix and by its shape, and misses."""

import pytest
import torch
from helpers import GREEDY, committed, pack, prompts

from shape.drafters.recipes.drafter import RecipeDrafter
from shape.drafters.recipes.misses import Miss, read_misses, recipes_of_misses, write_misses
from shape.drafters.recipes.pack import Recipe, merged, pack_of, recipes_of
from shape.errors import CheckpointError, ConfigError
from shape.generation.decoder import ShapeDecoder
from shape.target.model import Target


def test_looks_up_what_stands_there_and_then_its_shape(tiny_target):
    ids = tiny_target.tokenizer("a1b2c3", add_special_tokens=False).input_ids  # one token per letter and digit
    letter_a, one, letter_b, two, letter_c, three = ids
    drafter = RecipeDrafter(
        pack(tiny_target, ((letter_a, one), (letter_b, two), 3), ((letter_a, one), (letter_c,), 1)), nodes=3
    )
    drafter.bind(tiny_target)
    text = [letter_c, letter_a, one]
    drafter.start(committed(text), torch.empty(0))
    tree = drafter.draft(committed(text), GREEDY)
    assert tree.tokens[0].tolist() == [one, letter_b, two, letter_c] and tree.parent[0].tolist() == [-1, 0, 1, 0]
    assert [recipe.tokens for recipe in drafter.lookup([letter_c, one])] == [(letter_b, two)]  # by shape, seen often
    assert drafter.lookup([letter_c, three]) == [] and drafter.lookup([one]) == []


def test_descriptions_tell_packs_and_settings_apart(tiny_target):
    one, other = pack(tiny_target, ((5, 6), (7,), 1)), pack(tiny_target, ((5, 6), (8,), 1))
    made = [RecipeDrafter(one), RecipeDrafter(other), RecipeDrafter(one, nodes=3)]
    assert len({drafter.describe() for drafter in made}) == 3
    assert RecipeDrafter(one, misses="log").describe() == made[0].describe()  # drafts alike


def test_misses_are_logged_with_what_followed(tiny_target, tmp_path):
    log = tmp_path / "misses.jsonl"
    drafter = RecipeDrafter(pack(tiny_target, ((5, 6), (7,), 1)), misses=log)
    drafter.bind(tiny_target)
    drafter.start(committed([1, 2, 3]), torch.empty(0))
    for text in ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]):
        drafter.draft(committed(text), GREEDY)
    assert read_misses(log) == [Miss([2, 3], [4], []), Miss([3, 4], [5, 6], [])]
    log.write_text(log.read_text()[:-12])  # a process was killed
    drafter.bind(tiny_target)
    write_misses(log, [Miss([5], [6], [])])
    assert read_misses(log) == [Miss([2, 3], [4], []), Miss([5], [6], [])]
    with pytest.warns(UserWarning, match="misses cannot be written to .*some are lost"):
        write_misses(tmp_path, [Miss([5], [6], [])])
    log.write_text("nothing")
    with pytest.raises(CheckpointError, match=r"misses\.jsonl cannot be read"):
        read_misses(log)


def test_the_log_is_there_before_anything_is_written(tiny_target, tmp_path):
    log = tmp_path / "new" / "folder" / "misses.jsonl"
    RecipeDrafter(pack(tiny_target, ((5, 6), (7,), 1)), misses=log).bind(tiny_target)
    assert read_misses(log) == []
    with pytest.raises(ConfigError, match=f"misses cannot be written to {tmp_path} "):
        RecipeDrafter(pack(tiny_target, ((5, 6), (7,), 1)), misses=tmp_path).bind(tiny_target)


@pytest.mark.parametrize("drafter", ["recipes", "suffix+recipes"])
def test_warming_up_misses_nothing(tiny_target, tmp_path, drafter):
    """What it writes is nobody's text, and the same at every start of a server."""
    path, log = tmp_path / "task.pack", tmp_path / "misses.jsonl"
    pack(tiny_target, ((5, 6), (7,), 1)).save(path)
    decoder = ShapeDecoder.from_pretrained(tiny_target, drafter=drafter, pack=path, misses=log)
    decoder.warm_up()
    assert read_misses(log) == []
    decoder.generate(**prompts([9]), max_new_tokens=16, eos_token_id=[])
    assert read_misses(log)


def test_wrong_predictions_are_logged_and_the_next_pack_knows_better(tiny_target, tmp_path):
    log = tmp_path / "misses.jsonl"
    old = pack(tiny_target, ((5, 6), (7, 8, 9), 3), ((5, 6), (7, 2), 1))
    drafter = RecipeDrafter(old, misses=log)
    drafter.bind(tiny_target)
    came_true = ([4, 5, 6], [4, 5, 6, 7, 8, 9, 1]), ([4, 5, 6], [4, 5, 6, 7, 2]), ([4, 5, 6], [4, 5, 6, 7])
    refused = ([4, 5, 6], [4, 5, 6, 3, 4]), ([4, 5, 6], [4, 5, 6, 7, 8, 1, 1])
    for before, after in (*came_true, *refused, *refused):
        drafter.start(committed(before), torch.empty(0))
        drafter.draft(committed(before), GREEDY)
        drafter.draft(committed(after), GREEDY)
    found = read_misses(log)
    assert found == 2 * [Miss([5, 6], [3, 4], [7, 8, 9]), Miss([7, 8], [1, 1], [9])]
    new = merged([old], more=recipes_of_misses(found, old.prefix, old.depth))
    assert {Recipe((5, 6), (3, 4), 2), Recipe((7, 8), (1, 1), 2), *old.recipes} <= set(new.recipes)


def test_output_is_the_targets(tiny_model):
    model = tiny_model("llama")
    batch = prompts()
    target = Target(model)
    expected = model.generate(**batch, max_new_tokens=30, do_sample=False)
    stretches = [row.tolist() for row in expected]
    made = pack_of(target.identity, recipes_of(stretches, 2, 5), 1, 5, 1000)
    decoder = ShapeDecoder(target, RecipeDrafter(made), fall_back=False)
    out = decoder.generate(**batch, max_new_tokens=30, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected) and out.stats.acceptance_length > 2
    options = {"max_new_tokens": 20, "do_sample": True, "temperature": 1.3, "top_k": 0, "seed": 4}
    assert torch.equal(decoder.generate(**batch, **options), ShapeDecoder(target).generate(**batch, **options))
