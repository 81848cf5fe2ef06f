"""The modes that decoding runs in, without gradients and for evaluation, of which a model's owner notices nothing."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from threading import Barrier

import pytest
import torch
from helpers import predictor, tiny_config
from torch import nn
from torch.utils._pytree import tree_map
from transformers import AutoModelForCausalLM, LlamaConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from shape.drafters import HybridDrafter, ModelDrafter, NgramDrafter, TrainedDrafter
from shape.drafters.base import Wrapped
from shape.drafters.compressed import CompressedDrafter
from shape.errors import UnsupportedGeneration
from shape.generation.decoder import ShapeDecoder
from shape.target.inference import all_steps, each_step, evaluating, gradientless
from shape.target.model import Target
from shape.target.prepack import multiplies


class Kept(torch.Tensor):
    """Weights of a class of their own, as quantisers have them: unpacked by every operation."""

    def __new__(cls, actual: torch.Tensor) -> "Kept":
        return torch.Tensor._make_wrapper_subclass(cls, actual.shape, dtype=actual.dtype, device=actual.device)

    def __init__(self, actual: torch.Tensor) -> None:
        self.actual = actual

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        unpack = lambda part: part.actual if isinstance(part, Kept) else part  # noqa: E731
        found = operation(*tree_map(unpack, args), **tree_map(unpack, kwargs or {}))
        return cls(found) if operation is torch.ops.aten.detach.default else found


def keep(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Kept(module.weight.detach()), requires_grad=False)
    return model


def test_weights_of_their_own_class_decode_without_it(tiny_model):
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = tiny_model("llama").generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12)
    kept = keep(tiny_model("llama"))
    small = Target(keep(tiny_model("llama", seed=1)))
    assert isinstance(ShapeDecoder(kept).gradientless(), torch.no_grad)
    for decoder in (ShapeDecoder(kept, "ngram"), ShapeDecoder(tiny_model("llama"), ModelDrafter(small))):
        assert torch.equal(decoder.generate(ids, max_new_tokens=12), expected)
        assert isinstance(decoder.gradientless(), torch.no_grad)


def test_networks_of_every_kind_of_drafter_are_asked(tiny_model):
    trained, model = TrainedDrafter(predictor()), ModelDrafter(Target(tiny_model("llama", seed=1)))
    for drafter in (NgramDrafter(), trained, model, HybridDrafter([NgramDrafter(), trained]), Wrapped(trained)):
        assert isinstance(gradientless(drafter.networks)(), torch.inference_mode)
    keep(trained.predictor)
    keep(model.model.model)
    for drafter in (trained, model, HybridDrafter([NgramDrafter(), trained]), Wrapped(trained)):
        assert isinstance(gradientless(drafter.networks)(), torch.no_grad)


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 0}, {"trace": True}])
def test_nothing_of_it_reaches_the_caller(tiny_model, options):
    decoder = ShapeDecoder(tiny_model("llama"), TrainedDrafter(predictor()), fall_back=False)
    seen = []
    hidden = decoder.target.hidden
    decoder.target.hidden = lambda *a, **more: seen.append(torch.is_inference_mode_enabled()) or hidden(*a, **more)
    ids = torch.tensor([[5, 6, 7]])
    for _ in decoder.stream(ids, max_new_tokens=8, **options):
        assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
    assert seen and all(seen)
    out = decoder.generate(ids, max_new_tokens=8, return_dict_in_generate=True, **options)
    assert not out.sequences.is_inference()


@pytest.mark.parametrize("rope", ["default", "dynamic"])
def test_a_target_that_has_decoded_can_be_trained(rope):
    """What a model keeps between forwards, as frequencies for longer texts, was made while decoding."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=16, rope_parameters={"rope_type": rope, "rope_theta": 1e4, "factor": 4.0},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    target = Target(model)
    target.max_positions = None
    decoder = ShapeDecoder(target, fall_back=False)
    ids = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(0))
    text = decoder.generate(ids, max_new_tokens=24, eos_token_id=[])
    assert text.shape[1] == 36  # past the positions that the frequencies were made for
    assert not any(buffer.is_inference() for buffer in model.buffers())  # processes that train together write to them
    model(input_ids=text, labels=text).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# -------------------------------------------------------------------------------------- modes of their owners


