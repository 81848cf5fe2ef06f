"""Steps with fixed shapes against the loop that asks the host: the same tokens. That nothing in a step waits for the
host is shown by ``pretended_devices.py``.
"""

from collections import Counter

import pytest
import torch
from helpers import predictor, prompts
from transformers import StoppingCriteria, StoppingCriteriaList

from shape.drafters import Drafter, NgramDrafter, OracleDrafter, TrainedDrafter, TreeShape
from shape.generation.decoder import ShapeDecoder
from shape.generation.engine import ShapeOutput
from shape.generation.fixed import FixedSteps, bucket

SHAPES = {
    "shape tree": TreeShape(depth=4, width=3, nodes=7),
    "shape stopping chain": TreeShape(depth=5, width=1, threshold=0.03),
    "shape wide tree": TreeShape(depth=3, width=2, branching=3),
}
SAMPLED = {"do_sample": True, "temperature": 0.9, "seed": 7}
FEW = 16  # slots at first, so that texts outgrow several buckets


def oracle(batch: dict[str, torch.Tensor], sequences: torch.Tensor) -> OracleDrafter:
    width = batch["input_ids"].shape[1]
    rows = zip(batch["input_ids"], batch["attention_mask"].bool(), sequences[:, width:].tolist(), strict=True)
    return OracleDrafter([ids[mask].tolist() + new for ids, mask, new in rows], error_rate=0.3, depth=4)


def drafters(batch: dict[str, torch.Tensor], answers: torch.Tensor) -> dict[str, Drafter | None]:
    grown = {kind: TrainedDrafter(predictor(), shape) for kind, shape in SHAPES.items()}
    parallel = predictor(step_mode="parallel", token_conditioning="none")
    return {
        "plain": None,
        "oracle": oracle(batch, answers),
        **grown,
        "shape parallel": TrainedDrafter(parallel, TreeShape(depth=3, width=2)),
        "attending tree": TrainedDrafter(predictor(attention=True, loud=True), TreeShape(depth=4, width=2, nodes=6)),
        "eagle chain": TrainedDrafter(predictor(kind="eagle", loud=True), TreeShape(depth=3, width=1)),
        "deep eagle tree": TrainedDrafter(
            predictor(kind="eagle", num_layers=2, loud=True), TreeShape(depth=3, width=2)
        ),
        "peagle tree": TrainedDrafter(predictor(kind="peagle", num_layers=2, loud=True), TreeShape(depth=3, width=2)),
        "block tree": TrainedDrafter(predictor(kind="block", markov_rank=4, loud=True), TreeShape(depth=3, width=2)),
    }


def decode(model, drafter, batch, graphs, fall_back=False, **options) -> ShapeOutput:
    decoder = ShapeDecoder(model, drafter, fall_back=fall_back, graphs=graphs)
    return decoder.generate(**batch, return_dict_in_generate=True, **options)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gpt2", "mistral"])
@pytest.mark.parametrize("lengths", [[9], [3, 17, 9, 1, 12]])
def test_tokens_and_counts_are_those_of_the_loop(tiny_model, arch, lengths):
    """Long enough to outgrow buckets of slots, while rows end at different times and buckets of rows shrink."""
    model, batch = tiny_model(arch), prompts(lengths)
    for more in ({}, {**SAMPLED, "top_k": 0}, {**SAMPLED, "top_k": 9, "top_p": 0.8, "min_new_tokens": 6}):
        options = {**more, "max_new_tokens": 50}
        expected = decode(model, None, batch, False, **options)
        for kind, drafter in drafters(batch, expected.sequences).items():
            fixed = decode(model, drafter, batch, FixedSteps(slots=FEW), **options)
            assert fixed.stats.graphs and torch.equal(fixed.sequences, expected.sequences), kind
            if kind == "shape stopping chain":  # its threshold is not looked at here
                drafter = TrainedDrafter(drafter.predictor, TreeShape(depth=5, width=1))
            eager = decode(model, drafter, batch, False, **options)
            for name in ("histogram", "drafted", "accepted", "sequence_forwards", "sequence_emitted", "draft_steps"):
                assert getattr(fixed.stats, name) == getattr(eager.stats, name), (kind, name)
            if len(lengths) == 1:  # finished rows leave the loop at once, and here a step later
                assert [(one.sequences, one.lengths, one.nodes, one.passes) for one in fixed.stats.steps] == [
                    (one.sequences, one.lengths, one.nodes, one.passes) for one in padded(eager.stats.steps, fixed)
                ], kind


def padded(steps, fixed: ShapeOutput):
    """An oracle's last trees are smaller where shapes are not fixed; all else is compared as it is."""
    if fixed.stats.drafter != "oracle":
        return steps
    return [type(one)(**{**vars(one), "nodes": fixed.stats.steps[0].nodes}) for one in steps]


def test_buckets_of_rows():
    assert [bucket(rows) for rows in (1, 2, 3, 5, 8, 9, 17, 25, 33, 64)] == [1, 2, 4, 8, 8, 16, 24, 32, 64, 64]


