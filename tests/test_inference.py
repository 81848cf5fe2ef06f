"""The mode that decoding runs in: inference mode where weights bear with it, and nobody else notices."""

import pytest
import torch
from helpers import predictor
from torch import nn
from torch.utils._pytree import tree_map
from transformers import AutoModelForCausalLM, LlamaConfig

from shape.decoder import ShapeDecoder
from shape.drafters import HybridDrafter, ModelDrafter, NgramDrafter, TrainedDrafter
from shape.drafters.base import Wrapped
from shape.inference import gradientless
from shape.target import Target


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
    model.train().requires_grad_(True)
    model(input_ids=text, labels=text).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
