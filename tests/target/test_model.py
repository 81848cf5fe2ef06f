"""Loading, identity, features and logits of targets."""

import hashlib
import weakref
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from shape.errors import ConfigError, DataError, TargetMismatch, UnsupportedTarget
from shape.target.identity import TargetIdentity, weights_hash
from shape.target.loading import resolve_dtype
from shape.target.model import _SELECTS, Target


def test_features_are_the_states_behind_the_logits(tiny_target):
    ids = torch.randint(3, 200, (2, 9), generator=torch.Generator().manual_seed(0))
    features = tiny_target.features(ids, layers=(1, -1))
    assert features.shape == (2, 9, 64)
    expected = tiny_target.model(ids).logits
    assert torch.allclose(tiny_target.logits(features[..., 32:]), expected, atol=1e-5)
    states = tiny_target.model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(features[..., :32], states[1])


def test_states_that_nobody_reads_are_freed_on_the_way(tiny_target_folder):
    target = Target.load(str(tiny_target_folder))
    blocks, norm, alive = target.model.model.layers, target.model.model.norm, []
    states: list[weakref.ref[torch.Tensor]] = []
    for block in blocks:
        block.register_forward_hook(
            lambda _, __, out: states.append(weakref.ref(out[0] if isinstance(out, tuple) else out))
        )
    norm.register_forward_pre_hook(lambda *_: alive.extend(own() is not None for own in states))
    target.features(torch.arange(6)[None], layers=(0, -1))
    assert alive == [not _SELECTS, True]  # the last is the norm's input


def test_output_rows_are_what_logits_are_made_of(tiny_target):
    states, tokens = torch.randn(3, 32), torch.tensor([5, 200, 7])
    every = tiny_target.output_rows()
    assert every.data_ptr() == tiny_target.head.weight.data_ptr()  # not a copy
    assert torch.allclose(states @ every.T, tiny_target.logits(states), atol=1e-5)
    assert torch.equal(tiny_target.output_rows(tokens), every[tokens])


def test_right_padding_changes_no_feature(tiny_target):
    ids = torch.randint(3, 200, (1, 6), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([ids, torch.zeros(1, 3, dtype=torch.long)], dim=1)
    assert torch.allclose(tiny_target.features(ids), tiny_target.features(padded)[:, :6], atol=1e-6)


def test_identity_survives_saving_and_dtype(tiny_target, tiny_target_folder):
    loaded = Target.load(tiny_target_folder, dtype="bfloat16")
    assert loaded.dtype == torch.bfloat16
    assert tiny_target.identity.differences(loaded.identity) == []
    half = Target.load(tiny_target_folder, dtype="float16")  # whose head has other digits
    assert tiny_target.identity.differences(half.identity) == half.identity.differences(loaded.identity) == []
    assert TargetIdentity.from_dict(loaded.identity.to_dict()) == loaded.identity


def test_identity_names_what_differs(tiny_target, tiny_model, tiny_tokenizer):
    other = Target(tiny_model("llama", torch.float32, seed=2, vocab_size=len(tiny_tokenizer)), tiny_tokenizer)
    assert [text.split(" (")[0] for text in tiny_target.identity.differences(other.identity)] == ["output embedding"]
    without_tokenizer = Target(tiny_target.model)
    assert tiny_target.identity.differences(without_tokenizer.identity) == []


def test_several_templates_by_name_are_in_the_identity(tiny_target, tiny_tokenizer):
    before, hashes = Target(tiny_target.model, tiny_tokenizer).identity, set()
    assert before.template_hash == hashlib.sha256(tiny_tokenizer.chat_template.encode()).hexdigest()[:16]
    for templates in ({"default": "a", "tool_use": "b"}, {"tool_use": "b", "default": "a"}, {"default": "a"}):
        tokenizer = deepcopy(tiny_tokenizer)
        tokenizer.chat_template = templates
        identity = Target(tiny_target.model, tokenizer).identity
        assert [text.split(" (")[0] for text in identity.differences(before)] == ["chat template"]
        hashes.add(identity.template_hash)
    assert len(hashes) == 2  # in whatever order


def test_a_changed_chat_template_warns_and_another_target_is_refused(tiny_target, tiny_model, tiny_tokenizer):
    trained = replace(tiny_target.identity, revision="0ab1")
    with pytest.warns(UserWarning, match=r"\(revision 0ab1\) with another chat template than .* drafts are verified"):
        replace(trained, template_hash="of before").require(tiny_target.identity)
    other = Target(tiny_model("llama", torch.float32, seed=2, vocab_size=len(tiny_tokenizer)), tiny_tokenizer)
    with pytest.raises(TargetMismatch, match=r"\(revision 0ab1\), and .* differs in output embedding"):
        trained.require(other.identity)


def test_weights_are_told_apart_behind_one_head(tiny_target, tiny_target_folder):
    whole, half = weights_hash(tiny_target.model), Target.load(tiny_target_folder, dtype="bfloat16")
    assert whole == weights_hash(half.model) == weights_hash(Target.load(tiny_target_folder, prepacked=True).model)
    tuned = deepcopy(tiny_target.model)
    tuned.model.layers[0].mlp.up_proj.weight.data *= 1.1
    assert Target(tuned).identity.differences(tiny_target.identity) == [] and weights_hash(tuned) != whole
    assert weights_hash(tuned.half()) == ""


def test_gradients_end_at_the_target(tiny_target, tiny_target_folder):
    assert not any(parameter.requires_grad for parameter in Target.load(tiny_target_folder).model.parameters())
    head = tiny_target.model.get_output_embeddings()
    assert head.weight.requires_grad  # it is its owner's
    state = torch.randn(1, 32, requires_grad=True)
    tiny_target.logits(state).sum().backward()
    assert state.grad is not None and head.weight.grad is None
    assert not tiny_target.output_rows().requires_grad


def test_features_of_a_model_in_training_are_those_of_evaluation(tiny_target):
    model, ids = deepcopy(tiny_target.model).train(), torch.arange(3, 13)[None]
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert torch.equal(Target(model).features(ids), tiny_target.features(ids))
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("where", ["nowhere/at-all", "."])
def test_a_target_that_cannot_be_loaded(where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedTarget, match=f"target {where} cannot be loaded"):
        Target.load(where)


def test_encoder_decoder_models_are_refused(tmp_path):
    model = T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    with pytest.raises(UnsupportedTarget, match="encoder-decoder"):
        Target(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedTarget, match="encoder-decoder"):
        Target.load(tmp_path)


def test_no_chat_template(tiny_model):
    with pytest.raises(DataError, match="no chat template"):
        Target(tiny_model("llama")).render([{"role": "user", "content": "hi"}])


def test_dtype_names():
    assert resolve_dtype("bfloat16") is torch.bfloat16 and resolve_dtype(None) is None
    with pytest.raises(ConfigError, match="not a floating-point dtype"):
        resolve_dtype("int8")


def test_a_base_model_without_head_is_refused(tiny_model):
    with pytest.raises(UnsupportedTarget, match="no output embedding"):
        Target(tiny_model("llama").base_model)
