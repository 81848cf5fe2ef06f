"""The recipe of the shipped target in micro size: its export, what it holds out, how it resumes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import program, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

quickstart = program("train", "quickstart_target")
MICRO = quickstart.Recipe(
    hidden_size=32,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=16,
    intermediate_size=64,
    vocabulary=384,
    positions=256,
    block=32,
    batch=2,
    steps=6,
    warmup=2,
    generated=24,
    save_every=2,
    first_export=1,
    held_out_blocks=2,
)


def state(output: Path):
    return torch.load(output.parent / f".{output.name}.state.pt", weights_only=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run from beginning to end, and its held-out losses."""
    output = tmp_path_factory.mktemp("target") / "model"
    return output, quickstart.run(MICRO, output, data=[])


def test_export_loads_and_generates(finished):
    output, _ = finished
    model, tokenizer = AutoModelForCausalLM.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    assert model.dtype == torch.bfloat16
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    assert model.generate(**chat, max_new_tokens=3).shape[1] > chat["input_ids"].shape[1]


def test_tokenizer_keeps_text_and_splits_digits(finished):
    tokenizer = AutoTokenizer.from_pretrained(finished[0])
    text = "Pay 1234 dollars\n\tfür “zwei” 🦉 tickets."
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    assert all(digit in tokenizer.convert_ids_to_tokens(ids) for digit in "1234")


def test_training_text_is_what_the_chat_template_writes(finished):
    tokenizer = AutoTokenizer.from_pretrained(finished[0])
    row = {"conversations": [{"from": "human", "value": "Hi\nthere"}, {"from": "gpt", "value": "Hello!"}]}
    messages = [{"role": "user", "content": "Hi\nthere"}, {"role": "assistant", "content": "Hello!"}]
    assert quickstart.render(row) == tokenizer.apply_chat_template(messages, tokenize=False)


def test_card_and_losses(finished):
    output, losses = finished
    card = (output / "README.md").read_text()
    assert set(losses) == {"generated-validation"}
    assert f"{losses['generated-validation']:.3f}" in card
    assert "cc-by-sa-4.0" in card
    assert "--steps 6" in card


def test_loss_falls(finished):
    losses = state(finished[0])["progress"]["losses"]
    assert len(losses) == MICRO.steps
    assert losses[-1] < losses[0]


def test_a_stopped_run_ends_with_the_same_weights(finished, tmp_path, monkeypatch):
    output, untouched = tmp_path / "model", quickstart.Training.step

    def stops_after_five(training):
        if training.progress.step == 5:  # one step after the last saved state: it has to be done again
            raise KeyboardInterrupt
        return untouched(training)

    monkeypatch.setattr(quickstart.Training, "step", stops_after_five)
    with pytest.raises(KeyboardInterrupt):
        quickstart.run(MICRO, output, data=[])
    monkeypatch.setattr(quickstart.Training, "step", untouched)
    assert "interim weights" in (output / "README.md").read_text()
    assert state(output)["progress"]["step"] == 4

    losses = quickstart.run(MICRO, output, data=[], resume=True)
    assert losses == finished[1]
    assert (output / "model.safetensors").read_bytes() == (finished[0] / "model.safetensors").read_bytes()
    for name, tensor in state(finished[0])["model"].items():
        assert torch.equal(tensor, state(output)["model"][name]), name


def test_resuming_with_other_settings_is_refused(finished):
    output, _ = finished
    with pytest.raises(SystemExit, match="other settings"):
        quickstart.run(replace(MICRO, muon_lr=0.5), output, data=[], resume=True)


def test_development_dialogues_are_held_out(tmp_path):
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    rows = [{"id": name, "conversations": turns} for name in ("sgd-train-1", "sgd-dev-1", "sgd-train-2")]
    train, held_out = quickstart.local_sources([write_rows(tmp_path / "sgd_train.jsonl", *rows)])
    assert {name: len(texts) for name, texts in (train | held_out).items()} == {"sgd_train": 2, "sgd-dev": 1}


def test_no_prompt_that_is_measured_on_is_taught():
    train, _ = quickstart.generated_sources(5_000)
    generator = quickstart.load_generator()
    splits = generator.make_splits()
    measured = {generator.first_prompt(row) for name in ("validation", "bench") for row in splits[name]}
    taught = {text.removeprefix("<|im_start|>user\n").split("<|im_end|>")[0] for text in train["generated"]}
    assert len(taught) == len(train["generated"]) == 5_000
    assert not taught & measured


def test_sets_by_name_follow_the_published_schemas(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def published(name, *arguments, data_files="", split):
        if name == "parquet":
            return [{"turns": {"speaker": [0, 1], "utterance": ["Hi", "Hello"]}}]
        if name == "json":
            return [{"utterances": [{"speaker": "user", "text": "Tea"}, {"speaker": "assistant", "text": "Yes"}]}]
        assert (name, *arguments, split) == ("openai/gsm8k", "main", "train")
        return [{"question": "1 + 1?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"}]

    monkeypatch.setattr(datasets, "load_dataset", published)
    train, held_out = quickstart.hub_sources()
    sgd, tm4, gsm8k = (train[name] for name in ("sgd_train", "tm4", "gsm8k_train"))
    assert sgd == held_out["sgd-dev"] == ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"]
    assert "assistant\nYes<|im_end|>" in tm4[0]
    assert "assistant\n1 + 1 = 2\n#### 2<|im_end|>" in gsm8k[0]


def test_batches_depend_on_nothing_but_the_seed():
    documents = [torch.arange(n).numpy() for n in (5, 9, 3, 40)]
    longer, shorter = (quickstart.pack(documents, 8, rows, seed=1) for rows in (40, 7))
    assert torch.equal(longer[:7], shorter)
    assert not torch.equal(shorter, quickstart.pack(documents, 8, 7, seed=2))


def test_learning_rate_warms_up_and_falls_in_the_second_half():
    recipe = quickstart.Recipe(steps=100, warmup=10)
    factors = [quickstart.schedule(step, recipe) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[10:51] == [1.0] * 41
    assert factors[75] == pytest.approx(0.5)
    assert 0 < factors[99] < 0.03
