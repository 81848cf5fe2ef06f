"""The SHAPE drafter: trees grown from predicted future hidden states."""

from math import log

import torch
from torch import Tensor

from shape.drafters.base import Drafter, Settled, TreeShape
from shape.errors import TargetMismatch
from shape.predictor import ShapePredictor, roll, windows
from shape.target import Target, TargetIdentity
from shape.verification.sampling import Sampler
from shape.verification.tree import TokenTree, keep_best, root_only


class ShapeDrafter(Drafter):
    """Reads the window h_{t-W}..h_{t-1}, predicts h_t, h_{t+1}, ... and drafts from the target's own head.

    With path conditioning each node of the tree has its own window of predicted states; without it all paths
    share the predictions of their depth. Works on a predictor in training as well: it takes no gradient and
    touches no global random state.

    Args:
        predictor: the trained network.
        tree: how to grow; None takes the predictor's own default.
    """

    name = "shape"

    def __init__(self, predictor: ShapePredictor, tree: TreeShape | None = None) -> None:
        self.predictor = predictor
        self.tree = tree or TreeShape(**(predictor.config.draft or {}))

    def bind(self, target: Target) -> None:
        if list(self.predictor.config.feature_layers) != [-1]:
            raise TargetMismatch(
                f"the predictor reads layers {list(self.predictor.config.feature_layers)}, and decoding provides "
                "the last hidden state only; train it with feature_layers [-1]"
            )
        known = self.predictor.config.target_identity
        if known is not None:
            differences = TargetIdentity.from_dict(known).differences(target.identity)
            if differences:
                raise TargetMismatch(
                    f"the predictor was trained for target {known['name']}, and {target.name} differs in "
                    f"{', '.join(differences)}; give the target it was trained for, or train one for this target"
                )
        elif self.predictor.config.hidden_size != target.hidden_size:
            raise TargetMismatch(
                f"the predictor expects hidden size {self.predictor.config.hidden_size}, and target {target.name} "
                f"has {target.hidden_size}; train a predictor for this target"
            )
        self._target = target
        self._vocabulary = self.predictor.draft_vocabulary
        self._head = None if self._vocabulary is None else target.head_of(self._vocabulary, self.predictor.dtype)

    def start(self, settled: Settled, hidden: Tensor) -> None:
        self._window = windows(hidden, settled.lengths[:, None] - 1, self.predictor.config.window)[:, 0]

    def update(self, hidden: Tensor, counts: Tensor) -> None:
        known = torch.cat([self._window, hidden], dim=1)
        size = self.predictor.config.window
        self._window = windows(known, counts[:, None] + size, size)[:, 0]

    def select(self, rows: Tensor) -> None:
        self._window = self._window[rows]

    @torch.no_grad()
    def draft(self, settled: Settled, sampler: Sampler) -> TokenTree:
        config = self.predictor.config
        depth = self.tree.depth
        if config.step_mode == "parallel":
            depth = min(depth, config.num_steps)
        self.passes = 0
        if depth == 0:
            return root_only(settled.root)
        width, branching = self.tree.width, self.tree.branching or self.tree.width
        by_path = config.token_conditioning == "path"
        if sampler.coupled:
            sampler.foresee(range(depth + 1), self._target.vocab_size)
        shared = None if by_path else self._logits_of_all_depths(settled.root, depth)

        root = settled.root[:, None]
        rows = torch.arange(root.shape[0], device=root.device)[:, None]
        tokens, parents = [root], [torch.full_like(root, -1)]
        # Above every log-probability, so that the root always stays.
        scores = [torch.ones(root.shape, device=root.device)]
        # The frontier: nodes expanded next, with their number, joint log-probability and window.
        frontier, number, joint = root, torch.zeros_like(root), torch.zeros_like(scores[0])
        window, nodes = self._window[:, None], 1
        drawn: list[tuple[Tensor, Tensor]] = []  # numbers of expanded nodes, and what their children were drawn from
        for n in range(depth):
            if shared is None:
                states = self.predictor.step(window, self._target.embed(frontier), n)
                logits = self._logits(states)
            else:
                logits = shared[:, n : n + 1]
            self.passes = n + 1
            drafts = sampler.draft_scores(logits, n, self._target.vocab_size, self._vocabulary)
            log_probs, candidates = _best_children(drafts, branching)
            if not (sampler.coupled or sampler.greedy):
                log_q = sampler.draft_log_probs(logits, n, self._target.vocab_size, self._vocabulary)
                drawn.append((number, log_q.expand(-1, frontier.shape[1], -1)))
            if self._vocabulary is not None:
                candidates = self._vocabulary[candidates]
            log_probs = (joint[:, :, None] + log_probs).flatten(1)
            candidates = candidates.expand(-1, frontier.shape[1], -1).flatten(1)
            tokens.append(candidates)
            parents.append(number[:, :, None].expand(-1, -1, branching).flatten(1))
            scores.append(log_probs)
            if n + 1 < depth:
                joint, best = log_probs.topk(min(width, log_probs.shape[1]), dim=1)
                if self.tree.threshold > 0 and float(joint.max()) < log(self.tree.threshold):
                    break
                frontier, number = candidates.gather(1, best), nodes + best
                if by_path:  # a child inherits its parent's window, moved on by the parent's predicted state
                    window = roll(window, states)[rows, best // branching]
            nodes += candidates.shape[1]
        size = sum(part.shape[1] for part in tokens)
        every = TokenTree(
            torch.cat(tokens, dim=1), torch.cat(parents, dim=1), _rows_of(drawn, size), torch.cat(scores, dim=1)
        )
        if self.tree.nodes is None or self.tree.nodes + 1 >= size:
            return every
        return keep_best(every, self.tree.nodes + 1)

    @torch.no_grad()
    def rehearse(self, rows: int, passes: int) -> None:
        config, parameters = self.predictor.config, self.predictor.delta.weight
        by_path = config.token_conditioning == "path"
        window = parameters.new_zeros(rows, self.tree.width if by_path else 1, config.window, config.feature_size)
        embedding = window[..., 0, -config.hidden_size :]
        if not by_path:
            self._logits(self.predictor(window[:, 0], embedding, passes))
            return
        for n in range(passes):
            nodes = 1 if n == 0 else self.tree.width
            self._logits(self.predictor.step(window[:, :nodes], embedding[:, :nodes], n))

    def _logits_of_all_depths(self, root: Tensor, depth: int) -> Tensor:
        """(B, depth, V): without path conditioning one prediction per depth serves every path."""
        embedding = None
        if self.predictor.config.token_conditioning == "root":
            embedding = self._target.embed(root)[:, None]
        return self._logits(self.predictor(self._window, embedding, depth))

    def _logits(self, states: Tensor) -> Tensor:
        """(..., H) -> (..., K), over the draft vocabulary."""
        if self._head is None:
            states = states.to(self._target.dtype)
        return self._target.logits(states, self._head)


def _rows_of(drawn: list[tuple[Tensor, Tensor]], nodes: int) -> Tensor | None:
    """(B, N, V): what was collected for some nodes, laid out by their numbers."""
    if not drawn:
        return None
    numbers, log_q = (torch.cat(parts, dim=1) for parts in zip(*drawn, strict=True))
    full = log_q.new_zeros(log_q.shape[0], nodes, log_q.shape[2])
    return full.scatter_(1, numbers[..., None].expand_as(log_q), log_q)


def _best_children(scores: Tensor, branching: int) -> tuple[Tensor, Tensor]:
    """Per node the best children and their log-probability of being the target's choice, as the drafter sees it.

    When sampling, scores contain the noise, and their softmax is that estimate given the noise.
    """
    best = scores.topk(branching, dim=-1)
    return best.values - scores.logsumexp(-1, keepdim=True), best.indices
