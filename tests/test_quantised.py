"""Quantised targets: the same tokens as their own plain decoding, or a refusal that says why."""

import json
import shutil
import warnings
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, LlamaForCausalLM, PreTrainedModel, QuantoConfig, TorchAoConfig
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from shape import bundled
from shape.cli.generate import main as generate
from shape.drafters import AdversaryDrafter, TrainedDrafter, TreeShape
from shape.errors import TargetMismatch, UnsupportedTarget
from shape.generation.decoder import ShapeDecoder
from shape.networks.config import ShapeConfig
from shape.networks.shape import ShapePredictor
from shape.target.model import Target

Activations = Literal["float", "token", "forward"]


class Int8Linear(nn.Module):
    """What a quantiser puts in the place of a Linear: 8-bit weights with a scale per output, and no ``weight``.

    Args:
        activations: left alone, or rounded to 8 bits with a scale per token or one for the whole forward.
    """

    qweight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, inputs: int, outputs: int, bias: bool, activations: Activations, dtype: torch.dtype) -> None:
        super().__init__()
        self.activations = activations
        self.register_buffer("qweight", torch.zeros(outputs, inputs, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(outputs, 1, dtype=dtype))
        self.register_buffer("bias", torch.zeros(outputs, dtype=dtype) if bias else None)

    @classmethod
    def of(cls, linear: nn.Linear, activations: Activations = "float") -> "Int8Linear":
        weight = linear.weight.detach()
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, activations, weight.dtype)
        made.scale.copy_(weight.abs().amax(1, keepdim=True) / 127)
        made.qweight.copy_((weight / made.scale).round())
        if linear.bias is not None and made.bias is not None:
            made.bias.copy_(linear.bias.detach())
        return made

    def forward(self, x: Tensor) -> Tensor:
        if self.activations != "float":
            largest = x.abs().amax(-1, keepdim=True) if self.activations == "token" else x.abs().amax()
            step = largest.clamp(min=1e-9) / 127
            x = (x / step).round() * step
        return F.linear(x, self.qweight.to(x.dtype) * self.scale, self.bias)


class Int8Embedding(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        weight = embedding.weight.detach()
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 127)
        self.register_buffer("weight", (weight / self.scale).round().to(torch.int8))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids] * self.scale[ids]


class Float8Linear(nn.Module):
    """A ``weight`` that is floating-point and still no matrix to multiply by."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def quantise(model: PreTrainedModel, activations: Activations = "float", skip: tuple[str, ...] = ()) -> PreTrainedModel:
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name not in skip:
            model.set_submodule(name, Int8Linear.of(module, activations))
    return model


def prompt(model: PreTrainedModel, rows: int = 1) -> Tensor:
    return torch.randint(3, model.config.vocab_size, (rows, 9), generator=torch.Generator().manual_seed(1))


def assert_same_as_plain(model: PreTrainedModel, new_tokens: int = 24) -> None:
    """Random trees, in a batch: equal to the same quantised model's own generation."""
    ids = prompt(model, rows=3)
    decoder = ShapeDecoder(model, AdversaryDrafter(nodes=7, seed=1))
    assert decoder.support.mode == "tree"
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    found = decoder.generate(ids, max_new_tokens=new_tokens, do_sample=False)
    assert isinstance(found, Tensor) and torch.equal(found, expected)


def predictor_for(target: Target, **options: Any) -> ShapePredictor:
    config = ShapeConfig(
        hidden_size=target.hidden_size, intermediate_size=48, num_layers=1, target_identity=target.identity.to_dict(),
        **options,
    )  # fmt: skip
    torch.manual_seed(0)
    predictor = ShapePredictor(config).double().eval()
    if config.draft_vocab_size is not None:
        predictor.draft_vocabulary = torch.arange(5, 5 + config.draft_vocab_size)
    return predictor


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gpt_neox"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_8_bit_weights(tiny_model, arch, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # weights alone give no reason for one
        assert_same_as_plain(quantise(tiny_model(arch, dtype)))


def test_modules_that_give_zeros_mix_nothing(tiny_model):
    """As the second matrix of a LoRA does before training."""
    model = tiny_model("llama")
    nn.init.zeros_(model.model.layers[0].mlp.down_proj.weight)
    assert ShapeDecoder(model).support.mode == "tree"


