"""Which draft pays on this machine: costs measured, acceptance estimated, and the shape with most tokens per second.

Speculation trades what a drafter gets right for what the hardware charges, and each can be known without the other:
`shape.generation.timing` measures costs, `record_drafts` lets a drafter propose at every position of the target's own
answers, and `plan` puts the two together for any shape of draft, "none" included, without decoding with each.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log

import torch

from shape.drafters import Drafter, TreeShape
from shape.drafters.base import Committed, Wrapped
from shape.drafters.cost import Costs
from shape.generation.decoder import ShapeDecoder
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree, root_only

# A draft from which narrower ones can be cut.
WIDE = TreeShape(depth=8, width=4)
CANDIDATES = (
    *(TreeShape(depth=depth, width=1, threshold=limit) for depth in (2, 3, 4, 6, 8) for limit in (0.0, 0.1, 0.2, 0.35)),
    *(
        TreeShape(depth=depth, width=width, nodes=nodes, threshold=limit)
        for depth in (3, 4, 6, 8)
        for width in (2, 3, 4)
        for nodes in (6, 8, 12, 16, 24)
        for limit in (0.0, 0.1)
        if depth < nodes
    ),
    *(TreeShape.full(branching, depth) for branching, depth in ((2, 2), (3, 2), (4, 2), (2, 3))),  # the paper's k^N
)


@dataclass(frozen=True)
class RecordedDraft:
    """What a drafter proposed at one position, on the host, node 0 being the root.

    Attributes:
        depth: of every node; -1 where it hangs on nothing.
        children: of every node, the likeliest first.
        joint: log of the drafter's estimate that the path to the node is accepted.
        accepted: whether that path is how the text goes on.
    """

    depth: list[int]
    children: list[list[int]]
    joint: list[float]
    accepted: list[bool]

    @classmethod
    def of(cls, tokens: list[int], parent: list[int], joint: list[float], rest: list[int]) -> "RecordedDraft":
        """`rest`: the tokens that follow the root in the text."""
        depth, accepted, children = [0], [True], [[] for _ in tokens]  # type: ignore[var-annotated]
        for node, (token, above) in enumerate(zip(tokens[1:], parent[1:], strict=True), 1):
            hangs = above >= 0 and depth[above] >= 0
            depth.append(depth[above] + 1 if hangs else -1)
            accepted.append(hangs and accepted[above] and depth[node] <= len(rest) and rest[depth[node] - 1] == token)
            if hangs:
                children[above].append(node)
        return cls(depth, children, joint, accepted)


class _DraftRecorder(Wrapped):
    """Lets another drafter propose at every position of a single sequence, and offers none of it.

    Attributes:
        seen: the length of the text so far, with the tokens, parents and joint log-probabilities of the draft's nodes.
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.seen: list[tuple[int, list[int], list[int], list[float]]] = []

    def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        tree = self.inner.draft(committed, sampler)
        joint = tree.depth.neg() if tree.joint is None else tree.joint
        proposed = tree.tokens[0].tolist(), tree.parent[0].tolist(), joint[0].tolist()
        self.seen.append((len(committed.texts[0]), *proposed))
        return root_only(committed.root)


def record_drafts(
    decoder: ShapeDecoder, contexts: Iterable[list[int]], max_new_tokens: int = 64, wide: TreeShape = WIDE, **options
) -> list[list[RecordedDraft]]:
    """Drafts at every position of the target's answers to some prompts: per answer, position after position.

    Args:
        contexts: token ids of prompts.
        wide: what a predictor drafts, whatever its own tree; other shapes are cut from it.
        options: of ``generate``, for instance do_sample and seed.
    """
    drafter = decoder.drafter
    if drafter is None:
        return []
    recorder = _DraftRecorder(drafter.with_tree(wide) or drafter)
    watched = ShapeDecoder(decoder.target, recorder, fall_back=False)
    answers = []
    for context in contexts:
        recorder.seen.clear()  # the decoder's copies of the recorder share it
        ids = torch.tensor([context], device=decoder.target.device)
        text = watched.generate(ids, torch.ones_like(ids), max_new_tokens=max_new_tokens, **options)[0].tolist()  # type: ignore[index]
        answers.append(
            [RecordedDraft.of(tokens, parent, joint, text[length:]) for length, tokens, parent, joint in recorder.seen]
        )
    return answers


