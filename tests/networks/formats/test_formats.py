"""Checkpoints of other packages: they are read and written, whole or not at all."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import ROOT, predictor
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from shape.errors import CheckpointError, ConfigError
from shape.networks.decoder import Rotary
from shape.networks.formats.files import read_checkpoint
from shape.networks.formats.layers import layers_of
from shape.networks.formats.table import FORMATS, drafting_from, format_of, load, save
from shape.networks.formats.targets import TargetFacts

FIXTURES = ROOT / "tests/fixtures"
TARGET = TargetFacts("org/target", num_layers=8, vocab_size=64, max_position_embeddings=256)
EAGLE = {"kind": "eagle", "own_heads": True, "draft_vocab_size": 20, "feature_layers": [2, 4, 5]}
BLOCK = {"kind": "block", "mask_token_id": 63, "feature_layers": [1, 3], "num_layers": 2, "markov_rank": 0}
PEAGLE = {"kind": "peagle", "mask_token_id": 63, "feature_layers": [2, 4, 5], "num_layers": 2}
SLIDING = {
    **BLOCK,
    "transformer_layer_config": {
        "model_type": "qwen3", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4,
        "use_sliding_window": True, "num_attention_heads": 2,
    },
}  # fmt: skip
WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 4, "use_sliding_window": True}
WIDTH = {"hidden_size": 16, "target_hidden_size": 48, "own_heads": True, "own_embeddings": True}
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
DSPARK = {**BLOCK, "markov_rank": 4, "confidence": True, "sample_from_anchor": True}
DFLASH2 = {"markov_rank": 4, "markov_head_type": "selector", "selector_top_k": 5, "conv_kernel_size": 2}
OURS = {
    "eagle": ({**EAGLE}, ["speculators", "eagle3"]),
    "eagle 3.1 of all tokens": (
        {**EAGLE, "draft_vocab_size": None, "fc_norm": True, "norm_output": True, "own_embeddings": True},
        ["speculators", "eagle3"],
    ),
    "eagle with the target's head": (
        {**EAGLE, "own_heads": False, "draft_vocab_size": None},
        ["speculators", "eagle3"],
    ),
    "eagle with norms": ({**EAGLE, "norm_before_fc": True, "norm_before_residual": True}, ["speculators", "eagle3"]),
    "eagle of layers": ({**EAGLE, "num_layers": 3}, ["speculators"]),
    "eagle with windows": ({**EAGLE, "transformer_layer_config": WINDOW}, ["speculators"]),
    "peagle": ({**PEAGLE}, ["speculators"]),
    "peagle of some tokens": (
        {**PEAGLE, "own_heads": True, "own_embeddings": True, "draft_vocab_size": 20, "norm_before_fc": True},
        ["speculators"],
    ),
    "dflash": ({**BLOCK}, ["speculators", "dspark"]),
    "dflash with windows": ({**SLIDING}, ["speculators", "dspark"]),
    "dflash with windows that see whole blocks": (
        {**SLIDING, "sliding_window_non_causal": True},
        ["speculators", "dspark"],
    ),
    "dflash2": ({**BLOCK, **DFLASH2}, ["speculators", "dspark"]),
    "dflash2 with windows": ({**SLIDING, **DFLASH2}, ["speculators", "dspark"]),
    "dflash2 as published": ({**SLIDING, **DFLASH2, "sliding_window_non_causal": True}, ["speculators", "dspark"]),
    "dspark": ({**DSPARK}, ["speculators", "dspark"]),
    "dspark of some tokens": (
        {**DSPARK, "own_heads": True, "own_embeddings": True, "draft_vocab_size": 20, "sample_from_anchor": False},
        ["speculators", "dspark"],
    ),
    "dspark, gated": ({**DSPARK, "markov_head_type": "gated"}, ["speculators"]),
    "dspark, recurrent": ({**DSPARK, "markov_head_type": "rnn"}, ["speculators"]),
    "eagle narrower than its target": ({**EAGLE, **WIDTH, "fc_norm": True}, ["speculators", "eagle3"]),
    "peagle wider than its target": ({**PEAGLE, **WIDTH, "hidden_size": 64}, ["speculators"]),
    "dflash narrower than its target": ({**BLOCK, **WIDTH}, ["speculators", "dspark"]),
    "medusa": ({"kind": "medusa", "own_heads": True, "residual_bias": True, "num_layers": 2}, ["medusa"]),
    "medusa of some tokens": (
        {"kind": "medusa", "own_heads": True, "shared_head": True, "draft_vocab_size": 20},
        ["medusa"],
    ),
}
PAIRS = [(name, form) for name, (_, forms) in OURS.items() for form in forms]


def made(options: dict):
    network = predictor(torch.float32, loud=True, **options)
    if network.draft_vocabulary is not None:
        network.draft_vocabulary = torch.randperm(64)[:20].sort().values
    return network


@pytest.mark.parametrize(("name", "form"), PAIRS)
def test_there_and_back(name, form, tmp_path):
    options, _ = OURS[name]
    network = made(options)
    save(network, tmp_path, form, TARGET)
    assert format_of(read_checkpoint(tmp_path).config) == form
    again = load(tmp_path)
    before, after = network.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    for weight in before.keys() - {"mask_embedding"}:  # the target's, which no other format keeps
        assert torch.equal(before[weight], after[weight]), weight
    for option in {*options, "hidden_size", "vocab_size"} - {"transformer_layer_config"}:
        assert getattr(network.config, option) == getattr(again.config, option), option
    if network.config.has_decoder_layers:
        layers, others = again.config.transformer_layer_config, network.config.layer_config().to_dict()
        assert {**others, **layers, "max_position_embeddings": 0} == {**others, "max_position_embeddings": 0}


@pytest.mark.parametrize("name", OURS)
def test_drafting_from_some_tokens_keeps_their_rows_and_all_else(name):
    network, tokens = made({**OURS[name][0], "draft_vocab_size": None}), torch.arange(1, 64, 3)
    some = drafting_from(network, tokens)
    assert some.config.draft_vocab_size == len(tokens) and network.config.draft_vocab_size is None
    assert torch.equal(some.draft_vocabulary, tokens)
    by_token = {id(matrix) for matrix in network.matrices_over_tokens}
    before, after = dict(network.named_parameters()), dict(some.named_parameters())
    assert before.keys() == after.keys()
    for weight, given in before.items():
        assert torch.equal(after[weight], given[tokens] if id(given) in by_token else given), weight
    assert len(some.matrices_over_tokens) == len(by_token)


class Harmful:
    """What runs a program where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self.file,)


