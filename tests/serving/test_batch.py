"""Requests that come, go, pause and share prefixes: each has the drafts of a drafter that has it alone."""

from random import Random

import numpy as np
import pytest
import torch
from helpers import BASELINES, committed, predictor

from shape.drafters import (
    Drafter,
    GeodesicDrafter,
    HybridDrafter,
    LookaheadDrafter,
    NgramDrafter,
    SuffixDrafter,
    TrainedDrafter,
    TreeShape,
)
from shape.serving.batch import BatchDrafter, Computed, likeliest_chains
from shape.target.model import Target
from shape.verification.sampling import Sampler
from shape.verification.tree import ragged_chain, ragged_tree

MOST = 3
TRAINED = [
    "shape with attention",
    "shape with Markov bias",
    "shape of three layers",
    "medusa",
    "eagle",
    "eagle of three layers",
    "peagle",
    "block",
    "block with windows",
]


class Engine:
    """Schedules and verifies as engines do, one forward of the target per request."""

    def __init__(self, target: Target, drafter: Drafter, prompts: list[list[int]]) -> None:
        self.target, self.layers, self.drafter = target, drafter.layers, BatchDrafter(drafter, MOST)
        self.texts, self.prompts = [list(prompt) for prompt in prompts], [len(prompt) for prompt in prompts]
        self.computed, self.drafts = [0] * len(prompts), [[] for _ in prompts]

    def step(self, scheduled: list[int], chunk: int = 100) -> None:
        rows = [self._forward(request, chunk) for request in scheduled]
        for request, draft in zip(scheduled, self.drafter.propose(rows), strict=True):
            self.drafts[request] = draft

    def _forward(self, request: int, chunk: int) -> Computed:
        text, start = self.texts[request], self.computed[request]
        end, sampled = min(start + chunk, len(text)), []
        tokens = text[:end] + (self.drafts[request] if end == len(text) else [])
        states = self.target.features(torch.tensor([tokens]), self.layers)[0, start:]
        if end == len(text):
            logits = self.target.logits(states[:, -self.target.hidden_size :])
            for choice in logits[end - start - 1 :].argmax(-1).tolist():
                sampled.append(choice)
                if tokens[len(text) + len(sampled) - 1 :][:1] != [choice]:
                    break
        text.extend(sampled)
        self.computed[request] = len(text) - 1 if sampled else end
        return Computed(np.array(text), len(sampled), start, states)

    def preempt(self, request: int, cached: int = 0) -> None:
        """Its states are lost but for a cached prefix."""
        self.computed[request], self.drafts[request] = cached, []


@pytest.fixture(scope="module")
def target(tiny_model) -> Target:
    return Target(tiny_model("llama"))


def texts(*lengths: int) -> list[list[int]]:
    random = Random(0)
    return [[random.randrange(3, 64) for _ in range(length)] for length in lengths]


def plain(target: Target, prompt: list[int], new: int) -> list[int]:
    text = list(prompt)
    for _ in range(new):
        text.append(int(target.logits(target.features(torch.tensor([text]))[0, -1]).argmax()))
    return text


def alone(drafter: Drafter, target: Target, text: list[int], first: int = 0) -> list[int]:
    """The draft of one request whose states are known from a position on."""
    own = committed(text)
    drafter.start(own, target.features(torch.tensor([text[:-1]]), drafter.layers)[:, first:])
    return likeliest_chains(drafter.draft(own, Sampler(own.lengths)))[0][:MOST]


def trained(name: str, target: Target) -> TrainedDrafter:
    drafter = TrainedDrafter(predictor(loud=True, **BASELINES[name]), TreeShape(depth=MOST, width=1))
    drafter.bind(target)
    return drafter


def make(name: str, target: Target) -> Drafter:
    token_drafters = {"suffix": SuffixDrafter, "ngram": NgramDrafter}
    return token_drafters[name]() if name in token_drafters else trained(name, target)


