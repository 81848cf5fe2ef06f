"""Layers with a sliding window: attention reads the slots that a window reaches, and results are those of all slots."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import prompts
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from eval.families import random_model
from shape.drafters import AdversaryDrafter, OracleDrafter
from shape.generation.decoder import ShapeDecoder
from shape.generation.fixed import FixedSteps
from shape.target.inference import relative_error
from shape.target.model import Target
from shape.target.support import LayerShape
from shape.verification.cache import KVCache, KVCacheLayer
from shape.verification.forward import new_cache, prefill, tree_forward
from shape.verification.fused import FusedLayers
from shape.verification.probe import support_of
from shape.verification.tree import TokenTree, root_only

MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}  # gpt-oss: with attention sinks
KINDS: dict[str, dict[str, Any]] = {
    "gemma3_text": MIXED, "gpt_oss": MIXED | EXPERTS, "cohere2": MIXED, "mistral": {},
    "qwen2": MIXED | {"use_sliding_window": True},
}  # fmt: skip
PARENTS = [-1, 0, 0, 1, 1, 3, 2, 6]


def small(kind: str, window: int) -> PreTrainedModel:
    """In float64. Wide initialisation keeps attention influential."""
    own = {"mistral": {"num_hidden_layers": 2}}.get(kind, {"num_hidden_layers": 3}) | KINDS[kind]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    ends = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    return random_model(
        AutoConfig.for_model(
            kind, vocab_size=64, hidden_size=32, intermediate_size=48, max_position_embeddings=1024,
            initializer_range=0.3, sliding_window=window, **heads, **ends, **own,
        )
    )  # fmt: skip


@pytest.fixture
def seen(monkeypatch) -> list[tuple[bool, int]]:
    """Of every call to ``update``: whether the layer slides, and how many keys it hands to attention."""
    found: list[tuple[bool, int]] = []
    stock = KVCacheLayer.update

    def update(self, *given, **named):
        keys, values = stock(self, *given, **named)
        assert keys.shape[2] == values.shape[2]
        found.append((self.is_sliding, keys.shape[2]))
        return keys, values

    monkeypatch.setattr(KVCacheLayer, "update", update)
    return found


@pytest.mark.parametrize("window", [16, 64])
@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss"])
def test_greedy_answers_behind_texts_of_several_windows(kind, window):
    """Alone and in a batch of unequal lengths, of which some are shorter than the window; chains and trees."""
    model = small(kind, window)
    lengths, options = [4 * window, window // 2, 2 * window + 5], {"max_new_tokens": 24, "do_sample": False}
    given = prompts(lengths)
    expected = model.generate(**given, **options, eos_token_id=[])
    texts = [row[4 * window - length :].tolist() for row, length in zip(expected, lengths, strict=True)]
    for drafter in (AdversaryDrafter(), OracleDrafter(texts, error_rate=0.3, depth=5), None):
        decoder = ShapeDecoder(model, drafter, fall_back=False)
        found = decoder.generate(**given, **options, eos_token_id=[])
        assert torch.equal(found, expected), type(drafter)
    alone = ShapeDecoder(model, OracleDrafter(texts[:1], error_rate=0.3), fall_back=False)
    assert torch.equal(alone.generate(given["input_ids"][:1], **options, eos_token_id=[]), expected[:1])


@pytest.mark.parametrize(("kind", "fused"), [*((kind, False) for kind in KINDS), ("mistral", True), ("qwen2", True)])
@torch.inference_mode()
def test_states_of_trees_are_those_of_whole_texts(kind, fused):
    """In float32, behind prompts that come in portions longer than the window, and behind an accepted path."""
    target = Target(small(kind, 16).float())
    support = support_of(target)
    assert isinstance(support.fused, FusedLayers) or not fused
    assert support.mode == "tree" and support.sliding_window == 16
    ids, drafts = torch.randint(3, 64, (2, 3, 150), generator=torch.Generator().manual_seed(1))
    lengths = [150, 40, 70]
    support = support if fused else replace(support, fused=None)
    cache = new_cache(target, support, 3, 170)
    prefill(target, cache, ids, lengths, portion=40, support=support)
    tree = TokenTree(drafts[:, :8], torch.tensor([PARENTS] * 3))
    texts = [row[:length] for row, length in zip(ids, lengths, strict=True)]
    for path in ([0, 2, 6, 7], None):
        states = tree_forward(target, support, cache, tree)
        expected = torch.zeros_like(states)
        for row, text in enumerate(texts):
            for node in range(tree.size):
                own = tree.tokens[row, tree.ancestors[row, node].nonzero()[:, 0]]
                expected[row, node] = target.hidden(torch.cat([text, own])[None])[0, -1]
        assert relative_error(states, expected) < 1e-5
        if path is not None:
            cache.commit([path] * 3)
            texts = [torch.cat([text, own[path]]) for text, own in zip(texts, tree.tokens, strict=True)]


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "mistral"])
@torch.inference_mode()
def test_sliding_layers_read_a_window_and_the_tree(kind, seen):
    window, portion, tokens = 16, 40, 150
    target = Target(small(kind, window))
    support = support_of(target)
    ids = torch.randint(3, 64, (2, tokens), generator=torch.Generator().manual_seed(1))
    cache = new_cache(target, support, 2, tokens + 8)
    seen.clear()
    prefill(target, cache, ids, [tokens, tokens - 7], portion=portion)
    assert max(keys for sliding, keys in seen if sliding) == window - 1 + portion
    tree = TokenTree(ids[:, :8], torch.tensor([PARENTS] * 2))
    for each in (tree, root_only(ids[:, 0])):
        seen.clear()
        tree_forward(target, support, cache, each)
        assert {keys for sliding, keys in seen if sliding} == {7 + window - 1 + each.size}
        assert {keys for sliding, keys in seen if not sliding} == ({tokens + each.size} if kind != "mistral" else set())
    # The slots are all kept: a session goes back to an earlier place in its text.
    cache.set_lengths([40, 40])
    seen.clear()
    states = tree_forward(target, support, cache, root_only(ids[:, 40]))
    assert {keys for sliding, keys in seen if sliding} == {window}
    assert relative_error(states[:, 0], target.hidden(ids[:, :41])[:, -1]) < 1e-12


def test_a_session_goes_back_behind_its_window():
    """The second prompt shares less with the first answer than lies before the window then."""
    model, given = small("gemma3_text", 16), prompts([100])["input_ids"]
    decoder = ShapeDecoder(model, AdversaryDrafter(), fall_back=False)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": []}
    session = decoder.session()
    for prompt in (given, torch.cat([given[:, :60], given[:, :30]], dim=1)):
        assert torch.equal(session(prompt, **options), model.generate(prompt, **options))


def test_steps_of_fixed_shapes_see_all_slots(seen):
    """Their lengths are on the device, and a graph's shapes do not change."""
    model, given, options = small("gemma3_text", 16), prompts([70, 9]), {"max_new_tokens": 12, "eos_token_id": []}
    expected = model.generate(**given, **options, do_sample=False)
    texts = [expected[0].tolist(), expected[1, 61:].tolist()]
    drafter = OracleDrafter(texts, error_rate=0.3, depth=3)
    decoder = ShapeDecoder(model, drafter, fall_back=False, graphs=FixedSteps(slots=128))
    seen.clear()
    found = decoder.generate(**given, **options, return_dict_in_generate=True)
    assert found.stats.graphs and torch.equal(found.sequences, expected)
    assert (True, 128) in seen and (False, 128) in seen


