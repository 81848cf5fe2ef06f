"""Whether the next step drafts, and how much of its draft is verified: the cost model of ``shape.drafters.cost``,
measured while decoding on this text.
"""

from collections import deque
from collections.abc import Sequence
from functools import cache
from math import sqrt

import numpy as np
import torch

from shape.drafters.calibration import PathChances
from shape.drafters.cost import RecentTimes, VerificationTimes
from shape.generation.stats import Step
from shape.verification.compiled import compiled, runs_on_host
from shape.verification.tree import TokenTree, keep_best

# Where the clock must not decide, the acceptance length at which a drafted step is taken to be worth its time: a tree
# costs 1.1 to 1.3 single tokens of a target whose weights exceed the caches, and its draft 0.1 (``python -m
# eval.forwards``). Beside the 12M target that ships a drafted step costs 2.6 to 2.8 of them (eval/results/efficiency).
FIXED_BREAK_EVEN = 1.4


class SpeculationControl:
    """Decides before each step whether it drafts, by what drafting has brought in this call, and which nodes of a draft
    are verified, by their chances and what a node costs.

    Speculation pays while a drafted step commits more tokens per second than autoregressive ones would, so acceptance
    is compared with the break-even: seconds of a drafted step over seconds of an autoregressive one, both as measured
    while decoding, behind as much context. Below it autoregressive steps follow, after few drafted ones where that is
    clear; then a few drafted ones probe whether the text has become easier, and each probe in vain doubles the wait for
    the next. Where the chances of a draft's nodes are known, a step counts as the mean of the tokens that it
    committed and those that were expected, which predicts the next steps better while few have been seen.

    Args:
        costs: of steps in earlier calls.
        least: acceptance length below which drafting pauses; None measures the break-even.
    """

    _WINDOW = 16  # drafted steps that are judged together
    # (drafted steps, least standard deviation): after so many of them drafting pauses where their mean lies a standard
    # error below the break-even. The deviation has a floor, since a few steps may happen to be equal. _EXPECTED holds
    # where the draft's expected tokens were known.
    _COUNTED, _EXPECTED = (3, 1.0), (2, 0.4)
    _PAUSE, _LONGEST_PAUSE = 16, 512  # autoregressive steps
    _MEASURED = 3  # autoregressive steps that tell what one costs, where that is not known yet

    def __init__(self, costs: "StepCosts", least: float | None = None) -> None:
        self._costs, self._least = costs, least
        self._recent: deque[float] = deque(maxlen=self._WINDOW)
        self._waiting = costs.left if costs.pause == self._LONGEST_PAUSE else 0  # autoregressive steps to come
        # The next step's draft and the tokens that are to be expected, where the chances of its nodes are known.
        self._verified: tuple[TokenTree, float] | None = None
        self._few = self._COUNTED
        self.pauses = 0

    def draft_next(self, context: int) -> bool:
        """Whether the next step drafts, behind so many tokens of the longest sequence."""
        if self._waiting > 0:
            return False
        count, (few, deviation) = len(self._recent), self._few
        if count < few:
            return True
        least = self._least
        if least is None:
            if self._costs.unmeasured(context, drafted=True):
                return True
            if self._costs.unmeasured(context, drafted=False):
                self._waiting = self._MEASURED
                return False
            least = self._costs.break_even(context)
        mean = sum(self._recent) / count
        if mean >= least:
            self._costs.pause = None
            return True
        if count < self._WINDOW:  # what has come of a few may be chance
            squares = sum((one - mean) ** 2 for one in self._recent)
            if mean + max(sqrt(squares / (count - 1)), deviation) / sqrt(count) >= least:
                return True
        self._recent.clear()
        pause = self._costs.pause
        self._waiting = self._PAUSE if pause is None else min(2 * pause, self._LONGEST_PAUSE)
        self._costs.pause = self._costs.left = self._waiting
        self.pauses += 1
        return False

    def worthwhile(self, tree: TokenTree, context: int) -> TokenTree:
        """The nodes of a draft that are likely enough to be worth the time that they add to verification, the likeliest
        one at least. Trees stay whole where a node's chances are not known or a rule wants what was drawn, and on a
        device, where many nodes cost little more than one.

        Args:
            context: tokens of the longest sequence.
        """
        self._verified = None
        unknown = tree.joint is None or tree.log_q is not None or tree.size == 1
        if self._least is not None or unknown or not runs_on_host(tree.parent):
            return tree
        chances = self._costs.chances(tree)
        nodes, expected = _worthwhile(chances, self._costs.least_chance(context))
        kept = tree if nodes >= tree.size else keep_best(tree, nodes, chances)
        self._verified = kept, expected
        return kept

    def observe(self, step: Step, tokens: float, seconds: float, accepted: Sequence[Sequence[int]] = ()) -> None:
        """A step that committed `tokens` per sequence, and which nodes of each one's draft were accepted, where that is
        known. A drafter without a proposal costs nothing, and is not judged by it.
        """
        drafted, context = step.nodes > 1, max(step.lengths)
        known, self._verified = self._verified, None
        self._costs.add(drafted, seconds, context)
        self._costs.add_verification(step.nodes, step.verify, context)
        if drafted:
            self._costs.add_draft(tokens, seconds)
            self._few = self._COUNTED
            if known is not None and accepted:
                tree, expected = known
                self._costs.chances.add(tree, accepted)
                tokens, self._few = (tokens + expected) / 2, self._EXPECTED
            self._recent.append(tokens)
        elif self._waiting > 0:
            self._waiting -= 1
            self._costs.left -= 1


