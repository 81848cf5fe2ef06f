"""Targets whose weights are put into 8 or 4 bits at load: one model, plain and drafted, and less memory."""

import gc
import pickle
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import FalconConfig, FalconForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from shape.cli.generate import main as generate
from shape.drafters import AdversaryDrafter
from shape.errors import ConfigError
from shape.generation.decoder import ShapeDecoder
from shape.target import kernels
from shape.target.model import Target
from shape.target.quantize import QuantizedLinear, check, quantize_model, quantized

TEXTS = ("Book a table for two.", "What is 12 + 30?")


def layer(kind: type = nn.Linear) -> nn.Module:
    torch.manual_seed(0)
    return (nn.Linear(50, 70) if kind is nn.Linear else Conv1D(70, 50)).requires_grad_(False)


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
@pytest.mark.parametrize(("bits", "error"), [(8, 6e-3), (4, 9e-2)])
def test_a_layer_is_close_to_its_original_and_equal_to_its_own_weights(kind, bits, error):
    original = layer(kind)
    made = QuantizedLinear(original, bits)
    weight = original.weight.T if kind is Conv1D else original.weight
    assert (made.rows() - weight).norm() < error * weight.norm()
    x = torch.randn(2, 5, 50, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(made(x), F.linear(x, made.rows(), original.bias), rtol=1e-3, atol=1e-3)
    some = torch.tensor([69, 3, 3])
    assert torch.equal(made.rows(some), made.rows()[some])


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_of_zeros_stay_zeros(bits):
    original = layer()
    original.weight[:, :] = 0
    assert torch.equal(QuantizedLinear(original, bits).rows(), original.weight)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_layer_that_is_cast_copied_traced_or_learned_through(bits):
    made, x = QuantizedLinear(layer(), bits), torch.randn(3, 50)
    expected = made(x)
    for same in (made.double().float(), deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(same(x), expected)
    with torch.no_grad():
        assert torch.equal(torch.compile(made, backend="eager", fullgraph=True)(x), expected)
    given = x.clone().requires_grad_(True)
    made(given).sum().backward()
    torch.testing.assert_close(given.grad, made.rows().sum(0).expand_as(x))
    with pytest.raises(ConfigError, match=r"quantised for the CPU is given torch\.float64"):
        made(x.double())


@pytest.mark.parametrize("how", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_decoding_writes_what_the_quantised_model_writes(how):
    """By transformers with the same layers, by the plain loop, and with the predictor of the unquantised target."""
    drafted = ShapeDecoder.from_pretrained("quickstart-shape", dtype="float32", quantize=how, fall_back=False)
    target = drafted.target
    assert target.precision == f"float32, {how} weights" and drafted.support.mode == "tree"
    plain, emitted, forwards = ShapeDecoder(target), 0, 0
    for text in TEXTS:
        ids = target.encode([{"role": "user", "content": text}])
        found = drafted.generate(ids, max_new_tokens=40, do_sample=False, return_dict_in_generate=True)
        emitted, forwards = emitted + found.stats.emitted, forwards + found.stats.forwards
        assert torch.equal(found.sequences, plain.generate(ids, max_new_tokens=40, do_sample=False))
        assert torch.equal(found.sequences, target.model.generate(ids, max_new_tokens=40, do_sample=False))
    assert emitted / forwards > 1.3


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gpt_neox"])
@pytest.mark.parametrize("how", ["int8", "int4"])
def test_random_trees_in_a_batch(tiny_model, arch, how):
    model = tiny_model(arch, torch.float32)
    quantize_model(model, how)
    ids = torch.randint(3, 64, (3, 9), generator=torch.Generator().manual_seed(1))
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    found = ShapeDecoder(model, AdversaryDrafter(nodes=7, seed=1)).generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(found, expected)


def test_layers_that_keep_their_weight_transposed():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=2, n_positions=64)).eval()
    quantize_model(model, "int8")
    assert isinstance(model.transformer.h[0].mlp.c_fc, QuantizedLinear)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    found = ShapeDecoder(model, "ngram").generate(ids, max_new_tokens=20)
    assert torch.equal(found, model.generate(ids, max_new_tokens=20, do_sample=False))


def test_float_weights_are_let_go_of(tiny_model):
    model = tiny_model("llama", torch.float32)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    weights = [
        StorageWeakRef(module.weight.untyped_storage()) for module in model.modules() if isinstance(module, nn.Linear)
    ]
    before = sum(one.nbytes for one in model.parameters())
    quantize_model(model, "int8")
    gc.collect()
    assert [one.expired() for one in weights].count(False) == tied  # the embedding's stays
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    assert sum(one.nbytes for one in (*model.parameters(), *model.buffers())) < before


def test_the_output_embedding_keeps_8_bits_and_its_rows_are_at_hand(tiny_model):
    model = tiny_model("llama", torch.float32)
    original = model.lm_head.weight.clone()
    quantize_model(model, "int4")
    target = Target(model)
    assert model.lm_head.bits == 8 and model.model.layers[0].mlp.up_proj.bits == 4 and quantized(model) == "int4"
    tokens, states = torch.tensor([3, 60, 7]), torch.randn(2, 32)
    torch.testing.assert_close(target.output_rows(tokens), original[tokens], rtol=0.05, atol=0.02)
    torch.testing.assert_close(
        target.head_of(tokens, torch.float32)(states), target.logits(states)[:, tokens], rtol=1e-3, atol=1e-3
    )
    assert target.identity.head_hash == ""  # unknown: a predictor of the unquantised target is taken


def test_what_cannot_be_quantised(tiny_model, tiny_target_folder):
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match=r"option quantize .* says how a target is loaded"):
        Target.load(model, quantize="int8")
    for options, reason in (
        ({"quantize": "int3"}, "int3 is unknown; use int8 or int4"),
        ({"quantize": "int8", "dtype": "float16"}, "not in float16; give dtype bfloat16"),
        ({"quantize": "int8", "device_map": "cuda"}, "for the CPU, and the target is put on cuda"),
        ({"quantize": "int8", "quantization_config": {"quant_method": "x"}}, "leave one of them out"),
    ):
        with pytest.raises(ConfigError, match=reason):
            Target.load(tiny_target_folder, **{"device_map": "cpu", **options})


@pytest.mark.parametrize("dtype", [None, "auto"])
def test_a_checkpoint_in_float16_is_refused_before_it_is_read(dtype, tmp_path):
    FalconConfig(dtype="float16").save_pretrained(tmp_path)  # no weights are there
    with pytest.raises(ConfigError, match="not in float16; give dtype bfloat16"):
        Target.load(tmp_path, device_map="cpu", dtype=dtype, quantize="int8")


def test_a_family_with_linear_layers_of_its_own_is_refused(tmp_path):
    """All of its weights but the output embedding's would stay floats."""
    config = FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    FalconForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="a FalconForCausalLM has none but its output embedding"):
        Target.load(tmp_path, device_map="cpu", quantize="int8")


def test_the_option_of_commands(tiny_target_folder, capsys):
    arguments = ["--target", str(tiny_target_folder), "--device", "cpu", "--quantize", "int4"]
    generate([*arguments, "--prompt", "a b a b a b", "--max_new_tokens", "8"])
    assert "float32, int4 weights on cpu" in capsys.readouterr().err


def test_products_in_one_thread_are_told(monkeypatch):
    check("int4", None, torch.bfloat16, None, {})
    monkeypatch.setattr(kernels, "openmp", lambda: None)
    with pytest.warns(UserWarning, match="quantize int4 computes in one thread here"):
        check("int4", None, torch.bfloat16, None, {})