def test_stages_serve_later_calls_and_not_two_at_once(tiny_model):
    model, steps = tiny_model("llama"), FixedSteps(slots=64, kept=2)
    decoder = ShapeDecoder(model, TrainedDrafter(predictor(), SHAPES["shape tree"]), graphs=steps)
    one, two = (prompts([length])["input_ids"] for length in (9, 4))
    options = {"max_new_tokens": 20, "eos_token_id": [], **SAMPLED}
    expected = [ShapeDecoder(model).generate(ids, **options)[0, ids.shape[1] :].tolist() for ids in (one, two)]
    decoder.generate(one, **options)
    stage = next(iter(steps._stages.values()))
    streams = [decoder.stream(ids, **options) for ids in (one, two)]  # side by side, each with a stage
    found: list[list[int]] = [[], []]
    while streams_left := [at for at in (0, 1) if len(found[at]) < 20]:
        for at in streams_left:
            found[at] += next(streams[at])
    assert found == expected
    assert all(next(stream, None) is None for stream in streams)
    assert len(steps._stages) == 1 and stage not in steps._stages.values()  # of equal ones the last is kept
    broken = decoder.stream(one, **options)
    next(broken), next(broken)
    assert not steps._stages
    broken.close()
    assert len(steps._stages) == 1
    assert decoder.generate(two, **options)[0, 4:].tolist() == expected[1]
    for rows in (2, 4, 8):
        decoder.generate(**prompts([5] * rows), max_new_tokens=3)
    assert len(steps._stages) == 2


class After(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([int(row[-1]) % 7 == 0 for row in input_ids])


def test_criteria_stop_rows(tiny_model):
    model, batch = tiny_model("llama"), prompts()
    options = {"max_new_tokens": 40, "stopping_criteria": StoppingCriteriaList([After()]), **SAMPLED}
    drafter = TrainedDrafter(predictor(), SHAPES["shape tree"])
    eager, fixed = (decode(model, drafter, batch, graphs, **options) for graphs in (False, True))
    assert fixed.stats.graphs and torch.equal(fixed.sequences, eager.sequences)


def test_falling_back_to_plain_steps(tiny_model):
    model, batch = tiny_model("llama"), prompts([5, 8])
    options = {"max_new_tokens": 60, "eos_token_id": []}
    drafter = TrainedDrafter(predictor(), SHAPES["shape tree"])
    fixed = decode(model, drafter, batch, FixedSteps(slots=FEW), fall_back=100.0, **options)
    assert torch.equal(fixed.sequences, decode(model, None, batch, False, **options).sequences)
    assert fixed.stats.pauses > 0 and fixed.stats.autoregressive_steps > 20
    sizes = Counter(step.nodes for step in fixed.stats.steps)
    assert sizes[1] == fixed.stats.autoregressive_steps and sizes[8] == len(fixed.stats.steps) - sizes[1]


def test_what_waits_for_the_host_is_decoded_by_the_loop(tiny_model):
    model, batch = tiny_model("llama"), prompts([5])
    cases = [
        (NgramDrafter(), {}),
        (None, {"repetition_penalty": 1.3}),
        (None, {**SAMPLED, "acceptance": "rejection"}),
        (None, {"trace": True}),
    ]
    for drafter, options in cases:
        fixed = decode(model, drafter, batch, True, max_new_tokens=12, **options)
        assert not fixed.stats.graphs
        expected = decode(model, drafter, batch, False, max_new_tokens=12, **options)
        assert torch.equal(fixed.sequences, expected.sequences)
    say = ShapeDecoder(model, graphs=True).session()
    assert not say(**batch, max_new_tokens=3, return_dict_in_generate=True).stats.graphs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "shape tree"])
def test_compiled_steps_give_the_same_tokens(tiny_model, kind):
    model = tiny_model("llama")
    for batch in (prompts([9]), prompts([9, 4, 3])):
        for more in ({}, SAMPLED):
            expected = decode(model, None, batch, False, max_new_tokens=30, **more)
            drafter = drafters(batch, expected.sequences)[kind]
            compiled = decode(model, drafter, batch, FixedSteps(compiled=True), max_new_tokens=30, **more)
            assert compiled.stats.graphs and torch.equal(compiled.sequences, expected.sequences)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_graphs_on_a_gpu(tiny_model, compiled):
    """Float64, so that kernels for other shapes round alike; not run where there is no GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model = tiny_model("llama").cuda()
    try:
        for lengths in ([9], [3, 17, 9, 1, 12]):
            batch = {name: one.cuda() for name, one in prompts(lengths).items()}
            for more in ({}, {**SAMPLED, "top_k": 9}):
                expected = decode(model, None, batch, False, max_new_tokens=50, **more)
                for kind, drafter in drafters(batch, expected.sequences).items():
                    if isinstance(drafter, TrainedDrafter):
                        drafter.predictor.cuda()
                    steps = FixedSteps(compiled, slots=32)
                    fixed = decode(model, drafter, batch, steps, max_new_tokens=50, **more)
                    assert fixed.stats.graphs and torch.equal(fixed.sequences, expected.sequences), kind
    finally:
        model.cpu()