@pytest.mark.parametrize("name", [*TRAINED, "suffix", "ngram"])
def test_drafts_are_those_of_each_request_alone(target, name):
    engine = Engine(target, make(name, target), texts(9, 4, 13, 7))
    random, seen_from = Random(1), 0
    schedule = [[0], [0, 1], [1, 0, 2], [2, 3, 0, 1], [3, 1], [3, 1, 2], [0, 3, 2]]
    for number, scheduled in enumerate(schedule):
        random.shuffle(scheduled)
        if number == 5:
            engine.preempt(2)
        engine.step(scheduled)
        for request in scheduled:
            # It was away, and only the last step's states are seen.
            first = seen_from if (number, request) == (6, 0) else 0
            assert engine.drafts[request] == alone(make(name, target), target, engine.texts[request], first)
        seen_from = len(engine.texts[0]) - 1
    for text, length in zip(engine.texts, engine.prompts, strict=True):
        assert text == plain(target, text[:length], len(text) - length)


def test_a_prompt_in_chunks_and_one_with_a_cached_prefix(target):
    drafter = trained("shape with attention", target)
    engine = Engine(target, drafter, texts(10, 10))
    engine.preempt(1, cached=6)
    engine.step([0, 1], chunk=4)
    assert engine.drafts[0] == [] and engine.drafts[1] == alone(drafter, target, engine.texts[1], first=6)
    engine.step([1, 0], chunk=4)
    engine.step([0, 1], chunk=4)
    assert engine.drafts[0] == alone(drafter, target, engine.texts[0])
    assert engine.drafts[1] == alone(drafter, target, engine.texts[1], first=6)


def test_two_requests_of_one_text(target):
    drafter = trained("eagle", target)
    engine = Engine(target, drafter, texts(5) * 2)
    for _ in range(3):
        engine.step([0, 1])
        assert engine.drafts[0] == engine.drafts[1] == alone(drafter, target, engine.texts[0])
    assert engine.texts[0] == engine.texts[1]


def test_hybrids_of_requests_that_come_and_go(target):
    hybrid = HybridDrafter([SuffixDrafter(), trained("shape with attention", target)]).reproducible()
    hybrid.bind(target)
    engine = Engine(target, hybrid, texts(12, 5, 8))
    for scheduled in ([0], [0, 1], [1, 2], [2, 0, 1], [0, 2]):
        engine.step(scheduled)
        assert scheduled != [0] or engine.drafts[0]  # later only where it has been worth its time
    for text, length in zip(engine.texts, engine.prompts, strict=True):
        assert text == plain(target, text[:length], len(text) - length)


@pytest.mark.parametrize("drafter", [LookaheadDrafter(), GeodesicDrafter()], ids=str)
def test_drafts_that_depend_on_earlier_steps_or_on_the_batch(target, drafter):
    drafter.bind(target)
    engine = Engine(target, drafter, texts(12, 5, 8))
    for scheduled in ([0], [0, 1], [1, 2], [2, 0, 1], [0, 2]):
        engine.step(scheduled)
        assert all(engine.drafts[request] for request in scheduled)
    for text, length in zip(engine.texts, engine.prompts, strict=True):
        assert text == plain(target, text[:length], len(text) - length)


def test_no_request_at_all(target):
    batch = BatchDrafter(trained("medusa", target), MOST)
    assert batch.propose([]) == []


def test_the_chain_of_a_tree_is_where_most_is_expected():
    root = torch.tensor([1, 1])
    log = [float(np.log(odds)) for odds in (0.4, 0.6, 0.3, 0.3)]
    first = [(5, 0, log[0]), (6, 0, log[1]), (7, 1, log[2]), (8, 3, log[3])]  # 0.4 + 0.3 + 0.3 against 0.6
    assert likeliest_chains(ragged_tree(root, [first, first[1:2]])) == [[5, 7, 8], [6]]
    assert likeliest_chains(ragged_chain(root, [[4, 5, 6], []])) == [[4, 5, 6], []]
