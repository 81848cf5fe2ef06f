"""A predictor's Markov bias as drafting reads it: behind nodes of a tree, out of a table where tokens are few."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shape.drafters.growing import Biases
from shape.drafters.path_state import PathState
from shape.networks.layers import MarkovBias, MarkovTable, RecurrentMarkov, SelectorMarkov, StateMarkov

_EMBEDDED = 4096  # tokens whose embeddings are held at once
_TABLED = 2**24  # biases of tokens by tokens before them that are kept as a table
_ALONG_PATHS = 2**20  # numbers of a matrix that loops read for each node
_CHOSEN_AMONG = 2**26  # the same where they read a few rows for each node; 256 MB in float32
_NOTHING = np.empty((0, 0), np.float32)


class PathBias:
    """What is added to logits behind a node, by its token and, where the bias reads them, by the states of its path.

    Args:
        markov: the predictor's.
        tokens: (K,) int64, those that can be drafted, by whose numbers nodes are known.
        embed: embeddings of tokens, (...) int64 -> (..., H).

    Attributes:
        reduced: (K, rank), what the bias reads of each token.
        table: (K, K) biases behind each token, on the host in float32; None where there are many, or states are read.
        on_host: whether the host's compiled loops can add it.
    """

    @torch.no_grad()
    def __init__(self, markov: MarkovBias | MarkovTable, tokens: Tensor, embed: Callable[[Tensor], Tensor]) -> None:
        self.markov, self.reads_states = markov, isinstance(markov, StateMarkov)
        self.reduced = torch.cat([markov.reduced(some, embed(some)) for some in tokens.split(_EMBEDDED)])
        few = len(tokens) ** 2 <= _TABLED and not self.reads_states
        self.table: Tensor | None = markov(self.reduced) if few else None
        most = {RecurrentMarkov: _ALONG_PATHS, SelectorMarkov: _CHOSEN_AMONG}
        room = next((size for kind, size in most.items() if isinstance(markov, kind)), 0)
        small = self.reduced.numel() <= room and self.reduced.device.type == "cpu"
        self.on_host = small or not self.reads_states
        self._tabled: Biases | None = None
        if small:
            self._of_states, self._offset, weights = _by_input(markov)
            self._weights = [one.float().contiguous().numpy() for one in (self.reduced, *weights)]
        if self.table is not None and self.table.device.type == "cpu":  # numpy has no smaller floats
            self.table = self.table.float()
            self._tabled = Biases(self.table.numpy(), True)

    @property
    def in_loops(self) -> bool:
        """Whether the host's loops make all of it, without a call in between."""
        return self.table is not None or (self.reads_states and self.on_host)

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

    def for_loops(
        self, numbers: np.ndarray, root: Tensor, embedding: Tensor, states: Tensor
    ) -> tuple[Biases, Biases | Callable[[np.ndarray], Biases]]:
        """For the host's loops, behind the roots and behind all other nodes.

        Args:
            numbers, root: (B,), of the roots among what can be drafted, negative for those that are not, and in the
                target's vocabulary. embedding: (B, 1, H), theirs.
            states: (B, depth, H), those whose logits are biased.
        """
        if self.reads_states:
            found = self._along_paths(root, embedding, states)
            return found, found
        tabled = self._tabled
        if tabled is not None and min(numbers.tolist()) >= 0:
            return tabled, tabled
        first = self._rows(self.markov(self.markov.reduced(root[:, None], embedding)))
        if tabled is not None:
            return first, tabled
        return first, lambda numbers: self._rows(self.markov(self.behind(torch.from_numpy(numbers))))

    def _along_paths(self, root: Tensor, embedding: Tensor, states: Tensor) -> Biases:
        by_state = F.linear(states.to(self._of_states.dtype), self._of_states, self._offset)
        roots = self.markov.reduced(root[:, None], embedding)[:, 0]
        tokens, *weights = self._weights
        path = PathState(roots.float().numpy(), tokens, by_state.float().numpy(), *weights)
        return Biases(_NOTHING, True, path=path)

    def _rows(self, found: Tensor) -> Biases:
        """Biases (B, M, K) for the host's loops."""
        return Biases(found.float().flatten(0, 1).numpy(), False)


def _by_input(markov: MarkovBias | MarkovTable) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """What reads the states, its offset, and the other weights of a ``PathState``."""
    if isinstance(markov, SelectorMarkov):
        return markov.hidden_projection.weight, None, [markov.expansion.weight, torch.empty(0, 0)]
    assert isinstance(markov, RecurrentMarkov)
    joint, expand = markov.joint_proj, markov.expansion.weight
    rank = expand.shape[1]
    return joint.weight[:, 2 * rank :].clone(), joint.bias, [expand.T, joint.weight[:, : 2 * rank].T]
