"""Drafters by name, those of other packages among them."""

import pytest
import torch
from helpers import ROOT, prompts

from shape.drafters import DRAFTERS, NgramDrafter, SuffixDrafter, make_drafter
from shape.errors import ConfigError
from shape.generation.decoder import ShapeDecoder

EXAMPLE = ROOT / "tests/example_package"


def test_every_name_makes_its_drafter():
    for name in DRAFTERS:
        assert make_drafter(name).name == name


def test_descriptions_tell_settings_apart():
    """Records of other settings are not gone on from."""
    made = [
        *(NgramDrafter(), NgramDrafter(depth=9), NgramDrafter(longest=5), NgramDrafter(shortest=1)),
        *(SuffixDrafter(), SuffixDrafter(depth=9), SuffixDrafter(nodes=9), SuffixDrafter(shortest=1)),
        *(SuffixDrafter(threshold=0.2), SuffixDrafter(corpus=[[1, 2]]), SuffixDrafter(corpus=[[1, 3]])),
    ]
    assert len({drafter.describe() for drafter in made}) == len(made)
    assert SuffixDrafter(corpus=[[1, 2], [3]]).describe() == SuffixDrafter(corpus=[[1, 2], [3]]).describe()


def test_another_package_adds_a_drafter(tiny_model, monkeypatch):
    with pytest.raises(ConfigError, match="'parrot' is unknown"):
        make_drafter("parrot")
    monkeypatch.syspath_prepend(EXAMPLE)
    model, batch = tiny_model("llama"), prompts()
    expected = model.generate(**batch, max_new_tokens=20, do_sample=False)
    for name in ("parrot", "suffix+parrot"):
        out = ShapeDecoder(model, name, fall_back=False).generate(
            **batch, max_new_tokens=20, return_dict_in_generate=True
        )
        assert torch.equal(out.sequences, expected) and out.stats.drafter == name and out.stats.drafted > 0
    assert type(make_drafter("ngram")) is NgramDrafter
    with pytest.raises(
        ConfigError, match=r"'broken' of example_drafter:NothingThere cannot be made .*; see its package"
    ):
        make_drafter("broken")
    with pytest.raises(
        ConfigError, match=r"'nothing' is unknown; use one of none, ngram, suffix, .*, broken, parrot, or"
    ):
        make_drafter("nothing")
