"""A target that OpenVINO computes: what torch computes, and no draft changes a token."""

import gc
from pathlib import Path

import pytest
import torch
from helpers import predictor, prompts

from shape import ShapeDecoder, errors
from shape.drafters import TrainedDrafter, TreeShape
from shape.drafters.testing import AdversaryDrafter
from shape.evaluation.bench import load_methods
from shape.evaluation.options import BenchOptions
from shape.generation.options import GenerateOptions
from shape.generation.timing import measure_costs
from shape.target.loading import of_pair
from shape.target.model import Target
from shape.target.openvino import OpenVinoTarget
from shape.verification import openvino as caching
from shape.verification.forward import new_cache, prefill
from shape.verification.probe import support_of

pytest.importorskip("openvino", reason="openvino is not installed")

NEW_TOKENS = 24


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHAPE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folders(tiny_model, tmp_path_factory) -> dict[str, Path]:
    """Random targets in float32: a plain one, one with learned positions, one with a window of six tokens."""
    found = {}
    for family in ("llama", "gpt2", "mistral"):
        found[family] = tmp_path_factory.mktemp(family)
        tiny_model(family, torch.float32).save_pretrained(found[family])
    return found


@pytest.fixture(scope="module")
def targets(folders) -> dict[str, Target]:
    return {family: Target.load(folder, backend="openvino") for family, folder in folders.items()}


