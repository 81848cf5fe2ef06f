"""Prompt lookup: propose what followed the latest earlier occurrence of the text's last n tokens."""

from torch import Tensor

from shape.drafters.base import Committed, Drafter
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree, ragged_chain


class NgramDrafter(Drafter):
    """Chains copied from the sequence's own prompt and output (Saxena 2023, "prompt lookup decoding").

    Every n-gram is indexed once, so a step costs time in the number of new tokens, not in the text's length.

    Args:
        depth: longest chain proposed.
        longest: tokens of the first suffix tried.
        shortest: tokens of the last one.
    """

    name = "ngram"
    kept: "list[_SuffixIndex]"

    def __init__(self, depth: int = 8, longest: int = 4, shortest: int = 2) -> None:
        self.depth, self.longest, self.shortest = depth, longest, shortest

    def __str__(self) -> str:
        return f"ngram, {self.depth} tokens behind {self.longest} to {self.shortest} equal ones"

    @property
    def text_sizes(self) -> tuple[int, int]:
        return self.depth, self.depth

    def start(self, committed: Committed, hidden: Tensor) -> None:
        self.kept = [_SuffixIndex(self.shortest, self.longest) for _ in committed.texts]

    def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        drafts = [index.continuation(text, self.depth) for index, text in zip(self.kept, committed.texts, strict=True)]
        return ragged_chain(committed.root, drafts)


class _SuffixIndex:
    """Where each n-gram of a growing text was last continued."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        self.follows: dict[tuple[int, ...], int] = {}
        self.indexed = 0

    def continuation(self, text: list[int], depth: int) -> list[int]:
        # An n-gram is indexed once a token follows it, so the suffix can only match earlier text.
        for end in range(max(self.indexed, 1), len(text)):
            for size in self.sizes:
                if size <= end:
                    self.follows[tuple(text[end - size : end])] = end
        self.indexed = len(text)
        for size in self.sizes:
            found = self.follows.get(tuple(text[-size:])) if size <= len(text) else None
            if found is not None:
                return text[found : found + depth]
        return []
