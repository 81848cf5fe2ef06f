"""The recipes of `train/` are options of `shape train`, for targets whose plan can be made; data of the hub is read."""

import json

import pytest

from eval.training_plans import TARGETS, main, recipes
from shape.data.rows import parse_row
from shape.features.trainer import TrainerOptions
from shape.training.parsing import parse


def test_every_recipe_has_a_plan(tmp_path):
    main([f"--output={tmp_path}"])
    rows = json.loads((tmp_path / "plans.json").read_text())["rows"]
    assert {row["recipe"] for row in rows} == {path.stem for path in recipes()}
    assert {parse([f"--config={path}"]).target for path in recipes()} == set(TARGETS)
    for row in rows:
        assert sum(row["memory"].values()) < 80e9, row["recipe"]  # a GPU of 80 GB, as the recipes say
        assert row["network"] == "EAGLE-3" or 1.9 < row["epochs"] < 4.2
    one, eight = (
        next(row for row in rows if (row["recipe"], row["network"], row["gpus"]) == ("qwen3-8b", "SHAPE", gpus))
        for gpus in (1, 8)
    )
    assert eight["hours"]["training"] == pytest.approx(one["hours"]["training"] / 8)
    sharded = next(row for row in rows if row["recipe"] == "llama-3.3-70b")
    assert 141e9 / 8 < sharded["memory"]["target"] < 141e9 / 6


@pytest.mark.parametrize(
    "row",
    [
        {  # HuggingFaceH4/ultrachat_200k
            "prompt": "Hello?",
            "prompt_id": "f0e3",
            "messages": [{"content": "Hello?", "role": "user"}, {"content": "Hi.", "role": "assistant"}],
        },
        {  # Aeala/ShareGPT_Vicuna_unfiltered
            "id": "QWJh",
            "conversations": [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hi."}],
        },
    ],
)
def test_rows_of_the_recipes_data_are_dialogues(row):
    assert [message.role for message in parse_row(row, "x").messages] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("devices", "count"), [(2, 4), ("8", 16), ([0, 3, 5], 6), ("0,1", 4), ([0], 2), ([3], 2), ("0,", 2)]
)
def test_processes_are_counted_over_machines(devices, count):
    assert TrainerOptions(devices=devices, num_nodes=2).processes == count