@pytest.mark.parametrize("head", [Int8Linear.of, Float8Linear])
def test_a_quantised_embedding_and_head(tiny_model, head):
    model = tiny_model("llama")
    model.lm_head = head(model.lm_head)
    model.set_input_embeddings(Int8Embedding(model.get_input_embeddings()))
    assert Target(model).dtype == torch.float64  # not int8
    assert_same_as_plain(quantise(model))


@pytest.mark.parametrize("head", [Int8Linear.of, Float8Linear])
def test_rows_of_a_quantised_head(tiny_model, head):
    model = tiny_model("gpt_neox")
    model.set_output_embeddings(head(model.get_output_embeddings()))
    target, tokens = Target(model), torch.tensor([3, 60, 7])
    states = torch.randn(2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = target.head_of(tokens, torch.float64)
    assert torch.allclose(rows(states), model.get_output_embeddings()(states)[:, tokens], atol=1e-12)


def test_rows_of_a_quantised_head_with_a_bias(tiny_model):
    model = tiny_model("llama")
    linear = nn.Linear(32, 64).double()
    model.lm_head = Int8Linear.of(linear)
    states = torch.randn(2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = Target(model).head_of(torch.tensor([0, 63]), torch.float64)
    assert torch.allclose(rows(states), model.lm_head(states)[:, [0, 63]], atol=1e-12)


@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize("options", [{}, {"draft_vocab_size": 24}])
def test_the_predictor_of_the_target_before_it_was_quantised(tiny_model, with_head, options):
    model = tiny_model("llama")
    predictor = predictor_for(Target(model), **options)
    quantised = quantise(model, skip=() if with_head else ("lm_head",))
    decoder = ShapeDecoder(quantised, TrainedDrafter(predictor, TreeShape(depth=3, width=3)))
    ids = prompt(model)
    assert torch.equal(
        decoder.generate(ids, max_new_tokens=20), quantised.generate(ids, max_new_tokens=20, do_sample=False)
    )


def test_another_target_that_is_quantised_is_another_target(tiny_model):
    predictor = predictor_for(Target(tiny_model("llama", seed=0)))
    other = quantise(tiny_model("llama", seed=1), skip=("lm_head",))
    with pytest.raises(TargetMismatch, match="output embedding"):
        ShapeDecoder(other, TrainedDrafter(predictor))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("skip", [(), ("lm_head",)])
def test_activations_that_share_a_scale_are_refused(tiny_model, dtype, skip):
    model = quantise(tiny_model("llama", dtype), "forward", skip)
    with pytest.raises(UnsupportedTarget, match=r"_proj|lm_head|mlp") as refusal:
        ShapeDecoder(model)
    assert "one 8-bit scale for all tokens" in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_head_alone_whose_activations_share_a_scale_is_refused(tiny_model):
    model = tiny_model("llama")
    model.lm_head = Int8Linear.of(model.lm_head, "forward")
    with pytest.raises(UnsupportedTarget, match="lm_head"):
        ShapeDecoder(model)


def test_activations_rounded_token_by_token_are_reported(tiny_model):
    """They depend on no other token, and still the rounding of kernels can tip them over."""
    with pytest.warns(UserWarning, match=r"rounds coarsely.*near-ties"):
        decoder = ShapeDecoder(quantise(tiny_model("llama", torch.float32), "token"))
    assert decoder.support.mode == "tree"


def test_dynamic_quantisation_of_torch_is_refused(tiny_model):
    quantize_dynamic = getattr(torch.ao.quantization, "quantize_dynamic", None)
    if quantize_dynamic is None:
        pytest.skip("this torch has no torch.ao.quantization.quantize_dynamic any more")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = quantize_dynamic(tiny_model("llama", torch.float32), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UnsupportedTarget, match="one 8-bit scale for all tokens"):
        ShapeDecoder(model)


def test_a_checkpoint_that_says_how_it_is_quantised(tiny_model, tiny_tokenizer, tmp_path, capsys):
    """By transformers' own way for a quantiser of one's own, with a folder that commands load by its path."""

    @register_quantization_config("test-int8")
    class Config(QuantizationConfigMixin):
        def __init__(self, **values: Any) -> None:
            self.quant_method = "test-int8"

    @register_quantizer("test-int8")
    class Quantizer(HfQuantizer):
        requires_calibration = True

        def _process_model_before_weight_loading(self, model: PreTrainedModel, **more: Any) -> None:
            quantise(model, skip=("lm_head",))

        def is_serializable(self, *given: Any, **named: Any) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return False

    model = tiny_model("llama", torch.float32, seed=1, vocab_size=len(tiny_tokenizer))
    before = Target(model, tiny_tokenizer).identity
    quantise(model, skip=("lm_head",))
    model.config.quantization_config = Config()
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)

    loaded = Target.load(tmp_path)
    assert isinstance(loaded.model, LlamaForCausalLM)
    assert isinstance(loaded.model.model.layers[1].mlp.up_proj, Int8Linear)
    assert before.differences(loaded.identity) == [] and loaded.precision == "float32, quantised by test-int8"
    assert_same_as_plain(loaded.model)
    arguments = ["--target", str(tmp_path), "--drafter", "ngram", "--prompt", "a b a b a b", "--max_new_tokens", "8"]
    generate(arguments)
    assert "acceptance length" in capsys.readouterr().err


def test_quantised_when_it_is_loaded(tiny_target_folder, capsys):
    """By an object in the API and by a mapping in a command, which reach transformers' quantiser."""

    @register_quantization_config("test-int8-later")
    class Config(QuantizationConfigMixin):
        def __init__(self, skip: tuple[str, ...] = ("lm_head",), **values: Any) -> None:
            self.quant_method, self.skip = "test-int8-later", skip

    @register_quantizer("test-int8-later")
    class Quantizer(HfQuantizer):
        requires_calibration = False

        def _process_model_after_weight_loading(self, model: PreTrainedModel, **more: Any) -> PreTrainedModel:
            return quantise(model, skip=self.quantization_config.skip)

        def is_serializable(self, *given: Any, **named: Any) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return False

    decoder = ShapeDecoder.from_pretrained(tiny_target_folder, quantization_config=Config())
    assert decoder.target.precision == "float32, quantised by test-int8-later"
    assert isinstance(decoder.target.model.model.layers[0].mlp.up_proj, Int8Linear)
    assert_same_as_plain(decoder.target.model)
    given = ["--quantization_config", "{quant_method: test-int8-later, skip: [lm_head]}"]
    generate(["--target", str(tiny_target_folder), *given, "--prompt", "a b a b", "--max_new_tokens", "8"])
    assert "float32, quantised by test-int8-later on cpu" in capsys.readouterr().err


def test_a_quantised_checkpoint_without_its_library(tiny_target_folder, tmp_path):
    """transformers names the package; no traceback."""
    folder = shutil.copytree(tiny_target_folder, tmp_path / "quantised")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "aqlm"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedTarget, match=r"cannot be loaded .*aqlm"):
        Target.load(folder)


def _torchao() -> TorchAoConfig:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def _quanto() -> QuantoConfig:
    return QuantoConfig(weights="int8")


def _nf4() -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("package", "config"), [("torchao", _torchao), ("bitsandbytes", _nf4), ("optimum.quanto", _quanto)]
)
def test_quantisers_that_are_installed(tmp_path, package, config: Callable[[], Any]):
    """On the shipped target: 4-bit blocks do not fit into smaller matrices."""
    pytest.importorskip(package, reason=f"{package} is not installed: pip install -e '.[quant]'")
    folder = bundled.resolve("quickstart-target")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config())
    assert_same_as_plain(model)
    if not model.hf_quantizer.is_serializable():  # quanto's
        return
    model.save_pretrained(tmp_path)
    loaded = Target.load(tmp_path)
    assert loaded.model.config.quantization_config is not None
    assert_same_as_plain(loaded.model)


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
def test_outliers_taken_out_of_8_bit_products_are_reported(tiny_target_folder):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install -e '.[quant]'")
    config = BitsAndBytesConfig(load_in_8bit=True)
    model = LlamaForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32, quantization_config=config)
    with pytest.warns(UserWarning, match=r"change each other"):
        ShapeDecoder(model)
