"""Merging trees, learning what sources are worth, and when a source is asked at all."""

import math
from copy import copy
from dataclasses import replace

import pytest
import torch
from helpers import GREEDY, committed, predictor

from shape.drafters import (
    Committed,
    HybridDrafter,
    NgramDrafter,
    SuffixDrafter,
    TrainedDrafter,
    TreeShape,
    make_drafter,
)
from shape.drafters.base import Drafter, Wrapped
from shape.drafters.calibration import PathChances
from shape.errors import ConfigError
from shape.generation.decoder import ShapeDecoder
from shape.verification.sampling import Sampler
from shape.verification.tree import Drafted, TokenTree, ragged_tree


class Fixed(Drafter):
    """Proposes what it is told, (token, parent, probability where the parent stands), to every row."""

    def __init__(self, name: str, *nodes: tuple[int, int, float], layers: tuple[int, ...] = (-1,)) -> None:
        self.name, self.layers, self.asked, self.seen = name, layers, 0, []
        joint = [0.0]
        self.drafted: Drafted = []
        for token, parent, probability in nodes:
            joint.append(joint[parent] + math.log(probability))
            self.drafted.append((token, parent, joint[-1]))

    def start(self, committed: Committed, hidden: torch.Tensor) -> None:
        self.seen.append(hidden)

    def update(self, tokens: list[list[int]], hidden: torch.Tensor, counts: torch.Tensor) -> None:
        self.seen.append(hidden)

    def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        self.asked += 1
        return ragged_tree(committed.root, [self.drafted] * len(committed.texts))


def draft(hybrid: HybridDrafter, *rows: list[int]) -> TokenTree:
    return hybrid.draft(committed(*rows), GREEDY)


def started(hybrid: HybridDrafter, rows: int = 1, width: int = 4) -> HybridDrafter:
    hybrid.start(committed(*[[1]] * rows), torch.zeros(rows, 1, width))
    return hybrid


def test_shared_paths_are_one_and_the_best_of_all_are_kept():
    first = Fixed("a", (5, 0, 0.9), (6, 1, 0.8), (7, 2, 0.1))
    second = Fixed("b", (4, 0, 0.2), (5, 0, 0.6), (6, 2, 0.9), (9, 2, 0.4))
    tree = draft(started(HybridDrafter([first, second], nodes=4)), [1, 2])
    assert tree.tokens[0].tolist() == [2, 5, 6, 9, 4] and tree.parent[0].tolist() == [-1, 0, 1, 1, 0]
    assert tree.source == [[None, "a+b", "a+b", "b", "b"]]
    odds = [0.9, 0.9 * 0.9, 0.9 * 0.4, 0.2]  # of two opinions the better
    torch.testing.assert_close(tree.joint[0, 1:].exp(), torch.tensor(odds))


def test_a_node_s_first_child_is_its_likeliest_whoever_proposed_it():
    """It counts as the likeliest for the chances of paths, and in recorded drafts."""
    tree = draft(started(HybridDrafter([Fixed("a", (11, 0, 0.2)), Fixed("b", (22, 0, 0.75))])), [1, 2])
    assert tree.tokens[0].tolist() == [2, 22, 11]
    first = 0.75 + (1 - 0.75) / 3
    torch.testing.assert_close(torch.from_numpy(PathChances()(tree)[0, 1:]).exp(), torch.tensor([first, 0.2]))


def test_rows_of_unequal_size():
    hybrid = started(HybridDrafter([SuffixDrafter(depth=2), NgramDrafter(depth=1)]), rows=2)
    tree = draft(hybrid, [1, 2, 3, 1, 2], [4, 5, 6, 7])
    assert tree.tokens[0].tolist() == [2, 3, 1] and tree.source[0] == [None, "suffix+ngram", "suffix"]
    assert tree.parent[1].tolist() == [-1, -1, -1] and tree.source[1] == [None] * 3
    hybrid.select(torch.tensor([1]))
    assert draft(hybrid, [4, 5, 6, 7, 4, 5]).tokens[0].tolist() == [5, 6, 7]