def test_mask_sizes_are_those_of_transformers():
    shapes = [LayerShape((1, 2), (1, 2), sliding_window=8), LayerShape((1, 2), (1, 2))]
    for length in range(1, 20):
        stock = DynamicSlidingWindowLayer(sliding_window=8)
        new = torch.zeros(1, 1, length, 2)
        stock.update(new, new)
        cache = KVCache(shapes, 1, 32, torch.float32, torch.device("cpu"))
        cache.set_lengths([length])
        assert cache.is_sliding == [True, False]
        for size in (1, 5):
            assert cache.get_mask_sizes(size, 0) == stock.get_mask_sizes(size)
            assert cache.get_mask_sizes(size, 1) == (length + size, 0)
            more = torch.zeros(1, 1, size, 2)
            assert cache.update(more, more, 0)[0].shape[2] == stock.get_mask_sizes(size)[0]


def test_layers_that_a_mask_cannot_tell_apart_read_all_slots():
    """Only what the model masks by its configuration's one window is cut; chunks are left as they are."""
    llama4 = AutoConfig.for_model(
        "llama4_text", vocab_size=64, hidden_size=32, intermediate_size=48, intermediate_size_mlp=48,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=2,
        attention_chunk_size=24, max_position_embeddings=256,
    )  # fmt: skip
    chunked = support_of(Target(AutoModelForCausalLM.from_config(llama4).eval()))
    assert {shape.sliding_window for shape in chunked.layers} == {None}
    mixed = support_of(Target(small("gemma3_text", 16)))
    assert [shape.sliding_window for shape in mixed.layers] == [16, None, 16]
