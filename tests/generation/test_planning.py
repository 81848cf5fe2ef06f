"""Plans: the closed form against simulation, shapes cut from wide drafts against decoding with them."""

import pytest
import torch
from helpers import predictor, prompts

from shape.drafters import OracleDrafter, TrainedDrafter, TreeShape
from shape.drafters.cost import Costs
from shape.generation.decoder import ShapeDecoder
from shape.generation.planning import (
    RecordedDraft,
    acceptance,
    plan,
    record_drafts,
    replay_with,
)


@pytest.mark.parametrize(
    "shape",
    [
        TreeShape(depth=6, width=3),
        TreeShape(depth=6, width=3, nodes=7),
        TreeShape(depth=6, width=3, nodes=9, threshold=0.02),
        TreeShape(depth=5, width=1),
    ],
)
@pytest.mark.parametrize("sample", [False, True])
def test_a_cut_shape_is_what_decoding_with_it_gives(tiny_model, shape, sample):
    """The walk through the recorded takes the steps that decoding takes, with the same nodes and passes."""
    model = tiny_model("llama")
    network = predictor()
    contexts = [row[row != 0].tolist() for row in prompts()["input_ids"]]
    options = {"max_new_tokens": 30, "do_sample": sample, "seed": 1, "eos_token_id": []}
    wide = TreeShape(depth=6, width=shape.width)
    recorded = record_drafts(ShapeDecoder(model, TrainedDrafter(network)), contexts, wide=wide, **options)
    assert [len(answer) for answer in recorded] == [29] * 5
    costs = Costs(1, 128, {1: 1.0, 100: 1.0}, {1: (0.0, 0.0)})
    found = next(one for one in plan(costs, recorded, [shape]) if one.shape == shape)
    decoder, steps = ShapeDecoder(model, TrainedDrafter(network, shape), fall_back=False), []
    for context in contexts:
        ids = torch.tensor([context])
        steps += decoder.generate(ids, torch.ones_like(ids), return_dict_in_generate=True, **options).stats.steps
    assert found.acceptance_length == pytest.approx(5 * 29 / len(steps))
    assert found.nodes == pytest.approx(sum(step.nodes - 1 for step in steps) / len(steps))
    assert found.passes == pytest.approx(sum(step.passes for step in steps) / len(steps))


def test_acceptance_by_depth_and_rank():
    right = RecordedDraft.of([9, 5, 6, 7], [-1, 0, 0, 2], [0.0, -1.0, -2.0, -3.0], [6, 7])
    wrong = RecordedDraft.of([9, 5, 6, 7], [-1, 0, 0, 2], [0.0, -1.0, -2.0, -3.0], [5, 1])
    assert right.accepted == [True, False, True, True] and wrong.accepted == [True, True, False, False]
    assert acceptance([[right], [wrong]]) == [[0.5, 0.5], [1.0]]  # nothing was drafted below 5
    assert replay_with(right, TreeShape(depth=2, width=2)) == (2, 3, 2)
    assert replay_with(right, TreeShape(depth=2, width=2, nodes=2)) == (1, 2, 2)
    assert replay_with(right, TreeShape(depth=2, width=1)) == (0, 1, 1)
    loose = RecordedDraft.of([9, 5, 6], [-1, -1, 1], [0.0, -1.0, -2.0], [5, 6])
    assert loose.accepted == [True, False, False] and replay_with(loose, TreeShape(depth=3, width=2)) == (0, 0, 0)


def test_good_drafts_are_planned_and_bad_ones_are_not(tiny_model):
    model = tiny_model("llama")
    context = prompts([6])["input_ids"]
    text = ShapeDecoder(model).generate(context, max_new_tokens=30, eos_token_id=[])
    costs = Costs(1, 128, {1: 1.0, 9: 1.5}, {})
    shapes = [TreeShape(depth=depth, width=1) for depth in (2, 4)]
    good = record_drafts(ShapeDecoder(model, OracleDrafter(text.tolist())), context.tolist(), 30, eos_token_id=[])
    best = plan(costs, good, shapes)[0]
    assert best.shape == shapes[1] and best.speed_up > 3
    bad = record_drafts(ShapeDecoder(model, OracleDrafter(text.tolist(), 1.0)), context.tolist(), 30, eos_token_id=[])
    assert plan(costs, bad, shapes)[0].shape is None


def test_a_planned_shape_keeps_the_tokens_and_accepts_more(tiny_model):
    """Where drafts and larger verifications are free, the shape with the most accepted tokens, unlike the drafter's."""
    own = TreeShape(depth=2, width=1)
    free, dear = Costs(1, 128, {1: 1.0, 100: 1.0}, {1: (0.0, 0.0)}), Costs(1, 128, {1: 1.0, 100: 1.0}, {1: (0.0, 9.0)})
    options = {"max_new_tokens": 40, "eos_token_id": []}
    decoder = ShapeDecoder(tiny_model("llama"), TrainedDrafter(predictor(), own), fall_back=False)
    ids = torch.tensor([[5, 6, 7]])
    recorded = record_drafts(decoder, ids.tolist(), **options)
    assert plan(dear, recorded)[0].shape is None and decoder.drafter.tree == own
    before = decoder.generate(ids, **options, return_dict_in_generate=True)
    best = plan(free, recorded)[0]
    assert best.shape is not None and best.shape != own and best.speed_up > 1
    decoder.drafter = decoder.drafter.with_tree(best.shape)
    after = decoder.generate(ids, **options, return_dict_in_generate=True)
    assert torch.equal(before.sequences, after.sequences)
    assert after.stats.acceptance_length > before.stats.acceptance_length
    assert max(step.nodes for step in after.stats.steps) > max(step.nodes for step in before.stats.steps)
