"""The proposer as vLLM calls it, with what it reads of vLLM in its place; and in vLLM where that is installed."""

import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from helpers import ROOT, committed, predictor, tiny_config
from torch import nn
from transformers import AutoModelForCausalLM

from shape.drafters import TrainedDrafter, TreeShape
from shape.drafters.recipes.pack import Pack, Recipe
from shape.errors import ConfigError, UnsupportedTarget
from shape.generation.loading import load_predictor
from shape.networks.export import export
from shape.serving.batch import likeliest_chains
from shape.serving.vllm import TRIED, ServingOptions, ShapeProposer
from shape.target.model import Target
from shape.verification.sampling import Sampler


@pytest.fixture
def context(monkeypatch) -> SimpleNamespace:
    """A forward's context in vLLM, of which only the metadata are read."""
    found = SimpleNamespace(attn_metadata=None)
    engine, forward = ModuleType("vllm"), ModuleType("vllm.forward_context")
    engine.__version__, forward.get_forward_context = TRIED[0], lambda: found
    monkeypatch.setitem(sys.modules, "vllm", engine)
    monkeypatch.setitem(sys.modules, "vllm.forward_context", forward)
    return found


class Model(nn.Module):
    """vLLM's model: the states of all scheduled tokens, and those of layers that are asked for beside them."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.body, self.target, self.inner = target.model, target, ()

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.inner = layers

    def forward(self, texts: list[list[int]]):
        layers = [*self.inner, -1]
        found = [self.target.features(torch.tensor([text]), layers)[0] for text in texts]
        *inner, last = torch.cat(found).chunk(len(layers), dim=-1)
        return (last, inner) if inner else last


def config(folder, most: int = 2, graphs: bool = False, **options) -> SimpleNamespace:
    mode = SimpleNamespace(has_full_cudagraphs=lambda: graphs)
    model = {"model": str(folder), "dtype": torch.float32, "revision": None, "trust_remote_code": False}
    return SimpleNamespace(
        additional_config={"shape": options},
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
        model_config=SimpleNamespace(**model),
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
    )


def propose(proposer: ShapeProposer, model: Model, context: SimpleNamespace, texts: list[list[int]]) -> list[list[int]]:
    """One step over whole texts, each with the token that it has sampled."""
    lengths = [len(text) - 1 for text in texts]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    context.attn_metadata = {"layer": SimpleNamespace(query_start_loc=bounds, seq_lens=torch.tensor(lengths))}
    states = model([text[:-1] for text in texts])
    assert isinstance(states, torch.Tensor)  # which is what the runner expects
    ids = np.zeros((len(texts) + 2, 64), np.int32)  # rows of requests that may come
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
    counts = np.array([*map(len, texts), 0, 0])
    return proposer.propose([[text[-1]] for text in texts], counts, ids, slot_mappings=None)


TEXTS = [[5, 6, 7, 5, 6], [9, 8, 7, 6, 5, 4, 9, 8]]


def alone(folder, target: Target, text: list[int], most: int) -> list[int]:
    """The predictor's draft for one text, with the whole target at hand."""
    drafter = TrainedDrafter(load_predictor(str(folder)), TreeShape(depth=most, width=1))
    drafter.bind(target)
    own = committed(text)
    drafter.start(own, target.features(torch.tensor([text[:-1]]), drafter.layers))
    return likeliest_chains(drafter.draft(own, Sampler(own.lengths)))[0]


def test_a_predictor_drafts_from_the_states_of_the_forward(
    context, tiny_target, tiny_target_folder, tiny_predictor_folder
):
    proposer = ShapeProposer(config(tiny_target_folder, predictor=str(tiny_predictor_folder)))
    model = Model(tiny_target)
    proposer.load_model(model)
    model([[1, 2, 3]])  # a trial run: there are no metadata
    drafts = propose(proposer, model, context, TEXTS)
    assert drafts == [alone(tiny_predictor_folder, tiny_target, text, 2) for text in TEXTS]


def several_layers(target: Target, folder, layers: list[int]):
    options = {"attention": True, "feature_layers": layers, "vocab_size": target.vocab_size, "loud": True}
    export(predictor(torch.float32, **options), folder, target.identity, {"command": "none"})
    return folder


def test_layers_beside_the_last(context, tiny_target, tiny_target_folder, tmp_path):
    folder = several_layers(tiny_target, tmp_path, [0, 1, 2, -1])  # of two: 2 is what the head reads
    proposer, model = ShapeProposer(config(tiny_target_folder, predictor=str(folder))), Model(tiny_target)
    proposer.load_model(model)
    assert model.inner == (0, 1)
    assert propose(proposer, model, context, TEXTS) == [alone(folder, tiny_target, text, 2) for text in TEXTS]


def test_layers_that_vllm_does_not_give(context, tiny_target, tiny_target_folder, tmp_path):
    folder = several_layers(tiny_target, tmp_path, [1, -1])
    with pytest.raises(UnsupportedTarget, match=r"reads layers \[1\]"):
        ShapeProposer(config(tiny_target_folder, predictor=str(folder))).load_model(tiny_target.model)


def test_a_target_whose_configuration_names_its_layers(context, tiny_model, tmp_path):
    model = tiny_model("qwen3", torch.float32)
    model.save_pretrained(tmp_path)
    ends = ShapeProposer(config(tmp_path))._load_target(torch.device("cpu"))
    assert len(ends.model.model.layers) == 0 and ends.config.num_hidden_layers == 2
    assert torch.equal(ends.head.weight, model.lm_head.weight)
    assert torch.equal(ends.embed(torch.arange(64)), model.model.embed_tokens.weight)


