"""Targets that change their rotary table with the length of a forward: the tokens of ``model.generate`` before, across
and behind the change.
"""

import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import wraps

import pytest
import torch
import transformers
from helpers import prompts
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eval.architectures import build
from shape.data.encoding import Encoded
from shape.drafters import AdversaryDrafter, Drafter, OracleDrafter, SuffixDrafter
from shape.errors import UnsupportedGeneration
from shape.features.extraction import compute_features
from shape.generation.decoder import ShapeDecoder
from shape.generation.fixed import FixedSteps
from shape.target.inference import keeps_frequencies
from shape.target.model import Target
from shape.target.rotary import _TABLE, RotaryTable, Switch
from shape.target.size import longest_text
from shape.target.support import cache_name
from shape.verification.forward import new_cache, prefill

BOUNDARY = 24  # of the table's LongRoPE families
LENGTHS = [30, 9, 24, 3, 25]
OLD = Version(transformers.__version__) < Version("5.24")
GREEDY = {"max_new_tokens": 22, "do_sample": False, "eos_token_id": []}
FAMILIES = ["llama, LongRoPE", "phi3, LongRoPE", "minicpm3, LongRoPE", "phimoe, LongRoPE"]


def rows(batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [ids[mask.bool()][None] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]


def answers(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> list[list[int]]:
    return [model.generate(row, **GREEDY)[0].tolist() for row in rows(batch)]


def require_served(target: Target) -> None:
    """Skips where transformers itself loses the text at the change, behind checking that such calls are refused."""
    assert target.switch is not None
    if target.switch.unserved:
        with pytest.raises(UnsupportedGeneration, match="changes its rotary table and this version of transformers"):
            ShapeDecoder(target).generate(**prompts([BOUNDARY]), **GREEDY)
        pytest.skip(target.switch.unserved)


def drafters(texts: list[list[int]]) -> dict[str, Drafter | None]:
    return {
        "plain": None,
        "adversary": AdversaryDrafter(nodes=7, seed=1),
        "oracle": OracleDrafter(texts, error_rate=0.2, depth=5),
        "suffix": SuffixDrafter(),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_the_targets_own_alone_and_in_ragged_batches(family):
    model, batch = build(family), prompts(LENGTHS)
    target = Target(model)
    require_served(target)
    expected = answers(model, batch)
    assert target.switch == Switch(BOUNDARY, recomputes=family.startswith("phi"))
    for kind, drafter in drafters(expected).items():
        decoder = ShapeDecoder(target, drafter, fall_back=False)
        found = decoder.generate(**batch, **GREEDY, return_dict_in_generate=True)
        width = batch["input_ids"].shape[1]
        for text, row, length in zip(expected, found.sequences.tolist(), LENGTHS, strict=True):
            assert row[width:] == text[length:], (kind, length)
        assert kind != "oracle" or found.stats.accepted > 20
        alone = decoder.generate(rows(batch)[1], **GREEDY)
        assert alone[0].tolist() == expected[1], kind


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_a_long_prompt_has_one_table_whatever_the_portions(family):
    target, ids = Target(build(family)), prompts([60])["input_ids"]
    decoder = ShapeDecoder(target)
    expected = target.features(ids)
    for settled in (0, 7):  # also behind what a session has settled of a long prompt
        cache = new_cache(target, decoder.support, 1, 70)
        prefill(target, cache, ids, [settled])
        found = prefill(target, cache, ids[:, settled:], [60], portion=5)
        torch.testing.assert_close(found, expected[:, settled:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_sampling_and_sessions_across_the_change_are_those_of_separate_plain_calls(family):
    target = Target(build(family))
    require_served(target)
    plain, suffix = ShapeDecoder(target), ShapeDecoder(target, "suffix", fall_back=False)
    ids, options = prompts([9])["input_ids"], {"max_new_tokens": 9, "eos_token_id": [], "do_sample": True, "seed": 4}
    say, reused = suffix.session(), []
    for _ in range(5):  # 9, 20, 31, 42 and, back on the first side, 20 tokens
        expected = plain.generate(ids, torch.ones_like(ids), **options)
        out = say(ids, torch.ones_like(ids), **options, return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected)
        reused.append(out.stats.reused_tokens)
        ids = torch.cat([expected, expected[:, :2]], dim=1) if ids.shape[1] < 42 else ids[:, :20]
    # At 31 tokens the cache is kept where the target has computed it anew, and at 20 where it never did.
    assert reused == ([0, 17, 28, 39, 0] if target.switch.recomputes else [0, 17, 0, 39, 0])


def test_steps_of_fixed_shapes_stay_on_one_side():
    target = Target(build("llama, LongRoPE"))
    for lengths, new_tokens, served in ([3, 9], 16, True), ([30, 41], 30, True), ([9], 30, False):
        batch, options = prompts(lengths), {"max_new_tokens": new_tokens, "eos_token_id": []}
        expected = ShapeDecoder(target).generate(**batch, **options)
        texts = [row[mask].tolist() for row, mask in zip(expected, expected >= 0, strict=True)]
        decoder = ShapeDecoder(target, OracleDrafter(texts, depth=4), fall_back=False, graphs=FixedSteps(slots=16))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            out = decoder.generate(**batch, **options, return_dict_in_generate=True)
        # transformers 5.17 asks the host for the last position, so that the eager loop goes on.
        waits = any("waits for the host" in str(one.message) for one in said) and OLD
        assert torch.equal(out.sequences, expected) and out.stats.graphs == (served and not waits)


def test_features_have_the_table_of_their_own_text():
    target = Target(build("llama, LongRoPE"))
    texts = [row[0] for row in rows(prompts([30, 9, 24]))]
    batch = [Encoded(str(len(ids)), ids, torch.ones_like(ids, dtype=torch.bool)) for ids in texts]
    found = compute_features(target, batch)
    assert found.shape[:2] == (3, 30)
    for row, ids in enumerate(texts):
        torch.testing.assert_close(found[row, : len(ids)], target.hidden(ids[None])[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("lengths", [[9, 24], [30], [30, 9, 24]])
def test_a_target_that_processes_share_runs_two_forwards_whatever_the_texts(lengths, monkeypatch):
    """One process would otherwise wait for another, whose texts need one table where its own need both."""
    target = Target(build("llama, LongRoPE"))
    texts = [row[0] for row in rows(prompts(lengths))]
    batch = [Encoded(str(len(ids)), ids, torch.ones_like(ids, dtype=torch.bool)) for ids in texts]
    expected, hidden, forwards = compute_features(target, batch), Target.hidden, []
    monkeypatch.setattr(target, "hidden", lambda *given, **more: forwards.append(1) or hidden(target, *given, **more))
    target.sharded = True
    assert torch.equal(compute_features(target, batch), expected) and len(forwards) == 2


def dynamic(positions: int) -> PreTrainedModel:
    values = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": positions, "initializer_range": 0.3, "eos_token_id": 2, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **values)).double().eval()


def test_dynamic_ntk_has_one_table_within_its_positions():
    """Up to the last position, also where another call has gone past it and left the table of long texts behind."""
    model, batch = dynamic(40), prompts([18, 5, 11])
    expected = answers(model, batch)
    target = Target(model)
    assert target.switch is None
    for kind, drafter in drafters(expected).items():
        model(input_ids=prompts([60])["input_ids"])
        found = ShapeDecoder(target, drafter, fall_back=False).generate(**batch, **GREEDY)
        for text, row in zip(expected, found.tolist(), strict=True):
            assert row[18:] == text[-22:], kind


def loses(model: PreTrainedModel) -> None:
    """As transformers up to 5.17 prepares Phi-3's step at the switch: neither a cache nor the text before."""
    own = model.prepare_inputs_for_generation
    name = cache_name(type(model).prepare_inputs_for_generation)

    @wraps(own)
    def prepare(input_ids, **options):
        inputs = own(input_ids, **options)
        return inputs if inputs.get(name) is not None else {**inputs, "input_ids": input_ids[:, -1:]}

    model.prepare_inputs_for_generation = prepare


def unlimited(model: PreTrainedModel) -> None:
    """Someone takes a dynamic table further than its own positions, where it changes at every token."""
    model.config = deepcopy(model.config)
    model.config.max_position_embeddings = 200


@pytest.mark.parametrize(
    ("make", "spoil", "reason"),
    [
        (lambda: build("phi3, LongRoPE"), loses, "forgets the text there; keep to one side"),
        (lambda: dynamic(24), unlimited, "goes on changing it with every token"),
    ],
)
def test_a_change_that_cannot_be_followed_is_refused(
    make: Callable[[], PreTrainedModel], spoil: Callable[[PreTrainedModel], None], reason: str
):
    model = make()
    spoil(model)
    decoder, options = ShapeDecoder(model), {"do_sample": False, "eos_token_id": []}
    assert decoder.target.switch.positions == BOUNDARY
    ids = prompts([9])["input_ids"]
    with pytest.raises(UnsupportedGeneration, match=f"go past 24 tokens, where target .* {reason}"):
        decoder.generate(ids, max_new_tokens=30, **options)
    short = decoder.generate(ids, max_new_tokens=12, **options)
    assert torch.equal(short, model.generate(ids, max_new_tokens=12, **options))


ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip


def test_yarn_goes_as_far_as_its_factor_says():
    """As model cards of Qwen2.5 and Qwen3 say: the configuration's own number of positions stays."""
    given = {"hidden_size": 32, "max_position_embeddings": 80}
    for rope, positions in (("yarn", 256), ("linear", 80), ("default", 80)):
        config = AutoConfig.for_model("llama", **given, rope_parameters={**ROPES[rope], "rope_theta": 10000.0})
        assert longest_text(config) == positions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope", ROPES)
def test_tables_hold_what_the_module_gives(rope, dtype):
    """Bit for bit, also behind the positions that they begin with."""
    config = AutoConfig.for_model(
        "llama", hidden_size=32, num_attention_heads=2, rope_parameters={**ROPES[rope], "rope_theta": 10000.0}
    )
    rotary = LlamaRotaryEmbedding(config)
    assert keeps_frequencies(rotary)
    x = torch.empty(0, dtype=dtype)
    table = RotaryTable(lambda positions: [part[0] for part in rotary(x, positions[None])])
    for positions in (torch.tensor([[0, 1, 7], [5, 5, 900]]), torch.tensor([[2 * _TABLE + 3]])):
        found = [part[positions] for part in table.until(int(positions.max()) + 1)]
        for one, other in zip(found, rotary(x, positions), strict=True):
            assert one.dtype == dtype and torch.equal(one, other)
