"""How one call of ``generate`` is decoded: in which batches, by which kind of steps, under what control."""

from collections.abc import Generator
from contextlib import closing
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from shape.drafters import Drafter, make_drafter
from shape.errors import ConfigError, UnsupportedGeneration
from shape.generation.control import FIXED_BREAK_EVEN, SpeculationControl, StepCosts, compile_loops
from shape.generation.eager import EagerSteps
from shape.generation.fixed import FixedSteps, why_not
from shape.generation.loop import Batch, decode
from shape.generation.prefill import Memory
from shape.generation.request import Request, Seed
from shape.generation.rules import Rule, make_rule
from shape.generation.served import warn_of_slow
from shape.generation.stats import DecodeStats
from shape.generation.trace import Trace
from shape.target.inference import all_steps, each_step, evaluating, gradientless, host_by_default
from shape.target.model import Target
from shape.target.prepack import count_unseen
from shape.target.support import Support
from shape.verification.probe import support_of


@dataclass
class ShapeOutput:
    """What ``generate(..., return_dict_in_generate=True)`` returns.

    Attributes:
        sequences: (B * num_return_sequences, L) int64, prompts as given, followed by the new tokens and padding.
        stats: counts and times.
        trace: what became of every drafted and emitted token; only with ``trace=True``.
    """

    sequences: Tensor
    stats: DecodeStats
    trace: Trace | None = None


# (number of the sequence, its newly committed tokens), again and again; then the whole.
Pieces = Generator[tuple[int, list[int]], None, ShapeOutput]


