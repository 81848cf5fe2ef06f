"""Few calls a layer: the states of the target's own forward, and its own forward wherever that is not sure."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn

from shape.generation.decoder import ShapeDecoder
from shape.target.model import Target
from shape.target.prepack import prepack
from shape.target.quantize import quantize_model
from shape.verification.cache import KVCacheLayer
from shape.verification.forward import new_cache, prefill, tree_forward, tree_logits
from shape.verification.fused import MOST, FusedLayers
from shape.verification.probe import probe, support_of
from shape.verification.tree import TokenTree, root_only

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral"]
PARENTS = [-1, 0, 0, 1, 1, 3]


def made(tiny_model, arch: str = "llama", dtype: torch.dtype = torch.float32) -> Target:
    return made_of(tiny_model(arch, dtype))


def made_of(model: Any) -> Target:
    target = Target(model)
    support_of(target)
    return target


@torch.inference_mode()
def both(target: Target, batch: int = 1, layers: tuple[int, ...] = (-1,), single: bool = False) -> list[Tensor]:
    """States of a tree behind prompts of unequal length, fused and not, and the keys and values that they leave."""
    ids = torch.randint(64, (2, batch, 12), generator=torch.Generator().manual_seed(0))
    found, support = [], support_of(target)
    for fused in (support.fused, None):
        cache = new_cache(target, support, batch, 24)
        prefill(target, cache, ids[0], [12 - 3 * row for row in range(batch)])
        tree = root_only(ids[1, :, 0]) if single else TokenTree(ids[1, :, :6], torch.tensor([PARENTS] * batch))
        states = tree_forward(target, replace(support, fused=fused), cache, tree, layers)
        held = [x[row, :, : cache.host_lengths[row] + tree.size].flatten() for layer in cache.layers
                for x in (layer.keys, layer.values) for row in range(batch)]  # fmt: skip
        found += [states, torch.cat(held)]
    return found


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """Numbers of tokens that went through fused layers."""
    seen: list[int] = []
    stock = FusedLayers.__call__

    def call(self, input_ids, *others):
        seen.append(input_ids.numel())
        return stock(self, input_ids, *others)

    monkeypatch.setattr(FusedLayers, "__call__", call)
    return seen


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_states_and_cache_are_those_of_the_target_itself(tiny_model, calls, arch, dtype, batch, single):
    target = made(tiny_model, arch, dtype)
    calls.clear()
    states, held, expected, expected_held = both(target, batch, single=single)
    assert calls == [batch * (1 if single else 6)]
    assert states.dtype == dtype and states.shape == expected.shape
    near = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for one, other in ((states, expected), (held, expected_held)):
        assert (one - other).norm() <= near * other.norm()


def test_in_bfloat16_roundings_are_where_the_target_has_them(tiny_model):
    """Results lie nearer to each other than to exact ones, which roundings at other places would not do."""
    states, _, expected, _ = both(made(tiny_model, "llama", torch.bfloat16), 3)
    model = tiny_model("llama", torch.bfloat16).double()
    exact = both(made_of(model), 3)[0]
    assert (states - expected).norm() < 0.6 * min((one - exact).norm() for one in (states, expected))


def test_hooks_with_which_transformers_collects_states_do_not_turn_it_off(tiny_model, calls):
    """They stay where a forward was once asked for the states of several layers, as a prefill is."""
    target = made(tiny_model)
    with torch.no_grad():
        target.hidden(torch.tensor([[5, 6, 7]]), layers=(0, 1))
    calls.clear()
    states, _, expected, _ = both(target, layers=(0, 1, -1))
    assert calls == [6]
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layers", [(0,), (1,), (2,), (0, 1, 2, -1), (1, -1)])
def test_gives_the_states_of_other_layers(tiny_model, layers):
    states, _, expected, _ = both(made(tiny_model), 2, layers)
    assert states.shape == expected.shape
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("size", [1, 16, 37])
@torch.inference_mode()
def test_short_prompts_go_through_them(tiny_model, calls, arch, size):
    target = made(tiny_model, arch)
    ids = torch.randint(64, (2, size), generator=torch.Generator().manual_seed(0))
    calls.clear()
    found = []
    for support in (target.support, None):
        cache = new_cache(target, support_of(target), 2, 60)
        lengths = [size, (size + 1) // 2]
        states = prefill(target, cache, ids, lengths, layers=(0, -1), support=support)
        tree = TokenTree(ids[:, :1].expand(-1, 6), torch.tensor([PARENTS] * 2))
        assert cache.host_lengths == lengths
        found.append((states, tree_forward(target, support_of(target), cache, tree)))
    assert calls == [2 * (size + -size % 16), 12, 12]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


class Doubled(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.layer(x)


@pytest.mark.parametrize("place", ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp"])
def test_layers_that_take_another_ones_place_are_called(tiny_model, calls, place):
    """As adapters (LoRA) do."""
    target = made(tiny_model)
    block = target.model.model.layers[1]
    block.set_submodule(place, Doubled(block.get_submodule(place)))
    calls.clear()
    states, held, expected, expected_held = both(target)
    assert calls == [6]
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(held, expected_held, rtol=1e-4, atol=1e-4)


def replaced_norm(target: Target) -> None:
    target.model.model.layers[0].input_layernorm = Doubled(target.model.model.layers[0].input_layernorm)


def hooked(target: Target) -> None:
    target.model.model.layers[0].register_forward_hook(lambda module, given, found: 2 * found)


def wrapped(target: Target) -> None:
    add_hook_to_module(target.model.model.layers[1].self_attn, ModelHook())


def wider(target: Target) -> None:
    target.model.double()


@pytest.mark.parametrize("change", [replaced_norm, hooked, wrapped, wider])
def test_what_is_not_called_must_be_as_it_was(tiny_model, calls, change):
    target = made(tiny_model)
    calls.clear()
    change(target)
    states, _, expected, _ = both(target)
    assert not calls and torch.equal(states, expected)


def test_weights_that_change_are_noticed(tiny_model):
    target = made(tiny_model)
    with torch.no_grad():
        target.model.model.norm.weight.mul_(3)
        target.model.model.layers[1].post_attention_layernorm.weight = nn.Parameter(torch.full((32,), 0.3))
    states, _, expected, _ = both(target)
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


def halved(rotary: Any) -> None:
    with torch.no_grad():
        rotary.inv_freq.mul_(0.5)


def reversed_by_a_hook(rotary: Any) -> None:
    rotary.register_forward_hook(lambda module, given, found: (found[0], -found[1]))


@pytest.mark.parametrize("change", [halved, reversed_by_a_hook])
def test_rotary_frequencies_that_change_are_noticed(tiny_model, calls, change):
    target = made(tiny_model)
    before = both(target)[0]
    change(target.model.model.rotary_emb)
    calls.clear()
    states, _, expected, _ = both(target)
    assert calls == [6] and (states - before).norm() > 1e-3 * before.norm()
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


def test_serves_few_tokens_of_known_architectures(tiny_model):
    assert made(tiny_model, "gpt2").support.fused is None
    target = made(tiny_model)
    cache = new_cache(target, support_of(target), 1, 200)
    tokens = torch.zeros(1, MOST + 1, dtype=torch.int64)
    mask, fused = torch.zeros(1, 1, 1, 1), target.support.fused
    with torch.no_grad():
        assert fused.serves(tokens[:, 1:], mask, cache) and fused.serves(tokens[:, :1], None, cache)
        assert not fused.serves(tokens, mask, cache)
        assert not fused.serves(tokens[:, :2], None, cache)  # which would want a causal mask
    assert not fused.serves(tokens[:, :1], None, cache)  # gradients are kept


def test_caches_that_transform_what_they_hold_are_left_to_the_target(tiny_model):
    class Doubling(KVCacheLayer):
        def update(self, key_states, value_states, *args, **kwargs):
            return super().update(2 * key_states, value_states, *args, **kwargs)

    target = made(tiny_model)
    cache = new_cache(target, support_of(target), 1, 20)
    with torch.no_grad():
        assert target.support.fused.serves(torch.zeros(1, 1, dtype=torch.int64), None, cache)
        cache = new_cache(target, support_of(target), 1, 20)
        cache.layers = [Doubling(one.slots, one.keys, one.values) for one in cache.layers]
        assert not target.support.fused.serves(torch.zeros(1, 1, dtype=torch.int64), None, cache)


@pytest.mark.parametrize(("single", "layers"), [(False, (0, 1, -1)), (True, (-1,))])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4", "stock", "hooked"])
def test_logits_are_those_that_the_target_reads_off_the_states(tiny_model, kind, layers, single):
    """Bit for bit, by the same kernels or by the output embedding itself, where it has others or a hook; with a bias
    too, and new ones once its weights have changed.
    """
    model, seen = deepcopy(tiny_model("llama", torch.float32 if kind == "float32" else torch.bfloat16)), []
    model.lm_head.bias = torch.nn.Parameter(torch.randn(model.config.vocab_size, dtype=model.dtype))
    if kind.startswith("int"):
        quantize_model(model, kind)
    else:
        prepack(model, True)
    if kind == "stock":
        del model.lm_head.forward
    target = Target(model)
    support = support_of(target)
    if kind == "hooked":
        model.lm_head.register_forward_hook(lambda *_: seen.append(True))
    for change in range(2):
        cache = new_cache(target, support, 2, 24)
        ids = torch.arange(24).view(2, 12)
        prefill(target, cache, ids, [12, 9])
        tree = root_only(ids[:, 0]) if single else TokenTree(ids[:, :6], torch.tensor([PARENTS] * 2))
        seen.clear()
        with torch.inference_mode():
            states, logits = tree_logits(target, support, cache, tree, layers)
            assert len(seen) == (kind == "hooked")
            assert torch.equal(states, tree_forward(target, support, cache, tree, layers))
            assert torch.equal(logits, target.logits(states[..., -target.hidden_size :]))
        if change == 0 and not kind.startswith("int"):
            with torch.no_grad():
                model.lm_head.weight.mul_(2)
            before = logits
    assert kind.startswith("int") or not torch.equal(logits, before)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_one_that_computes_something_else_is_turned_off_when_the_target_is_probed(tiny_model, arch, monkeypatch):
    target, stock = Target(tiny_model(arch, torch.float32)), FusedLayers.__init__
    assert probe(target).fused is not None

    def other(self, *given):
        stock(self, *given)
        self.scale *= 2

    monkeypatch.setattr(FusedLayers, "__init__", other)
    support = probe(target)
    assert support.mode == "tree" and support.fused is None


def test_greedy_answers_are_the_targets_own(tiny_model, calls):
    model = tiny_model("llama", torch.float32)
    decoder = ShapeDecoder(model, "suffix")
    calls.clear()
    ids = torch.tensor([[5, 6, 7, 8] * 6])
    expected = model.generate(ids, do_sample=False, max_new_tokens=40)
    assert torch.equal(decoder.generate(ids, do_sample=False, max_new_tokens=40), expected)
    assert max(calls) > 1 and sum(calls) >= 40


@pytest.mark.parametrize("quantized", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_token_is_the_same_bit_for_bit_alone_and_in_a_tree(tiny_model, calls, arch, dtype, quantized):
    """Where its path lies in other slots, beside other nodes. So drafts change nothing in bfloat16 either."""
    model = deepcopy(tiny_model(arch, dtype))
    if quantized is not None:
        quantize_model(model, quantized)
    else:
        assert prepack(model)  # torch's own products depend on how many tokens there are
    target = made_of(model)
    support, path, length = support_of(target), [0, 1, 3, 5], 37
    ids = torch.randint(64, (1, length + 6), generator=torch.Generator().manual_seed(0))

    def behind_prompt(trees: list[TokenTree]) -> Tensor:
        cache = new_cache(target, support, 1, 64)
        prefill(target, cache, ids[:, :length], [length])
        calls.clear()
        found = []
        for tree in trees:
            found.append(tree_forward(target, support, cache, tree))
            cache.commit([[0]])
        assert calls == [tree.size for tree in trees]
        return torch.cat(found, dim=1)

    with torch.inference_mode():
        whole = behind_prompt([TokenTree(ids[:, length:], torch.tensor([PARENTS]))])[:, path]
        assert torch.equal(whole, behind_prompt([root_only(ids[:, length + node]) for node in path]))
