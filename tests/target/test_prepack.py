"""Prepacked weights: the same products, as long as the weight is what it was, and nobody else notices."""

import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import shape.target.model
import shape.target.prepack
from shape import bundled
from shape.generation.decoder import ShapeDecoder
from shape.target.model import Target
from shape.target.prepack import PrepackedForward, count_unseen, multiplies, prepack

pytestmark = pytest.mark.skipif(not multiplies(torch.float32), reason="this build of torch has no oneDNN")


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(24, 40), nn.SiLU(), nn.Linear(40, 16, bias=False), Conv1D(10, 16))
    return made.to(dtype).requires_grad_(False)


@torch.no_grad()
def assert_same(packed: nn.Module, stock: nn.Module, shape: tuple[int, ...] = (2, 5, 24)) -> None:
    dtype = stock[0].weight.dtype
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found, expected = packed(x), stock(x)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    rounding = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding)


@given(st.lists(st.integers(1, 4), max_size=2), st.integers(1, 70), st.sampled_from([torch.float32, torch.bfloat16]))
def test_products_are_the_same_whatever_the_number_of_tokens(batch, tokens, dtype):
    stock, packed = layers(dtype), layers(dtype)
    assert prepack(packed, True) == multiplies(dtype)
    assert_same(packed, stock, (*batch, tokens, 24))


def made(layer: nn.Module) -> bool:
    return layer.forward._blocks is not None or layer.forward._packed is not None


def used(model: nn.Module) -> bool:
    """Whether the layers' copies have been made, and are of their weights."""
    return all(
        made(one) and one.forward._made_of[:2] == (one.weight.data_ptr(), one.weight._version)
        for one in model.modules()
        if isinstance(one, nn.Linear | Conv1D)
    )


def test_a_weight_that_changes_is_noticed():
    stock, packed = layers(), layers()
    assert prepack(packed)
    assert_same(packed, stock)
    assert used(packed)
    with torch.no_grad():
        for model in (stock, packed):
            model[0].weight.mul_(2)  # in place, as optimizers do
            model[2].weight = nn.Parameter(model[2].weight + 1, requires_grad=False)
            model[3].weight.data = model[3].weight.data - 1
    assert not used(packed)
    assert_same(packed, stock)
    assert used(packed)
    other = layers()
    with torch.no_grad():
        other[0].weight.add_(0.5)
    packed.load_state_dict(other.state_dict())
    assert_same(packed, other)
    for there, back in ((torch.float64, torch.float32), (torch.bfloat16, torch.float32)):
        assert_same(packed.to(there), other.to(there))
        assert_same(packed.to(back), other.to(back))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_pytorch_does_not_count_is_seen_at_a_glance(mode):
    stock, packed = layers(), layers()
    prepack(packed)
    assert_same(packed, stock)
    for at in (0, 2, 3):
        for model in (stock, packed):
            model[at].weight.data += 0.5
        assert used(packed)  # as far as anybody could know
        with mode():
            count_unseen(packed.modules())
        assert not used(packed)
        assert_same(packed, stock)
        made = [one.forward._made_of for one in (packed[0], packed[2], packed[3])]
        count_unseen(packed.modules())
        assert_same(packed, stock)
        assert made == [one.forward._made_of for one in (packed[0], packed[2], packed[3])]  # not again


def test_a_change_that_pytorch_counts_is_of_one_weight_alone():
    """The others' copies stay, and so do the graphs of a training beside them."""
    stock, packed = layers(), layers()
    prepack(packed)
    assert_same(packed, stock)
    others = [packed[at].weight for at in (2, 3)]
    versions = [one._version for one in others]
    for model in (stock, packed):
        with torch.no_grad():
            model[0].weight.mul_(1.5)
    count_unseen(packed.modules())
    assert [one._version for one in others] == versions
    assert_same(packed, stock)


