"""Checkpoints of other packages draft as ours do, with any tree, hybrid, rule and batch; the text is the target's."""

import json
import shutil

import pytest
import torch
from helpers import predictor, prompts

from shape.drafters import TreeShape
from shape.errors import CheckpointError, ConfigError, TargetMismatch
from shape.generation.decoder import ShapeDecoder
from shape.generation.rules import RULES
from shape.networks.formats.table import save
from shape.networks.formats.targets import TargetFacts

BLOCK = {"kind": "block", "mask_token_id": 9, "feature_layers": [1, 2], "markov_rank": 0}
DSPARK = {**BLOCK, "markov_rank": 4, "confidence": True, "sample_from_anchor": True}
EAGLE = {"kind": "eagle", "feature_layers": [0, 1, 2], "own_heads": True, "draft_vocab_size": 40}
PEAGLE = {"kind": "peagle", "mask_token_id": 9, "feature_layers": [0, 1, 2], "num_layers": 2, "own_heads": True}
MEDUSA = {"kind": "medusa", "own_heads": True}
FOREIGN = {
    "speculators' EAGLE-3": ("speculators", EAGLE),
    "SafeAILab's EAGLE-3": ("eagle3", EAGLE),
    "speculators' EAGLE-3 of two layers": ("speculators", {**EAGLE, "num_layers": 2}),
    "speculators' P-EAGLE": ("speculators", PEAGLE),
    "speculators' DFlash": ("speculators", BLOCK),
    "z-lab's DFlash": ("dspark", BLOCK),
    "speculators' DSpark": ("speculators", DSPARK),
    "DeepSeek's DSpark": ("dspark", DSPARK),
    "vLLM's Medusa": ("medusa", MEDUSA),
}


@pytest.fixture(scope="module", params=FOREIGN, ids=lambda name: name.replace(" ", "-"))
def foreign(request, tmp_path_factory):
    """A folder with a random drafter of 64 tokens, loud enough to draft something."""
    form, options = FOREIGN[request.param]
    network = predictor(torch.float32, loud=True, **options)
    if network.draft_vocabulary is not None:
        network.draft_vocabulary = torch.arange(0, 64)[torch.randperm(64)[:40].sort().values]
    folder = tmp_path_factory.mktemp("foreign")
    name = "org/target" if form == "speculators" else ""
    save(network, folder, form, TargetFacts(name, None, 64, 256))
    return folder


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama", torch.float64)


@pytest.mark.parametrize("tree", [TreeShape(depth=4), TreeShape(depth=3, width=3, nodes=7)], ids=["chain", "tree"])
def test_greedy_text_is_the_targets(model, foreign, tree):
    decoder = ShapeDecoder.from_pretrained(foreign, target=model, tree=tree)
    batch, options = prompts([3, 12, 7]), {"max_new_tokens": 20, "eos_token_id": [], "do_sample": False}
    wanted = ShapeDecoder(model).generate(**batch, **options)
    out = decoder.generate(**batch, **options, return_dict_in_generate=True, trace=True)
    assert torch.equal(out.sequences, wanted)
    assert out.stats.drafted > 0 and out.trace.emitted(0)
    hybrid = ShapeDecoder.from_pretrained(foreign, target=model, tree=tree, drafter="suffix+shape")
    assert torch.equal(hybrid.generate(**batch, **options), wanted)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_goes_with_it(model, foreign, rule):
    decoder = ShapeDecoder.from_pretrained(foreign, target=model, tree=TreeShape(depth=3, width=2))
    batch, options = prompts([3, 12, 7]), {"max_new_tokens": 12, "eos_token_id": [], "do_sample": True, "seed": 7}
    sampled = decoder.generate(**batch, **options, acceptance=rule)
    assert sampled.shape[1] == batch["input_ids"].shape[1] + 12
    if rule == "match":  # the same seed, the same text
        assert torch.equal(sampled, ShapeDecoder(model).generate(**batch, **options))


def test_a_drafter_is_called_by_its_own_name(model, foreign):
    kind = ShapeDecoder.from_pretrained(foreign, target=model).drafter.name
    name = f"suffix+{dict(eagle='eagle3', block='dflash').get(kind, kind)}"
    assert ShapeDecoder.from_pretrained(foreign, target=model, drafter=name).drafter.name == f"suffix+{kind}"
    other = "medusa" if kind != "medusa" else "eagle3"
    with pytest.raises(ConfigError, match=f"drafter '{other}' is asked for, and predictor .* is of kind {kind}"):
        ShapeDecoder.from_pretrained(foreign, target=model, drafter=other)


def test_another_target_is_refused(foreign, tiny_target, tmp_path):
    with pytest.raises(TargetMismatch, match="vocabulary"):
        ShapeDecoder.from_pretrained(foreign, target=tiny_target)
    config = json.loads((foreign / "config.json").read_text())
    assert "target_identity" not in config
    nameless = shutil.copytree(foreign, tmp_path / "nameless")
    (nameless / "config.json").write_text(json.dumps(config | {"speculators_config": None}))
    with pytest.raises((TargetMismatch, CheckpointError), match="does not say which target"):
        ShapeDecoder.from_pretrained(nameless)
