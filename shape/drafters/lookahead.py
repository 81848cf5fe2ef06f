"""Lookahead decoding: the target's own guesses at tokens further ahead, got along with every verification."""

from collections import defaultdict
from collections.abc import Sequence
from math import log
from random import Random

from torch import Tensor

from shape.drafters.base import Committed, Drafter
from shape.drafters.growing import Paths
from shape.verification.sampling import Sampler, best
from shape.verification.tree import Drafted, TokenTree, ragged_tree

# First estimates of a guess's tokens, and of tokens that are there to be asked about.
_GUESSED, _ASKED = 0.5, 0.01


class LookaheadDrafter(Drafter):
    """Jacobi iteration on tokens to come, whose trajectories are kept as n-grams (Fu et al., arXiv 2402.02057).

    A window of guesses stands behind the committed text: its first level is what the next tokens may be, every further
    level what the target then said to come after. All of it is a tree, in which a level's tokens hang on the ones that
    they followed, so that one verification asks the target about the whole window and about n-grams from the pool that
    begin with the root. What it says behind the last level makes each column an n-gram for the pool, and the second
    level the first. Nothing is trained and nothing is computed here; the target pays for more nodes.

    In a hybrid, nodes that are unlikely to stand go first, and with them the window: alone it does what it can.

    Args:
        window: columns.
        size: tokens of an n-gram; the window has ``size - 1`` levels.
        guesses: n-grams per first token that are kept, the latest, and proposed.
        from_text: put the n-grams of prompt and output into the pool too.
    """

    name = "lookahead"

    def __init__(self, window: int = 3, size: int = 3, guesses: int = 3, from_text: bool = True) -> None:
        self.window, self.size, self.guesses, self.from_text = window, size, guesses, from_text

    def __str__(self) -> str:
        where = ", from the text too" if self.from_text else ""
        return f"lookahead, {self.window} columns, {self.guesses} guesses of {self.size} tokens{where}"

    def start(self, committed: Committed, hidden: Tensor) -> None:
        self._rows = [_Row(self, len(text)) for text in committed.texts]

    def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        drafts = [row.draft(text) for row, text in zip(self._rows, committed.texts, strict=True)]
        return ragged_tree(committed.root, drafts)

    def inspect(self, tree: TokenTree, logits: Tensor) -> None:
        parts = (part.tolist() for part in (tree.tokens, tree.parent, best(logits.float())))
        for row, tokens, parents, said in zip(self._rows, *parts, strict=True):
            row.learn(tokens, parents, said)

    def select(self, rows: Tensor) -> None:
        self._rows = [self._rows[row] for row in rows.tolist()]


class _Row:
    """Window and pool of one row.

    The token in column i of level k stands ``ahead + i + k`` places behind the text as it was at the last draft; it was
    said to follow the tokens of the levels above it.
    """

    def __init__(self, owner: LookaheadDrafter, length: int) -> None:
        self.owner, self.length = owner, length
        self.pool: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        self.levels: list[list[int]] = [[]]
        self.ahead = 1
        self.asked: list[list[int]] = []  # each column's path from the root, as it was drafted
        self._indexed = 0
        self._random = Random(0)  # a row's drafts do not depend on who shares the batch

    def draft(self, text: Sequence[int]) -> Drafted:
        self._settle(text)
        paths = Paths()
        for guess in self.pool.get(text[-1], ()):
            paths.add(guess, log(_GUESSED), _GUESSED)
        spine, self.asked = 0, []
        for column, token in enumerate(self.levels[0]):
            spine = paths.add([token], log(_ASKED), parent=spine)
            below = [level[column] for level in self.levels[1:]]
            paths.add(below, log(_ASKED), _ASKED, parent=spine)
            self.asked.append([*self.levels[0][: column + 1], *below])
        return paths.grown

    def learn(self, tokens: Sequence[int], parents: Sequence[int], said: Sequence[int]) -> None:
        """What the target says behind every node; columns that are not in the tree begin anew."""
        if not self.asked:
            return
        number = {pair: node for node, pair in enumerate(zip(parents, tokens, strict=True))}
        nodes = []
        for path in self.asked:
            node: int | None = 0
            for token in path:
                node = None if node is None else number.get((node, token))
            nodes.append(node)
        known = [column for column, node in enumerate(nodes) if node is not None]
        self.asked = []
        self.levels = [[level[column] for column in known] for level in self.levels]
        self.levels.append([said[node] for node in nodes if node is not None])
        if len(self.levels) < self.owner.size:
            return
        for gram in zip(*self.levels, strict=True):
            self._keep(gram)
        del self.levels[0]
        self.ahead += 1

    def _keep(self, gram: tuple[int, ...]) -> None:
        """Into the pool, as the latest of its first token."""
        known, following = self.pool[gram[0]], gram[1:]
        if following in known:
            known.remove(following)
        known.insert(0, following)
        del known[self.owner.guesses :]

    def _settle(self, text: Sequence[int]) -> None:
        """Move the window to behind the text, and fill it up."""
        size = self.owner.size
        if self.owner.from_text:
            for end in range(max(self._indexed, size - 1), len(text)):
                self._keep(tuple(text[end - size + 1 : end + 1]))
            self._indexed = len(text)
        self.ahead -= len(text) - self.length
        self.length = len(text)
        passed = max(1 - self.ahead, 0)
        self.ahead = max(self.ahead, 1)
        for level in self.levels:
            del level[:passed]
            level.extend(self._random.choice(text) for _ in range(self.owner.window - len(level)))