@pytest.mark.parametrize("drafter", ["suffix", "ngram", "onedecode", "suffix+ngram"])
def test_token_drafters_read_no_states(context, tiny_target, tiny_target_folder, drafter):
    proposer = ShapeProposer(config(tiny_target_folder, drafter=drafter))
    model = Model(tiny_target)
    proposer.load_model(model)
    assert not model._forward_hooks
    drafts = propose(proposer, model, context, TEXTS)
    if drafter != "onedecode":
        assert drafts == [[7, 5], [7, 6]]


def test_a_hybrid_copies_where_it_can(context, tiny_target, tiny_target_folder, tiny_predictor_folder):
    options = {"predictor": str(tiny_predictor_folder), "drafter": "suffix+shape"}
    proposer = ShapeProposer(config(tiny_target_folder, **options))
    model = Model(tiny_target)
    proposer.load_model(model)
    drafts = propose(proposer, model, context, [*TEXTS, [1, 2, 3]])
    assert all(drafts) and all(len(draft) <= 2 for draft in drafts)


def test_a_pack_of_recipes_has_its_own_length(context, tiny_target, tiny_target_folder, tmp_path):
    path = tmp_path / "task.pack"
    Pack(tiny_target.identity, (Recipe((5, 6), (7, 8, 9), 2),), samples=1, prompts=1).save(path)
    proposer, model = ShapeProposer(config(tiny_target_folder, pack=str(path))), Model(tiny_target)
    proposer.load_model(model)
    assert propose(proposer, model, context, TEXTS)[0] == [7, 8]


@pytest.mark.parametrize(
    "given",
    [{"prediktor": "x"}, "suffix", {"drafter": "lookahead"}, {"drafter": "suffix+model"}, {"drafter": ["suffix"]}],
)
def test_options_that_cannot_be_served(given):
    with pytest.raises(ConfigError, match=r"additional_config|does not give"):
        ServingOptions.of(given)


def test_a_predictor_needs_hooks(context, tiny_target, tiny_target_folder, tiny_predictor_folder):
    proposer = ShapeProposer(config(tiny_target_folder, graphs=True, predictor=str(tiny_predictor_folder)))
    with pytest.raises(ConfigError, match="PIECEWISE"):
        proposer.load_model(Model(tiny_target))
    ShapeProposer(config(tiny_target_folder, graphs=True)).load_model(Model(tiny_target))


def test_other_versions_get_one_warning(context, tiny_target_folder):
    sys.modules["vllm"].__version__ = "9.9"
    with pytest.warns(UserWarning, match=r"this is 9\.9"):
        ShapeProposer(config(tiny_target_folder))


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm(tiny_target_folder):
    with pytest.raises(ConfigError, match="pip install vllm"):
        ShapeProposer(config(tiny_target_folder))


in_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture
def large_heads(tiny_tokenizer, tmp_path) -> Path:
    """A random target whose heads have a size that vLLM's attention on a CPU takes."""
    config = tiny_config("llama", len(tiny_tokenizer))
    config.head_dim = 32
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    several_layers(Target(model, tiny_tokenizer, name="tiny"), tmp_path / "predictor", [-1])
    return tmp_path


@pytest.mark.slow
@in_vllm
def test_in_vllm(large_heads):
    from vllm import LLM, SamplingParams

    prompts = [{"prompt_token_ids": [5, 6, 7, 5, 6] * (1 + number)} for number in range(4)]
    answers, few = [], {"enforce_eager": True, "gpu_memory_utilization": 0.3}  # of a CPU's memory, too
    for own in ({}, {"predictor": str(large_heads / "predictor"), "drafter": "suffix+shape"}):
        speculative = {"model": "shape.serving.vllm.ShapeProposer", "num_speculative_tokens": 2}
        options = {"speculative_config": speculative, "additional_config": {"shape": own}} if own else {}
        llm = LLM(str(large_heads / "target"), dtype="float32", max_model_len=128, **few, **options)
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=32), use_tqdm=False)
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
    assert answers[0] == answers[1]


PAGE = (ROOT / "docs/guides/vllm.md").read_text()
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@in_vllm
def test_every_block_of_the_page_runs(tmp_path):
    """As a reader would, but for installing: the program, then the server and the client that streams from it."""
    (_, install), (_, program), (_, serve), (_, client) = BLOCK.findall(PAGE)
    assert "pip install vllm" in install and "LLM(" in program and "vllm serve" in serve and "OpenAI(" in client
    logs = {"VLLM_LOGGING_STREAM": "ext://sys.stderr"}  # answers alone go to the output
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **logs, **os.environ, "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    options: dict[str, Any] = {"env": environment, "cwd": tmp_path}

    def answer(code: str) -> str:
        (tmp_path / "block.py").write_text(code)
        done = subprocess.run([sys.executable, "block.py"], capture_output=True, text=True, **options)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.strip().splitlines()[-1]

    spoken = answer(program)
    # The command of vllm-cpu looks for its version under the name vllm, as the page says.
    serve = serve.replace("vllm serve", f"exec {sys.executable} -m vllm.entrypoints.openai.api_server --model")
    with subprocess.Popen(["bash", "-c", serve], stdout=subprocess.DEVNULL, **options) as server:
        try:
            while server.poll() is None and not answers("http://127.0.0.1:8000/health"):
                time.sleep(1)
            assert answer(client) == spoken
        finally:
            server.terminate()


def answers(address: str) -> bool:
    try:
        urlopen(address).close()
        return True
    except OSError:
        return False
