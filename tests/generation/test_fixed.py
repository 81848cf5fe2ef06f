"""Steps with fixed shapes against the loop that asks the host: the same tokens. That nothing in a step waits for the
host is shown by ``pretended_devices.py``.
"""

import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import BASELINES, predictor, prompts, without_compiler
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from shape.drafters import Drafter, LookaheadDrafter, OracleDrafter, TrainedDrafter, TreeShape
from shape.drafters.recipes.drafter import RecipeDrafter
from shape.drafters.recipes.pack import pack_of, recipes_of
from shape.generation import fixed as fixed_steps
from shape.generation.decoder import ShapeDecoder
from shape.generation.engine import ShapeOutput
from shape.generation.fixed import FixedSteps, bucket, buckets
from shape.generation.stage import Stage
from shape.target.model import Target

SHAPES = {
    "shape tree": TreeShape(depth=4, width=3, nodes=7),
    "shape stopping chain": TreeShape(depth=5, width=1, threshold=0.03),
    "shape wide tree": TreeShape(depth=3, width=2, branching=3),
    "shape deep tree of few nodes": TreeShape(depth=5, width=2, nodes=3),
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
        "tree of several layers": TrainedDrafter(
            predictor(kind="eagle", feature_layers=[0, 1], own_heads=True, loud=True), TreeShape(depth=3, width=2)
        ),
        "block of several layers": TrainedDrafter(
            predictor(kind="block", feature_layers=[1, -1], loud=True), TreeShape(depth=3, width=2)
        ),
        "deep eagle tree": TrainedDrafter(
            predictor(kind="eagle", num_layers=2, loud=True), TreeShape(depth=3, width=2)
        ),
        "peagle tree": TrainedDrafter(predictor(kind="peagle", num_layers=2, loud=True), TreeShape(depth=3, width=2)),
        "block with a selector": TrainedDrafter(
            predictor(**BASELINES["block with convolutions and a selector"], loud=True), TreeShape(depth=3, width=2)
        ),
        "block tree": TrainedDrafter(predictor(kind="block", markov_rank=4, loud=True), TreeShape(depth=3, width=2)),
    }


def tree_of_attention() -> TrainedDrafter:
    return TrainedDrafter(predictor(attention=True, loud=True), TreeShape(depth=3, width=2))


def decode(model, drafter, batch, graphs, fall_back=False, **options) -> ShapeOutput:
    decoder = ShapeDecoder(model, drafter, fall_back=fall_back, graphs=graphs)
    return decoder.generate(**batch, return_dict_in_generate=True, **options)


_WAYS = [
    {},
    {**SAMPLED, "top_k": 0},
    {**SAMPLED, "top_k": 9, "top_p": 0.8, "min_new_tokens": 6},
]


@pytest.mark.parametrize(
    ("arch", "lengths", "every"),
    [
        ("llama", [3, 17, 9, 1, 12], False),
        pytest.param("gpt2", [9], True, marks=pytest.mark.slow),
        *(
            pytest.param(arch, [3, 17, 9, 1, 12], True, marks=pytest.mark.slow)
            for arch in ("llama", "qwen2", "gpt2", "mistral")
        ),
    ],
)
def test_tokens_and_counts_are_those_of_the_loop(tiny_model, arch, lengths, every):
    """Long enough to outgrow buckets of slots, while rows end at different times and buckets of rows shrink. By default
    each drafter decodes in one of the ways.
    """
    model, batch = tiny_model(arch), prompts(lengths)
    for number, more in enumerate(_WAYS):
        options = {**more, "max_new_tokens": 50}
        expected = decode(model, None, batch, False, **options)
        made = list(drafters(batch, expected.sequences).items())
        for kind, drafter in made if every else made[number :: len(_WAYS)]:
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


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("kind", ["ngram", "suffix", "onedecode", "recipes"])
def test_drafts_of_the_text_are_made_on_the_host(tiny_model, kind, sample):
    """Rows end at different times, and go on in steps of smaller batches; texts repeat, so that there are drafts."""
    given, model = prompts([3, 17, 9, 1, 12]), tiny_model("llama")
    texts = [ids[mask].repeat(4) for ids, mask in zip(given["input_ids"], given["attention_mask"].bool(), strict=True)]
    batch = {
        name: pad_sequence(rows, batch_first=True, padding_side="left")
        for name, rows in (("input_ids", texts), ("attention_mask", [torch.ones_like(one) for one in texts]))
    }
    options = {"max_new_tokens": 40, "eos_token_id": [2, 9, 11], "pad_token_id": 0, **(SAMPLED if sample else {})}
    expected = decode(model, None, batch, False, **options)
    drafter: str | Drafter = kind
    if kind == "recipes":  # of texts that are near the answers, and not the same
        target, others = Target(model), decode(model, None, batch, False, **{**options, **SAMPLED, "seed": 8}).sequences
        rows = [*expected.sequences[:2].tolist(), *others.tolist()]
        drafter = RecipeDrafter(pack_of(target.identity, recipes_of(rows, prefix=2, depth=5), 1, 5, most=1000))
    for fall_back in (False, True):
        steps = FixedSteps(slots=FEW)
        decoder = ShapeDecoder(model, drafter, fall_back=fall_back, graphs=steps)
        decoder.warm_up(batch_size=5, prompt_length=batch["input_ids"].shape[1], **options)
        fixed = decoder.generate(**batch, return_dict_in_generate=True, **options)
        assert fixed.stats.graphs and torch.equal(fixed.sequences, expected.sequences)
        assert fixed.stats.drafted > 0 and {len(stage.root) for stage in steps._kept} > {8}
    eager = decode(model, ShapeDecoder(model, drafter).drafter, batch, False, **options)
    fixed = decode(model, ShapeDecoder(model, drafter).drafter, batch, FixedSteps(slots=FEW), **options)
    assert (fixed.stats.drafted, fixed.stats.accepted) == (eager.stats.drafted, eager.stats.accepted)


