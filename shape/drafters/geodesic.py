"""Drafting without training: the path of the hidden states, followed a little further."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from shape.drafters.base import Committed, Drafter
from shape.errors import ConfigError
from shape.target.model import Target
from shape.verification.noise import all_hashes
from shape.verification.sampling import Sampler, perturbed
from shape.verification.tree import TokenTree, chain
from shape.verification.tree_shape import TreeShape

_NEIGHBOURS = 8
_FITTED = 6  # states through which a parabola is laid


class GeodesicDrafter(Drafter):
    """Extrapolates the target's last hidden states and reads the results with its output embedding.

    Along a geodesic the acceleration is a quadratic form of the velocity, x'' = -G(x', x'), with coefficients G (the
    Christoffel symbols) that depend on the point. Here the acceleration is taken from the nearest states of the
    sequence, by how far they went in the present direction (see ``geodesic``). OTT-Decode names such a drafter for
    misses of its table, without a formula. Straight lines, constant acceleration and a parabola through the last states
    are special cases; ``analogue`` takes the step that the sequence took from its nearest state, with the root's token
    where it has been taken (Lorenz 1969).

    Args:
        path: a name among ``PATHS``.
        tree: of its chain: depth, and threshold.
    """

    name = "geodesic"
    kept: list[Tensor]  # states of the text
    tree: TreeShape

    def __init__(self, path: str = "analogue", tree: TreeShape | None = None) -> None:
        if path not in PATHS:
            raise ConfigError(f"path {path!r} is unknown; use one of {', '.join(PATHS)}")
        self.path = PATHS[path]
        self.tree = TreeShape(depth=3, width=1, threshold=0.2) if tree is None else tree

    def __str__(self) -> str:
        return f"geodesic, {self.path.__name__}, {self.tree}"

    def bind(self, target: Target) -> None:
        self._target = target
        self._words = all_hashes(target.vocab_size, target.device)

    def start(self, committed: Committed, hidden: Tensor) -> None:
        lengths = (committed.lengths - 1).tolist()
        self.kept = [row[:length].float() for row, length in zip(hidden, lengths, strict=True)]

    def update(self, tokens: list[list[int]], hidden: Tensor, counts: Tensor) -> None:
        self.kept = [
            torch.cat([states, new[:count].float()])
            for states, new, count in zip(self.kept, hidden, counts.tolist(), strict=True)
        ]

    @torch.no_grad()
    def draft(self, committed: Committed, sampler: Sampler) -> TokenTree:
        depth, noise = self.tree.depth, sampler.draft_noise(self.tree.depth, self._words)
        points = torch.stack(
            [
                follow(states, torch.tensor(text, device=states.device), self.path, depth)
                for states, text in zip(self.kept, committed.texts, strict=True)
            ]
        )
        offsets = torch.arange(depth, device=points.device)
        logits = sampler.draft_logits(self._target.logits(points.to(self._target.dtype)), offsets)
        tokens, joint, drawn = [], [torch.zeros_like(committed.root, dtype=torch.float)], []
        for n in range(depth):
            best, token = perturbed(logits[:, n : n + 1], noise[n]).log_softmax(-1).max(-1)
            unlikely = self.tree.threshold > 0 and float((joint[-1] + best[:, 0]).max().exp()) < self.tree.threshold
            if unlikely and not sampler.draws:  # what was drawn has to stay
                break
            joint.append(joint[-1] + best[:, 0])
            tokens.append(token)
            if sampler.draws:
                drawn.append(sampler.draft_log_probs(logits[:, n : n + 1], self._target.vocab_size))
            if unlikely:
                break
        tree = chain(committed.root, torch.cat([committed.root[:, None][:, :0], *tokens], dim=1))
        log_q = torch.cat([*drawn, drawn[-1]], dim=1) if drawn else None
        return replace(tree, log_q=log_q, joint=torch.stack(joint, dim=1))


def follow(states: Tensor, tokens: Tensor, path: "Path", steps: int) -> Tensor:
    """The next points of a trajectory, (steps, H).

    Points are kept at the length of the last state, near which a final norm holds them all.

    Args:
        states: (T, H), T at least 1.
        tokens: (T + 1,) int64; token t + 1 was chosen at state t.
    """
    known, length = len(states), states[-1].norm()
    for _ in range(steps):
        point = states[-1] if len(states) < 3 else path(states, tokens)
        states = torch.cat([states, (point * (length / point.norm().clamp(min=1e-6)))[None]])
    return states[known:]


# From states (T, H), T at least 3, and tokens to the next point (H,).
Path = Callable[[Tensor, Tensor], Tensor]


def line(states: Tensor, tokens: Tensor) -> Tensor:
    """With the last velocity."""
    return 2 * states[-1] - states[-2]


def acceleration(states: Tensor, tokens: Tensor) -> Tensor:
    """With the last velocity and the last acceleration: the parabola through three states."""
    return 3 * states[-1] - 3 * states[-2] + states[-3]


def parabola(states: Tensor, tokens: Tensor) -> Tensor:
    """On the parabola that fits the last states best."""
    last = states[-_FITTED:]
    times = torch.arange(-len(last), 1, device=states.device, dtype=states.dtype)
    powers = torch.stack([torch.ones_like(times), times, times**2], dim=1)
    return powers[-1] @ torch.linalg.pinv(powers[:-1]) @ last


def geodesic(states: Tensor, tokens: Tensor) -> Tensor:
    """With the last velocity v, and the mean of the accelerations a_i that neighbours had, each times
    (v v_i / v_i^2)^2: a quadratic form of v that has the value a_i at v_i, as the connection's.
    """
    velocities = states[1:] - states[:-1]
    accelerations = velocities[1:] - velocities[:-1]
    present, past = states[-1], states[1:-1]
    weights, nearest = _neighbours(present, past)
    chosen = velocities[:-1][nearest]
    along = (chosen @ velocities[-1]) / chosen.square().sum(-1).clamp(min=1e-6)
    return present + velocities[-1] + (weights * along.square()) @ accelerations[nearest]


def analogue(states: Tensor, tokens: Tensor) -> Tensor:
    """With the step from its nearest neighbours; where these exist, from those after which the root's token came."""
    steps = states[1:] - states[:-1]
    past = states[:-1]
    if len(tokens) > len(states):  # the last state's token is known
        same = (tokens[1 : len(states)] == tokens[len(states)]).nonzero()[:, 0]
        if len(same):
            past, steps = past[same], steps[same]
    weights, nearest = _neighbours(states[-1], past)
    return states[-1] + weights @ steps[nearest]


def _neighbours(point: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and numbers of the nearest states: weights go as exp(-(distance / that of the nearest)^2)."""
    distance = (past - point).square().sum(-1)
    nearest = distance.topk(min(_NEIGHBOURS, len(past)), largest=False)
    weights = F.softmax(-nearest.values / nearest.values[0].clamp(min=1e-6), dim=0)
    return weights, nearest.indices


PATHS: dict[str, Path] = {each.__name__: each for each in (line, acceleration, parabola, geodesic, analogue)}
