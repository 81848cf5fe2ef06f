"""One drafter for the requests of an engine, which come and go between its steps. Of no engine in particular."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from math import exp

import numpy as np
import torch
from torch import Tensor

from shape.drafters.base import Committed, Drafter
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree


@dataclass
class Computed:
    """What an engine's step has computed for one request.

    Attributes:
        tokens: (n,) all that is known of its text, what was just sampled included; of an unfinished prompt the whole.
        sampled: how many of these the step has sampled; 0 while parts of the prompt are to come.
        start: position of the first token that went through the target.
        states: (N, F), of the tokens that went through it; rejected drafts may follow.
    """

    tokens: np.ndarray
    sampled: int
    start: int
    states: Tensor


@dataclass
class _Request:
    """A request as it was left: what comes next continues these tokens at this position.

    Attributes:
        states: (position, F) at most, those of a prompt that is not finished yet; None once it drafts.
    """

    tokens: np.ndarray
    position: int
    states: Tensor | None = None

    def goes_on_in(self, computed: Computed) -> bool:
        own = len(self.tokens)
        return (
            self.position == computed.start
            and own <= len(computed.tokens)
            and np.array_equal(self.tokens, computed.tokens[:own])
        )


class BatchDrafter:
    """Drafts chains for whatever requests an engine has scheduled, all of them at once.

    A request is known by its text: what a step computed belongs to the request whose tokens it continues at the next
    position. So nothing needs to be told of requests that end, are cancelled, preempted or resumed; two of the same
    text have the same drafts. One that nothing is known of, since its prompt has just been computed, or since it was
    away for a while, starts from the states that this step has seen, its last ones.

    Args:
        drafter: bound to its target. Its drafts must depend on the text alone where several processes draft alike.
        most: tokens of a draft at most.
    """

    def __init__(self, drafter: Drafter, most: int) -> None:
        self._drafter, self._most = drafter, most
        self._drafting: list[_Request] = []  # in the order of the rows of:
        self._active: Drafter | None = None
        self._committed = _committed([])
        self._waiting: list[_Request] = []

    def propose(self, step: Sequence[Computed]) -> list[list[int]]:
        """Draft tokens for each request of a step; none where its prompt is not finished."""
        claimed: set[int] = set()
        kept: list[tuple[int, int]] = []  # row of the batch so far, number in the step
        fresh: list[int] = []
        for number, computed in enumerate(step):
            if computed.sampled:
                row = _find(self._drafting, computed, claimed)
                if row is None:
                    fresh.append(number)
                else:
                    claimed.add(row)
                    kept.append((row, number))
        kept.sort()
        self._advance(step, kept)
        started = [(number, self._known_states(step[number])) for number in fresh]
        self._waiting = [
            _Request(computed.tokens[:end].copy(), end, self._known_states(computed))
            for computed in step
            if not computed.sampled and (end := computed.start + len(computed.states))
        ]
        for number, states in started:
            self._start(step[number], states)
        numbers = [number for _, number in kept] + fresh
        self._drafting = [_Request(step[at].tokens.copy(), len(step[at].tokens) - 1) for at in numbers]
        drafts: list[list[int]] = [[] for _ in step]
        if self._active is not None:
            tree = self._active.draft(self._committed, Sampler(self._committed.lengths))
            for number, chain in zip(numbers, likeliest_chains(tree), strict=True):
                drafts[number] = chain[: self._most]
        return drafts

    def _advance(self, step: Sequence[Computed], kept: list[tuple[int, int]]) -> None:
        """Keep the requests that go on, and tell the drafter how."""
        if not kept:
            self._active, self._committed = None, _committed([])
            return
        assert self._active is not None
        rows = [row for row, _ in kept]
        if len(rows) < len(self._drafting):
            self._active.select(torch.tensor(rows))
            self._committed = self._committed.select(rows)
        going = [step[number] for _, number in kept]
        new = [computed.tokens[-computed.sampled :].tolist() for computed in going]
        counts = [computed.sampled for computed in going]
        hidden = going[0].states.new_zeros(len(going), max(counts), going[0].states.shape[-1])
        for row, computed in enumerate(going):
            hidden[row, : computed.sampled] = computed.states[: computed.sampled]
        verified = [[text[-1], *tokens] for text, tokens in zip(self._committed.texts, new, strict=True)]
        self._active.update(verified, hidden, torch.tensor(counts))
        self._committed.advance(new, torch.tensor(counts))

    def _known_states(self, computed: Computed) -> Tensor:
        """(N, F): the last states of a text that are known, up to the token before the last."""
        states = computed.states[: len(computed.tokens) - 1 - computed.start] if computed.sampled else computed.states
        earlier = _find(self._waiting, computed, set())
        if earlier is None:
            return states.clone()  # an engine may use the memory again
        known = self._waiting[earlier].states
        assert known is not None
        return torch.cat([known, states])

    def _start(self, computed: Computed, states: Tensor) -> None:
        """Take a request in, behind the others."""
        committed, drafter = _committed([computed.tokens.tolist()]), copy(self._drafter)
        drafter.start(committed, states[None])
        if self._active is None:
            self._active, self._committed = drafter, committed
        else:
            self._active.join(drafter)
            self._committed = _committed(self._committed.texts + committed.texts)


def _committed(texts: list[list[int]]) -> Committed:
    lengths, roots = [len(text) for text in texts], [text[-1] for text in texts]
    return Committed(texts, torch.tensor(lengths), torch.tensor(roots))


def _find(requests: Sequence[_Request], computed: Computed, claimed: set[int]) -> int | None:
    """The first request that goes on in what was computed, and is not claimed yet."""
    found = (at for at, request in enumerate(requests) if at not in claimed and request.goes_on_in(computed))
    return next(found, None)


def likeliest_chains(tree: TokenTree) -> list[list[int]]:
    """Of each tree the path from which most tokens are expected to be accepted; the longest where nothing is known of
    their probabilities.
    """
    joints = torch.zeros(tree.tokens.shape) if tree.joint is None else tree.joint
    rows = zip(tree.tokens.tolist(), tree.parent.tolist(), joints.tolist(), strict=True)
    return [_likeliest_chain(*row) for row in rows]


def _likeliest_chain(tokens: list[int], parents: list[int], joints: list[float]) -> list[int]:
    expected = {0: 0.0}
    for node in range(1, len(tokens)):
        if parents[node] in expected:  # or else it is padding
            expected[node] = expected[parents[node]] + exp(joints[node])
    node, chain = max(expected, key=lambda each: expected[each]), []
    while node > 0:
        chain.append(tokens[node])
        node = parents[node]
    return chain[::-1]