def answer(decoder: ShapeDecoder, lengths=(3, 17, 9, 1, 12), **options) -> torch.Tensor:
    return decoder.generate(**prompts(lengths), max_new_tokens=NEW_TOKENS, eos_token_id=[], **options)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_in_float32_tokens_are_those_of_torch_and_of_transformers(family, folders, targets):
    theirs = Target.load(folders[family], dtype="float32")
    expected = answer(ShapeDecoder(theirs))
    assert torch.equal(answer(ShapeDecoder(targets[family])), expected)
    assert torch.equal(answer(ShapeDecoder(targets[family], AdversaryDrafter(seed=3), fall_back=False)), expected)
    for row, length in enumerate((3, 17)):
        alone = prompts((3, 17, 9, 1, 12))["input_ids"][row : row + 1, -length:]
        found = theirs.model.generate(alone, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
        assert torch.equal(found[0, -NEW_TOKENS:], expected[row, -NEW_TOKENS:])


def test_states_of_several_layers_are_those_of_torch(folders, targets):
    theirs, ids = Target.load(folders["llama"], dtype="float32"), prompts((8, 8))["input_ids"]
    for layers in ((-1,), (0, 2, -1)):
        expected = theirs.hidden(ids, layers=layers)
        assert torch.allclose(targets["llama"].hidden(ids, layers=layers), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("acceptance", ["match", "rejection", "traversal"])
def test_samples_and_rules(acceptance, targets):
    decoder = ShapeDecoder(targets["llama"], AdversaryDrafter(seed=1), fall_back=False)
    options = {"do_sample": True, "seed": 5, "acceptance": acceptance}
    found = answer(decoder, num_return_sequences=2, **options)
    if acceptance == "match":  # the one whose samples do not depend on the drafts
        assert torch.equal(found, answer(ShapeDecoder(targets["llama"]), num_return_sequences=2, **options))
    again = ShapeDecoder(targets["llama"], AdversaryDrafter(seed=1), fall_back=False)
    assert torch.equal(found, answer(again, num_return_sequences=2, **options))


@pytest.mark.parametrize("layers", [[-1], [1, -1]])
def test_a_predictor_drafts_in_torch(layers, targets):
    network = predictor(torch.float32, feature_layers=layers, loud=True)
    decoder = ShapeDecoder(targets["llama"], TrainedDrafter(network, TreeShape(depth=3, width=2)), fall_back=False)
    assert torch.equal(answer(decoder), answer(ShapeDecoder(targets["llama"])))


def test_a_session_goes_on_from_the_state(targets):
    decoder = ShapeDecoder(targets["llama"], AdversaryDrafter(seed=2), fall_back=False)
    say, text = decoder.session(), prompts((9,))["input_ids"]
    for _ in range(3):
        asked = {"attention_mask": torch.ones_like(text), "max_new_tokens": 8, "eos_token_id": []}
        found = say(text, **asked, return_dict_in_generate=True)
        assert torch.equal(found.sequences, decoder.generate(text, **asked))
        text = torch.cat([found.sequences[:, :-3], prompts((4,))["input_ids"]], dim=1)  # some of it is taken back
    assert found.stats.reused_tokens > 0


def test_unused_slots_are_given_back(targets, monkeypatch):
    monkeypatch.setattr(caching, "_UNUSED", 4)
    compacted = []
    smaller = caching.OpenVinoCache._compact
    monkeypatch.setattr(caching.OpenVinoCache, "_compact", lambda self: (compacted.append(self.written), smaller(self)))
    decoder = ShapeDecoder(targets["llama"], AdversaryDrafter(seed=3), fall_back=False)
    found = answer(decoder)
    assert compacted
    monkeypatch.undo()
    assert torch.equal(found, answer(ShapeDecoder(targets["llama"])))


def test_measuring_costs_gives_unused_slots_back(targets, tmp_path, monkeypatch):
    written, append = [], caching.OpenVinoCache.append

    def watched(cache, *given):
        states = append(cache, *given)
        written.append(cache.written)
        return states

    monkeypatch.setattr(caching.OpenVinoCache, "append", watched)
    measure_costs(ShapeDecoder(targets["llama"]), context=40, cache=tmp_path / "costs.json")
    assert max(written) <= 64 + caching._UNUSED + 65


def test_requests_are_used_again(targets):
    decoder = ShapeDecoder(targets["llama"])
    answer(decoder)
    gc.collect()
    idle = targets["llama"].layers((-1,)).idle
    count = len(idle)
    assert count > 0
    answer(decoder)
    gc.collect()
    assert len(idle) == count


@pytest.mark.parametrize(
    "dtype, quantize",
    [("bfloat16", None), ("bfloat16", "int8"), ("bfloat16", "int4"), ("float32", "int8"), ("float32", "int4")],
)
def test_other_precisions_equal_their_own_plain_decoding(dtype, quantize, folders):
    target = Target.load(folders["llama"], backend="openvino", dtype=dtype, quantize=quantize)
    plain = answer(ShapeDecoder(target))
    assert torch.equal(answer(ShapeDecoder(target, AdversaryDrafter(seed=3), fall_back=False)), plain)
    assert target.precision == (dtype if quantize is None else f"{dtype}, {quantize} weights")
    exact = Target.load(folders["llama"], dtype="float32").hidden(prompts((9,))["input_ids"])
    found = target.hidden(prompts((9,))["input_ids"])
    assert 0 < (found - exact).norm() / exact.norm() < 0.3


def test_weights_are_read_once(folders, targets):
    """The second load takes what the first one wrote: no weights but the tables of tokens."""
    again = Target.load(folders["llama"], backend="openvino")
    assert isinstance(again, OpenVinoTarget) and again.converted is not None
    assert any(weight.is_meta for weight in again.model.parameters())
    assert not again.embed(torch.tensor([1])).is_meta and again.identity == targets["llama"].identity
    assert torch.equal(answer(ShapeDecoder(again)), answer(ShapeDecoder(targets["llama"])))


def test_a_changed_checkpoint_is_converted_anew(tiny_model, tmp_path):
    answers = []
    for seed in (0, 1):
        tiny_model("llama", torch.float32, seed=seed).save_pretrained(tmp_path)
        answers.append(answer(ShapeDecoder.from_pretrained(tmp_path, backend="openvino", drafter="none")))
    assert not torch.equal(*answers)


def test_a_state_that_is_cut_is_written_over(targets):
    target, ids = targets["llama"], prompts((12,))["input_ids"]
    support = support_of(target)
    cache = new_cache(target, support, 1, 0)
    whole = prefill(target, cache, ids, [12])
    cache.set_lengths([5])
    assert torch.allclose(prefill(target, cache, ids[:, 5:], [12]), whole[:, 5:], atol=1e-5)
    assert cache.written == 19


def test_what_cannot_be_served_is_refused(folders, targets, tiny_model):
    with pytest.raises(errors.ConfigError, match="device MARS is not there"):
        Target.load(folders["llama"], backend="openvino", device="MARS")
    with pytest.raises(errors.ConfigError, match="quantize int3 is unknown"):
        Target.load(folders["llama"], backend="openvino", quantize="int3")
    with pytest.raises(errors.ConfigError, match="dtype float64"):
        Target.load(folders["llama"], backend="openvino", dtype="float64")
    with pytest.raises(errors.ConfigError, match="at hand"):
        ShapeDecoder.from_pretrained(tiny_model("llama", torch.float32), backend="openvino")
    with pytest.raises(errors.ConfigError, match="backend tpu is unknown"):
        Target.load(folders["llama"], backend="tpu")
    with pytest.raises(errors.ConfigError, match="copies a target in torch"):
        ShapeDecoder(targets["llama"], "compressed")
    options = BenchOptions(target=str(folders["llama"]), backend="openvino", methods=["transformers", "autoregressive"])
    with pytest.raises(errors.ConfigError, match="method transformers decodes in torch"):
        load_methods(options)


def test_options_of_commands_reach_the_backend():
    assert of_pair(GenerateOptions(backend="openvino", device="GPU")) == {
        "backend": "openvino",
        "device_map": "GPU",
        "predictor_revision": None,
    }