def test_pickled_weights_run_nothing(tmp_path):
    save(made(OURS["medusa"][0]), tmp_path, "medusa", TARGET)
    (file,) = tmp_path.glob("*.safetensors")
    weights = load_file(file)
    file.unlink()
    pickled, touched = tmp_path / "pytorch_model.bin", tmp_path / "touched"
    torch.save(weights, pickled)
    assert load(tmp_path).state_dict().keys() == made(OURS["medusa"][0]).state_dict().keys()
    torch.save({**weights, "harmful": Harmful(touched)}, pickled)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path)
    assert not touched.exists()
    torch.load(pickled, weights_only=False)  # another unpickler would
    assert touched.exists()


@pytest.mark.parametrize(("name", "form"), PAIRS)
def test_a_missing_or_unknown_weight_is_an_error(name, form, tmp_path):
    save(made(OURS[name][0]), tmp_path, form, TARGET)
    whole = load_file(tmp_path / "model.safetensors")
    chosen = next(weight for weight in whole if weight.startswith(("fc.", "blocks.0.layers.0.weight")))
    changes = {
        "has unknown weights: stranger": {**whole, "stranger": torch.zeros(1)},
        "lacks weights": {weight: value for weight, value in whole.items() if weight != chosen},
        "has another shape": {**whole, chosen: whole[chosen][:-1].contiguous()},
    }
    for said, weights in changes.items():
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=said):
            load(tmp_path)


