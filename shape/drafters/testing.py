"""Two drafters that exist for testing: they drive every path of the loop without trained weights."""

import torch
from torch import Tensor

from shape.drafters.base import Committed, Drafter
from shape.target.model import Target
from shape.verification.noise import mix
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree, ragged_chain


class OracleDrafter(Drafter):
    """Proposes the true continuation as a chain, each token corrupted with a given probability.

    Tests the accounting: with error rate e and depth D the expected acceptance length is
    (1 - (1 - e)^(D + 1)) / e.

    Args:
        texts: the full true text per row (prompt and continuation), as autoregressive decoding gives it.
        error_rate: probability that a proposed token is replaced by another one.
        depth: length of the chain.
        seed: of the corruption.
    """

    name = "oracle"
    kept: list[int]  # which text is its own

    def __init__(self, texts: list[list[int]], error_rate: float = 0.0, depth: int = 4, seed: int = 0) -> None:
        self.texts, self.error_rate, self.depth, self.seed = texts, error_rate, depth, seed

    def bind(self, target: Target) -> None:
        self._vocab_size = target.vocab_size

    def why_not_fixed(self, target: Target) -> None:
        return None

    def start(self, committed: Committed, hidden: Tensor) -> None:
        self.kept = [self._row_of(row, text) for row, text in enumerate(committed.texts)]
        self.drafts = [self._corrupted(row, text) for row, text in enumerate(self.texts)]

    def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        drafts = zip(self.kept, map(len, committed.texts), strict=True)
        return ragged_chain(committed.root, [self.drafts[row][start : start + self.depth] for row, start in drafts])

    def _row_of(self, row: int, text: list[int]) -> int:
        """The text that begins so: sequences may be decoded in groups."""
        begins = [number for number, whole in enumerate(self.texts) if whole[: len(text)] == text]
        return row if row in begins or not begins else begins[0]

    def _corrupted(self, row: int, text: list[int]) -> list[int]:
        positions = torch.arange(len(text))
        uniform = mix(mix(positions + 1) + row + (self.seed << 20)).to(torch.float64) / 2.0**64 + 0.5
        return [
            (token + 1) % self._vocab_size if wrong else token
            for token, wrong in zip(text, (uniform < self.error_rate).tolist(), strict=True)
        ]


class AdversaryDrafter(Drafter):
    """Random trees with duplicate siblings, dead ends, padding nodes and candidates taken from the noise.

    No lossless rule may let any of this show in the output.

    Args:
        nodes: drafted nodes per tree.
        seed: of the trees.
        chains_only: propose unbranched trees.
    """

    name = "adversary"

    def __init__(self, nodes: int = 9, seed: int = 0, chains_only: bool = False) -> None:
        self.nodes, self.chains_only = nodes, chains_only
        self._generator = torch.Generator().manual_seed(seed)

    def bind(self, target: Target) -> None:
        self._vocab_size = target.vocab_size

    def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        batch, generator = len(committed.texts), self._generator
        index = torch.arange(self.nodes + 1)
        if self.chains_only:
            parent = (index - 1).expand(batch, -1).clone()
        else:
            uniform = torch.rand(batch, self.nodes + 1, generator=generator)
            parent = (uniform * index).long().minimum(index - 1)
            # Some nodes hang on nothing; their children are dead ends.
            orphan = torch.rand(batch, self.nodes + 1, generator=generator) < 0.1
            parent = parent.masked_fill(orphan, -1)
        parent[:, 0] = -1
        tokens = self._tokens(committed, sampler, generator)
        # Duplicates: every third node repeats the token before it.
        tokens[:, 3::3] = tokens[:, 2:-1:3]
        tokens[:, 0] = committed.root.cpu()
        return TokenTree(tokens.to(committed.root.device), parent.to(committed.root.device))

    def _tokens(self, committed: Committed, sampler: Sampler, generator: torch.Generator) -> Tensor:
        batch = len(committed.texts)
        tokens = torch.randint(self._vocab_size, (batch, self.nodes + 1), generator=generator)
        if not sampler.greedy:
            # The likeliest winners of the noise alone: a rule that leaks g into acceptance shows it here.
            favourites = sampler.noise(0, self._vocab_size).topk(2, dim=1).indices.cpu()
            tokens[:, 1:3] = favourites[:, : min(2, self.nodes)]
        return tokens
