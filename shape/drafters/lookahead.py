"""Lookahead decoding: the target's own guesses at tokens further ahead, made in every verification."""

from collections import defaultdict
from collections.abc import Sequence
from math import log
from random import Random

from torch import Tensor

from shape.drafters.base import Committed, Drafter
from shape.drafters.growing import Paths
from shape.drafters.proposal import walk
from shape.verification.sampling import Sampler, best
from shape.verification.tree import Drafted, TokenTree, ragged_tree

# Probabilities given to tokens of the pool's n-grams, and of the window.
_GUESSED, _WINDOW = 0.5, 0.01


class LookaheadDrafter(Drafter):
    """Jacobi iteration on tokens to come, whose trajectories are kept as n-grams (Fu et al., arXiv 2402.02057).

    A window of guesses follows the committed text: its first level guesses the next tokens, each further level has the
    target's choices after the level before. As a tree, in which tokens are children of those that they followed, the
    whole window is verified at once, with the pool's n-grams that begin with the root. The choices after the last level
    make each column an n-gram for the pool, and the second level the first. It needs no training and no computation of
    its own; the target verifies more nodes.

    A hybrid whose tree is full drops the window first, as its nodes are unlikely: this drafter works best alone.

    Args:
        window: columns.
        size: tokens of an n-gram; the window has ``size - 1`` levels.
        guesses: n-grams per first token that are kept, the latest, and proposed.
        from_text: put the n-grams of prompt and output into the pool too.
    """

    name = "lookahead"
    kept: "list[_Window]"
    verified_whole = True  # what the target says behind the window's nodes goes on in the next one

    def __init__(self, window: int = 3, size: int = 3, guesses: int = 3, from_text: bool = True) -> None:
        self.window, self.size, self.guesses, self.from_text = window, size, guesses, from_text

    def __str__(self) -> str:
        where = ", from the text too" if self.from_text else ""
        return f"lookahead, {self.window} columns, {self.guesses} guesses of {self.size} tokens{where}"

    def start(self, committed: Committed, hidden: Tensor) -> None:
        self.kept = [_Window(self, len(text)) for text in committed.texts]

    def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        drafts = [window.draft(text) for window, text in zip(self.kept, committed.texts, strict=True)]
        return ragged_tree(committed.root, drafts)

    def inspect(self, tree: TokenTree, logits: Tensor) -> None:
        parts = (part.tolist() for part in (tree.tokens, tree.parent, best(logits.float())))
        for window, tokens, parents, choices in zip(self.kept, *parts, strict=True):
            window.learn(tokens, parents, choices)


class _Window:
    """Window and pool of one sequence.

    The token in column i of level k is ``ahead + i + k`` positions behind the text of the last draft; it follows the
    tokens of the levels above it.
    """

    def __init__(self, owner: LookaheadDrafter, length: int) -> None:
        self.owner, self.length = owner, length
        self.pool: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        self.levels: list[list[int]] = [[]]
        self.ahead = 1
        self.drafted: list[list[int]] = []  # each column's path from the root, as it was drafted
        self._indexed = 0
        self._random = Random(0)  # its own, so that drafts do not depend on the rest of the batch

    def draft(self, text: Sequence[int]) -> Drafted:
        self._advance(text)
        paths = Paths()
        for guess in self.pool.get(text[-1], ()):
            paths.add(guess, log(_GUESSED), _GUESSED)
        spine, self.drafted = 0, []
        for column, token in enumerate(self.levels[0]):
            spine = paths.add([token], log(_WINDOW), parent=spine)
            below = [level[column] for level in self.levels[1:]]
            paths.add(below, log(_WINDOW), _WINDOW, parent=spine)
            self.drafted.append([*self.levels[0][: column + 1], *below])
        return paths.grown

    def learn(self, tokens: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> None:
        """Take the target's choice at every node; columns that are not in the tree begin anew."""
        if not self.drafted:
            return
        number = {pair: node for node, pair in enumerate(zip(parents, tokens, strict=True))}
        walked = [(path, walk(number, path)) for path in self.drafted]
        nodes = [found[-1] if len(found) == len(path) else None for path, found in walked]
        known = [column for column, node in enumerate(nodes) if node is not None]
        self.drafted = []
        self.levels = [[level[column] for column in known] for level in self.levels]
        self.levels.append([choices[node] for node in nodes if node is not None])
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

    def _advance(self, text: Sequence[int]) -> None:
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
