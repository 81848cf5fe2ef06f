"""A small model of the target's tokens: what it is, that it learns, and the whole way to a decoder."""

import json

import pytest
import pytorch_lightning as pl
import torch
from helpers import write_rows
from torch.nn.utils.rnn import pad_sequence
from training_runs import OPTIONS, data_of

from shape.cli.train import main
from shape.drafters import ModelDrafter
from shape.errors import ConfigError
from shape.features.positions import eligible
from shape.generation.decoder import ShapeDecoder
from shape.networks.teacher_forcing import Texts
from shape.training.batches import Batch
from shape.training.distillation import DistillModule, draft_model
from shape.training.options import Losses, TrainingOptions

KL = Losses(smooth_l1=0.0, soft_cross_entropy=0.0, kl=1.0)


def distilled(target, source, steps: int, **changes) -> DistillModule:
    torch.manual_seed(0)
    options = TrainingOptions(steps=steps, batch_size=64, learning_rate=1e-2, warmup_steps=2)
    module = DistillModule(draft_model(target, 32, 1, 2, **changes), target, KL, options)
    data = data_of(source, target, options, window=None, max_length=128)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, data)
    return module


@torch.no_grad()
def divergence(module: DistillModule, store) -> float:
    """Mean KL of the target and the small model, computed from the texts themselves."""
    total = count = 0.0
    for ids, mask, _ in store:
        both = [model(ids[None]).logits[0, :-1].log_softmax(-1) for model in (module.target.model, module.predictor)]
        kl = (both[0].exp() * (both[0] - both[1])).sum(-1)
        supervised = (mask[1:] & mask[:-1]).float()
        total, count = total + float((kl * supervised).sum()), count + float(supervised.sum())
    return total / count


def test_it_learns_the_targets_distributions(store, tiny_target):
    before = divergence(distilled(tiny_target, store, 1), store)
    module = distilled(tiny_target, store, 60)
    assert divergence(module, store) < 0.8 * before
    assert all(parameter.requires_grad for parameter in module.predictor.parameters())


def test_the_loss_is_that_of_the_texts(store, tiny_target):
    """Of a batch with every text once: positions are those at which drafts are made."""
    torch.manual_seed(0)
    module = DistillModule(draft_model(tiny_target, 32, 1, 2), tiny_target, KL, OPTIONS)
    stored = list(store)
    hidden = pad_sequence([each.hidden for each in stored], batch_first=True)
    texts = Texts.whole(hidden, [each.input_ids for each in stored], [each.loss_mask for each in stored])
    roots = [eligible(each.loss_mask, torch.tensor([0, len(each.loss_mask)])) for each in stored]
    counted = torch.ones(sum(int(each.sum()) for each in roots), dtype=torch.int64)
    batch = Batch(0, 0, 1, torch.arange(len(stored)), counted, texts)
    module.log = module.log_dict = lambda *_, **__: None
    with torch.no_grad():
        loss = module.training_step(batch, 0)
    torch.testing.assert_close(float(loss), divergence(module, store), rtol=1e-3, atol=1e-4)


def test_what_it_drafts_with_is_a_copy(tiny_target):
    module = DistillModule(draft_model(tiny_target, 32, 1, 2), tiny_target, KL, OPTIONS)
    drafter = module.drafter(module.network)
    assert isinstance(drafter, ModelDrafter)
    drafter.bind(tiny_target)
    assert module.predictor.training and all(p.requires_grad for p in module.predictor.parameters())


def test_sizes(tiny_target):
    model = draft_model(tiny_target, None, 2, None)
    assert model.config.vocab_size == tiny_target.vocab_size and model.config.tie_word_embeddings
    assert model.config.hidden_size == 32 and len(model.model.layers) == 2
    with pytest.raises(ConfigError, match="of width 33 with 2 heads and 1 layers cannot be made"):
        draft_model(tiny_target, 33, 1, 2)
    with pytest.raises(ConfigError, match="at least one layer"):
        draft_model(tiny_target, 32, 0, 2)


def test_the_whole_way(tiny_target, tiny_target_folder, tmp_path, capsys):
    talks = tmp_path / "talks.jsonl"
    rows = (
        {"id": f"c{i}", "conversations": [{"from": "human", "value": "say"}, {"from": "gpt", "value": f"there: {i}"}]}
        for i in range(20)
    )
    write_rows(talks, *rows)
    output = tmp_path / "small"
    main([
        f"--target={tiny_target_folder}", f"--data={talks}", f"--output={output}", "--regenerate=false",
        "--max_length=64", "--predictor.kind=model", "--predictor.intermediate_size=32", "--losses.smooth_l1=0",
        "--training.steps=6", "--training.batch_size=16", "--validation.every=3", "--validation.prompts=2",
        "--validation.max_new_tokens=6", "--measurement.limit=2", "--measurement.max_new_tokens=6",
        "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.enable_progress_bar=false",
    ])  # fmt: skip
    said = capsys.readouterr().out
    assert f"--target {tiny_target_folder} --predictor {output}" in " ".join(said.split())
    record = json.loads((output / "config.json").read_text())["training"]
    assert record["steps"] == 6 and record["acceptance_length"]["value"] >= 1
    assert "Draft model for" in (output / "README.md").read_text()
    decoder = ShapeDecoder.from_pretrained(output, target=tiny_target)
    assert isinstance(decoder.drafter, ModelDrafter)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(
        decoder.generate(ids, max_new_tokens=12), ShapeDecoder(tiny_target).generate(ids, max_new_tokens=12)
    )