def test_what_engines_read_of_a_configuration(tmp_path):
    network = made(OURS["dspark of some tokens"][0])
    save(network, tmp_path / "speculators", "speculators", TARGET)
    config = json.loads((tmp_path / "speculators/config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [1, 3] and config["sample_from_anchor"] is False
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert config["transformer_layer_config"]["max_position_embeddings"] >= 256
    save(network, tmp_path / "dspark", "dspark", TARGET)
    config = json.loads((tmp_path / "dspark/config.json").read_text())
    assert config["target_layer_ids"] == [0, 2] and config["architectures"] == ["Qwen3DSparkModel"]
    weights = load_file(tmp_path / "dspark/model.safetensors")
    tokens = network.draft_vocabulary
    assert torch.equal(weights["d2t"] + torch.arange(20), tokens) and torch.equal(
        weights["t2d"].nonzero()[:, 0], tokens
    )


def test_engines_number_layers_of_eagle_in_two_ways(tmp_path):
    """At the top they are of states, with the embedding as 0; in `eagle_config` of decoder layers' outputs, where the
    first is 1.
    """
    save(made(OURS["eagle"][0]), tmp_path, "eagle3", TARGET)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config[LAYER_IDS] == [2, 4, 5] and config["eagle_config"][LAYER_IDS] == [1, 3, 4]
    outputs, states = config["eagle_config"], {**config["eagle_config"], LAYER_IDS: [2, 4, 5]}
    for top, nested in (([2, 4, 5], None), (None, outputs), (None, states)):
        (tmp_path / "config.json").write_text(json.dumps({**config, LAYER_IDS: top, "eagle_config": nested}))
        assert load(tmp_path).config.feature_layers == [2, 4, 5]


@pytest.mark.parametrize("layers", [[3, 4, 5], [2, 4, 5]])
def test_sglang_finds_the_layers_in_its_own_list(tmp_path, layers):
    """Which it reads without the other."""
    save(made({**EAGLE, "feature_layers": layers}), tmp_path, "eagle3", TARGET)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, LAYER_IDS: None}))
    assert load(tmp_path).config.feature_layers == layers


def test_sglang_cannot_be_told_of_layer_one(tmp_path):
    with pytest.warns(UserWarning, match="SGLang reads other layers where the first one is 1"):
        save(made({**EAGLE, "feature_layers": [1, 3, 5]}), tmp_path, "eagle3", TARGET)
    assert load(tmp_path).config.feature_layers == [1, 3, 5]


def test_a_medusa_of_one_head(tmp_path):
    network = made({"kind": "medusa", "own_heads": True, "num_steps": 1, "draft_vocab_size": None})
    save(network, tmp_path, "medusa", TARGET)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        {name.replace("lm_head.", "lm_heads.0."): one for name, one in weights.items()}, tmp_path / "model.safetensors"
    )
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "original_lm_head": False}))
    assert torch.equal(load(tmp_path).lm_head.weight, network.lm_head.weight)


@pytest.mark.parametrize(("name", "form"), [("eagle", "eagle3"), ("dspark", "dspark")])
@pytest.mark.parametrize(
    ("stored", "computed"),
    [(torch.float32, "bfloat16"), (torch.bfloat16, "bfloat16"), (torch.float16, "float16")],
)
def test_engines_compute_in_two_bytes(name, form, stored, computed, tmp_path):
    save(made(OURS[name][0]).to(stored), tmp_path, form, TARGET)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == computed
    assert load(tmp_path).dtype == stored


def test_specforge_nests_its_options_and_pickles_are_read(tmp_path):
    save(made(OURS["dspark"][0]), tmp_path, "dspark", TARGET)
    config = json.loads((tmp_path / "config.json").read_text())
    names = ("markov_rank", "markov_head_type", "mask_token_id", "target_layer_ids", "confidence_head_with_markov")
    config["dflash_config"] = {name: config.pop(name) for name in names}
    config["architectures"], _ = ["DSparkDraftModel"], config.pop("sample_from_anchor")
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(tmp_path / "model.safetensors")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    again = load(tmp_path)
    assert again.config.sample_from_anchor and again.config.markov_rank == 4 and again.config.feature_layers == [1, 3]


