"""The registry of acceptance rules: names, parameters, refusals. What they emit is tested with the decoder."""

import pytest
from helpers import chain_only_model, predictor

from shape.cli.bench import parser as bench_parser
from shape.cli.generate import parser as generate_parser
from shape.drafters import HybridDrafter, NgramDrafter, SuffixDrafter, TrainedDrafter, TreeShape
from shape.errors import ConfigError, UnsupportedGeneration
from shape.generation.decoder import ShapeDecoder
from shape.generation.rules import (
    RULES,
    Rejection,
    Rule,
    Transport,
    Traversal,
    TrsLossy,
    TypicalLossy,
    UnverifiedLossy,
    make_rule,
)


def test_lossy_rules_say_so_and_no_others_do():
    lossy = ["typical-lossy", "trs-lossy", "unverified-lossy"]
    assert list(RULES) == ["match", "rejection", "traversal", "transport", *lossy]
    for name, rule in RULES.items():
        assert rule.name == name and rule.lossless == ("lossy" not in name)
        assert rule.lossless == ("Lossy" not in rule.__name__)


def test_rules_by_name_by_parameters_and_as_text():
    assert make_rule("trs-lossy") == TrsLossy(k=3, depth=3, threshold=0.8)
    assert make_rule("trs-lossy", TypicalLossy(), TrsLossy(k=2)) == TrsLossy(k=2)
    assert make_rule(TypicalLossy(epsilon=0.2)) == TypicalLossy(epsilon=0.2)
    assert str(make_rule("match")) == "match"
    assert str(TypicalLossy(delta=0.5)) == "typical-lossy(epsilon=0.09, delta=0.5)"
    with pytest.raises(
        UnsupportedGeneration, match="acceptance rule 'typical' is unknown; use one of match, rejection"
    ):
        make_rule("typical")


@pytest.mark.parametrize(
    "make",
    [
        lambda: TrsLossy(k=0),
        lambda: TrsLossy(depth=0),
        lambda: TrsLossy(threshold=0.0),
        lambda: TrsLossy(threshold=1.1),
        lambda: TypicalLossy(epsilon=0.0),
        lambda: TypicalLossy(epsilon=2.0),
        lambda: TypicalLossy(delta=0.0),
    ],
)
def test_parameters_out_of_range_get_one_sentence(make):
    with pytest.raises(
        ConfigError, match=r"^(trs|typical)_lossy\.\w+ is [\d.]+; give (at least 1|a (positive )?number.*)$"
    ):
        make()


@pytest.mark.parametrize("parser", [bench_parser, generate_parser])
def test_the_commands_name_every_rule(parser):
    text = "".join(parser().format_help().split())  # lines are broken behind hyphens, too
    assert all(name in text for name in RULES)
    assert "--typical_lossy.epsilon" in text and "--trs_lossy.k" in text


def shape_drafter(tree: TreeShape) -> TrainedDrafter:
    return TrainedDrafter(predictor(num_steps=3), tree)


@pytest.mark.parametrize("rule", [Rejection(), Traversal()], ids=str)
def test_rules_that_draw_refuse_trees_that_drop_what_was_drawn(tiny_model, rule: Rule):
    decoder = ShapeDecoder(tiny_model(), shape_drafter(TreeShape(depth=3, width=2, nodes=4)))
    with pytest.raises(UnsupportedGeneration, match=f"'{rule.name}' is biased where drawn nodes are dropped"):
        rule.fit(decoder.drafter, decoder.target)
    for drafter in (None, NgramDrafter(), shape_drafter(TreeShape(depth=3, width=2))):
        assert rule.fit(drafter, decoder.target) is drafter
        if drafter is not None:  # a hybrid does what its sources do
            assert rule.fit(hybrid := HybridDrafter([SuffixDrafter(), drafter]), decoder.target) is hybrid
    with pytest.raises(UnsupportedGeneration, match=f"'{rule.name}' is biased where drawn nodes are dropped"):
        rule.fit(HybridDrafter([SuffixDrafter(), decoder.drafter]), decoder.target)


def test_transport_takes_trees_that_drop_nodes_by_what_was_known_before(tiny_model):
    decoder = ShapeDecoder(tiny_model(), shape_drafter(TreeShape(depth=3, width=2, nodes=4)))
    for drafter in (decoder.drafter, HybridDrafter([SuffixDrafter(), decoder.drafter])):
        assert Transport().fit(drafter, decoder.target) is drafter

    class Others(TrainedDrafter):
        draws_one_child = False

    others = Others(decoder.drafter.predictor, TreeShape(depth=3, width=2, nodes=4))
    for drafter in (others, HybridDrafter([SuffixDrafter(), others])):
        with pytest.raises(UnsupportedGeneration, match="'transport' is biased where drawn nodes are dropped"):
            Transport().fit(drafter, decoder.target)


def test_the_papers_rule_takes_full_trees_and_refuses_what_has_none(tiny_model):
    decoder = ShapeDecoder(tiny_model(), shape_drafter(TreeShape(depth=1)))
    full = TrsLossy(k=2, depth=3).fit(decoder.drafter, decoder.target)
    assert isinstance(full, TrainedDrafter) and full.tree == TreeShape.full(2, 3)
    with pytest.raises(UnsupportedGeneration, match=r"needs the k\^N trees"):
        TrsLossy().fit(NgramDrafter(), decoder.target)
    chains = ShapeDecoder(chain_only_model())
    with pytest.raises(UnsupportedGeneration, match="verifies chains only"):
        TrsLossy().fit(decoder.drafter, chains.target)


def test_the_drafter_alone_drafts_chains_and_has_to_be_there(tiny_model):
    target = ShapeDecoder(tiny_model()).target
    chain = UnverifiedLossy().fit(shape_drafter(TreeShape(depth=3, width=2, nodes=4)), target)
    assert isinstance(chain, TrainedDrafter) and chain.tree == TreeShape(depth=3, width=1)
    assert UnverifiedLossy().fit(ngram := NgramDrafter(), target) is ngram
    with pytest.raises(UnsupportedGeneration, match="'unverified-lossy' is the drafter alone, and there is none"):
        UnverifiedLossy().fit(None, target)
