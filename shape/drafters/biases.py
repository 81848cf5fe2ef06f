"""A predictor's Markov bias as drafting reads it: behind nodes of a tree, out of a table where tokens are few."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shape.drafters.growing import Biases
from shape.networks.layers import MarkovBias, MarkovTable, StateMarkov

_EMBEDDED = 4096  # tokens whose embeddings are held at once
_TABLED = 2**24  # biases of tokens by tokens before them that are kept as a table


class PathBias:
    """What is added to logits behind a node, by its token and, where the bias reads them, by the states of its path.

    Args:
        markov: the predictor's.
        tokens: (K,) int64, those that can be drafted, by whose numbers nodes are known.
        embed: embeddings of tokens, (...) int64 -> (..., H).

    Attributes:
        reduced: (K, rank), what the bias reads of each token.
        table: (K, K) biases behind each token, on the host in float32; None where there are many, or states are read.
    """

    @torch.no_grad()
    def __init__(self, markov: MarkovBias | MarkovTable, tokens: Tensor, embed: Callable[[Tensor], Tensor]) -> None:
        self.markov, self.reads_states = markov, isinstance(markov, StateMarkov)
        self.reduced = torch.cat([markov.reduced(some, embed(some)) for some in tokens.split(_EMBEDDED)])
        few = len(tokens) ** 2 <= _TABLED and not self.reads_states
        self.table: Tensor | None = markov(self.reduced) if few else None
        self._tabled: Biases | None = None
        if self.table is not None and self.table.device.type == "cpu":  # numpy has no smaller floats
            self.table = self.table.float()
            self._tabled = Biases(self.table.numpy(), True)

    def behind_roots(self, root: Tensor, embedding: Tensor) -> Tensor:
        """What ``__call__`` reads at roots (B, 1) with embeddings (B, 1, H)."""
        found = self.markov.reduced(root, embedding)
        return found if self.table is None else self.markov(found)

    def behind(self, numbers: Tensor) -> Tensor:
        """What ``__call__`` reads at nodes (B, M), by the numbers of their tokens."""
        return F.embedding(numbers, self.reduced if self.table is None else self.table)

    def __call__(self, read: Tensor, states: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Biases (B, M, K), and what their paths carry on, which some biases read at the next step, (B, M, rank).

        Args:
            states: (B, M or 1, H), those whose logits are biased.
        """
        if self.table is not None:
            return read, None
        if isinstance(self.markov, StateMarkov):
            read, carried = self.markov.step(read, states, carried)
        return self.markov(read), carried

    def on_host(self, found: Tensor) -> Biases:
        """Biases (B, M, K) for the host's loops."""
        return Biases(found.float().flatten(0, 1).numpy(), False)

    def first_on_host(self, numbers: np.ndarray, root: Tensor, embedding: Tensor) -> Biases:
        """Behind the roots (B,) with embeddings (B, 1, H), whose numbers are negative where they cannot be drafted."""
        if self._tabled is not None and min(numbers.tolist()) >= 0:
            return self._tabled
        return self.on_host(self.markov(self.markov.reduced(root[:, None], embedding)))

    def later_on_host(self) -> Biases | Callable[[np.ndarray], Biases]:
        """Behind all other nodes."""
        if self._tabled is not None:
            return self._tabled
        return lambda numbers: self.on_host(self.markov(self.behind(torch.from_numpy(numbers))))
