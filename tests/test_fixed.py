"""Steps with fixed shapes against the loop that asks the host: the same tokens, and nothing in them that waits."""

import pytest
import torch
from helpers import predictor, prompts

from shape.decoder import ShapeDecoder
from shape.drafters import NgramDrafter, OracleDrafter, ShapeDrafter, TreeShape
from shape.fixed import FixedSteps

SHAPES = {
    "shape tree": TreeShape(depth=4, width=3, nodes=7),
    "shape chain": TreeShape(depth=5, width=1, threshold=0.03),
    "shape wide tree": TreeShape(depth=3, width=2, branching=3),
}
ARCHITECTURES = ["llama", "qwen2", "gpt2", "mistral"]
SAMPLED = {"do_sample": True, "temperature": 0.9, "seed": 7}


def drafter(kind, batch=None, sequences=None):
    if kind == "plain":
        return None
    if kind == "oracle":
        texts = [row[mask.bool()].tolist() + row.new_tensor(new).tolist() for row, mask, new in
                 zip(batch["input_ids"], batch["attention_mask"], sequences[:, batch["input_ids"].shape[1]:].tolist(), strict=True)]
        return OracleDrafter(texts, error_rate=0.3, depth=4)
    return ShapeDrafter(predictor(), SHAPES[kind])


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("lengths", [[9], [3, 17, 9, 1, 12]])
@pytest.mark.parametrize("options", [{}, {**SAMPLED, "top_k": 0}, {**SAMPLED, "top_k": 9, "top_p": 0.8, "min_new_tokens": 6}])
def test_tokens_are_those_of_the_eager_loop(tiny_model, arch, lengths, options):
    """Long enough to cross buckets of slots, with rows that end early."""
    model, batch = tiny_model(arch), prompts(lengths)
    options = {**options, "max_new_tokens": 60, "return_dict_in_generate": True}
    plain = ShapeDecoder(model).generate(**batch, **options)
    for kind in ("plain", "oracle", *SHAPES):
        made = drafter(kind, batch, plain.sequences)
        eager = ShapeDecoder(model, made, fall_back=False).generate(**batch, **options)
        fixed = ShapeDecoder(model, made, fall_back=False, graphs=FixedSteps(slots=16)).generate(**batch, **options)
        assert fixed.stats.graphs and not eager.stats.graphs
        assert torch.equal(fixed.sequences, plain.sequences), kind
        if kind != "shape chain":  # which stops early in the eager loop
            assert fixed.stats.histogram == eager.stats.histogram, kind
            assert fixed.stats.drafted == eager.stats.drafted, kind