IDS = torch.tensor([[5, 6, 7, 8]])


def in_training(seed: int = 0) -> PreTrainedModel:
    """With dropout, which is training's alone, one part in evaluation mode, and one frozen."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = tiny_config("llama")
        config.attention_dropout = 0.5
        model = AutoModelForCausalLM.from_config(config).double().train()
    model.model.layers[0].mlp.eval()
    model.model.embed_tokens.requires_grad_(False)
    return model


def modes(*networks: nn.Module) -> list[bool]:
    found = [module.training for network in networks for module in network.modules()]
    return found + [weight.requires_grad for network in networks for weight in network.parameters()]


class Fails(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > 8:
            raise RuntimeError("the processor failed")
        return scores


def drafters(kind: str):
    network = predictor().train()
    if kind == "trained":
        return TrainedDrafter(network), [network]
    if kind == "compressed":
        return CompressedDrafter(), []
    small = in_training(seed=1)
    return HybridDrafter([TrainedDrafter(network), ModelDrafter(Target(small))]), [network, small]


@pytest.mark.parametrize("kind", ["trained", "compressed", "hybrid"])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_model_in_training_decodes_as_in_evaluation_and_stays_in_training(kind, graphs):
    model, expected = in_training(), in_training().eval().generate(IDS, max_new_tokens=24, eos_token_id=[])
    model.gradient_checkpointing_enable()  # which keeps training's forwards from filling a cache
    drafter, networks = drafters(kind)
    owned = [model, *networks]
    before = modes(*owned)
    state = torch.get_rng_state()
    decoder = ShapeDecoder(model, drafter, fall_back=False, graphs=graphs)
    assert modes(*owned) == before
    options = {"max_new_tokens": 24, "eos_token_id": []}
    assert torch.equal(decoder.generate(IDS, **options), expected)
    decoder.generate(IDS, do_sample=True, seed=1, **options)
    assert modes(*owned) == before
    with pytest.raises(RuntimeError, match="the processor failed"):
        decoder.generate(IDS, logits_processor=LogitsProcessorList([Fails()]), **options)
    assert modes(*owned) == before
    for _ in decoder.stream(IDS, **options):
        assert modes(*owned) == before
        break  # and leave it
    assert modes(*owned) == before and torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None for network in owned for weight in network.parameters())


def test_open_streams_find_and_leave_what_the_owner_says_meanwhile():
    model = in_training()
    options = {"max_new_tokens": 16, "eos_token_id": []}
    expected = in_training().eval().generate(IDS, **options)[0, 4:].tolist()
    decoder = ShapeDecoder(model, "ngram", fall_back=False)
    streams, found = [decoder.stream(IDS, **options) for _ in range(2)], ([], [])
    for number in range(40):
        model.train(number % 3 > 0)
        model.lm_head.train(number % 2 > 0)
        found[number % 2].extend(next(streams[number % 2], []))
        assert model.training == model.model.training == (number % 3 > 0) and model.lm_head.training == (number % 2 > 0)
    assert found == (expected, expected)


def test_the_last_of_several_threads_puts_the_modes_back():
    model = in_training()
    before = modes(model)
    first, second = evaluating([model]), evaluating([model])
    with first:
        second.__enter__()
    assert not any(module.training for module in model.modules())  # for the second is at work
    second.__exit__()
    assert modes(model) == before
    # A step in a worker thread waits for the other's to begin, so that the two overlap, whichever ends first.
    meet = Barrier(2, timeout=60)

    class Meets(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 6:
                meet.wait()
            return scores

    decoder = ShapeDecoder(model)
    options = {"eos_token_id": [], "logits_processor": LogitsProcessorList([Meets()])}
    with ThreadPoolExecutor() as threads:
        running = [threads.submit(decoder.generate, IDS, max_new_tokens=length, **options) for length in (4, 30)]
    expected = in_training().eval().generate(IDS, max_new_tokens=30, eos_token_id=[])
    assert torch.equal(running[1].result(), expected) and torch.equal(running[0].result(), expected[:, :8])
    assert modes(model) == before


class Unlucky(nn.Module):
    """A module at which an interrupt comes."""

    now = False

    @property
    def training(self) -> bool:  # type: ignore[override]
        if self.now:
            raise KeyboardInterrupt
        return vars(self)["training"]

    @training.setter
    def training(self, value: bool) -> None:
        vars(self)["training"] = value


def test_an_interrupt_on_the_way_into_evaluation_leaves_the_modes(monkeypatch):
    model, unlucky = in_training(), Unlucky()
    before, context = modes(model), evaluating([model, unlucky])
    monkeypatch.setattr(Unlucky, "now", True)
    with pytest.raises(KeyboardInterrupt):
        context.__enter__()
    assert modes(model) == before
    monkeypatch.setattr(Unlucky, "now", False)
    with context:
        assert not any(module.training for module in (unlucky, *model.modules()))
    assert modes(model) == before and unlucky.training


@pytest.mark.parametrize("errors", [1, 4])
@pytest.mark.parametrize("within", [each_step, all_steps])
def test_an_interrupt_that_numba_makes_an_error_of_is_one_again(within, errors):
    """Of loops in loops, one error of another."""

    def raises(count):
        try:
            if count == 0:
                raise KeyboardInterrupt
            raises(count - 1)
        except (KeyboardInterrupt, SystemError) as cause:
            raise SystemError("returned a result with an exception set") from cause

    def steps():
        yield "token"
        raises(errors - 1)

    pieces = within(nullcontext(), steps())
    assert next(pieces) == "token"
    with pytest.raises(KeyboardInterrupt):
        next(pieces)


# ------------------------------------------------------------------------------------- closing and copying


def forwards(model: nn.Module) -> list[bool]:
    return ["forward" in vars(module) for module in model.modules()]


def test_closing_takes_away_what_was_attached(tmp_path):
    model = in_training().float()
    before, attributes = modes(model), set(vars(model))
    expected = model.eval().generate(IDS, max_new_tokens=8)
    model.train()
    model.model.layers[0].mlp.eval()
    with ShapeDecoder.from_pretrained(None, model, drafter="ngram", prepacked=True) as decoder:
        assert torch.equal(decoder.generate(IDS, max_new_tokens=8), expected)
        assert any(forwards(model)) == multiplies(torch.float32)
        for copied in (deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert modes(copied) == before
            assert torch.equal(ShapeDecoder(copied).generate(IDS, max_new_tokens=8), expected)
            weight = next(copied.parameters())
            assert weight.data_ptr() != next(model.parameters()).data_ptr()
        model.save_pretrained(tmp_path)
        stream = decoder.stream(IDS, max_new_tokens=8)
        assert next(stream)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(saved.generate(IDS, max_new_tokens=8), expected)
    assert not any(forwards(model)) and modes(model) == before and set(vars(model)) == attributes
    assert model.config._attn_implementation == "sdpa"
    run = {"custom_generate": decoder.as_custom_generate()}
    for generate in (decoder.generate, decoder.stream, partial(model.generate, **run)):
        with pytest.raises(UnsupportedGeneration, match="this decoder was closed"):
            generate(IDS, max_new_tokens=8)
    decoder.close()
    assert [token for step in stream for token in step] == expected[0, 5:].tolist()  # what was begun is finished


@pytest.mark.skipif(not multiplies(torch.float32), reason="this build of torch has no oneDNN")
def test_who_attached_takes_away(tiny_model):
    """A target that decoders share stays prepacked until it is closed itself, and owners' own layers stay theirs."""
    target = Target.load(tiny_model("llama", torch.float32), prepacked=True)
    ShapeDecoder(target).close()
    ShapeDecoder.from_pretrained(None, target, drafter="none", prepacked=True).close()
    ShapeDecoder.from_pretrained(None, target.model, drafter="none", prepacked=True).close()
    assert target.prepacked
    target.close()
    assert not any(forwards(target.model))
    decoder = ShapeDecoder.from_pretrained(None, "quickstart-target", drafter="none")
    assert decoder.target.prepacked
    decoder.close()
    assert not decoder.target.prepacked
    decoder = ShapeDecoder.from_pretrained("quickstart-shape", dtype="float32")
    network = decoder.drafter.predictor
    ShapeDecoder.from_pretrained(decoder.target, drafter=decoder.drafter).close()
    assert decoder.target.prepacked and any(forwards(network))
    decoder.close()
    assert not decoder.target.prepacked and not any(forwards(network))
