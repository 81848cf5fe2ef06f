"""What all measurements share: padded batches, turns in rotation, and one stopwatch for every method.

A call of transformers' `generate` and one of `ShapeDecoder.generate` give the same `Run`, timed alike: the first token
ends the prefill, and the last one, read to the host, ends decoding. So a drafter's reading of the prompt is decoding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from shape.data.backends import until_end
from shape.generation.decoder import ShapeDecoder
from shape.generation.engine import ShapeOutput
from shape.generation.prompts import Context, side_by_side
from shape.generation.rules import Match, Rule
from shape.generation.stats import DecodeStats
from shape.target.model import Target

Item = TypeVar("Item")


@dataclass(frozen=True)
class Run:
    """One timed call on the contexts of a batch.

    Attributes:
        sequences: the new tokens of each, up to its end token.
        prefilled: tokens that came with the prefill, which is not decoding.
        gaps: seconds between arrivals behind the prefill, of one token or of several committed together.
        stats: of our own decoder.
    """

    sequences: list[list[int]]
    prefilled: int
    decode_seconds: float
    prefill_seconds: float
    gaps: Sequence[float]
    stats: DecodeStats | None = None

    @property
    def timed_tokens(self) -> int:
        """What decode_seconds were spent on."""
        return sum(map(len, self.sequences)) - self.prefilled


# Answers contexts, with a seed for each (transformers takes the first alone).
Runner = Callable[[Sequence[Context], Sequence[int]], Run]


def rotated(items: Sequence[Item], turn: int) -> list[Item]:
    """Another one first in every turn, so that none always runs on a machine that just rested."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]


class Stopwatch(BaseStreamer):
    """A streamer that notes when tokens arrive: the prompt comes first, then the prefill's tokens, then the others."""

    def __init__(self) -> None:
        self.times: list[float] = []  # of what arrived
        self.prefilled = 0
        self.start = perf_counter()

    def put(self, value: Tensor) -> None:
        self.times.append(perf_counter())
        if len(self.times) == 2:
            self.prefilled = value.numel()

    def end(self) -> None: ...

    def stop(self, output: Tensor, prompt: int, end_tokens: Sequence[int], stats: DecodeStats | None = None) -> Run:
        """The finished call: its output (B, L) is read to the host before the watch stops."""
        answers = output[:, prompt:].tolist()
        end = perf_counter()
        prefilled = self.prefilled
        prefill = self.times[1] - self.start if len(self.times) > 1 else 0.0
        gaps = [after - before for before, after in pairwise(self.times[1:])]
        # Our decoder streams single sequences, and times the steps of batches itself.
        if stats is not None and len(answers) > 1:
            prefilled, gaps = len(answers), [one.seconds for one in stats.steps]
            prefill = end - self.start - stats.decode_seconds  # with what comes before it, as in a single sequence
        answers = [until_end(answer, end_tokens) for answer in answers]
        return Run(answers, prefilled, end - self.start - prefill, prefill, gaps, stats)


def by_transformers(target: Target, **options: Any) -> Runner:
    """`model.generate` on the target's own weights."""

    def run(contexts: Sequence[Context], seeds: Sequence[int]) -> Run:
        ids, mask = side_by_side(contexts, target.device)
        padding = {} if len(contexts) == 1 else {"pad_token_id": next(iter(target.eos_token_ids), 0)}
        with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
            torch.manual_seed(seeds[0])
            watch = Stopwatch()
            streamer = None if "num_beams" in options else watch  # of which transformers streams none
            output = target.model.generate(ids, attention_mask=mask, streamer=streamer, **padding, **options)
            return watch.stop(output, ids.shape[1], target.eos_token_ids)

    return run


def by_decoder(decoder: ShapeDecoder, rule: Rule | None = None, **options: Any) -> Runner:
    """`ShapeDecoder.generate` under an acceptance rule.

    Raises:
        UnsupportedGeneration: drafter or target cannot serve the rule.
    """
    rule = rule or Match()
    rule.fit(decoder.drafter, decoder.target)

    def run(contexts: Sequence[Context], seeds: Sequence[int]) -> Run:
        ids, mask = side_by_side(contexts, decoder.target.device)
        watch = Stopwatch()
        output = decoder.generate(
            ids,
            mask,
            seed=list(seeds),
            streamer=watch if len(contexts) == 1 else None,
            acceptance=rule,
            return_dict_in_generate=True,
            **options,
        )
        assert isinstance(output, ShapeOutput)
        return watch.stop(output.sequences, ids.shape[1], decoder.target.eos_token_ids, output.stats)

    return run
