"""What several tests share: prompts, tiny models and tokenizers, untrained predictors, and configurations that model
makers publish.
"""

import copy
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.generation.streamers import BaseStreamer

from shape.drafters import Committed
from shape.drafters.recipes.pack import Pack, Recipe
from shape.networks.base import Predictor
from shape.networks.config import ShapeConfig
from shape.networks.registry import PREDICTORS
from shape.networks.transport import Plan
from shape.target.model import Target
from shape.verification.noise import token_hashes
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree

ROOT = Path(__file__).resolve().parents[1]
MODES = [  # of steps, and the tokens that they read
    ("recursive", "path"),
    ("recursive", "root"),
    ("recursive", "none"),
    ("parallel", "root"),
    ("parallel", "none"),
]
FAMILIES = ["llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "mistral"]
LENGTHS = [3, 17, 9, 1, 12]
GREEDY = Sampler(prompt_lengths=torch.tensor([1]))


def location(path: Path) -> str:
    """Within the repository."""
    return str(path.relative_to(ROOT))


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


def tiny_config(arch: str, vocab_size: int = 64) -> PretrainedConfig:
    """A few thousand parameters of a real architecture. Wide initialisation keeps attention influential."""
    base = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    grouped = {"num_key_value_heads": 2}
    match arch:
        case "llama":
            return LlamaConfig(**base, **grouped)
        case "qwen2":
            return Qwen2Config(**base, **grouped)
        case "qwen3":
            return Qwen3Config(**base, **grouped, head_dim=8)
        case "mistral":
            return MistralConfig(**base, **grouped, sliding_window=6)
        case "gpt_neox":
            return GPTNeoXConfig(**base)
        case "gpt2":
            return GPT2Config(
                vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3,
                bos_token_id=None, eos_token_id=2, pad_token_id=0,
            )  # fmt: skip
    raise ValueError(f"no tiny configuration for {arch}")


def committed(*texts: Sequence[int]) -> Committed:
    """Texts as a drafter is given them, each its last token's root; copies, which may be added to."""
    lengths, roots = (torch.tensor(each) for each in ([len(text) for text in texts], [text[-1] for text in texts]))
    return Committed([list(text) for text in texts], lengths, roots)


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


def numbers(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """From the normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def words(count: int) -> torch.Tensor:
    """Of so many tokens, what their noise is drawn with."""
    return token_hashes(torch.arange(count))


def pack(target: Target, *recipes: tuple) -> Pack:
    """Recipes of a target, as (prefix, tokens, times)."""
    return Pack(target.identity, tuple(Recipe(*recipe) for recipe in recipes), samples=3, prompts=2)


def write_rows(path: Path, *rows: object) -> Path:
    """JSON lines; rows that are text already are lines as they are."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def save_untrained(target: Target, target_folder: Path, folder: Path, seed: int = 0, num_steps: int = 2) -> str:
    """An untrained predictor of a target in that folder, as training would export it."""
    identity = target.identity.to_dict() | {"name": str(target_folder)}
    config = ShapeConfig(hidden_size=target.hidden_size, num_steps=num_steps, target_identity=identity)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        PREDICTORS[config.kind](config).save_pretrained(folder)
    return str(folder)


def require_equal_trees(here: TokenTree, there: TokenTree, **tolerance: Any) -> None:
    """Of the same nodes, drawn with the same probabilities, but for rounding; no drawn token had none."""
    assert torch.equal(here.tokens, there.tokens) and torch.equal(here.parent, there.parent)
    torch.testing.assert_close(here.joint[:, 1:], there.joint[:, 1:], **tolerance)
    assert torch.equal(here.were_drawn[:, 1:], there.were_drawn[:, 1:])
    for row, node in (here.were_drawn & (here.parent >= 0)).nonzero().tolist():
        one, other = (tree.log_q[row, tree.parent[row, node]] for tree in (here, there))
        torch.testing.assert_close(one, other, check_dtype=False, atol=1e-4, rtol=1e-4)
        assert one[here.tokens[row, node]] > -torch.inf


@contextmanager
def without_compiler() -> Iterator[None]:
    """torch.compile as on a machine without a C++ compiler."""
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("there-is-no-such-compiler",), "force_disable_caches": True}):
        yield


def program(folder: str, name: str) -> ModuleType:
    """A program of a folder that is no package, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


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


def chain_only_model() -> PreTrainedModel:
    """One whose windows are in no mask that it is given, so that it verifies chains alone."""
    config = GPTNeoConfig(
        vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, window_size=5, max_position_embeddings=128,
        attention_types=[[["global", "local"], 1]], initializer_range=0.3, bos_token_id=None, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPTNeoForCausalLM(config).double().eval()


class Recorder(BaseStreamer):
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece]


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
    "eagle with windows": {
        "kind": "eagle", "num_layers": 2, "feature_layers": [1, 2],
        "transformer_layer_config": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
    },
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
    "block with convolutions and a selector": {
        "kind": "block", "num_layers": 2, "markov_rank": 4, "markov_head_type": "selector", "selector_top_k": 5,
        "conv_kernel_size": 2, "conv_group_size": 8, "mask_token_id": 5,
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
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]"],
}


def with_chat_template(tokenizer: PreTrainedTokenizerFast, family: str) -> PreTrainedTokenizerFast:
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