def test_parallel_drafting_in_the_layout_of_eagle3(tmp_path):
    """A Llama's configuration, whose mask token vLLM finds by several names."""
    network = made(OURS["peagle"][0])
    save(network, tmp_path, "speculators", TARGET)
    theirs = json.loads((tmp_path / "config.json").read_text())
    config = {
        **theirs["transformer_layer_config"], "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 64,
        "eagle_config": {LAYER_IDS: [1, 3, 4]}, "ptd_token_id": "63",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = load(tmp_path)
    assert again.kind == "peagle" and again.config.mask_token_id == 63 and again.config.num_layers == 2
    assert again.config.feature_layers == [2, 4, 5]
    assert torch.equal(again.mask_hidden, network.mask_hidden)
    (tmp_path / "config.json").write_text(json.dumps({**config, "ptd_token_id": None}))
    with pytest.raises(CheckpointError, match="has no mask_token_id"):
        load(tmp_path)


def test_windows_by_other_names(tmp_path):
    """XiaomiMiMo's: every layer has a window, and sees its block as a whole; is_causal says that of any."""
    save(made(OURS["dflash"][0]), tmp_path, "dspark", TARGET)
    config = json.loads((tmp_path / "config.json").read_text())
    swa = {**config, "layer_types": None, "dflash_config": {**config["dflash_config"], "use_swa": True}}
    swa["dflash_config"]["swa_window_size"] = 6
    (tmp_path / "config.json").write_text(json.dumps(swa))
    again = load(tmp_path).config
    assert again.windows == [6, 6] and again.sliding_window_non_causal
    (tmp_path / "config.json").write_text(json.dumps({**config, "is_causal": True}))
    with pytest.raises(CheckpointError, match="see only those before them in every layer"):
        load(tmp_path)


def test_fasterdecoding_counts_its_layers(tmp_path):
    save(made(OURS["medusa"][0]), tmp_path, "medusa", TARGET)
    wanted = load(tmp_path).state_dict()
    renamed = {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        parts = name.split(".")
        layer = f"{parts[3]}.linear" if parts[0] == "blocks" else "2"
        renamed[f"{parts[1]}.{layer}.{parts[-1]}"] = weight
    torch.save(renamed, tmp_path / "medusa_lm_head.pt")
    (tmp_path / "model.safetensors").unlink()
    config = {"medusa_num_heads": 4, "medusa_num_layers": 2, "base_model_name_or_path": "org/vicuna"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = load(tmp_path)
    assert all(torch.equal(weight, wanted[name]) for name, weight in again.state_dict().items())
    assert again.config.target_identity["name"] == "org/vicuna" and len(wanted) == len(again.state_dict())


@pytest.mark.parametrize(("name", "form"), [("eagle", "eagle3"), ("dflash", "dspark"), ("dflash", "speculators")])
def test_the_last_layer_is_warned_of(name, form, tmp_path):
    """Of a target that is known: here it is what is behind the final norm."""
    save(made(OURS[name][0]), tmp_path, form, TARGET)
    last = OURS[name][0]["feature_layers"][-1]
    with pytest.warns(UserWarning, match=f"the target's last layer, {last}: here behind the final norm"):
        load(tmp_path, LlamaConfig(num_hidden_layers=last, vocab_size=64))


def test_what_vllm_serves_by_itself_names_its_target(tmp_path):
    with pytest.raises(CheckpointError, match="names the target, which is not known: give --target"):
        save(made(OURS["eagle"][0]), tmp_path, "speculators", replace(TARGET, name=""))


def test_sglang_numbers_hidden_states_of_gpt_oss(tmp_path):
    """Whatever their list begins with, of others only where it does not begin with 1."""
    gpt_oss = replace(TARGET, architectures=("GptOssForCausalLM",))
    save(made(OURS["eagle"][0]), tmp_path, "eagle3", gpt_oss)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_config"][LAYER_IDS] == config[LAYER_IDS] == [2, 4, 5]
    config["eagle_config"][LAYER_IDS] = [1, 3, 4]
    (tmp_path / "config.json").write_text(json.dumps({**config, LAYER_IDS: None}))
    for architecture, read in (("GptOssForCausalLM", [1, 3, 4]), ("LlamaForCausalLM", [2, 4, 5])):
        target = LlamaConfig(num_hidden_layers=8, vocab_size=64, architectures=[architecture])
        assert load(tmp_path, target).config.feature_layers == read


WINDOWED = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("given", "rope"),
    [
        ({"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}, {"rope_theta": 1e6}),
        ({"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e6, "mrope_section": [4]}}, {"rope_theta": 1e6}),
        ({"rope_parameters": {"full_attention": WINDOWED}}, WINDOWED),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": WINDOWED}}, WINDOWED),
        (
            {"rope_theta": 3e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0},
        ),
        ({"rope_theta": 3e4, "rope_scaling": None}, {"rope_theta": 3e4, "rope_type": "default"}),
        ({"partial_rotary_factor": 1.0}, {"rope_type": "default"}),
    ],
)
def test_rotary_positions_whoever_wrote_them(given, rope):
    found = layers_of({"hidden_size": 32, "num_attention_heads": 2, **given})["rope_parameters"]
    assert rope.items() <= found.items()
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, rope_parameters=found)
    expected = found["rope_theta"] ** -(torch.arange(0, 16, 2) / 16) / rope.get("factor", 1)
    torch.testing.assert_close(Rotary(config)._frequencies[torch.device("cpu")], expected)


def test_rotary_positions_that_are_not_computed():
    for given, said in (
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "of type 'ntk', which is not computed here"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
    ):
        with pytest.raises(CheckpointError, match=said):
            layers_of({"hidden_size": 32, "num_attention_heads": 2, **given})
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.warns(UserWarning, match="of type 'dynamic': behind 64 tokens it drafts otherwise"):
        layers_of({"hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 64, "rope_scaling": dynamic})


def test_default_layers_depend_on_the_target(tmp_path, tiny_model):
    save(made(OURS["eagle"][0]), tmp_path, "eagle3", TARGET)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, LAYER_IDS: None, "eagle_config": None}))
    with pytest.raises(CheckpointError, match=r"cannot be read as eagle3: .* give --target"):
        load(tmp_path)
    target = tiny_model().config.__class__(num_hidden_layers=8)
    assert load(tmp_path, target).config.feature_layers == [2, 4, 5]


def test_default_layers_are_those_of_the_target_that_the_checkpoint_names(tmp_path, tiny_target_folder):
    """As of EAGLE-3 that speculators has converted."""
    save(made(OURS["eagle"][0]), tmp_path, "speculators", replace(TARGET, name=str(tiny_target_folder)))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, LAYER_IDS: None}))
    count = TargetFacts.of(tiny_target_folder).num_layers
    assert load(tmp_path).config.feature_layers == [2, count // 2, count - 3]


def test_deepspecs_eagle3(tmp_path):
    """Whose layers are outputs, at the top of a Qwen3's configuration; and weights behind `model.`."""
    network = made({**EAGLE, "draft_vocab_size": None, "transformer_layer_config": {"model_type": "qwen3"}})
    save(network, tmp_path, "speculators", TARGET)
    theirs = json.loads((tmp_path / "config.json").read_text())
    config = {
        **theirs["transformer_layer_config"], "architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [1, 3, 4],
        "ttt_length": 5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(tmp_path / "model.safetensors")
    save_file({f"model.{name}": weight for name, weight in weights.items()}, tmp_path / "model.safetensors")
    again = load(tmp_path)
    assert again.config.feature_layers == [2, 4, 5] and again.config.num_steps == 5
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in network.named_parameters())
    (tmp_path / "config.json").write_text(json.dumps({**config, "target_layer_ids": [1, 3, 7]}))
    with pytest.warns(UserWarning, match="the target's last layer, 8: here behind the final norm"):
        load(tmp_path, LlamaConfig(num_hidden_layers=8))
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_is_neox_style": False}))
    with pytest.raises(CheckpointError, match="rope_is_neox_style False, which is not computed here"):
        load(tmp_path)


def test_what_sglang_reads_of_a_configuration(tmp_path):
    save(made(OURS["eagle with the target's head"][0]), tmp_path / "a", "eagle3", TARGET)
    written = json.loads((tmp_path / "a/config.json").read_text())
    assert written["draft_vocab_size"] is None  # so the head is the target's
    save(made(OURS["dflash"][0]), tmp_path / "b", "dspark", TARGET)
    assert json.loads((tmp_path / "b/config.json").read_text())["num_target_layers"] == TARGET.num_layers
    said = "SGLang passes over an output embedding of the drafter's own and a draft vocabulary and blocks whose first"
    with pytest.warns(UserWarning, match=said):
        save(made(OURS["dspark of some tokens"][0]), tmp_path / "c", "dspark", TARGET)


def test_tokens_in_place_of_differences_are_refused(tmp_path):
    network = made(OURS["eagle"][0])
    save(network, tmp_path, "eagle3", TARGET)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "d2t": network.draft_vocabulary}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="d2t has to hold differences"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("options", "form", "said"),
    [
        ({**EAGLE, "own_heads": False}, "eagle3", "give --target, from which they are copied"),
        ({**EAGLE}, "medusa", "kind eagle, and the format medusa is for medusa"),
        ({**EAGLE, "transformer_layer_config": {"model_type": "qwen3"}}, "eagle3", "use --to speculators"),
        ({**EAGLE, "transformer_layer_config": WINDOW}, "eagle3", "no layers of sliding_attention"),
        ({**EAGLE, "num_layers": 2}, "eagle3", "one layer, and it has 2: use --to speculators"),
        ({**PEAGLE, "fc_norm": True}, "speculators", "fc_norm, which engines know of EAGLE-3 alone"),
        ({**EAGLE, "feature_layers": [1, -1]}, "eagle3", "engines know those from 0 on"),
        ({**PEAGLE}, "eagle3", "kind peagle, and the format eagle3 is for eagle"),
        ({**BLOCK, "sample_from_anchor": True}, "dspark", "markov_rank alone"),
        ({**BLOCK, **DFLASH2, "conv_kernel_size": 0}, "dspark", "convolutions and a selector together"),
        ({**BLOCK, **DFLASH2, "own_heads": True, "draft_vocab_size": 20}, "speculators", "without a draft vocabulary"),
        ({**DSPARK, "markov_head_type": "gated"}, "dspark", "markov_head_type is gated"),
        ({**BLOCK, "feature_layers": [1, -1]}, "speculators", "engines know those from 1 on"),
        ({"kind": "medusa", "own_heads": True, "draft_vocab_size": 20}, "medusa", "draft_vocab_size null"),
        ({"kind": "medusa", "own_heads": True, "markov_rank": 4}, "medusa", "which engines know of DSpark alone"),
        ({"kind": "medusa", "own_heads": True, "own_embeddings": True}, "medusa", "has no place for"),
        ({"kind": "medusa", "draft_vocab_size": None}, "medusa", "engines want in the file: give --target"),
        ({**PEAGLE, "markov_rank": 4}, "speculators", "which engines know of DSpark alone"),
        ({**EAGLE, "confidence": True}, "eagle3", "which engines know of DSpark alone"),
        ({**EAGLE, "feature_layers": [2, 4, 8]}, "eagle3", r"below the last \(8\), which they read before the final"),
        ({**BLOCK, "feature_layers": [1, 8]}, "dspark", r"from 1 on, below the last \(8\)"),
    ],
)
def test_what_a_format_has_no_place_for(options, form, said, tmp_path):
    with pytest.raises(CheckpointError, match=said):
        save(made(options), tmp_path, form, TARGET)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"speculators_model_type": "mtp"}, "its algorithm is mtp"),
        ({"markov_head_type": "lstm"}, "markov_head_type is 'lstm'"),
        ({"mask_token_id": None}, "has no mask_token_id"),
        ({"aux_hidden_state_layer_ids": None}, "has no aux_hidden_state_layer_ids"),
        ({"target_hidden_size": 48}, "give own_heads and own_embeddings"),
        ({"transformer_layer_config": {"model_type": "gpt2"}}, "of model_type 'gpt2'"),
    ],
)
def test_networks_that_are_not_known_are_named(changed, said, tmp_path):
    save(made(OURS["dspark"][0]), tmp_path, "speculators", TARGET)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises((CheckpointError, ConfigError), match=said):
        load(tmp_path)