def test_sources_are_believed_as_far_as_they_were_right():
    boasting, modest = Fixed("boasting", (5, 0, 0.9)), Fixed("modest", (6, 0, 0.5))
    hybrid = started(HybridDrafter([boasting, modest], nodes=1))
    text = [1, 2]
    for _ in range(20):
        last = draft(hybrid, text).tokens[0, 1]
        text = [*text, 6]
    assert last == 6
    for _ in range(200):
        text = [*text, 5]
        last = draft(hybrid, text).tokens[0, 1]
    assert last == 5


def test_what_a_source_adds_is_what_would_not_have_stood_without_it():
    """Of 5 6 7 8 the first source has 5 6, the second 5 6 7 and the third 8, behind the others' 7."""
    sources = [
        Fixed("first", (5, 0, 0.9), (6, 1, 0.9)),
        Fixed("second", (5, 0, 0.9), (6, 1, 0.9), (7, 2, 0.9)),
        Fixed("third", (5, 0, 0.5), (6, 1, 0.5), (7, 2, 0.5), (8, 3, 0.5)),
    ]
    hybrid = started(HybridDrafter(sources))
    draft(hybrid, [1])
    draft(hybrid, [1, 5, 6, 7, 8, 9])
    expected = [0.0, 0.9 + 0.9**2, 0.9 + 0.9**2 + 0.9**3]
    for value, before, gained in zip(hybrid._value, expected, [0, 0, 1], strict=True):
        assert value._gained[int(before)] == gained


def test_unlikely_nodes_are_left_to_speculation_control():
    """As other drafters', its drafts do not depend on what a node costs to verify."""
    sources = [Fixed("a", (5, 0, 0.9), (6, 1, 0.8), (7, 0, 1e-3)), Fixed("b", (5, 0, 0.9), (6, 1, 0.8), (8, 2, 1e-3))]
    hybrid = HybridDrafter(sources)
    for each in (hybrid, hybrid.reproducible()):
        assert draft(started(each), [1, 2]).tokens[0].tolist() == [2, 5, 6, 7, 8]


def test_nobody_is_asked_while_a_cheap_source_is_sure():
    cheap, dear = Fixed("cheap", (5, 0, 0.9), (5, 1, 0.9), (5, 2, 0.9)), Fixed("dear", (5, 0, 0.6))
    hybrid = started(HybridDrafter([cheap, dear]))
    text = [1]
    for _ in range(8):
        draft(hybrid, text)
        for _ in range(9):
            hybrid._value[1].seconds.append(1.0)
        for _ in range(9):
            hybrid._times.append(1.0)
        text = [*text, 5, 5, 5, 5]
    assert cheap.asked == 8 and dear.asked == 1


def test_each_source_gets_the_layers_that_it_reads():
    plain, deep = Fixed("plain", (3, 0, 0.5)), Fixed("deep", (4, 0, 0.5), layers=(2, 5, -1))
    other = Fixed("other", (5, 0, 0.5), layers=(3, -1))
    hybrid = HybridDrafter([plain, deep, other])
    assert hybrid.layers == (2, 3, 5, -1)
    hidden = torch.arange(8.0).expand(1, 3, 8)  # four layers of width 2
    hybrid.start(committed([1]), hidden)
    hybrid.update([[1, 2]], hidden[:, :1], torch.tensor([1]))
    for source, columns in ((plain, [6, 7]), (deep, [0, 1, 4, 5, 6, 7]), (other, [2, 3, 6, 7])):
        assert [seen[0, 0].tolist() for seen in source.seen] == [columns, columns]


def test_copies_for_calls_share_what_was_learned_and_nothing_else():
    hybrid = HybridDrafter([SuffixDrafter(), NgramDrafter()])
    one, other = copy(hybrid), copy(hybrid)
    started(one)
    started(other, rows=2)
    assert one._calibrations is other._calibrations and one.drafters[0] is not other.drafters[0]
    assert draft(one, [1, 2, 3, 1, 2]).size > 1  # the other call's rows are not in its way


