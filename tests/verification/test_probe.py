"""The probe tells trees, chains and refusals apart by experiment."""

import pytest
import torch
from helpers import FAMILIES, prompts
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

from eval import families
from shape.drafters import AdversaryDrafter, OracleDrafter
from shape.errors import UnsupportedTarget
from shape.generation.decoder import ShapeDecoder
from shape.target.model import Target
from shape.verification import probe as program
from shape.verification.fused import FusedLayers
from shape.verification.probe import _chain_failure, _many_failure, probe, support_of
from shape.verification.windows import too_wide


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_trees_are_supported(tiny_model, arch, dtype):
    support = probe(Target(tiny_model(arch, dtype)))
    assert support.mode == "tree" and support.reason == ""
    assert support.sliding_window == (6 if arch == "mistral" else None)
    assert len(support.layers) == 2
    assert support.grouped_queries == (arch not in ("gpt2", "gpt_neox"))


# Of tiny models that look back in a way that their configuration says under a name of its own.
_SMALL = {"vocab_size": 64, "hidden_size": 32, "max_position_embeddings": 512, "initializer_range": 0.3}
_HEADS = {
    "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
_EXPERTS = {"intermediate_size_mlp": 48, "num_local_experts": 2}
_LOCAL = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}


def looking_back(kind: str, window: int, **more) -> PreTrainedModel:
    name = {"gpt_neo": "window_size", "llama4_text": "attention_chunk_size"}.get(kind, "sliding_window")
    own = {"gpt_neo": _LOCAL, "llama4_text": _HEADS | _EXPERTS}.get(kind, _HEADS)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **_SMALL | own | {name: window} | more)
        return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text"])
def test_layers_that_read_other_layers_keys(kind):
    """As their small members are published: the last layers keep nothing of their own."""
    model = families.build(kind)
    support = probe(Target(model))
    assert support.mode == "tree" and len(support.layers) == 2 < model.config.num_hidden_layers
    decoder, given = ShapeDecoder(model, AdversaryDrafter(), fall_back=False), prompts([9, 40])
    expected = model.generate(**given, max_new_tokens=24, do_sample=False)
    assert torch.equal(decoder.generate(**given, max_new_tokens=24), expected)


@pytest.mark.parametrize("window", [5, 40, 300])  # the first is shorter than the texts of the probe
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_window_of_any_size_is_seen(window, dtype):
    """GPT-Neo hides by the place in the cache, which a tree's nodes have in another order."""
    support = probe(Target(looking_back("gpt_neo", window).to(dtype)))
    assert support.mode == "chain" and "off by" in support.reason
    known = probe(Target(looking_back("gemma2", window).to(dtype)))
    assert known.mode == "tree" and known.sliding_window == window


def test_chunks_are_seen_and_decoded_as_chains():
    assert probe(Target(looking_back("llama4_text", 40))).mode == "chain"
    # No text of this target is longer than a chunk.
    assert probe(Target(looking_back("llama4_text", 512))).mode == "tree"


def test_a_window_further_than_can_be_looked_is_no_tree():
    wide = looking_back("llama4_text", 70_000, max_position_embeddings=80_000)
    support = probe(Target(wide))
    assert support.mode == "chain" and "window of 70000 tokens is wider than can be looked beyond" in support.reason


def test_chunks_that_transformers_does_not_read_hide_nothing():
    """Of Qwen2.5-1M, which is a plain Qwen2 there."""
    chunks = {"chunk_size": 262_144, "local_size": 8192, "original_max_position_embeddings": 262_144}
    more = {"max_position_embeddings": 1_010_000, "use_sliding_window": False, "dual_chunk_attention_config": chunks}
    target = Target(looking_back("qwen2", 32_768, **more))
    assert too_wide(target) is None
    assert probe(target).mode == "tree"


def test_a_cache_that_drops_what_the_mask_shows_is_refused():
    """Moshi's window is in its cache alone: with a whole cache it sees more than ``generate`` lets it see."""
    with pytest.raises(UnsupportedTarget, match=r"states are off by .* behind"):
        probe(Target(families.build("moshi")))


