"""The decode loop: draft, verify, accept, commit, until every row has stopped. Plain decoding is the same loop."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from shape.drafters.base import Committed, Drafter, common_length
from shape.generation.control import SpeculationControl
from shape.generation.stats import DecodeStats, Step
from shape.generation.trace import Trace
from shape.target.model import Target
from shape.target.support import Support
from shape.verification.acceptance import Accepted
from shape.verification.cache import KVCache
from shape.verification.forward import new_cache, prefill, recompute, tree_forward
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree, first_path, root_only, shallow

AcceptanceRule = Callable[[TokenTree, Tensor, Sampler], Accepted]
# Cache slots allocated at first behind the prompt for new tokens and the tree under verification; grown on demand.
_NEW_SLOTS, _TREE_SLOTS = 512, 64


class Stops:
    """A row's reasons to stop beside length and end tokens, asked after every token.

    They are shown all tokens so far, as a view of one tensor that grows in place: what was shown before never changes.

    Args:
        criteria: transformers', each of which can stop the row.
        text: (1, L) int64, the prompt as they see it, on the device on which they are to compute.
    """

    def __init__(self, criteria: StoppingCriteriaList, text: Tensor) -> None:
        self._criteria, self._text, self._length = criteria, text, text.shape[1]

    def until_met(self, tokens: list[int]) -> tuple[int, bool]:
        """How many of some new tokens there are up to a stop, and whether there is one."""
        start, end = self._length, self._length + len(tokens)
        if end > self._text.shape[1]:
            grown = self._text.new_empty(1, 2 * end)
            grown[:, :start] = self._text[:, :start]
            self._text = grown
        self._text[0, start:end] = torch.tensor(tokens, device=self._text.device)
        self._length = end
        for count in range(1, len(tokens) + 1):
            if self._criteria(self._text[:, : start + count], None).all():  # type: ignore[arg-type]  # no scores are kept
                return count, True
        return len(tokens), False


@dataclass
class Row:
    """One row of the batch as it grows.

    Attributes:
        index: its number in the batch that ``generate`` was given.
        prompt: its tokens, without padding.
        stops: further reasons to stop.
        new: emitted tokens, an EOS included.
        finished: stopped by EOS, by length or by a criterion.
    """

    index: int
    prompt: list[int]
    stops: Stops | None = None
    new: list[int] = field(default_factory=list)
    finished: bool = False

    def extend(self, tokens: list[int], limit: int, eos: tuple[int, ...]) -> int:
        """Emit tokens up to a stop; the number that was emitted."""
        count = min(len(tokens), limit - len(self.new))
        count = next((at for at, token in enumerate(tokens[:count], 1) if token in eos), count)
        met = False
        if self.stops is not None:
            count, met = self.stops.until_met(tokens[:count])
        self.new += tokens[:count]
        self.finished = met or len(self.new) == limit or self.new[-1] in eos
        return count


def begin(rows: list[int], prompts: list[list[int]], criteria: list[Stops] | None) -> list[Row]:
    """The rows of a call, with nothing emitted yet."""
    return [
        Row(index, prompt, criteria[at] if criteria else None)
        for at, (index, prompt) in enumerate(zip(rows, prompts, strict=True))
    ]


@dataclass
class Memory:
    """What decoding one row leaves for the next call: cache slots, the tokens that they hold, and their states.

    Attributes:
        tokens: ids in the first slots of the arena.
        hidden: (1, len(tokens), F), the states that the drafter reads.
        switched: whether the first tokens have the rotary table of long texts (see ``shape.target.rotary``).
    """

    tokens: list[int] = field(default_factory=list)
    hidden: Tensor | None = None
    arena: KVCache | None = None
    switched: bool = False

    def take(self, prompt: list[int], switched: bool) -> tuple[KVCache, Tensor] | None:
        """Arena and states, cut to what they have in common with a prompt; None where that is nothing, as it is with
        a prompt that has the other rotary table.

        They leave the memory, so that a call that breaks off leaves none rather than a wrong one.
        """
        arena, hidden, tokens, same_table = self.arena, self.hidden, self.tokens, self.switched == switched
        self.keep([], None, None, False)
        # The prompt's last token always goes through the target: its state says what comes next.
        common = common_length(tokens, prompt[:-1])
        if arena is None or hidden is None or common == 0 or not same_table:
            return None
        arena.set_lengths([common])
        return arena, hidden[:, :common]

    def keep(self, tokens: list[int], hidden: Tensor | None, arena: KVCache | None, switched: bool) -> None:
        self.tokens, self.hidden, self.arena, self.switched = tokens, hidden, arena, switched


def decode(
    target: Target,
    support: Support,
    drafter: Drafter | None,
    prompts: list[list[int]],
    sampler: Sampler,
    *,
    max_new_tokens: int,
    eos_token_ids: tuple[int, ...],
    criteria: list[Stops] | None,
    acceptance: AcceptanceRule,
    stats: DecodeStats,
    rows: list[int],
    control: SpeculationControl | None = None,
    memory: Memory | None = None,
    trace: Trace | None = None,
) -> Generator[tuple[int, list[int]], None, list[Row]]:
    """Decode a batch, as far as the caller asks: a generator, so that whoever stops listening stops the decoding.

    To be called where nothing is kept for gradients (see ``inference``).

    Args:
        prompts: token ids per row, without padding, each at least one token.
        sampler: the target's choice, for these rows.
        max_new_tokens: at least 1.
        criteria: per row, further reasons to stop.
        acceptance: the rule; gets the tree, the target's logits (B, N, V) and the sampler.
        stats: counted into.
        rows: the rows' numbers.
        control: decides whether a step drafts; None always drafts.
        memory: of the call before, to go on from where the only row begins alike; gets what this call leaves.
        trace: gets a record of everything.

    Yields:
        (row number, its newly emitted tokens), as soon as they are settled.

    Returns:
        The finished rows in the order of ``prompts``.
    """
    started = perf_counter()
    finished = live = begin(rows, prompts, criteria)
    layers, size = (-1,) if drafter is None else drafter.layers, target.hidden_size
    needs_updates = drafter is not None and drafter.needs_updates
    arena, settled, hidden = settle_prompts(target, support, prompts, sampler, max_new_tokens, memory, stats, layers)
    for row, token in zip(live, settled.root.tolist(), strict=True):
        row.extend([token], max_new_tokens, eos_token_ids)
        yield row.index, [token]
    states_so_far = [hidden] if memory is not None else []
    switch, switched = target.switch, target.switched(len(prompts[0]))
    if drafter is not None:
        drafter.start(settled, hidden)
    del hidden  # of long prompts a large part of the memory, and nobody needs it any more
    prefilled = perf_counter()
    stats.prefill_seconds += prefilled - started
    if trace is not None:
        trace.prefill(rows, arena.host_lengths, settled.root.tolist(), prefilled - started)

    while True:
        going = [i for i, row in enumerate(live) if not row.finished]
        if not going:
            break
        if len(going) < len(live):
            live = [live[i] for i in going]
            index = settled.root.new_tensor(going)
            settled, sampler = settled.select(going), sampler.select(index)
            arena.select(index)
            if drafter is not None:
                drafter.select(index)

        if switch is not None and switch.recomputes and arena.longest == switch.positions:
            hidden, switched = recompute(target, arena, settled.texts, layers), True
            states_so_far = [hidden] if memory is not None else []
            del hidden
        drafting = perf_counter()
        sampler.settle(settled.lengths, settled.texts)
        active = drafter if control is None or control.draft_next(arena.longest) else None
        tree = root_only(settled.root) if active is None else active.draft(settled, sampler)
        if support.mode == "chain":
            tree = first_path(tree)
        if switch is not None and arena.longest < switch.positions < arena.longest + tree.size:
            tree = shallow(tree, switch.positions - 1 - arena.longest)  # no forward has two tables
        verifying = perf_counter()
        arena.reserve(tree.size)
        states = tree_forward(target, support, arena, tree, layers)
        logits = target.logits(states if len(layers) == 1 else states[..., -size:])
        accepted = acceptance(tree, logits, sampler)
        # The step's one wait for the device.
        counts, drafted = accepted.counts.tolist(), accepted.drafted.tolist()
        new = [row[:count] for row, count in zip(accepted.tokens.tolist(), counts, strict=True)]
        paths = [row[:count] for row, count in zip(accepted.path.tolist(), counts, strict=True)]
        committing = perf_counter()
        emitted = [row.extend(own, max_new_tokens, eos_token_ids) for row, own in zip(live, new, strict=True)]
        proposed = [sum(above >= 0 for above in parents) for parents in tree.parent.tolist()]
        for i, row in enumerate(live):
            stats.count(row.index, proposed[i], min(drafted[i], emitted[i]), emitted[i])
            if tree.source is not None:
                stats.count_sources(tree.source[i], paths[i][1 : 1 + min(drafted[i], emitted[i])])
        lengths = arena.host_lengths
        arena.commit(paths)
        if needs_updates or memory is not None:
            states = _along(states, accepted.path[:, : max(counts)])
        if active is not None:
            active.inspect(tree, logits)
        if drafter is not None and needs_updates:
            tokens = [[text[-1], *own] for text, own in zip(settled.texts, new, strict=True)]
            drafter.update(tokens, states, accepted.counts)
        if memory is not None:
            states_so_far.append(states)
        finishing = perf_counter()
        step = Step(
            [row.index for row in live],
            lengths,
            tree.size,
            0 if active is None else active.passes,
            verifying - drafting,
            committing - verifying,
            finishing - committing,
        )
        stats.steps.append(step)
        if trace is not None:
            trace.step(step, tree, logits, sampler, paths, new, drafted, emitted)
        settled.advance(new, accepted.counts)
        if control is not None:
            control.observe(tree.size > 1, sum(counts) / len(counts), step.seconds, max(lengths))
            stats.plain_steps += active is None
        # Behind the step's times, which decide whether drafting pays: whoever listens may be slow.
        for row, own, count in zip(live, new, emitted, strict=True):
            yield row.index, own[:count]
    stats.decode_seconds += perf_counter() - prefilled
    if control is not None:
        stats.pauses += control.pauses
    if memory is not None:
        memory.keep(settled.texts[0][: arena.longest], torch.cat(states_so_far, dim=1), arena, switched)
    return finished


def _along(states: Tensor, path: Tensor) -> Tensor:
    """(B, N, F), (B, D) int64 -> (B, D, F), the states of the nodes on a path."""
    if len(path) == 1:  # in half of the time
        return states.index_select(1, path.view(-1))
    return states.gather(1, path[:, :, None].expand(-1, -1, states.shape[-1]))


def settle_prompts(
    target: Target,
    support: Support,
    prompts: list[list[int]],
    sampler: Sampler,
    max_new_tokens: int,
    memory: Memory | None,
    stats: DecodeStats,
    layers: Sequence[int] = (-1,),
) -> tuple[KVCache, Committed, Tensor]:
    """The cache with the prompts in it, the first token of every row, and the prompts' states, (B, T, F)."""
    room = min(max_new_tokens, _NEW_SLOTS) + _TREE_SLOTS
    # Samples of one prompt share its prefill.
    distinct = {prompt: number for number, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    lengths = [len(prompt) for prompt in distinct]
    known = memory.take(prompts[0], target.switched(len(prompts[0]))) if memory is not None else None
    if known is None:
        arena = new_cache(target, support, len(distinct), max(lengths) + room)
        padded = [[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in distinct]
        hidden = prefill(target, arena, torch.tensor(padded, device=target.device), lengths, layers=layers)
    else:
        arena, before = known
        stats.reused_tokens += arena.longest
        rest = torch.tensor([prompts[0][arena.longest :]], device=target.device)
        hidden = torch.cat([before, prefill(target, arena, rest, lengths, layers=layers)], dim=1)
    stats.prompt_tokens += sum(lengths)
    if len(distinct) < len(prompts):
        index = torch.tensor([distinct[tuple(prompt)] for prompt in prompts], device=target.device)
        arena.select(index)
        hidden = hidden[index]
    last = hidden[torch.arange(len(prompts), device=hidden.device), arena.lengths - 1]
    sampler.settle(arena.lengths, prompts)
    root = sampler.choose_roots(target.logits(last[:, None, -target.hidden_size :]), root_only(arena.lengths))
    texts = [[*prompt, token] for prompt, token in zip(prompts, root.tolist(), strict=True)]
    return arena, Committed(texts, arena.lengths + 1, root), hidden