@cache
def compile_loops() -> None:
    """Run the loops that only some steps need, on trees that lie in memory as drafters leave them: compilation must not
    be counted in a step's time, on which this module's decisions rest.
    """
    chances = PathChances()
    for columns in (3, 5):  # as a whole, and as a part
        tokens, parents = torch.zeros(2, columns, dtype=torch.long), torch.arange(-1, columns - 1).repeat(2, 1)
        joint = torch.zeros(2, columns)
        tree = TokenTree(tokens[:, :3], parents[:, :3], joint=joint[:, :3])
        by = chances(tree)
        _worthwhile(by, 0.0)
        keep_best(tree, 2, by)
        chances.add(tree, [[1], [1]])


@compiled
def _worthwhile(joint: np.ndarray, least: float) -> tuple[int, float]:
    """How many nodes to keep, with the root, of trees whose nodes have joint log-probabilities (B, N): ranks whose
    chances are at least so large in the mean over the trees. And how many tokens a step is expected to commit by them.
    """
    chances = np.zeros(joint.shape[1] - 1)
    for row in joint:
        ranked = np.exp(row[1:])
        for at in range(1, len(ranked)):  # numpy's sort takes a second to compile
            place, chance = at, ranked[at]
            while place > 0 and ranked[place - 1] < chance:
                ranked[place] = ranked[place - 1]
                place -= 1
            ranked[place] = chance
        chances += ranked
    chances /= len(joint)
    kept = 1
    while kept < len(chances) and chances[kept] >= least:
        kept += 1
    nodes = kept + 2 - kept % 2  # an even number, as kernels take tokens in pairs: the other one is for free
    return nodes, 1.0 + chances[: nodes - 1].sum()


class StepCosts:
    """What steps took by context length, and what drafts brought, kept over the calls of a decoder. Lengths between two
    powers of two count as one, as do all short ones.

    Attributes:
        pause: autoregressive steps of the last pause; None where drafting paid last.
        left: steps of that pause still to come. A new call waits for them only after the longest pause: so many failed
            probes say something about more than one text.
        chances: of drafted nodes.
    """

    _KEPT, _ENOUGH = 16, 3
    _SHORT = 128  # tokens of context, below which it makes no difference
    _TRUSTED = 512  # drafted steps, after which autoregressive ones are measured anew
    _MEMORY = 0.95  # of what drafts brought, per drafted step

    def __init__(self) -> None:
        self.pause: int | None = None
        self.left = 0
        self.chances = PathChances()
        self._times: dict[tuple[int, bool], RecentTimes] = {}
        self._drafted_since: dict[int, int] = {}  # the last autoregressive step, by context length
        self._verifications: dict[int, VerificationTimes] = {}
        self._tokens = self._seconds = 0.0  # of drafted steps

    def add(self, drafted: bool, seconds: float, context: int) -> None:
        length_class = self._length_class(context)
        since = self._drafted_since.get(length_class, 0)
        if not drafted and since >= self._TRUSTED:
            self._times.pop((length_class, False), None)
        self._drafted_since[length_class] = since + 1 if drafted else 0
        self._times.setdefault((length_class, drafted), RecentTimes(kept=self._KEPT)).append(seconds)

    def add_verification(self, nodes: int, seconds: float, context: int) -> None:
        self._verifications.setdefault(self._length_class(context), VerificationTimes()).add(nodes, seconds)

    def add_draft(self, tokens: float, seconds: float) -> None:
        """A drafted step that committed so many tokens."""
        self._tokens = self._MEMORY * self._tokens + tokens
        self._seconds = self._MEMORY * self._seconds + seconds

    def least_chance(self, context: int) -> float:
        """Chance of being accepted from which on verifying a node makes more tokens per second: in the time that it
        adds drafted steps commit as many tokens (Dinkelbach 1967). 0 until that is known.
        """
        times = self._verifications.get(self._length_class(context))
        if times is None or times.line is None or self._seconds == 0:
            return 0.0
        _, node = times.line
        return self._tokens / self._seconds * node

    def unmeasured(self, context: int, drafted: bool) -> bool:
        """Whether too few steps of this kind have been measured, or autoregressive ones too long ago."""
        length_class = self._length_class(context)
        stale = not drafted and self._drafted_since.get(length_class, 0) >= self._TRUSTED
        return stale or len(self._times.get((length_class, drafted), ())) < self._ENOUGH

    def break_even(self, context: int) -> float:
        """Tokens that a drafted step has to commit to be worth its time, where both kinds are known."""
        length_class = self._length_class(context)
        known = (self._times.get((length_class, each)) for each in (True, False))
        drafted, autoregressive = (None if times is None else times.median for times in known)
        if drafted is None or autoregressive is None:  # another thread begins to measure anew
            return 1.0
        return drafted / autoregressive

    def _length_class(self, context: int) -> int:
        return max(context, self._SHORT).bit_length()