@pytest.mark.parametrize(("kind", "window"), [("gpt_neo", 40), ("llama4_text", 24)])
def test_answers_across_a_wide_window_are_the_targets_own(kind, window):
    model = looking_back(kind, window).double()
    batch, options = prompts([33, 9, 50]), {"max_new_tokens": 30, "do_sample": False, "eos_token_id": []}
    rows = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    expected = [model.generate(ids[mask][None], pad_token_id=0, **options)[0].tolist() for ids, mask in rows]
    for drafter in (None, OracleDrafter(expected, error_rate=0.3, depth=5)):
        found = ShapeDecoder(model, drafter, fall_back=False).generate(**batch, **options)
        assert [row[-30:] for row in found.tolist()] == [text[-30:] for text in expected]


def test_alibi_in_the_mask_is_decoded_as_chains_or_refused():
    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)).double()
    try:
        assert probe(Target(model)).mode == "chain"
    except UnsupportedTarget as error:
        assert "cannot verify drafts exactly" in str(error)


def test_states_that_forget_the_tokens_before_a_forward_are_refused():
    """Mamba's own forward over several tokens begins anew, whatever its cache holds."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4))
    with pytest.raises(UnsupportedTarget, match=r"recurrent layers cannot forget a rejected draft; as a chain, .* off"):
        probe(Target(model))


def test_states_behind_accepted_tokens_have_to_be_numbers(tiny_model, monkeypatch):
    target, calls, forward = Target(tiny_model("llama")), [], program.tree_forward

    def second_fails(*given):
        calls.append(given)
        return forward(*given) * (float("nan") if len(calls) == 2 else 1)

    given = support_of(target), torch.arange(3, 13)[None], torch.arange(20, 26)[None]
    assert _chain_failure(target, *given, 0.01) is None
    monkeypatch.setattr(program, "tree_forward", second_fails)
    assert _chain_failure(target, *given, 0.01) == "states are off by nan"


def test_unknown_logit_scaling_is_refused(tiny_model):
    target = Target(tiny_model("llama"))
    head = target.head
    target.head = lambda hidden: head(hidden) * 1.5  # type: ignore[assignment]
    with pytest.raises(UnsupportedTarget, match="logits in a way that is not known"):
        probe(target)


@pytest.mark.parametrize("room", [16, 32, 64])
def test_kernels_serve_as_many_tokens_as_there_is_room_for(tiny_model, room, monkeypatch, recwarn):
    """On a GPU with less shared memory than their tiles for many tokens take: a tree's go through them."""

    class Small(FusedLayers):
        most = 64

        def __call__(self, input_ids, *given, **named):
            assert input_ids.numel() <= room
            return super().__call__(input_ids, *given, **named)

    for name in ("FusedLayers", "FusedGpuLayers"):
        monkeypatch.setattr(program, name, Small)
    support = probe(Target(tiny_model("llama", torch.float32)))
    assert support.mode == "tree" and support.fused.most == room
    said = [str(one.message) for one in recwarn if "kernels of ours" in str(one.message)]
    assert len(said) == (room < 64) and all(
        f"no more than {room} tokens: with more it raises Ass" in one for one in said
    )


@pytest.mark.parametrize("count", [24, 48])
def test_forwards_over_more_tokens_than_a_trees_are_tried(tiny_model, count, monkeypatch):
    """On a GPU, whose kernels have other tiles for them."""
    target = Target(tiny_model("llama", torch.float32))
    support, prompt = support_of(target), torch.arange(5, 16)[None]
    assert _many_failure(target, support, prompt, count, 1e-4) is None
    monkeypatch.setattr(program, "tree_forward", lambda *_: target.hidden(torch.full((1, count), 7)))
    assert "states are off by" in _many_failure(target, support, prompt, count, 1e-4)
    monkeypatch.setattr(program, "tree_forward", lambda *_: 1 / 0)
    assert _many_failure(target, support, prompt, count, 1e-4) == f"it raises ZeroDivisionError over {count} tokens"
