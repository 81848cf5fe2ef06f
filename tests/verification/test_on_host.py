"""The compiled loops of the acceptance rules against their twins by operations of tensors."""

import pytest
import torch

from shape.verification.noise import sequence_keys
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree


def drawn_tree(seed: int, batch: int, nodes: int, vocabulary: int, some: bool) -> TokenTree:
    """Random trees with padding and duplicates, whose children are drawn, or some of them, or none at some nodes."""
    generator = torch.Generator().manual_seed(seed)
    parent = torch.stack([torch.randint(-1, i, (batch,), generator=generator) if i else torch.full((batch,), -1)
                          for i in range(nodes)], 1)  # fmt: skip
    logits = 3 * torch.randn(batch, nodes, vocabulary, generator=generator)
    logits[..., 1] = float("-inf")
    flags = torch.rand(batch, nodes, generator=generator) < 0.5
    tokens = torch.randint(0, vocabulary, (batch, nodes), generator=generator)
    return TokenTree(tokens, parent, logits.log_softmax(-1), drawn=flags if some else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_compiled_rules_decide_as_tensors_do(rule, some, dtype):
    """Temperatures, minimum lengths, batches, and trees that nobody drew; 50 batches of four random trees."""
    accepted = 0
    for seed in range(50):
        generator = torch.Generator().manual_seed(1000 + seed)
        tree = drawn_tree(seed, 4, 9, 7, some)
        if seed % 5 == 0:
            tree = TokenTree(tree.tokens, tree.parent)
        logits = (2 * torch.randn(4, 9, 7, generator=generator)).to(dtype)
        found = []
        for on_host in (True, False):
            sampler = Sampler(
                torch.tensor([3, 9, 1, 4]), temperature=1.0, keys=sequence_keys(seed, 4), coupled=False,
                min_new_tokens=2 * (seed % 2), eos_token_ids=(0,),
            )  # fmt: skip
            assert sampler.on_host and not sampler.node_by_node
            sampler.on_host = on_host
            found.append((sampler.traverse if rule == "traversal" else sampler.match)(logits, tree))
        for row, count in enumerate(found[0].counts.tolist()):
            assert found[1].counts[row] == count and found[1].drafted[row] == found[0].drafted[row] == count - 1
            for part in ("path", "tokens"):
                one, other = (getattr(each, part)[row, :count].tolist() for each in found)
                assert one == other, (seed, row, part)
            accepted += count - 1
    assert accepted > 50
