"""Recipe packs: what samples agree on, files that can be trusted, look-ups, misses, and the command."""

import gzip
import json
from collections import Counter

import pytest
import torch
from helpers import prompts
from hypothesis import given
from hypothesis import strategies as st

from shape.cli.recipes import main
from shape.drafters import Committed
from shape.drafters.recipes.drafter import Pack, Recipe, RecipeDrafter, agreed, merged, pack_of, read_misses, recipes_of
from shape.errors import CheckpointError, ConfigError, TargetMismatch
from shape.generation.decoder import ShapeDecoder
from shape.target.model import Target
from shape.verification.sampling import Sampler

GREEDY = Sampler(prompt_lengths=torch.tensor([1]))
texts = st.lists(st.integers(0, 3), min_size=1, max_size=14)


def committed(*rows: list[int]) -> Committed:
    lengths = torch.tensor([len(text) for text in rows])
    return Committed(list(rows), lengths, torch.tensor([text[-1] for text in rows]))


def inside(part: tuple[int, ...], text: list[int]) -> bool:
    return any(tuple(text[at : at + len(part)]) == part for at in range(len(text) - len(part) + 1))


@given(texts, st.lists(texts, max_size=3), st.integers(1, 4))
def test_stretches_are_the_longest_that_all_samples_have(first, others, shortest):
    found = list(agreed([first, *others], shortest))
    for stretch in found:
        assert len(stretch) >= shortest and all(inside(stretch, text) for text in [first, *others])
    # Whatever all have in common lies in one of them.
    for start in range(len(first)):
        for end in range(start + shortest, len(first) + 1):
            part = tuple(first[start:end])
            if all(inside(part, other) for other in others):
                assert any(inside(part, list(stretch)) for stretch in found)


def test_recipes_of_a_stretch():
    found = recipes_of([(1, 2, 3, 4), (2, 3, 4)], prefix=2, depth=2)
    assert found == Counter({((1, 2), (3, 4)): 1, ((2, 3), (4,)): 2})


def pack(target: Target, *recipes: tuple) -> Pack:
    return Pack(target.identity, tuple(Recipe(*recipe) for recipe in recipes), samples=3, prompts=2)


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
        with pytest.raises(CheckpointError, match="cannot be read; give a file of `compile`"):
            Pack.load(path)


def test_packs_of_other_tokens_are_refused(tiny_target, tiny_model):
    other = Target(tiny_model(), None, name="other")
    with pytest.raises(TargetMismatch, match="was compiled for target tiny, and other has other tokens"):
        RecipeDrafter(pack(tiny_target)).bind(other)
    with pytest.raises(TargetMismatch, match="packs of tiny and other have other tokens"):
        merged([pack(tiny_target), Pack(other.identity, (), 3, 2)])


def test_merging_adds_up(tiny_target):
    one = pack(tiny_target, ((1,), (2,), 4), ((3,), (4,), 1))
    both = merged([one, pack(tiny_target, ((3,), (4,), 5))])
    assert both.recipes == (Recipe((3,), (4,), 6), Recipe((1,), (2,), 4)) and both.prompts == 4
    assert merged([one]) == one


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


def test_misses_are_logged_with_what_followed(tiny_target, tmp_path):
    log = tmp_path / "misses.jsonl"
    drafter = RecipeDrafter(pack(tiny_target, ((5, 6), (7,), 1)), misses=log)
    drafter.bind(tiny_target)
    drafter.start(committed([1, 2, 3]), torch.empty(0))
    for text in ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]):
        drafter.draft(committed(text), GREEDY)
    assert read_misses(log) == [[2, 3, 4], [3, 4, 5, 6]]
    log.write_text("nothing")
    with pytest.raises(CheckpointError, match=r"misses\.jsonl cannot be read"):
        read_misses(log)


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


def test_the_command(tiny_target_folder, tmp_path, capsys):
    ask = tmp_path / "prompts.jsonl"
    ask.write_text("".join(json.dumps({"id": str(i), "turns": [f"say {i % 2}"]}) + "\n" for i in range(4)))
    one, two, both = (str(tmp_path / f"{name}.pack") for name in ("one", "two", "both"))
    given = ["--target", str(tiny_target_folder), "--prompts", str(ask), "--max_new_tokens", "12", "--prefix", "2"]
    main(["compile", *given, "--output", one, "--temperature", "0", "--samples", "1"])
    assert "recipes of" in capsys.readouterr().out
    main(["compile", *given, "--output", two, "--limit", "2", "--seed", "3"])
    main(["merge", one, two, "--output", both])
    assert len(Pack.load(both).recipes) >= len(Pack.load(one).recipes) > 0
    capsys.readouterr()
    main(["inspect", both, "--show", "3"])
    assert capsys.readouterr().out.count("->") == 3
    decoder = ShapeDecoder.from_pretrained(None, target=tiny_target_folder, pack=both)
    assert isinstance(decoder.drafter, RecipeDrafter)
    hybrid = ShapeDecoder.from_pretrained(None, target=tiny_target_folder, pack=both, drafter="suffix+recipes")
    assert hybrid.drafter.name == "suffix+recipes"
    with pytest.raises(ConfigError, match="drafter 'recipes' needs a pack"):
        ShapeDecoder.from_pretrained(None, target=tiny_target_folder, drafter="recipes")
    (tmp_path / "one.pack").write_bytes(b"broken")
    for arguments in (
        ["inspect", one],
        ["merge", one, two, "--output", both],
        ["compile", *given, "--output", one, "--prefix", "0"],
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2 and capsys.readouterr().err.splitlines()[-1].startswith("error: ")
