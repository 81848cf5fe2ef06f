"""What several tests decode with: random prompts of unequal length and an untrained predictor."""

import copy
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from conftest import tiny_config
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, BertConfig, BertModel, PreTrainedModel, PreTrainedTokenizerFast

from shape.drafters import PREDICTORS
from shape.networks.base import Predictor
from shape.networks.config import ShapeConfig
from shape.networks.transport import Plan

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ["llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "mistral"]
LENGTHS = [3, 17, 9, 1, 12]


def prompts(lengths=LENGTHS, side: str = "left", vocab_size: int = 64) -> dict[str, torch.Tensor]:
    """A batch of random prompts of unequal length, with its attention mask."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        at = slice(max(lengths) - length, None) if side == "left" else slice(0, length)
        ids[row, at] = torch.randint(3, vocab_size, (length,), generator=generator)
        mask[row, at] = 1
    return {"input_ids": ids, "attention_mask": mask}


def predictor(dtype=torch.float64, **options) -> Predictor:
    """Untrained; with `loud`, every weight is away from its special initial value."""
    torch.manual_seed(0)
    loud = options.pop("loud", False)
    options = {"step_mode": "recursive", "token_conditioning": "path", **options}
    config = ShapeConfig(**{"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, **options})
    network = PREDICTORS[config.kind](config).to(dtype).eval()
    if getattr(network, "mask_embedding", None) is not None:  # as of a target
        torch.nn.init.normal_(network.mask_embedding)
    for parameter in network.parameters() if loud else ():
        torch.nn.init.normal_(parameter, std=0.3)
    return network


@contextmanager
def without_compiler() -> Iterator[None]:
    """torch.compile as on a machine without a C++ compiler."""
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("there-is-no-such-compiler",), "force_disable_caches": True}):
        yield


@contextmanager
def program(name: str, folder: str = "eval") -> Iterator[ModuleType]:
    """A program of a folder that is no package as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]


def matrix(plan: Plan) -> torch.Tensor:
    """The transport plans themselves, (..., d, d), which nothing but a test makes."""
    return plan.u.unsqueeze(-1) * plan.kernel * plan.v.unsqueeze(-2)


def weaker_model(arch: str = "llama", noise: float = 0.02) -> PreTrainedModel:
    """The tiny model, a little wrong: what a smaller one of its family would be."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(arch)).double().eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(noise * torch.randn_like(weight))
    return model


# Of every kind and way of reading: what they are by name, for tests that draft with them.
BASELINES: dict[str, dict] = {
    "shape with attention": {"attention": True},
    "shape with Markov bias": {"step_mode": "parallel", "token_conditioning": "root", "markov_rank": 4},
    "shape with coupling": {"step_mode": "parallel", "token_conditioning": "none", "markov_rank": 4, "coupling": 9},
    "shape of three layers": {"attention": True, "feature_layers": [1, 2, -1]},
    "medusa": {"kind": "medusa", "own_heads": True},
    "eagle": {"kind": "eagle", "own_heads": True, "feature_layers": [1, 2, -1]},
    "eagle of one layer": {"kind": "eagle"},
    "eagle of Qwen3's layers": {
        "kind": "eagle", "feature_layers": [1, 2], "norm_before_residual": True, "fc_norm": True, "norm_output": True,
        "transformer_layer_config": {
            "model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        },
    },
    "eagle of three layers": {"kind": "eagle", "num_layers": 3, "feature_layers": [1, 2], "norm_before_residual": True},
    "peagle": {"kind": "peagle", "num_layers": 2, "feature_layers": [1, 2, -1], "own_heads": True, "mask_token_id": 5},
    "block": {"kind": "block", "num_layers": 2, "mask_token_id": 5},
    "block with windows": {
        "kind": "block", "num_layers": 2, "mask_token_id": 5,
        "transformer_layer_config": {
            "model_type": "qwen3", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4,
        },
    },
    "block with Markov bias and confidence": {
        "kind": "block", "feature_layers": [0, 1], "markov_rank": 4, "confidence": True, "mask_token_id": 5,
        "sample_from_anchor": True,
    },
    "block with gated Markov bias": {
        "kind": "block", "markov_rank": 4, "markov_head_type": "gated", "mask_token_id": 5,
    },
    "block with recurrent Markov bias": {
        "kind": "block", "markov_rank": 4, "markov_head_type": "rnn", "confidence": True, "mask_token_id": 5,
        "sample_from_anchor": True,
    },
}  # fmt: skip
# The same whose target, of the width 32, is wider or narrower.
WIDTHS: dict[str, dict] = {
    "eagle narrower than its target": {"kind": "eagle", "hidden_size": 16, "fc_norm": True},
    "peagle narrower than its target": {"kind": "peagle", "hidden_size": 16, "norm_before_fc": True},
    "block wider than its target": {"kind": "block", "hidden_size": 48, "markov_rank": 4},
}
for _options in WIDTHS.values():
    _options |= {"target_hidden_size": 32, "own_heads": True, "own_embeddings": True, "feature_layers": [1, 2]}
    _options |= {} if _options["kind"] == "eagle" else {"mask_token_id": 5}


def tiny_bert(folder: Path) -> Path:
    """A random encoder of a few thousand parameters, saved with a tokenizer of single letters."""
    letters = [*"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,?!:'"]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=64, initializer_range=0.5,
        )  # fmt: skip
        BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


SPECIALS = {
    "qwen3": ["<|im_start|>", "<|im_end|>"],
    "llama31": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "deepseek-r1": ["<|begin|>", "<|User|>", "<|Assistant|>", "<|end|>"],
    "gpt-oss": ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"],
}


def speaking(tokenizer: PreTrainedTokenizerFast, family: str) -> PreTrainedTokenizerFast:
    """A copy of a tokenizer with the special tokens of a family and a template that behaves like its own; the tags of
    reasoning are ordinary tokens, as with Qwen3.
    """
    copied = copy.deepcopy(tokenizer)
    copied.add_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIALS[family]], special_tokens=True
    )
    copied.add_tokens(["<think>", "</think>"])
    copied.chat_template = (Path(__file__).parent / f"templates/{family}.jinja").read_text()
    return copied


def thinking_model(tokenizer: PreTrainedTokenizerFast, steps: int = 300) -> PreTrainedModel:
    """Taught in seconds to answer everything with a thought, where the prompt has not closed it already."""
    config = tiny_config("llama", len(tokenizer))
    config.max_position_embeddings, config.initializer_range = 1024, 0.05
    config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        thoughts = "<think>\nhm, well\n</think>\n\nyes!<|im_end|>", "<think>\n\n</think>\n\nyes!<|im_end|>"
        for step in range(steps):
            asked = "".join(map(chr, torch.randint(32, 127, (1 + step % 17,)).tolist()))
            before = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nyes!<|im_end|>\n" * (step // 2 % 2)
            text = f"{before}<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
            start = len(tokenizer(text).input_ids)
            ids = torch.tensor([tokenizer(text + thoughts[step % 2]).input_ids])
            # An empty thought is given, and never written.
            start += len(tokenizer("<think>\n\n</think>\n\n").input_ids) * (step % 2)
            loss = torch.nn.functional.cross_entropy(model(ids).logits[0, start - 1 : -1], ids[0, start:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


# As in the configurations that their makers publish.
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
QWEN_06B = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
