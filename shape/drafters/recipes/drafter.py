"""Drafting from a recipe pack: a look-up by the last tokens, or by their shape."""

from collections import defaultdict
from collections.abc import Sequence
from math import log
from pathlib import Path

from torch import Tensor

from shape.drafters.base import Committed, Drafter
from shape.drafters.growing import Paths
from shape.drafters.recipes.misses import miss_of, open_log, write_misses
from shape.drafters.recipes.pack import CONTINUATIONS, Counts, Pack, Recipe
from shape.target.model import Target
from shape.verification.sampling import Sampler
from shape.verification.tree import Drafted, TokenTree, ragged_tree


class RecipeDrafter(Drafter):
    """Looks up what follows the last tokens: as they are, or else by their shape.

    The shape of a prefix is the kinds of its tokens (word, number, space, and each mark by itself) but for the last
    one, which is taken literally: what follows a price in one record follows it in the next, if it did so more than
    once. Misses are logged, with what the target wrote instead, for the next compile or merge
    (``Miss``): look-ups that found nothing, and continuations that were found and then
    refused, from where they went wrong.

    Args:
        pack: the recipes.
        nodes: drafted nodes at most.
        misses: file that they are added to; None keeps none.
    """

    name = "recipes"
    kept: list[tuple[int, list[Recipe]]]  # length of the text at the last look-up, and what that found

    def __init__(self, pack: Pack, nodes: int = 12, misses: str | Path | None = None) -> None:
        self.pack, self.nodes = pack, nodes
        self.misses = None if misses is None else Path(misses)

    def __str__(self) -> str:
        return f"recipes, {self.nodes} nodes, pack {self.pack.hash[:8]}"

    @property
    def text_sizes(self) -> tuple[int, int]:
        return self.nodes, self.nodes

    def forget_misses(self) -> None:
        self.misses = None

    def bind(self, target: Target) -> None:
        self.pack.require(target)
        if self.misses is not None:
            open_log(self.misses)
        self._prefix = self.pack.prefix
        self._kinds = kinds_of_tokens(target)
        self._literal: dict[tuple[int, ...], list[Recipe]] = defaultdict(list)
        shaped = Counts()
        for recipe in self.pack.recipes:  # the most frequent first
            self._literal[recipe.prefix].append(recipe)
            shaped[self._shape(recipe.prefix), recipe.tokens] += recipe.times
        self._shaped: dict[tuple[int, ...], list[Recipe]] = defaultdict(list)
        for (shape, tokens), times in shaped.most_common():
            if times > 1 and len(known := self._shaped[shape]) < CONTINUATIONS:
                known.append(Recipe(shape, tokens, times))

    def start(self, committed: Committed, hidden: Tensor) -> None:
        self.kept = [(len(text), []) for text in committed.texts]

    def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        if self.misses is not None:
            self._log(committed.texts, self.misses)
        self.kept = [(len(text), self.lookup(text[-self._prefix :])) for text in committed.texts]
        return ragged_tree(committed.root, [self._grown(recipes) for _, recipes in self.kept])

    def lookup(self, prefix: Sequence[int]) -> list[Recipe]:
        """Recipes for the last tokens of a text, the most frequent first."""
        if len(prefix) < self._prefix:
            return []
        literal = self._literal.get(tuple(prefix))
        return literal or self._shaped.get(self._shape(prefix)) or []

    def _shape(self, prefix: Sequence[int]) -> tuple[int, ...]:
        return (*(self._kinds[token] for token in prefix[:-1]), prefix[-1])

    def _grown(self, recipes: Sequence[Recipe]) -> Drafted:
        """Their tokens as one tree, each likely by the share of what followed here."""
        total = sum(recipe.times for recipe in recipes) + 1
        paths = Paths(self.nodes)
        for recipe in recipes:
            paths.add(recipe.tokens, log(recipe.times / total))
        return paths.grown

    def _log(self, texts: Sequence[Sequence[int]], file: Path) -> None:
        misses = []
        for text, (start, recipes) in zip(texts, self.kept, strict=True):
            miss = miss_of(text, start, [recipe.tokens for recipe in recipes], self._prefix)
            misses += [] if miss is None else [miss]
        write_misses(file, misses)


def kinds_of_tokens(target: Target) -> list[int]:
    """The kind of every token: a number for words, one for numbers, one for space, and one for each mark."""
    if target.tokenizer is None:
        return list(range(target.vocab_size))
    names: dict[str, int] = {}

    def kind(token: int) -> int:
        text = target.tokenizer.decode([token])
        bare = text.strip()
        name = "space" if not bare else "word" if bare.isalpha() else "number" if bare.isdecimal() else text
        return names.setdefault(name, len(names))

    return [kind(token) for token in range(target.vocab_size)]
