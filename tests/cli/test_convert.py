"""`shape convert`: from ours to what engines load, and back."""

import json
import shlex
from importlib import import_module

import pytest
import torch
from helpers import ROOT
from mtp_targets import MTP_TARGET, write_small
from training_runs import arguments, write_conversations

from shape.cli.convert import main
from shape.data.encoding import encode_all
from shape.data.reading import load_conversations
from shape.generation.decoder import ShapeDecoder
from shape.generation.loading import load_predictor
from shape.networks.config import ShapeConfig
from shape.networks.eagle import EaglePredictor
from shape.networks.export import export
from shape.target.model import Target


@pytest.fixture
def eagle(tiny_target, tmp_path):
    """A predictor of ours that reads with the target's head."""
    size = tiny_target.vocab_size
    config = ShapeConfig(kind="eagle", hidden_size=32, vocab_size=size, draft_vocab_size=40, feature_layers=[0, 1])
    network = EaglePredictor(config)
    network.draft_vocabulary = torch.arange(40) * 5
    export(network, tmp_path / "ours", tiny_target.identity, {})
    return tmp_path / "ours"


def test_there_and_back(eagle, tiny_target_folder, tmp_path, capsys):
    there, back = tmp_path / "there", tmp_path / "back"
    target = ["--target", str(tiny_target_folder)]
    main([str(eagle), "--to", "speculators", "--output", str(there), *target])
    config = json.loads((there / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(tiny_target_folder)
    decoder = ShapeDecoder.from_pretrained(there)  # which names its target
    ids = torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 6, "eos_token_id": []}
    assert torch.equal(decoder.generate(ids, **options), ShapeDecoder(decoder.target).generate(ids, **options))
    main([str(there), "--from", "speculators", "--to", "shape", "--output", str(back), *target])
    assert f"{back}: shape, " in capsys.readouterr().out
    before, after = load_predictor(eagle).state_dict(), load_predictor(back).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert after.keys() - before.keys() == {"lm_head.weight"}  # the target's rows, which engines want
    assert torch.equal(after["lm_head.weight"], decoder.target.output_rows(after["draft_vocabulary"]))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--to", "speculators"], "give --target, from which they are copied"),
        (["--to", "medusa"], "is of kind eagle, and the format medusa"),
        (["--to", "gguf"], "format gguf is unknown; choose one of shape, speculators"),
    ],
)
def test_errors_are_one_sentence(eagle, tmp_path, refused, more, said):
    assert said in refused(main, str(eagle), "--output", str(tmp_path / "out"), *more)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("own_heads", [False, True])
def test_draft_vocabulary_from_conversations(own_heads, tiny_target_folder, tmp_path, capsys, refused):
    target = Target.load(tiny_target_folder)
    size, named = target.vocab_size, ["--target", str(tiny_target_folder)]
    config = ShapeConfig(
        kind="eagle", hidden_size=32, vocab_size=size, feature_layers=[0, 1], own_heads=own_heads, num_steps=3
    )
    network = EaglePredictor(config)
    network.adopt(target)
    export(network, tmp_path / "whole", target.identity, {})
    data, whole, some = write_conversations(tmp_path / "talks.jsonl", 12), tmp_path / "whole", tmp_path / "some"
    counted = ["--data", str(data), "--draft_vocab_size", "24"]
    main([str(whole), "--to", "shape", "--output", str(some), *counted])
    assert "drafts from 24 tokens" in capsys.readouterr().out
    assert "the most frequent tokens of the answers in" in (some / "README.md").read_text()
    counts = torch.zeros(size, dtype=torch.int64)
    for example in encode_all(load_conversations(data), target.tokenizer, None).examples:
        counts += example.input_ids[example.loss_mask].bincount(minlength=size)
    tokens = load_predictor(some).draft_vocabulary
    assert tokens.tolist() == sorted(tokens.tolist()) and target.tokenizer.eos_token_id in tokens
    assert counts[tokens].sum() == counts.sort(descending=True).values[:24].sum()
    for predictor, drafted in ((whole, size), (some, 24)):
        decoder = ShapeDecoder.from_pretrained(predictor, num_draft_tokens=2)
        ids = torch.tensor([[5, 6, 7]])
        options = {"max_new_tokens": 12, "eos_token_id": []}
        assert torch.equal(decoder.generate(ids, **options), ShapeDecoder(decoder.target).generate(ids, **options))
        assert decoder.drafter.predictor.config.draft_size == drafted
    vllm = tmp_path / "vllm"
    main([str(whole), "--to", "speculators", "--output", str(vllm), *counted, *named])
    assert torch.equal(load_predictor(vllm).lm_head.weight, target.output_rows(tokens))
    out = ["--to", "shape", "--output", str(tmp_path / "out")]
    assert "give --data" in refused(main, str(whole), "--draft_vocab_size", "24", *out)
    assert "drafts from 24 tokens already" in refused(main, str(some), *counted, *out)
    for size in ("0", "-3", "5000"):
        wrong = ["--data", str(data), "--draft_vocab_size", size]
        assert f"draft_vocab_size is {size}, and the target has" in refused(main, str(whole), *wrong, *out)
    assert not (tmp_path / "out").exists()
    with pytest.warns(UserWarning, match="has few tokens"):
        main([str(whole), *out, "--data", str(data)])
    assert load_predictor(tmp_path / "out").draft_vocabulary is None


def test_nothing_is_overwritten(eagle, refused):
    assert "has a checkpoint already" in refused(main, str(eagle), "--to", "shape", "--output", str(eagle))


def test_every_command_of_the_page_runs(eagle, tiny_target_folder, tiny_tokenizer, tmp_path, monkeypatch):
    """docs/guides/checkpoints.md, with files of ours in place of a reader's; training is as short as can be."""
    monkeypatch.chdir(tmp_path)
    main([str(eagle), "--to", "eagle3", "--output", "theirs", "--target", str(tiny_target_folder)])
    data, target = write_conversations(tmp_path / "talks.jsonl", 12), str(tiny_target_folder)
    files = {"path/of/an/eagle3": "theirs", "path/of/the/drafter": "theirs", "D": str(data)}
    files |= {"T": target, "my-fine-tune": target, "checkpoints/my-eagle": "checkpoints/mine", MTP_TARGET: "qwen"}
    write_small(tmp_path / "qwen", tiny_tokenizer)
    short = [option for option in arguments("", "", "") if not option.startswith(("--target", "--data", "--output"))]
    short = [option for option in short if not option.startswith("--predictor.")] + ["--training.steps=2"]
    page = (ROOT / "docs/guides/checkpoints.md").read_text()
    commands = [shlex.split(line) for line in page.splitlines() if line.startswith("shape ")]
    assert [command[1] for command in commands] == ["convert", "train", "convert", "convert", "train"]
    for _, name, *given in sorted(commands, key=lambda command: command[-1] != "checkpoints/mine"):  # which others read
        run = import_module(f"shape.cli.{name}").main
        run([files.get(part, part) for part in given] + (short if name == "train" else []))
    made = {"checkpoints/eagle": "eagle", "checkpoints/mine": "eagle", "mine-vllm": "eagle", "checkpoints/mtp": "mtp"}
    for folder, kind in made.items():
        assert (tmp_path / folder / "model.safetensors").exists()
        assert load_predictor(tmp_path / folder).kind == kind
