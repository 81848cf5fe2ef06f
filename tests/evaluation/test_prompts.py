"""Which prompts measurements ask."""

from collections import Counter

import pytest

from shape.data.conversations import Prompt, evenly, evenly_by_category
from shape.errors import ConfigError
from shape.evaluation.prompts import SUITES, chosen_prompts


@pytest.mark.parametrize("count", [1, 7, 48, 95, 96, 200, None])
def test_items_are_spread_over_all_in_order(count):
    items = list(range(96))
    found = evenly(items, count)
    assert len(found) == min(96, 96 if count is None else count) and found == sorted(set(found))
    edges = [index * 96 // len(found) for index in range(len(found) + 1)]
    assert all(low <= item < high for item, low, high in zip(found, edges, edges[1:], strict=False))
    assert evenly([], count) == [] == evenly(items, 0)


@pytest.mark.parametrize("count", [12, 16, 24, 32, 48])
def test_kinds_that_take_turns_are_all_there(count):
    """Every second, third, ... of rows whose six kinds take turns would be of two or three kinds."""
    rotating = [number % 6 for number in range(96)]
    assert len(set(evenly(rotating, count))) == 6
    for suite in SUITES:
        prompts, name = chosen_prompts(suite, count)
        whole, _ = chosen_prompts(suite)
        assert name == f"{suite}.jsonl" and [one for one in whole if one in prompts] == prompts
        shares = Counter(prompt.category for prompt in whole)
        for category, found in Counter(prompt.category for prompt in prompts).items():
            assert abs(found - shares[category] * count / len(whole)) < 1


def test_prompts_of_one_category_and_bad_limits(tmp_path, monkeypatch):
    prompts = [Prompt(str(number), "", ("x",), ()) for number in range(10)]
    assert evenly_by_category(prompts, 4) == evenly(prompts, 4)
    (tmp_path / "bench.jsonl").write_text('{"prompt": "own"}\n')
    found, name = chosen_prompts(tmp_path / "bench.jsonl", 3)
    assert [prompt.turns for prompt in found] == [("own",)] and name == "bench.jsonl"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench.jsonl").rename(tmp_path / "bench" / "own.jsonl")
    for suite in (None, "bench"):  # whatever lies there, such as what --output bench wrote
        assert len(chosen_prompts(suite, 3)[0]) == 3
    assert [prompt.turns for prompt in chosen_prompts("./bench")[0]] == [("own",)]
    with pytest.raises(ConfigError, match="limit 0 leaves no prompt"):
        chosen_prompts(None, 0)
