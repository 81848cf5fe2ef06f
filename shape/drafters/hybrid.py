"""Several drafters in one: their candidates merged into one tree, weighed by what became of earlier ones."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from time import perf_counter
from typing import Self

import torch
from torch import Tensor, nn

from shape.drafters.base import Committed, Drafter
from shape.drafters.calibration import Calibration
from shape.drafters.cost import DraftValue, RecentTimes
from shape.drafters.proposal import Proposal
from shape.errors import ConfigError
from shape.target.model import Target
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree, ragged_tree

_LOOK_UP, _NETWORK = 0.02, 0.3  # time of a draft, as a share of a verification's, where the clock must not decide


class HybridDrafter(Drafter):
    """Drafts of several sources in one tree under one budget.

    Paths that several propose are one path. A source's probabilities are calibrated by what became of such tokens
    before (`Calibration`), so that the likeliest nodes of all can be kept. Where the last one asked alone proposes, its
    tree is taken as it is. Sources are asked in their order, cheap ones first: a later one only where what it adds to
    the others has so far been worth its time (`DraftValue`). So a predictor need not run while a text is being copied.

    Args:
        drafters: the sources, at least one; their names, joined by "+", are its name.
        nodes: drafted nodes kept at most.
    """

    def __init__(self, drafters: Sequence[Drafter], nodes: int = 24) -> None:
        if not drafters:
            raise ConfigError("a hybrid of no drafters drafts nothing; give some")
        self.drafters, self.nodes = list(drafters), nodes
        self.name = "+".join(drafter.name for drafter in drafters)
        self.verified_whole = any(each.verified_whole for each in drafters)
        # Of those whose drawn nodes are dropped; merged trees have none that count as drawn.
        self.draws_one_child = all(each.draws_one_child for each in drafters if each.drops_drawn_nodes)
        self.layers = (*sorted({layer for each in drafters for layer in each.layers} - {-1}), -1)
        # Kept over the calls of a decoder, whose copies share them.
        self._calibrations = [Calibration() for _ in drafters]
        self._value = [DraftValue() for _ in drafters]
        self._times = RecentTimes()  # of verifications
        self._passes = [0] * len(self.drafters)
        self._by_clock = True

    def __copy__(self) -> "HybridDrafter":
        other = object.__new__(type(self))
        other.__dict__ |= self.__dict__
        other.drafters = [copy(drafter) for drafter in self.drafters]
        return other

    def reproducible(self) -> "HybridDrafter":
        other = HybridDrafter([drafter.reproducible() for drafter in self.drafters], self.nodes)
        other._passes, other._by_clock, other.one_at_a_time = self._passes, False, self.one_at_a_time
        return other

    @property
    def networks(self) -> Sequence[nn.Module]:
        return [network for drafter in self.drafters for network in drafter.networks]

    @property
    def drops_drawn_nodes(self) -> bool:
        return any(drafter.drops_drawn_nodes for drafter in self.drafters)

    def describe(self, beside: torch.device | None = None) -> str:
        return f"{self.nodes} nodes of {' + '.join(drafter.describe(beside) for drafter in self.drafters)}"

    def limit_draft(self, num_draft_tokens: int) -> None:
        for drafter in self.drafters:
            drafter.limit_draft(num_draft_tokens)

    def forget_misses(self) -> None:
        for drafter in self.drafters:
            drafter.forget_misses()

    def bind(self, target: Target) -> None:
        for drafter in self.drafters:
            drafter.bind(target)
        self.one_at_a_time = any(drafter.one_at_a_time for drafter in self.drafters)

    def start(self, committed: Committed, hidden: Tensor) -> None:
        self._pending: list[Proposal | None] = [None] * len(committed.texts)
        self._drafted_at: float | None = None
        for drafter in self.drafters:
            drafter.start(committed, self._columns(drafter, hidden))

    def update(self, tokens: list[list[int]], hidden: Tensor, counts: Tensor) -> None:
        if self._drafted_at is not None:
            if self._by_clock:
                self._times.append(perf_counter() - self._drafted_at)
            self._drafted_at = None
        for drafter in self.drafters:
            drafter.update(tokens, self._columns(drafter, hidden), counts)

    def inspect(self, tree: TokenTree, logits: Tensor) -> None:
        for drafter in self.drafters:
            drafter.inspect(tree, logits)

    def select(self, rows: Tensor) -> None:
        self._pending = [self._pending[row] for row in rows.tolist()]
        for drafter in self.drafters:
            drafter.select(rows)

    def join(self, other: Self) -> None:
        self._pending += other._pending
        for drafter, its in zip(self.drafters, other.drafters, strict=True):
            drafter.join(its)

    def run_forwards(self, rows: int, passes: int) -> None:
        """The passes are the sources', in the proportion that they have had them so far."""
        total = sum(self._passes) or 1
        for drafter, own in zip(self.drafters, self._passes, strict=True):
            drafter.run_forwards(rows, round(passes * own / total))

    def _columns(self, drafter: Drafter, hidden: Tensor) -> Tensor:
        """The states of the layers that a source reads."""
        if drafter.layers == self.layers:
            return hidden
        layers = hidden.unflatten(-1, (len(self.layers), -1))
        return layers[..., [self.layers.index(layer) for layer in drafter.layers], :].flatten(-2)

    def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        self._learn(committed)
        self.passes, spent = 0, 0.0
        proposals = [Proposal(len(text)) for text in committed.texts]
        found: list[tuple[int, TokenTree]] = []  # not in the proposals yet
        for number, drafter in enumerate(self.drafters):
            self._add_trees(proposals, found)
            expected = sum(each.expected for each in proposals) / len(proposals)
            verify = self._times.median if self._by_clock else 1.0
            if number and not self._value[number].pays(expected, spent, verify):
                continue
            for proposal in proposals:
                proposal.expected_before[number] = proposal.expected
            started = perf_counter()
            tree = drafter.draft(committed, sampler)
            nominal = _NETWORK if drafter.networks else _LOOK_UP
            seconds = perf_counter() - started if self._by_clock else nominal
            if tree.size > 1:
                found.append((number, tree))
            self._value[number].seconds.append(seconds)
            spent += seconds
            self.passes += drafter.passes
            self._passes[number] += drafter.passes
        self._pending = list(proposals)
        alone = len(found) == 1 and not any(each.nodes for each in proposals)
        # A tree of drawn nodes stays whole: if they counted as drawn by its size, and so by what was drawn, rules that
        # ask what they were drawn from would be biased.
        if alone and (found[0][1].log_q is not None or found[0][1].size - 1 <= self.nodes):
            tree = self._only_tree(proposals, *found[0])
        else:
            self._add_trees(proposals, found)
            tree = self._merged(committed, proposals)
        self._drafted_at = perf_counter()
        return tree

    def _add_trees(self, proposals: Sequence[Proposal], found: list[tuple[int, TokenTree]]) -> None:
        """Move trees into the proposals."""
        for number, tree in found:
            joints = [None] * len(proposals) if tree.joint is None else tree.joint.tolist()
            rows = zip(proposals, tree.tokens.tolist(), tree.parent.tolist(), joints, strict=True)
            for proposal, tokens, parents, joint in rows:
                proposal.add(number, self._calibrations[number], tokens, parents, joint)
        found.clear()

    def _only_tree(self, proposals: Sequence[Proposal], number: int, tree: TokenTree) -> TokenTree:
        """The tree of the only drafter that has one, as it is."""
        name, source = self.drafters[number].name, []
        for proposal, tokens, parents in zip(proposals, tree.tokens.tolist(), tree.parent.tolist(), strict=True):
            proposal.only = number, tokens, parents
            source.append([name if parent >= 0 else None for parent in parents])
        return replace(tree, source=source)

    def _merged(self, committed: Committed, proposals: Sequence[Proposal]) -> TokenTree:
        """The likeliest nodes of all."""
        best = [each.best(self.nodes) for each in proposals]
        tree = ragged_tree(committed.root, [drafted for drafted, _ in best])
        names = [["+".join(self.drafters[each].name for each in sources) for sources in row] for _, row in best]
        return replace(tree, source=[[None, *row, *[None] * (tree.size - 1 - len(row))] for row in names])

    def _learn(self, committed: Committed) -> None:
        """What became of the last proposals, by the text that has been committed since."""
        for proposal, text in zip(self._pending, committed.texts, strict=True):
            if proposal is None:
                continue
            new = text[proposal.length :]
            for number, claim, first, accepted in proposal.outcomes(new):
                self._calibrations[number].add(claim, first, accepted)
            for number, gained in proposal.gains(new).items():
                self._value[number].add(proposal.expected_before[number], gained)
        self._pending = [None] * len(self._pending)