def test_dflash2_is_read_as_it_is_published(tmp_path):
    """As z-lab/Qwen3.8-27B-DFlash2: what is DFlash2's lies in dflash_config alone, and places see each other."""
    network = made({**SLIDING, **DFLASH2, "sliding_window_non_causal": True})
    save(network, tmp_path, "dspark", TARGET)
    config = json.loads((tmp_path / "config.json").read_text())
    own = config["dflash_config"]
    assert config["architectures"] == ["DFlash2DraftModel"] and config["is_causal"] is False
    names = {"block_size", "conv_group_size", "conv_kernel_size", "mask_token_id", "selector_rank", "selector_top_k"}
    assert own.keys() == {*names, "target_layer_ids", "sample_from_anchor"}
    own.pop("sample_from_anchor")
    bare = {name: value for name, value in config.items() if name not in (*own, "sample_from_anchor")}
    (tmp_path / "config.json").write_text(json.dumps(bare))
    again = load(tmp_path)
    same = [
        "num_steps",
        "mask_token_id",
        "feature_layers",
        "sample_from_anchor",
        "sliding_window_non_causal",
        "windows",
    ]
    for name in (*same, "markov_rank", "markov_head_type", "selector_top_k", "conv_kernel_size", "conv_group_size"):
        assert getattr(again.config, name) == getattr(network.config, name), name
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in network.named_parameters())
    (tmp_path / "config.json").write_text(json.dumps({**bare, "dflash_config": {**own, "output_multiplier": 0.5}}))
    with pytest.raises(CheckpointError, match=r"output_multiplier 0\.5, which is not computed"):
        load(tmp_path)


@pytest.mark.parametrize("name", [folder.name for folder in FIXTURES.iterdir() if (folder / "config.json").exists()])
def test_reference_checkpoints_come_back_as_they_were(name, tmp_path):
    network = load(FIXTURES / name)
    form = format_of(read_checkpoint(FIXTURES / name).config)
    assert form in FORMATS
    save(network, tmp_path, form, TARGET)
    before, after = load_file(FIXTURES / name / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[weight].to(after[weight].dtype), after[weight]) for weight in before)