def test_buckets_of_rows():
    assert [bucket(rows) for rows in (1, 2, 3, 5, 8, 9, 17, 25, 33, 64)] == [1, 2, 4, 8, 8, 16, 24, 32, 64, 64]
    assert buckets(1) == [1] and buckets(5) == [1, 2, 4, 8] and buckets(40)[-3:] == [24, 32, 64]


def test_a_target_shared_out_among_processes_takes_the_loop(tiny_model):
    """What one of them can capture, and has memory for, is not what all can."""
    target = Target(tiny_model("llama"))
    target.sharded = True
    out = ShapeDecoder(target, graphs=True).generate(
        **prompts([9]), max_new_tokens=4, eos_token_id=[], return_dict_in_generate=True
    )
    assert not out.stats.graphs


def test_stages_serve_later_calls_and_not_two_at_once(tiny_model):
    model, steps = tiny_model("llama"), FixedSteps(slots=64)
    decoder = ShapeDecoder(model, TrainedDrafter(predictor(), SHAPES["shape tree"]), graphs=steps)
    one, two = (prompts([length])["input_ids"] for length in (9, 4))
    options = {"max_new_tokens": 20, "eos_token_id": [], **SAMPLED}
    expected = [ShapeDecoder(model).generate(ids, **options)[0, ids.shape[1] :].tolist() for ids in (one, two)]
    decoder.generate(one, **options)
    (stage,) = steps._kept
    streams = [decoder.stream(ids, **options) for ids in (one, two)]  # side by side, each with a stage
    found: list[list[int]] = [[], []]
    while streams_left := [at for at in (0, 1) if len(found[at]) < 20]:
        for at in streams_left:
            found[at] += next(streams[at])
    assert found == expected
    assert all(next(stream, None) is None for stream in streams)
    assert len(steps._kept) == 2 and stage in steps._kept and not steps._taken
    broken = decoder.stream(one, **options)
    next(broken), next(broken)
    assert len(steps._kept) == len(steps._taken) == 1
    with steps._lock:  # as where Python's collector ends it within another call, which has the lock
        broken.close()
    assert len(steps._kept) == len(steps._taken) == 1
    assert decoder.generate(two, **options)[0, 4:].tolist() == expected[1]
    assert len(steps._kept) == 2 and not steps._taken


def test_steps_for_shorter_texts_are_made_where_a_longer_one_was(tiny_model):
    """A slot behind the width is no place for a mask: on CUDA it ends the process's work on the device."""
    decoder = ShapeDecoder(tiny_model("llama"), tree_of_attention(), fall_back=False, graphs=FixedSteps(slots=FEW))
    decoder.generate(**prompts([9]), max_new_tokens=40, eos_token_id=[])
    (stage,) = decoder.graphs._kept
    assert stage.cache.lengths.item() > FEW
    stage.prepare(False, FEW)
    assert stage.cache.lengths.tolist() == stage.memory.lengths.tolist() == [1]


def test_threads_have_stages_of_their_own(tiny_model):
    model, ids = tiny_model("llama"), [prompts([length])["input_ids"] for length in (9, 4, 12, 7)]
    options = {"max_new_tokens": 24, "eos_token_id": [], **SAMPLED}
    expected = [ShapeDecoder(model).generate(one, **options) for one in ids]
    decoder = ShapeDecoder(model, tree_of_attention(), fall_back=False, graphs=FixedSteps(slots=FEW))
    with ThreadPoolExecutor(4) as threads:
        for _ in range(2):
            found = list(threads.map(lambda one: decoder.generate(one, **options), ids))
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert 1 <= len(decoder.graphs._kept) <= 4 and not decoder.graphs._taken


