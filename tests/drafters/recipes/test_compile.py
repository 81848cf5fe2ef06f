"""What samples agree on, what passes verification, and misses."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from helpers import write_rows
from hypothesis import given
from hypothesis import strategies as st

from shape.data.options import CompileOptions
from shape.drafters.recipes.compile import agreed, compile_pack
from shape.drafters.recipes.misses import Miss, recipes_of_misses, write_misses
from shape.drafters.recipes.pack import Pack, Recipe, recipes_of
from shape.drafters.recipes.verify import make_verify
from shape.errors import ConfigError, DataError

texts = st.lists(st.integers(0, 3), min_size=1, max_size=14)


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


def test_of_misses_counts_what_another_one_says_too():
    """What varies is in no recipe, as in samples."""
    misses = [Miss([1, 2], [3, 4, 5], []), Miss([1, 2], [3, 4, 6], [9]), Miss([1, 2], [7], []), Miss([8, 2], [3], [])]
    assert recipes_of_misses(misses, 2, 5) == Counter({((1, 2), (3, 4)): 2, ((2, 3), (4,)): 2})


@pytest.mark.parametrize("answers,counted", [([1, 1], 2), ([1, 0], 1), ([0, 0], 0)])
def test_prompts_count_where_every_answer_passes(tiny_target, tmp_path, answers, counted):
    """Of two prompts; the second samples of some are no JSON."""
    asked = write_rows(tmp_path / "prompts.jsonl", *({"prompt": text} for text in ("one", "two")))
    good, bad = (tiny_target.tokenizer(text, add_special_tokens=False).input_ids for text in ("[12, 34]", "[12, 34}"))
    left = list(answers)

    def generate(ids, mask, **options):
        assert options["num_return_sequences"] == 2 and options["top_p"] == options["repetition_penalty"] == 1.0
        rows = [good, good if left.pop(0) else bad]
        return torch.cat([ids.expand(2, -1), torch.tensor(rows)], dim=1)

    options = CompileOptions(
        target="tiny", prompts=str(asked), output=str(tmp_path / "made.pack"), samples=2, prefix=2, verify="json"
    )
    made = compile_pack(options, lambda: (tiny_target, generate))
    assert made.prompts == counted and (made.recipes != ()) == (counted > 0)


def test_what_was_missed_twice_is_compiled_too(tiny_target, tmp_path):
    """Beside what samples agree on, from several logs, and at the same prefix."""
    asked, logs = tmp_path / "prompts.jsonl", [tmp_path / "one.jsonl", tmp_path / "other.jsonl"]
    write_rows(asked, {"prompt": "one"})
    write_misses(logs[0], [Miss([1, 2], [3, 4, 5], []), Miss([7, 8], [9], [])])
    write_misses(logs[1], [Miss([1, 2], [3, 4, 6], [9])])

    def generate(ids, mask, **options):
        return torch.cat([ids.expand(2, -1), torch.tensor([[20, 21, 22, 23]] * 2)], dim=1)

    options = CompileOptions(
        target="tiny", prompts=str(asked), output=str(tmp_path / "made.pack"), samples=2, prefix=2, depth=5
    )
    without = compile_pack(options, lambda: (tiny_target, generate))
    assert Recipe((20, 21), (22, 23), 1) in without.recipes
    made = compile_pack(replace(options, misses=[str(log) for log in logs]), lambda: (tiny_target, generate))
    assert set(made.recipes) == {*without.recipes, Recipe((1, 2), (3, 4), 2), Recipe((2, 3), (4,), 2)}
    assert Pack.load(tmp_path / "made.pack") == made


def test_answers_outlive_an_interruption_and_a_verification_that_fails(tiny_target, tmp_path, monkeypatch):
    """The same command asks for what is left, and settings that change answers are told."""
    asked = write_rows(tmp_path / "prompts.jsonl", *({"prompt": text} for text in ("one", "two", "three")))
    monkeypatch.syspath_prepend(tmp_path)
    verifier = tmp_path / "verifier_of_mine.py"
    verifier.write_text("def right(prompt, answer):\n    raise ZeroDivisionError\n")
    output, seeds = tmp_path / "made.pack", []
    options = CompileOptions(target="tiny", prompts=str(asked), output=str(output), samples=2, prefix=2)

    def generate(ids, mask, seed, **others):
        if len(seeds) == 2:
            seeds.append(None)
            raise KeyboardInterrupt
        seeds.append(seed)
        return torch.cat([ids.expand(2, -1), torch.tensor([[20, 21, 22, 23 + seed]] * 2)], dim=1)

    with pytest.raises(KeyboardInterrupt):
        compile_pack(options, lambda: (tiny_target, generate))
    assert not output.exists()
    with pytest.raises(ConfigError, match=r"made.pack.partial was begun with samples 2 \(now 3\)"):
        compile_pack(replace(options, samples=3), lambda: (tiny_target, generate))
    with pytest.raises(ConfigError, match="raised ZeroDivisionError"):
        compile_pack(replace(options, verify="verifier_of_mine:right"), lambda: (tiny_target, generate))
    made = compile_pack(options, lambda: (tiny_target, generate))
    assert seeds == [0, 1, None, 2] and made.prompts == 3
    assert {recipe.tokens[-1] for recipe in made.recipes} >= {23, 24, 25}
    assert [path.name for path in sorted(tmp_path.glob("*made*"))] == ["made.pack"]


def test_a_prompt_that_is_too_long_is_named_before_the_first_answer(tiny_target, tmp_path):
    asked = write_rows(tmp_path / "prompts.jsonl", {"prompt": "one"}, {"id": "long", "prompt": "word " * 300})
    options = CompileOptions(target="tiny", prompts=str(asked), output=str(tmp_path / "made.pack"))
    with pytest.raises(DataError, match=r"prompt long of .*prompts.jsonl has \d+ tokens, and with 128 new ones"):
        compile_pack(options, lambda: (tiny_target, lambda *_, **__: pytest.fail("answered")))


def test_verification_by_name(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "task_of_mine.py").write_text("def short(prompt, answer):\n    return len(answer) < 3\n")
    short = make_verify("task_of_mine:short")
    assert short(None, "ab") and not short(None, "abc")
    for wrong in ("xml", "task_of_mine:long", "no_such_module:short"):
        with pytest.raises(ConfigError, match=f"verify '{wrong}' is neither json nor a MODULE:FUNCTION"):
            make_verify(wrong)


def test_files_are_read_before_a_target_is_loaded(tmp_path):
    options = CompileOptions(target="tiny", prompts=str(tmp_path / "none.jsonl"), output=str(tmp_path / "made.pack"))
    with pytest.raises(DataError, match=r"none.jsonl does not exist"):
        compile_pack(options, lambda: pytest.fail("loaded"))
