"""Acceptance rules by name: how each decides, and what it needs of drafter and target. ``RULES`` lists them all."""

from abc import ABCMeta, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import ClassVar

from torch import Tensor

from shape.drafters import Drafter, TreeShape
from shape.errors import UnsupportedGeneration
from shape.generation.options import TrsParameters, TypicalParameters
from shape.target.model import Target
from shape.verification.acceptance import Accepted, at_nodes, trs_lossy, typical_lossy, unverified_lossy
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree


@dataclass(frozen=True)
class Rule(metaclass=ABCMeta):
    """Which drafted tokens are accepted. Subclasses are frozen dataclasses of the rule's parameters.

    Attributes:
        name: how the rule is asked for, and how stats call it; lossy ones say so.
        lossless: whether the output has the target's distribution.
        coupled, one_drawn: whether drafts see the target's own noise, and of those that do not, whether one child of a
            node alone is drawn (see ``Sampler``).
        same_for_every_draft: whether samples do not depend on what is drafted, if anything is.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = True
    coupled: ClassVar[bool] = True
    one_drawn: ClassVar[bool] = False
    same_for_every_draft: ClassVar[bool] = False

    def fit(self, drafter: Drafter | None, target: Target) -> Drafter | None:
        """The drafter with the trees that this rule needs.

        Raises:
            UnsupportedGeneration: drafter or target cannot serve the rule.
        """
        return drafter

    @abstractmethod
    def __call__(self, tree: TokenTree, logits: Tensor, sampler: Sampler) -> Accepted:
        """Decide over a tree, with the target's logits (B, N, V) at its nodes."""

    def __str__(self) -> str:
        parameters = ", ".join(f"{one.name}={getattr(self, one.name)}" for one in fields(self))  # type: ignore[arg-type]
        return f"{self.name}({parameters})" if parameters else self.name


@dataclass(frozen=True)
class Match(Rule):
    """Tokens are accepted while they are the target's own choice."""

    name = "match"
    same_for_every_draft = True

    def __call__(self, tree: TokenTree, logits: Tensor, sampler: Sampler) -> Accepted:
        return sampler.match(logits, tree)


@dataclass(frozen=True)
class Rejection(Rule):
    """Rejection sampling from the root down, in several rounds without replacement; greedy it is "match"."""

    name = "rejection"
    coupled = False

    def fit(self, drafter: Drafter | None, target: Target) -> Drafter | None:
        if drafter is not None and drafter.drops_drawn_nodes:
            raise UnsupportedGeneration(
                f"acceptance {self.name!r} is biased where drawn nodes are dropped again; give a tree without a "
                "limit of nodes (--tree.nodes null), or use 'match'"
            )
        return drafter

    def __call__(self, tree: TokenTree, logits: Tensor, sampler: Sampler) -> Accepted:
        return sampler.match(logits, tree)  # its choice is made by rejection sampling


@dataclass(frozen=True)
class Traversal(Rejection):
    """Rejection sampling of whole paths, from the leaves to the root; greedy it is "match"."""

    name = "traversal"

    def __call__(self, tree: TokenTree, logits: Tensor, sampler: Sampler) -> Accepted:
        return sampler.match(logits, tree) if sampler.greedy else sampler.traverse(logits, tree)


@dataclass(frozen=True)
class Transport(Rejection):
    """The optimal transport from one drawn child and the likeliest ones to the target's token (see ``reject_in_turn``).

    Greedy it is "match". Drafters that draw otherwise are asked as by "rejection".
    """

    name = "transport"
    one_drawn = True

    def fit(self, drafter: Drafter | None, target: Target) -> Drafter | None:
        return drafter if drafter is not None and drafter.draws_one_child else super().fit(drafter, target)


@dataclass(frozen=True)
class TypicalLossy(TypicalParameters, Rule):
    """Medusa's typical acceptance; lossy when sampling, while greedy it is "match", as in its paper."""

    name = "typical-lossy"
    lossless = False

    def __call__(self, tree: TokenTree, logits: Tensor, sampler: Sampler) -> Accepted:
        if sampler.greedy:
            return sampler.match(logits, tree)
        scores = sampler.tree_scores(logits, tree)
        return typical_lossy(tree, scores.softmax(-1), sampler.pick(scores, tree), self.epsilon, self.delta)


@dataclass(frozen=True)
class TrsLossy(TrsParameters, Rule):
    """The paper's tree rejection sampling; lossy, greedy or not."""

    name = "trs-lossy"
    lossless = False

    def fit(self, drafter: Drafter | None, target: Target) -> Drafter | None:
        full = None if drafter is None else drafter.with_tree(TreeShape.full(self.k, self.depth))
        if full is None:
            raise UnsupportedGeneration("acceptance 'trs-lossy' needs the k^N trees of a SHAPE predictor; give one")
        if target.support is not None and target.support.mode == "chain":
            raise UnsupportedGeneration(
                f"acceptance 'trs-lossy' needs trees, and target {target.name} verifies chains only"
            )
        return full

    def __call__(self, tree: TokenTree, logits: Tensor, sampler: Sampler) -> Accepted:
        log_p = at_nodes(tree, sampler.tree_scores(logits, tree).log_softmax(-1))
        return trs_lossy(tree, log_p, sampler.choose_roots(logits, tree), self.threshold)


@dataclass(frozen=True)
class UnverifiedLossy(Rule):
    """The drafter alone, without the target's verification; lossy, greedy or not.

    The target still computes the states that predictors read, and keeps to what the request bans. Drafters whose trees
    have a shape draft chains, since nothing would choose between paths.
    """

    name = "unverified-lossy"
    lossless = False

    def fit(self, drafter: Drafter | None, target: Target) -> Drafter | None:
        if drafter is None:
            raise UnsupportedGeneration(f"acceptance {self.name!r} is the drafter alone, and there is none; give one")
        return drafter if drafter.tree is None else drafter.with_tree(TreeShape(drafter.tree.depth, 1)) or drafter

    def __call__(self, tree: TokenTree, logits: Tensor, sampler: Sampler) -> Accepted:
        # By probabilities: of the -inf of what is banned remove_invalid_values makes the least number.
        possible = at_nodes(tree, sampler.tree_scores(logits, tree).softmax(-1)) > 0
        return unverified_lossy(tree, possible, sampler.choose_roots(logits, tree))


_ALL = (Match, Rejection, Traversal, Transport, TypicalLossy, TrsLossy, UnverifiedLossy)
RULES: dict[str, type[Rule]] = {rule.name: rule for rule in _ALL}


def make_rule(acceptance: str | Rule, *parameters: TypicalParameters | TrsParameters) -> Rule:
    """A rule by name, with its parameters among those given, or else with its default ones.

    Raises:
        UnsupportedGeneration: no rule of that name.
    """
    if isinstance(acceptance, Rule):
        return acceptance
    if not isinstance(acceptance, str) or acceptance not in RULES:
        raise UnsupportedGeneration(f"acceptance rule {acceptance!r} is unknown; use one of {', '.join(RULES)}")
    rule = RULES[acceptance]
    return next((rule(**asdict(each)) for each in parameters if issubclass(rule, type(each))), None) or rule()