def test_what_is_put_into_the_target_between_calls_is_seen(tiny_model):
    decoder = ShapeDecoder(tiny_model("llama", torch.float32), graphs=FixedSteps(slots=FEW))
    assert decoder.support.fused is not None
    options, seen = {"max_new_tokens": 8, "eos_token_id": []}, []
    decoder.generate(**prompts([9]), **options)
    hook = decoder.target.model.model.layers[1].register_forward_hook(lambda *given: seen.append(1))
    decoder.generate(**prompts([9]), **options)
    hook.remove()
    assert len(seen) == 9  # a step is tried anew first


@pytest.mark.parametrize("share", [False, True])
def test_memory_is_counted_and_bounded(tiny_model, monkeypatch, share):
    model = tiny_model("llama")
    drafter = tree_of_attention()
    steps = FixedSteps(slots=64)
    decoder = ShapeDecoder(model, drafter, graphs=steps)
    decoder.generate(**prompts([5, 3]), max_new_tokens=3, **SAMPLED)
    (stage,) = steps._kept
    # Keys and values of 2 key heads of 8 in two layers, and of the predictor's own; roots, lengths and the like, twice.
    (memory,) = drafter.predictor.memory_shapes
    floats = 2 * 64 * (2 * 2 * 2 * 8 + 2 * memory[0] * memory[1])
    window = stage.state.numel()
    assert stage.bytes == 8 * (floats + window + 2 * (5 + 3 + drafter.tree.depth)) == steps.bytes
    limit = int(2.5 * stage.bytes)
    free = [4 * limit] if share else []  # not asked for
    monkeypatch.setattr(fixed_steps, "free_bytes", lambda device: free[-1])
    decoder = ShapeDecoder(model, drafter, graphs=FixedSteps(slots=64, memory=0.25 if share else limit))
    for rows in (1, 2, 4, 1, 2):
        batch = prompts([5] * rows)
        out = decoder.generate(**batch, max_new_tokens=3, eos_token_id=[], return_dict_in_generate=True)
        assert out.stats.graphs and 0 < decoder.graphs.bytes <= limit
    assert [one.batch for one in decoder.graphs._kept] == [1, 2]  # what was used last
    free.append(4 * limit)
    with pytest.warns(UserWarning, match="may hold .* lower max_new_tokens or the batch"):
        big = decoder.generate(**prompts([5] * 8), max_new_tokens=3, return_dict_in_generate=True)
    assert not big.stats.graphs
    kept = decoder.graphs
    assert len(kept._kept) == 2
    free.append(0)  # what is kept makes room for a call that goes on without
    decoder.generate(**prompts([5] * 8), max_new_tokens=3)
    assert not kept._kept
    decoder.generate(**prompts([5]), max_new_tokens=3)
    decoder.close()
    assert kept.bytes > 0  # it was handed over
    kept.close()
    assert kept.bytes == 0


def test_nothing_is_made_in_the_middle_of_an_answer(tiny_model, monkeypatch):
    """Neither a width nor a batch size: a smaller one is gone on in only where it is at hand."""
    model, batch, prepared = tiny_model("llama"), prompts([3, 17, 9, 1, 12]), []
    original = Stage.prepare

    def prepare(stage: Stage, drafts: bool, width: int) -> None:
        if not stage.prepared(drafts, width):
            prepared.append((stage.batch, drafts, width))
        original(stage, drafts, width)

    monkeypatch.setattr(Stage, "prepare", prepare)
    drafter = TrainedDrafter(predictor(), SHAPES["shape tree"])
    options = {"max_new_tokens": 50, "stopping_criteria": StoppingCriteriaList([After()]), "eos_token_id": []}
    expected = ShapeDecoder(model).generate(**batch, **options)
    cold, warm = (ShapeDecoder(model, drafter, graphs=FixedSteps(slots=FEW)) for _ in range(2))
    for piece, _ in enumerate(cold._start(**batch, **options)):
        if piece == 0:
            known = list(prepared)
    assert prepared == known == [(8, kind, width) for kind in (True, False) for width in (32, 64, 128)]
    prepared.clear()
    warm.warm_up(batch_size=5, prompt_length=17, max_new_tokens=50)
    assert {rows for rows, _, _ in prepared} == {1, 2, 4, 8} and len(prepared) == 4 * 6
    used: list[int] = []
    launch = Stage.launch
    monkeypatch.setattr(Stage, "launch", lambda stage, *how: (used.append(stage.batch), launch(stage, *how))[1])
    assert torch.equal(warm.generate(**batch, **options), expected)
    assert len(prepared) == 4 * 6 and len(set(used)) > 1 and used == sorted(used, reverse=True)
    used.clear()
    assert torch.equal(warm.generate(**batch, **options, reproducible=True), expected)
    assert set(used) == {8}  # whatever earlier calls have left