class Adapter(nn.Module):
    """A layer beside another one, merged as PEFT merges its own: by a sum within ``weight.data``."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.merged_adapters = base, list[str]()
        self.delta = torch.randn(base.weight.shape, generator=torch.Generator().manual_seed(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.base_layer(x)
        return found if self.merged_adapters else found + x @ self.delta.T

    def merge(self) -> nn.Linear:
        self.base_layer.weight.data += self.delta
        self.merged_adapters.append("default")
        return self.base_layer

    def unmerge(self) -> nn.Linear:
        self.base_layer.weight.data -= self.delta
        self.merged_adapters.clear()
        return self.base_layer


def test_adapters_that_are_merged_are_noticed_by_the_next_call():
    decoder = ShapeDecoder.from_pretrained("quickstart-shape", dtype="float32", prepacked=True)
    plain = AutoModelForCausalLM.from_pretrained(bundled.resolve("quickstart-target"), dtype=torch.float32)
    ids = decoder.target.encode([{"role": "user", "content": "Book a table for two."}])
    options = {"max_new_tokens": 24, "do_sample": False}
    bare = plain.generate(ids, **options)
    adapter = Adapter(plain.model.layers[0].mlp.down_proj)
    adapter.merge()
    adapted = plain.generate(ids, **options)
    assert not torch.equal(bare, adapted)

    mlp, say = decoder.target.model.model.layers[0].mlp, decoder.session()
    adapter = Adapter(mlp.down_proj)

    def answers() -> torch.Tensor:
        out = say(ids, torch.ones_like(ids), **options, return_dict_in_generate=True)
        assert out.stats.reused_tokens == 0
        assert torch.equal(out.sequences, decoder.generate(ids, **options))
        return out.sequences

    assert torch.equal(answers(), bare)
    mlp.down_proj = adapter
    assert torch.equal(answers(), adapted)
    adapter.merge()
    assert torch.equal(answers(), adapted)
    adapter.unmerge()
    assert torch.equal(answers(), adapted)
    mlp.down_proj = adapter.merge()  # for good
    assert torch.equal(answers(), adapted)
    mlp.down_proj = adapter.unmerge()
    assert torch.equal(answers(), bare)
    mlp.down_proj = adapter.merge()  # between two calls, neither of which saw the adapter
    assert torch.equal(answers(), adapted)
    assert say(ids, torch.ones_like(ids), **options, return_dict_in_generate=True).stats.reused_tokens > 0


def test_copies_of_a_model_are_their_own():
    packed = layers()
    prepack(packed)
    assert_same(packed, layers())
    shared = deepcopy(packed, {id(one): one for one in packed.parameters()})  # as of a compressed target
    assert used(shared) and shared[0].forward._layer is shared[0]
    for copied in (deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        with torch.no_grad():
            copied[0].weight.zero_()
        assert copied[0].forward._layer is copied[0] is not packed[0]
        assert_same(packed, layers())
        expected = layers()
        expected[0].weight.zero_()
        assert_same(copied, expected)
    assert packed.state_dict().keys() == layers().state_dict().keys()


def test_where_the_copy_does_not_serve_the_layer_does_what_it_always_does():
    packed, x = layers(), torch.randn(3, 24)
    prepack(packed)
    packed.requires_grad_(True)
    packed(x).sum().backward()
    assert packed[0].weight.grad is not None and not made(packed[0])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert packed(x).dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(torch.compile(packed, backend="eager", fullgraph=True)(x), layers()(x))
    assert not made(packed[0])


def test_what_is_not_a_plain_layer_is_left_alone(monkeypatch):
    class Own(nn.Linear):
        pass

    hooked = add_hook_to_module(nn.Linear(4, 4), ModelHook())
    theirs = hooked.forward
    model = nn.Sequential(Own(4, 4), hooked, nn.Linear(4, 4).double())
    assert not prepack(model, True) and hooked.forward is theirs
    assert prepack(layers(), True) and not prepack(layers(), False)
    monkeypatch.setattr(shape.target.prepack, "_SHARE", 0.0)
    assert not prepack(layers()) and prepack(layers(), True)


def test_what_makes_a_target_slow_is_said_once(tiny_target_folder, monkeypatch, recwarn):
    def said(**options: Any) -> list[str]:
        recwarn.clear()
        Target.load(tiny_target_folder, device_map="cpu", **options)
        return [str(each.message) for each in recwarn if str(each.message).startswith("target ")]

    assert not said() and not said(prepacked=False, dtype="float16")
    monkeypatch.setattr(shape.target.prepack, "multiplies", lambda dtype: dtype == torch.float32)
    (slow,) = said(dtype="float16")
    assert "is in float16, for which this CPU has no fast kernels; give --dtype float32" in slow
    monkeypatch.setattr(shape.target.prepack, "_SHARE", 0.0)
    (short,) = said(dtype="float32")
    assert "has no copy of its weights" in short and short.endswith("or give --quantize int8")
    assert not said(dtype="float32", quantize="int8")


def test_a_model_at_hand_is_its_owners(tiny_model):
    model = tiny_model("llama")
    assert not Target.load(model).prepacked
    assert not any("forward" in vars(module) for module in model.modules())
    target = Target.load(model.float(), prepacked=True)
    assert target.prepacked and Target.load(target).prepacked and Target.load(model).prepacked
    other = Target.load(tiny_model("llama", torch.float32))
    assert not other.prepacked and Target.load(other, prepacked=True).prepacked and other.prepacked
    assert not Target.load("quickstart-target", prepacked=False).prepacked
    assert Target.load("quickstart-target").prepacked


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "temperature": 1.0, "top_k": 0}])
def test_decoding_writes_the_same(options):
    """By the loop with prepacked weights, without, and by transformers with the model as it is in the checkpoint."""
    stock = ShapeDecoder.from_pretrained("quickstart-shape", dtype="float32", prepacked=False)
    packed = ShapeDecoder.from_pretrained("quickstart-shape", dtype="float32")
    assert packed.target.prepacked and not stock.target.prepacked
    plain = AutoModelForCausalLM.from_pretrained(bundled.resolve("quickstart-target"), dtype=torch.float32)
    for text in ("Book a table for two.", "What is 12 + 30?", "Hello!"):
        ids = packed.target.encode([{"role": "user", "content": text}])
        found = packed.generate(ids, seed=1, max_new_tokens=40, **options)
        assert torch.equal(found, stock.generate(ids, seed=1, max_new_tokens=40, **options))
        if not options["do_sample"]:
            assert torch.equal(found, plain.generate(ids, max_new_tokens=40, do_sample=False))


def test_layers_that_keep_their_weight_transposed(tmp_path):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=2, n_positions=64)).eval()
    model.save_pretrained(tmp_path)
    target = Target.load(tmp_path, prepacked=True)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    assert isinstance(target.model.transformer.h[0].mlp.c_fc.forward, PrepackedForward)
    with torch.no_grad():
        torch.testing.assert_close(target.model(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    found = ShapeDecoder(target, "ngram").generate(ids, max_new_tokens=20)
    assert torch.equal(found, model.generate(ids, max_new_tokens=20, do_sample=False))