def test_the_tree_of_the_only_source_that_has_one_is_taken_as_it_is():
    silent, telling = Fixed("silent"), Fixed("telling", (5, 0, 0.9), (6, 1, 1e-9), (5, 2, 0.5))
    hybrid = started(HybridDrafter([silent, telling], nodes=3), rows=2)
    tree = draft(hybrid, [1, 2], [3, 4])
    assert tree.tokens.tolist() == [[2, 5, 6, 5], [4, 5, 6, 5]]
    assert tree.source == [[None, "telling", "telling", "telling"]] * 2
    draft(hybrid, [1, 2, 5, 6, 7], [3, 4, 8])
    assert hybrid._value[1]._gained[0] == pytest.approx(2 + 0.1 * (0 - 2))  # two of one row, none of the other
    assert hybrid._value[0]._gained[0] == 0
    small = started(HybridDrafter([silent, telling], nodes=2))
    assert draft(small, [1, 2]).size <= 3  # too large to be taken as it is


def test_a_tree_of_drawn_nodes_is_taken_whole_whatever_its_size(monkeypatch):
    """Its size may depend on what was drawn, and rejection is biased where that decides what counts as drawn."""
    telling = Fixed("telling", (5, 0, 0.9), (6, 1, 0.8), (7, 2, 0.5))
    plain = telling.draft
    monkeypatch.setattr(
        telling, "draft", lambda *given: replace(tree := plain(*given), log_q=torch.zeros(1, tree.size, 9))
    )
    tree = draft(started(HybridDrafter([Fixed("silent"), telling], nodes=2)), [1, 2])
    assert tree.size == 4 and tree.log_q is not None


def test_a_rehearsal_has_the_passes_that_each_source_had():
    light, heavy = Fixed("light", (5, 0, 0.5)), Fixed("heavy", (6, 0, 0.5))
    light.passes, heavy.passes, asked = 1, 3, []
    for drafter in (light, heavy):
        drafter.run_forwards = lambda rows, passes, name=drafter.name: asked.append((name, rows, passes))
    hybrid = started(HybridDrafter([light, heavy]))
    draft(hybrid, [1, 2])
    assert hybrid.passes == 4
    hybrid.run_forwards(2, 8)
    assert asked == [("light", 2, 2), ("heavy", 2, 6)]
    again = HybridDrafter([light, heavy])
    draft(started(again.reproducible()), [1, 2])
    again.run_forwards(2, 8)  # those of calls with a seed, too
    assert asked[2:] == asked[:2]


def test_who_observes_a_drafter_says_what_rules_ask_of_it():
    pruned = TrainedDrafter(predictor(), TreeShape(depth=2, width=2, nodes=3))
    assert Wrapped(pruned).drops_drawn_nodes and Wrapped(pruned).draws_one_child
    assert not Wrapped(Fixed("fixed")).drops_drawn_nodes and not Wrapped(Fixed("fixed")).draws_one_child


def test_names(tiny_target):
    assert make_drafter("suffix+ngram").name == "suffix+ngram"
    with pytest.raises(ConfigError, match="names one twice"):
        make_drafter("suffix+suffix")
    with pytest.raises(ConfigError, match=r"'nothing' is unknown; use one of none, ngram, suffix, .*, or several"):
        make_drafter("suffix+nothing")
    with pytest.raises(ConfigError, match="needs a predictor"):
        ShapeDecoder.from_pretrained(None, target=tiny_target, drafter=["suffix", "shape"])


def test_statistics_by_source(tiny_model):
    model = tiny_model("llama")
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    right = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()

    class Knowing(Fixed):
        def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
            done = len(committed.texts[0]) - ids.shape[1]
            self.drafted = [(token, place, -0.1 * place) for place, token in enumerate(right[done : done + 3])]
            return super().draft(committed, sampler)

    hybrid = HybridDrafter([Knowing("knowing"), SuffixDrafter(shortest=1)])
    decoder = ShapeDecoder(model, hybrid, fall_back=False)
    out = decoder.generate(ids, max_new_tokens=12, return_dict_in_generate=True, trace=True)
    proposed, accepted = out.stats.sources["knowing"]
    assert proposed >= accepted > 0 and out.stats.to_dict()["sources"]["knowing"] == [proposed, accepted]
    events = [record for record in out.trace.records if record["type"] == "token"]
    told = [record for record in events if record["source"] and "knowing" in record["source"].split("+")]
    assert len(told) == proposed and sum(record["emitted"] for record in told) == accepted
    assert {record["source"] for record in events if record["event"] in ("corrected", "bonus", "prefill")} == {None}