BASE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": None,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def asking() -> dict[str, tuple[PretrainedConfig, str, bool]]:
    """Targets that may ask the host: configuration, implementation of experts, whether they do."""
    experts = MixtralConfig(**BASE, num_local_experts=4)
    dynamic = LlamaConfig(**BASE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    return {
        "experts one by one": (experts, "eager", True),
        "experts at once": (experts, "batched_mm", False),
        "dynamic rope": (dynamic, "eager", True),
    }


@pytest.mark.parametrize("kind", list(asking()))
def test_targets_that_ask_the_host_are_decoded_by_the_loop(kind):
    """With one warning that says where, and nothing kept."""
    config, experts, asks = asking()[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, experts_implementation=experts).double().eval()
    batch = prompts([3, 9])
    decoder = ShapeDecoder(model, graphs=FixedSteps(slots=FEW))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = [decoder.generate(**batch, max_new_tokens=12, return_dict_in_generate=True) for _ in range(2)]
    expected = ShapeDecoder(model).generate(**batch, max_new_tokens=12)
    assert all(one.stats.graphs is not asks and torch.equal(one.sequences, expected) for one in found)
    told = [str(one.message) for one in said if "without steps of fixed shapes" in str(one.message)]
    assert len(told) == asks and bool(decoder.graphs._kept) is not asks
    assert all("waits for the host (aten::" in one and "modeling_" in one for one in told)


def test_calls_in_and_out_of_inference_mode_share_stages(tiny_model):
    model, batch = tiny_model("llama"), prompts([3, 9])
    decoder = ShapeDecoder(model, graphs=FixedSteps(slots=FEW))
    expected = ShapeDecoder(model).generate(**batch, max_new_tokens=12)
    for mode in (torch.inference_mode, torch.enable_grad, torch.inference_mode):
        with mode():
            assert torch.equal(decoder.generate(**batch, max_new_tokens=12), expected)
    assert len(decoder.graphs._kept) == 1


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
        (LookaheadDrafter(), {}),
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
@pytest.mark.parametrize("kind", ["plain", "shape tree", "tree of several layers"])
def test_compiled_steps_give_the_same_tokens(tiny_model, kind):
    model = tiny_model("llama")
    for batch in (prompts([9]), prompts([9, 4, 3])):
        for more in ({}, SAMPLED):
            expected = decode(model, None, batch, False, max_new_tokens=30, **more)
            drafter = drafters(batch, expected.sequences)[kind]
            steps = FixedSteps(compiled=True)
            compiled = decode(model, drafter, batch, steps, max_new_tokens=30, **more)
            assert compiled.stats.graphs and torch.equal(compiled.sequences, expected.sequences)
            assert steps.compiled  # what fails to compile decodes on, with a warning


@pytest.mark.slow
def test_without_a_compiler_steps_run_as_they_are(tiny_model):
    model, batch = tiny_model("llama"), prompts([9, 4])
    decoder = ShapeDecoder(model, graphs=FixedSteps(compiled=True, slots=FEW))
    with without_compiler(), pytest.warns(UserWarning, match="are not compiled, since that failed") as said:
        out = decoder.generate(**batch, max_new_tokens=30, return_dict_in_generate=True)
    assert out.stats.graphs and torch.equal(out.sequences, ShapeDecoder(model).generate(**batch, max_new_tokens=30))
    assert sum("are not compiled" in str(one.message) for one in said) == 1 and not decoder.graphs.compiled


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


def test_steps_are_captured_anew_where_the_target_has_changed(tiny_model):
    """A replay would not see it; what is as it was finds the first ones again."""
    model = tiny_model("llama", torch.float32)
    decoder, options = ShapeDecoder(model, graphs=FixedSteps(slots=FEW)), {"max_new_tokens": 8, "eos_token_id": []}

    def stages() -> int:
        out = decoder.generate(**prompts([9]), **options)
        assert torch.equal(out, ShapeDecoder(model).generate(**prompts([9]), **options))
        return len(decoder.graphs._kept)

    assert stages() == stages() == 1
    hook = model.model.layers[1].register_forward_hook(lambda module, given, out: 1.5 * out)
    assert stages() == 2
    hook.remove()
    assert stages() == 2
    model.model.layers[0].mlp._disable_adapters = True  # as PEFT's layers say it
    assert stages() == 3
    model.model.norm.weight.data = 2 * model.model.norm.weight.data  # lies elsewhere
    assert stages() == 4
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    assert stages() == 5
