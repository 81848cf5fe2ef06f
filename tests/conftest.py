"""Real tiny models and a real tiny tokenizer, so that tests need neither mocks nor downloads."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

# Before transformers is imported. No test needs a hub, and where there is no network one that names a model that does
# not exist would wait for 23 seconds at each attempt.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from helpers import thinking_model, tiny_config, with_chat_template
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from training_runs import UNEQUAL, extracted
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from shape.features.store import FeatureStore
from shape.loops import COMPILING
from shape.networks.config import ShapeConfig
from shape.networks.export import export
from shape.networks.shape import ShapePredictor
from shape.target.model import Target

# Of tests that run side by side, each process gets its share of the threads; so do the processes that they start.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    share = max(1, torch.get_num_threads() // workers)
    torch.set_num_threads(share)
    os.environ["OMP_NUM_THREADS"] = str(share)


def pytest_configure(config: pytest.Config) -> None:
    """Tests that are not marked `gpu` are about the CPU, where a GPU is too."""
    COMPILING.told = True  # on a machine's first run some test would find another line
    if "not gpu" in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


# A busy machine must not fail a test for being slow.
settings.register_profile("shape", deadline=None)
settings.load_profile("shape")

CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """tiny_model(arch="llama", dtype=torch.float64, seed=0, vocab_size=64) -> a random causal LM in eval mode."""

    def make(
        arch: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0, vocab_size: int = 64
    ) -> PreTrainedModel:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(tiny_config(arch, vocab_size))
        return model.to(dtype).eval()

    return make


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, one token per byte (259 in all), with ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(CHATML_TOKENS + alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="session")
def tiny_target(tiny_model, tiny_tokenizer) -> Target:
    """A random float32 Llama with the tiny tokenizer. Shared: do not change it."""
    model = tiny_model("llama", torch.float32, seed=1, vocab_size=len(tiny_tokenizer))
    return Target(model, tiny_tokenizer, name="tiny")


@pytest.fixture(scope="session")
def tiny_target_folder(tiny_target, tmp_path_factory) -> Path:
    """The same target saved as a checkpoint folder, for commands that load by path."""
    folder = tmp_path_factory.mktemp("tiny-target")
    tiny_target.model.save_pretrained(folder)
    tiny_target.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_predictor_folder(tiny_target, tmp_path_factory) -> Path:
    """An exported predictor of that target: untrained, with two parallel steps, and loud enough to draft something."""
    config = ShapeConfig(hidden_size=32, intermediate_size=48, vocab_size=tiny_target.vocab_size, num_steps=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = ShapePredictor(config)
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("tiny-predictor")
    training = {"command": "none", "seconds": 90.0, "steps": 3, "peak_memory_gb": 0.25, "positions_per_second": 7.0}
    export(network, folder, tiny_target.identity, training)
    return folder


@pytest.fixture
def refused(capsys) -> Callable[..., str]:
    """refused(main, *arguments, alone=False) -> the one sentence of a command that stops with status 2. Before it may
    stand what computes where, and transformers' bar; with `alone`, nothing.
    """

    def run(main: Callable[[list[str]], object], *arguments: str, alone: bool = False) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main(list(arguments))
        told = capsys.readouterr().err
        *before, said = told.splitlines()
        assert stopped.value.code == 2 and said.startswith("error: ") and told.endswith("\n")
        known = (line.startswith(("target ", "Loading weights: ")) for line in before if line)
        assert not before if alone else all(known), told
        return said

    return run


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of extra real data, where there is one."""
    folder = os.environ.get("SHAPE_SHARED")
    if not folder or not Path(folder).is_dir():
        pytest.skip("SHAPE_SHARED does not name a folder with the extra data and targets")
    return Path(folder).resolve()


@pytest.fixture(scope="session")
def store(tiny_target, tmp_path_factory) -> FeatureStore:
    """Features of a few conversations."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    return extracted(tiny_target, tmp_path_factory.mktemp("features"))


@pytest.fixture(scope="session")
def unequal(tiny_target, tmp_path_factory) -> FeatureStore:
    """Features of answers of very unequal length."""
    return extracted(tiny_target, tmp_path_factory.mktemp("unequal"), UNEQUAL)


@pytest.fixture(scope="session")
def thinking_target(tiny_tokenizer) -> Target:
    """A target that thinks before it answers, with a template like Qwen3's. Shared: do not change it."""
    tokenizer = with_chat_template(tiny_tokenizer, "qwen3")
    return Target(thinking_model(tokenizer), tokenizer, name="thinking")


@pytest.fixture(scope="session")
def thinking_target_folder(thinking_target, tmp_path_factory) -> Path:
    """The same target as a checkpoint folder."""
    folder = tmp_path_factory.mktemp("thinking-target")
    thinking_target.model.save_pretrained(folder)
    thinking_target.tokenizer.save_pretrained(folder)
    return folder