def acceptance(answers: Sequence[Sequence[RecordedDraft]]) -> list[list[float]]:
    """[depth][rank]: how often the text goes on with a node's child of that rank, where it came as far as the node."""
    counts: list[list[int]] = []
    asked: list[int] = []
    for one in (one for answer in answers for one in answer):
        node, depth = 0, 0
        while children := one.children[node]:
            if depth == len(asked):
                asked.append(0)
                counts.append([])
            asked[depth] += 1
            counts[depth] += [0] * (len(children) - len(counts[depth]))
            rank = next((rank for rank, child in enumerate(children) if one.accepted[child]), None)
            if rank is None:
                break
            counts[depth][rank] += 1
            node, depth = children[rank], depth + 1
    return [[count / total for count in ranks] for ranks, total in zip(counts, asked, strict=True)]


def replay_with(one: RecordedDraft, shape: TreeShape) -> tuple[int, int, int]:
    """(accepted tokens, nodes, passes) if a predictor's drafter had grown this shape.

    A narrow tree can expand a node that the wide one did not, where it then counts as ending; that is rare.
    """
    branching = shape.branching or shape.width
    frontier, grown, passes = [0], [], 0
    for depth in range(shape.depth):
        found = [child for node in frontier for child in one.children[node][:branching]]
        if not found:
            break
        passes += 1
        grown += found
        # Of equals, those that were expanded.
        frontier = sorted(found, key=lambda node: (-one.joint[node], not one.children[node]))[: shape.width]
        if shape.threshold > 0 and depth + 1 < shape.depth and one.joint[frontier[0]] < log(shape.threshold):
            break
    kept = sorted(grown, key=lambda node: (-one.joint[node], node))[: shape.nodes]
    return max((one.depth[node] for node in kept if one.accepted[node]), default=0), len(kept), passes


@dataclass(frozen=True)
class Plan:
    """What a shape of draft is expected to bring.

    Attributes:
        shape: None is autoregressive decoding.
        acceptance_length: tokens per step; nodes, passes: means per step.
        seconds: per step; rate: tokens per second and sequence; speed_up: over autoregressive decoding.
    """

    shape: TreeShape | None
    acceptance_length: float
    nodes: float
    passes: float
    seconds: float
    rate: float
    speed_up: float


def plan(
    costs: Costs, answers: Sequence[Sequence[RecordedDraft]], shapes: Sequence[TreeShape] = CANDIDATES
) -> list[Plan]:
    """All shapes, and none, by the tokens per second that they would have had on these answers; the fastest first.

    Each answer is walked through as decoding would: from a position to behind the last token that was accepted there.
    """
    plans = [Plan(None, 1.0, 0.0, 0.0, costs.autoregressive, 1.0 / costs.autoregressive, 1.0)]
    for shape in shapes:
        steps = tokens = nodes = passes = 0
        seconds = 0.0
        for answer in answers:
            at = 0
            while at < len(answer):
                accepted, grown, ran = replay_with(answer[at], shape)
                steps, nodes, passes = steps + 1, nodes + grown, passes + ran
                tokens += min(accepted + 1, len(answer) - at)
                seconds += costs.step_seconds(grown + 1, ran, shape.width)
                at += accepted + 1
        if steps:
            rate = tokens / seconds
            means = (tokens / steps, nodes / steps, passes / steps, seconds / steps)
            plans.append(Plan(shape, *means, rate, rate * costs.autoregressive))
    return sorted(plans, key=lambda one: -one.rate)
