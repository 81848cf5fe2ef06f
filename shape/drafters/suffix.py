"""Trees of what followed earlier occurrences of the text's last tokens, found by a suffix automaton."""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from heapq import merge
from itertools import islice
from math import exp, log

import torch
from torch import Tensor

from shape.drafters.base import Committed, Drafter
from shape.drafters.growing import grow
from shape.verification.sampling import Sampler
from shape.verification.tree import Drafted, TokenTree, ragged_tree

_COUNTED = 16  # contexts of a new token, the longest first, whose occurrences are counted
_BLENDED = 4  # contexts that a prediction looks at
_BREAK = -1  # no token: between texts of a corpus

Place = tuple[int, int]  # a state and how many tokens back it matches


class SuffixDrafter(Drafter):
    """Continues the text as it went on where its last tokens occurred before: in the text itself, or in a corpus.

    All earlier occurrences of the longest matching suffix are known at once (a suffix automaton: Blumer et al. 1985;
    for drafting: SAM-Decoding, arXiv 2411.10666; SuffixDecoding, arXiv 2411.04975, keeps a tree). Continuations are
    ranked by how often they followed, with shorter matches blended in where longer ones leave doubt, as in prediction
    by partial matching (Cleary and Witten 1984), and grown into a tree, the likeliest path first. A step costs time in
    the number of new tokens and of drafted nodes, whatever the length of the text.

    Args:
        depth: longest path proposed.
        nodes: drafted nodes at most.
        shortest: tokens that have to match.
        threshold: paths less likely than this, by the drafter's own estimate, are not proposed.
        corpus: texts, as token ids, in which to look too: answers to similar prompts, documents that are quoted.
    """

    name = "suffix"
    kept: "list[_Sequence]"

    def __init__(
        self,
        depth: int = 12,
        nodes: int = 12,
        shortest: int = 2,
        threshold: float = 0.1,
        corpus: Iterable[Sequence[int]] = (),
    ) -> None:
        self.depth, self.nodes, self.shortest = depth, nodes, shortest
        self.least = log(threshold) if threshold > 0 else float("-inf")
        self.corpus = SuffixAutomaton(token for text in corpus for token in (*text, _BREAK))

    def __str__(self) -> str:
        corpus = f", a corpus of {len(self.corpus)} tokens" if len(self.corpus) else ""
        return (
            f"suffix, depth {self.depth}, {self.nodes} nodes, threshold {exp(self.least):g}, "
            f"behind {self.shortest} equal tokens{corpus}"
        )

    def describe(self, beside: torch.device | None = None) -> str:
        content = sha256(repr(self.corpus.following).encode()).hexdigest()[:8]  # which only this text has
        return f"{self}, {content}" if len(self.corpus) else str(self)

    @property
    def text_sizes(self) -> tuple[int, int]:
        return self.nodes, min(self.depth, self.nodes)

    def start(self, committed: Committed, hidden: Tensor) -> None:
        self.kept = [_Sequence() for _ in committed.texts]

    def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        drafts = []
        for sequence, text in zip(self.kept, committed.texts, strict=True):
            for token in text[len(sequence.own) :]:
                sequence.own.extend(token)
                sequence.in_corpus = self.corpus.follow(sequence.in_corpus, token)
            drafts.append(self._grow(sequence))
        return ragged_tree(committed.root, drafts)

    def _grow(self, sequence: "_Sequence") -> Drafted:
        def follow(places: tuple[Place, Place], token: int) -> tuple[Place, Place]:
            return sequence.own.follow(places[0], token), self.corpus.follow(places[1], token)

        return grow(
            (sequence.own.before, sequence.in_corpus),
            lambda places: self._continuations(sequence.own, *places),
            follow,
            nodes=self.nodes,
            depth=self.depth,
            least=self.least,
        )

    def _continuations(self, own: "SuffixAutomaton", here: Place, in_corpus: Place) -> dict[int, float]:
        """Probabilities of next tokens. A context of n tokens, followed m times by one of d tokens, leaves
        d / (m + d + n - s) to shorter ones, s the shortest: what has matched for long will go on matching.
        """
        found: dict[int, float] = {}
        left = 1.0
        contexts = (each.contexts(place, self.shortest) for each, place in ((own, here), (self.corpus, in_corpus)))
        for matched, followed in islice(merge(*contexts, key=lambda context: -context[0]), _BLENDED):
            new = {token: times for token, times in followed.items() if token not in found and token != _BREAK}
            if new:
                total = sum(new.values())
                escape = len(new) / (total + len(new) + matched - self.shortest)
                for token, times in new.items():
                    found[token] = left * (1 - escape) * times / total
                left *= escape
        return found


class _Sequence:
    """A sequence's own text, and the place of its last tokens in the corpus."""

    def __init__(self) -> None:
        self.own = SuffixAutomaton()
        self.in_corpus: Place = (0, 0)


class SuffixAutomaton:
    """All substrings of a growing text: a state is those that end at the same places, state 0 the empty one.

    `length` is that of a state's longest substring, `link` leads to the longest suffix of it that occurs elsewhere too,
    `count` says how often it has occurred; of contexts beyond the `_COUNTED` longest of a token it counts less.

    Args:
        text: what it begins with.
    """

    def __init__(self, text: Iterable[int] = ()) -> None:
        self.length, self.link, self.count = [0], [-1], [0]
        self.following: list[dict[int, int]] = [{}]
        self._last = 0
        for token in text:
            self.extend(token)

    def __len__(self) -> int:
        """Tokens of the text."""
        return self.length[self._last]

    @property
    def before(self) -> Place:
        """The longest suffix of the text that occurred before."""
        state = max(self.link[self._last], 0)
        return state, self.length[state]

    def extend(self, token: int) -> None:
        """One more token; amortised constant time."""
        new, state = self._add(self.length[self._last] + 1, {}, 1), self._last
        while state >= 0 and token not in self.following[state]:
            self.following[state][token] = new
            state = self.link[state]
        if state < 0:
            self.link[new] = 0
        else:
            old = self.following[state][token]
            if self.length[old] == self.length[state] + 1:
                self.link[new] = old
            else:  # the shorter ones of its substrings end here too, and get a state of their own
                copy = self._add(self.length[state] + 1, dict(self.following[old]), self.count[old])
                self.link[copy], self.link[old], self.link[new] = self.link[old], copy, copy
                while state >= 0 and self.following[state].get(token) == old:
                    self.following[state][token] = copy
                    state = self.link[state]
        self._last = new
        state = self.link[new]
        for _ in range(_COUNTED):
            if state <= 0:
                break
            self.count[state] += 1
            state = self.link[state]

    def follow(self, place: Place, token: int) -> Place:
        """The place after one more token: the longest suffix that occurs; amortised constant time."""
        state, matched = place
        while state > 0 and token not in self.following[state]:
            state = self.link[state]
            matched = self.length[state]
        reached = self.following[state].get(token, 0)
        return (reached, matched + 1) if reached else (0, 0)

    def contexts(self, place: Place, shortest: int) -> Iterator[tuple[int, dict[int, int]]]:
        """Matching suffixes, the longest first: tokens matched, and how often each token followed."""
        state, matched = place
        while state > 0 and matched >= shortest:
            yield matched, {token: self.count[to] for token, to in self.following[state].items()}
            state = self.link[state]
            matched = self.length[state]

    def _add(self, length: int, following: dict[int, int], count: int) -> int:
        self.length.append(length)
        self.link.append(-1)
        self.count.append(count)
        self.following.append(following)
        return len(self.length) - 1
