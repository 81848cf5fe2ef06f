"""The SHAPE drafter: trees grown from predicted future hidden states."""

from math import log

import torch
import torch.nn.functional as F
from torch import Tensor

from shape.drafters.base import Drafter, Settled, TreeShape
from shape.errors import TargetMismatch
from shape.predictor import ShapePredictor, roll, windows
from shape.target import Target, TargetIdentity
from shape.verification.sampling import Sampler, token_words
from shape.verification.tree import TokenTree, keep_best, root_only


class ShapeDrafter(Drafter):
    """Reads the window h_{t-W}..h_{t-1}, predicts h_t, h_{t+1}, ... and drafts from the target's own head.

    With path conditioning each node of the tree has its own window of predicted states; without it all paths
    share the predictions of their depth. Works on a predictor in training as well: it takes no gradient and
    touches no global random state.

    It drafts on the predictor's device, which need not be the target's: new states go there and the tree comes back.
    There, and wherever a draft vocabulary is, it has a copy of what it needs of the head; embeddings of other tokens it
    asks of the target.

    Args:
        predictor: the trained network.
        tree: how to grow; None takes the predictor's own default.

    Attributes:
        window: (B, W, F), the last known states of each row: all that changes from step to step.
    """

    name = "shape"
    window: Tensor

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
        self._target, self._device = target, self.predictor.device
        vocabulary, dtype = self.predictor.draft_vocabulary, self.predictor.dtype
        tokens = torch.arange(target.vocab_size, device=self._device) if vocabulary is None else vocabulary
        self._vocabulary, self._words = vocabulary, token_words(tokens)
        apart = vocabulary is not None or self._device != target.device
        self._head = target.head_of(tokens, dtype) if apart else None
        self._embeddings = None if vocabulary is None else target.embed(vocabulary).to(dtype)

    def start(self, settled: Settled, hidden: Tensor) -> None:
        ends = settled.lengths[:, None].to(self._device) - 1
        self.window = windows(hidden.to(self._device), ends, self.predictor.config.window)[:, 0]

    def update(self, hidden: Tensor, counts: Tensor) -> None:
        known = torch.cat([self.window, hidden.to(self._device)], dim=1)
        size = self.predictor.config.window
        self.window = windows(known, counts[:, None].to(self._device) + size, size)[:, 0]

    def select(self, rows: Tensor) -> None:
        self.window = self.window[rows.to(self._device)]

    def draft(self, settled: Settled, sampler: Sampler) -> TokenTree:
        return self._draft(settled.to(self._device), sampler.to(self._device)).to(settled.root.device)

    @torch.no_grad()
    def _draft(self, settled: Settled, sampler: Sampler) -> TokenTree:
        config = self.predictor.config
        depth = self.tree.depth
        if config.step_mode == "parallel":
            depth = min(depth, config.num_steps)
        self.passes = 0
        if depth == 0:
            return root_only(settled.root)
        width, branching = self.tree.width, self.tree.branching or self.tree.width
        by_path = config.token_conditioning == "path"
        noise = sampler.foresee(depth, self._words, nodes=width)
        shared = None if by_path else self._logits_of_all_depths(settled.root, depth)

        root = settled.root[:, None]
        rows = torch.arange(root.shape[0], device=root.device)[:, None]
        # The frontier: nodes expanded next, with their numbers, joint log-probabilities, embeddings and windows.
        number = torch.zeros_like(root)
        joint = torch.zeros(root.shape, device=root.device)
        embedding, window, nodes = self._target.embed(root), self.window[:, None], 1
        # Of every depth: what was expanded, its best children, and their joint log-probabilities.
        numbers, children, scores = [], [], []
        drawn: list[Tensor] = []
        for n in range(depth):
            if shared is None:
                states = self.predictor.step(window, embedding, n)
                logits = self._logits(states)
            else:
                logits = shared[:, n : n + 1].expand(-1, number.shape[1], -1)
            self.passes = n + 1
            drafts = sampler.draft_scores(logits, n, noise[n], self._vocabulary)
            # When sampling, scores contain the noise, and their softmax is the estimate given the noise. None is above
            # 0, so that no child is likelier than its parent.
            log_probs, candidates = drafts.log_softmax(-1).topk(branching, dim=-1)
            log_probs, candidates = (joint[..., None] + log_probs).flatten(1), candidates.flatten(1)
            numbers.append(number)
            children.append(candidates)
            scores.append(log_probs)
            if sampler.draws:
                drawn.append(sampler.draft_log_probs(logits, n, self._target.vocab_size, self._vocabulary))
            if n + 1 == depth:
                break
            joint, chosen = log_probs.topk(min(width, log_probs.shape[1]), dim=1)
            if self.tree.threshold > 0 and float(joint.max()) < log(self.tree.threshold):
                break
            number = nodes + chosen
            nodes += candidates.shape[1]
            if by_path:  # a child inherits its parent's window, moved on by the parent's predicted state
                embedding = self._embed(candidates.gather(1, chosen))
                window = roll(window, states)
                if width > 1:
                    window = window[rows, chosen // branching]
        return self._tree(root, numbers, children, scores, branching, drawn)

    def _tree(
        self,
        root: Tensor,
        numbers: list[Tensor],
        children: list[Tensor],
        scores: list[Tensor],
        branching: int,
        drawn: list[Tensor],
    ) -> TokenTree:
        """The best of what was grown, behind the root."""
        drafted = torch.cat(children, dim=1)
        if self._vocabulary is not None:
            drafted = self._vocabulary[drafted]
        expanded = torch.cat(numbers, dim=1)
        parents = expanded.repeat_interleave(branching, dim=1)
        # Above every log-probability, so that the root always stays.
        joint = torch.cat([torch.ones(root.shape, device=root.device), *scores], dim=1)
        tree = TokenTree(
            torch.cat([root, drafted], dim=1),
            torch.cat([torch.full_like(root, -1), parents], dim=1),
            _rows_of(expanded, drawn, joint.shape[1]),
            joint,
        )
        if self.tree.nodes is None or self.tree.nodes + 1 >= tree.size:
            return tree
        return keep_best(tree, self.tree.nodes + 1)

    def _embed(self, candidates: Tensor) -> Tensor:
        """Input embeddings of tokens by their numbers in the draft vocabulary."""
        return self._target.embed(candidates) if self._embeddings is None else F.embedding(candidates, self._embeddings)

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
        return self._logits(self.predictor(self.window, embedding, depth))

    def _logits(self, states: Tensor) -> Tensor:
        """(..., H) -> (..., K), over the draft vocabulary."""
        if self._head is None:
            states = states.to(self._target.dtype)
        return self._target.logits(states, self._head)


def _rows_of(expanded: Tensor, drawn: list[Tensor], nodes: int) -> Tensor | None:
    """(B, N, V): what the children of expanded nodes were drawn from, laid out by the nodes' numbers."""
    if not drawn:
        return None
    log_q = torch.cat(drawn, dim=1)
    full = log_q.new_zeros(log_q.shape[0], nodes, log_q.shape[2])
    return full.scatter_(1, expanded[..., None].expand_as(log_q), log_q)
