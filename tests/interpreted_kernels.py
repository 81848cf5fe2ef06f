"""The GPU's kernels, interpreted on a CPU: forwards over trees beside the target's own layers.

A program of its own (see tests/verification/test_fused_gpu.py), since Triton decides at its import that it interprets.
"""

from dataclasses import replace

import torch
from helpers import tiny_config
from torch import nn
from transformers import AutoModelForCausalLM

from shape.target import gpu_kernels
from shape.target.model import Target
from shape.verification.forward import new_cache, prefill, tree_logits
from shape.verification.fused_gpu import FusedGpuLayers
from shape.verification.probe import support_of
from shape.verification.tree import TokenTree, root_only

_ALLOWED = 2e-6
_LENGTHS = [137, 20]  # the first fills more than a program's span of slots
_PARENTS = [-1, 0, 0, 1, 1, 3]


class Interpreted(FusedGpuLayers):
    """Bfloat16 is not interpreted rightly; kernels are the same for it."""

    dtypes = (torch.float32,)
    device = "cpu"


def target_of(family: str) -> Target:
    """With biases and gains that matter."""
    torch.manual_seed(0)
    config = tiny_config(family)
    config.head_dim = 16  # the least that is served
    model = AutoModelForCausalLM.from_config(config)
    for name, one in model.named_parameters():
        if "norm" in name or "bias" in name:
            nn.init.normal_(one, float("norm" in name), std=0.2)
    return Target(model.eval(), name=family)


def results(target: Target, served: bool) -> list[torch.Tensor]:
    """States and logits of branching trees, and of single tokens, behind texts of unequal length."""
    fused = Interpreted.of(target.model.base_model, target.config, target.head)
    assert fused is not None
    support = replace(support_of(target), fused=fused if served else None)
    generator = torch.Generator().manual_seed(1)
    ids, drafts = (torch.randint(60, (2, size), generator=generator) for size in (_LENGTHS[0], 6))
    cache = new_cache(target, support, 2, _LENGTHS[0] + 16)
    prefill(target, cache, ids, _LENGTHS)
    tree = TokenTree(drafts, torch.tensor(_PARENTS).expand_as(drafts))
    assert served == (support.fused is not None and support.fused.serves(drafts, torch.empty(0), cache))
    return [
        *tree_logits(target, support, cache, tree, layers=(0, 1, -1)),
        *tree_logits(target, support, cache, root_only(drafts[:, 0])),
    ]


def check_many_tokens() -> None:
    """More than a tile of a product has, behind a norm and before a residual."""
    generator = torch.Generator().manual_seed(2)
    x, first, second = (torch.randn(size, 48, generator=generator) for size in (70, 32, 48))
    gain = torch.rand(48, generator=generator)
    normed = torch.nn.functional.rms_norm(x, (48,), gain, 1e-6)
    active, _ = gpu_kernels.linear(x, [first, first.flip(0)], norm=(gain, 1e-6, gpu_kernels.squares_of(x)), gated=True)
    torch.testing.assert_close(active, torch.nn.functional.silu(normed @ first.T) * (normed @ first.flip(0).T))
    found, squares = gpu_kernels.linear(x, [second], residual=x)
    torch.testing.assert_close(found, x + x @ second.T)
    torch.testing.assert_close(squares.sums.sum(0), found.square().sum(-1))


@torch.no_grad()
def main() -> None:
    check_many_tokens()
    for family in ("llama", "qwen2", "qwen3", "mistral"):  # the last one with a window
        target = target_of(family)
        for found, expected in zip(*(results(target, served) for served in (True, False)), strict=True):
            off = float((found - expected).norm() / expected.norm())
            assert off <= _ALLOWED, (family, off)


if __name__ == "__main__":
    main()
