"""Drafting networks by kernels: the trees and the memory of the networks' own."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from helpers import BASELINES, WIDTHS, committed, prompts, require_equal_trees
from helpers import predictor as build

from shape.drafters import Committed, TrainedDrafter, TreeShape
from shape.drafters.fused_block import FusedBlock
from shape.drafters.fused_eagle import EagleDraft, FusedEagle, FusedParallelEagle
from shape.generation.decoder import ShapeDecoder
from shape.target.model import Target
from shape.target.prepack import prepack
from shape.verification.fused import MOST
from shape.verification.noise import sequence_keys
from shape.verification.sampling import Sampler

STEP_BY_STEP = [
    "eagle",
    "eagle of one layer",
    "eagle of Qwen3's layers",
    "eagle of three layers",
    "eagle narrower than its target",
]
ESTIMATED = "block with Markov bias and confidence"
AT_ONCE = [
    "peagle",
    "peagle narrower than its target",
    "block",
    "block wider than its target",
    "block with gated Markov bias",
    "block with recurrent Markov bias",
    "block with convolutions and a selector",
    ESTIMATED,
]
SHAPES = [
    TreeShape(depth=5, width=1),
    TreeShape(depth=4, width=3, branching=2, nodes=5),
    TreeShape(depth=4, width=2, threshold=0.02),
    TreeShape(depth=1, width=2),
    TreeShape.full(3, 3),
]
HOWS = ["greedy", "coupled", "drawn", "one drawn"]


def made(name: str, dtype: torch.dtype = torch.float32) -> Any:
    network = build(**(BASELINES | WIDTHS)[name], dtype=dtype, loud=True)
    assert prepack(network)
    return network


@pytest.fixture(scope="module")
def target(tiny_model) -> Target:
    return Target(tiny_model("llama", torch.float32))


def begin(network: Any, target: Target, tree: TreeShape, lengths: list[int]) -> tuple[TrainedDrafter, Committed]:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, 64, (length,), generator=generator).tolist() for length in lengths]
    begun = committed(*texts)
    drafter = TrainedDrafter(network, tree)
    drafter.bind(target)
    size = network.config.feature_size
    drafter.start(begun, torch.randn(len(lengths), max(lengths) - 1, size, generator=generator))
    return drafter, begun


def eager(drafter: TrainedDrafter) -> TrainedDrafter:
    """By torch's operations, as on a device."""
    other = deepcopy(drafter)
    other.fused, other.on_host = None, False
    return other


def sampler_of(committed: Committed, how: str) -> Sampler:
    noise = {} if how == "greedy" else {"temperature": 0.7, "keys": sequence_keys(0, len(committed.lengths))}
    sampler = Sampler(committed.lengths - 1, **noise, coupled="drawn" not in how, one_drawn=how == "one drawn")
    sampler.commit(committed.lengths)
    return sampler


@pytest.fixture
def steps(monkeypatch) -> list[int]:
    """Numbers of nodes, of each sequence, that went through kernels, pass by pass; places of masks are not counted."""
    seen: list[int] = []

    def counting(stock):
        def counted(self, feature, embedding, *rest):
            seen.append(embedding.shape[1])
            return stock(self, feature, embedding, *rest)

        return counted

    for kind, name in ((EagleDraft, "_step"), (FusedParallelEagle, "begin"), (FusedBlock, "begin")):
        monkeypatch.setattr(kind, name, counting(getattr(kind, name)))
    return seen


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", [*STEP_BY_STEP, *AT_ONCE])
def test_trees_are_those_of_the_network(target, steps, name, how, shape):
    """Texts are one, two of one length, and two of others, in turn: each meets every network, way and shape."""
    lengths = [[9], [6, 6], [7, 3]][(HOWS.index(how) + SHAPES.index(shape)) % 3]
    drafter, begun = begin(made(name), target, shape, lengths)
    if name in AT_ONCE:
        drafter.limit_draft(min(shape.depth, drafter.predictor.config.num_steps))
    sampler = sampler_of(begun, how)
    there = eager(drafter).draft(begun, sampler)
    assert not steps
    here = drafter.draft(begun, sampler)
    assert steps[0] == 1 and len(steps) == (1 if name in AT_ONCE else drafter.passes) <= shape.depth
    require_equal_trees(here, there, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[9], [7, 3]])
