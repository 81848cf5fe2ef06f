"""Forwards by the GPU's kernels: interpreted where there is Triton, and as they are on a GPU."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from helpers import ROOT, predictor, tiny_config
from torch import nn
from transformers import AutoModelForCausalLM

from shape.drafters import TrainedDrafter, TreeShape
from shape.generation.decoder import ShapeDecoder
from shape.generation.fixed import FixedSteps
from shape.target.model import Target
from shape.verification.forward import new_cache, prefill, tree_logits
from shape.verification.fused_gpu import FusedGpuLayers
from shape.verification.probe import support_of
from shape.verification.tree import TokenTree, chain


def test_kernels_as_they_are_interpreted():
    """See the program: states and logits of trees are those of the target's own layers."""
    pytest.importorskip("triton")
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    program = [sys.executable, str(ROOT / "tests/interpreted_kernels.py")]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_is_no_plain_layer_is_not_served(tiny_model):
    """By what is known without a GPU: heads of a size that no tile has, and other activations or layers."""
    model = tiny_model("llama")
    layers = FusedGpuLayers(model.model, model.config)
    (first, _) = layers.layers
    assert not layers._is_plain(first)  # heads of 8
    layers.size = 16
    assert layers._is_plain(first)
    projection = model.model.layers[0].mlp.down_proj
    for change in (
        lambda: projection.register_forward_hook(lambda *_: None).remove,
        lambda: model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: None).remove,
    ):
        undo = change()
        assert not layers._is_plain(first)
        undo()
        assert layers._is_plain(first)
    projection.bias = nn.Parameter(torch.zeros(32, dtype=projection.weight.dtype))
    assert not layers._is_plain(first)


@pytest.fixture
def served() -> Target:
    """In bfloat16 on a GPU, with heads that a tile has."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    config = tiny_config("qwen3")
    config.head_dim, config.max_position_embeddings = 16, 2048
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval(), name="tiny")


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[9], [700, 40]])
def test_trees_on_a_gpu(served, lengths):
    support = support_of(served)
    assert support.fused is not None
    generator = torch.Generator().manual_seed(1)
    ids, drafts = (torch.randint(60, (len(lengths), size), generator=generator).cuda() for size in (max(lengths), 6))
    tree = TokenTree(drafts, torch.tensor([-1, 0, 0, 1, 1, 3]).expand_as(drafts).cuda())
    found = []
    with torch.no_grad():
        for one in (support, replace(support, fused=None)):
            cache = new_cache(served, one, len(lengths), max(lengths) + 16)
            prefill(served, cache, ids, lengths)
            found.append(tree_logits(served, one, cache, tree, layers=(0, 1, -1)))
    for ours, own in zip(*found, strict=True):
        assert (ours.float() - own.float()).norm() <= 2e-2 * own.float().norm()


@pytest.mark.gpu
def test_tokens_have_the_same_states_alone_and_in_a_chain(served):
    """Bit for bit: sums do not depend on the tokens beside, up to sixteen."""
    support = support_of(served)
    ids, drafts = (
        torch.randint(60, (1, size), generator=torch.Generator().manual_seed(1)).cuda() for size in (300, 13)
    )
    found = []
    with torch.no_grad():
        for nodes in (1, 2, 7, 13):
            cache = new_cache(served, support, 1, 320)
            prefill(served, cache, ids, [300])
            tree = chain(drafts[:, 0], drafts[:, 1:nodes])
            found.append(tree_logits(served, support, cache, tree)[1][0])
    for shorter, longer in pairwise(found):
        assert torch.equal(shorter, longer[: len(shorter)])


@pytest.mark.gpu
def test_steps_of_kernels_are_captured(served):
    """And decode what the loop does that asks the host: both go through the same kernels."""
    network = predictor(torch.bfloat16, attention=True, loud=True).to("cuda")
    ids = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(2)).cuda()
    options = {"max_new_tokens": 60, "eos_token_id": [], "do_sample": False}
    expected = ShapeDecoder(served, graphs=False).generate(ids, **options)
    for drafter in (None, TrainedDrafter(network, TreeShape(depth=3, width=1))):
        decoder = ShapeDecoder(served, drafter, graphs=FixedSteps())
        out = decoder.generate(ids, return_dict_in_generate=True, **options)
        assert out.stats.graphs
        if drafter is None:  # in 16 bits trees of other sizes round otherwise
            assert torch.equal(out.sequences, expected)
        assert support_of(served).fused is not None