class Engine:
    """A target and a drafter, ready to decode; arguments are those of ``ShapeDecoder``."""

    def __init__(
        self,
        target: PreTrainedModel | Target,
        drafter: Drafter | str | None = None,
        tokenizer: object = None,
        fall_back: bool | float = True,
        graphs: bool | FixedSteps | None = None,
    ) -> None:
        if not isinstance(drafter, Drafter | str | None):
            raise ConfigError(
                f"drafter is {drafter!r}; give a Drafter, for example SuffixDrafter(), or the name of one"
            )
        if not isinstance(fall_back, bool | int | float):
            raise ConfigError(f"fall_back is {fall_back!r}; give True, False or an acceptance length")
        if not isinstance(graphs, bool | FixedSteps | None):
            raise ConfigError(f"graphs is {graphs!r}; give True, False or FixedSteps()")
        self.target = Target.load(target, tokenizer=tokenizer)
        self.drafter = make_drafter(drafter) if isinstance(drafter, str) else drafter
        with evaluating([self.target.model]), host_by_default():
            if self.drafter is not None:
                self.drafter.bind(self.target)
            self.support: Support = support_of(self.target)
        self.gradientless = gradientless(self._networks)
        self.fall_back = fall_back
        if graphs is None:  # launched one by one, a step's kernels leave a GPU idle for most of the time
            graphs = self.target.device.type == "cuda"
        self.graphs = (FixedSteps() if graphs else None) if isinstance(graphs, bool) else graphs
        self._step_costs: dict[tuple[int, bool], StepCosts] = {}  # by batch size, and whether by fixed steps
        self._made_target, self._made_graphs = not isinstance(target, Target), isinstance(graphs, bool)
        self._made_drafter = False
        self._closed = self._told = False

    @property
    def _networks(self) -> list[nn.Module]:
        """What it computes with."""
        return [self.target.model, *(() if self.drafter is None else self.drafter.networks)]

    def _decode(
        self,
        request: Request,
        input_ids: Tensor,
        *,
        seed: Seed | None,
        reproducible: bool,
        streaming: bool = False,
        stepwise: bool = False,
        acceptance: str | Rule = "match",
        memory: Memory | None = None,
        trace: bool = False,
        num_draft_tokens: int | None = None,
        warming: bool = False,
    ) -> Pieces:
        if self._closed:
            raise UnsupportedGeneration("this decoder was closed, and generates no more; make a new one of its target")
        if streaming and len(request.prompts) > 1:
            raise UnsupportedGeneration(
                f"streaming follows one sequence, and {len(request.prompts)} were asked for; decode them one by one"
            )
        model = self.target.model
        if model.get_output_embeddings() is not self.target.head:
            raise UnsupportedGeneration(
                f"the output embedding of target {self.target.name} is another since this decoder was made, and it may "
                "have copies of the first; make a new decoder"
            )
        if request.slow and not self._told:
            self._told = True
            warn_of_slow(self.target, request.slow)
        rule = make_rule(acceptance)
        drafter = None if num_draft_tokens == 0 else rule.fit(self.drafter, self.target)
        reproducible = reproducible or not rule.same_for_every_draft
        # Each call has its own: a stream may stay open while others decode.
        if drafter is not None:
            drafter = drafter.reproducible() if reproducible else copy(drafter)
            if num_draft_tokens is not None:
                drafter.limit_draft(num_draft_tokens)
            if warming:
                drafter.forget_misses()
        stats = DecodeStats.of(len(request.prompts), "none" if drafter is None else drafter.name, rule)
        keys = request.keys(seed)
        record = Trace() if trace else None
        groups, networks = self._groups(request, drafter), evaluating(self._networks)

        def pieces() -> Pieces:
            count_unseen(networks.modules)
            new: dict[int, list[int]] = {}
            for group in groups:
                sequences, sampler = request.sequences(group), request.sampler(group, keys, rule)
                batch = Batch(
                    self.target, self.support, drafter, sequences, sampler, rule, stats, reproducible=reproducible
                )
                fixed = None
                # The first token comes from the prompt.
                served = memory is None and record is None and request.max_new_tokens > 1
                if self.graphs is not None and served and why_not(batch) is None:
                    batch.control = self._control(drafter, (len(group), True), reproducible)
                    fixed = self.graphs.begin(batch)
                stats.graphs |= fixed is not None
                if fixed is not None:
                    yield from torch.no_grad()(decode)(fixed)
                else:
                    batch.control = self._control(drafter, (len(group), False), reproducible)
                    yield from self.gradientless()(decode)(EagerSteps(batch, memory), record)
                new |= {one.index: one.new for one in sequences}
            whole = request.assemble(input_ids, [new[index] for index in sorted(new)])
            return ShapeOutput(whole, stats, record)

        within = each_step if stepwise else all_steps
        return within(host_by_default(), within(networks, pieces()))

    def _groups(self, request: Request, drafter: Drafter | None) -> list[list[int]]:
        """The sequences that are decoded in one batch; one at a time on targets that can only verify chains, and with
        drafters that draft for one.
        """
        lengths, switch = [len(prompt) for prompt in request.prompts], self.target.switch
        if switch is not None:
            switch.check(self.target, lengths, request.max_new_tokens)
        if self.support.mode == "chain" or (drafter is not None and drafter.one_at_a_time):
            return [[index] for index in range(len(lengths))]
        return [list(range(len(lengths)))] if switch is None else switch.groups(lengths, request.max_new_tokens)

    def _control(
        self, drafter: Drafter | None, steps: tuple[int, bool], reproducible: bool
    ) -> SpeculationControl | None:
        if drafter is None or self.fall_back is False:
            return None
        if self.target.device.type == "cpu":
            compile_loops()
        least = None if self.fall_back is True else float(self.fall_back)
        if reproducible:
            return SpeculationControl(StepCosts(), FIXED_BREAK_EVEN if least is None else least)
        return SpeculationControl(self._step_costs.setdefault(steps, StepCosts()), least)


def finish(pieces: Pieces, input_ids: Tensor, streamer: BaseStreamer | None) -> ShapeOutput:
    """Decodes to the end; a streamer gets the prompt, then the pieces."""
    if streamer is not None:
        streamer.put(input_ids.cpu())
    with closing(pieces):  # at once where a streamer raises: the model is in evaluation mode until then
        while True:
            try:
                _, tokens = next(pieces)
            except StopIteration as done:
                return done.value
            if streamer is not None:
                streamer.put(torch.tensor(tokens))
