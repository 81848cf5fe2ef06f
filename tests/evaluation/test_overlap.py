"""How much of prompts and answers occurs in the training text."""

import json
from dataclasses import replace

import pytest
from helpers import write_rows

from shape.cli.bench import main
from shape.data.conversations import Conversation
from shape.data.reading import load_conversations
from shape.errors import DataError
from shape.evaluation.bench import training_text
from shape.evaluation.overlap import Overlap, grams, masked, overlaps
from shape.evaluation.results import SpeedResults
from shape.target.chat import Message


def test_words_grams_and_masks():
    assert list(grams("A cat, a dog!")) == [("a", "cat", ",", "a"), ("cat", ",", "a", "dog"), (",", "a", "dog", "!")]
    assert list(grams("Two words")) == [("two", "words")] and list(grams("  ")) == []
    assert masked("Book a table for Anna at 19:30.") == masked("Book a table for Bob at 8:15.")
    assert masked("Book a table for Anna at 19:30.") != masked("Find a table for Anna at 19:30.")
    assert masked("Please go. Then stop.") != masked("Please go. Now stop.")  # a capital that begins a sentence


def test_shares_are_of_what_was_asked():
    trained = Conversation("t", (Message("user", "Call Anna at 7 today."), Message("assistant", "I call Anna at 7.")))
    exchanges = [["Call Bob at 9 today.", "I call Anna at 7."], ["Sing a song for me.", "La la la la la."]]
    both, first = overlaps([exchanges, exchanges[:1]], [trained])
    # Of "call bob at 9 today ." no four words in a row were seen, of the answer all; the first turn is a known one.
    assert first == Overlap(3, 0, 3, 3, 1, 1)
    assert both == Overlap(6, 0, 6, 3, 2, 1) and overlaps([[]], [trained]) == [Overlap()]


@pytest.fixture
def measured(tiny_target_folder, tmp_path) -> SpeedResults:
    rows = [
        {"id": "seen", "category": "old", "turns": ["Tell me a story", "And another one"]},
        {"id": "unseen", "category": "new", "prompt": "Prove that it halts"},
    ]
    write_rows(tmp_path / "asked.jsonl", *rows)
    write_rows(tmp_path / "text.jsonl", {"turns": ["Tell me a story", "And another one"]})
    arguments = ["--target", str(tiny_target_folder), "--prompts", str(tmp_path / "asked.jsonl"), "--warmup", "0"]
    arguments += ["--training_data", str(tmp_path / "text.jsonl"), "--output", str(tmp_path / "out")]
    main([*arguments, "--methods", "[autoregressive,ngram]", "--max_new_tokens", "24", "--fall_back", "false"])
    return SpeedResults.from_json((tmp_path / "out" / "results.json").read_text())


def test_the_table_says_how_much_was_seen(measured, tmp_path):
    assert measured.overlap("old")["prompt_grams"] == 1 == measured.overlap("old")["turns"]
    assert measured.overlap("new") | {"answer_grams": 0} == {"prompt_grams": 0, "answer_grams": 0, "turns": 0}
    assert measured.overlap()["turns"] == pytest.approx(2 / 3)
    page, record = (tmp_path / "out" / "results.md").read_text(), (tmp_path / "out" / "results.json").read_text()
    assert "Overlap with the training text (text.jsonl): " in page and "| seen 4-grams, prompts / answers |" in page
    shares = json.loads(record)["training_overlap"]
    assert shares["all"] == measured.overlap() and list(shares) == ["all", "old", "new"]
    assert "Tell me a story" not in record  # prompts may be others' property, and answers quote them
    (tmp_path / "page.md").write_text("<!-- results:begin short out:ngram -->\n<!-- results:end -->")
    main(["--render", str(tmp_path), str(tmp_path / "page.md")])
    assert f"asked.jsonl: {measured.overlap_note()}" in (tmp_path / "page.md").read_text()
    shipped = {"target": "quickstart-target", "training_data": "train.jsonl.gz, answers.jsonl.gz"}
    note = replace(measured, settings={**measured.settings, **shipped}).overlap_note()  # it learned from more than that
    assert "of which a part ships (train.jsonl.gz, answers.jsonl.gz): at least" in note
    unknown = replace(measured, records=tuple(replace(one, overlap=None) for one in measured.records))
    assert unknown.overlap() == {} and "training text" not in unknown.to_markdown()


def test_figures_under_vllms_names(measured):
    plain, drafted = (measured.in_vllm_names(name) for name in ("autoregressive", "ngram"))
    total = measured.total["ngram"]
    assert plain["completed"] == 3 and plain["total_output_tokens"] == measured.total["autoregressive"].tokens
    assert plain["mean_ttft_ms"] > 0 and not any(name.startswith("spec_decode") for name in plain)
    assert drafted["spec_decode_num_drafts"] == total.draft_steps > 0
    assert drafted["spec_decode_acceptance_length"] == pytest.approx(1 + total.accepted / total.draft_steps)
    rate = 100 * drafted["spec_decode_accepted_tokens"] / drafted["spec_decode_draft_tokens"]
    assert drafted["spec_decode_acceptance_rate"] == pytest.approx(rate)
    positions = drafted["spec_decode_per_position_acceptance_rates"]
    assert sum(positions) * total.draft_steps == pytest.approx(total.accepted)
    assert positions == sorted(positions, reverse=True)


def test_texts_to_compare_with(tmp_path):
    write_rows(tmp_path / "ids.jsonl", {"input_ids": [1, 2], "loss_mask": [0, 1]})
    with pytest.raises(DataError, match=r"ids\.jsonl holds token ids and no text"):
        training_text(str(tmp_path / "ids.jsonl"))
    (tmp_path / "text.txt").write_text("One text.")
    for name in ("en", "de"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(name)
    both = [str(tmp_path / "en/text.txt"), str(tmp_path / "de/text.txt")]
    assert list(training_text(both)) == both  # none takes the other's place
    assert training_text([tmp_path / "text.txt"]) == {"text.txt": load_conversations(tmp_path / "text.txt")}
