"""What a call allocates is gone with the call, without Python's collector: on a GPU it is gigabytes."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from helpers import predictor, prompts, weaker_model
from transformers import StoppingCriteria

from shape.drafters import Drafter, HybridDrafter, ModelDrafter, NgramDrafter, TrainedDrafter
from shape.generation.decoder import ShapeDecoder
from shape.generation.static_drafters import StaticCache
from shape.target.model import Target
from shape.verification.cache import KVCache

DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "window": lambda: TrainedDrafter(predictor()),
    "attention": lambda: TrainedDrafter(predictor(attention=True)),
    "model": lambda: ModelDrafter(Target(weaker_model())),
    "hybrid": lambda: HybridDrafter([NgramDrafter(), TrainedDrafter(predictor(attention=True))]),
}


@pytest.fixture
def caches(monkeypatch, tiny_model):
    """Live KV caches, while the collector is off."""
    # What is compiled for the first time on a machine leaves cycles behind, with the frames that asked for it.
    warm = ShapeDecoder(tiny_model("llama"), TrainedDrafter(predictor(attention=True)))
    for options in ({}, {"do_sample": True, "num_return_sequences": 2}):
        warm.generate(**prompts([5, 9]), max_new_tokens=12, **options)
    del warm
    live: weakref.WeakSet = weakref.WeakSet()
    original = KVCache.__init__

    def counted(self: KVCache, *args, **options) -> None:
        live.add(self)
        original(self, *args, **options)

    monkeypatch.setattr(KVCache, "__init__", counted)
    gc.collect()
    gc.disable()
    yield live
    gc.enable()


@pytest.mark.parametrize("name", DRAFTERS)
def test_caches_are_freed_at_the_end_of_a_call(tiny_model, caches, name):
    decoder = ShapeDecoder(tiny_model("llama"), DRAFTERS[name]())
    decoder.generate(**prompts([5, 9]), max_new_tokens=12)
    decoder.generate(**prompts([5]), max_new_tokens=12, do_sample=True, num_return_sequences=2)
    assert not caches


def test_caches_are_freed_where_a_call_breaks_off(tiny_model, caches):
    class Fails(StoppingCriteria):
        def __call__(self, input_ids, scores, **options):
            raise RuntimeError("stop")

    decoder = ShapeDecoder(tiny_model("llama"), TrainedDrafter(predictor(attention=True)))
    ids = prompts([5])["input_ids"]
    stream = decoder.stream(ids, max_new_tokens=12)
    next(stream), next(stream)
    assert len(caches) == 2
    del stream
    assert not caches
    with pytest.raises(RuntimeError, match="stop"):
        decoder.generate(ids, stopping_criteria=[Fails()])
    assert not caches


def test_a_session_keeps_one_cache(tiny_model, caches):
    say = ShapeDecoder(tiny_model("llama")).session()
    for _ in range(2):
        say(**prompts([5]), max_new_tokens=8)
    assert len(caches) == 1
    del say
    assert not caches


def test_what_a_decoder_has_loaded_is_freed_once_it_is_closed():
    """Weights and their copies in blocks, target's and predictor's."""
    for kept in (True, False):  # what is compiled for the first time leaves cycles behind
        decoder = ShapeDecoder.from_pretrained("quickstart-shape", dtype="float32", prepacked=True)
        decoder.generate(**prompts([5]), max_new_tokens=8)
        networks = decoder.target.model, decoder.drafter.predictor
        weights = [weakref.ref(weight) for network in networks for weight in network.parameters()]
        copies = [vars(module).get("forward") for network in networks for module in network.modules()]
        copies = [weakref.ref(one._packed) for one in copies if one is not None and one._packed is not None]
        del networks
        gc.collect()
        gc.disable()
        try:
            decoder.close()
            assert kept or not any(copy() is not None for copy in copies)
            del decoder
            assert kept or not any(weight() is not None for weight in weights)
        finally:
            gc.enable()


def test_steps_of_fixed_shapes_keep_theirs_and_no_other(tiny_model, caches):
    decoder = ShapeDecoder(tiny_model("llama"), TrainedDrafter(predictor(attention=True)), graphs=True)
    assert decoder.generate(**prompts([5]), max_new_tokens=12, return_dict_in_generate=True).stats.graphs
    assert len(caches) == 2 and all(isinstance(cache, StaticCache) for cache in caches)
    del decoder
    assert not caches


@pytest.mark.parametrize("name", ["window", "attention"])
def test_a_prompts_states_are_let_go_once_the_drafter_has_them(tiny_model, name):
    seen: list[weakref.ref] = []

    class Watched(TrainedDrafter):
        def start(self, settled, hidden):
            super().start(settled, hidden)
            seen.append(weakref.ref(hidden))
            assert self.window.untyped_storage().nbytes() < hidden.untyped_storage().nbytes()

        def draft(self, settled, sampler):
            assert seen[-1]() is None
            return super().draft(settled, sampler)

    batch = prompts([40])
    ShapeDecoder(tiny_model("llama"), Watched(predictor(attention=name == "attention"))).generate(
        **batch, max_new_tokens=4
    )
    assert len(seen) == 1 and torch.is_tensor(batch["input_ids"])