@pytest.mark.parametrize("name", [*STEP_BY_STEP, *AT_ONCE])
def test_the_memory_is_that_of_the_network(target, name, lengths, dtype):
    """Behind several commits with drafts in between, which leave nothing."""
    drafter, begun = begin(made(name, dtype), target, TreeShape(depth=3, width=2), lengths)
    other, sampler = eager(drafter), sampler_of(begun, "greedy")
    generator = torch.Generator().manual_seed(2)
    for counts in ([3, 1], [1, 2], [2, 4]):
        counts = counts[: len(lengths)]
        tokens = [torch.randint(3, 64, (count + 1,), generator=generator).tolist() for count in counts]
        hidden = torch.randn(len(lengths), 4, drafter.predictor.config.feature_size, generator=generator)
        for one in (drafter, other):
            one.draft(begun, sampler)
            one.update(tokens, hidden, torch.tensor(counts))
    assert drafter.cache.host_lengths == other.cache.host_lengths
    near = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for row, length in enumerate(drafter.cache.host_lengths):
        for held, expected in zip(drafter.cache.layers, other.cache.layers, strict=True):
            for one, another in ((held.keys, expected.keys), (held.values, expected.values)):
                one, another = one[row, :, :length], another[row, :, :length]
                assert (one - another).norm() <= near * another.norm()


@torch.no_grad()
@pytest.mark.parametrize("threshold, depth", [(0.3, 2), (0.2, 3)])
def test_estimates_end_drafts(target, threshold, depth):
    """Where that of the likeliest path falls below the threshold, behind the next depth."""
    network = made(ESTIMATED)
    network.confidence_head.proj.weight.zero_()
    network.confidence_head.proj.bias.zero_()  # a half of every likeliest child
    drafter, begun = begin(network, target, TreeShape(depth=3, width=2, threshold=threshold), [9])
    sampler = sampler_of(begun, "greedy")
    here, there = (one.draft(begun, sampler) for one in (drafter, eager(drafter)))
    assert torch.equal(here.tokens, there.tokens)
    likeliest = [here.joint[here.depth == at].max().exp().item() for at in range(1, int(here.depth.max()) + 1)]
    assert likeliest == pytest.approx([0.5**at for at in range(1, depth + 1)])


@torch.no_grad()
@pytest.mark.parametrize("name", ["eagle", "peagle", "block"])
def test_weights_are_those_of_the_moment(target, name):
    """When a text begins."""
    network = made(name)
    drafter, begun = begin(network, target, TreeShape(depth=4, width=2), [9])
    sampler, states = sampler_of(begun, "greedy"), torch.randn(1, 8, network.config.feature_size)
    found = []
    for factor in (1, -1.5):
        for weight in network.parameters():
            weight.mul_(factor)
        drafter.start(begun, states)
        found.append(drafter.draft(begun, sampler))
    before, after = found
    assert not torch.equal(before.tokens, after.tokens)
    assert torch.equal(after.tokens, eager(drafter).draft(begun, sampler).tokens)


@torch.no_grad()
def test_bare_forwards_are_those_that_a_draft_takes(target, steps):
    drafter, _ = begin(made("eagle"), target, TreeShape(depth=2, width=3), [9])
    drafter.run_forwards(rows=2, passes=3)
    assert steps == [1, 3, 3]
    for name in ("peagle", "block"):
        steps.clear()
        begin(made(name), target, TreeShape(depth=2, width=3), [9])[0].run_forwards(rows=2, passes=2)
        assert steps == [1]


def test_what_is_served(target):
    assert FusedEagle.of_predictor(build(**BASELINES["eagle"], dtype=torch.float32)) is None  # not prepacked
    assert FusedEagle.of_predictor(made("peagle")) is None
    assert FusedBlock.of_predictor(made("block with windows")) is None
    assert FusedEagle.of_predictor(made("eagle with windows")) is None
    drafter, _ = begin(made("eagle"), target, TreeShape(), [9])
    with torch.no_grad():
        assert drafter.fused.serves_behind(drafter.cache, MOST)
        assert not drafter.fused.serves_behind(drafter.cache, MOST + 1)
        drafter.cache.set_lengths([0])
        assert not drafter.fused.serves_behind(drafter.cache, 1)


@pytest.mark.parametrize("name", [*STEP_BY_STEP, *AT_ONCE])
def test_greedy_answers_are_the_targets_own(tiny_model, steps, name):
    """Of prompts of unequal length, whose drafts are refused at unequal places."""
    model = tiny_model("llama", torch.float32)
    given = {**prompts([9, 4]), "do_sample": False, "max_new_tokens": 24}
    decoder = ShapeDecoder(model, TrainedDrafter(made(name), TreeShape(depth=3, width=2)))
    assert torch.equal(decoder.generate(**given, seed=0), model.generate(**given))
    assert steps
